//! Damage to files: flips bits, replaces directories, restricts permissions. Also lists
//! checkpoints.

use std::fmt::{self, Display};
use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::chance::Chance;

/// A flipped bit of a file.
#[derive(Debug)]
pub(crate) struct Flip {
    file: PathBuf,
    at: u64,
    bit: u8,
}

impl Display for Flip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a flip of bit {} of byte {} of {}", self.bit, self.at, self.file.display())
    }
}

impl Flip {
    fn flip(&self) {
        let file = OpenOptions::new().read(true).write(true).open(&self.file).expect("a file");
        let mut byte = [0];
        file.read_exact_at(&mut byte, self.at).expect("a byte of the file");
        byte[0] ^= 1 << self.bit;
        file.write_all_at(&byte, self.at).expect("a byte of the file");
    }

    /// Flips the bit back.
    pub(crate) fn undo(&self) {
        self.flip();
    }
}

/// Flips a bit of a file below `folder`.
///
/// Each file is equally likely. In half of all cases the bit is in the first 16 KiB, which hold the
/// most important fields.
pub(crate) fn flip_in(folder: &Path, chance: &mut Chance) -> Flip {
    let mut files = Vec::new();
    collect_files(folder, &mut files);
    files.sort();
    let (file, bytes) = files.swap_remove(chance.below(files.len() as u64) as usize);
    let within = if chance.once_in(2) { bytes.min(FIRST_BYTES) } else { bytes };
    let flip = Flip { file, at: chance.below(within), bit: chance.below(8) as u8 };
    flip.flip();
    flip
}

/// Collects the non-empty files below a folder with their lengths.
fn collect_files(folder: &Path, files: &mut Vec<(PathBuf, u64)>) {
    for entry in fs::read_dir(folder).expect("a folder can be read") {
        let entry = entry.expect("an entry of a folder");
        let of_it = entry.metadata().expect("a file has a length");
        match of_it.is_dir() {
            true => collect_files(&entry.path(), files),
            false if of_it.len() > 0 => files.push((entry.path(), of_it.len())),
            false => {}
        }
    }
}

/// The length of the first pages of a file.
const FIRST_BYTES: u64 = 16 << 10;

/// The name of a checkpoint. A newer checkpoint has a greater name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DamagedName {
    epoch: u64,
    step: u64,
    revision: u64,
}

impl DamagedName {
    pub(crate) fn of(text: &str) -> Option<DamagedName> {
        let (epoch, rest) = text.strip_prefix("ckpt-")?.split_once('-')?;
        let (step, revision) = rest.split_once('.').unwrap_or((rest, "0"));
        let number = |text: &str| text.parse().ok();
        Some(DamagedName {
            epoch: number(epoch)?,
            step: number(step)?,
            revision: number(revision)?,
        })
    }
}

impl Display for DamagedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ckpt-{}-{}", self.epoch, self.step)?;
        match self.revision {
            0 => Ok(()),
            revision => write!(f, ".{revision}"),
        }
    }
}

/// Returns the published checkpoints; none if the directory does not exist.
pub(crate) fn checkpoints(directory: &Path) -> Vec<DamagedName> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| DamagedName::of(entry.file_name().to_str()?)).collect()
}

/// Returns the newest published checkpoint.
pub(crate) fn newest(directory: &Path) -> Option<DamagedName> {
    checkpoints(directory).into_iter().max()
}

/// Moves a directory to `aside` and puts a file in its place.
pub(crate) fn replace(directory: &Path, aside: &Path) {
    fs::rename(directory, aside).expect("a directory can be moved");
    fs::write(directory, "not a directory").expect("a file can be written");
}

/// Undoes [`replace`].
pub(crate) fn put_back(directory: &Path, aside: &Path) {
    fs::remove_file(directory).expect("a file can be removed");
    fs::rename(aside, directory).expect("a directory can be moved");
}

/// Sets the permissions of a directory.
pub(crate) fn permit(directory: &Path, mode: u32) {
    fs::set_permissions(directory, Permissions::from_mode(mode)).expect("the directory is ours");
}
