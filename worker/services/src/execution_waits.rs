//! [`ExecutionWaits`]: the waits of a running function, reported to its server.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

/// Receives the cause of a function's wait, in words; `None` once the function goes on.
type WaitReport = Box<dyn Fn(Option<String>) + Send + Sync>;

/// The waits of one execution, reported to its server. A blocking function lends its thread during
/// a wait, and a passed deadline names the cause of the wait.
pub(crate) struct ExecutionWaits {
    report: WaitReport,
    /// The number of open waits; the server sees one.
    open: AtomicUsize,
}

/// A wait that is reported. Dropping it ends the wait.
struct OpenWait<'a>(&'a ExecutionWaits);

impl ExecutionWaits {
    pub(crate) fn new(report: impl Fn(Option<String>) + Send + Sync + 'static) -> ExecutionWaits {
        ExecutionWaits { report: Box::new(report), open: AtomicUsize::new(0) }
    }

    /// Waits for a future, and reports the wait unless the future is ready at once.
    pub(crate) async fn during<F: Future>(
        &self,
        awaited: impl FnOnce() -> String,
        future: F,
    ) -> F::Output {
        let mut future = pin!(future);
        let mut awaited = Some(awaited);
        let mut wait = None;
        poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(output) => {
                wait = None;
                Poll::Ready(output)
            }
            Poll::Pending => {
                wait = wait.take().or_else(|| awaited.take().map(|awaited| self.begin(awaited())));
                Poll::Pending
            }
        })
        .await
    }

    /// Replaces the reported cause of the open wait.
    pub(crate) fn say(&self, awaited: &str) {
        if self.open.load(Ordering::SeqCst) > 0 {
            (self.report)(Some(awaited.to_owned()));
        }
    }

    fn begin(&self, awaited: String) -> OpenWait<'_> {
        if self.open.fetch_add(1, Ordering::SeqCst) == 0 {
            (self.report)(Some(awaited));
        }
        OpenWait(self)
    }
}

impl Drop for OpenWait<'_> {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            (self.0.report)(None);
        }
    }
}

impl fmt::Debug for ExecutionWaits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutionWaits").field("open", &self.open).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::block_on::block_on;

    #[test]
    fn only_a_future_that_is_not_ready_is_reported() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let reports = told.clone();
        let waits = ExecutionWaits::new(move |awaited| reports.lock().unwrap().push(awaited));
        block_on(waits.during(|| "nothing".to_owned(), async {}));
        assert!(told.lock().unwrap().is_empty());
        block_on(waits.during(|| "the first".to_owned(), async {
            tokio::task::yield_now().await;
            waits.say("the second");
            waits.during(|| "inner".to_owned(), tokio::task::yield_now()).await;
        }));
        let expected = [Some("the first".to_owned()), Some("the second".to_owned()), None];
        assert_eq!(*told.lock().unwrap(), expected);
    }
}
