//! What a worker and a reader share: the session, and the operations that need no token.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::future::poll_fn;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::data_set::DataSet;
use pushpull_common::error::Chain;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{Incarnation, ShardId, TaskId};
use pushpull_common::protocol::message::{EndReason, Role};
use pushpull_common::protocol::{Features, Message, Refusal, message};
use pushpull_net::Connector;

use crate::config::WorkerConfig;
use crate::contained::contained;
use crate::error::{ConfigError, Error, UnresponsiveShard, UnresponsiveShards};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::outcome::DataBegun;
use crate::pause::Pause;
use crate::pull_client::PullClient;
use crate::runtime::{Caller, SessionThread};
use crate::session::{JoinedEpoch, Reply, ServerSettings, SessionCommand, SessionConfig};

/// The session of a worker or a reader with the servers of a cluster.
#[derive(Debug)]
pub(crate) struct SessionClient {
    pub(crate) config: WorkerConfig,
    pub(crate) caller: Arc<Caller>,
    /// Ends the session when dropped.
    _thread: SessionThread,
    pub(crate) owner: ShardId,
    pub(crate) settings: ServerSettings,
    pub(crate) pulls: PullClient,
}

impl SessionClient {
    /// Starts a session and connects to the step owner.
    pub(crate) async fn connect(config: WorkerConfig, role: Role) -> Result<SessionClient, Error> {
        SessionClient::connect_to(config, role, None).await
    }

    /// Starts a session and connects to one shard; without one to the step owner.
    pub(crate) async fn connect_to(
        config: WorkerConfig,
        role: Role,
        shard: Option<ShardId>,
    ) -> Result<SessionClient, Error> {
        config.check_codecs()?;
        let cluster = &config.cluster;
        let task = config.task.clone();
        let ps_job = match cluster.variables_job() {
            Ok(job) => job,
            Err(source) => return Err(ConfigError::NoVariablesJob { task, source }.into()),
        };
        let owner: TaskId = cluster.step_owner().ok_or(ConfigError::NoPs { task: task.clone() })?;
        let mut connectors = BTreeMap::new();
        for (index, address) in cluster.ps_tasks() {
            let connector = Connector::new(address)
                .credentials(config.credentials.clone())
                .task(TaskId::new(ps_job, index));
            connector.check_path().map_err(|error| ConfigError::NoServer {
                task: task.clone(),
                reason: Chain(&error).to_string(),
            })?;
            connectors.insert(index, Arc::new(connector));
        }
        let addresses = cluster.ps_tasks().map(|(index, address)| (index, address.to_owned()));
        let owner = ShardId { task: owner.index, shard: 0 };
        let start = SessionConfig {
            task,
            role,
            owner,
            incarnation: Incarnation(RandomState::new().build_hasher().finish()),
            checksums: config.checksums,
            shared_memory: config.shared_memory,
            values: config.values.map(|codec| codec.encoding()),
            identity: Identity::new().with("ps", cluster.ps_identity()).with_protocol(),
            expectations: config.expectations,
            features: Features::ALL,
            addresses: addresses.collect(),
            progress_interval: config.progress.is_some().then_some(config.progress_interval),
        };
        let progress = config.progress.clone();
        let thread = SessionThread::start(start, connectors, progress, config.busy_poll)
            .map_err(|error| Error::Thread { reason: error.to_string() })?;
        let caller = thread.caller().clone();
        caller.limit(config.limit);
        let first = vec![shard.unwrap_or(owner)];
        let settings = open(&caller, first, config.connect_timeout).await?;
        let pulls = PullClient::new(caller.clone(), config.timeout, config.in_place_pulls);
        Ok(SessionClient { config, caller, _thread: thread, owner, settings, pulls })
    }

    /// Connects to the step owner and to every shard of a plan. Returns these shards in that order,
    /// and the settings in their welcomes.
    pub(crate) async fn open(
        &self,
        plan: &ShardingPlan,
    ) -> Result<(Vec<ShardId>, ServerSettings), Error> {
        // The step owner comes first, with or without variables: it is also initialized first.
        let others = plan.shards().iter().copied().filter(|&shard| shard != self.owner);
        let shards: Vec<ShardId> = std::iter::once(self.owner).chain(others).collect();
        let timeout = self.config.connect_timeout;
        let settings = open(&self.caller, shards.clone(), timeout).await?;
        Ok((shards, settings))
    }

