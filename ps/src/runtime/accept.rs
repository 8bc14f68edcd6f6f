//! The accepting thread: it accepts sockets, reads each peer's hello under one absolute deadline,
//! and hands the socket to the shard that the hello names. A connection without a hello costs a
//! shard nothing, and a silent one keeps no other out.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{FrameReader, Header, Message, ProtocolError};
use pushpull_net::{FrameStream, Stream};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::handle::Ending;
use super::listener::Endpoint;
use super::shard_thread::{ArrivedPeer, Members};
use super::waiting::{PeerHost, WaitingConnections};
use crate::metrics::Counters;
use crate::shard::PeerOrigin;

/// How long an evicted connection may still complete its hello, which may have arrived without
/// having been read yet.
const EVICTION_GRACE: Duration = Duration::from_millis(1);

/// The pause after a failed accept. Retrying at once would take time from the connections whose end
/// frees the missing resource; new peers wait in the backlog.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(50);

/// The configuration and channels of the accepting thread.
pub(super) struct Acceptor {
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) shards: Vec<mpsc::Sender<ArrivedPeer>>,
    pub(super) members: Vec<watch::Receiver<Members>>,
    pub(super) handshake_timeout: Duration,
    pub(super) waiting_connections_max: usize,
    /// Counts connections that belong to no shard.
    pub(super) counters: Arc<Counters>,
    pub(super) exit_when_done: Option<Duration>,
    pub(super) ending: Arc<Ending>,
    pub(super) stop: CancellationToken,
}

/// Accepts connections on the calling thread until the server stops.
pub(super) fn run(acceptor: Acceptor) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = LocalSet::new();
    let stop = acceptor.stop.clone();
    local.block_on(&runtime, async move {
        let gate = Rc::new(AcceptGate {
            shards: acceptor.shards,
            handshake_timeout: acceptor.handshake_timeout,
            waiting: RefCell::new(WaitingConnections::new(acceptor.waiting_connections_max)),
            handed_over: Notify::new(),
            counters: acceptor.counters,
        });
        for endpoint in acceptor.endpoints {
            tokio::task::spawn_local(gate.clone().accept(endpoint));
        }
        let members = acceptor.members.clone();
        let all_left = async {
            match acceptor.exit_when_done {
                Some(grace) => all_members_left(members, grace).await,
                None => std::future::pending().await,
            }
        };
        let ending = &acceptor.ending;
        let finished = async {
            ending.finish.cancelled().await;
            let grace = ending.grace.get().copied().unwrap_or_default();
            // The time limit bounds the wait for workers that do not leave.
            let _ = tokio::time::timeout(grace, nobody_is_present(acceptor.members)).await;
            ending.is_final.store(true, Ordering::Relaxed);
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = all_left => stop.cancel(),
            () = finished => stop.cancel(),
        }
    });
    Ok(())
}

/// Returns once a member has joined and none has been present for `grace`.
async fn all_members_left(mut members: Vec<watch::Receiver<Members>>, grace: Duration) {
    loop {
        let now: Vec<Members> = members.iter_mut().map(|m| *m.borrow_and_update()).collect();
        let joined = now.iter().any(|&(joined, _)| joined > 0);
        let all_left = joined && now.iter().all(|&(_, present)| present == 0);
        let changed = any_changed(&mut members);
        match all_left {
            false => changed.await,
            true => match tokio::time::timeout(grace, changed).await {
                Ok(()) => {}
                Err(_) => return,
            },
        }
    }
}

/// Returns once no member is present.
async fn nobody_is_present(mut members: Vec<watch::Receiver<Members>>) {
    while members.iter_mut().any(|member| member.borrow_and_update().1 > 0) {
        any_changed(&mut members).await;
    }
}

