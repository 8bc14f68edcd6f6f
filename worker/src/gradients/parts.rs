//! The parts of a push: the range that each covers on its shard, and its bytes on this side.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::catalogue::Partition;
use pushpull_common::codec::Encoding;

use super::gradient_buffer::GradientBuffer;

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

const PADDING: &[u8] = &[0; 8];

/// Returns this many zeros, at most eight.
pub(crate) fn padding(bytes: usize) -> Bytes {
    Bytes::from_static(PADDING).slice(..bytes)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_body_is_that_of_its_slices() {
        for index in 0..40 {
            let chunk = |length: usize| Bytes::from(vec![index as u8; length]);
            let body: FrameBody = match index % 3 {
                0 => FrameBody::Empty,
                1 => chunk(5 * index).into(),
                _ => (0..100 + index).map(|_| chunk(1 + index % 4)).collect(),
            };
            assert_eq!(body.bytes(), body.concat().len() as u64);
            assert!(body.slices().all(|slice| !slice.is_empty()));
        }
    }
}
