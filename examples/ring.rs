//! Horovod's first listing on a ring: every rank is one process, and all train the same model.
//!
//! Each step names the call of the listing. A launcher starts the ranks; alone, the program is a
//! ring of one:
//!
//! ```sh
//! cargo build --release --example ring
//! mpirun -np 4 -H localhost:4 -bind-to none -map-by slot target/release/examples/ring
//! target/release/examples/ring --batch 256    # one process on the joined batch of the four
//! ```
//!
//! The ranks of several hosts need an address that all reach: `-x PUSHPULL_RENDEZVOUS=host:29500`.
//! The last line of rank 0 is its result as JSON.

use std::error::Error;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use pushpull::blocking::Ring;
use pushpull::collective::{Launch, LaunchError, Reduction, RingConfig, Tensor};
use pushpull::compute::{Device, Mlp, Network, Samples, View, ViewMut};
use pushpull::error::Chain;
use pushpull::optim::{Adagrad, ApplyAt, Optimizer, Run};
use safetensors::tensor::{Dtype, TensorView};

/// The settings of a training.
#[derive(Debug)]
struct Options {
    /// Samples of a rank in a step.
    batch: usize,
    steps: u64,
    /// The file that rank 0 writes.
    checkpoint: Option<PathBuf>,
}

impl Options {
    /// Reads `--batch N`, `--steps N` and `--checkpoint FILE`.
    fn from_flags(flags: impl IntoIterator<Item = String>) -> Result<Options, Box<dyn Error>> {
        let mut options = Options { batch: BATCH, steps: 300, checkpoint: None };
        let mut flags = flags.into_iter();
        while let Some(flag) = flags.next() {
            let value = flags.next().ok_or_else(|| format!("{flag} needs a value"))?;
            match &flag[..] {
                "--batch" => options.batch = value.parse()?,
                "--steps" => options.steps = value.parse()?,
                "--checkpoint" => options.checkpoint = Some(value.into()),
                _ => return Err(format!("no such flag: {flag}").into()),
            }
        }
        Ok(options)
    }
}

/// Trains as one rank. Rank 0 returns the result, as JSON.
fn train(options: &Options) -> Result<Option<String>, Box<dyn Error>> {
    // Step 1: hvd.init()
    let launch = match Launch::from_lookup(|name| std::env::var(name).ok()) {
        Err(LaunchError::NoLauncher { .. }) => Launch::new(0, 1)?,
        launch => launch?,
    };
    let launch = launch.parent_process(parent_id());
    let mut config = RingConfig::new(launch.clone())
        .fact("--batch", options.batch.to_string())
        .fact("--steps", options.steps.to_string());
    if let Some(address) = launch.rendezvous() {
        if launch.rank() == 0 {
            eprintln!("ring: whoever reaches {address} or a rank may join and read all tensors");
        }
        config = config.insecure();
    }
    let mut ring = Ring::join(config)?;
    // NCCL_DEBUG=INFO. One write, so that the lines of several ranks do not mix.
    let line = format!("{ring}\n");
    eprint!("{line}");

    // Step 2: config.gpu_options.visible_device_list = str(hvd.local_rank())
    // On GPUs: Device::cuda(ring.local_rank())
    let device = Device::pick("cpu:1")?;
    let mut network = Mlp::new(device, &SIZES);

    // Step 3: opt = tf.train.AdagradOptimizer(0.01 * hvd.size())
    // A rank with a larger batch counts as several, so that one process can train on the joined batch.
    let batches = options.batch as f64 / BATCH as f64;
    let rule = Adagrad::new(0.01 * f64::from(ring.size()) * batches);
    let mut model = TrainedModel::new(&network, &rule, ring.rank());

    // Step 5: hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    for values in &mut model.values {
        ring.broadcast(values, 0)?;
    }

    // while not mon_sess.should_stop(): mon_sess.run(train_op)
    let mut loss = [0.0];
    for step in 0..options.steps {
        let shard = step * u64::from(ring.size()) + u64::from(ring.rank());
        let digits = Digits::of(shard * options.batch as u64, options.batch);
        loss = [model.compute_gradients(&mut network, &digits)?];

        // Step 4: opt = hvd.DistributedOptimizer(opt)
        let mut tensors: Vec<Tensor<'_, f32>> = (NAMES.iter().zip(&mut model.gradients))
            .map(|(name, values)| Tensor { name, values })
            .collect();
        tensors.push(Tensor { name: "loss", values: &mut loss });
        ring.all_reduce_fused(&mut tensors, Reduction::Mean)?;

        model.apply_gradients(&rule, step);
    }

    // Step 6: checkpoint_dir = '/tmp/train_logs' if hvd.rank() == 0 else None
    let mut result = None;
    if ring.rank() == 0 {
        if let Some(file) = &options.checkpoint {
            model.save(&network, file)?;
        }
        let accuracy = network.accuracy(&model.views(), Digits::of(TEST, 2_000).samples())?;
        result = Some(format!(
            r#"{{"ranks":{},"steps":{},"loss":{:.4},"accuracy":{accuracy}}}"#,
            ring.size(),
            options.steps,
            loss[0]
        ));
    }
    ring.leave(); // hvd.shutdown()
    Ok(result)
}

