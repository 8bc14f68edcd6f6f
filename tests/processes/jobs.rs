//! Daemons of a job with a name of its own: they hold variables and serve functions.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::test_process::{LONG, TestProcess, free_addresses};
use pushpull::blocking::{FunctionClient, Reader, Worker};
use pushpull::error::Chain;
use pushpull::services::{Call, FunctionClientConfig};
use pushpull::variable::Initializer;
use pushpull::{ClusterSpec, TaskId, VariableSpec, WorkerConfig};
use rustix::process::Signal;

/// Starts a task of a cluster with its own state directory. `job` are the flags that name its job.
fn daemon(cluster: &str, state: &Path, job: &[&str], index: usize) -> TestProcess {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.args(["--cluster", cluster, "--learning-rate", "0.5", "--bytes-max", "67108864"]);
    command.arg("--state-dir").arg(state.join(index.to_string()));
    command.args(job).args(["--task-index", &index.to_string()]);
    TestProcess::start(format!("task {index}"), command.stdout(Stdio::piped()))
}

/// Pushes gradients of ones for every variable.
fn train(worker: &mut Worker, names: [&str; 4], steps: u64) {
    for _ in 0..steps {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        for name in names {
            gradients.view_mut::<f32>(name).unwrap().fill(1.0);
        }
        worker.push(token, gradients).unwrap();
    }
}

#[test]
fn two_daemons_of_a_job_hold_variables_and_compute_and_survive_kills() {
    let addresses = free_addresses(2);
    let state = tempfile::tempdir().unwrap();
    let text = format!("{{\"local\": [\"{}\", \"{}\"]}}", addresses[0], addresses[1]);
    let start = |job: &[&str], index| daemon(&text, state.path(), job, index);
    let mut daemons = [0, 1].map(|index| start(&["--job-name", "local"], index));

    // The worker that trains has no address, and the daemons need not know it.
    let cluster = ClusterSpec::builder().job("local", &addresses).workers(1).build().unwrap();
    let constant = |name, value| {
        VariableSpec::f32(name, [4]).unwrap().initializer(Initializer::Constant(value))
    };
    let names = ["pinned_0", "pinned_1", "free_0", "free_1"];
    let variables = [
        constant(names[0], 8.0).device("/job:local/task:0".parse().unwrap()),
        constant(names[1], 16.0).device("/job:local/task:1".parse().unwrap()),
        constant(names[2], 3.0),
        constant(names[3], 4.0),
    ];
    let config = WorkerConfig::new(cluster.clone(), TaskId::worker(0));
    let mut worker = Worker::connect(config).unwrap();
    worker.join(&variables, |_| ()).unwrap();
    let placed = worker.placement().unwrap();
    assert_eq!(placed.map().job(), "local");
    let tasks = placed.partitions().iter().map(|partition| partition.shard.task);
    assert_eq!(tasks.take(2).collect::<Vec<_>>(), [0, 1], "{}", placed.table());
    assert_eq!(placed.task_bytes(), [(0, 32), (1, 32)], "without a device, both tasks take one");

    let values = || {
        let config = WorkerConfig::new(cluster.clone(), TaskId::new("reader", 0));
        let mut reader = Reader::connect(config).unwrap();
        let mut params = reader.params();
        let step = reader.pull(&mut params).unwrap();
        (step, names.map(|name| <[f32; 4]>::try_from(params.view::<f32>(name).unwrap()).unwrap()))
    };
    train(&mut worker, names, 4);
    // Each step moves every value by -0.5.
    assert_eq!(values(), (4, [[6.0; 4], [14.0; 4], [1.0; 4], [2.0; 4]]));

    let client = || {
        let config = FunctionClientConfig::new(&addresses[0]).connect_timeout(LONG).timeout(LONG);
        FunctionClient::connect(config).unwrap()
    };
    let compute = |client: &FunctionClient, expected: f32| {
        assert_eq!(client.target(), &TaskId::new("local", 0));
        for task in 0..2 {
            let call = Call::new("add").on(&format!("/job:local/task:{task}/cpu:0"));
            let call = call.variable("a", "pinned_1").variable("b", "free_0");
            let sum = client.call(call).unwrap();
            assert_eq!(sum.view::<f32>().unwrap(), [expected; 4], "on task {task}");
        }
    };
    compute(&client(), 15.0);

    // Without a name of the job, a daemon is a task of the only job that can hold the variables.
    for (index, job) in [(1, &[][..]), (0, &["--job-name=local"])] {
        daemons[index].signal(Signal::KILL);
        assert!(!daemons[index].finish().0.success());
        daemons[index] = start(job, index);
    }
    assert_eq!(values(), (4, [[6.0; 4], [14.0; 4], [1.0; 4], [2.0; 4]]));
    train(&mut worker, names, 2);
    assert_eq!(values(), (6, [[5.0; 4], [13.0; 4], [0.0; 4], [1.0; 4]]));
    compute(&client(), 13.0);
    worker.leave().unwrap();

    for (index, daemon) in daemons.iter_mut().enumerate() {
        daemon.signal(Signal::TERM);
        let output = daemon.succeed();
        assert!(output.contains(&format!("task {index} is done")), "{output}");
    }

    // The state belongs to the tasks of this job.
    let renamed = text.replace("local", "ps");
    let mut command = daemon_refused(&renamed, state.path());
    let (status, _, errors) = command.finish();
    assert_eq!(status.code(), Some(2), "{errors}");
    assert!(errors.contains("local:0,1"), "{errors}");
}

/// Starts task 0 of a cluster on a state that another cluster has left.
fn daemon_refused(cluster: &str, state: &Path) -> TestProcess {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.args(["--cluster", cluster, "--learning-rate", "0.5", "--bytes-max", "67108864"]);
    command.arg("--state-dir").arg(state.join("0"));
    TestProcess::start("another job", command.stderr(Stdio::piped()))
}

/// Daemons of a cluster in which no job is that of the variables serve functions alone, and those
/// who need variables are told why there are none.
#[test]
fn daemons_of_two_candidates_serve_functions_alone() {
    let addresses = free_addresses(2);
    let text = format!("left={};right={}", addresses[0], addresses[1]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
    command.args(["--cluster", &text, "--job-name", "left"]).stdout(Stdio::piped());
    let mut left = TestProcess::start("left", &mut command);
    let config = FunctionClientConfig::new(&addresses[0]).connect_timeout(LONG).timeout(LONG);
    let client = FunctionClient::connect(config).unwrap();
    let sum = client.call(Call::new("add").feed("a", 1.0_f32).feed("b", 2.0_f32)).unwrap();
    assert_eq!(sum.element::<f32>(), Ok(3.0));
    let why =
        "cannot choose the job that holds the variables among left, right: name one of them ps";
    let error = client.call(Call::new("identity").variable("x", "w")).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
    let task = TaskId::new("left", 0);
    let error = Worker::connect(WorkerConfig::new(text.parse().unwrap(), task)).unwrap_err();
    let error = Chain(&error).to_string();
    assert!(error.ends_with(why), "{error}");
    left.signal(Signal::TERM);
    let output = left.succeed();
    assert!(output.contains("/job:left/task:0 has the functions"), "{output}");
}
