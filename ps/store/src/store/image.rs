//! An image of a shard's memory at one version, from which a checkpoint is written.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pushpull_common::stored_stream::StoredStream;
use pushpull_common::table::RowHead;

use super::{StoreGeometry, pieces_of};
use crate::arena::Pins;
use crate::table::TableImage;

/// The values and slots of one version, pinned while this value lives. Can be read on any thread.
#[derive(Debug)]
pub struct StoreImage {
    /// The images of the tables, in the order of the layout.
    pub tables: Vec<StoreTableImage>,
    pub(super) geometry: StoreGeometry,
    pub(super) values: Pins,
    pub(super) slots: Option<Pins>,
    pub(super) memory_needed: Arc<AtomicBool>,
}

/// The rows of one table in a [`StoreImage`].
#[derive(Debug)]
pub struct StoreTableImage {
    pub(super) image: TableImage,
    pub(super) memory_needed: Arc<AtomicBool>,
}

/// Pushes need the memory that an image pins, so it is read no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeeded;

fn check_memory(memory_needed: &AtomicBool) -> Result<(), MemoryNeeded> {
    match memory_needed.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(MemoryNeeded),
    }
}

impl StoreTableImage {
    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.image.rows()
    }

    /// Calls `out` with the head of each row, always in the same order.
    ///
    /// # Errors
    /// Those of `out`, and [`MemoryNeeded`].
    pub fn heads<E: From<MemoryNeeded>>(
        &self,
        out: &mut dyn FnMut(RowHead) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut heads = self.image.heads();
        heads.try_for_each(|head| {
            check_memory(&self.memory_needed)?;
            out(head)
        })
    }

    /// Calls `out` with the values of each row (stream 0) or one of its slots (from 1), in the
    /// order of [`StoreTableImage::heads`].
    ///
    /// # Errors
    /// Those of `out`, and [`MemoryNeeded`].
    pub fn stream<E: From<MemoryNeeded>>(
        &self,
        stream: usize,
        out: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rows = self.image.stream(stream);
        rows.try_for_each(|row| {
            check_memory(&self.memory_needed)?;
            out(row)
        })
    }
}

impl StoreImage {
    /// Calls `out` with the bytes of a range of the shard's layout, in order, in pieces.
    ///
    /// # Errors
    /// Those of `out`, and [`MemoryNeeded`].
    pub fn read<E: From<MemoryNeeded>>(
        &self,
        stream: StoredStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let block_bytes = self.geometry.block_bytes;
        let (pins, part) = match (stream, &self.slots) {
            (StoredStream::Slot(slot), Some(slots)) => (slots, slot),
            _ => (&self.values, 0),
        };
        pieces_of(&range, block_bytes).try_for_each(|(logical, within)| {
            check_memory(&self.memory_needed)?;
            out(&pins.read_part(logical, part)[within])
        })
    }
}
