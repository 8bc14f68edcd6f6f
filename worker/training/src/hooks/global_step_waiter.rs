//! [`GlobalStepWaiter`]: a late start.

use std::time::Duration;

use crate::{GrantedStep, Hook, HookError, StepGate};

/// Delays the first step of this worker until the others have made some, so that asynchronous
/// workers begin one after the other.
///
/// It asks for a token now and then and returns it, until the token's step is high enough. In
/// synchronous mode use it only for backup replicas: a step that needs this worker would wait for
/// ever.
#[derive(Debug)]
#[doc(alias = "GlobalStepWaiterHook")]
pub struct GlobalStepWaiter {
    until: u64,
    poll: Duration,
    is_open: bool,
}

impl GlobalStepWaiter {
    /// Waits until the global step is at least `step`.
    pub fn until(step: u64) -> GlobalStepWaiter {
        GlobalStepWaiter { until: step, poll: Duration::from_millis(500), is_open: false }
    }

    /// Sets the time between two looks. Default 0.5 s.
    pub fn poll_every(self, interval: Duration) -> GlobalStepWaiter {
        GlobalStepWaiter { poll: interval, ..self }
    }
}

impl Hook for GlobalStepWaiter {
    fn before_step(&mut self, step: &GrantedStep) -> Result<StepGate, HookError> {
        self.is_open |= step.step >= self.until;
        Ok(match self.is_open {
            true => StepGate::Begin,
            false => StepGate::Wait(self.poll),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_step_waits() {
        let mut hook = GlobalStepWaiter::until(10).poll_every(Duration::from_secs(2));
        let wait = StepGate::Wait(Duration::from_secs(2));
        for (step, gate) in [
            (0, &wait),
            (9, &wait),
            (10, &StepGate::Begin),
            // A restore does not close the gate again.
            (3, &StepGate::Begin),
        ] {
            let step = GrantedStep { step, local_steps: 0, at: Duration::ZERO };
            assert_eq!(hook.before_step(&step).unwrap(), *gate);
        }
    }
}
