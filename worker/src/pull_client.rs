//! [`PullClient`]: starts pulls, and keeps the buffers that they fill.

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
/// A pull fills a second buffer, so the caller's values are whole while it is under way, unless
/// pulls are in place.
#[derive(Debug)]
pub(crate) struct PullClient {
    caller: Arc<Caller>,
    timeout: Duration,
    /// Whether pulls of all values fill the buffer of the caller's parameters.
    in_place: bool,
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
    pub(crate) fn new(caller: Arc<Caller>, timeout: Duration, in_place: bool) -> PullClient {
        let buffers = Arc::default();
        let row_pulls = RowPulls::default();
        PullClient { caller, timeout, in_place, buffers, row_pulls }
    }

    /// Starts a pull of all values into `params`, for the step of a token or the newest.
    pub(crate) fn start<'a>(
        &self,
        params: &'a mut Params,
        token: Option<GlobalStep>,
        replica_values: ReplicaValues,
    ) -> ParamsPull<'a> {
        let plan = params.plan.clone();
        let replica_values = (replica_values == ReplicaValues::Keep).then(|| own_values(params));
        // The device copies from the pages of pinned parameters, which a failed pull would lose.
        let in_place = self.in_place && params.buffer.pinned().is_none();
        let mut buffer = match in_place {
            true => std::mem::replace(&mut params.buffer, AlignedBuffer::of_bytes(0)),
            false => self.buffers.take_like(&params.buffer, plan.bytes()),
        };
        let shared = self.caller.mapped_shards();
        let state = match shared.and_then(|shared| shared.pull(&plan, &mut buffer, token)) {
            Some(MappedPullOutcome::Pulled(read)) => PullState::Ready(Some((buffer, Some(read)))),
            Some(MappedPullOutcome::Stale) => PullState::Ready(Some((buffer, None))),
            None => {
                let command = SessionCommand::Pull { plan, buffer, token };
                PullState::Requested(self.caller.call("pull", command, self.timeout))
            }
        };
        ParamsPull { call: self.call(state), params, replica_values }
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
        self.call(PullState::Requested(self.caller.call("pull", command, self.timeout)))
    }

    /// Returns a pull that failed before it was requested.
    pub(crate) fn failed(&self, error: Error) -> PullCall {
        self.call(PullState::Requested(self.caller.failed("pull", error)))
    }

    /// Returns a pull into `params` that failed before it was requested.
    pub(crate) fn failed_into<'a>(&self, params: &'a mut Params, error: Error) -> ParamsPull<'a> {
        ParamsPull { call: self.failed(error), params, replica_values: None }
    }

    fn call(&self, state: PullState) -> PullCall {
        PullCall { state, buffers: self.buffers.clone() }
    }

    /// Replaces `params` with the newest values, and returns their step.
    pub(crate) async fn newest(
        &self,
        params: &mut Params,
        replica_values: ReplicaValues,
    ) -> Result<GlobalStep, Error> {
        let read = self.start(params, None, replica_values).await?;
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
        PullCall { state: PullState::Requested(call), buffers: Arc::default() }
    }

    /// Completes the pull of one variable: copies the values into `values`. Returns what was read,
    /// or `None` if the token's step has passed.
    pub(crate) fn poll_copied(
        &mut self,
        context: &mut Context<'_>,
        values: &mut [u8],
    ) -> Poll<Result<Option<ReadPoint>, Error>> {
        let (buffer, read) = ready!(self.poll_values(context))?;
        if read.is_some() {
            values.copy_from_slice(&buffer.bytes()[..values.len()]);
        }
        self.buffers.keep(buffer);
        Poll::Ready(Ok(read))
    }

    /// Takes the buffer of values that were copied from shared memory, if it is still here.
    fn take_copied(&mut self) -> Option<AlignedBuffer> {
        match &mut self.state {
            PullState::Ready(copied) => copied.take().map(|(buffer, _)| buffer),
            PullState::Requested(_) => None,
        }
    }

    /// Completes the pull with its buffer, which has the values unless the token's step has passed.
    fn poll_values(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(AlignedBuffer, Option<ReadPoint>), Error>> {
        Poll::Ready(match &mut self.state {
            PullState::Ready(state) => state.take().ok_or(Error::Ended { doing: "pull" }),
            PullState::Requested(call) => match ready!(Pin::new(call).poll(context)) {
                Ok(Reply::Pulled { buffer, read }) => Ok((buffer, Some(read))),
                Ok(Reply::Stale { buffer }) => Ok((buffer, None)),
                Ok(_) => Err(Error::Ended { doing: "pull" }),
                Err(error) => Err(error),
            },
        })
    }
}

