//! Tests of folds against tables, scalar references and the crate `half`.

use proptest::prelude::*;

use super::*;
use crate::RingElement;

/// Folds two tensors of one element: type, reduction, prefix, own, result.
const CASES: &str = "
f32  sum  1          2           3
f32  sum  16777216   1           16777216
f32  sum  3e38       3e38        inf
f32  sum  inf        -inf        nan
f32  sum  -0         -0          -0
f32  sum  -0         0           0
f32  mean 1          2           3
f32  min  1          -2          -2
f32  min  0          -0          -0
f32  min  nan        -inf        nan
f32  max  1          -2          1
f32  max  -0         0           0
f32  max  -nan       inf         nan
f64  sum  0.1        0.2         0.30000000000000004
f64  sum  1e308      1e308       inf
f64  min  5e-324     0           0
f64  max  nan        -nan        nan
f16  sum  1          2           3
f16  sum  2048       1           2048
f16  sum  2048       3           2052
f16  sum  65504      15          65504
f16  sum  65504      16          inf
f16  sum  6e-8       6e-8        12e-8
f16  sum  inf        -65504      inf
f16  sum  -inf       inf         nan
f16  sum  -nan       1           nan
f16  min  -0         0           -0
f16  max  -65504     -inf        -65504
bf16 sum  1          2           3
bf16 sum  256        1           256
bf16 sum  256        3           260
bf16 sum  3.38e38    3.38e38     inf
bf16 sum  -inf       inf         nan
bf16 min  -1         -2          -2
bf16 max  nan        1           nan
i32  sum  2147483646 1           2147483647
i32  sum  2147483647 1           overflow
i32  sum -2147483648 -1          overflow
i32  sum -2147483648 2147483647  -1
i32  min -2147483648 2147483647  -2147483648
i32  max -2147483648 2147483647  2147483647
i64  sum  9223372036854775807  1 overflow
i64  sum -9223372036854775808 -1 overflow
i64  sum  4294967295 1           4294967296
i64  min  1          -1          -1
i64  max  1          -1          1
";

/// Divides a sum of one element: type, ranks, sum, mean.
const MEANS: &str = "
f32  3    1       0.33333334
f32  4    -0      -0
f32  2    inf     inf
f32  7    nan     nan
f64  3    1       0.3333333333333333
f64  1024 1       0.0009765625
f16  3    1       0.3333
f16  2    6e-8    0
f16  2    18e-8   12e-8
f16  4    -inf    -inf
f16  2    nan     nan
bf16 3    1       0.33398438
bf16 1    3.38e38 3.38e38
bf16 2    -nan    nan
";

fn kind_of(name: &str) -> ElementKind {
    ElementKind::ALL.into_iter().find(|kind| kind.to_string() == name).unwrap()
}

fn reduction_of(name: &str) -> Reduction {
    Reduction::ALL.into_iter().find(|reduction| reduction.to_string() == name).unwrap()
}

/// Returns the bytes of a number in a text. `nan` is that of results.
fn element(kind: ElementKind, text: &str) -> Vec<u8> {
    let float =
        || text.parse::<f64>().unwrap().copysign(if text.starts_with('-') { -1.0 } else { 1.0 });
    match kind {
        ElementKind::F32 => (float() as f32).to_ne_bytes().to_vec(),
        ElementKind::F64 => float().to_ne_bytes().to_vec(),
        ElementKind::F16 => f16::from_f64(float()).to_ne_bytes().to_vec(),
        ElementKind::Bf16 => bf16::from_f64(float()).to_ne_bytes().to_vec(),
        ElementKind::I32 => text.parse::<i32>().unwrap().to_ne_bytes().to_vec(),
        ElementKind::I64 => text.parse::<i64>().unwrap().to_ne_bytes().to_vec(),
    }
}

fn lines(table: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    let lines = table.lines().filter(|line| !line.is_empty());
    lines.map(|line| (line, line.split_whitespace().collect()))
}

#[test]
fn folds_of_the_table() {
    for (line, words) in lines(CASES) {
        let kind = kind_of(words[0]);
        let reduction = reduction_of(words[1]);
        let mut own = element(kind, words[3]);
        let result = fold(kind, reduction, &element(kind, words[2]), &mut own);
        match words[4] {
            "overflow" => assert_eq!(result, Err(SumOverflow { index: 0 }), "{line}"),
            expected => {
                assert_eq!(result, Ok(()), "{line}");
                assert_eq!(own, element(kind, expected), "{line}");
            }
        }
    }
}

