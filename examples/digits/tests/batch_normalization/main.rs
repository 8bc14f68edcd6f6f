//! Batch normalization through servers reaches the accuracy of a training in one process.
//!
//! The running statistics are local variables or means. If they were plain variables, every pull
//! would replace them by the servers' values, and the trained network would be evaluated with
//! statistics that it never had.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod network;

use network::{Network, STATISTICS, Samples, TRAINED};
use pushpull::blocking::{Reader, TrainingSession};
use pushpull::local::Cluster;
use pushpull::training::TrainingConfig;
use pushpull::variable::Initializer;
use pushpull::{PsConfig, Sgd, Synchronous, VariableSpec};

const NETWORK: Network = Network { inputs: 64, hidden: 32, classes: 10 };
const REPLICAS: u64 = 2;
const BATCH: usize = 32;
const STEPS: u64 = 300;
const RATE: f64 = 0.1;
const SEED: u64 = 11;

/// The digits, of which every fifth is held out.
struct Digits {
    train: Samples,
    test: Samples,
}

impl Digits {
    fn load() -> Digits {
        let digits = smartcore::dataset::digits::load_dataset();
        let mut split = Digits { train: Samples::default(), test: Samples::default() };
        let rows = digits.data.chunks_exact(NETWORK.inputs).zip(&digits.target);
        for (index, (pixels, &label)) in rows.enumerate() {
            let part = if index % 5 == 0 { &mut split.test } else { &mut split.train };
            part.features.extend(pixels.iter().map(|pixel| pixel / 16.0));
            part.labels.push(label as usize);
        }
        split
    }

    /// Returns a batch of an endless training.
    fn batch(&self, number: u64) -> Samples {
        let rows = self.train.labels.len();
        let batches = (rows / BATCH) as u64;
        let order = shuffled(rows, SEED + number / batches);
        let first = (number % batches) as usize * BATCH;
        let mut batch = Samples::default();
        for &row in &order[first..first + BATCH] {
            let pixels = row * NETWORK.inputs..(row + 1) * NETWORK.inputs;
            batch.features.extend_from_slice(&self.train.features[pixels]);
            batch.labels.push(self.train.labels[row]);
        }
        batch
    }
}

/// Returns the numbers below `count` in an order that depends on the seed (Fisher and Yates, by
/// SplitMix64).
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state: u64 = seed;
    for last in (1..count).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        order.swap(last, ((bits ^ (bits >> 31)) % (last as u64 + 1)) as usize);
    }
    order
}

fn initializer(name: &str) -> Initializer {
    match name {
        "w1" | "w2" => Initializer::GlorotUniform,
        "gamma" | "running_variance" => Initializer::Ones,
        _ => Initializer::Zeros,
    }
}

/// The variables, with the statistics as `declare` makes them.
fn variables(declare: impl Fn(VariableSpec) -> VariableSpec) -> Vec<VariableSpec> {
    let variable = |name: &str, shape: Vec<u64>| {
        VariableSpec::f32(name, shape).unwrap().initializer(initializer(name)).seed(SEED)
    };
    let trained = TRAINED.into_iter().zip(NETWORK.shapes());
    let trained = trained.map(|(name, shape)| variable(name, shape));
    let width = NETWORK.hidden as u64;
    let statistics = STATISTICS.map(|name| declare(variable(name, vec![width])));
    trained.chain(statistics).collect()
}

/// Trains without servers, by the mean gradient of as many batches a step as there are replicas,
/// and returns the accuracy.
fn train_alone(digits: &Digits) -> f64 {
    let values = variables(|statistics| statistics).into_iter().map(|variable| {
        let mut values = vec![0.0_f32; variable.shape().elements() as usize];
        let initializer = variable.initializer;
        initializer.fill(SEED, variable.name(), variable.shape(), 0, &mut values);
        values
    });
    let [w1, gamma, beta, w2, b2, mean, variance]: [Vec<f32>; 7] =
        values.collect::<Vec<_>>().try_into().unwrap();
    let mut params = [w1, gamma, beta, w2, b2];
    let mut statistics = [mean, variance];
    let mut gradients = params.clone();
    for step in 0..STEPS {
        let before = params.clone();
        for replica in 0..REPLICAS {
            NETWORK.train(
                before.each_ref().map(Vec::as_slice),
                &digits.batch(step * REPLICAS + replica),
                gradients.each_mut().map(Vec::as_mut_slice),
                statistics.each_mut().map(Vec::as_mut_slice),
            );
            let rate = RATE as f32 / REPLICAS as f32;
            for (param, gradient) in params.iter_mut().flatten().zip(gradients.iter().flatten()) {
                *param -= rate * gradient;
            }
        }
    }
    let params = params.each_ref();
    let statistics = statistics.each_ref();
    NETWORK.accuracy(params.map(Vec::as_slice), statistics.map(Vec::as_slice), &digits.test)
}

