//! Launched clusters that train, with daemons and with the example `digits`.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pushpull::blocking::Worker;
use pushpull::security::CredentialFiles;
use pushpull::{ClusterSpec, VariableSpec, WorkerConfig};
use serde_json::Value;

use super::{launch, run, run_command};
use crate::test_process::{LONG, TestProcess};

/// The arguments by which a process of this file is [`task_of_the_environment`].
pub(super) const TASK: [&str; 4] =
    ["--exact", "launch::trains::task_of_the_environment", "--ignored", "--nocapture"];

/// The variable with the directory of a secure launch.
pub(super) const KEYS: &str = "PUSHPULL_LAUNCH_TEST_KEYS";

/// A worker that finds its cluster and its place in `TF_CONFIG`, and trains to the last step.
#[test]
#[ignore = "a program that the launcher starts"]
fn task_of_the_environment() {
    let config = std::env::var("TF_CONFIG").unwrap();
    let cluster = ClusterSpec::from_json(&config).unwrap();
    let task = ClusterSpec::task_of_json(&config).unwrap().unwrap();
    let mut config = WorkerConfig::new(cluster, task.clone());
    if let Some(keys) = std::env::var_os(KEYS).map(PathBuf::from) {
        let files = CredentialFiles::new().authority(keys.join("ca.pem"));
        config = config.credentials(files.tokens(keys.join("tokens")).open().unwrap());
    }
    let config = config.connect_timeout(LONG / 4).timeout(LONG / 4).save_timeout(LONG / 4);
    let mut worker = Worker::connect(config).unwrap();
    worker.join(&[VariableSpec::f32("w", [10]).unwrap()], |_| ()).unwrap();
    let mut pushed = 0;
    while let Some(token) = worker.token().unwrap() {
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
        pushed += 1;
    }
    println!("{task} has pushed {pushed} gradients");
}

/// Sums the gradients that workers say they have pushed, one line for each.
pub(super) fn pushed(output: &str, workers: u32) -> u64 {
    let of = |worker: u32| {
        let said = format!("task=worker:{worker} incarnation=0 ");
        let lines = output.lines().filter_map(|line| line.strip_prefix(&said));
        let mut counts = lines.filter_map(|line| {
            let count = line.strip_prefix(&format!("/job:worker/task:{worker} has pushed "))?;
            count.strip_suffix(" gradients")?.parse::<u64>().ok()
        });
        counts.next().unwrap_or_else(|| panic!("no line of worker {worker}: {output}"))
    };
    (0..workers).map(of).sum()
}

#[test]
fn daemons_and_a_program_that_reads_its_environment_train() {
    let program = std::env::current_exe().unwrap();
    let line = ["--num_ps=2", "--num_worker=3", "--ps-daemon", "--no-flags"];
    let daemon = ["--ps-args", "--learning-rate 0.5 --last-step 200", "--"];
    let line = [&line[..], &daemon, &[program.to_str().unwrap()], &TASK].concat();
    let (code, output, errors) = run(&line);
    assert_eq!(code, 0, "{output}\n{errors}");
    assert_eq!(pushed(&output, 3), 200, "{output}");
    for task in 0..2 {
        // They serve until they are told to end, and then do so in order.
        let line = format!("task=ps:{task} incarnation=0 pushpull-ps: task {task} is done");
        assert!(output.contains(&line), "{output}");
    }
    assert!(output.contains("\nstarted /job:worker/task:2 pid "), "{output}");
    assert!(output.contains("/job:ps/task:1 ended\n"), "{output}");
}

#[test]
fn a_job_file_names_servers_and_workers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("job.toml");
    let program = std::env::current_exe().unwrap();
    let text = format!(
        "[cluster]\nnum_ps = 2\nnum_workers = 3\n[training]\nlast_step = 200\n\
         [optimizer]\nlearning_rate = 0.5\n[worker]\nprogram = {program:?}\nargs = {TASK:?}\n"
    );
    std::fs::write(&file, text).unwrap();
    let (code, output, errors) = run(&[file.to_str().unwrap(), "--no-flags"]);
    assert_eq!(code, 0, "{output}\n{errors}");
    assert_eq!(pushed(&output, 3), 200, "{output}");
    let absent = folder.path().join("absent.toml");
    let (code, _, errors) = run(&[absent.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(errors.contains("cannot read the job file"), "{errors}");
}

/// Returns the example `digits`, if it has been built beside the tool.
fn digits() -> Option<PathBuf> {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_pushpull")).with_file_name("digits");
    if !program.is_file() {
        println!("SKIPPED: digits is not built, as `cargo test --workspace` does");
        return None;
    }
    Some(program)
}

/// Checks that a line is the result of a training to this step.
fn check_result(line: &str, steps: u64) {
    let result: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line:?}"));
    assert_eq!((&result["workers"], &result["ps"]), (&3.into(), &2.into()));
    assert_eq!(result["steps"], steps, "{result}");
}

