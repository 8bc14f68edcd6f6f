//! The tables of `docs/protocol.md`, as lines that can be compared with those of the code.

pub(crate) mod code;

use std::collections::BTreeSet;

/// The page in the source tree.
pub(crate) const PAGE: &str = include_str!("../../../docs/protocol.md");

/// A table of the page: the names of its columns, and its rows.
struct PageTable<'a> {
    columns: Vec<&'a str>,
    rows: Vec<Vec<&'a str>>,
}

impl<'a> PageTable<'a> {
    /// Returns the cell of a row in the column of this name.
    fn cell(&self, row: &[&'a str], column: &str) -> &'a str {
        let place = self.columns.iter().position(|name| *name == column);
        let cell = place.and_then(|place| row.get(place));
        cell.unwrap_or_else(|| panic!("no column {column:?} in the row {row:?}"))
    }
}

/// Returns the tables whose first columns have these names.
fn tables<'a>(page: &'a str, columns: &[&str]) -> Vec<PageTable<'a>> {
    let mut tables = Vec::new();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        if !line.starts_with('|') {
            continue;
        }
        let head = cells(line);
        let mut rows = Vec::new();
        while let Some(row) = lines.next_if(|line| line.starts_with('|')) {
            rows.push(cells(row));
        }
        assert!(!rows.is_empty(), "the table {line} has no rule below its head");
        rows.remove(0);
        if head.starts_with(columns) {
            let whole = rows.iter().all(|row| row.len() == head.len());
            assert!(whole, "a row of the table {line} has another number of cells");
            tables.push(PageTable { columns: head, rows });
        }
    }
    tables
}

fn cells(row: &str) -> Vec<&str> {
    let row = row.trim().trim_start_matches('|');
    let row = row.strip_suffix('|').unwrap_or_else(|| panic!("the row {row} has no closing bar"));
    row.split('|').map(str::trim).collect()
}

/// Returns the text of a cell between its two backticks: a name or a type.
fn quoted(cell: &str) -> &str {
    let quoted = cell.strip_prefix('`').and_then(|cell| cell.strip_suffix('`'));
    quoted.unwrap_or_else(|| panic!("{cell:?} is not between backticks"))
}

/// Formats fields such as ``token `u64`, push_slot `u32` `` as `token: u64, push_slot: u32`.
fn fields(cell: &str) -> String {
    let mut fields = Vec::new();
    let mut rest = cell;
    while !rest.is_empty() {
        let mut pieces = rest.splitn(3, '`');
        let name = pieces.next();
        let form = pieces.next();
        let (Some(name), Some(form), Some(behind)) = (name, form, pieces.next()) else {
            panic!("{cell:?} has a field without a name or a type");
        };
        fields.push(format!("{}: {form}", name.trim_start_matches(',').trim()));
        rest = behind;
    }
    fields.join(", ")
}

/// Parses a number, with or without commas.
fn number(cell: &str) -> u64 {
    let digits = cell.replace(',', "");
    digits.parse().unwrap_or_else(|_| panic!("{cell:?} is not a number"))
}

/// Collects lines into a sorted set. Panics if a line occurs twice.
fn lines(all: impl Iterator<Item = String>) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for line in all {
        assert!(!lines.contains(&line), "{line:?} occurs twice");
        lines.insert(line);
    }
    lines
}

/// Returns the messages: `10 Declare(digest: digest), body of at most 16777216`.
pub(crate) fn messages(page: &str) -> BTreeSet<String> {
    let tables = tables(page, &["kind", "message", "by", "fields"]);
    lines(tables.iter().flat_map(|table| {
        table.rows.iter().map(|row| {
            let [kind, name, fields_of, body] =
                ["kind", "message", "fields", "body at most"].map(|name| table.cell(row, name));
            let kind = number(kind);
            let name = quoted(name);
            let body = number(body);
            format!("{kind} {name}({}), body of at most {body}", fields(fields_of))
        })
    }))
}

