//! A connected stream, TCP with or without TLS or a Unix socket, for non-blocking vectored reads and
//! writes.
//!
//! This is one of the few files that may hold `unsafe` code.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
#[cfg(target_os = "linux")]
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pushpull_common::protocol::limits::PART_BYTES_MAX;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::net::TcpStream;

#[cfg(feature = "tls")]
use crate::tls::HandshakeStep;
use crate::tls::TlsSession;

/// A connected stream. One task at a time waits for it.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    tls: Option<Box<TlsSession>>,
    /// Whether the last read has taken all bytes that had arrived.
    is_drained: AtomicBool,
}

/// A stream that no runtime drives, on its way from one thread to another.
#[derive(Debug)]
pub struct DetachedStream {
    socket: DetachedSocket,
    tls: Option<Box<TlsSession>>,
}

#[derive(Debug)]
enum Socket {
    /// A TCP connection, without Nagle's algorithm.
    Tcp(TcpStream),
    /// A Unix socket.
    ///
    /// epoll reports a Unix socket as writable each time the peer reads, so a task that is
    /// registered for read and write wakes twice per request. This one is registered for reading;
    /// see [`Stream::ready`].
    Unix(AsyncFd<UnixStream>),
}

#[derive(Debug)]
enum DetachedSocket {
    Tcp(std::net::TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn plain(socket: Socket) -> Stream {
        Stream { socket, tls: None, is_drained: AtomicBool::new(false) }
    }

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
        Ok(Stream::plain(Socket::Tcp(stream)))
    }

    /// Takes a connected Unix socket.
    ///
    /// # Errors
    /// If the socket cannot be registered with the runtime.
    pub fn unix(stream: tokio::net::UnixStream) -> io::Result<Stream> {
        Stream::attach(stream.into_std()?.into())
    }

