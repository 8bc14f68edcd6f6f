//! What a worker and a reader have in common: a session, and the variables it is about.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{GlobalStep, Incarnation, ShardId, TaskId};
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::{Message, Refusal, message};

use crate::config::WorkerConfig;
use crate::error::{ConnectError, Error, JoinError};
use crate::fanout::Plan;
use crate::params::{Buffer, Params};
use crate::runtime::SessionThread;
use crate::session::{Command, Reply, Start, Welcomed};

/// A session with the servers of a cluster.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) config: WorkerConfig,
    pub(crate) session: SessionThread,
    pub(crate) owner: ShardId,
    pub(crate) welcomed: Welcomed,
    /// A buffer that the next pull can use.
    spare: Option<Buffer>,
}

impl Client {
    /// Starts a session and connects to the step owner.
    pub(crate) async fn connect(config: WorkerConfig, role: Role) -> Result<Client, ConnectError> {
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
            identity: Identity::new().with("ps", cluster.ps_identity()),
            addresses: addresses.collect(),
            progress_interval: config.progress.is_some().then_some(config.progress_interval),
        };
        let session = SessionThread::start(start, config.progress.clone())
            .map_err(|source| ConnectError::Thread { source })?;
        let welcomed = open(&session, vec![owner], config.connect_timeout).await?;
        Ok(Client { config, session, owner, welcomed, spare: None })
    }

    /// Connects to the step owner and to every shard a plan uses, and returns them in this order.
    pub(crate) async fn open(&self, plan: &Plan) -> Result<Vec<ShardId>, Error> {
        // The owner first, whether it holds variables or not: it is also initialized first.
        let others = plan.shards().iter().copied().filter(|&shard| shard != self.owner);
        let shards: Vec<ShardId> = std::iter::once(self.owner).chain(others).collect();
        open(&self.session, shards.clone(), self.config.connect_timeout).await?;
        Ok(shards)
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
        match self.session.call(doing, command, timeout).await? {
            Reply::Answer { message, body } => Ok((message, body)),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// The newest global step the step owner has told.
    pub(crate) async fn session_step(&self) -> Result<GlobalStep, Error> {
        match self.session.call("join", Command::Step, self.config.timeout).await? {
            Reply::Step(step) => Ok(step),
            _ => Err(Error::Ended { doing: "join" }),
        }
    }

    /// Waits until a shard's variables have values; the digest of its catalogue.
    pub(crate) async fn await_ready(&self, shard: ShardId) -> Result<[u8; 32], Error> {
        let doing = "wait for the chief to initialize the variables";
        let (timeout, body) = (self.config.connect_timeout, Bytes::new());
        match self.request(doing, shard, message::AwaitReady {}, body, timeout).await?.0 {
            Message::Ready(ready) => Ok(ready.digest),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// The catalogue that a shard holds.
    pub(crate) async fn fetch_catalogue(&self, shard: ShardId) -> Result<Catalogue, JoinError> {
        let (timeout, body) = (self.config.timeout, Bytes::new());
        let doing = "fetch the catalogue";
        let fetch = message::FetchCatalogue {};
        let (_, body) = self.request(doing, shard, fetch, body, timeout).await?;
        Ok(Catalogue::decode(&body)?)
    }

    /// Tells the session what the variables are.
    pub(crate) async fn joined(&self, plan: &Arc<Plan>) -> Result<(), Error> {
        let command = Command::Joined { plan: plan.clone() };
        self.session.call("join", command, self.config.timeout).await.map(|_| ())
    }

    /// Replaces all of `params` by values of at least this step.
    pub(crate) async fn pull(
        &mut self,
        params: &mut Params,
        at_least: GlobalStep,
    ) -> Result<GlobalStep, Error> {
        let plan = params.plan.clone();
        let buffer = self.spare.take().unwrap_or_else(|| Buffer::new(&plan));
        let command = Command::Pull { plan, buffer, at_least };
        match self.session.call("pull", command, self.config.timeout).await? {
            Reply::Pulled { buffer, step } => {
                self.spare = Some(std::mem::replace(&mut params.buffer, buffer));
                params.step = step;
                Ok(step)
            }
            _ => Err(Error::Ended { doing: "pull" }),
        }
    }

    /// Whether the servers' refusal is about the variables, and what differs then.
    pub(crate) fn differs(error: &Error) -> Option<(ShardId, String)> {
        match error {
            Error::Refused { shard, refusal: refusal @ Refusal::Catalogue { .. }, .. } => {
                Some((*shard, refusal.to_string()))
            }
            _ => None,
        }
    }
}

async fn open(
    session: &SessionThread,
    shards: Vec<ShardId>,
    timeout: Duration,
) -> Result<Welcomed, Error> {
    match session.call("connect", Command::Open { shards }, timeout).await? {
        Reply::Opened(welcomed) => Ok(welcomed),
        _ => Err(Error::Ended { doing: "connect" }),
    }
}

/// Drives futures side by side until all are done; their outputs in order.
pub(crate) async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
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
