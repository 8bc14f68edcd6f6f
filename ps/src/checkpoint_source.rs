//! Reads the contents of a checkpoint from the image of a store.

use std::ops::Range;

use pushpull_common::stored_stream::StoredStream;
use pushpull_common::table::RowHead;
use pushpull_store::store::{MemoryNeeded, StoreImage, StoreTableImage};

use crate::checkpoint::{CheckpointError, CheckpointSource, TableSource};

impl From<MemoryNeeded> for CheckpointError {
    fn from(MemoryNeeded: MemoryNeeded) -> CheckpointError {
        let reason = "pushes need the memory that it pins";
        CheckpointError::Memory { reason: reason.to_owned() }
    }
}

impl CheckpointSource for StoreImage {
    fn read(
        &mut self,
        stream: StoredStream,
        range: Range<u64>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        StoreImage::read(self, stream, range, out)
    }
}

impl TableSource for StoreTableImage {
    fn rows(&self) -> u64 {
        StoreTableImage::rows(self)
    }

    fn heads(
        &self,
        out: &mut dyn FnMut(RowHead) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        StoreTableImage::heads(self, out)
    }

    fn stream(
        &self,
        stream: usize,
        out: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        StoreTableImage::stream(self, stream, out)
    }
}
