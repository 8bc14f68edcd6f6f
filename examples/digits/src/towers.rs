//! Training by towers: one client divides each batch, and tasks compute the gradients of its parts.

use std::time::Instant;

use pushpull::compute::{Device, Mlp, Model, Network, Samples, View, ViewMut};
use pushpull::services::{
    FunctionClient, FunctionError, FunctionServer, FunctionServerConfig, Functions, Invocation,
    Outputs, Towers, Value,
};
use pushpull::{ClusterSpec, Ps, Reader, TaskId, Worker, WorkerConfig};

use super::TrainingRun;
use super::data::{CLASSES, Dataset, Split};
use super::options::DigitsOptions;
use super::task::TaskError;
use super::train::{self, NAMES, Outcome};

/// Trains with this many towers, each on a task of its own, and two servers, in this process.
pub(crate) fn train(
    options: &DigitsOptions,
    split: &Split,
    towers: u32,
) -> Result<TrainingRun, TaskError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(train_with(options, split, towers))
}

async fn train_with(
    options: &DigitsOptions,
    split: &Split,
    towers: u32,
) -> Result<TrainingRun, TaskError> {
    let rows = options.rows();
    if !rows.is_multiple_of(towers) {
        return Err(format!("--towers {towers} do not divide a batch of {rows} equally").into());
    }
    let servers = [Ps::listen("127.0.0.1:0").await?, Ps::listen("127.0.0.1:0").await?];
    let tasks = (0..towers).map(|_| FunctionServer::listen("127.0.0.1:0"));
    let tasks = tasks.collect::<Result<Vec<_>, _>>()?;
    let cluster = ClusterSpec::builder()
        .job("ps", servers.iter().map(|server| server.address()))
        .job("worker", tasks.iter().map(|task| task.address()))
        .build()?;
    let mut started = Vec::new();
    for (index, server) in (0..).zip(servers) {
        started.push(server.start(options.server(&cluster, TaskId::ps(index), None))?);
    }
    declare_variables(options, &cluster, split).await?;

    let sizes = [split.width(), options.hidden, CLASSES];
    let mut towers_here = Vec::new();
    for (index, task) in (0..).zip(tasks) {
        let functions = Functions::new().towers().add("tower", move |call| tower(call, &sizes));
        let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(index), functions);
        towers_here.push(task.start(config)?);
    }
    let client = FunctionClient::connect(towers_here[0].target()).await?;
    let replicas = Towers::new(&client, "tower", (0..towers).map(TaskId::worker))?;

    let start = Instant::now();
    let steps = options.total_steps(split)?;
    // Towers average parts of equal size, so the last rows of an epoch are left out.
    let batches = train::pipeline(options, split).drop_remainder(true).shard(0, 1)?;
    let mut losses = Vec::new();
    for batch in batches.take(usize::try_from(steps)?) {
        let batch = Dataset::of(&batch?.samples);
        let part = batch.rows() / towers as usize;
        let step = replicas.step(|tower, call| {
            let features = &batch.features[tower * part * batch.width..][..part * batch.width];
            let labels = batch.labels[tower * part..][..part].iter();
            let labels: Vec<i64> = labels.map(|&label| label.into()).collect();
            let features = Value::tensor(&[part as u64, batch.width as u64], features)?;
            let labels = Value::tensor(&[part as u64], &labels)?;
            Ok(call.feed("features", features).feed("labels", labels))
        });
        let step = step.await?;
        losses.push((step.step, step.loss));
    }
    let elapsed = start.elapsed();

    let mut reader = Reader::connect(WorkerConfig::new(cluster.clone(), TaskId::worker(0))).await?;
    let mut params = reader.params();
    reader.pull(&mut params).await?;
    let values = params.views(NAMES)?.map(View::from);
    let accuracy = Mlp::new(Device::cpu()?, &sizes).accuracy(&values, split.test.samples())?;
    let outcome = Outcome { from_step: 0, steps: params.step(), accuracy, losses };
    let push_bytes = started.iter().map(|server| server.handle().metrics().push_bytes).sum();
    let workers = towers as usize;
    let servers = started.len();
    Ok(TrainingRun { outcome, workers, servers, elapsed, push_bytes })
}

/// Declares the variables of the network and initializes them, as the chief.
async fn declare_variables(
    options: &DigitsOptions,
    cluster: &ClusterSpec,
    split: &Split,
) -> Result<(), TaskError> {
    let network = Mlp::new(Device::cpu()?, &[split.width(), options.hidden, CLASSES]);
    let variables = train::variables(options, split, &Model::new(network, NAMES))?;
    let mut chief = Worker::connect(WorkerConfig::new(cluster.clone(), TaskId::worker(0))).await?;
    let _ = chief.join(&variables, |_| ()).await?;
    Ok(chief.leave().await?)
}

/// A tower: computes the gradients of its part of a batch.
fn tower(call: &mut Invocation, sizes: &[usize]) -> Result<Outputs, FunctionError> {
    let labels: Vec<u32> = call.feed::<i64>("labels")?.iter().map(|&label| label as u32).collect();
    let samples = Samples { features: call.feed("features")?, labels: &labels };
    let params = call.values()?;
    let mut gradients = call.tower_gradients()?;
    let values = params.views(NAMES)?.map(View::from);
    let out = gradients.views_mut(NAMES)?.map(ViewMut::from).into();
    let loss = Mlp::new(Device::cpu_threads(1)?, sizes).gradients(&values, samples, out)?;
    call.tower(gradients, loss as f32)
}
