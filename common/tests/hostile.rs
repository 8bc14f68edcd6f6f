//! Frames that no correct peer sends, one file each. The reader refuses each with its typed error.
//!
//! The files are in `hostile/`, whose `README.md` has a table of the faults. This test makes them:
//! `PUSHPULL_BLESS=1 cargo test -p pushpull-common --test hostile` writes files and table again.

mod drip;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TokenId};
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{
    BodyCrc, Collective, Declare, Heartbeat, Hello, Operation, Pull, PushPart, Refused, RingCodec,
    RingEnd, RingJoin, RingOperation, RingOver, RingPart, Role, Selection,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyStamp, Envelope, FrameReader, Header, Message, Refusal, encode, limits,
};

use drip::{Drip, take_all};

/// One file, and the error that a reader reports for it.
struct HostileCase {
    name: &'static str,
    wrong: &'static str,
    /// The start of the error's `Debug` output, up to the first value.
    expected: &'static str,
    /// The start of the error's output after the handshake, where it differs.
    opened: Option<&'static str>,
    bytes: Vec<u8>,
}

fn case(
    name: &'static str,
    wrong: &'static str,
    expected: &'static str,
    bytes: Vec<u8>,
) -> HostileCase {
    HostileCase { name, wrong, expected, opened: None, bytes }
}

fn cases() -> Vec<HostileCase> {
    let mut cases = other_protocols();
    cases.extend(headers());
    cases.extend(checksums());
    cases.extend(cuts());
    cases.extend(metas());
    cases.extend(rings());
    cases
}

/// Bytes of other protocols, and bytes of none.
fn other_protocols() -> Vec<HostileCase> {
    let magic = "Magic {";
    let http = b"GET / HTTP/1.1\r\nHost: localhost:2222\r\nUser-Agent: a browser\r\n\
                 Accept: */*\r\nConnection: keep-alive\r\n\r\n";
    // Record, handshake and version of a TLS 1.2 client hello. The reader does not get further.
    let mut tls = vec![0x16, 3, 1, 0, 0xc8, 1, 0, 0, 0xc4, 3, 3];
    tls.extend(noise(0x7a5, 192));
    vec![
        case("http_request", "an HTTP request", magic, http.to_vec()),
        case("tls_client_hello", "a TLS client hello", magic, tls),
        case("zeros", "160 zeros", magic, vec![0; 160]),
        case("garbage", "4 KiB of noise", magic, noise(0x9a5, 4096)),
        case("bad_magic", "the magic in big-endian order", magic, {
            let mut bytes = frame(&hello().into());
            bytes[..4].reverse();
            mend(bytes)
        }),
    ]
}

/// Headers with a correct checksum and a wrong field.
fn headers() -> Vec<HostileCase> {
    let patched = |at: usize, bytes: &[u8]| {
        let mut frame = frame(&hello().into());
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        mend(frame)
    };
    let over = (limits::HANDSHAKE_META_BYTES_MAX + 1).to_le_bytes();
    let cut = Some("Cut { bytes: 80 }");
    vec![
        case("version_unknown", "version 65535", "Version {", patched(4, &[0xff; 2])),
        case(
            "version_zero",
            "version 0, which was never released",
            "Version {",
            patched(4, &[0; 2]),
        ),
        case(
            "kind_unknown",
            "message kind 9999",
            "Kind { found: 9999 }",
            patched(6, &[0x0f, 0x27]),
        ),
        case("kind_zero", "message kind 0", "Kind { found: 0 }", patched(6, &[0; 2])),
        case("flag_unknown", "flag 2", "Flags { found: 2 }", patched(12, &[2])),
        case(
            "meta_too_long",
            "a meta of 2^32 - 1 bytes",
            "TooLong { what: \"its meta\"",
            patched(8, &[0xff; 4]),
        ),
        HostileCase {
            opened: cut,
            ..case(
                "meta_too_long_for_a_stranger",
                "a meta one byte above the limit before the handshake",
                "TooLong { what: \"its meta\"",
                patched(8, &over)[..Header::BYTES].to_vec(),
            )
        },
        case(
            "body_too_long",
            "a push part with a body of 2^64 - 1 bytes",
            "TooLong { what: \"its body\"",
            with_body_length(&part().into(), u64::MAX),
        ),
        case(
            "body_one_too_long",
            "a push part with a body one byte above the limit",
            "TooLong { what: \"its body\"",
            with_body_length(&part().into(), limits::PART_BYTES_MAX + 1),
        ),
        case(
            "body_not_allowed",
            "a heartbeat with a body",
            "TooLong { what: \"its body\"",
            with_body_length(&Heartbeat {}.into(), 1),
        ),
        case(
            "config_epoch_set",
            "a reserved field is not 0",
            "Invalid { message: \"header\", field: \"config epoch\"",
            patched(36, &[1]),
        ),
        case(
            "auth_set",
            "a reserved field is not 0",
            "Invalid { message: \"header\", field: \"auth\"",
            patched(64, &[1]),
        ),
        case(
            "body_crc_without_flag",
            "a body checksum without the flag for it",
            "Invalid { message: \"header\", field: \"body CRC",
            patched(60, &[1]),
        ),
    ]
}

