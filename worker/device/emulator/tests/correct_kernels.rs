//! Runs kernels that are right, and compares their results with Rust.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod support;

use support::{Bench, CORRECT};

fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() * 4.0).collect()
}

fn assert_near(got: f64, expected: f64, relative: f64, what: &str) {
    let same = got == expected || got.is_nan() && expected.is_nan();
    let near = (got - expected).abs() <= relative * expected.abs().max(1e-30);
    assert!(same || near, "{what}: {got} instead of {expected}");
}

#[test]
fn vectors_are_added() {
    let mut bench = Bench::new(CORRECT);
    let a = numbers(1000, 1);
    let b = numbers(1000, 2);
    let left = bench.upload(&a);
    let right = bench.upload(&b);
    let out = bench.room::<f32>(1000);
    let shape = ([4, 1], [256, 1]);
    bench.launch("vector_add", shape, 0, arguments![out, left, right, 1000i32]).unwrap();
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(bench.download::<f32>(out, 1000), expected);
}

#[test]
fn matrices_are_multiplied_in_tiles() {
    let m = 37;
    let n = 50;
    let k = 45;
    let mut bench = Bench::new(CORRECT);
    let a = numbers(m * k, 3);
    let b = numbers(k * n, 4);
    let left = bench.upload(&a);
    let right = bench.upload(&b);
    let out = bench.room::<f32>(m * n);
    let arguments = arguments![out, left, right, m as i32, n as i32, k as i32];
    bench.launch("matrix_product", ([4, 3], [16, 16]), 0, arguments).unwrap();
    let got = bench.download::<f32>(out, m * n);
    for row in 0..m {
        for column in 0..n {
            let fused = (0..k).fold(0f32, |sum, i| a[row * k + i].mul_add(b[i * n + column], sum));
            assert_eq!(got[row * n + column], fused, "({row}, {column})");
        }
    }
}

#[test]
fn sums_are_reduced_in_shared_memory_and_in_warps() {
    let mut bench = Bench::new(CORRECT);
    let values: Vec<f32> = (0..1000).map(|i| (i % 17) as f32).collect();
    let input = bench.upload(&values);
    let out = bench.upload(&[0f32]);
    let shape = ([3, 1], [128, 1]);
    bench.launch("reduce_dynamic", shape, 512, arguments![out, input, 1000i32]).unwrap();
    assert_eq!(bench.download::<f32>(out, 1)[0], values.iter().sum::<f32>());
    let sums = bench.room::<f32>(5);
    bench.launch("reduce_warp", ([5, 1], [192, 1]), 0, arguments![sums, input]).unwrap();
    let expected: Vec<f32> = values.chunks(192).take(5).map(|part| part.iter().sum()).collect();
    assert_eq!(bench.download::<f32>(sums, 5), expected);
}

#[test]
fn functions_are_called_with_arrays_in_local_memory() {
    let mut bench = Bench::new(CORRECT);
    let x = numbers(64, 5);
    let input = bench.upload(&x);
    let out = bench.room::<f32>(64);
    let arguments = arguments![out, input, 3i32, 2i32];
    bench.launch("call_and_tables", ([1, 1], [64, 1]), 0, arguments).unwrap();
    for (at, got) in bench.download::<f32>(out, 64).into_iter().enumerate() {
        let count = 1 + (3 + at) % 8;
        let sum = (0..count).fold(0f32, |sum, i| sum.mul_add(x[at], (i + 2) as f32));
        assert_eq!(got, sum * [1.0, 2.0, 3.0, 4.0][at & 3], "{at}");
    }
    let counter = bench.addresses["counter"];
    assert_eq!(bench.download::<i32>(counter, 1), [6]);
}

#[test]
fn vectors_and_halves_are_loaded_and_stored() {
    let mut bench = Bench::new(CORRECT);
    let x = numbers(40, 6);
    let halves =
        [0x3c00u16, 0xc000, 0x3800, 0x4200, 0x0001, 0x7bff, 0x3555, 0xb555, 0x4900, 0x2e66];
    let floats =
        [1.0f32, -2.0, 0.5, 3.0, 2f32.powi(-24), 65504.0, 0.333_251_95, -0.333_251_95, 10.0];
    let input = bench.upload(&x);
    let half = bench.upload(&halves);
    let out = bench.room::<f32>(40);
    bench.launch("vectors", ([1, 1], [32, 1]), 0, arguments![out, input, half, 10i32]).unwrap();
    let got = bench.download::<f32>(out, 40);
    for (at, f) in floats.into_iter().enumerate() {
        let v = &x[at * 4..];
        assert_eq!(got[at * 4..at * 4 + 4], [v[3] + f, v[2] * f, v[1] - f, v[0] / f], "{at}");
    }
}

#[test]
fn the_functions_of_the_library_are_near_those_of_rust() {
    let mut bench = Bench::new(CORRECT);
    let x = numbers(500, 7);
    let y = numbers(500, 8);
    let a = bench.upload(&x);
    let b = bench.upload(&y);
    let out = bench.room::<f32>(6000);
    bench.launch("functions", ([4, 1], [128, 1]), 0, arguments![out, a, b, 500i32]).unwrap();
    for (at, got) in bench.download::<f32>(out, 6000).chunks(12).enumerate() {
        let a = f64::from(x[at]);
        let b = f64::from(y[at]);
        let large = f64::from(y[at] * 1e6);
        let expected = [
            a.exp(),
            b.abs().ln(),
            a.sin(),
            large.cos(),
            a.abs().powf(b),
            erf(a),
            b.tanh(),
            a.abs().sqrt(),
            a / b,
            1.0 / b.abs().sqrt(),
            a.abs().ln_1p(),
            a % b,
        ];
        for (which, (got, expected)) in got.iter().zip(expected).enumerate() {
            // Near a zero of a function, a relative distance says nothing.
            let near_zero = (f64::from(*got) - expected).abs() < 2e-7;
            if !near_zero {
                assert_near(f64::from(*got), expected, 1e-6, &format!("{which} of {a}, {b}"));
            }
        }
    }
}

