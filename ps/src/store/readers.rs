//! Readers of other processes, who read values where they lie: what they may be reading is not written.
//!
//! `pushpull_common::lending` says how. There is a board only while somebody has been lent a desk;
//! while nobody has, all of this costs a branch for each change.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use pushpull_common::lending::{Board, Counts, DESK_WORDS, Desk, board_words, holds};
use pushpull_common::protocol::message::Lent;

use super::Store;
use super::pool::Pool;
use crate::arena::{Budget, LentWords, Loan};
use crate::error::StorageError;
use crate::zoo::{Bug, Zoo};

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
pub(super) struct Readers(Option<Box<Lending>>);

#[derive(Debug)]
struct Lending {
    board: Board<LentWords>,
    seats: Vec<Seat>,
    /// By place: since which turn the block that holds it does.
    born: Vec<u64>,
    /// Places that another block holds by the change under way.
    moved: Vec<u32>,
    zoo: Zoo,
    /// A commit has not been shown, as [`Bug::TurnLate`] has it.
    late: bool,
    _loan: Loan,
}

/// One reader.
#[derive(Debug)]
struct Seat {
    connection: u64,
    desk: Desk<LentWords>,
    /// What it has counted, as far as it is known.
    counted: (u64, u64),
    /// The pin it was seen with, what it had counted then, and since when.
    seen: Option<(u64, (u64, u64), Instant)>,
    _loan: Loan,
}

impl Lending {
    fn has_pins(&self) -> bool {
        self.seats.iter().any(|seat| seat.desk.pinned() != 0)
    }
}

impl Readers {
    /// Whether there are any.
    pub(super) fn are_there(&self) -> bool {
        self.0.is_some()
    }

    /// Another block holds a place by the change under way; what readers know of the one before.
    pub(super) fn moved(&mut self, place: u32) -> Span {
        let Some(lending) = &mut self.0 else { return Span::default() };
        lending.moved.push(place);
        let freed = lending.board.turn() + 2;
        Span { born: std::mem::replace(&mut lending.born[place as usize], freed), freed }
    }

    /// Whether somebody may be reading a block that was replaced.
    pub(super) fn hold(&self, span: Span) -> bool {
        let Some(lending) = self.0.as_ref().filter(|_| span.freed > 0) else { return false };
        if lending.zoo.has(Bug::PinIgnored) {
            return false;
        }
        lending.seats.iter().any(|seat| holds(seat.desk.pinned(), span.born, span.freed))
    }

    /// Begins a change of values where they lie, unless somebody is reading. Whoever comes before it is
    /// shown is sent away.
    pub(super) fn make_way(&mut self) -> bool {
        let Some(lending) = &mut self.0 else { return true };
        // Mostly this is known without sending anybody away.
        if lending.has_pins() {
            return false;
        }
        lending.board.begin();
        let free = !lending.has_pins();
        if !free {
            lending.board.publish(lending.board.counts());
        }
        free
    }

    /// A change of values where they lie was taken back: all is as it was shown.
    pub(super) fn change_taken_back(&mut self) {
        if let Some(lending) = &mut self.0
            && lending.board.is_changing()
        {
            lending.board.publish(lending.board.counts());
        }
    }

    /// A change is committed: what its blocks hold, and what that is of, is for all to see.
    pub(super) fn show(&mut self, counts: Counts, homes: &[u32]) {
        let Some(lending) = &mut self.0 else { return };
        let Lending { board, moved, zoo, late, .. } = &mut **lending;
        if moved.is_empty() && !board.is_changing() && board.counts() == counts {
            return;
        }
        *late = zoo.has(Bug::TurnLate) && !*late;
        if *late {
            return;
        }
        board.begin();
        for place in moved.drain(..) {
            board.set_home(place as usize, homes[place as usize]);
        }
        board.publish(counts);
    }

    /// Asserts that the board shows where everything is.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(super) fn check_invariants(&self, homes: &[u32]) {
        let Some(lending) = self.0.as_ref().filter(|lending| lending.moved.is_empty()) else {
            return;
        };
        assert!(!lending.seats.is_empty(), "a board is kept for somebody");
        for (place, &home) in homes.iter().enumerate() {
            assert_eq!(lending.board.home(place), u64::from(home), "place {place} on the board");
            assert!(lending.born[place] <= lending.board.turn(), "place {place} has come already");
        }
    }

    /// Takes a desk back: what its reader copies from now on is of no use to it. What it has counted
    /// that was not known.
    fn forget(&mut self, connection: u64) -> (u64, u64) {
        let Some(lending) = &mut self.0 else { return (0, 0) };
        let mut counted = (0, 0);
        for mut seat in lending.seats.extract_if(.., |seat| seat.connection == connection) {
            if !lending.zoo.has(Bug::RevokedUnseen) {
                seat.desk.revoke();
            }
            counted = seat.count();
        }
        if lending.seats.is_empty() {
            self.0 = None;
        }
        counted
    }
}

impl Seat {
    /// Whether it has been at one pull for so long.
    fn has_stalled(&mut self, now: Instant, patience: Duration) -> bool {
        let (pin, counted) = (self.desk.pinned(), self.desk.counted());
        match self.seen {
            _ if pin == 0 => self.seen = None,
            Some((p, c, since)) if (p, c) == (pin, counted) => {
                return now.saturating_duration_since(since) >= patience;
            }
            _ => self.seen = Some((pin, counted, now)),
        }
        false
    }

