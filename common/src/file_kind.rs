//! The format of a file, by its first bytes: for errors of readers that expect another one.

use serde_json::Value;

use crate::record_head::RecordHead;

/// The first bytes that [`FileKind::of`] uses.
pub const FIRST_BYTES: usize = 512;

/// The first bytes of some files in UTF-8.
pub const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// The text of a file that is packed with gzip.
pub const PACKED: &str = "packed with gzip";

/// A format that is told by the first bytes of a file. Its text continues "it is".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileKind {
    text: String,
    is_text: bool,
}

impl FileKind {
    /// Recognizes a format by the first bytes of a file: [`FIRST_BYTES`], or fewer if the file is
    /// shorter.
    pub fn of(first: &[u8]) -> Option<FileKind> {
        let binary = |text: String| FileKind { text, is_text: false };
        if first.is_empty() {
            return Some(binary("empty".to_owned()));
        }
        let by_signature = SIGNATURES.iter().find(|(parts, _)| {
            parts.iter().all(|(at, bytes)| first.get(*at..at + bytes.len()) == Some(*bytes))
        });
        let by_rule = || RULES.iter().find_map(|rule| rule(first));
        by_signature
            .map(|(_, text)| *text)
            .or_else(by_rule)
            .map(str::to_owned)
            .or_else(|| idx(first))
            .map(binary)
            .or_else(|| text(first).map(|text| FileKind { text: text.to_owned(), is_text: true }))
    }

    /// Whether the file is text of no format that is known, such as a table.
    pub fn is_text(&self) -> bool {
        self.is_text
    }

    /// Whether the file begins as one in the safetensors format.
    pub fn is_safetensors(&self) -> bool {
        self.text == SAFETENSORS
    }

    /// Whether the file begins with the head of a record.
    pub fn is_records(&self) -> bool {
        self.text == RECORDS
    }

    /// The rest of a sentence that begins with "it is".
    pub fn into_text(self) -> String {
        self.text
    }
}

/// The offsets and bytes that a file of one format has.
type Signature = &'static [(usize, &'static [u8])];

