//! [`PullClient`]: starts pulls, and keeps the buffers that they fill.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use pushpull_common::ids::{GlobalStep, VariableId};
use pushpull_common::tensor::Element;

use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::params::Params;
use crate::gradients::row_ids;
use crate::gradients::row_requests::RowPulls;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::runtime::{Caller, MappedPullOutcome, OperationFuture};
use crate::session::{ReadPoint, Reply, SessionCommand};

/// Starts the pulls of a worker or a reader, from shared memory or by the session.
///
/// A pull fills a second buffer, so the caller's values are whole while it is under way.
#[derive(Debug)]
pub(crate) struct PullClient {
    caller: Arc<Caller>,
    timeout: Duration,
    /// Buffers of completed pulls, for reuse.
    buffers: Arc<PullBuffers>,
    row_pulls: RowPulls,
}

/// What a pull of all values does with the variables that each replica changes by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplicaValues {
    /// The replica's values stay.
    Keep,
    /// The servers' values replace them.
    Replace,
}

impl PullClient {
    pub(crate) fn new(caller: Arc<Caller>, timeout: Duration) -> PullClient {
        PullClient { caller, timeout, buffers: Arc::default(), row_pulls: RowPulls::default() }
    }

    /// Starts a pull of all values into `params`, for the step of a token or the newest. The result
    /// borrows neither.
    pub(crate) fn start(
        &self,
        params: &Params,
        token: Option<GlobalStep>,
        replica_values: ReplicaValues,
    ) -> PullCall {
        let plan = params.plan.clone();
        let mut buffer = self.buffers.take_like(&params.buffer, plan.bytes());
        // A child of `fork` would pin values in the reader slot of its parent.
        let shared = (!self.caller.is_forked()).then(|| self.caller.mapped_shards());
        let state = match shared.and_then(|shared| shared.pull(&plan, &mut buffer, token)) {
            Some(MappedPullOutcome::Pulled(read)) => PullState::Ready(Some((buffer, Some(read)))),
            Some(MappedPullOutcome::Stale) => PullState::Ready(Some((buffer, None))),
            None => {
                let command = SessionCommand::Pull { plan, buffer, token };
                PullState::Requested(self.caller.call("pull", command, self.timeout))
            }
        };
        self.call(state, replica_values)
    }

    /// Starts a pull of one dense variable, for the step of a token or the newest.
    pub(crate) fn start_variable(
        &self,
        plan: &Arc<ShardingPlan>,
        variable: VariableId,
        token: Option<GlobalStep>,
    ) -> PullCall {
        let plan = plan.clone();
        let buffer = self.buffers.take(plan.range(variable).len());
        let command = SessionCommand::PullVariable { plan, variable, buffer, token };
        let state = PullState::Requested(self.caller.call("pull", command, self.timeout));
        self.call(state, ReplicaValues::Replace)
    }

    /// Returns a pull that failed before it was requested.
    pub(crate) fn failed(&self, error: Error) -> PullCall {
        let state = PullState::Requested(self.caller.failed("pull", error));
        self.call(state, ReplicaValues::Keep)
    }

    fn call(&self, state: PullState, replica_values: ReplicaValues) -> PullCall {
        PullCall { state, buffers: self.buffers.clone(), replica_values }
    }

    /// Replaces `params` with the newest values, and returns their step.
    pub(crate) async fn newest(
        &self,
        params: &mut Params,
        replica_values: ReplicaValues,
    ) -> Result<GlobalStep, Error> {
        let mut call = self.start(params, None, replica_values);
        let read = poll_fn(|context| call.poll_into(context, params)).await?;
        read.map(|read| read.step).ok_or(Error::Ended { doing: "pull" })
    }

    /// Pulls rows of a sparse variable into `out`, for the step of a token or the newest. Returns
    /// what was read, or `None` if the token's step has passed.
    pub(crate) async fn rows<T: Element>(
        &self,
        plan: &Arc<ShardingPlan>,
        name: &str,
        ids: &[u64],
        out: &mut [T],
        token: Option<GlobalStep>,
    ) -> Result<Option<ReadPoint>, Error> {
        let variable = row_ids::check::<T>(plan, name, ids, out.len())?;
        let (row_requests, buffer) = self.row_pulls.prepare(plan, variable, ids, size_of_val(out));
        let plan = plan.clone();
        let rows = row_requests.clone();
        let command = SessionCommand::PullRows { plan, buffer, rows, token };
        match self.caller.call("pull rows", command, self.timeout).await? {
            Reply::Pulled { buffer, read } => {
                self.row_pulls.put(row_requests, buffer, bytemuck::cast_slice_mut(out));
                Ok(Some(read))
            }
            Reply::Stale { buffer } => {
                self.row_pulls.keep(row_requests, buffer);
                Ok(None)
            }
            _ => Err(Error::Ended { doing: "pull rows" }),
        }
    }
}

