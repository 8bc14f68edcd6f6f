//! Readers of other processes, who read values where they lie: what they may be reading is not written.
//!
//! `pushpull_common::shared_values` says how. There is a board only while somebody has been lent a desk;
//! while nobody has, all of this costs a branch for each change.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use pushpull_common::protocol::message::SharedValues;
use pushpull_common::shared_values::{
    BlockTable, Counts, READER_SLOT_WORDS, ReaderSlot, block_table_words, holds,
};

use super::Store;
use super::pool::Pool;
use crate::arena::{Budget, Loan, SharedWords};
use crate::error::StorageError;
use crate::planted::{Bug, PlantedBugs};

/// That values are lent, as a bit of what is.
pub(crate) const VALUES: u64 = 1;

/// Since which turn of the board a block has held a place, and until which; nobody reads a block of
/// none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Span {
    born: u64,
    freed: u64,
}

/// Whoever reads the values of a store without a request.
#[derive(Debug, Default)]
pub(super) struct Readers(Option<Box<SharedReaders>>);

#[derive(Debug)]
struct SharedReaders {
    block_table: BlockTable<SharedWords>,
    seats: Vec<Seat>,
    /// By place: since which turn the block that holds it does.
    born: Vec<u64>,
    /// Places that another block holds by the change under way.
    moved: Vec<u32>,
    planted: PlantedBugs,
    /// A commit has not been shown, as [`Bug::SequenceLate`] has it.
    late: bool,
    _loan: Loan,
}

/// One reader.
#[derive(Debug)]
struct Seat {
    connection: u64,
    reader_slot: ReaderSlot<SharedWords>,
    /// What it has counted, as far as it is known.
    counted: (u64, u64),
    /// The pin it was seen with, what it had counted then, and since when.
    seen: Option<(u64, (u64, u64), Instant)>,
    _loan: Loan,
}

impl SharedReaders {
    fn has_pins(&self) -> bool {
        self.seats.iter().any(|seat| seat.reader_slot.pinned() != 0)
    }
}

impl Readers {
    /// Whether there are any.
    pub(super) fn are_there(&self) -> bool {
        self.0.is_some()
    }

    /// Another block holds a place by the change under way; what readers know of the one before.
    pub(super) fn moved(&mut self, logical: u32) -> Span {
        let Some(shared_values) = &mut self.0 else { return Span::default() };
        shared_values.moved.push(logical);
        let freed = shared_values.block_table.sequence() + 2;
        Span { born: std::mem::replace(&mut shared_values.born[logical as usize], freed), freed }
    }

    /// Whether somebody may be reading a block that was replaced.
    pub(super) fn hold(&self, span: Span) -> bool {
        let Some(shared_values) = self.0.as_ref().filter(|_| span.freed > 0) else { return false };
        if shared_values.planted.has(Bug::PinIgnored) {
            return false;
        }
        shared_values
            .seats
            .iter()
            .any(|seat| holds(seat.reader_slot.pinned(), span.born, span.freed))
    }

    /// Begins a change of values where they lie, unless somebody is reading. Whoever comes before it is
    /// shown is sent away.
    pub(super) fn make_way(&mut self) -> bool {
        let Some(shared_values) = &mut self.0 else { return true };
        // Mostly this is known without sending anybody away.
        if shared_values.has_pins() {
            return false;
        }
        shared_values.block_table.begin();
        let free = !shared_values.has_pins();
        if !free {
            shared_values.block_table.publish(shared_values.block_table.counts());
        }
        free
    }

    /// A change of values where they lie was taken back: all is as it was shown.
    pub(super) fn change_taken_back(&mut self) {
        if let Some(shared_values) = &mut self.0
            && shared_values.block_table.is_changing()
        {
            shared_values.block_table.publish(shared_values.block_table.counts());
        }
    }

