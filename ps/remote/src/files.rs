//! [`RemoteFiles`]: files of any names at a URL, to read, such as training data.

use std::fmt;
use std::io;
use std::sync::Arc;

use pushpull_checkpoint::{ReadFile, StorageFault};
use pushpull_common::read_at::ReadAt;

use crate::backend::{Backend, OpenFile};
use crate::fault::{RemoteError, StoreError};
use crate::options::RemoteOptions;
use crate::remote_file::RemoteFile;
use crate::storage::connect;
use crate::store_threads::StoreThreads;
use crate::url::RemoteUrl;

/// The files below a URL, or the file of that URL. They are read, never changed.
pub struct RemoteFiles {
    threads: Arc<StoreThreads>,
    backend: Backend,
    url: RemoteUrl,
    options: RemoteOptions,
}

impl fmt::Debug for RemoteFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteFiles").field("url", &self.url).finish_non_exhaustive()
    }
}

/// A file of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteEntry {
    /// The path below the URL of the listing.
    pub path: String,
    /// The length in bytes.
    pub bytes: u64,
}

/// The most files of a listing.
const ENTRIES_MAX: usize = 1_000_000;

impl RemoteFiles {
    /// Uses the files at a URL. Sends nothing yet.
    ///
    /// # Errors
    /// The URL or a setting is wrong, or the program lacks the feature.
    pub fn new(url: &str, options: RemoteOptions) -> Result<RemoteFiles, RemoteError> {
        let url: RemoteUrl = url.parse()?;
        let (threads, backend) = connect(&url, &options)?;
        Ok(RemoteFiles { threads, backend, url, options })
    }

    /// Lists all files below the URL, sorted by their paths.
    ///
    /// # Errors
    /// The storage fails, or there are more than a million files.
    pub fn list(&self) -> Result<Vec<RemoteEntry>, StorageFault> {
        let backend = self.backend.clone();
        let found = self.threads.wait(self.options.operation_timeout, async move {
            match backend {
                Backend::Objects(objects) => objects.list_all(ENTRIES_MAX).await,
                #[cfg(feature = "hdfs")]
                Backend::Hdfs(hdfs) => hdfs.list_all(ENTRIES_MAX).await,
            }
        });
        let found = found.map_err(|error| self.fault("list", &self.url, error))?;
        Ok(found.into_iter().map(|(path, bytes)| RemoteEntry { path, bytes }).collect())
    }

    /// Opens the file at a path below the URL; an empty path opens the file of the URL itself. Its
    /// bytes are those that it has now: later reads fail if the file is replaced.
    ///
    /// # Errors
    /// There is no such file, or the storage fails.
    pub fn open(&self, path: &str) -> Result<RemoteInput, StorageFault> {
        let backend = self.backend.clone();
        let names: Vec<String> =
            path.split('/').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let url = names.iter().fold(self.url.to_string(), |url, name| format!("{url}/{name}"));
        let opened = self.threads.wait(self.options.operation_timeout, async move {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            if names.iter().any(|name| matches!(*name, "." | "..")) {
                return Err(StoreError::invalid("its path has . or .. as a name"));
            }
            match backend {
                Backend::Objects(objects) => {
                    let key = objects.key(&names)?;
                    objects.open_key(key).await.map(OpenFile::Object)
                }
                #[cfg(feature = "hdfs")]
                Backend::Hdfs(hdfs) => hdfs.open(&names).await.map(OpenFile::Hdfs),
            }
        });
        let opened = opened.map_err(|error| self.fault("open", &url, error))?;
        let limit = self.options.operation_timeout;
        let file = RemoteFile::new(self.threads.clone(), opened, url.clone(), limit);
        Ok(RemoteInput { file, url })
    }

    fn fault(
        &self,
        operation: &'static str,
        url: impl fmt::Display,
        error: StoreError,
    ) -> StorageFault {
        StorageFault::new(operation, url, error.into_io())
    }
}

/// A file of a storage that is open for reading. Several threads may read it.
#[derive(Debug)]
pub struct RemoteInput {
    file: RemoteFile,
    url: String,
}

impl ReadAt for RemoteInput {
    fn name(&self) -> &str {
        &self.url
    }

    fn bytes(&self) -> u64 {
        self.file.bytes()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        // The name is that of the reader's own error.
        self.file.read(offset, out).map_err(|fault| fault.source)
    }
}