/// The formats that fixed bytes tell. No text begins with them by chance.
const SIGNATURES: [(Signature, &str); 54] = [
    // Packed.
    (&[(0, b"\x1f\x9d\x90")], "packed with compress"),
    (&[(0, b"\x28\xb5\x2f\xfd")], "packed with zstd"),
    (&[(0, b"\xfd7zXZ\x00")], "packed with xz"),
    (&[(0, b"\x04\x22\x4d\x18")], "packed with lz4"),
    (&[(0, b"\x02\x21\x4c\x18")], "packed with lz4"),
    (&[(0, b"\xff\x06\x00\x00sNaPpY")], "packed with snappy"),
    (&[(0, b"BZh"), (4, b"\x31\x41\x59\x26\x53\x59")], "packed with bzip2"),
    (&[(0, b"BZh"), (4, b"\x17\x72\x45\x38\x50\x90")], "packed with bzip2"),
    // Archives, and documents that are archives.
    (&[(0, ZIP), (30, b"[Content_Types].xml")], OFFICE),
    (&[(0, ZIP), (30, b"docProps/")], OFFICE),
    (&[(0, ZIP), (30, b"_rels/")], OFFICE),
    (&[(0, ZIP), (30, b"xl/")], OFFICE),
    (&[(0, ZIP), (30, b"mimetypeapplication/vnd.oasis")], "an OpenDocument file"),
    (&[(0, b"PK\x05\x06")], "an empty zip archive"),
    (&[(0, b"7z\xbc\xaf\x27\x1c")], "a 7z archive"),
    (&[(0, b"Rar!\x1a\x07")], "a RAR archive"),
    (&[(257, b"ustar")], "a tar archive"),
    // Images, sound and documents.
    (&[(0, b"\x89PNG\r\n\x1a\n")], "a PNG image"),
    (&[(0, b"\xff\xd8\xff")], "a JPEG image"),
    (&[(0, b"GIF87a")], "a GIF image"),
    (&[(0, b"GIF89a")], "a GIF image"),
    (&[(0, b"BM"), (6, b"\0\0\0\0")], "a BMP image"),
    (&[(0, b"II\x2a\0")], "a TIFF image"),
    (&[(0, b"MM\0\x2a")], "a TIFF image"),
    (&[(0, b"II\x2b\0")], "a TIFF image"),
    (&[(0, b"MM\0\x2b")], "a TIFF image"),
    (&[(0, b"RIFF"), (8, b"WEBP")], "a WebP image"),
    (&[(0, b"RIFF"), (8, b"WAVE")], "a WAV file"),
    (&[(0, b"%PDF-")], "a PDF document"),
    (&[(0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")], "an old Office document"),
    // Tables, arrays and models.
    (&[(0, b"\x89HDF\r\n\x1a\n")], "an HDF5 file"),
    (&[(0, b"MATLAB 5.0 MAT-file")], "a MAT-file of MATLAB"),
    (&[(0, b"MATLAB 7.3 MAT-file")], "a MAT-file of MATLAB, which is HDF5"),
    (&[(0, b"CDF\x01")], "a NetCDF file"),
    (&[(0, b"CDF\x02")], "a NetCDF file"),
    (&[(0, b"CDF\x05")], "a NetCDF file"),
    (&[(0, b"\x93NUMPY")], "an NPY file of NumPy"),
    (&[(0, b"ARROW1\x00\x00")], "an Arrow or Feather file"),
    (&[(0, b"FEA1\x00")], "a Feather file"),
    (&[(0, b"Obj\x01")], "an Avro file"),
    (&[(0, b"SQLite format 3\x00")], "an SQLite database"),
    (&[(0, b"GGUF\x01\0\0\0")], "a GGUF file"),
    (&[(0, b"GGUF\x02\0\0\0")], "a GGUF file"),
    (&[(0, b"GGUF\x03\0\0\0")], "a GGUF file"),
    // Programs.
    (&[(0, b"\x7fELF")], "a program"),
    (&[(0, b"MZ\x90\0")], "a program"),
    (&[(0, b"\xcf\xfa\xed\xfe")], "a program"),
    (&[(0, b"\0asm\x01\0\0\0")], "a program"),
    // Stand-ins for files that are elsewhere.
    (&[(0, b"version https://git-lfs.github.com/spec/")], LFS_POINTER),
    (&[(0, b"version https://hawser.github.com/spec/")], LFS_POINTER),
    (&[(0, b"/annex/objects/")], ANNEX_POINTER),
    (&[(0, b".git/annex/objects/")], ANNEX_POINTER),
    (&[(0, b"../.git/annex/objects/")], ANNEX_POINTER),
    (&[(0, b"../../.git/annex/objects/")], ANNEX_POINTER),
];

/// The first bytes of a zip archive that is not empty.
const ZIP: &[u8] = b"PK\x03\x04";

const SAFETENSORS: &str = "a safetensors file";

const RECORDS: &str = "a TFRecord file";

const OFFICE: &str = "an Office document, such as a workbook of Excel";

const LFS_POINTER: &str = "a pointer of Git LFS: fetch the file with `git lfs pull`";

const ANNEX_POINTER: &str = "a pointer of git-annex: fetch the file with `git annex get`";

/// Returns what a file is by its first bytes, if it has the format of the rule.
type Rule = fn(&[u8]) -> Option<&'static str>;

/// The formats that need more than fixed bytes, in their order.
const RULES: [Rule; 12] = [
    gzip,
    zip,
    zlib,
    lzma,
    parquet,
    arrow_stream,
    markup,
    json,
    safetensors_or_records,
    wide_text,
    pickle,
    zeros,
];

/// The method, and levels and systems that exist.
fn gzip(first: &[u8]) -> Option<&'static str> {
    let [0x1f, 0x8b, 8, rest @ ..] = first else { return None };
    let is_possible = match rest {
        [flags, _, _, _, _, level, system, ..] => {
            *flags < 0x20 && matches!(level, 0 | 2 | 4) && matches!(system, 0..=13 | 255)
        }
        _ => true,
    };
    is_possible.then_some(PACKED)
}

/// Names an archive by its first entry.
fn zip(first: &[u8]) -> Option<&'static str> {
    let rest = first.strip_prefix(ZIP)?;
    let length =
        rest.get(22..24).map_or(0, |length| usize::from(length[0]) | usize::from(length[1]) << 8);
    let name = rest.get(26..).map_or(&[][..], |names| &names[..length.min(names.len())]);
    Some(match name {
        _ if name.ends_with(b".npy") => "an NPZ archive of NumPy",
        _ if name.ends_with(b"/data.pkl") => "a PyTorch file, whose pickle is never loaded",
        _ => "a zip archive, as NPZ and PyTorch files are",
    })
}

/// A zlib stream (RFC 1950) of the usual window, whose first block is possible.
fn zlib(first: &[u8]) -> Option<&'static str> {
    let &[0x78, 0x01 | 0x5e | 0x9c | 0xda, block, ref rest @ ..] = first else { return None };
    let is_possible = match (block >> 1) & 3 {
        // A stored block has its length, and the complement of it.
        0 => matches!(rest, [a, b, c, d, ..] if *a == !c && *b == !d),
        kind => kind != 3 && !rest.starts_with(&[0, 0, 0]),
    };
    (is_possible && text(first).is_none()).then_some("packed with zlib")
}

