//! Start, waiting, takeover and end of servers and workers.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pushpull::blocking::{Reader, Worker};
use pushpull::error::{Chain, ConfigError};
use pushpull::{Error, PsConfig, Sgd, Storage, TaskId, WorkerConfig};

use super::cluster::{TestCluster, block_on, listen, spec, vector, wait_for_end};

#[test]
fn serve_returns_after_stop_and_after_its_shutdown_future() {
    let cluster = TestCluster::sgd(1, |config| config);
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", 10)], |_| ()).unwrap();
    let address = cluster.handle().address().to_owned();
    cluster.stop();
    // The port is free again.
    let again = block_on(pushpull::Ps::listen(&address)).unwrap();
    let config = PsConfig::new(spec([again.address()], 1), TaskId::ps(0), Sgd::new(1.0));
    let ps = again.start(config).unwrap();
    block_on(ps.serve(async {})).unwrap();
}

#[test]
fn a_stopped_server_ends_every_wait_of_its_workers_and_readers() {
    let cluster = TestCluster::sgd(2, |config| config.last_step(1));
    let mut holder = cluster.worker(0);
    let mut waiter = cluster.worker(1);
    holder.join(&[vector("w", 10)], |_| ()).unwrap();
    waiter.join(&[vector("w", 10)], |_| ()).unwrap();
    let mut reader = Reader::connect(cluster.config(0)).unwrap();
    let mut values = reader.params();
    let token = holder.token().unwrap().unwrap();
    let waiting = thread::spawn(move || waiter.token().unwrap_err());
    cluster.stop();
    let is_stopped =
        |error: Error| matches!(error, Error::ServerStopped { shard } if shard.task == 0);
    // Without the goodbye these calls would wait for a minute for a server that is gone.
    assert!(is_stopped(waiting.join().unwrap()));
    let mut gradients = holder.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    assert!(is_stopped(holder.push(token, gradients).unwrap_err()));
    assert!(is_stopped(reader.pull(&mut values).unwrap_err()));
}

#[test]
fn a_finished_training_ends_its_workers_and_then_its_servers() {
    for leaves in [true, false] {
        let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| config);
        let workers = [0, 1].map(|index| {
            let mut worker = cluster.worker(index);
            thread::spawn(move || {
                worker.join(&[vector("w", 10), vector("b", 2)], |_| ()).unwrap();
                while let Some(token) = worker.token().unwrap() {
                    let mut gradients = worker.gradients();
                    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
                    worker.push(token, gradients).unwrap();
                }
                match leaves {
                    true => worker.leave().map(|()| None).unwrap(),
                    false => Some(worker),
                }
            })
        });
        while cluster.handle().metrics().gradients_applied < 10 {
            thread::sleep(Duration::from_millis(1));
        }
        // With a grace of an hour only the workers' departure ends the servers.
        let grace = if leaves { Duration::from_secs(3600) } else { Duration::from_millis(50) };
        cluster.servers.iter().for_each(|server| server.handle().finish(grace));
        let workers = workers.map(|worker| worker.join().unwrap());
        for server in cluster.servers {
            wait_for_end(server).unwrap();
        }
        for mut worker in workers.into_iter().flatten() {
            let error = worker.finish().unwrap_err();
            assert!(matches!(error, Error::ServerStopped { .. }), "{error}");
        }
    }
}

#[test]
fn a_suspended_server_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let storage = || Storage::directory(folder.path().join("state"));
    let cluster = TestCluster::sgd(1, |config| config.storage(storage()));
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", 10)], |_| ()).unwrap();
    let address = cluster.handle().address().to_owned();
    let spec = cluster.spec.clone();
    cluster.suspend();
    let waiting = thread::spawn(move || worker.token().map(|token| token.is_some()));
    let again = block_on(pushpull::Ps::listen(&address)).unwrap();
    let config = PsConfig::new(spec, TaskId::ps(0), Sgd::new(1.0)).storage(storage());
    let _ps = again.start(config).unwrap();
    assert_eq!(waiting.join().unwrap(), Ok(true));
}

