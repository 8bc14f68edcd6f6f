//! [`SuspectDelimiter`]: another delimiter than that of the format, by which a header seems to be
//! separated.

/// A delimiter that would separate the fields of a header that is one column.
#[derive(Clone, Copy)]
pub(super) struct SuspectDelimiter {
    byte: u8,
    name: &'static str,
    in_header: usize,
    in_row: usize,
}

impl SuspectDelimiter {
    /// Finds the delimiter that a header without delimiters has most. A comma is none if another
    /// delimiter was chosen: texts have commas.
    pub(super) fn find(header: &[u8], delimiter: u8) -> Option<SuspectDelimiter> {
        let others = OTHER_DELIMITERS.iter().filter(|(byte, _)| *byte != delimiter);
        let counts = others.map(|&(byte, name)| {
            let in_header = count(byte, header);
            SuspectDelimiter { byte, name, in_header, in_row: 0 }
        });
        counts.max_by_key(|suspect| suspect.in_header).filter(|suspect| suspect.in_header > 0)
    }

    /// Counts the delimiter in the next bytes of the first row.
    pub(super) fn count_in(&mut self, bytes: &[u8]) {
        self.in_row += count(self.byte, bytes);
    }

    /// Whether the row has the delimiter.
    pub(super) fn is_in_row(&self) -> bool {
        self.in_row > 0
    }

    /// Whether the delimiter separates the row into as many fields as the header.
    pub(super) fn separates(&self) -> bool {
        self.in_row == self.in_header
    }

    /// The end of a sentence about what is wrong.
    pub(super) fn advice(self) -> String {
        format!("; its fields seem to be separated by {}, see CsvFormat::delimiter", self.name)
    }
}

/// Returns the number of times that a byte occurs.
fn count(byte: u8, bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&found| found == byte).count()
}

/// The delimiters of tables that are taken for one column.
const OTHER_DELIMITERS: [(u8, &str); 3] = [(b';', "semicolons"), (b'\t', "tabs"), (b'|', "bars")];
