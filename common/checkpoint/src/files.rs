//! Files with a known size and hash: writing, reading back and verifying them.

use pushpull_common::file_kind::FIRST_BYTES;
use serde::{Deserialize, Serialize};

use crate::error::{CheckpointError, corrupt, foreign};
use crate::hex;
use crate::manifest::MANIFEST;
use crate::piece_hasher::PieceHasher;
use crate::storage::{CheckpointStorage, ReadFile, WriteFile};

/// The size of a piece that is read, hashed or written at once, in bytes.
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

/// A file that was written, and not read back yet.
#[derive(Debug)]
pub(crate) struct WrittenFile {
    pub(crate) entry: FileEntry,
    /// The CRC-32C of the whole file. It takes a twentieth of the time of the hash, and finds what a
    /// disk damages as well.
    crc: u32,
}

/// A file that is hashed as it is written.
#[derive(Debug)]
pub(crate) struct HashedFile {
    out: Box<dyn WriteFile>,
    /// The bytes of the next piece.
    pending: Vec<u8>,
    hasher: PieceHasher,
    crc: u32,
    bytes: u64,
}

impl HashedFile {
    pub(crate) fn new(out: Box<dyn WriteFile>) -> HashedFile {
        HashedFile { out, pending: Vec::new(), hasher: PieceHasher::new(), crc: 0, bytes: 0 }
    }

    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        self.bytes += bytes.len() as u64;
        while let Some((now, later)) = bytes.split_at_checked(PIECE_BYTES - self.pending.len()) {
            self.pending.extend_from_slice(now);
            self.write_pending()?;
            bytes = later;
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    fn write_pending(&mut self) -> Result<(), CheckpointError> {
        self.out.write(&self.pending)?;
        self.crc = crc32c::crc32c_append(self.crc, &self.pending);
        self.hasher.add(&mut self.pending);
        self.pending.clear();
        Ok(())
    }

    /// Completes the file and makes it durable.
    pub(crate) fn finish(mut self, file: &str) -> Result<WrittenFile, CheckpointError> {
        self.write_pending()?;
        self.out.sync()?;
        let sha256 = self.hasher.finish();
        let entry = FileEntry { file: file.to_owned(), bytes: self.bytes, sha256 };
        Ok(WrittenFile { entry, crc: self.crc })
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
    verify_written(storage, folder, out.finish(file)?)
}

/// Reads back a file that was written and synced; the only function that does. An unreadable file
/// is found now, and not when it is needed. Returns its entry.
pub(crate) fn verify_written(
    storage: &dyn CheckpointStorage,
    folder: &str,
    written: WrittenFile,
) -> Result<FileEntry, CheckpointError> {
    let WrittenFile { entry, crc } = written;
    let file = open_sized(storage, folder, &entry)?;
    let mut found = 0;
    read_pieces(&*file, 0, entry.bytes, &mut |piece| {
        found = crc32c::crc32c_append(found, piece);
        Ok(())
    })?;
    if found != crc {
        let text = |crc: u32| format!("bytes of CRC-32C {crc:08x}");
        let path = format!("{folder}/{}", entry.file);
        return Err(foreign_or(&*file, path.clone(), corrupt(&path, 0, text(crc), text(found))));
    }
    Ok(entry)
}

/// Opens a file and verifies all of it. The returned file is the one that was verified.
pub(crate) fn verify(
    storage: &dyn CheckpointStorage,
    folder: &str,
    entry: &FileEntry,
) -> Result<Box<dyn ReadFile>, CheckpointError> {
    let file = open_sized(storage, folder, entry)?;
    let mut hasher = PieceHasher::new();
    read_buffers(&*file, 0, entry.bytes, &mut |piece| {
        hasher.add(piece);
        Ok(())
    })?;
    let found = hasher.finish();
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
    read_buffers(file, offset, bytes, &mut |piece| take(piece))
}

/// Reads as [`read_pieces`] does, into a buffer that may be replaced by another one.
fn read_buffers(
    file: &dyn ReadFile,
    offset: u64,
    bytes: u64,
    take: &mut dyn FnMut(&mut Vec<u8>) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut piece = Vec::new();
    let mut done = 0;
    while done < bytes {
        let length = (bytes - done).min(PIECE_BYTES as u64);
        piece.resize(length as usize, 0);
        file.read(offset + done, &mut piece)?;
        take(&mut piece)?;
        done += length;
    }
    Ok(())
}
