//! [`TaskProcess`]: one start of a task, from its process to the end of its output.

use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use super::lines::LineSplitter;
use super::output::{Printer, Stream};
use super::supervisor::TaskEnd;

/// How a process is told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Orders {
    /// By signals to its group.
    Signals,
    /// By lines to its standard input, which a shell on its host reads.
    Lines,
}

/// A start of a task.
#[derive(Clone, Debug)]
pub(super) struct TaskStart {
    /// The number of the task in the launch.
    pub(super) index: usize,
    /// The name before its lines, such as `worker:1`.
    pub(super) name: String,
    /// The number of the start, from 0 on.
    pub(super) incarnation: u32,
    /// The number of its log file.
    pub(super) log: Option<usize>,
    pub(super) orders: Orders,
    /// The time that is left to what it leaves in its group, from SIGTERM to SIGKILL.
    pub(super) kill_after: Duration,
}

/// A process of a task, in a group of its own: Ctrl-C on the terminal reaches the launcher alone, and
/// what the process starts ends with it.
#[derive(Clone, Debug)]
pub(super) struct TaskProcess {
    /// The number of the process, and of its group.
    pub(super) pid: Pid,
    orders: Orders,
    /// The process until it has been waited for. Until then nobody else has its number.
    child: Arc<Mutex<Option<Child>>>,
    /// Where the orders go, if they are lines.
    stdin: Arc<Mutex<Option<ChildStdin>>>,
}

impl TaskProcess {
    /// Starts a process, prints its output, and adds its end to `ends`, with the number of the task.
    ///
    /// The calling thread must last as long as the launcher: the kernel takes its end for that of the
    /// launcher.
    ///
    /// # Errors
    /// If the system starts no further process or thread.
    pub(super) fn start(
        mut command: Command,
        start: TaskStart,
        printer: &Printer,
        ends: &mut JoinSet<(usize, TaskEnd)>,
    ) -> io::Result<TaskProcess> {
        command.stdin(match start.orders {
            Orders::Signals => Stdio::null(),
            Orders::Lines => Stdio::piped(),
        });
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let pipes = [child.stdout.take().map(Into::into), child.stderr.take().map(Into::into)];
        let process = TaskProcess {
            pid,
            orders: start.orders,
            stdin: Arc::new(Mutex::new(child.stdin.take())),
            child: Arc::new(Mutex::new(Some(child))),
        };
        let mut readers = Vec::new();
        for (pipe, stream) in pipes.into_iter().zip([Stream::Output, Stream::Errors]) {
            let Some(pipe) = pipe else { continue };
            let lines = LineSplitter::new(&start.name, start.incarnation);
            let from = pipe::Receiver::from_owned_fd(pipe);
            let from = from.inspect_err(|_| process.end_at_once())?;
            readers.push(tokio::spawn(printer.clone().copy(from, stream, lines, start.log)));
        }
        let exited = when_exited(pid).inspect_err(|_| process.end_at_once())?;
        let printer = printer.clone();
        let ending = process.clone();
        ends.spawn(async move {
            // The thread sends when the process has exited.
            let _ = exited.await;
            ending.end_group(readers, &start, &printer).await;
            (start.index, ending.reap())
        });
        Ok(process)
    }

    /// Tells the process, and what it has started, to end.
    pub(super) fn terminate(&self) {
        self.order("TERM", Signal::TERM);
    }

    /// Kills the process, and what it has started.
    pub(super) fn kill(&self) {
        self.order("KILL", Signal::KILL);
    }

    /// Kills the process on this machine, under both kinds of orders.
    pub(super) fn give_up(&self) {
        self.signal_group(Signal::KILL);
    }

    fn order(&self, line: &str, signal: Signal) {
        match self.orders {
            Orders::Signals => self.signal_group(signal),
            Orders::Lines => {
                let mut stdin = self.stdin.lock().unwrap_or_else(PoisonError::into_inner);
                // A host that reads no more has lost the connection, at which the task ends.
                stdin.as_mut().map(|stdin| writeln!(stdin, "{line}"));
            }
        }
    }

    /// Sends a signal to the group, unless the process has been waited for.
    fn signal_group(&self, signal: Signal) {
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        if child.is_some() {
            // The process has not been waited for, so the group is there.
            let _ = kill_process_group(self.pid, signal);
        }
    }

    /// Ends what the process has left in its group, and its output.
    async fn end_group(
        &self,
        mut readers: Vec<JoinHandle<()>>,
        start: &TaskStart,
        printer: &Printer,
    ) {
        self.signal_group(Signal::TERM);
        let all_read = async |readers: &mut Vec<JoinHandle<()>>| {
            while let Some(reader) = readers.last_mut() {
                // A reader does not panic; if it did, its output has ended.
                let _ = reader.await;
                readers.pop();
            }
        };
        let is_read = timeout(start.kill_after, all_read(&mut readers)).await.is_ok();
        self.signal_group(Signal::KILL);
        if !is_read && timeout(LAST_OUTPUT, all_read(&mut readers)).await.is_err() {
            printer.complain(&format!(
                "{} has left a process outside of its group, whose output is read no more",
                start.name
            ));
            readers.iter().for_each(JoinHandle::abort);
        }
    }

    /// Waits for the process, which has exited.
    fn reap(&self) -> TaskEnd {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let status = child.take().map(|mut child| child.wait());
        match status {
            Some(Ok(status)) => TaskEnd::from(status),
            Some(Err(error)) => TaskEnd::NotStarted(error.to_string()),
            None => TaskEnd::NotStarted("it has ended before".to_owned()),
        }
    }

    /// Ends a process that cannot be watched.
    fn end_at_once(&self) {
        self.signal_group(Signal::KILL);
        self.reap();
    }
}

/// Time for the output of a group that was killed.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

impl From<ExitStatus> for TaskEnd {
    fn from(status: ExitStatus) -> TaskEnd {
        let number = |number: i32| u8::try_from(number).unwrap_or(u8::MAX);
        match (status.code(), status.signal()) {
            (Some(code), _) => TaskEnd::Exit(number(code)),
            (None, Some(signal)) => TaskEnd::Signal(number(signal)),
            (None, None) => TaskEnd::Exit(u8::MAX),
        }
    }
}

/// Completes when a child has exited. It is not waited for: its number stays its own.
fn when_exited(pid: Pid) -> io::Result<oneshot::Receiver<()>> {
    let (exit, exited) = oneshot::channel();
    let thread = std::thread::Builder::new().name(format!("wait-{}", Pid::as_raw(Some(pid))));
    thread.stack_size(64 << 10).spawn(move || {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while waitid(WaitId::Pid(pid), options).is_err_and(|error| error == Errno::INTR) {}
        // The launcher may have given the process up.
        let _ = exit.send(());
    })?;
    Ok(exited)
}
