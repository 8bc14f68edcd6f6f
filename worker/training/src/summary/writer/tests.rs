use std::time::Duration;

use pushpull_common::error::Chain;

use super::*;
use crate::append_buffer::tests::FullDisk;
use crate::tfrecord::TfRecordReader;

/// Returns the records of each event file in a directory, in the order of the names.
fn files(directory: &Path) -> Vec<Vec<Vec<u8>>> {
    let mut names = file_names(directory).unwrap();
    names.retain(|name| name.contains("tfevents"));
    names.sort();
    let readers = names.iter().map(|name| TfRecordReader::open(directory.join(name)).unwrap());
    readers.map(|reader| reader.iter().map(Result::unwrap).collect()).collect()
}

/// Whether a record is an event with this tag.
fn has_tag(record: &[u8], tag: &str) -> bool {
    let field = [&[0x0a, tag.len() as u8], tag.as_bytes()].concat();
    record.windows(field.len()).any(|window| window == field)
}

#[test]
fn every_summary_is_one_record() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("logs/run-1");
    let config = SummaryConfig::new().json_lines(true);
    let mut writer = SummaryWriter::create(&directory, config).unwrap();
    writer.begin_run(&Hyperparameters::new().set("rate", 0.5)).unwrap();
    writer.scalar(1, "loss", 0.5_f32).unwrap();
    writer.scalar(1, "accuracy", 1).unwrap();
    writer.histogram(2, "weights", &SummaryHistogram::of([1.0])).unwrap();
    writer.text(3, "notes", "hi").unwrap();
    let image = SummaryImage::from_png(super::super::image::tests::WHITE).unwrap();
    writer.image(4, "input", &image).unwrap();
    writer.end_run(RunStatus::Success).unwrap();
    assert_eq!((writer.attempted(), writer.accepted(), writer.buffered()), (8, 8, 8));
    writer.sync().unwrap();
    assert_eq!(writer.buffered(), 0);
    let files = files(&directory);
    let tags = [
        "_hparams_/experiment",
        "_hparams_/session_start_info",
        "loss",
        "accuracy",
        "weights",
        "notes",
        "input",
        "_hparams_/session_end_info",
    ];
    assert_eq!((files.len(), files[0].len()), (1, 1 + tags.len()));
    assert!(files[0][0].ends_with(b"brain.Event:2"));
    assert!(files[0][1..].iter().zip(tags).all(|(record, tag)| has_tag(record, tag)));

    let names = file_names(&directory).unwrap();
    let lines = names.iter().find(|name| name.ends_with(".jsonl")).unwrap();
    let lines = fs::read_to_string(directory.join(lines)).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<serde_json::Value> = lines.collect();
    assert!(lines.iter().map(|line| line["tag"].as_str().unwrap()).eq(tags));
    assert_eq!((&lines[2]["step"], &lines[2]["value"]), (&1.into(), &0.5.into()));
}

#[test]
fn each_writer_begins_a_file_of_its_own() {
    let root = tempfile::tempdir().unwrap();
    let write = |tag: &str| {
        let config = SummaryConfig::new().json_lines(true);
        let mut writer = SummaryWriter::create(root.path(), config).unwrap();
        writer.scalar(0, tag, 0.5).unwrap();
        writer.path().to_owned()
    };
    std::thread::scope(|scope| {
        for name in ["a", "b", "c", "d"] {
            scope.spawn(move || (0..5).for_each(|index| _ = write(&format!("{name}{index}"))));
        }
    });
    let files = files(root.path());
    assert_eq!(files.len(), 20);
    assert!(files.iter().all(|records| records.len() == 2));
    let names = file_names(root.path()).unwrap();
    assert_eq!(names.len(), 40, "each has lines of its own");
}

#[test]
fn a_file_with_a_torn_end_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let mut writer = SummaryWriter::create(root.path(), SummaryConfig::new()).unwrap();
    writer.scalar(1, "before", 0.5).unwrap();
    writer.sync().unwrap();
    let torn = writer.path().to_owned();
    drop(writer);
    let size = fs::metadata(&torn).unwrap().len();
    OpenOptions::new().write(true).open(&torn).unwrap().set_len(size - 3).unwrap();

    let mut writer = SummaryWriter::create(root.path(), SummaryConfig::new()).unwrap();
    assert!(writer.path() > torn.as_path(), "TensorBoard reads it after the torn one");
    writer.scalar(2, "after", 0.5).unwrap();
    drop(writer);
    assert_eq!(fs::metadata(&torn).unwrap().len(), size - 3);
    let files = files(root.path());
    assert_eq!((files[0].len(), files[1].len()), (1, 2));
    assert!(has_tag(&files[1][1], "after"));
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for directory in [file.path().to_owned(), file.path().join("run")] {
        let error = SummaryWriter::create(&directory, SummaryConfig::new()).unwrap_err();
        let SummaryError::Directory { path, .. } = &error else { panic!("{error}") };
        assert_eq!(*path, directory);
    }
    // Files cannot be created there, also not by root.
    let error = SummaryWriter::create("/proc/self", SummaryConfig::new()).unwrap_err();
    let SummaryError::Create { path, .. } = &error else { panic!("{error}") };
    assert!(
        path.starts_with("/proc/self/") && error.to_string().starts_with("cannot create /proc")
    );
}

#[test]
fn a_write_flushes_when_the_interval_has_passed() {
    let disk = FullDisk::with_room(1 << 20);
    let events = TfRecordWriter::with_output("disk/events", disk.clone());
    let lines = JsonLines::new("disk/lines", disk.clone());
    let config = SummaryConfig::new().flush_every(Duration::from_secs(10));
    let mut writer = SummaryWriter::begin(events, Some(lines), config).unwrap();
    let start = writer.last_flush_s;
    let event = |seconds: i32| SummaryEvent {
        wall_time_s: start + f64::from(seconds),
        step: 1,
        tag: "t",
        value: SummaryValue::Scalar(0.5),
    };
    let table = [(0, 1), (9, 2), (10, 0), (19, 1), (20, 0), (40, 0), (41, 1), (35, 2), (25, 0)];
    for (seconds, buffered) in table {
        writer.write_event(&event(seconds)).unwrap();
        assert_eq!(writer.buffered(), buffered, "at {seconds} s");
    }
}

#[test]
fn lines_that_cannot_be_written_are_an_error() {
    let events = TfRecordWriter::with_output("disk/events", FullDisk::with_room(1 << 20));
    let lines = JsonLines::new("disk/lines", FullDisk::with_room(10));
    let config = SummaryConfig::new().flush_every(Duration::ZERO);
    let mut writer = SummaryWriter::begin(events, Some(lines), config).unwrap();
    let error = writer.scalar(1, "t", 0.5).unwrap_err();
    assert!(Chain(&error).to_string().starts_with("cannot write lines to disk/lines: "), "{error}");
    assert_eq!((writer.accepted(), writer.buffered(), writer.events.buffered()), (1, 1, 0));
}

/// A remote directory would become a folder `s3:` here, and be lost with the machine.
#[test]
fn a_directory_with_a_scheme_is_refused_and_none_is_made() {
    let error = SummaryWriter::create("s3://bucket/run", SummaryConfig::new()).unwrap_err();
    assert!(matches!(&error, SummaryError::Directory { .. }), "{error:?}");
    let expected = "the scheme \"s3\" of \"s3://bucket/run\" is not supported";
    assert!(Chain(&error).to_string().contains(expected), "{error}");
    assert!(!Path::new("s3:").exists());
}
