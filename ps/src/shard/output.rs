//! The outputs of a shard, such as frames to send and connections to close.

use std::collections::VecDeque;
use std::ops::{Deref, Range};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::{Catalogue, ValueEncoding};
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::{Pulled, PulledEncoded, PushAnswer};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{
    BodyStamp, Envelope, Features, Message, Outcome, Refusal, encode_for, message,
};
use pushpull_store::store::Snapshot;

use super::file_work::flush::Flush;
use super::file_work::restore_work::RestoreWork;
use super::file_work::saver_order::SaverOrder;
use super::file_work::shard_save::ShardSave;
use crate::event::Event;

/// An output of a shard.
#[derive(Debug)]
pub(crate) enum ShardOutput {
    /// Send a frame.
    Send {
        /// The connection.
        connection: u64,
        /// The fields of the header.
        envelope: Envelope,
        /// The meta.
        message: Message,
        /// The body.
        body: AnswerBody,
        /// The checksum of the body, if it has one.
        crc: Option<u32>,
        /// Whether the frame may be corked: its peer is waiting for a later frame as well.
        can_wait: bool,
    },
    /// Send a frame without a body, with these descriptors on its first byte.
    Shared {
        /// The connection, which is a Unix socket.
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
        /// The connection.
        connection: u64,
        /// The parts of the answer.
        parts: PulledParts,
    },
    /// An order for the saver of the step owner. It answers with [`super::ShardInput::SaverEvent`].
    SaverOrder(SaverOrder),
    /// Write this shard's part of a checkpoint. The result is [`super::ShardInput::ShardSaved`].
    SaveShard(Box<ShardSave>),
    /// Write an image of the durable words. The result is [`super::ShardInput::Flushed`].
    Flush(Box<Flush>),
    /// Check or read this shard's part of a checkpoint. The result is
    /// [`super::ShardInput::RestoreAdvanced`].
    RestoreShard(Box<RestoreWork>),
    /// Close the connection after everything queued before this output has been sent.
    Close {
        /// The connection.
        connection: u64,
    },
    /// Send a message to the step owner over the connection to it, from another shard.
    ToOwner {
        /// The fields of the header, with the number of steps applied here.
        envelope: Envelope,
        /// The meta.
        message: Message,
    },
    /// Stop the task for good, with all its shards.
    Stop,
    /// Report an event to the operator.
    Event(Event),
    /// The number of members has changed.
    Members {
        /// How many have ever joined.
        joined: usize,
        /// How many are present.
        present: usize,
    },
}

/// The outputs of a shard, in order.
///
/// Invariant: the stamp is the shard's global step and restore epoch.
#[derive(Debug, Default)]
pub(super) struct ShardOutputs {
    pub(super) queue: VecDeque<ShardOutput>,
    stamp: (GlobalStep, RestoreEpoch),
    /// The cause of the last refusal of the chief, until a declaration is accepted.
    chief_refusal: Option<String>,
}

impl ShardOutputs {
    /// Sets the global step and the restore epoch that every answer carries.
    pub(super) fn stamp(&mut self, step: GlobalStep, epoch: RestoreEpoch) {
        self.stamp = (step, epoch);
    }

    pub(super) fn push(&mut self, output: ShardOutput) {
        self.queue.push_back(output);
    }

    pub(super) fn close(&mut self, connection: u64) {
        self.push(ShardOutput::Close { connection });
    }

    pub(super) fn answer(&mut self, connection: u64, request: Envelope, message: Message) {
        self.answer_with(connection, request, message, AnswerBody::EMPTY, None);
    }

    /// Answers with a body, and its checksum if it has one.
    pub(super) fn answer_with(
        &mut self,
        connection: u64,
        request: Envelope,
        message: Message,
        body: AnswerBody,
        crc: Option<u32>,
    ) {
        let envelope = self.stamped(request);
        let can_wait = false;
        self.push(ShardOutput::Send { connection, envelope, message, body, crc, can_wait });
    }

