//! [`RowScanner`]: finds the rows of a CSV file, and what is malformed in them.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::csv_row::{CsvColumns, CsvRow, QUOTE};
use super::{CsvFormat, CsvSource, SourceError};

/// What one pass over a file finds.
pub(super) struct RowIndex {
    /// The names of the columns.
    pub(super) header: Vec<String>,
    /// The start of each row, and the end of the last. A row ends with the first byte of its
    /// terminator; empty lines that are skipped belong to the row behind them.
    pub(super) offsets: Vec<u64>,
    /// Whether there is a quote anywhere.
    pub(super) has_quotes: bool,
}

/// Finds the rows of a file in one pass, by the rules of RFC 4180.
pub(super) struct RowScanner<'a> {
    path: &'a Path,
    format: CsvFormat,
    rows_max: u64,
    /// What each byte is.
    classes: [ByteClass; 256],
    state: ScanState,
    /// The number of bytes that have been read.
    position: u64,
    /// The number of the line, counted from 1.
    line: u64,
    /// Whether the last byte was a carriage return, which ends a line together with a newline.
    is_after_return: bool,
    /// Where the row starts.
    row_start: u64,
    /// The number of delimiters in the row.
    delimiters: usize,
    /// The line in which the last quoted field begins.
    quote_line: u64,
    /// The bytes of the first row, until it is complete.
    first_row: Vec<u8>,
    index: RowIndex,
}

/// What a byte means outside of quotes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ByteClass {
    Text,
    Delimiter,
    Quote,
    LineEnd,
    Zero,
}

/// Where in a row the scanner is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScanState {
    /// No byte of the row has been read, but empty lines may have been.
    RowStart,
    FieldStart,
    Unquoted,
    Quoted,
    /// Behind a quote in a quoted field: the field ends here, or the quote is doubled.
    AfterQuote,
}