fn checksums() -> Vec<HostileCase> {
    let flipped = |mut frame: Vec<u8>, at: usize| {
        frame[at] ^= 1;
        frame
    };
    let hello = frame(&hello().into());
    let meta = hello.len() - 1;
    let body = [7; 64];
    let stamp = BodyStamp { bytes: 64, crc: Some(crc32c::crc32c(&body)) };
    let mut declare = Vec::new();
    encode(&mut declare, &Envelope::default(), &Declare { digest: [1; 32] }.into(), stamp);
    declare.extend(body);
    let last = declare.len() - 1;
    vec![
        case(
            "header_crc",
            "a flipped bit of the header's checksum",
            "Crc { what: \"header\"",
            flipped(hello.clone(), 76),
        ),
        case(
            "header_bit",
            "a flipped bit of the request id",
            "Crc { what: \"header\"",
            flipped(hello.clone(), 24),
        ),
        case(
            "meta_crc",
            "a flipped bit of the meta's checksum",
            "Crc { what: \"meta\"",
            mend_header(flipped(hello.clone(), 72)),
        ),
        case("meta_bit", "a flipped bit of the meta", "Crc { what: \"meta\"", flipped(hello, meta)),
        case("body_bit", "a flipped bit of a body", "Crc { what: \"body\"", flipped(declare, last)),
    ]
}

fn cuts() -> Vec<HostileCase> {
    let hello = frame(&hello().into());
    let cut = |name, wrong, expected, mut bytes: Vec<u8>, length| {
        bytes.truncate(length);
        case(name, wrong, expected, bytes)
    };
    let mut declare = with_body_length(&Declare { digest: [1; 32] }.into(), 64);
    declare.extend([7; 64]);
    let header = Header::BYTES;
    vec![
        cut("cut_magic", "3 bytes", "Cut { bytes: 3 }", hello.clone(), 3),
        cut("cut_header", "a header without its end", "Cut { bytes: 79 }", hello.clone(), 79),
        cut("cut_before_meta", "a header alone", "Cut { bytes: 80 }", hello.clone(), header),
        cut("cut_meta", "half a meta", "Cut { bytes: 100 }", hello, 100),
        cut("cut_body", "half a body", "Cut { bytes: 144 }", declare, header + 32 + 32),
    ]
}

