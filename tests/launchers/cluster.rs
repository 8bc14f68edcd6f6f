//! A parameter server and its workers under a launcher, which find each other by its variables
//! alone.

use std::path::Path;
use std::process::{Command, ExitCode};

use pushpull::blocking::Worker;
use pushpull::cluster::resolve::{Known, Resolver, resolve};
use pushpull::server::enter_private_folder;
use pushpull::{VariableSpec, WorkerConfig};
use serde_json::{Value, json};

/// The first argument of a process that is a worker. The others are flags of the server.
pub(crate) const WORKER: &str = "worker";

/// The global step at which the training ends.
const LAST_STEP: u64 = 300;

/// Runs a worker. Its last line says how often it has pushed.
pub(crate) fn worker(ps_hosts: Option<&str>) -> ExitCode {
    match train(ps_hosts) {
        Ok(result) => {
            println!("{result}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn train(ps_hosts: Option<&str>) -> Result<Value, Box<dyn std::error::Error>> {
    let mut known = Known::default();
    known.num_ps = Some(1);
    known.socket_folder = Some(std::env::temp_dir());
    known.parent_process = Some(std::os::unix::process::parent_id());
    if let Some(hosts) = ps_hosts {
        known.jobs.push(("--ps-hosts", format!("ps={hosts}").parse()?));
    }
    let lookup = |name: &str| std::env::var(name).ok();
    let resolution = resolve(Resolver::Auto, &lookup, &known)?;
    let (_, server) = resolution.cluster.ps_tasks().next().ok_or("the cluster has no server")?;
    if let Some(folder) = server.strip_prefix("unix:").and_then(|path| Path::new(path).parent()) {
        enter_private_folder(folder)?;
    }
    let task = resolution.task.ok_or("the launcher tells no task")?;
    let mut worker = Worker::connect(WorkerConfig::new(resolution.cluster, task.clone()))?;
    let mut params = worker.join(&[VariableSpec::f32("w", [4])?], |_| ())?;
    let mut pushes = 0;
    while let Some(token) = worker.token()? {
        worker.pull(&token, &mut params)?;
        let mut gradients = worker.gradients();
        gradients.view_mut::<f32>("w")?.fill(1.0);
        worker.push(token, gradients)?;
        pushes += 1;
    }
    worker.leave()?;
    Ok(json!({"source": resolution.source.name(), "task": task.to_string(), "pushes": pushes}))
}

/// Returns the command of the server, with these flags of its addresses.
pub(crate) fn server(flags: &[&str]) -> Vec<String> {
    let daemon = env!("CARGO_BIN_EXE_pushpull-ps");
    let last_step = LAST_STEP.to_string();
    let common = ["--resolve", "auto", "--num-ps", "1", "--last-step", &*last_step];
    let end = ["--exit-when-done", "--exit-grace-ms", "3000", "--no-functions"];
    let all = [daemon].into_iter().chain(common).chain(end).chain(flags.iter().copied());
    all.map(str::to_owned).collect()
}

/// Returns the command of a worker.
pub(crate) fn worker_command(ps_hosts: Option<&str>) -> Vec<String> {
    let own = std::env::current_exe().expect("this test has a path").display().to_string();
    [own, WORKER.to_owned()].into_iter().chain(ps_hosts.map(str::to_owned)).collect()
}

/// Runs a command under which one server and three workers train, and checks the pushes of all.
pub(crate) fn check(mut command: Command, source: &str) -> Result<Value, String> {
    let folder = tempfile::tempdir().expect("a folder of its own");
    let file = |name: &str| -> (std::path::PathBuf, std::fs::File) {
        let path = folder.path().join(name);
        let file = std::fs::File::create(&path).expect("a file in it");
        (path, file)
    };
    let (output, to_output) = file("output");
    let (errors, to_errors) = file("errors");
    let status = command.stdout(to_output).stderr(to_errors).status();
    let status = status.map_err(|error| format!("{command:?}: {error}"))?;
    let read = |path: &Path| {
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    };
    let (output, errors) = (read(&output), read(&errors));
    let fault = |reason: String| format!("{command:?}: {reason}\n{output}\n{errors}");
    if !status.success() {
        return Err(fault(format!("ended with {status}")));
    }
    let results: Vec<Value> =
        output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let pushes: u64 = results.iter().filter_map(|result| result["pushes"].as_u64()).sum();
    let mut tasks: Vec<_> = results.iter().map(|result| result["task"].to_string()).collect();
    tasks.sort();
    let expected = [0, 1, 2].map(|index| format!("\"/job:worker/task:{index}\""));
    let is_source = results.iter().all(|result| result["source"] == source);
    match tasks == expected && is_source && pushes == LAST_STEP {
        true => Ok(json!({"source": source, "workers": tasks.len(), "pushes": pushes})),
        false => Err(fault(format!("{pushes} pushes of {tasks:?}"))),
    }
}
