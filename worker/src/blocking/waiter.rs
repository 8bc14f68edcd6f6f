//! [`Waiter`]: waits on the calling thread.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use pushpull_net::{AdaptiveSpin, SpinWait, timed_yield};

use crate::config::WorkerConfig;
use crate::error::Error;
use crate::interrupt::Interrupt;
use crate::runtime::SessionRunner;

/// Waits for futures of this crate on the calling thread, and runs their session meanwhile if
/// possible. Then the same thread writes the request and reads the answer, and no thread has to be
/// woken on this side.
///
/// It keeps the thread's waker from call to call, as most callers stay on one thread.
#[derive(Clone, Debug, Default)]
pub struct Waiter {
    cached: Option<(Arc<Sleeper>, Waker)>,
    /// The waits while another thread runs the session.
    spin: Option<AdaptiveSpin>,
    /// Runs the session; `None` before there is one.
    pub runner: Option<Arc<SessionRunner>>,
    /// Cancels the calls of [`Waiter::call`] and [`Waiter::call_apart`].
    pub(crate) interrupt: Interrupt,
}

impl Waiter {
    /// Returns a waiter whose calls the interrupt of the configuration cancels, or one of its own.
    pub(crate) fn new(config: &WorkerConfig) -> Waiter {
        let interrupt = config.interrupt.clone().unwrap_or_default();
        Waiter { interrupt, ..Waiter::default() }
    }

    /// Starts an operation and waits for it, unless the interrupt is raised.
    pub(crate) fn call<T, F>(
        &mut self,
        doing: &'static str,
        begin: impl FnOnce() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        match self.interrupt.is_raised() {
            true => Err(Error::Interrupted { doing }),
            false => self.await_started(doing, begin),
        }
    }

    /// Waits for an operation until it is done or the interrupt is raised. An operation that is
    /// done already is not interrupted.
    pub(crate) fn await_started<T, F>(
        &mut self,
        doing: &'static str,
        begin: impl FnOnce() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let runner = self.runner.clone();
        let leading = runner.as_ref().and_then(|runner| runner.enter());
        let mut future = pin!(begin());
        if let Poll::Ready(result) = self.poll(future.as_mut()) {
            return result;
        }
        let interrupt = self.interrupt.clone();
        let raced = interrupt.race(future);
        let result = match leading {
            Some(leading) => leading.wait(raced),
            None => self.wait_apart(raced),
        };
        result.unwrap_or(Err(Error::Interrupted { doing }))
    }

    /// Waits as [`Waiter::call`] does while another thread runs the session.
    pub(crate) fn call_apart<T>(
        &mut self,
        doing: &'static str,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let interrupt = self.interrupt.clone();
        let result = match interrupt.is_raised() {
            true => None,
            false => self.wait_apart(interrupt.race(future)),
        };
        result.unwrap_or(Err(Error::Interrupted { doing }))
    }

    /// Starts an operation and waits for it.
    pub fn wait<F: Future>(&mut self, begin: impl FnOnce() -> F) -> F::Output {
        let runner = self.runner.clone();
        let Some(leading) = runner.as_ref().and_then(|runner| runner.enter()) else {
            return self.wait_apart(begin());
        };
        let mut future = pin!(begin());
        match self.poll(future.as_mut()) {
            Poll::Ready(output) => output,
            Poll::Pending => leading.wait(future),
        }
    }

    /// Polls an operation once. One that needs no answer, such as a pull from shared memory, is
    /// ready at once, whichever thread runs the session.
    fn poll<F: Future>(&mut self, future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(&self.waker().1))
    }

    /// Waits while another thread runs the session.
    pub fn wait_apart<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        let (sleeper, waker) = self.waker().clone();
        let mut context = Context::from_waker(&waker);
        if self.spin.is_none() {
            self.spin = self.runner.as_ref().map(|runner| AdaptiveSpin::new(runner.apart()));
        }
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                return output;
            }
            let mut wait = self.spin.as_ref().map(|spin| spin.begin(Instant::now()));
            sleeper.sleep(wait.as_mut());
            if let (Some(spin), Some(wait)) = (&mut self.spin, wait) {
                spin.waited(Instant::now(), &wait);
            }
        }
    }

    /// Returns a waker of the calling thread.
    fn waker(&mut self) -> &(Arc<Sleeper>, Waker) {
        let thread = std::thread::current();
        let id = thread.id();
        let cached = self.cached.take().filter(|(cached, _)| cached.thread.id() == id);
        self.cached.insert(cached.unwrap_or_else(|| {
            let sleeper = Arc::new(Sleeper { thread, is_woken: AtomicBool::new(false) });
            (sleeper.clone(), Waker::from(sleeper))
        }))
    }
}

/// A waiting thread.
#[derive(Debug)]
struct Sleeper {
    thread: Thread,
    is_woken: AtomicBool,
}

impl Sleeper {
    /// Polls as long as the wait allows, then sleeps. Returns once woken, and possibly without a
    /// reason.
    fn sleep(&self, mut wait: Option<&mut SpinWait>) {
        while !self.is_woken.swap(false, Ordering::Acquire) {
            if !wait.as_mut().is_some_and(|wait| wait.polls(Instant::now(), timed_yield)) {
                // A wake in the meantime makes this return at once.
                return std::thread::park();
            }
            std::hint::spin_loop();
        }
    }
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::sync::oneshot;

    use super::*;

    /// Waits for a value from another thread, and returns the waker that was used.
    fn wait_once(waiter: &mut Waiter) -> Waker {
        let (sender, request) = mpsc::channel::<oneshot::Sender<u32>>();
        let other = std::thread::spawn(move || request.recv().unwrap().send(7).unwrap());
        let (reply, receiver) = oneshot::channel();
        sender.send(reply).unwrap();
        assert_eq!(waiter.wait_apart(receiver), Ok(7));
        other.join().unwrap();
        waiter.cached.clone().unwrap().1
    }

    #[test]
    fn a_waker_serves_the_calls_of_one_thread() {
        let mut waiter = Waiter::default();
        let first = wait_once(&mut waiter);
        assert!(wait_once(&mut waiter).will_wake(&first));
        // A worker may be moved to another thread between two calls.
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!wait_once(&mut waiter).will_wake(&first))).join().unwrap();
        });
        assert!(!wait_once(&mut waiter).will_wake(&first), "the kept waker is another thread's");
    }
}
