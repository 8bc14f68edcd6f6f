//! The classic network of two layers: each layer on a ps task of its own, and eight worker tasks.

use pushpull::compute::{Compute, Device, Mlp, Model, Network, Samples, View, ViewMut};
use pushpull::services::{
    Call, FunctionClient, FunctionError, FunctionServer, FunctionServerConfig, Functions,
    Invocation, Outputs,
};
use pushpull::{ClusterSpec, Ps, PsConfig, Reader, Sgd, TaskId, WorkerConfig};

use super::GraphError;

const SIZES: [usize; 3] = [4, 8, 3];
const NAMES: [&str; 4] = ["weights_1", "biases_1", "weights_2", "biases_2"];
const WORKERS: u32 = 8;
/// A power of two, so that a product with it is exact.
const LEARNING_RATE: f32 = 0.125;
const SAMPLES: usize = 32;

/// The values of the variables, in the order of [`NAMES`].
type Values = [Vec<f32>; 4];

/// The result of a training.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) first_loss: f64,
    pub(crate) last_loss: f64,
    /// The largest difference between a weight on the servers and that of a local run.
    pub(crate) difference: f32,
}

/// Trains through worker 7, and beside it in this function alone.
pub(crate) async fn train(steps: u64) -> Result<Trained, GraphError> {
    let ps = [Ps::listen("127.0.0.1:0").await?, Ps::listen("127.0.0.1:0").await?];
    let workers = (0..WORKERS).map(|_| FunctionServer::listen("127.0.0.1:0"));
    let workers = workers.collect::<Result<Vec<_>, _>>()?;
    let cluster = ClusterSpec::builder()
        .job("ps", ps.each_ref().map(|ps| ps.address()))
        .job("worker", workers.iter().map(|worker| worker.address()))
        .build()?;
    let mut servers = Vec::new();
    let mut functions = Vec::new();
    for (index, ps) in (0..).zip(ps) {
        let optimizer = Sgd::new(f64::from(LEARNING_RATE));
        servers.push(ps.start(PsConfig::new(cluster.clone(), TaskId::ps(index), optimizer))?);
    }
    for (index, worker) in (0..).zip(workers) {
        let offered = Functions::new().add("train_step", train_step);
        let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(index), offered);
        functions.push(worker.start(config)?);
    }
    let client = FunctionClient::connect(cluster.task_address("worker", WORKERS - 1)?).await?;
    declare_variables(&client).await?;
    let mut local = pull(&cluster).await?;

    let mut first_loss = f64::NAN;
    let mut last_loss = f64::NAN;
    for step in 0..steps {
        let outputs = client.call(Call::new("train_step")).await?;
        last_loss = outputs.get("loss")?.element()?;
        if step == 0 {
            first_loss = last_loss;
        }
    }

    for _ in 0..steps {
        train_locally(&mut local)?;
    }
    let trained = pull(&cluster).await?;
    let pairs = trained.iter().flatten().zip(local.iter().flatten());
    let difference = pairs.map(|(found, expected)| (found - expected).abs()).fold(0.0, f32::max);
    Ok(Trained { first_loss, last_loss, difference })
}

/// Declares each layer on a ps task of its own and initializes it.
async fn declare_variables(client: &FunctionClient) -> Result<(), GraphError> {
    let model = Model::new(network()?, NAMES);
    let mut variables = Compute::<Samples<'_>>::variables(&model)?;
    for (index, variable) in variables.iter_mut().enumerate() {
        let device = format!("/job:ps/task:{}", index / 2).parse()?;
        *variable = variable.clone().device(device);
    }
    Ok(client.declare(&variables, |_| ()).await?)
}

/// The function on the workers: one step on the batch.
fn train_step(call: &mut Invocation) -> Result<Outputs, FunctionError> {
    let mut gradients = call.gradients()?;
    let values = call.params()?.views(NAMES)?.map(View::from);
    let out = gradients.views_mut(NAMES)?.map(ViewMut::from).into();
    let (features, labels) = batch();
    let samples = Samples { features: &features, labels: &labels };
    let mut network = Mlp::new(Device::cpu_threads(1)?, &SIZES);
    let loss = network.gradients(&values, samples, out)?;
    Ok(Outputs::from(call.push(gradients)?).with("loss", loss))
}

/// The same step without servers.
fn train_locally(values: &mut Values) -> Result<(), GraphError> {
    let (features, labels) = batch();
    let samples = Samples { features: &features, labels: &labels };
    let mut gradients = values.each_ref().map(|values| vec![0.0; values.len()]);
    let views = values.each_ref().map(View::from);
    let out = gradients.each_mut().map(|gradient| ViewMut::from(&mut gradient[..])).into();
    network()?.gradients(&views, samples, out)?;
    for (values, gradients) in values.iter_mut().zip(&gradients) {
        for (value, gradient) in values.iter_mut().zip(gradients) {
            *value -= LEARNING_RATE * gradient;
        }
    }
    Ok(())
}

async fn pull(cluster: &ClusterSpec) -> Result<Values, GraphError> {
    let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0));
    let mut reader = Reader::connect(config).await?;
    let mut params = reader.params();
    reader.pull(&mut params).await?;
    Ok(params.views(NAMES)?.map(<[f32]>::to_vec))
}

fn network() -> Result<Mlp, GraphError> {
    Ok(Mlp::new(Device::cpu_threads(1)?, &SIZES))
}

/// The synthetic batch, which is the same in every step: features, and the class of each sample.
fn batch() -> (Vec<f32>, Vec<u32>) {
    let features = (0..SAMPLES * SIZES[0]).map(|n| (n as f32 * 0.7).sin()).collect();
    (features, (0..SAMPLES as u32).map(|n| n % 3).collect())
}
