//! An image of a shard's memory at one version, from which a checkpoint is written.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{StoreGeometry, pieces_of};
use crate::arena::Pins;
use crate::checkpoint::{
    CheckpointError, CheckpointSource, CheckpointStream, RowHead, TableSource,
};
use crate::table::TableImage;

/// The values and slots of one version, pinned while this value lives. Can be read on any thread.
#[derive(Debug)]
pub(crate) struct StoreImage {
    /// The images of the tables, in the order of the layout.
    pub(crate) tables: Vec<StoreTableImage>,
    pub(super) geometry: StoreGeometry,
    pub(super) values: Pins,
    pub(super) slots: Option<Pins>,
    pub(super) memory_needed: Arc<AtomicBool>,
}

/// The rows of one table in a [`StoreImage`].
#[derive(Debug)]
pub(crate) struct StoreTableImage {
    pub(super) image: TableImage,
    pub(super) memory_needed: Arc<AtomicBool>,
}

/// Fails if the memory that the image pins is needed.
fn check_memory(memory_needed: &AtomicBool) -> Result<(), CheckpointError> {
    match memory_needed.load(Ordering::Relaxed) {
        false => Ok(()),
        true => {
            let reason = "pushes need the memory that it pins";
            Err(CheckpointError::Memory { reason: reason.to_owned() })
        }
    }
}

impl TableSource for StoreTableImage {
    fn rows(&self) -> u64 {
        self.image.rows()
    }

    fn heads(
        &self,
        out: &mut dyn FnMut(RowHead) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.image
            .heads()
            .try_for_each(|head| check_memory(&self.memory_needed).and_then(|()| out(head)))
    }

    fn stream(
        &self,
        stream: usize,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let mut rows = self.image.stream(stream);
        rows.try_for_each(|row| check_memory(&self.memory_needed).and_then(|()| out(row)))
    }
}

impl CheckpointSource for StoreImage {
    fn read(
        &mut self,
        stream: CheckpointStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let block_bytes = self.geometry.block_bytes;
        let (pins, part) = match (stream, &self.slots) {
            (CheckpointStream::Slot(slot), Some(slots)) => (slots, slot),
            _ => (&self.values, 0),
        };
        pieces_of(&range, block_bytes).try_for_each(|(logical, within)| {
            check_memory(&self.memory_needed)?;
            out(&pins.read_part(logical, part)[within])
        })
    }
}
