//! A training whose tasks and job are killed as an engine does it, and that is started again: nothing
//! lives on, and each step counts once.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use super::cluster::{self, SERVER};
use super::marked_job::{MarkedJob, wait_until};

/// The global step at which the training ends: further than the workers of all lives but the last come
/// before they are slow.
const LAST_STEP: u64 = 6000;

/// The target of a kill.
pub(crate) enum Victim<'a> {
    /// The process of a worker.
    Worker,
    /// The process of the server.
    Server,
    /// The job, by this command of its engine.
    Job(&'a dyn Fn() -> Command),
}

impl Victim<'_> {
    fn kill(&self, job: &MarkedJob) -> Result<(), String> {
        let own = std::env::current_exe().unwrap();
        let program = match self {
            Victim::Worker => own.to_str().unwrap(),
            Victim::Server => SERVER,
            Victim::Job(cancel) => {
                let status = cancel().status().unwrap();
                return status
                    .success()
                    .then_some(())
                    .ok_or_else(|| format!("ended with {status}"));
            }
        };
        let process = job.process_of(program).ok_or_else(|| format!("no {program} lives"))?;
        kill_process(process, Signal::KILL).map_err(|error| error.to_string())
    }
}

/// Starts a training, kills each victim, and starts it again. The last life ends by itself.
///
/// `start` returns the command that starts a server and three workers by their commands.
pub(crate) fn check(
    source: &str,
    victims: &[Victim<'_>],
    start: impl Fn(&[String], &[String]) -> Command,
) -> Result<Value, String> {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state").display().to_string();
    let go_on = folder.path().join("go-on");
    let flags = ["--state-dir", &state, "--exit-with-parent"];
    let flags: Vec<_> = cluster::BY_LAUNCHER.iter().copied().chain(flags).collect();
    let server = cluster::server(LAST_STEP, &flags);
    let worker = cluster::worker_command(&["--wait-for", go_on.to_str().unwrap()]);
    let mut longest = Duration::ZERO;
    for victim in victims {
        let mut job = MarkedJob::start(start(&server, &worker));
        let is_slow = || job.errors().contains(" has pushed ");
        if !wait_until(is_slow) {
            return Err(format!("no worker pushes:\n{}\n{}", job.output(), job.errors()));
        }
        victim.kill(&job)?;
        let killed = Instant::now();
        if job.wait()?.success() {
            return Err("a job with a killed task succeeds".to_owned());
        }
        if !wait_until(|| job.processes().is_empty()) {
            return Err(format!("{:?} outlive the job", job.processes()));
        }
        longest = longest.max(killed.elapsed());
    }
    std::fs::write(&go_on, "").unwrap();
    let mut job = MarkedJob::start(start(&server, &worker));
    let pushes = cluster::finish(&mut job, source, 0..3, LAST_STEP)?;
    let all_ended_after = format!("{:.1} s", longest.as_secs_f64());
    Ok(json!({"kills": victims.len(), "all_ended_after": all_ended_after,
        "steps": LAST_STEP, "of_the_last_life": pushes}))
}
