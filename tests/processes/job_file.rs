//! Daemons that read a job file: it trains alone, flags override it, and its faults are named.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::test_process::{LONG, TestProcess, free_addresses};
use pushpull::blocking::{Ps, Worker};
use pushpull::checkpoint::LocalDirectory;
use pushpull::job::Job;
use pushpull::{ClusterSpec, Error, TaskId, VariableSpec, WorkerConfig};

/// A folder with a job file.
struct JobFolder {
    folder: tempfile::TempDir,
}

impl JobFolder {
    fn new(text: &str) -> JobFolder {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("job.toml"), text).unwrap();
        JobFolder { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("job.toml")
    }

    fn job(&self) -> Job {
        Job::read(self.path()).unwrap()
    }

    /// Returns a daemon in the folder, which names the file without its folder.
    fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command.current_dir(self.folder.path()).args(["--job", "job.toml"]).args(flags);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn daemon(&self, flags: &[&str]) -> TestProcess {
        let mut command = self.command(flags);
        TestProcess::start(format!("{command:?}"), &mut command)
    }

    fn worker(&self) -> WorkerConfig {
        let config = self.job().worker_config(TaskId::worker(0)).unwrap();
        config.connect_timeout(LONG / 4).timeout(LONG / 4).save_timeout(LONG / 4)
    }
}

/// Pushes gradients of ones until the training ends, and returns the last values.
fn train(config: WorkerConfig) -> Vec<f32> {
    let mut worker = Worker::connect(config).unwrap();
    let variables = [VariableSpec::f32("a", [2]).unwrap(), VariableSpec::f32("b", [2]).unwrap()];
    let mut params = worker.join(&variables, |_| ()).unwrap();
    while let Some(token) = worker.token().unwrap() {
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("a").unwrap().fill(1.0);
        gradients.view_mut::<f32>("b").unwrap().fill(1.0);
        worker.push(token, gradients).unwrap();
    }
    worker.pull_final(&mut params).unwrap();
    let [a, b] = params.views::<f32, 2>(["a", "b"]).unwrap();
    let values = [a, b].concat();
    worker.leave().unwrap();
    values
}

fn job(hosts: &[String], beside: &str) -> String {
    format!(
        "[cluster]\nps_hosts = {hosts:?}\nworker_hosts = [\"127.0.0.1:1\"]\n\
         [optimizer]\nlearning_rate = 0.5\nrate_for = [\"b=0.5\"]\n\
         [training]\nlast_step = 4\nlease = \"9s\"\nexit_when_done = true\nexit_grace = \"100ms\"\n{beside}"
    )
}

#[test]
fn one_file_trains_by_daemons_by_flags_and_embedded() {
    let run = |daemons: &mut dyn FnMut(&JobFolder) -> Vec<TestProcess>| {
        let folder = JobFolder::new(&job(&free_addresses(2), ""));
        let mut daemons = daemons(&folder);
        let values = train(folder.worker());
        daemons.iter_mut().for_each(|daemon| _ = daemon.succeed());
        values
    };
    let by_file =
        run(&mut |folder| ["0", "1"].map(|index| folder.daemon(&["--task-index", index])).into());
    assert_eq!(by_file, [-2.0, -2.0, -1.0, -1.0]);
    let overridden = run(&mut |folder| {
        let flags = |index| ["--task_index", index, "--learning_rate=0.25", "--rate-for", "b=1"];
        ["0", "1"].map(|index| folder.daemon(&flags(index))).into()
    });
    assert_eq!(overridden, [-1.0; 4]);
    let mut server = None;
    let embedded = run(&mut |folder| {
        // The first task is a daemon, and the second serves in this process.
        let job = folder.job();
        let cluster = job.cluster().unwrap();
        let task = TaskId::ps(1);
        let address = cluster.task_address(&task.job, task.index).unwrap().to_owned();
        let config = job.ps_config(task).unwrap();
        server = Some(Ps::start(Ps::listen(&address).unwrap(), config).unwrap());
        vec![folder.daemon(&["--task-index", "0"])]
    });
    assert_eq!(embedded, by_file);
    drop(server);
}

