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
pub(super) struct Near {
    stream: AsyncFd<UnixStream>,
    room: Room,
}

impl Near {
    pub(super) fn new(stream: UnixStream) -> io::Result<Near> {
        stream.set_nonblocking(true)?;
        // SAFETY: a socket of the standard library has one descriptor, which is open until it is dropped.
        let stream = unsafe { AsyncFd::register_with_interest(stream, room::BESIDE) }?;
        Ok(Near { stream, room: Room::default() })
    }

    /// Waits until it may be read, or written, or what of both is asked for.
    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
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
    pub(super) fn read<R>(&self, read: impl FnOnce(&UnixStream) -> io::Result<R>) -> io::Result<R> {
        self.stream.try_io(Interest::READABLE, read)
    }

    /// Writes, if there may be room.
    pub(super) fn write<R>(
        &self,
        write: impl FnOnce(&UnixStream) -> io::Result<R>,
    ) -> io::Result<R> {
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