/// Frames with correct checksums and a wrong meta.
fn metas() -> Vec<HostileCase> {
    let kind = |message: &Message| message.kind();
    let hello = Message::from(hello());
    let pull = Message::from(pull());
    let hello_with = |at: usize, value: u8| {
        let mut meta = meta(&hello);
        meta[at] = value;
        raw(kind(&hello), &meta)
    };
    let refused = Refused { refusal: Refusal::Denied {} }.into();
    let push = Message::from(part());
    let short = &meta(&hello)[..meta(&hello).len() - 1];
    let mut trailing = meta(&refused);
    trailing.push(0);
    // Offsets of fields in this hello: the role is at 4, the job's text at 5.
    let job = 5;
    let crc = meta(&hello).len() - 22;
    vec![
        case(
            "meta_trailing",
            "a refusal with a byte after the last field",
            "Trailing {",
            raw(kind(&refused), &trailing),
        ),
        case("meta_empty", "a hello with an empty meta", "Truncated {", raw(kind(&hello), &[])),
        case(
            "meta_short",
            "a hello without its last byte",
            "Truncated {",
            raw(kind(&hello), short),
        ),
        case(
            "list_too_long",
            "a pull of 2^32 - 1 partitions",
            INVALID_LIST,
            raw(kind(&pull), &[2, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]),
        ),
        case(
            "list_longer_than_its_meta",
            "16,384 partitions in 4 bytes",
            INVALID_LIST,
            raw(kind(&pull), &[2, 0, 0x40, 0, 0, 0, 0, 0, 0]),
        ),
        case("text_too_long", "a job of 65 bytes", INVALID_TEXT, {
            let mut meta = meta(&hello)[..job].to_vec();
            meta.extend([65, 0]);
            meta.extend([b'w'; 65]);
            raw(kind(&hello), &meta)
        }),
        case("text_length_max", "a job of 65,535 bytes", INVALID_TEXT, {
            let mut meta = meta(&hello);
            meta[job..job + 2].fill(0xff);
            raw(kind(&hello), &meta)
        }),
        case("text_not_utf8", "a job that is not UTF-8", INVALID_UTF8, hello_with(job + 2, 0xff)),
        case("bool_two", "a push part whose `next` is 2", INVALID_BOOL, {
            let mut meta = meta(&push);
            *meta.last_mut().expect("a push part has fields") = 2;
            raw(kind(&push), &meta)
        }),
        case(
            "option_two",
            "an option whose byte is 2: the catalogue of a hello",
            INVALID_OPTION,
            hello_with(crc - 1, 2),
        ),
        case(
            "auth_option_two",
            "an option whose byte is 2: the access token of a hello",
            INVALID_OPTION,
            hello_with(crc + 5, 2),
        ),
        case(
            "role_unknown",
            "role 9",
            "Invalid { message: \"Hello\", field: \"Role\"",
            hello_with(4, 9),
        ),
        case(
            "role_zero",
            "role 0",
            "Invalid { message: \"Hello\", field: \"Role\"",
            hello_with(4, 0),
        ),
        case(
            "enum_unknown",
            "a `body_crc` that is neither on, off nor auto",
            INVALID_CRC,
            hello_with(crc, 4),
        ),
        case(
            "refusal_unknown",
            "refusal 255",
            "Invalid { message: \"Refused\", field: \"Refusal\"",
            raw(kind(&refused), &[255]),
        ),
    ]
}

