//! What a file is, by its first bytes: for errors of readers that expect another format.

use crate::training::tfrecord::RecordHead;

/// The first bytes that [`FileKind::of`] uses.
pub(crate) const FIRST_BYTES: usize = 512;

/// A format that is told by the first bytes of a file. Its text continues "it is".
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileKind {
    text: String,
    /// Whether the format is told by so few or so common bytes that text may begin with them.
    #[cfg_attr(not(feature = "csv"), allow(dead_code, reason = "read for tables of text"))]
    is_guess: bool,
}

impl FileKind {
    /// Recognizes a format by the first bytes of a file: [`FIRST_BYTES`], or fewer if the file is
    /// shorter.
    pub(crate) fn of(first: &[u8]) -> Option<FileKind> {
        let found = |text: &str| FileKind { text: text.to_owned(), is_guess: false };
        if first.is_empty() {
            return Some(found("empty"));
        }
        let by_signature = SIGNATURES.iter().find(|(at, signature, _)| {
            first.get(*at..at + signature.len()).is_some_and(|bytes| bytes == *signature)
        });
        by_signature
            .map(|(_, _, text)| found(text))
            .or_else(|| parquet(first).map(found))
            .or_else(|| markup(first).map(found))
            .or_else(|| idx(first))
            .or_else(|| is_safetensors(first).then(|| found("a safetensors file")))
            .or_else(|| is_records(first).then(|| found("a TFRecord file")))
            .or_else(|| utf16_without_mark(first).map(found))
            .or_else(|| guess(first).map(|text| FileKind { text: text.to_owned(), is_guess: true }))
    }

    /// Recognizes a format that no text begins with.
    #[cfg(feature = "csv")]
    pub(crate) fn of_binary(first: &[u8]) -> Option<FileKind> {
        FileKind::of(first).filter(|kind| !kind.is_guess)
    }

    /// The rest of a sentence that begins with "it is".
    pub(crate) fn into_text(self) -> String {
        self.text
    }
}

/// Where a signature begins, its bytes, and what a file with it is.
const SIGNATURES: [(usize, &[u8], &str); 35] = [
    (0, b"\x1f\x8b", "packed with gzip"),
    (0, b"PK\x03\x04", "a zip archive, as NPZ and PyTorch files are"),
    (0, b"PK\x05\x06", "an empty zip archive"),
    (0, b"\x28\xb5\x2f\xfd", "packed with zstd"),
    (0, b"\xfd7zXZ\x00", "packed with xz"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"\x04\x22\x4d\x18", "packed with lz4"),
    (0, b"\xff\x06\x00\x00sNaPpY", "packed with snappy"),
    (4, b"\x31\x41\x59\x26\x53\x59", "packed with bzip2"),
    (4, b"\x17\x72\x45\x38\x50\x90", "packed with bzip2"),
    (257, b"ustar", "a tar archive"),
    (0, b"\xff\xfe\x00\x00", "text in UTF-32, and UTF-8 is read"),
    (0, b"\x00\x00\xfe\xff", "text in UTF-32, and UTF-8 is read"),
    (0, b"\xff\xfe", "text in UTF-16, and UTF-8 is read"),
    (0, b"\xfe\xff", "text in UTF-16, and UTF-8 is read"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF87a", "a GIF image"),
    (0, b"GIF89a", "a GIF image"),
    (8, b"WEBPVP8", "a WebP image"),
    (8, b"WAVEfmt ", "a WAV file"),
    (0, b"%PDF-", "a PDF document"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (0, b"CDF\x01", "a NetCDF file"),
    (0, b"\x93NUMPY", "an NPY file of NumPy"),
    (0, b"ARROW1\x00\x00", "an Arrow file"),
    (0, b"\xff\xff\xff\xff", "an Arrow stream"),
    (0, b"FEA1\x00", "a Feather file"),
    (0, b"Obj\x01", "an Avro file"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (0, b"\x7fELF", "a program"),
    (0, b"GGUF", "a GGUF file"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document"),
    (
        0,
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS: fetch the file with `git lfs pull`",
    ),
    (
        0,
        b"version https://hawser.github.com/spec/",
        "a pointer of Git LFS: fetch the file with `git lfs pull`",
    ),
];

/// A header of names may begin with these letters; binary data follow them in Parquet and ORC.
fn parquet(first: &[u8]) -> Option<&'static str> {
    let is_binary = |at: usize| first.get(at).is_some_and(|&byte| byte < b' ' && byte != b'\n');
    match first {
        [b'P', b'A', b'R', b'1', ..] if is_binary(4) => Some("a Parquet file"),
        [b'O', b'R', b'C', ..] if is_binary(3) => Some("an ORC file"),
        _ => None,
    }
}

fn markup(first: &[u8]) -> Option<&'static str> {
    let text = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first).trim_ascii_start();
    let begins = |tag: &str| {
        text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag.as_bytes()))
    };
    if begins("<!doctype html") || begins("<html") || begins("<head") {
        return Some("an HTML page, perhaps an error of a download");
    }
    begins("<?xml").then_some("an XML document")
}

