//! What a worker and a reader have in common: a session, and the variables it is about.

use std::collections::hash_map::RandomState;
use std::future::poll_fn;
use std::hash::{BuildHasher, Hasher};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{GlobalStep, Incarnation, ShardId, TaskId, VariableId};
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::{Message, Refusal, message};
use pushpull_common::tensor::Element;

use crate::config::WorkerConfig;
use crate::error::{ConnectError, Error, JoinError};
use crate::params::{Buffer, Params};
use crate::row_requests::RowPulls;
use crate::rows;
use crate::runtime::{Call, Caller, Direct, SessionThread};
use crate::session::{Command, Read, Reply, Start, Welcomed};
use crate::sharding_plan::ShardingPlan;

/// A session with the servers of a cluster.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) config: WorkerConfig,
    pub(crate) caller: Arc<Caller>,
    /// Ends the session when it is dropped.
    _thread: SessionThread,
    pub(crate) owner: ShardId,
    pub(crate) welcomed: Welcomed,
    /// Buffers that pulls have left, for the next.
    pub(crate) buffers: Arc<Buffers>,
    row_pulls: RowPulls,
}

impl Client {
    /// Starts a session and connects to the step owner.
    pub(crate) async fn connect(config: WorkerConfig, role: Role) -> Result<Client, ConnectError> {
        config.check_codecs()?;
        let cluster = &config.cluster;
        let task = config.task.clone();
        let owner: TaskId =
            cluster.step_owner().ok_or(ConnectError::NoPs { task: task.clone() })?;
        let indices = cluster.task_indices("ps").unwrap_or_default();
        let addresses = indices.into_iter().filter_map(|index| {
            let address = cluster.task_address("ps", index).ok()?;
            Some((index, address.to_owned()))
        });
        let owner = ShardId { task: owner.index, shard: 0 };
        let start = Start {
            task,
            role,
            owner,
            incarnation: Incarnation(RandomState::new().build_hasher().finish()),
            checksums: config.checksums,
            shared_memory: config.shared_memory,
            values: config.values.map(|codec| codec.encoding()),
            identity: Identity::new().with("ps", cluster.ps_identity()),
            addresses: addresses.collect(),
            progress_interval: config.progress.is_some().then_some(config.progress_interval),
        };
        let thread = SessionThread::start(start, config.progress.clone(), config.busy_poll)
            .map_err(|source| ConnectError::Thread { source })?;
        let caller = thread.caller().clone();
        let welcomed = open(&caller, vec![owner], config.connect_timeout).await?;
        let buffers = Arc::default();
        let row_pulls = RowPulls::default();
        Ok(Client { config, caller, _thread: thread, owner, welcomed, buffers, row_pulls })
    }

    /// Connects to the step owner and to every shard a plan uses, and returns them in this order, with
    /// what they said.
    pub(crate) async fn open(
        &self,
        plan: &ShardingPlan,
    ) -> Result<(Vec<ShardId>, Welcomed), Error> {
        // The owner first, whether it holds variables or not: it is also initialized first.
        let others = plan.shards().iter().copied().filter(|&shard| shard != self.owner);
        let shards: Vec<ShardId> = std::iter::once(self.owner).chain(others).collect();
        let timeout = self.config.connect_timeout;
        let welcomed = open(&self.caller, shards.clone(), timeout).await?;
        Ok((shards, welcomed))
    }

