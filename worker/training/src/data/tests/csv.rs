//! CSV files, which may be damaged or hostile.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use pushpull_common::error::Chain;

use super::gzip;
use crate::data::{CsvFormat, CsvSource, Source, SourceError};

/// A folder for one file.
struct Table(tempfile::TempDir);

impl Table {
    fn new() -> Table {
        Table(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("table.csv")
    }

    fn open_as(
        &self,
        bytes: impl AsRef<[u8]>,
        format: CsvFormat,
    ) -> Result<CsvSource, SourceError> {
        fs::write(self.path(), bytes).unwrap();
        CsvSource::open_as(self.path(), format)
    }

    fn open(&self, bytes: impl AsRef<[u8]>) -> CsvSource {
        self.open_as(bytes, CsvFormat::new()).unwrap()
    }

    /// Returns an error without the folder.
    fn text(&self, error: &SourceError) -> String {
        Chain(error).to_string().replace(&format!("{}/", self.0.path().display()), "")
    }

    fn refusal(&self, bytes: impl AsRef<[u8]>) -> String {
        self.text(&self.open_as(bytes, CsvFormat::new()).unwrap_err())
    }
}

/// Returns the fields of all rows.
fn rows(source: &CsvSource) -> Vec<Vec<String>> {
    let row = |index| source.get(index).unwrap().parse_all::<String>().unwrap();
    (0..source.len()).map(row).collect()
}

#[test]
fn rows_are_read_by_their_number() {
    let table = Table::new();
    let unix = "a,b\n1,x\n2,\"y, \"\"z\"\"\"\n3,\"two\nlines\"\n4,";
    let forms = [
        unix.to_owned(),
        format!("{unix}\n"),
        unix.replace('\n', "\r\n"),
        unix.replace('\n', "\r"),
        format!("\n\n{}\n\n\n", unix.replace("\n2,", "\n\n\r\n2,")),
        format!("\u{feff}{unix}"),
    ];
    for form in forms {
        let newline = if form.contains("\r\n3") { "\r\n" } else { "\n" };
        let newline = if form.contains("\r3") { "\r" } else { newline };
        let quoted = format!("two{newline}lines");
        let expected = [["1", "x"], ["2", "y, \"z\""], ["3", &quoted], ["4", ""]];
        for memory_bytes_max in [1 << 20, 0] {
            let format = CsvFormat::new().memory_bytes_max(memory_bytes_max);
            let source = table.open_as(&form, format).unwrap();
            assert_eq!((source.name(), source.header().join("|")), ("table.csv", "a|b".to_owned()));
            assert_eq!(rows(&source), expected, "{form:?}");
            let row = source.get(2).unwrap();
            assert_eq!((row.row(), row.len(), row.is_empty()), (2, 2, false));
            let error = source.named("t").get(4).unwrap_err().to_string();
            assert_eq!(error, "cannot read sample 4 of \"t\": it has 4 samples");
        }
        let source = table.open_as(gzip(form.as_bytes()), CsvFormat::default()).unwrap();
        assert_eq!(rows(&source), expected, "packed {form:?}");
    }
}

#[test]
fn a_file_without_a_header_numbers_its_columns() {
    let table = Table::new();
    for mark in ["", "\u{feff}"] {
        let bytes = format!("{mark}5;6\n7;8\n");
        let format = CsvFormat::new().has_header(false).delimiter(b';');
        let source = table.open_as(bytes, format).unwrap().columns(["1", "0"]).unwrap();
        assert_eq!(source.get(0).unwrap().parse_all::<u32>().unwrap(), [6, 5]);
        assert_eq!(source.get(1).unwrap().text("0").unwrap(), "7");
    }
}

#[test]
fn a_row_may_have_many_columns() {
    let table = Table::new();
    for width in [63_u32, 64, 65, 200] {
        let line = |first: u32| {
            (first..first + width).map(|field| field.to_string()).collect::<Vec<_>>().join(",")
        };
        let bytes = format!("{}\n{}\n{}\n", line(0), line(1000), line(2000));
        for memory_bytes_max in [1 << 20, 0] {
            let format = CsvFormat::new().memory_bytes_max(memory_bytes_max);
            let source = table.open_as(&bytes, format).unwrap();
            let row = source.get(1).unwrap().parse_all::<u32>().unwrap();
            assert!(row.into_iter().eq(2000..2000 + width));
        }
        // On the disk a row may change to any number of fields.
        let format = CsvFormat::new().memory_bytes_max(0);
        let source = table.open_as(&bytes, format).unwrap();
        fs::write(table.path(), [line(0), ",".repeat(bytes.len())].join("\n")).unwrap();
        let error = table.text(&source.get(0).unwrap_err());
        let expected = "cannot read table.csv: row 0 has changed since the file was opened";
        assert_eq!(error, expected, "{width} columns");
    }
}

#[test]
fn columns_are_selected_by_name() {
    let table = Table::new();
    let source = table.open("a,b,c,d2\n1,2,3,4\n").columns(["c", "b", "c"]).unwrap();
    let row = source.get(0).unwrap();
    assert_eq!(row.parse_all::<f32>().unwrap(), [3.0, 2.0, 3.0]);
    assert_eq!((row.parse::<u8>("b").unwrap(), row.text("c").unwrap()), (2, "3"));
    let error = row.text("a").unwrap_err();
    assert_eq!(
        table.text(&error),
        "cannot read table.csv: there is no column \"a\" among \"c\", \"b\", \"c\""
    );
    let error = source.columns(["a", "d"]).unwrap_err();
    assert_eq!(
        table.text(&error),
        "cannot read table.csv: there is no column \"d\" among \"a\", \"b\", \"c\", \"d2\""
    );
    assert_eq!(row.texts().unwrap(), ["3", "2", "3"]);
    let error = row.texts::<2>().unwrap_err();
    let expected = "cannot read table.csv: row 0 has 3 selected fields, asked for 2";
    assert_eq!(table.text(&error), expected);
    let none = table.open("a\n1\n").columns::<String>([]).unwrap();
    assert!(none.get(0).unwrap().is_empty());
}

#[test]
fn parse_errors_name_file_row_column_and_text() {
    let table = Table::new();
    let long = "x".repeat(70);
    let bytes = [b"id,delay\n1,2.5\n2,NA\n3,\xff\n4,".as_slice(), long.as_bytes(), b"\n"].concat();
    let source = table.open(bytes);
    let row = |index| source.get(index).unwrap();
    assert_eq!(row(0).parse::<f32>("delay").unwrap(), 2.5);
    let cut = "x".repeat(64);
    let table_of_errors = [
        (
            row(1).parse::<f32>("delay").unwrap_err(),
            "row 1, column \"delay\" is \"NA\", expected f32",
        ),
        (row(1).parse_all::<i64>().unwrap_err(), "row 1, column \"delay\" is \"NA\", expected i64"),
        (
            row(2).text("delay").map(drop).unwrap_err(),
            "row 2, column \"delay\" is \"\u{fffd}\", expected UTF-8",
        ),
        (
            row(3).parse::<u8>("delay").unwrap_err(),
            &format!("row 3, column \"delay\" is \"{cut}\", expected u8"),
        ),
    ];
    for (error, expected) in table_of_errors {
        assert_eq!(table.text(&error), format!("cannot read table.csv: {expected}"));
    }
}

#[test]
fn malformed_files_are_refused_by_row() {
    let table = Table::new();
    let limit = CsvSource::ROW_BYTES_MAX as usize;
    let unclosed = |before: &str| [before.as_bytes(), &vec![b'x'; limit + 9][..]].concat();
    let refusals = [
        (b"".to_vec(), "it is empty, expected a table of text"),
        (b"\n\r\n".to_vec(), "it is empty but for line ends, expected a table of text"),
        (b"\xef\xbb\xbf\n".to_vec(), "it is empty but for line ends, expected a table of text"),
        (b"a,b\n1,2\n3\n".to_vec(), "row 1 has 1 field, expected 2"),
        (b"a,b\n1,2,3\n".to_vec(), "row 0 has 3 fields, expected 2"),
        (vec![b','; 1 << 16], "the number of columns is 65537, expected 1 to 65536"),
        (unclosed("a,b\n1,2\n3,4"), "row 1 has more than 1048576 bytes, the limit"),
        (unclosed("a,b"), "the header has more than 1048576 bytes, the limit"),
        (
            unclosed("a,b\n1,2\n3,\""),
            "row 1 opens a quote in line 3 that is not closed within 1048576 bytes, the limit",
        ),
        (
            unclosed("a,\""),
            "the header opens a quote in line 1 that is not closed within 1048576 bytes, the limit",
        ),
    ];
    for (bytes, expected) in refusals {
        assert_eq!(table.refusal(bytes), format!("cannot read table.csv: {expected}"));
    }
    assert_eq!(table.open("a,b\n").len(), 0);
    let error = table.open_as("a", CsvFormat::new().delimiter(b'"')).unwrap_err();
    let expected =
        "cannot read table.csv: the delimiter is 34, expected no quote and no end of a line";
    assert_eq!(table.text(&error), expected);
    let whole = [b"a,b\n1,\"".as_slice(), &vec![b'x'; limit - 4], b"\""].concat();
    assert_eq!(table.open(whole).get(0).unwrap().text("b").unwrap().len(), limit - 4);
    let over = [b"a,b\n1,\"".as_slice(), &vec![b'x'; limit - 3], b"\""].concat();
    // The closing quote is the byte beyond the limit.
    let expected = "cannot read table.csv: row 0 has more than 1048576 bytes, the limit";
    assert_eq!(table.refusal(over), expected);
}

/// Files that were joined, or written for another program.
#[test]
fn rows_that_are_none_of_the_table_are_refused() {
    let table = Table::new();
    let joined = "repeats the header, as in files that were joined; see CsvFormat::repeated_header";
    let mark = "begins with a byte order mark, as in files that were joined";
    let advice = |name: &str| {
        format!("; its fields seem to be separated by {name}, see CsvFormat::delimiter")
    };
    let conflict = "begins with <<<<<<<, as a conflict of Git that is not resolved";
    let number = |name: &str| {
        format!("the header names a column {name:?}, as a row does; see CsvFormat::has_header")
    };
    let excel =
        "the header is \"sep=;\", a line for Excel: remove it, and see CsvFormat::delimiter";
    let refusals: [(&[u8], String); 30] = [
        (b"5.1,3.5,setosa\n4.9,3.0,setosa\n", number("5.1")),
        (b"a,-1\n1,2\n", number("-1")),
        (b"7,0,0\n2,0,1\n", number("7")),
        (b"5\n3\n", number("5")),
        (b"a\n<<<<<<< HEAD\n1\n=======\n2\n>>>>>>> b\n", format!("row 0 {conflict}")),
        (b"a,b\n1,2\n<<<<<<< HEAD\n1,3\n", format!("row 1 {conflict}")),
        (b"sep=;\na;b\n1;2\n", excel.to_owned()),
        (
            b"# a remark\na,b\n1,2\n",
            "row 0 has 2 fields, expected 1 as in the header \"# a remark\"".to_owned(),
        ),
        (b"a,b\n1,2\na,b\n3,4\n", format!("row 1 {joined}")),
        (b"a,b\r\n1,2\r\na,b\r\n3,4\r\n", format!("row 1 {joined}")),
        (b"a,b\r1,2\ra,b", format!("row 1 {joined}")),
        (b"\n\na,\"b\nc\"\n1,2\n\na,\"b\nc\"\n", format!("row 1 {joined}")),
        (b"a\na\n", format!("row 0 {joined}")),
        (b"\xef\xbb\xbfa,b\n1,2\n\xef\xbb\xbfa,b\n", format!("row 1 {mark}")),
        (b"a,b\n1,2\n\n\xef\xbb\xbf3,4\n", format!("row 1 {mark}")),
        (b"a\n1\n\xef\xbb\xbf", format!("row 1 {mark}")),
        (b"\xef\xbb\xbf\xef\xbb\xbfa,b\n1,2\n", format!("the header {mark}")),
        (b"a\n1\n\x1a", "row 1 is the byte 0x1a, which ends a file on DOS".to_owned()),
        (b"a,b\n1,2\n\x1a", "row 1 is the byte 0x1a, which ends a file on DOS".to_owned()),
        (
            b"a,gr\xf6\xdfe\n1,2\n",
            "the header names column 1 \"gr\u{fffd}\u{fffd}e\", which is not UTF-8".to_owned(),
        ),
        (b"a;b\n1;2\n", format!("the header is one column, \"a;b\"{}", advice("semicolons"))),
        (
            b"a\tb\tc\n1\t2\t3\n",
            format!("the header is one column, \"a\\tb\\tc\"{}", advice("tabs")),
        ),
        (b"a|b\n1|2", format!("the header is one column, \"a|b\"{}", advice("bars"))),
        (
            b"a;b\n1,5;2,5\n",
            format!(
                "row 0 has 3 fields, expected 1 as in the header \"a;b\"{}",
                advice("semicolons")
            ),
        ),
        (
            b"a;b\n\"x\";2\n",
            format!("row 0 has text behind a closing quote{}", advice("semicolons")),
        ),
        (
            b"a;b\n1;\"x\"\n",
            format!("row 0 has a quote inside a field without quotes{}", advice("semicolons")),
        ),
        (
            b"\"a\";\"b\"\n1;2\n",
            format!("the header has text behind a closing quote{}", advice("semicolons")),
        ),
        (
            b"a\t\"b\"\n1\t2\n",
            format!("the header has a quote inside a field without quotes{}", advice("tabs")),
        ),
        (b"\"a\",b\"\n1;2\n", "the header has a quote inside a field without quotes".to_owned()),
        (b"a,b\n1,2\n3", "row 1 has 1 field, expected 2".to_owned()),
    ];
    for (bytes, expected) in refusals {
        let expected = format!("cannot read table.csv: {expected}");
        assert_eq!(table.refusal(bytes), expected, "{:?}", String::from_utf8_lossy(bytes));
        for memory_bytes_max in [1 << 20, 0] {
            let format = CsvFormat::new().memory_bytes_max(memory_bytes_max);
            assert_eq!(table.text(&table.open_as(bytes, format).unwrap_err()), expected);
        }
    }
    // Over two reads of the file, at every place of the border.
    for length in 65_520..65_534_usize {
        let rows = format!("ab,cd\n{}", "1,2\n".repeat(length.div_ceil(4)));
        let rows = &rows[rows.len() - length..];
        let rows = &rows[rows.find('\n').unwrap() + 1..];
        let count = rows.lines().count();
        for (row, problem) in [("ab,cd", joined), ("\u{feff}ab,cd", mark)] {
            let padding = "\n".repeat(length - rows.len());
            let text = format!("{padding}ab,cd\n{rows}{row}\n1,2\n");
            let expected = format!("cannot read table.csv: row {count} {problem}");
            assert_eq!(table.refusal(text), expected, "{length}");
        }
    }
    let format = CsvFormat::new().repeated_header(true);
    assert_eq!(rows(&table.open_as("a\na\n", format).unwrap()), [["a"]]);
    // These are other rows, and texts of one column.
    for text in ["a,b\na,bc\na,\nb,a\nba,b\n", "a;b\nx\ny;z\n", "x\n1;2\n3;4\n", "a;b\n"] {
        table.open(text);
    }
    // These names are none of a row, or the caller knows it.
    for header in ["0,1,2", "1,2,3", "0", "1", "x,7", "1x,2y", ",0,1", "nan,inf", "1990,x", "-,+"] {
        assert_eq!(table.open(format!("{header}\n{header}0\n")).len(), 1);
    }
    let sure = CsvFormat::new().has_header(true);
    assert_eq!(rows(&table.open_as("0.5,0.9\n1,2\n", sure).unwrap()), [["1", "2"]]);
    let headerless = CsvFormat::new().has_header(false);
    assert_eq!(rows(&table.open_as("a\na\n", headerless).unwrap()), [["a"], ["a"]]);
}

/// Text that a lenient reader takes for other data than its author saw.
#[test]
fn text_that_breaks_the_rules_of_quotes_is_refused_by_row() {
    let table = Table::new();
    let refusals: [(&str, &str); 12] = [
        ("a,b\n1,x\n2,\"y\n3,z\n4,w\n5,v\n", "row 1 opens a quote in line 3 that is not closed"),
        ("a,b\n1,\"x\n\ny\",\"\"\"\n", "row 0 opens a quote in line 4 that is not closed"),
        ("a,\"b\n1,2\n", "the header opens a quote in line 1 that is not closed"),
        ("a,b\r\n1,2\r\n3,\"4\r\n", "row 1 opens a quote in line 3 that is not closed"),
        ("a,b\n1,\"x\"y\n", "row 0 has text behind a closing quote"),
        ("a,b\n1,2\n\"x\" ,3\n", "row 1 has text behind a closing quote"),
        ("\"a\"b,c\n", "the header has text behind a closing quote"),
        ("a,b\n1,5\" disk\n", "row 0 has a quote inside a field without quotes"),
        ("a,b\n1, \"x\"\n", "row 0 has a quote inside a field without quotes"),
        ("a,b\n1,x\0\n", "row 0 has a zero byte"),
        ("a,b\n1,\"x\0\"\n", "row 0 has a zero byte"),
        ("x,a,x\n1,2,3\n", "the column \"x\" is repeated, at positions 0 and 2"),
    ];
    for (bytes, expected) in refusals {
        let expected = format!("cannot read table.csv: {expected}");
        assert_eq!(table.refusal(bytes), expected, "{bytes:?}");
        assert_eq!(table.refusal(gzip(bytes.as_bytes())), expected, "packed {bytes:?}");
    }
    // Over two reads of the file.
    let long = format!("a,b\n{}1,\"2\n3,4\n", "1,2\n".repeat(20_000));
    let expected =
        "cannot read table.csv: row 20000 opens a quote in line 20002 that is not closed";
    assert_eq!(table.refusal(long), expected);
    assert_eq!(rows(&table.open("\u{feff}\"a\",b\n1,2\n")), [["1", "2"]]);
}

#[test]
fn quotes_and_names_may_be_lenient() {
    let table = Table::new();
    let lenient = CsvFormat::new().lenient_quotes(true);
    let source = table.open_as("a,b\n5\" disk,\"x\" y\n", lenient).unwrap();
    assert_eq!(rows(&source), [["5\" disk", "x y"]]);
    let error = table.open_as("a,b\n1,\"2\n", lenient).unwrap_err();
    let expected = "cannot read table.csv: row 0 opens a quote in line 2 that is not closed";
    assert_eq!(table.text(&error), expected);
    let source = table.open_as("x,a,x\n1,2,3\n", CsvFormat::new().repeated_names(true)).unwrap();
    assert_eq!(rows(&source), [["1", "2", "3"]]);
    let error = source.columns(["x"]).unwrap_err();
    let expected = "cannot read table.csv: the column \"x\" is repeated, at positions 0 and 2";
    assert_eq!(table.text(&error), expected);
}

#[test]
fn an_empty_line_may_be_a_row_of_one_column() {
    let table = Table::new();
    let format = CsvFormat::new().blank_rows(true);
    for newline in ["\n", "\r\n", "\r"] {
        let text = "x\n1\n\n3\n\n\"\"\n4".replace('\n', newline);
        assert_eq!(rows(&table.open(&text)), [["1"], ["3"], [""], ["4"]]);
        for memory_bytes_max in [1 << 20, 0] {
            let format = format.memory_bytes_max(memory_bytes_max);
            let found = rows(&table.open_as(&text, format).unwrap());
            assert_eq!(found, [["1"], [""], ["3"], [""], [""], ["4"]], "{newline:?}");
        }
    }
    // Empty lines before the header are none, and in several columns they have no meaning.
    assert_eq!(rows(&table.open_as("\n\nx\n\n1\n", format).unwrap()), [[""], ["1"]]);
    assert_eq!(rows(&table.open_as("x,y\n\n1,2\n", format).unwrap()), [["1", "2"]]);
}

#[test]
fn a_file_of_another_format_is_named() {
    let table = Table::new();
    let utf16: Vec<u8> = "\u{feff}a,b\n1,2\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let cases: [(&[u8], &str); 13] = [
        (b"{\"a\": 1, \"b\": 2}\n", "JSON"),
        (b"\xef\xbb\xbf{\"a\": 1}\n{\"a\": 2}\n", "JSON, with a value in each line"),
        (b"[[1, 2], [3, 4]]\n", "JSON"),
        (b"\x80\x04\x95\x10\0\0\0", "a pickle of Python, which is never loaded"),
        (b"II\x2a\0\x08\0\0\0", "a TIFF image"),
        (&[0; 40], "filled with zeros, as a file whose writer was interrupted is"),
        (&utf16, "text in UTF-16, and UTF-8 is read"),
        (&utf16[2..], "text in UTF-16, and UTF-8 is read"),
        (&gzip(&gzip(b"a,b\n1,2\n")), "packed with gzip twice"),
        (b"\x28\xb5\x2f\xfd\0\0", "packed with zstd"),
        (b"PAR1\x15\x04\x15\x10", "a Parquet file"),
        (b"<!DOCTYPE html>\n<p>not found", "an HTML page, perhaps an error of a download"),
        (&gzip(b"PK\x03\x04\0\0"), "a zip archive, as NPZ and PyTorch files are"),
    ];
    for (bytes, kind) in cases {
        let expected = format!("cannot read table.csv: it is {kind}, expected a table of text");
        assert_eq!(table.refusal(bytes), expected);
    }
}

