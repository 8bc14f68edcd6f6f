//! The family of scheduled calls: a coordinator schedules calls, whose functions push.
//!
//! The coordinator, the function servers and the parameter servers are the real state machines.
//! Every call must take effect once on every shard, whichever processes are killed.

mod call_schedule;
mod checker;
mod coordinating;
mod function_server;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::ShardId;
use pushpull_worker::Error;
use pushpull_worker::simulation::WorkerAnswer;

use crate::chance::SimChance;
use crate::faults::{self, FaultKind};
use crate::process_program::{CallLinkEvent, ProcessProgram};
use crate::scenario::{Scenario, Sizes};
use crate::setting::LEASE;
use crate::trace::Trace;
use crate::world::{ScheduledEvent, SimOutcome, SimWorld};
use call_schedule::CallSchedule;
use checker::CallChecker;
use coordinating::{Coordinating, CoordinatorPhase};
use function_server::FunctionServer;

/// The default number of seeds.
pub(crate) const SEEDS: u64 = 200;

/// How long servers may remember clients after the last coordinator has ended: a lease, an eighth
/// of one, and the longest pause of a process.
const REMEMBERED: Duration = Duration::from_secs(6);

/// The most processes of the coordinator that faults start.
const COORDINATORS_MAX: usize = 12;

/// What a process of the family is.
#[derive(Debug)]
pub(crate) enum CallProgram {
    Server(Box<FunctionServer>),
    Coordinator(Box<Coordinating>),
}

/// What a process has scheduled for itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CallTimer {
    /// A server's execution has computed.
    Computed(usize, u64),
    /// A coordinator's program schedules more calls.
    Schedule(usize),
    /// A coordinator's program releases what it has left on servers.
    Release(usize),
    /// A coordinator's process ends.
    Leave(usize),
}

/// Starts the coordinator in place of a worker task.
const COORDINATOR_TASK: u32 = u32::MAX;

/// Creates the cluster of a scenario.
pub(crate) fn world(scenario: &Scenario, start: Instant, trace: Trace) -> SimWorld<CallProgram> {
    let seed = scenario.seed;
    let schedule = CallSchedule::draw(seed, scenario.at_most);
    let setting = call_schedule::setting(seed, scenario.at_most, &schedule);
    // Fault indices refer to the plan of the unbounded setting, so they do not change with it.
    let largest = CallSchedule::draw(seed, Sizes::ANY);
    let unbounded = call_schedule::setting(seed, Sizes::ANY, &largest);
    let (plan, end) = faults::plan(&unbounded, &FaultKind::CALLS);
    let checker = CallChecker::new(schedule, setting.catalogue.clone());
    let mut world: SimWorld<CallProgram> =
        SimWorld::new(scenario, setting, plan, end, checker, start, trace);
    let delay = SimChance::of(seed, "coordinator").millis(0, 500);
    world.after(delay, ScheduledEvent::Start(COORDINATOR_TASK));
    let words = format!("{:?}", world.checker.schedule);
    world.trace.note(|| words);
    world
}

/// Returns the number of planned faults of a scenario, and its sizes.
pub(crate) fn extent(scenario: &Scenario) -> (usize, Sizes) {
    let schedule = CallSchedule::draw(scenario.seed, scenario.at_most);
    let setting = call_schedule::setting(scenario.seed, scenario.at_most, &schedule);
    let (plan, _) = faults::plan(&setting, &FaultKind::CALLS);
    (plan.len(), Sizes { steps: schedule.last(), ..setting.sizes() })
}

/// Checks that runs show what they are for.
pub(crate) fn check_figures(
    outcomes: &[SimOutcome],
    median_events: u64,
    figures: &BTreeMap<&str, u64>,
) {
    assert!(median_events >= 500, "the median seed has only {median_events} events");
    // A few seeds need not show everything.
    if outcomes.len() >= 50 {
        for (figure, &count) in figures {
            assert!(count > 0, "no run shows the figure {figure:?}");
        }
        assert!(figures["executions"] > figures["ended"], "no call was executed again");
    }
}

impl SimWorld<CallProgram> {
    /// Runs until every call has ended, and nobody remembers the coordinator.
    ///
    /// # Panics
    /// If the run breaks a rule of the checker, or does not end.
    pub(crate) fn run(mut self) -> SimOutcome {
        self.run_to_end();
        self.checker.finish(self.shards().flatten());
        let figures = self.checker.figures.clone();
        self.outcome(figures)
    }
}

impl ProcessProgram for CallProgram {
    type Checker = CallChecker;
    type Timer = CallTimer;

    fn task_name(&self) -> String {
        match self {
            CallProgram::Server(server) => format!("worker {}", server.task),
            CallProgram::Coordinator(_) => "the coordinator".to_owned(),
        }
    }

    fn is_remote(&self) -> bool {
        match self {
            CallProgram::Server(server) => server.is_remote(),
            CallProgram::Coordinator(program) => program.is_remote(),
        }
    }

    fn waits(&self) -> Option<String> {
        match self {
            CallProgram::Server(server) => Some(server.waits()),
            CallProgram::Coordinator(program) => program.waits(),
        }
    }

