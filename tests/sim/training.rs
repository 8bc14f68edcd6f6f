//! The training family: every process trains until the last step.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::message::Role;
use pushpull_worker::Error;
use pushpull_worker::simulation::WorkerAnswer;

use crate::chance::SimChance;
use crate::checker::Checker;
use crate::faults::{self, FaultKind};
use crate::process_program::ProcessProgram;
use crate::scenario::{Scenario, Sizes};
use crate::setting::{LEASE, Setting};
use crate::trace::Trace;
use crate::trainer::{NextAction, Phase, Trainer};
use crate::world::{ScheduledEvent, SimOutcome, SimProcess, SimWorld};

/// What a training process has scheduled for itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TrainingTimer {
    /// It has computed a gradient.
    Computed(usize),
    /// It has computed its slow gradient.
    ComputedSlow(usize),
    /// Its pause after this operation ends.
    Again(usize, u64),
    /// It was stopped while all state was lost.
    Return(usize),
}

/// The default number of seeds.
pub(crate) const SEEDS: u64 = 500;

/// Creates the cluster of a scenario.
pub(crate) fn world(scenario: &Scenario, start: Instant, trace: Trace) -> SimWorld<Trainer> {
    let seed = scenario.seed;
    let setting = Setting::draw(seed, scenario.at_most);
    // Fault indices refer to the plan of the unbounded setting, so they do not change with it.
    let (plan, end) = faults::plan(&Setting::draw(seed, Sizes::ANY), &FaultKind::TRAINING);
    let checker = Checker::new(&setting);
    SimWorld::new(scenario, setting, plan, end, checker, start, trace)
}

/// Returns the number of planned faults of a scenario, and its sizes.
pub(crate) fn extent(scenario: &Scenario) -> (usize, Sizes) {
    let setting = Setting::draw(scenario.seed, scenario.at_most);
    let (plan, _) = faults::plan(&setting, &FaultKind::TRAINING);
    (plan.len(), setting.sizes())
}

/// Checks that runs show what they are for.
pub(crate) fn check_figures(
    outcomes: &[SimOutcome],
    median_events: u64,
    figures: &BTreeMap<&str, u64>,
) {
    assert!(median_events >= 500, "the median seed has only {median_events} events");
    let committed = outcomes.iter().filter(|outcome| outcome.figures["commits"] > 0).count();
    assert!(committed * 100 >= outcomes.len() * 95, "only {committed} seeds have made steps");
    // A few seeds need not show everything.
    if outcomes.len() >= 50 {
        let linux = cfg!(target_os = "linux");
        assert!(figures["second_losses"] > 0, "no worker was away while all state was lost");
        assert!(figures["clock_jumps"] > 0, "no clock was wrong");
        assert!(figures["with_tokens"] > 0, "nobody has proved who it is");
        assert!(figures["told"] > 0, "no worker was told of stragglers before its deadline");
        assert!(figures["direct_pulls"] > 0 || !linux, "no worker has read shared values");
        assert!(figures["named"] > 0 || !linux, "no worker has used a push buffer");
    }
}

impl SimWorld<Trainer> {
    /// Runs until the training is over.
    ///
    /// # Panics
    /// If the run breaks a rule of the checker, or does not end.
    pub(crate) fn run(mut self) -> SimOutcome {
        self.run_to_end();
        let up = self.shards().flatten();
        let counts: Vec<(ShardId, u64)> = up.map(|shard| (shard.id(), shard.steps())).collect();
        self.checker.finish(&self.setting, &counts);
        let sum = |figure: fn(&SimProcess<Trainer>) -> u64| self.processes.iter().map(figure).sum();
        let figures = BTreeMap::from([
            ("commits", self.checker.steps()),
            ("pulls", self.checker.pulls()),
            ("named", sum(|process| process.endpoint.shared_push_frames())),
            ("direct_pulls", sum(|process| process.endpoint.direct_pulls())),
            ("told", self.checker.early_errors()),
            ("second_losses", sum(|process| u64::from(process.program.was_away))),
        ]);
        self.outcome(figures)
    }

    /// Loses all state. The training begins again; processes that are stopped meanwhile must be told.
    fn lose_all_state(&mut self, chance: &mut SimChance) -> bool {
        let Some(away) = self.pick_alive(chance, |process| !process.program.chief) else {
            return false;
        };
        let time = LEASE + chance.millis(1500, 4000);
        self.processes[away].paused_until = Some(self.now + time);
        self.lose_state(chance);
        self.checker = Checker::new(&self.setting);
        for number in 0..self.processes.len() {
            let process = &mut self.processes[number];
            match (process.is_alive, process.paused_until) {
                (true, Some(until)) if until > self.now => {
                    process.program.stay_away();
                    self.after(
                        Duration::ZERO,
                        ScheduledEvent::Timer(TrainingTimer::Return(number)),
                    );
                }
                (true, _) => self.end_process(number),
                (false, _) => {}
            }
        }
        for task in 0..self.setting.workers {
            self.start_unless_running(task, chance.millis(10, 500));
        }
        true
    }

