//! The links of a rank: one from its predecessor, one to its successor.

mod ends;
mod incoming;
mod socket;

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

pub(crate) use ends::{LinkIn, LinkOut};
pub(crate) use incoming::Incoming;
use pushpull_common::error::Chain;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{RingOperation, RingPart};
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, encode};

use crate::running::{Fault, Operand, Running};
use crate::waiter::Wanted;

/// The bytes of one part, the most that a frame carries. The successor folds a part while the next
/// one is on its way.
pub(crate) const PART_BYTES: usize = 1 << 20;

/// The two links of a rank, and the frames that are half sent or half received.
#[derive(Debug)]
pub(crate) struct Links {
    predecessor: LinkIn,
    incoming: Incoming,
    successor: LinkOut,
    outgoing: Outgoing,
    /// Whether bodies have checksums: between hosts.
    has_crc: bool,
    traffic: Traffic,
    /// The bytes that were written or read, to tell whether a turn has moved any.
    moved: u64,
}

/// Frames that are being sent: heads, and the body of the last.
#[derive(Debug, Default)]
struct Outgoing {
    head: Vec<u8>,
    body: Range<usize>,
    sent: usize,
}

/// The bytes that have crossed the links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Bytes of tensors that were sent.
    pub(crate) sent: u64,
    /// Bytes of tensors that were received.
    pub(crate) received: u64,
    /// Time spent in sends.
    pub(crate) send: Duration,
    /// Time spent in receives, and in folding what was received.
    pub(crate) receive: Duration,
}

/// The state of an operation after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It is done.
    Done,
    /// It waits for one of the sockets.
    Waits {
        /// For bytes of the predecessor.
        reads: bool,
        /// For room in the socket to the successor.
        writes: bool,
        /// Whether bytes have moved in this turn.
        moved: bool,
    },
}

/// Why an operation cannot go on.
#[derive(Debug)]
pub(crate) enum LinkFault {
    /// The link from the predecessor broke.
    Predecessor(String),
    /// The link to the successor broke.
    Successor(io::Error),
    /// The predecessor performs another operation.
    Difference(Box<RingOperation>),
    /// A sum of integers exceeds their type.
    Overflow {
        /// The index of the element in the tensor.
        element: usize,
    },
}

impl From<Fault> for LinkFault {
    fn from(fault: Fault) -> LinkFault {
        match fault {
            Fault::Difference(other) => LinkFault::Difference(Box::new(other)),
            Fault::Protocol(detail) => LinkFault::Predecessor(detail),
            Fault::Overflow { element } => LinkFault::Overflow { element },
        }
    }
}

impl From<ReadError> for LinkFault {
    fn from(error: ReadError) -> LinkFault {
        LinkFault::Predecessor(Chain(&error).to_string())
    }
}

impl Links {
    /// Joins two links. `reader` continues the stream of the predecessor.
    pub(crate) fn new(
        predecessor: LinkIn,
        reader: FrameReader,
        successor: LinkOut,
        has_crc: bool,
    ) -> Links {
        Links {
            predecessor,
            incoming: Incoming::new(reader),
            successor,
            outgoing: Outgoing::default(),
            has_crc,
            traffic: Traffic::default(),
            moved: 0,
        }
    }

