//! The storages under one interface: an object store or HDFS.

use bytes::Bytes;

use crate::fault::StoreError;
#[cfg(feature = "hdfs")]
use crate::hdfs::{HdfsFile, HdfsFolders};
use crate::objects::{ObjectFile, ObjectFolders};

/// The folders of a storage. All clones are one.
#[derive(Clone, Debug)]
pub(crate) enum Backend {
    Objects(ObjectFolders),
    #[cfg(feature = "hdfs")]
    Hdfs(HdfsFolders),
}

/// A file that is open for reading.
#[derive(Clone, Debug)]
pub(crate) enum OpenFile {
    Object(ObjectFile),
    #[cfg(feature = "hdfs")]
    Hdfs(HdfsFile),
}

impl OpenFile {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            OpenFile::Object(file) => file.bytes,
            #[cfg(feature = "hdfs")]
            OpenFile::Hdfs(file) => file.bytes(),
        }
    }

    pub(crate) async fn read(self, offset: u64, bytes: u64) -> Result<Bytes, StoreError> {
        match self {
            OpenFile::Object(file) => file.read(offset, bytes).await,
            #[cfg(feature = "hdfs")]
            OpenFile::Hdfs(file) => file.read(offset, bytes).await,
        }
    }
}

impl Backend {
    /// Checks that the storage answers, and that it has the bucket. Makes a directory of HDFS if the
    /// storage is to be written.
    #[cfg_attr(not(feature = "hdfs"), expect(unused_variables))]
    pub(crate) async fn check(&self, creates: bool) -> Result<(), StoreError> {
        match self {
            // It lists one level, so that a bucket that is missing or denied is known.
            Backend::Objects(objects) => objects.names_under(CLAIMS).await.map(drop),
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.check(creates).await,
        }
    }

    pub(crate) async fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StoreError> {
        match (self, folder) {
            (Backend::Objects(objects), None) => objects.list_folders().await,
            (Backend::Objects(objects), Some(folder)) => objects.list_files(folder).await,
            #[cfg(feature = "hdfs")]
            (Backend::Hdfs(hdfs), folder) => hdfs.list(folder).await,
        }
    }

    pub(crate) async fn create_folder(&self, folder: &str) -> Result<(), StoreError> {
        match self {
            Backend::Objects(objects) => objects.create_folder(folder).await,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.create_folder(folder).await,
        }
    }

    pub(crate) async fn open(&self, folder: &str, file: &str) -> Result<OpenFile, StoreError> {
        match self {
            Backend::Objects(objects) => objects.open(folder, file).await.map(OpenFile::Object),
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.open(&[folder, file]).await.map(OpenFile::Hdfs),
        }
    }

    pub(crate) async fn rename_folder(&self, from: &str, to: &str) -> Result<(), StoreError> {
        match self {
            Backend::Objects(objects) => objects.rename_folder(from, to).await,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.rename_folder(from, to).await,
        }
    }

    pub(crate) async fn remove_folder(&self, folder: &str) -> Result<(), StoreError> {
        match self {
            Backend::Objects(objects) => objects.remove_folder(folder).await,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.remove_folder(folder).await,
        }
    }

    /// Returns the numbers of all claims, in ascending order.
    pub(crate) async fn claims(&self) -> Result<Vec<u64>, StoreError> {
        let names = match self {
            Backend::Objects(objects) => objects.names_under(CLAIMS).await?,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.names_under(CLAIMS).await?,
        };
        let mut numbers: Vec<u64> = names.iter().filter_map(|name| name.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Creates the claim of a number. Of several callers, one succeeds.
    pub(crate) async fn create_claim(&self, number: u64, text: Bytes) -> Result<(), StoreError> {
        let names = [CLAIMS, &number.to_string()];
        match self {
            Backend::Objects(objects) => objects.put_new(&names, text).await,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.put(&names, text, false).await,
        }
    }

    /// Replaces the text of the claim of a number.
    pub(crate) async fn write_claim(&self, number: u64, text: Bytes) -> Result<(), StoreError> {
        let names = [CLAIMS, &number.to_string()];
        match self {
            Backend::Objects(objects) => objects.put(&names, text).await,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.put(&names, text, true).await,
        }
    }

    /// Returns the text of the claim of a number.
    pub(crate) async fn read_claim(&self, number: u64) -> Result<Bytes, StoreError> {
        let names = [CLAIMS, &number.to_string()];
        match self {
            Backend::Objects(objects) => objects.get(&names).await,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.get(&names).await,
        }
    }

    pub(crate) async fn remove_claim(&self, number: u64) -> Result<(), StoreError> {
        let names = [CLAIMS, &number.to_string()];
        match self {
            Backend::Objects(objects) => objects.delete(&names).await,
            #[cfg(feature = "hdfs")]
            Backend::Hdfs(hdfs) => hdfs.delete(&names).await,
        }
    }
}

/// The folder of the claims. Its name is none of a checkpoint.
const CLAIMS: &str = ".claims";
