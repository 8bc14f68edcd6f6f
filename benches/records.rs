//! Benchmarks of TFRecord files and summaries (`cargo bench -p benches --bench records`), each
//! group beside the copy or the read that it cannot beat.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::os::unix::fs::FileExt;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pushpull::training::summary::{SummaryHistogram, SummaryWriter};
use pushpull::training::tfrecord::{TfRecordReader, TfRecordWriter};

/// Length of the records.
const RECORD_BYTES: usize = 4 << 10;

/// Number of records in the file that is read.
const RECORDS: u64 = 4096;

/// Number of values in a histogram.
const VALUES: usize = 1 << 16;

/// Appends records to an output that takes all.
fn append(criterion: &mut Criterion) {
    let record = vec![7_u8; RECORD_BYTES];
    let mut group = criterion.benchmark_group("append");
    group.throughput(Throughput::Bytes(RECORD_BYTES as u64));
    let mut copied = Vec::with_capacity(64 << 10);
    group.bench_function("copy", |bencher| {
        bencher.iter(|| {
            if copied.len() + RECORD_BYTES > copied.capacity() {
                copied.clear();
            }
            copied.extend_from_slice(black_box(&record));
        });
    });
    let mut writer = TfRecordWriter::with_output("sink", io::sink());
    group.bench_function("record", |bencher| {
        bencher.iter(|| writer.append(black_box(&record)).unwrap());
    });
    group.finish();
}

/// Reads records of a cached file in an order without neighbours.
fn get(criterion: &mut Criterion) {
    let path = std::env::temp_dir().join(format!("pushpull-records-{}", std::process::id()));
    let mut writer = TfRecordWriter::create(&path).unwrap();
    (0..RECORDS).for_each(|record| writer.append(&[record as u8; RECORD_BYTES]).unwrap());
    writer.flush().unwrap();
    let mut group = criterion.benchmark_group("get");
    group.throughput(Throughput::Bytes(RECORD_BYTES as u64));
    let file = File::open(&path).unwrap();
    let mut bytes = vec![0; RECORD_BYTES];
    let mut next = 0;
    group.bench_function("read", |bencher| {
        bencher.iter(|| {
            next = (next + 1667) % RECORDS;
            file.read_exact_at(&mut bytes, next * (RECORD_BYTES as u64 + 16) + 12).unwrap();
        });
    });
    let reader = TfRecordReader::open(&path).unwrap();
    group.bench_function("record", |bencher| {
        bencher.iter(|| {
            next = (next + 1667) % RECORDS;
            reader.read_into(next, &mut bytes).unwrap();
        });
    });
    group.finish();
    let mut group = criterion.benchmark_group("open");
    group.throughput(Throughput::Elements(RECORDS));
    group.bench_function("index", |bencher| {
        bencher.iter(|| TfRecordReader::open(&path).unwrap().len());
    });
    group.finish();
    std::fs::remove_file(&path).unwrap();
}

/// Writes a scalar, beside the append of a record of its length.
fn scalar(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scalar");
    let mut records = TfRecordWriter::with_output("sink", io::sink());
    group.bench_function("record", |bencher| {
        bencher.iter(|| records.append(black_box(&[7; 29])).unwrap());
    });
    let mut summaries = SummaryWriter::with_output("sink", io::sink()).unwrap();
    let mut step = 0;
    group.bench_function("summary", |bencher| {
        bencher.iter(|| {
            step += 1;
            summaries.scalar(step, "loss", black_box(0.5)).unwrap();
        });
    });
    group.finish();
}

/// Makes a histogram, beside the sum of the same values.
fn histogram(criterion: &mut Criterion) {
    let values: Vec<f32> = (0..VALUES).map(|i| ((i * 7919) % 1000) as f32 * 1e-3 - 0.5).collect();
    let mut group = criterion.benchmark_group("histogram");
    group.throughput(Throughput::Elements(VALUES as u64));
    group.bench_function("sum", |bencher| {
        bencher.iter(|| black_box(&values).iter().map(|&value| f64::from(value)).sum::<f64>());
    });
    group.bench_function("buckets", |bencher| {
        bencher.iter(|| SummaryHistogram::of(black_box(&values).iter().copied()));
    });
    group.finish();
}

criterion_group!(benches, append, get, scalar, histogram);
criterion_main!(benches);
