use proptest::prelude::*;
use pushpull_common::error::Chain;

use super::*;
use crate::append_buffer::tests::FullDisk;
use crate::tfrecord::TfRecordWriter;
use crate::tfrecord::writer::tests::file_with;

/// Returns the bytes of a file with these records.
fn encode(records: &[Vec<u8>]) -> Vec<u8> {
    let disk = FullDisk::with_room(usize::MAX);
    let mut writer = TfRecordWriter::with_output("memory", disk.clone());
    records.iter().for_each(|record| writer.append(record).unwrap());
    drop(writer);
    disk.contents()
}

fn records() -> impl Strategy<Value = Vec<Vec<u8>>> {
    // Behind some records the index pass reads only a head, and some are longer than its window.
    let record = prop_oneof![
        8 => proptest::collection::vec(any::<u8>(), 0..40),
        2 => proptest::collection::vec(any::<u8>(), 1900..2200),
        1 => proptest::collection::vec(any::<u8>(), 16_000..20_000),
    ];
    proptest::collection::vec(record, 1..12)
}

#[test]
fn an_empty_file_has_no_records() {
    let file = file_with(b"");
    let reader = TfRecordReader::open(file.path()).unwrap();
    assert_eq!((reader.len(), reader.is_empty(), reader.torn_tail()), (0, true, None));
    for record in [0, 1, u64::MAX - 1, u64::MAX] {
        let error = reader.get(record).unwrap_err();
        assert!(
            matches!(error, TfRecordError::NoRecord { record: r, records: 0, .. } if r == record)
        );
    }
}

#[test]
fn a_missing_file_is_named() {
    let error = TfRecordReader::open("missing/train.tfrecord").unwrap_err();
    assert!(
        Chain(&error).to_string().starts_with("cannot open missing/train.tfrecord: "),
        "{error}"
    );
}

#[test]
fn only_a_regular_file_is_opened() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for (path, kind) in [
        (directory.path().to_owned(), "a directory"),
        (pipe, "a pipe"),
        (socket, "a socket"),
        ("/dev/zero".into(), "a device"),
    ] {
        let error = TfRecordReader::open(&path).unwrap_err().to_string();
        let path = path.display();
        assert_eq!(error, format!("cannot open {path}: it is {kind}, expected a regular file"));
    }
}

#[test]
fn a_length_beyond_the_file_is_not_trusted() {
    let mut bytes = encode(&[b"one".to_vec()]);
    for length in [1, 1 << 20, u64::from(u32::MAX), i64::MAX as u64, u64::MAX - 15, u64::MAX] {
        bytes.truncate(19);
        bytes.extend_from_slice(&RecordHead::new(length).0);
        bytes.extend_from_slice(&[0; 4]);
        let file = file_with(&bytes);
        let reader = TfRecordReader::open(file.path()).unwrap();
        assert_eq!(reader.torn_tail(), Some(TornTail { records: 1, offset: 19, bytes: 16 }));
        assert_eq!(reader.get(0).unwrap(), b"one");
    }
}

#[test]
fn a_record_above_the_limit_leaves_the_others() {
    let file = file_with(&encode(&[vec![1; 10], vec![2; 11], vec![3; 10]]));
    let reader = TfRecordReader::open(file.path()).unwrap().record_bytes_max(10);
    let read: Vec<_> = reader.iter().map(|record| record.map(|data| data[0])).collect();
    assert!(matches!(&read[..], [Ok(1), Err(_), Ok(3)]));
    assert_eq!(
        read[1].as_ref().unwrap_err().to_string(),
        format!(
            "cannot read record 1 at byte 26 of {}: it has 11 bytes, and at most 10 are accepted",
            file.path().display()
        )
    );
}

#[test]
fn a_file_that_shrinks_is_an_error() {
    let file = file_with(&encode(&[vec![1; 10], vec![2; 10]]));
    let reader = TfRecordReader::open(file.path()).unwrap();
    file.as_file().set_len(30).unwrap();
    let mut data = b"before".to_vec();
    let error = reader.read_into(1, &mut data).unwrap_err();
    assert!(matches!(error, TfRecordError::Read { record: 1, offset: 26, .. }), "{error}");
    assert!(data.is_empty());
    assert_eq!(reader.get(0).unwrap(), [1; 10]);
}

#[test]
fn appended_records_appear_at_the_next_open() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.tfrecord");
    let mut writer = TfRecordWriter::create(&path).unwrap();
    writer.append(b"one").unwrap();
    writer.sync().unwrap();
    let reader = TfRecordReader::open(&path).unwrap();
    writer.append(b"two").unwrap();
    writer.sync().unwrap();
    assert_eq!(reader.len(), 1);
    assert_eq!(reader.get(0).unwrap(), b"one");
    assert_eq!(TfRecordReader::open(&path).unwrap().len(), 2);
    assert_eq!(fs::metadata(&path).unwrap().len(), 38);
}