/// Messages of rings with a wrong meta or body.
fn rings() -> Vec<HostileCase> {
    let join = Message::from(RingJoin {
        id: Text::default(),
        index: None,
        size: 2,
        host: Text::default(),
        addresses: List::default(),
        epoch: 0,
        gone: List::default(),
    });
    // Offsets of fields in this join: the addresses are at 9, behind them the epoch, and at the end
    // the members that are gone.
    let addresses = 9;
    let gone = meta(&join).len() - 4;
    let longer_list = |at: usize, count: usize| {
        let mut meta = meta(&join);
        meta[at..at + 4].copy_from_slice(&(count as u32).to_le_bytes());
        meta.extend(vec![0; 4 * count]);
        raw(join.kind(), &meta)
    };
    let operation = Message::from(ring_operation());
    let codec = Some(RingCodec::Int8 {});
    let encoded = Message::from(RingOperation { codec, ..ring_operation() });
    let difference = RingEnd::Difference {
        number: 1,
        rank: 0,
        operation: ring_operation(),
        other_rank: 1,
        other: ring_operation(),
    };
    let over = Message::from(RingOver { epoch: 1, end: difference });
    let end = 8;
    let with_tag = |message: &Message, at: usize, tag: u8| {
        let mut meta = meta(message);
        meta[at] = tag;
        raw(message.kind(), &meta)
    };
    let half = &meta(&over)[..meta(&over).len() / 2];
    let part = RingPart { pass: 0, offset: 0 }.into();
    vec![
        case(
            "ring_addresses_too_many",
            "a rank with 5 addresses",
            INVALID_JOIN,
            longer_list(addresses, limits::RANK_ADDRESSES_MAX + 1),
        ),
        case(
            "ring_gone_too_many",
            "a rank that can do without 1,025 others",
            INVALID_JOIN,
            longer_list(gone, limits::RING_SIZE_MAX + 1),
        ),
        case(
            "collective_unknown",
            "collective operation 12",
            "Invalid { message: \"RingOperation\", field: \"Collective\"",
            with_tag(&operation, 0, 12),
        ),
        case(
            "ring_codec_unknown",
            "a reduction in codec 6",
            "Invalid { message: \"RingOperation\", field: \"RingCodec\"",
            with_tag(&encoded, meta(&encoded).len() - 1, 6),
        ),
        case(
            "ring_end_unknown",
            "a ring that is over for reason 6",
            "Invalid { message: \"RingOver\", field: \"RingEnd\"",
            with_tag(&over, end, 6),
        ),
        case(
            "ring_over_short",
            "half of the difference that ends a ring",
            "Truncated { message: \"RingOver\"",
            raw(over.kind(), half),
        ),
        case(
            "ring_part_too_long",
            "a part of an operation with a body one byte above the limit",
            "TooLong { what: \"its body\"",
            with_body_length(&part, limits::PART_BYTES_MAX + 1),
        ),
    ]
}

const INVALID_JOIN: &str = "Invalid { message: \"RingJoin\", field: \"list length\"";
const INVALID_LIST: &str = "Invalid { message: \"Pull\", field: \"list length\"";
const INVALID_TEXT: &str = "Invalid { message: \"Hello\", field: \"text length\"";
const INVALID_UTF8: &str = "Invalid { message: \"Hello\", field: \"text byte\"";
const INVALID_BOOL: &str = "Invalid { message: \"PushPart\", field: \"bool\"";
const INVALID_OPTION: &str = "Invalid { message: \"Hello\", field: \"bool\"";
const INVALID_CRC: &str = "Invalid { message: \"Hello\", field: \"BodyCrc\"";

fn hello() -> Hello {
    Hello {
        version_oldest: 1,
        version_newest: 1,
        role: Role::Chief {},
        job: Text::new("worker").expect("the name is short"),
        task: 0,
        shard: ShardId { task: 0, shard: 0 },
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_arena: 0,
        seen_step: GlobalStep(0),
        catalogue: None,
        body_crc: BodyCrc::Auto {},
        identity: List::default(),
        auth: None,
        features: Default::default(),
    }
}

fn part() -> PushPart {
    PushPart {
        operation: Operation::Gradient {},
        token: TokenId(1),
        generation: 1,
        push_slot: 1,
        offset: 0,
        whole: None,
        next: false,
        read: None,
    }
}

fn pull() -> Pull {
    Pull { selection: Selection::All {} }
}

fn ring_operation() -> RingOperation {
    let collective = Collective::ReduceSum {};
    RingOperation { collective, elements: 1, count: 8, name: Text::clipped("w"), codec: None }
}

fn frame(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), message, BodyStamp::NONE);
    bytes
}

fn with_body_length(message: &Message, length: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), message, BodyStamp::plain(length));
    bytes
}

fn meta(message: &Message) -> Vec<u8> {
    frame(message)[Header::BYTES..].to_vec()
}

/// Makes a frame of this kind with this meta, valid or not.
fn raw(kind: u16, meta: &[u8]) -> Vec<u8> {
    let mut bytes = frame(&Heartbeat {}.into());
    bytes[6..8].copy_from_slice(&kind.to_le_bytes());
    bytes[8..12].copy_from_slice(&(meta.len() as u32).to_le_bytes());
    bytes.extend_from_slice(meta);
    mend(bytes)
}