/// A pull of all values into parameters. Completes with what was read, or `None` if the token's step
/// has passed.
///
/// If the pull is in place, the parameters have no memory meanwhile. They get other memory, of
/// zeros, if it ends without its buffer: with an error, or because it is dropped.
#[derive(Debug)]
pub(crate) struct ParamsPull<'a> {
    call: PullCall,
    params: &'a mut Params,
    /// The values that stay the replica's own, if they stay, in the order of
    /// [`ShardingPlan::replica_ranges`].
    replica_values: Option<Vec<u8>>,
}

impl<'a> ParamsPull<'a> {
    /// A pull that a test answers in place of a session.
    #[cfg(test)]
    pub(crate) fn requested(call: OperationFuture, params: &'a mut Params) -> ParamsPull<'a> {
        ParamsPull { call: PullCall::requested(call), params, replica_values: None }
    }

    /// Returns whether this pull holds the memory of the parameters.
    fn is_in_place(&self) -> bool {
        !self.params.buffer.is_of(self.params.plan.bytes())
    }

    /// Gives the parameters a buffer with values for all variables but those of the replica.
    /// Returns their former buffer.
    fn set_values(&mut self, buffer: AlignedBuffer) -> AlignedBuffer {
        let former = std::mem::replace(&mut self.params.buffer, buffer);
        let mut own = self.replica_values.as_deref().unwrap_or_default();
        let plan = &self.params.plan;
        for range in plan.replica_ranges().iter().filter(|_| self.replica_values.is_some()) {
            let (values, rest) = own.split_at(range.len());
            self.params.buffer.bytes_mut()[range.clone()].copy_from_slice(values);
            own = rest;
        }
        former
    }
}

impl Future for ParamsPull<'_> {
    type Output = Result<Option<ReadPoint>, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let (buffer, read) = ready!(this.call.poll_values(context))?;
        let in_place = this.is_in_place();
        let free = match read.is_some() || in_place {
            true => this.set_values(buffer),
            false => buffer,
        };
        if !in_place {
            this.call.buffers.keep(free);
        }
        if let Some(read) = &read {
            this.params.step = read.step;
        }
        Poll::Ready(Ok(read))
    }
}

impl Drop for ParamsPull<'_> {
    fn drop(&mut self) {
        if self.is_in_place() {
            let bytes = self.params.plan.bytes();
            let copied = self.call.take_copied();
            self.set_values(copied.unwrap_or_else(|| AlignedBuffer::of_bytes(bytes)));
        }
    }
}

