//! [`Interrupt`]: ends a training from outside.

use std::sync::Arc;

use tokio::sync::watch;

/// Ends a training from another thread or task, for example on Ctrl-C.
///
/// The library installs no signal handler. A program raises the interrupt where it learns of the
/// signal: in a task that awaits it, or in the callback of a crate for signals. Clones are one
/// interrupt, and one interrupt may end several sessions.
///
/// ```no_run
/// # use pushpull_worker::training::{Interrupt, TrainingConfig};
/// # fn wait_for_a_signal() {}
/// # fn run(config: TrainingConfig) {
/// let interrupt = Interrupt::new();
/// let config = config.interrupt(&interrupt);
/// std::thread::spawn(move || {
///     wait_for_a_signal();
///     interrupt.raise();
/// });
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<watch::Sender<bool>>);

impl Default for Interrupt {
    fn default() -> Interrupt {
        Interrupt::new()
    }
}

impl Interrupt {
    /// Creates an interrupt that is not raised.
    pub fn new() -> Interrupt {
        Interrupt(Arc::new(watch::Sender::new(false)))
    }

    /// Ends the sessions of this interrupt at their next step. A session that waits for a token,
    /// for the chief or for a lost server stops waiting. May block for a moment and allocate, so a
    /// signal handler must not call it directly.
    pub fn raise(&self) {
        self.0.send_replace(true);
    }

    /// Whether the interrupt was raised.
    pub fn is_raised(&self) -> bool {
        *self.0.borrow()
    }

    /// Awaits a future, or returns `None` as soon as the interrupt is raised. The future is dropped
    /// then.
    pub(crate) async fn race<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut raised = self.0.subscribe();
        tokio::select! {
            biased;
            output = future => Some(output),
            _ = raised.wait_for(|raised| *raised) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn a_race_ends_with_the_future_or_the_interrupt() {
        let interrupt = Interrupt::new();
        assert_eq!(interrupt.race(ready(3)).await, Some(3));
        let raiser = interrupt.clone();
        let (raced, ()) =
            tokio::join!(interrupt.race(pending::<()>()), async move { raiser.raise() });
        assert_eq!(raced, None);
        assert!(interrupt.is_raised());
        assert_eq!(interrupt.race(pending::<()>()).await, None, "it stays raised");
    }
}
