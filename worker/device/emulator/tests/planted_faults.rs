//! Runs kernels with planted bugs: each is found as what it is.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use pushpull_cuda_emulator::machine::DeviceFaultKind;
use pushpull_cuda_emulator::ptx::Space;
use support::{Bench, FAULTY};

#[test]
fn an_index_one_past_the_end_is_out_of_bounds() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(63);
    let input = bench.upload(&[1f32; 63]);
    let fault = bench
        .launch("off_by_one", ([1, 1], [64, 1]), 0, arguments![out, input, 63i32])
        .unwrap_err();
    let DeviceFaultKind::OutOfBounds { space: Space::Global, size: 4, allocation, .. } = fault.kind
    else {
        panic!("{fault}")
    };
    assert_eq!(allocation, Some((input, 252)));
    let location = fault.location.as_ref().unwrap();
    assert_eq!((location.block, location.thread), ([0; 3], [63, 0, 0]));
    assert!(location.text.starts_with("ld.global"), "{fault}");
    assert!(fault.to_string().contains("offset 252 of an allocation of 252 bytes"), "{fault}");
}

#[test]
fn an_index_into_the_neighbour_in_shared_memory_is_out_of_bounds() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(64);
    bench.launch("shared_off_by_one", ([1, 1], [64, 1]), 0, arguments![out, 0i32]).unwrap();
    let kind = bench.fault("shared_off_by_one", 64, arguments![out, 1i32]);
    assert!(matches!(kind, DeviceFaultKind::OutOfBounds { space: Space::Shared, .. }), "{kind}");
}

#[test]
fn a_missing_barrier_is_a_race() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(64);
    let input = bench.upload(&[1f32; 256]);
    // The last thread's value is not there yet when the first reads it.
    let kind = bench.fault("missing_barrier", 64, arguments![out, input]);
    assert!(matches!(kind, DeviceFaultKind::Uninitialized { space: Space::Shared, .. }), "{kind}");
    let kind = bench.fault("missing_second_barrier", 64, arguments![out, input, 256i32]);
    assert!(matches!(kind, DeviceFaultKind::Race { space: Space::Shared, .. }), "{kind}");
}

#[test]
fn blocks_that_write_the_same_elements_race() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(64);
    let input = bench.upload(&[1f32; 64]);
    let shape = ([4, 1], [16, 1]);
    let right = arguments![out, input, 16i32, 16i32];
    bench.launch("wrong_stride", shape, 0, right).unwrap();
    let wrong = arguments![out, input, 16i32, 15i32];
    let kind = bench.launch("wrong_stride", shape, 0, wrong).unwrap_err().kind;
    let DeviceFaultKind::Race { space: Space::Global, address, other } = kind else {
        panic!("{kind}")
    };
    assert_eq!((address, other.block, other.thread, other.wrote), (out + 60, 0, 15, true));
    let beyond = arguments![out, input, 16i32, 17i32];
    let kind = bench.launch("wrong_stride", shape, 0, beyond).unwrap_err().kind;
    assert!(matches!(kind, DeviceFaultKind::OutOfBounds { .. }), "{kind}");
}

#[test]
fn memory_without_a_value_is_not_read() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(64);
    let kind = bench.fault("uninitialized_shared", 64, arguments![out]);
    assert_eq!(kind, DeviceFaultKind::Uninitialized { space: Space::Shared, address: 252 });
    let kind = bench.fault("uninitialized_local", 64, arguments![out, 7i32]);
    assert_eq!(kind, DeviceFaultKind::Uninitialized { space: Space::Local, address: 28 });
    let fresh = bench.room::<f32>(64);
    let kind = bench.fault("read", 64, arguments![out, fresh]);
    assert_eq!(kind, DeviceFaultKind::Uninitialized { space: Space::Global, address: fresh });
}

#[test]
fn freed_memory_is_not_read() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(64);
    let input = bench.upload(&[1f32; 64]);
    bench.memory.free(input);
    let kind = bench.fault("read", 64, arguments![out, input]);
    let allocation = (input, 256);
    assert_eq!(kind, DeviceFaultKind::UseAfterFree { address: input, size: 4, allocation });
}

#[test]
fn a_sum_without_atomic_operations_is_a_race() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.upload(&[0f32]);
    let input = bench.upload(&[1f32; 64]);
    bench.launch("plain_sum", ([1, 1], [1, 1]), 0, arguments![out, input]).unwrap();
    let kind = bench.fault("plain_sum", 2, arguments![out, input]);
    assert!(matches!(kind, DeviceFaultKind::Race { space: Space::Global, .. }), "{kind}");
}

#[test]
fn a_barrier_that_not_all_threads_reach_is_divergent() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(64);
    let input = bench.upload(&[1f32; 64]);
    bench.launch("divergent_barrier", ([1, 1], [64, 1]), 0, arguments![out, input, 64i32]).unwrap();
    let kind = bench.fault("divergent_barrier", 64, arguments![out, input, 60i32]);
    assert_eq!(kind, DeviceFaultKind::DivergentBarrier { waiting: 60, exited: 4, elsewhere: 0 });
    let kind = bench.fault("two_barriers", 64, arguments![out, 10i32]);
    assert_eq!(kind, DeviceFaultKind::DivergentBarrier { waiting: 10, exited: 0, elsewhere: 54 });
    let kind = bench.fault("divergent_shuffle", 32, arguments![out]);
    assert_eq!(kind, DeviceFaultKind::DivergentWarp { members: u32::MAX, arrived: 0xffff });
}

#[test]
fn an_endless_loop_uses_up_its_steps() {
    let mut bench = Bench::new(FAULTY);
    let flag = bench.upload(&[0i32]);
    let kind = bench.fault("endless", 1, arguments![flag]);
    assert!(matches!(kind, DeviceFaultKind::StepBudget { .. }), "{kind}");
}

#[test]
fn misaligned_accesses_and_divisions_by_zero_are_found() {
    let mut bench = Bench::new(FAULTY);
    let out = bench.room::<f32>(1);
    let input = bench.upload(&[1i32, 0]);
    let kind = bench.fault("misaligned", 1, arguments![out, input]);
    assert!(matches!(kind, DeviceFaultKind::Misaligned { size: 4, .. }), "{kind}");
    assert_eq!(bench.fault("divide", 1, arguments![out, input]), DeviceFaultKind::DivisionByZero);
}
