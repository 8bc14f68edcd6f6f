//! The two programs: a shard of two places and four blocks that changes both, and a reader that pulls
//! both once.

use pushpull_common::lending::{Board, Counts, Desk, Geometry, NotNow, Reader, Words, holds};

use super::machine::{Program, Region, Run};

/// How the reader has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ending {
    /// It has read values of this version.
    Read(u64),
    /// It knows that it has read nothing.
    Not(NotNow),
    /// It takes these for values of this version.
    Torn { version: u64, values: [u64; 2] },
}

/// What happens beside the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    /// A change in other blocks; one where the values lie, unless somebody reads them; and two more in
    /// other blocks, which revoke a pin that is in their way.
    Changes,
    /// A change in other blocks; the shard is killed in the middle of one where the values lie; and
    /// another process, which does not know of the reader, writes all blocks.
    TakenOver,
}

/// A fault that somebody could have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The shard does not look at the pin.
    PinIgnored,
    /// The reader does not wait until its pin is seen.
    PinNotFenced,
    /// The shard does not wait until its turn is seen.
    TurnNotFenced,
    /// The reader does not look whether the turn is still the same.
    TurnNotLoadedAgain,
    /// The shard looks at the pin before it publishes.
    TurnLate,
    /// The turn stays even while a change is made.
    TurnNeverOdd,
    /// The reader does not look whether its pin was revoked.
    RevokedUnseen,
    /// The reader does not look whether the values are in other hands.
    TenureUnseen,
}

/// A word each; the tenure lies behind the first.
const GEOMETRY: Geometry = Geometry { offset: 0, block_bytes: 8, stride: 16, blocks: 4, places: 2 };

/// A block's word in the values.
fn word(block: u32) -> usize {
    (GEOMETRY.start(block) / 8) as usize
}

/// The blocks of a shard, as `store/pool.rs` of the server keeps them.
struct Shard<'a, W: Words> {
    board: Board<W>,
    desk: Option<Desk<W>>,
    values: &'a W,
    /// By place: the block, and since when.
    homes: [(u32, u64); 2],
    spare: Vec<u32>,
    /// Blocks that were replaced while they were pinned: since when they held something, and until when.
    retired: Vec<(u32, u64, u64)>,
    fault: Fault,
}

impl<W: Words> Shard<'_, W> {
    fn is_held(&self, born: u64, freed: u64) -> bool {
        self.desk.as_ref().is_some_and(|desk| holds(desk.pinned(), born, freed))
    }

    /// Both places become `version`, in other blocks.
    fn change(&mut self, version: u64) {
        while self.spare.len() < 2 {
            let retired = std::mem::take(&mut self.retired);
            for (block, born, freed) in retired {
                match self.is_held(born, freed) {
                    true => self.retired.push((block, born, freed)),
                    false => self.spare.push(block),
                }
            }
            if self.spare.len() < 2
                && let Some(desk) = self.desk.take()
            {
                desk.revoke();
            }
        }
        let shadows = [self.spare.remove(0), self.spare.remove(0)];
        shadows.iter().for_each(|&block| self.values.store(word(block), version));
        let next = self.board.turn() + 2;
        let late = self.fault == Fault::TurnLate;
        let seen_early = self.homes.map(|(_, born)| late && !self.is_held(born, next));
        self.board.begin();
        for (place, shadow) in shadows.into_iter().enumerate() {
            self.board.set_home(place, shadow);
        }
        let turn = self.board.publish(Counts { version, ..Counts::default() });
        assert_eq!(turn, next);
        for ((place, shadow), early) in shadows.into_iter().enumerate().zip(seen_early) {
            let (block, born) = std::mem::replace(&mut self.homes[place], (shadow, turn));
            match !early && (late || self.is_held(born, turn)) {
                true => self.retired.push((block, born, turn)),
                false => self.spare.push(block),
            }
        }
    }

    /// Both places become `version` where they lie, unless somebody reads them.
    fn change_in_place(&mut self, version: u64) {
        self.board.begin();
        let is_read = self.desk.as_ref().is_some_and(|desk| desk.pinned() != 0);
        if is_read {
            self.board.publish(self.board.counts());
            return;
        }
        self.homes.iter().for_each(|&(home, _)| self.values.store(word(home), version));
        self.board.publish(Counts { version, ..Counts::default() });
    }

    /// The process is killed in the middle of a change in place; the next one writes everything.
    fn die(mut self) {
        self.board.begin();
        let is_read = self.desk.as_ref().is_some_and(|desk| desk.pinned() != 0);
        if !is_read {
            self.values.store(word(self.homes[0].0), 2);
        }
        std::mem::forget(self.board);
        self.values.store(GEOMETRY.tenure_word(), 1);
        self.values.fence();
        (0..4).for_each(|block| self.values.store(word(block), 9));
    }
}

fn shard(run: &Run<'_>, script: Script, fault: Fault) -> Option<Ending> {
    let words = |region| run.words(region, false);
    let (values, homes) = (words(Region::Values), [(0, 0), (1, 0)]);
    let board = Board::new(words(Region::Board), Counts::default(), [0, 1].into_iter());
    let desk = Some(Desk::new(words(Region::Desk)));
    run.ready();
    let (spare, retired) = (vec![2, 3], Vec::new());
    let mut shard = Shard { board, desk, values: &values, homes, spare, retired, fault };
    shard.change(1);
    match script {
        Script::Changes => {
            shard.change_in_place(2);
            shard.change(3);
            shard.change(4);
            // The board is kept: that it is not in the end is another story.
            std::mem::forget(shard.board);
        }
        Script::TakenOver => shard.die(),
    }
    None
}

fn reader(run: &Run<'_>, fault: Fault) -> Option<Ending> {
    let words = |region| run.words(region, true);
    let tenure = 0;
    let (board, desk, values) = (words(Region::Board), words(Region::Desk), words(Region::Values));
    let mut reader = Reader::new(board, desk, values, GEOMETRY, tenure);
    let mut homes = run.scratch.borrow_mut();
    let counts = match reader.pin(0..2, &mut homes) {
        Ok(counts) => counts,
        Err(not) => return Some(Ending::Not(not)),
    };
    let copied = [0, 1].map(|place| reader.values().load(word(homes[place])));
    if let Err(not) = reader.unpin(16)
        && fault != Fault::TenureUnseen
    {
        return Some(Ending::Not(not));
    }
    Some(match copied == [counts.version; 2] {
        true => Ending::Read(counts.version),
        false => Ending::Torn { version: counts.version, values: copied },
    })
}

/// The shard's program and the reader's.
pub(crate) fn programs(
    script: Script,
    fault: Fault,
) -> (impl Fn(&Run<'_>) -> Option<Ending>, impl Fn(&Run<'_>) -> Option<Ending>) {
    let first: Box<Program<'static>> = Box::new(move |run| shard(run, script, fault));
    let second: Box<Program<'static>> = Box::new(move |run| reader(run, fault));
    (first, second)
}
