//! [`Pause`]: waits for a time, on any executor.

use std::pin::Pin;
use std::sync::mpsc::{self, Sender};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::oneshot;

/// A future that is ready after a time.
///
/// While a worker has no session there is no runtime whose timer could serve, so a thread waits.
/// Pauses are rare: a session takes them only after a failure, or if a hook asks for one. Dropping
/// a pause ends its thread.
#[derive(Debug)]
pub struct Pause {
    waiting: Option<WaitingThread>,
}

#[derive(Debug)]
struct WaitingThread {
    over: oneshot::Receiver<()>,
    keep: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Pause {
    /// Begins a pause of this length.
    pub fn new(length: Duration) -> Pause {
        let (keep, dropped) = mpsc::channel::<()>();
        let (done, over) = oneshot::channel();
        let wait = move || {
            // Nothing is sent: this returns when the time is over, or when the pause is dropped.
            let _ = dropped.recv_timeout(length);
            let _ = done.send(());
        };
        match thread::Builder::new().name("pause".to_owned()).spawn(wait) {
            Ok(thread) => {
                let keep = Some(keep);
                let thread = Some(thread);
                Pause { waiting: Some(WaitingThread { over, keep, thread }) }
            }
            // Without a thread to wait, this one does.
            Err(_) => {
                thread::sleep(length);
                Pause { waiting: None }
            }
        }
    }
}

impl Future for Pause {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.waiting {
            None => Poll::Ready(()),
            Some(waiting) => Pin::new(&mut waiting.over).poll(context).map(|_| ()),
        }
    }
}

impl Drop for WaitingThread {
    fn drop(&mut self) {
        drop(self.keep.take());
        if let Some(thread) = self.thread.take() {
            // It cannot panic, and it ends as soon as `keep` is dropped.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn a_pause_lasts_for_its_length() {
        let start = Instant::now();
        let length = Duration::from_millis(20);
        Pause::new(length).await;
        assert!(start.elapsed() >= length);
    }

    /// The test would hang if the thread did not end.
    #[test]
    fn a_dropped_pause_ends_its_thread() {
        drop(Pause::new(Duration::from_secs(1 << 20)));
    }
}
