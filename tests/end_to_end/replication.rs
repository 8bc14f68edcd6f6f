//! Variables that each replica changes by itself: local ones, and means.

use std::path::Path;
use std::sync::{Arc, Mutex};

use pushpull::blocking::{Reader, TrainingSession, Worker};
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::error::ConfigError;
use pushpull::training::{Flow, Hook, HookError, JoinReport, TrainingConfig};
use pushpull::variable::{DType, Partitioner, Shape};
use pushpull::worker::SavedCheckpoint;
use pushpull::{Asynchronous, ClusterSpec, Error, Mode, Params, Ps, PsConfig, Sgd, Synchronous};
use pushpull::{TaskId, VariableSpec, WorkerConfig};

use super::cluster::{TestCluster, block_on, listen, spec, vector};

/// The values towards which the means of three replicas move. Their mean is 3.
const TARGETS: [f32; 3] = [1.0, 2.0, 6.0];

/// A trained variable, a local one, and means of either type. All but the last have a part on each
/// of two servers.
fn variables() -> Vec<VariableSpec> {
    let split = || Partitioner::Fixed { shards: 2 };
    let f64 = VariableSpec::new("mean64", DType::F64, Shape::new([1]).unwrap()).unwrap();
    vec![
        vector("w", 6).partitioner(split()),
        vector("local", 5).partitioner(split()).local(),
        vector("mean", 3).partitioner(split()).mean_every_steps(1),
        f64.mean_every_steps(2),
    ]
}

fn synchronous() -> Mode {
    Synchronous::new(3).total_num_replicas(3).into()
}

/// Moves the means a tenth of the way to this replica's target, and counts in the local variable.
fn update(params: &mut Params, replica: usize) {
    let target = TARGETS[replica];
    for value in params.view_mut::<f32>("mean").unwrap() {
        *value = 0.9 * *value + 0.1 * target;
    }
    let value = &mut params.view_mut::<f64>("mean64").unwrap()[0];
    *value = 0.9 * *value + 0.1 * f64::from(target);
    let local = params.view_mut::<f32>("local").unwrap();
    local.iter_mut().for_each(|value| *value += 1.0 + replica as f32);
}

/// Makes one step of a worker, its `steps`th.
fn step(worker: &mut Worker, params: &mut Params, replica: usize, steps: u64) {
    let token = worker.token().unwrap().unwrap();
    assert!(!worker.pull(&token, params).unwrap().is_stale());
    update(params, replica);
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(-1.0);
    worker.push(token, gradients).unwrap();
    worker.average(params, steps).unwrap();
}

#[test]
fn local_values_stay_apart_and_means_converge_in_both_modes() {
    for mode in [Mode::from(Asynchronous::default()), synchronous()] {
        let cluster = TestCluster::start(2, 3, Sgd::new(1.0), |config| config.mode(mode));
        let mut workers = [0, 1, 2].map(|worker| cluster.worker(worker));
        let mut replicas = workers.each_mut().map(|worker| {
            worker.join(&variables(), |initial| _ = initial.set("local", &[0.5_f32; 5])).unwrap()
        });
        let mut reader = Reader::connect(cluster.config(0)).unwrap();
        let mut servers = reader.params();
        for steps in 1..=60 {
            for (replica, worker) in workers.iter_mut().enumerate() {
                step(worker, &mut replicas[replica], replica, steps);
            }
        }
        for (replica, params) in replicas.iter().enumerate() {
            let local = 0.5 + 60.0 * (1.0 + replica as f32);
            assert_eq!(params.view::<f32>("local").unwrap(), [local; 5], "{replica} in {mode:?}");
            assert!(params.view::<f32>("w").unwrap()[0] > 50.0, "trained values are pulled");
        }
        reader.pull(&mut servers).unwrap();
        assert_eq!(servers.view::<f32>("local").unwrap(), [0.5; 5], "nothing is published");
        let mean = servers.view::<f32>("mean").unwrap()[2];
        let mean64 = servers.view::<f64>("mean64").unwrap()[0];
        assert!((mean - 3.0).abs() < 0.2 && (mean64 - 3.0).abs() < 0.4, "{mean} {mean64}");
        // The last replica has averaged last.
        assert_eq!(replicas[2].view::<f32>("mean").unwrap(), servers.view::<f32>("mean").unwrap());

        let [chief, other, _] = &mut workers;
        let refused = other.publish(&replicas[1]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "cannot publish: only the chief may, and this is /job:worker/task:1"
        );
        chief.publish(&replicas[0]).unwrap();
        reader.pull(&mut servers).unwrap();
        assert_eq!(servers.view::<f32>("local").unwrap(), [60.5; 5]);
        cluster.stop();
    }
}

