//! The example `coordinator`: calls count once while workers and the coordinator are killed.

#![allow(dead_code, reason = "the example has a main of its own")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../examples/coordinator.rs"]
mod coordinator;
#[path = "support/test_process.rs"]
mod test_process;

use std::process::{Command, Stdio};
use std::time::Duration;

use test_process::{TestProcess, free_addresses};

/// The command line of the example, separated by spaces, for [`the_process_of_the_example`].
const LINE: &str = "COORDINATOR_LINE";

/// Runs the example in this process if another test has started it for that.
#[test]
fn the_process_of_the_example() {
    let Ok(line) = std::env::var(LINE) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let line = line.split(' ').map(str::to_owned);
    runtime.block_on(async { coordinator::run(line, coordinator::stop_signal()?).await }).unwrap();
}

/// Starts the example with these flags.
fn example(flags: &[String]) -> TestProcess {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_process_of_the_example", "--nocapture"]);
    let line = std::iter::once("coordinator").chain(flags.iter().map(|flag| &flag[..]));
    command.env(LINE, line.collect::<Vec<_>>().join(" "));
    TestProcess::start(format!("{flags:?}"), command.stdout(Stdio::piped()).stderr(Stdio::null()))
}

/// The calls, and how often workers and the coordinator are killed. `PUSHPULL_THOROUGH=1` makes it
/// as many as the documents say.
fn size() -> (u64, u32, u32) {
    match std::env::var_os("PUSHPULL_THOROUGH") {
        Some(_) => (3_000, 30, 20),
        None => (400, 6, 4),
    }
}

#[test]
fn one_process_counts_alone() {
    let output = example(&["--calls=50".to_owned()]).succeed();
    assert!(output.contains("\n50 50\n"), "{output}");
}

#[test]
fn calls_count_once_while_workers_and_the_coordinator_are_killed() {
    let (calls, worker_kills, coordinator_kills) = size();
    let addresses = free_addresses(5);
    let hosts = [
        format!("--ps_hosts={}", addresses[..2].join(",")),
        format!("--worker_hosts={}", addresses[2..].join(",")),
        format!("--calls={calls}"),
        "--call_ms=10".to_owned(),
    ];
    let task = |job: &str, index: usize| {
        let own = [format!("--job_name={job}"), format!("--task_index={index}")];
        example(&[&hosts[..], &own[..]].concat())
    };
    let _ps = [task("ps", 0), task("ps", 1)];
    let mut workers: Vec<TestProcess> = (0..3).map(|index| task("worker", index)).collect();
    let (mut killed_workers, mut killed_coordinators) = (0, 0);
    while killed_coordinators < coordinator_kills || killed_workers < worker_kills {
        let mut coordinator = task("chief", 0);
        // About as many kills of workers for each of the coordinator as there are to be in all.
        for round in 0..worker_kills.div_ceil(coordinator_kills) {
            std::thread::sleep(Duration::from_millis(150));
            let victim = (killed_workers as usize + round as usize) % workers.len();
            workers[victim].child.kill().unwrap();
            workers[victim].child.wait().unwrap();
            workers[victim] = task("worker", victim);
            killed_workers += 1;
        }
        if let Some(status) = coordinator.child.try_wait().unwrap() {
            assert!(status.success(), "the coordinator ended with {status}");
        }
        coordinator.child.kill().unwrap();
        coordinator.child.wait().unwrap();
        killed_coordinators += 1;
    }
    let output = task("chief", 0).succeed();
    let resumed = output.lines().find(|line| line.ends_with("calls have ended before")).unwrap();
    assert!(!resumed.starts_with(&format!("{calls} ")), "all calls ended before the last kill");
    println!("{killed_workers} workers and {killed_coordinators} coordinators killed; {resumed}");
    assert!(output.contains(&format!("\n{calls} {calls}\n")), "{output}");
}
