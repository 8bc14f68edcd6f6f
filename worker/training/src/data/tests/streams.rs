//! Streams of records: what is kept, and what is refused.

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use pushpull_common::error::Chain;

use crate::data::{
    Pipeline, Source, StreamAddress, StreamError, StreamInput, StreamLimits, StreamSource,
};

/// Returns the bytes of a stream.
fn stream<R: AsRef<[u8]>>(records: &[R]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for record in records {
        bytes.extend((record.as_ref().len() as u32).to_le_bytes());
        bytes.extend(record.as_ref());
    }
    bytes.extend(u32::MAX.to_le_bytes());
    bytes.extend((records.len() as u64).to_le_bytes());
    bytes
}

/// Reads a stream that must be refused.
fn refusal(limits: &StreamLimits, bytes: &[u8]) -> StreamError {
    limits.read("share", bytes).unwrap_err()
}

fn text(error: &StreamError) -> String {
    Chain(error).to_string()
}

const RECORDS: [&str; 4] = ["zero", "", "two", "three"];

fn check(source: &StreamSource) {
    assert_eq!((source.name(), source.len()), ("share", 4));
    for index in [3, 0, 1, 2, 0] {
        assert_eq!(source.get(index).unwrap(), RECORDS[index as usize].as_bytes());
    }
    let error = source.get(4).unwrap_err().to_string();
    assert_eq!(error, "cannot read sample 4 of \"share\": it has 4 samples");
}

#[test]
fn records_are_read_in_any_order_from_memory_and_from_a_file() {
    let bytes = stream(&RECORDS);
    check(&StreamSource::read("share", &bytes[..]).unwrap());
    let directory = tempfile::tempdir().unwrap();
    for memory_bytes_max in [0, 3, 4, 7, 11, 12] {
        let limits = StreamLimits::new().memory_bytes_max(memory_bytes_max);
        let limits = limits.spool_directory(directory.path());
        check(&limits.read("share", &bytes[..]).unwrap());
        assert_eq!(directory.path().read_dir().unwrap().count(), 0, "the file has no name");
    }
}

#[test]
fn a_worker_trains_on_its_whole_share_in_any_number_of_epochs() {
    let records: Vec<[u8; 1]> = (0..7).map(|number| [number]).collect();
    let source = StreamSource::read("share", &stream(&records)[..]).unwrap();
    let pipeline = Pipeline::new(source).shuffle(1).batch(2).epochs(3).map(|record| record[0]);
    let mut seen = [0; 7];
    for batch in pipeline.shard(0, 1).unwrap() {
        batch.unwrap().samples.iter().for_each(|&record| seen[usize::from(record)] += 1);
    }
    assert_eq!(seen, [3; 7]);
}

#[test]
fn a_stream_without_records_has_no_samples() {
    let source = StreamSource::read("share", &stream::<&str>(&[])[..]).unwrap();
    assert_eq!((source.len(), source.is_empty()), (0, true));
}

#[test]
fn a_stream_that_is_cut_anywhere_is_refused_with_its_position() {
    let bytes = stream(&RECORDS);
    // The ends of the four records.
    let ends = [8, 12, 19, 28];
    for cut in 0..bytes.len() {
        let error = refusal(&StreamLimits::new(), &bytes[..cut]);
        let whole = ends.iter().filter(|&&end| end <= cut).count() as u64;
        match &error {
            StreamError::Cut { stream, at, records } => {
                assert_eq!((&stream[..], *at, *records), ("share", cut as u64, whole));
            }
            error => panic!("cut at {cut}: {error:?}"),
        }
        let expected = format!(
            "cannot use the stream \"share\": it ends at byte {cut} without its end mark, behind {whole} \
             whole records"
        );
        assert_eq!(text(&error), expected);
    }
}

#[test]
fn bytes_behind_the_end_mark_are_refused() {
    let bytes = [stream(&RECORDS), stream(&RECORDS)].concat();
    let error = text(&refusal(&StreamLimits::new(), &bytes));
    let expected = "cannot use the stream \"share\": at byte 40 it goes on behind its end mark";
    assert_eq!(error, expected);
}

#[test]
fn an_end_mark_that_counts_other_records_is_refused() {
    for announced in [0, 3, 5, u64::MAX] {
        let mut bytes = stream(&RECORDS);
        bytes.truncate(32);
        bytes.extend(announced.to_le_bytes());
        let expected = format!(
            "cannot use the stream \"share\": its end mark at byte 28 counts {announced} records, and it \
             has 4"
        );
        assert_eq!(text(&refusal(&StreamLimits::new(), &bytes)), expected);
    }
}

#[test]
fn every_limit_is_reached_by_one_record_less() {
    let bytes = stream(&RECORDS);
    let cases = [
        (
            StreamLimits::new().record_bytes_max(5),
            StreamLimits::new().record_bytes_max(4),
            "record 3 at byte 19 has 5 bytes, of 4 at most",
        ),
        (
            StreamLimits::new().records_max(4),
            StreamLimits::new().records_max(3),
            "at byte 19 it has more than 3 records",
        ),
        (
            StreamLimits::new().bytes_max(12),
            StreamLimits::new().bytes_max(11),
            "at byte 19 its records have more than 11 bytes",
        ),
        (
            StreamLimits::new().memory_bytes_max(12),
            StreamLimits::new().memory_bytes_max(11),
            "at byte 19 its records have more than 11 bytes, the limit in memory; a longer stream needs a \
             directory for its file",
        ),
    ];
    for (enough, too_little, expected) in cases {
        check(&enough.read("share", &bytes[..]).unwrap());
        let expected = format!("cannot use the stream \"share\": {expected}");
        assert_eq!(text(&refusal(&too_little, &bytes)), expected);
    }
}

