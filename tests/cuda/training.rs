//! Workers whose values and gradients are on the device: an emulated one, or an installed one.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use pushpull::blocking::{Ps, TrainingSession, Worker};
use pushpull::compute::{
    Compute, Device, DeviceParams, DeviceTowers, Mlp, Model, ModelError, Samples, StepGradients,
    StepValues, View, ViewMut, compute_fn,
};
use pushpull::local::Cluster;
use pushpull::training::TrainingConfig;
use pushpull::{ClusterSpec, PsConfig, Push, Sgd, TaskId, VariableSpec, WorkerConfig};
use pushpull_cuda_emulator::turn::{DriverTurn, Turn};

const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];
const STEPS: u64 = 12;

/// The copies of a step that the test and the model make from and to pages that are not locked:
/// those of features, labels, halves and the loss.
const PAGEABLE: u64 = 4;

fn model(device: &Device) -> Model<Mlp> {
    Model::new(Mlp::new(device.clone(), &[3, 8, 2]), NAMES)
}

fn cluster() -> Cluster {
    let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.5)).last_step(STEPS);
    Cluster::start(2, 1, start).unwrap()
}

const BATCH: Samples<'_> = Samples {
    features: &[1.0, 0.0, 0.5, 0.0, 1.0, -0.5, 0.3, 0.3, 2.0, -1.0, 0.2, 0.1],
    labels: &[0, 1, 1, 0],
};

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} instead of {expected}");
    }
}

/// Trains on a server that shares memory with its worker.
fn train_beside(device: &Device) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let listener = Ps::listen(&format!("unix:{}", folder.path().join("ps").display())).unwrap();
    let spec = ClusterSpec::builder().job("ps", [listener.address()]).workers(1).build().unwrap();
    let config = PsConfig::new(spec.clone(), TaskId::ps(0), Sgd::new(0.5)).last_step(STEPS);
    let server = Ps::start(listener, config).unwrap();
    let losses = train_on(device, WorkerConfig::new(spec, TaskId::worker(0)));
    server.handle().stop();
    server.serve().unwrap();
    losses
}

/// Trains on two servers over TCP.
fn train_apart(device: &Device) -> Vec<f64> {
    let cluster = cluster();
    let losses = train_on(device, cluster.worker_config(0));
    cluster.stop().unwrap();
    losses
}

/// Trains with `pull_to` and `push_from`, and returns the losses.
fn train_on(device: &Device, config: WorkerConfig) -> Vec<f64> {
    let mut model = model(device);
    let mut variables = model.variables().unwrap();
    // Beside the model: halves on the device, a plain gradient and rows on the processor.
    variables.push(VariableSpec::bf16("half", [6]).unwrap());
    variables.push(VariableSpec::f32("host", [3]).unwrap());
    variables.push(VariableSpec::f32("rows", [9, 2]).unwrap().sparse());
    let mut worker = Worker::connect(config).unwrap();
    let params = worker.join(&variables, |_| ()).unwrap();
    let mut local = DeviceParams::new(device, params).unwrap();
    let mut losses = Vec::new();
    while let Some(token) = worker.token().unwrap() {
        worker.pull_to(&token, &mut local).unwrap();
        let mut gradients = worker.gradients_on(device).unwrap();
        let mut out = gradients.out();
        losses.push(model.gradients(local.values(), BATCH, &mut out).unwrap());
        let half: Vec<ViewMut<'_, pushpull::variable::bf16>> = out.views_mut(&["half"]).unwrap();
        let ones = [pushpull::variable::bf16::ONE; 6];
        half.into_iter().for_each(|half| device.write(&ones, half).unwrap());
        out.host_mut().view_mut::<f32>("host").unwrap().fill(2.0);
        out.host_mut().set_rows("rows", &[7, 1], &[1.0_f32, 2.0, 3.0, 4.0]).unwrap();
        assert!(matches!(worker.push_from(token, gradients).unwrap(), Push::Applied { .. }));
    }
    let mut params = local.host().clone();
    worker.pull_final(&mut params).unwrap();
    assert_eq!(params.view::<f32>("host").unwrap(), [-(STEPS as f32); 3]);
    let half = params.view::<pushpull::variable::bf16>("half").unwrap();
    assert!(half.iter().all(|half| half.to_f32() == -0.5 * STEPS as f32), "{half:?}");
    losses.push(f64::from(params.view::<f32>("w1").unwrap()[5]));
    worker.leave().unwrap();
    losses
}

