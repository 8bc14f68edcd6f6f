//! [`CsvRow`]: the selected fields of one row.

use std::any::type_name;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use smallvec::SmallVec;

use super::SourceError;

/// The selected fields of one row of a [`CsvSource`](super::CsvSource), as text.
///
/// Quotes are removed. Numbers are parsed on demand. An error names file, row, column and text.
///
/// The text of a row without quotes is a part of the file's memory, so a row that is kept keeps all
/// of it.
#[derive(Clone, Debug)]
pub struct CsvRow {
    columns: Arc<CsvColumns>,
    row: u64,
    /// The text of all fields, with bytes between them.
    text: Bytes,
    /// The place of each selected field in the text.
    fields: SmallVec<[Span; 8]>,
}

/// The columns that a source selects.
#[derive(Clone, Debug)]
pub(super) struct CsvColumns {
    pub(super) file: PathBuf,
    /// The number of columns in the file.
    pub(super) width: usize,
    /// The byte between two fields: no quote, and no end of a line.
    pub(super) delimiter: u8,
    /// Whether no row has a quote, nor can get one: the file is in memory.
    pub(super) is_plain: bool,
    /// The name of each selected column.
    pub(super) names: Vec<String>,
    /// The position of each selected column in the file.
    pub(super) positions: Vec<usize>,
}

impl CsvRow {
    /// The number of the row, counted from 0 without the header: the index of the sample.
    pub fn row(&self) -> u64 {
        self.row
    }

    /// The number of selected columns.
    pub fn len(&self) -> usize {
        self.fields.len()
    }

    /// Whether no column is selected.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// Returns the text of a field.
    ///
    /// # Errors
    /// [`SourceError::Column`] if the column is not selected, [`SourceError::Field`] if the text is
    /// not UTF-8.
    pub fn text(&self, column: &str) -> Result<&str, SourceError> {
        let index = self.columns.names.iter().position(|name| name == column);
        let index = index.ok_or_else(|| SourceError::Column {
            file: self.columns.file.clone(),
            column: column.to_owned(),
            columns: listed(&self.columns.names),
        })?;
        self.utf8(index)
    }

    /// Returns the texts of all selected fields, in the order of the selection.
    ///
    /// This is faster than [`CsvRow::text`] for each, which searches its column.
    ///
    /// ```
    /// # use pushpull_training::data::{CsvSource, Source};
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("flights.csv");
    /// std::fs::write(&path, "carrier,flight,origin\nUA,1545,EWR\n")?;
    /// let row = CsvSource::open(&path)?.columns(["origin", "carrier"])?.get(0)?;
    /// let [origin, carrier] = row.texts()?;
    /// assert_eq!((origin, carrier), ("EWR", "UA"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`SourceError::Row`] if another number of columns is selected, [`SourceError::Field`] if a
    /// text is not UTF-8.
    pub fn texts<const N: usize>(&self) -> Result<[&str; N], SourceError> {
        if self.len() != N {
            let problem = format!("has {} selected fields, asked for {N}", self.len());
            return Err(SourceError::Row {
                file: self.columns.file.clone(),
                row: self.row,
                problem,
            });
        }
        let mut texts = [""; N];
        for (index, text) in texts.iter_mut().enumerate() {
            *text = self.utf8(index)?;
        }
        Ok(texts)
    }

    /// Parses a field, such as a number.
    ///
    /// # Errors
    /// The errors of [`CsvRow::text`], and [`SourceError::Field`] if the text is no `T`.
    pub fn parse<T: FromStr>(&self, column: &str) -> Result<T, SourceError> {
        let text = self.text(column)?;
        text.parse().map_err(|_| self.not_a(column, text, type_name::<T>()))
    }

    /// Parses all selected fields, in the order of the selection.
    ///
    /// # Errors
    /// [`SourceError::Field`] names the first field whose text is no `T`.
    pub fn parse_all<T: FromStr>(&self) -> Result<Vec<T>, SourceError> {
        let mut values = Vec::with_capacity(self.len());
        for index in 0..self.len() {
            let text = self.utf8(index)?;
            values.push(
                text.parse()
                    .map_err(|_| self.not_a(&self.columns.names[index], text, type_name::<T>()))?,
            );
        }
        Ok(values)
    }

    /// Returns the texts of all fields, or the position and the text of the first that is not UTF-8.
    pub(super) fn into_texts(self) -> Result<Vec<String>, (usize, String)> {
        let text = |(position, span): (usize, &Span)| {
            let bytes = &self.text[span.start as usize..span.end as usize];
            let text = std::str::from_utf8(bytes).map(str::to_owned);
            text.map_err(|_| (position, cut(&String::from_utf8_lossy(bytes))))
        };
        self.fields.iter().enumerate().map(text).collect()
    }

