//! Training sessions with real servers: ends, hooks, checkpoints and recoveries.

use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, TrainingSession};
use pushpull::checkpoint::{Checkpoints, LocalDirectory, list};
use pushpull::error::{Chain, TrainingError};
use pushpull::training::data::{GrantedBatches, Pipeline, SliceSource};
use pushpull::training::{
    FinalValues, FinishedStep, Flow, Hook, HookError, JoinReport, StopReason, TrainingConfig,
    TrainingEnd, hooks,
};
use pushpull::worker::{DataSet, Interrupt, LoadOptions};
use pushpull::{Asynchronous, Error, Ps, PsConfig, Sgd, Synchronous, TaskId, VariableSpec};
use pushpull::{ClusterSpec, WorkerConfig};

use super::cluster::{LONG, TestCluster, block_on, spec, vector};

/// A session of this worker for one variable `w` of 3 elements.
fn config(cluster: &ClusterSpec, worker: u32) -> TrainingConfig {
    let config = WorkerConfig::new(cluster.clone(), TaskId::worker(worker));
    TrainingConfig::new(config).variables([vector("w", 3)])
}

/// Trains to the end with gradients of ones. Returns the end and the number of gradients that
/// count.
fn train(config: TrainingConfig) -> Result<(TrainingEnd, u64), TrainingError> {
    let mut session = TrainingSession::start(config)?;
    let mut counted = 0;
    while let Some(mut step) = session.step()? {
        let (params, gradients) = step.parts();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        let w = params.view::<f32>("w").unwrap()[0];
        step.scalar("w", w);
        counted += u64::from(step.push()?.counts());
    }
    Ok((session.close()?, counted))
}

/// Trains with two sessions at once.
fn train_two(configs: [TrainingConfig; 2]) -> [(TrainingEnd, u64); 2] {
    std::thread::scope(|scope| {
        let threads = configs.map(|config| scope.spawn(|| train(config)));
        threads.map(|thread| thread.join().unwrap().unwrap())
    })
}

/// Sends the final values of `w`.
struct FinalW(Sender<(u64, Vec<f32>)>);

impl Hook for FinalW {
    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        let params = at.end.params.as_ref().ok_or("the worker never joined")?;
        Ok(self.0.send((params.step(), params.view::<f32>("w")?.to_vec()))?)
    }
}

fn final_w() -> (FinalW, Receiver<(u64, Vec<f32>)>) {
    let (sender, receiver) = mpsc::channel();
    (FinalW(sender), receiver)
}

#[test]
fn two_workers_train_to_the_last_step_of_the_servers() {
    let cluster = TestCluster::sgd(2, |config| config.last_step(40));
    let (hook, values) = final_w();
    let ends = train_two([config(&cluster.spec, 0).hook(hook), config(&cluster.spec, 1)]);
    assert_eq!(ends.each_ref().map(|(_, counted)| counted).into_iter().sum::<u64>(), 40);
    for (end, counted) in ends {
        assert_eq!(end.metrics.pushes, counted);
        let values = end.params.unwrap();
        assert_eq!((end.reason, end.checkpoint, end.is_final), (StopReason::LastStep, None, true));
        assert_eq!((values.step(), values.view("w").unwrap()), (40, &[-40_f32; 3][..]));
    }
    assert_eq!(values.recv().unwrap(), (40, vec![-40.0; 3]), "the hook sees the same");
    // A training that is over runs no step and ends in the same way.
    let (end, counted) = train(config(&cluster.spec, 1)).unwrap();
    assert_eq!((end.step, end.reason, counted), (40, StopReason::LastStep, 0));
    cluster.stop();
}

