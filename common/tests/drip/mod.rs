//! A stream that delivers its bytes in small reads and records the widest read.

use std::io::{self, IoSliceMut};

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{BodyPoll, FrameReader, Header, Message, Poll};

/// A source that returns reads of the given lengths in a cycle, each after a `WouldBlock`.
pub(crate) struct Drip<'a> {
    rest: &'a [u8],
    steps: &'a [usize],
    sequence: usize,
    /// The largest buffer that a read was given, in bytes, without the memory of the body.
    pub(crate) widest: usize,
}

impl<'a> Drip<'a> {
    /// # Panics
    /// If `steps` is empty or contains 0.
    pub(crate) fn new(rest: &'a [u8], steps: &'a [usize]) -> Self {
        assert!(!steps.is_empty() && !steps.contains(&0), "every read must deliver a byte");
        Drip { rest, steps, sequence: 0, widest: 0 }
    }

    fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        // The last slice is the reader's own buffer; the slices before it are the body's memory.
        self.widest = self.widest.max(slices.last().map_or(0, |slice| slice.len()));
        self.sequence += 1;
        if self.sequence % 2 == 1 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let step = self.steps[self.sequence / 2 % self.steps.len()].min(self.rest.len());
        let mut now = &self.rest[..step];
        let mut count = 0;
        for slice in slices {
            count += io::Read::read(&mut now, slice)?;
        }
        self.rest = &self.rest[count..];
        Ok(count)
    }
}

/// A frame read from a stream, with its body.
#[derive(Debug, PartialEq)]
pub(crate) struct ReadFrame {
    pub(crate) header: Header,
    pub(crate) message: Message,
    pub(crate) body: Vec<u8>,
}

/// Reads frames until the stream ends, and returns them with the result at the end. Skips the body
/// of each frame for whose index `skip` returns true; such a body is empty in the result.
pub(crate) fn take_all(
    reader: &mut FrameReader,
    drip: &mut Drip<'_>,
    skip: impl Fn(usize) -> bool,
) -> (Vec<ReadFrame>, Result<(), ReadError>) {
    let mut taken = Vec::new();
    loop {
        match take_one(reader, drip, skip(taken.len())) {
            Ok(Some(frame)) => taken.push(frame),
            Ok(None) => return (taken, Ok(())),
            Err(error) => return (taken, Err(error)),
        }
    }
}

fn take_one(
    reader: &mut FrameReader,
    drip: &mut Drip<'_>,
    skip: bool,
) -> Result<Option<ReadFrame>, ReadError> {
    let mut source = |slices: &mut [IoSliceMut<'_>]| drip.read(slices);
    let (header, message) = loop {
        match reader.poll(&mut source)? {
            Poll::Pending => {}
            Poll::Closed => return Ok(None),
            Poll::Frame(header, message) => break (header, message),
        }
    };
    let mut body = vec![0; if skip { 0 } else { header.body_bytes as usize }];
    if header.body_bytes > 0 {
        let mut poll = || match skip {
            true => reader.skip_body(&mut source),
            false => reader.poll_body(&mut source, &mut body),
        };
        while poll()? == BodyPoll::Pending {}
    }
    Ok(Some(ReadFrame { header, message, body }))
}
