//! The initial contents of a store, written in place because nothing can read it yet.

use pushpull_common::tensor::{DType, Element};
use pushpull_optim::optimizer::VariableRules;

use super::geometry::pieces_of;
use super::{BLOCK_BYTES, Store};
use crate::change::StoredStream;

impl Store {
    /// Writes the initial values of a partition, as specified for its variable, from element `done`
    /// on: at most one block's worth of elements. Returns the new `done`.
    ///
    /// The values are written in place, because nothing reads them before the shard is ready.
    pub fn initialize(&mut self, index: usize, done: u64) -> u64 {
        let partition = self.layout.partitions()[index].clone();
        let count = (partition.elements.end - partition.elements.start - done)
            .min((BLOCK_BYTES / 8) as u64);
        // Words of 8 bytes align the buffer for every type.
        let length = count as usize * partition.dtype.size();
        let mut words = vec![0_u64; length.div_ceil(8)];
        let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..length];
        let id = partition.variable;
        let first = partition.elements.start + done;
        match partition.dtype {
            DType::F32 => self.catalogue.fill(id, first, as_elements::<f32>(bytes)),
            DType::F64 => self.catalogue.fill(id, first, as_elements::<f64>(bytes)),
            DType::I64 => self.catalogue.fill(id, first, as_elements::<i64>(bytes)),
            _ => unreachable!("a catalogue holds known types only"),
        }
        let start = partition.offset + done * partition.dtype.size() as u64;
        self.write_committed(StoredStream::Values, start, bytes);
        done + count
    }

    /// Writes values, or a slot, to the committed blocks. Only for a store that nothing can read
    /// yet.
    pub fn write_committed(&mut self, stream: StoredStream, start: u64, bytes: &[u8]) {
        let block_bytes = self.geometry.block_bytes;
        let (pool, part) = match (stream, &mut self.slots) {
            (StoredStream::Values, _) => (&mut self.values, 0),
            (StoredStream::Slot(slot), Some(slots)) => (slots, slot),
            (StoredStream::Slot(_), None) => return,
        };
        let mut bytes = bytes;
        for (logical, within) in pieces_of(&(start..start + bytes.len() as u64), block_bytes) {
            let (head, rest) = bytes.split_at(within.len());
            pool.blocks.write_part(pool.committed_block(logical), part)[within]
                .copy_from_slice(head);
            bytes = rest;
        }
    }

    pub(super) fn fill_slots(&mut self, rules: &VariableRules) {
        let Some(slots) = &mut self.slots else { return };
        let block_bytes = self.geometry.block_bytes;
        for partition in self.layout.partitions().iter().filter(|partition| partition.trainable) {
            let range = partition.offset..partition.offset + partition.bytes;
            let specs = rules.optimizer(partition.variable).slots();
            for (index, spec) in specs.iter().enumerate() {
                // A new mapped file already contains zeros.
                if spec.initial == 0.0 {
                    continue;
                }
                for (logical, within) in pieces_of(&range, block_bytes) {
                    let block = slots.blocks.write_part(slots.committed_block(logical), index);
                    let bytes = &mut block[within];
                    match partition.dtype {
                        DType::F32 => bytemuck::cast_slice_mut(bytes).fill(spec.initial as f32),
                        DType::F64 => bytemuck::cast_slice_mut(bytes).fill(spec.initial),
                        _ => {}
                    }
                }
            }
        }
    }
}

fn as_elements<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}
