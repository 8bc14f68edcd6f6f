//! Accepts connections: reads each peer's hello under one absolute deadline, and hands the peer to
//! whom it is for. A connection without a hello costs nobody else anything, and a silent one keeps
//! no other out.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pushpull_common::access::{AccessEvent, DeniedPeer, Principal};
use pushpull_common::error::Chain;
use pushpull_common::ids::{RequestId, TaskId};
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{Hello, Refused, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{
    BodyStamp, Envelope, FrameReader, Header, Message, ProtocolError, Refusal, encode,
};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Notify;

use crate::auth::everywhere::in_effect;
use crate::auth::failures::AuthFailures;
use crate::auth::gate::{NotProven, prove};
use crate::auth::places::NoPlace;
use crate::auth::{Credentials, ProvenPeer};
use crate::endpoints::{Endpoint, Endpoints};
use crate::open_files::{is_out_of_descriptors, open_files_limit};
#[cfg(feature = "tls")]
use crate::tls::HandshakeError;
use crate::waiting::{PeerHost, WaitingConnections};
use crate::{DetachedStream, FrameStream, Stream};

/// How long an evicted connection may still complete its hello, which may have arrived without
/// having been read yet.
const EVICTION_GRACE: Duration = Duration::from_millis(1);

/// The pause after a failed accept. Retrying at once would take time from the connections whose end
/// frees the missing resource; new peers wait in the backlog.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(50);

/// The shortest time between two reports of principals without a free place.
const FULL_INTERVAL: Duration = Duration::from_secs(10);

/// The time between two looks at the files of the credentials.
const CREDENTIALS_INTERVAL: Duration = Duration::from_millis(250);

/// Time limit for the hello and the refusal of a peer that is refused for lack of descriptors.
/// No other peer is accepted meanwhile.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(200);

/// A peer that has said hello.
#[derive(Debug)]
pub struct ArrivedPeer {
    /// Its connection.
    pub stream: DetachedStream,
    /// The reader of its frames, which may have read further than the hello.
    pub reader: FrameReader,
    /// The header of the hello.
    pub header: Header,
    /// The hello.
    pub hello: Hello,
    /// Its first request, if [`PeerReceiver::wants_request`] has asked for it.
    pub request: Option<Message>,
    /// Where it is.
    pub origin: PeerOrigin,
    /// The proof of who it is; `None` if it was not asked.
    pub proven: Option<ProvenPeer>,
}

/// Why a connection has ended without a hello, other than by its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoHello {
    /// It was not complete in time.
    TimedOut,
    /// The connection made room for another.
    Evicted,
    /// Something else arrived.
    Faulted,
    /// The peer has not proved that it may connect.
    Denied,
}

/// The task that a peer wants to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimedTask {
    /// This one.
    One(TaskId),
    /// Whichever one of the job it is given.
    Any {
        /// The job.
        job: String,
    },
}

impl ClaimedTask {
    /// Returns a task of a job, or any of it without an index.
    pub fn of(job: &str, index: Option<u32>) -> ClaimedTask {
        match index {
            Some(index) => ClaimedTask::One(TaskId::new(job, index)),
            None => ClaimedTask::Any { job: job.to_owned() },
        }
    }

    /// Returns why a principal may not be this task in a role, if it may not.
    pub fn fault(&self, principal: &Principal, role: Role) -> Option<String> {
        let Principal { name, rights } = principal;
        match self {
            ClaimedTask::One(task) if !rights.permit(role, task) => {
                let task = task.to_string();
                Some(format!("{name} may not be {task:?}, which it asks to be"))
            }
            ClaimedTask::Any { job } if !rights.permit_every(role, job) => {
                Some(format!("{name} may not be every task of the job {job:?}, and asks to be any"))
            }
            _ => None,
        }
    }
}

/// Takes the peers that have said hello.
pub trait PeerReceiver {
    /// Returns whether a peer with this hello sends a request without having been answered. It
    /// counts as silent until that has arrived: it may be evicted, and the time limit of the hello
    /// holds for both.
    fn wants_request(&self, hello: &Hello) -> bool {
        let _ = hello;
        false
    }

    /// Returns the task that the first request of a peer claims. The gate denies the peer if its
    /// principal may not be that task.
    fn claimed_task(&self, hello: &Hello, request: &Message) -> Option<ClaimedTask> {
        let _ = (hello, request);
        None
    }

