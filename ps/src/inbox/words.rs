//! The conversion between whole pushes in slots and words of the tables.
//!
//! Decoding validates: the rest of the server never sees parts, bytes or numbers that no shard
//! would accept.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::effect_window::EffectWindow;
use pushpull_common::ids::{
    CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, Sequence, TokenId,
};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{EffectId, EffectRef};
use pushpull_store::commit::{Address, Journal, offset_of};
use pushpull_store::layout::Fault;
use smallvec::{SmallVec, smallvec};

use super::{Extents, Inbox, PendingAnswer, PushArrival, PushSlot, is_for_trainable};
use crate::client_key::ClientKey;

/// The number of table words of a slot, without the map of its partitions and the row counts.
const SLOT_WORDS: usize = 15;

/// The first of the five words of the effect of a push: coordinator, epoch, number, settled and
/// digest. A number of 0 means none.
const EFFECT: usize = 10;

/// A slot with a whole push, as decoded from its words.
#[derive(Debug)]
pub(crate) struct WholeSlot {
    /// The index of the slot.
    pub(crate) slot: usize,
    pub(crate) number: u32,
    pub(crate) holder: Option<ClientKey>,
    pub(crate) arrival: PushArrival,
    /// The checksum of the body, if the arena keeps checksums.
    pub(crate) crc: u64,
}

/// Decodes the whole pushes of `push_slots` slots, whose words start at `first`, on a shard with
/// `clients` clients. Fails unless every push is valid: its parts are in the layout, its bytes
/// match them, and no two pushes are the same.
pub(crate) fn whole_slots(
    journal: &Journal,
    layout: &ShardLayout,
    first: usize,
    push_slots: usize,
    clients: usize,
) -> Result<Vec<WholeSlot>, Fault> {
    let words = slot_words(layout);
    let mut whole: Vec<WholeSlot> = Vec::new();
    for slot in 0..push_slots {
        let at = |word: usize| Address::Tables(first + slot * words + word);
        let load = |word: usize| journal.load(at(word));
        let fault = |word: usize, what: &str| Fault::at(offset_of(at(word)), what);
        let order = match load(0) {
            0 => continue,
            order if order < u64::MAX => order,
            _ => return Err(fault(0, "the order of a push")),
        };
        let holder = match load(1) {
            0 => None,
            key if key <= clients as u64 => Some(ClientKey(key as u32 - 1)),
            _ => return Err(fault(1, "the client of a push")),
        };
        let number = u32::try_from(load(2)).ok().filter(|&number| number != 0);
        let operation = match load(4) {
            1 => Operation::Gradient {},
            2 => Operation::Assign {},
            3 => Operation::AssignAdd {},
            _ => return Err(fault(4, "an operation")),
        };
        let map: Vec<u64> = (SLOT_WORDS..words).map(load).collect();
        let extents = extents_of(&map, layout)
            .ok_or_else(|| fault(SLOT_WORDS, "row counts of their partitions"))?;
        let bytes: u64 = extents.ranges().iter().map(|range| range.end - range.start).sum();
        if bytes != load(8) {
            return Err(fault(8, "the bytes of the partitions of a push"));
        }
        let trainable = is_for_trainable(operation);
        let mut ranges = extents.ranges().iter().flat_map(|range| layout.touched(range.clone()));
        if ranges.any(|partition| trainable.is_some_and(|t| t != partition.trainable)) {
            return Err(fault(4, "an operation that fits its partitions"));
        }
        let arrival = PushArrival {
            sequence: Sequence(load(3)),
            operation,
            token: TokenId(load(5)),
            generation: u32::try_from(load(6))
                .map_err(|_| fault(6, "the generation of a token"))?,
            effect: effect_of([0, 1, 2, 3, 4].map(|word| load(EFFECT + word)))
                .map_err(|()| fault(EFFECT, "an effect with a number below the limit"))?,
            step: GlobalStep(load(7)),
            read: None,
            extents,
            shared: Extents::default(),
            scanning: false,
            bytes,
            order,
            squares: None,
            // No client waits after a restart. A client that asks again is answered.
            whole: Some(PendingAnswer::unawaited()),
        };
        let number = number.ok_or_else(|| fault(2, "the number of a push slot"))?;
        let same = |other: &WholeSlot| {
            let push = (other.holder, other.arrival.sequence);
            other.number == number
                || other.arrival.order == order
                || (holder.is_some() && push == (holder, arrival.sequence))
        };
        if arrival.sequence.0 == 0 || whole.iter().any(same) {
            return Err(fault(0, "a push that is in no other push slot"));
        }
        whole.push(WholeSlot { slot, number, holder, arrival, crc: load(9) });
    }
    Ok(whole)
}

