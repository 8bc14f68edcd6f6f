//! How a worker joins: it places the variables, and the chief declares them on every shard and
//! ensures that all have consistent values.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::partition::Partitioner;
use pushpull_common::placement::{Placement, ShardMap};
use pushpull_common::protocol::message::{CheckpointId, Operation};
use pushpull_common::protocol::{Message, message};
use pushpull_common::variable::{Replication, VariableSpec};

use crate::client::{Deadline, SessionClient, is_outdated, join_all};
use crate::contained::contained;
use crate::error::{ConfigError, Error};
use crate::gradients::sharding_plan::ShardingPlan;
use crate::initial_values::{InitialTensors, InitialValues};
use crate::outcome::{PassedOver, RestoredCheckpoint};
use crate::session::JoinedEpoch;
use crate::start::{self, DeclaredShard, StartDecision};
use crate::worker::Worker;

/// The longest wait for the names of damaged checkpoints.
const PASSED_OVER_TIMEOUT: Duration = Duration::from_secs(5);

/// The chief's attempt to join.
///
/// A server may be killed at any time. If a shard then refuses because its state is not the
/// declared one, the attempt starts again with the declaration after a pause, until the deadline.
pub(crate) struct ChiefJoin<'a, F> {
    worker: &'a Worker,
    plan: &'a Arc<ShardingPlan>,
    /// The step owner is the first.
    shards: &'a [ShardId],
    fill: Option<F>,
    /// The values from `fill`, which is called once.
    values: InitialTensors,
    /// The checkpoint whose restore was requested.
    restored: Option<RestoredCheckpoint>,
}

