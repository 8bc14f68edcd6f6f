//! [`CsvSource`]: the rows of a CSV file.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pushpull_common::file_kind::FileKind;
use pushpull_common::read_at::ReadAt;

use super::csv_row::{CsvColumns, listed};
use super::csv_scanner::{RowIndex, RowScanner};
use super::data_file::{DataFile, MEMORY_BYTES_MAX};
use super::file_bytes::FileBytes;
use super::{CsvRow, Source, SourceError};

/// The rows of a CSV file (RFC 4180), by their number.
///
/// Opening a file reads it once and keeps the position of each row: 8 bytes a row. After that any
/// row is read directly. All rows must have as many fields as the first, and at most 1 MiB. Empty
/// lines are no rows. A file that is malformed would be other data than its author has seen, so it
/// is refused: a quote that is not closed, text behind a closing quote, a quote inside a field
/// without quotes, a column name that is repeated or is not UTF-8, a header that is repeated, a byte
/// order mark before a later row, a zero byte, and a table of one column whose fields are separated
/// by semicolons or tabs. [`CsvFormat`] relaxes some.
///
/// A file of up to 1 GiB ([`CsvFormat::memory_bytes_max`]) is kept in memory. A longer plain file
/// stays on the disk, which costs a system call for each row. A file may be packed with gzip
/// (feature `gz`); if it is longer unpacked, it is refused.
///
/// ```
/// use pushpull_training::data::{CsvSource, Pipeline};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("flights.csv");
/// std::fs::write(&path, "carrier,distance,delay\nUA,1400,11\nB6,1089,-3.5\n")?;
/// let source = CsvSource::open(&path)?.columns(["delay", "carrier"])?;
/// let pipeline = Pipeline::new(source)
///     .batch(2)
///     .try_map(|row| Ok::<_, pushpull_training::data::SourceError>((
///         row.text("carrier")?.to_owned(),
///         row.parse::<f32>("delay")?,
///     )));
/// let batch = pipeline.shard(0, 1)?.next().ok_or("there is one batch")??;
/// assert_eq!(batch.samples, [("UA".to_owned(), 11.0), ("B6".to_owned(), -3.5)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CsvSource {
    name: String,
    bytes: FileBytes,
    /// The start of each row, and the end of the last.
    offsets: Vec<u64>,
    /// The column names in the first row, selected or not.
    header: Vec<String>,
    columns: Arc<CsvColumns>,
}

/// The format of a CSV file.
///
/// ```
/// use pushpull_training::data::CsvFormat;
///
/// let format = CsvFormat::new().delimiter(b'\t').has_header(false).memory_bytes_max(8 << 30);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CsvFormat {
    pub(super) delimiter: u8,
    pub(super) has_header: bool,
    /// Whether a header that looks like a row is refused.
    pub(super) checks_header: bool,
    pub(super) has_lenient_quotes: bool,
    pub(super) has_blank_rows: bool,
    pub(super) allows_repeated_header: bool,
    allows_repeated_names: bool,
    memory_bytes_max: u64,
}

impl CsvFormat {
    /// Commas, a first row of names, strict quotes, and at most 1 GiB in memory.
    pub fn new() -> CsvFormat {
        CsvFormat {
            delimiter: b',',
            has_header: true,
            checks_header: true,
            has_lenient_quotes: false,
            has_blank_rows: false,
            allows_repeated_header: false,
            allows_repeated_names: false,
            memory_bytes_max: MEMORY_BYTES_MAX,
        }
    }

    /// Sets the byte between two fields. Default: a comma.
    pub fn delimiter(self, delimiter: u8) -> CsvFormat {
        CsvFormat { delimiter, ..self }
    }

    /// Whether the first row has the names of the columns. Without it the columns are named by their
    /// position: `0`, `1` and so on. Default: yes, but names that are numbers are refused, because
    /// they seem to be a row; a call with `true` accepts them.
    pub fn has_header(self, has_header: bool) -> CsvFormat {
        CsvFormat { has_header, checks_header: false, ..self }
    }

