//! [`LinkIn`] and [`LinkOut`]: the ends of a link between neighbours.
//!
//! A link carries its bytes through a socket, or through memory that both processes share. Then its
//! socket only wakes a side that sleeps, and shows the end of the other process.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use pushpull_net::{DetachedStream, PipeReader, PipeWriter};

use super::socket::LinkSocket;

/// The end of a link at the successor: it receives.
#[derive(Debug)]
pub(crate) struct LinkIn {
    socket: LinkSocket,
    pipe: Option<PipeReader>,
    /// Whether it has announced to the neighbour that it sleeps.
    sleeps: bool,
}

/// The end of a link at the predecessor: it sends.
#[derive(Debug)]
pub(crate) struct LinkOut {
    socket: LinkSocket,
    pipe: Option<PipeWriter>,
    /// Whether it has announced to the neighbour that it sleeps.
    sleeps: bool,
}

impl LinkIn {
    /// Takes a connection, and the memory that carries its bytes, if there is some.
    pub(crate) fn new(stream: DetachedStream, pipe: Option<PipeReader>) -> io::Result<LinkIn> {
        Ok(LinkIn { socket: LinkSocket::new(stream)?, pipe, sleeps: false })
    }

    /// Reads what is available; nothing once the neighbour is gone and its last byte is read.
    pub(crate) fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let Some(pipe) = &mut self.pipe else { return self.socket.read(slices) };
        let mut read = pipe.read(slices);
        if would_block(&read) && std::mem::take(&mut self.sleeps) {
            pipe.end_sleep();
            let is_connected = self.socket.take_wakes();
            // What the neighbour has written before its end counts.
            read = pipe.read(slices);
            if would_block(&read) && !is_connected? {
                return Ok(0);
            }
        }
        if read.is_ok() && pipe.wakes_writer() {
            self.socket.wake_peer();
        }
        read
    }

    /// Prepares a wait for the socket to become readable. Returns whether there is none, because
    /// bytes are there.
    pub(crate) fn begin_wait(&mut self) -> io::Result<bool> {
        let Some(pipe) = &self.pipe else { return Ok(self.socket.has_received()) };
        self.sleeps = true;
        pipe.begin_sleep()
    }
}

impl LinkOut {
    /// Takes a connection, and the memory that carries its bytes, if there is some.
    pub(crate) fn new(stream: DetachedStream, pipe: Option<PipeWriter>) -> io::Result<LinkOut> {
        Ok(LinkOut { socket: LinkSocket::new(stream)?, pipe, sleeps: false })
    }

    /// Writes as much as there is room for.
    pub(crate) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(pipe) = &mut self.pipe else { return self.socket.write(slices) };
        let mut written = pipe.write(slices);
        if would_block(&written) && std::mem::take(&mut self.sleeps) {
            pipe.end_sleep();
            if !self.socket.take_wakes()? {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            written = pipe.write(slices);
        }
        if written.is_ok() && pipe.wakes_reader() {
            self.socket.wake_peer();
        }
        written
    }

    /// Prepares a wait for the socket. Returns whether there is none, because there is room.
    pub(crate) fn begin_wait(&mut self) -> io::Result<bool> {
        let Some(pipe) = &self.pipe else { return Ok(false) };
        self.sleeps = true;
        pipe.begin_sleep()
    }

    /// Returns whether the socket becomes readable at the end of a wait, instead of writable.
    pub(crate) fn waits_for_bytes(&self) -> bool {
        self.pipe.is_some()
    }
}

impl AsFd for LinkIn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsFd for LinkOut {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn would_block(result: &io::Result<usize>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests;
