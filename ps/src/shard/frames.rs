//! What comes over a connection whose peer has said hello, as inputs of its shard.

use pushpull_common::protocol::decode::{ReadError, Source};
use pushpull_common::protocol::{BodyPoll, FrameReader, Poll};

use super::Input;

/// The shard that a connection leads to.
pub(crate) trait Hears {
    /// Takes in what happened.
    fn hear(&mut self, input: Input<'_>);

    /// Lends the memory for the body of the connection's last message: [`super::Shard::body_target`].
    fn with_body<R>(&mut self, connection: u64, receive: impl FnOnce(Option<&mut [u8]>) -> R) -> R;
}

/// What a read came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Came {
    /// Nothing more is there.
    Blocked,
    /// The peer has closed the stream.
    Closed,
    /// A message, or the whole body of the last one.
    Whole,
}

/// Reads a connection.
///
/// Invariant: whatever has come is told to the shard by an input before [`Frames::next`] returns, as any
/// byte renews its client's lease: a message, a body, or the progress of what is not whole yet.
#[derive(Debug)]
pub(crate) struct Frames {
    connection: u64,
    reader: FrameReader,
    /// A body is being received.
    in_body: bool,
}

impl Frames {
    /// Reads on where the hello ended.
    pub(crate) fn new(connection: u64, mut reader: FrameReader) -> Frames {
        reader.open();
        Frames { connection, reader, in_body: false }
    }

    /// How many bytes have come in all.
    pub(crate) fn bytes(&self) -> u64 {
        self.reader.bytes()
    }

    /// Whether a frame is here in part.
    pub(crate) fn has_begun(&self) -> bool {
        self.in_body || self.reader.has_begun()
    }

    /// Reads up to the end of the next message, or of the body of the last one.
    pub(crate) fn next(
        &mut self,
        source: &mut impl Source,
        shard: &mut impl Hears,
    ) -> Result<Came, ReadError> {
        let before = self.reader.bytes();
        let came = match self.in_body {
            true => self.body(source, shard)?,
            false => self.message(source, shard)?,
        };
        if came == Came::Blocked && self.reader.bytes() != before {
            shard.hear(Input::Progress { connection: self.connection });
        }
        Ok(came)
    }

    fn message(
        &mut self,
        source: &mut impl Source,
        shard: &mut impl Hears,
    ) -> Result<Came, ReadError> {
        Ok(match self.reader.poll(source)? {
            Poll::Pending => Came::Blocked,
            Poll::Closed => Came::Closed,
            Poll::Frame(header, message) => {
                self.in_body = header.body_bytes > 0;
                let (connection, header) = (self.connection, &header);
                shard.hear(Input::Message { connection, header, message });
                Came::Whole
            }
        })
    }

    fn body(
        &mut self,
        source: &mut impl Source,
        shard: &mut impl Hears,
    ) -> Result<Came, ReadError> {
        let reader = &mut self.reader;
        let polled = shard.with_body(self.connection, |target| match target {
            Some(target) => reader.poll_body(source, target),
            None => reader.skip_body(source),
        })?;
        if polled == BodyPoll::Pending {
            return Ok(Came::Blocked);
        }
        self.in_body = false;
        shard.hear(Input::Body { connection: self.connection });
        Ok(Came::Whole)
    }
}
