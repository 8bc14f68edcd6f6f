//! [`ClusterRendezvous`]: a registry of tasks with its connections.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::access::AccessEvent;
use pushpull_common::cluster::ClusterSize;
use pushpull_common::protocol::message::{Hello, Refused, RegisterTask, Role, TaskKey};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{BodyStamp, Envelope, Message, Refusal, encode};
use pushpull_common::task_registry::{
    RegistryInput, RegistryOutput, RendezvousEvent, TaskRegistry,
};
use tokio::sync::{Notify, mpsc};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::MissedTickBehavior;

use crate::auth::{Credentials, ProvenPeer};
use crate::{
    AcceptLimits, ArrivedPeer, ClaimedTask, Endpoints, FrameStream, ListenError, PeerReceiver,
    Stream, accept,
};

/// A rendezvous at which the tasks of a cluster learn each other's addresses.
///
/// Every task registers its job, its index or stable id, and its address. Once all have, each is told
/// the whole cluster and its own index. A task that is started again gets its index back, and the
/// tasks that ask later its new address. At most [`ClusterRendezvous::CONNECTIONS_MAX`] tasks are
/// connected at a time, and a peer that does not register is given up. A task whose machine is lost
/// counts as registered until its connection is given up, within three minutes.
#[derive(Debug)]
pub struct ClusterRendezvous {
    endpoints: Endpoints,
    size: ClusterSize,
    credentials: Option<Credentials>,
}

impl ClusterRendezvous {
    /// The largest number of connections: one for each task, and one for its successor.
    pub const CONNECTIONS_MAX: usize = 2 * ClusterSize::TASKS_MAX as usize;

    /// Listens at `host:port`. Port 0 takes a free one. `insecure` allows an address that other
    /// machines can reach: tasks are not authenticated.
    ///
    /// # Errors
    /// Every [`ListenError`].
    pub fn listen(
        address: &str,
        size: ClusterSize,
        insecure: bool,
    ) -> Result<ClusterRendezvous, ListenError> {
        let endpoints = Endpoints::bind(address, insecure)?;
        Ok(ClusterRendezvous { endpoints, size, credentials: None })
    }

    /// Lets in the tasks whom these credentials admit. Default: every task.
    #[must_use]
    pub fn credentials(self, credentials: Option<Credentials>) -> ClusterRendezvous {
        ClusterRendezvous { credentials, ..self }
    }

    /// Returns the address, with the real port.
    pub fn address(&self) -> String {
        self.endpoints.address()
    }

    /// Serves until all tasks have registered and their connections have ended. Reports events, that
    /// of missing tasks every two seconds.
    ///
    /// # Panics
    /// Outside of a Tokio runtime with sockets and time.
    pub async fn serve(self, on_event: impl FnMut(RendezvousEvent) + 'static) {
        let server = Rc::new(RegistryServer {
            registry: RefCell::new(TaskRegistry::new(self.size)),
            connections: RefCell::default(),
            next_connection: Cell::new(1),
            closed: Notify::new(),
            on_event: RefCell::new(Box::new(on_event)),
        });
        let serve = async {
            accept(self.endpoints, ACCEPT_LIMITS, self.credentials, Door(server.clone()));
            let mut reports = tokio::time::interval(REPORT_INTERVAL);
            reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
            reports.tick().await;
            while !server.registry.borrow().is_done() {
                tokio::select! {
                    _ = reports.tick() => server.handle(RegistryInput::Report),
                    () = server.closed.notified() => {}
                }
            }
        };
        LocalSet::new().run_until(serve).await;
    }
}

/// The interval at which tasks that wait are told whom they wait for.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// The time that a task may take to read what is sent to it.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// The most messages that wait for a task to read them.
const UNSENT_MAX: usize = 8;

/// The limits of connections that have not registered.
const ACCEPT_LIMITS: AcceptLimits =
    AcceptLimits { handshake_timeout: Duration::from_secs(10), waiting_connections_max: 256 };

/// A frame to send.
struct UnsentFrame {
    head: Vec<u8>,
    body: Arc<str>,
}

struct RegistryServer {
    registry: RefCell<TaskRegistry>,
    connections: RefCell<HashMap<u64, mpsc::Sender<UnsentFrame>>>,
    next_connection: Cell<u64>,
    /// Notified when a connection has ended.
    closed: Notify,
    on_event: RefCell<Box<dyn FnMut(RendezvousEvent)>>,
}