/// Names the element type of an IDX file.
fn idx(first: &[u8]) -> Option<FileKind> {
    let &[0, 0, code, dimensions @ 1..=8, ..] = first else { return None };
    let element = match code {
        0x08 => "unsigned bytes",
        0x09 => "signed bytes",
        0x0b => "i16",
        0x0c => "i32",
        0x0d => "f32",
        0x0e => "f64",
        _ => return None,
    };
    let plural = if dimensions == 1 { "" } else { "s" };
    let text =
        format!("an IDX file of {dimensions} dimension{plural}, whose elements are {element}");
    Some(FileKind { text, is_guess: false })
}

/// A length of 8 bytes, and JSON.
fn is_safetensors(first: &[u8]) -> bool {
    let Some((length, rest)) = first.split_first_chunk::<8>() else { return false };
    (2..1 << 32).contains(&u64::from_le_bytes(*length)) && rest.starts_with(b"{\"")
}

/// A length of 8 bytes, and its checksum.
fn is_records(first: &[u8]) -> bool {
    first.first_chunk().is_some_and(|head| RecordHead(*head).length().is_some())
}

/// Text in which every other byte is zero.
fn utf16_without_mark(first: &[u8]) -> Option<&'static str> {
    let pairs: Vec<&[u8]> = first.chunks_exact(2).take(4).collect();
    let is_text =
        |byte: u8| byte == b'\n' || byte == b'\r' || byte == b'\t' || (b' '..0x7f).contains(&byte);
    let is_wide = |text: usize| pairs.iter().all(|pair| is_text(pair[text]) && pair[1 - text] == 0);
    (pairs.len() >= 2 && (is_wide(0) || is_wide(1))).then_some("text in UTF-16, and UTF-8 is read")
}

/// Formats whose first bytes may as well be those of another.
fn guess(first: &[u8]) -> Option<&'static str> {
    match first {
        [0x80, 2..=5, ..] => Some("a pickle of Python, which is never loaded"),
        [b'{' | b'[', ..] => Some("JSON"),
        _ if first.iter().all(|byte| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~')) => {
            Some("text")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(first: &[u8]) -> Option<String> {
        FileKind::of(first).map(FileKind::into_text)
    }

    #[test]
    fn formats_are_told_by_their_first_bytes() {
        let mut tar = vec![b'a'; 257];
        tar.extend_from_slice(b"ustar\x0000");
        let records = RecordHead::new(3).0;
        let cases: [(&[u8], &str); 25] = [
            (b"", "empty"),
            (b"\x1f\x8b\x08", "packed with gzip"),
            (b"PK\x03\x04\x14", "a zip archive, as NPZ and PyTorch files are"),
            (b"\x28\xb5\x2f\xfd\x00", "packed with zstd"),
            (b"\xfd7zXZ\x00\x00", "packed with xz"),
            (b"BZh91AY&SY\x00", "packed with bzip2"),
            (b"\xff\xfea\x00", "text in UTF-16, and UTF-8 is read"),
            (b"\xfe\xff\x00a", "text in UTF-16, and UTF-8 is read"),
            (b"a\x00,\x00b\x00\n\x00", "text in UTF-16, and UTF-8 is read"),
            (b"\x00a\x00,\x00b", "text in UTF-16, and UTF-8 is read"),
            (b"\xff\xfe\x00\x00a\x00\x00\x00", "text in UTF-32, and UTF-8 is read"),
            (b"\x00\x00\xfe\xff\x00\x00\x00a", "text in UTF-32, and UTF-8 is read"),
            (b"\x89PNG\r\n\x1a\n", "a PNG image"),
            (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
            (b"\x93NUMPY\x01\x00", "an NPY file of NumPy"),
            (b"PAR1\x15\x04", "a Parquet file"),
            (b"ARROW1\x00\x00", "an Arrow file"),
            (b"\x37\0\0\0\0\0\0\0{\"w\"", "a safetensors file"),
            (b"\x00\x00\x0d\x02\x00", "an IDX file of 2 dimensions, whose elements are f32"),
            (
                b"\x00\x00\x08\x01\x00",
                "an IDX file of 1 dimension, whose elements are unsigned bytes",
            ),
            (b"version https://git-lfs.github.com/spec/v1\noid", SIGNATURES[33].2),
            (b" \n<!DOCTYPE HTML><p>", "an HTML page, perhaps an error of a download"),
            (b"\x80\x04\x95\x00", "a pickle of Python, which is never loaded"),
            (&tar, "a tar archive"),
            (&records, "a TFRecord file"),
        ];
        for (first, expected) in cases {
            assert_eq!(text(first).as_deref(), Some(expected), "{first:?}");
        }
    }

    #[test]
    fn tables_of_text_are_no_binary_format() {
        for first in
            ["id,x\n1,2\n", "PAR1,PAR2\n1,2\n", "ORC\n1\n", "{a},[b]\n", "1\n", "BZh9,x\n", "a"]
        {
            assert_eq!(FileKind::of_binary(first.as_bytes()), None, "{first:?}");
        }
        assert_eq!(FileKind::of(b"\x01\x02\x03"), None);
        assert_eq!(text(b"id,x\n").as_deref(), Some("text"));
    }
}