    /// Answers with a frame that may be corked until the next frame to the same client.
    pub(super) fn answer_corked(&mut self, connection: u64, request: Envelope, message: Message) {
        let envelope = self.stamped(request);
        let body = AnswerBody::EMPTY;
        let crc = None;
        let can_wait = true;
        self.push(ShardOutput::Send { connection, envelope, message, body, crc, can_wait });
    }

    /// Answers a push with its outcome, and with nothing to continue with.
    pub(super) fn answer_push(
        &mut self,
        connection: u64,
        request: Envelope,
        outcome: Outcome,
        duplicate: bool,
    ) {
        let answer = PushAnswer { outcome, duplicate, next: None, ended: None, push_slot: 0 };
        self.answer(connection, request, answer.into());
    }

    pub(super) fn refuse(&mut self, connection: u64, request: Envelope, refusal: Refusal) {
        self.answer(connection, request, message::Refused { refusal }.into());
    }

    /// Refuses a request of the chief, and reports the cause, unless the next attempt of the chief
    /// needs no help.
    pub(super) fn refuse_chief(
        &mut self,
        connection: u64,
        request: Envelope,
        shard: ShardId,
        asked: &'static str,
        refusal: Refusal,
    ) {
        let is_routine = matches!(
            refusal,
            Refusal::NotInitialized {} | Refusal::RestoreEpoch { .. } | Refusal::Fenced { .. }
        );
        if !is_routine {
            let cause = refusal.to_string();
            self.chief_refusal = Some(format!("{shard} has refused to {asked}: {cause}"));
            self.push(ShardOutput::Event(Event::ChiefRefused { shard, request: asked, cause }));
        }
        self.refuse(connection, request, refusal);
    }

    /// Records that a declaration of the chief was accepted.
    pub(super) fn chief_accepted(&mut self) {
        self.chief_refusal = None;
    }

    /// Returns what the chief was refused last, with the cause; `None` once it was accepted.
    pub(super) fn chief_refusal(&self) -> Option<&str> {
        self.chief_refusal.as_deref()
    }

    pub(super) fn refuse_storage(&mut self, connection: u64, request: Envelope, error: &str) {
        let detail = Detail::clipped(error);
        self.refuse(connection, request, Refusal::Storage { detail });
    }

    /// Sends a message that is not an answer.
    pub(super) fn send(&mut self, connection: u64, envelope: Envelope, message: Message) {
        let body = AnswerBody::EMPTY;
        let crc = None;
        let can_wait = false;
        self.push(ShardOutput::Send { connection, envelope, message, body, crc, can_wait });
    }

    /// Returns the envelope of a message that is not an answer, with the restore epoch.
    pub(super) fn epoch_only(&self) -> Envelope {
        Envelope { restore_epoch: self.stamp.1, ..Envelope::default() }
    }

    /// Adds the stamp to the envelope of an answer.
    pub(super) fn stamped(&self, request: Envelope) -> Envelope {
        let (step, restore_epoch) = self.stamp;
        Envelope { step, restore_epoch, ..request }
    }
}

/// The body of an answer.
#[derive(Debug)]
pub(crate) enum AnswerBody {
    /// No bytes, or bytes that several frames share.
    Shared(Bytes),
    /// Rows of a pull. The buffer returns to the pool after the send.
    Rows(Vec<u8>),
}

impl AnswerBody {
    pub(crate) const EMPTY: AnswerBody = AnswerBody::Shared(Bytes::new());
}

impl Deref for AnswerBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            AnswerBody::Shared(bytes) => bytes,
            AnswerBody::Rows(rows) => rows,
        }
    }
}

/// The answer to a pull. Its parts are produced when the connection can take them.
#[derive(Debug)]
pub(crate) struct PulledParts {
    snapshot: Snapshot,
    ranges: Vec<Range<u64>>,
    /// The index of the range of the next part, and the position of the part in the layout.
    next: (usize, u64),
    finished: bool,
    envelope: Envelope,
    /// The pushes and the gradients that had been applied to the values.
    version: u64,
    gradients: u64,
    crc: bool,
    encoder: Option<PullEncoder>,
    encoded: EncodeBuffers,
}

/// The bytes of values in one encoded part. A part exists twice while it is sent: as a copy of the
/// values and as the encoded body. It stays as long as its reader takes.
const SHORT_PART_BYTES: u64 = 256 << 10;

