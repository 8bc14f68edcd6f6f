//! One process that trains on several devices, as the classic trainer with one tower for each GPU.
//!
//! The parameters lie on a server. In each step every device computes a part of the batch with
//! values of its own, and the mean of the gradients is pushed once. Where there is no GPU, threads
//! are the devices:
//!
//! ```sh
//! cargo run --release --example multi_device                 # cpu:1 and cpu:1
//! cargo run --release --example multi_device cpu:2 cpu:1     # one device for each argument
//! ```
//!
//! The model tells points inside a ring from those outside. The last lines are the accuracy and how
//! long each tower computed: the step is as slow as the slowest.

use std::error::Error;
use std::time::Duration;

use pushpull::blocking::TrainingSession;
use pushpull::compute::{Compute, Device, DeviceTowers, Mlp, Model, Network, Samples, View};
use pushpull::local::Cluster;
use pushpull::training::TrainingConfig;
use pushpull::{Adam, PsConfig, WorkerConfig};

const SIZES: [usize; 4] = [2, 32, 32, 2];
const NAMES: [&str; 6] = ["w1", "b1", "w2", "b2", "w3", "b3"];
const BATCH: usize = 256;

/// The result of a training.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) steps: u64,
    pub(crate) accuracy: f64,
    /// For each tower, its device and the time that it computed.
    pub(crate) towers: Vec<(String, Duration)>,
}

/// Points and whether each is inside the ring.
struct Points {
    features: Vec<f32>,
    labels: Vec<u32>,
}

impl Points {
    /// Returns the points of a step: the next ones of a sequence that fills the square evenly.
    fn of_step(step: u64, count: usize) -> Points {
        let mut points = Points { features: Vec::new(), labels: Vec::new() };
        for n in (step * count as u64..).take(count) {
            let [x, y] = [0.754_877_666, 0.569_840_29].map(|ratio: f64| {
                let fraction = (n as f64 * ratio).fract();
                (2.0 * fraction - 1.0) as f32
            });
            points.features.extend([x, y]);
            points.labels.push((0.3..0.8).contains(&x.hypot(y)).into());
        }
        points
    }

    fn samples(&self) -> Samples<'_> {
        Samples { features: &self.features, labels: &self.labels }
    }
}

/// Trains on these devices, against a server in this process.
pub(crate) fn train(devices: &[String], steps: u64) -> Result<Outcome, Box<dyn Error>> {
    let cluster = Cluster::start(1, 1, |cluster, task| {
        PsConfig::new(cluster, task, Adam::new(0.01)).last_step(steps)
    })?;
    let outcome = train_towers(cluster.worker_config(0), devices)?;
    cluster.stop()?;
    Ok(outcome)
}

fn train_towers(worker: WorkerConfig, devices: &[String]) -> Result<Outcome, Box<dyn Error>> {
    let network = |name: &String| Ok::<_, Box<dyn Error>>(Mlp::new(Device::pick(name)?, &SIZES));
    let networks = devices.iter().map(network).collect::<Result<Vec<_>, _>>()?;
    let mut towers =
        DeviceTowers::new(networks.iter().map(|network| Model::new(network.clone(), NAMES)));
    let mut times = vec![Duration::ZERO; towers.len()];

    let config = TrainingConfig::new(worker).variables(towers.variables()?);
    let mut session = TrainingSession::start(config)?;
    while let Some(mut step) = session.step()? {
        let points = Points::of_step(step.step(), BATCH);
        step.compute(&mut towers, points.samples())?;
        times.iter_mut().zip(towers.times()).for_each(|(sum, time)| *sum += time);
        step.push()?;
    }

    let ended = session.close()?;
    let params = ended.params.ok_or("the worker never joined")?;
    let test = Points::of_step(1_000_000, 4_096);
    // The accuracy is computed on the processor, where the values are.
    let values = params.views(NAMES)?.map(View::from);
    let mut network = Mlp::new(Device::cpu()?, &SIZES);
    let accuracy = network.accuracy(&values, test.samples())?;
    let names = networks.iter().map(|network| network.device().to_string());
    Ok(Outcome { steps: ended.step, accuracy, towers: names.zip(times).collect() })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut devices: Vec<String> = std::env::args().skip(1).collect();
    if devices.is_empty() {
        devices = vec!["cpu:1".to_owned(); 2];
    }
    let Outcome { steps, accuracy, towers } = train(&devices, 2_000)?;
    println!("accuracy {accuracy:.3} after {steps} steps");
    for (index, (device, time)) in towers.iter().enumerate() {
        let each = time.as_secs_f64() * 1e6 / steps as f64;
        println!("tower {index} on {device}: {each:.0} us a step");
    }
    Ok(())
}
