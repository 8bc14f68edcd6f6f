//! [`BucketReducer`]: a thread that reduces buckets while the program computes the next ones.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use pushpull_collective::Ring;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::bucket_plan::BucketPlan;
use super::gradient_codecs::GradientCodecs;
use super::reductions::{Agreement, agree, reduce};
use super::ring_worker::RingWish;
use crate::blocking::waiter::Waiter;
use crate::contained::contained;
use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::sharding_plan::ShardingPlan;

/// A thread that has the ring during a streamed step, and reduces the buckets of the step in the
/// order of their plan.
///
/// Dropping it stops an operation under way, which gives the ring up, and waits for the thread. A
/// blocked operation notices that within 50 ms.
#[derive(Debug)]
pub(super) struct BucketReducer {
    /// `None` once the thread is to stop.
    orders: Option<Orders>,
    ended: oneshot::Receiver<ReducedBuckets>,
    thread: Option<JoinHandle<()>>,
}

/// The ends of the channels to the thread.
#[derive(Debug)]
struct Orders {
    commands: SyncSender<Command>,
    /// Stops an operation under way when it is dropped.
    _stop: oneshot::Sender<()>,
}

#[derive(Debug)]
enum Command {
    /// Reduces the next bucket.
    Reduce(AlignedBuffer),
    /// Ends the ring for all ranks.
    GiveUp(String),
}

/// The work of the thread: a step.
pub(super) struct StreamedWork {
    pub(super) ring: Ring,
    pub(super) codecs: GradientCodecs,
    pub(super) plan: Arc<ShardingPlan>,
    pub(super) buckets: Arc<BucketPlan>,
    /// The global step on which the ranks agree before they reduce its first bucket; `None` if they
    /// do not.
    pub(super) agrees_on: Option<u64>,
}

/// The end of a streamed step on its thread.
#[derive(Debug)]
pub(super) struct ReducedBuckets {
    pub(super) ring: Ring,
    pub(super) codecs: GradientCodecs,
    /// The memory of the first buckets; means if there was no error and all ranks want the step.
    pub(super) buckets: Vec<AlignedBuffer>,
    /// The agreement of the ranks; `None` before the first bucket.
    pub(super) agreement: Option<Agreement>,
    /// Whether all operations were performed that the step needed, until it was dropped.
    pub(super) result: Result<(), Error>,
}

impl BucketReducer {
    /// Starts the thread. `work` is called once it runs.
    ///
    /// # Errors
    /// [`Error::Thread`].
    pub(super) fn start(
        buckets: usize,
        work: impl FnOnce() -> StreamedWork,
    ) -> Result<BucketReducer, Error> {
        // No command waits for room: there is one for each bucket at most, and one that gives up.
        let (commands, received) = sync_channel(buckets + 1);
        let (begin, begun) = sync_channel::<StreamedWork>(1);
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let run = move || {
            let Ok(work) = begun.recv() else { return };
            // The step may be gone, but then nobody waits for the ring.
            let _ = end.send(run(work, &received, stopped));
        };
        let thread = std::thread::Builder::new().name("pushpull-reduce".to_owned()).spawn(run);
        let thread = thread.map_err(|error| Error::Thread { reason: error.to_string() })?;
        let orders = Orders { commands, _stop: stop };
        // The thread waits for it.
        let _ = begin.send(work());
        Ok(BucketReducer { orders: Some(orders), ended, thread: Some(thread) })
    }

    /// Has the next bucket of the plan reduced. If the thread has ended, [`BucketReducer::ended`]
    /// has the reason.
    pub(super) fn reduce(&self, bucket: AlignedBuffer) {
        self.order(Command::Reduce(bucket));
    }

    /// Has the ring given up after the buckets before. Otherwise as [`BucketReducer::reduce`].
    pub(super) fn give_up(&self, reason: String) {
        self.order(Command::GiveUp(reason));
    }

