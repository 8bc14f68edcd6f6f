//! [`Interrupt`]: cancels waits from another thread.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;

use crate::pause::Pause;

/// Cancels the blocking calls of workers and readers, and ends training sessions, from another
/// thread or task.
///
/// Give it to [`WorkerConfig::interrupt`](crate::WorkerConfig::interrupt) or to the configuration of
/// a training session, or take that of a worker:
/// [`blocking::Worker::interrupt`](crate::blocking::Worker::interrupt). Clones are one interrupt, and
/// one interrupt may serve any number of workers. It stays raised.
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
#[derive(Clone, Debug, Default)]
#[doc(alias = "canceller")]
#[doc(alias = "CancellationToken")]
pub struct Interrupt(Arc<InterruptState>);

#[derive(Debug, Default)]
struct InterruptState {
    is_raised: AtomicBool,
    raised: Notify,
}

/// How long an operation with grace may last once the interrupt is raised.
const GRACE: Duration = Duration::from_millis(250);

impl Interrupt {
    /// Creates an interrupt that is not raised.
    pub fn new() -> Interrupt {
        Interrupt::default()
    }

    /// Cancels the calls under way and all later ones: see [`crate::blocking`]. A training session
    /// stops waiting and ends with `StopReason::Interrupted`.
    ///
    /// May block for a moment and allocate, so a signal handler must not call it directly.
    #[doc(alias = "cancel")]
    pub fn raise(&self) {
        self.0.is_raised.store(true, Ordering::Release);
        self.0.raised.notify_waiters();
    }

    /// Whether the interrupt was raised.
    pub fn is_raised(&self) -> bool {
        self.0.is_raised.load(Ordering::Acquire)
    }

    /// Awaits a future, or returns `None` as soon as the interrupt is raised. The future is dropped
    /// then.
    #[doc(hidden)]
    pub async fn race<F: Future>(&self, future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = self.raised() => None,
        }
    }

    /// Waits until the interrupt is raised.
    async fn raised(&self) {
        // Made before the flag is read, it misses no notification.
        let mut raised = pin!(self.0.raised.notified());
        let mut registered: Option<Waker> = None;
        poll_fn(|context| {
            if self.is_raised() {
                return Poll::Ready(());
            }
            // A registration takes a lock, and a caller that spins polls some hundred times.
            if registered.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                return Poll::Pending;
            }
            registered = Some(context.waker().clone());
            raised.as_mut().poll(context)
        })
        .await;
    }

    /// Awaits a future as [`Interrupt::race`] does, but for [`GRACE`] longer once the interrupt is
    /// raised: for operations whose end matters and which a server that lives answers in that time.
    #[doc(hidden)]
    pub async fn race_with_grace<F: Future>(&self, future: F) -> Option<F::Output> {
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

    #[test]
    fn a_wait_misses_no_raise_of_another_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for _ in 0..1_000 {
            let interrupt = Interrupt::new();
            std::thread::scope(|scope| {
                scope.spawn(|| interrupt.raise());
                assert_eq!(runtime.block_on(interrupt.race(pending::<()>())), None);
            });
        }
    }

    #[tokio::test]
    async fn a_race_with_grace_ends_with_the_future_or_after_the_grace() {
        let interrupt = Interrupt::new();
        assert_eq!(interrupt.race_with_grace(ready(3)).await, Some(3));
        // The future ends only because the interrupt is raised, so within the grace.
        let raiser = interrupt.clone();
        let raised = interrupt.race(pending::<()>());
        let (settled, ()) =
            tokio::join!(interrupt.race_with_grace(raised), async move { raiser.raise() });
        assert_eq!(settled, Some(None));
        let start = Instant::now();
        assert_eq!(interrupt.race_with_grace(pending::<()>()).await, None);
        assert!(start.elapsed() >= GRACE);
    }
}
