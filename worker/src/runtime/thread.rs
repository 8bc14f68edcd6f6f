//! The session's thread. It runs beside the caller's threads, so that a caller that computes for
//! ten seconds does not lose its lease.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pushpull_common::protocol::Features;
use pushpull_net::Connector;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::caller::{Answer, Caller, QueuedCommand};
use super::command_queue::CommandQueue;
use super::connection::{ConnectOrder, LinkOutbox, ShardConnection};
use super::mapped_memory::{MappedShards, PushBuffers};
use super::runner::SessionRunner;
use super::shared_memory;
use crate::config::ProgressCallback;
use crate::contained::contained;
use crate::error::UnresponsiveShards;
use crate::metrics::OperationTimes;
use crate::session::{OpId, Session, SessionConfig, SessionInput, SessionOutput};
use crate::token::{DroppedItem, ReturnQueue};

/// A session's thread. Dropping it ends the session and waits for its thread.
#[derive(Debug)]
pub(crate) struct SessionThread {
    caller: Arc<Caller>,
    thread: Option<JoinHandle<()>>,
}

impl SessionThread {
    /// Starts the thread. The connectors are those to the ps tasks, by their indices.
    pub(crate) fn start(
        start: SessionConfig,
        connectors: BTreeMap<u32, Arc<Connector>>,
        progress: Option<ProgressCallback>,
        busy_poll: Duration,
    ) -> io::Result<SessionThread> {
        let commands = Arc::<CommandQueue>::default();
        let returns = Arc::new(ReturnQueue::default());
        let runner = Arc::new(SessionRunner::new(returns.leadership().clone(), busy_poll)?);
        let name = format!("worker-{}", start.task.index);
        let features = start.features;
        let session = Session::new(start);
        let mapped_shards = Arc::new(MappedShards::default());
        let unclaimed = session.unclaimed().clone();
        let push_buffers = Arc::new(PushBuffers::default());
        let caller_returns = returns.clone();
        let caller_shards = mapped_shards.clone();
        let caller_buffers = push_buffers.clone();
        let caller = Caller::new(
            commands.clone(),
            caller_returns,
            unclaimed,
            caller_shards,
            caller_buffers,
            runner.clone(),
        );
        let times = caller.times().clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let shared = SessionMemory { mapped_shards, push_buffers };
            let core =
                SessionCore::new(session, features, connectors, progress, returns, shared, times);
            let core = Arc::new(core);
            runner.run(core.run(commands));
        })?;
        Ok(SessionThread { caller: Arc::new(caller), thread: Some(thread) })
    }

    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl Drop for SessionThread {
    fn drop(&mut self) {
        if self.caller.is_forked() {
            // The thread and the sockets are the parent's. Closing them here would take them out of
            // the set that its runtime waits for.
            std::mem::forget((self.caller.clone(), self.thread.take()));
            return;
        }
        self.caller.end();
        if let Some(thread) = self.thread.take() {
            // Every caller sees a panic of the thread as an ended session.
            let _ = thread.join();
        }
    }
}

/// The session and its connections, shared by the tasks of its runtime. The tasks run one at a
/// time, so the locks are never contended.
pub(super) struct SessionCore {
    session: Mutex<Session>,
    features: Features,
    /// The connectors to the ps tasks.
    connectors: BTreeMap<u32, Arc<Connector>>,
    answers: Mutex<HashMap<OpId, Answer>>,
    outboxes: Mutex<HashMap<usize, Arc<LinkOutbox>>>,
    progress: Option<ProgressCallback>,
    returns: Arc<ReturnQueue>,
    mapped_shards: Arc<MappedShards>,
    push_buffers: Arc<PushBuffers>,
    /// When the timer task wakes; `rearm` makes it read the time again.
    timer_at: Mutex<Option<Instant>>,
    rearm: Notify,
    /// Connections for the `serve` task to open: it owns the set of connection tasks.
    connects: Mutex<Vec<ConnectOrder>>,
    connect: Notify,
    /// The links that have ever been connected.
    connected: Mutex<HashSet<usize>>,
    times: Arc<OperationTimes>,
}

/// The bytes of a body that are still to come from which on it arrives in several parts.
const LONG_BODY: usize = 64 << 10;

/// Locks, ignoring poison: a panic ends the session, and only the clean-up uses the data then.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails all open and queued operations when the session ends, also if it panics.
struct OperationsGuard(Arc<SessionCore>, Arc<CommandQueue>);