impl<'a> RowScanner<'a> {
    /// Prepares to read a file of at most `rows_max` rows.
    pub(super) fn new(path: &'a Path, format: CsvFormat, rows_max: u64) -> RowScanner<'a> {
        let mut classes = [ByteClass::Text; 256];
        classes[usize::from(format.delimiter)] = ByteClass::Delimiter;
        classes[usize::from(QUOTE)] = ByteClass::Quote;
        classes[usize::from(b'\n')] = ByteClass::LineEnd;
        classes[usize::from(b'\r')] = ByteClass::LineEnd;
        classes[0] = ByteClass::Zero;
        RowScanner {
            path,
            format,
            rows_max,
            classes,
            state: ScanState::RowStart,
            position: 0,
            line: 1,
            is_after_return: false,
            row_start: 0,
            delimiters: 0,
            quote_line: 0,
            first_row: Vec::new(),
            index: RowIndex { header: Vec::new(), offsets: Vec::new(), has_quotes: false },
        }
    }

    /// Reads the whole file. A byte order mark is skipped.
    pub(super) fn index(mut self, mut reader: impl Read) -> Result<RowIndex, SourceError> {
        let path = self.path;
        let failed = |source| SourceError::Read { file: path.to_owned(), source };
        let mut buffer = Vec::with_capacity(BUFFER);
        loop {
            buffer.clear();
            reader.by_ref().take(BUFFER as u64).read_to_end(&mut buffer).map_err(failed)?;
            if buffer.is_empty() {
                return self.finish();
            }
            match buffer.strip_prefix(&BYTE_ORDER_MARK).filter(|_| self.position == 0) {
                None => self.scan(&buffer)?,
                Some(text) => {
                    self.position = BYTE_ORDER_MARK.len() as u64;
                    self.row_start = self.position;
                    self.scan(text)?;
                }
            }
        }
    }

    fn scan(&mut self, bytes: &[u8]) -> Result<(), SourceError> {
        let mut rest = bytes;
        while let [byte, behind @ ..] = rest {
            let is_text = |byte: &&u8| self.classes[usize::from(**byte)] == ByteClass::Text;
            // Most bytes are text within a field.
            let run = match self.state {
                ScanState::Unquoted | ScanState::Quoted => rest.iter().take_while(is_text).count(),
                _ => 0,
            };
            let (taken, left) =
                if run == 0 { (std::slice::from_ref(byte), behind) } else { rest.split_at(run) };
            self.position += taken.len() as u64;
            if !self.has_first_row() {
                self.first_row.extend_from_slice(taken);
            }
            match run {
                0 => self.take(*byte)?,
                _ => self.is_after_return = false,
            }
            if self.position - self.row_start > CsvSource::ROW_BYTES_MAX {
                return Err(self.too_long());
            }
            rest = left;
        }
        Ok(())
    }

    fn take(&mut self, byte: u8) -> Result<(), SourceError> {
        use ByteClass::{Delimiter, LineEnd, Quote, Text, Zero};
        use ScanState::{AfterQuote, FieldStart, Quoted, RowStart, Unquoted};
        let class = self.classes[usize::from(byte)];
        let ends_line = class == LineEnd && !(byte == b'\n' && self.is_after_return);
        self.line += u64::from(ends_line);
        self.is_after_return = byte == b'\r';
        self.index.has_quotes |= class == Quote;
        match (self.state, class) {
            (_, Zero) => return Err(self.malformed("has a zero byte")),
            (RowStart, LineEnd) => {
                let is_row = self.format.has_blank_rows && self.index.header.len() == 1;
                if ends_line && is_row {
                    self.end_row()?;
                }
            }
            (RowStart | FieldStart, Quote) => {
                self.quote_line = self.line;
                self.state = Quoted;
            }
            (Quoted, Quote) => self.state = AfterQuote,
            (Quoted, _) => {}
            (AfterQuote, Quote) => self.state = Quoted,
            (_, Delimiter) => {
                self.delimiters += 1;
                self.state = FieldStart;
            }
            (_, LineEnd) => self.end_row()?,
            (AfterQuote, Text) if !self.format.has_lenient_quotes => {
                return Err(self.malformed("has text behind a closing quote"));
            }
            (Unquoted, Quote) if !self.format.has_lenient_quotes => {
                return Err(self.malformed("has a quote inside a field without quotes"));
            }
            (_, Text | Quote) => self.state = Unquoted,
        }
        Ok(())
    }

    /// Ends the file, and with it the last row.
    fn finish(mut self) -> Result<RowIndex, SourceError> {
        match self.state {
            ScanState::Quoted => {
                let line = self.quote_line;
                return Err(
                    self.malformed(&format!("opens a quote in line {line} that is not closed"))
                );
            }
            ScanState::RowStart if self.has_first_row() => {}
            ScanState::RowStart => return Err(self.wrong_width(0)),
            _ => self.end_row()?,
        }
        Ok(self.index)
    }

    /// Ends a row at the position.
    fn end_row(&mut self) -> Result<(), SourceError> {
        let fields = self.delimiters + 1;
        let is_header = !self.has_first_row() && self.format.has_header;
        if !self.has_first_row() {
            self.begin_table(fields)?;
        }
        let rows = self.rows();
        let expected = self.index.header.len();
        if fields != expected {
            return Err(self.malformed(&format!("has {fields} fields, expected {expected}")));
        }
        if rows == self.rows_max && !is_header {
            let file = self.path.to_owned();
            let rows_max = self.rows_max;
            return Err(SourceError::TooManyRows { file, rows_max });
        }
        self.index.offsets.push(self.position);
        self.row_start = self.position;
        self.delimiters = 0;
        self.state = ScanState::RowStart;
        Ok(())
    }

    /// Takes the names of the columns from the first row, or numbers them.
    fn begin_table(&mut self, fields: usize) -> Result<(), SourceError> {
        if fields > CsvSource::COLUMNS_MAX {
            return Err(self.wrong_width(fields));
        }
        self.index.header = (0..fields).map(|position| position.to_string()).collect();
        let first_row = Bytes::from(std::mem::take(&mut self.first_row));
        if !self.format.has_header {
            self.index.offsets.push(self.row_start);
            return Ok(());
        }
        let columns = CsvColumns {
            file: self.path.to_owned(),
            width: fields,
            delimiter: self.format.delimiter,
            is_plain: false,
            names: self.index.header.clone(),
            positions: (0..fields).collect(),
        };
        self.index.header = CsvRow::split(&Arc::new(columns), 0, first_row)?.lossy_texts();
        Ok(())
    }

    fn has_first_row(&self) -> bool {
        !self.index.header.is_empty()
    }

    /// The number of complete rows without the header.
    fn rows(&self) -> u64 {
        self.index.offsets.len().saturating_sub(1) as u64
    }

    fn wrong_width(&self, fields: usize) -> SourceError {
        SourceError::Header {
            file: self.path.to_owned(),
            field: "the number of columns",
            found: fields as u64,
            expected: format!("1 to {}", CsvSource::COLUMNS_MAX),
        }
    }

    fn too_long(&self) -> SourceError {
        let limit = CsvSource::ROW_BYTES_MAX;
        match self.state {
            ScanState::Quoted => {
                let line = self.quote_line;
                self.malformed(&format!(
                    "opens a quote in line {line} that is not closed within {limit} bytes, the limit"
                ))
            }
            _ => self.malformed(&format!("has more than {limit} bytes, the limit")),
        }
    }

    /// The error of the current row.
    fn malformed(&self, problem: &str) -> SourceError {
        let file = self.path.to_owned();
        let problem = problem.to_owned();
        match !self.has_first_row() && self.format.has_header {
            true => SourceError::HeaderRow { file, problem },
            false => SourceError::Row { file, row: self.rows(), problem },
        }
    }
}

/// The first bytes of some files in UTF-8.
const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// The bytes that are read at once.
const BUFFER: usize = 1 << 16;
