//! Streams, events and host functions: what is done when.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use pushpull_cuda_emulator::Leaks;

use crate::harness::{Driver, FAULTY, made, send, turn};

#[test]
fn a_copy_is_done_when_its_stream_is_waited_for() {
    let driver = turn();
    let stream = driver.stream();
    let device = driver.device(64);
    let host = driver.pinned(64);
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, device, 64, stream), 0);
    assert_eq!(driver.byte(host), 0xff);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(driver.byte(host), 7);
    // Page-locked memory is read when the stream gets there, not when the copy is queued.
    assert_eq!((driver.cuMemcpyHtoDAsync_v2)(device, host, 64, stream), 0);
    // SAFETY: the memory is 64 bytes long.
    unsafe { host.write_bytes(9, 64) };
    let mut pageable = [0u8; 64];
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(pageable.as_mut_ptr(), device, 64, stream), 0);
    assert_eq!(driver.byte(pageable.as_ptr()), 0);
    assert_eq!((driver.cuCtxSynchronize)(), 0);
    assert_eq!(driver.byte(pageable.as_ptr()), 9);
    assert_eq!(driver.control.pageable_copies(), 1);
}

#[test]
fn polling_makes_progress() {
    let driver = turn();
    let stream = driver.stream();
    let device = driver.device(64);
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 0));
    assert_eq!((driver.cuEventQuery)(event), 0);
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuEventRecord)(event, stream), 0);
    assert_eq!((driver.cuStreamQuery)(stream), 600);
    assert_eq!((driver.cuEventQuery)(event), 600);
    assert_eq!((driver.cuEventQuery)(event), 0);
    assert_eq!((driver.cuStreamQuery)(stream), 0);
    let later: u64 = made(|out| (driver.cuEventCreate)(out, 0));
    assert_eq!((driver.cuEventRecord)(later, stream), 0);
    let mut elapsed = -1f32;
    assert_eq!((driver.cuEventElapsedTime)(&raw mut elapsed, event, later), 600);
    assert_eq!((driver.cuEventSynchronize)(later), 0);
    assert_eq!((driver.cuEventElapsedTime)(&raw mut elapsed, event, later), 0);
    assert!(elapsed >= 0.0);
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let driver = turn();
    let first = driver.stream();
    let second = driver.stream();
    let device = driver.device(64);
    let host = driver.pinned(64);
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 2));
    assert_eq!((driver.cuMemsetD8Async)(device, 3, 64, first), 0);
    assert_eq!((driver.cuEventRecord)(event, first), 0);
    assert_eq!((driver.cuMemsetD8Async)(device, 4, 64, first), 0);
    assert_eq!((driver.cuStreamWaitEvent)(second, event, 0), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, device, 64, second), 0);
    assert_eq!((driver.cuStreamSynchronize)(second), 0);
    assert_eq!(driver.byte(host), 3);
    // Without the event, nothing orders the streams: the memory is not set yet.
    let fresh = driver.device(64);
    assert_eq!((driver.cuMemsetD8Async)(fresh, 4, 64, first), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, fresh, 64, second), 0);
    assert_eq!((driver.cuStreamSynchronize)(second), 700);
    assert!(driver.control.faults()[0].contains("uninitialized"), "{:?}", driver.control.faults());
}

