//! The data pipeline beside the bare reader of the same file, in one run (`cargo bench -p benches
//! --bench data`).
//!
//! Each line is the fastest of several epochs, which alternate with those of the bare reader: other
//! work on the machine slows either down. The last column is the speed as a part of the bare
//! reader's, the ceiling.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::fs::{self, File};
use std::hint::black_box;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use pushpull::training::data::{CsvFormat, CsvRow, CsvSource, IdxSource, Pipeline, Source};

/// The samples of a batch.
const BATCH: u32 = 128;

/// The columns that are parsed.
const COLUMNS: [&str; 8] = ["x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7"];

/// The bytes of a sample of the IDX file.
const PIXELS: usize = 784;

fn main() {
    // `cargo bench -- --test` runs everything once, on little data.
    let is_test = std::env::args().any(|argument| argument == "--test");
    let (rounds, samples) = if is_test { (1, 1_000) } else { (40, 60_000) };
    let directory = tempfile::tempdir().unwrap();
    csv_rows(&csv_file(directory.path(), 2 * samples), rounds);
    idx_samples(&idx_files(directory.path(), samples), rounds);
}

fn csv_rows(path: &Path, rounds: usize) {
    let bytes = fs::metadata(path).unwrap().len();
    let started = Instant::now();
    let source = || CsvSource::open(path).unwrap().columns(COLUMNS).unwrap();
    let memory = Pipeline::new(source()).batch(BATCH);
    println!(
        "csv: open and index {:.0} MB/s",
        bytes as f64 / 1e6 / started.elapsed().as_secs_f64()
    );

    // Both sides visit the text of each field.
    let len = |row: CsvRow| row.texts::<8>().unwrap().iter().map(|t| t.len()).sum::<usize>();
    let bare_len = |record: &csv::ByteRecord| {
        record.iter().skip(1).map(|field| std::str::from_utf8(field).unwrap().len()).sum::<usize>()
    };
    let read = compare("csv rows, 8 texts each", bytes, rounds, || bare_csv(path, bare_len));
    let texts = memory.clone().map(len);
    for threads in [0, 1] {
        read(&format!("{threads} threads"), &mut || epoch(&texts.clone().threads(threads)));
    }
    let parse = |row: CsvRow| row.parse_all::<f32>();
    let memory = memory.try_map(parse);
    let disk = CsvSource::open_as(path, CsvFormat::new().memory_bytes_max(0)).unwrap();
    let disk = Pipeline::new(disk.columns(COLUMNS).unwrap()).batch(BATCH).try_map(parse);
    let read = compare("csv rows, 8 numbers each", bytes, rounds, || bare_csv(path, numbers));
    for threads in [0, 1] {
        read(&format!("{threads} threads"), &mut || epoch(&memory.clone().threads(threads)));
    }
    read("0 threads, shuffled", &mut || epoch(&memory.clone().threads(0).shuffle(7)));
    read("0 threads, from disk", &mut || epoch(&disk.clone().threads(0)));
}

fn idx_samples((samples, labels): &(PathBuf, PathBuf), rounds: usize) {
    let bytes = fs::metadata(samples).unwrap().len();
    // Both sides add up the bytes of each sample.
    let total = |(sample, _): <IdxSource as Source>::Sample| sum(&sample);
    let memory = Pipeline::new(IdxSource::open(samples, labels).unwrap()).batch(BATCH).map(total);
    let disk = IdxSource::open_within(samples, labels, 0).unwrap();
    let disk = Pipeline::new(disk).batch(BATCH).map(total);
    for (name, bare) in [
        ("idx samples, beside reads of one batch", bare_batches as fn(&Path) -> u64),
        ("idx samples, beside reads of one sample", bare_samples),
    ] {
        let read = compare(name, bytes, rounds, || bare(samples));
        for threads in [0, 1] {
            read(&format!("{threads} threads"), &mut || epoch(&memory.clone().threads(threads)));
        }
        read("0 threads, shuffled", &mut || epoch(&memory.clone().threads(0).shuffle(7)));
        read("0 threads, from disk", &mut || epoch(&disk.clone().threads(0)));
    }
}

