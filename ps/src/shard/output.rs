//! What a shard wants done: frames to send, connections to close.

use std::io::IoSlice;
use std::ops::Range;

use bytes::Bytes;
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::Pulled;
use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode};

use super::checkpoints::{Order, ShardRestore, ShardSave};
use super::power::Flush;
use crate::store::Snapshot;

/// One thing a shard wants done.
#[derive(Debug)]
pub(crate) enum Output {
    /// Send a frame.
    Send {
        /// Over this connection.
        connection: u64,
        /// The fields of the header.
        envelope: Envelope,
        /// The meta.
        message: Message,
        /// The body.
        body: Bytes,
    },
    /// Answer a pull.
    Stream {
        /// Over this connection.
        connection: u64,
        /// In these parts.
        parts: PulledParts,
    },
    /// Tell the saver, which serves the owner's shard; it answers with [`super::Input::News`].
    Order(Order),
    /// Write this shard's part of a checkpoint; answered with [`super::Input::ShardSaved`].
    SaveShard(Box<ShardSave>),
    /// Write an image of the durable words; answered with [`super::Input::Flushed`].
    Flush(Box<Flush>),
    /// Read a checkpoint; answered with [`super::Input::ShardRestored`].
    RestoreShard(Box<ShardRestore>),
    /// Close the connection once all that was sent before is out.
    Close {
        /// Which.
        connection: u64,
    },
    /// Tell the step owner, if it is not this shard, over the connection to it.
    ToOwner {
        /// The steps applied here.
        envelope: Envelope,
        /// What.
        message: Message,
    },
    /// The number of members has changed.
    Members {
        /// How many have ever joined.
        joined: usize,
        /// How many are present.
        present: usize,
    },
}

/// The answer to a pull, made part by part as the connection takes it.
#[derive(Debug)]
pub(crate) struct PulledParts {
    snapshot: Snapshot,
    ranges: Vec<Range<u64>>,
    /// The range the next part comes from, and where in it.
    next: (usize, u64),
    finished: bool,
    envelope: Envelope,
    /// What the values are of: pushes applied, and gradients among them.
    version: u64,
    gradients: u64,
    crc: bool,
}

impl PulledParts {
    pub(crate) fn new(
        snapshot: Snapshot,
        ranges: Vec<Range<u64>>,
        envelope: Envelope,
        (version, gradients): (u64, u64),
        crc: bool,
    ) -> Self {
        let next = (0, ranges.first().map_or(0, |range| range.start));
        let finished = false;
        PulledParts { snapshot, ranges, next, finished, envelope, version, gradients, crc }
    }

    /// Appends the header and meta of the next part to `head` and returns the range of its body;
    /// `None` after the last. An answer without bytes is one part without a body.
    pub(crate) fn next_part(&mut self, head: &mut Vec<u8>) -> Option<Range<u64>> {
        self.next_part_of(PART_BYTES_MAX, head)
    }

    /// The same with a part of at most so many bytes.
    pub(crate) fn next_part_of(&mut self, bytes: u64, head: &mut Vec<u8>) -> Option<Range<u64>> {
        if self.finished {
            return None;
        }
        let (index, start) = self.next;
        let range_end = self.ranges.get(index).map_or(start, |range| range.end);
        let end = range_end.min(start + bytes);
        self.next = if end < range_end {
            (index, end)
        } else {
            (index + 1, self.ranges.get(index + 1).map_or(end, |range| range.start))
        };
        self.finished = self.next.0 >= self.ranges.len();
        let PulledParts { version, gradients, finished: last, .. } = *self;
        let pulled = Pulled { version, gradients, offset: start, last };
        let stamp =
            BodyStamp { bytes: end - start, crc: self.crc.then(|| self.checksum(start..end)) };
        encode(head, &self.envelope, &pulled.into(), stamp);
        Some(start..end)
    }

    /// Appends a range that `next_part` returned, as slices in order.
    pub(crate) fn slices<'a>(&'a self, range: Range<u64>, out: &mut Vec<IoSlice<'a>>) {
        self.snapshot.slices(range, out);
    }

    fn checksum(&self, range: Range<u64>) -> u32 {
        let mut slices = Vec::new();
        self.snapshot.slices(range, &mut slices);
        slices.iter().fold(0, |crc, slice| crc32c::crc32c_append(crc, slice))
    }
}
