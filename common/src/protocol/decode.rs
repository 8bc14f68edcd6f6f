//! Reads frames from a byte stream without copying bodies.
//!
//! [`FrameReader`] reads through a function that behaves like a non-blocking socket. Headers and
//! metas go through a small buffer. A body goes directly into its target; only the first bytes, if
//! they arrived with the header, are copied.

use std::io::{self, IoSliceMut};

use super::error::ProtocolError;
use super::feature::Features;
use super::header::{FLAG_BODY_CRC, Header, bound};
use super::limits;
use super::message::Message;

/// The reason why reading stopped: the stream failed, or the peer broke the protocol.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The stream failed.
    #[error("cannot read from the connection")]
    Io(#[from] io::Error),
    /// The peer broke the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// The result of [`FrameReader::poll`].
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "lives on the stack for one call")]
pub enum Poll {
    /// No whole frame is available yet.
    Pending,
    /// The peer closed the stream between two frames.
    Closed,
    /// A header and its message. If `header.body_bytes` is not 0, the body must be read with
    /// [`FrameReader::poll_body`] or [`FrameReader::skip_body`] before the next poll.
    Frame(Header, Message),
}

/// The progress of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyPoll {
    /// More bytes are outstanding.
    Pending,
    /// The body is whole, and its checksum, if present, is correct.
    Done,
}

/// The receiver of a connection's frames: a state machine and the memory for its bodies.
pub trait FrameSink {
    /// Handles an event of the connection.
    fn on_frame(&mut self, event: FrameEvent<'_>);

    /// Calls `receive` with the memory for the body of the last message, which must have the length
    /// of the body. `None` discards the body.
    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R;
}

/// An event of a connection, for a [`FrameSink`].
#[derive(Debug)]
pub enum FrameEvent<'a> {
    /// A message has arrived. Its body follows, if it has one.
    Message(&'a Header, Message),
    /// The body of the last message is whole.
    Body,
    /// Bytes of an incomplete frame have arrived.
    Progress,
}

/// The result of [`FrameReader::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameProgress {
    /// No more bytes are available now.
    Blocked,
    /// The peer closed the stream between two frames.
    Closed,
    /// A message, or the whole body of the last one, has arrived.
    Whole,
}

