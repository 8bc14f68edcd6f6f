//! [`Interrupt`]: cancels waits from another thread.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::pause::Pause;

/// Cancels the blocking calls of workers and readers, and ends training sessions, from another
/// thread or task.
///
/// Give it to [`WorkerConfig::interrupt`](crate::WorkerConfig::interrupt) or
/// [`TrainingConfig::interrupt`](crate::training::TrainingConfig::interrupt), or take that of a
/// worker: [`blocking::Worker::interrupt`](crate::blocking::Worker::interrupt). Clones are one
/// interrupt, and one interrupt may serve any number of workers. It stays raised.
///
/// The library installs no signal handler. A program raises the interrupt where it learns of the
/// signal: in a task that awaits it, or in the callback of a crate for signals.
///
/// ```no_run
/// # use pushpull_worker::{Error, Interrupt, WorkerConfig, blocking::Worker};
/// # fn run(config: WorkerConfig) {
/// let interrupt = Interrupt::new();
/// let config = config.interrupt(&interrupt);
/// let training = std::thread::spawn(move || {
///     let mut worker = Worker::connect(config)?;
///     // Join, then take tokens and push.
/// #   worker.token()?;
///     worker.leave()
/// });
/// interrupt.raise();
/// let ended = training.join().expect("no panic");
/// assert!(matches!(ended, Err(Error::Interrupted { .. })));
/// # }
/// ```
#[derive(Clone, Debug)]
#[doc(alias = "canceller")]
#[doc(alias = "CancellationToken")]
pub struct Interrupt(Arc<watch::Sender<bool>>);

/// How long an operation with grace may last once the interrupt is raised.
const GRACE: Duration = Duration::from_millis(250);

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

    /// Cancels the calls under way and all later ones: see [`crate::blocking`]. A training session
    /// stops waiting and ends with
    /// [`StopReason::Interrupted`](crate::training::StopReason::Interrupted).
    ///
    /// May block for a moment and allocate, so a signal handler must not call it directly.
    #[doc(alias = "cancel")]
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
        tokio::select! {
            biased;
            output = future => Some(output),
            () = self.raised() => None,
        }
    }

    /// Waits until the interrupt is raised.
    async fn raised(&self) {
        // It has no error while the sender is here.
        let _ = self.0.subscribe().wait_for(|raised| *raised).await;
    }

    /// Awaits a future as [`Interrupt::race`] does, but for [`GRACE`] longer once the interrupt is
    /// raised: for operations whose end matters and which a server that lives answers in that time.
    pub(crate) async fn race_with_grace<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        if let Some(output) = self.race(future.as_mut()).await {
            return Some(output);
        }
        tokio::select! {
            biased;
            output = future => Some(output),
            () = Pause::new(GRACE) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::time::Instant;

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

    #[tokio::test]
    async fn a_race_with_grace_ends_with_the_future_or_after_the_grace() {
        let interrupt = Interrupt::new();
        assert_eq!(interrupt.race_with_grace(ready(3)).await, Some(3));
        // The future ends only because the interrupt is raised, so within the grace.
        let (raiser, raised) = (interrupt.clone(), interrupt.race(pending::<()>()));
        let (settled, ()) =
            tokio::join!(interrupt.race_with_grace(raised), async move { raiser.raise() });
        assert_eq!(settled, Some(None));
        let start = Instant::now();
        assert_eq!(interrupt.race_with_grace(pending::<()>()).await, None);
        assert!(start.elapsed() >= GRACE);
    }
}