#[test]
fn a_server_ends_once_all_workers_have_left() {
    let grace = Duration::from_millis(50);
    let cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| {
        config.shards(2).exit_when_done(grace).lease(Duration::from_secs(60))
    });
    let variables: Vec<_> = (0..6).map(|index| vector(&format!("v{index}"), 4)).collect();
    let mut a = cluster.worker(0);
    let mut b = cluster.worker(1);
    a.join(&variables, |_| ()).unwrap();
    b.join(&variables, |_| ()).unwrap();
    a.leave().unwrap();
    b.leave().unwrap();
    for server in cluster.servers {
        wait_for_end(server).unwrap();
    }
}

#[test]
fn a_server_ends_once_a_silent_worker_has_lost_its_lease() {
    let cluster = TestCluster::sgd(2, |config| {
        config.exit_when_done(Duration::from_millis(50)).lease(Duration::from_millis(300))
    });
    let handle = cluster.handle();
    let mut a = cluster.worker(0);
    let mut b = cluster.worker(1);
    a.join(&[vector("w", 1)], |_| ()).unwrap();
    b.join(&[vector("w", 1)], |_| ()).unwrap();
    a.leave().unwrap();
    // Dropped without a goodbye, as if the process had been killed.
    drop(b);
    for server in cluster.servers {
        wait_for_end(server).unwrap();
    }
    assert_eq!(handle.metrics().members_lost, 1);
}

#[test]
fn tokens_of_a_lost_worker_are_granted_to_others() {
    let cluster =
        TestCluster::sgd(2, |config| config.last_step(2).lease(Duration::from_millis(300)));
    let mut a = cluster.worker(0);
    let mut b = cluster.worker(1);
    a.join(&[vector("w", 1)], |_| ()).unwrap();
    b.join(&[vector("w", 1)], |_| ()).unwrap();
    let lost = b.token().unwrap().unwrap();
    std::mem::forget(lost);
    drop(b);
    let mut steps = 0;
    while let Some(token) = a.token().unwrap() {
        let mut gradients = a.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        a.push(token, gradients).unwrap();
        steps += 1;
    }
    assert_eq!((steps, cluster.handle().metrics().global_step), (2, 2));
    cluster.stop();
}

#[test]
fn a_worker_waits_for_servers_that_are_not_up_yet() {
    // The ports are bound but not served yet: connections stay unanswered.
    let first = listen();
    let second = listen();
    let cluster = spec([first.address(), second.address()], 1);
    let reports = Arc::new(Mutex::new(Vec::new()));
    let sink = reports.clone();
    let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0)).on_progress(
        Duration::from_millis(20),
        move |silent| {
            sink.lock().unwrap().push(silent.to_string());
        },
    );
    let worker = thread::spawn(move || {
        let mut worker = Worker::connect(config).unwrap();
        worker.join(&[vector("a", 1), vector("b", 1)], |_| ()).unwrap();
    });
    while reports.lock().unwrap().is_empty() {
        thread::yield_now();
    }
    let start = |listener: pushpull::server::PsListener, index| {
        let config = PsConfig::new(cluster.clone(), TaskId::ps(index), Sgd::new(1.0));
        listener.start(config).unwrap()
    };
    let servers = [start(first, 0), start(second, 1)];
    worker.join().unwrap();
    assert!(reports.lock().unwrap()[0].contains("/job:ps/task:0"));
    drop(servers);
}

#[test]
fn a_timeout_names_the_silent_tasks_and_their_last_errors() {
    let up = listen();
    let gone = listen();
    let cluster = spec([up.address(), gone.address()], 1);
    let address = gone.address();
    drop(gone);
    let config = PsConfig::new(cluster.clone(), TaskId::ps(0), Sgd::new(1.0));
    let _server = up.start(config).unwrap();
    let config =
        WorkerConfig::new(cluster, TaskId::worker(0)).connect_timeout(Duration::from_millis(300));
    let start = Instant::now();
    let mut worker = Worker::connect(config).unwrap();
    let error = worker.join(&[vector("a", 1), vector("b", 1)], |_| ()).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(300));
    let Error::Timeout { awaited, .. } = &error else { panic!("{error}") };
    assert_eq!(awaited.0.len(), 1, "{error}");
    assert_eq!((awaited.0[0].shard.task, &awaited.0[0].address), (1, &address));
    assert!(awaited.0[0].last.contains("refused"), "{error}");
}

