//! Folders of files on HDFS.
//!
//! A folder is a directory and is renamed atomically. The client has no deadline of its own and
//! hangs when a NameNode is killed, so every call of it has one here. An answer that it did nothing,
//! such as that of a NameNode in safe mode, is asked again until the caller stops waiting.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hdfs_native::file::{FileReader, FileWriter};
use hdfs_native::{Client, ClientBuilder, HdfsError, WriteOptions};
use pushpull_checkpoint::{StorageFault, WriteFile};
use tokio::time::{Instant, sleep, timeout_at};

use crate::fault::{RemoteError, StoreError, one_line};
use crate::objects::random_id;
use crate::options::RemoteOptions;
use crate::store_threads::StoreThreads;
use crate::url::{RemoteScheme, RemoteUrl};

/// The directories under one directory of HDFS. All clones are one.
#[derive(Clone)]
pub(crate) struct HdfsFolders {
    client: Client,
    root: Arc<str>,
    operation_timeout: Duration,
}

impl fmt::Debug for HdfsFolders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HdfsFolders").field("root", &self.root).finish_non_exhaustive()
    }
}

/// A file that is open for reading. It names its blocks, so it never reads those of another file.
#[derive(Clone)]
pub(crate) struct HdfsFile {
    reader: Arc<FileReader>,
}

impl fmt::Debug for HdfsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HdfsFile").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl HdfsFile {
    pub(crate) fn bytes(&self) -> u64 {
        self.reader.file_length() as u64
    }

    pub(crate) async fn read(self, offset: u64, bytes: u64) -> Result<Bytes, StoreError> {
        // The client panics at ranges beyond the end.
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes()) {
            return Err(StoreError::new(io::ErrorKind::UnexpectedEof, "the file is shorter"));
        }
        if bytes == 0 {
            return Ok(Bytes::new());
        }
        Ok(self.reader.read_range(offset as usize, bytes as usize).await?)
    }
}

impl HdfsFolders {
    /// Makes the client of a NameNode. Sends nothing.
    pub(crate) fn connect(
        url: &RemoteUrl,
        options: &RemoteOptions,
        threads: &StoreThreads,
    ) -> Result<HdfsFolders, RemoteError> {
        let mut builder = ClientBuilder::new()
            .with_url(format!("hdfs://{}", url.authority()))
            .with_io_runtime(threads.handle().clone());
        for (name, value) in options.settings(RemoteScheme::Hdfs) {
            builder = match name {
                "HADOOP_CONF_DIR" => builder.with_config_dir(value),
                "HADOOP_USER_NAME" => builder.with_user(value),
                _ => builder,
            };
        }
        let client = builder.build().map_err(|error| {
            let reason = one_line(&error);
            RemoteError::Setting { url: url.to_string(), reason }
        })?;
        let root = format!("/{}", url.path()).into();
        Ok(HdfsFolders { client, root, operation_timeout: options.operation_timeout })
    }

    fn path(&self, names: &[&str]) -> String {
        let root = self.root.trim_end_matches('/');
        names.iter().fold(root.to_owned(), |path, name| format!("{path}/{name}"))
    }

    fn root_path(&self) -> String {
        self.root.to_string()
    }

    /// Checks that the NameNode answers, and makes the directory if it is to be written.
    pub(crate) async fn check(&self, creates: bool) -> Result<(), StoreError> {
        let root = self.root_path();
        if creates {
            return self.ask(|| self.client.mkdirs(&root, DIRECTORY_MODE, true)).await;
        }
        let status = self.ask(|| self.client.get_file_info(&root)).await?;
        match status.isdir {
            true => Ok(()),
            false => Err(StoreError::invalid("it is no directory")),
        }
    }

    pub(crate) async fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StoreError> {
        let path = folder.map_or_else(|| self.root_path(), |folder| self.path(&[folder]));
        let found = self.ask(|| self.client.list_status(&path, false)).await?;
        let wanted = found.iter().filter(|status| status.isdir == folder.is_none());
        Ok(wanted.filter_map(|status| last_name(&status.path)).collect())
    }

