//! Real processes: the daemon with clients, and its state directory.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::test_process::{LONG, TestProcess, free_addresses};
use pushpull::blocking::Worker;
use pushpull::variable::bf16;
use pushpull::{ClusterSpec, Params, TaskId, VariableSpec, WorkerConfig};
use rustix::process::Signal;

/// Starts a process whose output the test reads.
fn start(name: &str, command: &mut Command) -> TestProcess {
    TestProcess::start(name, command.stdout(Stdio::piped()).stderr(Stdio::inherit()))
}

fn daemon(arguments: &[&str]) -> TestProcess {
    start("daemon", Command::new(env!("CARGO_BIN_EXE_pushpull-ps")).args(arguments))
}

#[test]
fn the_daemon_serves_until_a_signal() {
    let address = &free_addresses(1)[0];
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let mut daemon = daemon(&[
        "--ps-hosts",
        address,
        "--worker-hosts",
        "127.0.0.1:1",
        "--shards",
        "2",
        "--optimizer",
        "adam",
        "--learning-rate",
        "1e-3",
        "--last-step",
        "5",
        "--state-dir",
        state.to_str().unwrap(),
        "--bytes-max",
        "16777216",
    ]);
    let cluster = ClusterSpec::builder().job("ps", [address]).job("worker", ["127.0.0.1:1"]);
    let config = WorkerConfig::new(cluster.build().unwrap(), TaskId::worker(0));
    let mut worker = Worker::connect(config).unwrap();
    worker.join(&[VariableSpec::f32("w", [10]).unwrap()], |_| ()).unwrap();
    while let Some(token) = worker.token().unwrap() {
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
    }
    daemon.signal(Signal::TERM);
    let output = daemon.succeed();
    assert!(output.contains("step 5") && output.contains("5 gradients"), "{output}");
    // The state is kept until the user removes it.
    assert!(state.join("shard-0/control").exists());
}

/// Runs a client that is written from the protocol page and uses nothing of this crate, and one of
/// an earlier revision. Neither has a feature of the protocol, and the daemon has all. It compares
/// pulled values with its own gradient descent: alone, with a second client, and in synchronous
/// mode.
#[test]
fn a_client_in_another_language_joins_pulls_and_pushes() {
    if !Command::new("python3").arg("--version").output().is_ok_and(|said| said.status.success()) {
        println!("SKIPPED: cannot run the clients in Python without python3");
        return;
    }
    let programs = ["examples/protocol_client.py", "tests/clients/earlier_client.py"];
    let modes = [&[][..], &["--synchronous", "2/2"]];
    for (program, mode) in programs.iter().flat_map(|program| modes.map(|mode| (program, mode))) {
        let address = &free_addresses(1)[0];
        let hosts = ["--ps-hosts", address, "--worker-hosts", "127.0.0.1:1,127.0.0.1:2"];
        let _daemon = daemon(&[&hosts[..], &["--learning-rate", "0.1"], mode].concat());
        let client = |name, task, rate, steps, cut_every| {
            let mut command = Command::new("python3");
            command.args([program, address.as_str(), "--task", task]);
            command.args(["--learning-rate", rate, "--steps", steps, "--cut-every", cut_every]);
            start(name, &mut command)
        };
        if mode.is_empty() {
            let (status, output, _) = client("alone", "0", "0.1", "40", "2").finish();
            assert!(status.success(), "{output}");
            let (status, output, _) = client("another rate", "0", "0.2", "20", "0").finish();
            assert_eq!(status.code(), Some(3), "it finds the other rate: {output}");
            assert!(output.contains("step 1: the server has"), "{output}");
        }
        let mut clients = [
            client("worker 1", "1", "0.1", "120", "7"),
            client("worker 0", "0", "0.1", "120", "0"),
        ];
        for client in &mut clients {
            let output = client.succeed();
            let last = output.lines().last().unwrap_or_default();
            assert!(last.starts_with("loss 0.0000"), "{}: {output}", client.name);
        }
    }
}

/// The commands of one server in its own folder. Its optimizer has three slots, and one variable
/// has another optimizer with one slot.
struct ServerCommands {
    folder: tempfile::TempDir,
}

