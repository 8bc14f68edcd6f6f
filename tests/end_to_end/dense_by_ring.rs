//! Training sessions whose dense gradients go around a ring, while servers have the rows.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use pushpull::blocking::{self, TrainingSession};
use pushpull::checkpoint::{Checkpoints, LocalDirectory};
use pushpull::collective::{Launch, Ring, RingConfig};
use pushpull::error::{ConfigError, TrainingError};
use pushpull::server::OnLoss;
use pushpull::training::TrainingSession as AsyncTrainingSession;
use pushpull::training::{
    FinishedStep, Flow, GradientOutcome, Hook, HookError, StopReason, TrainingConfig, TrainingEnd,
    hooks,
};
use pushpull::variable::{DType, Initializer, Partitioner, Shape, TableSpec};
use pushpull::worker::DataSet;
use pushpull::{
    Adam, Asynchronous, Error, Gradients, Mode, Params, Ps, PsConfig, Push, Sgd, Synchronous,
    TaskId, VariableSpec, WorkerConfig,
};

use crate::cluster::{TestCluster, block_on, spec, vector};
use crate::ring_checkpoints::exported;

static JOBS: AtomicU32 = AtomicU32::new(0);

/// The ranks of a job, and where they meet.
struct Job {
    folder: tempfile::TempDir,
    key: String,
    size: u32,
}

impl Job {
    fn new(size: u32) -> Job {
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let key = format!("dense-{}-{number}", std::process::id());
        Job { folder: tempfile::tempdir().unwrap(), key, size }
    }

    fn join(&self, rank: u32) -> Ring {
        blocking::Ring::join(self.config(rank)).unwrap().into_inner()
    }

    fn config(&self, rank: u32) -> RingConfig {
        let lookup = |name: &str| match name {
            "OMPI_COMM_WORLD_RANK" => Some(rank.to_string()),
            "OMPI_COMM_WORLD_SIZE" => Some(self.size.to_string()),
            "PMIX_NAMESPACE" => Some(self.key.clone()),
            _ => None,
        };
        let launch = Launch::from_lookup(lookup).unwrap();
        let config = RingConfig::new(launch).folder(self.folder.path());
        config.lease(Duration::from_secs(2)).join_timeout(Duration::from_secs(30))
    }
}