    /// Takes a peer. It counts as waiting until the future is done.
    fn take(&self, peer: ArrivedPeer) -> impl Future<Output = ()>;

    /// Handles the end of a connection without a hello.
    fn no_hello(&self, reason: NoHello) {
        let _ = reason;
    }

    /// Handles what the operator must know about who may connect: the first attempt of a host that
    /// was denied at once and further ones together, and files of credentials that cannot be used.
    fn access(&self, event: AccessEvent) {
        let _ = event;
    }

    /// Handles a failure to accept or to hand over a connection because no descriptor is left.
    fn out_of_descriptors(&self, error: &io::Error) {
        let _ = error;
    }
}

/// Takes the clients of functions that connect to another server, on any thread.
pub trait ServicePeers: Send + Sync {
    /// Takes a client. Does not block.
    fn take(&self, peer: ArrivedPeer);
}

/// The limits of connections that have not said hello.
#[derive(Clone, Copy, Debug)]
pub struct AcceptLimits {
    /// The longest time until the hello is complete.
    pub handshake_timeout: Duration,
    /// The most connections that wait.
    pub waiting_connections_max: usize,
}

/// Begins to accept connections, in tasks of the current `LocalSet`, until that ends. Those whom the
/// credentials let in reach the receiver.
pub fn accept<R: PeerReceiver + 'static>(
    endpoints: Endpoints,
    limits: AcceptLimits,
    credentials: Option<Credentials>,
    receiver: R,
) {
    let gate = Rc::new(AcceptGate {
        handshake_timeout: limits.handshake_timeout,
        credentials: in_effect(credentials.as_ref()),
        failures: RefCell::default(),
        full_reported: Cell::new(None),
        waiting: RefCell::new(WaitingConnections::new(limits.waiting_connections_max)),
        handed_over: Notify::new(),
        spare: RefCell::new(spare_descriptor()),
        receiver,
    });
    tokio::task::spawn_local(gate.clone().watch_credentials());
    for endpoint in endpoints.all {
        tokio::task::spawn_local(gate.clone().accept(endpoint));
    }
}

struct AcceptGate<R> {
    handshake_timeout: Duration,
    credentials: Option<Credentials>,
    failures: RefCell<AuthFailures<PeerHost>>,
    /// When a principal without a free place was last reported.
    full_reported: Cell<Option<Instant>>,
    /// The waiting connections, each with the notification that evicts it.
    waiting: RefCell<WaitingConnections<Rc<Notify>>>,
    /// Notified when a connection that has said hello stops waiting.
    handed_over: Notify,
    /// A descriptor that is given up to accept one more connection, which is refused.
    spare: RefCell<Option<File>>,
    receiver: R,
}

/// A peer that has said hello, before it is taken.
struct Greeting {
    frames: FrameStream,
    origin: PeerOrigin,
    header: Header,
    hello: Hello,
    proven: Option<ProvenPeer>,
    request: Option<Message>,
}

/// The reason why a peer was not greeted.
enum NoGreeting {
    /// It has closed the connection.
    Closed,
    /// Something else than a hello has arrived.
    Faulted,
    /// It has not proved that it may connect.
    Denied,
}

impl From<ReadError> for NoGreeting {
    fn from(error: ReadError) -> NoGreeting {
        match error {
            ReadError::Io(_) => NoGreeting::Closed,
            _ => NoGreeting::Faulted,
        }
    }
}

/// An entry in the list of waiting connections, removed when it is dropped.
struct WaitingConnection<R: PeerReceiver> {
    gate: Rc<AcceptGate<R>>,
    host: PeerHost,
    number: u64,
    evicted: Rc<Notify>,
    greeted: Cell<bool>,
}

impl<R: PeerReceiver> Drop for WaitingConnection<R> {
    fn drop(&mut self) {
        let mut waiting = self.gate.waiting.borrow_mut();
        match self.greeted.get() {
            true => {
                waiting.handed_over();
                self.gate.handed_over.notify_waiters();
            }
            false => waiting.closed(self.host, self.number),
        }
    }
}

