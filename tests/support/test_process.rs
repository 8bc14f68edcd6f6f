//! Processes that tests start, for the test files of this package and of the examples.

#![allow(dead_code, reason = "each test file uses a part")]

use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Deadline that only ends a hang.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// A process that is killed when the test ends.
pub(crate) struct TestProcess {
    pub(crate) name: String,
    pub(crate) child: Child,
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        // The process has already exited unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TestProcess {
    pub(crate) fn start(name: impl Into<String>, command: &mut Command) -> TestProcess {
        TestProcess { name: name.into(), child: command.stdin(Stdio::null()).spawn().unwrap() }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Waits until the process exits, and returns its status, output and errors. A stream is empty
    /// if it is not a pipe, or if the test has taken the pipe.
    pub(crate) fn finish(&mut self) -> (ExitStatus, String, String) {
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(start.elapsed() < LONG, "{} does not exit", self.name),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut output = String::new();
        let mut errors = String::new();
        if let Some(mut pipe) = self.child.stdout.take() {
            pipe.read_to_string(&mut output).unwrap();
        }
        if let Some(mut pipe) = self.child.stderr.take() {
            pipe.read_to_string(&mut errors).unwrap();
        }
        (status, output, errors)
    }

    /// Waits until the process exits, asserts that it failed with this code, and returns its output.
    #[allow(dead_code, reason = "not every test has such a process")]
    pub(crate) fn fail_with(&mut self, code: i32) -> String {
        let (status, output, _) = self.finish();
        assert_eq!(status.code(), Some(code), "{} ended with {status}: {output}", self.name);
        output
    }

    /// Waits until the process exits, asserts that it succeeded, and returns its output.
    pub(crate) fn succeed(&mut self) -> String {
        let (status, output, _) = self.finish();
        assert!(status.success(), "{} ended with {status}: {output}", self.name);
        output
    }
}

/// Returns addresses without listeners: bound once, then released.
pub(crate) fn free_addresses(count: usize) -> Vec<String> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect()
}

/// Returns two outputs that cannot be written: a full device, and a pipe without a reader.
pub(crate) fn unwritable() -> [Stdio; 2] {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    [full.into(), writer.into()]
}

/// Returns whether this process ignores the hangup signal. Its children inherit that.
pub(crate) fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // Bit 0 is signal 1.
    mask.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1))
}
