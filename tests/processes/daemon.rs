//! The daemon as a process: its errors for bad arguments, its output, and its exit.

use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use crate::test_process::{LONG, TestProcess, free_addresses, ignores_hangup, unwritable};
use pushpull::blocking::{FunctionClient, Reader, Worker};
use pushpull::services::{Call, ServiceError};
use pushpull::{ClusterSpec, TaskId, VariableSpec, WorkerConfig};
use rustix::process::{Resource, Signal, getrlimit};

const DAEMON: &str = env!("CARGO_BIN_EXE_pushpull-ps");

fn start(command: &mut Command) -> TestProcess {
    TestProcess::start(format!("{command:?}"), command)
}

fn free_address() -> String {
    free_addresses(1).remove(0)
}

fn daemon(address: &str) -> Command {
    let mut command = Command::new(DAEMON);
    command.args(["--ps-hosts", address, "--worker-hosts", "127.0.0.1:1", "--last-step", "5"]);
    command
}

/// Starts the daemon from a shell, after this line.
fn daemon_after(line: &str, address: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{line} && exec \"$0\" \"$@\""), DAEMON]);
    command.args(["--ps-hosts", address, "--worker-hosts", "127.0.0.1:1", "--last-step", "5"]);
    command
}

/// Returns the configuration of the only worker. Its deadline ends the wait for a daemon that has
/// ended.
fn worker_config(address: &str) -> WorkerConfig {
    let cluster = ClusterSpec::builder().job("ps", [address]).job("worker", ["127.0.0.1:1"]);
    let config = WorkerConfig::new(cluster.build().unwrap(), TaskId::worker(0));
    config.connect_timeout(LONG / 4).timeout(LONG / 4).save_timeout(LONG / 4)
}

/// Trains to the last step.
fn train(address: &str) {
    let mut worker = Worker::connect(worker_config(address)).unwrap();
    worker.join(&[VariableSpec::f32("w", [10]).unwrap()], |_| ()).unwrap();
    train_to_the_end(&mut worker);
}

fn train_to_the_end(worker: &mut Worker) {
    while let Some(token) = worker.token().unwrap() {
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
    }
}