#[test]
fn means_of_the_table() {
    for (line, words) in lines(MEANS) {
        let kind = kind_of(words[0]);
        let mut sum = element(kind, words[2]);
        if words[2].contains("nan") {
            // A sum has one NaN alone.
            fold(kind, Reduction::Sum, &sum.clone(), &mut sum).unwrap();
        }
        finish(kind, Reduction::Mean, words[1].parse().unwrap(), &mut sum);
        assert_eq!(sum, element(kind, words[3]), "{line}");
    }
}

#[test]
fn only_means_are_divided() {
    for kind in ElementKind::ALL {
        for reduction in [Reduction::Sum, Reduction::Min, Reduction::Max] {
            let mut values = element(kind, "7");
            finish(kind, reduction, 3, &mut values);
            assert_eq!(values, element(kind, "7"), "{reduction} of {kind}");
        }
    }
}

/// A scalar reference for one type, written with what the standard library and `half` have.
trait Reference: RingElement {
    fn reduced(reduction: Reduction, a: Self, b: Self) -> Option<Self>;
}

macro_rules! float_reference {
    ($float:ident, $nan:expr, $sum:expr) => {
        impl Reference for $float {
            fn reduced(reduction: Reduction, a: $float, b: $float) -> Option<$float> {
                if a.is_nan() || b.is_nan() {
                    return Some($nan);
                }
                let a_is_less = a.total_cmp(&b).is_lt();
                Some(match reduction {
                    Reduction::Sum | Reduction::Mean => {
                        let sum: fn($float, $float) -> $float = $sum;
                        Some(sum(a, b)).filter(|sum| !sum.is_nan()).unwrap_or($nan)
                    }
                    Reduction::Min => {
                        if a_is_less {
                            a
                        } else {
                            b
                        }
                    }
                    Reduction::Max => {
                        if a_is_less {
                            b
                        } else {
                            a
                        }
                    }
                })
            }
        }
    };
}
float_reference!(f32, f32::from_bits(0x7fc0_0000), |a, b| a + b);
float_reference!(f64, f64::from_bits(0x7ff8_0000_0000_0000), |a, b| a + b);
// The sum of two `f16` is exact in `f64`.
float_reference!(f16, f16::from_bits(0x7e00), |a, b| f16::from_f64(a.to_f64() + b.to_f64()));
float_reference!(bf16, bf16::from_bits(0x7fc0), |a, b| bf16::from_f32(a.to_f32() + b.to_f32()));

macro_rules! integer_reference {
    ($integer:ident) => {
        impl Reference for $integer {
            fn reduced(reduction: Reduction, a: $integer, b: $integer) -> Option<$integer> {
                match reduction {
                    Reduction::Sum => a.checked_add(b),
                    Reduction::Mean => None,
                    Reduction::Min => Some(a.min(b)),
                    Reduction::Max => Some(a.max(b)),
                }
            }
        }
    };
}
integer_reference!(i32);
integer_reference!(i64);

/// Compares a fold of whole tensors with the reference, bit for bit.
fn check<T: Reference>(reduction: Reduction, prefix: &[u8], own: &[u8]) {
    let size = size_of::<T>();
    let pairs = prefix.chunks_exact(size).zip(own.chunks_exact(size));
    let pairs = pairs.map(|(a, b)| {
        let a = bytemuck::pod_read_unaligned::<T>(a);
        (a, bytemuck::pod_read_unaligned::<T>(b))
    });
    let expected: Vec<Option<T>> = pairs.map(|(a, b)| T::reduced(reduction, a, b)).collect();
    // Room for every alignment of both.
    let mut folded = Vec::new();
    for (prefix_at, own_at) in [(0, 0), (1, 0), (0, 1), (3, 2), (4, 4), (7, 5)] {
        let mut moved_prefix = vec![0; prefix_at + prefix.len()];
        moved_prefix[prefix_at..].copy_from_slice(prefix);
        let mut moved_own = vec![0; own_at + own.len()];
        moved_own[own_at..].copy_from_slice(own);
        let result = fold(T::KIND, reduction, &moved_prefix[prefix_at..], &mut moved_own[own_at..]);
        let overflow = expected.iter().position(Option::is_none);
        assert_eq!(result.err(), overflow.map(|index| SumOverflow { index }), "{}", T::KIND);
        let found = moved_own[own_at..].to_vec();
        for (index, expected) in expected.iter().enumerate() {
            let found = &found[index * size..][..size];
            if let Some(expected) = expected {
                assert_eq!(
                    found,
                    bytemuck::bytes_of(expected),
                    "{} {reduction} at {index}",
                    T::KIND
                );
            }
        }
        folded.push(found);
    }
    assert!(folded.iter().all(|found| *found == folded[0]), "alignment changes nothing");
}