impl<R> AcceptGate<R> {
    /// Returns whether a principal without a free place is to be reported now.
    fn may_report_full(&self, now: Instant) -> bool {
        let last = self.full_reported.get();
        let is_due = last.is_none_or(|last| now.duration_since(last) >= FULL_INTERVAL);
        if is_due {
            self.full_reported.set(Some(now));
        }
        is_due
    }
}

impl<R: PeerReceiver + 'static> AcceptGate<R> {
    /// Reports once each time that the files of the credentials have become unusable.
    async fn watch_credentials(self: Rc<Self>) {
        let Some(credentials) = &self.credentials else { return };
        let mut reported = None;
        loop {
            tokio::time::sleep(CREDENTIALS_INTERVAL).await;
            let problem = credentials.problem().map(|problem| Chain(&*problem).to_string());
            if let Some(cause) = problem.clone().filter(|_| problem != reported) {
                self.receiver.access(AccessEvent::Unusable { cause });
            }
            reported = problem;
        }
    }

    async fn accept(self: Rc<Self>, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Tcp(listener, _) => {
                let Ok(listener) = TcpListener::from_std(listener) else {
                    return;
                };
                loop {
                    self.wait_for_free_place().await;
                    match listener.accept().await {
                        Ok((stream, from)) => {
                            self.admit(Stream::tcp(stream), PeerHost::of(from.ip()))
                        }
                        Err(error) => {
                            let accept = async || Stream::tcp(listener.accept().await?.0);
                            self.back_off_after(&error, accept).await;
                        }
                    }
                }
            }
            Endpoint::Unix(listener, _file) => {
                let Ok(listener) = UnixListener::from_std(listener) else {
                    return;
                };
                loop {
                    self.wait_for_free_place().await;
                    match listener.accept().await {
                        Ok((stream, _)) => self.admit(Stream::unix(stream), PeerHost::Local),
                        Err(error) => {
                            let accept = async || Stream::unix(listener.accept().await?.0);
                            self.back_off_after(&error, accept).await;
                        }
                    }
                }
            }
        }
    }

    /// Waits for a free connection place: every place may belong to a peer that has said hello.
    /// New connections stay in the backlog.
    async fn wait_for_free_place(&self) {
        loop {
            let handed_over = self.handed_over.notified();
            if self.waiting.borrow().can_accept() {
                return;
            }
            handed_over.await;
        }
    }

    fn admit(self: &Rc<Self>, stream: io::Result<Stream>, host: PeerHost) {
        // Setting up a socket fails if the peer has closed it already, or for lack of descriptors.
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => return self.report(&error),
        };
        let evicted = Rc::new(Notify::new());
        let (number, oldest) = self.waiting.borrow_mut().arrive(host, evicted.clone());
        if let Some(oldest) = oldest {
            oldest.notify_one();
        }
        let connection = WaitingConnection {
            gate: self.clone(),
            host,
            number,
            evicted,
            greeted: Cell::new(false),
        };
        tokio::task::spawn_local(async move {
            let Some(greeting) = connection.greeting(stream).await else { return };
            let gate = &connection.gate;
            let Greeting { frames, origin, header, hello, proven, request } = greeting;
            let (stream, reader) = frames.into_parts();
            let stream = match stream.detach() {
                Ok(stream) => stream,
                Err(error) => return gate.report(&error),
            };
            let peer = ArrivedPeer { stream, reader, header, hello, request, origin, proven };
            gate.receiver.take(peer).await;
        });
    }

    /// Pauses after a failed accept. If the process or the system is out of descriptors, a silent
    /// connection is evicted first: if silent connections held all descriptors, no peer could
    /// connect before they time out. Without a silent one, the next peer is refused.
    async fn back_off_after(
        &self,
        error: &io::Error,
        accept: impl AsyncFnOnce() -> io::Result<Stream>,
    ) {
        if !is_out_of_descriptors(error) {
            return tokio::time::sleep(ACCEPT_BACK_OFF).await;
        }
        self.report(error);
        let evicted = self.waiting.borrow_mut().evict();
        match evicted {
            Some(evicted) => {
                evicted.notify_one();
                tokio::time::sleep(2 * EVICTION_GRACE).await;
            }
            None => {
                let spare = self.spare.borrow_mut().take();
                if spare.is_some() {
                    drop(spare);
                    // A peer that is slow to say hello learns nothing.
                    let _ = tokio::time::timeout(REFUSAL_TIMEOUT, refuse(accept)).await;
                }
                tokio::time::sleep(ACCEPT_BACK_OFF).await;
                let mut spare = self.spare.borrow_mut();
                *spare = spare.take().or_else(spare_descriptor);
            }
        }
    }

    /// Reports an error that says that no descriptor is left.
    fn report(&self, error: &io::Error) {
        if is_out_of_descriptors(error) {
            self.receiver.out_of_descriptors(error);
        }
    }
}

