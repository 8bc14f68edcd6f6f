//! [`Incoming`]: the frames of the predecessor, as they arrive.

use pushpull_common::protocol::decode::ReadSource;
use pushpull_common::protocol::{BodyPoll, FrameReader, Poll};

use super::LinkFault;
use crate::running::{Operand, Running, Target};

/// The frames of the predecessor. The predecessor may send anything.
///
/// - **In.** The bytes of a source, in pieces of any length.
/// - **Out.** Whether a frame or a body has arrived, or the fault after which none may follow.
/// - **Never.** Nothing is written outside the range of the tensor that the operation expects next.
///   No memory is taken for a body before its length was compared with that.
#[derive(Debug)]
pub(crate) struct Incoming {
    reader: FrameReader,
    /// The part whose body is being received.
    target: Option<Target>,
    /// The bodies of parts that are folded, in words so that every element is aligned.
    beside: Vec<u64>,
    /// The bytes of tensors that have arrived.
    received: u64,
}

impl Incoming {
    /// Continues the stream of a reader.
    pub(crate) fn new(reader: FrameReader) -> Incoming {
        Incoming { reader, target: None, beside: Vec::new(), received: 0 }
    }

    /// Returns the bytes of tensors that have arrived.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Receives one frame or body, if it is available. Returns whether anything arrived.
    ///
    /// # Errors
    /// If the predecessor is gone, breaks the protocol or performs another operation, and if a sum
    /// overflows.
    pub(crate) fn receive(
        &mut self,
        source: &mut impl ReadSource,
        running: &mut Running,
        operand: &mut Operand<'_>,
    ) -> Result<bool, LinkFault> {
        if let Some(target) = &self.target {
            let polled = match target {
                Target::Store(range) => {
                    self.reader.poll_body(source, &mut operand.bytes[range.clone()])?
                }
                Target::Fold(range, _) => {
                    let beside = bytemuck::cast_slice_mut(&mut self.beside);
                    self.reader.poll_body(source, &mut beside[..range.len()])?
                }
            };
            if polled == BodyPoll::Pending {
                return Ok(false);
            }
            running.arrived(target, operand, bytemuck::cast_slice(&self.beside))?;
            let (Target::Store(range) | Target::Fold(range, _)) = target;
            self.received += range.len() as u64;
            self.target = None;
            return Ok(true);
        }
        if !running.expects() {
            return Ok(false);
        }
        match self.reader.poll(source)? {
            Poll::Pending => Ok(false),
            Poll::Closed => Err(LinkFault::Predecessor("it has closed the connection".to_owned())),
            Poll::Frame(header, message) => {
                self.target = running.message(&header, &message)?;
                match &self.target {
                    Some(Target::Fold(range, _)) => {
                        let words = range.len().div_ceil(size_of::<u64>());
                        self.beside.resize(self.beside.len().max(words), 0);
                    }
                    Some(Target::Store(_)) => {}
                    None if header.body_bytes > 0 => {
                        let name = message.name();
                        let detail = format!("a {name} with a body");
                        return Err(LinkFault::Predecessor(detail));
                    }
                    None => {}
                }
                Ok(true)
            }
        }
    }

    /// Returns the bytes of memory for bodies, and the place of the one that arrives.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn memory(&self) -> (usize, Option<&Target>) {
        (size_of_val(&self.beside[..]), self.target.as_ref())
    }
}
