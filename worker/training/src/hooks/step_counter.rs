//! [`StepCounter`]: the speed of a training.

use std::time::Duration;

use crate::cadence::Cadence;
use crate::{FinishedStep, Flow, Hook, HookError, JoinReport};

/// Sets the scalar [`StepCounter::SCALAR`] every few global steps or seconds: the global steps of
/// all workers in a second, since it was last set.
///
/// Add it before the hooks that show scalars.
#[derive(Debug)]
#[doc(alias = "StepCounterHook")]
pub struct StepCounter {
    interval: Cadence,
    /// The time and the global step at which the scalar was last set.
    since: (Duration, u64),
}

impl StepCounter {
    /// The name of the scalar.
    pub const SCALAR: &str = "global_steps_per_second";

    /// Sets the scalar after this many global steps; 0 counts as 1.
    pub fn every_steps(steps: u64) -> StepCounter {
        StepCounter { interval: Cadence::Steps(steps.max(1)), since: (Duration::ZERO, 0) }
    }

    /// Sets the scalar once per interval.
    pub fn every(interval: Duration) -> StepCounter {
        StepCounter { interval: Cadence::Time(interval), since: (Duration::ZERO, 0) }
    }
}

impl Hook for StepCounter {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        self.since = (at.at, at.step);
        Ok(Flow::Continue)
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        let (at, before) = self.since;
        let steps = step.global_step.saturating_sub(before);
        let time = step.at.saturating_sub(at);
        if self.interval.is_due(time, steps) && !time.is_zero() {
            step.scalars.set(Self::SCALAR, steps as f64 / time.as_secs_f64());
            self.since = (step.at, step.global_step);
        }
        Ok(Flow::Continue)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::Scalars;
    use crate::hooks::{ScalarSink, Summaries};
    use crate::lifecycle::tests::Script;

    /// The steps, each with its rate.
    type StepRates = Arc<Mutex<Vec<(u64, Option<f64>)>>>;

    struct Rates(StepRates);

    impl ScalarSink for Rates {
        fn write(&mut self, step: u64, scalars: &Scalars) -> Result<(), HookError> {
            self.0.lock().unwrap().push((step, scalars.get(StepCounter::SCALAR)));
            Ok(())
        }
    }

    #[test]
    fn steps_are_divided_by_the_given_time() {
        check_rates(StepCounter::every_steps(2));
        check_rates(StepCounter::every(Duration::from_secs(2)));
    }

    fn check_rates(counter: StepCounter) {
        let rates = StepRates::default();
        // A step takes a second. The recovery after the push of step 4 takes some more.
        let mut script = Script { last_step: 7, ..Script::default() };
        script.faults.push((
            "push",
            5,
            pushpull_worker::Error::RolledBack { from_step: 4, to_step: 3 },
        ));
        script.joins = [Ok((0, false)), Ok((3, true))].into();
        let sink = Rates(Arc::clone(&rates));
        script.play(vec![Box::new(counter), Box::new(Summaries::every_steps(1, sink))]);
        let expected =
            [(1, None), (2, Some(1.0)), (3, None), (4, Some(1.0)), (4, None), (5, Some(1.0))];
        let rates = rates.lock().unwrap();
        assert_eq!(rates[..expected.len()], expected, "{rates:?}");
    }
}