/// Bad values for each flag, with the other flags that it needs.
const BAD: &[(&str, &str, &[&str])] = &[
    ("--job", "none.toml", &[]),
    ("--job", "s3://bucket/job.toml", &[]),
    ("--ps-hosts", "nowhere", &[]),
    ("--worker-hosts", "127.0.0.1:1,127.0.0.1:1", &[]),
    ("--cluster", "ps=nowhere", &[]),
    ("--tls-cert", "none.pem", &["--tls-key", "none.key"]),
    ("--tls-key", "s3://b/ps.key", &["--tls-cert", "none.pem"]),
    ("--tls-ca", "none.pem", &[]),
    ("--tokens", "none", &[]),
    ("--job-name", "worker", &[]),
    ("--job-name", "chief", &[]),
    ("--task-index", "3", &[]),
    ("--resolve", "yarn", &[]),
    ("--num-ps", "-1", &[]),
    ("--num-workers", "many", &[]),
    ("--base-port", "65536", &[]),
    ("--ps-service", "a_b", &[]),
    ("--rendezvous", "nowhere", &[]),
    ("--rendezvous-timeout-ms", "-1", &[]),
    ("--advertise", "a:b", &[]),
    ("--task-id", "a b", &[]),
    ("--task-index", "3", &["--job-name=worker", "--worker-hosts=127.0.0.1:8"]),
    ("--listen", "nowhere", &[]),
    ("--listen", "0.0.0.0:0", &["--job-name=worker", "--worker-hosts=127.0.0.1:8"]),
    ("--listen", "0.0.0.0:0", &[]),
    ("--listen", "http://127.0.0.1:0", &[]),
    ("--ps-hosts", "http://127.0.0.1:7", &[]),
    ("--unix-socket", "/dev/null/socket", &[]),
    ("--shards", "0", &[]),
    ("--shards", "257", &[]),
    ("--shards", "-1", &[]),
    ("--state-dir", "/dev/null", &[]),
    ("--state-dir", "s3://bucket/state", &[]),
    ("--durability", "eternal", &[]),
    ("--checkpoint-dir", "/dev/null", &[]),
    ("--checkpoint-dir", "s3://bucket/run", &[]),
    ("--checkpoint-dir", "~/run", &[]),
    ("--checkpoint-dir", "$HOME/run", &[]),
    ("--checkpoint-every-ms", "9", &["--checkpoint-dir"]),
    ("--on-save-failure", "ignore", &["--checkpoint-dir"]),
    ("--max-to-keep", "-5", &[]),
    ("--keep-every-hours", "x", &[]),
    ("--bytes-max", "16X", &[]),
    ("--bytes-max", "1.5G", &[]),
    ("--bytes-max", "-1G", &[]),
    ("--bytes-max", "0", &[]),
    ("--bytes-max", "1", &[]),
    ("--bytes-max", "99999999999T", &[]),
    ("--cuda", "on", &[]),
    ("--effects-kept-hours", "-1", &[]),
    ("--optimizer", "adagard", &[]),
    ("--optimizer-for", "w*=adagard", &[]),
    ("--optimizer-for", "w*=adam --epsilon -1", &[]),
    ("--rate-for", "w*=-0.5", &[]),
    ("--rate-for", "w*", &[]),
    ("--learning-rate", "-1", &[]),
    ("--learning-rate", "NaN", &[]),
    ("--schedule", "sine:0/10", &[]),
    ("--warm-up", "-1", &[]),
    ("--momentum", "1", &["--optimizer=momentum"]),
    ("--rho", "-1", &["--optimizer=rmsprop"]),
    ("--beta1", "1", &["--optimizer=adam"]),
    ("--beta2", "1", &["--optimizer=adam"]),
    ("--epsilon", "-1", &["--optimizer=adam"]),
    ("--weight-decay", "-1", &["--optimizer=adamw"]),
    ("--initial-accumulator", "0", &["--optimizer=adagrad"]),
    ("--learning-rate-power", "1", &["--optimizer=ftrl"]),
    ("--l1", "-1", &["--optimizer=ftrl"]),
    ("--l2", "-1", &["--optimizer=ftrl"]),
    ("--l2-shrinkage", "-1", &["--optimizer=ftrl"]),
    ("--beta", "-1", &["--optimizer=ftrl"]),
    ("--last-step", "-1", &[]),
    ("--last-step", "0", &[]),
    ("--synchronous", "0/4", &[]),
    ("--synchronous", "2000/2000", &[]),
    ("--synchronous", "2/3", &["--deterministic"]),
    ("--issync", "1", &[]),
    ("--issync", "2", &[]),
    ("--issync", "0", &["--synchronous=2/2"]),
    ("--issync", "1", &["--synchronous=2/3", "--worker-hosts=127.0.0.1:1,127.0.0.1:2"]),
    ("--staleness", "damp", &["--issync=1", "--worker-hosts=127.0.0.1:1"]),
    ("--on-loss", "fail", &["--issync=0"]),
    ("--staleness", "damp:1", &[]),
    ("--on-loss", "shrink:3", &["--synchronous=2/2"]),
    ("--on-loss", "wait:-1", &["--synchronous=2/2"]),
    ("--join-timeout-ms", "-1", &["--synchronous=2/2"]),
    ("--clip-by-global-norm", "0", &["--synchronous=2/2"]),
    ("--sparse-reduction", "mean", &["--synchronous=2/2"]),
    ("--wait-ahead", "0", &[]),
    ("--reject-older", "-1", &[]),
    ("--lease-ms", "99", &[]),
    ("--token-timeout-ms", "10s", &[]),
    ("--non-finite", "ignore", &[]),
    ("--handshake-timeout-ms", "0", &[]),
    ("--waiting-connections-max", "0", &[]),
    ("--connections-max", "0", &[]),
    ("--busy-poll-us", "-1", &[]),
    ("--inbox-pushes", "0", &[]),
    ("--pin-bytes-max", "-64K", &[]),
    ("--exit-grace-ms", "-1", &[]),
];

