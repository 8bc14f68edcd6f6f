//! [`FinalMetrics`]: metrics of the final values.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use pushpull_worker::Params;

use crate::{FinalValues, Hook, HookError, Scalars};

/// Computes metrics from the final values of a training.
///
/// ```
/// use pushpull_training::hooks::FinalMetrics;
///
/// let hook = FinalMetrics::new(|params, metrics| {
///     let w = params.view::<f32>("w")?;
///     metrics.set("norm", w.iter().map(|w| w * w).sum::<f32>().sqrt().into());
///     Ok(())
/// });
/// let metrics = hook.handle(); // the hook goes to the session
/// assert!(metrics.get().is_none(), "the training has not ended");
/// ```
#[doc(alias = "FinalOpsHook")]
pub struct FinalMetrics {
    compute: Box<ComputeMetrics>,
    handle: MetricsHandle,
}

/// Computes metrics from values.
type ComputeMetrics = dyn FnMut(&Params, &mut Scalars) -> Result<(), HookError> + Send;

/// Returns the results of a [`FinalMetrics`] after the end.
#[derive(Clone, Debug, Default)]
pub struct MetricsHandle(Arc<Mutex<Option<Scalars>>>);

impl fmt::Debug for FinalMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FinalMetrics").field("handle", &self.handle).finish_non_exhaustive()
    }
}

impl FinalMetrics {
    /// Calls `compute` once, if the training ends without an error.
    pub fn new(
        compute: impl FnMut(&Params, &mut Scalars) -> Result<(), HookError> + Send + 'static,
    ) -> FinalMetrics {
        FinalMetrics { compute: Box::new(compute), handle: MetricsHandle::default() }
    }

    /// Returns the handle for the results.
    pub fn handle(&self) -> MetricsHandle {
        self.handle.clone()
    }
}

impl MetricsHandle {
    /// Returns the metrics; `None` before the end, after an error, and if the worker never joined.
    pub fn get(&self) -> Option<Scalars> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Hook for FinalMetrics {
    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        if let Some(params) = &at.end.params {
            let mut metrics = Scalars::default();
            (self.compute)(params, &mut metrics)?;
            *self.handle.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(metrics);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::error::Chain;

    use super::*;
    use crate::lifecycle::tests::Script;

    fn step_of_values() -> FinalMetrics {
        FinalMetrics::new(|params, metrics| {
            metrics.set("step", params.step() as f64);
            params.view::<f32>("w")?;
            Ok(())
        })
    }

    #[test]
    fn metrics_are_computed_from_the_last_values() {
        let hook = step_of_values();
        let script = Script { last_step: 3, ..Script::default() };
        let handle = hook.handle();
        assert!(handle.get().is_none());
        script.play(vec![Box::new(hook)]).ended.unwrap();
        assert_eq!(handle.get().unwrap().get("step"), Some(3.0));
    }

    #[test]
    fn an_error_computes_no_metrics() {
        let hook = step_of_values();
        let handle = hook.handle();
        let script = Script { last_step: 3, fails_at: Some(1), ..Script::default() };
        script.play(vec![Box::new(hook)]).ended.unwrap_err();
        assert!(handle.get().is_none());
        let hook = FinalMetrics::new(|params, _| Ok(params.view::<f32>("x").map(|_| ())?));
        let script = Script { last_step: 3, ..Script::default() };
        let error = Chain(&script.play(vec![Box::new(hook)]).ended.unwrap_err()).to_string();
        assert!(error.contains("FinalMetrics failed in end") && error.contains("\"x\""), "{error}");
    }
}
