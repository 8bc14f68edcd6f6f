//! Calls under way, as futures.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use super::call_session::CallReply;
use super::error::ServiceError;
use super::outputs::Outputs;
use super::runtime::client_core::ReplyFuture;

/// A call under way: a future of its outputs. Dropping it cancels the call.
#[derive(Debug)]
#[must_use = "dropping it cancels the call"]
pub struct Running {
    reply: ReplyFuture,
}

impl Running {
    pub(crate) fn new(reply: ReplyFuture) -> Running {
        Running { reply }
    }
}

impl Future for Running {
    type Output = Result<Outputs, ServiceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let reply = std::task::ready!(Pin::new(&mut self.reply).poll(context))?;
        Poll::Ready(match reply {
            CallReply::Done(values) => Ok(Outputs::from(values)),
            _ => Err(ServiceError::Ended { doing: "call a function".to_owned() }),
        })
    }
}

/// Calls under way together: a future of all their outputs, or of the first error.
///
/// A wake-up polls only the calls that have caused it. So the cost of all wake-ups grows with the
/// number of calls, not with its square.
#[derive(Debug)]
pub(crate) struct RunningSet {
    /// The calls without outputs yet, and the outputs of the others.
    calls: Vec<Result<Outputs, Running>>,
    waiting: usize,
    woken: Arc<WokenCalls>,
}

/// The calls to be polled, and the task to be woken for them.
#[derive(Debug)]
struct WokenCalls {
    state: Mutex<(Vec<usize>, Option<Waker>)>,
}

/// Wakes a set for one of its calls.
struct CallWaker {
    index: usize,
    woken: Arc<WokenCalls>,
}

impl WokenCalls {
    fn lock(&self) -> MutexGuard<'_, (Vec<usize>, Option<Waker>)> {
        // A list has no invariants over two of its changes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for CallWaker {
    fn wake(self: Arc<Self>) {
        let mut state = self.woken.lock();
        state.0.push(self.index);
        let task = state.1.take();
        drop(state);
        task.into_iter().for_each(Waker::wake);
    }
}

impl RunningSet {
    pub(crate) fn new(calls: Vec<Running>) -> RunningSet {
        let waiting = calls.len();
        let woken = WokenCalls { state: Mutex::new(((0..waiting).collect(), None)) };
        RunningSet { calls: calls.into_iter().map(Err).collect(), waiting, woken: Arc::new(woken) }
    }

    fn poll_call(&mut self, index: usize) -> Result<(), ServiceError> {
        let Err(running) = &mut self.calls[index] else { return Ok(()) };
        let waker = Waker::from(Arc::new(CallWaker { index, woken: self.woken.clone() }));
        match Pin::new(running).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(outputs) => {
                self.calls[index] = Ok(outputs?);
                self.waiting -= 1;
            }
            Poll::Pending => {}
        }
        Ok(())
    }
}

impl Future for RunningSet {
    type Output = Result<Vec<Outputs>, ServiceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut woken = {
            let mut state = self.woken.lock();
            state.1 = Some(context.waker().clone());
            std::mem::take(&mut state.0)
        };
        // Of several errors at once the first in the order of the calls is returned.
        woken.sort_unstable();
        for index in woken {
            if let Err(error) = self.poll_call(index) {
                return Poll::Ready(Err(error));
            }
        }
        if self.waiting > 0 {
            return Poll::Pending;
        }
        let calls = std::mem::take(&mut self.calls);
        Poll::Ready(Ok(calls.into_iter().filter_map(Result::ok).collect()))
    }
}
