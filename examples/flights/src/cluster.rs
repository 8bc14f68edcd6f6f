//! Training over parameter servers. Servers and workers run in this process and communicate over
//! sockets.

use std::error::Error;
use std::num::{NonZeroU16, NonZeroU32};
use std::thread;

use pushpull::blocking::{Reader, Worker};
use pushpull::optim::Adagrad;
use pushpull::server::Listener;
use pushpull::training::Codec;
use pushpull::{ClusterSpec, Params, Ps, PsConfig, Push, TaskId, WorkerConfig};
use tokio::runtime::Runtime;

use super::data::{Epoch, FlightBatch, FlightData};
use super::model::{FlightModel, Weights, WeightsMut};
use super::score::Score;
use super::variables::{ModelVariables, TABLE};

/// An error of any thread.
pub(crate) type RunError = Box<dyn Error + Send + Sync>;

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
    /// Reads the values without taking part in training.
    reader: Reader,
    params: Params,
    model: M,
    /// The whole table, and the ids of its rows.
    table: Vec<f32>,
    ids: Vec<u64>,
    servers: Vec<Ps>,
    runtime: Runtime,
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
    ) -> Result<RunningCluster<M, N>, RunError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let listeners = (0..size.servers.get())
            .map(|_| runtime.block_on(Ps::listen("127.0.0.1:0")))
            .collect::<Result<Vec<_>, _>>()?;
        let cluster = ClusterSpec::builder()
            .job("ps", listeners.iter().map(Listener::address))
            // Workers accept no connections: the address is only a name.
            .job("worker", (1..=size.workers.get()).map(|index| format!("127.0.0.1:{index}")))
            .build()?;
        let config = |index| {
            PsConfig::new(cluster.clone(), TaskId::ps(index), Adagrad::new(learning_rate))
                .shards(size.shards.get())
        };
        let servers = (0..)
            .zip(listeners)
            .map(|(index, listener)| listener.start(config(index)))
            .collect::<Result<Vec<_>, _>>()?;

        let config =
            |index| WorkerConfig::new(cluster.clone(), TaskId::worker(index)).codec("*", codec);
        let replicas = (0..size.workers.get())
            .map(|index| TrainingReplica::join(config(index), model.clone(), variables))
            .collect::<Result<Vec<_>, _>>()?;
        let reader = Reader::connect(config(0))?;
        let shape = variables.table.shape();
        Ok(RunningCluster {
            replicas,
            params: reader.params(),
            reader,
            model,
            table: vec![0.0; shape.elements() as usize],
            ids: (0..shape.rows()).collect(),
            servers,
            runtime,
        })
    }

    /// Trains on the batches of an epoch, each worker on its share in a thread of its own. Returns
    /// when all are done.
    pub(crate) fn train(&mut self, dataset: &FlightData, epoch: &Epoch) -> Result<(), RunError> {
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
    pub(crate) fn score(&mut self, dataset: &FlightData) -> Result<Option<Score>, RunError> {
        self.reader.pull(&mut self.params)?;
        self.reader.pull_rows(TABLE, &self.ids, &mut self.table)?;
        let weights = Weights { dense: self.params.views(M::NAMES)?, rows: &self.table };
        Ok(Score::of(&mut self.model, weights, dataset))
    }

    /// Returns the bytes of gradients that the servers received.
    pub(crate) fn push_bytes(&self) -> u64 {
        self.servers.iter().map(|server| server.handle().metrics().push_bytes).sum()
    }

    /// Has the workers leave and stops the servers.
    pub(crate) fn stop(self) -> Result<(), RunError> {
        for replica in self.replicas {
            replica.worker.leave()?;
        }
        for server in self.servers {
            self.runtime.block_on(server.serve(async {}))?;
        }
        Ok(())
    }
}

/// One worker and its buffers.
#[derive(Debug)]
struct TrainingReplica<M, const N: usize> {
    worker: Worker,
    /// The dense tensors.
    params: Params,
    model: M,
    batch: FlightBatch,
    /// The rows of the batch, and their gradients.
    rows: Vec<f32>,
    row_gradients: Vec<f32>,
}

impl<M: FlightModel<N>, const N: usize> TrainingReplica<M, N> {
    fn join(
        config: WorkerConfig,
        model: M,
        variables: &ModelVariables<N>,
    ) -> Result<TrainingReplica<M, N>, RunError> {
        let mut worker = Worker::connect(config)?;
        let mut specs = variables.dense.to_vec();
        specs.push(variables.table.clone());
        let params = worker.join(&specs, |_| ())?;
        let batch = FlightBatch::new(variables.table.shape().rows() as usize);
        Ok(TrainingReplica {
            worker,
            params,
            model,
            batch,
            rows: Vec::new(),
            row_gradients: Vec::new(),
        })
    }

    /// Pulls the dense tensors and the rows of a batch, and pushes their gradients.
    fn step(&mut self, dataset: &FlightData, rows: &[u32]) -> Result<(), RunError> {
        self.batch.fill(dataset, rows);
        let values = self.batch.ids.len() * self.model.width();
        self.rows.resize(values, 0.0);
        self.row_gradients.resize(values, 0.0);

        let token = self.worker.token()?.ok_or("the training has ended")?;
        self.worker.pull(&token, &mut self.params)?;
        self.worker.pull_rows(&token, TABLE, &self.batch.ids, &mut self.rows)?;
        let mut gradients = self.worker.gradients();
        self.model.gradients(
            Weights { dense: self.params.views(M::NAMES)?, rows: &self.rows },
            self.batch.samples(),
            WeightsMut { dense: gradients.views_mut(M::NAMES)?, rows: &mut self.row_gradients },
        );
        gradients.set_rows(TABLE, &self.batch.ids, &self.row_gradients)?;
        match self.worker.push(token, gradients)? {
            Push::Applied { .. } => Ok(()),
            other => Err(format!("a gradient was not applied: {other:?}").into()),
        }
    }
}
