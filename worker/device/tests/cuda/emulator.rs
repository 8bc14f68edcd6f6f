//! The devices of a test.

use pushpull_cuda_emulator::turn::DriverTurn;
use pushpull_device::Device;

/// Waits for the driver, and opens the processor and the first device.
pub(crate) fn devices() -> (DriverTurn, [Device; 2]) {
    let turn = DriverTurn::start();
    (turn, [Device::cpu_threads(1).unwrap(), Device::cuda(0).unwrap()])
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