/// An LZMA stream of the older kind: properties, the size of the dictionary, the unpacked length
/// if it is known, and a zero.
fn lzma(first: &[u8]) -> Option<&'static str> {
    let &[0x5d, a, b, c, d, ref length @ .., 0] = first.get(..14)? else { return None };
    let dictionary = u32::from_le_bytes([a, b, c, d]);
    let length = u64::from_le_bytes(length.try_into().ok()?);
    let is_possible = dictionary >= 4096 && (length == u64::MAX || length < 1 << 48);
    is_possible.then_some("packed with LZMA")
}

/// A header of names may begin with these letters; binary data follow them in Parquet and ORC.
fn parquet(first: &[u8]) -> Option<&'static str> {
    let is_binary = |at: usize| first.get(at).is_some_and(|&byte| byte < b' ' && byte != b'\n');
    match first {
        [b'P', b'A', b'R', b'1', ..] if is_binary(4) => Some("a Parquet file"),
        [b'P', b'A', b'R', b'E', ..] if is_binary(4) => Some("an encrypted Parquet file"),
        [b'O', b'R', b'C', ..] if is_binary(3) => Some("an ORC file"),
        _ => None,
    }
}

/// A mark, and the length of the metadata of the first message.
fn arrow_stream(first: &[u8]) -> Option<&'static str> {
    let &[0xff, 0xff, 0xff, 0xff, a, b, c, d, ..] = first else { return None };
    let length = i32::from_le_bytes([a, b, c, d]);
    (length >= 0 && length % 8 == 0).then_some("an Arrow stream")
}

fn markup(first: &[u8]) -> Option<&'static str> {
    let text = without_mark(first).trim_ascii_start();
    let begins = |tag: &str| {
        text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag.as_bytes()))
    };
    if begins("@relation ") {
        return Some("an ARFF file of Weka");
    }
    if ["<!doctype html", "<html", "<head", "<body"].into_iter().any(begins) {
        return Some("an HTML page, perhaps an error of a download");
    }
    ["<?xml", "<!doctype ", "<svg"].into_iter().any(begins).then_some("an XML document")
}

/// JSON, or what Python prints: text that begins with a named value, or whose first value is an object or an array. A table may
/// begin with a bracket: behind its first field there is a delimiter.
fn json(first: &[u8]) -> Option<&'static str> {
    let text = without_mark(first).trim_ascii_start();
    if !matches!(text, [b'{' | b'[', ..]) || text.iter().any(is_control) {
        return None;
    }
    let start: Vec<u8> =
        text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).take(3).collect();
    if start.starts_with(b"{'") || start == b"[{'" {
        return Some("text of Python values");
    }
    // Numbers such as NaN, which Python writes, end the parser behind the name.
    let is_named = start.starts_with(b"{\"") || start == b"[{\"";
    let mut values = serde_json::Deserializer::from_slice(text).into_iter::<Value>();
    match values.next()? {
        // The value goes on behind the first bytes.
        Err(error) => (error.is_eof() || is_named).then_some("JSON"),
        Ok(_) => match text[values.byte_offset()..].trim_ascii_start() {
            [] => Some("JSON"),
            [b'{' | b'[', ..] => Some("JSON, with a value in each line"),
            _ => is_named.then_some("JSON"),
        },
    }
}

