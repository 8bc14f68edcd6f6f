//! The two programs: a shard with two logical blocks on four blocks that updates both, and a reader
//! that pulls both once.

use pushpull_common::shared_values::{
    AtomicWords, BlockTable, Geometry, PinError, ReaderSlot, SharedValuesReader, ValueCounts, holds,
};

use super::machine::{Program, ProgramRun, Region};

/// The result of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ending {
    /// It read values of this version.
    Read(u64),
    /// It read nothing, and knows why.
    Not(PinError),
    /// It took these values for this version, and they are not.
    Torn { version: u64, values: [u64; 2] },
}

/// The updates that the shard makes while the reader runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    /// An update in shadow blocks, an update in place unless the reader has a pin, and two more
    /// updates in shadow blocks. They revoke a pin that holds the blocks they need.
    Changes,
    /// An update in shadow blocks; a kill of the shard in the middle of an update in place; and
    /// another process, which does not know the reader, writes all blocks.
    TakenOver,
}

/// A bug to plant in one of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlantedFault {
    None,
    /// The shard ignores the pin.
    PinIgnored,
    /// The reader does not fence its pin.
    PinNotFenced,
    /// The shard does not fence its odd sequence.
    SequenceNotFenced,
    /// The reader does not load the sequence a second time.
    SequenceNotLoadedAgain,
    /// The shard checks the pin before it publishes.
    PinsCheckedTooEarly,
    /// The sequence stays even during an update.
    SequenceNeverOdd,
    /// The reader does not check whether its pin was revoked.
    RevocationIgnored,
    /// The reader does not check the owner generation.
    OwnerGenerationIgnored,
}

/// Blocks of one word. The owner generation is behind the first block.
const GEOMETRY: Geometry =
    Geometry { offset: 0, block_bytes: 8, stride: 16, blocks: 4, logical_blocks: 2 };

/// Returns the number of a block's word in the values.
fn word(block: u32) -> usize {
    (GEOMETRY.start(block) / 8) as usize
}

/// The blocks of a shard, kept as the server's `ps/store/src/store/pool.rs` keeps them.
struct ShardProgram<'a, W: AtomicWords> {
    block_table: BlockTable<W>,
    reader_slot: Option<ReaderSlot<W>>,
    values: &'a W,
    /// For each logical block, its block and the sequence since which it has it.
    blocks: [(u32, u64); 2],
    free: Vec<u32>,
    /// Blocks that were replaced while pinned, each with its sequences `born` and `freed`.
    retired: Vec<(u32, u64, u64)>,
    fault: PlantedFault,
}

impl<W: AtomicWords> ShardProgram<'_, W> {
    fn is_held(&self, born: u64, freed: u64) -> bool {
        self.reader_slot
            .as_ref()
            .is_some_and(|reader_slot| holds(reader_slot.pinned(), born, freed))
    }

    /// Sets both logical blocks to `version`, in shadow blocks.
    fn change(&mut self, version: u64) {
        while self.free.len() < 2 {
            let retired = std::mem::take(&mut self.retired);
            for (block, born, freed) in retired {
                match self.is_held(born, freed) {
                    true => self.retired.push((block, born, freed)),
                    false => self.free.push(block),
                }
            }
            if self.free.len() < 2
                && let Some(reader_slot) = self.reader_slot.take()
            {
                reader_slot.revoke();
            }
        }
        let shadows = [self.free.remove(0), self.free.remove(0)];
        shadows.iter().for_each(|&block| self.values.store(word(block), version));
        let next = self.block_table.sequence() + 2;
        let early = self.fault == PlantedFault::PinsCheckedTooEarly;
        let free_early = self.blocks.map(|(_, born)| early && !self.is_held(born, next));
        self.block_table.begin();
        for (logical, shadow) in shadows.into_iter().enumerate() {
            self.block_table.set_block(logical, shadow);
        }
        let sequence = self.block_table.publish(ValueCounts { version, ..ValueCounts::default() });
        assert_eq!(sequence, next);
        for ((logical, shadow), is_free) in shadows.into_iter().enumerate().zip(free_early) {
            let (block, born) = std::mem::replace(&mut self.blocks[logical], (shadow, sequence));
            match !is_free && (early || self.is_held(born, sequence)) {
                true => self.retired.push((block, born, sequence)),
                false => self.free.push(block),
            }
        }
    }

    /// Sets both logical blocks to `version` in place, unless the reader has a pin.
    fn change_in_place(&mut self, version: u64) {
        self.block_table.begin();
        let is_read =
            self.reader_slot.as_ref().is_some_and(|reader_slot| reader_slot.pinned() != 0);
        if is_read {
            self.block_table.publish(self.block_table.counts());
            return;
        }
        self.blocks.iter().for_each(|&(block, _)| self.values.store(word(block), version));
        self.block_table.publish(ValueCounts { version, ..ValueCounts::default() });
    }

    /// Stops in the middle of an update in place, as a killed process does. The next owner raises
    /// the owner generation and then writes every block.
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

fn shard(run: &ProgramRun<'_>, script: Script, fault: PlantedFault) -> Option<Ending> {
    let words = |region| run.words(region, false);
    let values = words(Region::Values);
    let blocks = [(0, 0), (1, 0)];
    let block_table =
        BlockTable::new(words(Region::BlockTable), ValueCounts::default(), [0, 1].into_iter());
    let reader_slot = Some(ReaderSlot::new(words(Region::ReaderSlot)));
    run.ready();
    let free = vec![2, 3];
    let retired = Vec::new();
    let mut shard =
        ShardProgram { block_table, reader_slot, values: &values, blocks, free, retired, fault };
    shard.change(1);
    match script {
        Script::Changes => {
            shard.change_in_place(2);
            shard.change(3);
            shard.change(4);
            // Dropping the block table would close it, which this script does not cover.
            std::mem::forget(shard.block_table);
        }
        Script::TakenOver => shard.die(),
    }
    None
}

fn reader(run: &ProgramRun<'_>, fault: PlantedFault) -> Option<Ending> {
    let words = |region| run.words(region, true);
    let owner_generation = 0;
    let block_table = words(Region::BlockTable);
    let reader_slot = words(Region::ReaderSlot);
    let values = words(Region::Values);
    let mut reader =
        SharedValuesReader::new(block_table, reader_slot, values, GEOMETRY, owner_generation);
    let mut blocks = run.scratch.borrow_mut();
    let counts = match reader.pin(0..2, &mut blocks) {
        Ok(counts) => counts,
        Err(not) => return Some(Ending::Not(not)),
    };
    let copied = [0, 1].map(|logical| reader.values().load(word(blocks[logical])));
    if let Err(not) = reader.unpin(16)
        && fault != PlantedFault::OwnerGenerationIgnored
    {
        return Some(Ending::Not(not));
    }
    Some(match copied == [counts.version; 2] {
        true => Ending::Read(counts.version),
        false => Ending::Torn { version: counts.version, values: copied },
    })
}

/// Returns the shard's program and the reader's.
pub(crate) fn programs(
    script: Script,
    fault: PlantedFault,
) -> (impl Fn(&ProgramRun<'_>) -> Option<Ending>, impl Fn(&ProgramRun<'_>) -> Option<Ending>) {
    let first: Box<Program<'static>> = Box::new(move |run| shard(run, script, fault));
    let second: Box<Program<'static>> = Box::new(move |run| reader(run, fault));
    (first, second)
}
