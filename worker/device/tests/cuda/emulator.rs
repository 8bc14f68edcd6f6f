//! The devices of a test, with grids of every size.

use std::num::NonZeroU32;

use pushpull_cuda_emulator::turn::DriverTurn;
use pushpull_device::Device;

/// The most blocks of a grid: as many as a kernel asks for, then so few that each loop over the
/// grid makes further rounds. With one block no other block can do a round that is left out; with
/// three the stride is that of the grid.
pub(crate) const GRIDS: [Option<u32>; 3] = [None, Some(1), Some(3)];

/// The processor and the first device.
pub(crate) struct Devices {
    pub(crate) cpu: Device,
    pub(crate) cuda: Device,
    /// The most blocks of the device's grids, if they are limited.
    pub(crate) blocks_max: Option<u32>,
}

impl Devices {
    /// Opens them. The caller has the turn of the driver.
    pub(crate) fn open(blocks_max: Option<u32>) -> Devices {
        let cuda = match blocks_max.and_then(NonZeroU32::new) {
            None => Device::cuda(0),
            Some(blocks) => Device::cuda_with_blocks(0, blocks),
        };
        Devices { cpu: Device::cpu_threads(1).unwrap(), cuda: cuda.unwrap(), blocks_max }
    }

    pub(crate) fn both(&self) -> [&Device; 2] {
        [&self.cpu, &self.cuda]
    }
}

/// Runs a test with each of [`GRIDS`].
pub(crate) fn with_each_grid(test: impl Fn(&Devices)) {
    for blocks_max in GRIDS {
        println!("grids of at most {blocks_max:?} blocks");
        let _turn = DriverTurn::start();
        test(&Devices::open(blocks_max));
    }
}

/// Asserts that values differ by at most `tolerance`, relative to the greater of the expected value
/// and 1. NaN is expected where it is.
#[track_caller]
pub(crate) fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let is_same = found == expected || (found.is_nan() && expected.is_nan());
        let is_close = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(is_same || is_close, "element {index} is {found} instead of {expected}");
    }
}