/// Encodes the values of a pull, part by part.
#[derive(Debug)]
pub(crate) struct PullEncoder {
    pub(crate) catalogue: Arc<Catalogue>,
    pub(crate) shard: ShardId,
    pub(crate) form: ValueEncoding,
}

/// Buffers for one encoded part. They are reused for the next, and are small because parts are
/// short.
#[derive(Debug, Default)]
pub(crate) struct EncodeBuffers {
    /// The values of the part, contiguous.
    words: Vec<u64>,
    body: Vec<u8>,
}

impl EncodeBuffers {
    /// Returns whether there are buffers to keep.
    pub(crate) fn has_memory(&self) -> bool {
        self.words.capacity() > 0
    }

    fn encode(&mut self, encoder: &PullEncoder, snapshot: &Snapshot, range: Range<u64>) {
        self.words.clear();
        self.words.resize(((range.end - range.start) / 8) as usize, 0);
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        for slice in snapshot.pieces(range.clone()) {
            let (target, tail) = rest.split_at_mut(slice.len());
            target.copy_from_slice(slice);
            rest = tail;
        }
        self.body.clear();
        if let Some(layout) = encoder.catalogue.layout_of(encoder.shard) {
            layout
                .encode_values(encoder.form, range, &self.words, &mut self.body)
                .expect("codecs of values encode any element");
        }
    }
}

impl PulledParts {
    /// Creates the parts of an answer that are not encoded.
    pub(crate) fn new(
        snapshot: Snapshot,
        ranges: Vec<Range<u64>>,
        envelope: Envelope,
        version: u64,
        gradients: u64,
        crc: bool,
    ) -> Self {
        let next = (0, ranges.first().map_or(0, |range| range.start));
        PulledParts {
            snapshot,
            ranges,
            next,
            finished: false,
            envelope,
            version,
            gradients,
            crc,
            encoder: None,
            encoded: EncodeBuffers::default(),
        }
    }

    /// Encodes the parts, in these buffers.
    pub(crate) fn encoded(self, encoder: PullEncoder, encoded: EncodeBuffers) -> Self {
        PulledParts { encoder: Some(encoder), encoded, ..self }
    }

    /// Appends the header and meta of the next part to `head`, and returns the range of its body.
    /// `None` after the last part. An answer without bytes is one part without a body.
    pub(crate) fn next_part(
        &mut self,
        features: Features,
        head: &mut Vec<u8>,
    ) -> Option<Range<u64>> {
        let bytes = if self.encoder.is_some() { SHORT_PART_BYTES } else { PART_BYTES_MAX };
        self.next_part_of(features, bytes, head)
    }

    /// Does the work of [`PulledParts::next_part`] with a part of at most `bytes` bytes.
    pub(crate) fn next_part_of(
        &mut self,
        features: Features,
        bytes: u64,
        head: &mut Vec<u8>,
    ) -> Option<Range<u64>> {
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
        let (message, bytes): (Message, u64) = match &self.encoder {
            None => (part.into(), end - start),
            Some(encoder) => {
                self.encoded.encode(encoder, &self.snapshot, start..end);
                let bytes = end - start;
                (PulledEncoded { part, bytes }.into(), self.encoded.body.len() as u64)
            }
        };
        let crc = self.crc.then(|| self.slices(start..end).fold(0, crc32c::crc32c_append));
        encode_for(features, head, &self.envelope, &message, BodyStamp { bytes, crc });
        Some(start..end)
    }

    /// Yields the body of the range that `next_part` has just returned, as slices in order.
    pub(crate) fn slices(&self, range: Range<u64>) -> impl Iterator<Item = &[u8]> {
        let (pieces, encoded) = match &self.encoder {
            None => (Some(self.snapshot.pieces(range)), None),
            Some(_) => (None, Some(&self.encoded.body[..])),
        };
        pieces.into_iter().flatten().chain(encoded)
    }

    /// Unpins the values and returns the buffers that encoded them.
    pub(crate) fn into_buffers(self) -> EncodeBuffers {
        self.encoded
    }
}
