//! The two examples: what differs between them, and what they learn. Burn's `Learner` as a worker.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../examples/digits/mod.rs"]
mod digits;

use std::collections::HashSet;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::optim::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::Device;
use burn::train::metric::LossMetric;
use burn::train::{Interrupter, Learner, LearningResult, SupervisedTraining, TrainStep};
use digits::{BATCH, DigitNetwork, batches};
use pushpull::local::Cluster;
use pushpull::training::{StopReason, TrainingConfig};
use pushpull::{Adam, Mode, PsConfig, Synchronous};
use pushpull_burn::{AdapterError, PushPull, PushPullStrategy};

const EPOCHS: usize = 20;
const RATE: f64 = 0.005;

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

/// Makes a network with the same values each time.
fn network() -> DigitNetwork {
    // The seed is that of all threads.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock();
    Device::default().seed(1);
    DigitNetwork::new(&Device::default().autodiff())
}

fn learner(network: DigitNetwork) -> Learner<DigitNetwork> {
    Learner::new(network, AdamConfig::new().init(), RATE)
}

/// Trains with burn's loop on batches of `rows`. `seed` decides their order.
fn training(folder: &str, rows: usize, seed: u64) -> SupervisedTraining<DigitNetwork> {
    let folder = std::env::temp_dir().join(format!("{folder}-{}", std::process::id()));
    SupervisedTraining::new(folder, batches(false, rows, seed), batches(true, BATCH, 0))
        .metric_valid_numeric(LossMetric::new())
        .num_epochs(EPOCHS)
}

fn accuracy(result: &LearningResult<DigitNetwork>) -> f32 {
    result.model.accuracy(&Device::default())
}

#[test]
fn two_learners_learn_what_one_learns() {
    let network = network();
    let alone = training("burn-alone", BATCH, 0).launch(learner(network.clone()));
    let expected = accuracy(&alone);
    assert!(expected > 0.93, "burn alone reaches {expected}");

    // As many steps, each of half a batch of both.
    let steps = (EPOCHS * digits::digits(false).len().div_ceil(BATCH)) as u64;
    let cluster = Cluster::start(1, 2, |cluster, task| {
        let mode: Mode = Synchronous::new(2).into();
        PsConfig::new(cluster, task, Adam::new(RATE)).mode(mode).last_step(steps)
    })
    .unwrap();
    let train = |worker: u32| {
        let config = TrainingConfig::new(cluster.worker_config(worker));
        let network = network.clone();
        thread::spawn(move || {
            let strategy = PushPullStrategy::new(config, Device::default());
            let training = training(&format!("burn-{worker}"), BATCH / 2, worker.into());
            let training = training.with_training_strategy((&strategy).into());
            let result = training.launch(learner(network));
            assert!(result.error.is_none(), "{:?}", result.error);
            let end = strategy.end().unwrap().unwrap();
            assert!(strategy.end().is_none(), "it was taken");
            assert_eq!(end.reason, StopReason::LastStep);
            assert!(end.is_final && end.step == steps, "{end:?}");
            let reason = result.interrupted.and_then(|interruption| interruption.reason);
            assert!(reason.unwrap().contains(&steps.to_string()));
            result.model.accuracy(&Device::default())
        })
    };
    let found = [0, 1].map(train).map(|worker| worker.join().unwrap());
    cluster.stop().unwrap();
    println!("accuracy {expected:.4} in one process, {:.4} with two replicas", found[0]);
    assert_eq!(found[0], found[1], "both have the final values");
    assert!((found[0] - expected).abs() <= 0.0101, "{} instead of {expected}", found[0]);
}

