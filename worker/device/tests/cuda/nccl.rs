//! Communicators of NCCL: refusals without the library and with one that fails, and one rank whose
//! results are its own values.

use std::time::Duration;

use half::{bf16, f16};
use pushpull_cuda_emulator::turn::{DRIVER, DriverTurn};
use pushpull_device::{ComputeError, Device, Nccl, NcclElement, NcclError, NcclId, NcclReduction};

use crate::drivers::{CHILD, compile, emulated, output_of};

const REDUCTIONS: [NcclReduction; 5] = [
    NcclReduction::Sum,
    NcclReduction::Mean,
    NcclReduction::Product,
    NcclReduction::Minimum,
    NcclReduction::Maximum,
];

#[test]
fn contradictions_are_refused_before_any_call() {
    let device = Device::cpu_threads(2).unwrap();
    let id = NcclId::from_bytes([1; NcclId::BYTES]);
    assert_eq!(*id.as_bytes(), [1; NcclId::BYTES]);
    let join = |rank, size| Nccl::join(&device, &id, rank, size).unwrap_err();
    assert_eq!(join(0, 0), NcclError::Size { size: 0 });
    assert_eq!(join(0, 1 << 31), NcclError::Size { size: 1 << 31 });
    assert_eq!(join(4, 4), NcclError::Rank { rank: 4, size: 4 });
    assert_eq!(join(3, 4), NcclError::NotCuda { device: "cpu:2".to_owned() });
}

/// Prints what NCCL answers to a process. As a test by itself, it sees the driver of the tests.
#[test]
fn what_a_process_sees_of_nccl_agrees() {
    let _turn = std::env::var_os(CHILD).is_none().then(DriverTurn::start);
    let version = Nccl::version();
    let refused = match &version {
        Ok(version) => {
            return println!("SKIPPED: no NCCL is missing, this machine has {version:?}");
        }
        Err(error) => error.clone(),
    };
    println!("refused: {refused}");
    assert_eq!(Nccl::new_id().unwrap_err(), refused);
    let id = NcclId::from_bytes([0; NcclId::BYTES]);
    match Device::cuda(0) {
        Ok(device) => {
            assert_eq!(Nccl::join(&device, &id, 0, 1).unwrap_err(), refused);
            println!("refused on {device} as well");
        }
        Err(error) => println!("no device: {error}"),
    }
}

const SEEN: &str = "nccl::what_a_process_sees_of_nccl_agrees";

/// The refusal of a process that finds no library.
const NOT_LOADED: &str =
    "refused: cannot use NCCL: no library can be loaded; tried libnccl.so.2 and libnccl.so";

#[test]
fn a_machine_without_the_library_refuses_with_and_without_a_driver() {
    let with_driver = emulated();
    let seen = output_of(SEEN, with_driver.path(), &[]);
    if seen.contains("SKIPPED") {
        return println!("{seen}");
    }
    print!("{seen}");
    assert!(seen.contains(NOT_LOADED) && seen.contains("refused on cuda:0 as well"), "{seen}");
    let without = tempfile::tempdir().unwrap();
    let seen = output_of(SEEN, without.path(), &[]);
    assert!(seen.contains(NOT_LOADED), "{seen}");
}

#[test]
fn a_library_that_lacks_a_function_is_refused() {
    let folder = emulated();
    if !compile("int ncclGetVersion(int *v) { return 0; }", folder.path(), "libnccl.so.2") {
        return println!("SKIPPED: no NCCL lacks a function, there is no C compiler");
    }
    let seen = output_of(SEEN, folder.path(), &[]);
    let expected = "refused: cannot use NCCL: the library has no function ncclGetUniqueId";
    assert!(seen.contains(expected), "{seen}");
}

/// Checks that every operation of the only rank returns its own values.
fn check_one_rank<T: NcclElement + PartialEq>(nccl: &Nccl, values: &[T]) {
    let device = nccl.device();
    let mut buffer = device.buffer::<T>(values.len()).unwrap();
    device.write(values, &mut buffer).unwrap();
    let mut other = device.buffer::<T>(values.len()).unwrap();
    let mut found = vec![T::default(); values.len()];
    for reduction in REDUCTIONS {
        nccl.all_reduce(&mut buffer, reduction).unwrap();
        device.read(&buffer, &mut found).unwrap();
        assert_eq!(found, values, "all_reduce, {reduction:?}");
        device.zero(&mut other).unwrap();
        nccl.reduce_scatter(&buffer, &mut other, reduction).unwrap();
        device.read(&other, &mut found).unwrap();
        assert_eq!(found, values, "reduce_scatter, {reduction:?}");
    }
    nccl.broadcast(&mut buffer, 0).unwrap();
    device.read(&buffer, &mut found).unwrap();
    assert_eq!(found, values, "broadcast");
    device.zero(&mut other).unwrap();
    nccl.all_gather(&buffer, &mut other).unwrap();
    device.read(&other, &mut found).unwrap();
    assert_eq!(found, values, "all_gather");
    // A part of a buffer is reduced alone.
    nccl.all_reduce(buffer.view_mut().slice(1..2), NcclReduction::Sum).unwrap();
}

