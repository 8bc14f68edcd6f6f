//! The decisions of a group of tasks.

use std::sync::Arc;
use std::time::Duration;

use super::error::{StopCause, TaskFailure};

/// Which tasks run, and why they are to stop.
///
/// Invariants: names of running tasks differ. The first stop cause and the first failure are never
/// replaced. A failure implies a stop cause.
#[derive(Debug)]
pub(super) struct TaskLedger<E> {
    /// Names, in the order of their start.
    running: Vec<String>,
    stop_cause: Option<StopCause>,
    failure: Option<Arc<TaskFailure<E>>>,
    later_failures: u64,
}

/// How a task ended.
#[derive(Debug)]
pub(super) enum TaskOutcome<E> {
    Done,
    Failed(TaskFailure<E>),
}

impl<E> TaskLedger<E> {
    pub(super) fn new() -> TaskLedger<E> {
        TaskLedger { running: Vec::new(), stop_cause: None, failure: None, later_failures: 0 }
    }

    /// Adds a running task, unless another has its name.
    pub(super) fn begin(&mut self, name: &str) -> bool {
        let is_free = self.running.iter().all(|running| running != name);
        if is_free {
            self.running.push(name.to_owned());
        }
        is_free
    }

    /// Removes a task. Returns its failure if it is not the first.
    pub(super) fn end(&mut self, name: &str, outcome: TaskOutcome<E>) -> Option<TaskFailure<E>> {
        self.running.retain(|running| running != name);
        match outcome {
            TaskOutcome::Done => None,
            TaskOutcome::Failed(failure) => self.fail(failure),
        }
    }

    /// Records a failure. Returns it if it is not the first.
    pub(super) fn fail(&mut self, failure: TaskFailure<E>) -> Option<TaskFailure<E>> {
        if self.failure.is_some() {
            self.later_failures += 1;
            return Some(failure);
        }
        self.stop_cause.get_or_insert_with(|| StopCause::Failed(failure.task().to_owned()));
        self.failure = Some(Arc::new(failure));
        None
    }

    pub(super) fn request_stop(&mut self, reason: String) {
        self.stop_cause.get_or_insert(StopCause::Requested(reason));
    }

    /// Forgets everything but the running tasks. Returns the failure.
    pub(super) fn clear_stop(&mut self) -> Option<Arc<TaskFailure<E>>> {
        self.stop_cause = None;
        self.later_failures = 0;
        self.failure.take()
    }

    pub(super) fn running(&self) -> &[String] {
        &self.running
    }

    pub(super) fn stop_cause(&self) -> Option<&StopCause> {
        self.stop_cause.as_ref()
    }

    pub(super) fn failure(&self) -> Option<&Arc<TaskFailure<E>>> {
        self.failure.as_ref()
    }

    pub(super) fn later_failures(&self) -> u64 {
        self.later_failures
    }
}

/// One wait for all tasks. Times are durations since any fixed start.
#[derive(Debug)]
pub(super) struct JoinWait {
    grace: Duration,
    /// Set when the wait first sees a stop.
    deadline: Option<Duration>,
}

/// What a wait does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum JoinStep {
    /// Waits for a change.
    Wait,
    /// Waits for a change, at most until this time.
    WaitUntil(Duration),
    /// All tasks have ended.
    Ended,
    /// These tasks have not ended in time.
    Stragglers(Vec<String>),
}

impl JoinWait {
    pub(super) fn new(grace: Duration) -> JoinWait {
        JoinWait { grace, deadline: None }
    }

