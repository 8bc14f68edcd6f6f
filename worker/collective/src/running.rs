//! [`Running`]: the operation that a rank performs, between the caller's tensor and its two links.

use std::ops::Range;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::message::{Collective, RingCodec, RingOperation, RingPart};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Header, Message};

use crate::element::ElementKind;
use crate::encoded::{Contribution, Stretches};
use crate::fold;
#[cfg(test)]
use crate::planted::PlantedRingBugs;
use crate::reduction::Reduction;
use crate::schedule::{Arrival, Chunks, Schedule, ScheduleKind};
use crate::transfer::{Part, Transfer};

/// An operation under way on one rank.
///
/// - **In.** The messages of the predecessor, and the bytes of its parts.
/// - **Out.** The announcement of the operation and its parts, for the successor.
/// - **Never.** No byte of the predecessor is used before its announcement was compared with this
///   rank's.
#[derive(Debug)]
pub(crate) struct Running {
    number: Sequence,
    operation: RingOperation,
    transfer: Transfer,
    kind: ElementKind,
    /// The bytes of an element, or of an encoded stretch.
    width: usize,
    reduction: Reduction,
    ranks: u32,
    is_announced: bool,
    /// Whether the predecessor has announced the same operation. A rank without peers needs none.
    is_compared: bool,
}

/// What a rank does with a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Task<'a> {
    /// The operation, as it is announced.
    pub(crate) collective: Collective,
    /// The passes that perform it.
    pub(crate) schedule: ScheduleKind,
    /// The type of the elements.
    pub(crate) kind: ElementKind,
    /// The reduction of passes that fold.
    pub(crate) reduction: Reduction,
    /// The elements that the rank contributes.
    pub(crate) count: usize,
    /// The elements of the buffer; of an encoded reduction its stretches.
    pub(crate) elements: usize,
    /// The stretches of an encoded reduction; `None` if plain elements travel.
    pub(crate) encoded: Option<Stretches>,
    /// The name of the tensor.
    pub(crate) name: &'a str,
}

/// The memory of an operation on one rank.
pub(crate) struct Operand<'a> {
    /// The bytes that travel: elements, or encoded stretches.
    pub(crate) bytes: &'a mut [u8],
    /// The elements that the rank adds to encoded stretches; `None` if the bytes are its elements.
    pub(crate) contribution: Option<&'a mut dyn Contribution>,
}

impl Operand<'_> {
    /// A tensor whose elements travel.
    pub(crate) fn elements(bytes: &mut [u8]) -> Operand<'_> {
        Operand { bytes, contribution: None }
    }
}

/// The place for the bytes of a part that arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// They are stored in the tensor.
    Store(Range<usize>),
    /// They are received beside the tensor and folded into it.
    Fold(Range<usize>, bool),
}

/// A fault of the predecessor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    /// It performs another operation.
    Difference(RingOperation),
    /// It breaks the protocol.
    Protocol(String),
    /// A sum of integers exceeds their type.
    Overflow {
        /// The index of the element in the tensor.
        element: usize,
    },
}

impl Running {
    /// Begins an operation of a rank in a ring of `ranks`.
    pub(crate) fn new(number: Sequence, task: &Task<'_>, rank: u32, ranks: u32) -> Running {
        let width = task.encoded.map_or(task.kind.size(), |stretches| stretches.width());
        let chunks = Chunks::new(task.elements, width, ranks);
        let schedule = Schedule::new(task.schedule, rank, ranks, chunks);
        Running {
            number,
            operation: RingOperation {
                collective: task.collective,
                elements: task.kind.code(),
                count: task.count as u64,
                name: Text::shortened(task.name),
                codec: task.encoded.and_then(|stretches| RingCodec::of(stretches.codec())),
            },
            transfer: Transfer::new(schedule),
            kind: task.kind,
            width,
            reduction: task.reduction,
            ranks,
            is_announced: ranks == 1,
            is_compared: ranks == 1,
        }
    }

    /// Plants a bug in the schedule.
    #[cfg(test)]
    pub(crate) fn with_planted(mut self, planted: PlantedRingBugs) -> Running {
        self.transfer = Transfer::new(self.transfer.schedule().with_planted(planted));
        self
    }

    /// Returns the number of the operation.
    pub(crate) fn number(&self) -> Sequence {
        self.number
    }

