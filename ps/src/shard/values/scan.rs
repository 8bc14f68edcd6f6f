//! The scan of pushed values for NaN and infinity.
//!
//! Parts that are sent are scanned on arrival, while they are in cache: by the loop that applies
//! them if the push is applied as it arrives, otherwise by themselves. Ranges in a push buffer are
//! scanned by the loop that applies them, because a shadow can be discarded. They are scanned
//! before that where a change cannot be discarded: a gradient of a synchronous step counts once it
//! is held, and rows and small pushes are changed in place.

use std::ops::Range;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::finite::{Exponents, count_non_finite, first_non_finite};
use pushpull_common::protocol::Refusal;
use pushpull_common::tensor::DType;
use pushpull_optim::optimizer::SharedRun;
use pushpull_optim::volatile::Volatile;
use pushpull_store::change::{ByteSource, ChangeInput};

use super::SLICE_BYTES;
use super::variables::Variables;
use crate::config::NonFinite;
use crate::inbox::{Inbox, PushValues};
use crate::metrics::Counters;

/// The least cost of a fused range in the budget of a slice, in bytes.
const RANGE_COST: u64 = 256;

/// The bytes of a push buffer that one search step copies: a multiple of every element size.
const SEARCH_BYTES: usize = 4 << 10;

/// Scans values by the policy of the server.
#[derive(Clone, Copy)]
pub(in crate::shard) struct NonFiniteScan<'a> {
    pub(in crate::shard) policy: NonFinite,
    pub(in crate::shard) counters: &'a Counters,
}

impl NonFiniteScan<'_> {
    /// Scans values of one type that start at this byte of the layout. Returns the first element to
    /// refuse; under [`NonFinite::Count`] it counts and returns none.
    pub(in crate::shard) fn find(
        self,
        dtype: DType,
        start: u64,
        bytes: &[u8],
    ) -> Option<NonFiniteElement> {
        if self.policy == NonFinite::Allow {
            return None;
        }
        let (index, value) = first_non_finite(dtype, bytes)?;
        if self.policy == NonFinite::Count {
            self.counters.non_finite.add(count_non_finite(dtype, bytes));
            return None;
        }
        let size = dtype.size() as u64;
        Some(NonFiniteElement { at: start + index as u64 * size, size, value })
    }
}

/// An element that is NaN or infinite, in a push that is refused for it.
#[derive(Clone, Copy)]
pub(in crate::shard) struct NonFiniteElement {
    /// Its byte in the layout.
    pub(in crate::shard) at: u64,
    /// Its size in bytes.
    size: u64,
    pub(in crate::shard) value: f64,
}

impl NonFiniteElement {
    pub(in crate::shard) fn refusal(self, layout: &ShardLayout) -> Refusal {
        // The padding of a partition belongs to it: it should have been zeros.
        let partition = layout.at(self.at);
        let element = partition.elements.start + (self.at - partition.offset) / self.size;
        Refusal::NonFinite { variable: partition.variable, element, value: self.value }
    }
}

/// Values of one type, scanned as a change takes them.
pub(in crate::shard) struct ScanningInput<'a> {
    values: Volatile<'a>,
    /// The bytes taken so far.
    taken: usize,
    scan: Option<NonFiniteScan<'a>>,
    dtype: DType,
    /// The exponents that are scanned: none without a scan.
    exponents: Exponents,
    /// The byte of the layout where the values start.
    start: u64,
    found: Option<NonFiniteElement>,
}

impl<'a> ScanningInput<'a> {
    /// Takes values that start at this byte of the layout.
    pub(in crate::shard) fn new(
        values: Volatile<'a>,
        start: u64,
        dtype: DType,
        scan: Option<NonFiniteScan<'a>>,
    ) -> ScanningInput<'a> {
        let scan = scan.filter(|scan| scan.policy != NonFinite::Allow);
        let exponents = scan.map_or(Exponents::NONE, |_| Exponents::of(dtype));
        ScanningInput { values, taken: 0, scan, dtype, exponents, start, found: None }
    }

    /// The first element to refuse. The change that took it must be discarded.
    pub(in crate::shard) fn found(&self) -> Option<NonFiniteElement> {
        self.found
    }

    /// The byte of the layout of the next value.
    fn at(&self) -> u64 {
        self.start + self.taken as u64
    }

    /// The element to refuse among the next bytes, one of whose exponents was full when it was
    /// taken. If the client has overwritten that since, the first of the bytes is named.
    fn search(&self, scan: NonFiniteScan<'_>, bytes: usize) -> Option<NonFiniteElement> {
        let mut tile = [0; SEARCH_BYTES];
        let found = (0..bytes).step_by(SEARCH_BYTES).find_map(|from| {
            let tile = &mut tile[..SEARCH_BYTES.min(bytes - from)];
            self.values.skip(self.taken + from).copy(tile, Exponents::NONE);
            scan.find(self.dtype, self.at() + from as u64, tile)
        });
        let size = self.dtype.size() as u64;
        let overwritten = || NonFiniteElement { at: self.at(), size, value: f64::NAN };
        found.or_else(|| (scan.policy == NonFinite::Reject).then(overwritten))
    }
}

