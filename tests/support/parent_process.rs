//! A process that starts another and is killed, for the tests of `--exit-with-parent`.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{BufRead, BufReader};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::test_process::{LONG, TestProcess};

/// A shell that has started a program, and waits for it.
pub(crate) struct ParentProcess {
    shell: TestProcess,
    child: Pid,
    /// The output of both, with the errors of the program. It ends when both have ended.
    output: BufReader<ChildStdout>,
}

impl ParentProcess {
    /// Starts a shell that starts this command line.
    pub(crate) fn start(line: &[&str]) -> ParentProcess {
        let mut command = Command::new("sh");
        // The number comes before all output of the program, which has the number of its shell.
        let script = r#"sh -c 'echo $$; exec "$@" 2>&1' sh "$@" & wait"#;
        command.args(["-c", script, "sh"]).args(line);
        command.stdout(Stdio::piped());
        let mut shell = TestProcess::start(format!("{line:?}"), &mut command);
        let mut output = BufReader::new(shell.child.stdout.take().unwrap());
        let mut number = String::new();
        output.read_line(&mut number).unwrap();
        let child = Pid::from_raw(number.trim().parse().unwrap()).unwrap();
        ParentProcess { shell, child, output }
    }

    /// Returns the next line of the program.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "{}: the end of the output after {line:?}", self.shell.name);
        line
    }

    /// Kills the shell alone.
    pub(crate) fn kill(&mut self) {
        self.shell.signal(Signal::KILL);
        self.shell.finish();
    }

    /// Sends a signal to the program.
    ///
    /// # Panics
    /// If it has ended.
    pub(crate) fn signal_child(&self, signal: Signal) {
        test_kill_process(self.child).unwrap();
        kill_process(self.child, signal).unwrap();
    }

    /// Waits until the program has ended, and returns the rest of its output.
    pub(crate) fn rest(self) -> String {
        let ParentProcess { shell, child, output } = self;
        let reader = std::thread::spawn(move || std::io::read_to_string(output).unwrap());
        let start = Instant::now();
        while !reader.is_finished() {
            if start.elapsed() > LONG {
                // It may have ended meanwhile.
                let _ = kill_process(child, Signal::KILL);
                panic!("{}: the program outlives its parent", shell.name);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        reader.join().unwrap()
    }
}
