//! The session's thread: it lives beside the caller's, so that ten seconds of computing on the
//! caller's thread are not a death.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

use super::caller::{COMMANDS_MAX, Caller};
use super::connection;
use super::mapped_shards::MappedShards;
use super::outbox::Outbox;
use super::push_buffers::PushBuffers;
use super::reply::{Answer, PendingReply};
use super::runner::SessionRunner;
use super::shared_memory;
use crate::config::Progress;
use crate::session::{OpId, Session, SessionConfig, SessionInput, SessionOutput};
use crate::token::{DroppedItem, ReturnQueue};

/// A session's thread. Dropping it ends the session and waits for its thread.
#[derive(Debug)]
pub(crate) struct SessionThread {
    caller: Arc<Caller>,
    thread: Option<JoinHandle<()>>,
}

impl SessionThread {
    pub(crate) fn start(
        start: SessionConfig,
        progress: Option<Progress>,
        busy_poll: Duration,
    ) -> io::Result<SessionThread> {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let returns = Arc::new(ReturnQueue::default());
        let runner = Arc::new(SessionRunner::new(returns.leadership().clone(), busy_poll)?);
        let name = format!("worker-{}", start.task.index);
        let addresses = start.addresses.clone();
        let session = Session::new(start);
        let mapped_shards = Arc::new(MappedShards::default());
        let unclaimed = session.unclaimed().clone();
        let push_buffers = Arc::new(PushBuffers::default());
        let (way_back, to_read, to_write) =
            (returns.clone(), mapped_shards.clone(), push_buffers.clone());
        let caller = Caller::new(commands, way_back, unclaimed, to_read, to_write, runner.clone());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let shared = (mapped_shards, push_buffers);
            let core = Arc::new(Core::new(session, addresses, progress, returns, shared));
            runner.run(core.run(receiver));
        })?;
        Ok(SessionThread { caller: Arc::new(caller), thread: Some(thread) })
    }

    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl Drop for SessionThread {
    fn drop(&mut self) {
        self.caller.end();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been seen by every caller, as an ended session.
            let _ = thread.join();
        }
    }
}

/// The session and its connections, shared by the tasks of its runtime: they run one at a time, and the
/// locks are never waited for.
pub(super) struct Core {
    session: Mutex<Session>,
    addresses: BTreeMap<u32, String>,
    answers: Mutex<HashMap<OpId, Answer>>,
    outboxes: Mutex<HashMap<usize, Arc<Outbox>>>,
    progress: Option<Progress>,
    returns: Arc<ReturnQueue>,
    mapped_shards: Arc<MappedShards>,
    push_buffers: Arc<PushBuffers>,
    /// When the clock's task will wake, and what makes it look again.
    armed: Mutex<Option<Instant>>,
    rearm: Notify,
    /// Connections to be made, by the task that may spawn.
    connects: Mutex<Vec<(usize, String, Arc<Outbox>)>>,
    connect: Notify,
}

/// A task that panics ends the session: what it leaves is looked at by nobody but those who clear up.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whoever still waits when the session ends is told, though it end by a panic.
struct Ended(Arc<Core>);

impl Drop for Ended {
    fn drop(&mut self) {
        let unanswered = std::mem::take(&mut *lock(&self.0.answers));
        drop(unanswered);
    }
}

impl Core {
    fn new(
        session: Session,
        addresses: BTreeMap<u32, String>,
        progress: Option<Progress>,
        returns: Arc<ReturnQueue>,
        (mapped_shards, push_buffers): (Arc<MappedShards>, Arc<PushBuffers>),
    ) -> Core {
        Core {
            addresses,
            session: Mutex::new(session),
            answers: Mutex::default(),
            outboxes: Mutex::default(),
            progress,
            returns,
            mapped_shards,
            push_buffers,
            armed: Mutex::default(),
            rearm: Notify::new(),
            connects: Mutex::default(),
            connect: Notify::new(),
        }
    }

    async fn run(self: Arc<Core>, commands: mpsc::Receiver<PendingReply>) {
        let ended = Ended(self.clone());
        let mut connections = JoinSet::new();
        tokio::select! {
            () = self.serve(commands, &mut connections) => {}
            () = self.keep_time() => {}
        }
        // A token that was dropped last goes back while the connection stands.
        self.take_back();
        tokio::task::yield_now().await;
        connections.shutdown().await;
        drop(ended);
    }

    async fn serve(
        self: &Arc<Core>,
        mut commands: mpsc::Receiver<PendingReply>,
        connections: &mut JoinSet<()>,
    ) {
        loop {
            tokio::select! {
                command = commands.recv() => {
                    let Some(pending_reply) = command else { return };
                    self.take(pending_reply);
                }
                () = self.returns.notify.notified() => self.take_back(),
                () = self.connect.notified() => {
                    for (link, address, outbox) in std::mem::take(&mut *lock(&self.connects)) {
                        let run = connection::run(self.clone(), link, address, outbox);
                        connections.spawn(run);
                    }
                }
                Some(ended) = connections.join_next() => {
                    if ended.is_err() {
                        // It has panicked, and with it the session.
                        return;
                    }
                }
            }
        }
    }

    fn take(&self, mut pending_reply: PendingReply) {
        let (op, deadline) = (pending_reply.op, pending_reply.deadline);
        if let Some((command, answer)) = pending_reply.take() {
            lock(&self.answers).insert(op, answer);
            self.handle(SessionInput::Command { op, command, deadline });
        }
    }

