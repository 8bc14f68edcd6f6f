//! Exact sums under concurrent pushes: every push is applied exactly once.

use std::thread;
use std::time::Duration;

use pushpull::blocking::{Reader, Worker};
use pushpull::protocol::Refusal;
use pushpull::{Error, Push, Sgd, WorkerConfig};

use super::cluster::{TestCluster, vector};

/// Pushes gradients of ones until there are no more tokens, and returns their number.
fn push_ones(config: WorkerConfig, elements: u64) -> u64 {
    let mut worker = Worker::connect(config).unwrap();
    let mut params = worker.join(&[vector("w", elements)], |_| ()).unwrap();
    let mut pushed = 0;
    while let Some(token) = worker.token().unwrap() {
        worker.pull(&token, &mut params).unwrap();
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        assert!(matches!(worker.push(token, gradients).unwrap(), Push::Applied { .. }));
        pushed += 1;
    }
    worker.leave().unwrap();
    pushed
}

/// Lets all workers of a cluster push ones up to its last step, and returns the value that every
/// element then has.
fn sum_of_ones(cluster: &TestCluster, workers: u32, elements: u64, last_step: u64) -> f32 {
    let pushed: u64 = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers)
            .map(|index| {
                let config = cluster.config(index);
                scope.spawn(move || push_ones(config, elements))
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!(pushed, last_step);
    assert_eq!(cluster.handle().metrics().global_step, last_step);
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut params = reader.params();
    assert_eq!(reader.pull(&mut params).unwrap(), last_step);
    let values = params.view::<f32>("w").unwrap();
    assert!(values.iter().all(|value| *value == values[0]), "torn: {values:?}");
    values[0]
}

#[test]
fn two_workers_times_a_thousand_pushes_are_exact() {
    let cluster =
        TestCluster::start(1, 2, Sgd::new(2.0_f64.powi(-10)), |config| config.last_step(2000));
    assert_eq!(sum_of_ones(&cluster, 2, 1, 2000), -1.953125);
    cluster.stop();
}

#[test]
fn the_last_step_is_exact_over_several_shards_and_tasks() {
    let cluster = TestCluster::start(2, 5, Sgd::new(1.0), |config| config.shards(2).last_step(503));
    // 300,000 elements take two parts of at most 1 MiB.
    assert_eq!(sum_of_ones(&cluster, 5, 300_000, 503), -503.0);
    cluster.stop();
}

#[test]
fn a_gradient_with_an_expired_token_is_applied_on_no_shard() {
    let tasks = 2;
    let last_step = 40;
    let cluster = TestCluster::start(tasks, 2, Sgd::new(1.0), |config| {
        config.shards(2).last_step(last_step).token_timeout(Some(Duration::from_millis(200)))
    });
    let names = ["a", "b", "c", "d"];
    let variables = names.map(|name| vector(name, 100));
    let gradients = |worker: &mut Worker| {
        let mut gradients = worker.gradients();
        for name in names {
            gradients.view_mut::<f32>(name).unwrap().fill(1.0);
        }
        gradients
    };
    let mut slow = cluster.worker(0);
    let mut params = slow.join(&variables, |_| ()).unwrap();
    let token = slow.token().unwrap().unwrap();
    slow.pull(&token, &mut params).unwrap();
    // The slow worker holds one of the 40 tokens. The fast worker gets it after it has expired.
    let mut fast = cluster.worker(1);
    let mut pulled = fast.join(&variables, |_| ()).unwrap();
    while let Some(token) = fast.token().unwrap() {
        fast.pull(&token, &mut pulled).unwrap();
        let gradients = gradients(&mut fast);
        assert!(matches!(fast.push(token, gradients).unwrap(), Push::Applied { .. }));
    }
    let slow_gradients = gradients(&mut slow);
    let refused = slow.push(token, slow_gradients).unwrap_err();
    assert!(matches!(refused, Error::Refused { refusal: Refusal::Token { .. }, .. }), "{refused}");
    for server in &cluster.servers {
        for (shard, metrics) in server.handle().metrics_by_shard().into_iter().enumerate() {
            assert_eq!(metrics.gradients_applied, last_step, "shard {shard}");
        }
    }
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut params = reader.params();
    reader.pull(&mut params).unwrap();
    for name in names {
        let values = params.view::<f32>(name).unwrap();
        assert!(values.iter().all(|value| *value == -(last_step as f32)), "{name}: {values:?}");
    }
    cluster.stop();
}

#[test]
fn twenty_five_clusters_of_eight_workers_share_one_process() {
    thread::scope(|scope| {
        let clusters: Vec<_> = (0..25_u64)
            .map(|index| {
                scope.spawn(move || {
                    let last_step = 80 + index;
                    let cluster = TestCluster::start(1, 8, Sgd::new(1.0), |config| {
                        config.last_step(last_step)
                    });
                    assert_eq!(sum_of_ones(&cluster, 8, 100, last_step), -(last_step as f32));
                    cluster.stop();
                })
            })
            .collect();
        for cluster in clusters {
            cluster.join().unwrap();
        }
    });
}