#[test]
fn values_and_gradients_travel_to_the_device_and_back() {
    let turn = DriverTurn::start();
    for (train, locked) in [(train_apart as fn(&Device) -> _, 0), (train_beside, 1)] {
        let expected = train(&Device::cpu_threads(1).unwrap());
        if let Some(emulator) = turn.emulator() {
            emulator.reset();
        }
        let found = train(&Device::cuda(0).unwrap());
        assert_close(&found, &expected);
        assert!(found[STEPS as usize - 1] < 0.8 * found[0], "{found:?}");
        if let Some(emulator) = turn.emulator() {
            assert!(emulator.calls_of("kernel multiply") > STEPS);
            // The device copies to and from the pages of values, gradients and push buffers.
            assert_eq!(emulator.pageable_copies(), PAGEABLE * STEPS);
            assert_eq!(emulator.calls_of("cuMemHostRegister_v2"), locked);
            assert!((2..=4).contains(&emulator.calls_of("cuMemHostAlloc")));
        }
    }
}

/// Adds one to every gradient, in two steps and two views.
fn add_one(device: &Device, out: &mut StepGradients<'_>) -> Result<f64, ModelError> {
    for _ in 0..2 {
        let w: Vec<ViewMut<'_, f32>> = out.views_mut(&["w"])?;
        for mut w in w {
            let mut before = [0.0; 3];
            device.read(w.view(), &mut before)?;
            device.write(&before.map(|half| half + 0.5), w.reborrow())?;
        }
    }
    Ok(0.0)
}

/// The memory of the device is used again, and a model that adds to it is right all the same.
#[test]
fn gradients_of_a_device_begin_at_zero() {
    let _turn = DriverTurn::start();
    let device = Device::cuda(0).unwrap();
    let variables = vec![VariableSpec::f32("w", [3]).unwrap()];
    let at = |step: u64| [-0.5 * step as f32; 3];
    let own = device.clone();
    let adds = move |_: StepValues<'_>, (): (), out: &mut StepGradients<'_>| add_one(&own, out);
    let mut model = compute_fn(device.clone(), variables.clone(), adds);
    let cluster = cluster();
    let config = TrainingConfig::new(cluster.worker_config(0)).variables(variables.clone());
    let mut session = TrainingSession::start(config).unwrap();
    while let Some(mut step) = session.step().unwrap() {
        let number = step.step();
        assert_eq!(step.parts().0.view::<f32>("w").unwrap(), at(number));
        step.compute(&mut model, ()).unwrap();
        step.push().unwrap();
    }
    session.close().unwrap();
    cluster.stop().unwrap();

    let cluster = self::cluster();
    let mut worker = Worker::connect(cluster.worker_config(0)).unwrap();
    let params = worker.join(&variables, |_| ()).unwrap();
    let mut local = DeviceParams::new(&device, params).unwrap();
    while let Some(token) = worker.token().unwrap() {
        worker.pull_to(&token, &mut local).unwrap();
        assert_eq!(local.host().view::<f32>("w").unwrap(), at(local.host().step()));
        let mut gradients = worker.gradients_on(&device).unwrap();
        model.gradients(local.values(), (), &mut gradients.out()).unwrap();
        worker.push_from(token, gradients).unwrap();
    }
    worker.leave().unwrap();
    cluster.stop().unwrap();
}

