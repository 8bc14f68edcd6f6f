//! The accepting thread: it takes sockets, reads each peer's hello under one absolute deadline,
//! and hands the socket to the shard the peer wants. Nobody who has not said hello costs a shard
//! anything.

use std::cell::Cell;
use std::io::{self, IoSliceMut};
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::Hello;
use pushpull_common::protocol::{FrameReader, Header, Message, Poll, ProtocolError};
use tokio::io::Interest;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::link::Link;
use super::listener::Endpoint;
use super::shard_thread::{Arrived, Members};

/// What the accepting thread is given.
pub(super) struct Acceptor {
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) shards: Vec<mpsc::Sender<Arrived>>,
    pub(super) members: Vec<watch::Receiver<Members>>,
    pub(super) handshake_timeout: Duration,
    pub(super) half_open_max: usize,
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
            half_open: Cell::new(0),
            half_open_max: acceptor.half_open_max,
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
    half_open: Cell<usize>,
    half_open_max: usize,
}

/// Counts a peer that has not said hello for as long as it has not.
struct HalfOpen(Rc<Gate>);

impl Drop for HalfOpen {
    fn drop(&mut self) {
        self.0.half_open.set(self.0.half_open.get() - 1);
    }
}

impl Gate {
    async fn accept(self: Rc<Self>, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Tcp(listener, _) => {
                let Ok(listener) = TcpListener::from_std(listener) else {
                    return;
                };
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => self.admit(Link::tcp(stream)),
                        Err(error) => rest_after(error).await,
                    }
                }
            }
            Endpoint::Unix(listener, _file) => {
                let Ok(listener) = UnixListener::from_std(listener) else {
                    return;
                };
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => self.admit(Link::unix(stream)),
                        Err(error) => rest_after(error).await,
                    }
                }
            }
        }
    }

    fn admit(self: &Rc<Self>, link: io::Result<Link>) {
        // A socket that cannot be prepared is a peer that has gone already.
        let Ok(link) = link else { return };
        if self.half_open.get() >= self.half_open_max {
            return;
        }
        self.half_open.set(self.half_open.get() + 1);
        let counted = HalfOpen(self.clone());
        tokio::task::spawn_local(async move {
            let gate = counted.0.clone();
            // One deadline over the whole handshake, however the bytes drip.
            let hello = tokio::time::timeout(gate.handshake_timeout, read_hello(&link)).await;
            let Ok(Ok((reader, header, hello))) = hello else {
                return;
            };
            let way = link.way();
            let Ok(stream) = link.detach() else { return };
            let shard = gate.shards.get(usize::from(hello.shard.shard)).or(gate.shards.first());
            if let Some(shard) = shard {
                // If the shard is gone the server is stopping, and the peer sees a closed socket.
                let _ = shard.send(Arrived { stream, reader, header, hello, way }).await;
            }
        });
    }
}

async fn read_hello(link: &Link) -> Result<(FrameReader, Header, Hello), ReadError> {
    let mut reader = FrameReader::new();
    loop {
        let mut source = |slices: &mut [IoSliceMut<'_>]| link.try_read(slices);
        match reader.poll(&mut source)? {
            Poll::Frame(header, Message::Hello(hello)) => return Ok((reader, header, hello)),
            Poll::Frame(_, message) => {
                let found = message.name();
                let when = "before a hello";
                return Err(ProtocolError::Unexpected { found, when }.into());
            }
            Poll::Closed => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Poll::Pending => {
                link.ready(Interest::READABLE).await?;
            }
        }
    }
}

/// After a failed accept: out of descriptors, say. The backlog keeps the peers; spinning would
/// only take time from those whose connections will free some.
async fn rest_after(_error: io::Error) {
    tokio::time::sleep(Duration::from_millis(50)).await;
}