    /// Sends an idempotent request, and returns its answer and the answer's body.
    pub(crate) async fn request(
        &self,
        doing: &'static str,
        shard: ShardId,
        message: impl Into<Message>,
        body: Bytes,
        timeout: Duration,
    ) -> Result<(Message, Vec<u8>), Error> {
        let message = message.into();
        let command = SessionCommand::Request { shard, message, body, wait_ms: None };
        match self.caller.call(doing, command, timeout).await? {
            Reply::Answer { message, body } => Ok((message, body)),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Waits until the training has ended on all workers, for at most `within`, and returns why.
    /// `None` if it goes on.
    pub(crate) async fn await_end(&self, within: Duration) -> Result<Option<EndReason>, Error> {
        let doing = "wait for the end of the training";
        let shard = self.owner;
        let message = message::AwaitEnd {}.into();
        let body = Bytes::new();
        // Zero would be no limit.
        let wait_ms = u32::try_from(within.as_millis().max(1)).ok();
        let command = SessionCommand::Request { shard, message, body, wait_ms };
        let timeout = within.saturating_add(self.config.timeout);
        match self.caller.call(doing, command, timeout).await {
            Ok(Reply::Answer { message: Message::Ended(ended), .. }) => Ok(Some(ended.reason)),
            Ok(_) => Err(Error::Ended { doing }),
            Err(Error::Refused { refusal: Refusal::Deadline { .. }, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits until a shard's variables have values, and returns the digest of its catalogue.
    pub(crate) async fn await_ready(
        &self,
        shard: ShardId,
        timeout: Duration,
    ) -> Result<[u8; 32], Error> {
        let doing = "wait for the chief to initialize the variables";
        let since = Instant::now();
        let deadline = Deadline::after(timeout);
        let ended = |awaited| {
            let waited_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
            Error::Refused { doing, shard, refusal: Refusal::Deadline { waited_ms, awaited } }
        };
        let mut last = None;
        loop {
            let remaining = deadline.remaining();
            // Only the shard knows the chief. It answers once per interval, for the report.
            let interval = self.config.progress_interval.max(AWAIT_READY_MIN);
            let wait = interval.min(remaining);
            let wait_ms = self.config.progress.as_ref().and(u32::try_from(wait.as_millis()).ok());
            let message = message::AwaitReady {}.into();
            let body = Bytes::new();
            let command = SessionCommand::Request { shard, message, body, wait_ms };
            let asked = Instant::now();
            match self.caller.call(doing, command, remaining).await {
                Ok(Reply::Answer { message: Message::Ready(ready), .. }) => {
                    return Ok(ready.digest);
                }
                Ok(_) => return Err(Error::Ended { doing }),
                Err(Error::Refused { refusal: Refusal::Deadline { awaited, .. }, .. }) => {
                    if deadline.remaining() <= AWAIT_READY_MIN || self.caller.is_at_limit() {
                        return Err(ended(awaited));
                    }
                    self.report_wait(shard, awaited.to_string())?;
                    last = Some(awaited);
                }
                // The deadline has passed just before an answer. The one before names the chief. A
                // shard that has been silent for longer is itself what the wait was for.
                Err(error @ Error::Timeout { .. }) => {
                    let last = last.filter(|_| asked.elapsed() <= wait + AWAIT_READY_MIN);
                    return Err(last.map_or(error, ended));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Reports what a shard waits for.
    fn report_wait(&self, shard: ShardId, awaited: String) -> Result<(), Error> {
        let Some(progress) = &self.config.progress else { return Ok(()) };
        let address = self.config.cluster.ps_tasks().find(|&(task, _)| task == shard.task);
        let address = address.map(|(_, address)| address.to_owned()).unwrap_or_default();
        let last = format!("connected, waits for {awaited}");
        let shards = UnresponsiveShards(vec![UnresponsiveShard { shard, address, last }]);
        contained("on_progress", || progress(&shards))
    }

    /// Waits until a shard's variables have values, as [`SessionClient::await_ready`] does. Once
    /// `wait` has passed the shard refuses with [`Refusal::Deadline`].
    pub(crate) async fn ready_within(
        &self,
        shard: ShardId,
        wait: Duration,
    ) -> Result<[u8; 32], Error> {
        let doing = "look for the values of the variables";
        let wait_ms = u32::try_from(wait.as_millis()).ok();
        let message = message::AwaitReady {}.into();
        let body = Bytes::new();
        let command = SessionCommand::Request { shard, message, body, wait_ms };
        let timeout = wait.saturating_add(self.config.timeout);
        match self.caller.call(doing, command, timeout).await? {
            Reply::Answer { message: Message::Ready(ready), .. } => Ok(ready.digest),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Waits until the chief has given all shards of a plan consistent values, and adopts the plan.
    /// Returns their restore epoch.
    pub(crate) async fn await_values(
        &self,
        plan: &Arc<ShardingPlan>,
        shards: &[ShardId],
    ) -> Result<JoinedEpoch, Error> {
        let deadline = Deadline::after(self.config.connect_timeout);
        loop {
            for &shard in shards {
                if self.await_ready(shard, deadline.remaining()).await? != plan.catalogue().digest()
                {
                    return Err(self.differs(plan, shard).await?);
                }
            }
            match self.adopt(plan, deadline.remaining()).await {
                // A shard has lost its values since it answered.
                Err(error) if is_outdated(&error) && !deadline.has_passed() => {
                    deadline.pause().await;
                }
                adopted => return adopted,
            }
        }
    }

    /// Declares the data set on the step owner, or ensures that it has the same one.
    pub(crate) async fn declare_data(&self, set: &DataSet) -> Result<DataBegun, Error> {
        let doing = "declare the data set";
        let shard = self.owner;
        let timeout = self.config.timeout;
        let declare = message::DeclareData::from(set);
        match self.request(doing, shard, declare, Bytes::new(), timeout).await {
            Ok((Message::DataDeclared(declared), _)) => {
                let message::DataDeclared { begun, unspent } = declared;
                Ok(DataBegun { batches: begun, unspent })
            }
            Ok(_) => Err(Error::Ended { doing }),
            Err(Error::Refused { shard, refusal: Refusal::DataSet { differs }, .. }) => {
                Err(Error::DataDiffers { shard, differs: differs.to_string() })
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the error that describes how a shard's catalogue differs.
    pub(crate) async fn differs(
        &self,
        plan: &ShardingPlan,
        shard: ShardId,
    ) -> Result<Error, Error> {
        let theirs = self.fetch_catalogue(shard).await?;
        let differs = plan.catalogue().difference(&theirs);
        let differs = differs.unwrap_or_else(|| "their placement".to_owned());
        Ok(Error::Differs { shard, differs })
    }

    /// Adds to the refusal of a catalogue how the shard's own catalogue differs.
    pub(crate) async fn explain(&self, plan: &ShardingPlan, error: Error) -> Error {
        let Error::Refused { shard, refusal: refusal @ Refusal::Catalogue { .. }, .. } = &error
        else {
            return error;
        };
        let theirs = self.fetch_catalogue(*shard).await.ok();
        let differs = theirs.and_then(|theirs| plan.catalogue().difference(&theirs));
        let differs = differs.unwrap_or_else(|| refusal.to_string());
        Error::Differs { shard: *shard, differs }
    }

    /// Fetches the catalogue that a shard holds.
    pub(crate) async fn fetch_catalogue(&self, shard: ShardId) -> Result<Catalogue, Error> {
        let timeout = self.config.timeout;
        let body = Bytes::new();
        let doing = "fetch the catalogue";
        let fetch = message::FetchCatalogue {};
        let (_, body) = self.request(doing, shard, fetch, body, timeout).await?;
        Catalogue::decode(&body)
            .map_err(|error| Error::ForeignCatalogue { shard, reason: Chain(&error).to_string() })
    }

    /// Announces the plan to the session, and waits until its shards are in one restore epoch.
    /// Returns that epoch.
    pub(crate) async fn adopt(
        &self,
        plan: &Arc<ShardingPlan>,
        timeout: Duration,
    ) -> Result<JoinedEpoch, Error> {
        let command = SessionCommand::Join { plan: plan.clone() };
        match self.caller.call("join", command, timeout).await? {
            Reply::Joined(epoch) => Ok(epoch),
            _ => Err(Error::Ended { doing: "join" }),
        }
    }
}

/// The shortest wait for the chief that is asked of a shard. It checks its waits every 50 ms.
const AWAIT_READY_MIN: Duration = Duration::from_millis(100);

/// Whether a shard has refused because its state has changed since the chief or the worker last
/// asked: it was restarted, or is in another restore epoch.
pub(crate) fn is_outdated(error: &Error) -> bool {
    let outdated = |refusal: &Refusal| {
        matches!(refusal, Refusal::NotInitialized {} | Refusal::RestoreEpoch { .. })
    };
    matches!(error, Error::Refused { refusal, .. } if outdated(refusal))
}

/// The deadline of several operations together.
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(timeout: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(timeout))
    }

    pub(crate) fn remaining(&self) -> Duration {
        let remaining = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        self.0.map_or(Duration::MAX, remaining)
    }

    pub(crate) fn has_passed(&self) -> bool {
        self.remaining().is_zero()
    }

    /// Waits before another attempt, until the deadline at most: a shard refuses at once, for as
    /// long as a restore takes.
    pub(crate) async fn pause(&self) {
        Pause::new(ATTEMPT_PAUSE.min(self.remaining())).await;
    }
}

/// The pause between two attempts to join.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(50);

async fn open(
    caller: &Caller,
    shards: Vec<ShardId>,
    timeout: Duration,
) -> Result<ServerSettings, Error> {
    match caller.call("connect", SessionCommand::Open { shards }, timeout).await? {
        Reply::Opened(settings) => Ok(settings),
        _ => Err(Error::Ended { doing: "connect" }),
    }
}

/// Drives futures concurrently until all are done, and returns their outputs in order.
pub(crate) async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn attempts_to_join_have_a_pause() {
        let since = Instant::now();
        Deadline::after(Duration::from_secs(9)).pause().await;
        assert!(since.elapsed() >= ATTEMPT_PAUSE);
    }
}
