//! `pushpull launch` with real tasks: they train, fail, start again and end.

mod ends;
mod hosts;
mod output;
mod trains;

use std::io::{BufRead, BufReader, Lines};
use std::process::{ChildStdout, Command, Stdio};
use std::time::Instant;

use rustix::process::Signal;

use crate::test_process::{LONG, TestProcess};

/// Returns a command that launches.
fn launch(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pushpull"));
    command.arg("launch").args(arguments).stdin(Stdio::null());
    command
}

/// Runs a launch to its end. Returns its exit code, output and errors.
fn run(arguments: &[&str]) -> (i32, String, String) {
    run_command(&mut launch(arguments))
}

/// Runs the command of a launch to its end.
fn run_command(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().expect("the launcher ends by itself");
    (code, text(&output.stdout), text(&output.stderr))
}

/// A launch that runs until it is told to end.
struct Running {
    launcher: TestProcess,
    output: Lines<BufReader<ChildStdout>>,
    /// The lines that have been read.
    seen: Vec<String>,
    /// The processes of the tasks, in the order of their starts.
    pids: Vec<u32>,
}

impl Running {
    /// Starts a launch, and waits until this many lines have this text. Notes the processes meanwhile.
    fn start(command: &mut Command, count: usize, text: &str) -> Running {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut launcher = TestProcess::start(format!("{command:?}"), command);
        let mut output = BufReader::new(launcher.child.stdout.take().unwrap()).lines();
        let mut seen = Vec::new();
        let mut pids = Vec::new();
        let mut found = 0;
        while found < count {
            let line = output.next().expect("the launch goes on").unwrap();
            let mut words = line.split(' ').skip_while(|word| *word != "pid");
            if line.starts_with("started ") {
                pids.push(words.nth(1).unwrap().parse().unwrap());
            }
            found += usize::from(line.contains(text));
            seen.push(line);
        }
        Running { launcher, output, seen, pids }
    }

    /// Sends the launcher a signal, and waits until it has ended. Returns its exit code, if it has one,
    /// the rest of its output, and its errors.
    fn end(mut self, signal: Signal) -> (Option<i32>, String, String) {
        self.launcher.signal(signal);
        let rest: Vec<String> = self.output.map(Result::unwrap).collect();
        let (status, _, errors) = self.launcher.finish();
        (status.code(), rest.join("\n"), errors)
    }
}

/// Waits until all processes have ended.
fn wait_for_ends(pids: &[u32]) {
    let start = Instant::now();
    while let Some(pid) = pids.iter().find(|pid| is_alive(**pid)) {
        assert!(start.elapsed() < LONG, "process {pid} is still there");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Waits until no process is left in the groups of these processes.
fn wait_for_empty_groups(leaders: &[u32]) {
    let start = Instant::now();
    let members = || {
        let names = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
            entry.unwrap().file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        });
        let is_member = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // Behind the name: the state, the parent, the group.
            let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').nth(2));
            let group = fields.flatten().and_then(|group| group.parse().ok());
            group.is_some_and(|group: u32| leaders.contains(&group)) && is_alive(*pid)
        };
        names.filter(is_member).collect::<Vec<u32>>()
    };
    let mut left = members();
    while !left.is_empty() {
        assert!(start.elapsed() < LONG, "{left:?} are still there");
        std::thread::sleep(std::time::Duration::from_millis(20));
        left = members();
    }
}

/// Returns whether a process runs: it exists, and is no zombie that nobody has waited for.
fn is_alive(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name of the program is in parentheses and may contain any character.
    let state = stat.rsplit_once(") ").map(|(_, rest)| rest.starts_with(['Z', 'X']));
    !state.unwrap()
}
