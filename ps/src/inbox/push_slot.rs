//! A push slot, and the push that is received in it: its ranges and the memory of its values.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::finite::Exponents;
use pushpull_common::ids::{GlobalStep, RequestId, Sequence, TokenId};
use pushpull_common::protocol::EffectRef;
use pushpull_common::protocol::message::Operation;
use pushpull_optim::volatile::Volatile;
use pushpull_store::arena::SharedBytes;
use smallvec::SmallVec;

use crate::client_key::ClientKey;

/// The maximum size of a piece that is copied out for a scan, in bytes. It stays in the first-level
/// cache meanwhile.
const PIECE_BYTES: u64 = 8 << 10;

/// A push that is being received, or that is whole and waits to be applied.
#[derive(Debug)]
pub(crate) struct PushArrival {
    pub(crate) sequence: Sequence,
    pub(crate) operation: Operation,
    pub(crate) token: TokenId,
    pub(crate) generation: u32,
    /// The effect that the push has, if it counts once for one.
    pub(crate) effect: Option<EffectRef>,
    pub(crate) step: GlobalStep,
    /// The number of gradients in the values that the push was computed from, as reported by the
    /// client. Not durable.
    pub(crate) read: Option<u64>,
    pub(crate) extents: Extents,
    /// The extents that are in a push buffer: whole, dense partitions. Not durable.
    pub(crate) shared: Extents,
    /// Whether these must be scanned before the push counts. Not durable.
    pub(crate) scanning: bool,
    /// The number of bytes received.
    pub(crate) bytes: u64,
    /// The pending answer to the last request of the push; set once the push is whole.
    pub(crate) whole: Option<PendingAnswer>,
    /// The order of arrival among whole pushes; 0 until the push is whole.
    pub(crate) order: u64,
    /// The sum of the squares of its elements, once computed. Not durable.
    pub(crate) squares: Option<f64>,
}

/// The ranges of a push that have been received, merged.
///
/// Invariants: ascending, not empty, not adjacent. Each starts at a partition or at a partition's
/// row index, so there are at most twice as many as partitions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents(SmallVec<[Range<u64>; FEW]>);

/// The number of ranges that need no heap. Most pushes have fewer.
const FEW: usize = 4;

/// A part at a wrong position: where it had to start, or the limit that it exceeds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MisplacedPart {
    pub(crate) limit: u64,
}

impl Extents {
    pub(crate) fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Returns how many bytes of a range are covered.
    pub(crate) fn bytes_within(&self, range: Range<u64>) -> u64 {
        let first = self.0.partition_point(|extent| extent.end <= range.start);
        let touching = self.0[first..].iter().take_while(|extent| extent.start < range.end);
        touching.map(|e| e.end.min(range.end).saturating_sub(e.start.max(range.start))).sum()
    }

    /// Replaces the extents by the union of these pushes, without sparse partitions. The pushes
    /// cover partitions whole.
    pub(crate) fn unite(&mut self, pushes: &[&[Range<u64>]], layout: &ShardLayout) {
        self.0.clear();
        if let ([push], 0) = (pushes, layout.sparse().len()) {
            return self.0.extend(push.iter().cloned());
        }
        for partition in layout.partitions().iter().filter(|partition| !partition.is_sparse()) {
            let covers = |ranges: &&[Range<u64>]| {
                let next = ranges.partition_point(|range| range.end <= partition.offset);
                ranges.get(next).is_some_and(|range| range.contains(&partition.offset))
            };
            if partition.end() > partition.offset && pushes.iter().any(covers) {
                self.add(partition.offset..partition.end());
            }
        }
    }

    /// Checks whether a part may come next. It must continue an extent or start a partition,
    /// overlap nothing, and end within the push.
    pub(crate) fn check(
        &self,
        part: &Range<u64>,
        layout: &ShardLayout,
    ) -> Result<(), MisplacedPart> {
        let limit = layout.push_bytes();
        if part.end > limit || !part.end.is_multiple_of(8) || part.is_empty() {
            return Err(MisplacedPart { limit });
        }
        let next = self.0.partition_point(|range| range.end < part.start);
        let continues = self.0.get(next).is_some_and(|range| range.end == part.start);
        let starts = layout.starts_at(part.start) || layout.index_starts_at(part.start);
        if !continues && !starts {
            return Err(MisplacedPart { limit: self.0.get(next).map_or(0, |range| range.end) });
        }
        match self.0.get(next + usize::from(continues)) {
            Some(later) if later.start < part.end => Err(MisplacedPart { limit: later.start }),
            _ => Ok(()),
        }
    }

    /// Adds a part that [`Extents::check`] has accepted.
    pub(crate) fn add(&mut self, part: Range<u64>) {
        let next = self.0.partition_point(|range| range.end < part.start);
        match self.0.get_mut(next) {
            Some(range) if range.end == part.start => range.end = part.end,
            _ => self.0.insert(next, part.clone()),
        }
        // The part may have closed the gap before the next extent.
        let at = self.0.partition_point(|range| range.end < part.end);
        if self.0.get(at + 1).is_some_and(|later| later.start == part.end) {
            self.0[at].end = self.0.remove(at + 1).end;
        }
    }
}

/// The answer that a client waits for after its push is whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingAnswer {
    /// The connection of the request. A request id has no meaning on another connection.
    pub(crate) connection: u64,
    pub(crate) request: RequestId,
    pub(crate) next: bool,
    /// When the client began to wait.
    pub(crate) since: Option<Instant>,
    pub(crate) deadline: Option<Instant>,
}