#[test]
fn a_file_of_another_format_is_named() {
    let cases: [(&[u8], &str); 10] = [
        (b"\x1f\x8b\x08\0", "packed with gzip"),
        (b"text", "text"),
        (b"id,x\n1,2\n", "text"),
        (b"{\"x\": 1}\n", "JSON"),
        (b"PK\x05\x06\0\0\0\0\0\0\0\0\0\0\0", "an empty zip archive"),
        (&[0; 30], "filled with zeros, as a file whose writer was interrupted is"),
        (b"\x1f\x8b\x08\0\0\0\0\0\x02\x03cf\x80\x80\x0d3", "packed with gzip"),
        (b"<html><body>not found</body></html>", "an HTML page, perhaps an error of a download"),
        (b"\x37\0\0\0\0\0\0\0{\"w\":{\"dtype\":", "a safetensors file"),
        (b"id,x\n1,2\n3,4\n5,6\n", "text"),
    ];
    for (bytes, kind) in cases {
        let file = file_with(bytes);
        let error = TfRecordReader::open(file.path()).unwrap_err();
        assert!(
            matches!(&error, TfRecordError::OtherFormat { found, .. } if found == kind),
            "{error}"
        );
    }
    // Behind a long record, only the head is read.
    for record in [vec![1; 5], vec![1; 20_000]] {
        for (tail, kind) in [
            (vec![0; 64], "filled with zeros, as a file whose writer was interrupted is"),
            (b"a line of text\nand another\n".to_vec(), "text"),
            (b"\x1f\x8b\x08\0\0\0\0\0\x02\x03cf\x80\x80\x0d3".to_vec(), "packed with gzip"),
        ] {
            let bytes = [encode(std::slice::from_ref(&record)), tail].concat();
            let file = file_with(&bytes);
            let error = TfRecordReader::open(file.path()).unwrap_err().to_string();
            let path = file.path().display();
            let at = record.len() + 16;
            let expected = format!("cannot read record 1 at byte {at} of {path}: it is {kind}");
            assert_eq!(error, expected);
        }
    }
    // The first bytes of a record that was cut may be letters.
    for bytes in [&b"tex"[..], b"t\0\0\0", &encode(&[vec![1; 0x7465]])[..11]] {
        let reader = TfRecordReader::open(file_with(bytes).path()).unwrap();
        assert_eq!(reader.torn_tail().map(|tail| tail.bytes), Some(bytes.len() as u64));
    }
    let error = Chain(&TfRecordReader::open("gs://bucket/x.tfrecord").unwrap_err()).to_string();
    assert!(error.contains("the scheme \"gs\" of \"gs://bucket/x.tfrecord\""), "{error}");
    let error = Chain(&TfRecordWriter::create("gs://bucket/x.tfrecord").unwrap_err()).to_string();
    assert!(error.contains("the scheme \"gs\""), "{error}");
}

proptest! {
    #[test]
    fn records_are_read_in_any_order(records in records(), order in any::<u64>()) {
        let file = file_with(&encode(&records));
        let reader = TfRecordReader::open(file.path()).unwrap();
        prop_assert_eq!(reader.len(), records.len() as u64);
        prop_assert_eq!(reader.torn_tail(), None);
        for step in 0..records.len() as u64 {
            let record = order.wrapping_add(step.wrapping_mul(7)) % reader.len();
            prop_assert_eq!(&reader.get(record).unwrap(), &records[record as usize]);
        }
    }

    /// A file that ends anywhere has the whole records before, and a tail of the rest.
    #[test]
    fn a_torn_tail_is_measured(records in records(), cut in any::<prop::sample::Index>()) {
        let bytes = encode(&records);
        let cut = cut.index(bytes.len() + 1);
        let mut ends = records.iter().scan(0, |end, record| {
            *end += 16 + record.len();
            Some(*end)
        });
        let whole = ends.by_ref().take_while(|&end| end <= cut).count();
        let start: usize = records[..whole].iter().map(|record| 16 + record.len()).sum();
        let file = file_with(&bytes[..cut]);
        let reader = TfRecordReader::open(file.path()).unwrap();
        let read: Vec<_> = reader.iter().map(Result::unwrap).collect();
        prop_assert_eq!(&read[..], &records[..whole]);
        let tail = TornTail {
            records: whole as u64,
            offset: start as u64,
            bytes: (cut - start) as u64,
        };
        prop_assert_eq!(reader.torn_tail(), (cut > start).then_some(tail));
    }

    /// One flipped bit is found, and named by record and offset. Other records are readable.
    #[test]
    fn a_flipped_bit_is_found(records in records(), bit in any::<prop::sample::Index>()) {
        let mut bytes = encode(&records);
        let bit = bit.index(8 * bytes.len());
        bytes[bit / 8] ^= 1 << (bit % 8);
        let ends: Vec<usize> = records.iter().scan(0, |end, record| {
            *end += 16 + record.len();
            Some(*end)
        }).collect();
        let damaged = ends.iter().filter(|&&end| end <= bit / 8).count();
        let start = if damaged == 0 { 0 } else { ends[damaged - 1] };
        let file = file_with(&bytes);
        let found = |record: u64, offset: u64| (record, offset) == (damaged as u64, start as u64);
        match TfRecordReader::open(file.path()) {
            Err(TfRecordError::DamagedLength { record, offset, .. }) => {
                prop_assert!(found(record, offset) && bit / 8 < start + RecordHead::BYTES);
            }
            Err(error) => panic!("{error}"),
            Ok(reader) => for (index, record) in reader.iter().enumerate() {
                match record {
                    Ok(data) => prop_assert!(index != damaged && data == records[index]),
                    Err(TfRecordError::DamagedData { record, offset, .. }) => {
                        prop_assert!(index == damaged && found(record, offset));
                    }
                    Err(error) => panic!("{error}"),
                }
            },
        }
    }

    /// Any bytes give an index, a torn tail or an error: no panic, and no memory beyond the file.
    #[test]
    fn any_bytes_are_handled(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let file = file_with(&bytes);
        if let Ok(reader) = TfRecordReader::open(file.path()) {
            prop_assert!(reader.iter().all(|record| record.is_ok_and(|data| data.len() < 200)
                || !bytes.is_empty()));
        }
    }
}
