//! [`RowScanner`]: finds the rows of a CSV file, and its malformed ones.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::file_kind::BYTE_ORDER_MARK;

use super::csv_row::{CsvColumns, CsvRow, QUOTE, cut};
use super::row_mark::{MarkKind, RowMark};
use super::suspect_delimiter::SuspectDelimiter;
use super::{CsvFormat, CsvSource, SourceError};

/// The result of one pass over a file.
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
    /// The class of each byte value.
    classes: [ByteClass; 256],
    state: ScanState,
    /// The number of bytes that have been read.
    position: u64,
    /// The number of the line, counted from 1.
    line: u64,
    /// Whether the last byte was a carriage return, which ends a line together with a newline.
    is_after_return: bool,
    /// The offset at which the row starts, in bytes.
    row_start: u64,
    /// The number of delimiters in the row.
    delimiters: usize,
    /// The line in which the last quoted field begins.
    quote_line: u64,
    /// The bytes of the first row, until it is complete.
    first_row: Vec<u8>,
    /// The marks of lines that are no rows, such as a second header.
    marks: [RowMark; 4],
    /// Another delimiter that the header has, until a row tells.
    suspect: Option<SuspectDelimiter>,
    /// Whether a mark agrees with the row so far, or delimiters are counted.
    is_compared: bool,
    index: RowIndex,
}

/// The class of a byte outside of quotes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ByteClass {
    Text,
    Delimiter,
    Quote,
    LineEnd,
    Zero,
}

/// The state of the scanner within a row.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScanState {
    /// The state before the first byte of a row; empty lines may precede.
    RowStart,
    FieldStart,
    Unquoted,
    Quoted,
    /// The state behind a quote in a quoted field: the field ends here, or the quote is doubled.
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
            marks: [
                // There is no header yet.
                RowMark::new(MarkKind::Header, &[]),
                RowMark::new(MarkKind::ByteOrder, &BYTE_ORDER_MARK),
                RowMark::new(MarkKind::EndOfFile, b"\x1a"),
                RowMark::new(MarkKind::Conflict, b"<<<<<<< "),
            ],
            suspect: None,
            is_compared: true,
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
            if self.is_compared {
                self.compare(taken);
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

    /// Compares the next bytes of a row, or the end of a line, with what the row must not be.
    fn compare(&mut self, bytes: &[u8]) {
        let ends_line = self.state != ScanState::Quoted
            && bytes
                .first()
                .is_some_and(|byte| self.classes[usize::from(*byte)] == ByteClass::LineEnd);
        if ends_line {
            return;
        }
        self.marks.iter_mut().for_each(|mark| mark.compare(bytes));
        if let Some(suspect) = &mut self.suspect {
            suspect.count_in(bytes);
        }
        self.is_compared = self.suspect.is_some() || self.marks.iter().any(RowMark::agrees);
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
            ScanState::RowStart => {
                let file = self.path.to_owned();
                let found = "empty but for line ends".to_owned();
                let expected = "a table of text".to_owned();
                return Err(SourceError::OtherFormat { file, found, expected });
            }
            _ => self.end_row()?,
        }
        Ok(self.index)
    }

    /// Ends a row at the position.
    fn end_row(&mut self) -> Result<(), SourceError> {
        let fields = self.delimiters + 1;
        let is_first = !self.has_first_row();
        let is_header = is_first && self.format.has_header;
        if let Some(mark) = self.marks.iter().find(|mark| mark.is_row()) {
            return Err(self.malformed(mark.problem()));
        }
        if is_first {
            self.begin_table(fields)?;
        }
        let rows = self.rows();
        let expected = self.index.header.len();
        if fields != expected {
            let plural = if fields == 1 { "" } else { "s" };
            let mut problem = format!("has {fields} field{plural}, expected {expected}");
            if rows == 0 && expected == 1 && self.format.has_header {
                // The first line may be a title or a remark.
                problem += &format!(" as in the header {:?}", cut(&self.index.header[0]));
            }
            return Err(self.malformed(&problem));
        }
        if !is_header {
            self.check_suspect()?;
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
        self.marks.iter_mut().for_each(RowMark::begin_row);
        self.is_compared = true;
        Ok(())
    }

    /// Refuses a header of one column that another delimiter separates into as many names as it does
    /// the first row into fields: a table of one column would be other data than its author has seen.
    fn check_suspect(&mut self) -> Result<(), SourceError> {
        match self.suspect {
            Some(suspect) if suspect.separates() => {
                let file = self.path.to_owned();
                let name = cut(&self.index.header[0]);
                let problem = format!("is one column, {name:?}{}", suspect.advice());
                Err(SourceError::HeaderRow { file, problem })
            }
            _ => {
                self.suspect = None;
                Ok(())
            }
        }
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
        let is_line_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
        let start = first_row.iter().position(|byte| !is_line_end(byte)).unwrap_or(0);
        let header = &first_row[start..];
        let header = header.strip_suffix(b"\n").or(header.strip_suffix(b"\r")).unwrap_or(header);
        if header.len() == 5 && header.to_ascii_lowercase().starts_with(b"sep=") {
            let line = String::from_utf8_lossy(header);
            let problem =
                format!("is {line:?}, a line for Excel: remove it, and see CsvFormat::delimiter");
            return Err(SourceError::HeaderRow { file: self.path.to_owned(), problem });
        }
        self.suspect =
            (fields == 1).then(|| SuspectDelimiter::find(header, self.format.delimiter)).flatten();
        if !self.format.allows_repeated_header {
            self.marks[0] = RowMark::new(MarkKind::Header, header);
        }
        let names = CsvRow::split(&Arc::new(columns), 0, first_row)?.into_texts();
        self.index.header = names.map_err(|(position, name)| SourceError::HeaderRow {
            file: self.path.to_owned(),
            problem: format!("names column {position} {name:?}, which is not UTF-8"),
        })?;
        match number_in(&self.index.header).filter(|_| self.format.checks_header) {
            None => Ok(()),
            Some(number) => {
                let file = self.path.to_owned();
                let problem =
                    format!("names a column {number:?}, as a row does; see CsvFormat::has_header");
                Err(SourceError::HeaderRow { file, problem })
            }
        }
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
        let is_header = !self.has_first_row() && self.format.has_header;
        // Quotes and decimals of another format look malformed in this one.
        let suspect = match is_header && self.delimiters == 0 {
            true => SuspectDelimiter::find(&self.first_row, self.format.delimiter),
            false => self.suspect.filter(SuspectDelimiter::is_in_row),
        };
        let advice = suspect.map_or_else(String::new, SuspectDelimiter::advice);
        let problem = format!("{problem}{advice}");
        match is_header {
            true => SourceError::HeaderRow { file, problem },
            false => SourceError::Row { file, row: self.rows(), problem },
        }
    }
}

/// Returns a name that shows that the names of columns are a row of numbers: one with a fraction or
/// a sign, or the first if all are whole numbers, but not those that count the columns.
fn number_in(names: &[String]) -> Option<&str> {
    let is_number = |name: &&String| {
        name.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first))
            && name.parse::<f64>().is_ok()
    };
    let whole = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    let counts_from =
        |first: usize| names.iter().zip(first..).all(|(name, at)| *name == at.to_string());
    let number = names.iter().filter(is_number).find(|name| !whole(name));
    let is_row = || names.iter().all(|name| is_number(&name)) && !counts_from(0) && !counts_from(1);
    number.or_else(|| names.first().filter(|_| is_row())).map(String::as_str)
}

/// The size of a read, in bytes.
const BUFFER: usize = 1 << 16;
