//! The parts of a push: the range that each covers on its shard, and its bytes on this side.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::Partition;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{ShardId, VariableId};

use crate::push_buffers::{GradientBuffer, PushBufferId};

/// The body of a frame: slices of memory that is owned elsewhere. A clone does not allocate.
#[derive(Clone, Debug, Default)]
pub(crate) enum FrameBody {
    #[default]
    Empty,
    One(Bytes),
    Several(Arc<[Bytes]>),
    /// One of the bodies of a source.
    Stored {
        source: Arc<dyn BodySource>,
        index: usize,
    },
    /// Consecutive pieces of a buffer, and their total length.
    Pieces {
        buffer: Arc<GradientBuffer>,
        pieces: Arc<[BodyPiece]>,
        range: Range<usize>,
        bytes: u64,
    },
}

/// Memory that contains several bodies.
pub(crate) trait BodySource: Debug + Send + Sync {
    /// Returns a body, and the number of zeros that follow it, fewer than eight.
    fn body(&self, which: usize) -> (&[u8], usize);
}

/// A piece of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BodyPiece {
    /// This range of a buffer.
    Buffer(Range<usize>),
    /// This many zeros, fewer than eight.
    Padding(usize),
}

static PADDING: [u8; 8] = [0; 8];

/// Returns this many zeros, at most eight.
pub(crate) fn padding(bytes: usize) -> Bytes {
    Bytes::from_static(&PADDING).slice(..bytes)
}

impl FrameBody {
    /// Returns its length.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            FrameBody::Empty => 0,
            FrameBody::One(bytes) => bytes.len() as u64,
            FrameBody::Several(several) => several.iter().map(|bytes| bytes.len() as u64).sum(),
            FrameBody::Stored { source, index } => {
                let (bytes, padding) = source.body(*index);
                (bytes.len() + padding) as u64
            }
            FrameBody::Pieces { bytes, .. } => *bytes,
        }
    }

    /// Returns its slices in order.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        (0..).map_while(|index| self.slice(index))
    }

    fn slice(&self, index: usize) -> Option<&[u8]> {
        match self {
            FrameBody::Empty => None,
            FrameBody::One(bytes) => Some(&bytes[..]).filter(|_| index == 0),
            FrameBody::Several(several) => several.get(index).map(|bytes| &bytes[..]),
            FrameBody::Stored { source, index: which } => {
                let (bytes, padding) = source.body(*which);
                let both = [bytes, &PADDING[..padding]];
                both.into_iter().filter(|bytes| !bytes.is_empty()).nth(index)
            }
            FrameBody::Pieces { buffer, pieces, range, .. } => {
                match pieces[range.clone()].get(index)? {
                    BodyPiece::Buffer(slice) => Some(buffer.slice(slice.clone())),
                    BodyPiece::Padding(bytes) => Some(&PADDING[..*bytes]),
                }
            }
        }
    }

    /// Copies it into one slice.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn concat(&self) -> Vec<u8> {
        self.slices().flatten().copied().collect()
    }
}

impl From<Bytes> for FrameBody {
    fn from(bytes: Bytes) -> FrameBody {
        if bytes.is_empty() { FrameBody::Empty } else { FrameBody::One(bytes) }
    }
}

impl FromIterator<Bytes> for FrameBody {
    fn from_iter<I: IntoIterator<Item = Bytes>>(several: I) -> FrameBody {
        let mut several = several.into_iter().filter(|bytes| !bytes.is_empty());
        match (several.next(), several.next()) {
            (None, _) => FrameBody::Empty,
            (Some(one), None) => FrameBody::One(one),
            (Some(first), Some(second)) => {
                FrameBody::Several([first, second].into_iter().chain(several).collect())
            }
        }
    }
}

/// One part of a push for one shard.
#[derive(Clone, Debug)]
pub(crate) struct OutgoingPart {
    /// The start of its range in the shard's layout.
    pub(crate) offset: u64,
    pub(crate) body: FrameBody,
    /// The elements of the body, if it is encoded.
    pub(crate) encoded: Option<EncodedRange>,
}

/// Encoded elements of one partition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncodedRange {
    pub(crate) encoding: Encoding,
    pub(crate) elements: u32,
    /// The bytes that they take in the shard's layout.
    pub(crate) bytes: u64,
    /// The factor by which the shard multiplies them.
    pub(crate) factor: f64,
}

impl EncodedRange {
    /// This many elements of a partition, with factor 1.
    pub(crate) fn of(partition: &Partition, elements: usize, encoding: Encoding) -> EncodedRange {
        // The padding behind the last element is included.
        let bytes = (elements * partition.dtype.size()).next_multiple_of(8) as u64;
        EncodedRange { encoding, elements: elements as u32, bytes, factor: 1.0 }
    }
}

impl OutgoingPart {
    /// Returns its body, and the elements of that if it is encoded.
    pub(crate) fn body(&self) -> (FrameBody, Option<EncodedRange>) {
        (self.body.clone(), self.encoded)
    }