/// Runs each worker in a thread.
fn each<R: Send>(workers: u32, run: impl Fn(u32) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let start = |index| {
            let run = &run;
            scope.spawn(move || run(index))
        };
        let threads: Vec<_> = (0..workers).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Dense variables of two types, cut and whole, one that each replica changes by itself, rows and a
/// table.
fn variables() -> Vec<VariableSpec> {
    let thirds = Partitioner::Fixed { shards: 3 };
    let normal = Initializer::Normal { mean: 0.0, stddev: 1.0 };
    let f64 = VariableSpec::new("wide", DType::F64, Shape::new([7]).unwrap()).unwrap();
    let table = VariableSpec::table("table", DType::F32, [3], TableSpec::new(1 << 20)).unwrap();
    vec![
        VariableSpec::f32("matrix", [23, 5]).unwrap().partitioner(thirds).initializer(normal),
        vector("bias", 5),
        f64.initializer(normal),
        vector("running", 2).local(),
        VariableSpec::f32("users", [40, 5]).unwrap().sparse().initializer(normal),
        table.initializer(normal).seed(3),
    ]
}

/// The ids that a replica uses in a step: some are those of the other replica.
fn ids(step: u64, replica: u32) -> [u64; 4] {
    let own = u64::from(replica);
    [step % 40, (step + own) % 40, (step * 3 + own) % 40, 39]
}

/// Computes gradients that depend on all values, on the step and on the replica.
fn fill(params: &Params, gradients: &mut Gradients, users: &[f32], rows: &[f32], at: f32) {
    let [matrix, bias] = params.views::<f32, 2>(["matrix", "bias"]).unwrap();
    let sum: f32 = matrix.iter().chain(bias).chain(users).chain(rows).sum::<f32>().sin();
    let slope = |value: &f32| (value + sum + at).sin();
    let [d_matrix, d_bias] = gradients.views_mut::<f32, 2>(["matrix", "bias"]).unwrap();
    d_matrix.iter_mut().zip(matrix).for_each(|(d, value)| *d = slope(value));
    d_bias.iter_mut().zip(bias).for_each(|(d, value)| *d = slope(value));
    let wide = params.view::<f64>("wide").unwrap();
    let d_wide = gradients.view_mut::<f64>("wide").unwrap();
    d_wide.iter_mut().zip(wide).for_each(|(d, value)| *d = (value + f64::from(sum + at)).cos());
}

/// Trains a replica to the end. Returns how many of its gradients counted.
fn train(config: TrainingConfig, replica: u32) -> Result<(TrainingEnd, u64), TrainingError> {
    let mut session = TrainingSession::start(config)?;
    let mut counted = 0;
    while let Some(mut step) = session.step()? {
        let at = step.step();
        let ids = ids(at, replica);
        let mut users = [0.0_f32; 4 * 5];
        let mut rows = [0.0_f32; 4 * 3];
        if step.pull_rows("users", &ids, &mut users)?.is_stale()
            || step.pull_rows("table", &ids, &mut rows)?.is_stale()
        {
            continue;
        }
        let (params, gradients) = step.parts();
        fill(params, gradients, &users, &rows, at as f32 + 0.25 * replica as f32);
        gradients.set_rows("users", &ids, &users.map(f32::sin)).unwrap();
        gradients.set_rows("table", &ids, &rows.map(f32::cos)).unwrap();
        params.view_mut::<f32>("running").unwrap()[0] += 1.0 + replica as f32;
        counted += u64::from(step.push()?.counts());
    }
    Ok((session.close()?, counted))
}

fn mode(replicas: u32) -> Synchronous {
    Synchronous::new(replicas).total_num_replicas(replicas)
}

fn cluster(mode: impl Into<Mode>, workers: usize, directory: Option<&Path>) -> TestCluster {
    let mode = mode.into();
    TestCluster::start(2, workers, Adam::new(0.05).lazy(), |config| {
        let config = config.mode(mode).shards(2).lease(Duration::from_secs(2));
        match directory {
            Some(directory) => {
                config.checkpoints(Checkpoints::new(LocalDirectory::create(directory).unwrap()))
            }
            None => config,
        }
    })
}

fn config(cluster: &TestCluster, worker: u32) -> TrainingConfig {
    TrainingConfig::new(cluster.config(worker)).variables(variables())
}

/// Trains two replicas up to this step, from the newest checkpoint in the directory on.
fn train_to(last: u64, directory: &Path, by_ring: bool) -> Vec<TrainingEnd> {
    let cluster = cluster(mode(2).deterministic(true), 2, Some(directory));
    let job = Job::new(2);
    let ends = each(2, |worker| {
        let config = config(&cluster, worker).checkpoint_every_steps(4);
        let config = config.hook(hooks::StopAtStep::last(last));
        let config = match by_ring {
            true => config.dense_by(job.join(worker)),
            false => config,
        };
        train(config, worker).unwrap().0
    });
    cluster.stop();
    ends
}

/// Sorts the rows of the table, and its slots, by their ids: servers store them as they come.
fn with_sorted_rows(mut tensors: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    let ids = tensors["table:ids"].clone();
    let ids: Vec<&[u8]> = ids.chunks(8).collect();
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&row| ids[row]);
    for (_, bytes) in tensors.iter_mut().filter(|(name, _)| name.starts_with("table")) {
        let width = bytes.len() / ids.len();
        let rows = order.iter().map(|row| &bytes[row * width..(row + 1) * width]);
        *bytes = rows.flatten().copied().collect();
    }
    tensors
}