    /// A change is committed: what its blocks hold, and what that is of, is for all to see.
    pub(super) fn show(&mut self, counts: Counts, committed: &[u32]) {
        let Some(shared_values) = &mut self.0 else { return };
        let SharedReaders { block_table, moved, planted, late, .. } = &mut **shared_values;
        if moved.is_empty() && !block_table.is_changing() && block_table.counts() == counts {
            return;
        }
        *late = planted.has(Bug::SequenceLate) && !*late;
        if *late {
            return;
        }
        block_table.begin();
        for logical in moved.drain(..) {
            block_table.set_block(logical as usize, committed[logical as usize]);
        }
        block_table.publish(counts);
    }

    /// Asserts that the board shows where everything is.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_invariants(&self, committed: &[u32]) {
        let Some(shared_values) =
            self.0.as_ref().filter(|shared_values| shared_values.moved.is_empty())
        else {
            return;
        };
        assert!(!shared_values.seats.is_empty(), "a board is kept for somebody");
        for (logical, &committed) in committed.iter().enumerate() {
            assert_eq!(
                shared_values.block_table.block(logical),
                u64::from(committed),
                "place {logical} on the board"
            );
            assert!(
                shared_values.born[logical] <= shared_values.block_table.sequence(),
                "place {logical} has come already"
            );
        }
    }

    /// Takes a desk back: what its reader copies from now on is of no use to it. What it has counted
    /// that was not known.
    fn forget(&mut self, connection: u64) -> (u64, u64) {
        let Some(shared_values) = &mut self.0 else { return (0, 0) };
        let mut counted = (0, 0);
        for mut seat in shared_values.seats.extract_if(.., |seat| seat.connection == connection) {
            if !shared_values.planted.has(Bug::RevokedUnseen) {
                seat.reader_slot.revoke();
            }
            counted = seat.count();
        }
        if shared_values.seats.is_empty() {
            self.0 = None;
        }
        counted
    }
}

impl Seat {
    /// Whether it has been at one pull for so long.
    fn has_stalled(&mut self, now: Instant, stall_timeout: Duration) -> bool {
        let (pin, counted) = (self.reader_slot.pinned(), self.reader_slot.counted());
        match self.seen {
            _ if pin == 0 => self.seen = None,
            Some((p, c, since)) if (p, c) == (pin, counted) => {
                return now.saturating_duration_since(since) >= stall_timeout;
            }
            _ => self.seen = Some((pin, counted, now)),
        }
        false
    }

    /// What the reader has counted since this was asked last, which may be any numbers.
    fn count(&mut self) -> (u64, u64) {
        let now = self.reader_slot.counted();
        let (pulls, bytes) = std::mem::replace(&mut self.counted, now);
        (now.0.wrapping_sub(pulls), now.1.wrapping_sub(bytes))
    }
}