    /// Returns the description of the operation.
    pub(crate) fn operation(&self) -> &RingOperation {
        &self.operation
    }

    /// Returns whether everything is sent and received.
    pub(crate) fn is_done(&self) -> bool {
        self.is_announced && self.is_compared && self.transfer.is_done()
    }

    /// Returns whether frames of the predecessor are missing.
    pub(crate) fn expects(&self) -> bool {
        !self.is_compared || !self.transfer.has_received_all()
    }

    /// Returns the announcement, once.
    pub(crate) fn announcement(&mut self) -> Option<RingOperation> {
        let announces = !std::mem::replace(&mut self.is_announced, true);
        announces.then(|| self.operation.clone())
    }

    /// Returns the next part to send, of whole elements; see [`Transfer::next_part`].
    pub(crate) fn next_part(&self, bytes_max: usize) -> Option<Part> {
        self.transfer.next_part((bytes_max / self.width).max(1) * self.width)
    }

    /// Records that the last part is sent.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.transfer.sent(bytes);
    }

    /// Takes a message of the predecessor. Returns the place for its body, if it has one.
    pub(crate) fn message(
        &mut self,
        header: &Header,
        message: &Message,
    ) -> Result<Option<Target>, Fault> {
        if header.sequence != self.number {
            let detail = format!(
                "{} of operation {} during operation {}",
                message.name(),
                header.sequence,
                self.number
            );
            return Err(Fault::Protocol(detail));
        }
        match message {
            Message::RingOperation(other) if !self.is_compared => match *other == self.operation {
                true => {
                    self.is_compared = true;
                    Ok(None)
                }
                false => Err(Fault::Difference(other.clone())),
            },
            Message::RingPart(part) if self.is_compared => {
                self.target(part, header.body_bytes).map(Some)
            }
            other => Err(Fault::Protocol(format!("an unexpected {}", other.name()))),
        }
    }

    fn target(&self, part: &RingPart, bytes: u64) -> Result<Target, Fault> {
        let place = |part: &Part| format!("pass {} at {}", part.pass, part.offset);
        let Some((expected, arrival)) = self.transfer.expected() else {
            return Err(Fault::Protocol(format!("pass {} after the last", part.pass)));
        };
        if (part.pass, part.offset) != (expected.pass, expected.offset as u64) {
            let found = format!("pass {} at {}", part.pass, part.offset);
            return Err(Fault::Protocol(format!("{found} in place of {}", place(&expected))));
        }
        let width = self.width;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        if length == 0 || length > expected.bytes.len() || length % width != 0 {
            let most = expected.bytes.len();
            let of = place(&expected);
            return Err(Fault::Protocol(format!("{bytes} bytes for {of}, which takes {most}")));
        }
        let begin = expected.bytes.start;
        let range = begin..begin + length;
        Ok(match arrival {
            Arrival::Store => Target::Store(range),
            Arrival::Fold { is_last } => Target::Fold(range, is_last),
        })
    }

    /// Takes the whole body of a part: `operand` has it already if it was stored, `beside` has it
    /// otherwise.
    ///
    /// # Errors
    /// [`Fault::Overflow`], and [`Fault::Protocol`] for stretches that do not decode.
    pub(crate) fn arrived(
        &mut self,
        target: &Target,
        operand: &mut Operand<'_>,
        beside: &[u8],
    ) -> Result<(), Fault> {
        let (Target::Store(range) | Target::Fold(range, _)) = target;
        if let Target::Fold(_, is_last) = target {
            let arrived = &beside[..range.len()];
            let own = &mut operand.bytes[range.clone()];
            match &mut operand.contribution {
                None => self.fold(range, arrived, own, *is_last)?,
                Some(contribution) => {
                    contribution.add(range.clone(), arrived, own).map_err(Fault::Protocol)?;
                }
            }
        }
        self.transfer.received(range.len());
        Ok(())
    }

    /// Folds elements into the rank's own.
    fn fold(
        &self,
        range: &Range<usize>,
        arrived: &[u8],
        own: &mut [u8],
        is_last: bool,
    ) -> Result<(), Fault> {
        let folded = fold::fold(self.kind, self.reduction, arrived, own);
        folded.map_err(|overflow| Fault::Overflow {
            element: range.start / self.kind.size() + overflow.index,
        })?;
        if is_last {
            fold::finish(self.kind, self.reduction, self.ranks, own);
        }
        Ok(())
    }
}