#[test]
fn a_path_with_a_scheme_is_refused() {
    let error = Chain(&CsvSource::open("s3://bucket/train.csv").unwrap_err()).to_string();
    assert!(
        error.contains("the scheme \"s3\" of \"s3://bucket/train.csv\" is not supported"),
        "{error}"
    );
}

#[test]
fn a_file_with_too_many_rows_is_refused() {
    let table = Table::new();
    fs::write(table.path(), "a\n1\n2\n3\n").unwrap();
    let open = |rows_max| CsvSource::open_within(&table.path(), CsvFormat::new(), rows_max);
    assert_eq!(open(3).unwrap().len(), 3);
    let expected = "cannot index table.csv: it has more than 2 rows, the limit";
    assert_eq!(table.text(&open(2).unwrap_err()), expected);
}

#[test]
fn packed_files_are_refused_beyond_the_memory_and_if_damaged() {
    let table = Table::new();
    let bytes = gzip(format!("a\n{}", "1\n".repeat(1000)).as_bytes());
    let format = |memory_bytes_max| CsvFormat::new().memory_bytes_max(memory_bytes_max);
    assert_eq!(table.open_as(&bytes, format(2002)).unwrap().len(), 1000);
    let error = table.open_as(&bytes, format(2001)).unwrap_err();
    let expected = "cannot unpack table.csv: it has more than 2001 bytes, the limit";
    assert_eq!(table.text(&error), expected);
    for len in [3, 12, bytes.len() / 2, bytes.len() - 1] {
        let refusal = table.refusal(&bytes[..len]);
        let expected =
            "cannot unpack table.csv: its gzip stream is cut, or has other bytes behind it: ";
        assert!(refusal.starts_with(expected), "{refusal}");
    }
    let behind = [&bytes[..], b"garbage that is long enough for a header"].concat();
    let expected =
        "cannot unpack table.csv: its gzip stream is damaged, or has other bytes behind it: ";
    assert!(table.refusal(&behind).starts_with(expected), "{}", table.refusal(&behind));
    let mut damaged = bytes.clone();
    damaged[bytes.len() - 6] ^= 1;
    assert!(table.refusal(&damaged).starts_with(expected), "{}", table.refusal(&damaged));
}

