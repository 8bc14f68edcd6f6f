//! A child process: started, killed without warning, or waited for; it ends with its owner.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal};

/// How long anything may take that everything is there for. Generous: it only ends a hang.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// How long a loop that waits for something outside of this process lies still in between.
pub(crate) const BLINK: Duration = Duration::from_micros(200);

/// A process that is running, and what it says goes to a log.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
}

impl Process {
    /// Starts it; what it says is added to the log.
    pub(crate) fn start(name: String, command: &mut Command, log: PathBuf) -> Process {
        let log = OpenOptions::new().create(true).append(true).open(log).expect("a log");
        let errors = log.try_clone().expect("a log");
        let command = command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        Process { name, child }
    }

    /// SIGKILL, without waiting for what comes of it.
    pub(crate) fn strike(&mut self) {
        self.assert_alive();
        self.child.kill().expect("a child can be killed");
    }

    /// Waits for a process that was struck to be gone, and with it its locks and connections.
    pub(crate) fn bury(mut self) {
        let status = self.child.wait().expect("a child can be waited for");
        assert!(status.code().is_none(), "{} has ended by itself, with {status}", self.name);
    }

    /// Asks it to end, as one asks daemons.
    pub(crate) fn ask_to_end(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGSTOP: it does nothing until it goes on, and keeps its connections.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("a living child");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed()).expect("a child has a number")
    }

    /// Lets it write files of at most so many bytes: what is longer is as on a disk that is full.
    pub(crate) fn limit_files(&self, bytes: Option<u64>) {
        let limit = Rlimit { current: bytes, maximum: None };
        rustix::process::prlimit(Some(self.pid()), Resource::Fsize, limit)
            .expect("the limits of a child can be changed");
    }

    /// How it has ended, if it has.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.ended()
    }

    /// Waits for it to end well.
    pub(crate) fn finish(mut self) {
        let status = self.await_end();
        assert!(status.success(), "{} has ended with {status}", self.name);
    }

    /// Waits for it to end by itself.
    pub(crate) fn await_end(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(Instant::now() < deadline, "{} does not end in {TIMEOUT:?}", self.name);
            std::thread::sleep(BLINK);
        }
    }

    /// How many memories that are lent, or have been, it has mapped.
    pub(crate) fn shared_memories(&self) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id()));
        let maps = maps.expect("a living child has mappings");
        maps.lines().filter(|line| line.contains("/memfd:pushpull")).count()
    }

    /// Nothing ends by itself before it is told to.
    pub(crate) fn assert_alive(&mut self) {
        if let Some(status) = self.ended() {
            panic!("{} has ended by itself, with {status}", self.name);
        }
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be asked for")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended by itself unless the test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
