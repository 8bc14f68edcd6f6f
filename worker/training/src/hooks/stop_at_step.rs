//! [`StopAtStep`]: ends the training at a global step.

use crate::{FinishedStep, Flow, GrantedStep, Hook, HookError, JoinReport, StepGate};

/// Ends the training of this worker at a global step.
///
/// A training that has reached the step already runs no step. In synchronous mode, and with one
/// worker, the last step is exact. Asynchronous workers that hold tokens when it is reached still
/// push them: N workers make at most N - 1 steps more. Set `PsConfig::last_step` on the servers to
/// end exactly there in any mode.
#[derive(Debug)]
#[doc(alias = "StopAtStepHook")]
pub struct StopAtStep {
    last: Option<u64>,
    /// The number of steps after the first join.
    count: u64,
}

impl StopAtStep {
    /// Ends once the global step is `last`.
    pub fn last(last: u64) -> StopAtStep {
        StopAtStep { last: Some(last), count: 0 }
    }

    /// Ends once `count` global steps were made after this worker has first joined. Later joins
    /// change nothing.
    pub fn count(count: u64) -> StopAtStep {
        StopAtStep { last: None, count }
    }

    /// Returns the reason to stop, if the last step is reached.
    fn stop(&self, step: u64) -> Option<String> {
        let last = self.last.filter(|&last| step >= last)?;
        Some(format!("the global step is {step}, the last is {last}"))
    }

    fn flow(&self, step: u64) -> Flow {
        self.stop(step).map_or(Flow::Continue, Flow::Stop)
    }
}

impl Hook for StopAtStep {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        self.last.get_or_insert(at.step.saturating_add(self.count));
        Ok(self.flow(at.step))
    }

    fn before_step(&mut self, step: &GrantedStep) -> Result<StepGate, HookError> {
        Ok(self.stop(step.step).map_or(StepGate::Begin, StepGate::Stop))
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        Ok(self.flow(step.global_step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::tests::Script;

    #[test]
    fn a_training_ends_at_the_step_and_a_finished_one_runs_nothing() {
        for (first, hook, last, steps) in [
            (0, StopAtStep::last(10), 10, 10),
            (7, StopAtStep::last(10), 10, 3),
            // The classic system runs one more step.
            (8, StopAtStep::last(8), 8, 0),
            (9, StopAtStep::last(8), 9, 0),
            (0, StopAtStep::last(0), 0, 0),
            (8, StopAtStep::count(3), 11, 3),
            (8, StopAtStep::count(0), 8, 0),
            (8, StopAtStep::count(u64::MAX), 20, 12),
        ] {
            let script = Script { step: first, last_step: 20, ..Script::default() };
            let played = script.play(vec![Box::new(hook)]);
            let pushes = played.events.iter().filter(|event| *event == "push").count();
            assert_eq!((played.ended.unwrap().step, pushes), (last, steps), "from {first}");
            let tokens = played.events.iter().filter(|event| *event == "token").count();
            assert!(steps > 0 || tokens == 0, "a finished training takes no token");
        }
    }

    #[test]
    fn a_rollback_does_not_change_the_last_step() {
        let lost = pushpull_worker::Error::RolledBack { from_step: 12, to_step: 9 };
        let mut script = Script { step: 8, ..Script::default() };
        script.faults.push(("push", 5, lost));
        script.joins = [Ok((8, false)), Ok((9, true))].into();
        let played = script.play(vec![Box::new(StopAtStep::count(10))]);
        assert_eq!(played.ended.unwrap().step, 18);
    }
}