/// Opens a file for the sake of its descriptor.
fn spare_descriptor() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Accepts a peer and refuses it, because no descriptor is left.
async fn refuse(accept: impl AsyncFnOnce() -> io::Result<Stream>) -> Result<(), ReadError> {
    let mut frames = FrameStream::new(accept().await?, FrameReader::new());
    let (header, _) = read_hello(&mut frames).await?;
    let what = Detail::clipped("open files of the server (ulimit -n)");
    let refusal = Refusal::Busy { what, limit: open_files_limit().unwrap_or(u64::MAX) };
    Ok(send_refusal(&mut frames, header.request, refusal).await?)
}

async fn send_refusal(
    frames: &mut FrameStream,
    request: RequestId,
    refusal: Refusal,
) -> io::Result<()> {
    let envelope = Envelope { request, ..Envelope::default() };
    let mut frame = Vec::new();
    encode(&mut frame, &envelope, &Refused { refusal }.into(), BodyStamp::plain(0));
    frames.send(&frame).await
}

/// Returns where the peer is.
fn origin_of(stream: &Stream) -> PeerOrigin {
    match stream.addresses() {
        Ok(Some(addresses)) if !addresses.peer.ip().is_loopback() => PeerOrigin::Remote,
        Ok(Some(_)) | Err(_) => PeerOrigin::Loopback,
        Ok(None) => PeerOrigin::Unix { same_user: stream.is_same_user() },
    }
}

impl<R: PeerReceiver> WaitingConnection<R> {
    /// Reads the hello of this connection; `None` if it is invalid or does not arrive in time, or the
    /// peer may not connect.
    async fn greeting(&self, stream: Stream) -> Option<Greeting> {
        let gate = &self.gate;
        let mut greeting = std::pin::pin!(self.read(stream));
        // One deadline for the whole handshake, however slowly the bytes arrive.
        let deadline = tokio::time::timeout(gate.handshake_timeout, greeting.as_mut());
        let (outcome, reason) = tokio::select! {
            biased;
            outcome = deadline => (outcome, NoHello::TimedOut),
            () = self.evicted.notified() => {
                (tokio::time::timeout(EVICTION_GRACE, greeting).await, NoHello::Evicted)
            }
        };
        match outcome {
            Ok(Ok(greeting)) => {
                self.greet();
                return Some(greeting);
            }
            Ok(Err(NoGreeting::Closed)) => {}
            Ok(Err(NoGreeting::Faulted)) => gate.receiver.no_hello(NoHello::Faulted),
            Ok(Err(NoGreeting::Denied)) => gate.receiver.no_hello(NoHello::Denied),
            Err(_) => gate.receiver.no_hello(reason),
        }
        None
    }

    async fn read(&self, stream: Stream) -> Result<Greeting, NoGreeting> {
        let gate = &self.gate;
        let origin = origin_of(&stream);
        let stream = self.secure(stream).await?;
        let mut frames = FrameStream::new(stream, FrameReader::new());
        let (header, mut hello) = match read_hello(&mut frames).await {
            Ok(greeting) => greeting,
            Err(ReadError::Protocol(ProtocolError::Magic { found })) if is_tls(found) => {
                tell(&mut frames, RequestId(0), "this server does not speak TLS").await;
                return Err(NoGreeting::Faulted);
            }
            Err(error) => return Err(error.into()),
        };
        let credentials = gate.credentials.as_ref();
        let proven = match prove(credentials, &mut frames, origin, &header, &mut hello).await {
            Ok(proven) => proven,
            Err(NotProven::Read(error)) => return Err(error.into()),
            Err(NotProven::Full(NoPlace { principal, limit })) => {
                if gate.may_report_full(Instant::now()) {
                    gate.receiver.access(AccessEvent::Full { principal, limit });
                }
                let what = Detail::clipped("connections of this access token or certificate");
                let refusal = Refusal::Busy { what, limit: limit.into() };
                // It may have closed the connection.
                let _ = send_refusal(&mut frames, header.request, refusal).await;
                return Err(NoGreeting::Closed);
            }
            Err(NotProven::Denied(cause)) => {
                return Err(self.deny(&mut frames, &header, &hello, cause).await);
            }
        };
        let mut request = None;
        if gate.receiver.wants_request(&hello) {
            frames.open();
            let message = frames.next().await?.1;
            if let Some(proven) = &proven
                && let Some(claimed) = gate.receiver.claimed_task(&hello, &message)
                && let Some(cause) = claimed.fault(&proven.principal, hello.role)
            {
                return Err(self.deny(&mut frames, &header, &hello, cause).await);
            }
            request = Some(message);
        }
        Ok(Greeting { frames, origin, header, hello, proven, request })
    }