#[test]
fn a_bad_value_is_reported_with_its_flag_as_typed() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().to_str().unwrap();
    for &(flag, value, beside) in BAD {
        let mut command = Command::new(DAEMON);
        let mut arguments = vec![];
        if !["--ps-hosts", "--cluster"].contains(&flag) {
            arguments.extend(["--ps-hosts", "127.0.0.1:7"]);
        }
        if flag != "--listen" {
            arguments.extend(["--listen", "127.0.0.1:0"]);
        }
        for &argument in beside {
            arguments.push(argument);
            arguments.extend((argument == "--checkpoint-dir").then_some(checkpoints));
        }
        command.args(&arguments).args([flag, value]).stderr(Stdio::piped());
        let (status, _, said) = start(&mut command).finish();
        assert_eq!(status.code(), Some(2), "{flag} {value}: {said}");
        let first = said.lines().next().unwrap_or_default();
        let by_us = first.strip_prefix("pushpull-ps: ");
        let by_us = by_us.is_some_and(|said| said.starts_with(flag) && said.contains(value));
        let by_parser = first.contains(&format!("error: invalid value '{value}' for '{flag} <"));
        assert!(by_us || by_parser, "{flag} {value}: {said}");
    }
}

/// Flags without an effect beside the others, and the flag that they lack or that takes it from
/// them.
const UNUSED: &[(&[&str], &str)] = &[
    (&["--checkpoint-every-ms=1000"], "--checkpoint-dir"),
    (&["--max-to-keep=3"], "--checkpoint-dir"),
    (&["--keep-every-hours=3"], "--checkpoint-dir"),
    (&["--keep-every-hours=3", "--max-to-keep=0", "--checkpoint-dir"], "--max-to-keep 0"),
    (&["--group-writable"], "--state-dir <DIR>|--checkpoint-dir <DIR>"),
    (&["--integrity-full"], "--state-dir"),
    (&["--durability=power"], "--state-dir"),
    (&["--durability=process"], "--state-dir"),
    (&["--exit-grace-ms=1000"], "--exit-when-done"),
    (&["--num-ps=1"], "--resolve"),
    (&["--num-workers=1"], "--resolve"),
    (&["--base-port=9"], "--resolve"),
    (&["--ps-service=ps"], "--resolve"),
    (&["--cuda=off", "--no-functions"], "--no-functions"),
    (&["--on-loss=fail"], "--synchronous"),
    (&["--join-timeout-ms=1000"], "--synchronous"),
    (&["--deterministic"], "--synchronous"),
    (&["--clip-by-global-norm=1"], "--synchronous"),
    (&["--sparse-reduction=sum"], "--synchronous"),
    (&["--staleness=damp", "--synchronous=2/2"], "--synchronous"),
    (&["--wait-ahead=1", "--synchronous=2/2"], "--synchronous"),
    (&["--reject-older=1", "--synchronous=2/2"], "--synchronous"),
    (&["--beta1=0.5"], "--optimizer sgd"),
    (&["--schedule=cosine:0/9", "--job-name=worker"], "/job:worker/task:0"),
    (&["--shards=2", "--job-name=worker"], "/job:worker/task:0"),
    (&["--last-step=9", "--job-name=worker"], "/job:worker/task:0"),
    (&["--elastic-workers", "--job-name=worker"], "/job:worker/task:0"),
    (&["--no-functions", "--job-name=worker"], "/job:worker/task:0"),
];

#[test]
fn a_flag_without_an_effect_is_refused_with_what_takes_it() {
    let folder = tempfile::tempdir().unwrap();
    for &(line, named) in UNUSED {
        let mut command = Command::new(DAEMON);
        command.args(["--ps-hosts=127.0.0.1:7", "--worker-hosts=127.0.0.1:8"]);
        command.arg("--listen=127.0.0.1:0").args(line);
        if line.last() == Some(&"--checkpoint-dir") {
            command.arg(folder.path());
        }
        let (status, _, said) = start(command.stderr(Stdio::piped())).finish();
        assert_eq!(status.code(), Some(2), "{line:?}: {said}");
        let flag = line[0].split('=').next().unwrap();
        assert!(said.contains(flag) && said.contains(named), "{line:?}: {said}");
    }
}

