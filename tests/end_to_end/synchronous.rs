//! Synchronous training over sockets: several replicas equal one with a larger batch, and
//! deterministic runs give the same bits.

use std::sync::Barrier;

use pushpull::optim::Optimizer;
use pushpull::server::OnLoss;
use pushpull::{Adam, PsConfig, Pulled, Push, Sgd, Synchronous, VariableSpec};
use sha2::{Digest, Sha256};

use crate::cluster::{TestCluster, vector};

const FEATURES: usize = 12;
const STEPS: u64 = 50;
/// Samples per step, over all replicas.
const BATCH: usize = 32;

fn synchronous(replicas_to_aggregate: u32, total_num_replicas: u32) -> Synchronous {
    Synchronous::new(replicas_to_aggregate).total_num_replicas(total_num_replicas)
}

/// Returns a number between -1 and 1 that depends only on `at`.
fn noise(at: u64) -> f32 {
    let mut x = at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x ^ (x >> 27)) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Computes the gradient of a linear model's mean square error over these samples.
fn gradient(weights: &[f32], bias: f32, samples: std::ops::Range<u64>) -> (Vec<f32>, f32) {
    let count = (samples.end - samples.start) as f32;
    let mut dw = vec![0.0; FEATURES];
    let mut db = 0.0;
    for sample in samples {
        let x: Vec<f32> = (0..FEATURES as u64).map(|f| noise(sample * 64 + f)).collect();
        let target: f32 = x.iter().enumerate().map(|(f, x)| x * f as f32 * 0.1).sum::<f32>() + 0.5;
        let found: f32 = x.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>() + bias;
        let error = 2.0 * (found - target) / count;
        dw.iter_mut().zip(&x).for_each(|(dw, x)| *dw += error * x);
        db += error;
    }
    (dw, db)
}

fn variables() -> [VariableSpec; 2] {
    [vector("w", FEATURES as u64), vector("b", 1)]
}

/// Trains `replicas` replicas, each on its share of every batch, and returns the final values.
fn train(
    replicas: u32,
    optimizer: impl Optimizer + Clone,
    configure: impl Fn(PsConfig, Synchronous) -> PsConfig,
) -> Vec<f32> {
    let mode = synchronous(replicas, replicas);
    let cluster = TestCluster::start(2, replicas as usize, optimizer, |config| {
        configure(config.last_step(STEPS), mode)
    });
    let trained = Barrier::new(replicas as usize);
    let values = std::thread::scope(|scope| {
        let train = |index: u32| {
            let cluster = &cluster;
            let trained = &trained;
            move || {
                let mut worker = cluster.worker(index);
                let mut params = worker.join(&variables(), |_| ()).unwrap();
                while let Some(token) = worker.token().unwrap() {
                    let step = token.step();
                    if worker.pull(&token, &mut params).unwrap() == Pulled::Stale {
                        panic!("a pull was stale though each step waits for all replicas");
                    }
                    let share = BATCH as u64 / u64::from(replicas);
                    let first = step * BATCH as u64 + u64::from(index) * share;
                    let bias = params.view::<f32>("b").unwrap()[0];
                    let weights = params.view::<f32>("w").unwrap();
                    let (dw, db) = gradient(weights, bias, first..first + share);
                    let mut gradients = worker.gradients();
                    gradients.view_mut::<f32>("w").unwrap().copy_from_slice(&dw);
                    gradients.view_mut::<f32>("b").unwrap()[0] = db;
                    let pushed = worker.push(token, gradients).unwrap();
                    assert_eq!(pushed, Push::Accepted { step: step + 1 });
                }
                // All replicas have reached the end, so the values no longer change.
                trained.wait();
                let mut reader = cluster.worker(index);
                let params = reader.join(&variables(), |_| ()).unwrap();
                let mut values = params.view::<f32>("w").unwrap().to_vec();
                values.extend(params.view::<f32>("b").unwrap());
                values
            }
        };
        let threads: Vec<_> = (0..replicas).map(|index| scope.spawn(train(index))).collect();
        let values: Vec<Vec<f32>> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(values.windows(2).all(|pair| pair[0] == pair[1]), "all read equal values");
        values.into_iter().next().unwrap()
    });
    cluster.stop();
    values
}

#[test]
fn replicas_with_small_batches_equal_one_with_a_large_batch() {
    for replicas in [2, 4] {
        let many = train(replicas, Sgd::new(0.1), |config, mode| config.mode(mode));
        let one = train(1, Sgd::new(0.1), |config, mode| config.mode(mode));
        assert!(one[1] > 0.05, "nothing was learned: {one:?}");
        for (many, one) in many.iter().zip(&one) {
            assert!((many - one).abs() <= 1e-5, "{many} of {replicas} replicas, {one} of one");
        }
    }
    let many = train(2, Adam::new(0.02), |config, mode| config.mode(mode).shards(2));
    let one = train(1, Adam::new(0.02), |config, mode| config.mode(mode));
    for (many, one) in many.iter().zip(&one) {
        assert!((many - one).abs() <= 1e-5, "{many} of 2 replicas, {one} of one, with Adam");
    }
}

#[test]
fn two_deterministic_runs_give_the_same_bits() {
    let run = || {
        let values = train(4, Adam::new(0.02), |config, mode| {
            config.mode(mode.deterministic(true)).shards(2)
        });
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let digest = Sha256::digest(&bytes);
        digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let first = run();
    let second = run();
    println!("sha256 of the weights after {STEPS} steps: {first}, {second}");
    assert_eq!(first, second);
}

#[test]
fn a_step_with_a_backup_replica_takes_two_gradients_of_three() {
    let mode = synchronous(2, 3).on_loss(OnLoss::Shrink { min: 2 });
    let cluster = TestCluster::sgd(3, |config| config.mode(mode).last_step(40).shards(2));
    let results: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let train = |index: u32| {
            let cluster = &cluster;
            move || {
                let mut worker = cluster.worker(index);
                let mut params = worker.join(&[vector("v", 1000), vector("u", 3)], |_| ()).unwrap();
                let mut accepted = 0;
                let mut stale = 0;
                while let Some(token) = worker.token().unwrap() {
                    if worker.pull(&token, &mut params).unwrap().is_stale() {
                        continue;
                    }
                    let step = token.step() as f32;
                    let v = params.view::<f32>("v").unwrap();
                    assert!(v.iter().all(|&v| v == -step), "values of step {step}: {v:?}");
                    assert!(params.view::<f32>("u").unwrap().iter().all(|&u| u == -step));
                    let mut gradients = worker.gradients();
                    gradients.view_mut::<f32>("v").unwrap().fill(1.0);
                    gradients.view_mut::<f32>("u").unwrap().fill(1.0);
                    match worker.push(token, gradients).unwrap() {
                        Push::Accepted { .. } => accepted += 1,
                        Push::Stale { .. } => stale += 1,
                        other => panic!("{other:?}"),
                    }
                }
                (accepted, stale)
            }
        };
        let threads: Vec<_> = (0..3).map(|index| scope.spawn(train(index))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let accepted: u64 = results.iter().map(|(accepted, _)| accepted).sum();
    let metrics = cluster.handle().metrics();
    assert_eq!((accepted, metrics.gradients_admitted, metrics.global_step), (80, 80, 40));
    cluster.stop();
}
