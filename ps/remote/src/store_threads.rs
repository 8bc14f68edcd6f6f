//! The threads that run the requests of a storage, and callers that wait for them.

use std::future::Future;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::fault::StoreError;

/// A small runtime that belongs to one storage.
///
/// A caller waits on a channel, so it may be any thread, one of another runtime too. It stops
/// waiting at its limit, even if a request blocks its thread. Background work, such as renewing a
/// lease, goes on while nobody waits.
#[derive(Debug)]
pub(crate) struct StoreThreads {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl StoreThreads {
    pub(crate) fn start() -> io::Result<StoreThreads> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(4)
            .thread_name("pushpull-remote")
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        Ok(StoreThreads { runtime: Some(runtime), handle })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs a future and waits for its result, at most for `limit`. After that it is dropped.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        limit: Duration,
        future: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (sender, receiver) = sync_channel(1);
        let task = self.handle.spawn(async move {
            // Nobody waits any more after the limit.
            let _ = sender.send(future.await);
        });
        match receiver.recv_timeout(limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                task.abort();
                Err(StoreError::timed_out(limit, None))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(StoreError::new(io::ErrorKind::Other, "the request panicked"))
            }
        }
    }
}

impl Drop for StoreThreads {
    fn drop(&mut self) {
        // Waits for nothing: a request may hang, and a drop may happen on a thread of a runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_waits_no_longer_than_its_limit() {
        let threads = StoreThreads::start().unwrap();
        let limit = Duration::from_millis(20);
        let hang = std::future::pending::<Result<(), StoreError>>();
        let error = threads.wait(limit, hang).unwrap_err();
        assert_eq!(error.kind, io::ErrorKind::TimedOut);
        assert_eq!(error.text, "no answer within 0.02 s");
        let error = threads.wait(Duration::from_secs(60), async {
            if true {
                panic!("planted")
            };
            Ok(())
        });
        assert_eq!(error.unwrap_err().text, "the request panicked");
    }

    /// Servers open and drop storages inside the runtime of their host.
    #[test]
    fn a_caller_may_be_a_thread_of_a_runtime() {
        let host = Builder::new_current_thread().build().unwrap();
        let value = host.block_on(async {
            let threads = StoreThreads::start().unwrap();
            threads.wait(Duration::from_secs(60), async { Ok(7) })
        });
        assert_eq!(value.unwrap(), 7);
    }
}