/// The error function by its series.
fn erf(x: f64) -> f64 {
    if x.abs() > 3.5 {
        return x.signum() * (1.0 - (-x * x).exp() / (x.abs() * std::f64::consts::PI.sqrt()));
    }
    let mut term = x;
    let mut sum = x;
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

#[test]
fn doubles_are_near_those_of_rust() {
    let mut bench = Bench::new(CORRECT);
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let x = wide(numbers(200, 9));
    let y = wide(numbers(200, 10));
    let a = bench.upload(&x);
    let b = bench.upload(&y);
    let out = bench.room::<f64>(1200);
    bench.launch("doubles", ([2, 1], [128, 1]), 0, arguments![out, a, b, 200i32]).unwrap();
    for (at, got) in bench.download::<f64>(out, 1200).chunks(6).enumerate() {
        let a = x[at];
        let b = y[at];
        let expected = [a.exp(), b.abs().ln(), a.abs().powf(b), a.abs().sqrt(), a / b, a.sin()];
        for (which, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert_near(*got, expected, 1e-14, &format!("{which} of {a}, {b}"));
        }
    }
}

#[test]
fn integers_are_those_of_rust() {
    let mut bench = Bench::new(CORRECT);
    let a: Vec<i32> = (0..100i32).map(|i| i.wrapping_mul(-1_234_567_891)).collect();
    let b: Vec<u32> = (0..100u32).map(|i| i.wrapping_mul(2_654_435_761) + 1).collect();
    let left = bench.upload(&a);
    let right = bench.upload(&b);
    let out = bench.room::<i64>(800);
    bench.launch("integers", ([1, 1], [128, 1]), 0, arguments![out, left, right, 100i32]).unwrap();
    for (at, got) in bench.download::<i64>(out, 800).chunks(8).enumerate() {
        let x = a[at];
        let y = b[at];
        let wide = u64::from(y) << 32 | u64::from(x as u32);
        let expected = [
            i64::from(x / 7 + x % 5),
            i64::from(y / 11 + y % 13),
            i64::from(x) * i64::from(y as i32),
            i64::from(y.count_ones() * 100 + y.leading_zeros()),
            ((u64::from(y) * 0x9e37_79b9) >> 32) as i64,
            i64::from(x.wrapping_div(y as i32 | 1)),
            (wide % (u64::from(y) + 3)) as i64,
            i64::from(((u64::from(x as u32) << 32 | u64::from(y)) << 7 >> 32) as u32),
        ];
        assert_eq!(got, expected, "{x} {y}");
    }
}

#[test]
fn atomic_operations_do_not_race() {
    let mut bench = Bench::new(CORRECT);
    let words = bench.upload(&[0i32, 0, 0, 0, 0]);
    let unsigned = bench.upload(&[0u32, u32::MAX, 0, 0]);
    bench.launch("atomics", ([2, 1], [64, 1]), 0, arguments![words, unsigned, 100i32]).unwrap();
    assert_eq!(bench.download::<i32>(words, 5), [4950, 99, -99, 7, 9]);
    assert_eq!(bench.download::<u32>(unsigned, 4), [u32::MAX, 0, 0, 0]);
}

#[test]
fn warps_vote_and_match() {
    let mut bench = Bench::new(CORRECT);
    let x: Vec<i32> = (0..64).map(|i| i * 5 % 8).collect();
    let input = bench.upload(&x);
    let out = bench.room::<u32>(320);
    bench.launch("votes", ([1, 1], [64, 1]), 0, arguments![out, input]).unwrap();
    for (at, got) in bench.download::<u32>(out, 320).chunks(5).enumerate() {
        let warp = &x[at / 32 * 32..at / 32 * 32 + 32];
        let mask = |holds: &dyn Fn(i32) -> bool| {
            warp.iter().enumerate().fold(0, |all, (lane, &x)| all | u32::from(holds(x)) << lane)
        };
        let expected = [
            mask(&|x| x > 3),
            0,
            x.iter().filter(|&&x| x > 3).count() as u32,
            if at % 8 == 0 { x[at] } else { x[at - 1] } as u32,
            mask(&|other| other & 1 == x[at] & 1),
        ];
        assert_eq!(got, expected, "{at}");
    }
}

#[test]
fn structures_are_passed_by_value() {
    let mut bench = Bench::new(CORRECT);
    let out = bench.room::<f32>(4);
    let mut options = 2i32.to_le_bytes().to_vec();
    [1f32, 2.0, 3.0].iter().for_each(|value| options.extend(value.to_le_bytes()));
    options.extend(0.5f64.to_le_bytes());
    let arguments = [out.to_le_bytes().to_vec(), options];
    bench.launch("by_value", ([1, 1], [4, 1]), 0, &arguments).unwrap();
    assert_eq!(bench.download::<f32>(out, 4), [0.5, 3.5, 6.5, 9.5]);
}

#[test]
fn branches_are_taken_by_a_table() {
    for (n, expected) in [(0, 10), (1, 20), (2, 140), (3, -20), (4, 160), (5, 6), (6, 2), (9, 9)] {
        let mut bench = Bench::new(CORRECT);
        let out = bench.upload(&[0i32, 20]);
        bench.launch("choose", ([1, 1], [1, 1]), 0, arguments![out, n]).unwrap();
        assert_eq!(bench.download::<i32>(out, 1), [expected], "{n}");
    }
}
