//! Golden bytes of every message and of a catalogue, and the list of their revisions.
//!
//! `PUSHPULL_BLESS="the reason" cargo test -p pushpull-common --test golden` writes the tables
//! again and appends a revision. Once the version is released, entries may be added, and a changed
//! or removed entry fails the test even then: other bytes are another version.

mod revisions;
mod samples;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, IoSliceMut};
use std::path::PathBuf;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::data_set::SampleRange;
use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::initializer::Initializer;
use pushpull_common::partition::Partitioner;
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{Granted, Welcome};
use pushpull_common::protocol::{
    BodyStamp, Features, FrameReader, Grant, Header, Message, Poll, encode_for, version,
};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use samples::{ENVELOPE, Sample, samples};

/// The table of frames of the current protocol version.
const FRAMES: &str = "frames_v1.txt";

/// Returns the entries of a table, without the `= ` that begins each.
fn entries(table: &str) -> impl Iterator<Item = &str> {
    table.split("\n= ").skip(1).map(str::trim_end)
}

/// Returns the first entry of `before` that `after` changes or lacks.
fn changed<'a>(before: &'a str, after: &str) -> Option<&'a str> {
    let after: BTreeSet<&str> = entries(after).collect();
    entries(before).find(|entry| !after.contains(entry))
}

/// Compares `found` with the table of this name. Writes the table first if `PUSHPULL_BLESS` is set.
fn compare(name: &str, found: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if name == FRAMES
        && version::IS_RELEASED
        && let Ok(before) = std::fs::read_to_string(&path)
    {
        assert_eq!(changed(&before, found), None, "a released frame has changed");
    }
    if std::env::var_os("PUSHPULL_BLESS").is_some() {
        println!("blessed {}: check the difference", path.display());
        std::fs::write(&path, found).expect("cannot write the table");
    }
    let golden = std::fs::read_to_string(&path).expect("cannot read the table");
    for (number, (golden, found)) in golden.lines().zip(found.lines()).enumerate() {
        assert_eq!(found, golden, "line {} of {name}", number + 1);
    }
    assert_eq!(found.len(), golden.len(), "{name} has another length");
}

/// Formats bytes as rows of eight in hexadecimal, each after its offset.
fn rows(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (index, row) in bytes.chunks(8).enumerate() {
        let hex: Vec<String> = row.iter().map(|byte| format!("{byte:02x}")).collect();
        let _ = writeln!(text, "{:04x}  {}", 8 * index, hex.join(" "));
    }
    text
}

/// Parses the bytes of one entry of a table.
fn bytes_of(entry: &str) -> Vec<u8> {
    let rows = entry.lines().filter_map(|line| line.split_once("  "));
    let hex = rows.flat_map(|(_, row)| row.split(' '));
    hex.map(|byte| u8::from_str_radix(byte, 16).expect("a row holds hexadecimal bytes")).collect()
}

fn entry(sample: &Sample) -> String {
    format!("= {}\n# {:?}\n{}", sample.name, sample.message, rows(&sample.frame()))
}

/// Returns a sample of every field that belongs to a feature: each with only that feature agreed.
fn samples_of_features() -> Vec<Sample> {
    let ahead = Some(SampleRange { epoch: 2, start: 0, len: 64 });
    let token = TokenId(11);
    let step = GlobalStep(13);
    let grant = Grant { token, generation: 12, step, push_slot: 14, samples: None, ahead };
    let name = "Granted read_ahead".to_owned();
    let message = Granted { grant }.into();
    vec![Sample { name, message, body: BodyStamp::NONE, features: Features::READ_AHEAD }]
}

/// Returns the table of frames.
fn frames() -> String {
    let head = "Header (ten rows) and meta of every message, under one envelope: request 0x101, \
                restore epoch\n0x202, step 0x303, sequence 0x404, deadline 0x505 ms. Offsets and \
                bytes are hexadecimal.\n\n";
    let entries: Vec<String> = samples().iter().chain(&samples_of_features()).map(entry).collect();
    head.to_owned() + &entries.join("\n")
}