/// Returns the structs within messages: `grant(token: u64, ...)`.
pub(crate) fn structs(page: &str) -> BTreeSet<String> {
    let tables = tables(page, &["struct", "fields"]);
    let rows = tables.iter().flat_map(|table| &table.rows);
    lines(rows.map(|row| format!("{}({})", quoted(row[0]), fields(row[1]))))
}

/// Returns the variants of all sums but `refusal`, which has its own table: `role 1 worker()`.
pub(crate) fn variants(page: &str) -> BTreeSet<String> {
    let tables = tables(page, &["sum", "variants"]);
    let rows = tables.iter().flat_map(|table| &table.rows);
    let sums = rows.filter(|row| quoted(row[0]) != "refusal");
    lines(sums.flat_map(|row| row[1].split(';').map(|it| variant(quoted(row[0]), it.trim()))))
}

/// Formats one variant, such as ``2 declared (digest `digest`)``.
fn variant(sum: &str, text: &str) -> String {
    let (tag, rest) = text.split_once(' ').unwrap_or_else(|| panic!("{text:?} has no tag"));
    let (name, inner) = rest.split_once(" (").unwrap_or((rest, ")"));
    let inner = inner.strip_suffix(')').unwrap_or_else(|| panic!("{text:?} has no end"));
    format!("{sum} {} {name}({})", number(tag), fields(inner))
}

/// Returns the refusals: `5 NotInitialized()`.
pub(crate) fn refusals(page: &str) -> BTreeSet<String> {
    let tables = tables(page, &["tag", "refusal", "fields", "sent when", "the client"]);
    lines(tables.iter().flat_map(|table| {
        table.rows.iter().map(|row| {
            let explained = row[3..].iter().all(|cell| !cell.is_empty());
            assert!(explained, "the row of {} has an empty cell", row[1]);
            format!("{} {}({})", number(row[0]), quoted(row[1]), fields(row[2]))
        })
    }))
}

/// Returns the features: `0 read_ahead`.
pub(crate) fn features(page: &str) -> BTreeSet<String> {
    let tables = tables(page, &["bit", "feature"]);
    let rows = tables.iter().flat_map(|table| &table.rows);
    lines(rows.map(|row| format!("{} {}", number(row[0]), quoted(row[1]))))
}

/// Returns the limits: `WINDOW = 64`.
pub(crate) fn limits(page: &str) -> BTreeSet<String> {
    let tables = tables(page, &["limit", "value"]);
    let rows = tables.iter().flat_map(|table| &table.rows);
    lines(rows.map(|row| format!("{} = {}", quoted(row[0]), number(row[1]))))
}

/// Returns the fields of the header from its table: `4: version, 2 bytes`.
pub(crate) fn header(page: &str) -> BTreeSet<String> {
    let tables = tables(page, &["offset", "bytes", "field"]);
    let rows = tables.iter().flat_map(|table| &table.rows);
    lines(
        rows.map(|row| format!("{}: {}, {} bytes", number(row[0]), quoted(row[2]), number(row[1]))),
    )
}

/// Returns the fields of the header from its drawing, where a byte is seven characters wide.
pub(crate) fn drawn_header(page: &str) -> BTreeSet<String> {
    let rows = page.lines().filter_map(|line| {
        let (offset, fields) = line.split_once("  |")?;
        let offset: usize = offset.strip_prefix("    ")?.trim().parse().ok()?;
        Some((offset, fields.strip_suffix('|')?))
    });
    lines(rows.flat_map(|(row, fields)| {
        let mut at = 0;
        let places = fields.split('|').map(move |field| {
            let offset = row + at;
            let bytes = (field.len() + 1) / 7;
            at += bytes;
            let name = field.split_whitespace().next().unwrap_or_default();
            format!("{offset}: {name}, {bytes} bytes")
        });
        places.collect::<Vec<String>>()
    }))
}
