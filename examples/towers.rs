//! In-graph replication: towers on several tasks train one network, and each step is one update.
//!
//! The client divides every batch into equal parts, one for each tower. The towers compute
//! gradients, which go from task to task, and the mean of them is pushed once. All tasks run in
//! this process:
//!
//! ```sh
//! cargo run --release --example towers -- --towers 4
//! ```
//!
//! The network tells points inside a ring from those outside, as in `multi_device`. The weights are
//! the same for any number of towers, up to rounding.

use std::error::Error;

use clap::Parser;
use pushpull::compute::{Compute, Device, Mlp, Model, Network, Samples, View, ViewMut};
use pushpull::services::{
    FunctionClient, FunctionError, FunctionServer, FunctionServerConfig, Functions, Invocation,
    Outputs, Towers, Value,
};
use pushpull::{
    Adam, ClusterSpec, Params, Ps, PsConfig, Reader, TaskId, VariableSpec, WorkerConfig,
};

/// An error of any task.
pub(crate) type ExampleError = Box<dyn Error + Send + Sync>;

const SIZES: [usize; 4] = [2, 32, 32, 2];
pub(crate) const NAMES: [&str; 6] = ["w1", "b1", "w2", "b2", "w3", "b3"];
/// The points of a step, over all towers.
const BATCH: usize = 256;

/// The result of a training.
pub(crate) struct Outcome {
    pub(crate) accuracy: f64,
    /// The mean loss of the towers in the last step.
    pub(crate) loss: f64,
    pub(crate) params: Params,
}

/// Points and whether each is inside the ring.
struct Points {
    features: Vec<f32>,
    labels: Vec<u32>,
}

impl Points {
    /// Returns points from a sequence that fills the square evenly.
    fn of(first: u64, count: usize) -> Points {
        let mut points = Points { features: Vec::new(), labels: Vec::new() };
        for n in (first..).take(count) {
            let [x, y] = [0.754_877_666, 0.569_840_29].map(|ratio: f64| {
                let fraction = (n as f64 * ratio).fract();
                (2.0 * fraction - 1.0) as f32
            });
            points.features.extend([x, y]);
            points.labels.push((0.3..0.8).contains(&x.hypot(y)).into());
        }
        points
    }
}

fn network() -> Result<Mlp, ExampleError> {
    Ok(Mlp::new(Device::cpu_threads(1)?, &SIZES))
}

/// A tower: computes the gradients of its part of a batch.
fn tower(call: &mut Invocation) -> Result<Outputs, FunctionError> {
    let labels: Vec<u32> = call.feed::<i64>("labels")?.iter().map(|&label| label as u32).collect();
    let samples = Samples { features: call.feed("features")?, labels: &labels };
    let params = call.values()?;
    let mut gradients = call.tower_gradients()?;
    let values = params.views(NAMES)?.map(View::from);
    let out = gradients.views_mut(NAMES)?.map(ViewMut::from).into();
    let loss = Mlp::new(Device::cpu_threads(1)?, &SIZES).gradients(&values, samples, out)?;
    call.tower(gradients, loss as f32)
}

/// Trains with this many towers, each on a task of its own.
pub(crate) async fn train(towers: u32, steps: u64) -> Result<Outcome, ExampleError> {
    let part = BATCH / towers.max(1) as usize;
    if part * towers as usize != BATCH {
        return Err(format!("{towers} towers do not divide a batch of {BATCH} equally").into());
    }
    let ps = Ps::listen("127.0.0.1:0").await?;
    let workers = (0..towers).map(|_| FunctionServer::listen("127.0.0.1:0"));
    let workers = workers.collect::<Result<Vec<_>, _>>()?;
    let cluster = ClusterSpec::builder()
        .job("ps", [ps.address()])
        .job("worker", workers.iter().map(|worker| worker.address()))
        .build()?;
    let _ps = ps.start(PsConfig::new(cluster.clone(), TaskId::ps(0), Adam::new(0.01)))?;
    let mut servers = Vec::new();
    for (index, worker) in (0..).zip(workers) {
        let functions = Functions::new().towers().add("tower", tower);
        let config = FunctionServerConfig::new(cluster.clone(), TaskId::worker(index), functions);
        servers.push(worker.start(config)?);
    }

    let client = FunctionClient::connect(servers[0].target()).await?;
    declare_variables(&client).await?;
    let replicas = Towers::new(&client, "tower", (0..towers).map(TaskId::worker))?;
    let mut loss = f64::NAN;
    for step in 0..steps {
        let made = replicas.step(|tower, call| {
            let first = step * BATCH as u64 + (tower * part) as u64;
            let Points { features, labels } = Points::of(first, part);
            let labels: Vec<i64> = labels.into_iter().map(i64::from).collect();
            let features = Value::tensor(&[part as u64, 2], &features)?;
            let labels = Value::tensor(&[part as u64], &labels)?;
            Ok(call.feed("features", features).feed("labels", labels))
        });
        loss = made.await?.loss;
    }

    let mut reader = Reader::connect(WorkerConfig::new(cluster, TaskId::worker(0))).await?;
    let mut params = reader.params();
    reader.pull(&mut params).await?;
    let Points { features, labels } = Points::of(1 << 28, 4_096);
    let values = params.views(NAMES)?.map(View::from);
    let samples = Samples { features: &features, labels: &labels };
    let accuracy = network()?.accuracy(&values, samples)?;
    Ok(Outcome { accuracy, loss, params })
}

/// Declares the variables of the network and initializes them.
async fn declare_variables(client: &FunctionClient) -> Result<(), ExampleError> {
    let model = Model::new(network()?, NAMES);
    let variables: Vec<VariableSpec> = Compute::<Samples<'_>>::variables(&model)?;
    Ok(client.declare(&variables, |_| ()).await?)
}

/// Train a network with towers on several tasks.
#[derive(Debug, Parser)]
struct Options {
    /// Number of towers, each on a task of its own; divides 256
    #[arg(long, value_name = "N", default_value_t = 4)]
    towers: u32,
    /// Number of steps
    #[arg(long, value_name = "N", default_value_t = 1000)]
    steps: u64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), ExampleError> {
    let Options { towers, steps } = Options::parse();
    let Outcome { accuracy, loss, params } = train(towers, steps).await?;
    let steps = params.step();
    println!("accuracy {accuracy:.3}, loss {loss:.4} after {steps} steps, towers: {towers}");
    Ok(())
}