    fn take_back(&self) {
        for (dropped, _open) in self.returns.take() {
            self.handle(match dropped {
                DroppedItem::Token(grant) => SessionInput::TokenDropped { grant },
                DroppedItem::Push(sequence) => SessionInput::Abandoned { sequence },
                DroppedItem::Operation(op) => {
                    lock(&self.answers).remove(&op);
                    SessionInput::Cancelled { op }
                }
            });
        }
    }

    /// Tells the session the time when it wants to know it.
    async fn keep_time(&self) {
        loop {
            let now = Instant::now();
            let wake = lock(&self.session).wake_at(now);
            *lock(&self.armed) = Some(wake);
            tokio::select! {
                () = tokio::time::sleep_until(wake.into()) => self.handle(SessionInput::Tick),
                () = self.rearm.notified() => {}
            }
        }
    }

    /// Tells the session what happened, and does what it wants done.
    pub(super) fn handle(&self, input: SessionInput) {
        let now = Instant::now();
        let mut session = lock(&self.session);
        session.handle(now, input);
        while let Some(output) = session.poll_output() {
            self.deliver(output);
        }
        let wake = session.wake_at(now);
        let mut armed = lock(&self.armed);
        if armed.is_some_and(|armed| wake < armed) {
            *armed = Some(wake);
            self.rearm.notify_one();
        }
    }

    /// A connection has ended, and with it what was lent over it, unless another has taken its place.
    pub(super) fn sharing_ended(&self, link: usize, outbox: &Arc<Outbox>) {
        let outboxes = lock(&self.outboxes);
        if outboxes.get(&link).is_none_or(|current| Arc::ptr_eq(current, outbox)) {
            self.mapped_shards.remove(link);
            self.push_buffers.remove(link);
        }
    }

    /// Lends the memory for a body.
    pub(super) fn with_body<R>(
        &self,
        link: usize,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        lock(&self.session).with_targets(link, receive)
    }

    fn deliver(&self, output: SessionOutput) {
        match output {
            SessionOutput::Connect { link, shard } => {
                let address = self.addresses.get(&shard.task).cloned().unwrap_or_default();
                let outbox = Arc::new(Outbox::default());
                lock(&self.outboxes).insert(link, outbox.clone());
                lock(&self.connects).push((link, address, outbox));
                self.connect.notify_one();
            }
            SessionOutput::Disconnect { link } => {
                if let Some(outbox) = lock(&self.outboxes).remove(&link) {
                    outbox.give_up();
                    self.mapped_shards.remove(link);
                    self.push_buffers.remove(link);
                }
            }
            SessionOutput::Send { link, envelope, message, body, crc } => {
                if let Some(outbox) = lock(&self.outboxes).get(&link) {
                    outbox.push(&envelope, &message, body, crc);
                }
            }
            SessionOutput::SharedValues { link, mapped_shard, shared } => {
                // What cannot be mapped is not read; all can be asked for over the connection.
                if let Ok(reader) = shared_memory::map(&shared, self.descriptors(link)) {
                    self.mapped_shards.add(link, mapped_shard, reader);
                }
            }
            SessionOutput::SharedPushBuffer { link, shard, push_buffer, shared } => {
                // What cannot be mapped is not written; all can be sent over the connection.
                if let Ok(mapped) = shared_memory::map_push_buffer(&shared, self.descriptors(link))
                {
                    self.push_buffers.add(link, shard, push_buffer, mapped);
                }
            }
            SessionOutput::Reply { op, reply } => {
                if let Some(answer) = lock(&self.answers).remove(&op) {
                    answer.send(reply);
                }
            }
            SessionOutput::Progress { silent } => {
                if let Some(progress) = &self.progress {
                    progress(&silent);
                }
            }
        }
    }

    /// The descriptors that have come over a link.
    fn descriptors(&self, link: usize) -> Vec<OwnedFd> {
        let outboxes = lock(&self.outboxes);
        outboxes.get(&link).map(|outbox| outbox.take_descriptors()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};
    use std::time::Duration;

    use pushpull_common::identity::Identity;
    use pushpull_common::ids::{Incarnation, ShardId, TaskId};
    use pushpull_common::protocol::message::Role;

    use super::*;
    use crate::session::SessionCommand;

    const OWNER: ShardId = ShardId { task: 0, shard: 0 };

    fn open() -> SessionCommand {
        SessionCommand::Open { shards: vec![OWNER] }
    }

    /// A session that never reaches anybody.
    fn start() -> SessionConfig {
        SessionConfig {
            task: TaskId::worker(0),
            role: Role::Worker {},
            owner: OWNER,
            incarnation: Incarnation(1),
            checksums: Default::default(),
            shared_memory: true,
            values: None,
            identity: Identity::new(),
            addresses: [(0, "unix:/nobody/listens/here".to_owned())].into(),
            progress_interval: None,
        }
    }

    #[test]
    fn a_wait_without_end_can_be_given_up_and_the_thread_ends() {
        let session = SessionThread::start(start(), None, Duration::ZERO).unwrap();
        {
            let mut call = pin!(session.caller().call("connect", open(), Duration::MAX));
            assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        drop(session);
    }

    #[test]
    fn a_caller_that_runs_the_session_is_told_of_its_end() {
        let session = SessionThread::start(start(), None, Duration::ZERO).unwrap();
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let caller = session.caller();
            let waits = scope.spawn(move || {
                let waiting = caller.runner().come().expect("nothing is open");
                let call = caller.call("connect", open(), Duration::MAX);
                tell.send(()).unwrap();
                waiting.wait(call)
            });
            told.recv().unwrap();
            caller.end();
            let ended = waits.join().unwrap().map(|_| ());
            assert!(matches!(ended, Err(crate::Error::Ended { doing: "connect" })), "{ended:?}");
        });
    }
}