impl RegistryServer {
    /// Serves a task until its connection ends.
    async fn attend(
        self: Rc<Self>,
        frames: FrameStream,
        hello: Hello,
        task: RegisterTask,
        proven: Option<ProvenPeer>,
    ) {
        let connection = self.next_connection.replace(self.next_connection.get() + 1);
        let (sender, unsent) = mpsc::channel(UNSENT_MAX);
        self.connections.borrow_mut().insert(connection, sender);
        self.handle(RegistryInput::Register { connection, hello: Box::new(hello), task });
        tokio::select! {
            () = send_until_closed(frames, unsent) => {}
            event = revoked(proven.as_ref()) => self.access(event),
        }
        self.connections.borrow_mut().remove(&connection);
        self.handle(RegistryInput::Closed { connection });
        self.closed.notify_one();
    }

    fn access(&self, event: AccessEvent) {
        (self.on_event.borrow_mut())(RendezvousEvent::Access(event));
    }

    fn handle(&self, input: RegistryInput) {
        let mut registry = self.registry.borrow_mut();
        registry.handle(input);
        while let Some(output) = registry.poll_output() {
            let mut connections = self.connections.borrow_mut();
            match output {
                RegistryOutput::Send { connection, message, body } => {
                    let mut head = Vec::new();
                    let stamp = BodyStamp::plain(body.len() as u64);
                    encode(&mut head, &Envelope::default(), &message, stamp);
                    let sender = connections.get(&connection);
                    let frame = UnsentFrame { head, body };
                    if sender.is_some_and(|sender| sender.try_send(frame).is_err()) {
                        // It does not read. Its connection ends, and the registry is told so.
                        connections.remove(&connection);
                    }
                }
                RegistryOutput::Close { connection } => _ = connections.remove(&connection),
                RegistryOutput::Event(event) => {
                    drop(connections);
                    (self.on_event.borrow_mut())(event);
                }
            }
        }
    }
}

/// Sends frames until one of these: the task closes the connection or says more, it does not read, or
/// the sender of the frames is dropped.
async fn send_until_closed(mut frames: FrameStream, mut unsent: mpsc::Receiver<UnsentFrame>) {
    loop {
        tokio::select! {
            _ = frames.next() => return,
            frame = unsent.recv() => {
                let Some(UnsentFrame { head, body }) = frame else { return };
                let send = async {
                    frames.send(&head).await?;
                    frames.send(body.as_bytes()).await
                };
                if !matches!(tokio::time::timeout(SEND_TIMEOUT, send).await, Ok(Ok(()))) {
                    return;
                }
            }
        }
    }
}

/// Returns once what has let a task in no longer does. A task that was not asked who it is stays.
async fn revoked(proven: Option<&ProvenPeer>) -> AccessEvent {
    match proven {
        Some(proven) => proven.revoked().await,
        None => std::future::pending().await,
    }
}

/// Takes the peers that have said hello.
struct Door(Rc<RegistryServer>);

impl PeerReceiver for Door {
    /// A task sends its request together with its hello.
    fn wants_request(&self, hello: &Hello) -> bool {
        hello.role == (Role::Task {})
    }

    /// A task with an id may be given any index.
    fn claimed_task(&self, _: &Hello, request: &Message) -> Option<ClaimedTask> {
        let Message::RegisterTask(task) = request else { return None };
        let index = match task.key {
            TaskKey::Index { index } => Some(index),
            TaskKey::Id { .. } => None,
        };
        Some(ClaimedTask::of(task.job.as_str(), index))
    }

    fn access(&self, event: AccessEvent) {
        self.0.access(event);
    }

    async fn take(&self, peer: ArrivedPeer) {
        let ArrivedPeer { stream, reader, header, hello, request, proven, .. } = peer;
        let Ok(stream) = Stream::attach(stream) else { return };
        let mut frames = FrameStream::new(stream, reader);
        let limit = ClusterRendezvous::CONNECTIONS_MAX;
        let refusal = match request {
            None => Refusal::Role { role: hello.role.code(), kind: header.kind },
            Some(_) if self.0.connections.borrow().len() >= limit => {
                let what = Detail::clipped("connections to the rendezvous");
                Refusal::Busy { what, limit: limit as u64 }
            }
            Some(Message::RegisterTask(task)) => {
                spawn_local(self.0.clone().attend(frames, hello, task, proven));
                return;
            }
            Some(other) => {
                let detail = Detail::clipped(format!("a rendezvous takes no {}", other.name()));
                Refusal::Unsupported { kind: other.kind(), detail }
            }
        };
        spawn_local(async move {
            let mut frame = Vec::new();
            let refused = Refused { refusal }.into();
            encode(&mut frame, &Envelope::default(), &refused, BodyStamp::NONE);
            // A peer that does not read it sees the end of the connection.
            _ = tokio::time::timeout(SEND_TIMEOUT, frames.send(&frame)).await;
        });
    }
}
