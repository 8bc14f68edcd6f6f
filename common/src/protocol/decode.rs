//! From a stream of bytes to frames, without a copy of any body.
//!
//! [`FrameReader`] is given a function that reads as much as is there, like a non-blocking
//! socket's. Headers and metas go through a small buffer; a body goes straight to the slice its
//! owner lends, and only its first bytes, if they came with the header, are copied.

use std::io::{self, IoSliceMut};

use super::error::ProtocolError;
use super::header::{FLAG_BODY_CRC, Header, bound};
use super::limits;
use super::message::Message;

/// Why reading stopped: the stream failed, or the peer broke the protocol.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The stream failed.
    #[error("cannot read from the connection: {0}")]
    Io(#[from] io::Error),
    /// The peer broke the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// What [`FrameReader::poll`] found.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "lives on the stack for one call")]
pub enum Poll {
    /// Nothing more is there for now.
    Pending,
    /// The peer closed the stream between two frames.
    Closed,
    /// A header and its message. If `header.body_bytes` is not 0, the body must be taken with
    /// [`FrameReader::poll_body`] or [`FrameReader::skip_body`] before the next poll.
    Frame(Header, Message),
}

/// What became of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyPoll {
    /// More is to come.
    Pending,
    /// It is whole, and its checksum, if it carries one, is right.
    Done,
}

/// A function that reads into the buffers in order, and returns how many bytes it read; 0 at the
/// end, [`io::ErrorKind::WouldBlock`] when nothing is there.
pub trait Source: FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize> {}
impl<F: FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize>> Source for F {}

/// Takes frames off a byte stream.
///
/// Invariants: `start <= end <= buffer.len()`; the buffer never grows beyond a header and the
/// largest meta allowed; while a body is being taken, `body` holds its header.
#[derive(Debug)]
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    meta_bytes_max: u32,
    body: Option<BodyProgress>,
    closed: bool,
    bytes: u64,
}

#[derive(Debug)]
struct BodyProgress {
    header: Header,
    taken: u64,
}

impl FrameReader {
    /// A reader for a stream whose peer is not known yet: metas are bounded by
    /// [`limits::HANDSHAKE_META_BYTES_MAX`].
    pub fn new() -> Self {
        FrameReader {
            buffer: Vec::new(),
            start: 0,
            end: 0,
            meta_bytes_max: limits::HANDSHAKE_META_BYTES_MAX,
            body: None,
            closed: false,
            bytes: 0,
        }
    }

    /// Allows metas of any length the protocol knows: the handshake is done.
    pub fn open(&mut self) {
        self.meta_bytes_max = limits::META_BYTES_MAX;
    }

    /// How many bytes have come in all; every one of them renews a lease.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a frame is half here: its header or meta has begun, or its body is being taken.
    pub fn has_begun(&self) -> bool {
        self.body.is_some() || self.end > self.start
    }

    /// The next frame, as far as `source` has it.
    ///
    /// # Panics
    /// Never on anything the peer sent; only if the caller has left a body untaken.
    pub fn poll(&mut self, source: &mut impl Source) -> Result<Poll, ReadError> {
        assert!(self.body.is_none(), "the body of the last frame is taken before the next poll");
        loop {
            if let Some((header, message)) = self.parse()? {
                if header.body_bytes > 0 {
                    self.body = Some(BodyProgress { header, taken: 0 });
                }
                return Ok(Poll::Frame(header, message));
            }
            if self.closed {
                return match self.end - self.start {
                    0 => Ok(Poll::Closed),
                    cut => Err(ProtocolError::Cut { bytes: cut as u64 }.into()),
                };
            }
            if !self.fill(source)? {
                return Ok(Poll::Pending);
            }
        }
    }

    /// Takes as much of the body as is there into `target`, the whole of which the body will
    /// fill. The same target must be lent each time until the body is done.
    ///
    /// # Panics
    /// If the target is not as long as the body, or no body is being taken.
    pub fn poll_body(
        &mut self,
        source: &mut impl Source,
        target: &mut [u8],
    ) -> Result<BodyPoll, ReadError> {
        self.poll_body_scattered(source, &mut [target])
    }