/// Trains one replica in a session.
fn train_replica(config: TrainingConfig, digits: &Digits, replica: u64) {
    let mut session = TrainingSession::start(config).unwrap();
    while let Some(mut step) = session.step().unwrap() {
        let batch = digits.batch(step.step() * REPLICAS + replica);
        let (params, gradients) = step.parts();
        let mut statistics = STATISTICS.map(|name| params.view::<f32>(name).unwrap().to_vec());
        let loss = NETWORK.train(
            params.views(TRAINED).unwrap(),
            &batch,
            gradients.views_mut(TRAINED).unwrap(),
            statistics.each_mut().map(Vec::as_mut_slice),
        );
        for (name, values) in STATISTICS.into_iter().zip(statistics) {
            params.view_mut::<f32>(name).unwrap().copy_from_slice(&values);
        }
        step.scalar("loss", loss);
        step.push().unwrap();
    }
    session.close().unwrap();
}

/// Trains two replicas through two servers, and returns the accuracy of the servers' values.
fn train_through_servers(digits: &Digits, declare: impl Fn(VariableSpec) -> VariableSpec) -> f64 {
    let cluster = Cluster::start(2, REPLICAS as u32, |cluster, task| {
        let mode = Synchronous::new(2).total_num_replicas(2).deterministic(true);
        PsConfig::new(cluster, task, Sgd::new(RATE)).mode(mode).last_step(STEPS)
    })
    .unwrap();
    let variables = variables(declare);
    std::thread::scope(|scope| {
        for replica in 0..REPLICAS {
            let config = TrainingConfig::new(cluster.worker_config(replica as u32))
                .variables(variables.iter().cloned());
            scope.spawn(move || train_replica(config, digits, replica));
        }
    });
    let mut reader = Reader::connect(cluster.worker_config(0)).unwrap();
    let mut params = reader.params();
    assert_eq!(reader.pull(&mut params).unwrap(), STEPS);
    let trained = params.views(TRAINED).unwrap();
    let statistics = params.views(STATISTICS).unwrap();
    let accuracy = NETWORK.accuracy(trained, statistics, &digits.test);
    cluster.stop().unwrap();
    accuracy
}

#[test]
fn running_statistics_survive_training_through_servers() {
    let digits = Digits::load();
    let alone = train_alone(&digits);
    let local = train_through_servers(&digits, VariableSpec::local);
    let mean = train_through_servers(&digits, |statistics| statistics.mean_every_steps(4));
    let plain = train_through_servers(&digits, VariableSpec::plain);
    println!("alone {alone:.3}, local {local:.3}, mean {mean:.3}, plain {plain:.3}");
    assert!(alone > 0.9, "{alone}");
    assert!((alone - local).abs() <= 0.01, "alone {alone}, local {local}");
    assert!((alone - mean).abs() <= 0.01, "alone {alone}, mean {mean}");
    assert!(plain < alone - 0.05, "pulled statistics are useless: alone {alone}, plain {plain}");
}

/// The backward pass agrees with differences of the loss.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let network = Network { inputs: 3, hidden: 4, classes: 2 };
    let samples = Samples {
        features: (0..15).map(|i| ((i * 7 % 11) as f32) / 11.0).collect(),
        labels: vec![0, 1, 1, 0, 1],
    };
    let lengths = network.shapes().map(|shape| shape.iter().product::<u64>() as usize);
    let mut params = lengths.map(|length| vec![0.0_f32; length]);
    for (tensor, values) in params.iter_mut().enumerate() {
        for (at, value) in values.iter_mut().enumerate() {
            *value = ((at * 5 + tensor * 3) % 9) as f32 / 6.0 - 0.6;
        }
    }
    let loss = |params: &[Vec<f32>; 5]| {
        let mut gradients = params.clone();
        let mut statistics = [vec![0.0; 4], vec![1.0; 4]];
        let loss = network.train(
            params.each_ref().map(Vec::as_slice),
            &samples,
            gradients.each_mut().map(Vec::as_mut_slice),
            statistics.each_mut().map(Vec::as_mut_slice),
        );
        (loss, gradients)
    };
    let gradients = loss(&params).1;
    const DISTANCE: f32 = 1e-2;
    for tensor in 0..5 {
        for at in 0..params[tensor].len() {
            let value = params[tensor][at];
            params[tensor][at] = value + DISTANCE;
            let above = loss(&params).0;
            params[tensor][at] = value - DISTANCE;
            let slope = (above - loss(&params).0) / (2.0 * DISTANCE);
            params[tensor][at] = value;
            let found = gradients[tensor][at];
            let name = TRAINED[tensor];
            assert!((slope - found).abs() < 0.02, "{name}[{at}]: {found}, and not {slope}");
        }
    }
}
