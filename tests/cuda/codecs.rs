//! Gradients that a device encodes: the same bytes and residuals as those of the processor.

use std::future::poll_fn;
use std::task::Poll;

use pushpull::blocking::Worker;
use pushpull::compute::{Device, ViewMut};
use pushpull::local::Cluster;
use pushpull::variable::{Initializer, Partitioner, Shape};
use pushpull::worker::Codec;
use pushpull::{Error, Params, PsConfig, Push, Sgd, VariableSpec, WorkerConfig};
use pushpull_cuda_emulator::turn::DriverTurn;

const NAMES: [&str; 3] = ["whole", "cut", "plain"];
const ELEMENTS: [u64; 3] = [1_000, 777, 70];
const STEPS: u64 = 4;

const CODECS: [Codec; 6] = [
    Codec::F16,
    Codec::Bf16,
    Codec::Int8,
    Codec::OneBit,
    Codec::TopK { fraction: 0.1 },
    // The processor encodes these.
    Codec::Threshold { magnitude: 0.5 },
];

fn cluster() -> Cluster {
    let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.5));
    Cluster::start(2, 1, start).unwrap()
}

fn variables() -> Vec<VariableSpec> {
    let mut variables: Vec<VariableSpec> = NAMES
        .iter()
        .zip(ELEMENTS)
        .map(|(name, n)| VariableSpec::f32(*name, [n]).unwrap())
        .collect();
    variables[1] = variables[1].clone().partitioner(Partitioner::Fixed { shards: 2 });
    variables
}

/// Connects a worker that encodes two of the variables.
fn config(cluster: &Cluster, codec: Codec) -> WorkerConfig {
    cluster.worker_config(0).codec("whole", codec).codec("cut", codec)
}

/// Returns the gradients of a step.
fn gradients(step: u64) -> [Vec<f32>; 3] {
    ELEMENTS.map(|n| {
        let mut values = vec![0.0; n as usize];
        let uniform = Initializer::Uniform { low: -1.0, high: 1.0 };
        uniform.fill(step, "gradient", &Shape::new([n]).unwrap(), 0, &mut values);
        values
    })
}

/// Pushes the gradients of a step from a device.
fn push_from(worker: &mut Worker, device: &Device, values: &[Vec<f32>; 3]) -> Result<Push, Error> {
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients_on(device)?;
    let mut out = gradients.out();
    let views: Vec<ViewMut<'_, f32>> = out.views_mut(&NAMES)?;
    for (view, values) in views.into_iter().zip(values) {
        device.write(values, view)?;
    }
    worker.push_from(token, gradients)
}

/// Pushes the gradients of a step from the processor.
fn push(worker: &mut Worker, values: &[Vec<f32>; 3]) {
    let token = worker.token().unwrap().unwrap();
    let mut gradients = worker.gradients();
    for (view, values) in gradients.views_mut::<f32, 3>(NAMES).unwrap().into_iter().zip(values) {
        view.copy_from_slice(values);
    }
    worker.push(token, gradients).unwrap();
}

/// Returns all values of the servers, and the residuals.
fn state(worker: &mut Worker, params: &mut Params) -> (Vec<Vec<u32>>, Vec<u8>) {
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    drop(token);
    let bits = |name| params.view::<f32>(name).unwrap().iter().map(|x| x.to_bits()).collect();
    (NAMES.map(bits).to_vec(), worker.residuals().unwrap())
}

#[test]
fn a_device_encodes_as_the_processor_does() {
    let _turn = DriverTurn::start();
    let device = Device::cuda(0).unwrap();
    for codec in CODECS {
        let states = [false, true].map(|on_device| {
            let cluster = cluster();
            let mut worker = Worker::connect(config(&cluster, codec)).unwrap();
            let mut params = worker.join(&variables(), |_| ()).unwrap();
            let mut states = Vec::new();
            for step in 0..STEPS {
                // The residuals move to the device, back, and to the device again.
                match on_device && step != 2 {
                    true => drop(push_from(&mut worker, &device, &gradients(step)).unwrap()),
                    false => push(&mut worker, &gradients(step)),
                }
                states.push(state(&mut worker, &mut params));
            }
            // Restored residuals continue on the device.
            let saved = worker.residuals().unwrap();
            worker.restore_residuals(&saved).unwrap();
            match on_device {
                true => drop(push_from(&mut worker, &device, &gradients(STEPS)).unwrap()),
                false => push(&mut worker, &gradients(STEPS)),
            }
            states.push(state(&mut worker, &mut params));
            worker.leave().unwrap();
            cluster.stop().unwrap();
            states
        });
        assert!(states[0] == states[1], "{codec}");
        assert!(states[0][0] != states[0][1], "{codec} changes nothing");
    }
}

#[test]
fn what_is_not_finite_is_refused_and_changes_nothing() {
    let _turn = DriverTurn::start();
    let device = Device::cuda(0).unwrap();
    for codec in CODECS {
        let cluster = cluster();
        let mut worker = Worker::connect(config(&cluster, codec)).unwrap();
        let mut params = worker.join(&variables(), |_| ()).unwrap();
        push_from(&mut worker, &device, &gradients(0)).unwrap();
        let before = state(&mut worker, &mut params);
        for (which, element, value) in [(0, 999, f32::NAN), (1, 0, f32::INFINITY), (2, 5, f32::NAN)]
        {
            let mut values = gradients(1);
            values[which][element] = value;
            let error = push_from(&mut worker, &device, &values).unwrap_err();
            let Error::NonFinite { variable, element: found, value: at } = error else {
                panic!("{codec}: {error}");
            };
            assert_eq!((&*variable, found), (NAMES[which], element), "{codec}");
            assert!(!at.is_finite());
            assert!(state(&mut worker, &mut params) == before, "{codec}");
        }
        push_from(&mut worker, &device, &gradients(1)).unwrap();
        assert!(state(&mut worker, &mut params) != before);
        worker.leave().unwrap();
        cluster.stop().unwrap();
    }
}

/// Until a push has begun, the residuals are those before it.
#[test]
fn a_push_that_is_dropped_early_leaves_the_residuals() {
    let _turn = DriverTurn::start();
    let device = Device::cuda(0).unwrap();
    let cluster = cluster();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut worker = pushpull::Worker::connect(config(&cluster, Codec::Int8)).await.unwrap();
        worker.join(&variables(), |_| ()).await.unwrap();
        let zero = worker.residuals().unwrap();
        let mut dropped = 0;
        // Each push is polled twice as often as the last before it is dropped, until one begins.
        for polls in (0..16).map(|doubled| 1 << doubled) {
            let token = worker.token().await.unwrap().unwrap();
            let mut gradients = worker.gradients_on(&device).unwrap();
            let mut out = gradients.out();
            let views: Vec<ViewMut<'_, f32>> = out.views_mut(&NAMES).unwrap();
            for (view, values) in views.into_iter().zip(&self::gradients(0)) {
                device.write(values, view).unwrap();
            }
            let mut push = Box::pin(worker.push_from(token, gradients));
            let mut is_done = false;
            for _ in 0..polls {
                is_done |=
                    poll_fn(|context| Poll::Ready(push.as_mut().poll(context))).await.is_ready();
                if is_done {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(push);
            if is_done || worker.residuals().unwrap() != zero {
                break;
            }
            dropped += 1;
        }
        assert!(dropped > 0, "no push was dropped while the device worked");
        worker.leave().await.unwrap();
    });
    cluster.stop().unwrap();
}