    /// The socket from the predecessor, which becomes readable.
    pub(crate) fn predecessor(&self) -> BorrowedFd<'_> {
        self.predecessor.as_fd()
    }

    /// The socket to the successor; see [`Links::successor_waits_for_bytes`].
    pub(crate) fn successor(&self) -> BorrowedFd<'_> {
        self.successor.as_fd()
    }

    /// Returns whether the socket to the successor becomes readable when there is room, instead of
    /// writable.
    pub(crate) fn successor_waits_for_bytes(&self) -> bool {
        self.successor.waits_for_bytes()
    }

    /// Prepares a wait for the sockets. Returns whether there is none, because one of the links is
    /// ready.
    ///
    /// # Errors
    /// If a neighbour has broken a link.
    pub(crate) fn begin_wait(&mut self, wanted: Wanted) -> Result<bool, LinkFault> {
        let broken = |error: io::Error| LinkFault::Predecessor(error.to_string());
        let has_bytes = wanted.reads && self.predecessor.begin_wait().map_err(broken)?;
        let has_room =
            wanted.writes && self.successor.begin_wait().map_err(LinkFault::Successor)?;
        Ok(has_bytes || has_room)
    }

    /// Returns the bytes that have crossed the links.
    pub(crate) fn traffic(&self) -> Traffic {
        Traffic { received: self.incoming.received(), ..self.traffic }
    }

    /// Sends and receives as much of an operation as the sockets allow without waiting. `operand`
    /// has the memory of the operation, the same in each turn.
    ///
    /// # Errors
    /// The operation cannot go on, and no later one either.
    pub(crate) fn turn(
        &mut self,
        running: &mut Running,
        operand: &mut Operand<'_>,
    ) -> Result<Turn, LinkFault> {
        let before = self.moved;
        loop {
            let begin = Instant::now();
            let writes = self.send(running, operand.bytes).map_err(LinkFault::Successor)?;
            let sent = Instant::now();
            let predecessor = &mut self.predecessor;
            let moved = &mut self.moved;
            let mut source = |slices: &mut [IoSliceMut<'_>]| {
                let read = predecessor.read(slices);
                *moved += *read.as_ref().unwrap_or(&0) as u64;
                read
            };
            let arrived = self.incoming.receive(&mut source, running, operand)?;
            self.traffic.send += sent - begin;
            if arrived {
                self.traffic.receive += sent.elapsed();
            }
            if running.is_done() && !writes {
                return Ok(Turn::Done);
            }
            if !arrived {
                // What has been received was sent on above.
                let moved = self.moved != before;
                return Ok(Turn::Waits { reads: running.expects(), writes, moved });
            }
        }
    }

    /// Sends what is due. Returns whether the socket is full.
    fn send(&mut self, running: &mut Running, tensor: &[u8]) -> io::Result<bool> {
        loop {
            if self.outgoing.is_empty() && !self.fill_outgoing(running, tensor) {
                return Ok(false);
            }
            let Outgoing { head, body, sent } = &mut self.outgoing;
            let head_rest = &head[(*sent).min(head.len())..];
            let body_rest = &tensor[body.start + sent.saturating_sub(head.len())..body.end];
            match self.successor.write(&[IoSlice::new(head_rest), IoSlice::new(body_rest)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    *sent += count;
                    self.moved += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if *sent == head.len() + body.len() {
                let bytes = body.len();
                self.traffic.sent += bytes as u64;
                self.outgoing.clear();
                if bytes > 0 {
                    running.sent(bytes);
                }
            }
        }
    }

    /// Encodes the next frames: the announcement and a part. Returns whether there are some.
    fn fill_outgoing(&mut self, running: &mut Running, tensor: &[u8]) -> bool {
        let Outgoing { head, body, .. } = &mut self.outgoing;
        let envelope = Envelope { sequence: running.number(), ..Envelope::default() };
        if let Some(operation) = running.announcement() {
            encode(head, &envelope, &operation.into(), BodyStamp::NONE);
        }
        if let Some(part) = running.next_part(PART_BYTES) {
            let bytes = &tensor[part.bytes.clone()];
            let crc = self.has_crc.then(|| crc32c::crc32c(bytes));
            let stamp = BodyStamp { bytes: bytes.len() as u64, crc };
            let message = RingPart { pass: part.pass, offset: part.offset as u64 };
            encode(head, &envelope, &message.into(), stamp);
            *body = part.bytes;
        }
        !head.is_empty()
    }
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    fn clear(&mut self) {
        self.head.clear();
        self.body = 0..0;
        self.sent = 0;
    }
}
