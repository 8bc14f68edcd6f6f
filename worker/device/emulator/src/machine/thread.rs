//! [`Thread`]: a thread of a block, which can be stopped and resumed.

use super::memory::Region;
use crate::ptx::{FRAME, LinkedFunction, Register, Space, Special};

/// The scheduling state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SchedulingState {
    /// It can go on.
    Ready,
    /// It waits at a barrier of the block.
    AtBarrier,
    /// It waits for the other lanes of its warp.
    AtWarp,
    /// It has ended.
    Exited,
}

/// A thread of a block, which can be stopped and resumed.
#[derive(Clone, Debug)]
pub(crate) struct Thread {
    pub(crate) index: [u32; 3],
    pub(crate) linear: u32,
    pub(crate) state: SchedulingState,
    pub(crate) function: usize,
    /// The next instruction. A waiting thread stands at the one that it waits in.
    pub(crate) at: usize,
    pub(crate) registers: Vec<u64>,
    pub(crate) parameters: Vec<u8>,
    pub(crate) local: Region,
    pub(crate) carry: bool,
    pub(crate) warp_epoch: u32,
    pub(crate) frames: Vec<CallFrame>,
}

/// The frame of a call, from which the caller continues.
#[derive(Clone, Debug)]
pub(crate) struct CallFrame {
    pub(crate) function: usize,
    pub(crate) at: usize,
    pub(crate) registers: Vec<u64>,
    pub(crate) parameters: Vec<u8>,
}

/// The geometry of a launch, which special registers give to threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchGeometry {
    pub(crate) grid: [u32; 3],
    pub(crate) block_size: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
}

impl Thread {
    pub(crate) fn new(linear: u32, block_size: [u32; 3]) -> Thread {
        let [x, y, _] = block_size;
        Thread {
            index: [linear % x, linear / x % y, linear / x / y],
            linear,
            state: SchedulingState::Ready,
            function: 0,
            at: 0,
            registers: Vec::new(),
            parameters: Vec::new(),
            local: Region::new(Space::Local, 0),
            carry: false,
            warp_epoch: 0,
            frames: Vec::new(),
        }
    }

    /// Starts at a kernel.
    pub(crate) fn start(
        &mut self,
        function: usize,
        code: &LinkedFunction,
        parameters: &[u8],
        geometry: &LaunchGeometry,
    ) {
        self.state = SchedulingState::Ready;
        self.function = function;
        self.at = 0;
        self.carry = false;
        self.warp_epoch = 0;
        self.frames.clear();
        self.parameters.clear();
        self.parameters.extend_from_slice(parameters);
        self.parameters.resize(code.parameters.max(parameters.len()), 0);
        self.enter(code, 0, geometry);
    }

    /// Sets the registers of a function whose local variables begin at `frame`.
    pub(crate) fn enter(&mut self, code: &LinkedFunction, frame: usize, geometry: &LaunchGeometry) {
        self.registers.clear();
        self.registers.resize(code.registers, 0);
        for &(register, bits) in &code.constants {
            self.registers[register as usize] = bits;
        }
        for &(register, special) in &code.specials {
            self.registers[register as usize] = self.special(special, geometry);
        }
        self.registers[FRAME as usize] = frame as u64;
        for range in &code.local.ranges {
            self.local.map(frame + range.start..frame + range.end);
        }
    }

    pub(crate) fn get(&self, register: Register) -> u64 {
        self.registers[register as usize]
    }

    pub(crate) fn set(&mut self, register: Register, value: u64) {
        self.registers[register as usize] = value;
    }

    pub(crate) fn lane(&self) -> u32 {
        self.linear % 32
    }

    fn special(&self, special: Special, geometry: &LaunchGeometry) -> u64 {
        let threads: u32 = geometry.block_size.iter().product();
        let lane = self.lane();
        let value = match special {
            Special::Thread(axis) => self.index[axis],
            Special::BlockSize(axis) => geometry.block_size[axis],
            Special::Block(axis) => geometry.block[axis],
            Special::GridSize(axis) => geometry.grid[axis],
            Special::Lane => lane,
            Special::Warp => self.linear / 32,
            Special::WarpCount => threads.div_ceil(32),
            Special::LaneMaskEqual => 1 << lane,
            Special::LaneMaskLess => (1 << lane) - 1,
            Special::LaneMaskLessEqual => u32::MAX >> (31 - lane),
            Special::LaneMaskGreater => !(u32::MAX >> (31 - lane)),
            Special::LaneMaskGreaterEqual => u32::MAX << lane,
            Special::DynamicSharedSize => geometry.dynamic_shared,
        };
        u64::from(value)
    }
}
