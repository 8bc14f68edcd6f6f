//! [`PanicSlot`]: the panic that ends a shard's thread.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::task::Poll;

use tokio::sync::Notify;

/// The value of a panic.
type Panic = Box<dyn Any + Send>;

/// The first panic on a shard's thread: in a rule, an event callback or a checkpoint storage of the
/// user, or by a fault of the shard.
///
/// The runtime would drop a panic of one of the thread's tasks, such as that of a connection. It
/// ends the server instead, whichever task meets it.
///
/// Invariant: nothing uses the shard after a panic, because it may have been changed halfway. Its
/// durable state is then that of a crash at the same moment.
#[derive(Debug, Default)]
pub(super) struct PanicSlot {
    is_set: Cell<bool>,
    panic: RefCell<Option<Panic>>,
    changed: Notify,
}

impl PanicSlot {
    /// Returns whether the thread has panicked.
    pub(super) fn is_set(&self) -> bool {
        self.is_set.get()
    }

    /// Calls `work`, which uses the shard. Returns `None` after a panic, in it or before.
    pub(super) fn guard<R>(&self, work: impl FnOnce() -> R) -> Option<R> {
        if self.is_set() {
            return None;
        }
        catch_unwind(AssertUnwindSafe(work)).map_err(|panic| self.set(panic)).ok()
    }

    /// Runs a future until it ends or panics.
    pub(super) async fn contain(&self, future: impl Future<Output = ()>) {
        let mut future = pin!(future);
        std::future::poll_fn(|context| {
            let poll = || future.as_mut().poll(context);
            catch_unwind(AssertUnwindSafe(poll)).unwrap_or_else(|panic| {
                self.set(panic);
                Poll::Ready(())
            })
        })
        .await;
    }

    /// Waits for a panic.
    pub(super) async fn wait(&self) {
        while !self.is_set() {
            self.changed.notified().await;
        }
    }

    /// Continues the panic, if there was one.
    pub(super) fn resume(&self) {
        if let Some(panic) = self.panic.take() {
            resume_unwind(panic);
        }
    }

    fn set(&self, panic: Panic) {
        self.is_set.set(true);
        self.panic.borrow_mut().get_or_insert(panic);
        self.changed.notify_one();
    }
}
