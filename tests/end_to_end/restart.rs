//! A server that restarts on its state continues where it stopped.

use pushpull::blocking::Worker;
use pushpull::{Adam, Ps, PsConfig, Push, Sgd, Storage, TaskId, WorkerConfig};

use crate::cluster::{block_on, spec, vector};

/// A server on a Unix socket, so that it keeps its address across restarts.
pub(crate) struct RestartedServer {
    directory: tempfile::TempDir,
    pub(crate) ps: Option<Ps>,
}

impl RestartedServer {
    pub(crate) fn start() -> RestartedServer {
        let mut server = RestartedServer { directory: tempfile::tempdir().unwrap(), ps: None };
        server.restart();
        server
    }

    fn address(&self) -> String {
        format!("unix:{}", self.directory.path().join("ps.sock").display())
    }

    fn config(&self) -> PsConfig {
        let state = self.directory.path().join("state");
        let storage = Storage::directory(state).bytes_max(1 << 26);
        let cluster = spec([self.address()], 2);
        PsConfig::new(cluster, TaskId::ps(0), Adam::new(0.5)).shards(2).storage(storage)
    }

    pub(crate) fn stop(&mut self) {
        if let Some(ps) = self.ps.take() {
            block_on(ps.serve(async {})).unwrap();
        }
    }

    pub(crate) fn restart(&mut self) {
        self.stop();
        let listener = block_on(Ps::listen(&self.address())).unwrap();
        self.ps = Some(listener.start(self.config()).unwrap());
    }

    pub(crate) fn worker(&self, index: u32) -> Worker {
        let cluster = spec([self.address()], 2);
        Worker::connect(WorkerConfig::new(cluster, TaskId::worker(index))).unwrap()
    }
}

#[test]
fn a_training_loop_sees_a_restart_only_as_a_pause() {
    let mut server = RestartedServer::start();
    let mut undisturbed = RestartedServer::start();
    let mut results = Vec::new();
    for (server, restarts) in [(&mut server, true), (&mut undisturbed, false)] {
        let mut worker = server.worker(0);
        let variables = [vector("a", 40_000), vector("b", 7)];
        let mut params = worker.join(&variables, |_| ()).unwrap();
        for step in 0..12_u64 {
            let token = worker.token().unwrap().unwrap();
            if restarts && step % 3 == 0 {
                server.restart();
            }
            worker.pull(&token, &mut params).unwrap();
            if restarts && step % 4 == 1 {
                server.restart();
            }
            let mut gradients = worker.gradients();
            gradients.view_mut::<f32>("a").unwrap().fill(1.0 + step as f32);
            gradients.view_mut::<f32>("b").unwrap().fill(params.view::<f32>("a").unwrap()[9]);
            let applied = worker.push(token, gradients).unwrap();
            assert_eq!(applied, Push::Applied { step: step + 1, staleness: 0 });
        }
        let token = worker.token().unwrap().unwrap();
        worker.pull(&token, &mut params).unwrap();
        results.push((
            params.view::<f32>("a").unwrap().to_vec(),
            params.view::<f32>("b").unwrap().to_vec(),
        ));
        worker.leave().unwrap();
        server.stop();
    }
    assert!(results[0] == results[1], "values and slots are equal bit for bit");
    assert_ne!(results[0].1[0], 0.0);
}

#[test]
fn a_restarted_chief_keeps_the_state_of_a_restarted_server() {
    let mut server = RestartedServer::start();
    let mut chief = server.worker(0);
    chief.join(&[vector("w", 3)], |_| ()).unwrap();
    let token = chief.token().unwrap().unwrap();
    let mut gradients = chief.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    chief.push(token, gradients).unwrap();
    // The chief ends without a goodbye, and the server restarts.
    drop(chief);
    server.restart();
    let mut chief = server.worker(0);
    let params = chief.join(&[vector("w", 3)], |_| ()).unwrap();
    assert!(params.view::<f32>("w").unwrap().iter().all(|value| (value + 0.5).abs() < 1e-5));
    assert_eq!(server.ps.as_ref().unwrap().handle().metrics().global_step, 1);
    chief.leave().unwrap();
    server.stop();
}

#[test]
fn state_with_another_configuration_is_refused_by_name() {
    let mut server = RestartedServer::start();
    server.stop();
    let listener = block_on(Ps::listen(&server.address())).unwrap();
    let other = spec([server.address()], 2);
    let state = server.directory.path().join("state");
    let storage = Storage::directory(state).bytes_max(1 << 26);
    let other = PsConfig::new(other, TaskId::ps(0), Sgd::new(0.5)).shards(2).storage(storage);
    let error = listener.start(other).unwrap_err().to_string();
    assert!(error.contains("optimizer") && error.contains("adam"), "{error}");
    let listener = block_on(Ps::listen(&server.address())).unwrap();
    let error = listener.start(server.config().shards(3)).unwrap_err().to_string();
    assert!(error.contains("shards"), "{error}");
    // Settings that the state does not depend on may change.
    let listener = block_on(Ps::listen(&server.address())).unwrap();
    let config = server.config().lease(std::time::Duration::from_secs(9)).inbox_pushes(2);
    server.ps = Some(listener.start(config).unwrap());
    server.stop();
}
