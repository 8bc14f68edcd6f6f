//! A stream of frames: it receives frames one by one, or serves one side of a connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{
    BodyPoll, Features, FrameProgress, FrameReader, FrameSink, Header, Message, Poll,
};
use tokio::io::Interest;
use tokio::sync::Notify;

use crate::Stream;

/// One side of a connection: the sink of its frames, and the frames that it sends.
pub trait ConnectionSide: FrameSink {
    /// Sends the frames that are due, as far as the socket takes them. Returns whether some are
    /// left.
    ///
    /// # Errors
    /// Those of the write.
    fn flush(&mut self, stream: &Stream) -> io::Result<bool>;

    /// Returns what the connection does next.
    fn phase(&self) -> ConnectionPhase;

    /// Returns the notification that frames are due or that the phase has changed.
    fn changed(&self) -> &Notify;

    /// Handles the end of a batch of reads.
    fn batch_received(&mut self, reader: &FrameReader) {
        let _ = reader;
    }

    /// Handles the begin of a wait: with `rest`, for the rest of a frame or of a write; otherwise
    /// for the next frame.
    fn wait_begins(&mut self, rest: bool) {
        let _ = rest;
    }

    /// Handles the end of that wait: the socket is ready.
    fn socket_ready(&mut self) {}
}

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionPhase {
    /// It reads and writes.
    Open,
    /// It only writes.
    WriteOnly,
    /// It is to be closed.
    Ended,
}

/// A stream of frames.
#[derive(Debug)]
pub struct FrameStream {
    stream: Stream,
    reader: FrameReader,
}

/// The result of a batch of reads.
enum BatchEnd {
    /// The socket has no more bytes.
    Blocked,
    /// The other connections are to run first.
    Yield,
    /// The peer has closed the stream.
    Closed,
}

impl FrameStream {
    /// Creates a stream that continues with this reader.
    pub fn new(stream: Stream, reader: FrameReader) -> FrameStream {
        FrameStream { stream, reader }
    }

    /// Returns the stream below.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the bytes of the last frame but those of its body; see [`FrameReader::head`].
    pub(crate) fn head(&self, header: &Header) -> &[u8] {
        self.reader.head(header)
    }

    /// Returns the stream below and the reader of its frames.
    pub fn into_parts(self) -> (Stream, FrameReader) {
        (self.stream, self.reader)
    }

    /// Allows long metas; see [`FrameReader::open`].
    pub fn open(&mut self) {
        self.reader.open();
    }

    /// Sets the features of this side; see [`FrameReader::set_features`].
    pub fn set_features(&mut self, own: Features) {
        self.reader.set_features(own);
    }

    /// Returns the features that are agreed with the peer; see [`FrameReader::features`].
    pub fn features(&self) -> Features {
        self.reader.features()
    }

    /// Receives the next frame. A body must be read before the next one. Cancel-safe: a partly read
    /// frame is kept.
    ///
    /// # Errors
    /// Those of the read; [`io::ErrorKind::UnexpectedEof`] if the peer has closed the stream.
    pub async fn next(&mut self) -> Result<(Header, Message), ReadError> {
        self.next_taking(drop).await
    }

