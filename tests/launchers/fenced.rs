//! A worker that Slurm stops for longer than its lease, whose task it gives to another process.

use serde_json::{Value, json};

use super::cluster::{self, slow_line};
use super::marked_job::{MarkedJob, wait_until};
use super::slurm::SlurmCluster;

const LAST_STEP: u64 = 6000;

/// The name of the job whose worker is stopped.
const OLD: &str = "stopped-worker";

/// Checks that the stopped worker is refused when it goes on, and that each step counts once.
pub(crate) fn check(slurm: &SlurmCluster) -> Result<Value, String> {
    let folder = tempfile::tempdir().unwrap();
    let go_on = folder.path().join("go-on");
    let address = format!("{}:2223", slurm.node(1));
    let start = |name: &str, node: u16, command: Vec<String>| {
        let mut srun = slurm.srun("120");
        let node = slurm.node(node);
        srun.args(["-n", "1", "-w", &node, "--job-name", name]).args(command);
        MarkedJob::start(srun)
    };
    let place = ["--ps-hosts", &*address, "--job-name", "ps", "--task-index", "0"];
    let flags: Vec<_> = place.iter().copied().chain(["--lease-ms", "1000"]).collect();
    let mut server = start("server", 1, cluster::server(LAST_STEP, &flags));
    let file = go_on.to_str().unwrap();
    let place = ["--ps-hosts", &*address, "--task-index", "0", "--wait-for", file];
    let is_slow = |job: &MarkedJob| wait_until(|| job.errors().contains(&slow_line(0)));
    let fault = |what: &str, job: &MarkedJob| {
        Err(format!("{what}:\n{}\n{}\n{}", job.output(), job.errors(), server.errors()))
    };

    let mut old = start(OLD, 2, cluster::worker_command(&place));
    if !is_slow(&old) {
        return fault("the worker does not push", &old);
    }
    slurm.signal(OLD, "STOP")?;
    if !wait_until(|| server.errors().contains("lost")) {
        return fault("the server does not miss the worker", &old);
    }
    let mut new = start("new-worker", 3, cluster::worker_command(&place));
    if !is_slow(&new) {
        return fault("the new worker does not push", &new);
    }
    slurm.signal(OLD, "CONT")?;
    if old.wait()?.success() || !old.errors().contains("a newer worker has replaced this one") {
        return fault("the old worker is not fenced", &old);
    }
    std::fs::write(&go_on, "").unwrap();
    let pushes = cluster::finish(&mut new, "flags", 0..1, LAST_STEP)?;
    match server.wait()?.success() {
        true => Ok(json!({"steps": LAST_STEP, "of_the_new_worker": pushes})),
        false => Err(format!("the server fails:\n{}", server.errors())),
    }
}