/// Copies the values that each replica changes by itself.
fn own_values(params: &Params) -> Vec<u8> {
    let bytes = params.buffer.bytes();
    let own = params.plan.replica_ranges().iter();
    own.flat_map(|range| bytes[range.clone()].iter().copied()).collect()
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Waker;

    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::runtime::SubmittedOperations;
    use crate::session::GradientCounts;
    use crate::testing::plans::plan_of;

    /// A model with a variable that replicas keep, whose values are 7; the others are 1.
    fn params() -> Params {
        let f32 = |name| VariableSpec::f32(name, [2]).unwrap();
        let mut params = Params::new(plan_of(vec![f32("w"), f32("own").local()], 1));
        params.view_mut::<f32>("w").unwrap().fill(1.0);
        params.view_mut::<f32>("own").unwrap().fill(7.0);
        params
    }

    fn client(in_place: bool) -> (PullClient, SubmittedOperations) {
        let (caller, orders) = Caller::without_session();
        (PullClient::new(Arc::new(caller), Duration::MAX, in_place), orders)
    }

    fn buffer_of(params: &Params, value: f32) -> AlignedBuffer {
        let mut buffer = AlignedBuffer::of_bytes(params.plan.bytes());
        buffer
            .bytes_mut()
            .chunks_exact_mut(4)
            .for_each(|it| it.copy_from_slice(&value.to_le_bytes()));
        buffer
    }

    fn read(step: u64) -> ReadPoint {
        ReadPoint { step: GlobalStep(step), gradients: GradientCounts::default() }
    }

    /// Returns the values of both variables.
    fn values(params: &Params) -> [f32; 2] {
        let [w, own] = params.views::<f32, 2>(["w", "own"]).unwrap();
        assert!(w[0] == w[1] && own[0] == own[1], "{w:?} {own:?}");
        [w[0], own[0]]
    }

    /// Pulls, answers as `answer` does, and returns the values afterwards.
    fn pull(
        in_place: bool,
        keep: ReplicaValues,
        answer: impl FnOnce(&Params) -> Result<Reply, Error>,
    ) -> ([f32; 2], u64) {
        let (client, mut orders) = client(in_place);
        let mut params = params();
        let reply = answer(&params);
        let context = &mut Context::from_waker(Waker::noop());
        let mut call = client.start(&mut params, None, keep);
        assert!(Pin::new(&mut call).poll(context).is_pending());
        orders.next().answer(reply);
        assert!(Pin::new(&mut call).poll(context).is_ready());
        drop(call);
        assert_eq!(params.buffer.bytes().len(), params.plan.bytes());
        (values(&params), params.step())
    }

    #[test]
    fn a_pull_replaces_the_values_but_those_of_the_replica() {
        let pulled =
            |params: &Params| Ok(Reply::Pulled { buffer: buffer_of(params, 3.0), read: read(9) });
        for in_place in [false, true] {
            assert_eq!(pull(in_place, ReplicaValues::Keep, pulled), ([3.0, 7.0], 9));
            assert_eq!(pull(in_place, ReplicaValues::Replace, pulled), ([3.0, 3.0], 9));
        }
    }

    #[test]
    fn a_pull_without_values_leaves_the_parameters_alone_unless_it_is_in_place() {
        let stale = |params: &Params| Ok(Reply::Stale { buffer: buffer_of(params, 2.0) });
        let failed = |_: &Params| Err(Error::Fenced);
        assert_eq!(pull(false, ReplicaValues::Keep, stale), ([1.0, 7.0], 0));
        assert_eq!(pull(false, ReplicaValues::Keep, failed), ([1.0, 7.0], 0));
        assert_eq!(pull(true, ReplicaValues::Keep, stale), ([2.0, 7.0], 0));
        assert_eq!(pull(true, ReplicaValues::Keep, failed), ([0.0, 7.0], 0));
    }

    #[test]
    fn a_pull_in_place_that_is_dropped_leaves_memory_to_pull_into() {
        let (client, mut orders) = client(true);
        let mut params = params();
        let pages = params.buffer.bytes().as_ptr();
        for _ in 0..2 {
            drop(client.start(&mut params, None, ReplicaValues::Keep));
            assert_eq!(values(&params), [0.0, 7.0]);
        }
        assert_ne!(params.buffer.bytes().as_ptr(), pages, "the session may still write the first");
        drop((orders.next(), orders.next()));
    }

    #[test]
    fn pulls_in_place_need_no_second_buffer() {
        let (client, mut orders) = client(true);
        let mut params = params();
        let pages = params.buffer.bytes().as_ptr();
        for step in 1..4 {
            let context = &mut Context::from_waker(Waker::noop());
            let mut call = client.start(&mut params, None, ReplicaValues::Keep);
            orders.next().answer_with(|command| match command {
                SessionCommand::Pull { buffer, .. } => {
                    Ok(Reply::Pulled { buffer, read: read(step) })
                }
                other => panic!("another command: {other:?}"),
            });
            assert!(Pin::new(&mut call).poll(context).is_ready());
            drop(call);
            assert_eq!((params.buffer.bytes().as_ptr(), params.step()), (pages, step));
        }
        assert!(client.buffers.0.lock().unwrap().is_empty());
    }
}