    /// Splits the bytes of one row, which may have empty lines before it.
    pub(super) fn split(
        columns: &Arc<CsvColumns>,
        row: u64,
        mut bytes: Bytes,
    ) -> Result<CsvRow, SourceError> {
        let start = bytes.iter().position(|&byte| !is_line_end(byte)).unwrap_or(bytes.len());
        let ends_line = bytes.last().is_some_and(|&byte| is_line_end(byte));
        let end = (bytes.len() - usize::from(ends_line)).max(start);
        let is_plain =
            columns.width <= WIDTH_MAX && (columns.is_plain || !has_special(&bytes[start..end]));
        let (text, fields) = match is_plain {
            false => {
                let (text, fields, read) = unquote(&bytes[start..], columns);
                // A row ends with the first byte of its terminator.
                (text.into(), fields.filter(|_| start + read >= end))
            }
            true => {
                let fields = split_plain(&bytes[start..end], columns);
                bytes.truncate(end);
                bytes.advance(start);
                (bytes, fields)
            }
        };
        match fields {
            Some(fields) => Ok(CsvRow { columns: columns.clone(), row, text, fields }),
            None => {
                let problem = "has changed since the file was opened".to_owned();
                Err(SourceError::Row { file: columns.file.clone(), row, problem })
            }
        }
    }

    fn utf8(&self, index: usize) -> Result<&str, SourceError> {
        let Span { start, end } = self.fields[index];
        let bytes = &self.text[start as usize..end as usize];
        std::str::from_utf8(bytes).map_err(|_| {
            let text = String::from_utf8_lossy(bytes);
            self.not_a(&self.columns.names[index], &text, "UTF-8")
        })
    }

    fn not_a(&self, column: &str, text: &str, expected: &'static str) -> SourceError {
        SourceError::Field {
            file: self.columns.file.clone(),
            row: self.row,
            column: column.to_owned(),
            text: cut(text),
            expected,
        }
    }
}

/// Lists the names of columns, for errors: the first of them, and the number of the others.
pub(super) fn listed(names: &[String]) -> String {
    let mut texts: Vec<String> =
        names.iter().take(NAMES_MAX).map(|name| format!("{:?}", cut(name))).collect();
    match names.len() {
        0 => return "none".to_owned(),
        count if count > NAMES_MAX => texts.push(format!("and {} more", count - NAMES_MAX)),
        _ => {}
    }
    texts.join(", ")
}

/// The first characters of a text, for errors.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(64).collect()
}

/// The place of a field in the text of its row, which has fewer than 2^32 bytes.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u32,
    end: u32,
}

/// The places of the selected fields of a row.
type Fields = SmallVec<[Span; 8]>;

/// Finds the selected fields of a row without quotes, of at most [`WIDTH_MAX`] columns. Returns
/// `None` if it has another number of fields than the columns.
fn split_plain(bytes: &[u8], columns: &CsvColumns) -> Option<Fields> {
    // Every byte writes the end of the current field. A branch for each field instead would be
    // mispredicted most of the time, because fields differ in length.
    let mut ends = [0_u32; WIDTH_MAX];
    let delimiter = columns.delimiter;
    let mut field = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        // With too many fields this overwrites the first, and the row is refused below.
        ends[field % WIDTH_MAX] = at as u32;
        field += usize::from(byte == delimiter);
    }
    ends[field % WIDTH_MAX] = bytes.len() as u32;
    if field + 1 != columns.width {
        return None;
    }
    let span = |&field: &usize| Span {
        start: field.checked_sub(1).map_or(0, |before| ends[before] + 1),
        end: ends[field],
    };
    Some(columns.positions.iter().map(span).collect())
}

/// Splits a row with quotes. Returns its text without them, the selected fields, and the number of
/// bytes until the end of the row; no fields if their number is another than that of the columns.
///
/// A quote opens a quoted field only as its first byte. Within, two quotes stand for one. Text
/// after the closing quote, which only a lenient format has, belongs to the field.
fn unquote(bytes: &[u8], columns: &CsvColumns) -> (Vec<u8>, Option<Fields>, usize) {
    let mut text = Vec::with_capacity(bytes.len());
    let mut spans: SmallVec<[Span; 32]> = SmallVec::new();
    let mut at = 0;
    loop {
        let start = text.len() as u32;
        if bytes.get(at) == Some(&QUOTE) {
            at += 1;
            while let Some(&byte) = bytes.get(at) {
                at += 1;
                if byte == QUOTE {
                    if bytes.get(at) != Some(&QUOTE) {
                        break;
                    }
                    at += 1;
                }
                text.push(byte);
            }
        }
        let rest = &bytes[at..];
        let len = rest.iter().position(|&byte| byte == columns.delimiter || is_line_end(byte));
        let len = len.unwrap_or(rest.len());
        text.extend_from_slice(&rest[..len]);
        at += len;
        spans.push(Span { start, end: text.len() as u32 });
        if bytes.get(at) != Some(&columns.delimiter) {
            let fields = || columns.positions.iter().map(|&field| spans[field]).collect();
            let fields = (spans.len() == columns.width).then(fields);
            return (text, fields, at);
        }
        at += 1;
    }
}

/// Whether there is a quote or the end of a line, in one pass without branches.
fn has_special(bytes: &[u8]) -> bool {
    let mark = |byte| u8::from(byte == QUOTE) | u8::from(is_line_end(byte));
    bytes.iter().fold(0, |found, &byte| found | mark(byte)) != 0
}

/// Whether a byte ends a row outside of quotes.
fn is_line_end(byte: u8) -> bool {
    (byte == b'\n') | (byte == b'\r')
}

pub(super) const QUOTE: u8 = b'"';

/// The names of columns that an error lists.
const NAMES_MAX: usize = 8;

/// The maximum number of columns that are split without branches, a power of two.
const WIDTH_MAX: usize = 64;
