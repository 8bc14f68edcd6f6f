//! Receives the frames of a connection after its hello, as inputs of a shard.

use pushpull_common::protocol::decode::{ReadError, Source};
use pushpull_common::protocol::{BodyPoll, FrameReader, Poll};

use super::ShardInput;

/// The shard that a connection leads to.
pub(crate) trait FrameSink {
    /// Handles an input.
    fn frame_input(&mut self, input: ShardInput<'_>);

    /// Calls `receive` with the memory for the body of the connection's last message:
    /// [`super::Shard::body_target`].
    fn with_body<R>(&mut self, connection: u64, receive: impl FnOnce(Option<&mut [u8]>) -> R) -> R;
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameProgress {
    /// There are no more bytes now.
    Blocked,
    /// The peer has closed the stream.
    Closed,
    /// A message, or the complete body of the last one, has arrived.
    Whole,
}

/// Receives the frames of one connection.
///
/// Invariant: before [`FrameReceiver::next`] returns, the shard has an input for everything
/// received: a message, a body, or progress in an incomplete one. Every byte renews the lease of
/// its client.
#[derive(Debug)]
pub(crate) struct FrameReceiver {
    connection: u64,
    reader: FrameReader,
    /// A body is being received.
    in_body: bool,
}

impl FrameReceiver {
    /// Continues where the hello ended.
    pub(crate) fn new(connection: u64, mut reader: FrameReader) -> FrameReceiver {
        reader.open();
        FrameReceiver { connection, reader, in_body: false }
    }

    /// Returns how many bytes have arrived in total.
    pub(crate) fn bytes(&self) -> u64 {
        self.reader.bytes()
    }

    /// Returns whether a frame has arrived in part.
    pub(crate) fn has_begun(&self) -> bool {
        self.in_body || self.reader.has_begun()
    }

    /// Reads up to the end of the next message, or of the body of the last one.
    pub(crate) fn next(
        &mut self,
        source: &mut impl Source,
        shard: &mut impl FrameSink,
    ) -> Result<FrameProgress, ReadError> {
        let before = self.reader.bytes();
        let came = match self.in_body {
            true => self.body(source, shard)?,
            false => self.message(source, shard)?,
        };
        if came == FrameProgress::Blocked && self.reader.bytes() != before {
            shard.frame_input(ShardInput::Progress { connection: self.connection });
        }
        Ok(came)
    }

    fn message(
        &mut self,
        source: &mut impl Source,
        shard: &mut impl FrameSink,
    ) -> Result<FrameProgress, ReadError> {
        Ok(match self.reader.poll(source)? {
            Poll::Pending => FrameProgress::Blocked,
            Poll::Closed => FrameProgress::Closed,
            Poll::Frame(header, message) => {
                self.in_body = header.body_bytes > 0;
                let (connection, header) = (self.connection, &header);
                shard.frame_input(ShardInput::Message { connection, header, message });
                FrameProgress::Whole
            }
        })
    }

    fn body(
        &mut self,
        source: &mut impl Source,
        shard: &mut impl FrameSink,
    ) -> Result<FrameProgress, ReadError> {
        let reader = &mut self.reader;
        let polled = shard.with_body(self.connection, |target| match target {
            Some(target) => reader.poll_body(source, target),
            None => reader.skip_body(source),
        })?;
        if polled == BodyPoll::Pending {
            return Ok(FrameProgress::Blocked);
        }
        self.in_body = false;
        shard.frame_input(ShardInput::Body { connection: self.connection });
        Ok(FrameProgress::Whole)
    }
}
