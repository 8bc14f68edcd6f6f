//! [`RemoteStorage`]: checkpoints at a URL.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pushpull_checkpoint::{
    CheckpointStorage, ReadFile, StorageClaim, StorageFault, WriteFile, is_valid_name,
};

use crate::backend::Backend;
use crate::claim::{Claim, Holder};
use crate::fault::{RemoteError, StoreError};
use crate::objects::ObjectFolders;
use crate::options::RemoteOptions;
use crate::remote_file::RemoteFile;
use crate::store_threads::StoreThreads;
use crate::upload::{ObjectUpload, UploadLimits};
use crate::url::RemoteUrl;

/// Checkpoints on an object store or on HDFS: see the docs of the crate.
///
/// It has two threads of its own for the requests. A call blocks until its operation is done, or
/// fails when [`RemoteOptions::operation_timeout`] has passed. It may come from any thread.
///
/// A file that is removed while it is open fails to be read, or is read as it was: an object store
/// keeps no removed object for its readers. Other contents are never returned.
pub struct RemoteStorage {
    threads: Arc<StoreThreads>,
    backend: Backend,
    url: RemoteUrl,
    options: RemoteOptions,
    /// The claim of this process, which is checked before each change.
    holder: Mutex<Weak<Holder>>,
}

impl fmt::Debug for RemoteStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteStorage").field("url", &self.url).finish_non_exhaustive()
    }
}

impl RemoteStorage {
    /// Opens a storage to save and to restore. The bucket must exist; a directory of HDFS is made.
    /// Waits for one answer of the store.
    ///
    /// # Errors
    /// The URL or a setting is wrong, the program lacks the feature, or the store does not answer,
    /// has no such bucket or denies it.
    pub fn open(url: &str, options: RemoteOptions) -> Result<RemoteStorage, RemoteError> {
        RemoteStorage::connect(url.parse()?, options, true)
    }

    /// Opens a storage to read only: as [`RemoteStorage::open`], and makes no directory.
    ///
    /// # Errors
    /// As [`RemoteStorage::open`].
    pub fn open_read_only(url: &str, options: RemoteOptions) -> Result<RemoteStorage, RemoteError> {
        RemoteStorage::connect(url.parse()?, options, false)
    }

    /// Uses an object store that the program has opened itself, for example with credentials of its
    /// own. The URL has the prefix of the keys, and its text is that of errors. Needs no feature.
    ///
    /// # Errors
    /// The URL or a setting is wrong. Nothing is sent.
    pub fn with_store<S>(
        url: &str,
        store: Arc<S>,
        options: RemoteOptions,
    ) -> Result<RemoteStorage, RemoteError>
    where
        S: object_store::ObjectStore + object_store::multipart::MultipartStore,
    {
        let url: RemoteUrl = url.parse()?;
        options.check(&url)?;
        let threads = start_threads(&url)?;
        let backend = Backend::Objects(ObjectFolders::new(store, &url.path()));
        Ok(RemoteStorage::of(threads, backend, url, options))
    }

    fn connect(
        url: RemoteUrl,
        options: RemoteOptions,
        creates: bool,
    ) -> Result<RemoteStorage, RemoteError> {
        let (threads, backend) = connect(&url, &options)?;
        let storage = RemoteStorage::of(threads, backend, url, options);
        let backend = storage.backend.clone();
        let check = storage.run("open", &[], async move { backend.check(creates).await });
        check.map_err(RemoteError::Storage)?;
        Ok(storage)
    }

    fn of(
        threads: Arc<StoreThreads>,
        backend: Backend,
        url: RemoteUrl,
        options: RemoteOptions,
    ) -> RemoteStorage {
        RemoteStorage { threads, backend, url, options, holder: Mutex::default() }
    }

    /// Returns the URL.
    pub fn url(&self) -> &RemoteUrl {
        &self.url
    }

    /// Runs an operation on a path, if all names in it are valid.
    fn run<T: Send + 'static>(
        &self,
        operation: &'static str,
        names: &[&str],
        future: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StorageFault> {
        let fault =
            |error: StoreError| StorageFault::new(operation, self.path(names), error.into_io());
        if !names.iter().all(|name| is_valid_name(name)) {
            return Err(fault(StoreError::invalid("invalid name")));
        }
        self.threads.wait(self.options.operation_timeout, future).map_err(fault)
    }

    /// Runs an operation that changes the storage, if the claim of this process still holds.
    fn change<T: Send + 'static>(
        &self,
        operation: &'static str,
        names: &[&str],
        future: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StorageFault> {
        let holder = self.holder.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        self.run(operation, names, async move {
            if let Some(holder) = holder {
                holder.check().await?;
            }
            future.await
        })
    }

    fn path(&self, names: &[&str]) -> String {
        names.iter().fold(self.url.to_string(), |path, name| format!("{path}/{name}"))
    }

    /// Removes what killed saves have left: folders without a manifest, and their uploads. A failure
    /// is that of the next save, which finds them again.
    fn remove_leftovers(&self) {
        for folder in self.list(None).unwrap_or_default() {
            if folder.ends_with(".tmp") {
                let _ = self.remove_folder(&folder);
            }
        }
    }
}

fn start_threads(url: &RemoteUrl) -> Result<Arc<StoreThreads>, RemoteError> {
    let threads = StoreThreads::start();
    let threads =
        threads.map_err(|source| RemoteError::Threads { url: url.to_string(), source })?;
    Ok(Arc::new(threads))
}