/// Returns a function that times an epoch beside the bare reader, and prints both.
fn compare(
    name: &str,
    bytes: u64,
    rounds: usize,
    bare: impl Fn() -> u64,
) -> impl Fn(&str, &mut dyn FnMut() -> u64) {
    println!("{name}");
    move |label, pipeline| {
        let mut of_bare = Vec::new();
        let mut of_pipeline = Vec::new();
        for _ in 0..rounds {
            let started = Instant::now();
            let expected = bare();
            of_bare.push(started.elapsed().as_secs_f64());
            let started = Instant::now();
            assert_eq!(pipeline(), expected, "as many samples");
            of_pipeline.push(started.elapsed().as_secs_f64());
        }
        let fastest = |times: Vec<f64>| times.into_iter().fold(f64::MAX, f64::min);
        let speed = |times| bytes as f64 / 1e6 / fastest(times);
        let bare = speed(of_bare);
        let pipeline = speed(of_pipeline);
        println!(
            "  {label:<22} {pipeline:>7.0} MB/s   bare {bare:>7.0} MB/s   ratio {:.2}",
            pipeline / bare
        );
    }
}

/// Reads an epoch, and returns the number of its samples.
fn epoch<T: Send + 'static>(pipeline: &Pipeline<T>) -> u64 {
    let batches = pipeline.shard(0, 1).unwrap();
    batches.map(|batch| black_box(batch.unwrap()).len() as u64).sum()
}

/// Reads all rows with the csv crate into one record, and makes a sample of each.
fn bare_csv<T>(path: &Path, sample: impl Fn(&csv::ByteRecord) -> T) -> u64 {
    let mut reader = csv::Reader::from_path(path).unwrap();
    let mut record = csv::ByteRecord::new();
    let mut count = 0;
    let mut batch = Vec::with_capacity(BATCH as usize);
    while reader.read_byte_record(&mut record).unwrap() {
        batch.push(sample(black_box(&record)));
        count += 1;
        if batch.len() == BATCH as usize {
            black_box(&batch);
            batch.clear();
        }
    }
    count
}

fn numbers(record: &csv::ByteRecord) -> Vec<f32> {
    let number = |field| std::str::from_utf8(field).unwrap().parse().unwrap();
    record.iter().skip(1).map(number).collect()
}

/// Reads the bytes of an IDX file into one buffer, a batch at a time.
fn bare_batches(path: &Path) -> u64 {
    let mut file = File::open(path).unwrap();
    file.read_exact(&mut [0; 16]).unwrap();
    let mut buffer = vec![0; BATCH as usize * PIXELS];
    let mut bytes = 0;
    loop {
        let read = file.read(&mut buffer).unwrap();
        buffer[..read].chunks(PIXELS).for_each(|sample| _ = black_box(sum(sample)));
        bytes += read;
        if read == 0 {
            return (bytes / PIXELS) as u64;
        }
    }
}

/// Reads the samples of an IDX file, each into memory of its own.
fn bare_samples(path: &Path) -> u64 {
    let mut file = BufReader::with_capacity(1 << 16, File::open(path).unwrap());
    file.read_exact(&mut [0; 16]).unwrap();
    let mut batch = Vec::with_capacity(BATCH as usize);
    let mut count = 0;
    loop {
        let mut sample = vec![0; PIXELS];
        if file.read_exact(&mut sample).is_err() {
            return count;
        }
        black_box(sum(&sample));
        batch.push(sample);
        count += 1;
        if batch.len() == BATCH as usize {
            black_box(&batch);
            batch.clear();
        }
    }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().map(|&byte| u64::from(byte)).sum()
}

/// Writes a file of an id and 8 numbers a row.
fn csv_file(directory: &Path, rows: u64) -> PathBuf {
    let path = directory.join("rows.csv");
    let mut file = BufWriter::new(File::create(&path).unwrap());
    writeln!(file, "id,{}", COLUMNS.join(",")).unwrap();
    for row in 0..rows {
        write!(file, "{row}").unwrap();
        for column in 0..8 {
            let value = (row * 7919 + column * 104_729) % 2_000_003;
            write!(file, ",{}", value as f64 / 1000.0 - 1000.0).unwrap();
        }
        writeln!(file).unwrap();
    }
    file.flush().unwrap();
    path
}

/// Writes a file of samples and one of labels.
fn idx_files(directory: &Path, samples: u64) -> (PathBuf, PathBuf) {
    let header = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect();
    let write = |name: &str, mut bytes: Vec<u8>, len: u64| {
        bytes.extend((0..len).map(|at| (at % 251) as u8));
        let path = directory.join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let count = samples as u32;
    (
        write("images", header(&[0x0803, count, 28, 28]), samples * PIXELS as u64),
        write("labels", header(&[0x0801, count]), samples),
    )
}
