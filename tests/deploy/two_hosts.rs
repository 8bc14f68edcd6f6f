//! The commands of the README for several machines, word for word, on two hosts: network namespaces
//! that know the names of its machines.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use crate::Outcome;
use crate::hosts::Hosts;
use crate::tasks::Programs;

const README: &str = include_str!("../../README.md");

/// The heading before the commands.
const HEADING: &str = "## Or run the daemon\n";

/// The machines of the commands, and the hosts that they are here.
const MACHINES: [(&str, &str); 4] =
    [("a", "10.77.0.1"), ("b", "10.77.0.2"), ("c", "10.77.0.1"), ("d", "10.77.0.2")];

/// The time after which a training hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// Creates the hosts, or says why there are none.
pub(crate) fn hosts() -> Result<Hosts, String> {
    let hosts = Hosts::new("readme").map_err(|error| error.to_string())?;
    hosts.name_addresses(&MACHINES).map_err(|error| error.to_string())?;
    Ok(hosts)
}

/// Trains as the README says: certificates and tokens, two servers, two workers.
pub(crate) fn check(programs: &Programs, hosts: &Hosts) -> Outcome {
    let (_, below) = README.split_once(HEADING).ok_or("the README has no heading")?;
    let block = below.split("```").nth(1).and_then(|block| block.strip_prefix("sh\n"));
    let block = block.ok_or("there are no commands below the heading")?;
    if block.contains("--insecure") {
        return Err("the README gives up its security".to_owned());
    }
    let folder = tempfile::tempdir().unwrap();
    let tool = Path::new(env!("CARGO_BIN_EXE_pushpull")).parent().unwrap();
    let path = format!("{}:{}", programs.folder.display(), tool.display());
    let mut parts = block.split("# On ");
    let keys = parts.next().unwrap_or_default();
    let made = shell(&path, folder.path(), keys).status().map_err(|error| error.to_string())?;
    if !made.success() {
        return Err(format!("the keys are not made: {made}"));
    }
    let begin = Instant::now();
    let mut processes = Vec::new();
    for part in parts {
        let (machines, commands) = part.split_once(":\n").ok_or("a command without machines")?;
        let machines = machines.split(", ").next().unwrap_or_default();
        for (task, machine) in machines.split(" and ").enumerate() {
            let address = MACHINES.iter().find(|(name, _)| *name == machine);
            let (_, address) = address.ok_or_else(|| format!("nobody knows {machine:?}"))?;
            let script = folder.path().join(format!("{machine}.sh"));
            let folder_of_all = folder.path().display();
            let lines =
                format!("export PATH={path}:$PATH TASK={task}\ncd {folder_of_all}\n{commands}");
            std::fs::write(&script, lines).unwrap();
            let mut command = Command::new(hosts.agent());
            command.arg(address).arg("sh").arg(&script);
            processes.push(Process::start(machine, command, folder.path())?);
        }
    }
    for process in &mut processes {
        let faults = process.finish(begin).err();
        if let Some(fault) = faults {
            let said: Vec<String> = processes.iter().map(Process::said).collect();
            return Err(format!("{fault}\n{}", said.join("\n")));
        }
    }
    let chief = processes.iter().find(|process| process.machine == "c").ok_or("no chief")?;
    let said = chief.said();
    let result = said.lines().rev().find(|line| line.starts_with('{')).unwrap_or_default();
    let parsed: Value = serde_json::from_str(result).map_err(|_| format!("no result: {said}"))?;
    match parsed["accuracy"].as_f64() {
        Some(accuracy) if accuracy >= 0.9 => Ok(result.to_owned()),
        _ => Err(format!("the accuracy is too low: {result}")),
    }
}

/// Returns a shell that runs commands in a folder.
fn shell(path: &str, folder: &Path, commands: &str) -> Command {
    let before = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", commands]).current_dir(folder).stdin(Stdio::null());
    shell.env("PATH", format!("{path}:{before}")).stdout(Stdio::null());
    shell
}

/// The process of a machine, which is killed when this is dropped.
struct Process {
    machine: String,
    child: Child,
    output: std::path::PathBuf,
}

impl Process {
    fn start(machine: &str, mut command: Command, folder: &Path) -> Result<Process, String> {
        let output = folder.join(format!("{machine}.out"));
        let file = File::create(&output).unwrap();
        let errors = file.try_clone().unwrap();
        command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
        let child = command.spawn();
        let child = child.map_err(|error| format!("{machine}: {error}"))?;
        Ok(Process { machine: machine.to_owned(), child, output })
    }

    fn finish(&mut self, begin: Instant) -> Result<(), String> {
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("{} ends with {status}", self.machine)),
                Ok(None) if begin.elapsed() > LIMIT => return Err("it hangs".to_owned()),
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn said(&self) -> String {
        let said = std::fs::read_to_string(&self.output).unwrap_or_default();
        format!("{}:\n{said}", self.machine)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The shell has a program as its child. One that has ended is no fault.
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}
