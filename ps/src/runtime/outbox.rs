//! What a connection has yet to send, and how it goes out.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Instant;

use pushpull_net::Stream;
use tokio::sync::Notify;

use crate::shard::output::{AnswerBody, PulledParts};

/// Frames that a connection may have waiting before it is read from again, and bytes of their bodies:
/// rows that were pulled are there as a copy.
const QUEUE_MAX: usize = 64;
const BODIES_MAX: usize = 4 << 20;

/// One thing to send.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// A frame.
    Frame { head: Vec<u8>, body: AnswerBody },
    /// A frame without a body, and descriptors that go with its first byte.
    Shared { head: Vec<u8>, descriptors: Vec<OwnedFd> },
    /// The answer to a pull, made part by part.
    Parts(PulledParts),
}

/// The answer to a pull that is sent to its end: what it has pinned can be let go, and its memory used
/// again.
#[derive(Debug)]
pub(super) enum Answered {
    Values(Box<PulledParts>),
    Rows(Vec<u8>),
}

impl Outgoing {
    /// What it holds beside what is pinned.
    fn body_bytes(&self) -> usize {
        match self {
            Outgoing::Frame { body, .. } => body.len(),
            Outgoing::Parts(_) | Outgoing::Shared { .. } => 0,
        }
    }
}

/// The sending side of a connection. Owned by the shard's thread.
#[derive(Debug)]
pub(super) struct Outbox {
    queue: RefCell<VecDeque<Outgoing>>,
    /// The bytes of the bodies in it.
    bodies: Cell<usize>,
    /// What is in it is to be sent now.
    due: Cell<bool>,
    current: RefCell<Current>,
    /// Wakes the connection's task: there is something to send, or it is to close.
    pub(super) notify: Notify,
    /// Close when all is sent.
    pub(super) closing: Cell<bool>,
    /// Close at once.
    pub(super) broken: Cell<bool>,
    /// Since when the peer takes nothing of what waits for it.
    pub(super) stuck_since: Cell<Option<Instant>>,
    /// Since when the answer to a pull at the front is being sent: for so long it holds its pins.
    pub(super) pull_since: Cell<Option<Instant>>,
    /// Since when a frame of the peer is half here without progress.
    pub(super) half_since: Cell<Option<Instant>>,
}

/// How far the front of the queue is sent.
#[derive(Debug, Default)]
struct Current {
    /// Header and meta of the part under way, for [`Outgoing::Parts`].
    head: Vec<u8>,
    part: Option<Range<u64>>,
    sent: usize,
    /// Memory for the slices of a write, without any.
    slices: Vec<IoSlice<'static>>,
}

impl Outbox {
    pub(super) fn new() -> Self {
        Outbox {
            queue: RefCell::default(),
            bodies: Cell::new(0),
            due: Cell::new(false),
            current: RefCell::default(),
            notify: Notify::new(),
            closing: Cell::new(false),
            broken: Cell::new(false),
            stuck_since: Cell::new(None),
            pull_since: Cell::new(None),
            half_since: Cell::new(None),
        }
    }

    /// Takes what is to be sent, with what comes after it or once it is due.
    pub(super) fn put(&self, outgoing: Outgoing) {
        self.bodies.set(self.bodies.get() + outgoing.body_bytes());
        self.queue.borrow_mut().push_back(outgoing);
    }

    /// Takes what is to be sent now, with what came before it.
    pub(super) fn push(&self, outgoing: Outgoing) {
        self.put(outgoing);
        self.send_all();
    }

    /// All of it is to be sent now.
    pub(super) fn send_all(&self) {
        self.due.set(true);
        self.notify.notify_one();
    }

    pub(super) fn close(&self) {
        self.closing.set(true);
        self.send_all();
    }

    pub(super) fn break_off(&self) {
        self.broken.set(true);
        self.notify.notify_one();
    }

    /// Whether nothing is to be sent now.
    pub(super) fn is_idle(&self) -> bool {
        !self.due.get() || self.queue.borrow().is_empty()
    }

    /// Whether so much waits that no more requests are read.
    pub(super) fn is_full(&self) -> bool {
        self.queue.borrow().len() >= QUEUE_MAX || self.bodies.get() >= BODIES_MAX
    }

