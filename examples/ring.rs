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
//! With `--exit-with-parent` a rank ends with its launcher, also if that is killed.
//! The ranks of several hosts need an address that all reach: `-x PUSHPULL_RENDEZVOUS=host:29500`.
//! The last line of rank 0 is its result as JSON.

use std::error::Error;
use std::os::unix::process::parent_id;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use pushpull::blocking::{Ring, TrainingSession};
use pushpull::checkpoint::{LocalDirectory, Retention};
use pushpull::collective::{Launch, LaunchError, RingConfig, RingTrainerConfig};
use pushpull::compute::{Compute, Device, Mlp, Model, Samples, View};
use pushpull::error::Chain;
use pushpull::optim::Adagrad;
use pushpull::training::{TrainingConfig, hooks};

use exit_with_parent::ExitWithParent;

#[path = "../src/bin/options/exit_with_parent.rs"]
mod exit_with_parent;

/// The settings of a training.
#[derive(Debug)]
struct Options {
    /// Samples of a rank in a step.
    batch: usize,
    steps: u64,
    /// Where rank 0 saves checkpoints, and from where it restores the newest one.
    checkpoint_dir: Option<PathBuf>,
    parent: ExitWithParent,
}

impl Options {
    /// Reads `--batch N`, `--steps N`, `--checkpoint-dir DIRECTORY` and `--exit-with-parent`.
    fn from_flags(flags: impl IntoIterator<Item = String>) -> Result<Options, Box<dyn Error>> {
        let parent = ExitWithParent { exit_with_parent: false };
        let mut options = Options { batch: BATCH, steps: 300, checkpoint_dir: None, parent };
        let mut flags = flags.into_iter();
        while let Some(flag) = flags.next() {
            if flag == "--exit-with-parent" {
                options.parent = ExitWithParent { exit_with_parent: true };
                continue;
            }
            let value = flags.next().ok_or_else(|| format!("{flag} needs a value"))?;
            match &flag[..] {
                "--batch" => options.batch = value.parse()?,
                "--steps" => options.steps = value.parse()?,
                "--checkpoint-dir" => options.checkpoint_dir = Some(value.into()),
                _ => return Err(format!("no such flag: {flag}").into()),
            }
        }
        Ok(options)
    }
}

/// Trains as one rank. Rank 0 returns the result, as JSON.
fn train(options: &Options) -> Result<Option<String>, Box<dyn Error>> {
    options.parent.apply()?;
    // hvd.init()
    let ring = init(options)?;
    let ranks = ring.size();
    let rank = ring.rank();

    // config.gpu_options.visible_device_list = str(hvd.local_rank())
    // On GPUs: Device::cuda(ring.local_rank())
    let device = Device::pick("cpu:1")?;

    // loss = ...
    let mut model = Model::new(Mlp::new(device, &SIZES), NAMES);

    // opt = tf.train.AdagradOptimizer(0.01 * hvd.size())
    // A rank with a larger batch counts as several, so that one process can train on the joined batch.
    let batches = options.batch as f64 / BATCH as f64;
    let rule = Adagrad::new(0.01 * f64::from(ranks) * batches);

    // opt = hvd.DistributedOptimizer(opt)
    let mut optimizer = RingTrainerConfig::new(rule);

    // checkpoint_dir = '/tmp/train_logs' if hvd.rank() == 0 else None
    // All ranks name the directory: whichever is rank 0 saves.
    if let Some(directory) = &options.checkpoint_dir {
        let directory = Arc::new(LocalDirectory::create(directory)?);
        optimizer = optimizer.checkpoints(directory, Retention::default());
    }

    // hooks = [hvd.BroadcastGlobalVariablesHook(0)]: a session on a ring begins with the broadcast.
    // train_op = opt.minimize(loss)
    let config = TrainingConfig::ring_with(ring.into_inner(), optimizer)
        .variables(Compute::<Samples<'_>>::variables(&model)?)
        .hook(hooks::StopAtStep::last(options.steps));
    let config = match options.checkpoint_dir {
        Some(_) => config.checkpoint_every(Duration::from_secs(600)),
        None => config,
    };

    // with tf.train.MonitoredTrainingSession(...) as mon_sess:
    let mut session = TrainingSession::start(config)?;
    let mut loss = f64::NAN;
    // while not mon_sess.should_stop():
    while let Some(mut step) = session.step()? {
        let shard = step.step() * u64::from(ranks) + u64::from(rank);
        let digits = Digits::of(shard * options.batch as u64, options.batch);
        // mon_sess.run(train_op)
        loss = step.compute(&mut model, digits.samples())?;
        step.push()?;
    }
    let ended = session.close()?;

    if rank != 0 {
        return Ok(None);
    }
    let params = ended.params.ok_or("the rank has no values")?;
    let values = params.views(NAMES)?.map(View::from);
    let accuracy = model.network_mut().accuracy(&values, Digits::of(TEST, 2_000).samples())?;
    Ok(Some(format!(
        r#"{{"ranks":{ranks},"steps":{},"loss":{loss:.4},"accuracy":{accuracy}}}"#,
        ended.step
    )))
}

/// Joins the ring of the job. Says the place of this rank, as `NCCL_DEBUG=INFO` does.
fn init(options: &Options) -> Result<Ring, Box<dyn Error>> {
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
    let ring = Ring::join(config)?;
    // One write, so that the lines of several ranks do not mix.
    let line = format!("{ring}\n");
    eprint!("{line}");
    Ok(ring)
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
