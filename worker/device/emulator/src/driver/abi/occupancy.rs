//! `cuOccupancy*`: estimates from the limits alone.

use std::ffi::c_void;

use super::modules::kernel;
use super::pointers::Out;
use crate::driver::code::{Code, Status};
use crate::driver::state::State;
use crate::machine::LIMITS;

super::driver_functions! {
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>,
        function: u64,
        block_size: i32,
        _shared: usize,
    ) |state| active_blocks(state, blocks, function, block_size);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>,
        function: u64,
        block_size: i32,
        _shared: usize,
        _flags: u32,
    ) |state| active_blocks(state, blocks, function, block_size);
    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>,
        block: Out<i32>,
        function: u64,
        _shared_of: *const c_void,
        _shared: usize,
        most: i32,
    ) |state| block_size(state, grid, block, function, most);
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>,
        block: Out<i32>,
        function: u64,
        _shared_of: *const c_void,
        _shared: usize,
        most: i32,
        _flags: u32,
    ) |state| block_size(state, grid, block, function, most);
    fn cuOccupancyAvailableDynamicSMemPerBlock(
        bytes: Out<usize>,
        function: u64,
        _blocks: i32,
        _block_size: i32,
    ) |state| bytes.set(LIMITS.shared_bytes_max - kernel(state, function)?.shared_size());
}

fn active_blocks(state: &State, blocks: Out<i32>, function: u64, size: i32) -> Status {
    kernel(state, function)?;
    if !(1..=1024).contains(&size) {
        return Err(Code::INVALID_VALUE);
    }
    blocks.set((2048 / size).min(32))
}

fn block_size(state: &State, grid: Out<i32>, block: Out<i32>, function: u64, most: i32) -> Status {
    let limit = kernel(state, function)?.threads_max.unwrap_or(LIMITS.threads_per_block_max) as i32;
    let size = if most > 0 { limit.min(most) } else { limit };
    grid.set(4 * (2048 / size))?;
    block.set(size)
}