/// Makes the client of a storage. Sends nothing yet.
pub(crate) fn connect(
    url: &RemoteUrl,
    options: &RemoteOptions,
) -> Result<(Arc<StoreThreads>, Backend), RemoteError> {
    options.check(url)?;
    if !url.scheme().is_built() {
        let feature = url.scheme().name();
        return Err(RemoteError::NotBuilt { url: url.to_string(), feature });
    }
    let threads = start_threads(url)?;
    let backend = open_backend(url, options, &threads)?;
    Ok((threads, backend))
}

#[cfg_attr(not(any(feature = "cloud", feature = "hdfs")), expect(unused_variables))]
fn open_backend(
    url: &RemoteUrl,
    options: &RemoteOptions,
    threads: &StoreThreads,
) -> Result<Backend, RemoteError> {
    match url.scheme() {
        #[cfg(feature = "hdfs")]
        crate::url::RemoteScheme::Hdfs => {
            crate::hdfs::HdfsFolders::connect(url, options, threads).map(Backend::Hdfs)
        }
        #[cfg(feature = "cloud")]
        _ => {
            // The client of HTTP starts tasks on the runtime that it is made in.
            let _runtime = threads.handle().enter();
            let store = crate::cloud::open(url, options)?;
            let folders = ObjectFolders::new(store, &url.path());
            Ok(Backend::Objects(folders))
        }
        #[cfg(not(feature = "cloud"))]
        scheme => Err(RemoteError::NotBuilt { url: url.to_string(), feature: scheme.name() }),
    }
}

impl CheckpointStorage for RemoteStorage {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        let backend = self.backend.clone();
        let names: Vec<&str> = folder.into_iter().collect();
        let listed = folder.map(str::to_owned);
        let found =
            self.run("list", &names, async move { backend.list(listed.as_deref()).await })?;
        // Entries with other names are not ours, and are not checkpoints.
        Ok(found.into_iter().filter(|name| is_valid_name(name)).collect())
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        let backend = self.backend.clone();
        let name = folder.to_owned();
        self.change("create", &[folder], async move { backend.create_folder(&name).await })
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        let url = self.path(&[folder, file]);
        let folder_name = folder.to_owned();
        let file_name = file.to_owned();
        let timeout = self.options.operation_timeout;
        match &self.backend {
            Backend::Objects(objects) => {
                let creating = objects.clone();
                let key = self.change("create", &[folder, file], async move {
                    creating.create_file(&folder_name, &file_name).await
                })?;
                let limits = UploadLimits {
                    part_bytes: self.options.part_bytes,
                    parts_in_flight: self.options.parts_in_flight,
                    operation_timeout: timeout,
                };
                let store = objects.store().clone();
                Ok(Box::new(ObjectUpload::new(self.threads.clone(), store, key, url, limits)))
            }
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => {
                let creating = hdfs.clone();
                let writer = self.change("create", &[folder, file], async move {
                    creating.create(&[&folder_name, &file_name]).await
                })?;
                let threads = self.threads.clone();
                Ok(Box::new(crate::hdfs::HdfsUpload::new(threads, writer, url, timeout)))
            }
        }
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        let backend = self.backend.clone();
        let folder_name = folder.to_owned();
        let file_name = file.to_owned();
        let opened = self.run("open", &[folder, file], async move {
            backend.open(&folder_name, &file_name).await
        })?;
        let url = self.path(&[folder, file]);
        let threads = self.threads.clone();
        Ok(Box::new(RemoteFile::new(threads, opened, url, self.options.operation_timeout)))
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        let backend = self.backend.clone();
        let old = from.to_owned();
        let new = to.to_owned();
        if !is_valid_name(to) {
            let error = StoreError::invalid(format!("invalid name {to:?}"));
            return Err(StorageFault::new("rename", self.path(&[from]), error.into_io()));
        }
        self.change("rename", &[from], async move { backend.rename_folder(&old, &new).await })
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        let backend = self.backend.clone();
        let name = folder.to_owned();
        self.change("remove", &[folder], async move { backend.remove_folder(&name).await })
    }

    /// Does nothing: a storage has made an operation durable when it confirms it.
    fn sync(&self, _folder: Option<&str>) -> Result<(), StorageFault> {
        Ok(())
    }

    /// Claims the URL by a lease that is renewed, and removes what killed saves have left there.
    ///
    /// Waits for up to one [`RemoteOptions::claim_lease`] if there is a claim: it belongs to another
    /// cluster if it is renewed meanwhile. The claim of a process of this machine that has ended is
    /// taken over at once.
    fn claim(&self) -> Result<StorageClaim, StorageFault> {
        let lease = self.options.claim_lease;
        let timeout = self.options.operation_timeout;
        let claim = Claim::take(self.threads.clone(), self.backend.clone(), lease, timeout);
        let claim = claim.map_err(|error| {
            let operation = match error.kind {
                io::ErrorKind::WouldBlock => "use",
                _ => "claim",
            };
            StorageFault::new(operation, &self.url, error.into_io())
        })?;
        let holder = Arc::downgrade(claim.holder());
        *self.holder.lock().unwrap_or_else(PoisonError::into_inner) = holder;
        self.remove_leftovers();
        Ok(StorageClaim::held_by(claim))
    }
}
