//! Runtime of a call session: its connections, its timer, and the futures of its callers.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::device::DeviceFilters;
use pushpull_common::error::Chain;
use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::protocol::message::OutputRef;
use pushpull_common::protocol::{Features, FrameEvent, FrameReader, FrameSink};
use pushpull_net::auth::{Credentials, ProofStep};
use pushpull_net::{ConnectionPhase, ConnectionSide, Connector, FrameStream, HomeProcess, Stream};
use pushpull_worker::Error;
use pushpull_worker::internal::{Leadership, OpenOperation, contained};
use tokio::sync::{Notify, oneshot};

use super::outbox::CallOutbox;
use super::timer::Timer;
use crate::call_session::{
    Admission, CallCommand, CallInput, CallOp, CallOrder, CallOutput, CallReply, CallSession,
    LinkId, doing_call,
};
use crate::error::ServiceError;
use crate::execution_waits::ExecutionWaits;
use crate::nested_calls::NestedCalls;
use crate::unreachable::Unreachable;
use crate::value::Value;
use crate::value_body::ValueBody;

/// Receives the reports of servers that cannot be reached.
pub(crate) type UnreachableReport = Arc<dyn Fn(&Unreachable) + Send + Sync>;

/// A call session with its connections. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ClientCore {
    shared: Arc<SharedSession>,
    /// The execution of the function that makes these calls; `None` for a client's own.
    outer: Option<Arc<NestedCalls>>,
}

struct SharedSession {
    incarnation: Incarnation,
    session: Mutex<CallSession>,
    links: Mutex<LinkTable>,
    /// The callers that wait for replies; `None` once the client has ended.
    replies: Mutex<Option<HashMap<CallOp, ReplySender>>>,
    outboxes: Mutex<HashMap<u64, Arc<CallOutbox>>>,
    credentials: Option<Credentials>,
    /// The connectors to servers, by address.
    connectors: Mutex<HashMap<String, Arc<Connector>>>,
    unreachable: Option<UnreachableReport>,
    home: HomeProcess,
    next_op: AtomicU64,
    runtime: tokio::runtime::Handle,
    leadership: Arc<Leadership>,
    timer: Timer,
}

impl fmt::Debug for SharedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSession").field("session", &self.session).finish_non_exhaustive()
    }
}

type ReplySender = oneshot::Sender<Result<CallReply, ServiceError>>;

