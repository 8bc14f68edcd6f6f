//! [`NanGuard`]: keeps a NaN from being pushed.

use crate::{ComputedStep, Flow, Hook, HookError};

/// Ends the training if a scalar of a step is NaN or infinite. It looks before the push, so the
/// servers never see the step.
#[derive(Debug)]
#[doc(alias = "NanTensorHook")]
pub struct NanGuard {
    fails: bool,
    checks_gradients: bool,
}

impl NanGuard {
    /// Fails the training with an error that names the scalar.
    pub fn fail() -> NanGuard {
        NanGuard { fails: true, checks_gradients: false }
    }

    /// Ends the training without an error.
    pub fn stop() -> NanGuard {
        NanGuard { fails: false, checks_gradients: false }
    }

    /// Checks the gradients, too. Cost: a pass over them in each step.
    ///
    /// Servers refuse such gradients by default, and the session then skips the batch. This makes
    /// the first one end the training.
    pub fn gradients(self) -> NanGuard {
        NanGuard { checks_gradients: true, ..self }
    }
}

impl Hook for NanGuard {
    fn before_push(&mut self, step: &ComputedStep<'_>) -> Result<Flow, HookError> {
        let bad = step.scalars.iter().find(|(_, value)| !value.is_finite());
        let mut problem =
            bad.map(|(name, value)| format!("{name} is {value} at step {}", step.step));
        if problem.is_none() && self.checks_gradients {
            problem =
                step.check_finite().err().map(|error| format!("{error}, at step {}", step.step));
        }
        match problem {
            None => Ok(Flow::Continue),
            Some(problem) if self.fails => Err(problem.into()),
            Some(problem) => Ok(Flow::Stop(problem)),
        }
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::error::Chain;
    use pushpull_common::tensor::{DType, Shape};
    use pushpull_common::variable::VariableSpec;
    use pushpull_worker::Gradients;
    use pushpull_worker::simulation::{gradients_for, params_for};

    use super::*;
    use crate::lifecycle::tests::Script;
    use crate::{Scalars, StopReason};

    #[test]
    fn a_nan_loss_is_not_pushed() {
        let nan_at_three = |step| if step == 3 { f64::NAN } else { 1.0 };
        let script = || Script { last_step: 9, loss: nan_at_three, ..Script::default() };
        let pushes = |events: &[String]| events.iter().filter(|event| *event == "push").count();

        let played = script().play(vec![Box::new(NanGuard::fail())]);
        let error = Chain(&played.ended.unwrap_err()).to_string();
        let expected = "the hook NanGuard failed in before_push: loss is NaN at step 3";
        assert_eq!(error, format!("cannot continue: {expected}"));
        assert_eq!(pushes(&played.events), 3);

        let played = script().play(vec![Box::new(NanGuard::stop())]);
        let hook = "NanGuard".to_owned();
        let reason = "loss is NaN at step 3".to_owned();
        let ended = played.ended.unwrap();
        assert_eq!((ended.step, ended.reason), (3, StopReason::Hook { hook, reason }));
        assert_eq!(pushes(&played.events), 3);
    }

    fn check(guard: &mut NanGuard, gradients: &Gradients) -> Result<Flow, String> {
        let params = &params_for(Vec::new(), 0);
        let scalars = &Scalars::default();
        let at = std::time::Duration::ZERO;
        let step = ComputedStep { step: 4, params, gradients, scalars, at };
        guard.before_push(&step).map_err(|error| error.to_string())
    }

    #[test]
    fn gradients_are_checked_if_that_is_asked_for() {
        let variables = vec![
            VariableSpec::f32("w", [3]).unwrap(),
            VariableSpec::new("rows", DType::F64, Shape::new([9, 2]).unwrap()).unwrap().sparse(),
        ];
        let mut gradients = gradients_for(variables);
        gradients.view_mut::<f32>("w").unwrap().copy_from_slice(&[0.0, f32::MAX, -1.0]);
        gradients.set_rows("rows", &[7, 3], &[1.0, 2.0, 3.0, 4.0_f64]).unwrap();
        let mut guard = NanGuard::fail().gradients();
        assert_eq!(check(&mut guard, &gradients), Ok(Flow::Continue));
        gradients.set_rows("rows", &[7, 3], &[1.0, f64::NAN, 3.0, 4.0]).unwrap();
        let error = check(&mut guard, &gradients).unwrap_err();
        assert!(error.contains("NaN") && error.contains("\"rows\""), "{error}");
        gradients.view_mut::<f32>("w").unwrap()[2] = f32::NEG_INFINITY;
        let error = check(&mut guard, &gradients).unwrap_err();
        assert_eq!(error, "cannot push: element 2 of \"w\" is -inf, at step 4");
        assert_eq!(check(&mut NanGuard::fail(), &gradients), Ok(Flow::Continue));
    }
}
