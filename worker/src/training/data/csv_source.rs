//! [`CsvSource`]: the rows of a CSV file.

use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::csv_row::CsvColumns;
use super::data_file::{DataFile, MEMORY_BYTES_MAX};
use super::file_bytes::FileBytes;
use super::{CsvRow, Source, SourceError};

/// The rows of a CSV file (RFC 4180), by their number.
///
/// Opening a file reads it once and keeps the position of each row: 8 bytes a row. After that any
/// row is read directly. All rows must have as many fields as the first. A row of more than 1 MiB
/// is refused, such as one whose quotes are not closed. Empty lines are no rows.
///
/// A file of up to 1 GiB ([`CsvFormat::memory_bytes_max`]) is kept in memory. A longer plain file
/// stays on the disk, which costs a system call for each row. A file may be packed with gzip
/// (feature `gz`); if it is longer unpacked, it is refused.
///
/// ```
/// use pushpull_worker::training::data::{CsvSource, Pipeline};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("flights.csv");
/// std::fs::write(&path, "carrier,distance,delay\nUA,1400,11\nB6,1089,-3.5\n")?;
/// let source = CsvSource::open(&path)?.columns(["delay", "carrier"])?;
/// let pipeline = Pipeline::new(source)
///     .batch(2)
///     .try_map(|row| Ok::<_, pushpull_worker::training::data::SourceError>((
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
    /// All names of the first row.
    header: Vec<String>,
    columns: Arc<CsvColumns>,
}

/// How a CSV file is read.
///
/// ```
/// use pushpull_worker::training::data::CsvFormat;
///
/// let format = CsvFormat::new().delimiter(b'\t').has_header(false).memory_bytes_max(8 << 30);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CsvFormat {
    delimiter: u8,
    has_header: bool,
    memory_bytes_max: u64,
}

impl CsvFormat {
    /// Commas, a first row of names, and at most 1 GiB in memory.
    pub fn new() -> CsvFormat {
        CsvFormat { delimiter: b',', has_header: true, memory_bytes_max: MEMORY_BYTES_MAX }
    }

    /// Sets the byte between two fields. Default: a comma.
    pub fn delimiter(self, delimiter: u8) -> CsvFormat {
        CsvFormat { delimiter, ..self }
    }

