//! Folders of files on an object store, whose names are keys.
//!
//! A folder and its temporary name share one prefix, so that publishing a checkpoint copies no
//! model. The folder `NAME` is the prefix `NAME/` with the object `MANIFEST`; without that object it
//! is `NAME.tmp`. The rename of `NAME.tmp` to `NAME` is the creation of one object, which is atomic.
//! Until then the manifest is the object `.MANIFEST`.
//!
//! An object that is not whole yet holds a placeholder: it reserves the name, and it has the
//! identifier of the upload in parts, which the removal of the folder aborts.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};

use crate::bucket::SharedBucket;
use crate::fault::StoreError;

/// The folders under one prefix of an object store. All clones are one.
#[derive(Clone, Debug)]
pub(crate) struct ObjectFolders {
    store: SharedBucket,
    prefix: Arc<str>,
}

/// A file as it was when it was opened.
#[derive(Clone, Debug)]
pub(crate) struct ObjectFile {
    store: SharedBucket,
    path: Path,
    e_tag: Option<String>,
    pub(crate) bytes: u64,
}

impl ObjectFile {
    /// Reads a range. Fails if the object has been replaced or removed.
    pub(crate) async fn read(self, offset: u64, bytes: u64) -> Result<Bytes, StoreError> {
        let options = GetOptions {
            if_match: self.e_tag.clone(),
            range: Some(GetRange::Bounded(offset..offset + bytes)),
            ..GetOptions::default()
        };
        let read = self.store.get_opts(&self.path, options).await?.bytes().await?;
        match read.len() as u64 == bytes {
            true => Ok(read),
            false => Err(StoreError::new(
                std::io::ErrorKind::UnexpectedEof,
                format!("{} bytes came instead of {bytes}", read.len()),
            )),
        }
    }
}

impl ObjectFolders {
    /// Uses the folders under a prefix, which has no slash at either end.
    pub(crate) fn new(store: SharedBucket, prefix: &str) -> ObjectFolders {
        ObjectFolders { store, prefix: prefix.into() }
    }

    pub(crate) fn store(&self) -> &SharedBucket {
        &self.store
    }

    /// Returns the names of all folders.
    pub(crate) async fn list_folders(&self) -> Result<Vec<String>, StoreError> {
        let root = self.key(&[])?;
        let found = self.store.list_with_delimiter(Some(&root)).await?;
        let names = found.common_prefixes.iter().filter_map(Path::filename);
        let names: Vec<String> =
            names.filter(|name| !name.starts_with('.')).map(str::to_owned).collect();
        let named = stream::iter(names).map(|name| async move {
            match self.exists(&[&name, MANIFEST]).await? {
                true => Ok::<_, StoreError>(name),
                false => Ok(format!("{name}{TEMPORARY}")),
            }
        });
        named.buffer_unordered(REQUESTS_MAX).try_collect().await
    }

    /// Returns the names of the files of a folder.
    pub(crate) async fn list_files(&self, folder: &str) -> Result<Vec<String>, StoreError> {
        self.require(folder).await?;
        let (prefix, is_temporary) = prefix_of(folder);
        let found = self.store.list_with_delimiter(Some(&self.key(&[prefix])?)).await?;
        let names = found.objects.iter().filter_map(|object| object.location.filename());
        let names = names.filter_map(|name| match name {
            UNPUBLISHED_MANIFEST if is_temporary => Some(MANIFEST.to_owned()),
            name if name.starts_with('.') => None,
            name => Some(name.to_owned()),
        });
        Ok(names.collect())
    }

    pub(crate) async fn create_folder(&self, folder: &str) -> Result<(), StoreError> {
        let (prefix, is_temporary) = prefix_of(folder);
        if !is_temporary {
            return Err(StoreError::invalid("a folder begins under a name that ends in .tmp"));
        }
        if self.exists(&[prefix, MANIFEST]).await? {
            return Err(StoreError::already_exists(format!("{prefix} exists")));
        }
        let own = Bytes::from(format!("{}\n", random_id()));
        self.put_new(&[prefix, FOLDER], own).await
    }

    /// Reserves the name of a file. Returns the key of its object.
    pub(crate) async fn create_file(&self, folder: &str, file: &str) -> Result<Path, StoreError> {
        let (prefix, is_temporary) = prefix_of(folder);
        if !is_temporary {
            return Err(StoreError::invalid("a published folder takes no more files"));
        }
        self.require(folder).await?;
        let names = [prefix, object_of(file, is_temporary)];
        self.put_new(&names, placeholder("")).await?;
        self.key(&names)
    }

