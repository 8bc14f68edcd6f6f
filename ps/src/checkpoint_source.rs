//! Reads the contents of a checkpoint from the image of a store.

use std::ops::Range;

use pushpull_checkpoint::{CheckpointError, CheckpointSource, TableSource};
use pushpull_common::stored_stream::StoredStream;
use pushpull_common::table::RowHead;
use pushpull_store::store::{MemoryNeeded, StoreImage, StoreTableImage};

/// The image of a store, as the source of a shard's file.
#[derive(Debug)]
pub(crate) struct ImageSource(pub(crate) StoreImage);

/// The image of a table, as the source of its file.
#[derive(Debug)]
pub(crate) struct TableImageSource(pub(crate) StoreTableImage);

/// The reason why an image is read no further.
enum ReadEnd {
    /// Pushes need the memory that the image pins.
    MemoryNeeded,
    /// The bytes could not be written.
    Failed(CheckpointError),
}

impl From<MemoryNeeded> for ReadEnd {
    fn from(MemoryNeeded: MemoryNeeded) -> ReadEnd {
        ReadEnd::MemoryNeeded
    }
}

impl From<ReadEnd> for CheckpointError {
    fn from(end: ReadEnd) -> CheckpointError {
        match end {
            ReadEnd::MemoryNeeded => {
                let reason = "pushes need the memory that it pins";
                CheckpointError::Memory { reason: reason.to_owned() }
            }
            ReadEnd::Failed(error) => error,
        }
    }
}

impl CheckpointSource for ImageSource {
    fn read(
        &mut self,
        stream: StoredStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let mut write = |bytes: &[u8]| out(bytes).map_err(ReadEnd::Failed);
        Ok(self.0.read(stream, range, &mut write)?)
    }
}

impl TableSource for TableImageSource {
    fn rows(&self) -> u64 {
        self.0.rows()
    }

    fn heads(
        &self,
        out: &mut dyn FnMut(RowHead) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        Ok(self.0.heads(&mut |head| out(head).map_err(ReadEnd::Failed))?)
    }

    fn stream(
        &self,
        stream: usize,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        Ok(self.0.stream(stream, &mut |row| out(row).map_err(ReadEnd::Failed))?)
    }
}