/// Returns the number of table words of a slot: the fixed words, the map, and a row count for each
/// sparse partition.
fn slot_words(layout: &ShardLayout) -> usize {
    SLOT_WORDS + map_words(layout) + layout.sparse().len()
}

/// Returns the number of words of a map with one bit for each partition.
pub(crate) fn map_words(layout: &ShardLayout) -> usize {
    layout.all().len().div_ceil(64)
}

impl Inbox {
    /// Returns the number of table words for `push_slots` slots.
    pub(crate) fn table_words(layout: &ShardLayout, push_slots: usize) -> usize {
        push_slots * slot_words(layout)
    }

    /// Stages the words of the whole pushes, which start at `first`, with checksums of the bodies
    /// if `integrity` is set.
    pub(crate) fn stage(
        &self,
        journal: &mut Journal,
        layout: &ShardLayout,
        first: usize,
        integrity: bool,
    ) {
        let words = slot_words(layout);
        for (slot, push_slot) in self.push_slots.iter().enumerate() {
            let at = |word: usize| Address::Tables(first + slot * words + word);
            let whole = push_slot
                .as_ref()
                .and_then(|push_slot| Some((push_slot, push_slot.arrival.as_ref()?)));
            let whole = whole.filter(|(_, push)| push.whole.is_some());
            let Some((push_slot, push)) = whole else {
                journal.stage(at(0), 0);
                continue;
            };
            let holder = push_slot.holder.map_or(0, |holder| u64::from(holder.0) + 1);
            journal.stage(at(1), holder);
            // A whole push does not change any more.
            if journal.load(at(0)) == push.order {
                continue;
            }
            let operation = match push.operation {
                Operation::Gradient {} => 1,
                Operation::Assign {} => 2,
                Operation::AssignAdd {} => 3,
            };
            let fixed = [
                push.order,
                push_slot.number.into(),
                push.sequence.0,
                operation,
                push.token.0,
                push.generation.into(),
                push.step.0,
                push.bytes,
                if integrity { self.body_crc(slot, &push.extents) } else { 0 },
            ];
            for (word, value) in [0, 2, 3, 4, 5, 6, 7, 8, 9].into_iter().zip(fixed) {
                journal.stage(at(word), value);
            }
            for (word, value) in (EFFECT..).zip(effect_words(push.effect)) {
                journal.stage(at(word), value);
            }
            let rows =
                layout.sparse().map(|p| self.rows(push_slot.number, p).map_or(0, |r| r.len()));
            let map = map_of(&push.extents, layout).into_iter();
            for (word, value) in map.chain(rows.map(|rows| rows as u64)).enumerate() {
                journal.stage(at(SLOT_WORDS + word), value);
            }
        }
    }

    /// Restores the whole pushes of an earlier process, and compares their bodies with the
    /// checksums if `integrity` is set. Returns the slot numbers in the order of arrival.
    pub(crate) fn restore(
        &mut self,
        whole: Vec<WholeSlot>,
        layout: &ShardLayout,
        integrity: bool,
        now: Instant,
    ) -> Result<Vec<u32>, Fault> {
        let mut order = Vec::new();
        for WholeSlot { slot, number, holder, arrival, crc } in whole {
            order.push((arrival.order, number));
            self.next_order = self.next_order.max(arrival.order + 1);
            let found = if integrity { self.body_crc(slot, &arrival.extents) } else { crc };
            if found != crc {
                let what = format!("the body of a push of checksum {crc:#x}, not {found:#x}");
                return Err(Fault::at(self.memory.range(slot).start, what));
            }
            let arrival = Some(arrival);
            self.memory.recovered(slot);
            self.push_slots[slot] =
                Some(PushSlot { number, holder, requested: false, last_progress: now, arrival });
            self.check_rows(number, layout).map_err(|refusal| {
                let what = format!("valid rows of a push, not those with the fault: {refusal}");
                Fault::at(self.memory.range(slot).start, what)
            })?;
        }
        order.sort_unstable();
        Ok(order.into_iter().map(|(_, number)| number).collect())
    }

