//! Files with a known size and hash: writing, reading back and verifying them.

use pushpull_common::file_kind::FIRST_BYTES;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{CheckpointError, corrupt, foreign};
use crate::hex;
use crate::manifest::MANIFEST;
use crate::storage::{CheckpointStorage, ReadFile, WriteFile};

/// The maximum size of a read, and the size up to which small writes are collected, in bytes.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// The manifest's entry of a file: the name, length and hash that the file must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The file's name.
    pub(crate) file: String,
    /// The file's length in bytes.
    pub(crate) bytes: u64,
    /// The SHA-256 of the whole file.
    #[serde(with = "hex")]
    pub(crate) sha256: [u8; 32],
}

impl FileEntry {
    /// Checks that this is the entry of a file of this name and length.
    pub(crate) fn check(
        &self,
        folder: &str,
        file: &str,
        bytes: u64,
    ) -> Result<(), CheckpointError> {
        if (&*self.file, self.bytes) == (file, bytes) {
            return Ok(());
        }
        let text = |file: &str, bytes: u64| format!("{file} of {bytes} bytes");
        let expected = text(file, bytes);
        let found = text(&self.file, self.bytes);
        Err(corrupt(&format!("{folder}/{MANIFEST}"), 0, expected, found))
    }
}

/// A file that is hashed as it is written.
#[derive(Debug)]
pub(crate) struct HashedFile {
    out: Box<dyn WriteFile>,
    /// Bytes of small tensors, collected into larger writes.
    pending: Vec<u8>,
    hasher: Sha256,
    bytes: u64,
}

impl HashedFile {
    pub(crate) fn new(out: Box<dyn WriteFile>) -> HashedFile {
        HashedFile { out, pending: Vec::new(), hasher: Sha256::new(), bytes: 0 }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        if self.pending.len() + bytes.len() > PIECE_BYTES {
            self.out.write(&self.pending)?;
            self.pending.clear();
        }
        if bytes.len() >= PIECE_BYTES {
            self.out.write(bytes)?;
        } else {
            self.pending.extend_from_slice(bytes);
        }
        Ok(())
    }

    /// Completes the file and makes it durable. Returns its entry.
    pub(crate) fn finish(mut self, file: &str) -> Result<FileEntry, CheckpointError> {
        self.out.write(&self.pending)?;
        self.out.sync()?;
        let sha256 = self.hasher.finalize().into();
        Ok(FileEntry { file: file.to_owned(), bytes: self.bytes, sha256 })
    }
}

/// Writes a file from bytes in memory, and verifies it.
pub(crate) fn write_whole(
    storage: &dyn CheckpointStorage,
    folder: &str,
    file: &str,
    bytes: &[u8],
) -> Result<FileEntry, CheckpointError> {
    let mut out = HashedFile::new(storage.create(folder, file)?);
    out.write(bytes)?;
    let entry = out.finish(file)?;
    verify_written(storage, folder, &entry)?;
    Ok(entry)
}

/// Reads back a file that was written and synced; the only function that does. An unreadable file
/// is found now, and not when it is needed.
pub(crate) fn verify_written(
    storage: &dyn CheckpointStorage,
    folder: &str,
    entry: &FileEntry,
) -> Result<(), CheckpointError> {
    verify(storage, folder, entry).map(|_| ())
}

/// Opens a file and verifies all of it. The returned file is the one that was verified.
pub(crate) fn verify(
    storage: &dyn CheckpointStorage,
    folder: &str,
    entry: &FileEntry,
) -> Result<Box<dyn ReadFile>, CheckpointError> {
    let file = open_sized(storage, folder, entry)?;
    let mut hasher = Sha256::new();
    read_pieces(&*file, 0, entry.bytes, &mut |piece| {
        hasher.update(piece);
        Ok(())
    })?;
    let found: [u8; 32] = hasher.finalize().into();
    if found != entry.sha256 {
        let text = |hash: &[u8]| format!("bytes of SHA-256 {}", hex::encode(hash));
        let path = format!("{folder}/{}", entry.file);
        let error = corrupt(&path, 0, text(&entry.sha256), text(&found));
        return Err(foreign_or(&*file, path, error));
    }
    Ok(file)
}

/// Opens a file and checks that it has the length of its entry.
pub(crate) fn open_sized(
    storage: &dyn CheckpointStorage,
    folder: &str,
    entry: &FileEntry,
) -> Result<Box<dyn ReadFile>, CheckpointError> {
    let file = storage.open(folder, &entry.file)?;
    let found = file.bytes();
    let expected = entry.bytes;
    if found != expected {
        let path = format!("{folder}/{}", entry.file);
        let text = |end: u64| format!("an end at byte {end}");
        let error = corrupt(&path, found.min(expected), text(expected), text(found));
        return Err(foreign_or(&*file, path, error));
    }
    Ok(file)
}

/// Returns the error of a file of another format, or else the one that was found.
fn foreign_or(file: &dyn ReadFile, path: String, error: CheckpointError) -> CheckpointError {
    let mut first = vec![0; file.bytes().min(FIRST_BYTES as u64) as usize];
    match file.read(0, &mut first).ok().and_then(|()| foreign(&first)) {
        Some(found) => CheckpointError::OtherFile { file: path, found },
        None => error,
    }
}

/// Reads `bytes` bytes from `offset` on, in pieces of at most [`PIECE_BYTES`].
pub(crate) fn read_pieces(
    file: &dyn ReadFile,
    offset: u64,
    bytes: u64,
    take: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut buffer = vec![0; bytes.min(PIECE_BYTES as u64) as usize];
    let mut done = 0;
    while done < bytes {
        let piece = &mut buffer[..(bytes - done).min(PIECE_BYTES as u64) as usize];
        file.read(offset + done, piece)?;
        take(piece)?;
        done += piece.len() as u64;
    }
    Ok(())
}