    /// Returns the length of its range in the shard's layout, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.encoded {
            Some(range) => range.bytes,
            None => self.body.bytes(),
        }
    }
}

/// The plan of a push: the parts for each shard, and the pieces of the buffer that they consist of.
/// Computed once for pushes of the same variables.
#[derive(Debug)]
pub(crate) struct Scatter {
    pub(super) shards: Vec<ShardParts>,
    pub(super) pieces: Arc<[BodyPiece]>,
}

/// The parts for one shard.
#[derive(Debug)]
pub(super) struct ShardParts {
    pub(super) shard: ShardId,
    pub(super) planned: Vec<PlannedPart>,
    /// The number of parts, from the first, that contain unpartitioned variables in the type that
    /// the shard keeps.
    pub(super) unsplit_parts: usize,
    /// The ranges of the shard's layout that these parts cover.
    pub(super) unsplit_ranges: Arc<[Range<u64>]>,
}

/// A part as it is in every push of the plan.
#[derive(Debug)]
pub(super) struct PlannedPart {
    pub(super) offset: u64,
    pub(super) pieces: Range<usize>,
    /// The length of its body.
    pub(super) bytes: u64,
    /// Its variable and its elements, if it is encoded.
    pub(super) encoded: Option<(VariableId, EncodedRange)>,
}

impl PlannedPart {
    fn part(&self, body: FrameBody, factors: &BTreeMap<VariableId, f64>) -> OutgoingPart {
        let encoded = self.encoded.map(|(variable, range)| EncodedRange {
            factor: factors.get(&variable).copied().unwrap_or(1.0),
            ..range
        });
        OutgoingPart { offset: self.offset, body, encoded }
    }
}

impl Scatter {
    /// Returns the parts of a push, by shard. `body` returns the bytes of a range of the buffer.
    pub(crate) fn parts(
        &self,
        body: impl Fn(Range<usize>) -> Bytes,
    ) -> Vec<(ShardId, Vec<OutgoingPart>)> {
        let bytes = |piece: &BodyPiece| match piece {
            BodyPiece::Buffer(range) => body(range.clone()),
            BodyPiece::Padding(bytes) => padding(*bytes),
        };
        let part = |part: &PlannedPart| {
            let body = self.pieces[part.pieces.clone()].iter().map(bytes).collect();
            part.part(body, &BTreeMap::new())
        };
        let parts = |of: &ShardParts| (of.shard, of.planned.iter().map(part).collect());
        self.shards.iter().map(parts).collect()
    }
}

/// Dense gradients in a buffer, with their plan.
#[derive(Clone, Debug)]
pub(crate) struct ScatteredGradients {
    pub(crate) scatter: Arc<Scatter>,
    pub(crate) buffer: Arc<GradientBuffer>,
    /// The factors by which the servers multiply gradients of half types, where that is not 1.
    pub(crate) factors: BTreeMap<VariableId, f64>,
}

impl ScatteredGradients {
    /// Returns the shards that have a part.
    pub(crate) fn shards(&self) -> impl Iterator<Item = ShardId> + '_ {
        self.scatter.shards.iter().map(|of| of.shard)
    }

    /// Returns the parts for a shard, by its index in [`ScatteredGradients::shards`].
    pub(crate) fn parts(&self, shard: usize) -> impl Iterator<Item = OutgoingPart> + '_ {
        self.scatter.shards[shard].planned.iter().map(|part| {
            let (pieces, buffer) = (self.scatter.pieces.clone(), self.buffer.clone());
            let (range, bytes) = (part.pieces.clone(), part.bytes);
            part.part(FrameBody::Pieces { buffer, pieces, range, bytes }, &self.factors)
        })
    }

    /// Returns what of the parts for a shard is in a slot of its push buffer. `behind` is the
    /// number of other parts that precede these parts.
    pub(crate) fn in_push_buffer(&self, shard: usize, behind: usize) -> Option<PushBufferParts> {
        let ShardParts { shard, unsplit_parts, unsplit_ranges, .. } = &self.scatter.shards[shard];
        let slot = self.buffer.slot_of(*shard)?;
        (*unsplit_parts > 0).then(|| PushBufferParts {
            push_buffer: slot.push_buffer,
            push_slot: slot.number,
            ranges: unsplit_ranges.clone(),
            parts: behind..behind + unsplit_parts,
            buffer: self.buffer.clone(),
        })
    }
}

/// The parts of a push that are in a slot of the shard's push buffer, so the session names them
/// instead of sending them.
#[derive(Clone, Debug)]
pub(crate) struct PushBufferParts {
    pub(crate) push_buffer: PushBufferId,
    pub(crate) push_slot: u32,
    /// Their ranges of the shard's layout.
    pub(crate) ranges: Arc<[Range<u64>]>,
    /// Their indices among the parts of the push; these are sent instead if the slot cannot be
    /// named.
    pub(crate) parts: Range<usize>,
    /// Owns the slot.
    pub(crate) buffer: Arc<GradientBuffer>,
}
