//! The worker: the verbs of a training loop.

mod assigns;
mod pulls;
mod pushes;
mod stepping;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::ShardId;
use pushpull_common::placement::{Placement, ShardMap};
use pushpull_common::protocol::limits::USER_BLOB_BYTES_MAX;
use pushpull_common::protocol::message::Role;
use pushpull_common::protocol::{Message, message};
use pushpull_common::variable::VariableSpec;

use crate::client::{Client, all};
use crate::compression::Compression;
use crate::config::WorkerConfig;
use crate::error::{ConnectError, Error, JoinError};
use crate::initial_values::InitialValues;
use crate::joined_model::JoinedModel;
use crate::joining::Chief;
use crate::outcome::{RestoredCheckpoint, SavedCheckpoint};
use crate::params::{Gradients, Memory, Params};
use crate::parts::Scatter;
use crate::push_buffers::Run;
use crate::runtime::{Caller, SessionRunner};
use crate::session::{Command, Reply};
use crate::sharding_plan::ShardingPlan;
use crate::token::Token;

/// One task of the job `worker`: a session with the parameter servers.
///
/// It owns a thread that keeps its leases, so its caller may compute for as long as it likes. Its
/// futures need no runtime of a kind; [`crate::blocking`] has the same verbs for callers that are
/// not asynchronous. Every operation ends: with a value, or by its deadline
/// ([`WorkerConfig::timeout`]) with an error that names who has not answered.
///
/// Dropping a worker ends its session; the servers miss it when its lease runs out. Say
/// [`Worker::leave`] to be gone at once.
#[derive(Debug)]
pub struct Worker {
    pub(crate) client: Client,
    joined: Option<Arc<JoinedModel>>,
    placement: Option<Placement>,
    restored: Option<RestoredCheckpoint>,
    /// Memory of earlier pushes.
    pool: Vec<Memory>,
    /// Which variables were pushed last, and how they travel.
    scatter: Option<(Vec<bool>, Arc<Scatter>)>,
}

/// How long a worker that leaves tries to tell servers it has never used.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(2);

/// Gradient buffers that are kept: one being filled, and one on its way.
const POOL_MAX: usize = 2;

impl Worker {
    /// Connects to the step owner, waiting for it to come up if need be
    /// ([`WorkerConfig::connect_timeout`]). Other servers are connected when variables on them
    /// are joined; other workers never are.
    ///
    /// Dropping the future ends the session.
    pub async fn connect(config: WorkerConfig) -> Result<Worker, ConnectError> {
        let job = config.task.job.clone();
        if let Err(source) = config.cluster.task_address(&job, config.task.index) {
            return Err(ConnectError::UnknownTask { task: config.task, source });
        }
        let role = if config.is_chief() { Role::Chief {} } else { Role::Worker {} };
        let client = Client::connect(config, role).await?;
        let (joined, placement, restored, pool, scatter) = (None, None, None, Vec::new(), None);
        Ok(Worker { client, joined, placement, restored, pool, scatter })
    }

    /// What runs its session.
    pub(crate) fn runner(&self) -> &Arc<SessionRunner> {
        self.client.caller.runner()
    }

    /// Whether this worker is the chief: the one that declares and initializes the variables, and
    /// may end the training.
    pub fn is_chief(&self) -> bool {
        self.client.config.is_chief()
    }

