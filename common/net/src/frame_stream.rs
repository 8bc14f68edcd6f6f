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
        stream.begin_reads();
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
            if !self.reader.has_begun() && stream.take_drained() {
                return Ok(BatchEnd::Blocked);
            }
        }
        Ok(BatchEnd::Yield)
    }
}

/// The most frames that one connection reads before it yields to the others.
const FRAMES_PER_BATCH: usize = 16;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use pushpull_common::protocol::message::Heartbeat;
    use pushpull_common::protocol::{BodyStamp, FrameEvent, encode};
    use tokio::net::TcpStream;

    use super::*;

    /// A side that counts heartbeats until it has all. Its peer sends the last ones at a given count.
    struct CountingSide {
        count: usize,
        all: usize,
        sends_at: usize,
        peer: std::net::TcpStream,
        /// The count at which the side stops reading for one wait.
        rests_at: usize,
        is_resting: bool,
        changed: Notify,
    }

    fn heartbeats(count: usize) -> Vec<u8> {
        let mut one = Vec::new();
        encode(&mut one, &Default::default(), &Heartbeat {}.into(), BodyStamp::plain(0));
        one.repeat(count)
    }

    impl FrameSink for CountingSide {
        fn on_frame(&mut self, event: FrameEvent<'_>) {
            let FrameEvent::Message(..) = event else { return };
            self.count += 1;
            if self.count == self.sends_at {
                self.peer.write_all(&heartbeats(LAST)).unwrap();
            }
            self.is_resting |= self.count == self.rests_at;
        }

        fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
            receive(None)
        }
    }

    impl ConnectionSide for CountingSide {
        fn flush(&mut self, _: &Stream) -> io::Result<bool> {
            Ok(false)
        }

        fn phase(&self) -> ConnectionPhase {
            match self.is_resting {
                _ if self.count == self.all => ConnectionPhase::Ended,
                true => ConnectionPhase::WriteOnly,
                false => ConnectionPhase::Open,
            }
        }

        fn changed(&self) -> &Notify {
            &self.changed
        }

        fn wait_begins(&mut self, _: bool) {
            if std::mem::take(&mut self.is_resting) {
                self.changed.notify_one();
            }
        }
    }

    const LAST: usize = 3;

    /// The runtime notices the last frames between two batches of reads, while frames of the first
    /// read are still buffered.
    #[tokio::test]
    async fn frames_that_arrive_between_two_batches_are_received() {
        let counts = [1, 2, 15, 16, 17, 18, 32, 33];
        let cases = counts.into_iter().flat_map(|first| {
            let sends_at = counts.into_iter().filter(move |&at| at <= first);
            sends_at.flat_map(move |at| [0, 1, at, first].map(|rests_at| (first, at, rests_at)))
        });
        for (first, sends_at, rests_at) in cases {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let ours = Stream::tcp(TcpStream::connect(address).await.unwrap()).unwrap();
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(&heartbeats(first)).unwrap();
            let mut side = CountingSide {
                count: 0,
                all: first + LAST,
                sends_at,
                peer,
                rests_at,
                is_resting: false,
                changed: Notify::new(),
            };
            let mut frames = FrameStream::new(ours, FrameReader::new());
            frames.open();
            let served = frames.serve(&mut side, drop);
            let served = tokio::time::timeout(std::time::Duration::from_secs(60), served).await;
            let case = format!("{first} frames, more at {sends_at}, a rest at {rests_at}");
            assert!(matches!(served, Ok(Ok(()))), "{case}: {} were received", side.count);
        }
    }
}