/// Burn's own ways to stop end the worker, and the others go on without it.
#[test]
fn epochs_interrupters_and_accumulation_are_those_of_burn() {
    let cluster =
        Cluster::start(1, 1, |cluster, task| PsConfig::new(cluster, task, Adam::new(RATE)))
            .unwrap();
    let batches = digits::digits(false).len().div_ceil(BATCH) as u64;
    let run = |training: SupervisedTraining<DigitNetwork>| {
        let strategy = PushPullStrategy::new(cluster.worker_config(0), Device::default());
        let training = training.with_training_strategy((&strategy).into());
        let network = network();
        let result = training.launch(learner(network));
        (strategy.end().unwrap().unwrap().step, result)
    };
    let (first, result) = run(training("burn-epochs", BATCH, 0).num_epochs(2));
    assert_eq!((first, result.interrupted), (2 * batches, None));
    // The next training goes on with the servers' values, and pushes a gradient of four batches.
    let accumulated = training("burn-accumulated", BATCH, 0).num_epochs(1).grads_accumulation(4);
    let (second, _) = run(accumulated);
    assert_eq!(second, first + batches.div_ceil(4));
    let interrupter = Interrupter::new();
    interrupter.stop(Some("enough"));
    let (third, result) = run(training("burn-stop", BATCH, 0).with_interrupter(interrupter));
    assert_eq!(third, second);
    assert_eq!(result.interrupted.unwrap().reason.unwrap(), "enough");
    cluster.stop().unwrap();
}

/// An error that burn cannot express is returned by the strategy.
#[test]
fn a_training_that_cannot_begin_says_why() {
    let cluster =
        Cluster::start(1, 1, |cluster, task| PsConfig::new(cluster, task, Adam::new(RATE)))
            .unwrap();
    let strategy = PushPullStrategy::new(cluster.worker_config(0), Device::default());
    let network = network().no_grad();
    let training = training("burn-error", BATCH, 0).with_training_strategy((&strategy).into());
    let result = training.launch(learner(network));
    let error = strategy.end().unwrap().unwrap_err();
    assert_eq!(result.interrupted.unwrap().reason.unwrap(), error.to_string());
    cluster.stop().unwrap();
}

/// The servers would go on with their own rate.
#[test]
fn a_scheduler_of_the_learner_is_refused() {
    let cluster =
        Cluster::start(1, 1, |cluster, task| PsConfig::new(cluster, task, Adam::new(RATE)))
            .unwrap();
    let strategy = PushPullStrategy::new(cluster.worker_config(0), Device::default());
    let training = training("burn-scheduler", BATCH, 0).with_training_strategy((&strategy).into());
    let scheduler = ExponentialLrSchedulerConfig::new(RATE, 0.5).init().unwrap();
    training.launch(Learner::new(network(), AdamConfig::new().init(), scheduler));
    let error = strategy.end().unwrap().unwrap_err();
    assert!(matches!(error, AdapterError::Scheduler { step: 2, .. }), "{error}");
    cluster.stop().unwrap();
}

/// What the adapter adds to a step, beside the forward and backward pass. Printed, not asserted: it
/// is a matter of the machine.
#[test]
fn the_cost_of_a_step_is_measured() {
    let cluster = Cluster::start(1, 1, |cluster, task| {
        PsConfig::new(cluster, task, Adam::new(RATE)).last_step(100)
    })
    .unwrap();
    let network = network();
    let config = TrainingConfig::new(cluster.worker_config(0));
    let (mut optimizer, mut network) = PushPull::from_module(network, config).unwrap();
    let mut compute = Vec::new();
    let mut step = Vec::new();
    let loader = batches(false, BATCH, 0).to_device(&Device::default().autodiff());
    while optimizer.ready() {
        for batch in loader.iter() {
            if !optimizer.ready() {
                break;
            }
            let since = Instant::now();
            let gradients: GradientsParams = TrainStep::step(&network, batch.unwrap()).grads;
            compute.push(since.elapsed());
            let since = Instant::now();
            network = optimizer.step(network, gradients).unwrap();
            step.push(since.elapsed());
        }
    }
    optimizer.close(network).unwrap();
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