impl Drop for OperationsGuard {
    fn drop(&mut self) {
        self.1.close();
        let unanswered = std::mem::take(&mut *lock(&self.0.answers));
        drop(unanswered);
    }
}

/// The memory that shards share with a session.
struct SessionMemory {
    mapped_shards: Arc<MappedShards>,
    push_buffers: Arc<PushBuffers>,
}

impl SessionCore {
    fn new(
        session: Session,
        features: Features,
        connectors: BTreeMap<u32, Arc<Connector>>,
        progress: Option<ProgressCallback>,
        returns: Arc<ReturnQueue>,
        shared: SessionMemory,
        times: Arc<OperationTimes>,
    ) -> SessionCore {
        SessionCore {
            features,
            connectors,
            session: Mutex::new(session),
            answers: Mutex::default(),
            outboxes: Mutex::default(),
            progress,
            returns,
            mapped_shards: shared.mapped_shards,
            push_buffers: shared.push_buffers,
            timer_at: Mutex::default(),
            rearm: Notify::new(),
            connects: Mutex::default(),
            connect: Notify::new(),
            connected: Mutex::default(),
            times,
        }
    }

    async fn run(self: Arc<SessionCore>, commands: Arc<CommandQueue>) {
        let ended = OperationsGuard(self.clone(), commands.clone());
        let mut connections = JoinSet::new();
        tokio::select! {
            () = self.serve(&commands, &mut connections) => {}
            () = self.run_timer() => {}
        }
        commands.close();
        // Tokens dropped just before the end are returned while the connections are open.
        self.process_returns();
        tokio::task::yield_now().await;
        connections.shutdown().await;
        drop(ended);
    }

    async fn serve(
        self: &Arc<SessionCore>,
        commands: &CommandQueue,
        connections: &mut JoinSet<()>,
    ) {
        loop {
            tokio::select! {
                () = self.returns.leadership().called() => {
                    commands.take().into_iter().for_each(|command| self.take(command));
                    self.process_returns();
                    if commands.is_done() {
                        return;
                    }
                    // Callers that submit without end keep the connections from nothing.
                    tokio::task::coop::consume_budget().await;
                }
                () = self.connect.notified() => {
                    for order in std::mem::take(&mut *lock(&self.connects)) {
                        connections.spawn(ShardConnection::new(self.clone(), order).run());
                    }
                }
                Some(ended) = connections.join_next() => {
                    if ended.is_err() {
                        // A connection task has panicked, which ends the session.
                        return;
                    }
                }
            }
        }
    }

    fn take(&self, mut queued_command: QueuedCommand) {
        let op = queued_command.op;
        let deadline = queued_command.deadline;
        if let Some((command, answer)) = queued_command.take() {
            lock(&self.answers).insert(op, answer);
            self.handle(SessionInput::Command { op, command, deadline });
        }
    }

    fn process_returns(&self) {
        for (dropped, _open) in self.returns.take() {
            self.handle(match dropped {
                DroppedItem::Token(grant) => SessionInput::TokenDropped { grant },
                DroppedItem::SkippedToken(grant) => SessionInput::TokenSkipped { grant },
                DroppedItem::Push(sequence) => SessionInput::Abandoned { sequence },
                DroppedItem::Operation(op) => {
                    lock(&self.answers).remove(&op);
                    SessionInput::Cancelled { op }
                }
            });
        }
    }

    /// Sends the session a tick at each of its wake-up times.
    async fn run_timer(&self) {
        loop {
            let now = Instant::now();
            let wake = lock(&self.session).wake_at(now);
            *lock(&self.timer_at) = Some(wake);
            tokio::select! {
                () = tokio::time::sleep_until(wake.into()) => self.handle(SessionInput::Tick),
                () = self.rearm.notified() => {}
            }
        }
    }

    /// Passes an input to the session and carries out its outputs.
    pub(super) fn handle(&self, input: SessionInput) {
        let now = Instant::now();
        let mut session = lock(&self.session);
        session.handle(now, input);
        while let Some(output) = session.poll_output() {
            if let SessionOutput::Progress { silent } = output {
                self.report(&mut session, &silent);
            } else {
                self.deliver(output);
            }
        }
        let wake = session.wake_at(now);
        let mut timer_at = lock(&self.timer_at);
        if timer_at.is_some_and(|timer_at| wake < timer_at) {
            *timer_at = Some(wake);
            self.rearm.notify_one();
        }
    }

    /// Counts a connection, which is a reconnect if the link was connected before.
    pub(super) fn count_connection(&self, link: usize) {
        if !lock(&self.connected).insert(link) {
            self.times.count(|metrics| metrics.reconnects += 1);
        }
    }

