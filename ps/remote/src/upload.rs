//! Files that are written to a storage: to an object in parts, or to a file of HDFS.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use pushpull_checkpoint::{StorageFault, WriteFile};
use tokio::task::JoinHandle;

use crate::bucket::SharedBucket;
use crate::fault::StoreError;
use crate::objects::placeholder;
use crate::store_threads::StoreThreads;

/// The sizes and the deadline of an upload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UploadLimits {
    pub(crate) part_bytes: usize,
    pub(crate) parts_in_flight: usize,
    pub(crate) operation_timeout: Duration,
}

/// The most parts of an upload to S3.
const PARTS_MAX: usize = 10_000;

/// The longest time that a dropped upload waits until it is aborted. Later the removal of its
/// folder aborts it.
const ABORT_WAIT: Duration = Duration::from_secs(10);

/// An object that is being written.
///
/// It holds one part that is being filled and at most `parts_in_flight` parts that are sent. A file
/// of less than a part is sent by one request when it is synced. An upload that is dropped before
/// that is aborted; its placeholder stays, as an unfinished file of a disk does.
#[derive(Debug)]
pub(crate) struct ObjectUpload {
    threads: Arc<StoreThreads>,
    store: SharedBucket,
    path: Path,
    /// The URL, for errors.
    url: String,
    limits: UploadLimits,
    part: Vec<u8>,
    /// The identifier of the upload in parts, from its first part on.
    id: Option<String>,
    sent: Vec<PartId>,
    in_flight: VecDeque<JoinHandle<Result<PartId, StoreError>>>,
    state: UploadState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UploadState {
    Open,
    Complete,
    Failed,
}

impl ObjectUpload {
    pub(crate) fn new(
        threads: Arc<StoreThreads>,
        store: SharedBucket,
        path: Path,
        url: String,
        limits: UploadLimits,
    ) -> ObjectUpload {
        ObjectUpload {
            threads,
            store,
            path,
            url,
            limits,
            part: Vec::new(),
            id: None,
            sent: Vec::new(),
            in_flight: VecDeque::new(),
            state: UploadState::Open,
        }
    }

    fn fault(&self, operation: &'static str, error: StoreError) -> StorageFault {
        StorageFault::new(operation, &self.url, error.into_io())
    }

    fn check_open(&self, operation: &'static str) -> Result<(), StorageFault> {
        let text = match self.state {
            UploadState::Open => return Ok(()),
            UploadState::Complete => "it is complete",
            UploadState::Failed => "it has failed before",
        };
        Err(self.fault(operation, StoreError::invalid(text)))
    }

    /// Sends the filled part. Waits while too many parts are under way.
    fn send_part(&mut self) -> Result<(), StoreError> {
        let index = self.sent.len() + self.in_flight.len();
        if index >= PARTS_MAX {
            let bytes = self.limits.part_bytes;
            let text = format!("the file has more than {PARTS_MAX} parts of {bytes} bytes");
            return Err(StoreError::invalid(format!("{text}: set larger ones")));
        }
        let id = self.begin()?;
        while self.in_flight.len() >= self.limits.parts_in_flight {
            self.wait_for_part()?;
        }
        let part = std::mem::replace(&mut self.part, Vec::with_capacity(self.limits.part_bytes));
        let store = self.store.clone();
        let path = self.path.clone();
        self.in_flight.push_back(self.threads.handle().spawn(async move {
            let payload = PutPayload::from(Bytes::from(part));
            Ok(store.put_part(&path, &id, index, payload).await?)
        }));
        Ok(())
    }

    /// Begins the upload in parts, and notes its identifier in the placeholder.
    fn begin(&mut self) -> Result<String, StoreError> {
        if let Some(id) = &self.id {
            return Ok(id.clone());
        }
        let store = self.store.clone();
        let path = self.path.clone();
        let id = self.threads.wait(self.limits.operation_timeout, async move {
            let id = store.create_multipart(&path).await?;
            if let Err(error) = store.put(&path, placeholder(&id).into()).await {
                let _ = store.abort_multipart(&path, &id).await;
                return Err(error.into());
            }
            Ok(id)
        })?;
        self.id = Some(id.clone());
        Ok(id)
    }

    fn wait_for_part(&mut self) -> Result<(), StoreError> {
        let Some(oldest) = self.in_flight.pop_front() else { return Ok(()) };
        let stopper = oldest.abort_handle();
        let part = self.threads.wait(self.limits.operation_timeout, async move {
            match oldest.await {
                Ok(part) => part,
                Err(error) => Err(StoreError::new(std::io::ErrorKind::Other, error)),
            }
        });
        if part.is_err() {
            stopper.abort();
        }
        self.sent.push(part?);
        Ok(())
    }

    fn complete(&mut self) -> Result<(), StoreError> {
        let store = self.store.clone();
        let path = self.path.clone();
        if self.id.is_none() {
            let content = Bytes::from(std::mem::take(&mut self.part));
            return self.threads.wait(self.limits.operation_timeout, async move {
                store.put(&path, content.into()).await?;
                Ok(())
            });
        }
        if !self.part.is_empty() {
            self.send_part()?;
        }
        while !self.in_flight.is_empty() {
            self.wait_for_part()?;
        }
        let id = self.begin()?;
        let parts = std::mem::take(&mut self.sent);
        self.threads.wait(self.limits.operation_timeout, async move {
            store.complete_multipart(&path, &id, parts).await?;
            Ok(())
        })
    }

    /// Ends the parts under way and has the store drop those that it has.
    fn abort(&mut self) {
        for part in self.in_flight.drain(..) {
            part.abort();
        }
        let Some(id) = self.id.take() else { return };
        let store = self.store.clone();
        let path = self.path.clone();
        let limit = ABORT_WAIT.min(self.limits.operation_timeout);
        // Its failure is no news: the removal of the folder aborts it again.
        let _ = self.threads.wait(limit, async move {
            store.abort_multipart(&path, &id).await?;
            Ok(())
        });
    }
}

impl WriteFile for ObjectUpload {
    fn write(&mut self, mut bytes: &[u8]) -> Result<(), StorageFault> {
        self.check_open("write")?;
        while !bytes.is_empty() {
            let room = self.limits.part_bytes - self.part.len();
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            self.part.extend_from_slice(now);
            bytes = rest;
            if self.part.len() == self.limits.part_bytes {
                self.send_part().map_err(|error| {
                    self.state = UploadState::Failed;
                    self.fault("write", error)
                })?;
            }
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), StorageFault> {
        self.check_open("complete")?;
        self.state = UploadState::Failed;
        self.complete().map_err(|error| self.fault("complete", error))?;
        self.state = UploadState::Complete;
        Ok(())
    }
}

impl Drop for ObjectUpload {
    fn drop(&mut self) {
        if self.state != UploadState::Complete {
            self.abort();
        }
    }
}
