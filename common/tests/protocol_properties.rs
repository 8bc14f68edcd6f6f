//! Properties of the frame reader for arbitrary bytes, damaged frames and reads of any size.

mod drip;
mod samples;

use proptest::collection::vec;
use proptest::prelude::*;
use pushpull_common::ids::PartitionId;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{Pull, RingJoin, Selection};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyStamp, Envelope, Features, FrameReader, Header, Message, ProtocolError, encode, limits,
};

use drip::{Drip, take_all};
use samples::{Sample, samples};

/// The largest buffer that a reader may have, in bytes.
const BUFFER_MAX: usize = Header::BYTES + limits::META_BYTES_MAX as usize;

fn opened() -> FrameReader {
    let mut reader = FrameReader::new();
    reader.open();
    reader
}

/// Returns whether this is the only meta of the message. A newer client may append fields to a
/// `Hello`.
fn is_only_encoding(message: &Message, meta: &[u8]) -> bool {
    let mut again = Vec::new();
    message.put(Features::NONE, &mut again);
    match message {
        Message::Hello(_) => meta.starts_with(&again),
        _ => meta == again,
    }
}

/// Reads a stream to its end, and checks that the buffer never grows beyond its bound.
fn read_any(bytes: &[u8], steps: &[usize]) -> (usize, Result<(), ReadError>) {
    let mut drip = Drip::new(bytes, steps);
    let (taken, end) = take_all(&mut opened(), &mut drip, |index| index % 2 == 1);
    assert!(drip.widest <= BUFFER_MAX, "a buffer of {} bytes", drip.widest);
    (taken.len(), end)
}

fn steps() -> impl Strategy<Value = Vec<usize>> {
    vec(prop_oneof![Just(1), 1..100_usize, Just(1 << 20)], 1..4)
}

/// Returns a sample's message and its frame. The body is cut to the limit of its kind.
fn frame(sample: &Sample, envelope: &Envelope, body: &[u8], crc: bool) -> (Message, Vec<u8>) {
    let kind = sample.message.kind();
    let limit = Message::body_limit(kind).expect("samples have known kinds");
    let body = &body[..body.len().min(limit as usize)];
    let stamp = BodyStamp { bytes: body.len() as u64, crc: crc.then(|| crc32c::crc32c(body)) };
    let mut bytes = Vec::new();
    encode(&mut bytes, envelope, &sample.message, stamp);
    bytes.extend_from_slice(body);
    (sample.message.clone(), bytes)
}

fn envelope() -> impl Strategy<Value = Envelope> {
    (any::<u64>(), any::<u32>(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
        |(request, restore_epoch, step, sequence, deadline_ms)| Envelope {
            request: request.into(),
            restore_epoch: restore_epoch.into(),
            step: step.into(),
            sequence: sequence.into(),
            deadline_ms,
        },
    )
}

#[test]
fn every_flipped_bit_of_a_header_or_a_meta_is_found() {
    for sample in samples() {
        let whole = sample.frame();
        for at in 0..whole.len() {
            for mask in [1, 2, 4, 8, 16, 32, 64, 128, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= mask;
                let (taken, end) = read_any(&bytes, &[usize::MAX]);
                assert_eq!(taken, 0, "{} at {at} by {mask:#x}", sample.name);
                let found = matches!(
                    end,
                    Err(ReadError::Protocol(
                        ProtocolError::Magic { .. } | ProtocolError::Crc { .. }
                    ))
                );
                assert!(found, "{} at {at} by {mask:#x}: {end:?}", sample.name);
            }
        }
    }
}

#[test]
fn a_stream_that_ends_at_any_byte_of_a_frame_is_reported_as_cut() {
    for sample in samples() {
        let whole = sample.frame();
        for length in 1..whole.len() {
            let (taken, end) = read_any(&whole[..length], &[7]);
            let cut = ProtocolError::Cut { bytes: length as u64 };
            assert!(
                matches!(&end, Err(ReadError::Protocol(error)) if *error == cut),
                "{} cut to {length}: {end:?}",
                sample.name
            );
            assert_eq!(taken, 0);
        }
    }
}

#[test]
fn the_largest_meta_is_read_after_the_handshake_only() {
    let partitions = (0..limits::SELECTION_MAX as u32).map(PartitionId).collect();
    let partitions = List::new(partitions).expect("the list has its largest length");
    let pull: Message = Pull { selection: Selection::Partitions { partitions } }.into();
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), &pull, BodyStamp::NONE);
    let (taken, end) = read_any(&bytes, &[4096]);
    assert!(taken == 1 && end.is_ok(), "{end:?}");
    let mut drip = Drip::new(&bytes, &[4096]);
    let (_, end) = take_all(&mut FrameReader::new(), &mut drip, |_| false);
    assert!(matches!(end, Err(ReadError::Protocol(ProtocolError::TooLong { .. }))), "{end:?}");
    assert!(drip.widest <= limits::READ_BUFFER_BYTES);
}