    /// Registers a stream with the runtime of the calling thread.
    ///
    /// # Errors
    /// If the stream cannot be registered with the runtime.
    ///
    /// # Panics
    /// Outside of a tokio runtime that drives sockets.
    pub fn attach(detached: DetachedStream) -> io::Result<Stream> {
        let socket = match detached.socket {
            DetachedSocket::Tcp(stream) => Socket::Tcp(TcpStream::from_std(stream)?),
            DetachedSocket::Unix(stream) => {
                stream.set_nonblocking(true)?;
                socket2::SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER_BYTES)?;
                Socket::Unix(register(stream, Interest::READABLE)?)
            }
        };
        Ok(Stream { tls: detached.tls, ..Stream::plain(socket) })
    }

    /// Takes the stream from its runtime.
    ///
    /// # Errors
    /// If the runtime fails to deregister the socket.
    pub fn detach(self) -> io::Result<DetachedStream> {
        let socket = match self.socket {
            Socket::Tcp(stream) => DetachedSocket::Tcp(stream.into_std()?),
            Socket::Unix(stream) => DetachedSocket::Unix(stream.into_inner()),
        };
        Ok(DetachedStream { socket, tls: self.tls })
    }

    /// Returns the internet addresses of this side and of the peer; `None` of a Unix socket.
    ///
    /// # Errors
    /// If the connection has ended.
    pub fn addresses(&self) -> io::Result<Option<StreamAddresses>> {
        let Socket::Tcp(stream) = &self.socket else { return Ok(None) };
        Ok(Some(StreamAddresses { local: stream.local_addr()?, peer: stream.peer_addr()? }))
    }

    /// Returns the TLS of the stream, if it has one.
    pub(crate) fn tls(&self) -> Option<&TlsSession> {
        self.tls.as_deref()
    }

    /// Returns whether the stream can pass descriptors.
    pub fn passes_descriptors(&self) -> bool {
        cfg!(target_os = "linux") && matches!(self.socket, Socket::Unix(_))
    }

    /// Returns whether the peer is reached over a Unix socket and runs as the same user. Always
    /// false on systems without shared memory.
    pub fn is_same_user(&self) -> bool {
        matches!(&self.socket, Socket::Unix(stream) if is_same_user(stream))
    }

    /// Returns whether the peer is known to run as another user than this process, and not as root.
    pub(crate) fn is_of_another_user(&self) -> bool {
        matches!(&self.socket, Socket::Unix(stream) if is_of_another_user(stream))
    }

    /// Waits until the stream is ready for one of the interests. A wait for a Unix socket to become
    /// writable registers a duplicate of its descriptor until the wait ends.
    ///
    /// # Errors
    /// If the runtime is shutting down, or the process has no descriptor left.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        if interest.is_readable() && self.tls.as_ref().is_some_and(|tls| tls.has_received()) {
            // A peer that sends without end keeps the thread from nothing else.
            tokio::task::coop::consume_budget().await;
            return Ok(Ready::READABLE);
        }
        let stream = match &self.socket {
            Socket::Tcp(stream) => return stream.ready(interest).await,
            Socket::Unix(stream) => stream,
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
        match (&self.socket, &self.tls) {
            (Socket::Tcp(stream), Some(tls)) => tls.read(slices, stream),
            (Socket::Tcp(stream), None) => {
                let space: usize = slices.iter().map(|slice| slice.len()).sum();
                let read = stream.try_read_vectored(slices);
                let is_drained = read.as_ref().is_ok_and(|read| (1..space).contains(read));
                self.is_drained.store(is_drained, Ordering::Relaxed);
                read
            }
            (Socket::Unix(stream), _) => {
                stream.try_io(Interest::READABLE, |stream| receive(stream, slices, take))
            }
        }
    }

    /// Begins a batch of reads, for [`Stream::take_drained`].
    pub(crate) fn begin_reads(&self) {
        self.is_drained.store(false, Ordering::Relaxed);
    }

    /// Returns whether the last read of the batch has taken all bytes that had arrived, so that the
    /// next one would only return `WouldBlock`. The next wait is for more bytes then, as after such a
    /// read. False if that is unknown: a Unix socket also ends a read behind descriptors.
    ///
    /// The runtime must not have run since the batch began: it may have noticed more bytes.
    pub(crate) fn take_drained(&self) -> bool {
        let is_drained = self.is_drained.swap(false, Ordering::Relaxed);
        if let (true, Socket::Tcp(stream)) = (is_drained, &self.socket) {
            // The runtime still reports a peer that has closed.
            let nothing = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
            let _ = stream.try_io(Interest::READABLE, nothing);
        }
        is_drained
    }

    /// Writes as much as the socket takes. The next write must begin with the bytes that this one
    /// did not take: under TLS they may be encrypted already.
    ///
    /// # Errors
    /// Those of the write; [`io::ErrorKind::WouldBlock`] if the socket takes no bytes.
    pub fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match (&self.socket, &self.tls) {
            (Socket::Tcp(stream), Some(tls)) => tls.write(slices, stream),
            (Socket::Tcp(stream), None) => stream.try_write_vectored(slices),
            (Socket::Unix(stream), _) => stream.get_ref().write_vectored(slices),
        }
    }

    /// Writes like [`Stream::try_write`], and sends descriptors with the first byte.
    ///
    /// # Errors
    /// Those of the write; [`io::ErrorKind::Unsupported`] if the stream passes no descriptors.
    #[cfg(target_os = "linux")]
    pub fn try_send(&self, slices: &[IoSlice<'_>], descriptors: &[OwnedFd]) -> io::Result<usize> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let Socket::Unix(stream) = &self.socket else {
            return Err(io::ErrorKind::Unsupported.into());
        };
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

#[cfg(feature = "tls")]
impl Stream {
    /// Puts TLS between the stream and its socket.
    pub(crate) fn set_tls(&mut self, session: TlsSession) {
        self.tls = Some(Box::new(session));
    }

    /// Takes TLS away again.
    pub(crate) fn take_tls(&mut self) -> Option<Box<TlsSession>> {
        self.tls.take()
    }

    /// Continues the TLS handshake as far as the socket allows.
    pub(crate) fn handshake(&self) -> io::Result<HandshakeStep> {
        match (&self.socket, &self.tls) {
            (Socket::Tcp(stream), Some(tls)) => tls.handshake(stream),
            _ => Ok(HandshakeStep::Done),
        }
    }
}

/// The internet addresses of a stream.
#[derive(Clone, Copy, Debug)]
pub struct StreamAddresses {
    /// That of this side.
    pub local: SocketAddr,
    /// That of the peer.
    pub peer: SocketAddr,
}

impl DetachedStream {
    /// Returns whether it is a Unix socket.
    pub fn is_unix(&self) -> bool {
        matches!(self.socket, DetachedSocket::Unix(_))
    }

    /// Returns whether the peer is on this host.
    pub fn is_loopback(&self) -> bool {
        match &self.socket {
            DetachedSocket::Unix(_) => true,
            DetachedSocket::Tcp(stream) => {
                stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback())
            }
        }
    }

    /// Makes reads and writes return instead of waiting.
    ///
    /// # Errors
    /// If the system rejects it.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        match &self.socket {
            DetachedSocket::Tcp(stream) => stream.set_nonblocking(true),
            DetachedSocket::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    /// Returns whether bytes were received that a read has not taken, so that the socket does not
    /// become readable for them.
    pub fn has_received(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_received())
    }

    /// Reads what is available.
    ///
    /// # Errors
    /// Those of the read.
    pub fn read(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match (&self.socket, &self.tls) {
            (DetachedSocket::Tcp(stream), Some(tls)) => tls.read(slices, stream),
            (DetachedSocket::Tcp(stream), None) => (&*stream).read_vectored(slices),
            (DetachedSocket::Unix(stream), _) => (&*stream).read_vectored(slices),
        }
    }

    /// Writes as much as the socket takes; see [`Stream::try_write`].
    ///
    /// # Errors
    /// Those of the write.
    pub fn write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match (&self.socket, &self.tls) {
            (DetachedSocket::Tcp(stream), Some(tls)) => tls.write(slices, stream),
            (DetachedSocket::Tcp(stream), None) => (&*stream).write_vectored(slices),
            (DetachedSocket::Unix(stream), _) => (&*stream).write_vectored(slices),
        }
    }
}

