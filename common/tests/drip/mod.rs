//! A stream that comes in pieces, and notes the widest read it was asked for.

use std::io::{self, IoSliceMut};

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{BodyPoll, FrameReader, Header, Message, Poll};

/// Bytes that come in reads of the given lengths, over and over, with a "would block" between.
pub(crate) struct Drip<'a> {
    rest: &'a [u8],
    steps: &'a [usize],
    sequence: usize,
    /// The most bytes that one read had room for, beyond the body's own memory.
    pub(crate) widest: usize,
}

impl<'a> Drip<'a> {
    /// # Panics
    /// If there is no step, or one is 0.
    pub(crate) fn new(rest: &'a [u8], steps: &'a [usize]) -> Self {
        assert!(!steps.is_empty() && !steps.contains(&0), "every read brings something");
        Drip { rest, steps, sequence: 0, widest: 0 }
    }

    fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        // The reader's own buffer is the last slice; before it comes the body's memory.
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

/// A frame taken off a stream, with its body.
#[derive(Debug, PartialEq)]
pub(crate) struct Taken {
    pub(crate) header: Header,
    pub(crate) message: Message,
    pub(crate) body: Vec<u8>,
}

/// Takes frames off until the stream ends, and says how it ended. Skips the bodies that `skip`
/// says, by the number of the frame; they count as empty.
pub(crate) fn take_all(
    reader: &mut FrameReader,
    drip: &mut Drip<'_>,
    skip: impl Fn(usize) -> bool,
) -> (Vec<Taken>, Result<(), ReadError>) {
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
) -> Result<Option<Taken>, ReadError> {
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
    Ok(Some(Taken { header, message, body }))
}
