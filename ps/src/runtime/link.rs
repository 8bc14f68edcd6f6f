//! The stream under a connection: TCP or a Unix socket, with one face.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
#[cfg(target_os = "linux")]
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
#[cfg(target_os = "linux")]
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use pushpull_runtime::QuietUnixStream;
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

use crate::shard::Way;

/// A connected stream.
#[derive(Debug)]
pub(super) enum Link {
    Tcp(TcpStream),
    Unix(QuietUnixStream),
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

    /// Takes a Unix socket that is connected.
    pub(super) fn unix(stream: UnixStream) -> io::Result<Link> {
        QuietUnixStream::new(stream.into_std()?).map(Link::Unix)
    }

    /// How the peer has come.
    pub(super) fn way(&self) -> Way {
        match self {
            Link::Tcp(stream) => match stream.peer_addr() {
                Ok(peer) if !peer.ip().is_loopback() => Way::Remote,
                _ => Way::Loopback,
            },
            Link::Unix(stream) => Way::Unix { same_user: stream.is_of_same_user() },
        }
    }

    pub(super) fn detach(self) -> io::Result<Detached> {
        match self {
            Link::Tcp(stream) => stream.into_std().map(Detached::Tcp),
            Link::Unix(stream) => Ok(Detached::Unix(stream.into_inner())),
        }
    }

    pub(super) fn attach(detached: Detached) -> io::Result<Link> {
        match detached {
            Detached::Tcp(stream) => TcpStream::from_std(stream).map(Link::Tcp),
            Detached::Unix(stream) => QuietUnixStream::new(stream).map(Link::Unix),
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
            Link::Unix(stream) => stream.read(|mut stream| stream.read_vectored(slices)),
        }
    }

    /// As [`Link::try_write`]; these descriptors go with the first byte.
    #[cfg(target_os = "linux")]
    pub(super) fn try_send(
        &self,
        slices: &[IoSlice<'_>],
        descriptors: &[OwnedFd],
    ) -> io::Result<usize> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let Link::Unix(stream) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let rights = SendAncillaryMessage::ScmRights(&descriptors);
        let mut space = vec![MaybeUninit::uninit(); rights.size()];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(rights);
        stream.write(|stream| Ok(sendmsg(stream, slices, &mut control, SendFlags::NOSIGNAL)?))
    }

    /// The same where no memory is lent.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn try_send(&self, _: &[IoSlice<'_>], _: &[OwnedFd]) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Link::Tcp(stream) => stream.try_write_vectored(slices),
            Link::Unix(stream) => stream.write(|mut stream| stream.write_vectored(slices)),
        }
    }
}