    /// Whether the first row has the names of the columns. Default: yes. Without it the columns are
    /// named by their position: `0`, `1` and so on.
    pub fn has_header(self, has_header: bool) -> CsvFormat {
        CsvFormat { has_header, ..self }
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
    /// The limit of the bytes of a row, with its terminator.
    pub const ROW_BYTES_MAX: u64 = 1 << 20;
    /// The limit of the columns.
    pub const COLUMNS_MAX: usize = 1 << 16;
    /// The limit of the rows: their positions take 2 GiB.
    pub const ROWS_MAX: u64 = 1 << 28;

    /// Opens a file with the default [`CsvFormat`], and selects all columns.
    ///
    /// # Errors
    /// [`SourceError::Row`] names the first malformed row; those of reading files, and
    /// [`SourceError::TooManyRows`].
    pub fn open(path: impl AsRef<Path>) -> Result<CsvSource, SourceError> {
        CsvSource::open_as(path, CsvFormat::new())
    }

    /// Opens a file of another format, and selects all columns.
    ///
    /// # Errors
    /// Those of [`CsvSource::open`].
    pub fn open_as(path: impl AsRef<Path>, format: CsvFormat) -> Result<CsvSource, SourceError> {
        CsvSource::open_within(path.as_ref(), format, CsvSource::ROWS_MAX)
    }

    /// Selects columns by their names. Rows have these fields in this order.
    ///
    /// # Errors
    /// [`SourceError::Column`] names the first column that the file does not have.
    pub fn columns<N: Into<String>>(
        self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<CsvSource, SourceError> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let position = |column: &String| {
            let position = self.header.iter().position(|name| name == column);
            let (file, column) = (self.columns.file.clone(), column.clone());
            position.ok_or(SourceError::Column { file, column })
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
        if b"\"\r\n".contains(&format.delimiter) {
            let expected = "no quote and no end of a line".to_owned();
            let (field, found) = ("the delimiter", format.delimiter.into());
            return Err(SourceError::Header { file: path.to_owned(), field, found, expected });
        }
        let bytes = DataFile::open(path)?.load(None, format.memory_bytes_max)?;
        let RowIndex { header, offsets, has_quotes } =
            RowIndexer::new(&bytes, format)?.index(rows_max)?;
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

/// What one pass over a file finds.
struct RowIndex {
    /// The names of the columns.
    header: Vec<String>,
    /// The start of each row, and the end of the last.
    offsets: Vec<u64>,
    /// Whether there is a quote anywhere.
    has_quotes: bool,
}

/// Finds the rows of a file in one pass, by the rules of the csv crate.
struct RowIndexer<'a> {
    reader: csv::Reader<RowLimit<'a>>,
    file: PathBuf,
    /// The position of the first record.
    start: u64,
    has_header: bool,
}

impl<'a> RowIndexer<'a> {
    fn new(bytes: &'a FileBytes, format: CsvFormat) -> Result<RowIndexer<'a>, SourceError> {
        let mut first = Vec::new();
        let file = bytes.path().to_owned();
        let mut mark = bytes.reader()?.take(BYTE_ORDER_MARK.len() as u64);
        mark.read_to_end(&mut first)
            .map_err(|source| SourceError::Read { file: file.clone(), source })?;
        let start = if first == BYTE_ORDER_MARK { first.len() as u64 } else { 0 };
        let reader = csv::ReaderBuilder::new()
            .delimiter(format.delimiter)
            .has_headers(format.has_header)
            .buffer_capacity(BUFFER)
            .from_reader(RowLimit { reader: bytes.reader()?, left: LEFT, has_quotes: false });
        Ok(RowIndexer { reader, file, start, has_header: format.has_header })
    }

    fn index(mut self, rows_max: u64) -> Result<RowIndex, SourceError> {
        let header = self.header()?;
        let start = if self.has_header { self.reader.position().byte() } else { self.start };
        let mut offsets = vec![start];
        let mut record = csv::ByteRecord::new();
        loop {
            let row = offsets.len() as u64 - 1;
            self.reader.get_mut().left = LEFT;
            match self.reader.read_byte_record(&mut record) {
                Ok(false) => {
                    let has_quotes = self.reader.get_ref().has_quotes;
                    return Ok(RowIndex { header, offsets, has_quotes });
                }
                Ok(true) if row == rows_max => {
                    return Err(SourceError::TooManyRows { file: self.file, rows_max });
                }
                Ok(true) => offsets.push(self.reader.position().byte()),
                Err(error) => return Err(self.malformed(row, error)),
            }
            if let &[.., start, end] = &offsets[..]
                && end - start > CsvSource::ROW_BYTES_MAX
            {
                return Err(self.too_long(row));
            }
        }
    }

    /// Returns the names of the columns.
    fn header(&mut self) -> Result<Vec<String>, SourceError> {
        let names = match self.reader.byte_headers().cloned() {
            Ok(names) => names,
            Err(_) if self.reader.get_ref().left == 0 => {
                let limit = CsvSource::ROW_BYTES_MAX;
                let (field, found) = ("the length of the header", LEFT);
                let (file, expected) = (self.file.clone(), format!("at most {limit}"));
                return Err(SourceError::Header { file, field, found, expected });
            }
            Err(error) => return Err(self.malformed(0, error)),
        };
        if !(1..=CsvSource::COLUMNS_MAX).contains(&names.len()) {
            let (file, field) = (self.file.clone(), "the number of columns");
            let found = names.len() as u64;
            let expected = format!("1 to {}", CsvSource::COLUMNS_MAX);
            return Err(SourceError::Header { file, field, found, expected });
        }
        let name = |(position, name): (usize, &[u8])| match self.has_header {
            true => String::from_utf8_lossy(name).into_owned(),
            false => position.to_string(),
        };
        Ok(names.iter().enumerate().map(name).collect())
    }

    fn malformed(&self, row: u64, error: csv::Error) -> SourceError {
        let file = self.file.clone();
        match error.into_kind() {
            csv::ErrorKind::Io(_) if self.reader.get_ref().left == 0 => self.too_long(row),
            csv::ErrorKind::Io(source) => SourceError::Read { file, source },
            csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                let problem = format!("has {len} fields, expected {expected_len}");
                SourceError::Row { file, row, problem }
            }
            other => SourceError::Row { file, row, problem: format!("is malformed: {other:?}") },
        }
    }

    fn too_long(&self, row: u64) -> SourceError {
        let problem = format!("has more than {} bytes, the limit", CsvSource::ROW_BYTES_MAX);
        SourceError::Row { file: self.file.clone(), row, problem }
    }
}

/// A reader that fails in a row of more bytes than the limit, before they are all in memory.
struct RowLimit<'a> {
    reader: Box<dyn Read + 'a>,
    /// The bytes that the row may still have.
    left: u64,
    /// Whether a quote has been read.
    has_quotes: bool,
}

impl Read for RowLimit<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(io::Error::other("the row is too long"));
        }
        let len = bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.reader.read(&mut bytes[..len])?;
        self.left -= read as u64;
        self.has_quotes = self.has_quotes || bytes[..read].contains(&b'"');
        Ok(read)
    }
}

/// The first bytes of some files in UTF-8.
const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// The bytes that may be read for one row: one more than it may have, to see that the file ends.
const LEFT: u64 = CsvSource::ROW_BYTES_MAX + 1;

/// The bytes that are read at once.
const BUFFER: usize = 1 << 16;
