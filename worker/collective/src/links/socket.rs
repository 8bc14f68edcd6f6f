//! A connected socket that no runtime drives: non-blocking vectored reads and writes.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use pushpull_net::DetachedStream;

/// One end of a link between neighbours.
#[derive(Debug)]
pub(crate) struct LinkSocket(pub(crate) DetachedStream);

impl LinkSocket {
    /// Reads what is available.
    pub(crate) fn read(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.0 {
            DetachedStream::Tcp(stream) => (&*stream).read_vectored(slices),
            DetachedStream::Unix(stream) => (&*stream).read_vectored(slices),
        }
    }

    /// Writes as much as the socket takes.
    pub(crate) fn write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &self.0 {
            DetachedStream::Tcp(stream) => (&*stream).write_vectored(slices),
            DetachedStream::Unix(stream) => (&*stream).write_vectored(slices),
        }
    }

    /// Makes reads and writes return instead of waiting.
    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        match &self.0 {
            DetachedStream::Tcp(stream) => stream.set_nonblocking(true),
            DetachedStream::Unix(stream) => stream.set_nonblocking(true),
        }
    }
}

impl AsFd for LinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            DetachedStream::Tcp(stream) => stream.as_fd(),
            DetachedStream::Unix(stream) => stream.as_fd(),
        }
    }
}
