//! The command line of the daemon, grouped as its help shows it.

use std::path::PathBuf;

use clap::builder::TypedValueParser;
use clap::{ArgGroup, Args, Parser, ValueEnum, value_parser};
use pushpull::checkpoint::list;
use pushpull::cluster::resolve::Resolution;
use pushpull::job::optimizer_list;
use pushpull::security::Credentials;
use pushpull::{ClusterSpec, PsConfig, Storage, TaskId};

use super::complaint::{CommandLine, DaemonError, with_group_hint};
use super::ending::{WorkSummary, unsaved_line};
use super::modes::{AsynchronousOptions, SynchronousOptions};
use super::optimizer_options::OptimizerOptions;
use super::output::print_error;
use super::place::{Place, place};
use super::shared::{
    ExitWithParent, JobOptions, JoinAccess, Joined, MeetingAccess, ResolveOptions, SecurityOptions,
    TaskOptions, local_path, parse_byte_size,
};
use super::unused::{check_directories, check_elastic, check_functions_alone};

/// An address to listen on, with the flag that gives it, and whom the task lets in there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlagAddress<'a> {
    pub(crate) flag: &'static str,
    pub(crate) address: &'a str,
    pub(crate) credentials: Option<&'a Credentials>,
}

/// Serve one task of a pushpull cluster until SIGINT, SIGTERM or SIGHUP.
#[derive(Debug, Parser)]
#[command(name = "pushpull-ps", version, after_help = details())]
#[command(group(ArgGroup::new("directory").args(["state_dir", "checkpoint_dir"]).multiple(true)))]
pub(crate) struct DaemonOptions {
    #[command(flatten)]
    pub(crate) job: JobOptions,
    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,
    #[command(flatten)]
    pub(crate) network: NetworkOptions,
    #[command(flatten)]
    pub(crate) security: SecurityOptions,
    #[command(flatten)]
    pub(crate) storage: StorageOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    #[command(flatten)]
    _optimizer: OptimizerOptions,
    #[command(flatten)]
    _synchronous: SynchronousOptions,
    #[command(flatten)]
    _asynchronous: AsynchronousOptions,
    #[command(flatten)]
    _training: TrainingOptions,
    #[command(flatten)]
    pub(crate) functions: FunctionOptions,
    #[command(flatten)]
    pub(crate) parent: ExitWithParent,
}

/// The open files of a task without its shards and connections, and those of each shard, rounded up
/// from `/proc/PID/fd`: runtimes of threads, listeners, mapped files and a checkpoint.
const FILES_OF_TASK: u64 = 24;
const FILES_OF_SHARD: u64 = 12;

/// The divisor of the memory limit that gives the share of functions beside variables.
const FUNCTIONS_SHARE: u64 = 16;

/// The least memory limit of a task.
const LIMIT_MIN: u64 = 2 * Storage::BYTES_MAX_MIN;

#[derive(Debug, Args)]
#[command(next_help_heading = "Cluster")]
#[command(mut_arg("ps_hosts", |hosts| hosts.required_unless_present_any(["cluster", "resolve"])))]
#[command(mut_arg("job_name", |job| job.help("Job of this task [default: that of the variables]")))]
pub(crate) struct ClusterOptions {
    #[command(flatten)]
    pub(crate) tasks: TaskOptions,
    /// Accept workers that the cluster does not list
    #[arg(long)]
    elastic_workers: bool,
    /// Cluster as "ps=a:1,b:1;worker=c:1", as JSON, or as a whole TF_CONFIG
    #[arg(long, conflicts_with_all = ["ps_hosts", "worker_hosts", "resolve"])]
    cluster: Option<String>,
    #[command(flatten)]
    resolve: ResolveOptions,
}

