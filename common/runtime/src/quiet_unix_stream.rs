//! A Unix socket that wakes nobody because its peer has read.

use std::io;
use std::os::unix::net::UnixStream;

use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

use room::Room;

/// A connected Unix socket.
///
/// Whoever waits for anything that a Unix socket may become is woken whenever its peer has read, for it can be
/// written then; a TCP socket says so only to those whom it had no room for. Where a request is a frame there and one
/// back each side would be woken twice for it, and the second time the processor is taken from somebody who computes.
/// So it is watched for room only while somebody waits for some.
#[derive(Debug)]
pub struct QuietUnixStream {
    stream: AsyncFd<UnixStream>,
    room: Room,
}

impl QuietUnixStream {
    /// Takes a socket that is connected, which a runtime of tokio drives from now on: the one that it is called in.
    ///
    /// # Errors
    ///
    /// When the system does not let it be watched.
    ///
    /// # Panics
    ///
    /// Outside of a runtime that drives sockets and time.
    pub fn new(stream: UnixStream) -> io::Result<QuietUnixStream> {
        stream.set_nonblocking(true)?;
        // SAFETY: a socket of the standard library has one descriptor, which is open until it is dropped.
        let stream = unsafe { AsyncFd::register_with_interest(stream, room::BESIDE) }?;
        Ok(QuietUnixStream { stream, room: Room::default() })
    }

    /// The socket, which no runtime drives any more.
    pub fn into_inner(self) -> UnixStream {
        self.stream.into_inner()
    }

    /// Whether the process at the other end is of our user.
    #[cfg(target_os = "linux")]
    pub fn is_of_same_user(&self) -> bool {
        let us = rustix::process::geteuid();
        rustix::net::sockopt::socket_peercred(&self.stream).is_ok_and(|peer| peer.uid == us)
    }

    /// The same where it makes no difference: no memory is lent.
    #[cfg(not(target_os = "linux"))]
    pub fn is_of_same_user(&self) -> bool {
        false
    }

    /// Waits until it may be read, or written, or what of both is asked for. One task at a time may wait for room.
    ///
    /// # Errors
    ///
    /// When the system no longer watches it.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        if !interest.is_writable() {
            return Ok(self.stream.readable().await?.ready());
        }
        tokio::select! {
            biased;
            ready = self.stream.readable(), if interest.is_readable() => Ok(ready?.ready()),
            ready = self.room.wait(&self.stream) => ready,
        }
    }

    /// Reads, if something may be there.
    ///
    /// # Errors
    ///
    /// What `read` gives, and [`io::ErrorKind::WouldBlock`] where nothing is there.
    pub fn read<R>(&self, read: impl FnOnce(&UnixStream) -> io::Result<R>) -> io::Result<R> {
        self.stream.try_io(Interest::READABLE, read)
    }

    /// Writes, if there may be room.
    ///
    /// # Errors
    ///
    /// What `write` gives, and [`io::ErrorKind::WouldBlock`] where there is no room.
    pub fn write<R>(&self, write: impl FnOnce(&UnixStream) -> io::Result<R>) -> io::Result<R> {
        self.room.write(&self.stream, write)
    }
}

#[cfg(target_os = "linux")]
mod room {
    use std::io;
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use rustix::event::Timespec;
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use rustix::io::retry_on_intr;
    use tokio::io::unix::AsyncFd;
    use tokio::io::{Interest, Ready};

    /// What the socket itself is watched for.
    pub(super) const BESIDE: Interest = Interest::READABLE;

    /// After how long it is tried again to write, where there is no descriptor left to watch by.
    const TRIED_AGAIN: Duration = Duration::from_millis(1);

    /// Room to write, waited for by a descriptor of its own: one that watches the socket, for room alone and only when
    /// told to, and tells once. Made when there is none for the first time, it costs a call to be told again, where a
    /// second registration of the socket with tokio would allocate whenever there is no room, and tell of every read
    /// of the peer until it is undone.
    #[derive(Debug, Default)]
    pub(super) struct Room {
        watch: OnceLock<AsyncFd<OwnedFd>>,
        /// Whether it has been told to watch and has told nothing since.
        told: AtomicBool,
    }