    pub(crate) async fn open(&self, folder: &str, file: &str) -> Result<ObjectFile, StoreError> {
        self.require(folder).await?;
        let (prefix, is_temporary) = prefix_of(folder);
        self.open_key(self.key(&[prefix, object_of(file, is_temporary)])?).await
    }

    /// Opens the object of a key.
    pub(crate) async fn open_key(&self, path: Path) -> Result<ObjectFile, StoreError> {
        let ObjectMeta { e_tag, size, .. } = self.store.head(&path).await?;
        Ok(ObjectFile { store: self.store.clone(), path, e_tag, bytes: size })
    }

    /// Renames `NAME.tmp` to `NAME` or back, by the creation or the removal of its manifest.
    pub(crate) async fn rename_folder(&self, from: &str, to: &str) -> Result<(), StoreError> {
        let (prefix, from_temporary) = prefix_of(from);
        let (other, to_temporary) = prefix_of(to);
        if prefix != other || from_temporary == to_temporary {
            let text = "a folder of an object store is renamed from NAME.tmp to NAME, or back";
            return Err(StoreError::invalid(text));
        }
        let published = [prefix, MANIFEST];
        let unpublished = [prefix, UNPUBLISHED_MANIFEST];
        if to_temporary {
            let manifest = self.get(&published).await?;
            self.put(&unpublished, manifest).await?;
            return self.delete(&published).await;
        }
        let manifest = match self.get(&unpublished).await {
            Err(error) if error.is_not_found() && self.exists(&published).await? => {
                return Err(StoreError::already_exists(format!("{to} exists")));
            }
            manifest => manifest?,
        };
        self.put_new(&published, manifest).await?;
        // The folder is published. What is left of the manifest is no file of it.
        let _ = self.delete(&unpublished).await;
        Ok(())
    }

    /// Removes a folder with its objects and aborts its uploads. The manifest goes first, because a
    /// folder without it is no checkpoint; the marker of the folder goes last, so that a removal
    /// that is cut short is found again.
    pub(crate) async fn remove_folder(&self, folder: &str) -> Result<(), StoreError> {
        let (prefix, _) = prefix_of(folder);
        let root = self.key(&[prefix])?;
        let objects: Vec<ObjectMeta> = self.store.list(Some(&root)).try_collect().await?;
        if objects.is_empty() {
            return Err(StoreError::not_found("there is no such folder"));
        }
        let marker = self.key(&[prefix, FOLDER])?;
        let manifest = self.key(&[prefix, MANIFEST])?;
        if objects.iter().any(|object| object.location == manifest) {
            self.delete(&[prefix, MANIFEST]).await?;
        }
        let others = objects
            .into_iter()
            .filter(|object| object.location != marker && object.location != manifest);
        let removed = stream::iter(others).map(|object| self.remove_object(object));
        let mut removed = removed.buffer_unordered(REQUESTS_MAX);
        while let Some(removed) = removed.next().await {
            removed?;
        }
        self.delete(&[prefix, FOLDER]).await
    }