impl ServerCommands {
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn address(&self) -> String {
        format!("unix:{}", self.path("ps.sock"))
    }

    /// Starts the daemon on the state directory `state`.
    fn start(&self, state: &str, shards: &str) -> TestProcess {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command
            .args(["--ps-hosts", &self.address(), "--worker-hosts", "127.0.0.1:1"])
            .args(["--shards", shards, "--bytes-max", "67108864"])
            .args(["--state-dir", &self.path(state)])
            .args(["--checkpoint-dir", &self.path("checkpoints")])
            .args(["--optimizer", "rmsprop", "--centered", "--momentum", "0.9"])
            .args(["--optimizer-for", "b=adagrad --learning-rate 0.5", "--rate-for", "b*=0.25"]);
        start("daemon", &mut command)
    }

    fn worker(&self) -> Worker {
        let cluster = ClusterSpec::builder().job("ps", [self.address()]);
        let cluster = cluster.job("worker", ["127.0.0.1:1"]).build().unwrap();
        Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap()
    }
}

/// Checks that the daemon reports failed saves, and that it serves even if its stderr is closed.
#[test]
fn the_daemon_reports_failed_saves_while_it_serves_and_when_it_exits() {
    let server = ServerCommands { folder: tempfile::tempdir().unwrap() };
    let checkpoints = server.path("checkpoints");
    for closed in [false, true] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command
            .args(["--ps-hosts", &server.address(), "--worker-hosts", "127.0.0.1:1"])
            .args(["--bytes-max", "67108864", "--checkpoint-dir", &checkpoints])
            .args(["--checkpoint-every-ms", "20"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut daemon = TestProcess::start("daemon", &mut command);
        let mut stderr = Some(BufReader::new(daemon.child.stderr.take().unwrap()));
        if closed {
            stderr = None;
        }
        let mut worker = server.worker();
        worker.join(&slotted(), |_| ()).unwrap();
        // A file replaces the directory. Permissions would not stop a test that runs as root.
        std::fs::remove_dir_all(&checkpoints).unwrap();
        std::fs::write(&checkpoints, "no directory").unwrap();
        train(&mut worker, 0..2);
        let start = Instant::now();
        // A closed stderr shows no failure, so explicit saves find out when saves begin to fail.
        let failed = loop {
            assert!(start.elapsed() < LONG, "no save failed");
            match worker.save(b"") {
                Ok(_) => {}
                Err(error) => break error.to_string(),
            }
        };
        assert!(failed.contains(&checkpoints), "{failed}");
        if let Some(stderr) = &mut stderr {
            let mut line = String::new();
            while !line.starts_with("pushpull-ps: cannot save a checkpoint: ") {
                // The events of workers and earlier saves come before.
                line.clear();
                assert!(stderr.read_line(&mut line).unwrap() > 0, "no failed save is reported");
            }
            assert!(line.contains(&checkpoints) && line.contains("in a row"), "{line}");
        }
        train(&mut worker, 2..4);
        daemon.signal(Signal::TERM);
        // The checkpoints are what a script that starts the daemon cannot see.
        let output = daemon.fail_with(3);
        let last = output.lines().last().unwrap_or_default();
        assert!(
            last.contains("saves of checkpoints failed") && last.contains(&checkpoints),
            "{output}"
        );
        std::fs::remove_file(&checkpoints).unwrap();
    }
}

const SLOTTED: [&str; 2] = ["w", "b"];

fn slotted() -> [VariableSpec; 4] {
    let [w, b] = [VariableSpec::f32("w", [70, 300]), VariableSpec::f32("b", [7])];
    let half = VariableSpec::bf16("half", [70, 30]).unwrap();
    [w.unwrap(), b.unwrap(), half, VariableSpec::bf16("rows", [70, 3]).unwrap().sparse()]
}

fn train(worker: &mut Worker, steps: std::ops::Range<u64>) {
    for step in steps {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for name in SLOTTED {
            for (index, gradient) in gradients.view_mut(name).unwrap().iter_mut().enumerate() {
                *gradient = ((index as f32 + 1.0) * (step as f32 + 0.5)).sin();
            }
        }
        for (index, gradient) in (1_u16..).zip(gradients.view_mut::<bf16>("half").unwrap()) {
            *gradient = bf16::from_f32((f32::from(index) * (step as f32 + 0.5)).cos());
        }
        let row = [1.0, -0.3, step as f32].map(bf16::from_f32);
        gradients.set_rows("rows", &[60, step], &[row, row].concat()).unwrap();
        worker.push(token, gradients).unwrap();
    }
}

fn pulled(worker: &mut Worker, params: &mut Params) -> Vec<Vec<u32>> {
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    let bits = |name| params.view::<f32>(name).unwrap().iter().map(|value| value.to_bits());
    let mut pulled: Vec<Vec<u32>> = SLOTTED.map(|name| bits(name).collect()).into();
    let half = params.view::<bf16>("half").unwrap().iter();
    pulled.push(half.map(|value| value.to_bits().into()).collect());
    let ids = (0..70).collect::<Vec<u64>>();
    let mut rows = [bf16::ZERO; 210];
    worker.pull_rows(&token, "rows", &ids, &mut rows).unwrap();
    pulled.push(rows.iter().map(|value| value.to_bits().into()).collect());
    pulled
}

#[test]
fn slots_survive_a_kill_and_a_restored_checkpoint_to_the_bit() {
    let server = ServerCommands { folder: tempfile::tempdir().unwrap() };
    // A server is killed midway, saves a checkpoint, and trains on.
    let mut daemon = server.start("killed", "2");
    let mut worker = server.worker();
    let mut params = worker.join(&slotted(), |_| ()).unwrap();
    train(&mut worker, 0..2);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    daemon = server.start("killed", "2");
    train(&mut worker, 2..4);
    assert_eq!(worker.save(b"").unwrap().step, 4);
    train(&mut worker, 4..6);
    let killed = pulled(&mut worker, &mut params);
    drop((worker, daemon));
    // A server without state, with another number of shards, restores the checkpoint.
    let daemon = server.start("restored", "3");
    let mut worker = server.worker();
    let mut params = worker.join(&slotted(), |_| panic!("already restored")).unwrap();
    assert_eq!(worker.restored().unwrap().step, 4);
    train(&mut worker, 4..6);
    let restored = pulled(&mut worker, &mut params);
    drop((worker, daemon));
    // An undisturbed server trains the same steps.
    std::fs::remove_dir_all(server.path("checkpoints")).unwrap();
    let daemon = server.start("undisturbed", "1");
    let mut worker = server.worker();
    let mut params = worker.join(&slotted(), |_| ()).unwrap();
    train(&mut worker, 0..6);
    let undisturbed = pulled(&mut worker, &mut params);
    drop((worker, daemon));
    assert!(killed == undisturbed, "values after a kill differ");
    assert!(restored == undisturbed, "restored values differ");
    assert!(undisturbed.iter().all(|values| values[0] != 0), "all are trained");
}

#[test]
fn the_daemon_reports_bad_arguments_and_exits_with_2() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let cases: [(&[&str], &str); 9] = [
        (&["--ps-hosts", &address], &address),
        (&["--ps-hosts", "127.0.0.1:1,127.0.0.1:1"], "127.0.0.1:1"),
        (&["--ps-hosts", "127.0.0.1:7", "--task-index", "3"], "3"),
        (&["--ps-hosts", "0.0.0.0:2222"], "0.0.0.0:2222"),
        (&["--ps-hosts", "127.0.0.1:0"], "port"),
        (&["--cluster", "{\"ps\": 5}"], "ps"),
        (&["--ps-hosts", "127.0.0.1:7", "--optimizer", "adagrad", "--momentum", "0.9"], "adagrad"),
        (&["--ps-hosts", "127.0.0.1:7", "--optimizer-for", "w*=adagard"], "adagard"),
        (
            &["--ps-hosts", "127.0.0.1:7", "--rate-for", "w*=-0.5"],
            "--rate-for 'w*=-0.5': it must be",
        ),
    ];
    for (arguments, expected) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        let mut child = command.args(arguments).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}
