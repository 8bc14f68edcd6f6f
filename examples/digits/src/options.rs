//! Command line of the example.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use pushpull::checkpoint::Checkpoints;
use pushpull::error::Chain;
use pushpull::job::Settings;
use pushpull::worker::Codec;
use pushpull::{ClusterSpec, PsConfig, TaskId};

use super::data::{CLASSES, Split};
use super::data_origin::{DataOrigin, data_origin};
use super::ledger;
use super::place::{Place, place};
use super::task::{
    self, JobFlags, JobOptions, ModeOptions, ProcessOptions, Replicas, Role, TaskError, local_path,
};
use super::train;

/// Train a small network on handwritten digits over a parameter server.
///
/// Without --job-name the whole cluster runs in this process: two parameter servers and two
/// workers, or with --synchronous A/R as many workers as R. With --job-name, give all processes the
/// same hosts, the same mode and the same end: --steps, --epochs or neither. A flag without an
/// effect on the job of a process is an error. A step is made of --batch rows in either mode, so the same number
/// of steps reaches the same accuracy.
#[derive(Clone, Debug, Parser)]
pub(crate) struct DigitsOptions {
    /// Codec of the gradients: f16, bf16, int8, onebit, topk(FRACTION) or threshold(MAGNITUDE). The
    /// error of the encoding is added to the next gradient. [default: none]
    #[arg(long)]
    pub(crate) codec: Option<Codec>,
    /// Train in this process with each codec and three seeds, and write a table of the results into
    /// this document, between its marks. Uses --data or the digits.
    #[arg(
        long,
        value_name = "FILE",
        value_parser = local_path(),
        conflicts_with_all = ["job_name", "codec", "epochs", "checkpoint_dir", "summaries"]
    )]
    pub(crate) codec_table: Option<PathBuf>,
    /// Directory or URL with Fashion-MNIST or MNIST in IDX form, plain or .gz; or a stream of records
    /// of digits: - for the standard input, unix:PATH or tcp:HOST:PORT. The stream of a worker process
    /// is its own share of the samples. [default: built-in digits]
    #[arg(long, value_name = "PLACE", value_parser = data_origin())]
    pub(crate) data: Option<DataOrigin>,
    /// Print the samples to train on as CSV, the label first, and end.
    #[arg(long, conflicts_with_all = ["job_name", "codec_table"])]
    pub(crate) print_samples: bool,
    /// Seed of the initial weights and of the batches.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Global step at which training ends. [default: 2000, or with --epochs none]
    #[arg(long)]
    steps: Option<u64>,
    /// Number of times that each row is trained on, exactly. A ps task then has no last step but that
    /// of --steps. [default: until the last step]
    #[arg(long)]
    pub(crate) epochs: Option<u64>,
    /// Rows in a step. A gradient is of all of them, or with --synchronous A/R of an A-th, rounded
    /// up.
    #[arg(long, default_value_t = 32)]
    batch: u32,
    /// Number of units in the hidden layer.
    #[arg(long, default_value_t = 128, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) hidden: usize,
    /// Device that computes the gradients: auto, cpu, cpu:THREADS or cuda:INDEX. With --towers, cpu.
    #[arg(long, default_value = "auto")]
    pub(crate) device: String,
    /// Learning rate of Adam.
    #[arg(long, default_value_t = 1e-3)]
    pub(crate) learning_rate: f64,
    /// Steps in which the learning rate decays to 0, along a cosine. [default: none]
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..))]
    decay_steps: Option<u64>,
    /// Directory or URL of the checkpoints, the same for all ps tasks. The same command then resumes
    /// after Ctrl-C or a loss of all servers. [default: none]
    #[arg(long, value_parser = place(), value_name = "DIR")]
    pub(crate) checkpoint_dir: Option<Place>,
    /// Global steps from one checkpoint to the next; there is one more at the end.
    #[arg(long, value_name = "STEPS", default_value_t = 500, requires = "checkpoint_dir")]
    pub(crate) checkpoint_steps: u64,
    /// Directory of the state of a ps task, best on tmpfs. It survives a kill of the process.
    /// [default: anonymous memory]
    #[arg(long, value_parser = local_path(), value_name = "DIR", requires = "job_name")]
    state_dir: Option<PathBuf>,
    /// Directory of TensorBoard summaries, with a subdirectory for each worker. [default:
    /// none]
    #[arg(long, value_parser = local_path(), value_name = "DIR")]
    pub(crate) summaries: Option<PathBuf>,
    /// Train with one client that divides each batch among towers on this many tasks, whose mean
    /// gradient is one update.
    #[arg(
        long,
        value_name = "K",
        value_parser = clap::value_parser!(u32).range(1..=32),
        conflicts_with_all = [
            "job_name", "synchronous", "issync", "codec", "codec_table", "device", "checkpoint_dir",
            "summaries", "ledger"
        ]
    )]
    pub(crate) towers: Option<u32>,
    /// Count the gradients of each row in a variable, for a test.
    #[arg(long, hide = true, conflicts_with_all = ["codec", "codec_table"])]
    pub(crate) ledger: bool,
    /// Delay of each gradient, in ms, for tests that kill processes.
    #[arg(long, hide = true, default_value_t = 0, requires = "ledger")]
    pub(crate) step_delay_ms: u64,
    // Their headings would hold for the flags behind them.
    #[command(flatten)]
    pub(crate) process: ProcessOptions,
    #[command(flatten)]
    mode: ModeOptions,
    #[command(flatten)]
    _job: JobOptions,
    /// Whether the samples are this worker's alone, so that the servers grant none.
    #[arg(skip)]
    pub(crate) has_own_share: bool,
    /// What the flags of `mode` choose.
    #[arg(skip)]
    pub(crate) synchronous: Option<Replicas>,
    /// The settings of the servers: those of the flags and of the job file.
    #[arg(skip)]
    settings: Settings,
}