    impl Room {
        /// Waits until there may be some.
        pub(super) async fn wait(&self, stream: &AsyncFd<UnixStream>) -> io::Result<Ready> {
            let Ok(watch) = self.watch(stream.get_ref()) else {
                tokio::time::sleep(TRIED_AGAIN).await;
                return Ok(Ready::WRITABLE);
            };
            if !self.told.load(Ordering::Relaxed) {
                self.tell(watch, stream.get_ref(), EventFlags::OUT)?;
            }
            loop {
                let mut ready = watch.readable().await?;
                let told = retry_on_intr(|| {
                    let mut events = [const { MaybeUninit::uninit() }; 1];
                    let (events, _) = epoll::wait(watch, &mut events, Some(&Timespec::default()))?;
                    Ok(!events.is_empty())
                })?;
                ready.clear_ready();
                if told {
                    self.told.store(false, Ordering::Relaxed);
                    return Ok(Ready::WRITABLE);
                }
            }
        }

        pub(super) fn write<R>(
            &self,
            stream: &AsyncFd<UnixStream>,
            write: impl FnOnce(&UnixStream) -> io::Result<R>,
        ) -> io::Result<R> {
            let stream = stream.get_ref();
            let written = write(stream)?;
            // Who waited was woken by something else, and then there was room. Should it not be possible to say so,
            // it is told once more than it has to be; what is written is written.
            if self.told.load(Ordering::Relaxed)
                && let Some(watch) = self.watch.get()
            {
                let _ = self.tell(watch, stream, EventFlags::empty());
            }
            Ok(written)
        }

        fn watch(&self, stream: &UnixStream) -> io::Result<&AsyncFd<OwnedFd>> {
            if let Some(watch) = self.watch.get() {
                return Ok(watch);
            }
            let watch = epoll::create(CreateFlags::CLOEXEC)?;
            epoll::add(&watch, stream, EventData::new_u64(0), EventFlags::ONESHOT)?;
            // SAFETY: it is one descriptor, open until it is dropped.
            let watch = unsafe { AsyncFd::register_with_interest(watch, Interest::READABLE) }?;
            Ok(self.watch.get_or_init(|| watch))
        }

        /// Tells it to watch for this once, or for nothing any more.
        fn tell(
            &self,
            watch: &AsyncFd<OwnedFd>,
            stream: &UnixStream,
            flags: EventFlags,
        ) -> io::Result<()> {
            epoll::modify(watch, stream, EventData::new_u64(0), flags | EventFlags::ONESHOT)?;
            self.told.store(!flags.is_empty(), Ordering::Relaxed);
            Ok(())
        }
    }
}

/// Elsewhere nothing is watched but the socket.
#[cfg(not(target_os = "linux"))]
mod room {
    use std::io;
    use std::os::unix::net::UnixStream;

    use tokio::io::unix::AsyncFd;
    use tokio::io::{Interest, Ready};

    pub(super) const BESIDE: Interest = Interest::READABLE.add(Interest::WRITABLE);

    #[derive(Debug, Default)]
    pub(super) struct Room;

    impl Room {
        pub(super) async fn wait(&self, stream: &AsyncFd<UnixStream>) -> io::Result<Ready> {
            Ok(stream.writable().await?.ready())
        }

        pub(super) fn write<R>(
            &self,
            stream: &AsyncFd<UnixStream>,
            write: impl FnOnce(&UnixStream) -> io::Result<R>,
        ) -> io::Result<R> {
            stream.try_io(Interest::WRITABLE, write)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Duration;

    use tokio::runtime::Handle;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Waits for an answer, and maybe for room beside it, of which there is none.
    async fn read_answer(same_host: &QuietUnixStream, interest: Interest) {
        loop {
            assert!(same_host.ready(interest).await.unwrap().is_readable());
            match same_host.read(|mut stream| stream.read(&mut [0; 64])) {
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                Ok(bytes) => break assert_eq!(bytes, 9),
            }
        }
    }

    /// How often one sleeps until a peer that reads what is sent to it, and then answers, has answered.
    async fn sleeps_until_an_answer(
        same_host: &QuietUnixStream,
        theirs: UnixStream,
    ) -> (u64, UnixStream) {
        let sleeps = || Handle::current().metrics().worker_park_count(0);
        // What a new descriptor is told first.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let before = sleeps();
        let peer = std::thread::spawn(move || {
            drain(&theirs);
            std::thread::sleep(Duration::from_millis(50));
            (&theirs).write_all(b"an answer").unwrap();
            theirs
        });
        read_answer(same_host, Interest::READABLE).await;
        (sleeps() - before, peer.join().unwrap())
    }

    #[test]
    fn a_peer_that_reads_wakes_nobody() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        runtime().block_on(async {
            let same_host = QuietUnixStream::new(ours).unwrap();
            same_host.write(|mut stream| stream.write_all(b"a request")).unwrap();
            assert_eq!(sleeps_until_an_answer(&same_host, theirs).await.0, 1);
        });
    }

