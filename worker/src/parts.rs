//! The parts of a push: what each covers on its shard, and where its bytes lie on this side.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::Partition;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{ShardId, VariableId};

use crate::push_buffers::{GradientBuffer, PushBufferId};

/// What a frame carries behind its head: stretches of memory that others keep, one behind the other.
/// To clone one takes no memory.
#[derive(Clone, Debug, Default)]
pub(crate) enum Body {
    #[default]
    Empty,
    One(Bytes),
    Several(Arc<[Bytes]>),
    /// One of those that lie in some memory.
    Of {
        memory: Arc<dyn Bodies>,
        which: usize,
    },
    /// Some pieces of a buffer, and how long they are together.
    Pieces {
        buffer: Arc<GradientBuffer>,
        pieces: Arc<[Piece]>,
        which: Range<usize>,
        bytes: u64,
    },
}

/// Memory that several bodies lie in.
pub(crate) trait Bodies: Debug + Send + Sync {
    /// One of them, and how many zeros come behind it, fewer than eight.
    fn body(&self, which: usize) -> (&[u8], usize);
}

/// A piece of what is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// This stretch of a buffer.
    Buffer(Range<usize>),
    /// So many zeros, fewer than eight.
    Padding(usize),
}

static PADDING: [u8; 8] = [0; 8];

/// So many zeros, at most eight.
pub(crate) fn padding(bytes: usize) -> Bytes {
    Bytes::from_static(&PADDING).slice(..bytes)
}

impl Body {
    /// How long it is.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Body::Empty => 0,
            Body::One(bytes) => bytes.len() as u64,
            Body::Several(several) => several.iter().map(|bytes| bytes.len() as u64).sum(),
            Body::Of { memory, which } => {
                let (bytes, padding) = memory.body(*which);
                (bytes.len() + padding) as u64
            }
            Body::Pieces { bytes, .. } => *bytes,
        }
    }

    /// Its stretches in order.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        (0..).map_while(|index| self.slice(index))
    }

    fn slice(&self, index: usize) -> Option<&[u8]> {
        match self {
            Body::Empty => None,
            Body::One(bytes) => Some(&bytes[..]).filter(|_| index == 0),
            Body::Several(several) => several.get(index).map(|bytes| &bytes[..]),
            Body::Of { memory, which } => {
                let (bytes, padding) = memory.body(*which);
                let both = [bytes, &PADDING[..padding]];
                both.into_iter().filter(|bytes| !bytes.is_empty()).nth(index)
            }
            Body::Pieces { buffer, pieces, which, .. } => match pieces[which.clone()].get(index)? {
                Piece::Buffer(range) => Some(buffer.slice(range.clone())),
                Piece::Padding(bytes) => Some(&PADDING[..*bytes]),
            },
        }
    }

    /// All of it in one stretch, for whoever must have it so.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn concat(&self) -> Vec<u8> {
        self.slices().flatten().copied().collect()
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Body {
        if bytes.is_empty() { Body::Empty } else { Body::One(bytes) }
    }
}

impl FromIterator<Bytes> for Body {
    fn from_iter<I: IntoIterator<Item = Bytes>>(several: I) -> Body {
        let mut several = several.into_iter().filter(|bytes| !bytes.is_empty());
        match (several.next(), several.next()) {
            (None, _) => Body::Empty,
            (Some(one), None) => Body::One(one),
            (Some(first), Some(second)) => {
                Body::Several([first, second].into_iter().chain(several).collect())
            }
        }
    }
}

/// One part of a push for one shard.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Where it starts in the shard's layout.
    pub(crate) offset: u64,
    pub(crate) body: Body,
    /// What the body is, if it is encoded.
    pub(crate) encoded: Option<Stretch>,
}

/// Elements that are encoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    pub(crate) encoding: Encoding,
    pub(crate) elements: u32,
    /// The bytes they take in the shard's layout.
    pub(crate) bytes: u64,
    /// What the shard multiplies them with.
    pub(crate) factor: f64,
}

impl Stretch {
    /// So many elements of a partition.
    pub(crate) fn of(partition: &Partition, elements: usize, encoding: Encoding) -> Stretch {
        // The padding behind the last element counts.
        let bytes = (elements * partition.dtype.size()).next_multiple_of(8) as u64;
        Stretch { encoding, elements: elements as u32, bytes, factor: 1.0 }
    }
}

impl Part {
    /// Its body, and what that is if it is encoded.
    pub(crate) fn body(&self) -> (Body, Option<Stretch>) {
        (self.body.clone(), self.encoded)
    }