/// Dense by ring with rows by servers: equal to servers alone in deterministic mode.
#[test]
fn dense_by_ring_equals_servers_alone_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let train = |name: &str, stretches: [(u64, bool); 3]| {
        let directory = folder.path().join(name);
        stretches.map(|(last, by_ring)| {
            let ends = train_to(last, &directory, by_ring);
            assert_eq!(ends.iter().map(|end| end.step).collect::<Vec<_>>(), [last; 2]);
            let params = |end: &TrainingEnd| {
                let params = end.params.as_ref().unwrap();
                let [matrix, bias] = params.views::<f32, 2>(["matrix", "bias"]).unwrap();
                matrix.iter().chain(bias).map(|value| value.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(params(&ends[0]), params(&ends[1]), "{name} at {last}");
            with_sorted_rows(exported(&directory))
        })
    };
    let servers = train("servers", [(6, false), (13, false), (17, false)]);
    let ring = train("ring", [(6, true), (13, true), (17, true)]);
    let mixed = train("mixed", [(6, false), (13, true), (17, false)]);
    assert!(servers[0].len() >= 14, "{:?}", servers[0].keys());
    assert!(servers[0] != servers[1], "it trains");
    for (index, servers) in servers.iter().enumerate() {
        for (name, trained) in [("ring", &ring[index]), ("mixed", &mixed[index])] {
            let differs = |name: &&String| trained.get(*name) != servers.get(*name);
            let differing: Vec<&String> = servers.keys().filter(differs).collect();
            assert!(differing.is_empty(), "{name} differs in stretch {index}: {differing:?}");
        }
    }
}

/// A hook that stops at a step.
struct StopAfter(u64);

impl Hook for StopAfter {
    fn name(&self) -> &str {
        "stop_after"
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        match step.local_steps >= self.0 {
            true => Ok(Flow::Stop("enough".to_owned())),
            false => Ok(Flow::Continue),
        }
    }
}

#[test]
fn a_hook_that_stops_one_rank_stops_all() {
    let cluster = cluster(mode(3), 3, None);
    let job = Job::new(3);
    let ends = each(3, |worker| {
        let config = config(&cluster, worker).dense_by(job.join(worker));
        let config = match worker {
            1 => config.hook(StopAfter(5)),
            _ => config,
        };
        train(config, worker).unwrap()
    });
    for (worker, (end, counted)) in ends.iter().enumerate() {
        assert_eq!((end.step, *counted, end.is_final), (5, 5, true), "{worker}");
        let is_own = matches!(end.reason, StopReason::Hook { .. });
        assert_eq!(is_own, worker == 1, "{worker}: {}", end.reason);
    }
    cluster.stop();
}

#[test]
fn the_end_on_the_servers_ends_all_ranks() {
    let mode = mode(2);
    let cluster = TestCluster::start(1, 2, Sgd::new(0.1), |config| config.mode(mode).last_step(4));
    let job = Job::new(2);
    let ends = each(2, |worker| {
        train(config(&cluster, worker).dense_by(job.join(worker)), worker).unwrap()
    });
    for (end, counted) in ends {
        assert_eq!((end.step, counted, end.reason), (4, 4, StopReason::LastStep));
        assert!(end.is_final);
    }
    cluster.stop();
}

/// The asynchronous forms of the ring and of the session.
#[test]
fn the_servers_receive_each_dense_gradient_once_and_send_each_value_once() {
    let mode = mode(3);
    let cluster = TestCluster::start(1, 3, Sgd::new(1.0), |config| config.mode(mode).last_step(5));
    let job = Job::new(3);
    let train = async |worker: u32| {
        let ring = Ring::join(job.config(worker)).await.unwrap();
        let config = TrainingConfig::new(cluster.config(worker)).variables([vector("w", 1 << 16)]);
        let mut session = AsyncTrainingSession::start(config.dense_by(ring)).await.unwrap();
        while let Some(mut step) = session.step().await.unwrap() {
            step.parts().1.view_mut::<f32>("w").unwrap().fill(3.0 * worker as f32);
            assert!(step.push().await.unwrap().counts());
        }
        let end = session.close().await.unwrap();
        assert!(end.params.unwrap().view::<f32>("w").unwrap().iter().all(|&w| w == -15.0));
    };
    each(3, |worker| block_on(train(worker)));
    let metrics = cluster.handle().metrics();
    // Each rank pulls the values when it joins and at the end.
    let model = 4 << 16;
    assert_eq!((metrics.push_bytes, metrics.pull_bytes), (5 * model, (3 + 5 + 3) * model));
    cluster.stop();
}

/// A model of dense variables alone, for steps that end in other ways.
#[test]
fn streamed_gradients_are_collected_until_the_end_of_the_step() {
    let mode = mode(2);
    let cluster = TestCluster::start(1, 2, Sgd::new(1.0), |config| config.mode(mode).last_step(2));
    let job = Job::new(2);
    each(2, |worker| {
        let users = VariableSpec::f32("users", [4, 2]).unwrap().sparse();
        let config = TrainingConfig::new(cluster.config(worker)).variables([vector("w", 3), users]);
        let mut session = TrainingSession::start(config.dense_by(job.join(worker))).unwrap();
        let own = worker as f32 + 1.0;
        while let Some(step) = session.step().unwrap() {
            let mut step = step.begin().unwrap();
            step.rows("users", &[u64::from(worker)], &[own; 2]).unwrap();
            step.variable("w", &[own; 3]).unwrap();
            assert!(step.finish().unwrap().counts());
        }
        let params = session.close().unwrap().params.unwrap();
        assert_eq!(params.view::<f32>("w").unwrap(), [-3.0; 3], "twice the mean");
    });
    cluster.stop();
}

fn dense_config(cluster: &TestCluster, job: &Job, worker: u32) -> TrainingConfig {
    let config = TrainingConfig::new(cluster.config(worker)).variables([vector("w", 3)]);
    config.hook(hooks::StopAtStep::last(9)).dense_by(job.join(worker))
}

/// A rank other than the lead has nothing to push then, and its push counts all the same.
#[test]
fn a_step_that_one_rank_drops_counts_on_none() {
    let cluster = cluster(mode(2), 2, None);
    let job = Job::new(2);
    let outcomes = each(2, |worker| {
        let mut session = TrainingSession::start(dense_config(&cluster, &job, worker)).unwrap();
        let mut attempts = 0;
        let mut stale = 0;
        let mut skipped = 0;
        while let Some(mut step) = session.step().unwrap() {
            attempts += 1;
            if attempts == 3 && worker == 1 {
                continue;
            }
            let is_bad = attempts == 6 && worker == 1;
            let gradient = if is_bad { f32::NAN } else { 1.0 + 2.0 * worker as f32 };
            step.parts().1.view_mut::<f32>("w").unwrap().fill(gradient);
            match step.push().unwrap() {
                GradientOutcome::Pushed(Push::Stale { .. }) => stale += 1,
                GradientOutcome::Skipped(Error::NonFinite { .. }) => skipped += 1,
                outcome => assert!(outcome.counts(), "{outcome:?}"),
            }
        }
        let end = session.close().unwrap();
        let w = end.params.as_ref().unwrap().view::<f32>("w").unwrap().to_vec();
        (attempts, stale, skipped, end.step, w)
    });
    assert_eq!(outcomes[0].4, outcomes[1].4);
    assert_eq!((outcomes[0].0, outcomes[0].1, outcomes[0].2, outcomes[0].3), (11, 1, 1, 9));
    assert_eq!((outcomes[1].0, outcomes[1].1, outcomes[1].2, outcomes[1].3), (11, 0, 1, 9));
    cluster.stop();
}

/// After a kill of all workers, the servers may have the gradient of one for the step that the
/// others have to begin again.
#[test]
fn ranks_begin_after_a_step_that_one_has_given_its_gradient_to_before() {
    let cluster = cluster(mode(2).deterministic(true), 2, None);
    let mut killed = [cluster.worker(0), cluster.worker(1)];
    let join = |worker: &mut blocking::Worker| worker.join(&[vector("w", 3)], |_| ()).map(|_| ());
    killed.iter_mut().for_each(|worker| join(worker).unwrap());
    let token = killed[0].token().unwrap().unwrap();
    let mut gradients = killed[0].gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    assert_eq!(killed[0].push(token, gradients).unwrap(), Push::Accepted { step: 1 });
    drop(killed);
    let job = Job::new(2);
    let counted = each(2, |worker| {
        let session = TrainingSession::start(dense_config(&cluster, &job, worker)).unwrap();
        let mut counted = 0;
        let run = session.run(|step| {
            counted += 1;
            step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
            Ok::<(), TrainingError>(())
        });
        assert_eq!(run.unwrap().step, 9);
        counted
    });
    assert_eq!(counted, [8, 8], "the step that had begun takes no gradient more");
    cluster.stop();
}

#[test]
fn ranks_that_are_left_go_on() {
    let cluster = cluster(mode(3), 3, None);
    let job = Job::new(3);
    let ends = each(3, |worker| {
        let config = dense_config(&cluster, &job, worker);
        let mut session = TrainingSession::start(config).unwrap();
        while let Some(mut step) = session.step().unwrap() {
            // As if the process of the lead was killed.
            if worker == 0 && step.step() == 4 {
                return None;
            }
            step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
            step.push().unwrap();
        }
        let end = session.close().unwrap();
        Some((end.step, end.params.unwrap().view::<f32>("w").unwrap().to_vec()))
    });
    let left: Vec<_> = ends.into_iter().flatten().collect();
    assert_eq!((left.len(), left[0].0), (2, 9));
    assert_eq!(left[0], left[1]);
    cluster.stop();
}

/// Its lease on the servers goes on while it waits for the ring, and while it computes.
#[test]
fn a_rank_that_computes_for_longer_than_a_lease_is_waited_for() {
    let mode = mode(2).deterministic(true);
    let cluster = TestCluster::start(1, 2, Sgd::new(0.1), |config| {
        config.mode(mode).lease(Duration::from_secs(1))
    });
    let job = Job::new(2);
    let counted = each(2, |worker| {
        let mut session = TrainingSession::start(dense_config(&cluster, &job, worker)).unwrap();
        let mut counted = 0;
        while let Some(mut step) = session.step().unwrap() {
            if worker == 1 && step.step() == 2 {
                std::thread::sleep(Duration::from_secs(3));
            }
            step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
            counted += u32::from(step.push().unwrap().counts());
        }
        counted
    });
    assert_eq!(counted, [9, 9]);
    cluster.stop();
}

/// Makes steps until one has counted after `until` is set.
fn train_until(config: TrainingConfig, until: &AtomicBool) {
    let mut session = TrainingSession::start(config).unwrap();
    while let Some(mut step) = session.step().unwrap() {
        step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
        let is_set = until.load(Ordering::Relaxed);
        if step.push().unwrap().counts() && is_set {
            break;
        }
    }
    assert!(session.close().unwrap().is_final);
}

#[test]
fn a_rank_that_comes_again_is_let_in() {
    let cluster = cluster(mode(3), 3, None);
    let job = Job::new(3);
    let is_back = AtomicBool::new(false);
    let config = |worker| {
        let config = TrainingConfig::new(cluster.config(worker)).variables([vector("w", 3)]);
        config.dense_by(job.join(worker))
    };
    each(3, |worker| {
        if worker != 2 {
            return train_until(config(worker), &is_back);
        }
        let mut session = TrainingSession::start(config(worker)).unwrap();
        for _ in 0..3 {
            let mut step = session.step().unwrap().unwrap();
            step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
            assert!(step.push().unwrap().counts());
        }
        drop(session);
        let config = config(worker);
        is_back.store(true, Ordering::Relaxed);
        train_until(config, &is_back);
    });
    cluster.stop();
}

/// The ranks keep their ring while they join servers again that have gone back to a checkpoint.
#[test]
fn ranks_go_on_from_a_checkpoint_when_a_server_has_lost_its_state() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("checkpoints");
    let cluster = spec([format!("unix:{}/ps.sock", folder.path().display())], 2);
    let start = || {
        let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0)).mode(mode(2));
        let storage = LocalDirectory::create(&directory).unwrap();
        let config = config.last_step(20).checkpoints(Checkpoints::new(storage));
        let listener = block_on(Ps::listen(cluster.task_address("ps", 0).unwrap())).unwrap();
        listener.start(config).unwrap()
    };
    let job = Job::new(2);
    let pause = Barrier::new(3);
    let train = &|worker: u32| {
        let config = WorkerConfig::new(cluster.clone(), TaskId::worker(worker));
        let config = TrainingConfig::new(config).variables([vector("w", 3)]);
        let config = config.checkpoint_every_steps(5).finish_for_all(true);
        let mut session = TrainingSession::start(config.dense_by(job.join(worker))).unwrap();
        let mut is_lost = false;
        while let Some(mut step) = session.step().unwrap() {
            let gradient = 1.0 + 2.0 * worker as f32;
            step.parts().1.view_mut::<f32>("w").unwrap().fill(gradient);
            if step.step() == 12 && !std::mem::replace(&mut is_lost, true) {
                pause.wait();
                pause.wait();
            }
            step.push().unwrap();
        }
        let end = session.close().unwrap();
        assert_eq!((end.step, end.reason), (20, StopReason::LastStep), "{worker}");
        assert_eq!(end.params.unwrap().view::<f32>("w").unwrap(), [-40.0; 3], "{worker}");
    };
    let server = std::thread::scope(|scope| {
        let server = start();
        let ranks = [0, 1].map(|worker| scope.spawn(move || train(worker)));
        pause.wait();
        block_on(server.serve(async {})).unwrap();
        let server = start();
        pause.wait();
        for rank in ranks {
            rank.join().unwrap();
        }
        server
    });
    block_on(server.serve(async {})).unwrap();
}