#[test]
fn a_file_that_changes_while_it_is_open_is_reported() {
    let table = Table::new();
    let open = || table.open_as("a,b\n1,2\n3,4\n", CsvFormat::new().memory_bytes_max(0)).unwrap();
    let source = open();
    fs::write(table.path(), "a,b\n1,2\n").unwrap();
    let error = source.get(1).unwrap_err();
    assert_eq!(table.text(&error), "cannot read table.csv: it has 8 bytes, expected 12");
    for changed in
        ["a,b\n1,2\n3\n4\n", "a,b\n1,2\n3,,,\n", "a,b\n1,2\n\n\n\n\n", "a,b\n1,2\n\"\"\"\"\n"]
    {
        let source = open();
        fs::write(table.path(), changed).unwrap();
        let error = source.get(1).unwrap_err();
        let expected = "cannot read table.csv: row 1 has changed since the file was opened";
        assert_eq!(table.text(&error), expected, "{changed:?}");
    }
}

/// Reads all rows with the csv crate: `None` if some row is malformed, or there is no first row.
fn reference(bytes: &[u8], has_header: bool) -> Option<Vec<Vec<Vec<u8>>>> {
    let mut reader = csv::ReaderBuilder::new().has_headers(has_header).from_reader(bytes);
    if reader.byte_headers().ok()?.is_empty() {
        return None;
    }
    let row = |record: csv::ByteRecord| record.iter().map(<[u8]>::to_vec).collect();
    reader.byte_records().map(|record| record.ok().map(row)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn any_file_is_read_as_the_csv_crate_reads_it_or_refused(
        text in "(\u{feff})?([ab,\"\r\n]|\n\u{feff}|a,b\n){0,40}", has_header: bool,
    ) {
        let table = Table::new();
        let expected = reference(text.as_bytes(), has_header);
        for memory_bytes_max in [1 << 20, 0] {
            let strict = CsvFormat::new()
                .has_header(has_header)
                .repeated_names(true)
                .memory_bytes_max(memory_bytes_max);
            for format in [strict, strict.lenient_quotes(true)] {
                let found = table.open_as(&text, format).map(|source| {
                    let row = |row: Vec<String>| row.into_iter().map(String::into_bytes).collect();
                    rows(&source).into_iter().map(row).collect::<Vec<Vec<Vec<u8>>>>()
                });
                match found {
                    Ok(found) => prop_assert_eq!(Some(&found), expected.as_ref()),
                    // These are refused although the csv crate takes them.
                    Err(error) => {
                        let text = error.to_string();
                        let stricter = ["quote", "repeats the header", "byte order mark"];
                        prop_assert!(
                            expected.is_none() || stricter.iter().any(|problem| text.contains(problem))
                        );
                    }
                }
            }
        }
    }
}
