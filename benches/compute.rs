//! Computing on a device (`cargo bench -p benches --bench compute`): products in parts, and on two
//! threads, beside one call of the library on one thread; and steps by way of a device beside steps
//! of a bare worker.
//!
//! With `--features cuda -- --device cuda:0`: products on that device, copies to and from it, and
//! steps by way of it.
//!
//! The variants take turns, so that a busy machine slows them alike.

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on says where")]

use std::path::Path;
use std::time::{Duration, Instant};

use pushpull::blocking::{Ps, Worker};
use pushpull::compute::{Buffer, Device, DeviceParams, Matrix, Pinned};
use pushpull::variable::{Initializer, Shape};
use pushpull::worker::Codec;
use pushpull::{ClusterSpec, Params, PsConfig, Sgd, TaskId, VariableSpec, WorkerConfig};

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

fn time<R>(work: impl FnOnce() -> R) -> Duration {
    let start = Instant::now();
    drop(work());
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
    params: Params,
    _server: Ps,
}

impl BenchWorker {
    /// Connects over TCP, or over a socket of Unix, so that both share memory.
    fn start(elements: u64, socket: Option<&Path>, codec: Option<Codec>) -> BenchWorker {
        let address = match socket {
            None => "127.0.0.1:0".to_owned(),
            Some(socket) => format!("unix:{}", socket.display()),
        };
        let listener = Ps::listen(&address).unwrap();
        let spec =
            ClusterSpec::builder().job("ps", [listener.address()]).workers(1).build().unwrap();
        let config = PsConfig::new(spec.clone(), TaskId::ps(0), Sgd::new(0.1));
        let server = Ps::start(listener, config).unwrap();
        let mut config = WorkerConfig::new(spec, TaskId::worker(0));
        if let Some(codec) = codec {
            config = config.codec("*", codec);
        }
        let mut worker = Worker::connect(config).unwrap();
        let variables = [VariableSpec::f32("w", [elements]).unwrap()];
        let params = worker.join(&variables, |_| ()).unwrap();
        BenchWorker { worker, params, _server: server }
    }

    /// Takes a step, and returns how long the pull and the push took.
    fn step(&mut self) -> [Duration; 2] {
        let token = self.worker.token().unwrap().unwrap();
        let pull = time(|| self.worker.pull(&token, &mut self.params).unwrap());
        let mut gradients = self.worker.gradients();
        let w = gradients.view_mut::<f32>("w").unwrap();
        w.copy_from_slice(self.params.view("w").unwrap());
        [pull, time(|| self.worker.push(token, gradients).unwrap())]
    }

    /// Takes a step whose values and gradients are on a device.
    fn step_on(&mut self, device: &Device, params: &mut DeviceParams) -> [Duration; 2] {
        let token = self.worker.token().unwrap().unwrap();
        let pull = time(|| self.worker.pull_to(&token, params).unwrap());
        let mut gradients = self.worker.gradients_on(device).unwrap();
        let values = params.values();
        let mut out = gradients.out();
        let [w] = out.views_mut(&["w"]).unwrap().try_into().unwrap();
        device.copy(values.view::<f32>("w").unwrap(), w).unwrap();
        // Computing is not part of the push.
        device.synchronize().unwrap();
        [pull, time(|| self.worker.push_from(token, gradients).unwrap())]
    }
}

/// Copies pinned memory to a device and back, and returns how long each took.
fn copy(
    device: &Device,
    buffer: &mut Buffer<f32>,
    pinned: &mut Option<Pinned<f32>>,
) -> [Duration; 2] {
    let mut both = [Duration::ZERO; 2];
    for (index, duration) in both.iter_mut().enumerate() {
        let from = pinned.take().unwrap();
        *duration = time(|| {
            let transfer = match index {
                0 => device.start_write(from, &mut *buffer),
                _ => device.start_read(&*buffer, from),
            };
            *pinned = Some(transfer.unwrap().wait().unwrap());
        });
    }
    both
}

