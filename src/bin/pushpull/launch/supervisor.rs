//! [`Supervisor`]: when tasks start, start again and end. It is pure: time and ends are arguments.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

/// Pause before the first restart of a task. It doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_millis(250);

/// Maximum pause before a restart.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Time from SIGKILL until a process that is still there is given up.
const GIVE_UP_AFTER: Duration = Duration::from_secs(5);

/// What a task is to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskKind {
    /// It serves until all workers have ended.
    Ps,
    /// The launch lasts as long as workers do.
    Worker,
    /// It accompanies the others, and nothing depends on its end.
    Companion,
}

/// How long things may take, and how often tasks start again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    /// The restarts of each task.
    pub(super) restarts: u32,
    /// The time for ps tasks to end after the last worker.
    pub(super) grace: Duration,
    /// The time from SIGTERM to SIGKILL.
    pub(super) kill_after: Duration,
}

/// The end of one start of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TaskEnd {
    /// It exited with this code.
    Exit(u8),
    /// A signal ended it.
    Signal(u8),
    /// It could not be started, for this reason.
    NotStarted(String),
}

/// A thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Start a task, for the first time as incarnation 0.
    Start { task: usize, incarnation: u32 },
    /// Send SIGTERM to a task.
    Terminate(usize),
    /// Send SIGKILL to a task.
    Kill(usize),
    /// Wait no longer for a task.
    GiveUp(usize),
    /// Print a line.
    Say(String),
    /// Print a line about something that went wrong.
    Complain(String),
}

/// Decides when tasks start and end, and with which exit code the launch does.
///
/// - Inputs: the end of each start ([`Supervisor::ended`]), signals to the launcher, and the time
///   ([`Supervisor::tick`], at [`Supervisor::deadline`]).
/// - Outputs: [`Supervisor::next_action`], until [`Supervisor::exit_code`] is there.
/// - Time: a task that is told to end is killed after `kill_after`, and given up 5 s later, so that the
///   launch ends even if a task never does.
/// - Never: a start after the launch has begun to end; an action on a task that has ended.
#[derive(Debug)]
pub(super) struct Supervisor {
    policy: Policy,
    tasks: Vec<SupervisedTask>,
    phase: Phase,
    /// The exit code of the first failure or signal.
    failure: Option<u8>,
    actions: VecDeque<Action>,
}

#[derive(Debug)]
struct SupervisedTask {
    name: String,
    kind: TaskKind,
    /// The number of the last start, from 0 on.
    incarnation: u32,
    state: TaskState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskState {
    Running,
    /// It starts again then.
    Pausing(Instant),
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    /// All workers have ended well: the others have time to end until then.
    Grace(Instant),
    /// All have been told to end. Those that have not are killed then.
    Ending(Instant),
    /// All have been killed, and are given up then.
    Killed(Instant),
}

impl Supervisor {
    /// Starts all tasks, in this order.
    pub(super) fn new(
        tasks: impl IntoIterator<Item = (String, TaskKind)>,
        policy: Policy,
    ) -> Supervisor {
        let task =
            |(name, kind)| SupervisedTask { name, kind, incarnation: 0, state: TaskState::Running };
        let tasks: Vec<_> = tasks.into_iter().map(task).collect();
        let actions = (0..tasks.len()).map(|task| Action::Start { task, incarnation: 0 }).collect();
        Supervisor { policy, tasks, phase: Phase::Running, failure: None, actions }
    }

    /// Returns the next thing to do.
    pub(super) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the exit code of the launch once all tasks have ended.
    pub(super) fn exit_code(&self) -> Option<u8> {
        let is_over = self.tasks.iter().all(|task| task.state == TaskState::Over);
        (is_over && self.actions.is_empty()).then(|| self.failure.unwrap_or(0))
    }