/// Names the samples of an IDX file, or only the type of its elements if its header is cut.
fn idx(first: &[u8]) -> Option<String> {
    let &[0, 0, code, dimensions @ 1..=8, ref rest @ ..] = first else { return None };
    let element = match code {
        0x08 => "unsigned bytes",
        0x09 => "signed bytes",
        0x0b => "i16",
        0x0c => "i32",
        0x0d => "f32",
        0x0e => "f64",
        _ => return None,
    };
    let Some(extents) = rest.get(..4 * usize::from(dimensions)) else {
        let plural = if dimensions == 1 { "" } else { "s" };
        return Some(format!(
            "an IDX file of {dimensions} dimension{plural}, whose elements are {element}"
        ));
    };
    let extents: Vec<u32> = extents
        .chunks_exact(4)
        .map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]))
        .collect();
    Some(format!("an IDX file of {}", idx_samples(&extents, element)))
}

/// Names the samples of an IDX file by its dimensions, of which the first is their number.
pub fn idx_samples(extents: &[u32], element: &str) -> String {
    let (count, sample) = extents.split_first().unwrap_or((&0, &[]));
    let sample: Vec<String> = sample.iter().map(u32::to_string).collect();
    match (sample.len(), element) {
        (0, "unsigned bytes") => format!("{count} labels"),
        (0, _) => format!("{count} numbers, whose type is {element}"),
        (2, "unsigned bytes") => format!("{count} images of {}", sample.join("x")),
        _ => format!("{count} samples of {}, whose elements are {element}", sample.join("x")),
    }
}

/// A length of 8 bytes, and JSON or the checksum of the length.
fn safetensors_or_records(first: &[u8]) -> Option<&'static str> {
    let (length, rest) = first.split_first_chunk::<8>()?;
    let is_header = (2..1 << 32).contains(&u64::from_le_bytes(*length)) && rest.starts_with(b"{\"");
    let is_record = || first.first_chunk().is_some_and(|head| RecordHead(*head).length().is_some());
    match is_header {
        true => Some(SAFETENSORS),
        false => is_record().then_some(RECORDS),
    }
}

/// Text of 2 or 4 bytes a character: with a byte order mark, or with a zero in every other byte.
fn wide_text(first: &[u8]) -> Option<&'static str> {
    const UTF_32: &str = "text in UTF-32, and UTF-8 is read";
    const UTF_16: &str = "text in UTF-16, and UTF-8 is read";
    let is_letter = |letter: u32| (9..0x11_0000).contains(&letter);
    let has_units = |text: &[u8], unit: fn([u8; 2]) -> u16| {
        text.chunks_exact(2).take(4).all(|pair| unit([pair[0], pair[1]]) >= 9)
    };
    match *first {
        [0xff, 0xfe, 0, 0] | [0, 0, 0xfe, 0xff] => return Some(UTF_32),
        [0xff, 0xfe, 0, 0, a, b, c, d, ..] if is_letter(u32::from_le_bytes([a, b, c, d])) => {
            return Some(UTF_32);
        }
        [0, 0, 0xfe, 0xff, a, b, c, d, ..] if is_letter(u32::from_be_bytes([a, b, c, d])) => {
            return Some(UTF_32);
        }
        [0xff, 0xfe, ref text @ ..] if has_units(text, u16::from_le_bytes) => return Some(UTF_16),
        [0xfe, 0xff, ref text @ ..] if has_units(text, u16::from_be_bytes) => return Some(UTF_16),
        _ => {}
    }
    let pairs: Vec<&[u8]> = first.chunks_exact(2).take(4).collect();
    let is_text =
        |byte: u8| byte == b'\n' || byte == b'\r' || byte == b'\t' || (b' '..0x7f).contains(&byte);
    let is_wide = |text: usize| pairs.iter().all(|pair| is_text(pair[text]) && pair[1 - text] == 0);
    (pairs.len() >= 2 && (is_wide(0) || is_wide(1))).then_some(UTF_16)
}

/// The number of a protocol, and an operation.
fn pickle(first: &[u8]) -> Option<&'static str> {
    matches!(first, [0x80, 2..=5, b'('..=b'}' | 0x80..=0x98, ..])
        .then_some("a pickle of Python, which is never loaded")
}

/// A file system leaves zeros where data had not reached the disk.
fn zeros(first: &[u8]) -> Option<&'static str> {
    (first.len() >= 16 && first.iter().all(|&byte| byte == 0))
        .then_some("filled with zeros, as a file whose writer was interrupted is")
}