/// The links of a session by tasks and addresses.
#[derive(Debug, Default)]
struct LinkTable {
    cluster: ClusterSpec,
    filters: DeviceFilters,
    by_address: HashMap<String, LinkId>,
    by_task: HashMap<TaskId, LinkId>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The session keeps its invariants between inputs.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClientCore {
    /// Creates the core of a client on this runtime. The leadership decides which thread runs it.
    pub(crate) fn new(
        session: CallSession,
        cluster: ClusterSpec,
        filters: DeviceFilters,
        credentials: Option<Credentials>,
        runtime: tokio::runtime::Handle,
        leadership: Arc<Leadership>,
        unreachable: Option<UnreachableReport>,
    ) -> ClientCore {
        let shared = SharedSession {
            incarnation: session.incarnation(),
            session: Mutex::new(session),
            links: Mutex::new(LinkTable { cluster, filters, ..LinkTable::default() }),
            replies: Mutex::new(Some(HashMap::new())),
            outboxes: Mutex::default(),
            credentials,
            connectors: Mutex::default(),
            unreachable,
            home: HomeProcess::current(),
            next_op: AtomicU64::new(1),
            runtime,
            leadership,
            timer: Timer::default(),
        };
        ClientCore { shared: Arc::new(shared), outer: None }
    }

    /// Returns the client of an execution of a function, whose calls end with it.
    pub(crate) fn of_execution(calls: Arc<NestedCalls>) -> ClientCore {
        ClientCore { shared: calls.core().shared.clone(), outer: Some(calls) }
    }

    /// Returns the client for operations that outlive an execution.
    pub(crate) fn without_execution(&self) -> ClientCore {
        ClientCore { shared: self.shared.clone(), outer: None }
    }

    /// Whether no call can succeed any more: the client has ended, or the execution whose client it
    /// is.
    pub(crate) fn is_over(&self) -> bool {
        let has_ended = lock(&self.shared.replies).is_none();
        has_ended || self.outer.as_ref().is_some_and(|outer| outer.is_over())
    }

    /// The waits of the execution whose client it is.
    pub(crate) fn waits(&self) -> Option<&Arc<ExecutionWaits>> {
        self.outer.as_ref().map(|outer| &outer.waits)
    }

    /// Runs a task on the thread of the client.
    pub(crate) fn spawn(
        &self,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> tokio::task::AbortHandle {
        let open = self.shared.leadership.open();
        let task = async move {
            task.await;
            drop(open);
        };
        let spawned = self.shared.runtime.spawn(task).abort_handle();
        self.shared.leadership.call();
        spawned
    }

    /// Ticks the session at the times that it asks for.
    pub(crate) async fn run_timer(&self) {
        let tick = || {
            self.handle(CallInput::Tick);
            lock(&self.shared.session).wake_at()
        };
        self.shared.timer.run(tick).await;
    }

    /// Replaces the addresses of the tasks of the cluster.
    pub(crate) fn set_cluster(&self, cluster: ClusterSpec) {
        lock(&self.shared.links).cluster = cluster;
    }

    /// Returns what the client proves itself with.
    pub(crate) fn credentials(&self) -> Option<&Credentials> {
        self.shared.credentials.as_ref()
    }

    /// Returns the cluster as the target has described it.
    pub(crate) fn cluster(&self) -> ClusterSpec {
        lock(&self.shared.links).cluster.clone()
    }

    /// Returns whether the device filters allow a task.
    pub(crate) fn allows(&self, task: &TaskId) -> bool {
        lock(&self.shared.links).filters.allow(task)
    }

    /// Returns the link to the server at an address. Its task may be unknown.
    pub(crate) fn link_of_address(&self, address: &str) -> LinkId {
        let mut links = lock(&self.shared.links);
        *links.by_address.entry(address.to_owned()).or_insert_with(|| {
            lock(&self.shared.session).add_link(Instant::now(), address.to_owned(), None)
        })
    }

    /// Records the task of the server of a link.
    pub(crate) fn name_link(&self, link: LinkId, task: TaskId) {
        lock(&self.shared.links).by_task.insert(task, link);
    }

    /// Returns the link to a task, or the reason why there is none.
    pub(crate) fn link_of_task(&self, task: &TaskId) -> Result<LinkId, String> {
        let mut links = lock(&self.shared.links);
        if let Some(&link) = links.by_task.get(task) {
            return Ok(link);
        }
        let address = links.cluster.task_address(&task.job, task.index);
        let address = address.map_err(|error| error.to_string())?.to_owned();
        if !links.filters.allow(task) {
            return Err(format!("the device filters exclude {task}"));
        }
        let link = lock(&self.shared.session).add_link(Instant::now(), address, Some(task.clone()));
        links.by_task.insert(task.clone(), link);
        Ok(link)
    }

    /// Calls a function. Returns the number of the call, 0 if it does not begin, and a future of
    /// its reply.
    pub(crate) fn call(
        &self,
        link: LinkId,
        order: CallOrder,
        deadline: Option<Instant>,
    ) -> (u64, ReplyFuture) {
        let depth = self.outer.as_ref().map_or(0, |outer| outer.depth);
        let order = Box::new(CallOrder { depth, ..order });
        let (reply, begins) = self.begin(|| doing_call(&order.function));
        let mut call = 0;
        if begins {
            // A number is settled by the reply to its command, so it is taken with one.
            let number = lock(&self.shared.session).number_call();
            call = number;
            self.submit(reply.op, link, CallCommand::Call { number, order }, deadline);
        }
        (call, reply)
    }

    /// Fetches an output that a call has left on a task.
    pub(crate) async fn fetch(
        &self,
        link: LinkId,
        of: OutputRef,
        deadline: Option<Instant>,
    ) -> Result<Value, ServiceError> {
        self.fetch_admitted(link, of, deadline, None).await
    }

    /// Fetches an output like [`ClientCore::fetch`], after its admission.
    pub(crate) async fn fetch_admitted(
        &self,
        link: LinkId,
        of: OutputRef,
        deadline: Option<Instant>,
        admission: Option<Admission>,
    ) -> Result<Value, ServiceError> {
        match self.command(link, CallCommand::Fetch { of, admission }, deadline).await? {
            CallReply::Fetched(value) => Ok(value),
            _ => Err(ServiceError::Ended { doing: "fetch an output".to_owned() }),
        }
    }

    /// Passes a command to the session and returns a future of the reply. Dropping it cancels the
    /// command.
    pub(crate) fn command(
        &self,
        link: LinkId,
        command: CallCommand,
        deadline: Option<Instant>,
    ) -> ReplyFuture {
        let (reply, begins) = self.begin(|| command.doing());
        if begins {
            self.submit(reply.op, link, command, deadline);
        }
        reply
    }

    /// Returns the future of an operation, and whether it begins. It does not if the client or the
    /// execution whose client it is has ended: then its future ends at once.
    fn begin(&self, doing: impl FnOnce() -> String) -> (ReplyFuture, bool) {
        let op = CallOp(self.shared.next_op.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = oneshot::channel();
        let open = self.shared.leadership.open();
        let outer = self.outer.as_deref();
        let is_forked = self.shared.home.is_elsewhere();
        let doing = (is_forked || outer.is_some()).then(doing);
        let may_begin = !is_forked && outer.is_none_or(|outer| outer.begin(op));
        // Without a sender the future ends at once.
        let begins = match &mut *lock(&self.shared.replies) {
            Some(replies) if may_begin => replies.insert(op, sender).is_none(),
            _ => false,
        };
        (ReplyFuture { core: self.clone(), op, receiver, doing, _open: open }, begins)
    }

    /// Passes the command of an operation to the session.
    fn submit(&self, op: CallOp, link: LinkId, command: CallCommand, deadline: Option<Instant>) {
        let outer = self.outer.as_deref();
        let until = outer.and_then(|outer| outer.deadline);
        let deadline = deadline.into_iter().chain(until).min();
        self.handle(CallInput::Command { op, link, command, deadline });
        self.shared.leadership.call();
        if outer.is_some_and(NestedCalls::is_over) {
            self.cancel(op);
        }
    }

    /// Gives an operation up. Its future ends.
    pub(crate) fn cancel(&self, op: CallOp) {
        if self.take_sender(op).is_some() {
            self.handle(CallInput::Cancelled { op });
        }
    }

    fn take_sender(&self, op: CallOp) -> Option<ReplySender> {
        lock(&self.shared.replies).as_mut()?.remove(&op)
    }

    /// Returns the server that has the outputs of a call of this client; 0 if that is unknown.
    pub(crate) fn holder_of(&self, link: LinkId, call: u64) -> Incarnation {
        lock(&self.shared.session).holder_on(link, call)
    }

    /// Returns the incarnation by which servers know the client.
    pub(crate) fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// Drops the kept outputs of calls on the server of a link.
    pub(crate) fn release(&self, link: LinkId, calls: Vec<u64>) {
        self.handle(CallInput::Release { link, calls });
    }

    /// Fails all commands, because the client ends.
    pub(crate) fn end(&self) {
        *lock(&self.shared.replies) = None;
        for outbox in lock(&self.shared.outboxes).values() {
            outbox.give_up();
        }
        // A thread that callers lead sees the end.
        self.shared.leadership.end();
    }

    /// Reports why a server is not reached, and returns it for the link.
    fn reported(&self, connector: &Connector, outbox: &CallOutbox, reason: String) -> String {
        let report = self.shared.unreachable.as_ref().filter(|_| !outbox.is_given_up());
        let Some(report) = report else { return reason };
        let address = connector.address().to_owned();
        let unreachable = Unreachable { address, reason: reason.clone() };
        // The link hears of the end of its connection also after a panic.
        match contained("on_unreachable", || report(&unreachable)) {
            Err(Error::Panicked { callback, message }) => {
                format!("{reason}; {callback} panicked: {message}")
            }
            _ => reason,
        }
    }

    fn handle(&self, input: CallInput<'_>) {
        let mut session = lock(&self.shared.session);
        session.handle(Instant::now(), input);
        while let Some(output) = session.poll_output() {
            self.deliver(output);
        }
        self.shared.timer.set(session.wake_at());
    }

    fn deliver(&self, output: CallOutput) {
        match output {
            CallOutput::Connect { connection, address } => {
                let outbox = Arc::new(CallOutbox::default());
                lock(&self.shared.outboxes).insert(connection, outbox.clone());
                let mut connectors = lock(&self.shared.connectors);
                let connector = connectors.entry(address);
                let credentials = &self.shared.credentials;
                let connector = connector
                    .or_insert_with_key(|address| {
                        let connector = Connector::new(address);
                        Arc::new(connector.credentials(credentials.clone()))
                    })
                    .clone();
                let connecting = run_connection(self.clone(), connection, connector, outbox);
                self.shared.runtime.spawn(connecting);
            }
            CallOutput::Disconnect { connection } => {
                if let Some(outbox) = lock(&self.shared.outboxes).remove(&connection) {
                    outbox.give_up();
                }
            }
            CallOutput::Send { connection, envelope, message, body, crc } => {
                if let Some(outbox) = lock(&self.shared.outboxes).get(&connection) {
                    outbox.push(&envelope, &message, body, crc);
                }
            }
            CallOutput::Reply { op, reply } => {
                if let Some(waiting) = self.take_sender(op) {
                    // The caller may have dropped its future.
                    let _ = waiting.send(reply);
                }
            }
        }
    }
}

/// Connects, and exchanges frames until the connection ends.
async fn run_connection(
    core: ClientCore,
    connection: u64,
    connector: Arc<Connector>,
    outbox: Arc<CallOutbox>,
) {
    let reason = match connector.connect(Connector::LIMIT).await {
        Err(error) => core.reported(&connector, &outbox, Chain(&error).to_string()),
        Ok(connected) => {
            let mut frames = FrameStream::new(connected.stream, FrameReader::new());
            // The client has chosen the server, so its metas may have any length.
            frames.open();
            frames.set_features(Features::ALL);
            outbox.proof().begin(connector.own_credentials(), frames.stream());
            core.handle(CallInput::Connected { connection });
            let unproven = connected.address;
            let connector = &*connector;
            let mut side =
                ClientSide { core: &core, connection, outbox: &outbox, connector, unproven };
            let served = frames.serve(&mut side, drop).await;
            match (outbox.proof().failure(), served) {
                (Some(reason), _) => core.reported(connector, &outbox, reason),
                (None, Ok(())) => "the server has closed the connection".to_owned(),
                (None, Err(error)) => Chain(&error).to_string(),
            }
        }
    };
    if !outbox.is_given_up() {
        lock(&core.shared.outboxes).remove(&connection);
        core.handle(CallInput::Disconnected { connection, reason });
    }
}

/// The client's side of a connection.
struct ClientSide<'a> {
    core: &'a ClientCore,
    connection: u64,
    outbox: &'a CallOutbox,
    connector: &'a Connector,
    /// The address of a server that has not sent a message yet.
    unproven: Option<SocketAddr>,
}

impl FrameSink for ClientSide<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        let connection = self.connection;
        self.connector.answered(self.unproven.take());
        self.core.handle(match event {
            FrameEvent::Message(header, message) => {
                match self.outbox.proof().take(&message) {
                    ProofStep::Pass => {}
                    ProofStep::Answer(envelope, answer) => {
                        let answer = answer.into();
                        return self.outbox.push(&envelope, &answer, ValueBody::default(), false);
                    }
                    ProofStep::End => return,
                }
                if let Some(peer) = Features::of_peer(&message) {
                    self.outbox.agree(Features::ALL.agreed(peer));
                }
                CallInput::Message { connection, header, message }
            }
            FrameEvent::Body => CallInput::Body { connection },
            FrameEvent::Progress => CallInput::Progress { connection },
        });
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        lock(&self.core.shared.session).with_body(self.connection, receive)
    }
}

