//! [`EarlyStopping`]: ends a training that no longer improves.

use crate::{FinishedStep, Flow, Hook, HookError, JoinReport};

/// Ends the training once a scalar has not improved for a number of observations.
///
/// An observation is a step that sets the scalar. Set it only where it is meaningful, for example
/// once per evaluation. NaN is no improvement.
#[derive(Debug)]
pub struct EarlyStopping {
    scalar: String,
    /// Observations without an improvement that end the training.
    patience: u64,
    min_delta: f64,
    is_maximized: bool,
    /// The best value and its global step.
    best: Option<(f64, u64)>,
    /// Observations since the best one.
    without_improvement: u64,
}

impl EarlyStopping {
    /// Ends after `patience` observations of `scalar` in a row that are not below the best one.
    pub fn new(scalar: impl Into<String>, patience: u64) -> EarlyStopping {
        EarlyStopping {
            scalar: scalar.into(),
            patience,
            min_delta: 0.0,
            is_maximized: false,
            best: None,
            without_improvement: 0,
        }
    }

    /// Counts a change as an improvement only if it is larger than `delta`. Default 0.
    pub fn min_delta(self, delta: f64) -> EarlyStopping {
        EarlyStopping { min_delta: delta, ..self }
    }

    /// Wants the scalar to grow, as an accuracy does. Default: to fall.
    pub fn maximize(self) -> EarlyStopping {
        EarlyStopping { is_maximized: true, ..self }
    }

    fn is_improvement(&self, value: f64) -> bool {
        let Some((best, _)) = self.best else { return !value.is_nan() };
        match self.is_maximized {
            true => value - best > self.min_delta,
            false => best - value > self.min_delta,
        }
    }
}

impl Hook for EarlyStopping {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        if at.has_gone_back() {
            // The values of later steps are lost, and the best may be one of them.
            self.best = self.best.filter(|&(_, step)| step <= at.step);
            self.without_improvement = 0;
        }
        Ok(Flow::Continue)
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        let Some(value) = step.scalars.get(&self.scalar) else { return Ok(Flow::Continue) };
        if self.is_improvement(value) {
            self.best = Some((value, step.global_step));
            self.without_improvement = 0;
            return Ok(Flow::Continue);
        }
        self.without_improvement += 1;
        if self.without_improvement < self.patience {
            return Ok(Flow::Continue);
        }
        let scalar = &self.scalar;
        let count = self.without_improvement;
        Ok(Flow::Stop(match self.best {
            Some((best, at)) => format!(
                "{scalar} has not improved for {count} observations, the best was {best} at step {at}"
            ),
            None => format!("{scalar} was NaN in {count} observations"),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StopReason;
    use crate::lifecycle::tests::Script;

    #[test]
    fn a_training_ends_when_its_patience_is_spent() {
        let falls = |step: u64| [5.0, 4.0, 3.0, 3.0, 3.5, 2.95, 3.0, 3.0, 3.0, 3.0][step as usize];
        let nan = |_: u64| f64::NAN;
        let new = || EarlyStopping::new("loss", 3);
        for (hook, loss, last) in [
            (new(), falls as fn(u64) -> f64, 9),
            (new().min_delta(0.1), falls, 6),
            (EarlyStopping::new("loss", 2), falls, 5),
            (new().maximize(), falls, 4),
            (new(), nan, 3),
            (EarlyStopping::new("other", 1), falls, 10),
        ] {
            let name = format!("{hook:?}");
            let script = Script { last_step: 10, loss, ..Script::default() };
            assert_eq!(script.play(vec![Box::new(hook)]).ended.unwrap().step, last, "{name}");
        }
        let script = Script { last_step: 10, loss: falls, ..Script::default() };
        let ended = script.play(vec![Box::new(new())]).ended.unwrap();
        let StopReason::Hook { reason, .. } = ended.reason else { panic!("{ended:?}") };
        let expected = "loss has not improved for 3 observations, the best was 2.95 at step 6";
        assert_eq!(reason, expected);
    }

    /// The best value was made by a step that a restore has lost.
    #[test]
    fn a_rollback_forgets_later_values() {
        let loss = |step: u64| if step == 3 { 1.0 } else { 5.0 - step as f64 / 10.0 };
        let mut script = Script { last_step: 9, loss, ..Script::default() };
        script.faults.push((
            "push",
            5,
            pushpull_worker::Error::RolledBack { from_step: 4, to_step: 4 },
        ));
        script.joins = [Ok((0, false)), Ok((3, true))].into();
        script.loss = |step| 5.0 - step as f64 / 10.0;
        assert_eq!(
            script.play(vec![Box::new(EarlyStopping::new("loss", 1))]).ended.unwrap().step,
            9
        );
    }
}
