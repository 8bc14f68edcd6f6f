//! The end of an execution: the outputs of a function, its panic, or the reason why it did not
//! begin.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};

use super::function_pool::NoThread;
use super::server_core::ServerCore;
use crate::cancel::CancelFlag;
use crate::functions::FunctionResult;
use crate::service::{ExecutionId, Failure};
use crate::value::Value;
use pushpull_common::panic_message::message_of;

/// Reports the end of an execution when it is dropped, so that none is lost.
pub(super) struct EndedExecution {
    pub(super) core: Arc<ServerCore>,
    pub(super) execution: ExecutionId,
    pub(super) result: Option<Result<Vec<(String, Value)>, Failure>>,
}

impl Drop for EndedExecution {
    fn drop(&mut self) {
        // Without a result the function did not begin, or its future was dropped.
        let result = self.result.take().unwrap_or(Err(Failure::Cancelled));
        self.core.returned(self.execution, result);
    }
}

/// The payload of a panic.
type Panic = Box<dyn std::any::Any + Send>;

/// The outcome of a function that has returned or panicked. The error of one that was cancelled may
/// be that of the cancellation, which says nothing about another execution.
pub(super) fn result_of(
    result: Result<FunctionResult, Panic>,
    cancelled: &CancelFlag,
) -> Result<Vec<(String, Value)>, Failure> {
    match result {
        Ok(Ok(outputs)) => {
            let mut values = outputs.into_values();
            // An output is charged by its own size, also while it stays on the server.
            Value::detach_all(values.iter_mut().map(|(_, value)| value));
            Ok(values)
        }
        Ok(Err(_)) if cancelled.is_raised() => Err(Failure::Cancelled),
        Ok(Err(error)) => {
            let (detail, retry) = error.into_parts();
            Err(Failure::Failed { retry, detail })
        }
        Err(panic) => Err(Failure::Panicked { detail: message_of(&*panic) }),
    }
}

/// The failure of a function that has no thread.
pub(super) fn failure_without(reason: NoThread) -> Failure {
    match reason {
        NoThread::Ended => Failure::Cancelled,
        NoThread::Refused(error) => {
            let detail = format!("no thread could be started for it: {error}");
            Failure::Failed { retry: true, detail }
        }
    }
}

/// A future whose panics are values.
pub(super) struct CatchUnwind<F>(pub(super) F);

impl<F: Future + Unpin> Future for CatchUnwind<F> {
    type Output = Result<F::Output, Panic>;

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let future = std::pin::Pin::new(&mut self.0);
        match catch_unwind(AssertUnwindSafe(|| future.poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::functions::FunctionError;

    #[test]
    fn the_error_of_a_function_that_was_cancelled_is_the_cancellation() {
        let fails = || Ok(Err(FunctionError::new("nobody waits for it any more")));
        let flag = CancelFlag::default();
        assert!(matches!(result_of(fails(), &flag), Err(Failure::Failed { retry: false, .. })));
        flag.raise();
        assert!(matches!(result_of(fails(), &flag), Err(Failure::Cancelled)));
        // What it has done all the same is its outcome, and so is its fault.
        let done = result_of(Ok(Ok(Value::from(1_i64).into())), &flag);
        assert_eq!(done.map(|outputs| outputs.len()).ok(), Some(1));
        let panicked = result_of(Err(Box::new("at the end")), &flag);
        assert!(matches!(panicked, Err(Failure::Panicked { .. })));
    }
}
