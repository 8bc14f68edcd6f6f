//! The stream under a connection: TCP or a Unix socket, with one face.

use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

/// A connected stream.
#[derive(Debug)]
pub(super) enum Link {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A stream on its way from the accepting thread to a shard's.
#[derive(Debug)]
pub(super) enum Detached {
    Tcp(std::net::TcpStream),
    Unix(std::os::unix::net::UnixStream),
}

impl Link {
    /// Prepares an accepted TCP stream.
    pub(super) fn tcp(stream: TcpStream) -> io::Result<Link> {
        stream.set_nodelay(true)?;
        // A peer whose machine is gone is found out within two minutes, however idle it was.
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(60))
            .with_interval(Duration::from_secs(10));
        socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(Link::Tcp(stream))
    }

    /// Whether the peer may be on another machine.
    pub(super) fn is_remote(&self) -> bool {
        match self {
            Link::Tcp(stream) => stream.peer_addr().is_ok_and(|peer| !peer.ip().is_loopback()),
            Link::Unix(_) => false,
        }
    }

    pub(super) fn detach(self) -> io::Result<Detached> {
        match self {
            Link::Tcp(stream) => stream.into_std().map(Detached::Tcp),
            Link::Unix(stream) => stream.into_std().map(Detached::Unix),
        }
    }

    pub(super) fn attach(detached: Detached) -> io::Result<Link> {
        match detached {
            Detached::Tcp(stream) => TcpStream::from_std(stream).map(Link::Tcp),
            Detached::Unix(stream) => UnixStream::from_std(stream).map(Link::Unix),
        }
    }

    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Link::Tcp(stream) => stream.ready(interest).await,
            Link::Unix(stream) => stream.ready(interest).await,
        }
    }

    pub(super) fn try_read(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Link::Tcp(stream) => stream.try_read_vectored(slices),
            Link::Unix(stream) => stream.try_read_vectored(slices),
        }
    }

    pub(super) fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Link::Tcp(stream) => stream.try_write_vectored(slices),
            Link::Unix(stream) => stream.try_write_vectored(slices),
        }
    }
}
