//! The example `in_graph`: in one process, and as the four machines of the classic document.

#![allow(dead_code, reason = "the example has a main of its own")]

#[path = "../../examples/in_graph.rs"]
mod in_graph;

use std::future::pending;
use std::io::{BufRead, BufReader, Lines};
use std::process::{ChildStdout, Command, Stdio};

use crate::test_process::{TestProcess, free_addresses};
use rustix::process::Signal;

/// The results, as the example prints them.
const MATRICES: [&str; 3] = [
    "w + b = [[7.0, 7.0], [7.0, 7.0]]",
    "w * b = [[10.0, 10.0], [10.0, 10.0]]",
    "w / b = [[0.4, 0.4], [0.4, 0.4]]",
];

/// The command line of the example, separated by spaces, for [`the_process_of_the_example`].
const LINE: &str = "IN_GRAPH_LINE";

/// Runs the example in this process if another test has started it for that.
#[test]
fn the_process_of_the_example() {
    let Ok(line) = std::env::var(LINE) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let line = line.split(' ').map(str::to_owned);
    runtime.block_on(async { in_graph::run(line, in_graph::stop_signal()?).await }).unwrap();
}

/// Starts the example with these flags.
fn example(flags: &[&str]) -> TestProcess {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "example_in_graph::the_process_of_the_example", "--nocapture"]);
    command.env(LINE, ["in_graph"].iter().chain(flags).copied().collect::<Vec<_>>().join(" "));
    TestProcess::start(format!("{flags:?}"), command.stdout(Stdio::piped()))
}

fn daemon(flags: &[&str]) -> TestProcess {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.args(flags);
    TestProcess::start(format!("{flags:?}"), command.stdout(Stdio::piped()))
}

/// Starts the tasks of a cluster, each by `start`, and returns them with the flags of the hosts.
fn cluster(start: fn(&[&str]) -> TestProcess) -> (Vec<TestProcess>, [String; 2]) {
    let addresses = free_addresses(4);
    let hosts = [
        format!("--ps_hosts={}", addresses[0]),
        format!("--worker_hosts={}", addresses[1..].join(",")),
    ];
    let tasks = [("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)];
    let start = |(job, index)| {
        let task = [format!("--job_name={job}"), format!("--task_index={index}")];
        start(&hosts.iter().chain(&task).map(|flag| &flag[..]).collect::<Vec<_>>())
    };
    (tasks.map(start).into(), hosts)
}

/// Reads lines until the three matrices have been printed.
fn await_matrices(lines: &mut Lines<BufReader<ChildStdout>>) {
    for expected in MATRICES {
        assert!(lines.any(|line| line.unwrap().ends_with(expected)), "{expected}");
    }
}

/// Ends processes by Ctrl-C, and checks that each exits with 0.
fn interrupt(processes: &mut [TestProcess]) {
    for process in &mut *processes {
        process.signal(Signal::INT);
    }
    for process in processes {
        process.succeed();
    }
}

#[test]
fn one_process_computes_alone() {
    let output = example(&[]).succeed();
    for expected in MATRICES {
        assert!(output.contains(expected), "{output}");
    }
}

#[test]
fn one_ps_and_three_workers_compute_for_a_client_until_ctrl_c() {
    let (mut processes, hosts) = cluster(daemon);
    let hosts = [&hosts[0][..], &hosts[1]];
    let client = |more: &str| example(&[hosts[0], hosts[1], "--job_name=client", more]);
    let output = client("--task_index=0").succeed();
    for expected in MATRICES {
        assert!(output.contains(expected), "{output}");
    }
    // A client that never ends, beside the one before: its variables are the same.
    let mut forever = client("--forever");
    let mut lines = BufReader::new(forever.child.stdout.take().unwrap()).lines();
    await_matrices(&mut lines);
    await_matrices(&mut lines);
    processes.push(forever);
    interrupt(&mut processes);
}

#[test]
fn the_example_serves_each_task_itself() {
    let (mut processes, hosts) = cluster(example);
    let target = hosts[1].rsplit(',').next().unwrap();
    let output = example(&[&format!("--target={target}")]).succeed();
    for expected in MATRICES {
        assert!(output.contains(expected), "{output}");
    }
    interrupt(&mut processes);
}

#[tokio::test(flavor = "current_thread")]
async fn a_task_without_an_address_is_reported() {
    let line = ["in_graph", "--ps_hosts=127.0.0.1:1", "--job_name=worker"];
    let error = in_graph::run(line.map(str::to_owned), pending()).await.unwrap_err();
    assert!(error.to_string().contains("cannot find the job \"worker\""), "{error}");
}

/// `PUSHPULL_THOROUGH=1` makes as many steps as the classic example.
#[tokio::test(flavor = "current_thread")]
async fn two_layers_end_with_the_weights_of_a_local_run() {
    let steps = match std::env::var_os("PUSHPULL_THOROUGH") {
        Some(_) => 10_000,
        None => 500,
    };
    let trained = in_graph::two_layers::train(steps).await.unwrap();
    println!("{steps} steps: {trained:?}");
    assert!(trained.difference <= 1e-6, "{trained:?}");
    assert!(trained.last_loss < 0.9 * trained.first_loss, "{trained:?}");
}
