//! The send queue of a connection, and how it is written to the socket.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Instant;

use pushpull_net::Stream;
use tokio::sync::Notify;

use crate::shard::output::{AnswerBody, EncodeBuffers, PulledParts};

/// A connection with this many queued frames, or this many bytes of bodies, is not read from.
/// Pulled rows are queued as a copy.
const QUEUE_MAX: usize = 64;
const BODIES_MAX: usize = 4 << 20;

/// One item of the send queue.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// A frame.
    Frame { head: Vec<u8>, body: AnswerBody },
    /// A frame without a body, whose first byte carries descriptors.
    Shared { head: Vec<u8>, descriptors: Vec<OwnedFd> },
    /// The answer to a pull, encoded part by part.
    Parts(PulledParts),
}

/// What is left of a sent answer: its memory, for reuse. Its pins are released.
#[derive(Debug)]
pub(super) enum SentAnswer {
    Values(EncodeBuffers),
    Rows(Vec<u8>),
}

impl Outgoing {
    /// Returns the bytes of the body that the queue itself holds; pinned blocks do not count.
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
    /// Bytes of the bodies in the queue.
    bodies: Cell<usize>,
    /// The queue is to be sent now.
    due: Cell<bool>,
    current: RefCell<SendCursor>,
    /// Wakes the connection's task to send or to close.
    pub(super) notify: Notify,
    /// Close once everything is sent.
    pub(super) closing: Cell<bool>,
    /// Close at once.
    pub(super) broken: Cell<bool>,
    /// Since when the peer has read nothing of the queued frames.
    pub(super) stuck_since: Cell<Option<Instant>>,
    /// Since when the pull at the front has been in progress; it holds its pins until it is sent.
    pub(super) pull_since: Cell<Option<Instant>>,
    /// Since when a partly received frame has made no progress.
    pub(super) partial_since: Cell<Option<Instant>>,
}

/// How far the front of the queue is sent.
#[derive(Debug, Default)]
struct SendCursor {
    /// Header and meta of the current part, for [`Outgoing::Parts`].
    head: Vec<u8>,
    part: Option<Range<u64>>,
    sent: usize,
    /// An empty list whose allocation each write reuses for its slices.
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
            partial_since: Cell::new(None),
        }
    }

    /// Queues an item that is sent with the next one, or once the queue is due.
    pub(super) fn put(&self, outgoing: Outgoing) {
        self.bodies.set(self.bodies.get() + outgoing.body_bytes());
        self.queue.borrow_mut().push_back(outgoing);
    }

    /// Queues an item and sends the queue now.
    pub(super) fn push(&self, outgoing: Outgoing) {
        self.put(outgoing);
        self.send_all();
    }

    /// Marks the whole queue as due.
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

    /// Whether the queue has reached a limit, so that no more requests are read.
    pub(super) fn is_full(&self) -> bool {
        self.queue.borrow().len() >= QUEUE_MAX || self.bodies.get() >= BODIES_MAX
    }

    /// Sends as much as the socket takes, and passes each completely sent answer to a pull to
    /// `answered`.
    pub(super) fn flush(
        &self,
        stream: &Stream,
        mut answered: impl FnMut(SentAnswer),
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
                Ok(SendProgress::All) => {
                    (current.part, current.sent) = (None, 0);
                    self.stuck_since.set(None);
                    let Some(sent) = queue.pop_front() else { break };
                    self.bodies.set(self.bodies.get() - sent.body_bytes());
                    match sent {
                        Outgoing::Frame { body, .. } => {
                            if let AnswerBody::Rows(rows) = body {
                                answered(SentAnswer::Rows(rows));
                            }
                        }
                        Outgoing::Shared { .. } => {}
                        Outgoing::Parts(parts) => {
                            self.pull_since.set(None);
                            answered(SentAnswer::Values(parts.into_buffers()));
                        }
                    }
                }
                Ok(SendProgress::Some) => self.stuck_since.set(None),
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

/// Whether a write that failed like this can be retried unchanged.
fn is_retryable(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

enum SendProgress {
    All,
    Some,
}

/// Writes once from the front of the queue.
fn send(
    front: &mut Outgoing,
    current: &mut SendCursor,
    stream: &Stream,
) -> io::Result<SendProgress> {
    let mut slices = pooled_vec(std::mem::take(&mut current.slices));
    let sent = write(front, current, stream, &mut slices);
    current.slices = pooled_vec(slices);
    sent
}

/// Clears a list of slices and keeps its allocation for slices of another lifetime.
fn pooled_vec<'a>(mut slices: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    slices.clear();
    // `collect` reuses the allocation in place: the element size is the same.
    slices.into_iter().map(|_| IoSlice::new(&[])).collect()
}

fn write<'a>(
    front: &'a mut Outgoing,
    current: &'a mut SendCursor,
    stream: &Stream,
    slices: &mut Vec<IoSlice<'a>>,
) -> io::Result<SendProgress> {
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
                    None => return Ok(SendProgress::All),
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
            Err(error) if !is_retryable(&error) => {
                // The system passes no descriptors: the peer continues without shared memory.
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
            return Ok(SendProgress::All);
        }
    }
    Ok(SendProgress::Some)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use bytes::Bytes;
    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn a_corked_frame_is_sent_with_the_next_one_or_once_it_is_due() {
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
        assert!(sent().is_empty() && outbox.is_idle(), "a corked frame waits");
        outbox.push(frame(b", go on"));
        assert!(!outbox.is_idle());
        assert_eq!(sent(), b"it counts, go on");
        outbox.put(frame(b"it counts"));
        assert!(
            sent().is_empty() && outbox.is_idle(),
            "the queue is no longer due once it is empty"
        );
        outbox.send_all();
        assert_eq!(sent(), b"it counts");
        // The frame may have been sent with another in the meantime.
        outbox.send_all();
        assert!(sent().is_empty());
        outbox.put(frame(b"it counts"));
        assert!(sent().is_empty(), "a due queue without frames does not stay due");
        outbox.close();
        assert_eq!(sent(), b"it counts");
        assert!(outbox.is_idle());
    }
}
