//! The daemon: turns flags into a `PsConfig` and signals into a shutdown future. It uses the public
//! API only, so an embedder can do all that it does.

mod complaint;
mod ending;
mod events;
mod output;
mod rule;
mod schedule;
mod training;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use pushpull::{
    Checkpoints, ClusterSpec, Durability, LocalDirectory, Mode, NonFinite, OnLoss, Ps, PsConfig,
    Retention, StalenessPolicy, Storage, TaskId,
};

use complaint::{CommandLine, DaemonError, takes_negative};
use ending::{Signals, WorkSummary};
use events::Printer;
use output::{print_error, print_line};
use training::TrainingOptions;

/// Serve one ps task of a pushpull cluster. Ends on SIGINT and SIGTERM, and on SIGHUP unless that
/// is ignored at the start, as under nohup. Finishes the pushes that are whole before it ends.
#[derive(Debug, Parser)]
#[command(name = "pushpull-ps", version)]
struct Options {
    /// Addresses of the ps tasks, separated by commas: host:port or unix:/path.
    #[arg(long, value_delimiter = ',', required_unless_present = "cluster")]
    ps_hosts: Vec<String>,
    /// Addresses of the worker tasks, separated by commas. They are only names: nothing connects to
    /// a worker. If any are given, other workers are refused.
    #[arg(long, value_delimiter = ',')]
    worker_hosts: Vec<String>,
    /// Accept workers that the cluster does not list, with any index of a job that it has. A
    /// cluster that lists no workers accepts any.
    #[arg(long)]
    elastic_workers: bool,
    /// Cluster as text, such as "ps=a:1,b:1;worker=c:1", or as JSON. Needed for jobs with gaps in
    /// their task indices.
    #[arg(long, conflicts_with_all = ["ps_hosts", "worker_hosts"])]
    cluster: Option<String>,
    /// Index of this task in the ps job.
    #[arg(long, default_value_t = 0)]
    task_index: u32,
    /// Address to listen on in place of the address that the cluster gives this task.
    #[arg(long)]
    listen: Option<String>,
    /// Unix socket to listen on as well.
    #[arg(long)]
    unix_socket: Option<PathBuf>,
    /// Share no memory with clients of the same host and user that connect through a Unix socket.
    #[arg(long)]
    no_shared_memory: bool,
    /// Allow addresses that other machines can reach, although peers are not authenticated.
    #[arg(long)]
    insecure: bool,
    /// Number of shards of the task, each with a thread of its own.
    #[arg(long, default_value_t = 1)]
    shards: u16,
    /// Directory for the state, which then survives this process: best on tmpfs, such as /dev/shm.
    /// [default: anonymous memory]
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Keep a checksum of every block of values and slots, and verify all of them when the state is
    /// opened. The tables that name the blocks always have checksums.
    #[arg(long, requires = "state_dir")]
    integrity_full: bool,
    /// Failures that an acknowledged push survives: the end of this process, or a loss of power as
    /// well.
    #[arg(long, value_enum, default_value_t = DurabilityOption::Process)]
    durability: DurabilityOption,
    /// Directory for checkpoints, the same for all ps tasks.
    #[arg(long)]
    checkpoint_dir: Option<PathBuf>,
    /// Interval between automatic checkpoints, in milliseconds; 0 saves only on request.
    #[arg(long, default_value_t = 0, requires = "checkpoint_dir")]
    checkpoint_every_ms: u64,
    /// Number of newest checkpoints to keep; 0 keeps all.
    #[arg(long, default_value_t = 5)]
    max_to_keep: usize,
    /// Period in hours: of the older checkpoints, the first in each period is kept for good, except
    /// in the first period; 0 keeps none of them.
    #[arg(long, default_value_t = 10_000)]
    keep_every_hours: u32,
    /// Memory limit of all shards together, in bytes.
    #[arg(long, default_value_t = Storage::BYTES_MAX)]
    bytes_max: u64,
    #[command(flatten)]
    training: TrainingOptions,
    /// Global step at which training ends. [default: none]
    #[arg(long)]
    last_step: Option<u64>,
    /// Make each step of the mean of A gradients, from R replicas: 4/5 takes the four fastest of
    /// five. The same for all ps tasks. [default: every push is applied at once]
    #[arg(long, value_name = "A/R", value_parser = synchronous)]
    synchronous: Option<Mode>,
    /// Staleness adjustment, without --synchronous: ignore, damp, compensate or compensate:LAMBDA.
    /// damp divides the learning rate of a stale gradient by 1 + staleness. compensate adds LAMBDA
    /// g g (w - w_read) to it and keeps a copy of the values for each worker; LAMBDA is 0.04 if not
    /// given. [default: ignore]
    #[arg(long, value_name = "POLICY", value_parser = staleness, conflicts_with = "synchronous")]
    staleness: Option<StalenessPolicy>,
    /// Policy for a synchronous step when a replica is lost. shrink:MIN takes as many gradients as
    /// the remaining replicas can give, at least MIN. wait:SECONDS waits for another replica, then
    /// reports the absent ones. fail reports them at once. [default: shrink:1]
    #[arg(long, value_name = "POLICY", value_parser = on_loss, requires = "synchronous")]
    on_loss: Option<OnLoss>,
    /// Time in milliseconds that the first synchronous step waits for replicas that have not
    /// joined, from the join of the first one. [default: 60000]
    #[arg(long, requires = "synchronous")]
    join_timeout_ms: Option<u64>,
    /// Sum the gradients of a synchronous step in the order of the worker tasks, so that two runs
    /// give the same bits. Requires A = R, and waits for lost replicas.
    #[arg(long, requires = "synchronous")]
    deterministic: bool,
    /// Maximum Euclidean norm of a gradient over all variables of all servers: a longer gradient is
    /// scaled down to it. Set it on all ps tasks or on none. Without --synchronous workers clip.
    /// [default: none]
    #[arg(long, value_name = "NORM", requires = "synchronous")]
    clip_by_global_norm: Option<f64>,
    /// Lead in gradients, without --synchronous, at which a worker waits for the slowest one.
    /// [default: none]
    #[arg(long, value_name = "GRADIENTS", conflicts_with = "synchronous")]
    wait_ahead: Option<u64>,
    /// Maximum age in steps, without --synchronous, of the values that a gradient was computed
    /// from: an older gradient is dropped. [default: none]
    #[arg(long, value_name = "STEPS", conflicts_with = "synchronous")]
    reject_older: Option<u64>,
    /// Time in milliseconds after which a silent worker is lost.
    #[arg(long, default_value_t = 5000)]
    lease_ms: u64,
    /// Time in milliseconds for which a worker may hold a token; 0 for no limit.
    #[arg(long, default_value_t = 600_000)]
    token_timeout_ms: u64,
    /// Policy for a push with NaN or infinity, and for a push of finite elements that would make a
    /// value one: reject refuses it, count accepts and counts it, allow does not check. reject
    /// refuses the second kind only on a single shard without --synchronous; elsewhere such pushes
    /// are counted and reported at the end.
    #[arg(long, value_enum, default_value_t = NonFiniteOption::Reject)]
    non_finite: NonFiniteOption,
    /// Time in milliseconds within which a peer must say hello.
    #[arg(long, default_value_t = 5000)]
    handshake_timeout_ms: u64,
    /// Maximum number of connections that have not said hello. For one more, the oldest connection
    /// of the address with the most of them is closed.
    #[arg(long, default_value_t = 1024)]
    waiting_connections_max: usize,
    /// Maximum number of connections of each shard that have said hello. The shard refuses one more
    /// with Busy.
    #[arg(long, default_value_t = 4096)]
    connections_max: usize,
    /// Microseconds for which a shard polls its sockets before it sleeps, where requests follow each other that
    /// fast. 0 switches polling off.
    #[arg(long, default_value_t = 50)]
    busy_poll_us: u64,
    /// Number of push slots of each shard, each for one whole push. With --synchronous the shard
    /// has further ones for the gradients of a step.
    #[arg(long, default_value_t = 4)]
    inbox_pushes: usize,
    /// Bytes of values that each shard may pin for pulls and checkpoints. [default: the size of its
    /// values]
    #[arg(long)]
    pin_bytes_max: Option<u64>,
    /// Exit once every worker that joined has left or is lost and the grace period has passed.
    #[arg(long)]
    exit_when_done: bool,
    /// Grace period of --exit-when-done, in milliseconds.
    #[arg(long, default_value_t = 10_000)]
    exit_grace_ms: u64,
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

/// Parses `A/R`, two positive integers, as a synchronous mode.
fn synchronous(text: &str) -> Result<Mode, String> {
    let number = |part: &str| part.parse().ok().filter(|&number: &u32| number > 0);
    let parts = text.split_once('/').map(|(a, r)| (number(a), number(r)));
    let Some((Some(replicas_to_aggregate), Some(total_num_replicas))) = parts else {
        return Err("expected A/R, two whole numbers from 1 on, such as 4/5".to_owned());
    };
    Ok(Mode::Synchronous { replicas_to_aggregate, total_num_replicas })
}

/// Parses the policy for the loss of a replica.
fn on_loss(text: &str) -> Result<OnLoss, String> {
    let seconds = |text: &str| Duration::try_from_secs_f64(text.parse().ok()?).ok();
    let policy = match text.split_once(':') {
        Some(("shrink", min)) => {
            min.parse().ok().filter(|&min| min > 0).map(|min| OnLoss::Shrink { min })
        }
        Some(("wait", timeout)) => seconds(timeout).map(|timeout| OnLoss::Wait { timeout }),
        None if text == "fail" => Some(OnLoss::Fail),
        _ => None,
    };
    policy.ok_or_else(|| "expected shrink:MIN with MIN from 1 on, wait:SECONDS, or fail".to_owned())
}

/// Parses a staleness policy.
fn staleness(text: &str) -> Result<StalenessPolicy, String> {
    let compensation = |lambda| StalenessPolicy::DelayCompensation { lambda };
    let usable = |lambda: &f64| lambda.is_finite() && *lambda >= 0.0;
    let policy = match (text, text.split_once(':')) {
        ("ignore", _) => Some(StalenessPolicy::Ignore),
        ("damp", _) => Some(StalenessPolicy::Damp),
        ("compensate", _) => Some(compensation(StalenessPolicy::LAMBDA)),
        (_, Some(("compensate", lambda))) => lambda.parse().ok().filter(usable).map(compensation),
        _ => None,
    };
    policy.ok_or_else(|| "expected ignore, damp, compensate, or compensate:LAMBDA".to_owned())
}

/// Maximum time to wait for the address, socket and state of a predecessor. A killed process holds
/// them until its memory is torn down.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two attempts to start meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Exit code for an invalid command line or a failed start.
const EXIT_CONFIGURATION: u8 = 2;
/// Exit code for a failure while serving.
const EXIT_SERVING: u8 = 1;

fn main() -> ExitCode {
    let parsed = Options::command().mut_args(takes_negative).try_get_matches();
    let parsed =
        parsed.and_then(|typed| Ok((Options::from_arg_matches(&typed)?, CommandLine(typed))));
    let (options, typed) = match parsed {
        Ok(parsed) => parsed,
        // clap reports --help and --version as errors, too.
        Err(error) => {
            let code = u8::try_from(error.exit_code()).unwrap_or(EXIT_CONFIGURATION);
            let said = error.print();
            return ExitCode::from(said.map_or(EXIT_SERVING, |()| code));
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match (runtime, Printer::start()) {
        (Ok(runtime), Ok(printer)) => {
            let ended = runtime.block_on(run(&options, &typed, &printer));
            drop(runtime);
            printer.finish();
            ended
        }
        (Err(error), _) | (_, Err(error)) => Err((EXIT_CONFIGURATION, error.to_string().into())),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, error)) => {
            print_error(&error);
            ExitCode::from(code)
        }
    }
}

/// Serves until a signal or the end of training. Errors carry the exit code.
async fn run(
    options: &Options,
    typed: &CommandLine,
    printer: &Printer,
) -> Result<(), (u8, DaemonError)> {
    let configuration = |error| (EXIT_CONFIGURATION, error);
    let mut signals = Signals::watch().map_err(|error| configuration(error.to_string().into()))?;
    let cluster = cluster(options, typed).map_err(configuration)?;
    let owns_step = cluster.step_owner().is_some_and(|owner| owner.index == options.task_index);
    let summary = WorkSummary {
        task: options.task_index,
        owns_step,
        synchronous: options.synchronous.is_some(),
    };
    let start = async || start(options, typed, &cluster, printer).await;
    let ps = start_after_predecessor(start, &mut signals).await.map_err(configuration)?;
    let (task, handle) = (options.task_index, ps.handle());
    if options.insecure {
        let address = handle.address();
        print_error(&format_args!(
            "insecure: every machine that reaches {address} can change the variables"
        ));
    }
    print_line(format_args!("task {task} serves on {}", handle.address()));
    let served = ps.serve(signals.any()).await;
    served.map_err(|error| (EXIT_SERVING, error.to_string().into()))?;
    let metrics = handle.metrics();
    print_line(format_args!("{}", summary.line(&metrics, &handle.metrics_by_shard())));
    if let Some(first) = &metrics.first_overflow {
        let overflows = metrics.overflows;
        print_line(format_args!("task {task}: {overflows} updates overflowed, the first: {first}"));
    }
    if let Some(mean) = metrics.staleness.mean() {
        let histogram = &metrics.staleness;
        print_line(format_args!("task {task}: mean staleness {mean:.2}, {histogram}"));
    }
    let saves = handle.saves();
    if let Some(error) = &saves.last_error {
        let newest = saves.newest.as_deref().unwrap_or("none since the start");
        print_line(format_args!(
            "task {task}: the last {} saves of checkpoints failed, the newest saved is {newest}: {error}",
            saves.failed_in_a_row
        ));
    }
    Ok(())
}

/// Starts the server. Retries for up to [`HANDOVER_TIMEOUT`] while an exiting predecessor holds
/// what it needs.
async fn start_after_predecessor(
    start: impl AsyncFn() -> Result<Ps, DaemonError>,
    signals: &mut Signals,
) -> Result<Ps, DaemonError> {
    let (began, mut reported) = (Instant::now(), false);
    loop {
        let error = match start().await {
            Err(error) if error.is_transient && began.elapsed() < HANDOVER_TIMEOUT => error,
            started => return started,
        };
        if !reported {
            reported = true;
            let most = HANDOVER_TIMEOUT.as_secs();
            print_error(&format_args!("waits up to {most} s for a predecessor to exit: {error}"));
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            () = signals.any() => return Err(error),
        }
    }
}

async fn start(
    options: &Options,
    typed: &CommandLine,
    cluster: &ClusterSpec,
    printer: &Printer,
) -> Result<Ps, DaemonError> {
    let own = cluster.task_address("ps", options.task_index);
    let own = own.map_err(|error| typed.blame("--task-index", &error))?;
    let hosts = if options.cluster.is_some() { "--cluster" } else { "--ps-hosts" };
    let (flag, address) = match &options.listen {
        Some(address) => ("--listen", &**address),
        None => (hosts, own),
    };
    let mut config = config(options, cluster.clone())?.on_event(printer.event_sink());
    let listener = match options.insecure {
        true => Ps::listen_insecure(address).await,
        false => Ps::listen(address).await,
    };
    let mut listener = listener.map_err(|error| typed.cannot_listen(flag, &error))?;
    if let Some(path) = &options.unix_socket {
        let unix = Ps::listen(&format!("unix:{}", path.display())).await;
        let unix = unix.map_err(|error| typed.cannot_listen("--unix-socket", &error))?;
        listener = listener.also(unix);
    }
    if let Some(directory) = &options.checkpoint_dir {
        let mut retention = Retention::default();
        retention.max_to_keep = options.max_to_keep;
        retention.keep_every_hours = options.keep_every_hours;
        let storage = LocalDirectory::create(directory)
            .map_err(|error| typed.blame("--checkpoint-dir", &error))?;
        let checkpoints = Checkpoints::new(storage).retention(retention);
        config = config.checkpoints(match options.checkpoint_every_ms {
            0 => checkpoints,
            millis => checkpoints.every(Duration::from_millis(millis)),
        });
    }
    listener.start(config).map_err(|error| typed.cannot_start(&error))
}

fn cluster(options: &Options, typed: &CommandLine) -> Result<ClusterSpec, DaemonError> {
    if let Some(text) = &options.cluster {
        let cluster = match text.trim_start().starts_with('{') {
            true => ClusterSpec::from_json(text),
            false => text.parse(),
        };
        return cluster.map_err(|error| typed.blame("--cluster", &error));
    }
    let servers = || ClusterSpec::builder().job("ps", &options.ps_hosts);
    let alone = servers().build().map_err(|error| typed.blame("--ps-hosts", &error))?;
    if options.worker_hosts.is_empty() {
        return Ok(alone);
    }
    let both = servers().job("worker", &options.worker_hosts).build();
    both.map_err(|error| typed.blame("--worker-hosts", &error))
}

fn config(options: &Options, cluster: ClusterSpec) -> Result<PsConfig, String> {
    let mut config = options.training.config(cluster, TaskId::ps(options.task_index))?;
    let bytes_max = options.bytes_max;
    let token_timeout = Duration::from_millis(options.token_timeout_ms);
    config = config
        .shards(options.shards)
        .storage(match &options.state_dir {
            Some(state) => Storage::Directory { state: state.clone(), bytes_max },
            None => Storage::Memory { bytes_max },
        })
        .lease(Duration::from_millis(options.lease_ms))
        .token_timeout((!token_timeout.is_zero()).then_some(token_timeout))
        .handshake_timeout(Duration::from_millis(options.handshake_timeout_ms))
        .waiting_connections_max(options.waiting_connections_max)
        .connections_max(options.connections_max)
        .busy_poll(Duration::from_micros(options.busy_poll_us))
        .inbox_pushes(options.inbox_pushes)
        .integrity_full(options.integrity_full)
        .shared_memory(!options.no_shared_memory)
        .elastic_workers(options.elastic_workers)
        .durability(match options.durability {
            DurabilityOption::Process => Durability::Process,
            DurabilityOption::Power => Durability::Power,
        })
        .non_finite(match options.non_finite {
            NonFiniteOption::Reject => NonFinite::Reject,
            NonFiniteOption::Count => NonFinite::Count,
            NonFiniteOption::Allow => NonFinite::Allow,
        });
    if let Some(mode) = options.synchronous {
        config = config.mode(mode).deterministic(options.deterministic);
    }
    if let Some(bound) = options.clip_by_global_norm {
        config = config.clip_by_global_norm(bound);
    }
    if let Some(policy) = options.staleness {
        config = config.staleness(policy);
    }
    if let Some(policy) = options.on_loss {
        config = config.on_loss(policy);
    }
    if let Some(millis) = options.join_timeout_ms {
        config = config.join_timeout(Duration::from_millis(millis));
    }
    if let Some(gradients) = options.wait_ahead {
        config = config.wait_ahead(gradients);
    }
    if let Some(steps) = options.reject_older {
        config = config.reject_older(steps);
    }
    if let Some(step) = options.last_step {
        config = config.last_step(step);
    }
    if let Some(bytes) = options.pin_bytes_max {
        config = config.pin_bytes_max(bytes);
    }
    if options.exit_when_done {
        config = config.exit_when_done(Duration::from_millis(options.exit_grace_ms));
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_synchronous_mode_is_two_positive_integers() {
        let mode = Mode::Synchronous { replicas_to_aggregate: 3, total_num_replicas: 4 };
        assert_eq!(synchronous("3/4"), Ok(mode));
        for text in ["", "3", "3/", "/4", "0/4", "3/0", "3/4/5", "-3/4", "3 / 4", "4294967296/1"] {
            assert!(synchronous(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_loss_policy_is_shrink_wait_or_fail() {
        assert_eq!(on_loss("shrink:2"), Ok(OnLoss::Shrink { min: 2 }));
        let timeout = Duration::from_millis(1500);
        assert_eq!(on_loss("wait:1.5"), Ok(OnLoss::Wait { timeout }));
        assert_eq!(on_loss("fail"), Ok(OnLoss::Fail));
        for text in ["", "shrink", "shrink:0", "shrink:x", "wait", "wait:-1", "wait:NaN", "fail:1"]
        {
            assert!(on_loss(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_staleness_policy_is_ignore_damp_or_compensate() {
        let compensation = |lambda| Ok(StalenessPolicy::DelayCompensation { lambda });
        assert_eq!(staleness("ignore"), Ok(StalenessPolicy::Ignore));
        assert_eq!(staleness("damp"), Ok(StalenessPolicy::Damp));
        assert_eq!(staleness("compensate"), compensation(0.04));
        assert_eq!(staleness("compensate:0.5"), compensation(0.5));
        for text in ["", "damp:1", "compensate:", "compensate:-1", "compensate:NaN", "0.04"] {
            assert!(staleness(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn synchronous_flags_require_the_mode_and_errors_name_the_value() {
        let parse = |flags: &[&str]| {
            let always = ["pushpull-ps", "--ps-hosts", "a:1"];
            Options::try_parse_from(always.iter().chain(flags))
        };
        for flags in [
            &["--on-loss", "fail"][..],
            &["--join-timeout-ms", "5"],
            &["--deterministic"],
            &["--clip-by-global-norm", "5"],
        ] {
            let error = parse(flags).unwrap_err().to_string();
            assert!(error.contains("--synchronous"), "{error}");
        }
        let error = parse(&["--synchronous", "2/2", "--staleness", "damp"]).unwrap_err();
        assert!(error.to_string().contains("--staleness"), "{error}");
        let error = parse(&["--synchronous", "3:4"]).unwrap_err().to_string();
        assert!(error.contains("3:4") && error.contains("4/5"), "{error}");
        let options = parse(&["--synchronous", "2/2", "--deterministic"]).unwrap();
        assert!(options.deterministic && options.on_loss.is_none());
    }
}