    /// Whether quotes inside a field without quotes, and text behind a closing quote, belong to the
    /// field: for files whose author did not quote, such as `5" disk`. Default: no, they are
    /// refused. A quote that is not closed always is.
    pub fn lenient_quotes(self, lenient: bool) -> CsvFormat {
        CsvFormat { has_lenient_quotes: lenient, ..self }
    }

    /// Whether an empty line is a row in a file of one column, where it is an empty value. Without
    /// it such rows are skipped, and the rows behind them shift against those of another file.
    /// Default: no.
    pub fn blank_rows(self, blank_rows: bool) -> CsvFormat {
        CsvFormat { has_blank_rows: blank_rows, ..self }
    }

    /// Whether several columns may have one name. None of them can be selected then. Default: no.
    pub fn repeated_names(self, allowed: bool) -> CsvFormat {
        CsvFormat { allows_repeated_names: allowed, ..self }
    }

    /// Whether a row that equals the header is a row. Files that were joined have the header of each,
    /// which would be a sample of names. Default: no, it is refused.
    pub fn repeated_header(self, allowed: bool) -> CsvFormat {
        CsvFormat { allows_repeated_header: allowed, ..self }
    }

    /// Sets the most bytes, unpacked, of a file that is kept in memory. Default: 1 GiB.
    pub fn memory_bytes_max(self, bytes: u64) -> CsvFormat {
        CsvFormat { memory_bytes_max: bytes, ..self }
    }
}

impl Default for CsvFormat {
    fn default() -> CsvFormat {
        CsvFormat::new()
    }
}

impl CsvSource {
    /// The maximum size of a row with its terminator, in bytes.
    pub const ROW_BYTES_MAX: u64 = 1 << 20;
    /// The maximum number of columns.
    pub const COLUMNS_MAX: usize = 1 << 16;
    /// The maximum number of rows. Their positions take 2 GiB.
    pub const ROWS_MAX: u64 = 1 << 28;

    /// Opens a file with the default [`CsvFormat`], and selects all columns.
    ///
    /// # Errors
    /// [`SourceError::OtherFormat`] if the file is no table of text; [`SourceError::HeaderRow`] and
    /// [`SourceError::RepeatedColumn`] for the names; [`SourceError::Row`] names the first malformed
    /// row; those of reading files, and [`SourceError::TooManyRows`].
    pub fn open(path: impl AsRef<Path>) -> Result<CsvSource, SourceError> {
        CsvSource::open_as(path, CsvFormat::new())
    }

    /// Opens a file of another format, and selects all columns.
    ///
    /// # Errors
    /// The errors of [`CsvSource::open`].
    pub fn open_as(path: impl AsRef<Path>, format: CsvFormat) -> Result<CsvSource, SourceError> {
        CsvSource::open_within(path.as_ref(), format, CsvSource::ROWS_MAX)
    }

    /// Reads an open input, such as an object of an object store, as [`CsvSource::open_as`] reads a
    /// file. A plain input that is not kept in memory stays in its storage, which costs a read for
    /// each row.
    ///
    /// # Errors
    /// The errors of [`CsvSource::open`].
    pub fn of_input(input: Arc<dyn ReadAt>, format: CsvFormat) -> Result<CsvSource, SourceError> {
        let path = PathBuf::from(input.name());
        let open = || DataFile::of_input(input);
        CsvSource::of_file(&path, open, format, CsvSource::ROWS_MAX)
    }