#[test]
fn a_file_names_the_launcher_that_tells_the_cluster() {
    let address = free_addresses(1).remove(0);
    let folder = JobFolder::new(
        "[cluster]\nresolve = \"tf-config\"\n[optimizer]\nlearning_rate = 0.5\n\
         [training]\nlast_step = 4\nexit_when_done = true\nexit_grace = \"100ms\"\n",
    );
    let cluster = format!("{{\"ps\": [\"{address}\"], \"worker\": [\"127.0.0.1:1\"]}}");
    let task = "{\"type\": \"ps\", \"index\": 0}";
    let mut command = folder.command(&[]);
    command.env("TF_CONFIG", format!("{{\"cluster\": {cluster}, \"task\": {task}}}"));
    let mut daemon = TestProcess::start("a daemon with TF_CONFIG", &mut command);
    let cluster = ClusterSpec::from_json(&cluster).unwrap();
    let config = WorkerConfig::new(cluster, TaskId::worker(0)).expect_last_step(4);
    assert_eq!(train(config.connect_timeout(LONG / 4).timeout(LONG / 4)), [-2.0; 4]);
    daemon.succeed();
    // A typed cluster is in place of the launcher.
    let printed = folder.daemon(&["--print-config", "--cluster", "ps=a:1"]).succeed();
    assert!(printed.contains("spec = \"ps=a:1\"") && !printed.contains("resolve ="), "{printed}");
}

#[test]
fn each_setting_is_printed_with_its_origin() {
    let hosts = ["127.0.0.1:7".to_owned()];
    let folder = JobFolder::new(&job(&hosts, "[storage]\nbytes_max = \"1G\"\n"));
    let printed = folder.daemon(&["--print-config", "--lease-ms=700", "--task-index=0"]).succeed();
    for line in [
        "# --task-index 0",
        "ps_hosts = [\"127.0.0.1:7\"] # job.toml:2",
        "bytes_max = 1073741824 # job.toml:13",
        "learning_rate = 0.5 # job.toml:5",
        "# warm_up = 0 # default",
        "last_step = 4 # job.toml:8",
        "lease_ms = 700 # flag",
        "exit_grace_ms = 100 # job.toml:11",
    ] {
        let mut found =
            printed.lines().map(|found| found.split_whitespace().collect::<Vec<_>>().join(" "));
        assert!(found.any(|found| found == line), "{line} in\n{printed}");
    }
    let again = JobFolder::new(&printed);
    let config =
        |folder: &JobFolder| format!("{:?}", folder.job().ps_config(TaskId::ps(0)).unwrap());
    assert!(config(&again).contains("lease: 700ms"), "{}", config(&again));
    // The flags have the defaults of the library. Those of other settings need these.
    let whole = "[cluster]\nps_hosts = [\"a:1\"]\n[storage]\nstate_dir = \"state\"\n\
                 [checkpoints]\ncheckpoint_dir = \"/tmp\"\n[training]\nexit_when_done = true\n";
    let whole = JobFolder::new(whole);
    let printed = whole.daemon(&["--print-config"]).succeed();
    let settings = |text: String| {
        let job = Job::parse(&text, "printed").unwrap();
        let settings = job.settings();
        let server = settings.ps_config(job.cluster().unwrap(), TaskId::ps(0)).unwrap();
        let checkpoints =
            settings.checkpoints(Arc::new(LocalDirectory::open_read_only("/tmp").unwrap()));
        format!("{server:?} {:?}", checkpoints.unwrap())
    };
    let explicit = printed.lines().map(|line| match line.ends_with("# default") {
        true => line.trim_start_matches("# "),
        false => line,
    });
    let explicit = explicit.collect::<Vec<_>>().join("\n");
    assert!(explicit.contains("\nlease_ms = 5000 "), "{explicit}");
    assert_eq!(settings(explicit), settings(fs::read_to_string(whole.path()).unwrap()));
}

