//! The trainer as processes: the cluster of four of the README, and one server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../../../tests/support/parent_process.rs"]
mod parent_process;
#[path = "../../../tests/support/test_process.rs"]
mod test_process;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use parent_process::ParentProcess;
use pushpull::blocking::{Reader, Worker};
use pushpull::{ClusterSpec, TaskId, VariableSpec, WorkerConfig};
use rustix::process::Signal;
use test_process::{TestProcess, free_addresses, unwritable};

/// Returns a command for the trainer.
fn digits() -> Command {
    Command::new(env!("CARGO_BIN_EXE_digits"))
}

/// The four commands of the README.
struct ReadmeCluster {
    hosts: Vec<String>,
    more: &'static [&'static str],
}

impl ReadmeCluster {
    fn new(more: &'static [&'static str]) -> ReadmeCluster {
        ReadmeCluster { hosts: free_addresses(4), more }
    }

    fn task(&self, name: &'static str, job: &str, index: u32) -> TestProcess {
        let mut command = digits();
        command
            .args(["--ps-hosts", &self.hosts[..2].join(",")])
            .args(["--worker-hosts", &self.hosts[2..].join(",")])
            .args(["--job-name", job, "--task-index", &index.to_string()])
            .args(self.more);
        if job == "ps" {
            // A worker may come after the others have spent all steps.
            command.args(["--exit-grace", "5"]);
        }
        TestProcess::start(name, command.stdout(Stdio::piped()))
    }
}

fn last_line(output: &str) -> serde_json::Value {
    serde_json::from_str(output.lines().last().expect("a last line")).unwrap()
}

#[test]
fn four_processes_in_any_order_train_and_end_by_themselves() {
    let cluster = ReadmeCluster::new(&[]);
    // The workers start first and wait.
    let mut processes = [
        cluster.task("worker 1", "worker", 1),
        cluster.task("worker 0", "worker", 0),
        cluster.task("ps 1", "ps", 1),
        cluster.task("ps 0", "ps", 0),
    ];
    for process in &mut processes {
        let output = process.succeed();
        if process.name == "worker 0" {
            let result = last_line(&output);
            println!("{result}");
            assert_eq!((&result["workers"], &result["ps"]), (&2.into(), &2.into()));
            assert_eq!((&result["steps"], &result["test"]), (&2000.into(), &360.into()));
            assert!(result["accuracy"].as_f64().unwrap() >= 0.95, "{result}");
        }
    }
}

/// The command lines of a classic trainer, with its spelling and nothing else.
#[test]
fn the_four_classic_command_lines_end_with_success() {
    for issync in [None, Some("--issync=1")] {
        let hosts = free_addresses(4);
        let task = |job: &str, index: u32| {
            let mut command = digits();
            command
                .arg(format!("--ps_hosts={}", hosts[..2].join(",")))
                .arg(format!("--worker_hosts={}", hosts[2..].join(",")))
                .arg(format!("--job_name={job}"))
                .arg(format!("--task_index={index}"))
                .args(issync);
            TestProcess::start(format!("{job} {index}"), command.stdout(Stdio::piped()))
        };
        let [mut ps_0, mut ps_1] = [task("ps", 0), task("ps", 1)];
        let [mut worker_0, mut worker_1] = [task("worker", 0), task("worker", 1)];
        let result = last_line(&worker_0.succeed());
        worker_1.succeed();
        let mode = if issync.is_some() { "synchronous" } else { "asynchronous" };
        assert_eq!((&result["mode"], &result["steps"]), (&mode.into(), &2000.into()), "{result}");
        let aggregated = issync.map(|_| serde_json::Value::from(2));
        assert_eq!(result.get("replicas_to_aggregate"), aggregated.as_ref(), "{result}");
        assert!(result["accuracy"].as_f64().unwrap() >= 0.95, "{result}");
        for server in [&mut ps_0, &mut ps_1] {
            assert!(server.succeed().ends_with("is done\n"));
        }
    }
}

