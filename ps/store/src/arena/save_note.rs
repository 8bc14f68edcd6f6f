//! A note in the state directory that checkpoint saves are failing, for `pushpull inspect`.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The file's name in a state directory.
const NAME: &str = "saves-failing";

/// The longest cause that is written or read, in bytes.
const CAUSE_BYTES_MAX: usize = 4096;

/// The note's file: how many saves in a row have failed, and the cause of the last failure.
///
/// The file exists only while saves fail. Nothing depends on it, and a failure to write it is
/// ignored.
#[derive(Clone, Debug)]
pub struct SaveNote(PathBuf);

impl SaveNote {
    /// Returns the note of a state directory.
    pub fn of(directory: &Path) -> SaveNote {
        SaveNote(directory.join(NAME))
    }

    /// Records that `in_a_row` saves in a row have failed, the last one for this cause.
    pub fn write(&self, in_a_row: u64, cause: &str) {
        let most = CAUSE_BYTES_MAX.min(cause.len());
        let end = (0..=most).rev().find(|&at| cause.is_char_boundary(at)).unwrap_or(0);
        let cause = &cause[..end];
        let write = || -> io::Result<()> {
            // A new file, never one that another process created.
            self.remove();
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.0)?;
            writeln!(file, "{in_a_row}\n{cause}")
        };
        // An event reports the failure in any case.
        let _ = write();
    }

    /// Removes the note: a save has succeeded.
    pub fn remove(&self) {
        // Usually the file does not exist.
        let _ = std::fs::remove_file(&self.0);
    }

    /// Returns how many saves in a row have failed and the cause of the last failure; `None` if
    /// there is no note.
    pub fn read(&self) -> Option<(u64, String)> {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(flags.bits() as i32);
        let file = options.open(&self.0).ok()?;
        let mut text = Vec::new();
        file.take(32 + CAUSE_BYTES_MAX as u64).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let (count, cause) = text.split_once('\n')?;
        Some((count.parse().ok()?, cause.trim_end().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_readable_until_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let note = SaveNote::of(directory.path());
        assert_eq!(note.read(), None);
        note.write(1, "the disk is full");
        note.write(3, "cannot open it:\nit is gone");
        assert_eq!(note.read(), Some((3, "cannot open it:\nit is gone".to_owned())));
        note.write(4, &"ä".repeat(CAUSE_BYTES_MAX));
        assert_eq!(note.read().unwrap().1, "ä".repeat(CAUSE_BYTES_MAX / 2));
        note.remove();
        assert_eq!(note.read(), None);
        std::fs::write(directory.path().join(NAME), b"\xff\xff").unwrap();
        assert_eq!(note.read(), None);
    }

    #[test]
    fn a_failed_write_leaves_no_note() {
        let note = SaveNote::of(Path::new("/proc/self/nowhere"));
        note.write(1, "the disk is full");
        assert_eq!(note.read(), None);
    }
}