impl DigitsOptions {
    /// Parses a command line, and returns the role of this process in its cluster; no role if the
    /// whole cluster runs in it.
    pub(crate) fn parse_with_role(
        line: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<(DigitsOptions, Option<Role>), TaskError> {
        let (mut options, given) = task::parse::<DigitsOptions>(line, &[("last-step", "steps")]);
        options.process.follow_parent()?;
        let role = options.process.role()?;
        given.check(role.as_ref(), JOB_FLAGS)?;
        let is_stream = matches!(options.data, Some(DataOrigin::Stream(_)));
        options.has_own_share = is_stream && matches!(role, Some(Role::Worker(..)));
        if options.has_own_share && options.epochs.is_some() {
            return Err(
                "--epochs: nothing counts the samples of a stream that is one worker's share: \
                        give --steps"
                    .into(),
            );
        }
        if options.has_own_share && options.ledger {
            return Err("--ledger: a stream that is one worker's share has no ledger".into());
        }
        let here = options.mode.synchronous.map_or(2, |replicas| replicas.total);
        options.synchronous = options.mode.replicas(task::workers(role.as_ref(), here))?;
        options.settings = options.settings_of_servers(given.settings());
        // An invalid setting is found before anything is started.
        let cluster = ClusterSpec::builder().job("ps", ["localhost:1"]).build()?;
        options.settings.ps_config(cluster, TaskId::ps(0))?;
        Ok((options, role))
    }

    /// Returns the settings of a parameter server. `checkpoints` are those of
    /// [`DigitsOptions::checkpoints`].
    pub(crate) fn server(
        &self,
        cluster: &ClusterSpec,
        task: TaskId,
        checkpoints: Option<Checkpoints>,
    ) -> PsConfig {
        let config = self.settings.ps_config(cluster.clone(), task);
        let mut config = config.expect("parse_with_role has built one of the same settings");
        if let Some(checkpoints) = checkpoints {
            config = config.checkpoints(checkpoints);
        }
        if self.ledger { ledger::serve(config) } else { config }
    }

    /// Returns where checkpoints are saved. Creates a directory.
    pub(crate) fn checkpoints(&self) -> Result<Option<Checkpoints>, TaskError> {
        let Some(place) = &self.checkpoint_dir else { return Ok(None) };
        let storage = place.open(false);
        let storage =
            storage.map_err(|error| format!("--checkpoint-dir {place}: {}", Chain(&error)))?;
        Ok(Some(self.settings.checkpoints(storage)?))
    }

    /// Returns the settings of the servers: Adam, unless a job file has another rule, the mode that
    /// the flags choose, and the last step.
    fn settings_of_servers(&self, given: Settings) -> Settings {
        let mut settings = given;
        settings.set_default("optimizer", ["adam"]);
        settings.set_default("learning-rate", [self.learning_rate.to_string()]);
        if let Some(steps) = self.decay_steps {
            settings.set_flag("schedule", [format!("cosine:0/{steps}")]);
        }
        match self.last_step() {
            Some(step) => settings.set_default("last-step", [step.to_string()]),
            None => settings.remove("last-step"),
        }
        settings.remove("issync");
        match self.synchronous {
            Some(replicas) => settings.set_default("synchronous", [replicas.to_string()]),
            None => settings.remove("synchronous"),
        }
        settings
    }

    /// Returns the last step, if it ends the training.
    pub(crate) fn last_step(&self) -> Option<u64> {
        self.steps.or_else(|| self.epochs.is_none().then_some(STEPS))
    }

    /// Returns the number of steps of the whole training. In synchronous mode it is a few more if
    /// the batches of the last steps do not come in time.
    pub(crate) fn total_steps(&self, split: &Split) -> Result<u64, TaskError> {
        let gradients = u64::from(self.synchronous.map_or(1, |replicas| replicas.aggregate));
        let batches = train::pipeline(self, split).data_set()?.batches();
        let of_data = self.epochs.map(|epochs| epochs.saturating_mul(batches).div_ceil(gradients));
        Ok(self.last_step().into_iter().chain(of_data).min().unwrap_or(STEPS))
    }

    /// Returns the number of workers of a cluster in one process.
    pub(crate) fn workers(&self) -> u32 {
        self.synchronous.map_or(2, |replicas| replicas.total)
    }

    /// Returns the number of parameters of the network for this dataset.
    pub(crate) fn parameters(&self, split: &Split) -> usize {
        (split.width() + 1) * self.hidden + (self.hidden + 1) * CLASSES
    }

    /// Returns the number of rows in one gradient.
    pub(crate) fn rows(&self) -> u32 {
        let gradients = self.synchronous.map_or(1, |replicas| replicas.aggregate);
        self.batch.div_ceil(gradients)
    }
}

/// The last step, unless the flags set another or the number of epochs.
const STEPS: u64 = 2000;

/// The flags that have an effect in the tasks of one job alone.
const JOB_FLAGS: JobFlags = JobFlags {
    ps: &["--learning-rate", "--decay-steps", "--state-dir"],
    worker: &[
        "--codec",
        "--data",
        "--seed",
        "--batch",
        "--hidden",
        "--device",
        "--checkpoint-steps",
        "--summaries",
        "--step-delay-ms",
    ],
};