    /// Sends a request that may be sent again, and returns its answer and the answer's body.
    pub(crate) async fn request(
        &self,
        doing: &'static str,
        shard: ShardId,
        message: impl Into<Message>,
        body: Bytes,
        timeout: Duration,
    ) -> Result<(Message, Vec<u8>), Error> {
        let command = Command::Request { shard, message: message.into(), body };
        match self.caller.call(doing, command, timeout).await? {
            Reply::Answer { message, body } => Ok((message, body)),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Waits until a shard's variables have values; the digest of its catalogue.
    pub(crate) async fn await_ready(
        &self,
        shard: ShardId,
        timeout: Duration,
    ) -> Result<[u8; 32], Error> {
        let doing = "wait for the chief to initialize the variables";
        let body = Bytes::new();
        match self.request(doing, shard, message::AwaitReady {}, body, timeout).await?.0 {
            Message::Ready(ready) => Ok(ready.digest),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Waits until the chief has given the variables of a plan values that belong together, and
    /// joins them.
    pub(crate) async fn await_values(
        &self,
        plan: &Arc<ShardingPlan>,
        shards: &[ShardId],
    ) -> Result<(), JoinError> {
        let deadline = Deadline::after(self.config.connect_timeout);
        loop {
            for &shard in shards {
                if self.await_ready(shard, deadline.left()).await? != plan.catalogue().digest() {
                    return Err(self.differs(plan, shard).await?);
                }
            }
            match self.joined(plan, deadline.left()).await {
                // One has lost its values since it was asked.
                Err(error) if has_moved_on(&error) && !deadline.has_passed() => {}
                joined => return Ok(joined?),
            }
        }
    }

    /// Says in words what a shard's catalogue differs in.
    pub(crate) async fn differs(
        &self,
        plan: &ShardingPlan,
        shard: ShardId,
    ) -> Result<JoinError, JoinError> {
        let theirs = self.fetch_catalogue(shard).await?;
        let differs = plan.catalogue().difference(&theirs);
        let differs = differs.unwrap_or_else(|| "their placement".to_owned());
        Ok(JoinError::Differs { shard, differs })
    }

    /// Says in words what a refused catalogue differs in.
    pub(crate) async fn explain(&self, plan: &ShardingPlan, error: Error) -> JoinError {
        let Error::Refused { shard, refusal: refusal @ Refusal::Catalogue { .. }, .. } = &error
        else {
            return error.into();
        };
        let theirs = self.fetch_catalogue(*shard).await.ok();
        let differs = theirs.and_then(|theirs| plan.catalogue().difference(&theirs));
        let differs = differs.unwrap_or_else(|| refusal.to_string());
        JoinError::Differs { shard: *shard, differs }
    }

    /// The catalogue that a shard holds.
    pub(crate) async fn fetch_catalogue(&self, shard: ShardId) -> Result<Catalogue, JoinError> {
        let (timeout, body) = (self.config.timeout, Bytes::new());
        let doing = "fetch the catalogue";
        let fetch = message::FetchCatalogue {};
        let (_, body) = self.request(doing, shard, fetch, body, timeout).await?;
        Ok(Catalogue::decode(&body)?)
    }

    /// Tells the session what the variables are, once their shards live in one restore epoch.
    pub(crate) async fn joined(
        &self,
        plan: &Arc<ShardingPlan>,
        timeout: Duration,
    ) -> Result<(), Error> {
        let command = Command::Joined { plan: plan.clone() };
        self.caller.call("join", command, timeout).await.map(|_| ())
    }

    /// Replaces all of `params` by the newest values; the step they are of.
    pub(crate) async fn pull(&self, params: &mut Params) -> Result<GlobalStep, Error> {
        let mut call = self.pull_for(params, None);
        let read = poll_fn(|context| call.poll_into(context, params)).await?;
        read.map(|read| read.step).ok_or(Error::Ended { doing: "pull" })
    }

    /// Asks for the values of one variable, likewise.
    pub(crate) fn pull_variable(
        &self,
        plan: &Arc<ShardingPlan>,
        variable: VariableId,
        token: Option<GlobalStep>,
    ) -> PullCall {
        let plan = plan.clone();
        let buffer = self.buffers.take(plan.range(variable).len());
        let command = Command::PullVariable { plan, variable, buffer, token };
        let found = Found::Asked(self.caller.call("pull", command, self.config.timeout));
        PullCall { found, buffers: self.buffers.clone() }
    }

    /// Values that cannot even be asked for, and why.
    pub(crate) fn refuse_pull(&self, error: Error) -> PullCall {
        let found = Found::Asked(self.caller.failed("pull", error));
        PullCall { found, buffers: self.buffers.clone() }
    }

    /// Asks for values for the step of a token, or for whatever there are, to be put into `params`; none
    /// of `self` is borrowed by the answer.
    pub(crate) fn pull_for(&self, params: &Params, token: Option<GlobalStep>) -> PullCall {
        let plan = params.plan.clone();
        let mut buffer = self.buffers.take(plan.bytes());
        let found = match self.caller.mapped_shards().pull(&plan, &mut buffer, token) {
            Some(Direct::Pulled(read)) => Found::Direct(Some((buffer, Some(read)))),
            Some(Direct::Stale) => Found::Direct(Some((buffer, None))),
            None => {
                let command = Command::Pull { plan, buffer, token };
                Found::Asked(self.caller.call("pull", command, self.config.timeout))
            }
        };
        PullCall { found, buffers: self.buffers.clone() }
    }
}

impl Client {
    /// Pulls rows of a sparse variable into `out`, for the step of a token or of whatever step they
    /// are; what they are of, or `None` if the token's step has passed.
    pub(crate) async fn pull_rows<T: Element>(
        &self,
        plan: &Arc<ShardingPlan>,
        name: &str,
        ids: &[u64],
        out: &mut [T],
        token: Option<GlobalStep>,
    ) -> Result<Option<Read>, Error> {
        let variable = rows::check::<T>(plan, name, ids, out.len())?;
        let (row_requests, buffer) = self.row_pulls.ask(plan, variable, ids, size_of_val(out));
        let (plan, asked) = (plan.clone(), row_requests.clone());
        let command = Command::PullRows { plan, buffer, wanted: asked, token };
        match self.caller.call("pull rows", command, self.config.timeout).await? {
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

/// Values that have been asked for.
#[derive(Debug)]
pub(crate) struct PullCall {
    found: Found,
    buffers: Arc<Buffers>,
}

#[derive(Debug)]
enum Found {
    /// Nothing yet: a session was asked.
    Asked(Call),
    /// In memory that is lent: what the buffer's values are of, if the token's step has not passed. None
    /// once it was taken.
    Direct(Option<(Buffer, Option<Read>)>),
}

impl PullCall {
    /// Values that a session was asked for.
    #[cfg(test)]
    pub(crate) fn asked(call: Call) -> PullCall {
        PullCall { found: Found::Asked(call), buffers: Arc::default() }
    }

    /// Puts all of the values, once they are there, into the parameters they were asked for; what they
    /// are of, or `None` if the token's step has passed.
    pub(crate) fn poll_into(
        &mut self,
        context: &mut Context<'_>,
        params: &mut Params,
    ) -> Poll<Result<Option<Read>, Error>> {
        self.poll_with(context, |mut buffer, read| {
            std::mem::swap(&mut params.buffer, &mut buffer);
            params.step = read.step;
            buffer
        })
    }

    /// The same for values that are copied.
    pub(crate) fn poll_copied(
        &mut self,
        context: &mut Context<'_>,
        values: &mut [u8],
    ) -> Poll<Result<Option<Read>, Error>> {
        self.poll_with(context, |buffer, _| {
            values.copy_from_slice(&buffer.bytes()[..values.len()]);
            buffer
        })
    }

    /// The same for `put`, which leaves a buffer for the next pull.
    fn poll_with(
        &mut self,
        context: &mut Context<'_>,
        put: impl FnOnce(Buffer, &Read) -> Buffer,
    ) -> Poll<Result<Option<Read>, Error>> {
        let found = match &mut self.found {
            Found::Direct(found) => found.take().ok_or(Error::Ended { doing: "pull" }),
            Found::Asked(call) => match ready!(Pin::new(call).poll(context)) {
                Ok(Reply::Pulled { buffer, read }) => Ok((buffer, Some(read))),
                Ok(Reply::Stale { buffer }) => Ok((buffer, None)),
                Ok(_) => Err(Error::Ended { doing: "pull" }),
                Err(error) => Err(error),
            },
        };
        Poll::Ready(found.map(|(buffer, read)| {
            let left = match &read {
                Some(read) => put(buffer, read),
                None => buffer,
            };
            self.buffers.keep(left);
            read
        }))
    }
}

/// Buffers that are kept: those of pulls that are usually under way at once.
const BUFFERS_MAX: usize = 4;

/// Buffers that pulls have left.
#[derive(Debug, Default)]
pub(crate) struct Buffers(Mutex<Vec<Buffer>>);

impl Buffers {
    /// A buffer of this length, of whatever content.
    pub(crate) fn take(&self, bytes: usize) -> Buffer {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = buffers.iter().position(|buffer| buffer.is_of(bytes));
        let kept = fits.map(|fits| buffers.swap_remove(fits));
        drop(buffers);
        kept.unwrap_or_else(|| Buffer::of_bytes(bytes))
    }

    /// Keeps a buffer, in place of the oldest if there are many.
    pub(crate) fn keep(&self, buffer: Buffer) {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = (buffers.len() >= BUFFERS_MAX).then(|| buffers.remove(0));
        buffers.push(buffer);
        drop(buffers);
        drop(oldest);
    }
}

/// Whether a shard has refused something because its state is not what it was when it was asked
/// for that state: it was restarted, or another epoch has begun there.
pub(crate) fn has_moved_on(error: &Error) -> bool {
    let moved_on = |refusal: &Refusal| {
        matches!(refusal, Refusal::NotInitialized {} | Refusal::RestoreEpoch { .. })
    };
    matches!(error, Error::Refused { refusal, .. } if moved_on(refusal))
}

/// When something that takes several operations must be done.
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(timeout: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(timeout))
    }

    pub(crate) fn left(&self) -> Duration {
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        self.0.map_or(Duration::MAX, left)
    }

    pub(crate) fn has_passed(&self) -> bool {
        self.left().is_zero()
    }
}

async fn open(caller: &Caller, shards: Vec<ShardId>, timeout: Duration) -> Result<Welcomed, Error> {
    match caller.call("connect", Command::Open { shards }, timeout).await? {
        Reply::Opened(welcomed) => Ok(welcomed),
        _ => Err(Error::Ended { doing: "connect" }),
    }
}

/// Drives futures side by side until all are done; their outputs in order.
pub(crate) async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    poll_fn(|context| {
        let mut waiting = false;
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    Poll::Ready(done) => *output = Some(done),
                    Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    outputs.into_iter().flatten().collect()
}
