//! IDX files, which may be damaged or hostile.

use std::fs;
use std::path::PathBuf;

use bytes::Bytes;
use pushpull_common::error::Chain;

use super::gzip;
use crate::data::{IdxSource, Source, SourceError};

const IMAGES: u32 = 0x0803;
const LABELS: u32 = 0x0801;

/// A folder for two files.
struct Pair(tempfile::TempDir);

impl Pair {
    fn new() -> Pair {
        Pair(tempfile::tempdir().unwrap())
    }

    fn paths(&self) -> (PathBuf, PathBuf) {
        (self.0.path().join("images"), self.0.path().join("labels"))
    }

    fn open_within(
        &self,
        images: &[u8],
        labels: &[u8],
        memory_bytes_max: u64,
    ) -> Result<IdxSource, SourceError> {
        let (image_path, label_path) = self.paths();
        fs::write(&image_path, images).unwrap();
        fs::write(&label_path, labels).unwrap();
        IdxSource::open_within(image_path, label_path, memory_bytes_max)
    }

    /// Opens two files, and returns the error without the folder.
    fn refusal(&self, images: &[u8], labels: &[u8]) -> String {
        let error = Chain(&self.open_within(images, labels, 1 << 20).unwrap_err()).to_string();
        error.replace(&format!("{}/", self.0.path().display()), "")
    }
}

/// Returns a file with these header words and this payload.
fn idx(header: &[u32], payload: &[u8]) -> Vec<u8> {
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_be_bytes()).collect();
    bytes.extend_from_slice(payload);
    bytes
}

/// Returns three images of 2 x 2 pixels.
fn images() -> Vec<u8> {
    idx(&[IMAGES, 3, 2, 2], &[0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])
}

fn labels() -> Vec<u8> {
    idx(&[LABELS, 3], &[9, 0, 4])
}

#[test]
fn samples_are_read_from_memory_and_disk_plain_and_packed() {
    let pair = Pair::new();
    for (pack, memory_bytes_max) in [(false, 1 << 20), (false, 0), (true, 1 << 20)] {
        let pack = |bytes: Vec<u8>| if pack { gzip(&bytes) } else { bytes };
        let source = pair.open_within(&pack(images()), &pack(labels()), memory_bytes_max).unwrap();
        assert_eq!((source.name(), source.len(), source.shape()), ("images", 3, &[2, 2][..]));
        assert_eq!(source.get(0).unwrap(), (Bytes::from_static(&[0, 1, 2, 3]), 9));
        assert_eq!(source.get(2).unwrap(), (Bytes::from_static(&[20, 21, 22, 23]), 4));
        let error = source.named("train").get(3).unwrap_err().to_string();
        assert_eq!(error, "cannot read sample 3 of \"train\": it has 3 samples");
    }
}

#[test]
fn samples_have_one_to_four_dimensions() {
    let pair = Pair::new();
    let tables: [(&[u32], &[usize]); 3] =
        [(&[0x0801, 2], &[]), (&[0x0802, 2, 6], &[6]), (&[0x0804, 2, 1, 2, 3], &[1, 2, 3])];
    for (header, shape) in tables {
        let bytes: Vec<u8> = (0..2 * shape.iter().product::<usize>() as u8).collect();
        let labels = idx(&[LABELS, 2], &[5, 6]);
        let source = pair.open_within(&idx(header, &bytes), &labels, 1 << 20).unwrap();
        assert_eq!(source.shape(), shape);
        assert_eq!(source.get(1).unwrap(), (bytes[bytes.len() / 2..].to_vec().into(), 6));
    }
}