/// Compares steps by way of a device with steps of a bare worker, and with copies alone.
fn steps(device: &Device, rounds: usize) {
    println!("\nsteps by way of {device}, in us");
    println!(
        "{:<18} {:>22} {:>22} {:>22} {:>16}",
        "of", "bare pull, push", "pull_to, push_from", "copies", "over the slower"
    );
    let sizes = [("64 B", 16), ("1 MiB", 1 << 18), ("16 MiB", 1 << 22), ("64 MiB", 1 << 24)];
    let folder = tempfile::tempdir().unwrap();
    for (transport, shares) in [("TCP", false), ("shared", true)] {
        for (size, elements) in sizes {
            let [bare, on_device] = ["bare", "device"].map(|which| {
                let socket = folder.path().join(format!("{elements}-{which}"));
                BenchWorker::start(elements as u64, shares.then_some(&*socket), None)
            });
            let rounds = if elements > 1 << 22 { rounds.div_ceil(4) } else { rounds };
            steps_of(&format!("{size} {transport}"), device, rounds, bare, on_device);
        }
    }
    let codecs = [Codec::Bf16, Codec::Int8, Codec::OneBit, Codec::TopK { fraction: 0.01 }];
    for codec in codecs.into_iter().filter(|_| !device.uses_host_memory()) {
        let [bare, on_device] = [0, 1].map(|_| BenchWorker::start(1 << 22, None, Some(codec)));
        steps_of(&format!("16 MiB {codec}"), device, rounds.div_ceil(4), bare, on_device);
    }
}

fn steps_of(
    name: &str,
    device: &Device,
    rounds: usize,
    mut bare: BenchWorker,
    mut on_device: BenchWorker,
) {
    let elements = bare.params.view::<f32>("w").unwrap().len();
    let mut params = DeviceParams::new(device, on_device.params.clone()).unwrap();
    let mut buffer = device.buffer(elements).unwrap();
    let mut pinned = Some(device.pinned(elements).unwrap());
    let mut times: [Vec<Duration>; 6] = Default::default();
    for _ in 0..rounds {
        let round = [
            bare.step(),
            on_device.step_on(device, &mut params),
            copy(device, &mut buffer, &mut pinned),
        ];
        times.iter_mut().zip(round.as_flattened()).for_each(|(all, &one)| all.push(one));
    }
    let micros = times.map(|times| fast(times) * 1e6);
    let [pull, push, pull_to, push_from, write, read] = micros;
    let ratios = [pull.max(write) / pull_to, push.max(read) / push_from];
    let pair = |[a, b]: [f64; 2]| format!("{a:.1} {b:>10.1}");
    println!(
        "{name:<18} {:>22} {:>22} {:>22} {:>8.2} {:>7.2}",
        pair([pull, push]),
        pair([pull_to, push_from]),
        pair([write, read]),
        ratios[0],
        ratios[1],
    );
}

/// Computes products on a device, each queued behind the one before.
fn products_on(device: &Device, rounds: usize) {
    let by = if device.uses_cublas().unwrap() { "cuBLAS" } else { "our kernel" };
    println!("{:<16} {:>18} {:>10} on {device}, by {by}", "product", "", "GFLOP/s");
    let large = [("large", [4096, 4096, 4096]), ("odd", [1000, 999, 1001])];
    for (name, [rows, inner, columns]) in PRODUCTS.into_iter().chain(large) {
        let [a, b] = [("a", rows * inner), ("b", inner * columns)].map(|(name, elements)| {
            let mut buffer = device.buffer(elements).unwrap();
            device.write(&random(name, elements), &mut buffer).unwrap();
            buffer
        });
        let [a, b] = [(&a, rows, inner), (&b, inner, columns)]
            .map(|(values, rows, columns)| Matrix::new(values, rows, columns).unwrap());
        let mut product = device.buffer(rows * columns).unwrap();
        let queued = if device.uses_host_memory() { 1 } else { 20 };
        let times = (0..rounds.div_ceil(queued)).map(|_| {
            time(|| {
                for _ in 0..queued {
                    device.multiply(a, b, 0.0, &mut product).unwrap();
                }
                device.synchronize().unwrap();
            })
        });
        let each = fast(times.collect()) / queued as f64;
        let size = format!("{rows}x{inner}x{columns}");
        println!(
            "{name:<16} {size:>18} {:>10.1}",
            2.0 * (rows * inner * columns) as f64 / each / 1e9
        );
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    // As the tests of a bench run it.
    let mut rounds = 200;
    let mut device = None;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--test" => rounds = 2,
            "--device" => device = Some(Device::pick(&arguments.next().unwrap()).unwrap()),
            _ => {}
        }
    }
    match device {
        Some(device) => {
            products_on(&device, rounds);
            steps(&device, rounds);
        }
        None => {
            products(rounds);
            steps(&Device::cpu_threads(1).unwrap(), rounds);
        }
    }
}

fn products(rounds: usize) {
    let [one, two] = [1, 2].map(|threads| Device::cpu_threads(threads).unwrap());
    println!("{:<16} {:>10} {:>16} {:>16}", "product", "GFLOP/s", "in two parts", "on two threads");
    for (name, [rows, inner, columns]) in PRODUCTS {
        let a = random("a", rows * inner);
        let b = random("b", inner * columns);
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
