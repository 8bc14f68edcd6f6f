//! The file jobs of a shard: saves, restores and flushes, on threads that may block on a disk.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use pushpull_checkpoint::CheckpointStorage;
use tokio::sync::Notify;
use tokio::task::spawn_blocking;

use crate::shard::ShardInput;
use crate::shard::file_work::flush::Flush;
use crate::shard::file_work::restore_work::RestoreWork;
use crate::shard::file_work::shard_save::ShardSave;

/// The file jobs of a shard that have not begun.
///
/// At most one save or restore runs at a time, and at most one flush.
#[derive(Debug)]
pub(super) struct FileJobs {
    storage: Option<Arc<dyn CheckpointStorage>>,
    queue: RefCell<VecDeque<FileJob>>,
    queued: Notify,
    flush: RefCell<Option<Box<Flush>>>,
    flush_due: Notify,
}

/// A job on checkpoint files.
#[derive(Debug)]
pub(super) enum FileJob {
    Save(Box<ShardSave>),
    Restore(Box<RestoreWork>),
}

impl FileJobs {
    /// Creates an empty queue of jobs on checkpoints in this storage.
    pub(super) fn new(storage: Option<Arc<dyn CheckpointStorage>>) -> FileJobs {
        let queued = Notify::new();
        let flush_due = Notify::new();
        let queue = RefCell::default();
        let flush = RefCell::default();
        FileJobs { storage, queue, queued, flush, flush_due }
    }

    pub(super) fn add(&self, job: FileJob) {
        self.queue.borrow_mut().push_back(job);
        self.queued.notify_one();
    }

    pub(super) fn add_flush(&self, flush: Box<Flush>) {
        *self.flush.borrow_mut() = Some(flush);
        self.flush_due.notify_one();
    }

    /// Runs the next save or restore. Returns its result as an input of the shard.
    pub(super) async fn next(&self) -> ShardInput<'static> {
        loop {
            let job = self.queue.borrow_mut().pop_front();
            match (job, self.storage.clone()) {
                (Some(FileJob::Save(save)), Some(storage)) => {
                    let connection = save.connection;
                    let request = save.request;
                    let saved = spawn_blocking(move || save.run(storage)).await;
                    // A panic of the user's storage ends the server.
                    let result =
                        saved.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
                    return ShardInput::ShardSaved { connection, request, result };
                }
                (Some(FileJob::Restore(restore)), Some(storage)) => {
                    match spawn_blocking(move || restore.run(storage)).await {
                        Ok(result) => return ShardInput::RestoreAdvanced(Box::new(result)),
                        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
                    }
                }
                _ => self.queued.notified().await,
            }
        }
    }

    /// Runs the next flush. Returns its result as an input of the shard.
    pub(super) async fn next_flush(&self) -> ShardInput<'static> {
        loop {
            let flush = self.flush.borrow_mut().take();
            if let Some(flush) = flush {
                let flushed = spawn_blocking(move || flush.run()).await;
                return ShardInput::Flushed(flushed.unwrap_or_else(|panic| Err(panic.to_string())));
            }
            self.flush_due.notified().await;
        }
    }
}