/// Servers that take no step without the lost rank say so to the others.
#[test]
fn servers_that_wait_for_all_replicas_end_the_ranks_that_are_left() {
    let cluster = cluster(mode(2).on_loss(OnLoss::Fail), 2, None);
    let job = Job::new(2);
    let errors = each(2, |worker| {
        let session = TrainingSession::start(dense_config(&cluster, &job, worker)).unwrap();
        let run = session.run(|step| {
            step.parts().1.view_mut::<f32>("w").unwrap().fill(1.0);
            match (worker, step.step()) {
                (1, 4) => Err("no samples"),
                _ => Ok(()),
            }
        });
        run.unwrap_err()
    });
    assert!(matches!(errors[1], TrainingError::Step { step: 4, .. }), "{}", errors[1]);
    let error = errors[0].worker_error().unwrap();
    assert!(matches!(error, Error::ReplicasAbsent { .. }), "{error}");
    cluster.stop();
}

fn refusal(config: TrainingConfig) -> Error {
    let error = TrainingSession::start(config).map(|_| ()).unwrap_err();
    error.worker_error().unwrap().clone()
}

#[test]
fn a_ring_that_does_not_fit_its_servers_is_refused() {
    let one = || Job::new(1).join(0);
    let cluster = cluster(mode(2), 2, None);
    let error = refusal(config(&cluster, 0).dense_by(one()));
    assert_eq!(error, ConfigError::RingSize { ranks: 1, replicas: 2 }.into());
    cluster.stop();
    let expected = "synchronous, 1 gradients of 1 replicas";
    for (mode, setting, expected, found) in [
        (Asynchronous::default().into(), "mode", expected, "asynchronous"),
        (
            Mode::from(Synchronous::new(1).total_num_replicas(2)),
            "mode",
            expected,
            "synchronous, 1 gradients of 2 replicas",
        ),
        (mode(1).clip_by_global_norm(1.0).into(), "clips", "none", "by global norm"),
    ] {
        let cluster = crate::dense_by_ring::cluster(mode, 1, None);
        let error = refusal(config(&cluster, 0).dense_by(one()));
        let Error::Unexpected { setting: of, expected: ours, found: theirs, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((*of, &ours[..], &theirs[..]), (setting, expected, found));
        let set = DataSet::new("images", 100, 10).unwrap();
        let error = refusal(config(&cluster, 0).data(set).dense_by(one()));
        let data_set = "images".to_owned();
        assert_eq!(error, ConfigError::GrantedData { data_set }.into());
        cluster.stop();
    }
}