    /// How much of the shard's layout it covers, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.encoded {
            Some(stretch) => stretch.bytes,
            None => self.body.bytes(),
        }
    }
}

/// How some variables travel: in which parts to which shards, of which pieces of a buffer. Made once
/// for as long as the same variables are pushed.
#[derive(Debug)]
pub(crate) struct Scatter {
    pub(super) shards: Vec<ShardCuts>,
    pub(super) pieces: Arc<[Piece]>,
}

/// The parts of one shard.
#[derive(Debug)]
pub(super) struct ShardCuts {
    pub(super) shard: ShardId,
    pub(super) cuts: Vec<Cut>,
    /// So many of them come first that are of variables in one piece,
    pub(super) wholes: usize,
    /// which is all of these ranges of the shard's layout.
    pub(super) whole: Arc<[Range<u64>]>,
}

/// One part as it will be of every push.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) offset: u64,
    pub(super) pieces: Range<usize>,
    /// How long its body is.
    pub(super) bytes: u64,
    /// What it is, if it is encoded, and of which variable.
    pub(super) stretch: Option<(VariableId, Stretch)>,
}

impl Cut {
    fn part(&self, body: Body, factors: &BTreeMap<VariableId, f64>) -> Part {
        let encoded = self.stretch.map(|(variable, stretch)| Stretch {
            factor: factors.get(&variable).copied().unwrap_or(1.0),
            ..stretch
        });
        Part { offset: self.offset, body, encoded }
    }
}

impl Scatter {
    /// The parts of a push, by shard; `body` makes the stretches that the pieces name.
    pub(crate) fn parts(&self, body: impl Fn(Range<usize>) -> Bytes) -> Vec<(ShardId, Vec<Part>)> {
        let bytes = |piece: &Piece| match piece {
            Piece::Buffer(range) => body(range.clone()),
            Piece::Padding(bytes) => padding(*bytes),
        };
        let part = |cut: &Cut| {
            let body = self.pieces[cut.pieces.clone()].iter().map(bytes).collect();
            cut.part(body, &BTreeMap::new())
        };
        let parts = |of: &ShardCuts| (of.shard, of.cuts.iter().map(part).collect());
        self.shards.iter().map(parts).collect()
    }
}

/// Gradients that travel by a scatter.
#[derive(Clone, Debug)]
pub(crate) struct Scattered {
    pub(crate) scatter: Arc<Scatter>,
    pub(crate) buffer: Arc<GradientBuffer>,
    /// What the servers multiply those of half types with, where that is not 1.
    pub(crate) factors: BTreeMap<VariableId, f64>,
}

impl Scattered {
    /// The shards that have a part in it.
    pub(crate) fn shards(&self) -> impl Iterator<Item = ShardId> + '_ {
        self.scatter.shards.iter().map(|of| of.shard)
    }

    /// The parts for one of the shards, in the order of [`Scattered::shards`].
    pub(crate) fn parts(&self, shard: usize) -> impl Iterator<Item = Part> + '_ {
        self.scatter.shards[shard].cuts.iter().map(|cut| {
            let (pieces, buffer) = (self.scatter.pieces.clone(), self.buffer.clone());
            let (which, bytes) = (cut.pieces.clone(), cut.bytes);
            cut.part(Body::Pieces { buffer, pieces, which, bytes }, &self.factors)
        })
    }

    /// The parts for one of the shards that are in a slot of its push buffer, after `behind` other parts.
    pub(crate) fn in_push_buffer(&self, shard: usize, behind: usize) -> Option<InPushBuffer> {
        let ShardCuts { shard, wholes, whole, .. } = &self.scatter.shards[shard];
        let push_slot = self.buffer.push_slot_of(*shard)?;
        (*wholes > 0).then(|| InPushBuffer {
            push_buffer: push_slot.push_buffer,
            push_slot: push_slot.number,
            ranges: whole.clone(),
            parts: behind..behind + wholes,
            buffer: self.buffer.clone(),
        })
    }
}

/// What of a push lies in a room of its shard's tray, and so need not be sent there.
#[derive(Clone, Debug)]
pub(crate) struct InPushBuffer {
    pub(crate) push_buffer: PushBufferId,
    pub(crate) push_slot: u32,
    /// Ranges of the shard's layout.
    pub(crate) ranges: Arc<[Range<u64>]>,
    /// The parts that would be sent in place of them.
    pub(crate) parts: Range<usize>,
    /// What keeps the room.
    pub(crate) buffer: Arc<GradientBuffer>,
}