/// The cluster and this task in it.
pub(crate) struct ClusterPlace {
    pub(crate) cluster: ClusterSpec,
    pub(crate) task: TaskId,
    /// The flag that gives the addresses.
    flag: Option<&'static str>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Network")]
pub(crate) struct NetworkOptions {
    /// Address to listen on [default: that of the task in the cluster]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,
    /// Unix socket to listen on as well [default: none]
    #[arg(long, value_name = "PATH", value_parser = local_path())]
    pub(crate) unix_socket: Option<PathBuf>,
    /// Share no memory with clients of the same host and user
    #[arg(long)]
    no_shared_memory: bool,
    /// Let in everybody on an address that other hosts can reach, without encryption
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Maximum time for a peer to say hello, in ms
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    handshake_timeout_ms: u64,
    /// Maximum number of connections without a hello
    #[arg(long, value_name = "N", default_value_t = 1024)]
    waiting_connections_max: usize,
    /// Maximum number of connections of each shard
    #[arg(long, value_name = "N", default_value_t = 4096)]
    connections_max: usize,
    /// Polling of busy sockets before a sleep, in us; 0 for none
    #[arg(long, value_name = "US", default_value_t = 50)]
    busy_poll_us: u64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Storage")]
pub(crate) struct StorageOptions {
    /// Number of shards, each with a thread of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = shards())]
    shards: u16,
    /// Directory of the state, best on tmpfs [default: anonymous memory]
    #[arg(long, value_name = "DIR", value_parser = local_path())]
    state_dir: Option<PathBuf>,
    /// Memory limit of shards and functions [default: 16G, or 3/4 of the container's memory]
    #[arg(long, value_name = "BYTES", value_parser = parse_limit)]
    bytes_max: Option<u64>,
    /// Accept directories that their group may write, as on a volume with fsGroup
    #[arg(long, requires = "directory")]
    pub(crate) group_writable: bool,
    /// Loss that an acknowledged push survives: process or power
    #[arg(
        long,
        value_name = "FAILURE",
        value_enum,
        default_value_t = DurabilityOption::Process,
        hide_possible_values = true,
        requires = "state_dir"
    )]
    durability: DurabilityOption,
    /// Keep checksums of all blocks, and verify them at the start
    #[arg(long, requires = "state_dir")]
    integrity_full: bool,
    /// Push slots of each shard, beside those of synchronous steps
    #[arg(long, value_name = "N", default_value_t = 4)]
    inbox_pushes: usize,
    /// Memory that each shard pins for pulls and checkpoints [default: as much as its values]
    #[arg(long, value_name = "BYTES", value_parser = parse_byte_size)]
    pin_bytes_max: Option<u64>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointOptions {
    /// Directory or URL of the checkpoints, the same for all ps tasks [default: none]
    #[arg(long, value_name = "DIR", value_parser = place())]
    checkpoint_dir: Option<Place>,
    /// Interval between checkpoints, in ms; 0 for none
    #[arg(long, value_name = "MS", default_value_t = 0, requires = "checkpoint_dir")]
    checkpoint_every_ms: u64,
    /// Number of newest checkpoints to keep; 0 keeps all
    #[arg(long, value_name = "N", default_value_t = 5, requires = "checkpoint_dir")]
    max_to_keep: usize,
    /// Hours between checkpoints that are never removed; 0 for none
    #[arg(long, value_name = "HOURS", default_value_t = 10_000, requires = "checkpoint_dir")]
    keep_every_hours: u32,
    /// Reaction to a failed save: continue, or stop with exit code 3
    #[arg(
        long,
        value_name = "REACTION",
        value_enum,
        default_value_t = SaveFailureOption::Continue,
        hide_possible_values = true,
        requires = "checkpoint_dir"
    )]
    on_save_failure: SaveFailureOption,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
struct TrainingOptions {
    /// Global step at which training ends [default: none]
    #[arg(long, value_name = "STEP", value_parser = value_parser!(u64).range(1..))]
    last_step: Option<u64>,
    /// Time after which a silent worker is lost, in ms
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    lease_ms: u64,
    /// Hours that settled effects of a silent coordinator are kept
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    effects_kept_hours: u32,
    /// Maximum age of a token, in ms; 0 for no limit
    #[arg(long, value_name = "MS", default_value_t = 600_000)]
    token_timeout_ms: u64,
    /// Pushes with NaN or infinity: reject, count or allow
    #[arg(
        long,
        value_name = "POLICY",
        value_enum,
        default_value_t = NonFiniteOption::Reject,
        hide_possible_values = true
    )]
    non_finite: NonFiniteOption,
    /// Exit once every worker that joined has left or is lost
    #[arg(long)]
    exit_when_done: bool,
    /// Time that --exit-when-done waits for another worker, in ms
    #[arg(long, value_name = "MS", default_value_t = 10_000, requires = "exit_when_done")]
    exit_grace_ms: u64,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Functions")]
