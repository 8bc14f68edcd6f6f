//! Inputs of other storages, which are read as files are.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pushpull_common::error::Chain;
use pushpull_common::read_at::ReadAt;

use super::gzip;
use crate::data::{CsvFormat, CsvSource, IdxSource, Source};

/// An object in memory. It counts its reads, and fails those beyond `readable`.
#[derive(Debug)]
struct Object {
    name: &'static str,
    bytes: Vec<u8>,
    readable: usize,
    reads: AtomicU64,
}

impl Object {
    fn new(name: &'static str, bytes: Vec<u8>) -> Arc<Object> {
        let readable = bytes.len();
        Arc::new(Object { name, bytes, readable, reads: AtomicU64::new(0) })
    }
}

impl ReadAt for Object {
    fn name(&self) -> &str {
        self.name
    }

    fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let end = offset as usize + out.len();
        if end > self.readable {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer within 9 s"));
        }
        out.copy_from_slice(&self.bytes[offset as usize..end]);
        Ok(())
    }
}

fn idx(header: &[u32], payload: &[u8]) -> Vec<u8> {
    let words = header.iter().flat_map(|word| word.to_be_bytes());
    words.chain(payload.iter().copied()).collect()
}

#[test]
fn idx_inputs_are_read_in_memory_or_by_sample() {
    let images = idx(&[0x0803, 3, 2, 2], &[0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]);
    let labels = idx(&[0x0801, 3], &[9, 0, 4]);
    for memory_bytes_max in [1 << 20, 0] {
        let images = Object::new("s3://b/images", images.clone());
        let labels = Object::new("s3://b/labels", labels.clone());
        let source = IdxSource::of_inputs(images.clone(), labels, memory_bytes_max).unwrap();
        assert_eq!((source.name(), source.len(), source.shape()), ("images", 3, &[2, 2][..]));
        let before = images.reads.load(Ordering::Relaxed);
        for index in [2, 0, 1] {
            let (pixels, label) = source.get(index).unwrap();
            let tens = 10 * index as u8;
            assert_eq!(pixels[..], [tens, tens + 1, tens + 2, tens + 3]);
            assert_eq!(label, [9, 0, 4][index as usize]);
        }
        let reads = images.reads.load(Ordering::Relaxed) - before;
        assert_eq!(reads, if memory_bytes_max == 0 { 3 } else { 0 });
    }
}

#[test]
fn packed_and_damaged_idx_inputs_are_treated_as_files_are() {
    let images = idx(&[0x0801, 2], &[7, 8]);
    let labels = gzip(&idx(&[0x0801, 2], &[1, 2]));
    let open = |images: Vec<u8>, labels: Vec<u8>| {
        let images = Object::new("s3://b/images", images);
        IdxSource::of_inputs(images, Object::new("s3://b/labels.gz", labels), 1 << 20)
    };
    let source = open(images.clone(), labels.clone()).unwrap();
    assert_eq!(source.get(1).unwrap().1, 2);
    let short = Chain(&open(images[..9].to_vec(), labels.clone()).unwrap_err()).to_string();
    assert!(short.contains("s3://b/images") && short.contains("10"), "{short}");
    let same = Object::new("s3://b/x", images);
    let error = Chain(&IdxSource::of_inputs(same.clone(), same, 0).unwrap_err()).to_string();
    assert!(error.contains("s3://b/x"), "{error}");
}

#[test]
fn csv_inputs_are_read_in_memory_or_by_row() {
    let text: String = (0..500).map(|row| format!("{row},{}\n", row * row)).collect();
    let text = format!("x,square\n{text}");
    for (bytes, memory_bytes_max) in [
        (text.clone().into_bytes(), 1 << 20),
        (text.clone().into_bytes(), 0),
        (gzip(text.as_bytes()), 1 << 20),
    ] {
        let input = Object::new("hdfs://n:1/squares.csv", bytes);
        let format = CsvFormat::new().memory_bytes_max(memory_bytes_max);
        let source = CsvSource::of_input(input, format).unwrap();
        assert_eq!((source.name(), source.len()), ("squares.csv", 500));
        assert_eq!(source.get(20).unwrap().text("square").unwrap(), "400");
        assert_eq!(source.get(499).unwrap().text("x").unwrap(), "499");
    }
}

#[test]
fn a_storage_that_fails_is_named() {
    let input = Object {
        name: "s3://b/t.csv",
        bytes: b"a,b\n1,2\n".repeat(300_000),
        readable: 1 << 20,
        reads: AtomicU64::new(0),
    };
    let error = CsvSource::of_input(Arc::new(input), CsvFormat::new()).unwrap_err();
    let text = Chain(&error).to_string();
    assert_eq!(text, "cannot read s3://b/t.csv: no answer within 9 s");
}