/// A contribution is sent before the servers' values are taken: each change counts once.
#[test]
fn a_change_is_added_once_and_a_nan_never() {
    let cluster = TestCluster::sgd_of(2, 2, |config| config);
    let [mut worker, mut other] = [cluster.worker(0), cluster.worker(1)];
    let mut params = worker.join(&variables(), |_| ()).unwrap();
    let mut others = other.join(&variables(), |_| ()).unwrap();
    params.view_mut::<f32>("mean").unwrap().fill(8.0);
    // `mean64` is not due yet, so only `mean` changes on the servers.
    params.view_mut::<f64>("mean64").unwrap().fill(8.0);
    worker.average(&mut params, 1).unwrap();
    assert_eq!(params.view::<f32>("mean").unwrap(), [4.0; 3]);
    assert_eq!(params.view::<f64>("mean64").unwrap(), [8.0]);
    worker.average(&mut params, 1).unwrap();
    worker.average(&mut params, 2).unwrap();
    assert_eq!(params.view::<f32>("mean").unwrap(), [4.0; 3]);
    assert_eq!(params.view::<f64>("mean64").unwrap(), [4.0]);

    // The other replica has not changed its zeros, and takes the values.
    others.view_mut::<f32>("mean").unwrap()[1] = f32::NAN;
    let error = other.average(&mut others, 2).unwrap_err();
    let Error::NonFinite { variable, element: 1, .. } = &error else { panic!("{error}") };
    assert_eq!(variable, "mean");
    others.view_mut::<f32>("mean").unwrap()[1] = 0.0;
    other.average(&mut others, 2).unwrap();
    assert_eq!(others.view::<f32>("mean").unwrap(), [4.0; 3]);
    assert_eq!(others.view::<f64>("mean64").unwrap(), [4.0]);

    params.view_mut::<f32>("local").unwrap()[4] = f32::INFINITY;
    let error = worker.publish(&params).unwrap_err();
    assert!(matches!(error, Error::NonFinite { element: 4, .. }), "{error}");
    cluster.stop();
}

/// A future that is dropped at any point loses or completes its contribution, and never repeats it.
#[test]
fn a_cancelled_average_does_not_count_twice() {
    let cluster = TestCluster::sgd_of(2, 2, |config| config);
    block_on(async {
        let mut worker = pushpull::Worker::connect(cluster.config(0)).await.unwrap();
        let mut params = worker.join(&variables(), |_| ()).await.unwrap();
        let mut reader = pushpull::Reader::connect(cluster.config(1)).await.unwrap();
        let mut servers = reader.params();
        for polls in 1..12 {
            params.view_mut::<f32>("mean").unwrap()[0] += 2.0;
            let mut average = Box::pin(worker.average(&mut params, 1));
            let mut left = polls;
            let polled = std::future::poll_fn(|context| {
                left -= 1;
                match average.as_mut().poll(context) {
                    std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(None),
                    other => other.map(Some),
                }
            });
            let _ = polled.await;
        }
        worker.average(&mut params, 1).await.unwrap();
        reader.pull(&mut servers).await.unwrap();
        let mean = servers.view::<f32>("mean").unwrap()[0];
        assert!((0.0..=11.0).contains(&mean), "11 changes of 2, halved: {mean}");
    });
    cluster.stop();
}

#[test]
fn a_mean_needs_replicas_that_can_be_counted() {
    let listener = listen();
    let builder = ClusterSpec::builder().job("ps", [listener.address()]);
    let cluster = builder.job("trainer", [ClusterSpec::NO_ADDRESS]).build().unwrap();
    let server =
        listener.start(PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0))).unwrap();
    let task = TaskId { job: "trainer".into(), index: 0 };
    let mut worker = Worker::connect(WorkerConfig::new(cluster, task)).unwrap();
    let error = worker.join(&variables(), |_| ()).unwrap_err();
    let variable = "mean".to_owned();
    assert_eq!(error, Error::Config(ConfigError::NoReplicas { variable }));
    block_on(server.serve(async {})).unwrap();
}

fn checkpoints(config: PsConfig, directory: &Path) -> PsConfig {
    config.checkpoints(Checkpoints::new(LocalDirectory::create(directory).unwrap()))
}

/// Trains a session to its end, and returns the number of its steps and its final local value.
fn train(config: TrainingConfig, replica: usize) -> (f32, f32) {
    let mut session = TrainingSession::start(config).unwrap();
    let mut steps = 0.0;
    let mut local = 0.0;
    while let Some(mut step) = session.step().unwrap() {
        let (params, gradients) = step.parts();
        update(params, replica);
        local = params.view::<f32>("local").unwrap()[0];
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        steps += 1.0;
        step.push().unwrap();
    }
    session.close().unwrap();
    (steps, local)
}

/// Makes a step with a gradient of each replica.
fn make_a_step(cluster: &TestCluster) {
    let mut workers = [0, 1, 2].map(|worker| cluster.worker(worker));
    let mut replicas = workers.each_mut().map(|worker| worker.join(&variables(), |_| ()).unwrap());
    for (replica, worker) in workers.iter_mut().enumerate() {
        step(worker, &mut replicas[replica], replica, 1);
    }
    // Every shard has applied the step once the next token is granted.
    assert!(workers[0].token().unwrap().is_some());
    workers.into_iter().for_each(|worker| worker.leave().unwrap());
}