/// Returns when any of the receivers has a new value.
async fn any_changed(members: &mut [watch::Receiver<Members>]) {
    let mut waits: Vec<_> = members.iter_mut().map(|member| Box::pin(member.changed())).collect();
    std::future::poll_fn(|context| {
        let ready = waits.iter_mut().any(|wait| wait.as_mut().poll(context).is_ready());
        if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

struct AcceptGate {
    shards: Vec<mpsc::Sender<ArrivedPeer>>,
    handshake_timeout: Duration,
    /// The waiting connections, each with the notification that evicts it.
    waiting: RefCell<WaitingConnections<Rc<Notify>>>,
    /// Notified when a connection that has said hello stops waiting.
    handed_over: Notify,
    counters: Arc<Counters>,
}

/// An entry in the list of waiting connections, removed when it is dropped.
struct WaitingConnection {
    gate: Rc<AcceptGate>,
    host: PeerHost,
    number: u64,
    evicted: Rc<Notify>,
    greeted: Cell<bool>,
}

impl Drop for WaitingConnection {
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

impl AcceptGate {
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
                        Err(error) => self.back_off_after(&error).await,
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
                        Err(error) => self.back_off_after(&error).await,
                    }
                }
            }
        }
    }

    /// Waits for a free connection place: every place may belong to a client that has said hello.
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
        // Setting up a socket fails only if the peer has closed it already.
        let Ok(stream) = stream else { return };
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
            let mut frames = FrameStream::new(stream, FrameReader::new());
            let Some((header, hello)) = connection.hello(&mut frames).await else { return };
            let gate = &connection.gate;
            let (stream, reader) = frames.into_parts();
            let origin = origin_of(&stream);
            let Ok(stream) = stream.detach() else { return };
            let shard = gate.shards.get(usize::from(hello.shard.shard)).or(gate.shards.first());
            if let Some(shard) = shard {
                // If the shard has ended, the server is stopping, and the peer sees a closed
                // socket.
                let _ = shard.send(ArrivedPeer { stream, reader, header, hello, origin }).await;
            }
        });
    }

    /// Pauses after a failed accept. If the process or the system is out of descriptors, a silent
    /// connection is evicted first: if silent connections held all descriptors, no peer could
    /// connect before they time out.
    async fn back_off_after(&self, error: &io::Error) {
        let is_out_of_descriptors = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE]
            .map(|errno| errno.raw_os_error())
            .into_iter()
            .any(|errno| error.raw_os_error() == Some(errno));
        let evicted = if is_out_of_descriptors { self.waiting.borrow_mut().evict() } else { None };
        match evicted {
            Some(evicted) => {
                evicted.notify_one();
                tokio::time::sleep(2 * EVICTION_GRACE).await;
            }
            None => tokio::time::sleep(ACCEPT_BACK_OFF).await,
        }
    }
}

/// Returns the peer's location in the terms of the shard.
fn origin_of(stream: &Stream) -> PeerOrigin {
    match stream {
        Stream::Tcp(tcp) => match tcp.peer_addr() {
            Ok(peer) if !peer.ip().is_loopback() => PeerOrigin::Remote,
            _ => PeerOrigin::Loopback,
        },
        Stream::Unix(_) => PeerOrigin::Unix { same_user: stream.is_same_user() },
    }
}

impl WaitingConnection {
    /// Reads the hello of this connection; `None` if it is invalid or does not arrive in time.
    async fn hello(&self, frames: &mut FrameStream) -> Option<(Header, Hello)> {
        let (gate, counters) = (&self.gate, &self.gate.counters);
        let mut hello = std::pin::pin!(read_hello(frames));
        // One deadline for the whole handshake, however slowly the bytes arrive.
        let deadline = tokio::time::timeout(gate.handshake_timeout, hello.as_mut());
        let (outcome, miss_counter) = tokio::select! {
            biased;
            outcome = deadline => (outcome, &counters.waiting_timed_out),
            () = self.evicted.notified() => {
                (tokio::time::timeout(EVICTION_GRACE, hello).await, &counters.waiting_evicted)
            }
        };
        match outcome {
            Ok(Ok(hello)) => {
                // An evicted connection does not count as waiting any more.
                self.greeted.set(gate.waiting.borrow_mut().greet(self.host, self.number));
                return Some(hello);
            }
            // The peer closed the connection.
            Ok(Err(ReadError::Io(_))) => {}
            Ok(Err(_)) => counters.waiting_faulted.add(1),
            Err(_) => miss_counter.add(1),
        }
        None
    }
}

async fn read_hello(frames: &mut FrameStream) -> Result<(Header, Hello), ReadError> {
    match frames.next().await? {
        (header, Message::Hello(hello)) => Ok((header, hello)),
        (_, message) => {
            let (found, when) = (message.name(), "before a hello");
            Err(ProtocolError::Unexpected { found, when }.into())
        }
    }
}
