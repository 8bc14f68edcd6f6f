//! The example `coordinator`: calls count once while workers, clients, the coordinator and the
//! parameter servers are killed.

#![allow(dead_code, reason = "the example has a main of its own")]

#[path = "../../examples/coordinator.rs"]
mod coordinator;

use std::process::{Command, Stdio};
use std::time::Duration;

use pushpull::error::Chain;

use crate::test_process::{TestProcess, free_addresses};

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
    command.args(["--exact", "example_coordinator::the_process_of_the_example", "--nocapture"]);
    let line = std::iter::once("coordinator").chain(flags.iter().map(|flag| &flag[..]));
    command.env(LINE, line.collect::<Vec<_>>().join(" "));
    TestProcess::start(format!("{flags:?}"), command.stdout(Stdio::piped()).stderr(Stdio::null()))
}

/// The calls, and in how many rounds five processes are killed. `PUSHPULL_THOROUGH=1` makes it as
/// many as the documents say.
fn size() -> (u64, usize) {
    match std::env::var_os("PUSHPULL_THOROUGH") {
        Some(_) => (3_000, 12),
        None => (400, 2),
    }
}

#[test]
fn one_process_counts_alone() {
    let output = example(&["--calls=50".to_owned()]).succeed();
    assert!(output.contains("\n50 50\n"), "{output}");
}

#[test]
fn a_state_directory_with_a_scheme_is_refused_and_none_is_made() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let address = free_addresses(1).remove(0);
    let line =
        ["coordinator", "--job_name=ps", "--ps_hosts", &address, "--state-dir", "s3://b/run"];
    let line = line.map(str::to_owned);
    let error = runtime.block_on(coordinator::run(line, std::future::ready(()))).unwrap_err();
    let expected = "the scheme \"s3\" of \"s3://b/run\" is not supported";
    let error = Chain(&*error).to_string();
    assert!(error.contains(expected), "{error}");
    assert!(!std::path::Path::new("s3:").exists());
}

/// Kills a process, and starts another in its place.
fn replace(process: &mut TestProcess, start: impl Fn() -> TestProcess) {
    process.child.kill().unwrap();
    process.child.wait().unwrap();
    *process = start();
}

#[test]
fn calls_count_once_whoever_is_killed() {
    let (calls, rounds) = size();
    let states = tempfile::tempdir().unwrap();
    let addresses = free_addresses(5);
    let hosts = [
        format!("--ps_hosts={}", addresses[..2].join(",")),
        format!("--worker_hosts={}", addresses[2..].join(",")),
        format!("--calls={calls}"),
        "--call_ms=10".to_owned(),
    ];
    let task = |job: &str, index: usize| {
        let state = format!("--state-dir={}", states.path().join(index.to_string()).display());
        let own = [format!("--job_name={job}"), format!("--task_index={index}")];
        let state = (job == "ps").then_some(state);
        example(&hosts.iter().chain(&own).chain(&state).cloned().collect::<Vec<_>>())
    };
    let mut ps = [0, 1].map(|index| task("ps", index));
    let mut workers = [0, 1, 2].map(|index| task("worker", index));
    let mut client = task("client", 0);
    let pause = || std::thread::sleep(Duration::from_millis(150));
    let mut kills = 0;
    for round in 0..rounds {
        let mut coordinator = task("chief", 0);
        for victim in [2 * round, 2 * round + 1].map(|victim| victim % 3) {
            pause();
            replace(&mut workers[victim], || task("worker", victim));
        }
        pause();
        replace(&mut ps[round % 2], || task("ps", round % 2));
        replace(&mut client, || task("client", 0));
        pause();
        if let Some(status) = coordinator.child.try_wait().unwrap() {
            assert!(status.success(), "the coordinator ended with {status}");
        }
        coordinator.child.kill().unwrap();
        coordinator.child.wait().unwrap();
        kills += 5;
    }
    let output = task("chief", 0).succeed();
    let resumed = output.lines().find(|line| line.ends_with("calls have ended before")).unwrap();
    assert!(!resumed.starts_with(&format!("{calls} ")), "all calls ended before the last kill");
    println!("{kills} kills; {resumed}");
    assert!(output.contains(&format!("\n{calls} {calls}\n")), "{output}");
}
