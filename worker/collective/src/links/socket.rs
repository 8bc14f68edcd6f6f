//! [`LinkSocket`]: a connected socket that no runtime drives.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use pushpull_net::DetachedStream;
use rustix::net::SendFlags;

/// One end of a connection between neighbours, for non-blocking vectored reads and writes.
#[derive(Debug)]
pub(crate) struct LinkSocket(DetachedStream);

impl LinkSocket {
    /// Takes a connection, and makes its reads and writes return instead of waiting.
    pub(crate) fn new(stream: DetachedStream) -> io::Result<LinkSocket> {
        stream.set_nonblocking()?;
        Ok(LinkSocket(stream))
    }

    /// Reads what is available.
    pub(crate) fn read(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.0.read(slices)
    }

    /// Returns whether bytes were received that a read has not taken, so that the socket does not
    /// become readable for them.
    pub(crate) fn has_received(&self) -> bool {
        self.0.has_received()
    }

    /// Writes as much as the socket takes.
    pub(crate) fn write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write(slices)
    }

    /// Wakes a neighbour that sleeps until this socket has bytes.
    pub(crate) fn wake_peer(&self) {
        // A socket without room has bytes already, and the end of a neighbour is noticed elsewhere.
        let _ = rustix::net::send(self.as_fd(), &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    /// Takes the bytes that have woken this side. Returns whether the neighbour is still connected.
    pub(crate) fn take_wakes(&self) -> io::Result<bool> {
        match self.read(&mut [IoSliceMut::new(&mut [0; 64])]) {
            Ok(0) => Ok(false),
            Ok(_) => Ok(true),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(true),
                _ => Err(error),
            },
        }
    }
}

impl AsFd for LinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
