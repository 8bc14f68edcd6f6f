//! In-graph replication: towers on several tasks make one update.

use pushpull::blocking::Worker;
use pushpull::local::Cluster;
use pushpull::server::OnLoss;
use pushpull::services::{
    FunctionClient, FunctionClientConfig, FunctionServerConfig, Functions, ServiceError, Towers,
    Value,
};
use pushpull::{ClusterSpec, Mode, PsConfig, Sgd, Synchronous, TaskId, VariableSpec};

use crate::services::cluster::{LONG, block_on, listen};

/// A linear model of two weights with the mean of squared errors; and gradients as they are fed.
fn functions() -> Functions {
    Functions::new()
        .towers()
        .add("tower", |call| {
            let params = call.values()?;
            let w = params.view::<f32>("w")?;
            let samples = call.feed::<f32>("x")?.chunks_exact(3);
            let count = samples.len() as f32;
            let mut gradients = call.tower_gradients()?;
            let out = gradients.view_mut::<f32>("w")?;
            out.fill(0.0);
            let mut loss = 0.0;
            for sample in samples {
                let error = w[0] * sample[0] + w[1] * sample[1] - sample[2];
                loss += error * error / count;
                out[0] += 2.0 * error * sample[0] / count;
                out[1] += 2.0 * error * sample[1] / count;
            }
            call.tower(gradients, loss)
        })
        .add("constant", |call| {
            let mut gradients = call.tower_gradients()?;
            gradients.view_mut::<f32>("w")?.fill(call.input("g")?.element()?);
            call.tower(gradients, 1.0)
        })
}

/// A parameter server with `w` of two zeros, and workers.
struct Place {
    ps: Cluster,
    servers: Vec<pushpull::services::FunctionServer>,
    client: FunctionClient,
}

fn place(workers: usize, learning_rate: f64) -> Place {
    place_in(Mode::default(), workers, learning_rate)
}

fn place_in(mode: Mode, workers: usize, learning_rate: f64) -> Place {
    let start = |cluster, task| {
        let config = PsConfig::new(cluster, task, Sgd::new(learning_rate));
        config.mode(mode).elastic_workers(true)
    };
    let ps = Cluster::start(1, 1, start).unwrap();
    let mut chief = Worker::connect(ps.worker_config(0)).unwrap();
    chief.join(&[VariableSpec::f32("w", [2]).unwrap()], |_| ()).unwrap();
    chief.leave().unwrap();
    let listeners = listen(workers);
    let cluster = ClusterSpec::builder()
        .job("ps", ps.spec().job_tasks("ps").unwrap().into_iter().flatten())
        .job("worker", listeners.iter().map(|listener| listener.address()))
        .build()
        .unwrap();
    let servers: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(index, listener)| {
            let task = TaskId::worker(index as u32);
            listener.start(FunctionServerConfig::new(cluster.clone(), task, functions())).unwrap()
        })
        .collect();
    let config = FunctionClientConfig::new(servers[0].target()).timeout(LONG);
    let client = block_on(FunctionClient::connect(config)).unwrap();
    Place { ps, servers, client }
}

impl Place {
    fn weights(&self) -> [f32; 2] {
        block_on(async {
            let mut reader = pushpull::Reader::connect(self.ps.worker_config(0)).await.unwrap();
            let mut params = reader.params();
            reader.pull(&mut params).await.unwrap();
            params.view::<f32>("w").unwrap().try_into().unwrap()
        })
    }
}

#[test]
fn the_mean_of_two_towers_is_one_update() {
    let place = place(2, 1.0);
    let towers = Towers::new(&place.client, "constant", [0, 1].map(TaskId::worker)).unwrap();
    let step =
        block_on(towers.step(|tower, call| Ok(call.feed("g", [1.0_f32, 3.0][tower])))).unwrap();
    assert_eq!((step.step, step.counted, step.loss), (1, true, 1.0));
    assert_eq!(place.weights(), [-2.0, -2.0]);
}

#[test]
fn two_clients_of_two_towers_make_one_mean_in_synchronous_mode() {
    // The chief has left, so a step would begin with one replica.
    let mode = Synchronous::new(2).on_loss(OnLoss::Shrink { min: 2 });
    let place = place_in(mode.into(), 4, 1.0);
    let config = FunctionClientConfig::new(place.servers[2].target()).timeout(LONG);
    let other = block_on(FunctionClient::connect(config)).unwrap();
    let first = Towers::new(&place.client, "constant", [0, 1].map(TaskId::worker)).unwrap();
    let second = Towers::new(&other, "constant", [2, 3].map(TaskId::worker)).unwrap();
    for made in 1..=3_u8 {
        let (left, right) = block_on(async {
            tokio::join!(
                first.step(|tower, call| Ok(call.feed("g", [1.0_f32, 3.0][tower]))),
                second.step(|tower, call| Ok(call.feed("g", [5.0_f32, 7.0][tower]))),
            )
        });
        for step in [left.unwrap(), right.unwrap()] {
            assert_eq!((step.step, step.counted), (made.into(), true));
        }
        assert_eq!(place.weights(), [-4.0 * f32::from(made); 2]);
    }
}

#[test]
fn any_number_of_towers_gives_the_same_weights() {
    // Samples of 3 x - y + noise.
    let samples: Vec<[f32; 3]> = (0..64)
        .map(|n| {
            let x = (n as f32 * 0.7).sin();
            let y = (n as f32 * 1.3).cos();
            [x, y, 3.0 * x - y + (n as f32 * 2.1).sin() * 0.01]
        })
        .collect();
    let mut found = Vec::new();
    for count in [1_usize, 2, 4] {
        let place = place(count, 0.1);
        let tasks = (0..count as u32).map(TaskId::worker);
        let towers = Towers::new(&place.client, "tower", tasks).unwrap();
        let mut losses = Vec::new();
        for _ in 0..60 {
            let step = towers.step(|tower, call| {
                let part = samples[tower * 64 / count..(tower + 1) * 64 / count].concat();
                Ok(call.feed("x", Value::tensor(&[part.len() as u64], &part)?))
            });
            losses.push(block_on(step).unwrap().loss);
        }
        assert!(losses[59] < losses[0] / 100.0, "{losses:?}");
        found.push(place.weights());
    }
    for weights in &found {
        for (found, first) in weights.iter().zip(found[0]) {
            assert!((found - first).abs() <= 1e-6, "{weights:?} beside {first}");
        }
    }
}

#[test]
fn a_tower_that_fails_is_named_and_nothing_is_updated() {
    let place = place(2, 1.0);
    let towers = Towers::new(&place.client, "constant", [0, 1].map(TaskId::worker)).unwrap();
    let fed = |tower: usize, call: pushpull::services::Call| match tower {
        0 => Ok(call.feed("g", 1.0_f32)),
        _ => Ok(call),
    };
    let error = block_on(towers.step(fed)).unwrap_err();
    assert!(matches!(error, ServiceError::Failed { .. }), "{error:?}");
    assert!(
        error.to_string().contains("on /job:worker/task:1: cannot find the value \"g\""),
        "{error}"
    );
    assert_eq!(place.weights(), [0.0, 0.0]);
    let none = Towers::new(&place.client, "constant", []).unwrap_err();
    assert!(none.to_string().contains("0 towers, not 1 to 32"), "{none}");
}