    /// As [`FrameReader::poll_body`], into several targets one after the other, which together
    /// are as long as the body.
    ///
    /// # Panics
    /// As [`FrameReader::poll_body`].
    pub fn poll_body_scattered(
        &mut self,
        source: &mut impl Source,
        targets: &mut [&mut [u8]],
    ) -> Result<BodyPoll, ReadError> {
        let (header, mut taken) = self.progress();
        let length: usize = targets.iter().map(|target| target.len()).sum();
        assert_eq!(length as u64, header.body_bytes, "the targets are as long as the body");
        while taken < length && self.end > self.start {
            let rest = first_unfilled(targets, taken);
            let count = rest.len().min(self.end - self.start);
            rest[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.start += count;
            taken += count;
        }
        while taken < length {
            // Whatever follows the body, usually the next header, comes in the same call.
            self.make_room(limits::READ_BUFFER_BYTES);
            let mut slices = [(); SLICES_MAX + 1].map(|()| IoSliceMut::new(&mut []));
            let mut listed = unfilled(targets, taken, &mut slices[..SLICES_MAX]);
            let wanted: usize = slices[..listed].iter().map(|slice| slice.len()).sum();
            if wanted == length - taken {
                slices[listed] = IoSliceMut::new(&mut self.buffer[self.end..]);
                listed += 1;
            }
            let count = match read_once(source, &mut slices[..listed])? {
                None => break,
                Some(0) => {
                    self.closed = true;
                    return Err(self.cut(taken as u64).into());
                }
                Some(count) => count,
            };
            self.bytes += count as u64;
            let into_targets = count.min(wanted);
            taken += into_targets;
            self.end += count - into_targets;
        }
        self.advance(taken, header, |header| check_crc(header, targets))
    }

    /// Reads past the body without keeping it. Its checksum is not looked at.
    ///
    /// # Panics
    /// If no body is being taken.
    pub fn skip_body(&mut self, source: &mut impl Source) -> Result<BodyPoll, ReadError> {
        let (header, mut taken) = self.progress();
        let length = header.body_bytes as usize;
        loop {
            let buffered = (self.end - self.start).min(length - taken);
            self.start += buffered;
            taken += buffered;
            if taken == length {
                break;
            }
            match self.fill(source)? {
                true if self.closed => return Err(self.cut(taken as u64).into()),
                true => {}
                false => break,
            }
        }
        self.advance(taken, header, |_| Ok(()))
    }

    fn progress(&self) -> (Header, usize) {
        let body = self.body.as_ref().expect("a frame with a body was polled");
        (body.header, body.taken as usize)
    }

    fn advance(
        &mut self,
        taken: usize,
        header: Header,
        check: impl FnOnce(&Header) -> Result<(), ProtocolError>,
    ) -> Result<BodyPoll, ReadError> {
        if (taken as u64) < header.body_bytes {
            self.body = Some(BodyProgress { header, taken: taken as u64 });
            return Ok(BodyPoll::Pending);
        }
        self.body = None;
        check(&header)?;
        Ok(BodyPoll::Done)
    }

    fn cut(&self, taken: u64) -> ProtocolError {
        let (header, _) = self.progress();
        ProtocolError::Cut { bytes: Header::BYTES as u64 + u64::from(header.meta_bytes) + taken }
    }

    /// A whole header and meta off the buffer, if they are there.
    fn parse(&mut self) -> Result<Option<(Header, Message)>, ProtocolError> {
        let Some(head) = self.buffer[self.start..self.end].first_chunk() else {
            return Ok(None);
        };
        let header = Header::take(head)?;
        bound("its meta", header.meta_bytes.into(), self.meta_bytes_max.into())?;
        let meta_start = self.start + Header::BYTES;
        let meta_end = meta_start + header.meta_bytes as usize;
        if meta_end > self.end {
            return Ok(None);
        }
        let meta = &self.buffer[meta_start..meta_end];
        let computed = crc32c::crc32c(meta);
        if computed != header.meta_crc {
            return Err(ProtocolError::Crc { what: "meta", found: header.meta_crc, computed });
        }
        let message = Message::take(header.kind, meta)?;
        self.start = meta_end;
        Ok(Some((header, message)))
    }

    /// Reads once into the buffer; false when nothing is there.
    fn fill(&mut self, source: &mut impl Source) -> Result<bool, ReadError> {
        self.make_room(self.wanted());
        let mut slices = [IoSliceMut::new(&mut self.buffer[self.end..])];
        match read_once(source, &mut slices)? {
            None => return Ok(false),
            Some(0) => self.closed = true,
            Some(count) => {
                self.bytes += count as u64;
                self.end += count;
            }
        }
        Ok(true)
    }

    /// How much the buffer must hold for the frame at its front. The header there has been
    /// checked by `parse`, which runs before every `fill`.
    fn wanted(&self) -> usize {
        let meta = match self.buffer.get(self.start..self.end).and_then(|b| b.first_chunk()) {
            Some(head) if self.body.is_none() => Header::take(head).map_or(0, |h| h.meta_bytes),
            _ => 0,
        };
        (Header::BYTES + meta as usize).max(limits::READ_BUFFER_BYTES)
    }

    /// Moves what is buffered to the front and makes the buffer `size` long, so that there is
    /// room behind it; gives back what a large meta needed once it has been read.
    fn make_room(&mut self, size: usize) {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let size = size.max(self.end + 1);
        if self.buffer.len() < size || self.buffer.len() > 2 * size {
            self.buffer.resize(size, 0);
            self.buffer.shrink_to(size);
        }
    }
}

impl Default for FrameReader {
    fn default() -> Self {
        FrameReader::new()
    }
}

/// How many slices one read is given; the system has a limit of its own far above.
const SLICES_MAX: usize = 64;

/// Lists the rest of the targets behind the first `taken` bytes, as many as there is room for; how many
/// those are.
fn unfilled<'a>(
    targets: &'a mut [&mut [u8]],
    mut taken: usize,
    slices: &mut [IoSliceMut<'a>],
) -> usize {
    let mut listed = 0;
    for target in targets {
        let skip = taken.min(target.len());
        taken -= skip;
        if skip < target.len() && listed < slices.len() {
            slices[listed] = IoSliceMut::new(&mut target[skip..]);
            listed += 1;
        }
    }
    listed
}

/// The rest of the target in which the body's byte `taken` lies.
fn first_unfilled<'a>(targets: &'a mut [&mut [u8]], mut taken: usize) -> &'a mut [u8] {
    for target in targets {
        if taken < target.len() {
            return &mut target[taken..];
        }
        taken -= target.len();
    }
    &mut []
}

/// One read, with "nothing there" as a value.
fn read_once(
    source: &mut impl Source,
    slices: &mut [IoSliceMut<'_>],
) -> Result<Option<usize>, io::Error> {
    loop {
        match source(slices) {
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn check_crc(header: &Header, body: &[&mut [u8]]) -> Result<(), ProtocolError> {
    if header.flags & FLAG_BODY_CRC == 0 {
        return Ok(());
    }
    let computed = body.iter().fold(0, |crc, part| crc32c::crc32c_append(crc, part));
    if header.body_crc != computed {
        return Err(ProtocolError::Crc { what: "body", found: header.body_crc, computed });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::encode::{BodyStamp, Envelope, encode};
    use super::super::message::{Heartbeat, Pulled};
    use super::*;

    /// Hands out `bytes` in reads of at most `step`, with a "would block" before each.
    fn drip(bytes: Vec<u8>, step: usize) -> impl Source {
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
    fn any_chopping_of_the_stream_reads_the_same() {
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
    fn a_skipped_body_leaves_the_stream_in_step() {
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
    fn a_damaged_body_and_a_cut_stream_are_refused() {
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
}
