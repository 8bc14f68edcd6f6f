//! The session's thread: it lives beside the caller's, so that ten seconds of computing on the
//! caller's thread are not a death.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::LocalSet;

use super::connection::{self, Frame, Outbox};
use crate::config::Progress;
use crate::error::Error;
use crate::session::{Command, Input, OpId, Output, Reply, Session, Start};
use crate::token::{Dropped, Returns};

/// Operations on their way to the session's thread; the next caller waits.
const COMMANDS_MAX: usize = 64;

type Answer = oneshot::Sender<Result<Reply, Error>>;

/// The caller's end of a session. Dropping it ends the session and waits for its thread.
#[derive(Debug)]
pub(crate) struct SessionThread {
    commands: Option<mpsc::Sender<(OpId, Command, Instant, Answer)>>,
    returns: Arc<Returns>,
    next_op: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl SessionThread {
    pub(crate) fn start(start: Start, progress: Option<Progress>) -> io::Result<SessionThread> {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let returns = Arc::new(Returns::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let name = format!("worker-{}", start.task.index);
        let dropped = returns.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let core = Rc::new(Core::new(start, progress));
            LocalSet::new().block_on(&runtime, core.run(receiver, dropped));
        })?;
        Ok(SessionThread {
            commands: Some(commands),
            returns,
            next_op: AtomicU64::new(1),
            thread: Some(thread),
        })
    }

    pub(crate) fn returns(&self) -> &Arc<Returns> {
        &self.returns
    }

    /// Has something done within `timeout`. Dropping the future tells the session that nobody
    /// waits any more.
    pub(crate) async fn call(
        &self,
        doing: &'static str,
        command: Command,
        timeout: Duration,
    ) -> Result<Reply, Error> {
        let op = OpId(self.next_op.fetch_add(1, Ordering::Relaxed));
        let (answer, answered) = oneshot::channel();
        let commands = self.commands.as_ref().ok_or(Error::Ended { doing })?;
        let deadline = Instant::now() + timeout;
        let mut waiting = Waiting { op, returns: Some(&self.returns) };
        let sent = commands.send((op, command, deadline, answer)).await;
        sent.map_err(|_| Error::Ended { doing })?;
        let reply = answered.await;
        waiting.returns = None;
        reply.map_err(|_| Error::Ended { doing })?
    }
}

impl Drop for SessionThread {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been seen by every caller, as an ended session.
            let _ = thread.join();
        }
    }
}

/// An operation whose caller waits; tells the session when the caller stops.
struct Waiting<'a> {
    op: OpId,
    returns: Option<&'a Arc<Returns>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(returns) = self.returns {
            returns.add(Dropped::Operation(self.op));
        }
    }
}

/// The session and its connections, shared by the tasks of its thread.
pub(super) struct Core {
    session: RefCell<Session>,
    addresses: std::collections::BTreeMap<u32, String>,
    answers: RefCell<HashMap<OpId, Answer>>,
    outboxes: RefCell<HashMap<usize, Rc<Outbox>>>,
    progress: Option<Progress>,
    /// When the clock's task will wake, and what makes it look again.
    armed: Cell<Option<Instant>>,
    rearm: Notify,
    /// Connections to be made, by the task that may spawn.
    connects: RefCell<Vec<(usize, String, Rc<Outbox>)>>,
    connect: Notify,
}

impl Core {
    fn new(start: Start, progress: Option<Progress>) -> Core {
        Core {
            addresses: start.addresses.clone(),
            session: RefCell::new(Session::new(start)),
            answers: RefCell::default(),
            outboxes: RefCell::default(),
            progress,
            armed: Cell::new(None),
            rearm: Notify::new(),
            connects: RefCell::default(),
            connect: Notify::new(),
        }
    }

