//! Presence of a worker that is not the chief: when it joined, and when it ended.

use pushpull::TaskId;
use pushpull::error::Chain;
use pushpull::training::{FinalValues, Flow, Hook, HookError, JoinReport};

use super::output::print_error;

/// A hook that prints one line on stderr for each join, and one for the end. The chief shows the
/// steps.
#[derive(Debug)]
pub(crate) struct Presence {
    task: TaskId,
}

impl Presence {
    /// Creates the hook of the worker `task`.
    pub(crate) fn new(task: TaskId) -> Presence {
        Presence { task }
    }
}

impl Hook for Presence {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        match at.cause {
            None => print_error(format_args!("{} joined at step {}", self.task, at.step)),
            Some(cause) => print_error(format_args!(
                "{} joined again at step {}: {}",
                self.task,
                at.step,
                Chain(cause)
            )),
        }
        Ok(Flow::Continue)
    }

    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        print_error(format_args!("{} ended at step {}: {}", self.task, at.end.step, at.end.reason));
        Ok(())
    }
}
