//! [`Transfer`]: how far one rank is with the passes of an operation.

use std::ops::Range;

use crate::schedule::{Arrival, Schedule};

/// The progress of a rank through the passes of a [`Schedule`].
///
/// - **In.** The bytes that were sent, and those that arrived.
/// - **Out.** The next bytes to send, and the place of the next bytes to arrive.
/// - **Never.** No byte is sent in a pass before the same byte has arrived in the pass before. No
///   byte is named twice.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    schedule: Schedule,
    sent: Position,
    received: Position,
}

/// The next byte of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    pass: u32,
    offset: usize,
}

/// Bytes of one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The pass.
    pub(crate) pass: u32,
    /// The offset in what the pass carries.
    pub(crate) offset: usize,
    /// The place of the bytes in the tensor.
    pub(crate) bytes: Range<usize>,
}

impl Transfer {
    /// Begins an operation.
    pub(crate) fn new(schedule: Schedule) -> Transfer {
        let mut transfer =
            Transfer { schedule, sent: Position::default(), received: Position::default() };
        transfer.skip_empty_passes();
        transfer
    }

    /// Returns the passes.
    #[cfg(test)]
    pub(crate) fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// Returns whether everything is sent and received.
    pub(crate) fn is_done(&self) -> bool {
        self.has_sent_all() && self.has_received_all()
    }

    /// Returns whether everything is sent.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.sent.pass == self.schedule.passes()
    }

    /// Returns whether everything is received.
    pub(crate) fn has_received_all(&self) -> bool {
        self.received.pass == self.schedule.passes()
    }

    /// Returns the next part to send, of at most `bytes_max` bytes; `None` if the rank must receive
    /// before, or if everything is sent.
    pub(crate) fn next_part(&self, bytes_max: usize) -> Option<Part> {
        if self.has_sent_all() {
            return None;
        }
        let Position { pass, offset } = self.sent;
        let whole = self.schedule.sends(pass);
        let available = match self.received.pass {
            _ if pass == 0 => whole.len(),
            received if received >= pass => whole.len(),
            received if received + 1 == pass => self.received.offset,
            _ => 0,
        };
        let length = available.saturating_sub(offset).min(bytes_max);
        let begin = whole.start + offset;
        (length > 0).then(|| Part { pass, offset, bytes: begin..begin + length })
    }

    /// Records that the last part of [`Transfer::next_part`] is sent, `bytes` long.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.sent.offset += bytes;
        self.skip_empty_passes();
    }

    /// Returns the part that arrives next, whole, and the handling of its bytes; `None` if
    /// everything is received.
    pub(crate) fn expected(&self) -> Option<(Part, Arrival)> {
        if self.has_received_all() {
            return None;
        }
        let Position { pass, offset } = self.received;
        let (whole, arrival) = self.schedule.receives(pass);
        Some((Part { pass, offset, bytes: whole.start + offset..whole.end }, arrival))
    }

    /// Records the arrival of the first `bytes` bytes of [`Transfer::expected`].
    pub(crate) fn received(&mut self, bytes: usize) {
        self.received.offset += bytes;
        self.skip_empty_passes();
    }

    /// Moves both positions past the passes that are whole.
    fn skip_empty_passes(&mut self) {
        let passes = self.schedule.passes();
        let schedule = self.schedule;
        self.sent.skip(passes, |pass| schedule.sends(pass).len());
        self.received.skip(passes, |pass| schedule.receives(pass).0.len());
    }
}

impl Position {
    fn skip(&mut self, passes: u32, length: impl Fn(u32) -> usize) {
        while self.pass < passes && self.offset >= length(self.pass) {
            *self = Position { pass: self.pass + 1, offset: 0 };
        }
    }
}