    async fn run(
        self: Rc<Core>,
        mut commands: mpsc::Receiver<(OpId, Command, Instant, Answer)>,
        returns: Arc<Returns>,
    ) {
        let serve = async {
            loop {
                tokio::select! {
                    command = commands.recv() => {
                        let Some((op, command, deadline, answer)) = command else { return };
                        self.answers.borrow_mut().insert(op, answer);
                        self.handle(Input::Command { op, command, deadline });
                    }
                    () = returns.notify.notified() => self.take_back(&returns),
                    () = self.connect.notified() => {
                        for (link, address, outbox) in self.connects.take() {
                            let run = connection::run(self.clone(), link, address, outbox);
                            tokio::task::spawn_local(run);
                        }
                    }
                }
            }
        };
        tokio::select! {
            () = serve => {}
            () = self.keep_time() => {}
        }
        // A token that was dropped last goes back while the connection stands.
        self.take_back(&returns);
        tokio::task::yield_now().await;
    }

    fn take_back(&self, returns: &Returns) {
        for dropped in returns.take() {
            self.handle(match dropped {
                Dropped::Token(grant) => Input::TokenDropped { grant },
                Dropped::Push(sequence) => Input::Abandoned { sequence },
                Dropped::Operation(op) => {
                    self.answers.borrow_mut().remove(&op);
                    Input::Cancelled { op }
                }
            });
        }
    }

    /// Tells the session the time when it wants to know it.
    async fn keep_time(&self) {
        loop {
            let now = Instant::now();
            let wake = self.session.borrow().wake_at(now);
            self.armed.set(Some(wake));
            tokio::select! {
                () = tokio::time::sleep_until(wake.into()) => self.handle(Input::Tick),
                () = self.rearm.notified() => {}
            }
        }
    }

    /// Tells the session what happened, and does what it wants done.
    pub(super) fn handle(&self, input: Input) {
        let now = Instant::now();
        let mut session = self.session.borrow_mut();
        session.handle(now, input);
        while let Some(output) = session.poll_output() {
            self.deliver(output);
        }
        let wake = session.wake_at(now);
        if self.armed.get().is_some_and(|armed| wake < armed) {
            self.armed.set(Some(wake));
            self.rearm.notify_one();
        }
    }

    /// Lends the memory for a body.
    pub(super) fn with_body<R>(
        &self,
        link: usize,
        receive: impl FnOnce(Option<Vec<&mut [u8]>>) -> R,
    ) -> R {
        receive(self.session.borrow_mut().body_targets(link))
    }

    fn deliver(&self, output: Output) {
        match output {
            Output::Connect { link, shard } => {
                let address = self.addresses.get(&shard.task).cloned().unwrap_or_default();
                let outbox = Rc::new(Outbox::default());
                self.outboxes.borrow_mut().insert(link, outbox.clone());
                self.connects.borrow_mut().push((link, address, outbox));
                self.connect.notify_one();
            }
            Output::Disconnect { link } => {
                if let Some(outbox) = self.outboxes.borrow_mut().remove(&link) {
                    outbox.give_up();
                }
            }
            Output::Send { link, envelope, message, bodies, crc } => {
                if let Some(outbox) = self.outboxes.borrow().get(&link) {
                    outbox.push(frame(&envelope, &message, bodies, crc));
                }
            }
            Output::Reply { op, reply } => {
                if let Some(answer) = self.answers.borrow_mut().remove(&op) {
                    // The caller may have gone this instant.
                    let _ = answer.send(reply);
                }
            }
            Output::Progress { silent } => {
                if let Some(progress) = &self.progress {
                    progress(&silent);
                }
            }
        }
    }
}

fn frame(envelope: &Envelope, message: &Message, bodies: Vec<Bytes>, crc: bool) -> Frame {
    let bytes = bodies.iter().map(|body| body.len() as u64).sum();
    let checksum = || bodies.iter().fold(0, |crc, body| crc32c::crc32c_append(crc, body));
    let stamp = BodyStamp { bytes, crc: (crc && bytes > 0).then(checksum) };
    let mut head = Vec::with_capacity(256);
    encode(&mut head, envelope, message, stamp);
    Frame { head, bodies }
}
