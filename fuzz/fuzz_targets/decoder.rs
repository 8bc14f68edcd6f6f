//! Fuzzes the decoder with arbitrary bytes. It must not panic or exceed its buffer limit, and every
//! frame that it accepts must have exactly one encoding.
//!
//! Each input is read twice: as it is, and with headers and checksums repaired, so that the code
//! behind the checksums is reached. The input also determines how the stream is cut into reads and
//! which bodies are skipped.

#![no_main]

use std::io::{self, IoSliceMut};

use libfuzzer_sys::fuzz_target;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::codec::{Encoding, ScaleBlocks};
use pushpull_common::protocol::{
    BodyPoll, BodyStamp, Envelope, Features, FrameReader, Header, Message, Poll, encode_for,
    header, limits, version,
};

/// The longest body that is read. Longer ones are skipped to save time.
const TAKEN_MAX: u64 = 64 << 10;

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    read(&mend(bytes));
    catalogue(bytes);
    stretch(bytes);
});

/// Decodes an encoded gradient. The first three bytes choose the encoding and the number of
/// elements.
fn stretch(bytes: &[u8]) {
    let Some((&[code, low, high], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let Some(encoding) = Encoding::from_code(code) else {
        return;
    };
    let elements = usize::from(u16::from_le_bytes([low, high]));
    let _ = encoding.decode(rest, &mut vec![0f32; elements]);
    let _ = encoding.decode(rest, &mut vec![0f64; elements]);
    let blocks = ScaleBlocks::of_rows(usize::from(low), usize::from(high));
    let _ = encoding.decode_rows(blocks, rest, &mut vec![0f32; elements]);
}

/// A random sequence that follows from the input (xorshift64).
struct ServiceChoices(u64);

impl ServiceChoices {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn read(stream: &[u8]) {
    let mut choices = ServiceChoices(u64::from(crc32c::crc32c(stream)) << 8 | 1);
    let opened = choices.next() % 4 != 0;
    let mut reader = FrameReader::new();
    reader.set_features(Features(choices.next()));
    let mut meta_max = limits::HANDSHAKE_META_BYTES_MAX;
    if opened {
        reader.open();
        meta_max = limits::META_BYTES_MAX;
    }
    let buffer_max = (Header::BYTES + meta_max as usize).max(limits::READ_BUFFER_BYTES);
    let skips = choices.next();
    let mut rest = stream;
    let mut source = |slices: &mut [IoSliceMut<'_>]| {
        let buffer = slices.last().map_or(0, |slice| slice.len());
        assert!(buffer <= buffer_max, "{buffer} bytes of buffer, {buffer_max} allowed");
        let step = match choices.next() % 8 {
            0 => return Err(io::ErrorKind::WouldBlock.into()),
            1 => return Err(io::ErrorKind::Interrupted.into()),
            2 => 1,
            3..6 => choices.next() as usize % 100 + 1,
            _ => usize::MAX,
        };
        let mut now = &rest[..step.min(rest.len())];
        let mut count = 0;
        for slice in slices {
            count += io::Read::read(&mut now, slice)?;
        }
        rest = &rest[count..];
        Ok(count)
    };
    let mut at = 0;
    for frame in 0.. {
        let features = reader.features();
        let (header, message) = match reader.poll(&mut source) {
            Ok(Poll::Frame(header, message)) => (header, message),
            Ok(Poll::Pending) => continue,
            Ok(Poll::Closed) => {
                assert_eq!(at, stream.len(), "bytes after the last frame");
                return;
            }
            Err(_) => return,
        };
        let again = encode_again(features, &header, &message);
        let length = Header::BYTES + header.meta_bytes as usize;
        match &message {
            // A newer client may append fields to it.
            Message::Hello(_) => {
                let meta = &stream[at + Header::BYTES..at + length];
                assert!(meta.starts_with(&again[Header::BYTES..]), "{message:?} has other fields");
            }
            _ => assert_eq!(again, stream[at..at + length], "{message:?} has another encoding"),
        }
        at += length;
        if header.body_bytes > 0 {
            let skip = header.body_bytes > TAKEN_MAX || skips >> (frame % 64) & 1 == 1;
            let mut body = vec![0; if skip { 0 } else { header.body_bytes as usize }];
            loop {
                let poll = match skip {
                    true => reader.skip_body(&mut source),
                    false => reader.poll_body(&mut source, &mut body),
                };
                match poll {
                    Ok(BodyPoll::Done) => break,
                    Ok(BodyPoll::Pending) => {}
                    Err(_) => return,
                }
            }
            let length = header.body_bytes as usize;
            assert!(skip || body == stream[at..at + length], "the body differs from the stream");
            at += length;
            catalogue(&body);
        }
        assert!(reader.bytes() >= at as u64, "the reader counts fewer bytes than it returned");
    }
}

fn encode_again(features: Features, header: &Header, message: &Message) -> Vec<u8> {
    let envelope = Envelope {
        request: header.request,
        restore_epoch: header.restore_epoch,
        step: header.step,
        sequence: header.sequence,
        deadline_ms: header.deadline_ms,
    };
    let crc = (header.flags & header::FLAG_BODY_CRC != 0).then_some(header.body_crc);
    let mut bytes = Vec::new();
    encode_for(
        features,
        &mut bytes,
        &envelope,
        message,
        BodyStamp { bytes: header.body_bytes, crc },
    );
    bytes
}

/// Rewrites the input as a stream of frames with valid headers and checksums.
fn mend(bytes: &[u8]) -> Vec<u8> {
    let mut stream = bytes.to_vec();
    let mut rest = stream.as_mut_slice();
    while rest.len() >= Header::BYTES {
        let (head, after) = rest.split_at_mut(Header::BYTES);
        let field = |head: &[u8], at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let kind = Message::KINDS[usize::from(field(head, 6)) % Message::KINDS.len()];
        let meta = usize::from(field(head, 8)).min(after.len());
        let (meta, after) = after.split_at_mut(meta);
        let flags = head[12] & header::FLAG_BODY_CRC as u8;
        let limit = Message::body_limit(kind).unwrap_or(0).min(after.len() as u64) as usize;
        let (body, after) = after.split_at_mut(usize::from(field(head, 16)).min(limit));
        head[..4].copy_from_slice(&header::MAGIC.to_le_bytes());
        head[4..6].copy_from_slice(&version::NEWEST.to_le_bytes());
        head[6..8].copy_from_slice(&kind.to_le_bytes());
        head[8..12].copy_from_slice(&(meta.len() as u32).to_le_bytes());
        head[12..16].copy_from_slice(&u32::from(flags).to_le_bytes());
        head[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
        head[36..40].fill(0);
        // One checksummed body in eight keeps its wrong checksum.
        match (flags, head[60] % 8) {
            (0, _) => head[60..64].fill(0),
            (_, 0) => {}
            _ => head[60..64].copy_from_slice(&crc32c::crc32c(body).to_le_bytes()),
        }
        head[64..72].fill(0);
        head[72..76].copy_from_slice(&crc32c::crc32c(meta).to_le_bytes());
        let crc = crc32c::crc32c(&head[..76]);
        head[76..80].copy_from_slice(&crc.to_le_bytes());
        rest = after;
    }
    stream
}

/// Checks that a catalogue that decodes has one encoding and layouts without holes.
fn catalogue(bytes: &[u8]) {
    let Ok(catalogue) = Catalogue::decode(bytes) else {
        return;
    };
    assert_eq!(catalogue.encode(), bytes);
    let mut seen = 0;
    for shard in catalogue.shards() {
        let layout = catalogue.layout(shard);
        let mut end = 0;
        for partition in layout.partitions() {
            assert_eq!((partition.offset, partition.offset % 8), (end, 0));
            assert!(layout.starts_at(end));
            end = partition.end();
            assert!(layout.cut_at(end).is_none());
            seen += 1;
        }
        assert_eq!(layout.bytes(), end);
    }
    assert_eq!(seen, catalogue.partitions().len());
    assert_eq!(catalogue.difference(&catalogue.clone()), None);
}