impl From<UnixStream> for DetachedStream {
    fn from(stream: UnixStream) -> DetachedStream {
        DetachedStream { socket: DetachedSocket::Unix(stream), tls: None }
    }
}

impl AsFd for DetachedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            DetachedSocket::Tcp(stream) => stream.as_fd(),
            DetachedSocket::Unix(stream) => stream.as_fd(),
        }
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

#[cfg(target_os = "linux")]
fn is_of_another_user(stream: &AsyncFd<UnixStream>) -> bool {
    let us = rustix::process::geteuid();
    rustix::net::sockopt::socket_peercred(stream)
        .is_ok_and(|peer| peer.uid != us && !peer.uid.is_root())
}

#[cfg(not(target_os = "linux"))]
fn is_of_another_user(_: &AsyncFd<UnixStream>) -> bool {
    false
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
        (Stream::attach(ours.into()).unwrap(), theirs)
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
            let (stream, _peer) = pair();
            let stream = stream.detach().unwrap();
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

    /// Returns a TCP stream and its blocking peer.
    async fn tcp_pair() -> (Stream, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ours = Stream::tcp(TcpStream::connect(address).await.unwrap()).unwrap();
        (ours, listener.accept().unwrap().0)
    }

    /// Reads once the stream is ready.
    async fn read_ready(stream: &Stream) -> usize {
        loop {
            stream.ready(Interest::READABLE).await.unwrap();
            stream.begin_reads();
            match read(stream) {
                Ok(bytes) => break bytes,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
    }

    #[test]
    fn a_read_that_takes_all_bytes_is_followed_by_a_wait() {
        runtime().block_on(async {
            let (stream, mut theirs) = tcp_pair().await;
            for round in 0..100 {
                theirs.write_all(&[1; 9]).unwrap();
                assert_eq!(read_ready(&stream).await, 9);
                // Bytes may arrive before the stream is found drained.
                let more = &[2; 64];
                if round % 3 == 0 {
                    theirs.write_all(more).unwrap();
                }
                assert!(stream.take_drained());
                assert_eq!(read(&stream).unwrap_err().kind(), io::ErrorKind::WouldBlock);
                match round % 3 {
                    0 => {}
                    1 => theirs.write_all(more).unwrap(),
                    _ => {
                        let mut theirs = theirs.try_clone().unwrap();
                        std::thread::spawn(move || theirs.write_all(more).unwrap());
                    }
                }
                assert_eq!(read_ready(&stream).await, 64);
                assert!(!stream.take_drained(), "the read had no room for more bytes");
            }
        });
    }

    #[test]
    fn a_batch_of_reads_knows_nothing_of_earlier_ones() {
        runtime().block_on(async {
            let (stream, mut theirs) = tcp_pair().await;
            theirs.write_all(&[1; 9]).unwrap();
            assert_eq!(read_ready(&stream).await, 9);
            theirs.write_all(&[2; 9]).unwrap();
            // The runtime notices the second message.
            tokio::time::sleep(Duration::from_millis(10)).await;
            stream.begin_reads();
            assert!(!stream.take_drained());
            assert_eq!(read(&stream).unwrap(), 9);
        });
    }

    #[test]
    fn a_peer_that_closes_behind_its_last_bytes_ends_a_wait() {
        runtime().block_on(async {
            for _ in 0..100 {
                let (stream, mut theirs) = tcp_pair().await;
                theirs.write_all(&[1; 9]).unwrap();
                drop(theirs);
                assert_eq!(read_ready(&stream).await, 9);
                assert!(stream.take_drained());
                assert_eq!(read_ready(&stream).await, 0);
            }
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
