//! The committed contents of a store, for tests.

use super::Store;
use super::pool::Pool;

impl Store {
    /// Returns the committed contents of the values and of each slot, in the order of the layout.
    pub fn contents(&self) -> Vec<Vec<u8>> {
        let (bytes, block_bytes) = (self.layout.bytes() as usize, self.geometry.block_bytes);
        let concatenate = |pool: &Pool, part: usize| {
            let blocks = (0..pool.logical_blocks()).map(|logical| {
                let end = block_bytes.min(bytes - logical * block_bytes);
                &pool.blocks.read_part(pool.committed_block(logical), part)[..end]
            });
            blocks.collect::<Vec<_>>().concat()
        };
        let slots = self.slots.iter();
        let slots =
            slots.flat_map(|pool| (0..self.geometry.slots).map(|slot| concatenate(pool, slot)));
        [concatenate(&self.values, 0)].into_iter().chain(slots).collect()
    }
}
