//! Files that are read from a storage, with a window that is read ahead.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use pushpull_checkpoint::{ReadFile, StorageFault};

use crate::backend::OpenFile;
use crate::fault::StoreError;
use crate::store_threads::StoreThreads;

/// The bytes that a request reads which continues the last one. Checkpoints are read in pieces of
/// 1 MiB, and a request costs the time of a round trip.
const WINDOW_BYTES: u64 = 8 << 20;

/// An open file of a storage. It holds at most one window of 8 MiB.
pub(crate) struct RemoteFile {
    threads: Arc<StoreThreads>,
    file: OpenFile,
    url: String,
    bytes: u64,
    limit: Duration,
    /// The last bytes that were read, with their offset.
    window: Mutex<(u64, Bytes)>,
}

impl fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteFile").field("url", &self.url).field("bytes", &self.bytes).finish()
    }
}

impl RemoteFile {
    pub(crate) fn new(
        threads: Arc<StoreThreads>,
        file: OpenFile,
        url: String,
        limit: Duration,
    ) -> RemoteFile {
        let bytes = file.bytes();
        RemoteFile { threads, file, url, bytes, limit, window: Mutex::default() }
    }

    fn fill(&self, mut offset: u64, mut out: &mut [u8]) -> Result<(), StoreError> {
        let asked = out.len() as u64;
        if offset.checked_add(asked).is_none_or(|end| end > self.bytes) {
            let text = format!("it has {} bytes, not {asked} from {offset} on", self.bytes);
            return Err(StoreError::new(std::io::ErrorKind::UnexpectedEof, text));
        }
        // A panic between the two words of the window leaves them as they were.
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        while !out.is_empty() {
            let skip = offset.checked_sub(window.0).filter(|skip| *skip < window.1.len() as u64);
            let Some(skip) = skip else {
                // Only a read that continues the last one is followed by more of its kind.
                let continues = offset == window.0 + window.1.len() as u64;
                let wanted = if continues { WINDOW_BYTES } else { out.len() as u64 };
                let bytes = wanted.min(self.bytes - offset);
                let file = self.file.clone();
                let read =
                    self.threads.wait(self.limit, async move { file.read(offset, bytes).await })?;
                *window = (offset, read);
                continue;
            };
            let held = &window.1[skip as usize..];
            let now = held.len().min(out.len());
            out[..now].copy_from_slice(&held[..now]);
            out = &mut out[now..];
            offset += now as u64;
        }
        if offset == self.bytes {
            // The end of the file has been read: its window would only be kept.
            *window = (offset, Bytes::new());
        }
        Ok(())
    }
}

impl ReadFile for RemoteFile {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StorageFault> {
        let read = self.fill(offset, out);
        read.map_err(|error| StorageFault::new("read", &self.url, error.into_io()))
    }
}
