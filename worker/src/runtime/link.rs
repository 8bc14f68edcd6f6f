//! The stream to a shard: TCP or a Unix socket, with one face.

#[cfg(not(target_os = "linux"))]
use std::io::Read;
use std::io::{self, IoSlice, IoSliceMut, Write};
#[cfg(target_os = "linux")]
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use pushpull_runtime::QuietUnixStream;
use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

/// A connected stream.
#[derive(Debug)]
pub(super) enum Link {
    Tcp(TcpStream),
    Unix(QuietUnixStream),
}

impl Link {
    /// Connects to `host:port` or `unix:/path`.
    pub(super) async fn connect(address: &str) -> io::Result<Link> {
        if let Some(path) = address.strip_prefix("unix:") {
            return QuietUnixStream::new(UnixStream::connect(path).await?.into_std()?)
                .map(Link::Unix);
        }
        // A name is looked up anew each time: a server may come back somewhere else.
        let stream = TcpStream::connect(address).await?;
        let stream = not_itself(stream)?;
        stream.set_nodelay(true)?;
        Ok(Link::Tcp(stream))
    }

    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Link::Tcp(stream) => stream.ready(interest).await,
            Link::Unix(stream) => stream.ready(interest).await,
        }
    }

    /// Whether descriptors can come over it.
    pub(super) fn is_same_host(&self) -> bool {
        cfg!(target_os = "linux") && matches!(self, Link::Unix(_))
    }

    /// Reads what is there, and hands over the descriptors that have come with it.
    pub(super) fn try_read(
        &self,
        slices: &mut [IoSliceMut<'_>],
        take: impl FnMut(OwnedFd),
    ) -> io::Result<usize> {
        match self {
            Link::Tcp(stream) => stream.try_read_vectored(slices),
            Link::Unix(stream) => receive(stream, slices, take),
        }
    }

    pub(super) fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Link::Tcp(stream) => stream.try_write_vectored(slices),
            Link::Unix(stream) => stream.write(|mut stream| stream.write_vectored(slices)),
        }
    }
}

/// Descriptors that one read takes; the system closes what there is no room for.
#[cfg(target_os = "linux")]
const DESCRIPTORS_MAX: usize = 4;

#[cfg(target_os = "linux")]
fn receive(
    stream: &QuietUnixStream,
    slices: &mut [IoSliceMut<'_>],
    take: impl FnMut(OwnedFd),
) -> io::Result<usize> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let read = stream
        .read(|stream| Ok(recvmsg(stream, slices, &mut control, RecvFlags::CMSG_CLOEXEC)?))?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    rights.flatten().for_each(take);
    Ok(read.bytes)
}

/// The same where none are asked for.
#[cfg(not(target_os = "linux"))]
fn receive(
    stream: &QuietUnixStream,
    slices: &mut [IoSliceMut<'_>],
    _: impl FnMut(OwnedFd),
) -> io::Result<usize> {
    stream.read(|mut stream| stream.read_vectored(slices))
}

/// Refuses a stream that has met itself. While a server on this host is dead, the system may try to
/// reach its port from that very port, and succeed; the stream would talk to itself, and hold the
/// port against the server.
fn not_itself(stream: TcpStream) -> io::Result<TcpStream> {
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    #[tokio::test]
    async fn a_stream_that_met_itself_is_no_connection() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let own = socket.local_addr().unwrap();
        let itself = socket.connect(own).await.unwrap();
        let error = not_itself(itself).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        assert!(matches!(Link::connect(&address).await, Ok(Link::Tcp(_))));
    }
}