    async fn remove_object(&self, object: ObjectMeta) -> Result<(), StoreError> {
        let path = object.location;
        if object.size <= PLACEHOLDER_BYTES_MAX {
            let content = match self.store.get(&path).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(()),
                content => content?.bytes().await?,
            };
            if let Some(id) = upload_of(&content) {
                // It may have been completed or aborted meanwhile. The store ends it otherwise.
                let _ = self.store.abort_multipart(&path, &id.to_owned()).await;
            }
        }
        gone(self.store.delete(&path).await)
    }

    /// Fails if there is no such folder.
    async fn require(&self, folder: &str) -> Result<(), StoreError> {
        let (prefix, is_temporary) = prefix_of(folder);
        let is_published = self.exists(&[prefix, MANIFEST]).await?;
        let exists = match is_temporary {
            true => !is_published && self.exists(&[prefix, FOLDER]).await?,
            false => is_published,
        };
        if exists { Ok(()) } else { Err(StoreError::not_found("there is no such folder")) }
    }

    async fn exists(&self, names: &[&str]) -> Result<bool, StoreError> {
        match self.store.head(&self.key(names)?).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) async fn get(&self, names: &[&str]) -> Result<Bytes, StoreError> {
        Ok(self.store.get(&self.key(names)?).await?.bytes().await?)
    }

    pub(crate) async fn put(&self, names: &[&str], content: Bytes) -> Result<(), StoreError> {
        self.store.put(&self.key(names)?, PutPayload::from(content)).await?;
        Ok(())
    }

    /// Creates an object. If there is one with this content, a repeated request has created it.
    pub(crate) async fn put_new(&self, names: &[&str], content: Bytes) -> Result<(), StoreError> {
        let key = self.key(names)?;
        let options = PutOptions::from(PutMode::Create);
        match self.store.put_opts(&key, PutPayload::from(content.clone()), options).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::AlreadyExists { .. }) => {
                let found = self.store.get(&key).await?.bytes().await?;
                match found == content {
                    true => Ok(()),
                    false => Err(StoreError::already_exists(format!("{key} exists"))),
                }
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) async fn delete(&self, names: &[&str]) -> Result<(), StoreError> {
        gone(self.store.delete(&self.key(names)?).await)
    }

    /// Returns the names of the objects right under a folder, which need not exist.
    pub(crate) async fn names_under(&self, folder: &str) -> Result<Vec<String>, StoreError> {
        let found = self.store.list_with_delimiter(Some(&self.key(&[folder])?)).await?;
        let names = found.objects.iter().filter_map(|object| object.location.filename());
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns all objects under the prefix with their sizes, sorted by their paths below it, or the
    /// object of the prefix itself under its last name.
    pub(crate) async fn list_all(&self, most: usize) -> Result<Vec<(String, u64)>, StoreError> {
        let root = self.key(&[])?;
        let mut found = Vec::new();
        let mut objects = self.store.list(Some(&root));
        while let Some(object) = objects.try_next().await? {
            let key = object.location.as_ref();
            let below = key.strip_prefix(&*self.prefix).map(|key| key.trim_start_matches('/'));
            if let Some(below) = below.filter(|below| !below.is_empty()) {
                found.push((below.to_owned(), object.size));
            }
            if found.len() > most {
                return Err(StoreError::invalid(format!("there are more than {most} objects")));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Returns the key of an object under the prefix.
    pub(crate) fn key(&self, names: &[&str]) -> Result<Path, StoreError> {
        let mut key = self.prefix.to_string();
        for name in names {
            if !key.is_empty() {
                key.push('/');
            }
            key.push_str(name);
        }
        Path::parse(&key).map_err(|error| StoreError::invalid(error.to_string()))
    }
}

/// Returns the content of an object that is not whole yet, with the identifier of its upload.
pub(crate) fn placeholder(upload: &str) -> Bytes {
    // The number makes each reservation a content of its own: see `put_new`.
    Bytes::from(format!("{PLACEHOLDER}{}\n{upload}\n", random_id()))
}

/// Returns the identifier of the upload that a placeholder names.
fn upload_of(content: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(content.strip_prefix(PLACEHOLDER.as_bytes())?).ok()?;
    text.lines().nth(1).filter(|id| !id.is_empty())
}

/// Returns a number that no other call on any machine returns.
pub(crate) fn random_id() -> String {
    use std::hash::{BuildHasher, RandomState};
    let word = || RandomState::new().hash_one(std::process::id());
    format!("{:016x}{:016x}", word(), word())
}

/// Ignores that an object to be deleted is gone.
fn gone(deleted: object_store::Result<()>) -> Result<(), StoreError> {
    match deleted {
        Err(object_store::Error::NotFound { .. }) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the prefix of a folder, and whether its name is a temporary one.
fn prefix_of(folder: &str) -> (&str, bool) {
    match folder.strip_suffix(TEMPORARY) {
        Some(prefix) => (prefix, true),
        None => (folder, false),
    }
}

/// Returns the last name of a file's key.
fn object_of(file: &str, is_temporary: bool) -> &str {
    if is_temporary && file == MANIFEST { UNPUBLISHED_MANIFEST } else { file }
}

/// The ending of the names of folders that are not published.
const TEMPORARY: &str = ".tmp";
const MANIFEST: &str = "MANIFEST";
const UNPUBLISHED_MANIFEST: &str = ".MANIFEST";
/// The object that makes a folder exist.
const FOLDER: &str = ".folder";
const PLACEHOLDER: &str = "pushpull: this upload is not complete\n";
/// The largest placeholder: identifiers of uploads have at most some hundred bytes.
const PLACEHOLDER_BYTES_MAX: u64 = 8192;
/// The most requests of one operation that are under way at a time.
const REQUESTS_MAX: usize = 16;
