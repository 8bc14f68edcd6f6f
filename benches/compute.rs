//! The kernels of a device (`cargo bench -p benches --bench compute`): products in parts, and on two
//! threads, beside one call of the library on one thread.
//!
//! The variants take turns, so that a busy machine slows them alike.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::time::{Duration, Instant};

use pushpull::compute::{Device, Matrix};
use pushpull::variable::{Initializer, Shape};

/// The products of a layer of 784 x 1,024 weights with a batch of 128 rows: forwards, by the
/// weights, and by the inputs.
const PRODUCTS: [(&str, [usize; 3]); 3] = [
    ("forwards", [128, 784, 1024]),
    ("by the weights", [784, 128, 1024]),
    ("by the inputs", [128, 1024, 784]),
];

fn random(name: &str, elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    let uniform = Initializer::Uniform { low: -1.0, high: 1.0 };
    uniform.fill(1, name, &Shape::new([elements as u64]).unwrap(), 0, &mut values);
    values
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Returns the time in seconds that a tenth of the rounds were below. Other programs only make
/// rounds longer.
fn fast(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 10].as_secs_f64()
}

fn main() {
    // As the tests of a bench run it.
    let is_test = std::env::args().any(|argument| argument == "--test");
    let rounds = if is_test { 2 } else { 200 };
    let [one, two] = [1, 2].map(|threads| Device::cpu_threads(threads).unwrap());
    println!("{:<16} {:>10} {:>16} {:>16}", "product", "GFLOP/s", "in two parts", "on two threads");
    for (name, [rows, inner, columns]) in PRODUCTS {
        let (a, b) = (random("a", rows * inner), random("b", inner * columns));
        let b = Matrix::new(&b, inner, columns).unwrap();
        let mut product = vec![0.0; rows * columns];
        let mut times: [Vec<Duration>; 3] = Default::default();
        for _ in 0..rounds {
            let whole = Matrix::new(&a, rows, inner).unwrap();
            times[0].push(time(|| one.multiply(whole, b, 0.0, &mut product).unwrap()));
            times[1].push(time(|| {
                let halves = a.chunks(a.len() / 2).zip(product.chunks_mut(rows * columns / 2));
                for (a, product) in halves {
                    let half = Matrix::new(a, rows / 2, inner).unwrap();
                    one.multiply(half, b, 0.0, product).unwrap();
                }
            }));
            times[2].push(time(|| two.multiply(whole, b, 0.0, &mut product).unwrap()));
        }
        let [whole, parts, threads] = times.map(fast);
        let rate = 2.0 * (rows * inner * columns) as f64 / whole / 1e9;
        println!("{name:<16} {rate:>10.1} {:>15.2}x {:>15.2}x", whole / parts, whole / threads);
    }
}
