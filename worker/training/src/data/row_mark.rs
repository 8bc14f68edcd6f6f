//! [`RowMark`]: the marks of rows that do not belong to the table of a CSV file.

/// Bytes that show that a row is none of the table.
pub(super) struct RowMark {
    kind: MarkKind,
    bytes: Vec<u8>,
    /// The number of bytes of the row that were compared.
    compared: usize,
    /// Whether the row agrees so far.
    agrees: bool,
}

/// The kind of line that a mark describes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MarkKind {
    /// The row is equal to the header.
    Header,
    /// The row begins with a byte order mark.
    ByteOrder,
    /// The row is the byte that ends a file on DOS.
    EndOfFile,
    /// The row begins a conflict of Git.
    Conflict,
}

impl RowMark {
    /// A mark of these bytes; without bytes no row agrees with it.
    pub(super) fn new(kind: MarkKind, bytes: &[u8]) -> RowMark {
        RowMark { kind, bytes: bytes.to_vec(), compared: 0, agrees: !bytes.is_empty() }
    }

    /// Forgets the row before.
    pub(super) fn begin_row(&mut self) {
        self.compared = 0;
        self.agrees = !self.bytes.is_empty();
    }

    /// Compares the next bytes of the row.
    pub(super) fn compare(&mut self, bytes: &[u8]) {
        if !self.agrees {
            return;
        }
        let rest = self.bytes.get(self.compared..).unwrap_or_default();
        let shared = rest.len().min(bytes.len());
        self.agrees = rest[..shared] == bytes[..shared];
        self.compared += bytes.len();
    }

    /// Whether the row agrees with the mark so far.
    pub(super) fn agrees(&self) -> bool {
        self.agrees
    }

    /// Whether the whole row is known, and is none of the table.
    pub(super) fn is_row(&self) -> bool {
        let is_found = match self.kind {
            MarkKind::ByteOrder | MarkKind::Conflict => self.compared >= self.bytes.len(),
            MarkKind::Header | MarkKind::EndOfFile => self.compared == self.bytes.len(),
        };
        self.agrees && is_found
    }

    /// Returns the problem of the row, as the rest of a sentence.
    pub(super) fn problem(&self) -> &'static str {
        match self.kind {
            MarkKind::Header => {
                "repeats the header, as in files that were joined; see CsvFormat::repeated_header"
            }
            MarkKind::ByteOrder => "begins with a byte order mark, as in files that were joined",
            MarkKind::Conflict => "begins with <<<<<<<, as a conflict of Git that is not resolved",
            MarkKind::EndOfFile => "is the byte 0x1a, which ends a file on DOS",
        }
    }
}
