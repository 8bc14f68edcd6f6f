//! A shard's memory as it was at one version, for whoever writes it to a checkpoint.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Geometry;
use crate::arena::{Pins, SKEW_BYTES};
use crate::checkpoint::{CheckpointError, Source, Stream};

/// Values and slots of one version, pinned for as long as this lives. It may be read on any thread.
#[derive(Debug)]
pub(crate) struct Image {
    pub(super) geometry: Geometry,
    pub(super) values: Pins,
    pub(super) slots: Option<Pins>,
    pub(super) given_up: Arc<AtomicBool>,
}

impl Source for Image {
    fn read(
        &mut self,
        stream: Stream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let block_bytes = self.geometry.block_bytes;
        let (pins, first) = match (stream, &self.slots) {
            (Stream::Slot(slot), Some(slots)) => (slots, slot * (block_bytes + SKEW_BYTES)),
            _ => (&self.values, 0),
        };
        let (mut start, end) = (range.start as usize, range.end as usize);
        while start < end {
            if self.given_up.load(Ordering::Relaxed) {
                let reason = "pushes need the memory that it pins";
                return Err(CheckpointError::Memory { reason: reason.to_owned() });
            }
            let place = start / block_bytes;
            let stop = end.min((place + 1) * block_bytes);
            let within = start - place * block_bytes..stop - place * block_bytes;
            out(&pins.read(place)[first + within.start..first + within.end])?;
            start = stop;
        }
        Ok(())
    }
}