pub(crate) struct FunctionOptions {
    /// Offer no functions, and refuse clients that call them
    #[arg(long)]
    no_functions: bool,
    /// CUDA devices that functions may use: auto (all, but none for the job ps) or off
    #[arg(
        long,
        value_name = "WHEN",
        value_enum,
        default_value_t = CudaOption::Auto,
        hide_possible_values = true,
        conflicts_with = "no_functions"
    )]
    cuda: CudaOption,
}

impl FunctionOptions {
    /// Returns whether a task of this job opens the CUDA driver. A task of the job `ps` computes on
    /// no device.
    pub(crate) fn opens_cuda(&self, job: &str) -> bool {
        self.cuda == CudaOption::Auto && job != TaskId::PS_JOB
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CudaOption {
    Auto,
    Off,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SaveFailureOption {
    Continue,
    Stop,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DurabilityOption {
    Process,
    Power,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum NonFiniteOption {
    Reject,
    Count,
    Allow,
}

impl DaemonOptions {
    /// Returns the configuration of the server, without its checkpoints.
    ///
    /// # Errors
    /// Returns an error that names a flag or a key: of an invalid value, or without an effect.
    pub(crate) fn config(
        &self,
        cluster: ClusterSpec,
        task: TaskId,
        typed: &CommandLine,
    ) -> Result<PsConfig, DaemonError> {
        check_elastic(typed, &cluster)?;
        let checkpoints = self.checkpoints.checkpoint_dir.as_ref();
        let checkpoints = checkpoints.and_then(Place::directory);
        check_directories(typed, [self.storage.state_dir.as_deref(), checkpoints])?;
        let mut settings = typed.settings();
        let bytes = self.storage.limit() - self.function_bytes().unwrap_or(0);
        settings.set_flag("bytes-max", [bytes.to_string()]);
        Ok(settings.ps_config(cluster, task)?)
    }

    /// Checks that the process may open the files of a server.
    ///
    /// # Errors
    /// Returns an error that names the limit and the number of files.
    pub(crate) fn check_open_files(&self, limit: Option<u64>) -> Result<(), DaemonError> {
        let shards = self.storage.shards;
        let needed = FILES_OF_TASK + FILES_OF_SHARD * u64::from(shards);
        match limit.filter(|&limit| limit < needed) {
            None => Ok(()),
            Some(limit) => Err(format!(
                "RLIMIT_NOFILE (ulimit -n) is {limit}: a task with --shards {shards} needs {needed} \
                 open files, and one more for each connection"
            )
            .into()),
        }
    }

    /// Returns the line about a control group whose memory limit is below `--bytes-max`.
    pub(crate) fn memory_line(&self, typed: &CommandLine) -> Option<String> {
        let bytes = self.storage.bytes_max?;
        let limit = Storage::memory().bytes_max(bytes).lower_limit()?;
        let setting = typed.flag("--bytes-max");
        Some(format!(
            "{setting}: the memory limit of the control group is lower, {limit} bytes: the system may \
             kill a process that reaches it"
        ))
    }

    /// Returns the memory of the functions beside the variables, a part of `--bytes-max`; `None`
    /// with `--no-functions`.
    pub(crate) fn function_bytes(&self) -> Option<u64> {
        (!self.functions.no_functions).then_some(self.storage.limit() / FUNCTIONS_SHARE)
    }

    /// Returns the memory of a task that serves functions alone.
    ///
    /// # Errors
    /// Returns an error that names a flag without an effect in such a task. With `--no-functions`
    /// it would serve nothing.
    pub(crate) fn bytes_of_functions_alone(
        &self,
        typed: &CommandLine,
        task: &TaskId,
    ) -> Result<u64, DaemonError> {
        check_functions_alone(typed, task)?;
        Ok(self.storage.limit())
    }

    /// Returns the line about steps that are lost with the memory of an ending server, because no
    /// checkpoint has them: on the step owner, with a directory of checkpoints and none of the state.
    pub(crate) fn unsaved(&self, summary: WorkSummary, step: u64) -> Option<String> {
        let place = self.checkpoints.checkpoint_dir.as_ref();
        let is_lost = summary.owns_step && self.storage.state_dir.is_none();
        let storage = place.filter(|_| is_lost)?.open_read_only().ok()?;
        let saved = list(&*storage).ok()?.checkpoints;
        let newest = saved.first().map(|saved| (&*saved.name, saved.global_step));
        unsaved_line(summary.task, step, newest)
    }
}

impl ClusterOptions {
    /// Returns the cluster and this task, by flags, by the launcher or by the rendezvous. `None` for a
    /// scheduler, once it has served the rendezvous of its cluster.
    ///
    /// # Errors
    /// Returns an error that names the flag or the variable with the fault.
    pub(crate) async fn place(
        &self,
        typed: &CommandLine,
        network: &NetworkOptions,
        security: &SecurityOptions,
    ) -> Result<Option<ClusterPlace>, DaemonError> {
        let Some(resolver) = self.resolve.resolve else {
            let cluster = self.spec(typed)?;
            let task = self.task(&cluster, typed)?;
            return Ok(Some(ClusterPlace { cluster, task, flag: None }));
        };
        let credentials = security.credentials(&self.tasks.joining_task())?;
        let meeting = MeetingAccess { insecure: network.insecure, credentials };
        let access = JoinAccess { meeting, listen: network.listen.as_deref(), line: print_error };
        let blame = |fault| typed.blame("--resolve", &fault);
        let joining = self.resolve.join(resolver, &self.tasks, access).map_err(blame)?;
        let resolution = match joining.joined().await.map_err(blame)? {
            Joined::Task(resolution, _) => resolution,
            Joined::Scheduler => return Ok(None),
        };
        let Resolution { cluster, task, .. } = *resolution;
        let task = match task {
            Some(task) => task,
            None => self.task(&cluster, typed)?,
        };
        Ok(Some(ClusterPlace { cluster, task, flag: Some("--resolve") }))
    }

    /// Returns this task. Its job is that of the variables unless a flag or the `task` of a
    /// `TF_CONFIG` names another.
    ///
    /// # Errors
    /// Returns an error that names the flag if it contradicts the `TF_CONFIG`.
    fn task(&self, cluster: &ClusterSpec, typed: &CommandLine) -> Result<TaskId, DaemonError> {
        let TaskOptions { job_name, task_index, .. } = &self.tasks;
        let json = self.cluster.as_deref().filter(|text| is_json(text));
        let named = json.map_or(Ok(None), ClusterSpec::task_of_json);
        let Some(named) = named.map_err(|error| typed.blame("--cluster", &error))? else {
            let job = job_name.as_deref().or(cluster.variables_job().ok());
            return Ok(TaskId::new(job.unwrap_or(TaskId::PS_JOB), self.tasks.index()));
        };
        let differs = |flag: &str| {
            typed.blame(flag, &format_args!("the task in --cluster is {named}, another"))
        };
        if job_name.as_ref().is_some_and(|job| **job != *named.job) {
            return Err(differs("--job-name"));
        }
        if task_index.is_some_and(|index| index != named.index) {
            return Err(differs("--task-index"));
        }
        Ok(named)
    }

    /// Returns the address of a task in the cluster, with the flag that gives it.
    ///
    /// # Errors
    /// Returns an error that names `--job-name` for a job without addresses, and `--task-index` for
    /// a task that its job lacks.
    pub(crate) fn address<'a>(
        &self,
        ClusterPlace { cluster, task: TaskId { job, index }, flag }: &'a ClusterPlace,
        typed: &CommandLine,
    ) -> Result<FlagAddress<'a>, DaemonError> {
        cluster.job_tasks(job).map_err(|error| typed.blame("--job-name", &error))?;
        let address = cluster.task_address(job, *index);
        let address = address.map_err(|error| typed.blame("--task-index", &error))?;
        let flag = match (flag, &self.cluster, &**job) {
            (Some(flag), ..) => flag,
            (None, Some(_), _) => "--cluster",
            (None, None, TaskId::PS_JOB) => "--ps-hosts",
            (None, None, _) => "--worker-hosts",
        };
        Ok(FlagAddress { flag, address, credentials: None })
    }

    /// Returns the cluster.
    ///
    /// # Errors
    /// Returns an error that names the flag with the fault.
    fn spec(&self, typed: &CommandLine) -> Result<ClusterSpec, DaemonError> {
        if let Some(text) = &self.cluster {
            let cluster = match is_json(text) {
                true => ClusterSpec::from_json(text),
                false => text.parse(),
            };
            return cluster.map_err(|error| typed.blame("--cluster", &error));
        }
        self.tasks.cluster().map_err(|(flag, error)| typed.blame(flag, &error))
    }
}

/// Whether the text of a cluster is JSON.
fn is_json(text: &str) -> bool {
    text.trim_start().starts_with('{')
}

impl StorageOptions {
    /// Returns the memory limit of variables and functions together.
    fn limit(&self) -> u64 {
        self.bytes_max.unwrap_or_else(|| Storage::memory().limit())
    }
}

impl CheckpointOptions {
    /// Adds the checkpoints to a configuration. Creates their directory.
    ///
    /// # Errors
    /// Returns an error that names the flag if the directory cannot be used, or if a flag has no
    /// effect.
    pub(crate) fn apply(
        &self,
        config: PsConfig,
        group_writable: bool,
        typed: &CommandLine,
    ) -> Result<PsConfig, DaemonError> {
        let Some(place) = &self.checkpoint_dir else {
            return Ok(config);
        };
        let storage = place.open(group_writable);
        let storage =
            storage.map_err(|error| typed.blame("--checkpoint-dir", &with_group_hint(&error)))?;
        Ok(config.checkpoints(typed.settings().checkpoints(storage)?))
    }
}

/// Parses the memory limit of a task. A part of the least one is left for functions.
fn parse_limit(text: &str) -> Result<u64, String> {
    let bytes = parse_byte_size(text).map_err(|error| error.to_string())?;
    match bytes < LIMIT_MIN {
        true => Err(format!("it must be at least {LIMIT_MIN} ({}K)", LIMIT_MIN >> 10)),
        false => Ok(bytes),
    }
}

/// Parses a number of shards.
fn shards() -> impl TypedValueParser<Value = u16> {
    value_parser!(u16).range(1..=i64::from(PsConfig::SHARDS_MAX))
}

/// Returns what the help explains after the flags.
fn details() -> String {
    format!("{DETAILS}\nOptimizers, with the flags that each accepts:\n{}", optimizer_list())
}

const DETAILS: &str = "\
Jobs:
  ps                      serves variables and functions
  the only candidate      serves variables and functions if the cluster has no job ps; candidates are the jobs
                          whose tasks all have addresses, except chief, worker and evaluator
  any other               serves functions alone; only --listen, --unix-socket, --insecure, --cuda, --bytes-max
                          and the flags under Cluster but --elastic-workers are accepted
  The functions are add, mul, div, mean and identity of tensors.

Sizes:
  BYTES may end in K, M, G or T, powers of 1024, or in KB, MB, GB or TB, powers of 1000.

Schedules:
  steps:STEP=RATE,...     RATE after STEP
  exponential:RATE/STEPS  times RATE every STEPS, gradually
  staircase:RATE/STEPS    times RATE every STEPS, at once
  cosine:RATE/STEPS       down to RATE within STEPS

Policies:
  --on-loss shrink:MIN    the step takes what the other replicas can give, at least MIN gradients
  --on-loss wait:SECONDS  the step waits for another replica, then reports the absent ones
  --on-loss fail          the step reports the absent replicas at once
  --staleness damp        divides the learning rate of a gradient by 1 + its staleness
  --staleness compensate  adds LAMBDA g g (w - w_read) to a gradient; LAMBDA is 0.04 if not given
  --non-finite reject     refuses the push; one shard alone also refuses updates that overflow
  --non-finite count      accepts and counts the push
  --non-finite allow      does not check

NAMES is one name, or a prefix followed by *. --optimizer-for and --rate-for may be given several
times; the last match counts. Without its own flags, the rule of --optimizer-for has its defaults.
";