    /// Removes the shared memory of a connection that has ended, unless a newer connection has
    /// replaced it.
    pub(super) fn sharing_ended(&self, link: usize, outbox: &Arc<LinkOutbox>) {
        let outboxes = lock(&self.outboxes);
        if outboxes.get(&link).is_none_or(|current| Arc::ptr_eq(current, outbox)) {
            self.mapped_shards.remove(link);
            self.push_buffers.remove(link);
        }
    }

    /// Calls `receive` with the memory into which the body of a frame is read.
    pub(super) fn with_body<R>(
        &self,
        link: usize,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        lock(&self.session).with_targets(link, |targets| {
            let bytes = targets.iter().flat_map(|slices| slices.iter()).map(|slice| slice.len());
            if bytes.sum::<usize>() >= LONG_BODY {
                self.returns.leadership().part_arrives();
            }
            receive(targets)
        })
    }

    fn deliver(&self, output: SessionOutput) {
        match output {
            SessionOutput::Connect { link, shard } => {
                let connector = self.connectors.get(&shard.task).cloned();
                // The placement names ps tasks of the cluster alone.
                let connector = connector.unwrap_or_else(|| Arc::new(Connector::new("")));
                let outbox = Arc::new(LinkOutbox::default());
                lock(&self.outboxes).insert(link, outbox.clone());
                lock(&self.connects).push(ConnectOrder {
                    link,
                    connector,
                    outbox,
                    features: self.features,
                });
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
                // If the values cannot be mapped, pulls use the connection.
                if let Ok(reader) = shared_memory::map(&shared, self.descriptors(link)) {
                    self.mapped_shards.add(link, mapped_shard, reader);
                }
            }
            SessionOutput::SharedPushBuffer { link, shard, push_buffer, shared } => {
                // If the push buffer cannot be mapped, pushes use the connection.
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
            SessionOutput::Progress { .. } => {}
        }
    }

    /// Reports progress to the function of the caller. A panic in it ends the session, so that
    /// every operation names it.
    fn report(&self, session: &mut Session, silent: &UnresponsiveShards) {
        let Some(progress) = &self.progress else { return };
        if let Err(error) = contained("on_progress", || progress(silent)) {
            session.fail(error);
        }
    }

    /// Takes the descriptors received over a link.
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

    /// The configuration of a session that cannot reach a server.
    fn connectors() -> BTreeMap<u32, Arc<Connector>> {
        [(0, Arc::new(Connector::new("unix:/nobody/listens/here")))].into()
    }

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
            expectations: Default::default(),
            features: Features::ALL,
            addresses: [(0, "unix:/nobody/listens/here".to_owned())].into(),
            progress_interval: None,
        }
    }

    #[test]
    fn an_endless_wait_can_be_cancelled_and_the_thread_ends() {
        let session = SessionThread::start(start(), connectors(), None, Duration::ZERO).unwrap();
        {
            let mut call = pin!(session.caller().call("connect", open(), Duration::MAX));
            assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        drop(session);
    }

    /// A recovery ends with its window, even if the timeout of the operation under way is later.
    #[test]
    fn a_limit_ends_calls_with_longer_timeouts() {
        let session = SessionThread::start(start(), connectors(), None, Duration::ZERO).unwrap();
        let caller = session.caller();
        caller.limit(Some(Instant::now()));
        assert!(caller.is_at_limit());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let ended = runtime.block_on(caller.call("connect", open(), Duration::MAX));
        assert!(matches!(ended, Err(crate::Error::Timeout { .. })));
        caller.limit(None);
        let mut call = pin!(caller.call("connect", open(), Duration::MAX));
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }

    #[test]
    fn the_end_of_a_session_fails_the_wait_of_its_leader() {
        let session = SessionThread::start(start(), connectors(), None, Duration::ZERO).unwrap();
        std::thread::scope(|scope| {
            let (sender, submitted) = std::sync::mpsc::channel();
            let caller = session.caller();
            let waits = scope.spawn(move || {
                let waiting = caller.runner().enter().expect("no operation is open");
                let call = caller.call("connect", open(), Duration::MAX);
                sender.send(()).unwrap();
                waiting.wait(call)
            });
            submitted.recv().unwrap();
            caller.end();
            let ended = waits.join().unwrap().map(|_| ());
            assert!(matches!(ended, Err(crate::Error::Ended { doing: "connect" })), "{ended:?}");
        });
    }
}
