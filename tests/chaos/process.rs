//! A child process that is killed when its handle is dropped.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal};

/// How long the test waits for any event. Generous, since it only ends a hang.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// The polling interval of loops that wait for something outside of this process.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// A running process whose output goes to a log.
#[derive(Debug)]
pub(crate) struct LoggedProcess {
    name: String,
    child: Child,
}

impl LoggedProcess {
    /// Starts a process and appends its output to a log file.
    pub(crate) fn start(name: String, command: &mut Command, log: PathBuf) -> LoggedProcess {
        let log = OpenOptions::new().create(true).append(true).open(log).expect("a log");
        let errors = log.try_clone().expect("a log");
        let command = command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        LoggedProcess { name, child }
    }

    /// Sends SIGKILL without waiting for the end of the process.
    pub(crate) fn kill(&mut self) {
        self.assert_alive();
        self.child.kill().expect("a child can be killed");
    }

    /// Waits for the end of a killed process, which also ends its locks and connections.
    pub(crate) fn wait_killed(mut self) {
        let status = self.child.wait().expect("a child can be waited for");
        assert!(status.code().is_none(), "{} has ended by itself, with {status}", self.name);
    }

    /// Sends SIGTERM.
    pub(crate) fn ask_to_end(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends SIGSTOP: the process pauses until [`LoggedProcess::resume`] and keeps its connections.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("a living child");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed()).expect("a child has a process id")
    }

    /// Limits the size of its files; longer writes fail as on a full disk. `None` removes the
    /// limit.
    pub(crate) fn limit_files(&self, bytes: Option<u64>) {
        let limit = Rlimit { current: bytes, maximum: None };
        rustix::process::prlimit(Some(self.pid()), Resource::Fsize, limit)
            .expect("the limits of a child can be changed");
    }

    /// Returns the exit status if the process has ended.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.ended()
    }

    /// Waits for the process to end with success.
    pub(crate) fn finish(mut self) {
        let status = self.await_end();
        assert!(status.success(), "{} has ended with {status}", self.name);
    }

    /// Waits for the process to end without a signal from here.
    pub(crate) fn await_end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(Instant::now() < deadline, "{} has not ended after {TIMEOUT:?}", self.name);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns how many shared memory mappings the process has, those of past connections included.
    pub(crate) fn shared_memories(&self) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id()));
        let maps = maps.expect("a living child has mappings");
        maps.lines().filter(|line| line.contains("/memfd:pushpull")).count()
    }

    /// Asserts that the process has not ended.
    pub(crate) fn assert_alive(&mut self) {
        if let Some(status) = self.ended() {
            panic!("{} has ended by itself, with {status}", self.name);
        }
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be polled")
    }
}

impl Drop for LoggedProcess {
    fn drop(&mut self) {
        // The process has already ended unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