#[test]
fn the_longest_join_of_a_ring_is_read_at_once() {
    let address = Text::new("a".repeat(limits::RANK_ADDRESS_BYTES_MAX)).expect("the longest");
    let addresses = vec![address; limits::RANK_ADDRESSES_MAX];
    let gone = (0..limits::RING_SIZE_MAX as u32).collect();
    let join: Message = RingJoin {
        id: Text::new("i".repeat(limits::RANK_ID_BYTES_MAX)).expect("the longest"),
        index: Some(u32::MAX),
        size: limits::RING_SIZE_MAX as u32,
        host: Text::new("h".repeat(limits::HOST_BYTES_MAX)).expect("the longest"),
        addresses: List::new(addresses).expect("the list has its largest length"),
        epoch: u64::MAX,
        gone: List::new(gone).expect("the list has its largest length"),
    }
    .into();
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), &join, BodyStamp::NONE);
    let mut drip = Drip::new(&bytes, &[usize::MAX]);
    let (taken, end) = take_all(&mut opened(), &mut drip, |_| false);
    assert!(end.is_ok() && taken.len() == 1, "{end:?}");
    assert_eq!(taken[0].message, join);
    assert!(drip.widest <= limits::READ_BUFFER_BYTES, "a buffer of {} bytes", drip.widest);
}

proptest! {
    #[test]
    fn any_bytes_are_refused_within_bounds(bytes in vec(any::<u8>(), 0..4096), steps in steps()) {
        let (_, end) = read_any(&bytes, &steps);
        prop_assert!(bytes.is_empty() || end.is_err());
    }

    /// Decodes metas without their checksums, so that random bytes reach the fields.
    #[test]
    fn any_meta_is_refused_or_is_the_only_encoding_of_its_message(
        kind in proptest::sample::select(Message::KINDS),
        meta in vec(prop_oneof![Just(0_u8), 1..6_u8, any::<u8>()], 0..300),
    ) {
        if let Ok(message) = Message::take(kind, Features::NONE, &meta) {
            prop_assert!(is_only_encoding(&message, &meta));
        }
    }

    #[test]
    fn a_damaged_meta_is_refused_or_is_the_only_encoding_of_its_message(
        which in any::<proptest::sample::Index>(),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        length in any::<proptest::sample::Index>(),
    ) {
        let samples = samples();
        let sample = which.get(&samples);
        let mut meta = Vec::new();
        sample.message.put(sample.features, &mut meta);
        meta.truncate(length.index(meta.len() + 1).max(meta.len() / 2));
        for (at, byte) in damage {
            if !meta.is_empty() {
                let at = at.index(meta.len());
                meta[at] = byte;
            }
        }
        if let Ok(message) = Message::take(sample.message.kind(), sample.features, &meta) {
            prop_assert!(is_only_encoding(&message, &meta));
        }
    }

    #[test]
    fn reads_of_any_size_deliver_the_same_frames(
        chosen in vec((any::<proptest::sample::Index>(), envelope(), any::<bool>()), 1..8),
        body in vec(any::<u8>(), 0..20_000),
        skipped in any::<u8>(),
        steps in steps(),
    ) {
        let samples = samples();
        let mut stream = Vec::new();
        let mut expected = Vec::new();
        for (which, envelope, crc) in &chosen {
            let (message, bytes) = frame(which.get(&samples), envelope, &body, *crc);
            expected.push((message, *envelope));
            stream.extend(bytes);
        }
        let mut drip = Drip::new(&stream, &steps);
        let skip = |index: usize| skipped >> index & 1 == 1;
        let (taken, end) = take_all(&mut opened(), &mut drip, skip);
        prop_assert!(end.is_ok(), "{:?}", end);
        prop_assert!(drip.widest <= BUFFER_MAX);
        prop_assert_eq!(taken.len(), expected.len());
        for (index, (taken, (message, envelope))) in taken.iter().zip(expected).enumerate() {
            prop_assert_eq!(&taken.message, &message);
            let header = &taken.header;
            let found = Envelope {
                request: header.request,
                restore_epoch: header.restore_epoch,
                step: header.step,
                sequence: header.sequence,
                deadline_ms: header.deadline_ms,
            };
            prop_assert_eq!(found, envelope);
            if !skip(index) {
                prop_assert_eq!(&taken.body[..], &body[..header.body_bytes as usize]);
            }
        }
    }
}