    /// Starts a process of a worker task, unless one runs or is about to start.
    fn start_unless_running(&mut self, task: u32, delay: Duration) {
        let runs = |process: &SimProcess<Trainer>| process.program.task == task && process.is_alive;
        if !self.processes.iter().any(runs) && !self.starts(task) {
            self.after(delay, ScheduledEvent::Start(task));
        }
    }

    fn computed(&mut self, number: usize, slow: bool) {
        let process = &mut self.processes[number];
        if process.is_alive && !process.program.was_away {
            let SimProcess { endpoint, program, chance, .. } = process;
            let now = self.now;
            let setting = &self.setting;
            let checker = &mut self.checker;
            match slow {
                true => program.push_slow(now, endpoint, setting, checker, chance),
                false => program.push(now, endpoint, setting, checker, chance),
            }
            self.settle_process(number);
        }
    }
}

impl ProcessProgram for Trainer {
    type Checker = Checker;
    type Timer = TrainingTimer;

    fn task_name(&self) -> String {
        format!("worker {}", self.task)
    }

    fn is_remote(&self) -> bool {
        !self.incarnation.is_multiple_of(2)
    }

    fn waits(&self) -> Option<String> {
        (!self.is_over()).then(|| format!("in {:?}", self.phase))
    }

    fn start(world: &mut SimWorld<Trainer>, task: u32) {
        let (life, mut chance) = world.next_life(&format!("worker {task}"));
        let incarnation = 1000 * u64::from(task) + 2 * life + chance.between(0, 1);
        let trainer = Trainer::new(task, &world.setting, incarnation, &mut chance);
        let role = if task == 0 { Role::Chief {} } else { Role::Worker {} };
        let endpoint = world.session(TaskId::worker(task), role, incarnation);
        let number = world.add_process(endpoint, trainer, life, chance);
        let process = &mut world.processes[number];
        process.program.begin(world.now, &mut process.endpoint);
        world.settle_process(number);
    }

    fn replied(
        world: &mut SimWorld<Trainer>,
        process: usize,
        op: u64,
        reply: Result<WorkerAnswer, Error>,
    ) {
        let SimProcess { endpoint, program, chance, .. } = &mut world.processes[process];
        if program.was_away {
            if program.is_told(world.now, endpoint, op, &reply) {
                let task = program.task;
                world.end_process(process);
                // Its hello may have replaced another process that was not welcomed yet.
                let of_task = |other: &&mut SimProcess<Trainer>| other.program.task == task;
                let others = world.processes.iter_mut().filter(of_task);
                others.for_each(|other| other.program.is_replaced |= other.is_alive);
                world.start_unless_running(task, Duration::from_millis(300));
            }
            return;
        }
        let action = program.on_reply(world.now, endpoint, op, reply, &mut world.checker, chance);
        let (time, timer) = match action {
            None => {
                if world.processes[process].program.is_over() {
                    world.end_process(process);
                }
                return;
            }
            Some(NextAction::Gradient(time)) => (time, TrainingTimer::Computed(process)),
            Some(NextAction::SlowGradient(time)) => (time, TrainingTimer::ComputedSlow(process)),
            Some(NextAction::Pause(time, op)) => (time, TrainingTimer::Again(process, op)),
        };
        world.after(time, ScheduledEvent::Timer(timer));
    }

    fn timer(world: &mut SimWorld<Trainer>, timer: TrainingTimer) {
        match timer {
            TrainingTimer::Computed(process) => world.computed(process, false),
            TrainingTimer::ComputedSlow(process) => world.computed(process, true),
            TrainingTimer::Return(number) => {
                let process = &mut world.processes[number];
                if process.is_alive {
                    let SimProcess { endpoint, program, .. } = process;
                    program.return_from_away(world.now, endpoint);
                    world.settle_process(number);
                }
            }
            TrainingTimer::Again(number, op) => {
                let process = &mut world.processes[number];
                if process.is_alive && !process.program.was_away {
                    let SimProcess { endpoint, program, .. } = process;
                    program.again(world.now, endpoint, op, &mut world.checker);
                    world.settle_process(number);
                }
            }
        }
    }