#[test]
fn work_of_streams_that_nothing_orders_is_a_fault() {
    let driver = turn();
    let first = driver.stream();
    let second = driver.stream();
    let (device, other) = (driver.device(256), driver.device(256));
    let function = driver.function(FAULTY, c"read");
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 2));
    let fill = |at, stream| assert_eq!((driver.cuMemsetD32Async)(at, 0, 64, stream), 0);
    let wait = |stream| assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    let faults = || driver.control.faults().len();
    // An event, the host's wait and a host function order; so do bytes that are not shared.
    fill(device, first);
    assert_eq!((driver.cuEventRecord)(event, first), 0);
    assert_eq!((driver.cuStreamWaitEvent)(second, event, 0), 0);
    assert_eq!(driver.launch(function, 64, second, &[other, device]), 0);
    wait(second);
    fill(device, first);
    let (sender, receiver) = mpsc::channel::<()>();
    let argument = Box::into_raw(Box::new(sender)).cast();
    assert_eq!((driver.cuLaunchHostFunc)(first, send, argument), 0);
    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!(driver.launch(function, 32, second, &[other, device]), 0);
    assert_eq!((driver.cuMemsetD32Async)(device + 128, 0, 32, first), 0);
    wait(second);
    wait(first);
    assert_eq!(driver.control.faults(), Vec::<String>::new());
    // The stream that reads is waited for first, and still gets the old values: by luck.
    fill(device, first);
    assert_eq!(driver.launch(function, 64, second, &[other, device]), 0);
    wait(second);
    wait(first);
    assert_eq!(faults(), 1);
    assert!(
        driver.control.faults()[0].starts_with(
            "no order: fill and kernel read of another stream use offset 0 of the allocation at"
        ),
        "{:?}",
        driver.control.faults()
    );
    // Memory is freed only when its work is known to be done.
    fill(other, first);
    assert_eq!((driver.cuEventRecord)(event, first), 0);
    assert_eq!((driver.cuStreamWaitEvent)(second, event, 0), 0);
    assert_eq!((driver.cuMemFreeAsync)(other, second), 0);
    wait(second);
    assert_eq!(faults(), 1);
    assert_eq!((driver.cuMemFreeAsync)(device, second), 0);
    wait(second);
    assert_eq!(faults(), 1);
    let third = driver.device(4);
    assert_eq!((driver.cuMemsetD32Async)(third, 0, 1, first), 0);
    assert_eq!((driver.cuStreamQuery)(first), 600);
    assert_eq!((driver.cuMemFree_v2)(third), 0);
    assert_eq!(
        driver.control.faults()[1],
        "no order: free and fill that the host has not waited for"
    );
}

#[test]
fn the_default_stream_is_ordered_with_blocking_ones() {
    let driver = turn();
    let blocking: u64 = made(|out| (driver.cuStreamCreate)(out, 0));
    let device = driver.device(4);
    assert_eq!((driver.cuMemsetD32Async)(device, 5, 1, blocking), 0);
    let mut value = [0u8; 4];
    assert_eq!((driver.cuMemcpyDtoH_v2)(value.as_mut_ptr(), device, 4), 0);
    assert_eq!(value, [5, 0, 0, 0]);
}

#[test]
fn a_host_function_is_called_after_the_work_before_it() {
    let driver = turn();
    let stream = driver.stream();
    let device = driver.device(64);
    let host = driver.pinned(64);
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemcpyDtoHAsync_v2)(host, device, 64, stream), 0);
    let (sender, receiver) = mpsc::channel::<()>();
    let argument = Box::into_raw(Box::new(sender)).cast();
    assert_eq!((driver.cuLaunchHostFunc)(stream, send, argument), 0);
    // The host does not wait for the stream.
    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
    assert_eq!(driver.byte(host), 7);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
}

static CODE: AtomicU32 = AtomicU32::new(0);

extern "C" fn calls_the_driver(argument: *mut c_void) {
    // SAFETY: the function is of the driver, which the test holds.
    let driver = unsafe { &*argument.cast::<Driver>() };
    CODE.store((driver.cuCtxSynchronize)(), Ordering::SeqCst);
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    let driver = turn();
    let stream = driver.stream();
    let argument = std::ptr::from_ref::<Driver>(&driver.driver).cast_mut().cast();
    assert_eq!((driver.cuLaunchHostFunc)(stream, calls_the_driver, argument), 0);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!(CODE.load(Ordering::SeqCst), 800);
    assert_eq!(driver.control.faults(), ["cuCtxSynchronize called by a host function"]);
}

#[test]
fn threads_use_the_driver_at_the_same_time() {
    let driver = turn();
    let copy = driver.driver;
    let context = driver.context;
    let threads: Vec<_> = (0..4u8)
        .map(|value| {
            std::thread::spawn(move || {
                assert_eq!((copy.cuCtxSetCurrent)(context), 0);
                let stream = made(|out| (copy.cuStreamCreate)(out, 1));
                for _ in 0..50 {
                    let device = made(|out| (copy.cuMemAlloc_v2)(out, 256));
                    assert_eq!((copy.cuMemsetD8Async)(device, value, 256, stream), 0);
                    let (sender, receiver) = mpsc::channel::<()>();
                    let argument = Box::into_raw(Box::new(sender)).cast();
                    assert_eq!((copy.cuLaunchHostFunc)(stream, send, argument), 0);
                    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
                    let mut host = [0u8; 256];
                    assert_eq!((copy.cuMemcpyDtoH_v2)(host.as_mut_ptr(), device, 256), 0);
                    assert_eq!(host, [value; 256]);
                    assert_eq!((copy.cuMemFree_v2)(device), 0);
                }
                assert_eq!((copy.cuStreamDestroy_v2)(stream), 0);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(driver.control.leaks(), Leaks { contexts: 1, ..Leaks::default() });
    assert!(driver.control.faults().is_empty());
}