    /// Returns the checksum of these extents of a slot.
    fn body_crc(&self, slot: usize, extents: &Extents) -> u64 {
        let push_slot = &self.memory.bytes()[self.memory.range(slot)];
        let extents = extents.ranges().iter();
        let crc = extents.fold(0, |crc, extent| {
            crc32c::crc32c_append(crc, &push_slot[extent.start as usize..extent.end as usize])
        });
        crc.into()
    }
}

/// Returns the words of the effect of a push.
fn effect_words(effect: Option<EffectRef>) -> [u64; 5] {
    let of = |EffectRef { id, settled, digest }| {
        [id.coordinator.0, id.epoch.0, id.number.0, settled.0, digest]
    };
    effect.map_or([0; 5], of)
}

/// Decodes the words of [`effect_words`].
fn effect_of(
    [coordinator, epoch, number, settled, digest]: [u64; 5],
) -> Result<Option<EffectRef>, ()> {
    if number >= EffectWindow::NUMBER_LIMIT {
        return Err(());
    }
    let coordinator = CoordinatorId(coordinator);
    let epoch = CoordinatorEpoch(epoch);
    let number = EffectNumber(number);
    let id = EffectId { coordinator, epoch, number };
    let settled = EffectNumber(settled);
    let effect = EffectRef { id, settled, digest };
    Ok((number.0 > 0).then_some(effect))
}

/// Returns a bit for each partition that the extents cover. Those of a whole push end at partition
/// boundaries.
fn map_of(extents: &Extents, layout: &ShardLayout) -> SmallVec<[u64; 8]> {
    let mut map = smallvec![0_u64; map_words(layout)];
    if layout.sparse().len() == 0 {
        // Extents cover runs of whole partitions, and there may be many partitions in a run.
        let before = |offset| layout.all().partition_point(|partition| partition.offset < offset);
        for extent in extents.ranges() {
            set_bits(&mut map, before(extent.start)..before(extent.end));
        }
        return map;
    }
    for (index, partition) in layout.all().iter().enumerate() {
        let start = partition.index.unwrap_or(partition.offset);
        let some = partition.is_sparse() || partition.end() > partition.offset;
        if some && extents.bytes_within(start..start + 8) > 0 {
            map[index / 64] |= 1 << (index % 64);
        }
    }
    map
}

fn set_bits(map: &mut [u64], bits: Range<usize>) {
    let words = bits.start / 64..bits.end.div_ceil(64);
    for word in words {
        let from = bits.start.max(64 * word);
        let to = bits.end.min(64 * word + 64);
        if let count @ 1.. = to.saturating_sub(from) {
            map[word] |= (u64::MAX >> (64 - count)) << (from % 64);
        }
    }
}

/// Decodes the words that [`map_of`] and the row counts produce; `None` if a partition has fewer
/// rows than its count.
fn extents_of(words: &[u64], layout: &ShardLayout) -> Option<Extents> {
    let (map, rows) = words.split_at(map_words(layout));
    let mut extents = Extents::default();
    let mut rows = rows.iter();
    let mut indices = Vec::new();
    for (index, partition) in layout.all().iter().enumerate() {
        let covered = map[index / 64] >> (index % 64) & 1 == 1;
        if partition.is_sparse() {
            let &rows = rows.next()?;
            if rows > if covered { partition.row_count() } else { 0 } {
                return None;
            }
            if covered {
                indices.push((partition, rows));
            }
        } else if covered && partition.end() > partition.offset {
            extents.add(partition.offset..partition.end());
        }
    }
    for (partition, rows) in indices {
        extents.add_rows(partition, rows);
    }
    Some(extents)
}