#[test]
fn two_workers_consume_their_data_once_and_end_with_them() {
    let cluster = TestCluster::sgd(2, |config| config);
    let pipeline = || {
        let source = SliceSource::new("numbers", (0..40_u64).collect::<Vec<u64>>());
        Pipeline::new(source).shuffle(3).batch(3).epochs(2).threads(1).prefetch(2)
    };
    let train = |worker| {
        let pipeline = pipeline();
        let config = TrainingConfig::new(cluster.config(worker))
            .variables([vector("ledger", 40)])
            .data(pipeline.data_set().unwrap());
        let mut batches = GrantedBatches::new(pipeline.loader().unwrap());
        let mut session = TrainingSession::start(config).unwrap();
        while let Some(mut step) = session.step().unwrap() {
            let batch = step.load(&mut batches).unwrap();
            let ledger = step.parts().1.view_mut::<f32>("ledger").unwrap();
            ledger.fill(0.0);
            batch.samples.iter().for_each(|&number| ledger[number as usize] -= 1.0);
            assert!(step.push().unwrap().counts());
        }
        session.close().unwrap()
    };
    let ends = std::thread::scope(|scope| {
        [0, 1].map(|worker| scope.spawn(move || train(worker))).map(|it| it.join().unwrap())
    });
    for end in ends {
        assert_eq!((&end.reason, end.is_final), (&StopReason::DataEnd, true));
        assert_eq!(end.params.unwrap().view::<f32>("ledger").unwrap(), [2.0; 40]);
    }
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut values = reader.params();
    assert_eq!(reader.pull(&mut values).unwrap(), 28);
    assert_eq!(values.view::<f32>("ledger").unwrap(), [2.0; 40]);
    cluster.stop();
}

#[test]
fn two_workers_stop_by_a_hook_at_exactly_its_step() {
    let mode = Synchronous::new(2).total_num_replicas(2);
    let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| config.mode(mode));
    let (hook, values) = final_w();
    let config = |worker| config(&cluster.spec, worker).hook(hooks::StopAtStep::last(30));
    for (end, counted) in train_two([config(0).hook(hook), config(1)]) {
        assert_eq!((end.step, counted, end.is_final), (30, 30, false), "the servers train on");
        assert!(matches!(end.reason, StopReason::Hook { hook, .. } if hook == "StopAtStep"));
    }
    assert_eq!(values.recv().unwrap(), (30, vec![-30.0; 3]));
    // The classic system runs one more step.
    let (end, counted) = train(config(0)).unwrap();
    assert_eq!((end.step, counted), (30, 0));
    cluster.stop();
}

#[test]
fn the_chief_ends_the_training_for_all() {
    let cluster = TestCluster::sgd(2, |config| config);
    let chief = config(&cluster.spec, 0).hook(hooks::StopAtStep::last(25)).finish_for_all(true);
    let [(first, _), (second, _)] = train_two([chief, config(&cluster.spec, 1)]);
    assert!(matches!(first.reason, StopReason::Hook { .. }), "{first:?}");
    assert_eq!(second.reason, StopReason::Finished);
    assert!(second.step >= 25);
    cluster.stop();
}

fn checkpoints(config: PsConfig, directory: &Path) -> PsConfig {
    config.checkpoints(Checkpoints::new(LocalDirectory::create(directory).unwrap()))
}

#[test]
fn checkpoints_are_saved_at_the_start_and_the_end_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let cluster = TestCluster::sgd(1, |config| checkpoints(config, &directory));
    let (end, _) = train(
        config(&cluster.spec, 0)
            .initialize(|initial| _ = initial.set("w", &[5.0_f32; 3]))
            .checkpoint_every_steps(3)
            .hook(hooks::StopAtStep::last(10)),
    )
    .unwrap();
    cluster.stop();
    let storage = LocalDirectory::create(&directory).unwrap();
    let listed = list(&storage).unwrap().checkpoints;
    let mut steps: Vec<u64> = listed.iter().map(|checkpoint| checkpoint.global_step).collect();
    steps.sort_unstable();
    assert_eq!((steps.first(), steps.last()), (Some(&0), Some(&10)));
    assert!(steps.windows(2).all(|pair| pair[0] < pair[1]), "one of each step: {steps:?}");
    assert_eq!(end.checkpoint.unwrap().step, 10);

    // Another server continues, and a finished training saves nothing again.
    let cluster = TestCluster::sgd(1, |config| checkpoints(config, &directory));
    let (hook, values) = final_w();
    let (end, counted) = train(
        config(&cluster.spec, 0)
            .initialize(|_| panic!("a checkpoint has values"))
            .checkpoint_every_steps(3)
            .hook(hooks::StopAtStep::last(10))
            .hook(hook),
    )
    .unwrap();
    assert_eq!((end.step, counted, end.checkpoint), (10, 0, None));
    assert_eq!(values.recv().unwrap(), (10, vec![-5.0; 3]));
    cluster.stop();
}