/// The variables of ps-lite, and nothing else: the scheduler gathers the addresses, and numbers the
/// others.
#[test]
fn a_scheduler_two_servers_and_three_workers_of_dmlc_train() {
    let [root] = <[String; 1]>::try_from(free_addresses(1)).unwrap();
    let (host, port) = root.rsplit_once(':').unwrap();
    let start = |role: &str| {
        let mut command = digits();
        command.args(["--resolve", "dmlc"]).env("DMLC_ROLE", role);
        if role != "scheduler" {
            command.args(["--steps", "300"]);
        }
        command.envs([("DMLC_NUM_SERVER", "2"), ("DMLC_NUM_WORKER", "3")]);
        command.envs([("DMLC_PS_ROOT_URI", host), ("DMLC_PS_ROOT_PORT", port)]);
        TestProcess::start(role, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let roles = ["worker", "server", "worker", "scheduler", "server", "worker"];
    let mut tasks = Vec::new();
    for mut process in roles.map(start) {
        let (status, output, errors) = process.finish();
        assert!(status.success(), "{}: {output}{errors}", process.name);
        match &*process.name {
            "worker" => {
                if output.lines().last().is_some_and(|line| line.starts_with('{')) {
                    let result = last_line(&output);
                    assert_eq!((&result["workers"], &result["ps"]), (&3.into(), &2.into()));
                    assert_eq!(result["steps"], 300, "{result}");
                    tasks.push("chief".to_owned());
                }
            }
            "server" => tasks.push(output.lines().next().unwrap()[..14].to_owned()),
            _ => assert!(errors.ends_with("all tasks have ended\n"), "{errors}"),
        }
    }
    tasks.sort();
    assert_eq!(tasks, ["/job:ps/task:0", "/job:ps/task:1", "chief"]);
}

/// The flags of a worker are what it expects of the servers.
#[test]
fn a_worker_of_another_mode_or_last_step_than_the_servers_fails_with_both_values() {
    let hosts = free_addresses(2);
    let task = |job: &str, flags: &[&str]| {
        let mut command = digits();
        command.args(["--ps-hosts", &hosts[0], "--worker-hosts", &hosts[1], "--job-name", job]);
        command.args(flags).stdout(Stdio::piped()).stderr(Stdio::piped());
        TestProcess::start(job, &mut command)
    };
    // It is killed when the test ends.
    let _ps = task("ps", &["--keep-serving"]);
    for (flags, text) in [
        (["--issync=1", "--steps=2000"], "is asynchronous, and this worker expects synchronous"),
        (["--issync=0", "--steps=100"], "is 2000, and this worker expects 100"),
        (["--issync=0", "--epochs=4"], "is 2000, and this worker expects none"),
    ] {
        let (status, _, errors) = task("worker", &flags).finish();
        assert!(!status.success() && errors.contains(text), "{status}: {errors}");
    }
}

/// Runs a command that trains in one process, and returns what it reports.
fn trained_here(arguments: &[&str]) -> serde_json::Value {
    let mut command = digits();
    let command = command.args(arguments).stdout(Stdio::piped());
    last_line(&TestProcess::start("digits", command).succeed())
}

#[test]
fn four_towers_reach_the_accuracy_of_asynchronous_workers() {
    let asynchronous = trained_here(&["--steps", "1000"]);
    let towers = trained_here(&["--steps", "1000", "--towers", "4"]);
    println!("{asynchronous}\n{towers}");
    assert_eq!((&towers["mode"], &towers["steps"]), (&"towers".into(), &1000.into()));
    let [towers, asynchronous] =
        [towers, asynchronous].map(|run| run["accuracy"].as_f64().unwrap());
    assert!(towers >= 0.95 && towers >= asynchronous - 0.01, "{towers} beside {asynchronous}");
}

#[test]
fn towers_that_do_not_divide_a_batch_are_refused() {
    let mut command = digits();
    command.args(["--towers", "3"]).stderr(Stdio::piped()).stdout(Stdio::piped());
    let (status, _, errors) = TestProcess::start("digits", &mut command).finish();
    assert!(!status.success());
    assert_eq!(errors, "digits: --towers 3 do not divide a batch of 32 equally\n");
}

/// Starts the whole cluster in one process, with checkpoints.
fn all_in_one(checkpoints: &Path) -> TestProcess {
    let mut command = digits();
    command.args(["--steps", "6000", "--checkpoint-steps", "1000", "--checkpoint-dir"]);
    command.arg(checkpoints).stdout(Stdio::piped()).stderr(Stdio::piped());
    TestProcess::start("digits", &mut command)
}

/// The worker that waits for the chief would fail later, with less to say.
#[test]
fn a_chief_that_is_refused_ends_the_training_with_its_error() {
    let folder = tempfile::tempdir().unwrap();
    let run = |steps: &str, hidden: &str| {
        let mut command = digits();
        command.args(["--steps", steps, "--hidden", hidden, "--checkpoint-steps", "5"]);
        command.arg("--checkpoint-dir").arg(folder.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        TestProcess::start("digits", &mut command).finish()
    };
    let (status, _, errors) = run("10", "16");
    assert!(status.success(), "{errors}");
    let (status, _, errors) = run("20", "7");
    let last = errors.lines().last().unwrap();
    assert!(!status.success() && last.starts_with("digits: "), "{errors}");
    assert!(!last.contains("waited") && last.contains("[64, 7]"), "{errors}");
}

#[test]
fn a_termination_saves_a_checkpoint_as_ctrl_c_does() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = all_in_one(folder.path());
    let errors = BufReader::new(process.child.stderr.take().unwrap());
    let mut errors = errors.lines().map(Result::unwrap);
    errors.find(|line| line.starts_with("step ")).expect("the training is in progress");
    process.signal(Signal::TERM);
    let errors: Vec<String> = errors.collect();
    let step = last_line(&process.succeed())["steps"].as_u64().unwrap();
    assert!(errors.last().unwrap().ends_with(": interrupted"), "{errors:?}");
    assert!(folder.path().join(format!("ckpt-1-{step}")).is_dir(), "{step}");
}

#[test]
fn ctrl_c_saves_a_checkpoint_and_the_same_command_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().join("checkpoints");
    let mut first = all_in_one(&checkpoints);
    let mut errors = BufReader::new(first.child.stderr.take().unwrap()).lines().map(Result::unwrap);
    errors.find(|line| line.starts_with("step ")).expect("the training is in progress");
    first.signal(Signal::INT);
    // The rest is read, so that the process can write it.
    let errors: Vec<String> = errors.collect();
    let interrupted = last_line(&first.succeed());
    assert!(errors.last().unwrap().ends_with(": interrupted"), "{errors:?}");
    let step = interrupted["steps"].as_u64().unwrap();
    assert!((1..6000).contains(&step), "{interrupted}");

    let (status, output, errors) = all_in_one(&checkpoints).finish();
    assert!(status.success(), "{errors}");
    let restored = format!("of step {step}\n");
    // A worker that was built with CUDA has said before why it computes on the processor.
    let is_about_device = |line: &&str| line.starts_with("computes on ");
    let first_line = errors.split_inclusive('\n').find(|line| !is_about_device(line)).unwrap();
    assert!(first_line.starts_with("restored") && first_line.ends_with(&restored), "{errors}");
    let result = last_line(&output);
    // Another worker may have made a step before the chief had its values.
    assert!(result["from_step"].as_u64().unwrap() >= step, "{result}");
    assert_eq!(result["steps"], 6000);
    assert!(result["accuracy"].as_f64().unwrap() >= 0.95, "{result}");
}

#[test]
fn the_data_end_after_their_epochs() {
    for mode in [&[][..], &["--synchronous", "2/2"]] {
        let output =
            digits().args(["--epochs", "4", "--batch", "100"]).args(mode).output().unwrap();
        let result = last_line(&String::from_utf8(output.stdout).unwrap());
        // 15 batches of 100 samples; in synchronous mode, 29 of 50, two for a step.
        let steps = if mode.is_empty() { 60 } else { 58 };
        assert_eq!(result["steps"], steps, "{result}");
    }
}

#[test]
fn each_worker_writes_summaries_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let output = digits().args(["--steps", "50", "--summaries"]).arg(folder.path()).output();
    assert!(output.unwrap().status.success());
    for worker in ["worker-0", "worker-1"] {
        let files = std::fs::read_dir(folder.path().join(worker)).unwrap();
        let paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        let [path] = &paths[..] else { panic!("{paths:?}") };
        let bytes = std::fs::read(path).unwrap();
        assert!(bytes.windows(4).any(|window| window == b"loss"), "{path:?}");
    }
}

