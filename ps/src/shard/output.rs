//! What a shard wants done: frames to send, connections to close.

use std::io::IoSlice;
use std::ops::{Deref, Range};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::{Catalogue, ValueEncoding};
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::{Pulled, PulledEncoded};
use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode};

use super::checkpoints::{Order, ShardRestore, ShardSave};
use super::power::Flush;
use crate::event::Event;
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
        body: Body,
        /// Its checksum, if it has one.
        crc: Option<u32>,
        /// Whether its peer has nothing to do with it before more comes that it waits for.
        can_wait: bool,
    },
    /// Send a frame without a body, and these descriptors with its first byte.
    Shared {
        /// Over this connection, which is a Unix socket.
        connection: u64,
        /// The fields of the header.
        envelope: Envelope,
        /// The meta.
        message: Message,
        /// The descriptors.
        descriptors: Vec<OwnedFd>,
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
    /// Tell whoever runs the server.
    Event(Event),
    /// The number of members has changed.
    Members {
        /// How many have ever joined.
        joined: usize,
        /// How many are present.
        present: usize,
    },
}

/// What a frame carries behind its head.
#[derive(Debug)]
pub(crate) enum Body {
    /// Nothing, or what many frames carry.
    Shared(Bytes),
    /// Rows that were pulled: memory for others, once they are sent.
    Rows(Vec<u8>),
}

impl Body {
    pub(crate) const EMPTY: Body = Body::Shared(Bytes::new());
}

impl Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Body::Shared(bytes) => bytes,
            Body::Rows(rows) => rows,
        }
    }
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
    short: Option<Short>,
    encoded: EncodedValuesPart,
}

/// The values of a part that is sent in a shorter form: while it is sent it is held as a copy, and again
/// as its body, for as long as its reader takes.
const SHORT_PART_BYTES: u64 = 256 << 10;

/// The shorter form in which values are sent: made part by part.
#[derive(Debug)]
pub(crate) struct Short {
    pub(crate) catalogue: Arc<Catalogue>,
    pub(crate) shard: ShardId,
    pub(crate) form: ValueEncoding,
}

/// The part under way in that form; kept for the next, as no part is long.
#[derive(Debug, Default)]
pub(crate) struct EncodedValuesPart {
    /// Its values, side by side.
    words: Vec<u64>,
    body: Vec<u8>,
}

impl EncodedValuesPart {
    /// Whether it has buffers to keep.
    pub(crate) fn has_memory(&self) -> bool {
        self.words.capacity() > 0
    }

    fn encode(&mut self, short: &Short, snapshot: &Snapshot, range: Range<u64>) {
        self.words.clear();
        self.words.resize(((range.end - range.start) / 8) as usize, 0);
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for slice in snapshot.pieces(range.clone()) {
            let (target, tail) = rest.split_at_mut(slice.len());
            target.copy_from_slice(slice);
            rest = tail;
        }
        self.body.clear();
        if let Some(layout) = short.catalogue.layout_of(short.shard) {
            layout
                .encode_values(short.form, range, &self.words, &mut self.body)
                .expect("the codecs of values take every element of a part");
        }
    }
}

impl PulledParts {
    pub(crate) fn new(
        snapshot: Snapshot,
        ranges: Vec<Range<u64>>,
        envelope: Envelope,
        (version, gradients): (u64, u64),
        crc: bool,
        (short, encoded): (Option<Short>, EncodedValuesPart),
    ) -> Self {
        let next = (0, ranges.first().map_or(0, |range| range.start));
        let finished = false;
        PulledParts {
            snapshot,
            ranges,
            next,
            finished,
            envelope,
            version,
            gradients,
            crc,
            short,
            encoded,
        }
    }

    /// Whether the values are sent in a shorter form.
    #[cfg(fuzzing)]
    pub(crate) fn is_short(&self) -> bool {
        self.short.is_some()
    }

    /// Appends the header and meta of the next part to `head` and returns the range of its body;
    /// `None` after the last. An answer without bytes is one part without a body.
    pub(crate) fn next_part(&mut self, head: &mut Vec<u8>) -> Option<Range<u64>> {
        let bytes = if self.short.is_some() { SHORT_PART_BYTES } else { PART_BYTES_MAX };
        self.next_part_of(bytes, head)
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
        let part = Pulled { version, gradients, offset: start, last };
        let (message, bytes): (Message, u64) = match &self.short {
            None => (part.into(), end - start),
            Some(short) => {
                self.encoded.encode(short, &self.snapshot, start..end);
                let bytes = end - start;
                (PulledEncoded { part, bytes }.into(), self.encoded.body.len() as u64)
            }
        };
        let crc = self.crc.then(|| self.checksum(start..end));
        encode(head, &self.envelope, &message, BodyStamp { bytes, crc });
        Some(start..end)
    }

    /// Appends the body of the range that `next_part` has just returned, as slices in order.
    pub(crate) fn slices<'a>(&'a self, range: Range<u64>, out: &mut Vec<IoSlice<'a>>) {
        match &self.short {
            None => out.extend(self.snapshot.pieces(range).map(IoSlice::new)),
            Some(_) => out.push(IoSlice::new(&self.encoded.body)),
        }
    }

    fn checksum(&self, range: Range<u64>) -> u32 {
        match &self.short {
            None => self.snapshot.pieces(range).fold(0, crc32c::crc32c_append),
            Some(_) => crc32c::crc32c(&self.encoded.body),
        }
    }

    /// Unpins the values and returns the buffers in which they were encoded.
    pub(crate) fn into_encoded(self) -> EncodedValuesPart {
        self.encoded
    }
}