#[test]
fn a_server_without_a_checkpoint_directory_is_named_at_once() {
    let cluster = TestCluster::sgd(1, |config| config);
    let error = train(config(&cluster.spec, 0).checkpoint_every(LONG)).unwrap_err();
    let TrainingError::Save { source } = &error else { panic!("{error}") };
    assert!(
        Chain(&error).to_string().contains("no place for checkpoints is configured"),
        "{source}"
    );
    cluster.stop();
}

/// The step before a join, and the step of its values.
type JoinSteps = (Option<u64>, u64);

/// Records the joins.
#[derive(Clone, Default)]
struct Joins(Arc<Mutex<Vec<JoinSteps>>>);

impl Hook for Joins {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        self.0.lock().unwrap().push((at.from_step, at.step));
        Ok(Flow::Continue)
    }
}

/// Calls a function at each step.
struct EachStep<F>(F);

impl<F: FnMut(u64) + Send> Hook for EachStep<F> {
    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        (self.0)(step.global_step);
        Ok(Flow::Continue)
    }
}

/// The server loses its state at step 12. Both workers go on from the checkpoint, whichever notices
/// first, and the updates that are in the values are exactly the steps.
#[test]
fn two_sessions_go_on_from_a_checkpoint_when_a_server_has_lost_its_state() {
    for synchronous in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("checkpoints");
        let cluster = spec([format!("unix:{}/ps.sock", folder.path().display())], 2);
        let start = || {
            let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0)).last_step(40);
            let config = match synchronous {
                true => config.mode(Synchronous::new(2).total_num_replicas(2)),
                false => config.mode(Asynchronous::default()),
            };
            let listener = block_on(Ps::listen(cluster.task_address("ps", 0).unwrap())).unwrap();
            listener.start(checkpoints(config, &directory)).unwrap()
        };
        let server = start();
        let (step, steps) = mpsc::channel();
        // No worker trains beyond step 12 before the state is lost.
        let is_lost = Arc::new(Mutex::new(()));
        let pause = || {
            let is_lost = is_lost.clone();
            EachStep(move |at| {
                if at >= 12 {
                    drop(is_lost.lock().unwrap());
                }
            })
        };
        let joins = Joins::default();
        let (hook, values) = final_w();
        let chief = config(&cluster, 0)
            .checkpoint_every_steps(5)
            .hook(joins.clone())
            .hook(EachStep(move |at| _ = step.send(at)))
            .hook(pause())
            .hook(hook);
        let other = config(&cluster, 1).hook(pause());
        let server = std::thread::scope(|scope| {
            let not_yet = is_lost.lock().unwrap();
            let sessions = scope.spawn(|| train_two([chief, other]));
            while steps.recv_timeout(LONG).unwrap() < 12 {}
            block_on(server.serve(async {})).unwrap();
            drop(not_yet);
            let server = start();
            for (end, _) in sessions.join().unwrap() {
                assert_eq!(end.reason, StopReason::LastStep);
            }
            server
        });
        assert_eq!(server.handle().metrics().global_step, 40);
        let (step, w) = values.recv().unwrap();
        assert_eq!(w, vec![-(step as f32); 3], "synchronous {synchronous}");
        let joins = joins.0.lock().unwrap().clone();
        // The other may have trained by the time that the chief hears of its own join.
        let [(None, _), (Some(12..), _)] = joins[..] else { panic!("{joins:?}") };
        block_on(server.serve(async {})).unwrap();
    }
}