impl ConnectionSide for ClientSide<'_> {
    fn flush(&mut self, stream: &Stream) -> io::Result<bool> {
        Ok(self.outbox.flush(stream)?.is_left)
    }

    fn phase(&self) -> ConnectionPhase {
        match self.outbox.phase() {
            // A client reads also while it has much to send: two full sockets would wait for each
            // other.
            ConnectionPhase::WriteOnly => ConnectionPhase::Open,
            phase => phase,
        }
    }

    fn changed(&self) -> &Notify {
        self.outbox.changed()
    }
}

/// The reply to a command. Dropping it cancels the command.
#[derive(Debug)]
pub(crate) struct ReplyFuture {
    core: ClientCore,
    op: CallOp,
    receiver: oneshot::Receiver<Result<CallReply, ServiceError>>,
    /// The operation of a function, as in "cannot call \"add\"".
    doing: Option<String>,
    _open: OpenOperation,
}

impl Future for ReplyFuture {
    type Output = Result<CallReply, ServiceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let reply = std::task::ready!(Pin::new(&mut self.receiver).poll(context));
        Poll::Ready(reply.unwrap_or_else(|_| {
            let doing = self.doing.take().unwrap_or_else(|| "go on".to_owned());
            let home = &self.core.shared.home;
            Err(match &self.core.outer {
                _ if home.is_elsewhere() => ServiceError::Forked { doing, parent: home.id() },
                Some(outer) if outer.is_over() => ServiceError::Cancelled { doing },
                _ => ServiceError::Ended { doing },
            })
        }))
    }
}