#[test]
fn every_message_has_its_golden_bytes() {
    let samples = samples();
    let kinds: BTreeSet<u16> = samples.iter().map(|sample| sample.message.kind()).collect();
    let all: BTreeSet<u16> = Message::KINDS.iter().copied().collect();
    assert_eq!(kinds, all, "every kind has a sample");
    let names: BTreeSet<&str> = samples.iter().map(|sample| sample.name.as_str()).collect();
    assert_eq!(names.len(), samples.len(), "two samples have one name");
    compare(FRAMES, &frames());
}

/// Returns a reader that has agreed on these features with its peer.
fn reader_with(features: Features) -> FrameReader {
    let welcome = samples().into_iter().find_map(|sample| match sample.message {
        Message::Welcome(welcome) => Some(Welcome { features, ..welcome }),
        _ => None,
    });
    let mut frame = Vec::new();
    let welcome = welcome.expect("there is a welcome").into();
    encode_for(Features::NONE, &mut frame, &ENVELOPE, &welcome, BodyStamp::NONE);
    let mut reader = FrameReader::new();
    reader.set_features(features);
    assert!(matches!(reader.poll(&mut slice_source(&frame)), Ok(Poll::Frame(..))));
    assert_eq!(reader.features(), features);
    reader
}

#[test]
fn golden_bytes_decode_to_their_messages() {
    let table = include_str!("golden/frames_v1.txt");
    let mut entries = entries(table);
    for sample in samples().into_iter().chain(samples_of_features()) {
        let entry = entries.next().unwrap_or_else(|| panic!("{} has no entry", sample.name));
        assert_eq!(entry.lines().next(), Some(sample.name.as_str()));
        let bytes = bytes_of(entry);
        let mut rest = bytes.as_slice();
        let mut reader = reader_with(sample.features);
        let mut source = |slices: &mut [IoSliceMut<'_>]| io::Read::read(&mut rest, &mut slices[0]);
        let Poll::Frame(header, message) = reader.poll(&mut source).unwrap() else {
            panic!("{} is not a whole frame", sample.name);
        };
        assert_eq!(message, sample.message, "{}", sample.name);
        assert_eq!(header.kind, sample.message.kind());
        assert_eq!(header.request, ENVELOPE.request);
        assert_eq!(header.restore_epoch, ENVELOPE.restore_epoch);
        assert_eq!((header.step, header.sequence), (ENVELOPE.step, ENVELOPE.sequence));
        assert_eq!(header.deadline_ms, ENVELOPE.deadline_ms);
        assert_eq!(header.body_bytes, sample.body.bytes);
        assert_eq!(header.body_crc, sample.body.crc.unwrap_or(0));
        assert_eq!(Header::BYTES + header.meta_bytes as usize, bytes.len());
    }
    assert_eq!(entries.next(), None);
}

#[test]
fn a_changed_or_removed_entry_of_a_released_table_is_found() {
    let before = "head\n\n= a\n# A\n0000  01\n\n= b\n# B\n0000  02\n";
    let added = "another\n\n= a\n# A\n0000  01\n\n= c\n# C\n0000  03\n\n= b\n# B\n0000  02\n";
    assert_eq!(changed(before, added), None);
    assert_eq!(changed(added, before), Some("c\n# C\n0000  03"));
    assert_eq!(changed(before, &before.replace("02", "03")), Some("b\n# B\n0000  02"));
}

/// A catalogue with every type and initializer, a partitioned variable, an empty one, a scalar, and
/// each replication.
fn catalogue() -> Catalogue {
    let f32 = |name: &str, extents: &[u64], initializer| {
        VariableSpec::f32(name, extents).expect("a variable").initializer(initializer)
    };
    let variables = vec![
        f32("zeros", &[10, 3], Initializer::Zeros).partitioner(Partitioner::Fixed { shards: 3 }),
        f32("ones", &[1], Initializer::Ones).seed(0x0102_0304_0506_0708),
        f32("constant", &[], Initializer::Constant(-0.5)).plain(),
        f32("uniform", &[2, 2], Initializer::Uniform { low: -1.0, high: 1.0 }),
        f32("normal", &[2], Initializer::Normal { mean: 0.0, stddev: 0.5 }),
        f32("truncated", &[2], Initializer::TruncatedNormal { mean: 1.0, stddev: 2.0 }),
        f32("glorot uniform", &[2, 3], Initializer::GlorotUniform),
        f32("glorot normal", &[2, 3], Initializer::GlorotNormal),
        f32("he uniform", &[2, 3], Initializer::HeUniform),
        f32("he normal", &[2, 3], Initializer::HeNormal),
        VariableSpec::new("f64", DType::F64, Shape::new([3]).expect("a shape"))
            .expect("a variable"),
        VariableSpec::new("i64", DType::I64, Shape::scalar()).expect("a variable"),
        VariableSpec::f32("none", [0, 4]).expect("a variable"),
        VariableSpec::f32("rows", [5, 2]).expect("a variable").sparse(),
        VariableSpec::f16("f16", [3]).expect("a variable"),
        VariableSpec::bf16("bf16", [3, 2]).expect("a variable"),
        f32("local", &[2], Initializer::Zeros).local(),
        f32("mean", &[2], Initializer::Ones).mean_every_steps(0x0102_0304_0506_0708),
    ];
    let map = ShardMap::new([0, 1], 2).expect("shards");
    let placement =
        Placement::plan(&variables, &map, &PlacementStrategy::RoundRobin).expect("a placement");
    Catalogue::new(variables, &placement).expect("a catalogue")
}

#[test]
fn a_catalogue_has_its_golden_bytes_and_digest() {
    let catalogue = catalogue();
    let text = catalogue_table();
    compare("catalogue.txt", &text);
    let decoded = Catalogue::decode(&bytes_of(&text)).unwrap();
    assert_eq!((decoded.digest(), decoded.difference(&catalogue)), (catalogue.digest(), None));
}

/// The tables whose bytes a revision has, and the client that today's servers must train.
fn golden_tables() -> [String; 4] {
    let codecs = include_str!("golden/codecs.txt").to_owned();
    let client = include_str!("../../tests/clients/earlier_client.py").to_owned();
    [frames(), catalogue_table(), codecs, client]
}

#[test]
fn the_newest_revision_has_the_golden_bytes() {
    revisions::check(&golden_tables());
}

#[test]
fn a_change_of_bytes_without_a_new_revision_is_found() {
    let tables = golden_tables();
    let mut other = tables.clone();
    other[0] = other[0].replacen("70 70 73 68 01", "70 70 73 68 02", 1);
    let listed = revisions::fault(version::REVISIONS, &[version::REVISIONS.to_owned()], &tables);
    assert_eq!(listed, None);
    let fault =
        |now: &str, before: &str, tables| revisions::fault(now, &[before.to_owned()], tables);
    // The bytes change alone.
    let alone = fault(version::REVISIONS, version::REVISIONS, &other).unwrap();
    assert!(alone.contains("has other bytes"), "{alone}");
    // The same commit writes the digest of the new bytes over the old one.
    let (kept, _) = version::REVISIONS.trim_end().rsplit_once('\n').unwrap();
    let edited = revisions::appended(&format!("{kept}\n"), &other, "an edit");
    let noticed = fault(&edited, version::REVISIONS, &other).unwrap();
    assert!(noticed.contains("only be appended to"), "{noticed}");
    // An earlier line is edited: the digest of every later one covers it.
    let rewritten = version::REVISIONS.replacen("\n1 ", "\n1 0", 1);
    let noticed = revisions::fault(&rewritten, &[], &tables).unwrap();
    assert!(noticed.contains("has other bytes"), "{noticed}");
    // A new line is how bytes change.
    let next = revisions::appended(version::REVISIONS, &other, "a reason");
    assert_eq!(fault(&next, version::REVISIONS, &other), None);
    assert_eq!(next.lines().count(), version::REVISIONS.lines().count() + 1);
}

fn catalogue_table() -> String {
    let catalogue = catalogue();
    let digest: String = catalogue.digest().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut text = format!("= digest {digest}\n");
    for variable in catalogue.variables() {
        let _ = writeln!(text, "# {} {} {}", variable.name(), variable.dtype(), variable.shape());
    }
    text.push_str(&rows(catalogue.encode()));
    text
}
