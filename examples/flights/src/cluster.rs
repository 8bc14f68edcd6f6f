//! Training over parameter servers. Servers and workers run in this process and communicate over
//! sockets.

use std::num::{NonZeroU16, NonZeroU32};
use std::thread;

use pushpull::PsConfig;
use pushpull::local::Cluster;
use pushpull::optim::Adagrad;
use pushpull::worker::Codec;

use super::data::{Epoch, FlightData};
use super::evaluator::Evaluator;
use super::model::FlightModel;
use super::replica::TrainingReplica;
use super::score::Score;
use super::task::TaskError;
use super::variables::ModelVariables;

/// The size of a cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Number of workers, each with a share of the batches.
    pub(crate) workers: NonZeroU32,
    /// Number of parameter servers.
    pub(crate) servers: NonZeroU32,
    /// Number of shards of each server.
    pub(crate) shards: NonZeroU16,
}

impl Size {
    /// Returns the number of shards of all servers.
    pub(crate) fn parts(self) -> u32 {
        self.servers.get().saturating_mul(self.shards.get().into())
    }
}

/// Parameter servers that hold a model, and workers that train it asynchronously with Adagrad. Each
/// gradient is applied at once, and is stale by the steps that other workers made meanwhile.
#[derive(Debug)]
pub(crate) struct RunningCluster<M, const N: usize> {
    replicas: Vec<TrainingReplica<M, N>>,
    evaluator: Evaluator<M>,
    servers: Cluster,
}

impl<M: FlightModel<N>, const N: usize> RunningCluster<M, N> {
    /// Starts servers and workers. `codec` encodes the gradients, if given. The first worker is the
    /// chief and initializes the variables.
    pub(crate) fn start(
        model: M,
        variables: &ModelVariables<N>,
        size: Size,
        learning_rate: f64,
        codec: Option<Codec>,
    ) -> Result<RunningCluster<M, N>, TaskError> {
        let servers = Cluster::start(size.servers.get(), size.workers.get(), |cluster, task| {
            PsConfig::new(cluster, task, Adagrad::new(learning_rate)).shards(size.shards.get())
        })?;
        let config = |index| servers.worker_config(index).codec("*", codec);
        let replicas = (0..size.workers.get())
            .map(|index| TrainingReplica::join(config(index), model.clone(), variables))
            .collect::<Result<Vec<_>, _>>()?;
        let evaluator = Evaluator::connect(config(0), model, variables)?;
        Ok(RunningCluster { replicas, evaluator, servers })
    }

    /// Trains on the batches of an epoch, each worker on its share in a thread of its own. Returns
    /// when all are done.
    pub(crate) fn train(&mut self, dataset: &FlightData, epoch: &Epoch) -> Result<(), TaskError> {
        let workers = self.replicas.len();
        thread::scope(|scope| {
            let replicas = self.replicas.iter_mut().enumerate();
            let running: Vec<_> = replicas
                .map(|(worker, replica)| {
                    scope.spawn(move || {
                        let mut share = epoch.share(worker, workers);
                        share.try_for_each(|rows| replica.step(dataset, rows))
                    })
                })
                .collect();
            running.into_iter().try_for_each(|run| run.join().map_err(|_| "a worker panicked")?)
        })
    }

    /// Returns the current score of the model.
    pub(crate) fn score(&mut self, dataset: &FlightData) -> Result<Option<Score>, TaskError> {
        self.evaluator.score(dataset)
    }

    /// Returns the bytes of gradients that the servers received.
    pub(crate) fn push_bytes(&self) -> u64 {
        self.servers.handles().iter().map(|server| server.metrics().push_bytes).sum()
    }

    /// Has the workers leave and stops the servers.
    pub(crate) fn stop(self) -> Result<(), TaskError> {
        for replica in self.replicas {
            replica.worker.leave()?;
        }
        Ok(self.servers.stop()?)
    }
}
