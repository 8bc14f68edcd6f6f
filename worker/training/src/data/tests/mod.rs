//! Tests of the data pipeline: reading files and streams of records, loading batches, splitting epochs.

mod csv;
mod idx;
mod inputs;
mod loading;
mod splitting;
mod streams;
mod test_source;

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

/// Packs bytes with gzip.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
