//! The two programs: a shard of two places and four blocks that changes both, and a reader that pulls
//! both once.

use pushpull_common::shared_values::{
    AtomicWords, BlockTable, Counts, Geometry, NotNow, Reader, ReaderSlot, holds,
};

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
    SequenceNotFenced,
    /// The reader does not look whether the turn is still the same.
    SequenceNotLoadedAgain,
    /// The shard looks at the pin before it publishes.
    SequenceLate,
    /// The turn stays even while a change is made.
    SequenceNeverOdd,
    /// The reader does not look whether its pin was revoked.
    RevokedUnseen,
    /// The reader does not look whether the values are in other hands.
    OwnerGenerationUnseen,
}

/// A word each; the tenure lies behind the first.
const GEOMETRY: Geometry =
    Geometry { offset: 0, block_bytes: 8, stride: 16, blocks: 4, logical_blocks: 2 };

/// A block's word in the values.
fn word(block: u32) -> usize {
    (GEOMETRY.start(block) / 8) as usize
}

/// The blocks of a shard, as `store/pool.rs` of the server keeps them.
struct Shard<'a, W: AtomicWords> {
    block_table: BlockTable<W>,
    reader_slot: Option<ReaderSlot<W>>,
    values: &'a W,
    /// By place: the block, and since when.
    blocks: [(u32, u64); 2],
    spare: Vec<u32>,
    /// Blocks that were replaced while they were pinned: since when they held something, and until when.
    retired: Vec<(u32, u64, u64)>,
    fault: Fault,
}

impl<W: AtomicWords> Shard<'_, W> {
    fn is_held(&self, born: u64, freed: u64) -> bool {
        self.reader_slot
            .as_ref()
            .is_some_and(|reader_slot| holds(reader_slot.pinned(), born, freed))
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
                && let Some(reader_slot) = self.reader_slot.take()
            {
                reader_slot.revoke();
            }
        }
        let shadows = [self.spare.remove(0), self.spare.remove(0)];
        shadows.iter().for_each(|&block| self.values.store(word(block), version));
        let next = self.block_table.sequence() + 2;
        let late = self.fault == Fault::SequenceLate;
        let seen_early = self.blocks.map(|(_, born)| late && !self.is_held(born, next));
        self.block_table.begin();
        for (logical, shadow) in shadows.into_iter().enumerate() {
            self.block_table.set_block(logical, shadow);
        }
        let sequence = self.block_table.publish(Counts { version, ..Counts::default() });
        assert_eq!(sequence, next);
        for ((logical, shadow), early) in shadows.into_iter().enumerate().zip(seen_early) {
            let (block, born) = std::mem::replace(&mut self.blocks[logical], (shadow, sequence));
            match !early && (late || self.is_held(born, sequence)) {
                true => self.retired.push((block, born, sequence)),
                false => self.spare.push(block),
            }
        }
    }

    /// Both places become `version` where they lie, unless somebody reads them.
    fn change_in_place(&mut self, version: u64) {
        self.block_table.begin();
        let is_read =
            self.reader_slot.as_ref().is_some_and(|reader_slot| reader_slot.pinned() != 0);
        if is_read {
            self.block_table.publish(self.block_table.counts());
            return;
        }
        self.blocks.iter().for_each(|&(block, _)| self.values.store(word(block), version));
        self.block_table.publish(Counts { version, ..Counts::default() });
    }

    /// The process is killed in the middle of a change in place; the next one writes everything.
    fn die(mut self) {
        self.block_table.begin();
        let is_read =
            self.reader_slot.as_ref().is_some_and(|reader_slot| reader_slot.pinned() != 0);
        if !is_read {
            self.values.store(word(self.blocks[0].0), 2);
        }
        std::mem::forget(self.block_table);
        self.values.store(GEOMETRY.owner_generation_word(), 1);
        self.values.fence();
        (0..4).for_each(|block| self.values.store(word(block), 9));
    }
}

fn shard(run: &Run<'_>, script: Script, fault: Fault) -> Option<Ending> {
    let words = |region| run.words(region, false);
    let (values, blocks) = (words(Region::Values), [(0, 0), (1, 0)]);
    let block_table =
        BlockTable::new(words(Region::BlockTable), Counts::default(), [0, 1].into_iter());
    let reader_slot = Some(ReaderSlot::new(words(Region::ReaderSlot)));
    run.ready();
    let (spare, retired) = (vec![2, 3], Vec::new());
    let mut shard =
        Shard { block_table, reader_slot, values: &values, blocks, spare, retired, fault };
    shard.change(1);
    match script {
        Script::Changes => {
            shard.change_in_place(2);
            shard.change(3);
            shard.change(4);
            // The board is kept: that it is not in the end is another story.
            std::mem::forget(shard.block_table);
        }
        Script::TakenOver => shard.die(),
    }
    None
}

fn reader(run: &Run<'_>, fault: Fault) -> Option<Ending> {
    let words = |region| run.words(region, true);
    let owner_generation = 0;
    let (block_table, reader_slot, values) =
        (words(Region::BlockTable), words(Region::ReaderSlot), words(Region::Values));
    let mut reader = Reader::new(block_table, reader_slot, values, GEOMETRY, owner_generation);
    let mut blocks = run.scratch.borrow_mut();
    let counts = match reader.pin(0..2, &mut blocks) {
        Ok(counts) => counts,
        Err(not) => return Some(Ending::Not(not)),
    };
    let copied = [0, 1].map(|logical| reader.values().load(word(blocks[logical])));
    if let Err(not) = reader.unpin(16)
        && fault != Fault::OwnerGenerationUnseen
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