    /// What the reader has counted since this was asked last, which may be any numbers.
    fn count(&mut self) -> (u64, u64) {
        let now = self.desk.counted();
        let (pulls, bytes) = std::mem::replace(&mut self.counted, now);
        (now.0.wrapping_sub(pulls), now.1.wrapping_sub(bytes))
    }
}

impl Store {
    /// Lends a connection the values, which are of what `counts` says: what it is told, and the
    /// descriptors of board, desk and values. A desk that it had is taken back.
    pub(crate) fn lend(
        &mut self,
        connection: u64,
        counts: Counts,
        budget: &Budget,
    ) -> Result<(Lent, Vec<OwnedFd>), StorageError> {
        let failed = |source| {
            let path = Path::new("memory of the values").to_owned();
            StorageError::Io { doing: "lend", path, source }
        };
        let geometry = self.values.blocks.geometry(self.geometry.places);
        let (values, values_bytes) = self.values.blocks.to_read().map_err(failed)?;
        let words = LentWords::new(DESK_WORDS).map_err(failed)?;
        let loan = budget.take(words.bytes())?;
        let (desk, desk_bytes) = (words.to_write().map_err(failed)?, words.bytes());
        let homes = (0..self.geometry.places).map(|place| self.values.home(place));
        let mut made = None;
        if !self.values.readers.are_there() {
            let words = LentWords::new(board_words(homes.len())).map_err(failed)?;
            let loan = budget.take(words.bytes())?;
            let (seats, born, moved) = (Vec::new(), vec![0; homes.len()], Vec::new());
            let board = Board::new(words, counts, homes);
            let (zoo, late) = (self.zoo, false);
            made = Some(Box::new(Lending { board, seats, born, moved, zoo, late, _loan: loan }));
        }
        let lending = made.as_ref().or(self.values.readers.0.as_ref());
        let board = lending.map(|lending| lending.board.words());
        let board = board.expect("one is made if there is none");
        let (board, board_bytes) = (board.to_read().map_err(failed)?, board.bytes());
        // Nothing fails from here on.
        let tenure = self.values.blocks.word(geometry.tenure_word());
        if let Some(made) = made {
            self.values.readers.0 = Some(made);
        }
        if let Some(lending) = &mut self.values.readers.0 {
            for seat in lending.seats.extract_if(.., |seat| seat.connection == connection) {
                seat.desk.revoke();
            }
            let desk = Desk::new(words.lent());
            lending.seats.push(Seat { connection, desk, counted: (0, 0), seen: None, _loan: loan });
        }
        let lent = Lent {
            lends: VALUES,
            tenure,
            board_bytes,
            desk_bytes,
            values_bytes,
            offset: geometry.offset,
            block_bytes: geometry.block_bytes,
            stride: geometry.stride,
            blocks: geometry.blocks,
            places: geometry.places,
        };
        Ok((lent, vec![board, desk, values]))
    }

    /// Whether somebody reads the values without a request: that it has done so is told by nobody.
    pub(crate) fn is_lent(&self) -> bool {
        self.values.readers.are_there()
    }

    /// Takes back what a connection was lent, if it was; the pulls it has made and their bytes, as it
    /// says itself, since they were asked for.
    pub(crate) fn take_back(&mut self, connection: u64) -> (u64, u64) {
        let counted = self.values.readers.forget(connection);
        if !self.is_lent() {
            // The next board counts its turns anew: these would mean others there.
            self.values.forget_spans();
        }
        counted
    }

    /// The pulls that readers have made, and their bytes, as they say themselves, since this was asked
    /// for.
    pub(crate) fn direct_pulls(&mut self) -> (u64, u64) {
        let Some(lending) = &mut self.values.readers.0 else { return (0, 0) };
        let counts = lending.seats.iter_mut().map(Seat::count);
        counts.fold((0, 0), |sum, (pulls, bytes)| {
            (sum.0.wrapping_add(pulls), sum.1.wrapping_add(bytes))
        })
    }

    /// The connections of readers who have been at one pull for so long: they may have stopped in the
    /// middle of it, and would hold what they were reading for good.
    pub(crate) fn stalled_readers(&mut self, now: Instant, patience: Duration) -> Vec<u64> {
        let Some(lending) = &mut self.values.readers.0 else { return Vec::new() };
        let seats = lending.seats.iter_mut();
        let stalled = seats.filter_map(|seat| seat.has_stalled(now, patience).then_some(seat));
        stalled.map(|seat| seat.connection).collect()
    }

    /// The connections of readers that hold blocks which no longer hold anything.
    pub(crate) fn holding_readers(&self) -> Vec<u64> {
        let Pool { readers, retired, .. } = &self.values;
        let seats = readers.0.iter().flat_map(|lending| &lending.seats);
        let holds_one = |seat: &&Seat| {
            let pin = seat.desk.pinned();
            retired.iter().any(|gone| holds(pin, gone.span.born, gone.span.freed))
        };
        seats.filter(holds_one).map(|seat| seat.connection).collect()
    }
}
