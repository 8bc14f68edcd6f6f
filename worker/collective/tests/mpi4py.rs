//! Sums around a ring beside those of MPI on equal inputs, and beside exact sums.
//!
//! The test needs a folder with `mpiexec` and a `python` that has `mpi4py` and `numpy`: the one in
//! `PUSHPULL_MPICH`, that of the virtual environment `target/mpich` (`.ci/run` makes it), or one in
//! `PATH`. Without one, sums are compared with exact ones alone.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pushpull_collective::{Launch, Reduction, RingConfig, RingElement, blocking};
use pushpull_common::tensor::bf16;

const SIZES: [u32; 5] = [1, 2, 3, 4, 7];
/// Of short and long tensors, most of which no ring divides.
const LENGTHS: [usize; 5] = [1, 5, 1000, 4097, 100_003];
const SIGNS: [&str; 2] = ["positive", "mixed"];

/// A type of elements, with exact conversions of its inputs.
trait Number: RingElement + PartialEq {
    const NAME: &'static str;
    /// The bits of a mantissa, the first one included.
    const PRECISION: u32;
    fn from_exact(value: f64) -> Self;
    fn exact(self) -> f64;
}

macro_rules! number {
    ($type:ident, $precision:literal, $from:expr, $to:expr) => {
        impl Number for $type {
            const NAME: &'static str = stringify!($type);
            const PRECISION: u32 = $precision;
            fn from_exact(value: f64) -> Self {
                $from(value)
            }
            fn exact(self) -> f64 {
                $to(self)
            }
        }
    };
}

number!(f32, 24, |value| value as f32, f64::from);
number!(f64, 53, |value| value, |value| value);
number!(bf16, 8, bf16::from_f64, bf16::to_f64);

/// Returns what a rank contributes: `PRECISION` random bits, scaled by a power of two. The script
/// has the same formula.
fn input<T: Number>(rank: u32, element: usize, signs: &str) -> f64 {
    let mut bits = (element as u64 + (u64::from(rank) << 32) + 1).wrapping_mul(GOLDEN);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    let mantissa = (bits >> (64 - T::PRECISION)) as f64;
    let exponent = (bits & 7) as i32 - T::PRECISION as i32;
    let sign = if signs == "mixed" && bits & 8 != 0 { -1.0 } else { 1.0 };
    sign * mantissa * f64::from(exponent).exp2()
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sums around a ring of threads. Checks that all ranks have the same bits.
fn sum<T: Number>(size: u32, length: usize, signs: &str) -> Vec<T> {
    let folder = tempfile::tempdir().unwrap();
    let rank = |rank: u32| {
        let launch = Launch::new(rank, size).unwrap().parent_process(std::process::id());
        let mut ring = blocking::Ring::join(RingConfig::new(launch).folder(folder.path())).unwrap();
        let own = (0..length).map(|element| input::<T>(rank, element, signs));
        let mut values: Vec<T> = own.map(T::from_exact).collect();
        ring.all_reduce(&mut values, Reduction::Sum).unwrap();
        ring.leave();
        values
    };
    let mut sums: Vec<Vec<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|at| scope.spawn(move || rank(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let first = sums.swap_remove(0);
    for other in sums {
        assert_eq!(bytes(&other), bytes(&first), "{size} ranks, {length} x {}", T::NAME);
    }
    first
}

fn bytes<T: Number>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Returns the largest difference of sums, in units in the last place of the sum of magnitudes: no
/// partial sum is larger.
fn units<T: Number>(size: u32, signs: &str, ours: &[T], others: impl Iterator<Item = f64>) -> f64 {
    let differences = ours.iter().zip(others).enumerate().map(|(element, (own, other))| {
        let magnitude: f64 = (0..size).map(|rank| input::<T>(rank, element, signs).abs()).sum();
        let unit = (magnitude.log2().floor() - f64::from(T::PRECISION - 1)).exp2();
        (own.exact() - other).abs() / unit
    });
    differences.fold(0.0, f64::max)
}

/// Compares all sums of a type with those that `others` returns. Returns the largest difference for
/// each number of ranks.
fn compare<T: Number>(mut others: impl FnMut(u32, &str, usize) -> Vec<f64>) -> Vec<f64> {
    let of_size = |size: u32| {
        let mut largest = 0.0_f64;
        for signs in SIGNS {
            for length in LENGTHS {
                let ours = sum::<T>(size, length, signs);
                let again = sum::<T>(size, length, signs);
                assert_eq!(bytes(&ours), bytes(&again), "{size} ranks, {length} x {}", T::NAME);
                let others = others(size, signs, length);
                assert_eq!(others.len(), length);
                let units = units(size, signs, &ours, others.into_iter());
                let what = format!("{size} ranks, {length} x {}, {signs}", T::NAME);
                assert!(units <= f64::from(size), "{what}: {units} units in the last place");
                largest = largest.max(units);
            }
        }
        largest
    };
    SIZES.map(of_size).into()
}

/// Reads the sums that MPI has written to a folder for each number of ranks.
fn read<T: Number>(folder: &Path, size: u32, signs: &str, length: usize) -> Vec<f64> {
    let file = folder.join(size.to_string()).join(format!("{}-{signs}-{length}", T::NAME));
    let bytes = std::fs::read(file).unwrap();
    let elements = bytes.chunks_exact(size_of::<T>());
    elements.map(|element| bytemuck::pod_read_unaligned::<T>(element).exact()).collect()
}

#[test]
fn sums_differ_from_those_of_mpi_by_a_unit_for_each_rank() {
    let Some(programs) = programs() else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mpi4py/all_reduce.py");
    let mut library = String::new();
    for size in SIZES {
        let sums = folder.path().join(size.to_string());
        std::fs::create_dir(&sums).unwrap();
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60"]).arg(programs.join("mpiexec"));
        command.args(["-n", &size.to_string()]).arg(programs.join("python"));
        command.arg(&script).arg(&sums).args(LENGTHS.map(|length| length.to_string()));
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        library = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    }
    let folder = folder.path();
    println!("units in the last place between rings and {library}, of {SIZES:?} ranks:");
    println!("f32: {:.2?}", compare::<f32>(|size, signs, n| read::<f32>(folder, size, signs, n)));
    println!("f64: {:.2?}", compare::<f64>(|size, signs, n| read::<f64>(folder, size, signs, n)));
}

#[test]
fn sums_of_bf16_differ_from_exact_ones_by_a_unit_for_each_rank() {
    // Sums of so few bits are exact in f64.
    let exact = |size: u32, signs: &str, length: usize| {
        let total = |element| (0..size).map(|rank| input::<bf16>(rank, element, signs)).sum();
        (0..length).map(total).collect()
    };
    let units = compare::<bf16>(exact);
    println!("units in the last place between rings and exact sums, of {SIZES:?} ranks:");
    println!("bf16: {units:.2?}");
}

/// Returns a folder whose `python` has mpi4py for its `mpiexec`.
fn programs() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = std::env::var_os("PUSHPULL_MPICH").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = named.into_iter().chain([root.join("target/mpich/bin")]);
    let mut folders = folders.chain(std::env::split_paths(&path));
    let found = folders.find(|folder| {
        let mut command = Command::new(folder.join("python"));
        command.args(["-c", "import numpy, mpi4py.MPI"]).stdin(Stdio::null());
        folder.join("mpiexec").is_file()
            && command.output().is_ok_and(|output| output.status.success())
    });
    if found.is_none() {
        println!("SKIPPED: no sum is compared with MPI's, no python beside mpiexec has mpi4py");
    }
    found
}