    /// Refuses a peer. It is told after a delay, which grows with the failures of its host, and not
    /// why.
    async fn deny(
        &self,
        frames: &mut FrameStream,
        header: &Header,
        hello: &Hello,
        cause: String,
    ) -> NoGreeting {
        let task = TaskId::new(hello.job.as_str(), hello.task);
        self.count_failure(Some((hello.role, task)), cause).await;
        // It may have closed the connection.
        let _ = send_refusal(frames, header.request, Refusal::Denied {}).await;
        NoGreeting::Denied
    }

    /// Reports a peer that has not proved who it is, and waits for the time until it may be told.
    async fn count_failure(&self, claim: Option<(Role, TaskId)>, cause: String) {
        let failed = self.gate.failures.borrow_mut().failed(Instant::now(), self.host);
        if let Some(attempts) = failed.report {
            let host = self.host.to_string();
            let denied = DeniedPeer::new(host, claim, cause, attempts);
            self.gate.receiver.access(AccessEvent::Denied(denied));
        }
        tokio::time::sleep(failed.delay).await;
    }

    /// Puts TLS over a TCP connection, if this server has a certificate.
    #[cfg(feature = "tls")]
    async fn secure(&self, stream: Stream) -> Result<Stream, NoGreeting> {
        let current = self.gate.credentials.as_ref().map(Credentials::fresh);
        let server = current.and_then(|current| current.tls.server.clone());
        let Some(server) = server.filter(|_| !stream.passes_descriptors()) else {
            return Ok(stream);
        };
        match server.accept(stream).await {
            Ok(stream) => Ok(stream),
            Err((stream, HandshakeError::Plain(request))) => {
                let mut frames = FrameStream::new(stream, FrameReader::new());
                tell(&mut frames, request, "this server speaks TLS only").await;
                Err(NoGreeting::Faulted)
            }
            Err((_, HandshakeError::Ended)) => Err(NoGreeting::Closed),
            Err((_, error @ HandshakeError::Failed(_))) => {
                self.count_failure(None, Chain(&error).to_string()).await;
                Err(NoGreeting::Denied)
            }
        }
    }

    #[cfg(not(feature = "tls"))]
    async fn secure(&self, stream: Stream) -> Result<Stream, NoGreeting> {
        Ok(stream)
    }

    /// Gives the connection a place among those that have said hello, even if it was evicted.
    fn greet(&self) {
        let silent = self.gate.waiting.borrow_mut().greet(self.host, self.number);
        if let Some(silent) = silent {
            silent.notify_one();
        }
        self.greeted.set(true);
    }
}

/// Returns whether the first bytes of a connection are the begin of a TLS handshake: a record of
/// type 22 and version 3.
fn is_tls(first: u32) -> bool {
    first.to_le_bytes().starts_with(&[22, 3])
}

/// Tells a peer that has not said hello what it has met.
async fn tell(frames: &mut FrameStream, request: RequestId, detail: &str) {
    let refusal = Refusal::Unsupported { kind: 1, detail: Detail::clipped(detail) };
    // It may have closed the connection.
    let _ = send_refusal(frames, request, refusal).await;
}

async fn read_hello(frames: &mut FrameStream) -> Result<(Header, Hello), ReadError> {
    match frames.next().await? {
        (header, Message::Hello(hello)) => Ok((header, hello)),
        (_, message) => {
            let found = message.name();
            let when = "before a hello";
            Err(ProtocolError::Unexpected { found, when }.into())
        }
    }
}