    /// Returns when [`Supervisor::tick`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let phase = match self.phase {
            Phase::Running => None,
            Phase::Grace(then) | Phase::Ending(then) | Phase::Killed(then) => Some(then),
        };
        let pauses = self.tasks.iter().filter_map(|task| match task.state {
            TaskState::Pausing(until) => Some(until),
            _ => None,
        });
        pauses.chain(phase).min()
    }

    /// Takes the end of a start.
    pub(super) fn ended(&mut self, now: Instant, task: usize, end: &TaskEnd) {
        let TaskState::Running = std::mem::replace(&mut self.tasks[task].state, TaskState::Over)
        else {
            return;
        };
        let SupervisedTask { kind, incarnation, .. } = self.tasks[task];
        let restarts = self.policy.restarts;
        let name = self.tasks[task].name.clone();
        let Some(code) = end.failure() else {
            self.actions.push_back(Action::Say(format!("{name} ended")));
            return self.check_end(now);
        };
        match self.phase {
            Phase::Ending(_) | Phase::Killed(_) => {
                self.complain(format!("{name} {end}"));
                if kind == TaskKind::Ps && !end.is_asked_for() {
                    self.failure.get_or_insert(code);
                }
            }
            _ if kind == TaskKind::Companion => {
                self.complain(format!("{name} {end}: the others go on"));
            }
            Phase::Running if incarnation < restarts => {
                let pause = pause(incarnation);
                self.tasks[task].state = TaskState::Pausing(now + pause);
                let number = incarnation + 1;
                let pause = pause.as_millis();
                self.complain(format!(
                    "{name} {end}: restart {number} of {restarts} in {pause} ms"
                ));
            }
            Phase::Running | Phase::Grace(_) => {
                self.failure.get_or_insert(code);
                let others = if self.runs_another() { ": all others are ended" } else { "" };
                self.complain(format!("{name} {end}{others}"));
                self.end_all(now);
            }
        }
        self.check_end(now);
    }

    /// Takes a signal that ends the launcher: the first ends all tasks, the second kills them.
    pub(super) fn signalled(&mut self, now: Instant, signal: u8) {
        self.failure.get_or_insert(128 | signal);
        match self.phase {
            Phase::Running | Phase::Grace(_) => {
                self.complain(format!(
                    "signal {signal}: all tasks are ended, and a second one kills them"
                ));
                self.end_all(now);
            }
            Phase::Ending(_) => self.kill_all(now),
            Phase::Killed(_) => {}
        }
    }

    /// Takes the time.
    pub(super) fn tick(&mut self, now: Instant) {
        for task in 0..self.tasks.len() {
            let paused = &mut self.tasks[task];
            if matches!(paused.state, TaskState::Pausing(until) if until <= now) {
                paused.state = TaskState::Running;
                paused.incarnation += 1;
                let incarnation = paused.incarnation;
                self.actions.push_back(Action::Start { task, incarnation });
            }
        }
        match self.phase {
            Phase::Grace(until) if until <= now => self.end_all(now),
            Phase::Ending(until) if until <= now => self.kill_all(now),
            Phase::Killed(until) if until <= now => {
                for task in self.running() {
                    let name = self.tasks[task].name.clone();
                    self.tasks[task].state = TaskState::Over;
                    self.failure.get_or_insert(128 | SIGKILL);
                    self.actions.push_back(Action::GiveUp(task));
                    self.complain(format!(
                        "{name} is still there after SIGKILL, and is left behind"
                    ));
                }
            }
            _ => {}
        }
    }

    /// Begins the end once nothing is left to wait for.
    fn check_end(&mut self, now: Instant) {
        let is_over = |kind| {
            let mut tasks = self.tasks.iter().filter(|task| task.kind == kind).peekable();
            (tasks.peek().is_some(), tasks.all(|task| task.state == TaskState::Over))
        };
        match (self.phase, is_over(TaskKind::Worker), is_over(TaskKind::Ps).1) {
            // The companions of no task are of no use.
            (Phase::Running | Phase::Grace(_), (_, true), true) => self.end_all(now),
            (Phase::Running, (true, true), false) => {
                self.phase = Phase::Grace(now + self.policy.grace);
            }
            _ => {}
        }
    }

    /// Tells all tasks to end.
    fn end_all(&mut self, now: Instant) {
        self.phase = Phase::Ending(now + self.policy.kill_after);
        // What has not been started never is.
        let mut never = Vec::new();
        self.actions.retain(|action| match action {
            Action::Start { task, .. } => {
                never.push(*task);
                false
            }
            _ => true,
        });
        for (index, task) in self.tasks.iter_mut().enumerate() {
            if matches!(task.state, TaskState::Pausing(_)) || never.contains(&index) {
                task.state = TaskState::Over;
            }
        }
        let running = self.running();
        self.actions.extend(running.into_iter().map(Action::Terminate));
    }

    fn kill_all(&mut self, now: Instant) {
        let had_time = matches!(self.phase, Phase::Ending(until) if until <= now);
        self.phase = Phase::Killed(now + GIVE_UP_AFTER);
        for task in self.running() {
            if had_time {
                let name = self.tasks[task].name.clone();
                let seconds = self.policy.kill_after.as_secs();
                self.complain(format!(
                    "{name} has not ended {seconds} s after SIGTERM: it is killed"
                ));
            }
            self.actions.push_back(Action::Kill(task));
        }
    }

    /// Returns the tasks that run.
    fn running(&self) -> Vec<usize> {
        let tasks = self.tasks.iter().enumerate();
        let running = tasks.filter(|(_, task)| task.state == TaskState::Running);
        running.map(|(index, _)| index).collect()
    }

    fn runs_another(&self) -> bool {
        self.tasks.iter().any(|task| task.state != TaskState::Over)
    }

    fn complain(&mut self, line: String) {
        self.actions.push_back(Action::Complain(line));
    }
}

/// The number of SIGKILL.
const SIGKILL: u8 = 9;

/// Returns the pause before the restart of an incarnation.
fn pause(incarnation: u32) -> Duration {
    let factor = 2_u32.checked_pow(incarnation).unwrap_or(u32::MAX);
    PAUSE_MIN.checked_mul(factor).map_or(PAUSE_MAX, |pause| pause.min(PAUSE_MAX))
}

impl TaskEnd {
    /// Returns the exit code of a failure; `None` for a good end.
    fn failure(&self) -> Option<u8> {
        match self {
            TaskEnd::Exit(0) => None,
            TaskEnd::Exit(code) => Some(*code),
            TaskEnd::Signal(signal) => Some(128 | signal),
            TaskEnd::NotStarted(_) => Some(126),
        }
    }
}

impl TaskEnd {
    /// Returns whether this is how a process ends that has been told to: by SIGTERM or SIGKILL, also
    /// if a shell around it reports that.
    fn is_asked_for(&self) -> bool {
        const SIGTERM: u8 = 15;
        let signals = [SIGTERM, SIGKILL];
        match self {
            TaskEnd::Exit(code) => signals.iter().any(|signal| *code == 128 | signal),
            TaskEnd::Signal(signal) => signals.contains(signal),
            TaskEnd::NotStarted(_) => false,
        }
    }
}

impl fmt::Display for TaskEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TaskEnd::Exit(code) => write!(f, "ended with exit code {code}"),
            TaskEnd::Signal(signal) => write!(f, "was ended by signal {signal}"),
            TaskEnd::NotStarted(reason) => write!(f, "cannot be started: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests;