/// A function that reads into the buffers in order and returns the number of bytes read.
///
/// It returns 0 at the end of the stream and [`io::ErrorKind::WouldBlock`] if nothing is available.
pub trait ReadSource: FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize> {}
impl<F: FnMut(&mut [IoSliceMut<'_>]) -> io::Result<usize>> ReadSource for F {}

/// Returns a source of these bytes, for callers without a socket. At their end the source has
/// nothing available.
pub fn slice_source(mut bytes: &[u8]) -> impl ReadSource {
    move |slices: &mut [IoSliceMut<'_>]| match bytes.is_empty() {
        true => Err(io::ErrorKind::WouldBlock.into()),
        false => io::Read::read_vectored(&mut bytes, slices),
    }
}

/// Reads frames from a byte stream.
///
/// A reader knows the features of its own side. It learns those of the peer from the message that
/// opens the peer's side of the connection, and then expects the fields of the agreed ones.
///
/// Invariants: `start <= end <= buffer.len()`. The buffer never grows beyond a header and the
/// largest meta allowed. While a body is read, `body` holds its header.
#[derive(Debug)]
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    meta_bytes_max: u32,
    body: Option<BodyProgress>,
    closed: bool,
    bytes: u64,
    own: Features,
    peer: Features,
}

#[derive(Debug)]
struct BodyProgress {
    header: Header,
    taken: u64,
}

impl FrameReader {
    /// Creates a reader for an unauthenticated client: metas are limited to
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
            own: Features::NONE,
            peer: Features::NONE,
        }
    }

    /// Sets the features of this side. Default: none.
    pub fn set_features(&mut self, own: Features) {
        self.own = own;
    }

    /// Returns the features that are agreed with the peer; none before it has opened its side.
    pub fn features(&self) -> Features {
        self.own.agreed(self.peer)
    }

    /// Raises the limit of metas to [`limits::META_BYTES_MAX`], once the handshake is done.
    pub fn open(&mut self) {
        self.meta_bytes_max = limits::META_BYTES_MAX;
    }

    /// Returns the bytes of the header and of the meta of the frame that the last
    /// [`poll`](FrameReader::poll) has returned, by its header. Nothing must have been received since.
    ///
    /// # Panics
    /// If the frame was not the last one.
    pub fn head(&self, header: &Header) -> &[u8] {
        &self.buffer[self.start - Header::BYTES - header.meta_bytes as usize..self.start]
    }

    /// Returns the number of bytes received in total; each of them renews a lease.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether a frame is incomplete: part of its header or meta has arrived, or its body
    /// is being read.
    pub fn has_begun(&self) -> bool {
        self.body.is_some() || self.end > self.start
    }

    /// Receives the next message, or the body of the last one, into a sink.
    ///
    /// Before this returns, the sink has an event for everything received: every byte renews the
    /// lease of its sender.
    ///
    /// # Panics
    /// If the sink's memory has another length than the body.
    pub fn receive(
        &mut self,
        source: &mut impl ReadSource,
        sink: &mut impl FrameSink,
    ) -> Result<FrameProgress, ReadError> {
        let before = self.bytes;
        if self.body.is_some() {
            let polled = sink.with_body(|targets| match targets {
                Some(targets) => self.poll_body_scattered(source, targets),
                None => self.skip_body(source),
            })?;
            if polled == BodyPoll::Done {
                sink.on_frame(FrameEvent::Body);
                return Ok(FrameProgress::Whole);
            }
        } else {
            match self.poll(source)? {
                Poll::Frame(header, message) => {
                    sink.on_frame(FrameEvent::Message(&header, message));
                    return Ok(FrameProgress::Whole);
                }
                Poll::Closed => return Ok(FrameProgress::Closed),
                Poll::Pending => {}
            }
        }
        if self.bytes != before {
            sink.on_frame(FrameEvent::Progress);
        }
        Ok(FrameProgress::Blocked)
    }

    /// Returns the next frame, if `source` has all of its header and meta.
    ///
    /// # Panics
    /// If the caller has not read the body of the last frame. Bytes from the peer never cause a
    /// panic.
    pub fn poll(&mut self, source: &mut impl ReadSource) -> Result<Poll, ReadError> {
        assert!(self.body.is_none(), "the last frame's body must be read before the next poll");
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

    /// Reads the available bytes of the body into `target`, which must have the length of the body.
    /// Pass the same target on each call until the body is done.
    ///
    /// # Panics
    /// If the target has another length than the body, or if no body is being read.
    pub fn poll_body(
        &mut self,
        source: &mut impl ReadSource,
        target: &mut [u8],
    ) -> Result<BodyPoll, ReadError> {
        self.poll_body_scattered(source, &mut [target])
    }

    /// Reads the available bytes of the body into several targets, one after the other; see
    /// [`FrameReader::poll_body`]. The targets together must have the length of the body.
    ///
    /// # Panics
    /// If the targets have another length than the body, or if no body is being read.
    pub fn poll_body_scattered(
        &mut self,
        source: &mut impl ReadSource,
        targets: &mut [&mut [u8]],
    ) -> Result<BodyPoll, ReadError> {
        let (header, mut taken) = self.progress();
        let length: usize = targets.iter().map(|target| target.len()).sum();
        assert_eq!(length as u64, header.body_bytes, "the targets must be as long as the body");
        while taken < length && self.end > self.start {
            let rest = first_unfilled(targets, taken);
            let count = rest.len().min(self.end - self.start);
            rest[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.start += count;
            taken += count;
        }
        while taken < length {
            // The same call also reads the bytes that follow the body, usually the next header.
            self.reserve(limits::READ_BUFFER_BYTES);
            let mut slices = [(); SLICES_MAX + 1].map(|()| IoSliceMut::new(&mut []));
            let mut listed = unfilled(targets, taken, &mut slices[..SLICES_MAX]);
            let required: usize = slices[..listed].iter().map(|slice| slice.len()).sum();
            if required == length - taken {
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
            let into_targets = count.min(required);
            taken += into_targets;
            self.end += count - into_targets;
        }
        self.advance(taken, header, |header| check_crc(header, targets))
    }

    /// Reads past the body without keeping it. Its checksum is not checked.
    ///
    /// # Panics
    /// If no body is being read.
    pub fn skip_body(&mut self, source: &mut impl ReadSource) -> Result<BodyPoll, ReadError> {
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

    /// Parses a header and meta from the buffer, if they are complete.
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
        let message = Message::take(header.kind, self.features(), meta)?;
        self.peer = Features::of_peer(&message).unwrap_or(self.peer);
        self.start = meta_end;
        Ok(Some((header, message)))
    }

    /// Reads once into the buffer; returns false if nothing is available.
    fn fill(&mut self, source: &mut impl ReadSource) -> Result<bool, ReadError> {
        self.reserve(self.required());
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

    /// Returns the bytes that the buffer must hold for its first frame. `parse` runs before every
    /// `fill`, so that frame's header has been checked.
    fn required(&self) -> usize {
        let meta = match self.buffer.get(self.start..self.end).and_then(|b| b.first_chunk()) {
            Some(head) if self.body.is_none() => Header::take(head).map_or(0, |h| h.meta_bytes),
            _ => 0,
        };
        (Header::BYTES + meta as usize).max(limits::READ_BUFFER_BYTES)
    }

    /// Moves the buffered bytes to the front and resizes the buffer to `size`. Shrinks it again
    /// after a large meta has been read.
    fn reserve(&mut self, size: usize) {
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

/// The most slices of one read; the limit of the system is far higher.
const SLICES_MAX: usize = 64;

/// Lists the targets behind the first `taken` bytes, as far as `slices` suffices. Returns the
/// number of slices listed.
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

/// Returns the rest of the target that contains byte `taken` of the body.
fn first_unfilled<'a>(targets: &'a mut [&mut [u8]], mut taken: usize) -> &'a mut [u8] {
    for target in targets {
        if taken < target.len() {
            return &mut target[taken..];
        }
        taken -= target.len();
    }
    &mut []
}

/// Reads once; `None` if nothing is available.
fn read_once(
    source: &mut impl ReadSource,
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
mod tests;
