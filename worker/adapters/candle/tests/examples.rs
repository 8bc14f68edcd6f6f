//! The two examples: what differs between them, and what they learn.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../examples/images/mod.rs"]
mod images;

use std::collections::HashSet;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use images::{ImageNetwork, ImageSet};
use pushpull::local::Cluster;
use pushpull::training::TrainingConfig;
use pushpull::{Adam, Mode, PsConfig, Synchronous};
use pushpull_candle::PushPull;

const STEPS: u64 = 300;
const ROWS: usize = 64;
const RATE: f64 = 0.003;

fn network() -> (VarMap, ImageNetwork) {
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let network = ImageNetwork::new(8, builder).unwrap();
    (variables, network)
}

/// The lines of a program without those of its documentation.
fn code(source: &str) -> Vec<&str> {
    source.lines().filter(|line| !line.starts_with("//!")).collect()
}

#[test]
fn five_lines_make_a_trainer_distributed() {
    let single = code(include_str!("../examples/single.rs"));
    let distributed = code(include_str!("../examples/distributed.rs"));
    let before: HashSet<&str> = single.into_iter().collect();
    let changed: Vec<&str> =
        distributed.into_iter().filter(|line| !before.contains(line)).collect();
    println!("{} lines are new or changed: {changed:#?}", changed.len());
    assert!(changed.len() <= 5 && changed.len() >= 3, "{changed:#?}");
}

#[test]
fn two_replicas_learn_what_one_process_learns() {
    let digits = ImageSet::digits(&Device::Cpu).unwrap();
    let (variables, alone) = network();
    // Both begin with the same values.
    let first: Vec<(String, Tensor)> = variables
        .data()
        .lock()
        .unwrap()
        .iter()
        .map(|(name, variable)| (name.clone(), variable.as_tensor().copy().unwrap()))
        .collect();
    let mut optimizer = AdamW::new_lr(variables.all_vars(), RATE).unwrap();
    let since = Instant::now();
    for step in 0..STEPS {
        let (images, labels) = digits.batch(step, ROWS).unwrap();
        optimizer.backward_step(&alone.loss(&images, &labels).unwrap()).unwrap();
    }
    let alone_time = since.elapsed();
    let expected = alone.accuracy(&digits).unwrap();

    let cluster = Cluster::start(1, 2, |cluster, task| {
        let mode: Mode = Synchronous::new(2).into();
        PsConfig::new(cluster, task, Adam::new(RATE)).mode(mode).last_step(STEPS)
    })
    .unwrap();
    let train = |worker: u32| {
        let config = TrainingConfig::new(cluster.worker_config(worker));
        let first = first.clone();
        thread::spawn(move || {
            let digits = ImageSet::digits(&Device::Cpu).unwrap();
            let (mut variables, network) = network();
            variables.set(first.into_iter()).unwrap();
            let mut optimizer = PushPull::from_varmap(&variables, config).unwrap();
            let half = ROWS / 2;
            let mut in_adapter = Duration::ZERO;
            while optimizer.ready().unwrap() {
                let (images, labels) = digits.batch(optimizer.global_step(), ROWS).unwrap();
                let part = |all: Tensor| all.narrow(0, worker as usize * half, half).unwrap();
                let images = part(images);
                let labels = part(labels);
                let loss = network.loss(&images, &labels).unwrap();
                let gradients = loss.backward().unwrap();
                let since = Instant::now();
                optimizer.step(&gradients).unwrap();
                in_adapter += since.elapsed();
            }
            let accuracy = network.accuracy(&digits).unwrap();
            optimizer.close().unwrap();
            (accuracy, in_adapter)
        })
    };
    let workers = [0, 1].map(train);
    let found = workers.map(|worker| worker.join().unwrap());
    cluster.stop().unwrap();
    println!(
        "accuracy {expected:.4} in one process ({:.2} ms a step), {:.4} with two replicas; a step of \
         the optimizer takes {:.2} ms, most of it waiting for the other replica",
        alone_time.as_secs_f64() * 1e3 / STEPS as f64,
        found[0].0,
        found[0].1.as_secs_f64() * 1e3 / STEPS as f64,
    );
    assert!(expected > 0.93, "candle alone reaches {expected}");
    for (accuracy, _) in found {
        assert!((accuracy - expected).abs() <= 0.0101, "{accuracy} instead of {expected}");
    }
}

/// What the adapter adds to a step, beside the forward and backward pass. Printed, not asserted: it
/// is a matter of the machine.
#[test]
fn the_cost_of_a_step_is_measured() {
    let cluster = Cluster::start(1, 1, |cluster, task| {
        PsConfig::new(cluster, task, Adam::new(RATE)).last_step(200)
    })
    .unwrap();
    let digits = ImageSet::digits(&Device::Cpu).unwrap();
    let (variables, network) = network();
    let config = TrainingConfig::new(cluster.worker_config(0));
    let mut optimizer = PushPull::from_varmap(&variables, config).unwrap();
    let mut compute = Vec::new();
    let mut step = Vec::new();
    while optimizer.ready().unwrap() {
        let since = Instant::now();
        let (images, labels) = digits.batch(optimizer.global_step(), ROWS).unwrap();
        let gradients = network.loss(&images, &labels).unwrap().backward().unwrap();
        compute.push(since.elapsed());
        let since = Instant::now();
        optimizer.step(&gradients).unwrap();
        step.push(since.elapsed());
    }
    optimizer.close().unwrap();
    cluster.stop().unwrap();
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let compute = median(compute);
    let step = median(step);
    println!("a step computes for {compute:?}, and pushes and pulls for {step:?}");
    assert!(!step.is_zero());
}
