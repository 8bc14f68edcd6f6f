//! A server that comes back at another address under its name, on hosts that resolve it again.

use std::path::Path;
use std::process::Command;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use super::cluster::{self, SERVER, slow_line};
use super::hosts::Hosts;
use super::marked_job::{MarkedJob, wait_until};

const LAST_STEP: u64 = 3000;

/// The name of the server.
const NAME: &str = "ps-0.pushpull.test";

/// Kills the server on the first host and starts it on the second. Its workers, on the others, know
/// its name alone, and lose nothing.
pub(crate) fn check(hosts: &Hosts) -> Result<Value, String> {
    let folder = tempfile::tempdir().unwrap();
    let go_on = folder.path().join("go-on");
    let state = folder.path().join("state").display().to_string();
    let address = format!("{NAME}:2222");
    let start = |number: u32, command: Vec<String>| {
        let mut agent = Command::new(hosts.agent());
        agent.arg(format!("10.77.0.{number}")).args(command);
        MarkedJob::start(agent)
    };
    let flags = ["--ps-hosts", &*address, "--job-name", "ps", "--task-index", "0"];
    let flags = flags.iter().copied().chain([
        "--listen",
        "0.0.0.0:2222",
        "--insecure",
        "--state-dir",
        &state,
    ]);
    let server = cluster::server(LAST_STEP, &flags.collect::<Vec<_>>());
    hosts.name_addresses(&[(NAME, "10.77.0.1")]).map_err(|error| error.to_string())?;
    let first = start(1, server.clone());
    let workers = [0, 1].map(|index| start(3 + index, worker(index, &address, &go_on)));
    for (index, worker) in (0..).zip(&workers) {
        if !wait_until(|| worker.errors().contains(&slow_line(index))) {
            return Err(format!(
                "the worker does not push:\n{}\n{}",
                worker.errors(),
                first.errors()
            ));
        }
    }
    let process = first.process_of(SERVER).ok_or("no server lives")?;
    kill_process(process, Signal::KILL).map_err(|error| error.to_string())?;
    hosts.name_addresses(&[(NAME, "10.77.0.2")]).map_err(|error| error.to_string())?;
    let mut second = start(2, server);
    std::fs::write(&go_on, "").unwrap();
    let mut pushes = 0;
    for (index, mut worker) in (0..).zip(workers) {
        pushes += cluster::finish(&mut worker, "flags", index..index + 1, LAST_STEP)
            .map_err(|fault| format!("{fault}\n{}", second.errors()))?;
    }
    match second.wait()?.success() && pushes == LAST_STEP {
        true => Ok(json!({"workers": 2, "pushes": pushes})),
        false => Err(format!("{pushes} pushes, not {LAST_STEP}\n{}", second.errors())),
    }
}

fn worker(index: u32, address: &str, go_on: &Path) -> Vec<String> {
    let index = index.to_string();
    let place = ["--ps-hosts", address, "--task-index", &index];
    let wait = ["--wait-for", go_on.to_str().unwrap()];
    cluster::worker_command(&[&place[..], &wait].concat())
}