/// A communicator of one rank on the first device, if this process has a library for it: that of
/// the machine with the driver of the machine, or that of another test.
#[test]
fn one_rank_gets_its_own_values() {
    let is_child = std::env::var_os(CHILD).is_some();
    let _turn = (!is_child).then(DriverTurn::start);
    if !is_child && std::env::var(DRIVER).as_deref() != Ok("installed") {
        return println!("SKIPPED: NCCL computes nothing on the emulated driver");
    }
    let id = match Nccl::new_id() {
        Ok(id) => id,
        Err(error) => return println!("SKIPPED: {error}"),
    };
    let device = Device::cuda(0).unwrap();
    let nccl = Nccl::join(&device, &id, 0, 1).unwrap();
    println!("version {:?}: {nccl:?}", Nccl::version().unwrap());
    assert_eq!((nccl.rank(), nccl.size()), (0, 1));
    check_one_rank(&nccl, &[1.5_f32, -2.0, 3.25]);
    check_one_rank(&nccl, &[1.5_f64, -2.0, 3.25]);
    check_one_rank(&nccl, &[1.5, -2.0, 3.25].map(f16::from_f32));
    check_one_rank(&nccl, &[1.5, -2.0, 3.25].map(bf16::from_f32));
    check_one_rank(&nccl, &[1_u8, 2, 255]);
    check_one_rank(&nccl, &[1_u32, 2, u32::MAX]);
    check_one_rank(&nccl, &[1_u64, 2, 1 << 40]);
    check_one_rank(&nccl, &[1_i64, -2, 1 << 40]);
    check_arguments(&nccl);
    drop(nccl);
    println!("done");
}

/// Checks that a wrong argument is refused, and that the communicator goes on.
fn check_arguments(nccl: &Nccl) {
    let mut buffer = nccl.device().buffer::<f32>(4).unwrap();
    let short = nccl.device().buffer::<f32>(3).unwrap();
    let mut on_host = vec![0.0_f32; 4];
    assert_eq!(nccl.broadcast(&mut buffer, 1), Err(NcclError::Rank { rank: 1, size: 1 }));
    let length = |kernel| ComputeError::Length { kernel, argument: "all", found: 4, expected: 3 };
    let refused = nccl.all_gather(&short, &mut buffer).unwrap_err();
    assert_eq!(refused, NcclError::Compute(length("all_gather")));
    let other = ComputeError::OtherMemory { kernel: "all_reduce", argument: "values" };
    let refused = nccl.all_reduce(&mut on_host, NcclReduction::Sum).unwrap_err();
    assert_eq!(refused, NcclError::Compute(other));
    let mut empty = nccl.device().buffer::<f32>(0).unwrap();
    nccl.all_reduce(&mut empty, NcclReduction::Sum).unwrap();
    nccl.all_reduce(&mut buffer, NcclReduction::Sum).unwrap();
}

/// Prints how a communicator ends whose library fails. Only the next test runs it, in a process of
/// its own.
#[test]
fn a_communicator_that_fails_has_ended() {
    if std::env::var_os(CHILD).is_none() {
        return println!("SKIPPED: no library fails in this process");
    }
    let device = Device::cuda(0).unwrap();
    let id = Nccl::new_id().unwrap();
    let joined = Nccl::join_within(&device, &id, 0, 1, Duration::from_millis(100));
    let nccl = match joined {
        Ok(nccl) => nccl,
        Err(error) => return println!("refused: {error}"),
    };
    let mut buffer = device.buffer::<f32>(4).unwrap();
    if let Err(error) = nccl.all_reduce(&mut buffer, NcclReduction::Sum) {
        println!("refused: {error}");
        let ended = nccl.broadcast(&mut buffer, 0);
        assert_eq!(ended, Err(NcclError::Ended { doing: "broadcast" }));
    }
    // The device goes on.
    device.fill(1.0, &mut buffer).unwrap();
    assert_eq!(device.sum(&buffer).unwrap(), 4.0);
}

#[test]
fn a_library_that_fails_ends_its_communicator_and_hangs_nothing() {
    let folder = emulated();
    if !compile(include_str!("nccl.c"), folder.path(), "libnccl.so.2") {
        return println!("SKIPPED: no NCCL fails, there is no C compiler");
    }
    let seen = output_of("nccl::one_rank_gets_its_own_values", folder.path(), &[]);
    assert!(
        seen.contains("version (2, 23, 4): Nccl { rank: 0, size: 1, device: cuda:0, .. }")
            && seen.contains("done"),
        "{seen}"
    );
    assert!(seen.contains("destroyed") && !seen.contains("aborted"), "{seen}");
    let late = "not all ranks have done their part within 100ms";
    let lost = "NCCL error 6 (another rank has failed or cannot be reached)";
    let cases = [
        ("join never ends", format!("refused: cannot join the communicator: {late}")),
        ("join loses a rank", format!("refused: cannot join the communicator: {lost}")),
        (
            "join is refused",
            "refused: cannot join the communicator: NCCL error 4 (invalid argument)".to_owned(),
        ),
        ("operation never ends", format!("refused: cannot all-reduce: {late}")),
        ("operation loses a rank", format!("refused: cannot all-reduce: {lost}")),
        (
            "operation is refused",
            "refused: cannot all-reduce: NCCL error 4 (invalid argument)".to_owned(),
        ),
        // Nobody hears of these.
        ("finalize never ends", String::new()),
        ("finalize loses a rank", String::new()),
        ("finalize is refused", String::new()),
    ];
    for (fault, expected) in cases {
        let settings = [("FAKE_NCCL_FAULT", fault)];
        let test = "nccl::a_communicator_that_fails_has_ended";
        let seen = output_of(test, folder.path(), &settings);
        assert!(seen.contains(&expected), "{fault}: {seen}");
        assert!(seen.contains("aborted") && !seen.contains("destroyed"), "{fault}: {seen}");
    }
}