#[test]
fn a_fault_of_the_file_is_named_with_its_line() {
    let hosts = ["127.0.0.1:7".to_owned()];
    for (beside, flags, expected) in [
        (
            "[mode]\nstalenes = \"damp\"",
            &[][..],
            "job.toml:13: unknown key \"stalenes\": the nearest is \"staleness\"",
        ),
        (
            "[storage]\nshards = \"two\"",
            &[],
            "job.toml:13: shards = \"two\": expected a whole number",
        ),
        ("[storage]\nshards = 300", &[], "--shards"),
        (
            "[storage]\nintegrity_full = true",
            &[],
            "--integrity-full is job.toml:13: integrity_full = true",
        ),
        (
            "[mode]\nstaleness = \"damp\"",
            &["--synchronous=1/1"],
            "--staleness is job.toml:13: staleness",
        ),
        (
            "[network]\nbusy_poll = \"1ms\"\nhandshake_timeout_ms = 1",
            &[],
            "job.toml:14: handshake_timeout_ms = 1: it must be",
        ),
        ("[checkpoints]\ncheckpoint_dir = \"s3://b/run\"", &[], "s3"),
        ("[optimizer]\nname = \"adam\"", &[], "job.toml:12: duplicate key"),
        ("[functions]\nno_functions = true", &["--lease-ms=9"], "--lease-ms 9: it must be 100 ms"),
    ] {
        let folder = JobFolder::new(&job(&hosts, beside));
        let listen = ["--listen=127.0.0.1:0"];
        let (status, _, said) = folder.daemon(&[&listen[..], flags].concat()).finish();
        assert_eq!(status.code(), Some(2), "{beside}: {said}");
        assert!(said.contains(expected), "{beside}: {said}");
    }
    let folder = JobFolder::new("");
    for (path, expected) in [
        ("none.toml", "cannot read the job file none.toml: No such file"),
        (".", "cannot read the job file .: it is a directory"),
        ("s3://bucket/job.toml", "the scheme \"s3\""),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull-ps"));
        command.current_dir(folder.folder.path()).arg(format!("--job={path}"));
        let daemon = command.stderr(Stdio::piped());
        let (status, _, said) = TestProcess::start(path, daemon).finish();
        assert_eq!(status.code(), Some(2), "{said}");
        assert!(said.contains(expected), "{said}");
    }
    assert!(Path::new(&folder.path()).exists());
}

/// Of eight servers one has another value: a typing error. It is refused, and nothing is trained.
#[test]
fn a_server_that_differs_from_seven_others_is_refused_by_name() {
    for (flag, name, here, there) in [
        ("--learning-rate=0.05", "rules", "0.5", "0.05"),
        ("--last-step=40", "last_step", "4", "40"),
        ("--lease-ms=900", "lease_ms", "9000", "900"),
    ] {
        let folder = JobFolder::new(&job(&free_addresses(8), "[functions]\nno_functions = true\n"));
        let daemons: Vec<_> = (0..8)
            .map(|index| {
                let index = format!("--task-index={index}");
                match &*index {
                    "--task-index=5" => folder.daemon(&[&index, flag]),
                    _ => folder.daemon(&[&index]),
                }
            })
            .collect();
        let mut worker = Worker::connect(folder.worker()).unwrap();
        let variables: Vec<_> =
            (0..8).map(|index| VariableSpec::f32(format!("v{index}"), [2]).unwrap()).collect();
        let error = worker.join(&variables, |_| ()).unwrap_err();
        let Error::Identity { field, left_value, right_value, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(field, name);
        let values = [left_value, right_value];
        assert!(
            [here, there].iter().all(|value| values.iter().any(|v| v.contains(value))),
            "{error}"
        );
        assert!(error.to_string().contains("/job:ps/task:5"), "{error}");
        drop(daemons);
    }
}