#[test]
fn refusals_name_file_field_and_expectation() {
    let pair = Pair::new();
    let huge = u32::MAX;
    let table = [
        (
            idx(&[0x0805, 3], &[]),
            labels(),
            "cannot read images: it is an IDX file of 5 dimensions, whose elements are unsigned bytes, \
             expected an IDX file of at most 4 dimensions",
        ),
        (
            idx(&[0x0308_0000, 0x0300_0000], &[0; 12]),
            labels(),
            "cannot read images: the magic number is 50855936, expected 2049 to 2052 in big-endian order",
        ),
        (
            idx(&[0x0800, 3], &[]),
            labels(),
            "cannot read images: the magic number is 2048, expected 2049 to 2052",
        ),
        (
            idx(&[0x0d03, 3], &[]),
            labels(),
            "cannot read images: it is an IDX file of 3 dimensions, whose elements are f32, expected \
             an IDX file of unsigned bytes",
        ),
        (
            images(),
            images(),
            "cannot read labels: it is an IDX file of 3 images of 2x2, expected an IDX file of labels",
        ),
        (
            labels(),
            images(),
            "cannot pair images with labels: the first has 3 labels, and the second 3 images of 2x2; \
             exchange the paths",
        ),
        (
            gzip(&labels()),
            gzip(&idx(&[0x0802, 3, 2], &[0; 6])),
            "cannot pair images with labels: the first has 3 labels, and the second 3 samples of 2, \
             whose elements are unsigned bytes; exchange the paths",
        ),
        (
            images(),
            idx(&[0x0c01, 3], &[0; 12]),
            "cannot read labels: it is an IDX file of 3 numbers, whose type is i32, expected an IDX file \
             of unsigned bytes",
        ),
        (
            idx(&[IMAGES, 0, 2, 2], &[]),
            labels(),
            "cannot read images: the number of samples is 0, expected at least 1",
        ),
        (
            idx(&[IMAGES, 3, 2, 0], &[]),
            labels(),
            "cannot read images: a dimension is 0, expected at least 1",
        ),
        (
            images(),
            idx(&[LABELS, 2], &[9, 0]),
            "cannot pair images with labels: 3 samples and 2 labels",
        ),
        (
            images(),
            idx(&[LABELS, 2], &[9, 0, 4]),
            "cannot read labels: it has 11 bytes, expected 10",
        ),
        // Nothing is allocated for what a header only claims.
        (
            images(),
            idx(&[LABELS, huge], &[9, 0, 4]),
            "cannot read labels: it has 11 bytes, expected 4294967303",
        ),
        (
            idx(&[IMAGES, huge, 1 << 15, 1 << 15], &[]),
            labels(),
            "cannot read images: it has 16 bytes, expected 4611686017353646096",
        ),
        (
            idx(&[IMAGES, huge, huge, huge], &[]),
            labels(),
            "cannot read images: the number of samples is 4294967295, expected samples of \
             [4294967295, 4294967295] bytes in fewer than 2^64",
        ),
        (
            idx(&[0x0804, huge, huge, huge, huge], &[]),
            labels(),
            "cannot read images: the number of samples is 4294967295, expected samples of \
             [4294967295, 4294967295, 4294967295] bytes in fewer than 2^64",
        ),
        // A packed file is unpacked by at most one byte more than announced, and within a limit.
        (
            gzip(&idx(&[IMAGES, 1 << 20, 2, 2], &[])),
            labels(),
            "cannot unpack images: it has more than 1048576 bytes, the limit",
        ),
        (
            gzip(&idx(&[IMAGES, 3, 2, 2], &vec![0; 1 << 22])),
            labels(),
            "cannot read images: it has 29 bytes, expected 28",
        ),
        (gzip(&images()[..20]), labels(), "cannot read images: it has 20 bytes, expected 28"),
        (
            Vec::new(),
            labels(),
            "cannot read images: it is empty, expected an IDX file of unsigned bytes",
        ),
        (
            images(),
            b"label\n7\n2\n".to_vec(),
            "cannot read labels: it is text, expected an IDX file of unsigned bytes",
        ),
    ];
    for (images, labels, expected) in table {
        assert_eq!(pair.refusal(&images, &labels), expected);
    }
}

#[test]
fn every_truncation_is_reported() {
    let pair = Pair::new();
    // Without a byte it is empty.
    for len in 1..images().len() {
        let refusal = pair.refusal(&images()[..len], &labels());
        let plural = if len == 1 { "" } else { "s" };
        assert!(refusal.starts_with(&format!("cannot read images: it has {len} byte{plural}, ")));
    }
    let packed = gzip(&images());
    for len in 0..packed.len() {
        let refusal = pair.refusal(&packed[..len], &labels());
        let expected = match len {
            0 => "cannot read images: it is empty, ",
            1 => "cannot read images: it has 1 byte, ",
            _ => "cannot unpack images: its gzip stream is ",
        };
        assert!(refusal.starts_with(expected), "{refusal}");
    }
}

#[test]
fn damaged_bytes_never_panic() {
    let pair = Pair::new();
    for (file, header) in [(images(), 16), (gzip(&images()), 64)] {
        for position in 0..file.len().min(header) {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut damaged = file.clone();
                damaged[position] = value;
                if let Ok(source) = pair.open_within(&damaged, &labels(), 1 << 20) {
                    assert_eq!(source.len(), 3);
                    (0..3).for_each(|index| _ = source.get(index).unwrap());
                }
            }
        }
    }
}

#[test]
fn what_is_not_a_file_is_refused() {
    let pair = Pair::new();
    let (images, labels) = pair.paths();
    let text = || Chain(&IdxSource::open(&images, &labels).unwrap_err()).to_string();
    assert!(text().contains("images: No such file"), "{}", text());
    fs::create_dir(&images).unwrap();
    assert!(text().ends_with("images: it is a directory, expected a regular file"), "{}", text());
}

#[test]
fn one_file_is_not_samples_and_labels() {
    let pair = Pair::new();
    let (images_path, labels_path) = pair.paths();
    fs::write(&labels_path, labels()).unwrap();
    std::os::unix::fs::symlink(&labels_path, &images_path).unwrap();
    for path in [&labels_path, &images_path] {
        let error = Chain(&IdxSource::open(path, &labels_path).unwrap_err()).to_string();
        let expected = format!(
            "cannot pair {} with {}: they are the same file, of 3 labels",
            path.display(),
            labels_path.display()
        );
        assert_eq!(error, expected);
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_open_is_reported() {
    let pair = Pair::new();
    let source = pair.open_within(&images(), &labels(), 0).unwrap();
    fs::write(pair.paths().0, &images()[..20]).unwrap();
    let Err(SourceError::Length { found: 20, expected: 28, .. }) = source.get(1) else {
        panic!("{:?}", source.get(1));
    };
    assert_eq!(source.get(0).unwrap().1, 9, "this sample is still there");
}