    /// Decides what to do at a time.
    pub(super) fn poll<E>(&mut self, ledger: &TaskLedger<E>, now: Duration) -> JoinStep {
        if ledger.running.is_empty() {
            return JoinStep::Ended;
        }
        if ledger.stop_cause.is_none() {
            // Another thread may have cleared a stop.
            self.deadline = None;
            return JoinStep::Wait;
        }
        let deadline = *self.deadline.get_or_insert(now.saturating_add(self.grace));
        match now >= deadline {
            true => JoinStep::Stragglers(ledger.running.clone()),
            false => JoinStep::WaitUntil(deadline),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn failure(task: &str, error: u32) -> TaskFailure<u32> {
        TaskFailure::Error { task: task.to_owned(), error }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_first_failure_is_kept() {
        let mut ledger = TaskLedger::new();
        assert!(["a", "b", "c"].iter().all(|name| ledger.begin(name)));
        assert!(ledger.end("b", TaskOutcome::Failed(failure("b", 1))).is_none());
        assert_eq!(ledger.stop_cause(), Some(&StopCause::Failed("b".to_owned())));
        let refused = ledger.end("a", TaskOutcome::Failed(failure("a", 2)));
        assert!(matches!(refused, Some(TaskFailure::Error { error: 2, .. })));
        let refused = ledger.fail(failure("loop", 3));
        assert!(matches!(refused, Some(TaskFailure::Error { error: 3, .. })));
        assert_eq!((ledger.running(), ledger.later_failures()), (&["c".to_owned()][..], 2));
        assert_eq!(ledger.failure().unwrap().task(), "b");
    }

    #[test]
    fn a_clean_stop_hides_no_failure() {
        let mut ledger = TaskLedger::new();
        ledger.begin("a");
        ledger.request_stop("last step".to_owned());
        ledger.request_stop("another".to_owned());
        ledger.end("a", TaskOutcome::Failed(failure("a", 1)));
        let reason = StopCause::Requested("last step".to_owned());
        assert_eq!(ledger.stop_cause(), Some(&reason), "the first reason counts");
        assert_eq!(ledger.failure().unwrap().task(), "a");
        assert!(ledger.clear_stop().is_some());
        assert_eq!((ledger.stop_cause(), ledger.failure().is_none()), (None, true));
    }

    #[test]
    fn a_name_is_used_once_at_a_time() {
        let mut ledger = TaskLedger::<u32>::new();
        assert!(ledger.begin("a") && !ledger.begin("a"));
        ledger.end("a", TaskOutcome::Done);
        assert!(ledger.begin("a"));
    }

    #[test]
    fn the_grace_time_begins_with_the_stop() {
        let mut ledger = TaskLedger::<u32>::new();
        let mut wait = JoinWait::new(seconds(120));
        assert_eq!(wait.poll(&ledger, seconds(0)), JoinStep::Ended);
        ledger.begin("a");
        ledger.begin("b");
        assert_eq!(wait.poll(&ledger, seconds(1_000_000)), JoinStep::Wait);
        ledger.request_stop("enough".to_owned());
        let until = JoinStep::WaitUntil(seconds(1_000_130));
        assert_eq!(wait.poll(&ledger, seconds(1_000_010)), until);
        assert_eq!(wait.poll(&ledger, seconds(1_000_129)), until);
        ledger.end("a", TaskOutcome::Done);
        let stragglers = JoinStep::Stragglers(vec!["b".to_owned()]);
        assert_eq!(wait.poll(&ledger, seconds(1_000_130)), stragglers);
        ledger.end("b", TaskOutcome::Done);
        assert_eq!(wait.poll(&ledger, seconds(1_000_131)), JoinStep::Ended);
    }

    #[test]
    fn a_cleared_stop_ends_the_grace_time() {
        let mut ledger = TaskLedger::<u32>::new();
        ledger.begin("a");
        ledger.request_stop("pause".to_owned());
        let mut wait = JoinWait::new(seconds(10));
        assert_eq!(wait.poll(&ledger, seconds(1)), JoinStep::WaitUntil(seconds(11)));
        ledger.clear_stop();
        assert_eq!(wait.poll(&ledger, seconds(20)), JoinStep::Wait);
        ledger.request_stop("end".to_owned());
        assert_eq!(wait.poll(&ledger, seconds(30)), JoinStep::WaitUntil(seconds(40)));
    }

    #[test]
    fn a_grace_time_of_any_length_is_possible() {
        let mut ledger = TaskLedger::<u32>::new();
        ledger.begin("a");
        ledger.request_stop("end".to_owned());
        let poll = |grace| JoinWait::new(grace).poll(&ledger, seconds(1));
        assert_eq!(poll(Duration::MAX), JoinStep::WaitUntil(Duration::MAX));
        assert_eq!(poll(Duration::ZERO), JoinStep::Stragglers(vec!["a".to_owned()]));
    }

    proptest! {
        /// In any order of inputs the first failure and the first cause are kept.
        #[test]
        fn the_invariants_hold(inputs in proptest::collection::vec((0_u8..5, 0_u8..4), 0..60)) {
            let mut ledger = TaskLedger::new();
            let (mut first, mut cause, mut failures) = (None, None, 0_u64);
            let mut running = Vec::<String>::new();
            for (index, (input, task)) in inputs.into_iter().enumerate() {
                let (name, index) = (format!("task-{task}"), index as u32);
                match input {
                    0 => {
                        let is_new = !running.contains(&name);
                        prop_assert_eq!(ledger.begin(&name), is_new);
                        running.extend(is_new.then_some(name));
                    }
                    1 | 2 => {
                        let is_failure = input == 2;
                        let outcome = match is_failure {
                            true => TaskOutcome::Failed(failure(&name, index)),
                            false => TaskOutcome::Done,
                        };
                        let refused = ledger.end(&name, outcome);
                        prop_assert_eq!(refused.is_some(), is_failure && first.is_some());
                        failures += u64::from(refused.is_some());
                        running.retain(|other| *other != name);
                        if is_failure {
                            first.get_or_insert(index);
                            cause.get_or_insert(StopCause::Failed(name));
                        }
                    }
                    3 => {
                        ledger.request_stop(name.clone());
                        cause.get_or_insert(StopCause::Requested(name));
                    }
                    _ => {
                        ledger.clear_stop();
                        (first, cause, failures) = (None, None, 0);
                    }
                }
                let kept = ledger.failure().map(|failure| match **failure {
                    TaskFailure::Error { error, .. } => error,
                    TaskFailure::Panic { .. } => u32::MAX,
                });
                prop_assert_eq!(kept, first);
                prop_assert_eq!(ledger.stop_cause(), cause.as_ref());
                prop_assert_eq!(ledger.later_failures(), failures);
                prop_assert_eq!(ledger.running(), &running[..]);
            }
        }
    }
}