#[test]
fn one_program_has_both_roles() {
    let Some(digits) = digits() else { return };
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().canonicalize().unwrap().join("keys");
    // The third launch replaces the keys of the second.
    for secure in [&[][..], &["--secure", keys.to_str().unwrap()], &["--secure", "keys"]] {
        check_both_roles(digits.to_str().unwrap(), secure, folder.path());
    }
    for (name, mode) in [("ca.pem", 0o644), ("ps.pem", 0o644), ("ps.key", 0o600), ("tokens", 0o600)]
    {
        let found = std::fs::metadata(keys.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{name}");
    }
    let refused = |fault: &str| {
        let (code, output, errors) = run(&["--secure", keys.to_str().unwrap(), "--", "true"]);
        assert_eq!(code, 1, "{output}");
        assert!(errors.contains(fault), "{errors}");
        assert!(!output.contains("started"), "{output}");
    };
    std::fs::set_permissions(&keys, PermissionsExt::from_mode(0o755)).unwrap();
    refused("keys: it is not a private folder of this user");
    std::fs::set_permissions(&keys, PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::rename(keys.join("launch.lock"), folder.path().join("lock")).unwrap();
    refused("keys: it has files that are not of a launch");
    std::fs::rename(folder.path().join("lock"), keys.join("launch.lock")).unwrap();
    let lock = std::fs::File::open(keys.join("launch.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    refused("keys: another launch uses these keys");
}

/// Trains with a program in both roles. What is launched is secure with `secure`.
fn check_both_roles(digits: &str, secure: &[&str], folder: &Path) {
    let line = ["--num-ps", "2", "--num-workers", "3"];
    let line = [&line[..], secure, &["--", digits, "--steps", "300"]].concat();
    let (code, output, errors) = run_command(launch(&line).current_dir(folder));
    assert_eq!(code, 0, "{output}\n{errors}");
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[0].starts_with("--ps_hosts=127.0.0.1:"), "{output}");
    let cluster = ClusterSpec::from_json(lines[1]).unwrap();
    assert_eq!((cluster.num_tasks("ps"), cluster.num_tasks("worker")), (Ok(2), Ok(3)));
    for task in ["ps:0", "ps:1", "worker:0", "worker:1", "worker:2"] {
        let said = format!("task={task} incarnation=0 ");
        let mut said_lines = lines.iter().copied().chain(errors.lines());
        assert!(said_lines.any(|line| line.starts_with(&said)), "{task}: {output}\n{errors}");
    }
    let mut results = lines.iter().filter_map(|line| {
        line.strip_prefix("task=worker:0 incarnation=0 ").filter(|line| line.starts_with('{'))
    });
    check_result(results.next_back().expect("a result"), 300);
}

#[test]
fn the_printed_flags_train_in_terminals() {
    let Some(digits) = digits() else { return };
    let digits = digits.to_str().unwrap();
    let line = ["--num-ps", "2", "--num-workers", "3", "--dry-run", "--", digits, "--steps", "300"];
    let (code, output, errors) = run(&line);
    assert_eq!((code, &*errors), (0, ""), "{output}");
    let commands: Vec<&str> = output.lines().skip(2).collect();
    assert_eq!(commands.len(), 5, "{output}");
    let start = |(index, command): (usize, &&str)| {
        // A ps task waits for a worker that is late on a busy machine.
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).stdout(Stdio::piped());
        TestProcess::start(format!("terminal {index}"), &mut shell)
    };
    let mut terminals: Vec<TestProcess> = commands.iter().enumerate().map(start).collect();
    let outputs: Vec<String> = terminals.iter_mut().map(TestProcess::succeed).collect();
    check_result(outputs[2].lines().last().expect("a result of worker 0"), 300);
}

#[test]
fn without_a_program_the_servers_wait_for_workers_that_somebody_else_starts() {
    let servers = "--ps-args=--last-step 50 --exit-when-done --exit-grace-ms 100";
    let mut running = super::Running::start(&mut launch(&["--num-ps=2", servers]), 2, "serves on");
    assert_eq!(running.pids.len(), 2);
    let (ps, _) = running.seen[0].split_once(' ').expect("the flags of both jobs");
    let hosts = ps.strip_prefix("--ps_hosts=").unwrap();
    let cluster = ClusterSpec::builder().job("ps", hosts.split(',')).workers(1).build().unwrap();
    let worker = pushpull::TaskId::worker(0);
    let mut worker = Worker::connect(WorkerConfig::new(cluster, worker)).unwrap();
    worker.join(&[VariableSpec::f32("w", [10]).unwrap()], |_| ()).unwrap();
    while let Some(token) = worker.token().unwrap() {
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
    }
    worker.leave().unwrap();
    // They end by themselves, and the launch with them.
    let rest: Vec<String> = running.output.by_ref().map(Result::unwrap).collect();
    let (status, _, errors) = running.launcher.finish();
    assert!(status.success(), "{rest:?}\n{errors}");
}
