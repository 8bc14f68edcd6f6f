//! Memory of a CUDA device: limits, foreign memory, copies that go on by themselves.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use pushpull_cuda_emulator::Leaks;
use pushpull_cuda_emulator::turn::{DriverTurn, Turn};
use pushpull_device::{ComputeError, Device, View, ViewMut};

use crate::testing::random;

#[test]
fn everything_is_given_back() {
    let Some(emulator) = Turn::start() else { return };
    {
        let device = Device::cuda(0).unwrap();
        let mut buffer = device.buffer::<f32>(100).unwrap();
        device.fill(1.0, &mut buffer).unwrap();
        let pinned = device.pinned::<f32>(100).unwrap();
        let transfer = device.start_read(&buffer, pinned).unwrap();
        assert_eq!(transfer.wait().unwrap()[99], 1.0);
        assert_ne!(emulator.leaks(), Leaks::default());
    }
    emulator.await_no_leaks();
}

#[test]
fn memory_is_limited_by_bytes() {
    let Some(emulator) = Turn::start() else { return };
    let device = Device::cuda_within(0, 4096).unwrap();
    let first = device.buffer::<f32>(1000).unwrap();
    let error = device.buffer::<f32>(25).unwrap_err();
    let expected = ComputeError::MemoryLimit { index: 0, bytes: 100, used: 4000, limit: 4096 };
    assert_eq!(error, expected);
    drop(device.buffer::<f32>(24).unwrap());
    drop(first);
    drop(device.buffer::<u8>(4096).unwrap());
    // A number of bytes that overflows is beyond every limit.
    assert!(matches!(device.buffer::<u64>(usize::MAX), Err(ComputeError::MemoryLimit { .. })));
    drop(device);
    emulator.await_no_leaks();
    emulator.set_memory(1 << 20);
    let device = Device::cuda(0).unwrap();
    let error = device.buffer::<u8>(2 << 20).unwrap_err();
    assert_eq!(error, ComputeError::OutOfMemory { index: 0, bytes: 2 << 20 });
    assert_eq!(error.to_string(), "cuda:0 has no memory for 2097152 bytes more");
    drop(device.buffer::<u8>(1 << 19).unwrap());
}

#[test]
fn memory_of_another_device_is_refused() {
    let Some(turn) = Turn::start() else { return };
    turn.set_devices(2);
    let cpu = Device::cpu_threads(1).unwrap();
    let first = Device::cuda(0).unwrap();
    let second = Device::cuda(1).unwrap();
    assert_eq!([first.to_string(), second.to_string()], ["cuda:0", "cuda:1"]);
    assert!(first.is_same(&first.clone()) && !first.is_same(&second) && !first.is_same(&cpu));
    let mut on_host = vec![0.0_f32; 3];
    let mut on_first = first.buffer::<f32>(3).unwrap();
    let on_second = second.buffer::<f32>(3).unwrap();
    let argument = |argument| ComputeError::OtherMemory { kernel: "axpy", argument };
    let refused = first.axpy(1.0, &on_second, &mut on_first).unwrap_err();
    assert_eq!(refused, argument("x"));
    assert_eq!(first.axpy(1.0, &on_host, &mut on_first).unwrap_err(), argument("x"));
    assert_eq!(cpu.axpy(1.0, &on_first, &mut on_host).unwrap_err(), argument("x"));
    assert_eq!(first.axpy(1.0, &on_first, &mut on_host).unwrap_err(), argument("y"));
    let pinned = cpu.pinned::<f32>(3).unwrap();
    assert!(first.start_read(&on_first, pinned).is_err(), "its pages are not locked");
}

#[test]
fn views_are_cut_and_cast() {
    let _turn = DriverTurn::start();
    let device = Device::cuda(0).unwrap();
    let mut bytes = device.buffer::<u8>(32).unwrap();
    let values = random(1, 8);
    let (left, right) = bytes.view_mut().split_at(12);
    device.write(&values[..3], left.cast::<f32>()).unwrap();
    device.write(&values[3..], right.cast::<f32>()).unwrap();
    let middle: View<'_, f32> = bytes.view().slice(4..24).cast();
    let mut found = vec![0.0; 5];
    device.read(middle, &mut found).unwrap();
    assert_eq!(found, values[1..6]);
    assert!(middle.as_host().is_none());
    let view: ViewMut<'_, u8> = bytes.view_mut();
    assert!(view.into_host().is_none());
}

#[test]
fn copies_go_on_by_themselves_and_hold_their_memory() {
    let turn = DriverTurn::start();
    let device = Device::cuda(0).unwrap();
    let values = random(1, 1000);
    let mut buffer = device.buffer::<f32>(1000).unwrap();
    let mut pinned = device.pinned::<f32>(1200).unwrap();
    pinned[..1000].copy_from_slice(&values);
    let pinned = device.start_write(pinned, &mut buffer).unwrap().wait().unwrap();
    device.scale(2.0, &mut buffer).unwrap();
    let mut transfer = device.start_read(&buffer, pinned).unwrap();
    // The view is changed after the copy.
    device.fill(0.0, &mut buffer).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let pinned = loop {
        if let Poll::Ready(result) = Pin::new(&mut transfer).poll(&mut context) {
            break result.unwrap();
        }
        std::thread::yield_now();
    };
    let doubled: Vec<f32> = values.iter().map(|x| 2.0 * x).collect();
    assert_eq!(pinned[..1000], doubled);
    // Dropped at once: the emulator would report pages that are freed during a copy.
    for _ in 0..20 {
        let pinned = device.pinned::<f32>(1000).unwrap();
        drop(device.start_read(&buffer, pinned).unwrap());
    }
    drop((buffer, pinned, device));
    if let Some(emulator) = turn.emulator() {
        assert_eq!(emulator.pageable_copies(), 0);
        emulator.await_no_leaks();
    }
}