/// Text of no format that is known: UTF-8, or mostly letters of ASCII in another encoding.
fn text(first: &[u8]) -> Option<&'static str> {
    if first.iter().any(is_control) {
        return None;
    }
    match std::str::from_utf8(first) {
        Ok(_) => Some("text"),
        // The last character is cut.
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => Some("text"),
        Err(_) => {
            let ascii = first.iter().filter(|byte| byte.is_ascii()).count();
            (ascii >= 2 * (first.len() - ascii))
                .then_some("text in another encoding than UTF-8, such as Latin-1")
        }
    }
}

/// Whether no text has a byte.
fn is_control(byte: &u8) -> bool {
    matches!(byte, 0..=8 | 0x0b | 0x0e..=0x1f | 0x7f)
}

/// The bytes behind a byte order mark of UTF-8.
fn without_mark(first: &[u8]) -> &[u8] {
    first.strip_prefix(&BYTE_ORDER_MARK).unwrap_or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of a kind, with a star for text without a known format.
    fn kind(first: &[u8]) -> String {
        match FileKind::of(first) {
            None => "unknown".to_owned(),
            Some(kind) if kind.is_text() => format!("*{}", kind.into_text()),
            Some(kind) => kind.into_text(),
        }
    }

    /// A text of this length, with bytes at some offsets.
    fn at(length: usize, parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![b'a'; length];
        parts.iter().for_each(|(at, part)| bytes[*at..at + part.len()].copy_from_slice(part));
        bytes
    }

    /// The first entry of a zip archive.
    fn zip_of(name: &str) -> Vec<u8> {
        let mut bytes = [ZIP, &[0; 22], &(name.len() as u16).to_le_bytes(), &[0; 2]].concat();
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(b"more of it.npy");
        bytes
    }

    #[test]
    fn every_signature_is_told_and_is_no_text() {
        for (parts, expected) in &SIGNATURES {
            let length = parts.iter().map(|(at, bytes)| at + bytes.len()).max().unwrap();
            assert!(length <= FIRST_BYTES, "{expected}");
            assert_eq!(&kind(&at(length, parts)), expected, "{parts:?}");
            assert_eq!(&kind(&at(FIRST_BYTES, parts)), expected, "{parts:?}");
        }
    }

    #[test]
    fn formats_are_told_by_their_first_bytes() {
        let utf16 = "text in UTF-16, and UTF-8 is read";
        let utf32 = "text in UTF-32, and UTF-8 is read";
        let html = "an HTML page, perhaps an error of a download";
        let zip = "a zip archive, as NPZ and PyTorch files are";
        let records = RecordHead::new(3).0;
        let long = format!("{{\"a\": [{}", "1, ".repeat(200));
        let cases: [(&[u8], &str); 56] = [
            (b"", "empty"),
            (b"\x1f\x8b\x08", "packed with gzip"),
            (b"BZh91AY&SY\x00", "packed with bzip2"),
            (b"x\x9c\xed\x9d\x07", "packed with zlib"),
            (b"x\x01\x01\x05\x00\xfa\xffhello", "packed with zlib"),
            (b"x^\x4b\x4c\x04\x00", "packed with zlib"),
            (b"]\0\0\x80\0\xff\xff\xff\xff\xff\xff\xff\xff\0\x31", "packed with LZMA"),
            (b"]\0\0\x10\0\x07\0\0\0\0\0\0\0\0\x31", "packed with LZMA"),
            (b"PK\x03\x04\x14", zip),
            (&zip_of("readme"), zip),
            (&zip_of("x.npy"), "an NPZ archive of NumPy"),
            (&zip_of("archive/data.pkl"), "a PyTorch file, whose pickle is never loaded"),
            (&zip_of("[Content_Types].xml"), OFFICE),
            (b"\xff\xfe", utf16),
            (b"\xff\xfea\x00", utf16),
            (b"\xfe\xff\x00a", utf16),
            (b"a\x00,\x00b\x00\n\x00", utf16),
            (b"\x00a\x00,\x00b", utf16),
            (b"\xff\xfe\x00\x00a\x00\x00\x00", utf32),
            (b"\x00\x00\xfe\xff\x00\x00\x00a", utf32),
            (b"PAR1\x15\x04", "a Parquet file"),
            (b"PARE\x15\x04", "an encrypted Parquet file"),
            (b"ORC\x01", "an ORC file"),
            (b"\xff\xff\xff\xff\x10\x01\0\0", "an Arrow stream"),
            (b"\x37\0\0\0\0\0\0\0{\"w\"", "a safetensors file"),
            (&records, "a TFRecord file"),
            (b"\x80\x04\x95\x00", "a pickle of Python, which is never loaded"),
            (b"\x80\x02\x8a\x0a", "a pickle of Python, which is never loaded"),
            (&[0; 16], "filled with zeros, as a file whose writer was interrupted is"),
            (b"\x00\x00\x0d\x02\x00", "an IDX file of 2 dimensions, whose elements are f32"),
            (
                b"\x00\x00\x08\x01\x00",
                "an IDX file of 1 dimension, whose elements are unsigned bytes",
            ),
            (b"\0\0\x08\x01\0\0\xea\x60", "an IDX file of 60000 labels"),
            (b"\0\0\x0d\x01\0\0\0\x05", "an IDX file of 5 numbers, whose type is f32"),
            (b"\0\0\x08\x03\0\0\0\x07\0\0\0\x1c\0\0\0\x1b", "an IDX file of 7 images of 28x27"),
            (
                b"\0\0\x0d\x02\0\0\0\x07\0\0\0\x1c",
                "an IDX file of 7 samples of 28, whose elements are f32",
            ),
            (b" \n<!DOCTYPE HTML><p>", html),
            (b"\xef\xbb\xbf<html>", html),
            (b"\xef\xbb\xbf<?xml version", "an XML document"),
            (b"<svg xmlns", "an XML document"),
            (b"@RELATION iris\n", "an ARFF file of Weka"),
            (b"{'a': 1}", "text of Python values"),
            (b"{\"a\": 1}", "JSON"),
            (b"{\"a\": NaN}", "JSON"),
            (b" [ { \"a\"", "JSON"),
            (b"[[1, 2], [3, 4]]\n", "JSON"),
            (b"[1, 2, ", "JSON"),
            (b"\xef\xbb\xbf\r\n[\"x\",", "JSON"),
            (long.as_bytes(), "JSON"),
            (b"{\"a\": 1}\n{\"a\": 2}\n", "JSON, with a value in each line"),
            (b"\xef\xbb\xbf[1]\r\n[2]\r\n", "JSON, with a value in each line"),
            (b"id,x\n", "*text"),
            ("größe,x\n".as_bytes(), "*text"),
            (&"größe".as_bytes()[..3], "*text"),
            ("\u{feff}größe".as_bytes(), "*text"),
            (b"gr\xf6\xdfe,x\n", "*text in another encoding than UTF-8, such as Latin-1"),
            (b"\xf6", "unknown"),
        ];
        for (first, expected) in cases {
            assert_eq!(kind(first), expected, "{first:?}");
        }
    }

    #[test]
    fn tables_of_text_are_no_other_format() {
        for first in [
            "id,x\n1,2\n",
            "PAR1,PAR2\n1,2\n",
            "ORC\n1\n",
            "{a},[b]\n",
            "[id],[name]\n",
            "[1],[2]\n",
            "{}x\n",
            "1\n",
            "BZh9,x\n",
            "BM,II*,MM\n",
            "RIFF,WAVE\n",
            "abc,ftype\n",
            "x^2,y\n1,2\n",
            "],\n",
            "GGUF,MATLAB,RDX2\n",
            "MATLAB 5.0\n",
            "<a>,<b>\n",
            "version https\n",
            "a",
        ] {
            assert_eq!(kind(first.as_bytes()), "*text", "{first:?}");
        }
        assert_eq!(kind(b"\x01\x02\x03"), "unknown");
    }

    /// A damaged head of a record must be called damaged: its length has zeros behind it.
    #[test]
    fn lengths_of_records_are_no_other_format() {
        let lengths = (1..1 << 20).chain((20..40).map(|bits| 1 << bits));
        for length in lengths {
            let mut head = RecordHead::new(length).0;
            head[11] ^= 1;
            // One checksum in 65,536 begins as the JSON of a safetensors file.
            if head[8..].starts_with(b"{\"") {
                continue;
            }
            assert_eq!(FileKind::of(&head), None, "{length}: {head:?}");
        }
    }
}