fn check_all(prefix: &[u8], own: &[u8]) {
    for reduction in [Reduction::Sum, Reduction::Min, Reduction::Max] {
        check::<f32>(reduction, whole::<f32>(prefix), whole::<f32>(own));
        check::<f64>(reduction, whole::<f64>(prefix), whole::<f64>(own));
        check::<f16>(reduction, whole::<f16>(prefix), whole::<f16>(own));
        check::<bf16>(reduction, whole::<bf16>(prefix), whole::<bf16>(own));
        check::<i32>(reduction, whole::<i32>(prefix), whole::<i32>(own));
        check::<i64>(reduction, whole::<i64>(prefix), whole::<i64>(own));
    }
}

/// Returns the bytes of the whole elements.
fn whole<T>(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len() / size_of::<T>() * size_of::<T>()]
}

/// Pairs of byte strings of one length. Some bytes are frequent, because random elements seldom have
/// equal exponents, zeros or NaN.
fn tensors() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let byte = prop_oneof![any::<u8>(), Just(0), Just(0x3f), Just(0x7f), Just(0x80), Just(0xff)];
    (0..400_usize).prop_flat_map(move |length| {
        let bytes = proptest::collection::vec(byte.clone(), length);
        (bytes.clone(), bytes)
    })
}

proptest! {
    /// Compares folds with the reference at several alignments and all lengths around those of
    /// vectors.
    #[test]
    fn folds_equal_the_reference(pair in tensors()) {
        check_all(&pair.0, &pair.1);
    }

    /// Compares divisions with those of single elements.
    #[test]
    fn means_equal_the_reference(sums in tensors(), ranks in 1..=1024_u32) {
        let n = ranks as f32;
        check_mean::<f32>(ranks, &sums.0, |sum| sum / n);
        check_mean::<f64>(ranks, &sums.0, |sum| sum / f64::from(ranks));
        check_mean::<f16>(ranks, &sums.0, |sum| f16::from_f32(sum.to_f32() / n));
        check_mean::<bf16>(ranks, &sums.0, |sum| bf16::from_f32(sum.to_f32() / n));
    }
}

fn check_mean<T: RingElement + PartialEq>(ranks: u32, sums: &[u8], expected: impl Fn(T) -> T) {
    let sums = whole::<T>(sums);
    let mut found = vec![0; sums.len() + 1];
    found[1..].copy_from_slice(sums);
    finish(T::KIND, Reduction::Mean, ranks, &mut found[1..]);
    for (sum, found) in sums.chunks(size_of::<T>()).zip(found[1..].chunks(size_of::<T>())) {
        let expected = expected(bytemuck::pod_read_unaligned(sum));
        // The payload of a NaN is that of the sum, if it had one.
        #[expect(clippy::eq_op, reason = "NaN alone is not equal to itself")]
        if expected != expected {
            let found: T = bytemuck::pod_read_unaligned(found);
            assert!(found != found, "{}", T::KIND);
        } else {
            assert_eq!(found, bytemuck::bytes_of(&expected), "{} / {ranks}", T::KIND);
        }
    }
}

/// Magnitudes of `f16` and `bf16` at which rules change, each of which has both signs.
const HALVES: [u16; 24] = [
    0, 1, 2, 3, 0x03ff, 0x0400, 0x0401, 0x0fff, 0x1400, 0x3555, 0x3bff, 0x3c00, 0x3c01, 0x3f80,
    0x4248, 0x7000, 0x7bff, 0x7c00, 0x7c01, 0x7e00, 0x7f7f, 0x7f80, 0x7f81, 0x7fff,
];

