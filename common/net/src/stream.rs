//! A connected stream, TCP or a Unix socket, for non-blocking vectored reads and writes.
//!
//! This is one of the few files that may hold `unsafe` code.

#[cfg(not(target_os = "linux"))]
use std::io::Read;
use std::io::{self, IoSlice, IoSliceMut, Write};
#[cfg(target_os = "linux")]
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
#[cfg(target_os = "linux")]
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pushpull_common::protocol::limits::PART_BYTES_MAX;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::net::TcpStream;

/// A connected stream. One task at a time waits for it.
#[derive(Debug)]
pub enum Stream {
    /// A TCP connection, without Nagle's algorithm.
    Tcp(TcpStream),
    /// A Unix socket.
    ///
    /// epoll reports a Unix socket as writable each time the peer reads, so a task that is
    /// registered for read and write wakes twice per request. This one is registered for reading;
    /// see [`Stream::ready`].
    Unix(AsyncFd<UnixStream>),
}

/// A stream that no runtime drives, on its way from one thread to another.
#[derive(Debug)]
pub enum DetachedStream {
    /// A TCP connection.
    Tcp(std::net::TcpStream),
    /// A Unix socket.
    Unix(UnixStream),
}

impl Stream {
    /// Takes a connected TCP stream: switches Nagle's algorithm off and keepalive on, which finds a
    /// lost machine within two minutes.
    ///
    /// # Errors
    /// If the system rejects one of the options.
    pub fn tcp(stream: TcpStream) -> io::Result<Stream> {
        stream.set_nodelay(true)?;
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(60))
            .with_interval(Duration::from_secs(10));
        socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(Stream::Tcp(stream))
    }

    /// Takes a connected Unix socket.
    ///
    /// # Errors
    /// If the socket cannot be registered with the runtime.
    pub fn unix(stream: tokio::net::UnixStream) -> io::Result<Stream> {
        Stream::attach(DetachedStream::Unix(stream.into_std()?))
    }

    /// Registers a stream with the runtime of the calling thread.
    ///
    /// # Errors
    /// If the stream cannot be registered with the runtime.
    ///
    /// # Panics
    /// Outside of a tokio runtime that drives sockets.
    pub fn attach(detached: DetachedStream) -> io::Result<Stream> {
        match detached {
            DetachedStream::Tcp(stream) => TcpStream::from_std(stream).map(Stream::Tcp),
            DetachedStream::Unix(stream) => {
                stream.set_nonblocking(true)?;
                socket2::SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER_BYTES)?;
                register(stream, Interest::READABLE).map(Stream::Unix)
            }
        }
    }

    /// Takes the stream from its runtime.
    ///
    /// # Errors
    /// If the runtime fails to deregister the socket.
    pub fn detach(self) -> io::Result<DetachedStream> {
        match self {
            Stream::Tcp(stream) => stream.into_std().map(DetachedStream::Tcp),
            Stream::Unix(stream) => Ok(DetachedStream::Unix(stream.into_inner())),
        }
    }

    /// Returns whether the stream can pass descriptors.
    pub fn passes_descriptors(&self) -> bool {
        cfg!(target_os = "linux") && matches!(self, Stream::Unix(_))
    }

    /// Returns whether the peer is reached over a Unix socket and runs as the same user. Always
    /// false on systems without shared memory.
    pub fn is_same_user(&self) -> bool {
        matches!(self, Stream::Unix(stream) if is_same_user(stream))
    }

    /// Waits until the stream is ready for one of the interests. A wait for a Unix socket to become
    /// writable registers a duplicate of its descriptor until the wait ends.
    ///
    /// # Errors
    /// If the runtime is shutting down, or the process has no descriptor left.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        let stream = match self {
            Stream::Tcp(stream) => return stream.ready(interest).await,
            Stream::Unix(stream) => stream,
        };
        if !interest.is_writable() {
            return Ok(stream.readable().await?.ready());
        }
        let duplicate = stream.get_ref().try_clone()?;
        let writable = register(duplicate, Interest::WRITABLE)?;
        tokio::select! {
            biased;
            ready = stream.readable(), if interest.is_readable() => Ok(ready?.ready()),
            ready = writable.writable() => Ok(ready?.ready()),
        }
    }

    /// Reads the available bytes, and passes the descriptors that arrived with them to `take`.
    ///
    /// # Errors
    /// Those of the read; [`io::ErrorKind::WouldBlock`] if no bytes are available.
    pub fn try_read(
        &self,
        slices: &mut [IoSliceMut<'_>],
        take: impl FnMut(OwnedFd),
    ) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.try_read_vectored(slices),
            Stream::Unix(stream) => {
                stream.try_io(Interest::READABLE, |stream| receive(stream, slices, take))
            }
        }
    }

    /// Writes as much as the socket takes.
    ///
    /// # Errors
    /// Those of the write; [`io::ErrorKind::WouldBlock`] if the socket takes no bytes.
    pub fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.try_write_vectored(slices),
            Stream::Unix(stream) => stream.get_ref().write_vectored(slices),
        }
    }

    /// Writes like [`Stream::try_write`], and sends descriptors with the first byte.
    ///
    /// # Errors
    /// Those of the write; [`io::ErrorKind::Unsupported`] if the stream passes no descriptors.
    #[cfg(target_os = "linux")]
    pub fn try_send(&self, slices: &[IoSlice<'_>], descriptors: &[OwnedFd]) -> io::Result<usize> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let Stream::Unix(stream) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let rights = SendAncillaryMessage::ScmRights(&descriptors);
        let mut space = vec![MaybeUninit::uninit(); rights.size()];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(rights);
        Ok(sendmsg(stream.get_ref(), slices, &mut control, SendFlags::NOSIGNAL)?)
    }

    /// Fails: this system passes no descriptors.
    ///
    /// # Errors
    /// Always [`io::ErrorKind::Unsupported`].
    #[cfg(not(target_os = "linux"))]
    pub fn try_send(&self, _: &[IoSlice<'_>], _: &[OwnedFd]) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The size of a Unix socket's send buffer, as far as the system allows it: that of a part. With the
/// usual default of 208 KiB, a sender sleeps several times while its peer reads one part.
const SEND_BUFFER_BYTES: usize = PART_BYTES_MAX as usize;

/// Registers a socket with the runtime.
fn register(socket: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    // SAFETY: a socket of the standard library has one descriptor, which is open until the socket
    // is dropped.
    unsafe { AsyncFd::register_with_interest(socket, interest) }.map_err(io::Error::from)
}

/// The most descriptors that one read takes; the system closes the others.
#[cfg(target_os = "linux")]
const DESCRIPTORS_MAX: usize = 4;

#[cfg(target_os = "linux")]
fn receive(
    stream: &UnixStream,
    slices: &mut [IoSliceMut<'_>],
    take: impl FnMut(OwnedFd),
) -> io::Result<usize> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let read = recvmsg(stream, slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    rights.flatten().for_each(take);
    Ok(read.bytes)
}

#[cfg(not(target_os = "linux"))]
fn receive(
    mut stream: &UnixStream,
    slices: &mut [IoSliceMut<'_>],
    _: impl FnMut(OwnedFd),
) -> io::Result<usize> {
    stream.read_vectored(slices)
}

/// Returns whether the peer process runs as the same user as this one. False on systems without
/// shared memory.
#[cfg(target_os = "linux")]
fn is_same_user(stream: &AsyncFd<UnixStream>) -> bool {
    let us = rustix::process::geteuid();
    rustix::net::sockopt::socket_peercred(stream).is_ok_and(|peer| peer.uid == us)
}

#[cfg(not(target_os = "linux"))]
fn is_same_user(_: &AsyncFd<UnixStream>) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use tokio::runtime::Handle;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Returns a stream and its blocking peer.
    fn pair() -> (Stream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Stream::attach(DetachedStream::Unix(ours)).unwrap(), theirs)
    }

    fn read(stream: &Stream) -> io::Result<usize> {
        stream.try_read(&mut [IoSliceMut::new(&mut [0; 64])], |_| ())
    }

    fn write(stream: &Stream, bytes: &[u8]) -> io::Result<usize> {
        stream.try_write(&[IoSlice::new(bytes)])
    }

    /// Writes until the system takes nothing more.
    fn fill(stream: &Stream) {
        while write(stream, &[1; 4096]).is_ok() {}
    }

    const EITHER: Interest = Interest::READABLE.add(Interest::WRITABLE);

    #[test]
    fn a_unix_socket_has_a_send_buffer_for_a_part() {
        // What the system grants, it tells on a socket that it makes.
        let (alone, _peer) = UnixStream::pair().unwrap();
        let alone = socket2::SockRef::from(&alone);
        alone.set_send_buffer_size(SEND_BUFFER_BYTES).unwrap();
        let granted = alone.send_buffer_size().unwrap();
        runtime().block_on(async {
            let (Stream::Unix(stream), _peer) = pair() else { unreachable!("a Unix socket") };
            let size = socket2::SockRef::from(&stream).send_buffer_size().unwrap();
            assert_eq!(size, granted);
        });
    }

    #[test]
    fn a_peer_that_reads_wakes_no_task() {
        runtime().block_on(async {
            let (stream, mut theirs) = pair();
            write(&stream, b"a request").unwrap();
            // A new descriptor is reported once.
            tokio::time::sleep(Duration::from_millis(10)).await;
            let sleeps = || Handle::current().metrics().worker_park_count(0);
            let before = sleeps();
            let peer = std::thread::spawn(move || {
                theirs.read_exact(&mut [0; 9]).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                theirs.write_all(b"an answer").unwrap();
                theirs
            });
            loop {
                assert!(stream.ready(Interest::READABLE).await.unwrap().is_readable());
                match read(&stream) {
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                    Ok(bytes) => break assert_eq!(bytes, 9),
                }
            }
            assert_eq!(sleeps() - before, 1);
            drop(peer.join().unwrap());
        });
    }

    #[test]
    fn a_blocked_write_continues_when_the_peer_reads() {
        let all = 10 << 20;
        runtime().block_on(async {
            let (stream, mut theirs) = pair();
            let bytes = vec![1; 1 << 20];
            let mut written = write(&stream, &bytes).unwrap();
            // The socket is full before the peer begins to read.
            while let Ok(count) = write(&stream, &bytes) {
                written += count;
            }
            let peer = std::thread::spawn(move || {
                let mut bytes = vec![0; 100_000];
                let mut read = 0;
                while read < all {
                    read += theirs.read(&mut bytes).unwrap();
                }
                theirs
            });
            while written < all {
                assert!(stream.ready(EITHER).await.unwrap().is_writable());
                match write(&stream, &bytes[..bytes.len().min(all - written)]) {
                    Ok(count) => written += count,
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            drop(peer.join().unwrap());
        });
    }

    #[test]
    fn an_answer_ends_a_wait_for_a_blocked_write() {
        runtime().block_on(async {
            let (stream, mut theirs) = pair();
            fill(&stream);
            let peer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                theirs.write_all(b"an answer").unwrap();
                theirs
            });
            assert!(stream.ready(EITHER).await.unwrap().is_readable());
            assert_eq!(read(&stream).unwrap(), 9);
            drop(peer.join().unwrap());
        });
    }

    #[test]
    fn a_lost_peer_ends_a_wait_for_a_blocked_write() {
        runtime().block_on(async {
            let (stream, theirs) = pair();
            fill(&stream);
            let peer = std::thread::spawn(move || drop(theirs));
            stream.ready(Interest::WRITABLE).await.unwrap();
            let error = write(&stream, b"more").unwrap_err();
            assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
            peer.join().unwrap();
        });
    }

    #[test]
    fn an_empty_stream_is_not_read() {
        runtime().block_on(async {
            let (stream, theirs) = pair();
            assert_eq!(read(&stream).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            drop(theirs);
            stream.ready(Interest::READABLE).await.unwrap();
            assert_eq!(read(&stream).unwrap(), 0, "the peer has closed");
        });
    }
}