    fn process_of(timer: TrainingTimer) -> usize {
        match timer {
            TrainingTimer::Computed(process)
            | TrainingTimer::ComputedSlow(process)
            | TrainingTimer::Again(process, _)
            | TrainingTimer::Return(process) => process,
        }
    }

    fn ended(world: &mut SimWorld<Trainer>, number: usize) {
        let SimProcess { program, chance, .. } = &mut world.processes[number];
        let task = program.task;
        let fenced = program.phase == Phase::Fenced;
        if program.phase == (Phase::Left { ended: false }) && world.setting.waits() {
            let delay = chance.millis(300, 3000);
            world.after(delay, ScheduledEvent::Start(task));
        }
        // Of two processes that were never welcomed, the last to send a hello counts as the newer.
        let of_task = world.processes.iter().filter(|other| other.program.task == task);
        let is_alone = of_task.count() == 1;
        assert!(
            !(fenced && is_alone) || world.retired() > 0,
            "process {number} of worker {task} is fenced without a newer process"
        );
        let lives = |other: &SimProcess<Trainer>| other.program.task == task && other.is_alive;
        let is_replaced = world.processes[number].program.is_replaced;
        let is_given_up = fenced && (world.retired() > 0 || is_replaced);
        if is_given_up && !world.processes.iter().any(lives) {
            let delay = world.processes[number].chance.millis(300, 3000);
            world.after(delay, ScheduledEvent::Start(task));
        }
    }

    fn inject(world: &mut SimWorld<Trainer>, fault: FaultKind, chance: &mut SimChance) -> bool {
        match fault {
            FaultKind::KillWorker | FaultKind::KillChief => {
                let chief = fault == FaultKind::KillChief;
                let killed = world.pick_alive(chance, |process| process.program.chief == chief);
                let Some(number) = killed else { return false };
                let task = world.processes[number].program.task;
                world.end_process(number);
                world.after(chance.millis(10, 2000), ScheduledEvent::Start(task));
                true
            }
            FaultKind::Pause | FaultKind::Ghost => {
                let Some(number) = world.pick_alive(chance, |_| true) else { return false };
                let time = LEASE + chance.millis(100, 2500);
                world.processes[number].paused_until = Some(world.now + time);
                if fault == FaultKind::Ghost {
                    let task = world.processes[number].program.task;
                    world.after(chance.millis(10, 1000), ScheduledEvent::Start(task));
                }
                true
            }
            FaultKind::LoseState => world.lose_all_state(chance),
            FaultKind::Leave => {
                let leaves = world.pick_alive(chance, |process| !process.program.chief);
                leaves.map(|number| world.processes[number].program.leaves = true).is_some()
            }
            FaultKind::Hold => {
                let holds = world.pick_alive(chance, |process| process.program.holds.is_none());
                let timeout = world.setting.token_timeout.unwrap_or(LEASE);
                let time = timeout + chance.millis(50, 1000);
                holds.map(|number| world.processes[number].program.holds = Some(time)).is_some()
            }
            FaultKind::Cancel => {
                let now = world.now;
                let Some(number) = world.pick_alive(chance, |_| true) else { return false };
                let SimProcess { endpoint, program, .. } = &mut world.processes[number];
                let cancelled = program.cancel(now, endpoint, &mut world.checker);
                world.settle_process(number);
                cancelled
            }
            _ => false,
        }
    }

    /// Whether all workers have ended and all shards have made the last step.
    fn is_over(world: &mut SimWorld<Trainer>) -> bool {
        let over = |process: &SimProcess<Trainer>| !process.is_alive || process.program.is_over();
        let all = world.processes.iter().all(over) && world.next_starts() == 0;
        let owner = world.shards().flatten().find(|endpoint| endpoint.owns_step());
        let last = match world.setting.data {
            Some(_) => owner.map(|endpoint| endpoint.steps()),
            None => Some(world.setting.last_step),
        };
        all && world.shards().all(|shard| {
            shard.is_some_and(|endpoint| {
                let counts = !world.setting.asynchronous
                    && world.setting.catalogue.shards().any(|id| id == endpoint.id());
                Some(endpoint.steps()) == last || !(counts || endpoint.owns_step())
            })
        })
    }

    fn opened(checker: &mut Checker, shard: ShardId, steps: u64) {
        checker.opened(shard, steps);
    }

    fn applied(checker: &mut Checker, shard: ShardId, step: u64, tokens: Vec<u64>) {
        checker.applied(shard, step, tokens);
    }

    fn partly_applied(checker: &mut Checker, token: u64) {
        checker.partly_applied(token);
    }
}