    /// Selects columns by their names. Rows have these fields in this order.
    ///
    /// # Errors
    /// [`SourceError::Column`] names the first column that the file does not have, and
    /// [`SourceError::RepeatedColumn`] one that it has several times.
    pub fn columns<N: Into<String>>(
        self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<CsvSource, SourceError> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let position = |column: &String| {
            let mut positions = (0..self.header.len()).filter(|&at| self.header[at] == *column);
            let file = self.columns.file.clone();
            let column = column.clone();
            match (positions.next(), positions.next()) {
                (None, _) => {
                    Err(SourceError::Column { file, column, columns: listed(&self.header) })
                }
                (Some(position), None) => Ok(position),
                (Some(first), Some(second)) => {
                    Err(SourceError::RepeatedColumn { file, column, first, second })
                }
            }
        };
        let positions = names.iter().map(position).collect::<Result<Vec<usize>, _>>()?;
        let columns = CsvColumns { names, positions, ..(*self.columns).clone() };
        Ok(CsvSource { columns: Arc::new(columns), ..self })
    }

    /// Sets the name of the data set. Default: the name of the file.
    pub fn named(self, name: impl Into<String>) -> CsvSource {
        CsvSource { name: name.into(), ..self }
    }

    /// The names of all columns of the file.
    pub fn header(&self) -> &[String] {
        &self.header
    }

    /// Opens a file of at most `rows_max` rows.
    pub(super) fn open_within(
        path: &Path,
        format: CsvFormat,
        rows_max: u64,
    ) -> Result<CsvSource, SourceError> {
        CsvSource::of_file(path, || DataFile::open(path), format, rows_max)
    }

    fn of_file(
        path: &Path,
        open: impl FnOnce() -> Result<DataFile, SourceError>,
        format: CsvFormat,
        rows_max: u64,
    ) -> Result<CsvSource, SourceError> {
        if b"\"\r\n".contains(&format.delimiter) {
            let expected = "no quote and no end of a line".to_owned();
            let field = "the delimiter";
            let found = format.delimiter.into();
            return Err(SourceError::Header { file: path.to_owned(), field, found, expected });
        }
        let file = open()?;
        let first = file.first_bytes()?;
        if let Some(kind) = FileKind::of(&first).filter(|kind| !kind.is_text()) {
            return Err(file.other_format(kind, "a table of text".to_owned()));
        }
        let bytes = file.load(None, format.memory_bytes_max)?;
        let scanner = RowScanner::new(path, format, rows_max);
        let RowIndex { header, offsets, has_quotes } = scanner.index(bytes.reader()?)?;
        if format.has_header && !format.allows_repeated_names {
            check_names(path, &header)?;
        }
        let columns = CsvColumns {
            file: path.to_owned(),
            width: header.len(),
            delimiter: format.delimiter,
            is_plain: !has_quotes && bytes.is_in_memory(),
            names: header.clone(),
            positions: (0..header.len()).collect(),
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(CsvSource { name, bytes, offsets, header, columns: Arc::new(columns) })
    }
}

impl Source for CsvSource {
    type Sample = CsvRow;

    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> u64 {
        (self.offsets.len() - 1) as u64
    }

    fn get(&self, index: u64) -> Result<CsvRow, SourceError> {
        let bounds = usize::try_from(index).ok().and_then(|at| self.offsets.get(at..)?.get(..2));
        let &[start, end] = bounds.unwrap_or_default() else {
            return Err(SourceError::Index { name: self.name.clone(), index, len: self.len() });
        };
        // The index has no longer rows than the limit.
        let bytes = self.bytes.read(start, (end - start) as usize)?;
        CsvRow::split(&self.columns, index, bytes)
    }
}

impl fmt::Debug for CsvSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CsvSource")
            .field("name", &self.name)
            .field("bytes", &self.bytes)
            .field("rows", &self.len())
            .field("columns", &self.columns.names)
            .finish()
    }
}

/// Checks that no name is repeated.
fn check_names(path: &Path, names: &[String]) -> Result<(), SourceError> {
    let mut positions = HashMap::with_capacity(names.len());
    for (second, column) in names.iter().enumerate() {
        if let Some(first) = positions.insert(column, second) {
            let file = path.to_owned();
            let column = column.clone();
            return Err(SourceError::RepeatedColumn { file, column, first, second });
        }
    }
    Ok(())
}