impl Drop for ReplyFuture {
    fn drop(&mut self) {
        if let Some(outer) = &self.core.outer {
            outer.ended(self.op);
        }
        self.core.cancel(self.op);
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::protocol::message::CallInputs;

    use super::*;

    #[test]
    fn a_call_of_a_client_that_has_ended_takes_no_number() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let session = CallSession::new(Incarnation(1), TaskId::new("client", 0), 1 << 20);
        let cluster = ClusterSpec::default();
        let filters = DeviceFilters::default();
        let handle = runtime.handle().clone();
        let core = ClientCore::new(session, cluster, filters, None, handle, Arc::default(), None);
        let link = core.link_of_address("127.0.0.1:1");
        core.end();
        let order = CallOrder {
            function: "f".to_owned(),
            device: String::new(),
            any_device: false,
            depth: 0,
            retain: false,
            scheduled: None,
            ends_with_connection: false,
            inputs: CallInputs::default(),
            values: Vec::new(),
        };
        let (call, reply) = core.call(link, order, None);
        assert!(matches!(runtime.block_on(reply), Err(ServiceError::Ended { .. })));
        // A number that was taken and never answered would hold the watermark of the calls down.
        assert_eq!((call, lock(&core.shared.session).number_call()), (0, 1));
    }
}