impl PendingAnswer {
    /// Returns a pending answer for which no client waits.
    pub(crate) fn unawaited() -> PendingAnswer {
        let since = None;
        let deadline = None;
        PendingAnswer { connection: 0, request: RequestId(0), next: false, since, deadline }
    }
}

/// A slot that a client has, with its push.
///
/// Invariant: it has a holder or a whole push.
#[derive(Debug)]
pub(super) struct PushSlot {
    pub(super) number: u32,
    /// The client that has the slot; `None` for a whole push whose client has been replaced by a
    /// newer incarnation.
    pub(super) holder: Option<ClientKey>,
    /// Whether the holder requested the slot. A slot may also be offered with an answer.
    pub(super) requested: bool,
    /// When the holder last made progress.
    pub(super) last_progress: Instant,
    pub(super) arrival: Option<PushArrival>,
}

impl PushSlot {
    /// Returns whether the slot has a whole push.
    pub(super) fn is_whole(&self) -> bool {
        self.arrival.as_ref().is_some_and(|push| push.whole.is_some())
    }

    /// Returns whether a client has this slot without a whole push.
    pub(super) fn is_unfinished(&self, client: ClientKey) -> bool {
        self.holder == Some(client) && !self.is_whole()
    }

    /// Returns the push, if it is a gradient.
    pub(super) fn gradient(&self) -> Option<&PushArrival> {
        let is_gradient = |push: &&PushArrival| matches!(push.operation, Operation::Gradient {});
        self.arrival.as_ref().filter(is_gradient)
    }
}

/// The memory that the values of a push are read from: the slot's own, and the push buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PushSource<'a> {
    own: &'a [u8],
    shared: Option<SharedSlotPart<'a>>,
}

#[derive(Clone, Copy, Debug)]
struct SharedSlotPart<'a> {
    memory: &'a SharedBytes,
    /// The offset of the slot in the push buffer.
    start: usize,
    ranges: &'a [Range<u64>],
}

/// Values of a push in one memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PushValues<'a> {
    /// In the slot's own memory.
    Own(&'a [u8]),
    /// In the push buffer.
    Shared(Volatile<'a>),
}

impl<'a> PushSource<'a> {
    /// Returns the memory of a push that has no ranges in a push buffer.
    pub(super) fn own(own: &'a [u8]) -> PushSource<'a> {
        PushSource { own, shared: None }
    }

    /// Returns the memory of a push that has these ranges in a push buffer. Its slot starts at this
    /// offset there.
    pub(super) fn shared(
        own: &'a [u8],
        memory: &'a SharedBytes,
        start: usize,
        ranges: &'a [Range<u64>],
    ) -> PushSource<'a> {
        PushSource { own, shared: Some(SharedSlotPart { memory, start, ranges }) }
    }

    /// Returns the first values of a range that are in one memory, and their end. Returns `None` if
    /// the range is empty or not in this push.
    pub(crate) fn values(&self, range: Range<u64>) -> Option<(PushValues<'a>, u64)> {
        if range.is_empty() {
            return None;
        }
        let next = self.shared.and_then(|shared| {
            let next = shared.ranges.partition_point(|held| held.end <= range.start);
            Some((shared, shared.ranges.get(next)?)).filter(|(_, held)| held.start < range.end)
        });
        match next {
            Some((shared, held)) if held.start <= range.start => {
                let at = shared.start + range.start as usize;
                let end = range.end.min(held.end);
                let values = shared.memory.bytes(at, (end - range.start) as usize);
                Some((PushValues::Shared(values), end))
            }
            next => {
                let end = next.map_or(range.end, |(_, held)| held.start.min(range.end));
                let bytes = self.own.get(range.start as usize..end as usize)?;
                Some((PushValues::Own(bytes), end))
            }
        }
    }

    /// Copies the first values of a range that are in one memory. Returns their end.
    ///
    /// # Panics
    /// If `to` is too short.
    pub(crate) fn copy(&self, range: Range<u64>, to: &mut [u8]) -> Option<u64> {
        let (values, end) = self.values(range.clone())?;
        let to = &mut to[..(end - range.start) as usize];
        match values {
            PushValues::Shared(shared) => _ = shared.copy(to, Exponents::NONE),
            PushValues::Own(bytes) => to.copy_from_slice(bytes),
        }
        Some(end)
    }

    /// Returns the first values of a range for a scan, and their end. Values in a push buffer are
    /// copied, at most [`PIECE_BYTES`] at a time, and aligned for every type if the range is.
    pub(crate) fn piece<'b>(
        &self,
        range: Range<u64>,
        copy: &'b mut Vec<u64>,
    ) -> Option<(&'b [u8], u64)>
    where
        'a: 'b,
    {
        let (values, end) = self.values(range.clone())?;
        match values {
            PushValues::Shared(shared) => {
                let end = end.min((range.start / PIECE_BYTES + 1) * PIECE_BYTES);
                let bytes = (end - range.start) as usize;
                copy.resize(copy.len().max(bytes.div_ceil(8)), 0);
                let bytes = &mut bytemuck::cast_slice_mut(copy)[..bytes];
                shared.copy(bytes, Exponents::NONE);
                Some((bytes, end))
            }
            PushValues::Own(bytes) => Some((bytes, end)),
        }
    }
}

/// Returns whether an operation applies to trainable partitions (true) or to plain ones (false);
/// `None` if it applies to both.
pub(crate) fn is_for_trainable(operation: Operation) -> Option<bool> {
    match operation {
        Operation::Gradient {} => Some(true),
        Operation::AssignAdd {} => Some(false),
        _ => None,
    }
}
