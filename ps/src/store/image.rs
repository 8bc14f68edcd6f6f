//! A shard's memory as it was at one version, for whoever writes it to a checkpoint.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Geometry, pieces_of};
use crate::arena::Pins;
use crate::checkpoint::{CheckpointError, RowHead, Source, Stream, TableSource};
use crate::table::TableImage;

/// Values and slots of one version, pinned for as long as this lives. It may be read on any thread.
#[derive(Debug)]
pub(crate) struct Image {
    /// The rows of tables, in the order of the layout.
    pub(crate) tables: Vec<TableOfImage>,
    pub(super) geometry: Geometry,
    pub(super) values: Pins,
    pub(super) slots: Option<Pins>,
    pub(super) given_up: Arc<AtomicBool>,
}

/// The rows of a partition of a table, as the rest of an [`Image`].
#[derive(Debug)]
pub(crate) struct TableOfImage {
    pub(super) image: TableImage,
    pub(super) given_up: Arc<AtomicBool>,
}

/// Whether what is read is still wanted.
fn go_on(given_up: &AtomicBool) -> Result<(), CheckpointError> {
    match given_up.load(Ordering::Relaxed) {
        false => Ok(()),
        true => {
            let reason = "pushes need the memory that it pins";
            Err(CheckpointError::Memory { reason: reason.to_owned() })
        }
    }
}

impl TableSource for TableOfImage {
    fn rows(&self) -> u64 {
        self.image.rows()
    }

    fn heads(
        &self,
        out: &mut dyn FnMut(RowHead) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.image.heads().try_for_each(|head| go_on(&self.given_up).and_then(|()| out(head)))
    }

    fn stream(
        &self,
        stream: usize,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let mut rows = self.image.stream(stream);
        rows.try_for_each(|row| go_on(&self.given_up).and_then(|()| out(row)))
    }
}

impl Source for Image {
    fn read(
        &mut self,
        stream: Stream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let block_bytes = self.geometry.block_bytes;
        let (pins, part) = match (stream, &self.slots) {
            (Stream::Slot(slot), Some(slots)) => (slots, slot),
            _ => (&self.values, 0),
        };
        pieces_of(&range, block_bytes).try_for_each(|(logical, within)| {
            go_on(&self.given_up)?;
            out(&pins.read_part(logical, part)[within])
        })
    }
}