    /// Creates a directory under another name and renames it, because making one that exists
    /// succeeds.
    pub(crate) async fn create_folder(&self, folder: &str) -> Result<(), StoreError> {
        let new = self.path(&[&format!(".new-{}", random_id())]);
        self.ask(|| self.client.mkdirs(&new, DIRECTORY_MODE, true)).await?;
        let target = self.path(&[folder]);
        let renamed = self.ask(|| self.client.rename(&new, &target, false)).await;
        if renamed.is_err() {
            let _ = self.ask(|| self.client.delete(&new, true)).await;
        }
        renamed
    }

    pub(crate) async fn create(&self, names: &[&str]) -> Result<FileWriter, StoreError> {
        let path = self.path(names);
        let options = WriteOptions::default().create_parent(false);
        self.ask(|| self.client.create(&path, &options)).await
    }

    pub(crate) async fn open(&self, names: &[&str]) -> Result<HdfsFile, StoreError> {
        self.open_path(&self.path(names)).await
    }

    async fn open_path(&self, path: &str) -> Result<HdfsFile, StoreError> {
        let reader = self.ask(|| self.client.read(path)).await?;
        Ok(HdfsFile { reader: Arc::new(reader) })
    }

    pub(crate) async fn rename_folder(&self, from: &str, to: &str) -> Result<(), StoreError> {
        let old = self.path(&[from]);
        let new = self.path(&[to]);
        self.ask(|| self.client.rename(&old, &new, false)).await
    }

    pub(crate) async fn remove_folder(&self, folder: &str) -> Result<(), StoreError> {
        let path = self.path(&[folder]);
        match self.ask(|| self.client.delete(&path, true)).await? {
            true => Ok(()),
            false => Err(StoreError::not_found("there is no such folder")),
        }
    }

    /// Returns the names of the files right under a directory, which need not exist.
    pub(crate) async fn names_under(&self, folder: &str) -> Result<Vec<String>, StoreError> {
        match self.list(Some(folder)).await {
            Err(error) if error.is_not_found() => Ok(Vec::new()),
            found => found,
        }
    }

    /// Writes a small file, new or in place of one.
    pub(crate) async fn put(
        &self,
        names: &[&str],
        content: Bytes,
        overwrites: bool,
    ) -> Result<(), StoreError> {
        let path = self.path(names);
        let options = WriteOptions::default().overwrite(overwrites);
        let mut writer = self.ask(|| self.client.create(&path, &options)).await?;
        writer.write_bytes(content).await?;
        Ok(writer.close().await?)
    }

    pub(crate) async fn get(&self, names: &[&str]) -> Result<Bytes, StoreError> {
        let file = self.open(names).await?;
        let bytes = file.bytes().min(SMALL_FILE_BYTES);
        file.read(0, bytes).await
    }

    pub(crate) async fn delete(&self, names: &[&str]) -> Result<(), StoreError> {
        let path = self.path(names);
        self.ask(|| self.client.delete(&path, false)).await.map(drop)
    }

