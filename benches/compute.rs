//! Computing on a device (`cargo bench -p benches --bench compute`): products in parts, and on two
//! threads, beside one call of the library on one thread; and steps by way of a device beside steps
//! of a bare worker.
//!
//! The variants take turns, so that a busy machine slows them alike.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::time::{Duration, Instant};

use pushpull::blocking::Worker;
use pushpull::compute::{Device, DeviceParams, Matrix};
use pushpull::local::Cluster;
use pushpull::variable::{Initializer, Shape};
use pushpull::{Params, PsConfig, Sgd, VariableSpec};

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

/// A worker with a server of its own in this process.
struct BenchWorker {
    worker: Worker,
    params: DeviceParams,
    device: Device,
    _cluster: Cluster,
}

impl BenchWorker {
    fn start(elements: u64) -> BenchWorker {
        let start = |cluster, task| PsConfig::new(cluster, task, Sgd::new(0.1));
        let cluster = Cluster::start(1, 1, start).unwrap();
        let mut worker = Worker::connect(cluster.worker_config(0)).unwrap();
        let variables = [VariableSpec::f32("w", [elements]).unwrap()];
        let params = worker.join(&variables, |_| ()).unwrap();
        let device = Device::cpu_threads(1).unwrap();
        let params = DeviceParams::new(&device, params).unwrap();
        BenchWorker { worker, params, device, _cluster: cluster }
    }

    /// Pulls to the device and pushes from it.
    fn step_on_device(&mut self) {
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull_to(&token, &mut self.params).unwrap();
        let mut gradients = self.worker.gradients_on(&self.device).unwrap();
        let (values, mut out) = (self.params.values(), gradients.out());
        let [w] = out.views_mut(&["w"]).unwrap().try_into().unwrap();
        self.device.copy(values.view::<f32>("w").unwrap(), w).unwrap();
        self.worker.push_from(token, gradients).unwrap();
    }

    /// Pulls and pushes.
    fn step(&mut self, params: &mut Params) {
        let token = self.worker.token().unwrap().unwrap();
        self.worker.pull(&token, params).unwrap();
        let mut gradients = self.worker.gradients();
        let w = gradients.view_mut::<f32>("w").unwrap();
        w.copy_from_slice(params.view("w").unwrap());
        self.worker.push(token, gradients).unwrap();
    }
}

/// Compares steps by way of a device with steps of a bare worker.
fn steps(rounds: usize) {
    println!("\n{:<16} {:>14} {:>14} {:>10}", "step of", "bare", "by a device", "ratio");
    for (name, elements) in [("64 B", 16), ("1 MiB", 1 << 18), ("16 MiB", 1 << 22)] {
        let (mut bare, mut device) = (BenchWorker::start(elements), BenchWorker::start(elements));
        let mut params = bare.params.host().clone();
        let steps = if elements > 1 << 20 { 5 } else { 50 };
        let mut times: [Vec<Duration>; 2] = Default::default();
        for _ in 0..rounds {
            times[0].push(time(|| (0..steps).for_each(|_| bare.step(&mut params))));
            times[1].push(time(|| (0..steps).for_each(|_| device.step_on_device())));
        }
        let [bare, device] = times.map(|times| fast(times) / f64::from(steps) * 1e6);
        println!("{name:<16} {bare:>11.1} us {device:>11.1} us {:>9.3}x", device / bare);
    }
}

fn main() {
    // As the tests of a bench run it.
    let is_test = std::env::args().any(|argument| argument == "--test");
    let rounds = if is_test { 2 } else { 200 };
    products(rounds);
    steps(rounds);
}

fn products(rounds: usize) {
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