#[test]
fn an_interrupt_ends_a_wait_for_another_replica() {
    let mode = Synchronous::new(2).total_num_replicas(2).join_timeout(LONG);
    let cluster = TestCluster::sgd(2, |config| config.mode(mode));
    let interrupt = Interrupt::new();
    let raised = interrupt.clone();
    let config = config(&cluster.spec, 0).interrupt(&interrupt);
    // The step waits for a gradient of the worker that never comes.
    let hook = EachStep(move |_| {
        let raised = raised.clone();
        std::thread::spawn(move || raised.raise());
    });
    let start = Instant::now();
    let (end, counted) = train(config.hook(hook)).unwrap();
    assert_eq!((end.reason, counted), (StopReason::Interrupted, 1));
    assert!(start.elapsed() < LONG);
    cluster.stop();
}

#[test]
fn a_dropped_step_returns_its_token() {
    let cluster = TestCluster::sgd(1, |config| config.last_step(1));
    let mut session = TrainingSession::start(config(&cluster.spec, 0)).unwrap();
    for _ in 0..3 {
        assert_eq!(session.step().unwrap().unwrap().step(), 0, "the only token is granted again");
    }
    let mut step = session.step().unwrap().unwrap();
    step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
    assert!(step.push().unwrap().counts());
    assert!(session.step().unwrap().is_none());
    assert!(session.step().unwrap().is_none(), "the end stays the end");
    assert_eq!(session.close().unwrap().reason, StopReason::LastStep);
    cluster.stop();
}

/// Counts the ends that a hook hears of.
#[derive(Clone, Default)]
struct Ends(Arc<Mutex<Vec<String>>>);

impl Hook for Ends {
    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        self.0.lock().unwrap().push(at.end.reason.to_string());
        Ok(())
    }

    fn failed(&mut self, error: &TrainingError) {
        self.0.lock().unwrap().push(Chain(error).to_string());
    }
}

#[test]
fn an_error_of_the_loop_reaches_the_hooks_and_frees_the_servers() {
    // The servers end once all workers have left, so the test would hang if one had not.
    let grace = Duration::from_millis(50);
    let cluster = TestCluster::sgd(1, |config| config.exit_when_done(grace).lease(LONG));
    let ends = Ends::default();
    let session = TrainingSession::start(config(&cluster.spec, 0).hook(ends.clone())).unwrap();
    let mut steps = 0;
    let error = session
        .run(|step| {
            steps += 1;
            if steps == 4 {
                return Err("the data set is damaged");
            }
            step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
            Ok(())
        })
        .unwrap_err();
    let expected = "cannot compute a gradient for step 3: the data set is damaged";
    assert_eq!(Chain(&error).to_string(), expected);
    assert_eq!(*ends.0.lock().unwrap(), [expected]);
    for server in cluster.servers {
        super::cluster::wait_for_end(server).unwrap();
    }
}

#[test]
fn a_session_that_is_dropped_tells_its_hooks() {
    let cluster = TestCluster::sgd(1, |config| config);
    let ends = Ends::default();
    let mut session = TrainingSession::start(config(&cluster.spec, 0).hook(ends.clone())).unwrap();
    drop(session.step().unwrap());
    drop(session);
    assert_eq!(*ends.0.lock().unwrap(), [TrainingError::Dropped.to_string()]);
    // A step without a gradient is a fault of the program.
    let ends = Ends::default();
    let mut session = TrainingSession::start(config(&cluster.spec, 0).hook(ends.clone())).unwrap();
    let error = session.step().unwrap().unwrap().push().unwrap_err();
    assert_eq!(error.worker_error(), Some(&Error::EmptyPush));
    assert!(matches!(session.step().map(|_| ()), Err(TrainingError::Failed)));
    assert!(matches!(session.close(), Err(TrainingError::Failed)));
    assert_eq!(*ends.0.lock().unwrap(), [Error::EmptyPush.to_string()]);
    cluster.stop();
}