    /// Returns all files under the directory with their sizes, sorted by their paths below it.
    pub(crate) async fn list_all(&self, most: usize) -> Result<Vec<(String, u64)>, StoreError> {
        let root = self.root_path();
        let files = self.client.list_status_iter(&root, true);
        let deadline = Instant::now() + self.operation_timeout;
        let mut found = Vec::new();
        loop {
            let next = timeout_at(deadline, files.next()).await;
            let next = next.map_err(|_| StoreError::timed_out(self.operation_timeout, None))?;
            let Some(status) = next.transpose()? else { break };
            let below = status.path.strip_prefix(&*self.root).unwrap_or(&status.path);
            let below = below.trim_start_matches('/');
            if !status.isdir && !below.is_empty() {
                found.push((below.to_owned(), status.length as u64));
            }
            if found.len() > most {
                return Err(StoreError::invalid(format!("there are more than {most} files")));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Calls the client until it has done or refused something.
    async fn ask<T, F>(&self, call: impl Fn() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, HdfsError>>,
    {
        // The last answer is told before the caller stops waiting.
        let limit = self.operation_timeout.mul_f64(0.9);
        let deadline = Instant::now() + limit;
        let mut last = None;
        loop {
            match timeout_at(deadline, call()).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) => {
                    let error = StoreError::from(error);
                    if !error.is_retriable {
                        return Err(error);
                    }
                    last = Some(error);
                }
                Err(_) => return Err(StoreError::timed_out(limit, last.as_ref())),
            }
            if Instant::now() + RETRY_PAUSE >= deadline {
                return Err(StoreError::timed_out(limit, last.as_ref()));
            }
            sleep(RETRY_PAUSE).await;
        }
    }
}

fn last_name(path: &str) -> Option<String> {
    path.rsplit('/').next().filter(|name| !name.is_empty()).map(str::to_owned)
}

impl From<HdfsError> for StoreError {
    fn from(error: HdfsError) -> StoreError {
        let text = one_line(&error);
        let has = |part: &str| text.contains(part);
        let kind = match &error {
            HdfsError::FileNotFound(_) => io::ErrorKind::NotFound,
            HdfsError::AlreadyExists(_) => io::ErrorKind::AlreadyExists,
            HdfsError::IOError(error) => error.kind(),
            HdfsError::InvalidPath(_) | HdfsError::InvalidArgument(_) => {
                io::ErrorKind::InvalidInput
            }
            HdfsError::UnsupportedFeature(_) => io::ErrorKind::Unsupported,
            _ if has("FileNotFoundException") => io::ErrorKind::NotFound,
            _ if has("FileAlreadyExistsException") => io::ErrorKind::AlreadyExists,
            // The lease of a file that another client has open.
            _ if has("AlreadyBeingCreatedException") => io::ErrorKind::AlreadyExists,
            _ if has("AccessControlException") => io::ErrorKind::PermissionDenied,
            _ if has("QuotaExceededException") => io::ErrorKind::StorageFull,
            _ => io::ErrorKind::Other,
        };
        let is_safe_mode = has("SafeModeException") || has("in safe mode");
        let is_retriable =
            is_safe_mode || has("StandbyException") || kind == io::ErrorKind::ConnectionRefused;
        // The rest of the text is a stack of Java.
        let text = match text.split_once(" at org.apache.") {
            Some((first, _)) => first.to_owned(),
            None => text,
        };
        StoreError { kind, text, is_retriable }
    }
}

/// A file that is being written. It is removed by the removal of its folder if it stays incomplete.
pub(crate) struct HdfsUpload {
    threads: Arc<StoreThreads>,
    /// `None` after a failure, and once the file is complete.
    writer: Option<FileWriter>,
    url: String,
    operation_timeout: Duration,
}

impl fmt::Debug for HdfsUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HdfsUpload").field("url", &self.url).finish_non_exhaustive()
    }
}

impl HdfsUpload {
    pub(crate) fn new(
        threads: Arc<StoreThreads>,
        writer: FileWriter,
        url: String,
        operation_timeout: Duration,
    ) -> HdfsUpload {
        HdfsUpload { threads, writer: Some(writer), url, operation_timeout }
    }

    fn fault(&self, operation: &'static str, error: StoreError) -> StorageFault {
        StorageFault::new(operation, &self.url, error.into_io())
    }

    fn writer(&mut self, operation: &'static str) -> Result<FileWriter, StorageFault> {
        let text = "it is complete, or has failed before";
        self.writer.take().ok_or_else(|| self.fault(operation, StoreError::invalid(text)))
    }
}

impl WriteFile for HdfsUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageFault> {
        for piece in bytes.chunks(PIECE_BYTES) {
            let mut writer = self.writer("write")?;
            let piece = Bytes::copy_from_slice(piece);
            let written = self.threads.wait(self.operation_timeout, async move {
                writer.write_bytes(piece).await?;
                Ok(writer)
            });
            self.writer = Some(written.map_err(|error| self.fault("write", error))?);
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), StorageFault> {
        let mut writer = self.writer("complete")?;
        let synced = self.threads.wait(self.operation_timeout, async move {
            match writer.hsync().await {
                // Files with erasure codes have no such call. Closing them is all there is.
                Ok(()) | Err(HdfsError::UnsupportedFeature(_)) => {}
                Err(error) => return Err(error.into()),
            }
            Ok(writer.close().await?)
        });
        synced.map_err(|error| self.fault("complete", error))
    }
}

/// The pause before a call is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
const DIRECTORY_MODE: u32 = 0o755;
/// The most bytes that are read of a claim.
const SMALL_FILE_BYTES: u64 = 8192;
/// The most bytes that are copied for one call.
const PIECE_BYTES: usize = 4 << 20;