    /// Agrees with the servers, and so with all other workers, on the variables, and pulls them.
    ///
    /// The chief declares them, and sees to it that they have values that belong together:
    ///
    /// - where all servers live, their values are kept;
    /// - where one has lost its state, or all have, the newest sound checkpoint is restored on all
    ///   of them, and [`Worker::restored`] names it;
    /// - where there is no checkpoint and nothing has been trained, `fill` may give the variables
    ///   values; those it leaves out take those of their initializers. It is not called otherwise.
    ///
    /// What some servers have lost, others still hold and no checkpoint brings back is
    /// [`Error::StateLost`]. Workers that are not the chief wait for it, while it restores too.
    ///
    /// The order of `variables` decides their places, so all workers must declare the same in the
    /// same order. Dropping the future leaves the worker unjoined; joining again goes on.
    pub async fn join(
        &mut self,
        variables: &[VariableSpec],
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<Params, JoinError> {
        if self.joined.is_some() {
            return Err(JoinError::Twice);
        }
        let config = &self.client.config;
        let shards = self.client.welcomed.shards_per_task;
        let map = ShardMap::of_cluster(&config.cluster, shards)?;
        let placement = Placement::plan(variables, &map, &config.placement)?;
        let catalogue = Arc::new(Catalogue::new(variables.to_vec(), &placement)?);
        let plan = Arc::new(ShardingPlan::new(catalogue));
        let (shards, welcomed) = self.client.open(&plan).await?;
        let codecs = &self.client.config.codecs;
        let row_bytes = self.client.config.row_residual_bytes;
        let encodings = &welcomed.encodings;
        let compression = Compression::new(plan.catalogue(), codecs, encodings, row_bytes)?;
        self.restored = match self.is_chief() {
            true => Chief::new(self, &plan, &shards, fill).begin().await?,
            false => self.client.await_values(&plan, &shards).await.map(|()| None)?,
        };
        let mut params = Params::new(plan.clone());
        self.client.pull(&mut params).await?;
        self.joined = Some(Arc::new(JoinedModel::new(plan, &self.client, compression)));
        self.placement = Some(placement);
        Ok(params)
    }

    /// The variables and their places.
    pub fn catalogue(&self) -> Option<&Catalogue> {
        self.joined.as_ref().map(|joined| &**joined.plan.catalogue())
    }

    /// Which shard holds what, with a table for people: bytes by task and shard, and their skew.
    pub fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    /// The checkpoint that this worker restored when it joined; `None` if it kept the values it
    /// found or initialized them, and always for workers that are not the chief.
    ///
    /// The data readers belong where they were when it was saved: see [`Worker::save`].
    pub fn restored(&self) -> Option<&RestoredCheckpoint> {
        self.restored.as_ref()
    }

    /// Takes the right to push one gradient, at once if it came with the answer to the last push; `None` once the last step is reached or the chief
    /// has finished the training.
    ///
    /// In asynchronous mode it waits while every step that is left is promised to others. In
    /// synchronous mode it waits once this worker has given its share to the step under way: until
    /// that step has its gradients and every shard has applied it. If that takes longer than
    /// [`WorkerConfig::timeout`], or the servers give up waiting for a replica that is lost, the error
    /// ([`Error::Refused`]) names the replicas that are missing. Asking again waits on.
    ///
    /// Dropping the future loses nothing: a token that comes after that serves the next call, or
    /// goes back.
    pub async fn token(&mut self) -> Result<Option<Token>, Error> {
        self.joined("take a token")?;
        let caller = &self.client.caller;
        // The one that came with the last answer, without a word to the session's thread.
        if let Some(grant) = caller.claim() {
            return Ok(Some(Token::new(grant, caller.returns().clone())));
        }
        let reply = caller.call("take a token", Command::Token, self.client.config.timeout).await?;
        token_of(caller, reply)
    }

    /// An empty set of gradients, in memory that earlier pushes have used.
    ///
    /// What a server of this host lends ([`WorkerConfig::shared_memory`]) is written where the server reads
    /// it, so that pushing it copies nothing: variables in one piece that travel as they are, for the
    /// gradients of two pushes at a time.
    ///
    /// # Panics
    /// If the worker has not joined: there are no variables yet.
    pub fn gradients(&mut self) -> Gradients {
        let joined = self.joined.as_ref().expect("a worker has gradients once it has joined");
        let (plan, runs) = (joined.plan.clone(), joined.runs.clone());
        Gradients::new(plan.clone(), self.memory(&plan, &runs))
    }

    /// Memory for gradients of a plan of which these may lie in rooms.
    fn memory(&mut self, plan: &ShardingPlan, runs: &Arc<[Run]>) -> Memory {
        // One with rooms before one without: there are no more rooms than those.
        let free = self.pool.iter().enumerate().filter(|(_, memory)| memory.is_free());
        let free =
            free.max_by_key(|(_, memory)| memory.buffer.push_slots()).map(|(index, _)| index);
        let memory = free.map(|free| self.pool.swap_remove(free));
        let mut memory = memory.unwrap_or_else(|| Memory::new(plan, runs.clone()));
        let push_buffers = self.client.caller.push_buffers();
        memory
            .buffer_mut()
            .renew(|push_buffer| push_buffers.has(push_buffer), |shard| push_buffers.take(shard));
        memory
    }

    /// The memory of gradients that are to be pushed. What another worker has given out may lie in rooms of
    /// another session, whose names say something else in this one: it is copied.
    fn own(&mut self, plan: &ShardingPlan, runs: &Arc<[Run]>, memory: Memory) -> Memory {
        if memory.buffer.is_of(runs) {
            return memory;
        }
        let mut own = self.memory(plan, runs);
        for id in memory.present() {
            let range = plan.range(id);
            own.buffer_mut().slice_mut(range.clone()).copy_from_slice(memory.buffer.slice(range));
        }
        (own.present, own.own) = (memory.present, memory.own);
        own
    }

    /// Ends the training for all workers: no more tokens are granted. For the chief.
    pub async fn finish(&mut self) -> Result<(), Error> {
        let (owner, timeout) = (self.client.owner, self.client.config.timeout);
        let doing = "finish the training";
        self.client.request(doing, owner, message::Finish {}, Bytes::new(), timeout).await?;
        Ok(())
    }

    /// Saves a checkpoint of all variables and the optimizer's state. For the chief.
    ///
    /// `user` is kept in it for whoever restores it, such as the positions of the data readers; at
    /// most 1 MiB. What is saved is at least as new as every push that has been applied; in
    /// synchronous mode it is of one step on all shards, which a push that was just accepted may not
    /// be a part of. The training goes on meanwhile.
    ///
    /// It is saved, verified and published once this returns, which takes as long as the disks of
    /// the servers do: [`WorkerConfig::save_timeout`]. If the connection is lost on the way it is
    /// asked for again, and may then be saved twice, under two names. Dropping the future, or its
    /// timeout, does not stop what the servers have begun.
    pub async fn save(&mut self, user: &[u8]) -> Result<SavedCheckpoint, Error> {
        let doing = "save a checkpoint";
        self.joined(doing)?;
        let (bytes, limit) = (user.len() as u64, USER_BLOB_BYTES_MAX);
        if bytes > limit {
            return Err(Error::UserBlob { bytes, limit });
        }
        let (owner, timeout) = (self.client.owner, self.client.config.save_timeout);
        let body = Bytes::copy_from_slice(user);
        match self.client.request(doing, owner, message::Save {}, body, timeout).await? {
            (Message::Saved(saved), _) => Ok(saved.checkpoint.into()),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Leaves the training and ends the session. Tokens this worker still holds go to others.
    ///
    /// All servers are told, those too that hold none of the variables: they may be waiting for
    /// their workers to be gone. One that cannot be reached does not keep the others from it; if it
    /// holds variables, the error names it after the timeout.
    pub async fn leave(self) -> Result<(), Error> {
        let mut shards = vec![self.client.owner];
        if let Some(joined) = &self.joined {
            shards.extend(joined.plan.shards().iter().filter(|&&shard| shard != self.client.owner));
        }
        let used = shards.len();
        let tasks = self.client.config.cluster.task_indices("ps").unwrap_or_default();
        for task in tasks {
            if !shards.iter().any(|shard| shard.task == task) {
                shards.push(ShardId { task, shard: 0 });
            }
        }
        let timeout = self.client.config.timeout;
        let leaves = shards.into_iter().enumerate().map(|(index, shard)| {
            let timeout = if index < used { timeout } else { timeout.min(UNUSED_TIMEOUT) };
            self.client.request("leave", shard, message::Leave {}, Bytes::new(), timeout)
        });
        let answers = all(leaves).await;
        answers.into_iter().take(used).try_for_each(|answer| answer.map(|_| ()))
    }

    fn joined(&self, doing: &'static str) -> Result<&Arc<JoinedModel>, Error> {
        self.joined.as_ref().ok_or(Error::NotJoined { doing })
    }
}

/// The token that a reply hands over.
fn token_of(caller: &Caller, reply: Reply) -> Result<Option<Token>, Error> {
    match reply {
        Reply::Token(grant) => Ok(grant.map(|grant| Token::new(grant, caller.returns().clone()))),
        _ => Err(Error::Ended { doing: "take a token" }),
    }
}