    /// Sends as much as the link takes, and hands on each answer to a pull that is sent to its end.
    pub(super) fn flush(
        &self,
        stream: &Stream,
        mut answered: impl FnMut(Answered),
    ) -> io::Result<()> {
        if !self.due.get() {
            return Ok(());
        }
        let mut queue = self.queue.borrow_mut();
        let mut current = self.current.borrow_mut();
        while let Some(front) = queue.front_mut() {
            if matches!(front, Outgoing::Parts(_)) && self.pull_since.get().is_none() {
                self.pull_since.set(Some(Instant::now()));
            }
            match send(front, &mut current, stream) {
                Ok(Sent::All) => {
                    (current.part, current.sent) = (None, 0);
                    self.stuck_since.set(None);
                    let Some(sent) = queue.pop_front() else { break };
                    self.bodies.set(self.bodies.get() - sent.body_bytes());
                    match sent {
                        Outgoing::Frame { body, .. } => {
                            if let AnswerBody::Rows(rows) = body {
                                answered(Answered::Rows(rows));
                            }
                        }
                        Outgoing::Shared { .. } => {}
                        Outgoing::Parts(parts) => {
                            self.pull_since.set(None);
                            answered(Answered::Values(Box::new(parts)));
                        }
                    }
                }
                Ok(Sent::Some) => self.stuck_since.set(None),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.stuck_since.get().is_none() {
                        self.stuck_since.set(Some(Instant::now()));
                    }
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.due.set(!queue.is_empty());
        Ok(())
    }
}

/// Whether something may be tried again as it is.
fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

enum Sent {
    All,
    Some,
}

/// One write of the front of the queue.
fn send(front: &mut Outgoing, current: &mut Current, stream: &Stream) -> io::Result<Sent> {
    let mut slices = pooled_vec(std::mem::take(&mut current.slices));
    let sent = write(front, current, stream, &mut slices);
    current.slices = pooled_vec(slices);
    sent
}

/// The memory of a list of slices, for others.
fn pooled_vec<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    // Collecting as many of the same size as there were takes the memory that there was.
    slices.into_iter().map(|_| IoSlice::new(&[])).collect()
}

fn write<'a>(
    front: &'a mut Outgoing,
    current: &'a mut Current,
    stream: &Stream,
    slices: &mut Vec<IoSlice<'a>>,
) -> io::Result<Sent> {
    let (total, is_last, descriptors) = match front {
        Outgoing::Frame { head, body } => {
            slices.push(IoSlice::new(head));
            slices.push(IoSlice::new(body));
            (head.len() + body.len(), true, None)
        }
        Outgoing::Shared { head, descriptors } => {
            slices.push(IoSlice::new(head));
            (head.len(), true, Some(descriptors).filter(|_| current.sent == 0))
        }
        Outgoing::Parts(parts) => {
            if current.part.is_none() {
                current.head.clear();
                match parts.next_part(&mut current.head) {
                    None => return Ok(Sent::All),
                    Some(range) => (current.part, current.sent) = (Some(range), 0),
                }
            }
            let range = current.part.clone().unwrap_or_default();
            slices.push(IoSlice::new(&current.head));
            parts.slices(range, slices);
            (slices.iter().map(|slice| slice.len()).sum(), false, None)
        }
    };
    let mut rest = &mut slices[..];
    IoSlice::advance_slices(&mut rest, current.sent);
    let count = match descriptors {
        Some(descriptors) => match stream.try_send(rest, descriptors) {
            Err(error) if !is_for_now(&error) => {
                // The system passes no more of them: whoever asked goes on without.
                descriptors.clear();
                stream.try_write(rest)?
            }
            sent => sent?,
        },
        None => stream.try_write(rest)?,
    };
    if count == 0 {
        return Err(io::ErrorKind::WriteZero.into());
    }
    current.sent += count;
    if current.sent == total {
        (current.part, current.sent) = (None, 0);
        if is_last {
            return Ok(Sent::All);
        }
    }
    Ok(Sent::Some)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use bytes::Bytes;
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn what_can_wait_goes_with_what_cannot_or_once_it_is_due() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (stream, mut peer) = (Stream::unix(ours).unwrap(), theirs.into_std().unwrap());
        let outbox = Outbox::new();
        let frame = |text: &[u8]| {
            let (head, body) = (text.to_vec(), AnswerBody::Shared(Bytes::new()));
            Outgoing::Frame { head, body }
        };
        let mut sent = || {
            outbox.flush(&stream, |_| ()).unwrap();
            let mut bytes = [0; 64];
            let count = peer.read(&mut bytes).unwrap_or_default();
            bytes[..count].to_vec()
        };
        outbox.put(frame(b"it counts"));
        assert!(sent().is_empty() && outbox.is_idle(), "nobody is in a hurry");
        outbox.push(frame(b", go on"));
        assert!(!outbox.is_idle());
        assert_eq!(sent(), b"it counts, go on");
        outbox.put(frame(b"it counts"));
        assert!(sent().is_empty() && outbox.is_idle(), "what was due has gone");
        outbox.send_all();
        assert_eq!(sent(), b"it counts");
        // As when it has gone with something else meanwhile.
        outbox.send_all();
        assert!(sent().is_empty());
        outbox.put(frame(b"it counts"));
        assert!(sent().is_empty(), "there was nothing to send when it was due");
        outbox.close();
        assert_eq!(sent(), b"it counts");
        assert!(outbox.is_idle());
    }
}
