//! Training sessions while a server process is killed and started again.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use crate::test_process::{LONG, TestProcess};
use pushpull::blocking::TrainingSession;
use pushpull::training::{
    FinalValues, FinishedStep, Flow, Hook, HookError, JoinReport, StopReason, TrainingConfig,
    TrainingEnd, hooks,
};
use pushpull::{ClusterSpec, TaskId, VariableSpec, WorkerConfig};

const LAST: u64 = 40;
const ELEMENTS: u64 = 1000;

/// What a session tells the test.
enum Report {
    Joined {
        worker: u32,
        step: u64,
    },
    Step(u64),
    /// An operation waits for a server.
    Waits(u32),
    Final(Vec<u32>),
}

struct Reports {
    worker: u32,
    reports: Sender<Report>,
}

impl Hook for Reports {
    fn joined(&mut self, at: &JoinReport<'_>) -> Result<Flow, HookError> {
        let worker = self.worker;
        let step = at.step;
        // The test may have ended.
        _ = self.reports.send(Report::Joined { worker, step });
        Ok(Flow::Continue)
    }

    fn after_step(&mut self, step: &mut FinishedStep<'_>) -> Result<Flow, HookError> {
        _ = self.reports.send(Report::Step(step.global_step));
        Ok(Flow::Continue)
    }

    fn end(&mut self, at: &FinalValues<'_>) -> Result<(), HookError> {
        let params = at.end.params.as_ref().ok_or("the worker never joined")?;
        let w = params.view::<f32>("w")?.iter().map(|value| value.to_bits());
        _ = self.reports.send(Report::Final(w.collect()));
        Ok(())
    }
}

/// Two deterministic, synchronous replicas with checkpoints, and the daemon that serves them.
struct Training {
    folder: tempfile::TempDir,
}

impl Training {
    fn address(&self) -> String {
        format!("unix:{}", self.folder.path().join("ps.sock").display())
    }

    fn daemon(&self, state: &Path) -> TestProcess {
        let checkpoints = self.folder.path().join("checkpoints");
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command
            .args(["--ps-hosts", &self.address(), "--worker-hosts", "127.0.0.1:1,127.0.0.1:2"])
            .args(["--shards", "2", "--bytes-max", "67108864", "--optimizer", "adam"])
            .args(["--synchronous", "2/2", "--deterministic"])
            .arg("--state-dir")
            .arg(state)
            .arg("--checkpoint-dir")
            .arg(checkpoints)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        TestProcess::start("daemon", &mut command)
    }

    /// Trains one replica. Its gradients depend on the step and the values only.
    fn train(&self, worker: u32, reports: Sender<Report>) -> TrainingEnd {
        let cluster = ClusterSpec::builder().job("ps", [self.address()]);
        let cluster = cluster.job("worker", ["127.0.0.1:1", "127.0.0.1:2"]).build().unwrap();
        let waits = reports.clone();
        // Operations time out while the server is away, so the session tries them again.
        let config = WorkerConfig::new(cluster, TaskId::worker(worker))
            .timeout(Duration::from_millis(300))
            .on_progress(Duration::from_millis(50), move |_| _ = waits.send(Report::Waits(worker)));
        let config = TrainingConfig::new(config)
            .variables([VariableSpec::f32("w", [ELEMENTS]).unwrap()])
            .checkpoint_every_steps(5)
            .recover_for(LONG)
            .hook(hooks::StopAtStep::last(LAST))
            .hook(Reports { worker, reports });
        let session = TrainingSession::start(config).unwrap();
        let ended = session.run(|step| {
            let at = step.step() as f32 + f32::from(worker as u8) / 2.0;
            let (params, gradients) = step.parts();
            let values = params.view::<f32>("w")?.iter();
            for ((index, gradient), value) in
                (0_u16..).zip(gradients.view_mut::<f32>("w")?).zip(values)
            {
                *gradient = value + (f32::from(index) * at).sin();
            }
            Ok::<(), HookError>(())
        });
        ended.unwrap()
    }

    /// Runs both replicas while `disturb` receives their reports. Returns the final values, which
    /// are equal on both.
    fn run(&self, disturb: impl FnOnce(&Receiver<Report>)) -> Vec<u32> {
        let (sender, reports) = mpsc::channel();
        std::thread::scope(|scope| {
            let senders = [sender.clone(), sender];
            let mut workers = [0, 1].into_iter().zip(senders);
            let workers: Vec<_> = workers
                .by_ref()
                .map(|(worker, sender)| scope.spawn(move || self.train(worker, sender)))
                .collect();
            disturb(&reports);
            for worker in workers {
                let ended = worker.join().unwrap();
                assert!(matches!(ended.reason, StopReason::Hook { .. }), "{ended:?}");
                assert_eq!(ended.step, LAST);
            }
        });
        let finals = reports.try_iter().filter_map(|report| match report {
            Report::Final(values) => Some(values),
            _ => None,
        });
        let finals: Vec<_> = finals.collect();
        assert!(finals.len() == 2 && finals[0] == finals[1], "both end with the same values");
        finals.into_iter().next().unwrap()
    }
}

/// Waits for a report, and returns what `take` makes of it.
fn wait_for<T>(reports: &Receiver<Report>, mut take: impl FnMut(Report) -> Option<T>) -> T {
    loop {
        let report = reports.recv_timeout(LONG).expect("a session reports");
        if let Some(taken) = take(report) {
            return taken;
        }
    }
}

/// A server is killed at step 12 and started again once both sessions have waited for it, with its
/// state or without. Both go on, and the final values equal those of an undisturbed run.
#[test]
fn two_sessions_survive_a_killed_server_and_end_with_the_same_values() {
    let mut results = Vec::new();
    for disturbance in [None, Some("state"), Some("another state")] {
        let training = Training { folder: tempfile::tempdir().unwrap() };
        let state = |name: &str| training.folder.path().join(name);
        let mut daemon = training.daemon(&state("state"));
        let values = training.run(|reports| {
            let Some(next) = disturbance else { return };
            let joined = |report| matches!(report, Report::Joined { .. }).then_some(());
            wait_for(reports, joined);
            wait_for(reports, |report| matches!(report, Report::Step(12)).then_some(()));
            daemon.child.kill().unwrap();
            daemon.child.wait().unwrap();
            let mut waits = [0; 2];
            wait_for(reports, |report| {
                if let Report::Waits(worker) = report {
                    waits[worker as usize] += 1;
                }
                // At 50 ms each, operations have timed out.
                waits.iter().all(|waits| *waits > 20).then_some(())
            });
            daemon = training.daemon(&state(next));
            if next != "state" {
                // Both join again, at the step of a checkpoint.
                let mut joins = [None; 2];
                wait_for(reports, |report| {
                    if let Report::Joined { worker, step } = report {
                        joins[worker as usize] = Some(step);
                    }
                    joins.iter().all(Option::is_some).then_some(())
                });
                assert!(joins[0].is_some_and(|step| step <= 12), "{joins:?}");
            }
        });
        results.push(values);
    }
    assert!(results[0] == results[1], "values differ after a restart with the state");
    assert!(results[0] == results[2], "values differ after a restore");
    assert!(results[0].iter().any(|value| *value != 0));
}
