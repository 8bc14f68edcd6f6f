//! A driver of which any call fails.

use pushpull_cuda_emulator::turn::Turn;
use pushpull_device::{ComputeError, Device, Mlp, Network, Samples, View, ViewMut};

use crate::testing::random;

/// Uses most of a device: opens it, computes a network, and copies with pinned memory.
fn scenario() -> Result<f32, ComputeError> {
    let device = Device::cuda(0)?;
    let mut network = Mlp::new(device.clone(), &[3, 4, 2]);
    let mut params = Vec::new();
    for (count, seed) in [12, 4, 8, 2].into_iter().zip(1..) {
        let mut buffer = device.buffer::<f32>(count)?;
        device.write(&random(seed, count), &mut buffer)?;
        params.push(buffer);
    }
    let mut gradients = Vec::new();
    for buffer in &params {
        gradients.push(device.buffer::<f32>(buffer.len())?);
    }
    let features = random(9, 15);
    let batch = Samples { features: &features, labels: &[0, 1, 1, 0, 1] };
    let views: Vec<View<'_, f32>> = params.iter().map(View::from).collect();
    let out = gradients.iter_mut().map(ViewMut::from).collect();
    let loss = network.gradients(&views, batch, out)?;
    let pinned = device.pinned::<f32>(12)?;
    let pinned = device.start_read(&gradients[0], pinned)?.wait()?;
    let pinned = device.start_write(pinned, &mut gradients[0])?.wait()?;
    Ok(loss as f32 + pinned[0])
}

/// The code of a failure that the driver gives no other meaning.
const CODE: u32 = 999;

#[test]
fn every_call_that_fails_is_a_typed_error_and_loses_nothing() {
    let Some(emulator) = Turn::start().map(Turn::expects_faults) else { return };
    let expected = scenario().unwrap();
    let mut failed = Vec::new();
    for nth in 1.. {
        emulator.reset();
        emulator.fail(c"*", nth, CODE);
        match scenario() {
            Ok(found) if emulator.calls().iter().map(|(_, count)| count).sum::<u64>() < nth => {
                assert_eq!(found, expected);
                break;
            }
            // The failure was that of a call that frees something: nobody hears of it, and it is
            // not free.
            Ok(found) => assert_eq!(found, expected, "call {nth}"),
            Err(ComputeError::Cuda { call, code }) => {
                assert_eq!(code, CODE, "call {nth}");
                emulator.await_no_leaks();
                failed.push(call);
            }
            Err(other) => panic!("call {nth}: {other}"),
        }
        assert_eq!(emulator.faults(), Vec::<String>::new(), "call {nth}");
    }
    failed.sort_unstable();
    failed.dedup();
    println!("{} kinds of calls fail: {failed:?}", failed.len());
    assert!(failed.len() >= 12, "{failed:?}");
}

/// A kernel that reads beyond its memory: the error arrives with the next call that waits, and the
/// device stays failed.
#[test]
fn a_device_that_has_failed_says_so_and_hangs_nothing() {
    let Some(emulator) = Turn::start().map(Turn::expects_faults) else { return };
    let device = Device::cuda(0).unwrap();
    let mut buffer = device.buffer::<f32>(10).unwrap();
    emulator.set_steps_max(5);
    device.fill(1.0, &mut buffer).unwrap();
    let error = device.sum(&buffer).unwrap_err();
    assert!(matches!(error, ComputeError::Cuda { .. }), "{error}");
    let pinned = device.pinned::<f32>(10).map_err(|error| error.to_string());
    if let Ok(pinned) = pinned {
        let transfer = device.start_read(&buffer, pinned).unwrap();
        assert!(transfer.wait().is_err());
    }
    assert!(!emulator.faults().is_empty());
}