impl Store {
    /// Lends a connection the values, which are of what `counts` says: what it is told, and the
    /// descriptors of board, desk and values. A desk that it had is taken back.
    pub(crate) fn share(
        &mut self,
        connection: u64,
        counts: Counts,
        budget: &Budget,
    ) -> Result<(SharedValues, Vec<OwnedFd>), StorageError> {
        let failed = |source| {
            let path = Path::new("memory of the values").to_owned();
            StorageError::Io { doing: "share", path, source }
        };
        let geometry = self.values.blocks.geometry(self.geometry.logical_blocks);
        let (values, values_bytes) = self.values.blocks.to_read().map_err(failed)?;
        let words = SharedWords::new(READER_SLOT_WORDS).map_err(failed)?;
        let loan = budget.take(words.bytes())?;
        let (reader_slot, reader_slot_bytes) = (words.to_write().map_err(failed)?, words.bytes());
        let committed =
            (0..self.geometry.logical_blocks).map(|logical| self.values.committed_block(logical));
        let mut made = None;
        if !self.values.readers.are_there() {
            let words = SharedWords::new(block_table_words(committed.len())).map_err(failed)?;
            let loan = budget.take(words.bytes())?;
            let (seats, born, moved) = (Vec::new(), vec![0; committed.len()], Vec::new());
            let block_table = BlockTable::new(words, counts, committed);
            let (planted, late) = (self.planted, false);
            made = Some(Box::new(SharedReaders {
                block_table,
                seats,
                born,
                moved,
                planted,
                late,
                _loan: loan,
            }));
        }
        let shared_values = made.as_ref().or(self.values.readers.0.as_ref());
        let block_table = shared_values.map(|shared_values| shared_values.block_table.words());
        let block_table = block_table.expect("one is made if there is none");
        let (block_table, block_table_bytes) =
            (block_table.to_read().map_err(failed)?, block_table.bytes());
        // Nothing fails from here on.
        let owner_generation = self.values.blocks.word(geometry.owner_generation_word());
        if let Some(made) = made {
            self.values.readers.0 = Some(made);
        }
        if let Some(shared_values) = &mut self.values.readers.0 {
            for seat in shared_values.seats.extract_if(.., |seat| seat.connection == connection) {
                seat.reader_slot.revoke();
            }
            let reader_slot = ReaderSlot::new(words.shared());
            shared_values.seats.push(Seat {
                connection,
                reader_slot,
                counted: (0, 0),
                seen: None,
                _loan: loan,
            });
        }
        let shared = SharedValues {
            shares: VALUES,
            owner_generation,
            block_table_bytes,
            reader_slot_bytes,
            values_bytes,
            offset: geometry.offset,
            block_bytes: geometry.block_bytes,
            stride: geometry.stride,
            blocks: geometry.blocks,
            logical_blocks: geometry.logical_blocks,
        };
        Ok((shared, vec![block_table, reader_slot, values]))
    }

    /// Whether somebody reads the values without a request: that it has done so is told by nobody.
    pub(crate) fn is_shared(&self) -> bool {
        self.values.readers.are_there()
    }

    /// Takes back what a connection was lent, if it was; the pulls it has made and their bytes, as it
    /// says itself, since they were asked for.
    pub(crate) fn take_back(&mut self, connection: u64) -> (u64, u64) {
        let counted = self.values.readers.forget(connection);
        if !self.is_shared() {
            // The next board counts its turns anew: these would mean others there.
            self.values.forget_spans();
        }
        counted
    }

    /// The pulls that readers have made, and their bytes, as they say themselves, since this was asked
    /// for.
    pub(crate) fn direct_pulls(&mut self) -> (u64, u64) {
        let Some(shared_values) = &mut self.values.readers.0 else { return (0, 0) };
        let counts = shared_values.seats.iter_mut().map(Seat::count);
        counts.fold((0, 0), |sum, (pulls, bytes)| {
            (sum.0.wrapping_add(pulls), sum.1.wrapping_add(bytes))
        })
    }

    /// The connections of readers who have been at one pull for so long: they may have stopped in the
    /// middle of it, and would hold what they were reading for good.
    pub(crate) fn stalled_readers(&mut self, now: Instant, stall_timeout: Duration) -> Vec<u64> {
        let Some(shared_values) = &mut self.values.readers.0 else { return Vec::new() };
        let seats = shared_values.seats.iter_mut();
        let stalled = seats.filter_map(|seat| seat.has_stalled(now, stall_timeout).then_some(seat));
        stalled.map(|seat| seat.connection).collect()
    }

    /// The connections of readers that hold blocks which no longer hold anything.
    pub(crate) fn holding_readers(&self) -> Vec<u64> {
        let Pool { readers, retired, .. } = &self.values;
        let seats = readers.0.iter().flat_map(|shared_values| &shared_values.seats);
        let holds_one = |seat: &&Seat| {
            let pin = seat.reader_slot.pinned();
            retired.iter().any(|gone| holds(pin, gone.span.born, gone.span.freed))
        };
        seats.filter(holds_one).map(|seat| seat.connection).collect()
    }
}
