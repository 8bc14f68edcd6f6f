use std::io;

use proptest::prelude::*;
use pushpull_common::error::Chain;

use super::*;
use crate::append_buffer::tests::FullDisk;
use crate::tfrecord::TfRecordReader;

#[test]
fn the_bytes_of_records_are_known() {
    let disk = FullDisk::with_room(1 << 20);
    let mut writer = TfRecordWriter::with_output("memory", disk.clone());
    writer.append(b"").unwrap();
    writer.append(b"123456789").unwrap();
    writer.flush().unwrap();
    let expected = [
        // An empty record: its length and the CRC of that, no data and the CRC of nothing.
        &[0, 0, 0, 0, 0, 0, 0, 0, 0x29, 0x03, 0x98, 0x07, 0xd8, 0xea, 0x82, 0xa2][..],
        &[9, 0, 0, 0, 0, 0, 0, 0, 0x37, 0xf9, 0x71, 0x39],
        b"123456789",
        // The CRC32C of the digits is 0xe3069283: its check value in every catalogue of CRCs.
        &(0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8)).to_le_bytes(),
    ];
    assert_eq!(disk.contents(), expected.concat());
}

#[test]
fn records_wait_in_the_buffer_until_a_flush() {
    let disk = FullDisk::with_room(1 << 20);
    let mut writer = TfRecordWriter::with_output("memory", disk.clone());
    writer.append(b"one").unwrap();
    assert_eq!((writer.buffered(), disk.contents().len()), (1, 0));
    writer.flush().unwrap();
    assert_eq!((writer.buffered(), disk.contents().len()), (0, 19));
    writer.append(b"two").unwrap();
    drop(writer);
    assert_eq!(disk.contents().len(), 38, "a dropped writer flushes");
}

#[test]
fn a_full_disk_refuses_records_and_tears_none() {
    // Room for one record and a part of the next.
    let disk = FullDisk::with_room(25);
    let mut writer = TfRecordWriter::with_output("disk/a", disk.clone());
    writer.append(b"one").unwrap();
    writer.append(b"two").unwrap();
    let error = writer.flush().unwrap_err();
    assert!(Chain(&error).to_string().starts_with("cannot write records to disk/a: "), "{error}");
    assert_eq!(writer.buffered(), 1, "the first record is in the file");

    // The buffer takes what fits, and then refuses.
    let long = vec![7; AppendBuffer::<FullDisk>::BYTES];
    let error = writer.append(&long).unwrap_err();
    assert!(matches!(error, TfRecordError::Write { .. }), "{error}");
    assert_eq!(writer.buffered(), 1);

    disk.add_room(2 * AppendBuffer::<FullDisk>::BYTES);
    writer.append(&long).unwrap();
    writer.flush().unwrap();
    let file = file_with(&disk.contents());
    let reader = TfRecordReader::open(file.path()).unwrap();
    let records: Vec<_> = reader.iter().map(Result::unwrap).collect();
    assert_eq!(records, [b"one".to_vec(), b"two".to_vec(), long]);
    assert_eq!(reader.torn_tail(), None);
}

#[test]
fn a_failing_disk_bounds_the_buffer() {
    let disk = FullDisk::default();
    let mut writer = TfRecordWriter::with_output("memory", disk);
    let accepted = (0..100_000).filter(|_| writer.append(&[1; 100]).is_ok()).count();
    assert_eq!(accepted, AppendBuffer::<FullDisk>::BYTES / 116);
    assert!(writer.output.memory_bytes() <= 2 * AppendBuffer::<FullDisk>::BYTES);
}

#[test]
fn an_existing_file_is_never_changed() {
    let file = file_with(b"text");
    let error = TfRecordWriter::create(file.path()).unwrap_err();
    let TfRecordError::Create { path, source } = &error else { panic!("{error}") };
    assert_eq!((path.as_path(), source.kind()), (file.path(), io::ErrorKind::AlreadyExists));
    assert_eq!(std::fs::read(file.path()).unwrap(), b"text");
}

#[test]
fn after_a_failed_sync_nothing_is_accepted() {
    // The device takes writes, but `fdatasync` of it fails.
    let device = OpenOptions::new().write(true).open("/dev/null").unwrap();
    let mut writer = TfRecordWriter::with_output("/dev/null", device);
    writer.append(b"one").unwrap();
    let Err(error) = writer.sync() else { panic!("/dev/null can be synced") };
    assert!(matches!(error, TfRecordError::Sync { .. }), "{error}");
    let errors = [writer.append(b"two"), writer.flush(), writer.sync()];
    for error in errors.map(Result::unwrap_err) {
        assert_eq!(
            error.to_string(),
            "cannot write records to /dev/null: an earlier sync of it failed"
        );
    }
}

/// Writes one byte, fails, or is interrupted, in turn.
struct Trickle(Vec<u8>, usize);

impl Write for Trickle {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1 += 1;
        match self.1 % 3 {
            0 => Err(io::ErrorKind::Interrupted.into()),
            1 => Err(io::ErrorKind::StorageFull.into()),
            _ => {
                let count = bytes.len().min(1 + self.1 % 7);
                self.0.extend_from_slice(&bytes[..count]);
                Ok(count)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

proptest! {
    /// Failures at any byte neither tear nor repeat a record.
    #[test]
    fn failures_at_any_byte_leave_whole_records(
        records in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..20),
    ) {
        let mut writer = TfRecordWriter::with_output("memory", Trickle(Vec::new(), 0));
        for record in &records {
            writer.append(record).unwrap();
            let _ = writer.flush();
        }
        while writer.flush().is_err() {}
        let file = file_with(&writer.output.output_mut().0);
        let reader = TfRecordReader::open(file.path()).unwrap();
        let read: Vec<_> = reader.iter().map(Result::unwrap).collect();
        prop_assert_eq!(read, records);
    }
}

/// Makes a file with these bytes.
pub(crate) fn file_with(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}
