//! Device and host memory: limits, misuse and leaks.

use pushpull_cuda_emulator::Leaks;

use crate::harness::{made, turn};

#[test]
fn memory_that_a_queued_copy_uses_is_not_freed() {
    for registered in [false, true] {
        let driver = turn();
        let stream = driver.stream();
        let device = driver.device(64);
        let mut own = vec![1u8; 64];
        let host = if registered { own.as_mut_ptr() } else { driver.pinned(64) };
        if registered {
            assert_eq!((driver.cuMemHostRegister_v2)(host, 64, 1), 0);
            assert_eq!((driver.cuMemHostRegister_v2)(host, 64, 1), 712);
        }
        assert_eq!((driver.cuMemcpyHtoDAsync_v2)(device, host, 64, stream), 0);
        let code = if registered {
            (driver.cuMemHostUnregister)(host)
        } else {
            (driver.cuMemFreeHost)(host)
        };
        assert_eq!(code, 700);
        assert_eq!((driver.cuStreamSynchronize)(stream), 700);
        assert!(driver.control.faults()[0].contains("page-locked memory that a queued copy uses"));
        assert_eq!((driver.cuMemHostUnregister)(host), 713);
    }
}

#[test]
fn freed_device_memory_is_not_used() {
    let driver = turn();
    let stream = driver.stream();
    let device = driver.device(64);
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemFree_v2)(device), 0);
    assert_eq!((driver.cuStreamSynchronize)(stream), 700);
    assert!(driver.control.faults()[0].contains("use after free"));
    let driver = {
        drop(driver);
        turn()
    };
    let stream = driver.stream();
    let device = driver.device(64);
    assert_eq!((driver.cuMemsetD8Async)(device, 7, 64, stream), 0);
    assert_eq!((driver.cuMemFreeAsync)(device, stream), 0);
    assert_eq!((driver.cuMemFreeAsync)(device, stream), 1);
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!((driver.cuMemFree_v2)(device), 1);
}

#[test]
fn memory_is_limited() {
    let driver = turn();
    driver.control.set_memory(1 << 20);
    let first = driver.device(1 << 19);
    let mut address = 0;
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, (1 << 19) + 1), 2);
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 0), 1);
    let mut free = 0;
    let mut total = 0;
    assert_eq!((driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total), 0);
    assert_eq!((free, total), (1 << 19, 1 << 20));
    assert_eq!((driver.cuMemFree_v2)(first), 0);
    assert_eq!((driver.cuMemAlloc_v2)(&raw mut address, 1 << 20), 0);
}

#[test]
fn leaks_are_counted() {
    let driver = turn();
    let mine = Leaks { contexts: 1, ..Leaks::default() };
    assert_eq!(driver.control.leaks(), mine);
    let stream = driver.stream();
    let device = driver.device(100);
    let host = driver.pinned(10);
    let event: u64 = made(|out| (driver.cuEventCreate)(out, 0));
    let leaks = Leaks {
        device_allocations: 1,
        device_bytes: 100,
        pinned_allocations: 1,
        streams: 1,
        events: 1,
        ..mine
    };
    assert_eq!(driver.control.leaks(), leaks);
    assert_eq!((driver.cuStreamDestroy_v2)(stream), 0);
    assert_eq!((driver.cuStreamDestroy_v2)(stream), 400);
    assert_eq!((driver.cuEventDestroy_v2)(event), 0);
    assert_eq!((driver.cuMemFreeHost)(host), 0);
    assert_eq!((driver.cuMemFree_v2)(device), 0);
    assert_eq!(driver.control.leaks(), mine);
    assert_eq!((driver.cuDevicePrimaryCtxRelease_v2)(0), 0);
    assert_eq!(driver.control.leaks(), Leaks::default());
}

#[test]
fn overlapping_and_partial_copies_keep_what_has_a_value() {
    let driver = turn();
    let stream = driver.stream();
    let device = driver.device(64);
    let other = driver.device(64);
    assert_eq!((driver.cuMemsetD8Async)(device, 1, 32, stream), 0);
    assert_eq!((driver.cuMemcpyDtoDAsync_v2)(other, device, 64, stream), 0);
    let mut host = [0u8; 64];
    assert_eq!((driver.cuStreamSynchronize)(stream), 0);
    assert_eq!((driver.cuMemcpyDtoH_v2)(host.as_mut_ptr(), other, 32), 0);
    assert_eq!((driver.cuMemcpyDtoH_v2)(host.as_mut_ptr(), other, 33), 700);
    assert!(driver.control.faults()[0].starts_with("read of uninitialized memory"));
}