#[test]
fn a_late_worker_waits_for_the_steps_of_the_others() {
    let cluster = TestCluster::sgd(2, |config| config.last_step(200));
    let firsts = Arc::new(Mutex::new(Vec::new()));
    let seen = firsts.clone();
    let late = config(&cluster.spec, 1)
        .hook(hooks::GlobalStepWaiter::until(20).poll_every(Duration::from_millis(1)))
        .hook(EachStep(move |at| seen.lock().unwrap().push(at)));
    let [(_, first), (_, second)] = train_two([config(&cluster.spec, 0), late]);
    assert_eq!(first + second, 200);
    assert!(firsts.lock().unwrap().first().is_none_or(|step| *step > 20), "{firsts:?}");
    cluster.stop();
}

/// A gradient that the server refuses is skipped, and the guard ends the training before that.
#[test]
fn a_nan_is_skipped_or_ends_the_training() {
    let cluster = TestCluster::sgd(1, |config| config.last_step(5));
    let train = |config: TrainingConfig| {
        let mut calls = 0;
        TrainingSession::start(config).unwrap().run(|step| {
            calls += 1;
            let value = if calls == 3 { f32::NAN } else { 1.0 };
            step.parts().1.view_mut::<f32>("w").unwrap().fill(value);
            Ok::<(), Error>(())
        })
    };
    let guard = hooks::NanGuard::fail().gradients();
    let error = Chain(&train(config(&cluster.spec, 0).hook(guard)).unwrap_err()).to_string();
    assert!(error.contains("NanGuard") && error.contains("\"w\" is NaN"), "{error}");
    assert_eq!(cluster.handle().metrics().global_step, 2);
    assert_eq!(train(config(&cluster.spec, 0)).unwrap().step, 5);
    cluster.stop();
}

#[test]
fn steps_pull_rows_and_first_values_come_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("first.safetensors");
    let bytes: Vec<u8> = [1.5_f32, 2.5, 3.5].iter().flat_map(|value| value.to_le_bytes()).collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![3], &bytes);
    std::fs::write(&file, safetensors::serialize([("w", view.unwrap())], None).unwrap()).unwrap();
    let cluster = TestCluster::sgd(1, |config| config.last_step(4));
    let rows = VariableSpec::f32("rows", [9, 2]).unwrap().sparse();
    let config = config(&cluster.spec, 0).variables([rows]);
    // The rows keep their initializer.
    let options = LoadOptions::new().allow_missing(true);
    let config = config.initialize(move |initial| initial.load_with(&file, &options));
    let mut session = TrainingSession::start(config).unwrap();
    let mut values = [0.0_f32; 4];
    for index in 0..4 {
        let mut step = session.step().unwrap().unwrap();
        let w = step.parts().0.view::<f32>("w").unwrap().to_vec();
        assert_eq!(w, [1.5, 2.5, 3.5]);
        assert!(!step.pull_rows("rows", &[7, 2], &mut values).unwrap().is_stale());
        assert_eq!(values, [-(index as f32), -(index as f32), 0.0, 0.0]);
        step.parts().1.set_rows("rows", &[7], &[1.0_f32, 1.0]).unwrap();
        assert!(step.push().unwrap().counts());
    }
    assert!(session.step().unwrap().is_none());
    cluster.stop();
}

/// Each sample of a data set counts once, though one step is dropped and one batch is skipped.
#[test]
fn steps_have_the_samples_of_a_data_set() {
    let cluster = TestCluster::sgd(1, |config| config);
    let set = DataSet::new("train", 10, 3).unwrap().epochs(2);
    let worker = WorkerConfig::new(cluster.spec.clone(), TaskId::worker(0)).data(set);
    let config = TrainingConfig::new(worker).variables([vector("w", 3)]);
    let mut session = TrainingSession::start(config).unwrap();
    let mut counts = [0; 10];
    let mut steps = 0;
    while let Some(mut step) = session.step().unwrap() {
        steps += 1;
        let range = step.samples().unwrap();
        let samples = range.start as usize..(range.start + u64::from(range.len)) as usize;
        match steps {
            2 => continue,
            3 => step.skip(),
            _ => {
                step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
                assert!(step.push().unwrap().counts());
            }
        }
        samples.for_each(|sample| counts[sample] += 1);
    }
    assert_eq!((counts, steps), ([2; 10], 9));
    let ended = session.close().unwrap();
    assert_eq!((ended.step, ended.reason), (7, StopReason::DataEnd));
    cluster.stop();
}

