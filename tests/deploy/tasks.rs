//! [`Programs`] and [`Tasks`]: the processes of a training, with the commands of a deployment.

use std::fs::{File, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::Outcome;

/// The folder of the programs in the image.
const IN_IMAGE: &str = "/usr/local/bin/";

/// The port of a ps task in each deployment.
pub(crate) const PORT: &str = "2222";

/// The steps of a training in each deployment.
const STEPS: u64 = 2000;

/// The time after which a training hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// The programs of the image.
pub(crate) struct Programs {
    /// Their folder.
    pub(crate) folder: PathBuf,
}

impl Programs {
    /// Finds the programs, or says how to build them.
    pub(crate) fn find() -> Result<Programs, String> {
        let target = format!("target/{}-unknown-linux-gnu/release", std::env::consts::ARCH);
        let built = || Path::new(env!("CARGO_MANIFEST_DIR")).join(target);
        let folder = std::env::var_os("PUSHPULL_STATIC").map_or_else(built, PathBuf::from);
        match ["pushpull-ps", "digits"].iter().all(|program| folder.join(program).is_file()) {
            true => Ok(Programs { folder }),
            false => Err(format!(
                "the static programs are not in {}, see docs/containers.md",
                folder.display()
            )),
        }
    }

    /// Returns the command of a process: the program is one of the image.
    fn command(&self, line: &[String]) -> Result<Command, String> {
        let (program, arguments) = line.split_first().ok_or("a command is empty")?;
        let name = program.strip_prefix(IN_IMAGE);
        let name = name.ok_or_else(|| format!("{program} is not in the image"))?;
        let mut command = Command::new(self.folder.join(name));
        command.args(arguments).stdin(Stdio::null());
        Ok(command)
    }
}

/// A process as a deployment describes it.
pub(crate) struct Task {
    pub(crate) command: Vec<String>,
    /// The variables that the engine sets.
    pub(crate) variables: Vec<(&'static str, String)>,
}

/// A training as a deployment describes it: the commands of its tasks, and what they refer to.
#[derive(Default)]
pub(crate) struct Tasks {
    pub(crate) servers: Vec<Task>,
    pub(crate) workers: Vec<Task>,
    /// The addresses of the ps tasks in the commands.
    pub(crate) names: Vec<String>,
    /// The folders that each ps task has for itself.
    pub(crate) own_volumes: Vec<String>,
    /// The folders that all ps tasks share.
    pub(crate) shared_volumes: Vec<String>,
}

impl Tasks {
    /// Trains with processes on loopback, in a temporary folder. Returns the last line of the chief.
    pub(crate) fn train(&self, programs: &Programs) -> Outcome {
        let folder = tempfile::tempdir().unwrap();
        let listeners = self.names.iter().map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let listeners: Vec<TcpListener> = listeners.collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap().to_string());
        let addresses: Vec<String> = addresses.collect();
        drop(listeners);

        let begin = Instant::now();
        let start = |job: &str, index: usize, task: &Task| {
            let line = self.localize(&task.command, index, &addresses, folder.path());
            let said = folder.path().join(format!("{job}-{index}"));
            let mut command = programs.command(&line)?;
            command.envs(task.variables.iter().map(|(name, value)| (name, value)));
            Process::start(format!("{job} {index}"), command, said, begin)
        };
        let start_all = |tasks: &[Task], job: &str| -> Result<Vec<Process>, String> {
            tasks.iter().enumerate().map(|(index, task)| start(job, index, task)).collect()
        };
        let mut servers = start_all(&self.servers, "ps")?;
        let mut workers = start_all(&self.workers, "worker")?;
        for worker in &mut workers {
            let servers_said = || servers.iter().map(Process::said).collect::<String>();
            worker.finish().map_err(|fault| fault + &servers_said())?;
        }
        for server in &mut servers {
            server.terminate()?;
        }
        let chief = workers.first().map(Process::said).unwrap_or_default();
        check_result(&chief, self.servers.len(), self.workers.len(), STEPS)
    }

    /// Returns a command with addresses of loopback and folders below a temporary one. Creates those.
    fn localize(
        &self,
        line: &[String],
        index: usize,
        addresses: &[String],
        folder: &Path,
    ) -> Vec<String> {
        let own = folder.join(format!("of-{index}"));
        let own = self.own_volumes.iter().map(|volume| (volume, own.display().to_string()));
        let shared = folder.join("shared").display().to_string();
        let shared = self.shared_volumes.iter().map(|volume| (volume, shared.clone()));
        let volumes: Vec<(&String, String)> = own.chain(shared).collect();
        for (volume, below) in &volumes {
            let volume = format!("{below}{volume}");
            std::fs::create_dir_all(&volume).unwrap();
            // As `fsGroup` leaves it: what is created in it belongs to the group as well.
            std::fs::set_permissions(&volume, Permissions::from_mode(0o2775)).unwrap();
        }
        let localize = |word: &String| {
            let mut word = word.clone();
            if let Some(address) = addresses.get(index) {
                word = word.replace(&format!("0.0.0.0:{PORT}"), address);
            }
            for (name, address) in self.names.iter().zip(addresses) {
                word = word.replace(name, address);
            }
            for (volume, below) in &volumes {
                word = word.replace(&format!("={volume}/"), &format!("={below}{volume}/"));
            }
            word
        };
        line.iter().map(localize).collect()
    }
}

/// A process whose output is in a file. It is killed when the test ends.
struct Process {
    name: String,
    child: Child,
    said: PathBuf,
    begin: Instant,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended, or the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(
        name: String,
        mut command: Command,
        said: PathBuf,
        begin: Instant,
    ) -> Result<Process, String> {
        let output = File::create(&said).unwrap();
        command.stdout(output.try_clone().unwrap()).stderr(output);
        let child = command.spawn().map_err(|error| format!("{name}: {error}"))?;
        Ok(Process { name, child, said, begin })
    }

    /// Returns the output and the errors.
    fn said(&self) -> String {
        std::fs::read_to_string(&self.said).unwrap_or_default()
    }

    /// Waits until the process has ended well.
    fn finish(&mut self) -> Result<(), String> {
        let name = &self.name;
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("{name} ended with {status}: {}", self.said())),
                None if self.begin.elapsed() > LIMIT => {
                    return Err(format!("{name} does not end: {}", self.said()));
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Ends a server, which must still run.
    fn terminate(&mut self) -> Result<(), String> {
        if let Some(status) = self.child.try_wait().unwrap() {
            return Err(format!("{} has ended with {status}: {}", self.name, self.said()));
        }
        let id = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(id, Signal::TERM).unwrap();
        self.finish()
    }
}

/// Checks the last line of a chief: the numbers of tasks and steps, and that the network has learned.
pub(crate) fn check_result(output: &str, servers: usize, workers: usize, steps: u64) -> Outcome {
    let last = output.lines().last().unwrap_or_default();
    let result: Value = serde_json::from_str(last).map_err(|_| output.to_owned())?;
    let is_whole = result["ps"] == servers && result["workers"] == workers;
    let has_learned = result["accuracy"].as_f64().is_some_and(|accuracy| accuracy > 0.9);
    match is_whole && has_learned && result["steps"] == steps {
        true => Ok(last.to_owned()),
        false => Err(format!("{servers} ps tasks and {workers} workers: {output}")),
    }
}
