//! [`Spool`]: bytes that arrive one after the other, in memory and then in a file without a name.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::file_bytes::FileBytes;

/// The bytes of a stream while it arrives.
pub(super) struct Spool {
    place: SpoolPlace,
    len: u64,
}

/// The place of the bytes so far.
enum SpoolPlace {
    Memory(Vec<u8>),
    File(BufWriter<File>),
}

impl Spool {
    /// Begins in memory.
    pub(super) fn new() -> Spool {
        Spool { place: SpoolPlace::Memory(Vec::new()), len: 0 }
    }

    /// Returns the number of bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the bytes are in memory.
    pub(super) fn is_in_memory(&self) -> bool {
        matches!(self.place, SpoolPlace::Memory(_))
    }

    /// Moves the bytes from memory to a file of this directory.
    pub(super) fn move_to_file(&mut self, directory: &Path) -> io::Result<()> {
        if let SpoolPlace::Memory(bytes) = &self.place {
            let mut file = BufWriter::with_capacity(BUFFER_BYTES, unnamed_file(directory)?);
            file.write_all(bytes)?;
            self.place = SpoolPlace::File(file);
        }
        Ok(())
    }

    /// Appends bytes.
    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.place {
            SpoolPlace::Memory(memory) => memory.extend_from_slice(bytes),
            SpoolPlace::File(file) => file.write_all(bytes)?,
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Ends the writing. The bytes can then be read at any position; errors call them `name`.
    pub(super) fn finish(self, name: PathBuf) -> io::Result<FileBytes> {
        Ok(match self.place {
            SpoolPlace::Memory(bytes) => FileBytes::in_memory(name, bytes),
            SpoolPlace::File(file) => {
                let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
                FileBytes::on_disk(name, file, self.len)
            }
        })
    }
}

/// Creates a file without a name, which the system deletes when it is closed, also after a kill.
///
/// The file has a name for a moment: not every file system has `O_TMPFILE`.
fn unnamed_file(directory: &Path) -> io::Result<File> {
    let process = std::process::id();
    for number in 0..NAMES_MAX {
        let path = directory.join(format!(".pushpull-spool-{process}-{number}"));
        let mut options = OpenOptions::new();
        // An existing file may be another user's.
        options.read(true).write(true).create_new(true).mode(0o600);
        match options.open(&path) {
            Ok(file) => {
                fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// The names that are tried: of files that are being created, or that a kill at that moment left.
const NAMES_MAX: u32 = 1024;

/// The bytes that are written at once.
const BUFFER_BYTES: usize = 1 << 18;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_move_to_a_file_without_a_name() {
        let directory = tempfile::tempdir().unwrap();
        let left_by_a_kill = format!(".pushpull-spool-{}-0", std::process::id());
        fs::write(directory.path().join(&left_by_a_kill), "not ours").unwrap();
        let mut spool = Spool::new();
        spool.append(b"one").unwrap();
        assert!(spool.is_in_memory());
        spool.move_to_file(directory.path()).unwrap();
        spool.append(b"two").unwrap();
        assert_eq!((spool.len(), spool.is_in_memory()), (6, false));
        let bytes = spool.finish("stream".into()).unwrap();
        assert_eq!(bytes.read(2, 3).unwrap(), &b"etw"[..]);
        assert_eq!(directory.path().read_dir().unwrap().count(), 1);
        assert_eq!(fs::read(directory.path().join(left_by_a_kill)).unwrap(), b"not ours");
    }
}