    fn serves(&self) -> Option<u32> {
        match self {
            CallProgram::Server(server) => Some(server.task),
            CallProgram::Coordinator(_) => None,
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        match self {
            CallProgram::Server(server) => server.endpoint.wake_at(),
            CallProgram::Coordinator(program) => program.endpoint.as_ref()?.wake_at(),
        }
    }

    fn start(world: &mut SimWorld<CallProgram>, task: u32) {
        match task {
            COORDINATOR_TASK => world.start_coordinator(),
            task => world.start_server(task),
        }
    }

    fn replied(
        world: &mut SimWorld<CallProgram>,
        process: usize,
        op: u64,
        reply: Result<WorkerAnswer, Error>,
    ) {
        match world.processes[process].program {
            CallProgram::Server(_) => world.server_replied(process, op, reply),
            CallProgram::Coordinator(_) => world.coordinator_replied(process, op, reply),
        }
    }

    fn timer(world: &mut SimWorld<CallProgram>, timer: CallTimer) {
        match timer {
            CallTimer::Computed(process, execution) => world.computed(process, execution),
            CallTimer::Schedule(process) => world.schedule_more(process),
            CallTimer::Release(process) => world.release(process),
            CallTimer::Leave(process) => world.left(process),
        }
    }

    fn process_of(timer: CallTimer) -> usize {
        match timer {
            CallTimer::Computed(process, _)
            | CallTimer::Schedule(process)
            | CallTimer::Release(process)
            | CallTimer::Leave(process) => process,
        }
    }

    fn tick(world: &mut SimWorld<CallProgram>, process: usize) {
        match world.processes[process].program {
            CallProgram::Server(_) => world.tick_server(process),
            CallProgram::Coordinator(_) => world.tick_coordinator(process),
        }
    }

    fn call_event(
        world: &mut SimWorld<CallProgram>,
        process: usize,
        event: CallLinkEvent<'_>,
    ) -> bool {
        match world.processes[process].program {
            CallProgram::Server(_) => world.server_event(process, event),
            CallProgram::Coordinator(_) => world.coordinator_event(process, event),
        }
    }

    fn ended(world: &mut SimWorld<CallProgram>, process: usize) {
        if let CallProgram::Coordinator(program) = &mut world.processes[process].program {
            program.ended_at = Some(world.now);
        }
    }

    fn inject(world: &mut SimWorld<CallProgram>, fault: FaultKind, chance: &mut SimChance) -> bool {
        let is_coordinator = |program: &CallProgram| matches!(program, CallProgram::Coordinator(_));
        let started =
            world.processes.iter().filter(|process| is_coordinator(&process.program)).count();
        match fault {
            FaultKind::KillWorker => {
                let killed = world.pick_alive(chance, |process| !is_coordinator(&process.program));
                let Some(number) = killed else { return false };
                let task = world.processes[number].program.serves().unwrap();
                world.end_process(number);
                world.after(chance.millis(10, 2000), ScheduledEvent::Start(task));
                true
            }
            FaultKind::KillCoordinator => {
                let killed = world.pick_alive(chance, |process| is_coordinator(&process.program));
                let Some(number) = killed else { return false };
                world.end_process(number);
                world.after(chance.millis(10, 2000), ScheduledEvent::Start(COORDINATOR_TASK));
                true
            }
            FaultKind::Replace if started < COORDINATORS_MAX => {
                world.after(chance.millis(0, 500), ScheduledEvent::Start(COORDINATOR_TASK));
                true
            }
            FaultKind::Pause => {
                let Some(number) = world.pick_alive(chance, |_| true) else { return false };
                let short = chance.percent(40);
                let time = match short {
                    true => chance.millis(50, 900),
                    false => LEASE + chance.millis(100, 2500),
                };
                world.processes[number].paused_until = Some(world.now + time);
                true
            }
            _ => false,
        }
    }

    fn is_over(world: &mut SimWorld<CallProgram>) -> bool {
        let coordinates = |program: &CallProgram| match program {
            CallProgram::Coordinator(program) => program.phase != CoordinatorPhase::Ended,
            CallProgram::Server(_) => false,
        };
        let alive = || world.processes.iter().filter(|process| process.is_alive);
        let is_quiet = world.checker.closed
            && world.next_starts() == 0
            && !alive().any(|process| coordinates(&process.program))
            && world.shards().all(|shard| shard.is_some());
        if !is_quiet {
            return false;
        }
        let idle = alive().all(|process| match &process.program {
            CallProgram::Server(server) => {
                process.endpoint.unfinished().is_none() && server.is_idle()
            }
            CallProgram::Coordinator(_) => true,
        });
        let forgotten = alive().all(|process| match &process.program {
            CallProgram::Server(server) => server.endpoint.remembers_nobody(),
            CallProgram::Coordinator(_) => true,
        });
        let now = world.now;
        let since = *world.checker.quiet_since.get_or_insert(now);
        let is_late = now.saturating_duration_since(since) > REMEMBERED;
        assert!(forgotten || !is_late, "a server remembers a client that is gone");
        idle && forgotten
    }

    fn opened(checker: &mut CallChecker, shard: ShardId, _: u64) {
        checker.shard_opened(shard);
    }

    fn applied(_: &mut CallChecker, shard: ShardId, step: u64, _: Vec<u64>) {
        panic!("{shard} has applied the synchronous step {step}");
    }

    fn shard_changed(world: &mut SimWorld<CallProgram>, shard: ShardId) {
        let (checker, mut shards) = world.checker_and_shards();
        if let Some(endpoint) = shards.find(|endpoint| endpoint.id() == shard) {
            checker.shard_changed(endpoint);
        }
    }
}