impl ByteSource for ScanningInput<'_> {
    fn fill(&mut self, to: &mut [u8]) {
        let full = self.values.skip(self.taken).copy(to, self.exponents);
        if let Some(scan) = self.scan.filter(|_| full && self.found.is_none()) {
            self.found = scan.find(self.dtype, self.at(), to);
        }
        self.taken += to.len();
    }

    fn shared_input(&self) -> Option<SharedRun<'_>> {
        let gradients = std::slice::from_ref(&self.values);
        Some(SharedRun { gradients, at: self.taken, divisor: 1, exponents: self.exponents })
    }

    fn consume_shared(&mut self, bytes: usize, full: bool) {
        if let Some(scan) = self.scan.filter(|_| full && self.found.is_none()) {
            self.found = self.search(scan, bytes);
        }
        self.taken += bytes;
    }
}

/// Scans the ranges that a whole push has in a push buffer, before anything of it counts.
#[derive(Debug)]
pub(in crate::shard) struct ScanJob {
    pub(in crate::shard) push_slot: u32,
    /// The number of the push among those that came whole: its slot may get another.
    pub(in crate::shard) order: u64,
    /// The index of the current range, and the byte up to which it is scanned.
    range: usize,
    done_to: u64,
    pub(in crate::shard) refusal: Option<Refusal>,
}

impl ScanJob {
    pub(in crate::shard) fn new(push_slot: u32, order: u64) -> ScanJob {
        ScanJob { push_slot, order, range: 0, done_to: 0, refusal: None }
    }

    /// Returns the slot of its push if the scan has not begun.
    pub(in crate::shard) fn unbegun(&self) -> Option<u32> {
        ((self.range, self.done_to) == (0, 0)).then_some(self.push_slot)
    }

    /// Scans a slice; returns whether the job is done.
    pub(in crate::shard) fn slice(&mut self, inbox: &Inbox, variables: &Variables) -> bool {
        let Some(store) = variables.store() else { return true };
        let (Some(push), Some(source)) =
            (inbox.arrival(self.push_slot), inbox.source(self.push_slot))
        else {
            return true;
        };
        if push.order != self.order {
            // The push was dropped, and its slot holds another.
            return true;
        }
        let scan =
            NonFiniteScan { policy: variables.config.non_finite, counters: &variables.counters };
        let mut budget = SLICE_BYTES;
        while let Some(range) = push.shared.ranges().get(self.range) {
            if budget == 0 {
                return false;
            }
            let left = self.done_to.max(range.start)..range.end;
            let Some(fused_range) = variables.fused_ranges.within(left.clone()).next() else {
                self.range += 1;
                continue;
            };
            let mut part = fused_range.part_of(&left);
            part.end = part.end.min(part.start.saturating_add(budget));
            let bytes = part.end - part.start;
            if let Some((PushValues::Shared(values), _)) = source.values(part.clone()) {
                let dtype = fused_range.dtype;
                let mut input = ScanningInput::new(values, part.start, dtype, Some(scan));
                ChangeInput::Source(&mut input).each(0..bytes as usize, |_, _| {});
                if let Some(found) = input.found() {
                    self.refusal = Some(found.refusal(store.layout()));
                    return true;
                }
            }
            // Rounded to words, so that the next slice starts with an element of any type.
            budget = budget.saturating_sub(bytes.next_multiple_of(8).max(RANGE_COST));
            self.done_to = part.end;
        }
        true
    }
}

impl Variables {
    /// Scans a part of a push on arrival, while it is in cache.
    pub(in crate::shard) fn scan_part(
        &self,
        inbox: &Inbox,
        push_slot: u32,
        range: &Range<u64>,
    ) -> Result<(), Refusal> {
        let Some(store) = self.store() else { return Ok(()) };
        let scan = NonFiniteScan { policy: self.config.non_finite, counters: &self.counters };
        for fused_range in self.fused_ranges.within(range.clone()) {
            let part = fused_range.part_of(range);
            if let Some(bytes) = inbox.bytes(push_slot, part.clone())
                && let Some(found) = scan.find(fused_range.dtype, part.start, bytes)
            {
                return Err(found.refusal(store.layout()));
            }
        }
        Ok(())
    }

    /// Whether the ranges that a whole push has in a push buffer are scanned before it is applied,
    /// because the change cannot be discarded. `waits` says whether it waits for a synchronous step.
    pub(in crate::shard) fn is_scanned_first(
        &self,
        inbox: &Inbox,
        push_slot: u32,
        waits: bool,
    ) -> bool {
        let (Some(store), Some(push)) = (self.store(), inbox.arrival(push_slot)) else {
            return false;
        };
        if push.shared.ranges().is_empty() || self.config.non_finite == NonFinite::Allow {
            return false;
        }
        let by_rows = store.layout().sparse().len() > 0;
        let bytes = push.extents.ranges().iter().map(|range| range.end - range.start);
        let small = store.is_small(bytes.fold(0, u64::saturating_add));
        by_rows || small || waits
    }
}