#[test]
fn sessions_average_by_themselves_and_a_checkpoint_has_the_chiefs_values() {
    for mode in [Mode::from(Asynchronous::default()), synchronous()] {
        let folder = tempfile::tempdir().unwrap();
        let start = || {
            TestCluster::start(2, 3, Sgd::new(1.0), |config| {
                checkpoints(config.mode(mode).last_step(60), folder.path())
            })
        };
        let config = |cluster: &TestCluster, worker| {
            TrainingConfig::new(cluster.config(worker)).variables(variables())
        };
        let cluster = start();
        // Without a step, a server may not have reached the step owner when the first save begins.
        make_a_step(&cluster);
        let trained = std::thread::scope(|scope| {
            let chief = config(&cluster, 0).checkpoint_every_steps(25);
            let configs = [chief, config(&cluster, 1), config(&cluster, 2)];
            let threads = configs.into_iter().enumerate();
            let threads: Vec<_> = threads
                .map(|(replica, config)| scope.spawn(move || train(config, replica)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for (replica, (steps, local)) in trained.iter().enumerate() {
            assert_eq!(*local, steps * (1.0 + replica as f32), "{replica} in {mode:?}");
        }
        cluster.stop();

        // All state is lost but the checkpoint.
        let cluster = start();
        let mut chief = cluster.worker(0);
        let restored = chief.join(&variables(), |_| panic!("a checkpoint has values")).unwrap();
        let chiefs = trained[0].1;
        assert_eq!(restored.view::<f32>("local").unwrap(), [chiefs; 5], "in {mode:?}");
        let mean = restored.view::<f32>("mean").unwrap()[0];
        assert!(mean > 0.0 && mean < 6.0, "{mean} in {mode:?}");
        let mut other = cluster.worker(1);
        let other = other.join(&variables(), |_| ()).unwrap();
        assert_eq!(other.view::<f32>("local").unwrap(), [chiefs; 5], "in {mode:?}");
        cluster.stop();
    }
}

/// What a session has met.
#[derive(Clone, Debug, Default)]
struct Record {
    /// The step and the local value of each join.
    joins: Vec<(u64, f32)>,
    /// The step of the newest checkpoint.
    saved: u64,
}

/// Keeps the record of a session.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Record>>);

impl Hook for Recorder {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        let local = at.params.view::<f32>("local")?[0];
        self.0.lock().unwrap().joins.push((at.step, local));
        Ok(Flow::Continue)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint) -> Result<Flow, HookError> {
        self.0.lock().unwrap().saved = checkpoint.step;
        Ok(Flow::Continue)
    }
}

/// The server loses its state. The local values are those of the checkpoint, as all others are, or
/// the first ones if there is no checkpoint.
#[test]
fn local_values_go_back_with_all_others() {
    for has_checkpoints in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("checkpoints");
        let cluster = spec([format!("unix:{}/ps.sock", folder.path().display())], 1);
        let start = || {
            let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
            let listener = block_on(Ps::listen(cluster.task_address("ps", 0).unwrap())).unwrap();
            listener.start(checkpoints(config, &directory)).unwrap()
        };
        let recorder = Recorder::default();
        let config = TrainingConfig::new(WorkerConfig::new(cluster.clone(), TaskId::worker(0)))
            .variables([vector("w", 1), vector("local", 1).local()])
            .hook(recorder.clone());
        let config = match has_checkpoints {
            true => config.checkpoint_every_steps(5),
            false => config,
        };
        let mut server = Some(start());
        let mut session = TrainingSession::start(config).unwrap();
        while let Some(mut step) = session.step().unwrap() {
            let (params, gradients) = step.parts();
            params.view_mut::<f32>("local").unwrap()[0] += 1.0;
            gradients.view_mut::<f32>("w").unwrap().fill(1.0);
            let at = step.step();
            step.push().unwrap();
            let Record { joins, saved } = recorder.0.lock().unwrap().clone();
            if joins.len() == 2 {
                break;
            }
            if at >= 12 && (saved >= 5 || !has_checkpoints) {
                block_on(server.take().unwrap().serve(async {})).unwrap();
                server = Some(start());
            }
        }
        drop(session);
        let joins = recorder.0.lock().unwrap().joins.clone();
        let [(0, 0.0), (step, local)] = joins[..] else { panic!("{joins:?}") };
        assert_eq!(step >= 5, has_checkpoints, "{joins:?}");
        // A step that followed the publication may be in the checkpoint.
        assert!((0.0..=1.0).contains(&(step as f32 - local)), "{joins:?}");
        block_on(server.unwrap().serve(async {})).unwrap();
    }
}