    /// Writes until there is no room.
    fn fill(same_host: &QuietUnixStream) {
        while same_host.write(|mut stream| stream.write(&[1; 4096])).is_ok() {}
    }

    /// Reads all there is.
    fn drain(mut theirs: &UnixStream) {
        theirs.set_nonblocking(true).unwrap();
        while theirs.read(&mut [0; 4096]).is_ok() {}
        theirs.set_nonblocking(false).unwrap();
    }

    const EITHER: Interest = Interest::READABLE.add(Interest::WRITABLE);

    #[test]
    fn who_waits_for_room_goes_on_when_there_is_some() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let all = 10 << 20;
        let peer = std::thread::spawn(move || {
            let (mut bytes, mut read) = (vec![0; 100_000], 0);
            while read < all {
                read += theirs.read(&mut bytes).unwrap();
            }
            theirs
        });
        runtime().block_on(async {
            let same_host = QuietUnixStream::new(ours).unwrap();
            let (bytes, mut written, mut waits) = (vec![1; 1 << 20], 0, 0);
            while written < all {
                let more = &bytes[..bytes.len().min(all - written)];
                match same_host.write(|mut stream| stream.write(more)) {
                    Ok(count) => written += count,
                    Err(error) => {
                        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                        assert!(same_host.ready(EITHER).await.unwrap().is_writable());
                        waits += 1;
                    }
                }
            }
            assert!(waits > 0, "there was room for all of it");
        });
        drop(peer.join().unwrap());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn who_has_waited_for_room_is_not_told_of_it_later() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        runtime().block_on(async {
            let same_host = QuietUnixStream::new(ours).unwrap();
            for answered in [false, true] {
                fill(&same_host);
                if answered {
                    // What is waited for beside room comes first, when room has been asked for.
                    let peer = std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(20));
                        theirs.write_all(b"an answer").unwrap();
                        theirs
                    });
                    read_answer(&same_host, EITHER).await;
                    theirs = peer.join().unwrap();
                    drain(&theirs);
                } else {
                    drain(&theirs);
                    assert!(same_host.ready(EITHER).await.unwrap().is_writable());
                }
                same_host.write(|mut stream| stream.write_all(b"a request")).unwrap();
                let sleeps;
                (sleeps, theirs) = sleeps_until_an_answer(&same_host, theirs).await;
                assert_eq!(sleeps, 1, "answered first: {answered}");
            }
        });
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_peer_that_is_gone_is_told_to_who_waits_for_room() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        runtime().block_on(async {
            let same_host = QuietUnixStream::new(ours).unwrap();
            fill(&same_host);
            let gone = std::thread::spawn(move || drop(theirs));
            same_host.ready(Interest::WRITABLE).await.unwrap();
            let error = same_host.write(|mut stream| stream.write(b"more")).unwrap_err();
            assert_ne!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
            gone.join().unwrap();
        });
    }

    #[test]
    fn what_is_not_there_is_not_read() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        runtime().block_on(async {
            let same_host = QuietUnixStream::new(ours).unwrap();
            let read = || same_host.read(|mut stream| stream.read(&mut [0; 64]));
            assert_eq!(read().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            drop(theirs);
            same_host.ready(Interest::READABLE).await.unwrap();
            assert_eq!(read().unwrap(), 0, "the peer has gone");
        });
    }
}