/// Folds all 65,536 numbers with each of these, and divides them.
#[test]
fn all_f16_and_bf16_equal_the_reference() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for magnitude in HALVES {
        for other in [magnitude, magnitude | 0x8000] {
            let others = vec![other; all.len()];
            let prefix = bytemuck::cast_slice(&all);
            let own = bytemuck::cast_slice(&others);
            for reduction in [Reduction::Sum, Reduction::Min, Reduction::Max] {
                check::<f16>(reduction, prefix, own);
                check::<bf16>(reduction, prefix, own);
            }
        }
    }
    for ranks in [1, 2, 3, 5, 7, 1000, 1024] {
        let n = ranks as f32;
        let sums = bytemuck::cast_slice(&all);
        check_mean::<f16>(ranks, sums, |sum| f16::from_f32(sum.to_f32() / n));
        check_mean::<bf16>(ranks, sums, |sum| bf16::from_f32(sum.to_f32() / n));
    }
}

/// Folds special numbers in every order of three ranks.
#[test]
fn minima_and_maxima_do_not_depend_on_the_order_of_ranks() {
    let numbers = ["nan", "-nan", "inf", "-inf", "0", "-0", "1", "-1", "1e-7", "2"];
    let floats = ElementKind::ALL.into_iter().filter(|kind| kind.is_float());
    for kind in floats {
        for reduction in [Reduction::Min, Reduction::Max] {
            let fold_all = |ranks: [&str; 3]| {
                let mut result = element(kind, ranks[0]);
                for rank in &ranks[1..] {
                    let mut own = element(kind, rank);
                    fold(kind, reduction, &result, &mut own).unwrap();
                    result = own;
                }
                result
            };
            for a in numbers {
                for b in numbers {
                    for c in numbers {
                        let result = fold_all([a, b, c]);
                        let orders = [[a, c, b], [b, a, c], [b, c, a], [c, a, b], [c, b, a]];
                        for order in orders {
                            assert_eq!(fold_all(order), result, "{reduction} of {kind} {order:?}");
                        }
                        if [a, b, c].iter().any(|number| number.contains("nan")) {
                            assert_eq!(result, element(kind, "nan"), "{reduction} of {kind}");
                        }
                    }
                }
            }
        }
    }
}

/// Which NaN an addition gives depends on the processor and the order of its operands.
#[test]
fn a_sum_has_one_nan() {
    for kind in ElementKind::ALL.into_iter().filter(|kind| kind.is_float()) {
        for (a, b) in [("nan", "-nan"), ("-nan", "1"), ("1", "-nan"), ("inf", "-inf")] {
            // Longer than a vector, with a rest.
            let prefix = element(kind, a).repeat(37);
            let mut own = element(kind, b).repeat(37);
            fold(kind, Reduction::Sum, &prefix, &mut own).unwrap();
            assert_eq!(own, element(kind, "nan").repeat(37), "{kind}: {a} + {b}");
        }
    }
}

#[test]
fn the_first_overflow_is_located() {
    for at in [0, 1, 15, 16, 98, 99] {
        let mut prefix = [i32::MAX; 100];
        prefix[..at].fill(-1);
        let mut own = [1_i32; 100];
        let own = bytemuck::cast_slice_mut(&mut own);
        let prefix = bytemuck::cast_slice(&prefix);
        let result = fold(ElementKind::I32, Reduction::Sum, prefix, own);
        assert_eq!(result, Err(SumOverflow { index: at }));
    }
}

#[test]
fn the_first_non_finite_number_is_located() {
    for kind in ElementKind::ALL {
        let mut values = element(kind, "1").repeat(9);
        assert_eq!(first_non_finite(kind, &values), None, "{kind}");
        if kind.is_float() {
            values[5 * kind.size()..][..kind.size()].copy_from_slice(&element(kind, "-inf"));
            assert_eq!(first_non_finite(kind, &values), Some((5, f64::NEG_INFINITY)), "{kind}");
        }
    }
    assert_eq!(first_non_finite(ElementKind::I32, &f32::NAN.to_ne_bytes()), None);
}

#[test]
#[should_panic(expected = "both have the same elements")]
fn lengths_must_agree() {
    let _ = fold(ElementKind::F32, Reduction::Sum, &[0; 8], &mut [0; 4]);
}

#[test]
#[should_panic(expected = "mean of i32 is refused before it begins")]
fn a_mean_of_integers_is_no_silent_sum() {
    finish(ElementKind::I32, Reduction::Mean, 2, &mut [0; 4]);
}
