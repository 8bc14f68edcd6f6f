//! Two workers and a server that train the network.

use std::time::Duration;

use pushpull::blocking::Worker;
use pushpull::compute::{Compute, Mlp, Model};
use pushpull::worker::StepOutcome;
use pushpull::{ClusterSpec, Mode, Params, Ps, PsConfig, Push, Sgd, TaskId, Token, WorkerConfig};

use super::alone::initial_values;
use super::data::Data;
use super::{NAMES, ThreadError, WORKERS, network, together};
use crate::bench::{BenchError, BenchFolder, Transport};

/// A running training.
pub(super) struct Training<'a> {
    trainers: Vec<TrainingWorker<'a>>,
    /// Number of gradients in a step.
    gradients_per_step: u64,
    /// Loss before the first step.
    loss: f64,
    _server: Ps,
    _folder: Option<BenchFolder>,
}

impl<'a> Training<'a> {
    /// Starts a server in this process and the workers, which join.
    pub(super) fn start(
        transport: Transport,
        mode: Mode,
        data: &'a Data,
    ) -> Result<Training<'a>, BenchError> {
        let (what, gradients_per_step) = match mode {
            Mode::Synchronous(_) => ("synchronous", WORKERS as u64),
            Mode::Asynchronous(_) => ("asynchronous", 1),
        };
        let (address, folder) = transport.address(what)?;
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let listener = runtime.block_on(Ps::listen(&address))?;
        let cluster = ClusterSpec::builder()
            .job("ps", [listener.address()])
            .job("worker", (0..WORKERS).map(|worker| format!("127.0.0.1:{}", worker + 1)))
            .build()?;
        let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(RATE)).mode(mode);
        let server = listener.start(config.network(transport.network()))?;
        let join = |worker| TrainingWorker::join(&cluster, worker, transport, data);
        let trainers = (0..WORKERS).map(join);
        let mut trainers = trainers.collect::<Result<Vec<_>, ThreadError>>().map_err(failure)?;
        let loss = trainers[0].loss().map_err(failure)?;
        Ok(Training { trainers, gradients_per_step, loss, _server: server, _folder: folder })
    }

    /// Has each worker train on some batches. Returns the time until the last one is done.
    pub(super) fn turn(&mut self) -> Result<Duration, BenchError> {
        together(&mut self.trainers, TrainingWorker::step)
    }

    /// Checks that every gradient counted and that the loss fell.
    pub(super) fn check(mut self) -> Result<(), BenchError> {
        let pushed: u64 = self.trainers.iter().map(|trainer| trainer.pushed).sum();
        let trainer = &mut self.trainers[0];
        // A pull with a token includes all steps before it.
        let token = trainer.ready().map_err(failure)?;
        trainer.worker.pull(&token, &mut trainer.params)?;
        let step = trainer.params.step();
        let loss = trainer.loss().map_err(failure)?;
        if step * self.gradients_per_step != pushed {
            let per_step = self.gradients_per_step;
            return Err(format!("{pushed} pushes made {step} steps of {per_step}").into());
        }
        // A hundred steps reduce the loss to 0.55 of the initial one. The comparison is false for
        // NaN.
        let learned = loss < 0.75 * self.loss;
        let message = || format!("the loss was {} and is {loss}", self.loss).into();
        learned.then_some(()).ok_or_else(message)
    }
}

/// One worker and its training loop.
struct TrainingWorker<'a> {
    worker: Worker,
    params: Params,
    /// Token of the next step, whose values are in `params`; `None` before the first step.
    token: Option<Token>,
    model: Model<Mlp>,
    data: &'a Data,
    next: usize,
    /// Number of pushes acknowledged as applied or accepted.
    pushed: u64,
}

impl<'a> TrainingWorker<'a> {
    fn join(
        cluster: &ClusterSpec,
        index: usize,
        transport: Transport,
        data: &'a Data,
    ) -> Result<TrainingWorker<'a>, ThreadError> {
        let task = TaskId::worker(index as u32);
        let config = WorkerConfig::new(cluster.clone(), task);
        let mut worker = Worker::connect(config.shared_memory(transport.is_shared()))?;
        let model = Model::new(network()?, NAMES);
        let params = worker.join(&model.variables()?, |initial| {
            for (name, values) in NAMES.into_iter().zip(&initial_values(model.network())) {
                initial.set(name, values);
            }
        })?;
        Ok(TrainingWorker { worker, params, token: None, model, data, next: index, pushed: 0 })
    }

    /// Returns a token whose values are in `params`.
    fn ready(&mut self) -> Result<Token, ThreadError> {
        if let Some(token) = self.token.take() {
            return Ok(token);
        }
        let token = self.worker.token()?.ok_or("the training has ended")?;
        match self.worker.pull(&token, &mut self.params)?.is_stale() {
            true => Err("a step was made without one of its workers".into()),
            false => Ok(token),
        }
    }

    /// Runs the training loop of the README once.
    fn step(&mut self) -> Result<(), ThreadError> {
        let token = self.ready()?;
        let mut gradients = self.worker.gradients();
        let batch = self.data.batch(self.next);
        let values = (&self.params).into();
        let mut out = (&mut gradients).into();
        self.model.gradients(values, batch, &mut out)?;
        let StepOutcome { push, next, .. } =
            self.worker.push_and_pull(token, gradients, &mut self.params)?;
        self.token = next?;
        match push {
            Push::Applied { .. } | Push::Accepted { .. } => {}
            other => return Err(format!("unexpected outcome of a push: {other:?}").into()),
        }
        self.next += WORKERS;
        self.pushed += 1;
        Ok(())
    }

    /// Returns the mean loss over all batches.
    fn loss(&mut self) -> Result<f64, ThreadError> {
        let mut gradients = self.worker.gradients();
        let mut sum = 0.0;
        for batch in 0..self.data.batches() {
            let batch = self.data.batch(batch);
            let values = (&self.params).into();
            let mut out = (&mut gradients).into();
            sum += self.model.gradients(values, batch, &mut out)?;
        }
        Ok(sum / self.data.batches() as f64)
    }
}

fn failure(fault: ThreadError) -> BenchError {
    fault
}

const RATE: f64 = 0.1;
