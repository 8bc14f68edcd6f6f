//! The stream to a shard: TCP or a Unix socket, with one face.

use std::io::{self, IoSlice, IoSliceMut};

use tokio::io::{Interest, Ready};
use tokio::net::{TcpStream, UnixStream};

/// A connected stream.
#[derive(Debug)]
pub(super) enum Link {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Link {
    /// Connects to `host:port` or `unix:/path`.
    pub(super) async fn connect(address: &str) -> io::Result<Link> {
        if let Some(path) = address.strip_prefix("unix:") {
            return UnixStream::connect(path).await.map(Link::Unix);
        }
        // A name is looked up anew each time: a server may come back somewhere else.
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Link::Tcp(stream))
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