/// Without locked pages the copies are slower, and no less right.
#[test]
fn values_travel_without_locked_pages() {
    let Some(emulator) = Turn::start() else { return };
    for train in [train_apart as fn(&Device) -> _, train_beside] {
        let expected = train(&Device::cpu_threads(1).unwrap());
        emulator.reset();
        emulator.fail(c"cuMemHostRegister_v2", 1, 801);
        for nth in 1..200 {
            emulator.fail(c"cuMemHostAlloc", nth, 2);
        }
        let found = train(&Device::cuda(0).unwrap());
        assert_close(&found, &expected);
        assert!(emulator.calls_of("cuMemHostRegister_v2") <= 1, "it is not tried again");
        assert!(emulator.pageable_copies() > (PAGEABLE + 1) * STEPS);
    }
}

/// Trains in a session, and returns the losses.
fn train_session(mut model: impl for<'a> Compute<Samples<'a>>) -> Vec<f64> {
    let cluster = cluster();
    let config = TrainingConfig::new(cluster.worker_config(0));
    let config = config.variables(model.variables().unwrap());
    let mut session = TrainingSession::start(config).unwrap();
    let mut losses = Vec::new();
    while let Some(mut step) = session.step().unwrap() {
        losses.push(step.compute(&mut model, BATCH).unwrap());
        step.push().unwrap();
    }
    session.close().unwrap();
    cluster.stop().unwrap();
    losses
}

#[test]
fn sessions_compute_on_the_device_and_on_towers() {
    let turn = DriverTurn::start();
    let [cpu, cuda] = [Device::cpu_threads(1).unwrap(), Device::cuda(0).unwrap()];
    let expected = train_session(model(&cpu));
    assert_close(&train_session(model(&cuda)), &expected);
    if let Some(emulator) = turn.emulator() {
        assert_eq!(emulator.pageable_copies(), (PAGEABLE - 1) * STEPS, "there are no halves");
    }
    let towers = || DeviceTowers::new([model(&cuda), model(&cpu)]);
    // The values lie on the processor: no tower's device gets a second copy.
    assert!(Compute::<Samples<'_>>::device(&towers()).uses_host_memory());
    assert_close(&train_session(towers()), &expected);
}

/// A pull that is dropped while the device copies leaves the memory alone that the device uses.
#[test]
fn a_pull_can_be_dropped_at_any_time() {
    let turn = DriverTurn::start();
    let device = Device::cuda(0).unwrap();
    let cluster = cluster();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut worker = pushpull::Worker::connect(cluster.worker_config(0)).await.unwrap();
        let variables = [VariableSpec::f32("w", [50_000]).unwrap()];
        let params = worker.join(&variables, |_| ()).await.unwrap();
        let mut local = DeviceParams::new(&device, params).unwrap();
        let token = worker.token().await.unwrap().unwrap();
        for polls in 1..20 {
            let mut pull = pin!(worker.pull_to(&token, &mut local));
            for _ in 0..polls {
                let ready = poll_fn(|context| Poll::Ready(pull.as_mut().poll(context))).await;
                if ready.is_ready() {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_micros(200)).await;
            }
        }
        worker.pull_to(&token, &mut local).await.unwrap();
        let view: View<'_, f32> = local.values().view("w").unwrap();
        let mut found = vec![f32::NAN; 50_000];
        device.read(view, &mut found).unwrap();
        assert!(found.iter().all(|&x| x == 0.0));
        match turn.emulator() {
            // A gradient of a device that fails is withdrawn, and the token comes back.
            Some(emulator) => {
                let mut gradients = worker.gradients_on(&device).unwrap();
                gradients.out().views_mut::<f32>(&["w"]).unwrap();
                emulator.fail(c"cuMemcpyDtoHAsync_v2", 1, 999);
                let error = worker.push_from(token, gradients).await.unwrap_err();
                assert!(matches!(error, pushpull::Error::Device(_)), "{error}");
                let again = worker.token().await.unwrap().unwrap();
                assert_eq!(again.step(), 0);
            }
            None => drop(token),
        }
        worker.leave().await.unwrap();
    });
    cluster.stop().unwrap();
}