/// A pull under way.
#[derive(Debug)]
pub(crate) struct PullCall {
    state: PullState,
    buffers: Arc<PullBuffers>,
    replica_values: ReplicaValues,
}

#[derive(Debug)]
enum PullState {
    /// The session was asked.
    Requested(OperationFuture),
    /// The values were copied from shared memory: `None` for what was read if the token's step has
    /// passed. The whole is `None` once it was taken.
    Ready(Option<(AlignedBuffer, Option<ReadPoint>)>),
}

impl PullCall {
    /// A pull that a test answers in place of a session.
    #[cfg(test)]
    pub(crate) fn requested(call: OperationFuture) -> PullCall {
        let buffers = Arc::default();
        let replica_values = ReplicaValues::Keep;
        PullCall { state: PullState::Requested(call), buffers, replica_values }
    }

    /// Completes the pull: moves the values into `params` and returns what was read, or `None` if
    /// the token's step has passed.
    pub(crate) fn poll_into(
        &mut self,
        context: &mut Context<'_>,
        params: &mut Params,
    ) -> Poll<Result<Option<ReadPoint>, Error>> {
        let keeps = self.replica_values == ReplicaValues::Keep;
        self.poll_with(context, |mut buffer, read| {
            std::mem::swap(&mut params.buffer, &mut buffer);
            if keeps {
                for range in params.plan.replica_ranges() {
                    let own = &buffer.bytes()[range.clone()];
                    params.buffer.bytes_mut()[range.clone()].copy_from_slice(own);
                }
            }
            params.step = read.step;
            buffer
        })
    }

    /// Completes the pull of one variable: copies the values into `values`. Returns as
    /// [`PullCall::poll_into`].
    pub(crate) fn poll_copied(
        &mut self,
        context: &mut Context<'_>,
        values: &mut [u8],
    ) -> Poll<Result<Option<ReadPoint>, Error>> {
        self.poll_with(context, |buffer, _| {
            values.copy_from_slice(&buffer.bytes()[..values.len()]);
            buffer
        })
    }

    /// Completes the pull with `put`, which takes the values and returns a buffer for the next
    /// pull.
    fn poll_with(
        &mut self,
        context: &mut Context<'_>,
        put: impl FnOnce(AlignedBuffer, &ReadPoint) -> AlignedBuffer,
    ) -> Poll<Result<Option<ReadPoint>, Error>> {
        let state = match &mut self.state {
            PullState::Ready(state) => state.take().ok_or(Error::Ended { doing: "pull" }),
            PullState::Requested(call) => match ready!(Pin::new(call).poll(context)) {
                Ok(Reply::Pulled { buffer, read }) => Ok((buffer, Some(read))),
                Ok(Reply::Stale { buffer }) => Ok((buffer, None)),
                Ok(_) => Err(Error::Ended { doing: "pull" }),
                Err(error) => Err(error),
            },
        };
        Poll::Ready(state.map(|(buffer, read)| {
            let free = match &read {
                Some(read) => put(buffer, read),
                None => buffer,
            };
            self.buffers.keep(free);
            read
        }))
    }
}

/// A pool of buffers of completed pulls.
#[derive(Debug, Default)]
struct PullBuffers(Mutex<Vec<AlignedBuffer>>);

impl PullBuffers {
    /// Returns a buffer of this length on the heap, with arbitrary content.
    fn take(&self, bytes: usize) -> AlignedBuffer {
        let fits = |buffer: &AlignedBuffer| buffer.is_of(bytes) && buffer.pinned().is_none();
        self.find(fits).unwrap_or_else(|| AlignedBuffer::of_bytes(bytes))
    }

    /// Returns a buffer of this length in memory of the kind of another, with arbitrary content.
    fn take_like(&self, other: &AlignedBuffer, bytes: usize) -> AlignedBuffer {
        let Some(pinned) = other.pinned() else { return self.take(bytes) };
        let fits = |buffer: &AlignedBuffer| buffer.is_of(bytes) && buffer.pinned().is_some();
        self.find(fits).unwrap_or_else(|| AlignedBuffer::pinned_like(pinned, bytes))
    }

    fn find(&self, fits: impl Fn(&AlignedBuffer) -> bool) -> Option<AlignedBuffer> {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = buffers.iter().position(fits);
        found.map(|found| buffers.swap_remove(found))
    }

    /// Keeps a buffer; drops the oldest if the pool is full.
    fn keep(&self, buffer: AlignedBuffer) {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = (buffers.len() >= BUFFERS_MAX).then(|| buffers.remove(0));
        buffers.push(buffer);
        drop(buffers);
        drop(oldest);
    }
}

/// The most buffers in the pool: the number of pulls that are usually under way at once.
const BUFFERS_MAX: usize = 4;