    fn order(&self, command: Command) {
        if let Some(orders) = &self.orders {
            // A thread that has ended takes none; its end says why.
            let _ = orders.commands.send(command);
        }
    }

    /// Waits until all buckets are reduced, or an error. Dropping the future changes nothing.
    ///
    /// # Errors
    /// [`Error::Thread`] if the thread has ended without a result, and its ring with it.
    pub(super) async fn ended(&mut self) -> Result<ReducedBuckets, Error> {
        (&mut self.ended).await.map_err(|_| lost())
    }

    /// Stops the thread and waits for it.
    ///
    /// # Errors
    /// As [`BucketReducer::ended`].
    pub(super) fn stop(&mut self) -> Result<ReducedBuckets, Error> {
        self.halt();
        self.ended.try_recv().map_err(|_| lost())
    }

    fn halt(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic has dropped the sender of the result.
            let _ = thread.join();
        }
    }
}

impl Drop for BucketReducer {
    fn drop(&mut self) {
        self.halt();
    }
}

fn lost() -> Error {
    Error::Thread { reason: "the thread that reduces gradients has ended".to_owned() }
}

/// Performs the operations of a step. Its ring waits as before afterwards.
fn run(
    mut work: StreamedWork,
    commands: &Receiver<Command>,
    stopped: oneshot::Receiver<()>,
) -> ReducedBuckets {
    let was_blocking = work.ring.is_blocking();
    let mut buckets = Vec::new();
    let mut agreement = None;
    let operations = contained("the reduction of gradients", || {
        Waiter::default().wait_apart(async {
            work.ring.set_blocking(true)?;
            reduce_all(&mut work, commands, stopped, &mut buckets, &mut agreement).await
        })
    });
    let StreamedWork { mut ring, codecs, .. } = work;
    let result = match operations {
        Ok(result) => result,
        Err(panicked) => {
            ring.try_give_up(&panicked.to_string());
            Err(panicked)
        }
    };
    let result = match ring.set_blocking(was_blocking) {
        Ok(()) => result,
        Err(error) => {
            ring.try_give_up(&error.to_string());
            result.and(Err(error.into()))
        }
    };
    ReducedBuckets { ring, codecs, buckets, agreement, result }
}

async fn reduce_all(
    work: &mut StreamedWork,
    commands: &Receiver<Command>,
    mut stopped: oneshot::Receiver<()>,
    reduced: &mut Vec<AlignedBuffer>,
    agreement: &mut Option<Agreement>,
) -> Result<(), Error> {
    let buckets = work.buckets.clone();
    for bucket in buckets.buckets() {
        let mut buffer = match commands.recv() {
            Ok(Command::Reduce(buffer)) => buffer,
            Ok(Command::GiveUp(reason)) => return Err(work.ring.give_up(&reason).await.into()),
            Err(_) => return Ok(()),
        };
        // After a drop the complete buckets that wait are left, but for the first: whether the ring
        // is given up does not depend on when this thread runs.
        if agreement.is_some() && matches!(stopped.try_recv(), Err(TryRecvError::Closed)) {
            return Ok(());
        }
        let operations = async {
            let agreed = match (*agreement, work.agrees_on) {
                (Some(agreed), _) => agreed,
                (None, Some(step)) => agree(&mut work.ring, step, RingWish::Step).await?,
                (None, None) => Agreement::STEP,
            };
            *agreement = Some(agreed);
            if agreed.wish == RingWish::Step {
                let bytes = &mut buffer.bytes_mut()[..bucket.range.len()];
                let StreamedWork { ring, codecs, plan, .. } = &mut *work;
                reduce(ring, codecs, plan, &bucket.variables, bytes).await?;
            }
            Ok::<Agreement, Error>(agreed)
        };
        let agreed = tokio::select! {
            biased;
            agreed = operations => agreed?,
            // The operation gives the ring up when it is dropped.
            _ = &mut stopped => return Ok(()),
        };
        reduced.push(buffer);
        if agreed.wish != RingWish::Step {
            break;
        }
    }
    Ok(())
}