    /// Receives the next frame like [`FrameStream::next`], and passes descriptors that arrive to
    /// `take`.
    ///
    /// # Errors
    /// As there.
    pub async fn next_taking(
        &mut self,
        mut take: impl FnMut(OwnedFd),
    ) -> Result<(Header, Message), ReadError> {
        loop {
            let stream = &self.stream;
            let mut source = |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, &mut take);
            match self.reader.poll(&mut source)? {
                Poll::Frame(header, message) => return Ok((header, message)),
                Poll::Closed => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Poll::Pending => {}
            }
            self.stream.ready(Interest::READABLE).await?;
        }
    }

    /// Receives the body of the last frame.
    ///
    /// # Errors
    /// Those of the read.
    ///
    /// # Panics
    /// If the body has another length, or if there is none.
    pub async fn body(&mut self, body: &mut [u8]) -> Result<(), ReadError> {
        loop {
            let stream = &self.stream;
            let mut source = |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, drop);
            if self.reader.poll_body(&mut source, body)? == BodyPoll::Done {
                return Ok(());
            }
            self.stream.ready(Interest::READABLE).await?;
        }
    }

    /// Sends encoded frames.
    ///
    /// # Errors
    /// Those of the write.
    pub async fn send(&mut self, frames: &[u8]) -> io::Result<()> {
        self.send_passing(frames, &[]).await
    }

    /// Sends encoded frames, and descriptors with their first byte.
    ///
    /// # Errors
    /// Those of the write; [`io::ErrorKind::Unsupported`] if the stream passes no descriptors.
    pub async fn send_passing(&mut self, frames: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
        let mut sent = 0;
        while sent < frames.len() {
            let rest = [IoSlice::new(&frames[sent..])];
            let written = match sent == 0 && !descriptors.is_empty() {
                true => self.stream.try_send(&rest, descriptors),
                false => self.stream.try_write(&rest),
            };
            match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stream.ready(Interest::WRITABLE).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Serves one side of the connection until it ends or the peer closes the stream. Received
    /// descriptors are passed to `take` before the frame that they arrived with.
    ///
    /// # Errors
    /// Those of the stream and of the protocol.
    pub async fn serve(
        &mut self,
        side: &mut impl ConnectionSide,
        mut take: impl FnMut(OwnedFd),
    ) -> Result<(), ReadError> {
        loop {
            let mut unsent = side.flush(&self.stream)?;
            let reads = match side.phase() {
                ConnectionPhase::Open => true,
                ConnectionPhase::WriteOnly => false,
                ConnectionPhase::Ended => return Ok(()),
            };
            if reads {
                let end = self.read_batch(side, &mut take, unsent)?;
                side.batch_received(&self.reader);
                match end {
                    BatchEnd::Closed => return Ok(()),
                    BatchEnd::Yield => {
                        tokio::task::yield_now().await;
                        continue;
                    }
                    BatchEnd::Blocked => {}
                }
                // The frames just read may have been answered, or may have ended the connection.
                unsent = side.flush(&self.stream)?;
            }
            let interest = match (reads, unsent) {
                (true, true) => Interest::READABLE | Interest::WRITABLE,
                (_, true) => Interest::WRITABLE,
                _ => Interest::READABLE,
            };
            side.wait_begins(unsent || self.reader.has_begun());
            tokio::select! {
                biased;
                ready = self.stream.ready(interest) => {
                    ready?;
                    side.socket_ready();
                }
                () = side.changed().notified() => {}
            }
        }
    }

    fn read_batch(
        &mut self,
        side: &mut impl ConnectionSide,
        take: &mut impl FnMut(OwnedFd),
        mut unsent: bool,
    ) -> Result<BatchEnd, ReadError> {
        let stream = &self.stream;
        let mut source = |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, &mut *take);
        for _ in 0..FRAMES_PER_BATCH {
            // Answers are sent before a read that may only return `WouldBlock`.
            if !unsent && !self.reader.has_begun() {
                unsent = side.flush(stream)?;
            }
            match self.reader.receive(&mut source, side)? {
                FrameProgress::Blocked => return Ok(BatchEnd::Blocked),
                FrameProgress::Closed => return Ok(BatchEnd::Closed),
                FrameProgress::Whole => {}
            }
            if side.phase() != ConnectionPhase::Open {
                return Ok(BatchEnd::Yield);
            }
            if stream.is_drained() && !self.reader.has_begun() {
                // The next read would only return `WouldBlock`.
                return Ok(BatchEnd::Blocked);
            }
        }
        Ok(BatchEnd::Yield)
    }
}

/// The most frames that one connection reads before it yields to the others.
const FRAMES_PER_BATCH: usize = 16;