/// The parameters of the network on one rank, their gradients, and the slots of the rule.
struct TrainedModel {
    values: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
    slots: Vec<Vec<f32>>,
}

impl TrainedModel {
    /// Creates a model with values that depend on the rank.
    fn new(network: &Mlp, rule: &Adagrad, rank: u32) -> TrainedModel {
        let initial = rule.slots()[0].initial as f32;
        let lengths = network.shapes().into_iter().map(|shape| shape.iter().product::<u64>());
        let values = lengths.enumerate().map(|(tensor, length)| {
            let stream = (u64::from(rank) << 8) + tensor as u64;
            (0..length).map(|element| 0.2 * noise(stream, element)).collect()
        });
        let values: Vec<Vec<f32>> = values.collect();
        let filled = |value: f32| values.iter().map(|all| vec![value; all.len()]).collect();
        TrainedModel { gradients: filled(0.0), slots: filled(initial), values }
    }

    fn views(&self) -> Vec<View<'_, f32>> {
        self.values.iter().map(View::from).collect()
    }

    /// Computes the gradients of these samples. Returns their mean loss.
    fn compute_gradients(
        &mut self,
        network: &mut Mlp,
        digits: &Digits,
    ) -> Result<f32, Box<dyn Error>> {
        let values: Vec<View<'_, f32>> = self.values.iter().map(View::from).collect();
        let gradients = self.gradients.iter_mut().map(ViewMut::from).collect();
        Ok(network.gradients(&values, digits.samples(), gradients)? as f32)
    }

    fn apply_gradients(&mut self, rule: &Adagrad, step: u64) {
        let tensors = self.values.iter_mut().zip(&self.gradients).zip(&mut self.slots);
        for ((values, gradient), slot) in tensors {
            let slots = &mut [&mut slot[..]];
            rule.apply_f32(ApplyAt::new(step + 1, step), Run { values, slots, gradient });
        }
    }

    /// Writes the values as a file of safetensors.
    fn save(&self, network: &Mlp, file: &Path) -> Result<(), Box<dyn Error>> {
        let bytes: Vec<Vec<u8>> = (self.values.iter())
            .map(|values| values.iter().flat_map(|value| value.to_le_bytes()).collect())
            .collect();
        let mut views = Vec::new();
        for ((name, shape), bytes) in NAMES.iter().zip(network.shapes()).zip(&bytes) {
            let shape = shape.iter().map(|length| *length as usize).collect();
            views.push((*name, TensorView::new(Dtype::F32, shape, bytes)?));
        }
        std::fs::write(file, safetensors::serialize(views, None)?)?;
        Ok(())
    }
}

/// Digits of 8 x 8 pixels, made from their numbers: no rank needs a file.
struct Digits {
    features: Vec<f32>,
    labels: Vec<u32>,
}

impl Digits {
    /// Makes the digits `first..first + count`. Each is the picture of its class, with noise.
    fn of(first: u64, count: usize) -> Digits {
        let mut digits = Digits { features: Vec::new(), labels: Vec::new() };
        for number in (first..).take(count) {
            let class = number % CLASSES;
            let pixel =
                |pixel| noise(PICTURES + class, pixel) + 2.0 * noise(SAMPLES, number * 64 + pixel);
            digits.features.extend((0..64).map(pixel));
            digits.labels.push(class as u32);
        }
        digits
    }

    fn samples(&self) -> Samples<'_> {
        Samples { features: &self.features, labels: &self.labels }
    }
}

/// Returns a number of -1 to 1 that depends on its place alone.
fn noise(stream: u64, at: u64) -> f32 {
    // SplitMix64.
    let mut bits = (stream << 40 ^ at).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((bits ^ bits >> 31) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
}

const SIZES: [usize; 3] = [64, 32, CLASSES as usize];
const NAMES: [&str; 4] = ["w1", "b1", "w2", "b2"];
const CLASSES: u64 = 10;
/// The samples of a rank in a step, unless `--batch` says otherwise.
const BATCH: usize = 64;
/// The first digit of the test.
const TEST: u64 = 1 << 30;
/// The streams of the pictures and of the noise on them.
const PICTURES: u64 = 1 << 20;
const SAMPLES: u64 = 1 << 21;

/// Runs the program with these flags.
pub(crate) fn run(flags: impl IntoIterator<Item = String>) -> ExitCode {
    let trained = Options::from_flags(flags).and_then(|options| train(&options));
    match trained {
        Ok(result) => {
            result.iter().for_each(|result| println!("{result}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("ring: {}", Chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn main() -> ExitCode {
    run(std::env::args().skip(1))
}
