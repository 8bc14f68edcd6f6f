//! Several devices in one process: the example, and what they compute together.

#![allow(dead_code, reason = "the example has a main of its own")]

#[path = "../../examples/multi_device.rs"]
mod multi_device;

use std::thread;

use pushpull::blocking::{TrainingSession, Worker};
use pushpull::compute::{Compute, Device, DeviceParams, DeviceTowers, Mlp, Model, Samples};
use pushpull::local::Cluster;
use pushpull::training::TrainingConfig;
use pushpull::{Params, PsConfig, Push, Sgd, Synchronous};

#[test]
fn towers_of_one_process_learn_together() {
    let devices = ["cpu:1", "cpu:2", "cpu:1"].map(str::to_owned);
    let outcome = multi_device::train(&devices, 1_500).unwrap();
    assert_eq!(outcome.steps, 1_500);
    assert!(outcome.accuracy > 0.95, "{outcome:?}");
    let names: Vec<&str> = outcome.towers.iter().map(|(device, _)| device.as_str()).collect();
    assert_eq!(names, devices);
    assert!(outcome.towers.iter().all(|(_, time)| !time.is_zero()), "{outcome:?}");
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let error = multi_device::train(&["cuda:99".to_owned()], 1).unwrap_err();
    // Without a driver it says so, and which libraries it tried.
    let named =
        ["cuda:99", "no driver is installed"].iter().any(|text| error.to_string().contains(text));
    assert!(named, "{error}");
}

const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];
const STEPS: u64 = 12;

fn model() -> Model<Mlp> {
    Model::new(Mlp::new(Device::cpu_threads(1).unwrap(), &[3, 8, 2]), NAMES)
}

/// Trains synchronously, each worker on its part of every batch, and returns the final values.
fn final_values<C>(models: Vec<C>) -> Vec<Vec<f32>>
where
    C: for<'a> Compute<Samples<'a>> + Send + 'static,
{
    let workers = models.len();
    let cluster = Cluster::start(1, workers as u32, |cluster, task| {
        let mode = Synchronous::new(workers as u32).deterministic(true);
        PsConfig::new(cluster, task, Sgd::new(0.5)).mode(mode).last_step(STEPS)
    })
    .unwrap();
    let train = |(index, mut model): (usize, C)| {
        let worker = cluster.worker_config(index as u32);
        thread::spawn(move || {
            let config = TrainingConfig::new(worker).variables(model.variables().unwrap());
            let mut session = TrainingSession::start(config).unwrap();
            while let Some(mut step) = session.step().unwrap() {
                let samples = 12 / workers;
                let first = step.step() as usize * 12 + index * samples;
                let labels: Vec<u32> = (first..first + samples).map(|n| (n % 2) as u32).collect();
                let value = |n: usize| (n as f32 * 0.7).sin() + (n / 3 % 2) as f32;
                let features: Vec<f32> = (first * 3..(first + samples) * 3).map(value).collect();
                let batch = Samples { features: &features, labels: &labels };
                let loss = step.compute(&mut model, batch).unwrap();
                assert!(loss.is_finite());
                step.push().unwrap();
            }
            session.close().unwrap().params.unwrap()
        })
    };
    let workers: Vec<_> = models.into_iter().enumerate().map(train).collect();
    let ends: Vec<Params> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    cluster.stop().unwrap();
    assert_eq!(ends[0].step(), STEPS);
    ends[0].views::<f32, 4>(NAMES).unwrap().map(<[f32]>::to_vec).to_vec()
}

#[test]
fn two_workers_of_two_towers_make_one_mean_of_four_parts() {
    let alone = final_values(vec![model()]);
    let towers = || DeviceTowers::new([model(), model()]);
    let divided = final_values(vec![towers(), towers()]);
    for (found, expected) in divided.concat().iter().zip(alone.concat()) {
        assert!((found - expected).abs() < 1e-5, "{found} instead of {expected}");
    }
    assert!(alone[1].iter().any(|&bias| bias.abs() > 1e-3), "nothing was trained");
}

/// A worker without a session: pulls to a device and pushes from it.
#[test]
fn values_travel_to_a_device_and_gradients_from_it() {
    let cluster = Cluster::start(1, 1, |cluster, task| {
        PsConfig::new(cluster, task, Sgd::new(0.5)).last_step(30)
    })
    .unwrap();
    let mut model = model();
    let mut worker = Worker::connect(cluster.worker_config(0)).unwrap();
    let params = worker.join(&model.variables().unwrap(), |_| ()).unwrap();
    let device = model.device().clone();
    let mut local = DeviceParams::new(&device, params).unwrap();
    let batch = Samples { features: &[1.0, 0.0, 0.5, 0.0, 1.0, -0.5], labels: &[0, 1] };
    let mut losses = Vec::new();
    while let Some(token) = worker.token().unwrap() {
        worker.pull_to(&token, &mut local).unwrap();
        let mut gradients = worker.gradients_on(&device).unwrap();
        losses.push(model.gradients(local.values(), batch, &mut gradients.out()).unwrap());
        assert!(matches!(worker.push_from(token, gradients).unwrap(), Push::Applied { .. }));
    }
    assert_eq!((losses.len(), local.host().step()), (30, 29));
    assert!(losses[29] < 0.2 * losses[0], "{losses:?}");
    cluster.stop().unwrap();
}
