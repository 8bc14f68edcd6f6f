//! `pushpull resolve`, and the daemon that takes its cluster from a launcher's variables.

use std::process::{Command, Output, Stdio};

use pushpull::blocking::{FunctionClient, Worker};
use pushpull::{TaskId, VariableSpec, WorkerConfig};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::test_process::{TestProcess, free_addresses};

/// Runs a program with no variables but these.
fn run(program: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(variables.iter().copied());
    command.stdin(Stdio::null()).output().unwrap()
}

fn resolve(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let arguments = [&["resolve"], arguments].concat();
    run(env!("CARGO_BIN_EXE_pushpull"), &arguments, variables)
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

const TF_CONFIG: (&str, &str) = (
    "TF_CONFIG",
    r#"{"cluster":{"ps":["p:1"],"worker":["w:1","v:1"]},"task":{"type":"worker","index":1}}"#,
);

#[test]
fn the_tool_prints_the_cluster_and_why_it_passed_over_others() {
    let output = resolve(&[], &[TF_CONFIG]);
    assert!(output.status.success(), "{output:?}");
    let lines: Vec<_> = text(&output.stdout).lines().collect();
    let expected = [
        "source   tf-config",
        "cluster  ps=p:1;worker=w:1,v:1",
        "task     /job:worker/task:1",
        "flags    --ps-hosts p:1 --worker-hosts w:1,v:1 --job-name worker --task-index 1",
    ];
    assert_eq!(lines[..4], expected);
    assert!(lines[4].starts_with("read     TF_CONFIG={"), "{}", lines[4]);
    assert!(
        lines.contains(&"passed   kubernetes: KUBERNETES_SERVICE_HOST is not set"),
        "{lines:?}"
    );

    let output = resolve(&["--json"], &[TF_CONFIG]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["cluster"], json!({"ps": ["p:1"], "worker": ["w:1", "v:1"]}));
    assert_eq!(found["task"], json!({"type": "worker", "index": 1}));
    assert_eq!(found["passed"]["dmlc"], "DMLC_ROLE is not set");
}

#[test]
fn the_tool_fails_with_every_reason() {
    let output = resolve(&[], &[]);
    assert_eq!(output.status.code(), Some(1));
    let errors = text(&output.stderr);
    assert!(errors.starts_with("pushpull: cannot resolve the cluster: flags: "), "{errors}");
    assert!(errors.contains("; tony: CLUSTER_SPEC is not set; "), "{errors}");
    let unknown = resolve(&["--resolve", "yarn"], &[]);
    assert_eq!(unknown.status.code(), Some(2));
    let errors = text(&unknown.stderr);
    assert!(errors.contains("cannot find the resolver \"yarn\": expected auto, flags"), "{errors}");
}

#[test]
fn a_flag_that_contradicts_the_launcher_is_refused_by_both_names() {
    let daemon = env!("CARGO_BIN_EXE_pushpull-ps");
    let output = run(daemon, &["--resolve", "auto", "--ps-hosts", "q:1"], &[TF_CONFIG]);
    assert_eq!(output.status.code(), Some(2));
    let expected = "pushpull-ps: --resolve auto: cannot use --ps-hosts (ps=q:1) with TF_CONFIG \
                    (ps=p:1): they contradict each other\n";
    assert_eq!(text(&output.stderr), expected);
}

#[test]
fn a_daemon_serves_the_task_of_its_launcher() {
    let [address] = <[String; 1]>::try_from(free_addresses(1)).unwrap();
    let config = json!({
        "cluster": {"ps": [address], "worker": ["-"]},
        "task": {"type": "ps", "index": "0"},
        "environment": "cloud",
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.args(["--resolve", "auto"]).env("TF_CONFIG", config.to_string());
    let mut daemon = TestProcess::start("ps", command.stdout(Stdio::piped()));
    let cluster = format!("ps={address};worker=-").parse().unwrap();
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    worker.join(&[VariableSpec::f32("w", [1]).unwrap()], |_| ()).unwrap();
    worker.leave().unwrap();
    daemon.signal(Signal::TERM);
    let lines = daemon.succeed();
    assert!(lines.starts_with(&format!("pushpull-ps: task 0 serves on {address}\n")), "{lines}");
}

/// A worker of the cluster may serve functions.
#[test]
fn a_daemon_of_a_worker_serves_functions() {
    let addresses = free_addresses(2);
    let config = json!({
        "cluster": {"ps": [addresses[0]], "worker": [addresses[1]]},
        "task": {"type": "worker", "index": 0},
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.args(["--resolve", "tf-config", "--exit-with-parent"]);
    command.env("TF_CONFIG", config.to_string());
    let mut daemon = TestProcess::start("worker", command.stdout(Stdio::piped()));
    let client = FunctionClient::connect(&addresses[1]).unwrap();
    client.describe(&TaskId::worker(0)).unwrap();
    daemon.signal(Signal::TERM);
    daemon.succeed();
}

/// Ranks of MPI on one host need no address: the ps tasks listen in a private folder.
#[test]
fn ranks_of_one_host_meet_in_a_private_folder() {
    let folder = tempfile::tempdir().unwrap();
    let rank = |rank: &str, program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).args(["--resolve", "mpi", "--num-ps", "1"]);
        command.env("XDG_RUNTIME_DIR", folder.path()).env("PMIX_NAMESPACE", "7");
        command.env("OMPI_COMM_WORLD_RANK", rank).env("OMPI_COMM_WORLD_SIZE", "2");
        command.stdout(Stdio::piped());
        command
    };
    let daemon = env!("CARGO_BIN_EXE_pushpull-ps");
    let mut daemon = TestProcess::start("ps", &mut rank("0", daemon, &[]));
    let tool = env!("CARGO_BIN_EXE_pushpull");
    let output = rank("1", tool, &["resolve", "--json"]).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["task"], json!({"type": "worker", "index": 0}));
    let cluster: pushpull::ClusterSpec =
        pushpull::ClusterSpec::from_json(&found["cluster"].to_string()).unwrap();
    let socket = folder.path().join("pushpull-open-mpi-7/ps-0.sock");
    assert_eq!(cluster.task_address("ps", 0).unwrap(), format!("unix:{}", socket.display()));
    let mut worker = Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap();
    worker.join(&[VariableSpec::f32("w", [1]).unwrap()], |_| ()).unwrap();
    worker.leave().unwrap();
    daemon.signal(Signal::TERM);
    daemon.succeed();

    // A folder that others may enter is refused by name.
    let shared = folder.path().join("pushpull-open-mpi-8");
    std::fs::create_dir(&shared).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&shared, mode).unwrap();
    let mut command = rank("0", env!("CARGO_BIN_EXE_pushpull-ps"), &[]);
    let output = command.env("PMIX_NAMESPACE", "8").output().unwrap();
    let expected = format!(
        "pushpull-ps: --resolve mpi: cannot use the folder {}: it is not a private folder of this \
         user\n",
        shared.display()
    );
    assert_eq!(text(&output.stderr), expected);
}
