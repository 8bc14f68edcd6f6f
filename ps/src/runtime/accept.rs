//! The accepting thread: it takes sockets, reads each peer's hello under one absolute deadline,
//! and hands the socket to the shard the peer wants. Nobody who has not said hello costs a shard
//! anything, and nobody who is silent keeps another out.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSliceMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{FrameReader, Header, Message, Poll, ProtocolError};
use pushpull_net::{PeerLocation, Stream};
use tokio::io::Interest;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::listener::Endpoint;
use super::shard_thread::{Arrived, Members};
use super::waiting::{Host, Waiting};
use crate::metrics::Counters;
use crate::shard::PeerOrigin;

/// How long a connection that is evicted has left to be found not silent: its hello may have come and
/// not have been looked at yet.
const LAST_LOOK: Duration = Duration::from_millis(1);

/// How long accepting rests after a failure: spinning would only take time from those whose connections
/// will free what is lacking, and the backlog keeps the peers.
const REST: Duration = Duration::from_millis(50);

/// What the accepting thread is given.
pub(super) struct Acceptor {
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) shards: Vec<mpsc::Sender<Arrived>>,
    pub(super) members: Vec<watch::Receiver<Members>>,
    pub(super) handshake_timeout: Duration,
    pub(super) waiting_connections_max: usize,
    /// What is counted of connections that belong to no shard.
    pub(super) counters: Arc<Counters>,
    pub(super) exit_when_done: Option<Duration>,
    pub(super) stop: CancellationToken,
}

/// Accepts until the server stops, on the thread it is called on.
pub(super) fn run(acceptor: Acceptor) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = LocalSet::new();
    let stop = acceptor.stop.clone();
    local.block_on(&runtime, async move {
        let gate = Rc::new(Gate {
            shards: acceptor.shards,
            handshake_timeout: acceptor.handshake_timeout,
            waiting: RefCell::new(Waiting::new(acceptor.waiting_connections_max)),
            taken: Notify::new(),
            counters: acceptor.counters,
        });
        for endpoint in acceptor.endpoints {
            tokio::task::spawn_local(gate.clone().accept(endpoint));
        }
        match acceptor.exit_when_done {
            None => stop.cancelled().await,
            Some(grace) => tokio::select! {
                () = stop.cancelled() => {}
                () = all_gone(acceptor.members, grace) => stop.cancel(),
            },
        }
    });
    Ok(())
}

/// Returns once somebody has joined, nobody is present, and that has been so for `grace`.
async fn all_gone(mut members: Vec<watch::Receiver<Members>>, grace: Duration) {
    loop {
        let now: Vec<Members> = members.iter_mut().map(|m| *m.borrow_and_update()).collect();
        let joined = now.iter().any(|&(joined, _)| joined > 0);
        let gone = joined && now.iter().all(|&(_, present)| present == 0);
        let changed = any_changed(&mut members);
        match gone {
            false => changed.await,
            true => match tokio::time::timeout(grace, changed).await {
                Ok(()) => {}
                Err(_) => return,
            },
        }
    }
}

