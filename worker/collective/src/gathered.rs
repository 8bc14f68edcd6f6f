//! [`Gathered`]: the contributions that one rank has gathered from all, and their reduction.

use crate::element::ElementKind;
use crate::fold;
use crate::planted::{PlantedRingBugs, RingBug};
use crate::reduction::Reduction;
use crate::schedule::Chunks;

/// The contributions of all ranks, one after the other in order of ranks.
#[derive(Debug)]
pub(crate) struct Gathered<'a> {
    /// The contributions.
    pub(crate) blocks: &'a mut [u8],
    /// The type of the elements.
    pub(crate) kind: ElementKind,
    /// The number of ranks.
    pub(crate) ranks: u32,
    /// The rank that has gathered them.
    pub(crate) rank: u32,
    /// The planted bug.
    pub(crate) planted: PlantedRingBugs,
}

impl Gathered<'_> {
    /// Reduces the contributions into `values`, chunk `c` in rank order beginning at rank `c`: as
    /// an all-reduce around the ring does. The contributions are unspecified afterwards.
    ///
    /// Returns the element whose sum exceeds its type, if there is one.
    pub(crate) fn reduce(self, reduction: Reduction, values: &mut [u8]) -> Option<usize> {
        let Gathered { blocks, kind, ranks, rank, planted } = self;
        let stride = values.len();
        let chunks = Chunks::new(stride / kind.size(), kind.size(), ranks);
        let mut overflow = None;
        for chunk in 0..ranks {
            let range = chunks.bytes(chunk);
            let block = |step: u32| match planted.has(RingBug::FoldAsArrived) {
                true => ((rank + ranks - step) % ranks) as usize * stride,
                false => ((chunk + step) % ranks) as usize * stride,
            };
            let result = &mut values[range.clone()];
            result.copy_from_slice(&blocks[block(0)..][range.clone()]);
            for step in 1..ranks {
                let own = &mut blocks[block(step)..][range.clone()];
                if let Err(at) = fold::fold(kind, reduction, result, own) {
                    overflow = Some(chunks.elements(chunk).start + at.index);
                }
                result.copy_from_slice(own);
            }
            fold::finish(kind, reduction, ranks, result);
        }
        overflow
    }
}