#[test]
fn a_flag_that_repeats_another_is_refused_with_that() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("one").display().to_string();
    let unix = format!("unix:{path}");
    let address = "127.0.0.1:7";
    for (line, named) in [
        (vec!["--ps-hosts", address, "--elastic-workers"], "lists no workers"),
        (vec!["--ps-hosts", &unix, "--unix-socket", &path], "it is the address of --ps-hosts"),
        (
            vec!["--ps-hosts", address, "--state-dir", &path, "--checkpoint-dir", &path],
            "it is the --state-dir",
        ),
    ] {
        let (status, _, said) =
            start(Command::new(DAEMON).args(&line).stderr(Stdio::piped())).finish();
        assert_eq!(status.code(), Some(2), "{line:?}: {said}");
        let flag = line.iter().rfind(|argument| argument.starts_with("--")).unwrap();
        let expected = format!("pushpull-ps: {flag}");
        assert!(said.starts_with(&expected) && said.contains(named), "{line:?}: {said}");
    }
}

#[test]
fn a_daemon_starts_by_a_classic_command_line() {
    let address = free_address();
    let mut command = Command::new(DAEMON);
    command.args([&format!("--ps_hosts={address}"), "--worker_hosts=127.0.0.1:1"]);
    command.args(["--job_name=ps", "--task_index=0", "--issync=1", "--last_step=5"]);
    command.args(["--exit_when_done", "--exit_grace_ms", "100"]);
    let mut daemon = start(command.stdout(Stdio::piped()));
    train(&address);
    let output = daemon.succeed();
    assert!(output.contains("5 steps applied, 5 gradients admitted"), "{output}");
}

#[test]
fn a_task_of_every_job_serves_functions() {
    let addresses = free_addresses(2);
    let tasks = [TaskId::ps(0), TaskId::worker(0)];
    let mut daemons: Vec<TestProcess> = tasks
        .iter()
        .map(|task| {
            let mut command = Command::new(DAEMON);
            command.args(["--ps_hosts", &addresses[0], "--worker_hosts", &addresses[1]]);
            command.args(["--job_name", &task.job, "--task_index", "0"]);
            start(command.stdout(Stdio::piped()))
        })
        .collect();
    for address in &addresses {
        // Each is a target for calls on both.
        let client = FunctionClient::connect(address).unwrap();
        for task in &tasks {
            let call = Call::new("add").on(&task.to_string()).feed("a", 2.0_f32).feed("b", 5.0_f32);
            assert_eq!(client.call(call).unwrap().element::<f32>(), Ok(7.0), "{task}");
            let description = client.describe(task).unwrap();
            let names: Vec<&str> = description.functions.keys().map(String::as_str).collect();
            assert_eq!(names, ["add", "div", "identity", "mean", "mul"]);
            let lists_gpu = description.devices.iter().any(|(name, _)| name.contains("GPU"));
            assert_eq!(lists_gpu, *task == TaskId::worker(0), "a ps opens no driver");
        }
    }
    daemons[0].signal(Signal::INT);
    daemons[1].signal(Signal::TERM);
    assert!(daemons[0].succeed().contains(&format!("task 0 serves on {}", addresses[0])));
    let expected = format!(
        "pushpull-ps: /job:worker/task:0 has the functions add, div, identity, mean, mul\n\
         pushpull-ps: /job:worker/task:0 serves on {}\n\
         pushpull-ps: /job:worker/task:0 is done\n",
        addresses[1]
    );
    assert_eq!(daemons[1].succeed(), expected);
}

/// The hosts are also known by the classic names in the singular.
#[test]
fn a_task_that_may_use_no_device_offers_none() {
    let addresses = free_addresses(2);
    for [ps, worker] in [["--ps_host", "--worker_host"], ["--ps-host", "--worker-host"]] {
        let mut command = Command::new(DAEMON);
        command.args([ps, &addresses[0], worker, &addresses[1], "--cuda", "off"]);
        command.args(["--job-name", "worker"]);
        let mut daemon = start(command.stdout(Stdio::piped()));
        let description =
            FunctionClient::connect(&addresses[1]).unwrap().describe(&TaskId::worker(0)).unwrap();
        let names: Vec<&String> = description.devices.iter().map(|(name, _)| name).collect();
        assert!(!names.is_empty() && !names.iter().any(|name| name.contains("GPU")), "{names:?}");
        daemon.signal(Signal::TERM);
        daemon.succeed();
    }
}