/// A remote directory would become a folder `s3:` here, and be lost with the machine.
#[test]
fn a_directory_with_a_scheme_is_refused_and_none_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let hosts = ["--ps_hosts=127.0.0.1:7", "--worker_hosts=127.0.0.1:8"];
    for flag in ["--checkpoint-dir", "--summaries", "--state-dir"] {
        let mut command = digits();
        command.current_dir(&folder).args(hosts).args(["--job_name=ps", flag, "s3://b/run"]);
        let output = command.output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        let expected = "the scheme \"s3\" of \"s3://b/run\" is not supported";
        assert!(!output.status.success() && errors.contains(expected), "{flag}: {errors}");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn contradictory_and_unknown_flags_are_named() {
    let hosts = ["--ps_hosts=127.0.0.1:7", "--worker_hosts=127.0.0.1:8,127.0.0.1:9"];
    let worker = [&hosts[..], &["--job_name=worker"]].concat();
    let with = |lines: &[&'static str]| [&worker[..], lines].concat();
    let of_ps = |lines: &[&'static str]| [&hosts[..], &["--job_name=ps"], lines].concat();
    let cases = [
        (
            with(&["--issync=1", "--synchronous=2/3"]),
            "--issync 1: with 2 workers it is --synchronous 2/2",
        ),
        (with(&["--issync=0", "--synchronous=2/2"]), "--issync 0: it is the asynchronous mode"),
        (with(&["--issync=2"]), "invalid value '2' for '--issync <0|1>'"),
        (with(&["--task_index=2"]), "--task-index 2: "),
        ([&hosts[..], &["--job_name=chief"]].concat(), "--job-name chief: "),
        (hosts.to_vec(), "--job-name"),
        (vec!["--job_name=ps"], "--ps-hosts"),
        (with(&["--learning-rate=0.1"]), "--learning-rate: it has no effect in /job:worker/task:0"),
        (with(&["--decay-steps=9"]), "--decay-steps: it has no effect in /job:worker/task:0"),
        (with(&["--state-dir=x"]), "--state-dir: it has no effect in /job:worker/task:0"),
        (with(&["--keep-serving"]), "--keep-serving: it has no effect in /job:worker/task:0"),
        (of_ps(&["--batch=9"]), "--batch: it has no effect in /job:ps/task:0"),
        (of_ps(&["--codec=f16"]), "--codec: it has no effect in /job:ps/task:0"),
        (vec!["--hidden=0"], "invalid value '0' for '--hidden <HIDDEN>'"),
        (vec!["--learning-rate", "-1"], "--learning-rate -1: it must be"),
        (vec!["--batch", "-1"], "invalid value '-1' for '--batch <BATCH>'"),
        (vec!["--towers=4", "--device=cpu"], "'--device <DEVICE>'"),
        (vec!["--task_index=1"], "--job-name"),
        (vec!["--insecure"], "--job-name"),
    ];
    for (line, expected) in cases {
        let output = digits().args(&line).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && errors.contains(expected), "{line:?}: {errors}");
    }
}

#[test]
fn a_killed_worker_does_not_stop_the_others() {
    let cluster = ReadmeCluster::new(&["--steps", "6000"]);
    let mut ps = [cluster.task("ps 0", "ps", 0), cluster.task("ps 1", "ps", 1)];
    let mut chief = cluster.task("worker 0", "worker", 0);
    let mut victim = cluster.task("worker 1", "worker", 1);
    // The chief reports progress on its standard error, which this test does not read. A reader
    // of the servers shows that training is in progress.
    let spec = ClusterSpec::builder()
        .job("ps", &cluster.hosts[..2])
        .job("worker", &cluster.hosts[2..])
        .build()
        .unwrap();
    let config = WorkerConfig::new(spec, TaskId::worker(9));
    let mut reader = Reader::connect(config).unwrap();
    let mut values = reader.params();
    while reader.pull(&mut values).unwrap() < 500 {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(reader);
    victim.child.kill().unwrap();
    let output = chief.succeed();
    assert_eq!(last_line(&output)["steps"], 6000);
    for process in &mut ps {
        process.succeed();
    }
}

#[test]
fn workers_wait_for_servers_that_start_later() {
    let cluster = ReadmeCluster::new(&["--steps", "50"]);
    let mut workers =
        [cluster.task("worker 0", "worker", 0), cluster.task("worker 1", "worker", 1)];
    // The wait is the subject of this test: both workers try and back off many times.
    std::thread::sleep(Duration::from_secs(5));
    let mut servers = [cluster.task("ps 0", "ps", 0), cluster.task("ps 1", "ps", 1)];
    for process in workers.iter_mut().chain(&mut servers) {
        process.succeed();
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_server_of_the_example_serves_though_its_output_cannot_be_written() {
    for (out, error) in unwritable().into_iter().zip(unwritable()) {
        let address = &free_addresses(1)[0];
        let mut command = digits();
        command.args(["--ps-hosts", address, "--worker-hosts", "127.0.0.1:1"]);
        command.args(["--job-name", "ps", "--steps", "5"]);
        let mut server = TestProcess::start("server", command.stdout(out).stderr(error));
        train(address);
        server.signal(Signal::INT);
        server.succeed();
    }
}

/// Trains to the last step.
#[cfg(target_os = "linux")]
fn train(address: &str) {
    let cluster = ClusterSpec::builder().job("ps", [address]).job("worker", ["127.0.0.1:1"]);
    let config = WorkerConfig::new(cluster.build().unwrap(), TaskId::worker(0));
    let mut worker = Worker::connect(config).unwrap();
    worker.join(&[VariableSpec::f32("w", [10]).unwrap()], |_| ()).unwrap();
    while let Some(token) = worker.token().unwrap() {
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
    }
}

/// It could not save its last checkpoint, for which it would otherwise wait for minutes.
#[test]
fn a_chief_ends_when_its_parent_and_its_server_are_killed() {
    let hosts = free_addresses(2);
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = format!("--checkpoint-dir={}", folder.path().display());
    let cluster = [format!("--ps_hosts={}", hosts[0]), format!("--worker_hosts={}", hosts[1])];
    let of_job =
        |job: &str| [&cluster[..], &[format!("--job_name={job}"), checkpoints.clone()]].concat();
    let mut ps = TestProcess::start("ps", digits().args(of_job("ps")).arg("--steps=1000000"));
    let mut line = vec![env!("CARGO_BIN_EXE_digits").to_owned(), "--steps=1000000".to_owned()];
    line.extend(of_job("worker"));
    line.push("--exit-with-parent".to_owned());
    let mut parent = ParentProcess::start(&line.iter().map(String::as_str).collect::<Vec<_>>());
    while !parent.line().starts_with("saved the checkpoint") {}
    ps.signal(Signal::KILL);
    ps.finish();
    parent.kill();
    let output = parent.rest();
    // The thread of the session may report its wait for the server after that.
    assert!(output.contains("digits: ended at once, without a last checkpoint\n"), "{output}");
}

#[test]
fn a_worker_that_computes_ends_when_its_parent_is_killed() {
    let hosts = free_addresses(2);
    let task = |job| {
        let hosts = [format!("--ps_hosts={}", hosts[0]), format!("--worker_hosts={}", hosts[1])];
        let more = [format!("--job_name={job}"), "--steps=40000".to_owned()];
        [hosts, more].concat()
    };
    let mut ps = TestProcess::start("ps", digits().args(task("ps")).arg("--exit-grace=1"));
    let line = [vec![env!("CARGO_BIN_EXE_digits").to_owned()], task("worker")].concat();
    let mut line: Vec<&str> = line.iter().map(String::as_str).collect();
    line.push("--exit-with-parent");
    let mut parent = ParentProcess::start(&line);
    while !parent.line().starts_with("step ") {}
    parent.kill();
    let output = parent.rest();
    assert!(output.contains(": interrupted"), "{output}");
    // It has left the training, so that the server ends, too.
    ps.succeed();
}