#[test]
fn a_cluster_without_servers_is_refused_at_once() {
    let cluster = pushpull::ClusterSpec::builder().job("worker", ["a:1"]).build().unwrap();
    let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0));
    let error = Worker::connect(config).unwrap_err();
    assert!(matches!(error, Error::Config(ConfigError::NoVariablesJob { .. })), "{error:?}");
    let text = Chain(&error).to_string();
    assert!(text.contains("the cluster has the jobs worker; name a job ps"), "{text}");
    let empty = "ps=;worker=a:1".parse().unwrap();
    let error = Worker::connect(WorkerConfig::new(empty, TaskId::worker(0))).unwrap_err();
    assert!(matches!(error, Error::Config(ConfigError::NoPs { .. })), "{error:?}");
    let config = WorkerConfig::new(cluster, TaskId::worker(7));
    let error = Chain(&Worker::connect(config).unwrap_err()).to_string();
    assert!(error.contains("task:7"), "{error}");
}

#[test]
fn a_restarted_worker_takes_over_and_fences_its_old_incarnation() {
    let cluster = TestCluster::sgd(1, |config| config.last_step(3));
    let mut old = cluster.worker(0);
    old.join(&[vector("w", 1)], |_| ()).unwrap();
    let token = old.token().unwrap().unwrap();
    let mut new = cluster.worker(0);
    let mut params = new.join(&[vector("w", 1)], |_| panic!("already initialized")).unwrap();
    let mut gradients = old.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    assert_eq!(old.push(token, gradients), Err(Error::Fenced));
    // The new incarnation gets all three steps: the token of the old one was returned.
    let mut steps = 0;
    while let Some(token) = new.token().unwrap() {
        let mut gradients = new.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        new.push(token, gradients).unwrap();
        steps += 1;
    }
    assert_eq!(steps, 3);
    let mut reader = pushpull::blocking::Reader::connect(cluster.config(0)).unwrap();
    reader.pull(&mut params).unwrap();
    assert_eq!(params.view::<f32>("w").unwrap(), [-3.0]);
    cluster.stop();
}

/// Starts a server at the address of one that has ended.
fn restart(address: &str, cluster: &pushpull::ClusterSpec, task: u32) -> pushpull::Ps {
    let listener = block_on(pushpull::Ps::listen(address)).unwrap();
    listener.start(PsConfig::new(cluster.clone(), TaskId::ps(task), Sgd::new(1.0))).unwrap()
}

#[test]
fn a_server_that_restarts_empty_is_named_and_the_others_keep_their_values() {
    for lost in [0, 1] {
        let mut cluster = TestCluster::start(2, 2, Sgd::new(1.0), |config| config);
        let addresses: Vec<String> =
            cluster.servers.iter().map(|server| server.handle().address().to_owned()).collect();
        let variables = [vector("a", 1), vector("b", 1)];
        let fill = |initial: &mut pushpull::worker::InitialValues<'_>| {
            initial.set("a", &[100.0_f32]).set("b", &[100.0_f32]);
        };
        let mut chief = cluster.worker(0);
        chief.join(&variables, fill).unwrap();
        let token = chief.token().unwrap().unwrap();
        let mut gradients = chief.gradients();
        for view in gradients.views_mut::<f32, 2>(["a", "b"]).unwrap() {
            view.fill(1.0);
        }
        chief.push(token, gradients).unwrap();
        drop(chief);
        let gone = cluster.servers.remove(lost);
        block_on(gone.serve(async {})).unwrap();
        let _back = restart(&addresses[lost], &cluster.spec, lost as u32);

        let error = cluster.worker(0).join(&variables, fill).unwrap_err();
        let Error::NoCheckpoint { shard } = &error else { panic!("{error}") };
        assert_eq!(shard.task, lost as u32);
        // The other server still holds the trained values.
        let kept = &cluster.servers[0].handle().metrics();
        assert_eq!(kept.gradients_applied, 1);
        assert_eq!(kept.assigns_applied, 1, "only the first chief may assign values");
        cluster.stop();
    }
}

#[test]
fn a_server_without_variables_ends_with_the_others() {
    let cluster = TestCluster::start(3, 1, Sgd::new(1.0), |config| {
        config.exit_when_done(Duration::from_millis(50)).lease(Duration::from_secs(60))
    });
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", 1)], |_| ()).unwrap();
    worker.leave().unwrap();
    for server in cluster.servers {
        wait_for_end(server).unwrap();
    }
}