#[test]
fn clients_of_a_daemon_without_functions_are_refused() {
    let address = free_address();
    let mut daemon = daemon(&address);
    let mut daemon = start(daemon.arg("--no-functions"));
    let error = FunctionClient::connect(&address).unwrap_err();
    assert!(matches!(error, ServiceError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("this server offers no functions"), "{error}");
    // The variables are served.
    train(&address);
    daemon.signal(Signal::TERM);
    daemon.succeed();
}

#[test]
fn every_flag_with_a_value_has_a_bad_value() {
    let help = Command::new(DAEMON).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let flags = help.lines().filter_map(|line| line.trim().strip_prefix("--"));
    let flags: Vec<&str> = flags.filter_map(|flag| Some(flag.split_once(" <")?.0)).collect();
    assert!(flags.len() > 40, "{flags:?}");
    for flag in flags {
        let is_listed = BAD.iter().any(|(bad, ..)| bad.strip_prefix("--") == Some(flag));
        assert!(is_listed, "--{flag} has no bad value in BAD");
    }
}

/// A remote directory would become a folder `s3:` here, and be lost with the machine.
#[test]
fn a_path_with_a_scheme_is_refused_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let address = free_address();
    for flag in ["--checkpoint-dir", "--state-dir", "--unix-socket"] {
        let mut command = daemon(&address);
        let said = command.current_dir(&folder).args([flag, "hdfs://name:9/run"]).output().unwrap();
        let errors = String::from_utf8(said.stderr).unwrap();
        let expected = "the scheme \"hdfs\" of \"hdfs://name:9/run\" is not supported";
        assert!(!said.status.success() && errors.contains(expected), "{flag}: {errors}");
    }
    for line in [["inspect", "s3://b/run"].as_slice(), &["export", "s3://b/run", "--to", "x"]] {
        let mut tool = Command::new(env!("CARGO_BIN_EXE_pushpull"));
        let said = tool.current_dir(&folder).args(line).output().unwrap();
        let errors = String::from_utf8(said.stderr).unwrap();
        let expected = "the scheme \"s3\" of \"s3://b/run\" is not supported";
        assert!(!said.status.success() && errors.contains(expected), "{line:?}: {errors}");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn a_path_that_no_shell_has_expanded_is_refused_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    for (path, expected) in [
        ("~/run", "\"~\" of \"~/run\" was not expanded by a shell"),
        ("$HOME/run", "\"$HOME\" of \"$HOME/run\" was not expanded by a shell"),
        ("", "the path is empty"),
    ] {
        for flag in ["--checkpoint-dir", "--state-dir"] {
            let mut command = daemon(&free_address());
            let said = command.current_dir(&folder).args([flag, path]).output().unwrap();
            let errors = String::from_utf8(said.stderr).unwrap();
            assert!(!said.status.success() && errors.contains(expected), "{flag}: {errors}");
        }
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

/// The volumes of a pod with `fsGroup` may be written by their group, again at each mount.
#[test]
fn a_directory_that_its_group_may_write_is_accepted_by_a_flag() {
    for flag in ["--state-dir", "--checkpoint-dir"] {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path().join("volume");
        std::fs::create_dir(&volume).unwrap();
        std::fs::set_permissions(&volume, Permissions::from_mode(0o770)).unwrap();
        let address = free_address();
        let said = daemon(&address).arg(flag).arg(&volume).output().unwrap();
        let errors = String::from_utf8(said.stderr).unwrap();
        let hint = "give --group-writable for a volume with fsGroup";
        assert!(!said.status.success() && errors.contains(hint), "{flag}: {errors}");
        let mut command = daemon(&address);
        let mut serving = start(command.arg(flag).arg(&volume).arg("--group-writable"));
        train(&address);
        serving.signal(Signal::TERM);
        let (status, _, errors) = serving.finish();
        assert!(status.success(), "{flag}: {errors}");
    }
}

#[test]
fn a_task_that_contradicts_a_whole_tf_config_is_refused() {
    let config =
        r#"{"cluster":{"ps":["127.0.0.1:1","127.0.0.1:2"]},"task":{"type":"ps","index":1}}"#;
    for (flag, value) in [("--task-index", "0"), ("--job-name", "worker")] {
        let said = Command::new(DAEMON).args(["--cluster", config, flag, value]).output().unwrap();
        let errors = String::from_utf8(said.stderr).unwrap();
        let expected = format!("{flag} {value}: the task in --cluster is /job:ps/task:1, another");
        assert!(!said.status.success() && errors.contains(&expected), "{errors}");
    }
    let address = free_address();
    let config = config.replace("127.0.0.1:2", &address);
    let mut serving = Command::new(DAEMON);
    let mut serving = start(serving.args(["--cluster", &config]).stdout(Stdio::piped()));
    let mut lines = BufReader::new(serving.child.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert!(line.ends_with(&format!("task 1 serves on {address}")), "{line}");
    serving.signal(Signal::TERM);
    assert!(serving.finish().0.success());
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_named_with_what_is_needed() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 16; exec \"$@\"", "sh", DAEMON, "--ps-hosts", "127.0.0.1:7"]);
    let (status, _, said) = start(command.stderr(Stdio::piped())).finish();
    assert_eq!(status.code(), Some(2), "{said}");
    let expected = "pushpull-ps: RLIMIT_NOFILE (ulimit -n) is 16: a task with --shards 1 needs 36";
    assert!(said.starts_with(expected), "{said}");
}

#[test]
fn a_socket_path_that_is_a_plain_file_is_refused_at_once() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut command = daemon(&free_address());
    command.arg("--unix-socket").arg(file.path()).stderr(Stdio::piped());
    let (status, _, said) = start(&mut command).finish();
    assert_eq!(status.code(), Some(2), "{said}");
    let path = file.path().display();
    let expected = format!(
        "pushpull-ps: --unix-socket {path}: cannot listen on unix:{path}: a plain file has this path"
    );
    assert!(said.starts_with(&expected), "nothing is waited for: {said}");
}

/// Checks that `pushpull` names the flag in its errors, as the daemon does.
#[test]
fn a_bad_value_for_the_tool_is_reported_with_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap();
    let bench = |flag, value| vec!["bench", flag, value];
    let export = vec!["export", empty, "--to", "/dev/null", "--checkpoint", "none"];
    let few = ["--sizes", "8B", "--rounds", "5", "--round-ms", "1"];
    let lines = [
        bench("--sizes", "4kx"),
        bench("--sizes", "-4K"),
        bench("--rounds", "4"),
        bench("--round-ms", "0"),
        bench("--replicas", "257"),
        bench("--suite", "all"),
        bench("--transport", "ipx"),
        [&["bench"][..], &few, &["--variables", "9"]].concat(),
        bench("--plot", "s3://bucket/x.svg"),
        vec!["export", empty, "--to", "gs://bucket/x.safetensors"],
        export,
    ];
    for line in lines {
        let said = Command::new(env!("CARGO_BIN_EXE_pushpull")).args(&line).output().unwrap();
        let errors = String::from_utf8(said.stderr).unwrap();
        let flag = line[line.len() - 2];
        let value = line[line.len() - 1];
        let by_us = errors.starts_with(&format!("pushpull: {flag} {value}: "));
        let by_parser = errors.contains(&format!("invalid value '{value}' for '{flag} <"));
        assert!(!said.status.success() && (by_us || by_parser), "{line:?}: {errors}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_daemon_serves_to_the_end_though_its_output_cannot_be_written() {
    for (out, error) in unwritable().into_iter().zip(unwritable()) {
        let address = free_address();
        let mut daemon = start(daemon(&address).stdout(out).stderr(error));
        train(&address);
        daemon.signal(Signal::TERM);
        let (status, ..) = daemon.finish();
        assert!(status.success(), "{status}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_tool_reports_that_its_output_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let address = free_address();
    let mut running = daemon(&address);
    running.args(["--state-dir", state.to_str().unwrap(), "--bytes-max", "16777216"]);
    let mut running = start(running.stdout(Stdio::null()));
    train(&address);
    running.signal(Signal::TERM);
    assert!(running.finish().0.success());
    let tool = env!("CARGO_BIN_EXE_pushpull");
    for arguments in [&["inspect", state.to_str().unwrap()][..], &["--help"], &["--version"]] {
        let [full, closed] = unwritable();
        let mut command = Command::new(tool);
        command.args(arguments).stdout(full).stderr(Stdio::piped());
        let (status, _, said) = start(&mut command).finish();
        assert_eq!(status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.starts_with("pushpull: cannot write"), "{arguments:?}: {said}");
        // A closed pipe is no error: its reader has read enough.
        command.stdout(closed);
        let (status, _, said) = start(&mut command).finish();
        assert!(status.success() && said.is_empty(), "{arguments:?}: {status}, {said}");
    }
}

/// Only a chief saves at its end. The steps since its last checkpoint end with the memory.
#[test]
fn a_daemon_says_at_its_end_which_steps_are_in_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let ended = |flags: &[&str]| {
        let address = free_address();
        let mut command = daemon(&address);
        command.arg("--checkpoint-dir").arg(folder.path().join("saved")).args(flags);
        let mut daemon = start(command.stdout(Stdio::piped()));
        train(&address);
        daemon.signal(Signal::TERM);
        let (status, output, _) = daemon.finish();
        assert!(status.success(), "{status}, {output}");
        output
    };
    let line = "task 0: the last 5 steps are in no checkpoint, there is none\n";
    let output = ended(&[]);
    assert!(output.contains(line), "{output}");
    let state = folder.path().join("state").display().to_string();
    let output = ended(&["--state-dir", &state]);
    assert!(!output.contains("in no checkpoint"), "{output}");
}

#[test]
fn the_daemon_exits_cleanly_on_each_of_its_signals() {
    for signal in [Signal::HUP, Signal::INT, Signal::TERM] {
        if signal == Signal::HUP && ignores_hangup() {
            println!("SKIPPED: no daemon is ended by a hangup, nohup has started this test");
            continue;
        }
        let address = free_address();
        let mut daemon = start(daemon(&address).stdout(Stdio::piped()));
        train(&address);
        daemon.signal(signal);
        let (status, output, _) = daemon.finish();
        assert!(status.success(), "{signal:?}: {status}, {output}");
        assert!(output.contains("is done at step 5: 5 gradients"), "{signal:?}: {output}");
    }
}

/// Checks that SIGXFSZ, which would end the process by default, only fails the save.
#[test]
#[cfg(target_os = "linux")]
fn a_file_size_limit_fails_the_save_and_the_training_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let address = free_address();
    // The unit of the limit is 512 or 1024 bytes. The values have 1 MiB.
    let mut command = daemon_after("ulimit -f 64", &address);
    command.arg("--checkpoint-dir").arg(folder.path().join("checkpoints"));
    let mut daemon = start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut worker = Worker::connect(worker_config(&address)).unwrap();
    worker.join(&[VariableSpec::f32("w", [1 << 18]).unwrap()], |_| ()).unwrap();
    let error = worker.save(b"").unwrap_err().to_string();
    assert!(error.contains("File too large"), "{error}");
    train_to_the_end(&mut worker);
    drop(worker);
    daemon.signal(Signal::TERM);
    let (status, output, errors) = daemon.finish();
    let event = "cannot save a checkpoint: ";
    let reported =
        errors.lines().any(|line| line.contains(event) && line.contains("(os error 27)"));
    assert!(reported, "{errors}");
    assert_eq!(status.code(), Some(3), "the last save failed: {output}{errors}");
    assert!(output.contains("is done at step 5: 5 gradients"), "{output}");
}

/// A connection needs a descriptor, and the usual soft limit is lower than `--connections-max`.
#[test]
#[cfg(target_os = "linux")]
fn the_soft_limit_of_open_files_does_not_limit_the_connections() {
    const CONNECTIONS: usize = 100;
    let hard = getrlimit(Resource::Nofile).maximum;
    if hard.is_some_and(|hard| hard < 4 * CONNECTIONS as u64) {
        println!("SKIPPED: the hard limit of open files is {hard:?}");
        return;
    }
    let address = free_address();
    let mut command = daemon_after("ulimit -S -n 64", &address);
    let mut daemon = start(command.stderr(Stdio::piped()));
    let mut worker = Worker::connect(worker_config(&address)).unwrap();
    worker.join(&[VariableSpec::f32("w", [10]).unwrap()], |_| ()).unwrap();
    let connect = |_| Reader::connect(worker_config(&address)).unwrap();
    let mut readers: Vec<Reader> = (0..CONNECTIONS).map(connect).collect();
    train_to_the_end(&mut worker);
    for reader in &mut readers {
        let mut params = reader.params();
        reader.pull(&mut params).unwrap();
        assert_eq!(params.step(), 5);
    }
    drop(readers);
    daemon.signal(Signal::TERM);
    let (status, _, errors) = daemon.finish();
    assert!(status.success() && !errors.contains("can be accepted"), "{status}: {errors}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_hangup_signal_ignored_at_start_stays_ignored() {
    let address = free_address();
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh", DAEMON]);
    command.args(["--ps-hosts", &address, "--worker-hosts", "127.0.0.1:1", "--last-step", "5"]);
    let mut daemon = start(command.stdout(Stdio::piped()));
    let mut lines = BufReader::new(daemon.child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("serves on"));
    daemon.signal(Signal::HUP);
    train(&address);
    daemon.signal(Signal::TERM);
    let (status, ..) = daemon.finish();
    let last = lines.next().unwrap().unwrap();
    assert!(status.success() && last.contains("5 gradients"), "{status}: {last}");
}

#[test]
fn the_last_line_of_synchronous_training_counts_applied_steps() {
    let address = free_address();
    let mut daemon = daemon(&address);
    daemon.args(["--synchronous", "1/1", "--shards", "2"]);
    let mut daemon = start(daemon.stdout(Stdio::piped()));
    train(&address);
    daemon.signal(Signal::TERM);
    let (status, output, _) = daemon.finish();
    assert!(status.success(), "{status}: {output}");
    let expected = "is done at step 5: 5 steps applied, 5 gradients admitted, ";
    assert!(output.lines().last().unwrap_or_default().contains(expected), "{output}");
}

/// A listener that holds an address until it is dropped.
type Holder = Box<dyn Send>;

#[test]
fn the_daemon_waits_for_an_address_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let unix = folder.path().join("ps.sock");
    let tcp = free_address();
    let holders: [(String, Holder); 2] = [
        (format!("unix:{}", unix.display()), Box::new(UnixListener::bind(&unix).unwrap())),
        (tcp.clone(), Box::new(TcpListener::bind(&tcp).unwrap())),
    ];
    for (address, holder) in holders {
        let mut daemon = start(daemon(&address).stdout(Stdio::piped()).stderr(Stdio::piped()));
        let mut errors = BufReader::new(daemon.child.stderr.take().unwrap()).lines();
        let waits = errors.next().unwrap().unwrap();
        assert!(waits.contains("waits") && waits.contains(&address), "{waits}");
        drop(holder);
        train(&address);
        daemon.signal(Signal::TERM);
        let (status, output, _) = daemon.finish();
        assert!(status.success() && output.contains("5 gradients"), "{status}: {output}");
        let again = errors.find(|line| line.as_ref().unwrap().contains("waits"));
        assert!(again.is_none(), "the wait is reported once: {again:?}");
    }
}

#[test]
fn an_address_that_stays_in_use_is_reported_after_a_while() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut daemon = start(daemon(&address).stderr(Stdio::piped()));
    let (status, _, said) = daemon.finish();
    assert_eq!(status.code(), Some(2), "{said}");
    let last = said.lines().last().unwrap_or_default();
    let expected =
        format!("pushpull-ps: --ps-hosts {address}: cannot listen on {address}: it is in use");
    assert_eq!(last, expected);
}

#[test]
fn a_signal_ends_the_wait_for_an_address() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut daemon = start(daemon(&address).stderr(Stdio::piped()));
    let mut errors = BufReader::new(daemon.child.stderr.take().unwrap()).lines();
    errors.next().unwrap().unwrap();
    daemon.signal(Signal::TERM);
    let (status, ..) = daemon.finish();
    assert_eq!(status.code(), Some(2));
    assert!(errors.next().unwrap().unwrap().contains("in use"));
}
