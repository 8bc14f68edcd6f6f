//! How the chief joins: declares the variables on every shard, and sees to it that they have values
//! that belong together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pushpull_common::ids::{RestoreEpoch, ShardId, VariableId};
use pushpull_common::protocol::message::{CheckpointId, Operation};
use pushpull_common::protocol::{Message, message};

use crate::client::{Client, Deadline, all, has_moved_on};
use crate::error::{Error, JoinError};
use crate::initial_values::InitialValues;
use crate::outcome::{PassedOver, RestoredCheckpoint};
use crate::sharding_plan::ShardingPlan;
use crate::start::{self, Begin, Found};
use crate::worker::Worker;

/// How long is waited for the names of checkpoints that were passed over.
const ASKING: Duration = Duration::from_secs(5);

/// A chief that joins.
///
/// Servers may be killed at any moment of it. What is found then is not what was declared, a shard
/// says so, and all begins again with a declaration, until the deadline.
pub(crate) struct Chief<'a, F> {
    worker: &'a Worker,
    plan: &'a Arc<ShardingPlan>,
    /// The step owner is the first.
    shards: &'a [ShardId],
    fill: Option<F>,
    /// What `fill` gave; it is called once.
    values: BTreeMap<VariableId, Bytes>,
    /// What has been asked for.
    restored: Option<RestoredCheckpoint>,
}

impl<'a, F: FnOnce(&mut InitialValues<'_>)> Chief<'a, F> {
    pub(crate) fn new(
        worker: &'a Worker,
        plan: &'a Arc<ShardingPlan>,
        shards: &'a [ShardId],
        fill: F,
    ) -> Self {
        let (fill, values) = (Some(fill), BTreeMap::new());
        Chief { worker, plan, shards, fill, values, restored: None }
    }

    /// Joins; what was restored, if anything was.
    pub(crate) async fn begin(mut self) -> Result<Option<RestoredCheckpoint>, JoinError> {
        let deadline = Deadline::after(self.client().config.connect_timeout);
        loop {
            match self.try_begin().await {
                Err(JoinError::Session(error))
                    if has_moved_on(&error) && !deadline.has_passed() => {}
                begun => return begun.map(|()| self.restored),
            }
        }
    }

    async fn try_begin(&mut self) -> Result<(), JoinError> {
        let found = self.declare().await?;
        match start::living(&found) {
            // What an interrupted attempt has restored is told all the same.
            Some(epoch) => self.restored = self.restored.take().filter(|r| r.epoch == epoch.0),
            None => self.give_values(&found).await?,
        }
        Ok(self.client().joined(self.plan, self.client().config.timeout).await?)
    }

    async fn declare(&self) -> Result<Vec<Found>, JoinError> {
        let digest = self.plan.catalogue().digest();
        let body = Bytes::copy_from_slice(self.plan.catalogue().encode());
        let (timeout, doing) = (self.client().config.timeout, "declare the variables");
        let mut found = Vec::new();
        for &shard in self.shards {
            let declare = message::Declare { digest };
            match self.client().request(doing, shard, declare, body.clone(), timeout).await {
                Ok((Message::Declared(declared), _)) => {
                    found.push(Found::new(shard, &declared));
                }
                Ok(_) => return Err(Error::Ended { doing }.into()),
                Err(error) => return Err(self.client().explain(self.plan, error).await),
            }
        }
        Ok(found)
    }

    async fn give_values(&mut self, found: &[Found]) -> Result<(), JoinError> {
        let checkpoint = self.find_checkpoint().await?;
        self.restored = None;
        match start::begin(found, checkpoint) {
            Begin::Restore { checkpoint, epoch } => self.restore(checkpoint, epoch).await,
            Begin::Initialize { shards, epoch } => self.initialize(&shards, epoch).await,
            Begin::Lost { shard } => Err(Error::StateLost { shard }.into()),
            Begin::NoEpoch { shard, epoch } => Err(JoinError::NoEpoch { shard, epoch: epoch.0 }),
        }
    }

    async fn find_checkpoint(&self) -> Result<Option<CheckpointId>, Error> {
        let doing = "look for a checkpoint";
        let (owner, timeout) = (self.client().owner, self.client().config.connect_timeout);
        let find = message::FindCheckpoint {};
        match self.client().request(doing, owner, find, Bytes::new(), timeout).await? {
            (Message::CheckpointFound(found), _) => Ok(found.checkpoint),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Which checkpoints were passed over. Nothing depends on it: a server that does not know the question closes
    /// the connection, and is not asked for long.
    async fn passed_over(&self) -> Vec<PassedOver> {
        let (doing, owner) = ("ask for damaged checkpoints", self.client().owner);
        let query = message::PassedOverQuery {};
        let answer = self.client().request(doing, owner, query, Bytes::new(), ASKING).await;
        let Ok((Message::PassedOverAre(answer), _)) = answer else { return Vec::new() };
        let each = answer.checkpoints.items().iter().map(|passed_over| PassedOver {
            checkpoint: passed_over.name.to_string(),
            cause: passed_over.cause.to_string(),
        });
        each.collect()
    }

    /// The owner is the first, so that nobody is granted a token of the old epoch any more.
    async fn restore(
        &mut self,
        checkpoint: CheckpointId,
        epoch: RestoreEpoch,
    ) -> Result<(), JoinError> {
        let (name, step) = (checkpoint.name.to_string(), checkpoint.step.0);
        let passed_over = self.passed_over().await;
        self.restored = Some(RestoredCheckpoint { name, step, epoch: epoch.0, passed_over });
        let restore = message::Restore { checkpoint, epoch };
        let doing = "restore the variables";
        let owner = self.client().owner;
        self.open(doing, owner, restore.clone()).await?;
        let others = self.shards.iter().filter(|&&shard| shard != owner);
        let others = all(others.map(|&shard| self.open(doing, shard, restore.clone()))).await;
        others.into_iter().collect()
    }

    /// The owner is the first, so that it is known how far a chief that dies here has come.
    async fn initialize(
        &mut self,
        shards: &[ShardId],
        epoch: RestoreEpoch,
    ) -> Result<(), JoinError> {
        if let Some(fill) = self.fill.take() {
            let mut initial_values = InitialValues::new(self.plan);
            fill(&mut initial_values);
            self.values = initial_values.finish().map_err(JoinError::InitialValues)?;
        }
        for (id, values) in &self.values {
            // What is initialized keeps its values.
            let (id, values, operation) = (*id, values.clone(), Operation::Assign {});
            self.worker.assign_bytes(self.plan, id, values, operation, shards).await?;
        }
        for &shard in shards {
            let initialize = message::Initialize { epoch };
            self.open("initialize the variables", shard, initialize).await?;
        }
        Ok(())
    }

    /// Has a shard give its variables values, and waits until it is open to all.
    async fn open(
        &self,
        doing: &'static str,
        shard: ShardId,
        message: impl Into<Message>,
    ) -> Result<(), JoinError> {
        let (timeout, body) = (self.client().config.connect_timeout, Bytes::new());
        match self.client().request(doing, shard, message, body, timeout).await? {
            (Message::Ready(ready), _) if ready.digest == self.plan.catalogue().digest() => Ok(()),
            // Another chief has declared other variables in between.
            (Message::Ready(_), _) => Err(self.client().differs(self.plan, shard).await?),
            _ => Err(Error::Ended { doing }.into()),
        }
    }

    fn client(&self) -> &'a Client {
        &self.worker.client
    }
}