/// A length costs no memory before its bytes have come.
#[test]
fn a_length_without_its_bytes_is_a_cut_or_a_limit() {
    let longest = u32::MAX - 1;
    let bytes = [&longest.to_le_bytes()[..], b"few"].concat();
    let limits = StreamLimits::new().record_bytes_max(u32::MAX);
    assert!(matches!(refusal(&limits, &bytes), StreamError::Cut { at: 7, records: 0, .. }));
    let behind_another = [&4_u32.to_le_bytes()[..], b"zero", &bytes].concat();
    let error = text(&refusal(&StreamLimits::new(), &behind_another));
    assert!(error.contains("record 1 at byte 8 has 4294967294 bytes, of 16777216"), "{error}");
}

#[test]
fn a_stream_of_another_format_is_named() {
    let refused = |bytes: &[u8]| text(&refusal(&StreamLimits::new(), bytes));
    let expected = "expected records with their lengths";
    let csv = refused(b"label,x,y\n1,2,3\n");
    assert!(csv.contains("text") && csv.ends_with(expected), "{csv}");
    let packed = refused(&[&[0x28, 0xb5, 0x2f, 0xfd][..], &[7; 600]].concat());
    assert!(packed.contains("packed with zstd") && packed.ends_with(expected), "{packed}");
}

#[test]
fn no_bytes_make_it_panic_or_pass_for_a_stream() {
    let mut state = 1_u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    let limits = StreamLimits::new().memory_bytes_max(64);
    let whole = stream(&RECORDS);
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..=random() % 3 {
            let at = usize::from(random()) % bytes.len();
            bytes[at] = random();
        }
        // The bytes of records may be any; other changes are refused or make other records.
        if let Ok(source) = limits.read("share", &bytes[..]) {
            let records = (0..source.len()).map(|index| source.get(index).unwrap());
            let taken: usize = records.map(|record| 4 + record.len()).sum();
            assert_eq!((source.len(), taken + 12), (4, bytes.len()), "{bytes:?}");
        }
    }
}

/// Fails after its bytes.
struct Failing<'a>(&'a [u8]);

impl Read for Failing<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.0.read(out)? {
            0 => Err(io::ErrorKind::ConnectionReset.into()),
            read => Ok(read),
        }
    }
}

#[test]
fn a_failed_read_is_told_with_its_position() {
    let error = StreamSource::read("share", Failing(&stream(&RECORDS)[..30])).unwrap_err();
    let expected = "cannot read the stream \"share\" from byte 30 on: connection reset";
    assert_eq!(text(&error), expected);
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let limits = StreamLimits::new().memory_bytes_max(5).spool_directory("/nonexistent");
    let error = text(&refusal(&limits, &stream(&RECORDS)));
    let expected = "cannot keep the stream \"share\" in a file of /nonexistent: ";
    assert!(error.starts_with(expected), "{error}");
}

/// Longer than any wait of a test that passes.
const LONG: Duration = Duration::from_secs(60);

#[test]
fn pipes_and_sockets_are_read_to_their_end() {
    let bytes = stream(&RECORDS);
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(&bytes).unwrap();
    drop(writer);
    check(&StreamSource::read("share", StreamInput::new(reader, LONG)).unwrap());

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let unix = UnixListener::bind(&path).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let unix_address = format!("unix:{}", path.display());
    let tcp_address = format!("tcp:{}", tcp.local_addr().unwrap());
    let sent = bytes.clone();
    let feeder = std::thread::spawn(move || {
        unix.accept().unwrap().0.write_all(&sent).unwrap();
        tcp.accept().unwrap().0.write_all(&sent[..20]).unwrap();
    });
    let open = |address: &str| address.parse::<StreamAddress>().unwrap().open(LONG).unwrap();
    check(&StreamSource::read("share", open(&unix_address)).unwrap());
    let error = StreamSource::read("share", open(&tcp_address)).unwrap_err();
    assert!(matches!(error, StreamError::Cut { at: 20, records: 3, .. }), "{error:?}");
    feeder.join().unwrap();
}

#[test]
fn a_silent_writer_ends_the_wait() {
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(&stream(&RECORDS)).unwrap();
    // The end mark is there, and the end of the stream is not.
    let input = StreamInput::new(reader, Duration::from_millis(20));
    let error = text(&StreamSource::read("share", input).unwrap_err());
    let expected = "cannot read the stream \"share\" from byte 40 on: it was silent for 20ms";
    assert_eq!(error, expected);
    drop(writer);
}

#[test]
fn a_program_that_accepts_nobody_ends_the_wait() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("share");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address: StreamAddress = format!("unix:{}", path.display()).parse().unwrap();
    // One connection fits into the queue.
    let _queued = address.open(Duration::from_millis(20)).unwrap();
    let error = address.open(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, StreamError::Open { .. }), "{error:?}");
}

#[test]
fn a_socket_without_a_listener_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", directory.path().join("nobody").display());
    let opened = address.parse::<StreamAddress>().unwrap().open(Duration::from_millis(1));
    let error = text(&opened.unwrap_err());
    assert!(error.starts_with(&format!("cannot open the stream {address}: ")), "{error}");
}

#[test]
fn addresses_are_written_as_they_are_read() {
    for address in ["-", "unix:/run/share", "unix:relative", "tcp:host:1", "tcp:[::1]:1"] {
        assert_eq!(address.parse::<StreamAddress>().unwrap().to_string(), address);
    }
    for address in ["", "--", "unix:", "tcp:", "tcp:host", "http:host:1", "/a/path"] {
        let error = text(&address.parse::<StreamAddress>().unwrap_err());
        assert!(error.starts_with(&format!("cannot read {address:?}: expected -")), "{error}");
    }
}