/// A step can be computed while nothing borrows the session, and only the newest one.
#[test]
fn a_detached_step_goes_on_where_it_was() {
    let cluster = TestCluster::sgd(1, |config| config.last_step(4));
    let mut session = TrainingSession::start(config(&cluster.spec, 0)).unwrap();
    let first = session.step().unwrap().unwrap().detach();
    assert_eq!((first.step(), session.global_step()), (0, 0));
    let mut step = session.attach(first).unwrap();
    step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
    assert!(step.push().unwrap().counts());
    // Another step has begun, so the old one is dropped with its token.
    let old = session.step().unwrap().unwrap().detach();
    let mut current = session.step().unwrap().unwrap();
    assert_eq!(current.parts().0.view::<f32>("w").unwrap()[0], -1.0);
    let current = current.detach();
    assert!(session.attach(old).is_none());
    // A step of the same number of another session.
    let other_cluster = TestCluster::sgd(1, |config| config);
    let mut other = TrainingSession::start(config(&other_cluster.spec, 0)).unwrap();
    for _ in 0..2 {
        drop(other.step().unwrap());
    }
    let foreign = other.step().unwrap().unwrap().detach();
    assert!(session.attach(foreign).is_none());
    other.close().unwrap();
    other_cluster.stop();
    session.attach(current).unwrap().skip();
    while let Some(mut step) = session.step().unwrap() {
        step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
        step.push().unwrap();
    }
    assert_eq!(session.close().unwrap().step, 4);
    cluster.stop();
}

#[test]
fn a_file_that_does_not_fit_is_an_error_of_the_start() {
    let cluster = TestCluster::sgd(1, |config| config);
    let config =
        config(&cluster.spec, 0).initialize(|initial| initial.load("/nowhere/w.safetensors"));
    let error = TrainingSession::start(config).unwrap_err();
    let Some(Error::Load(source)) = error.worker_error() else { panic!("{error}") };
    assert!(source.to_string().contains("/nowhere/w.safetensors"), "{source}");
    cluster.stop();
}

/// The hooks of a blocking session may use a runtime of their own.
#[test]
fn the_asynchronous_form_is_the_same() {
    struct OwnRuntime;
    impl Hook for OwnRuntime {
        fn joined(&mut self, _: &JoinReport<'_>) -> Result<Flow, HookError> {
            block_on(async { tokio::task::yield_now().await });
            Ok(Flow::Continue)
        }

        fn after_step(&mut self, _: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
            block_on(async { tokio::task::yield_now().await });
            Ok(Flow::Continue)
        }
    }
    let cluster = TestCluster::sgd(1, |config| config.last_step(20));
    let stops = config(&cluster.spec, 0).hook(OwnRuntime).hook(hooks::StopAtStep::count(5));
    let (end, counted) = train(stops).unwrap();
    assert_eq!((end.step, counted), (5, 5));
    let ends = Ends::default();
    let config = config(&cluster.spec, 0).hook(ends.clone());
    let end = block_on(async {
        let mut session = pushpull::training::TrainingSession::start(config).await?;
        let mut step = session.step().await?.expect("there are steps");
        step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
        step.push().await?;
        session
            .run(|step| {
                step.parts().1.view_mut::<f32>("w")?.fill(1.0);
                Ok::<(), HookError>(())
            })
            .await
    });
    assert_eq!(end.unwrap().step, 20);
    assert_eq!(*ends.0.lock().unwrap(), [StopReason::LastStep.to_string()]);
    cluster.stop();
}