/// Corrects both checksums of a frame without a body.
fn mend(mut frame: Vec<u8>) -> Vec<u8> {
    let crc = crc32c::crc32c(&frame[Header::BYTES..]);
    frame[72..76].copy_from_slice(&crc.to_le_bytes());
    mend_header(frame)
}

fn mend_header(mut frame: Vec<u8>) -> Vec<u8> {
    let crc = crc32c::crc32c(&frame[..76]);
    frame[76..80].copy_from_slice(&crc.to_le_bytes());
    frame
}

/// Returns pseudo-random bytes, the same in every run (xorshift64).
fn noise(mut seed: u64, count: usize) -> Vec<u8> {
    let next = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 32) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hostile")
}

fn readme() -> String {
    let mut text = String::from(
        "# Hostile frames\n\n\
         Each file holds bytes that no correct peer sends. `../hostile.rs` makes the files and\n\
         this page: `PUSHPULL_BLESS=1` writes them again.\n\n\
         Send one file as the first bytes of a connection, then shut down the sending side. The\n\
         server answers nothing, closes the connection and keeps running.\n\n\
         The table names the error of a reader that waits for a handshake. After the handshake\n\
         the reader reports the same error, or the one in brackets. `body_bit` and `cut_body`\n\
         begin with a valid `Declare`, which a server does not read before a hello.\n\n\
         | file | what is wrong | error |\n| --- | --- | --- |\n",
    );
    for case in cases() {
        let opened =
            case.opened.map_or(String::new(), |error| format!(" (`{}`)", error.trim_end()));
        let expected = case.expected.trim_end();
        let _ = writeln!(text, "| `{}.bin` | {} | `{expected}`{opened} |", case.name, case.wrong);
    }
    text
}

#[test]
fn the_files_match_the_generated_cases() {
    let mut expected: BTreeSet<String> = BTreeSet::from(["README.md".to_owned()]);
    let mut all = vec![("README.md".to_owned(), readme().into_bytes())];
    all.extend(cases().into_iter().map(|case| (format!("{}.bin", case.name), case.bytes)));
    for (name, bytes) in all {
        let path = folder().join(&name);
        if std::env::var_os("PUSHPULL_BLESS").is_some() {
            println!("blessed {}", path.display());
            std::fs::write(&path, &bytes).unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{name}");
        expected.insert(name);
    }
    let found: BTreeSet<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, expected, "a file has no case, or a case has no file");
}

#[test]
fn every_file_is_refused_with_its_error_in_reads_of_any_size() {
    for case in cases() {
        for opened in [false, true] {
            for steps in [&[1][..], &[7], &[79, 1, 3], &[usize::MAX]] {
                let mut drip = Drip::new(&case.bytes, steps);
                let mut reader = FrameReader::new();
                if opened {
                    reader.open();
                }
                let (_, end) = take_all(&mut reader, &mut drip, |_| false);
                let name = format!("{} in steps of {steps:?}, opened: {opened}", case.name);
                let Err(ReadError::Protocol(error)) = end else { panic!("{name}: {end:?}") };
                let expected = case.opened.filter(|_| opened).unwrap_or(case.expected);
                let found = format!("{error:?}");
                assert!(found.starts_with(expected), "{name}: {found}, not {expected}");
                let meta =
                    if opened { limits::META_BYTES_MAX } else { limits::HANDSHAKE_META_BYTES_MAX };
                let buffer_max = (Header::BYTES + meta as usize).max(limits::READ_BUFFER_BYTES);
                assert!(drip.widest <= buffer_max, "{name}: a buffer of {} bytes", drip.widest);
            }
        }
    }
}

#[test]
fn a_skipped_body_is_not_checked() {
    let case = cases().into_iter().find(|case| case.name == "body_bit").unwrap();
    let mut drip = Drip::new(&case.bytes, &[10]);
    let (taken, end) = take_all(&mut FrameReader::new(), &mut drip, |_| true);
    assert!(end.is_ok() && taken.len() == 1, "{end:?}");
}
