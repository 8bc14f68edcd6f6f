//! Tests of the frame reader.

use super::super::encode::{BodyStamp, Envelope, encode};
use super::super::message::{Heartbeat, Pulled};
use super::*;

/// Returns `bytes` in reads of at most `step`, with a "would block" before each.
fn drip(bytes: Vec<u8>, step: usize) -> impl ReadSource {
    let mut rest = io::Cursor::new(bytes);
    let mut block = false;
    move |slices: &mut [IoSliceMut<'_>]| {
        block = !block;
        if block && step < 1000 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut count = 0;
        for slice in slices {
            let take = slice.len().min(step - count);
            count += io::Read::read(&mut rest, &mut slice[..take])?;
        }
        Ok(count)
    }
}

fn stream(body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let pulled = Pulled { version: 3, gradients: 2, offset: 16, last: true }.into();
    let stamp = BodyStamp { bytes: body.len() as u64, crc: Some(crc32c::crc32c(body)) };
    encode(&mut bytes, &Envelope::default(), &pulled, stamp);
    bytes.extend_from_slice(body);
    encode(&mut bytes, &Envelope::default(), &Heartbeat {}.into(), BodyStamp::NONE);
    bytes
}

#[test]
fn frames_do_not_depend_on_read_sizes() {
    let body: Vec<u8> = (0..20_000_u32).map(|i| i as u8).collect();
    for step in [1, 7, 79, 80, 81, 4096, 1 << 20] {
        let mut source = drip(stream(&body), step);
        let mut reader = FrameReader::new();
        let mut target = vec![0; body.len()];
        let header = loop {
            match reader.poll(&mut source).unwrap() {
                Poll::Frame(header, Message::Pulled(pulled)) => {
                    assert_eq!((pulled.offset, header.body_bytes), (16, body.len() as u64));
                    break header;
                }
                Poll::Pending => {}
                other => panic!("step {step}: {other:?}"),
            }
        };
        while reader.poll_body(&mut source, &mut target).unwrap() == BodyPoll::Pending {}
        assert_eq!(target, body, "step {step}, {header:?}");
        loop {
            match reader.poll(&mut source).unwrap() {
                Poll::Frame(_, Message::Heartbeat(_)) => break,
                Poll::Pending => {}
                other => panic!("step {step}: {other:?}"),
            }
        }
        while !matches!(reader.poll(&mut source).unwrap(), Poll::Closed) {}
    }
}

#[test]
fn a_skipped_body_keeps_the_stream_in_sync() {
    for step in [3, 100, 1 << 20] {
        let mut source = drip(stream(&[7; 9000]), step);
        let mut reader = FrameReader::new();
        while !matches!(reader.poll(&mut source).unwrap(), Poll::Frame(..)) {}
        while reader.skip_body(&mut source).unwrap() == BodyPoll::Pending {}
        loop {
            match reader.poll(&mut source).unwrap() {
                Poll::Frame(_, message) => {
                    assert_eq!(message, Heartbeat {}.into());
                    break;
                }
                Poll::Pending => {}
                Poll::Closed => panic!("closed"),
            }
        }
    }
}

#[test]
fn damaged_bodies_and_truncated_streams_are_rejected() {
    let mut bytes = stream(&[1; 100]);
    let body_start = bytes.len() - Header::BYTES - 100;
    bytes[body_start + 50] ^= 1;
    let mut source = drip(bytes.clone(), 1 << 20);
    let mut reader = FrameReader::new();
    assert!(matches!(reader.poll(&mut source).unwrap(), Poll::Frame(..)));
    let error = reader.poll_body(&mut source, &mut [0; 100]).unwrap_err();
    assert!(matches!(error, ReadError::Protocol(ProtocolError::Crc { what: "body", .. })));

    bytes.truncate(body_start + 40);
    let mut source = drip(bytes, 1 << 20);
    let mut reader = FrameReader::new();
    assert!(matches!(reader.poll(&mut source).unwrap(), Poll::Frame(..)));
    let error = reader.poll_body(&mut source, &mut [0; 100]).unwrap_err();
    assert!(matches!(error, ReadError::Protocol(ProtocolError::Cut { .. })), "{error}");
}
