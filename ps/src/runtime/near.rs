//! A Unix socket that wakes nobody because its peer has read.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

/// How often in a row there is room, until it is no longer watched.
const ROOMY: u32 = 64;

/// After how long it is tried again to write, where it cannot be watched.
const TRIED_AGAIN: Duration = Duration::from_millis(1);

/// A connected Unix socket.
///
/// Whoever waits for anything that a Unix socket may become is woken whenever its peer has read, for it can be
/// written then; a TCP socket says so only to those whom it had no room for. Where a request is a frame there and one
/// back each side would be woken twice for it, and the second time the processor is taken from somebody who computes.
/// So it is waited for room only where there was none lately.
#[derive(Debug)]
pub(super) struct Near {
    stream: AsyncFd<UnixStream>,
    room: Mutex<Room>,
}

/// Whether there is room to write.
#[derive(Debug, Default)]
struct Room {
    /// The same socket, while it is watched.
    watched: Option<Arc<AsyncFd<UnixStream>>>,
    /// How often there was since there was none.
    roomy: u32,
}

impl Near {
    pub(super) fn new(stream: UnixStream) -> io::Result<Near> {
        stream.set_nonblocking(true)?;
        let stream = register(stream, Interest::READABLE)?;
        Ok(Near { stream, room: Mutex::default() })
    }

    pub(super) fn into_inner(self) -> UnixStream {
        self.stream.into_inner()
    }

    /// Whether the process at the other end is of our user.
    #[cfg(target_os = "linux")]
    pub(super) fn is_of_same_user(&self) -> bool {
        let us = rustix::process::geteuid();
        rustix::net::sockopt::socket_peercred(&self.stream).is_ok_and(|peer| peer.uid == us)
    }

    /// The same where it makes no difference: no memory is lent.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn is_of_same_user(&self) -> bool {
        false
    }

    /// Waits until it may be read, or written, or what of both is asked for.
    pub(super) async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        if !interest.is_writable() {
            return Ok(self.stream.readable().await?.ready());
        }
        tokio::select! {
            biased;
            ready = self.stream.readable(), if interest.is_readable() => Ok(ready?.ready()),
            ready = self.writable() => ready,
        }
    }

    async fn writable(&self) -> io::Result<Ready> {
        let watched = self.room().watch(self.stream.get_ref());
        if let Ok(watched) = watched {
            return Ok(watched.writable().await?.ready());
        }
        // There is no descriptor left to watch it by.
        tokio::time::sleep(TRIED_AGAIN).await;
        Ok(Ready::WRITABLE)
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
        let mut room = self.room();
        let Some(watched) = &room.watched else { return write(self.stream.get_ref()) };
        let written = watched.try_io(Interest::WRITABLE, write);
        if written.is_ok() {
            room.was_there();
        }
        written
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Room {
    fn was_there(&mut self) {
        self.roomy += 1;
        if self.roomy >= ROOMY {
            *self = Room::default();
        }
    }

    fn watch(&mut self, stream: &UnixStream) -> io::Result<Arc<AsyncFd<UnixStream>>> {
        self.roomy = 0;
        if let Some(watched) = &self.watched {
            return Ok(watched.clone());
        }
        let watched = Arc::new(register(stream.try_clone()?, Interest::WRITABLE)?);
        self.watched = Some(watched.clone());
        Ok(watched)
    }
}

fn register(stream: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    // SAFETY: a socket of the standard library has one descriptor, which is open until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(stream, interest) }?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_peer_that_reads_wakes_nobody() {
        let runtime = runtime();
        let sleeps = || runtime.metrics().worker_park_count(0);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        runtime.block_on(async {
            let near = Near::new(ours).unwrap();
            // What a new descriptor is told first.
            tokio::time::sleep(Duration::from_millis(10)).await;
            let before = sleeps();
            near.write(|mut stream| stream.write_all(b"a request")).unwrap();
            let peer = std::thread::spawn(move || {
                theirs.read_exact(&mut [0; 9]).unwrap();
                std::thread::sleep(Duration::from_millis(50));
                theirs.write_all(b"an answer").unwrap();
                theirs
            });
            assert!(near.ready(Interest::READABLE).await.unwrap().is_readable());
            assert_eq!(near.read(|mut stream| stream.read(&mut [0; 64])).unwrap(), 9);
            assert_eq!(sleeps() - before, 1, "asleep until the answer comes");
            drop(peer.join().unwrap());
        });
    }

    #[test]
    fn who_waits_for_room_goes_on_when_there_is_some() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let all = 10 << 20;
        let peer = std::thread::spawn(move || {
            let (mut bytes, mut read) = (vec![0; 100_000], 0);
            while read < all {
                read += theirs.read(&mut bytes).unwrap();
            }
            theirs.write_all(b"an answer").unwrap();
            theirs
        });
        runtime().block_on(async {
            let near = Near::new(ours).unwrap();
            let (bytes, mut written, mut waits) = (vec![1; 1 << 20], 0, 0);
            while written < all {
                let more = &bytes[..bytes.len().min(all - written)];
                match near.write(|mut stream| stream.write(more)) {
                    Ok(count) => written += count,
                    Err(error) => {
                        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                        let ready = near.ready(Interest::READABLE | Interest::WRITABLE).await;
                        assert!(ready.unwrap().is_writable());
                        waits += 1;
                    }
                }
            }
            assert!(waits > 0, "there was room for all of it");
            let ready = near.ready(Interest::READABLE | Interest::WRITABLE).await.unwrap();
            assert!(ready.is_readable() || ready.is_writable());
            assert!(near.room().watched.is_some());
            near.ready(Interest::READABLE).await.unwrap();
            assert_eq!(near.read(|mut stream| stream.read(&mut [0; 64])).unwrap(), 9);
            for _ in 0..ROOMY {
                while near.write(|mut stream| stream.write(b"more")).is_err() {
                    near.ready(Interest::WRITABLE).await.unwrap();
                }
            }
            assert!(near.room().watched.is_none(), "there has been room for long");
        });
        drop(peer.join().unwrap());
    }

    #[test]
    fn what_is_not_there_is_not_read() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        runtime().block_on(async {
            let near = Near::new(ours).unwrap();
            let read = || near.read(|mut stream| stream.read(&mut [0; 64]));
            assert_eq!(read().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            drop(theirs);
            near.ready(Interest::READABLE).await.unwrap();
            assert_eq!(read().unwrap(), 0, "the peer has gone");
        });
    }
}