impl<'a, F: FnOnce(&mut InitialValues<'_>)> ChiefJoin<'a, F> {
    pub(crate) fn new(
        worker: &'a Worker,
        plan: &'a Arc<ShardingPlan>,
        shards: &'a [ShardId],
        fill: F,
    ) -> Self {
        let fill = Some(fill);
        let values = InitialTensors::default();
        ChiefJoin { worker, plan, shards, fill, values, restored: None }
    }

    /// Joins. Returns the restore epoch of the shards, and the restored checkpoint if there was
    /// one.
    pub(crate) async fn join(mut self) -> Result<(JoinedEpoch, Option<RestoredCheckpoint>), Error> {
        let deadline = Deadline::after(self.client().config.connect_timeout);
        loop {
            match self.try_join().await {
                Err(error) if is_outdated(&error) && !deadline.has_passed() => {
                    deadline.pause().await;
                }
                result => return result.map(|epoch| (epoch, self.restored)),
            }
        }
    }

    async fn try_join(&mut self) -> Result<JoinedEpoch, Error> {
        let found = self.declare().await?;
        match start::common_epoch(&found) {
            // A restore by an interrupted attempt is still reported.
            Some(epoch) => self.restored = self.restored.take().filter(|r| r.epoch == epoch.0),
            None => self.give_values(&found).await?,
        }
        self.client().adopt(self.plan, self.client().config.timeout).await
    }

    async fn declare(&self) -> Result<Vec<DeclaredShard>, Error> {
        let digest = self.plan.catalogue().digest();
        let body = Bytes::copy_from_slice(self.plan.catalogue().encode());
        let timeout = self.client().config.timeout;
        let doing = "declare the variables";
        let mut found = Vec::new();
        for &shard in self.shards {
            let declare = message::Declare { digest };
            match self.client().request(doing, shard, declare, body.clone(), timeout).await {
                Ok((Message::Declared(declared), _)) => {
                    found.push(DeclaredShard::new(shard, &declared));
                }
                Ok(_) => return Err(Error::Ended { doing }),
                Err(error) => return Err(self.client().explain(self.plan, error).await),
            }
        }
        Ok(found)
    }

    async fn give_values(&mut self, found: &[DeclaredShard]) -> Result<(), Error> {
        let (checkpoint, named) = self.find_checkpoint().await?;
        self.restored = None;
        match start::decide(found, checkpoint, named) {
            StartDecision::Restore { checkpoint, epoch } => self.restore(checkpoint, epoch).await,
            StartDecision::Initialize { shards, epoch } => self.initialize(&shards, epoch).await,
            StartDecision::Lost { shard } => Err(Error::NoCheckpoint { shard }),
            StartDecision::NoEpoch { shard, epoch } => {
                Err(Error::NoEpoch { shard, epoch: epoch.0 })
            }
        }
    }

    /// Returns the newest valid checkpoint, and the highest epoch that any names.
    async fn find_checkpoint(&self) -> Result<(Option<CheckpointId>, RestoreEpoch), Error> {
        let doing = "look for a checkpoint";
        let owner = self.client().owner;
        let timeout = self.client().config.connect_timeout;
        let find = message::FindCheckpoint {};
        match self.client().request(doing, owner, find, Bytes::new(), timeout).await? {
            (Message::CheckpointFound(found), _) => Ok((found.checkpoint, found.named)),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Returns the damaged checkpoints that are newer than the restored one. Nothing depends on the
    /// answer: a server that does not support the request closes the connection, and the wait is
    /// short.
    async fn passed_over(&self) -> Vec<PassedOver> {
        let doing = "ask for damaged checkpoints";
        let owner = self.client().owner;
        let query = message::PassedOverQuery {};
        let answer =
            self.client().request(doing, owner, query, Bytes::new(), PASSED_OVER_TIMEOUT).await;
        let Ok((Message::PassedOverAre(answer), _)) = answer else { return Vec::new() };
        let each = answer.checkpoints.items().iter().map(|passed_over| PassedOver {
            checkpoint: passed_over.name.to_string(),
            cause: passed_over.cause.to_string(),
        });
        each.collect()
    }

    /// Restores all shards, those with values too: values of two steps never mix. Nothing changes on
    /// any shard before each has checked the checkpoint. The step owner is restored first, so that
    /// it grants no more tokens of the old epoch.
    async fn restore(
        &mut self,
        checkpoint: CheckpointId,
        epoch: RestoreEpoch,
    ) -> Result<(), Error> {
        let name = checkpoint.name.to_string();
        let step = checkpoint.step.0;
        let passed_over = self.passed_over().await;
        self.restored = Some(RestoredCheckpoint { name, step, epoch: epoch.0, passed_over });
        let prepare = message::PrepareRestore { checkpoint: checkpoint.clone(), epoch };
        let prepared = self.shards.iter().map(|&shard| self.prepare(shard, prepare.clone()));
        join_all(prepared).await.into_iter().collect::<Result<(), Error>>()?;
        let restore = message::Restore { checkpoint, epoch };
        let doing = "restore the variables";
        let owner = self.client().owner;
        self.open(doing, owner, restore.clone()).await?;
        let others = self.shards.iter().filter(|&&shard| shard != owner);
        let others = join_all(others.map(|&shard| self.open(doing, shard, restore.clone()))).await;
        others.into_iter().collect()
    }

    /// Has a shard check its part of a checkpoint.
    async fn prepare(&self, shard: ShardId, prepare: message::PrepareRestore) -> Result<(), Error> {
        let doing = "check the checkpoint";
        let timeout = self.client().config.connect_timeout;
        let body = Bytes::new();
        match self.client().request(doing, shard, prepare, body, timeout).await? {
            // An earlier attempt has restored the shard from it.
            (Message::RestorePrepared(_) | Message::Ready(_), _) => Ok(()),
            _ => Err(Error::Ended { doing }),
        }
    }

    /// Initializes these shards, the step owner first, so that its state shows how far a dead chief
    /// had come.
    async fn initialize(&mut self, shards: &[ShardId], epoch: RestoreEpoch) -> Result<(), Error> {
        if let Some(fill) = self.fill.take() {
            let mut initial_values = InitialValues::new(self.plan);
            // What the closure has set is dropped with the attempt.
            contained("the function that sets first values", || fill(&mut initial_values))?;
            self.values = initial_values.finish()?;
        }
        // An initialized variable keeps its assigned values.
        for (&id, values) in &self.values.dense {
            let values = values.clone();
            let operation = Operation::Assign {};
            self.worker.assign_bytes(self.plan, id, values, operation, shards).await?;
        }
        for (&id, rows) in &self.values.rows {
            for piece in rows.pieces(self.plan, id, shards) {
                let piece = rows.read(self.plan, id, piece, shards)?;
                self.worker.assign_piece(self.plan, id, &piece).await?;
            }
        }
        for &shard in shards {
            let initialize = message::Initialize { epoch };
            self.open("initialize the variables", shard, initialize).await?;
        }
        Ok(())
    }

    /// Makes a shard give its variables values, and waits until all clients may use it.
    async fn open(
        &self,
        doing: &'static str,
        shard: ShardId,
        message: impl Into<Message>,
    ) -> Result<(), Error> {
        let timeout = self.client().config.connect_timeout;
        let body = Bytes::new();
        match self.client().request(doing, shard, message, body, timeout).await? {
            (Message::Ready(ready), _) if ready.digest == self.plan.catalogue().digest() => Ok(()),
            // Another chief has declared other variables meanwhile.
            (Message::Ready(_), _) => Err(self.client().differs(self.plan, shard).await?),
            _ => Err(Error::Ended { doing }),
        }
    }

    fn client(&self) -> &'a SessionClient {
        &self.worker.client
    }
}

/// Places variables on the shards of the cluster. Servers whose optimizers need whole variables get
/// them so, unless a partitioner is given.
pub(crate) fn place(
    client: &SessionClient,
    variables: &[VariableSpec],
) -> Result<(Placement, Catalogue), ConfigError> {
    let SessionClient { config, settings, .. } = client;
    let map = ShardMap::of_cluster(&config.cluster, settings.shards_per_task)?;
    let mut variables = variables.to_vec();
    let automatic = variables.iter_mut().filter(|v| v.partitioner == Partitioner::Automatic);
    if settings.whole_variables {
        automatic.for_each(|variable| variable.partitioner = Partitioner::None);
    }
    let placement = Placement::plan(&variables, &map, &config.placement)?;
    let catalogue = Catalogue::new(variables, &placement)?;
    Ok((placement, catalogue))
}

/// Returns the number of replicas in a cluster, by which contributions to means are divided; 1 if
/// no variable is a mean.
pub(crate) fn replicas(
    cluster: &ClusterSpec,
    variables: &[VariableSpec],
) -> Result<usize, ConfigError> {
    let is_mean = |it: &&VariableSpec| matches!(it.replication(), Replication::Mean { .. });
    let Some(variable) = variables.iter().find(is_mean) else { return Ok(1) };
    let counts = ["chief", "worker"].map(|job| cluster.num_tasks(job).unwrap_or(0));
    match counts.iter().sum() {
        0 => Err(ConfigError::NoReplicas { variable: variable.name().to_owned() }),
        replicas => Ok(replicas),
    }
}