/// Returns when any of these has changed.
async fn any_changed(members: &mut [watch::Receiver<Members>]) {
    let mut waits: Vec<_> = members.iter_mut().map(|member| Box::pin(member.changed())).collect();
    std::future::poll_fn(|context| {
        let ready = waits.iter_mut().any(|wait| wait.as_mut().poll(context).is_ready());
        if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

struct Gate {
    shards: Vec<mpsc::Sender<Arrived>>,
    handshake_timeout: Duration,
    /// With each, what tells it that it is evicted.
    waiting: RefCell<Waiting<Rc<Notify>>>,
    /// A shard has taken one of them.
    taken: Notify,
    counters: Arc<Counters>,
}

/// A connection's place among those that wait, for as long as it does.
struct ConnectionPlace {
    gate: Rc<Gate>,
    host: Host,
    number: u64,
    evicted: Rc<Notify>,
    greeted: Cell<bool>,
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut waiting = self.gate.waiting.borrow_mut();
        match self.greeted.get() {
            true => {
                waiting.taken();
                self.gate.taken.notify_waiters();
            }
            false => waiting.gone(self.host, self.number),
        }
    }
}

/// A hello, and the reader behind it.
type Greeting = (FrameReader, Header, Hello);

impl Gate {
    async fn accept(self: Rc<Self>, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Tcp(listener, _) => {
                let Ok(listener) = TcpListener::from_std(listener) else {
                    return;
                };
                loop {
                    self.slot().await;
                    match listener.accept().await {
                        Ok((stream, from)) => self.admit(Stream::tcp(stream), Host::of(from.ip())),
                        Err(error) => self.rest_after(&error).await,
                    }
                }
            }
            Endpoint::Unix(listener, _file) => {
                let Ok(listener) = UnixListener::from_std(listener) else {
                    return;
                };
                loop {
                    self.slot().await;
                    match listener.accept().await {
                        Ok((stream, _)) => self.admit(Stream::unix(stream), Host::Local),
                        Err(error) => self.rest_after(&error).await,
                    }
                }
            }
        }
    }

    /// Waits while all places are those of clients that have said hello. The backlog keeps the others.
    async fn slot(&self) {
        loop {
            let taken = self.taken.notified();
            if self.waiting.borrow().has_room() {
                return;
            }
            taken.await;
        }
    }

    fn admit(self: &Rc<Self>, stream: io::Result<Stream>, host: Host) {
        // A socket that cannot be prepared is a peer that has gone already.
        let Ok(stream) = stream else { return };
        let evicted = Rc::new(Notify::new());
        let (number, oldest) = self.waiting.borrow_mut().arrive(host, evicted.clone());
        if let Some(oldest) = oldest {
            oldest.notify_one();
        }
        let place = ConnectionPlace {
            gate: self.clone(),
            host,
            number,
            evicted,
            greeted: Cell::new(false),
        };
        tokio::task::spawn_local(async move {
            let Some((reader, header, hello)) = place.hello(&stream).await else { return };
            let gate = &place.gate;
            let origin = origin_of(&stream);
            let Ok(stream) = stream.detach() else { return };
            let shard = gate.shards.get(usize::from(hello.shard.shard)).or(gate.shards.first());
            if let Some(shard) = shard {
                // If the shard is gone the server is stopping, and the peer sees a closed socket.
                let _ = shard.send(Arrived { stream, reader, header, hello, origin }).await;
            }
        });
    }

    /// After a failed accept. Where descriptors are lacking, a silent connection gives its own up: if all
    /// were theirs, nobody could come before they time out.
    async fn rest_after(&self, error: &io::Error) {
        let lacking = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE]
            .map(|errno| errno.raw_os_error())
            .into_iter()
            .any(|errno| error.raw_os_error() == Some(errno));
        let evicted = if lacking { self.waiting.borrow_mut().evict() } else { None };
        match evicted {
            Some(evicted) => {
                evicted.notify_one();
                tokio::time::sleep(2 * LAST_LOOK).await;
            }
            None => tokio::time::sleep(REST).await,
        }
    }
}

/// Where the peer of a stream is, in the terms of the shard.
fn origin_of(stream: &Stream) -> PeerOrigin {
    match stream.peer_location() {
        PeerLocation::Remote => PeerOrigin::Remote,
        PeerLocation::Loopback => PeerOrigin::Loopback,
        PeerLocation::UnixSocket { same_user } => PeerOrigin::Unix { same_user },
    }
}

impl ConnectionPlace {
    /// The hello of this connection, unless it does not come in time or is none.
    async fn hello(&self, stream: &Stream) -> Option<Greeting> {
        let (gate, counters) = (&self.gate, &self.gate.counters);
        let mut hello = std::pin::pin!(read_hello(stream));
        // One deadline over the whole handshake, however the bytes drip.
        let deadline = tokio::time::timeout(gate.handshake_timeout, hello.as_mut());
        let (said, late) = tokio::select! {
            biased;
            said = deadline => (said, &counters.waiting_timed_out),
            () = self.evicted.notified() => {
                (tokio::time::timeout(LAST_LOOK, hello).await, &counters.waiting_evicted)
            }
        };
        match said {
            Ok(Ok(greeting)) => {
                // One that was evicted has no place any more.
                self.greeted.set(gate.waiting.borrow_mut().greet(self.host, self.number));
                return Some(greeting);
            }
            // It has gone by itself.
            Ok(Err(ReadError::Io(_))) => {}
            Ok(Err(_)) => counters.waiting_faulted.add(1),
            Err(_) => late.add(1),
        }
        None
    }
}

async fn read_hello(stream: &Stream) -> Result<Greeting, ReadError> {
    let mut reader = FrameReader::new();
    loop {
        let mut source = |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, drop);
        match reader.poll(&mut source)? {
            Poll::Frame(header, Message::Hello(hello)) => return Ok((reader, header, hello)),
            Poll::Frame(_, message) => {
                let found = message.name();
                let when = "before a hello";
                return Err(ProtocolError::Unexpected { found, when }.into());
            }
            Poll::Closed => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Poll::Pending => {
                stream.ready(Interest::READABLE).await?;
            }
        }
    }
}
