//! The daemon: flags to a `PsConfig`, signals to a shutdown future. There is no second path:
//! whatever it does, an embedder can do.

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

use complaint::{Complaint, Typed, takes_negative};
use ending::{Signals, Worked};
use events::Printer;
use output::{complain, say};
use training::TrainingOptions;

/// A parameter server of a cluster. It ends on SIGINT and SIGTERM, and on SIGHUP unless that is ignored when it
/// starts, as under nohup: pushes that are whole are finished first.
#[derive(Debug, Parser)]
#[command(name = "pushpull-ps", version)]
struct Options {
    /// The addresses of the parameter servers: host:port or unix:/path, separated by commas.
    #[arg(long, value_delimiter = ',', required_unless_present = "cluster")]
    ps_hosts: Vec<String>,
    /// The addresses of the workers; they are only names, nobody connects to a worker. Workers that are not
    /// listed are refused, if any are.
    #[arg(long, value_delimiter = ',')]
    worker_hosts: Vec<String>,
    /// Lets workers in that the cluster does not list: any index of a job that it has. A cluster that lists no
    /// workers at all lets any in.
    #[arg(long)]
    elastic_workers: bool,
    /// The cluster as text, such as "ps=a:1,b:1;worker=c:1", or as JSON; for sparse jobs.
    #[arg(long, conflicts_with_all = ["ps_hosts", "worker_hosts"])]
    cluster: Option<String>,
    /// The index of this task.
    #[arg(long, default_value_t = 0)]
    task_index: u32,
    /// Listens here and not on the task's own address of the cluster.
    #[arg(long)]
    listen: Option<String>,
    /// Listens on this Unix socket as well.
    #[arg(long)]
    unix_socket: Option<PathBuf>,
    /// Lends no memory to clients of this host and user that come through a Unix socket.
    #[arg(long)]
    no_shared_memory: bool,
    /// Listens where other machines can reach it, though peers are not authenticated.
    #[arg(long)]
    insecure: bool,
    /// How many shards the task has, each with a thread.
    #[arg(long, default_value_t = 1)]
    shards: u16,
    /// A directory for the state, which survives this process: best on a memory file system such as
    /// /dev/shm. Anonymous memory without it.
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Checks every block of values and slots when the state is opened, not only what names them.
    #[arg(long, requires = "state_dir")]
    integrity_full: bool,
    /// What an acknowledged push survives: the end of this process, or the loss of power, too.
    #[arg(long, value_enum, default_value_t = Survives::Process)]
    durability: Survives,
    /// A directory for checkpoints, the same for all ps tasks.
    #[arg(long)]
    checkpoint_dir: Option<PathBuf>,
    /// Saves a checkpoint by itself so often; 0 only when asked.
    #[arg(long, default_value_t = 0, requires = "checkpoint_dir")]
    checkpoint_every_ms: u64,
    /// How many of the newest checkpoints are kept; 0 keeps all.
    #[arg(long, default_value_t = 5)]
    max_to_keep: usize,
    /// Of the older ones, keeps the first in each stretch of so many hours.
    #[arg(long, default_value_t = 10_000)]
    keep_every_hours: u32,
    /// The most bytes the shards may use together.
    #[arg(long, default_value_t = Storage::BYTES_MAX)]
    bytes_max: u64,
    #[command(flatten)]
    training: TrainingOptions,
    /// The global step at which training ends.
    #[arg(long)]
    last_step: Option<u64>,
    /// Makes each step of the gradients of A replicas of R: 4/5 takes the four fastest of five. The
    /// same for all ps tasks. Each push is applied at once without this.
    #[arg(long, value_name = "A/R", value_parser = synchronous)]
    synchronous: Option<Mode>,
    /// What is made of stale gradients, without --synchronous. damp divides their learning rate by 1 +
    /// staleness; compensate:LAMBDA adds LAMBDA g g (w - w_read) to them, and keeps a copy of the values
    /// for each worker; compensate alone takes 0.04. [default: ignore]
    #[arg(long, value_name = "POLICY", value_parser = staleness, conflicts_with = "synchronous")]
    staleness: Option<StalenessPolicy>,
    /// What becomes of a synchronous step when a replica is lost. shrink:MIN takes as few gradients as
    /// are left, but no fewer than MIN; wait:SECONDS waits for another replica, and then tells who is
    /// missing; fail tells it at once. [default: shrink:1]
    #[arg(long, value_name = "POLICY", value_parser = on_loss, requires = "synchronous")]
    on_loss: Option<OnLoss>,
    /// How long the first synchronous step counts on replicas that have not come yet, from the first
    /// one's coming. [default: 60000]
    #[arg(long, requires = "synchronous")]
    join_timeout_ms: Option<u64>,
    /// Adds the gradients of a synchronous step up in the order of the worker tasks, so that two runs
    /// give the same bits. Needs A = R, and waits for replicas that are lost.
    #[arg(long, requires = "synchronous")]
    deterministic: bool,
    /// Scales each gradient down to this Euclidean norm over all variables of all servers, if it is
    /// longer. Give all tasks one. Without --synchronous workers clip.
    #[arg(long, value_name = "NORM", requires = "synchronous")]
    clip_by_global_norm: Option<f64>,
    /// Without --synchronous: whoever has made so many gradients more than the slowest worker waits
    /// for it.
    #[arg(long, value_name = "GRADIENTS", conflicts_with = "synchronous")]
    wait_ahead: Option<u64>,
    /// Without --synchronous: a gradient whose values are more than so many steps old is dropped.
    #[arg(long, value_name = "STEPS", conflicts_with = "synchronous")]
    reject_older: Option<u64>,
    /// How long a worker may be silent before it is lost.
    #[arg(long, default_value_t = 5000)]
    lease_ms: u64,
    /// How long a worker may hold a token; 0 for ever.
    #[arg(long, default_value_t = 600_000)]
    token_timeout_ms: u64,
    /// What happens to NaN and infinities in a push, and to a push of finite elements that would make a value
    /// one. Such a push is refused by a single shard without --synchronous, and else counted and told at
    /// the end.
    #[arg(long, value_enum, default_value_t = OnNonFinite::Reject)]
    non_finite: OnNonFinite,
    /// By when a peer must have said hello.
    #[arg(long, default_value_t = 5000)]
    handshake_timeout_ms: u64,
    /// How many connections that have not said hello are kept. When one more comes, the oldest goes of the
    /// address that has most of them.
    #[arg(long, default_value_t = 1024)]
    waiting_connections_max: usize,
    /// The most connections of each shard after their hello. A shard refuses the next with Busy.
    #[arg(long, default_value_t = 4096)]
    connections_max: usize,
    /// How many whole pushes each shard has room for.
    #[arg(long, default_value_t = 4)]
    inbox_pushes: usize,
    /// How many bytes of values each shard may hold on to for pulls and checkpoints; as many as it
    /// has without this.
    #[arg(long)]
    pin_bytes_max: Option<u64>,
    /// Ends once every worker that joined is gone and the grace has passed.
    #[arg(long)]
    exit_when_done: bool,
    /// How long to wait then for another worker.
    #[arg(long, default_value_t = 10_000)]
    exit_grace_ms: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Survives {
    Process,
    Power,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OnNonFinite {
    Reject,
    Count,
    Allow,
}

/// Reads how many gradients a step takes, and of how many replicas.
fn synchronous(text: &str) -> Result<Mode, String> {
    let number = |part: &str| part.parse().ok().filter(|&number: &u32| number > 0);
    let parts = text.split_once('/').map(|(a, r)| (number(a), number(r)));
    let Some((Some(replicas_to_aggregate), Some(total_num_replicas))) = parts else {
        return Err("expected A/R, two whole numbers from 1 on, such as 4/5".to_owned());
    };
    Ok(Mode::Synchronous { replicas_to_aggregate, total_num_replicas })
}

/// Reads what becomes of a step when a replica is lost.
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

/// Reads what is made of stale gradients.
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

/// How long the address, the socket and the state of a predecessor that is going are waited for: a process
/// that was killed has them until its memory is torn down.
const HANDOVER: Duration = Duration::from_secs(5);

/// How often it is tried meanwhile.
const AGAIN: Duration = Duration::from_millis(5);

/// The exit code of a daemon that was told to do something it cannot do.
const EXIT_CONFIGURATION: u8 = 2;
/// The exit code of a daemon that failed while it served.
const EXIT_SERVING: u8 = 1;

fn main() -> ExitCode {
    let parsed = Options::command().mut_args(takes_negative).try_get_matches();
    let parsed = parsed.and_then(|typed| Ok((Options::from_arg_matches(&typed)?, Typed(typed))));
    let (options, typed) = match parsed {
        Ok(parsed) => parsed,
        // Which is how help and version are said, too.
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
        Err((code, complaint)) => {
            complain(&complaint);
            ExitCode::from(code)
        }
    }
}

/// Serves until it is told to end; the exit code of what went wrong, and what that was.
async fn run(options: &Options, typed: &Typed, printer: &Printer) -> Result<(), (u8, Complaint)> {
    let configuration = |complaint| (EXIT_CONFIGURATION, complaint);
    let mut signals = Signals::watch().map_err(|error| configuration(error.to_string().into()))?;
    let cluster = cluster(options, typed).map_err(configuration)?;
    let owns_step = cluster.step_owner().is_some_and(|owner| owner.index == options.task_index);
    let worked =
        Worked { task: options.task_index, owns_step, synchronous: options.synchronous.is_some() };
    let start = async || start(options, typed, &cluster, printer).await;
    let ps = start_in_time(start, &mut signals).await.map_err(configuration)?;
    let (task, handle) = (options.task_index, ps.handle());
    if options.insecure {
        let address = handle.address();
        complain(&format_args!("insecure: whoever reaches {address} can change the variables"));
    }
    say(format_args!("task {task} serves on {}", handle.address()));
    let served = ps.serve(signals.any()).await;
    served.map_err(|error| (EXIT_SERVING, error.to_string().into()))?;
    let metrics = handle.metrics();
    say(format_args!("{}", worked.said(&metrics, &handle.metrics_by_shard())));
    if let Some(first) = &metrics.first_overflow {
        let overflows = metrics.overflows;
        say(format_args!("task {task}: {overflows} updates overflowed, the first: {first}"));
    }
    if let Some(mean) = metrics.staleness.mean() {
        let histogram = &metrics.staleness;
        say(format_args!("task {task}: staleness {mean:.2} on average, {histogram}"));
    }
    let saves = handle.saves();
    if let Some(error) = &saves.last_error {
        let newest = saves.newest.as_deref().unwrap_or("none since the start");
        say(format_args!(
            "task {task}: the last {} saves of checkpoints failed, the newest saved is {newest}: {error}",
            saves.failed_in_a_row
        ));
    }
    Ok(())
}

/// Starts as soon as a predecessor that is going has gone, if it goes in time.
async fn start_in_time(
    start: impl AsyncFn() -> Result<Ps, Complaint>,
    signals: &mut Signals,
) -> Result<Ps, Complaint> {
    let (began, mut told) = (Instant::now(), false);
    loop {
        let complaint = match start().await {
            Err(complaint) if complaint.may_pass && began.elapsed() < HANDOVER => complaint,
            started => return started,
        };
        if !told {
            told = true;
            let most = HANDOVER.as_secs();
            complain(&format_args!("waits for up to {most} s, as it may pass: {complaint}"));
        }
        tokio::select! {
            () = tokio::time::sleep(AGAIN) => {}
            () = signals.any() => return Err(complaint),
        }
    }
}

async fn start(
    options: &Options,
    typed: &Typed,
    cluster: &ClusterSpec,
    printer: &Printer,
) -> Result<Ps, Complaint> {
    let own = cluster.task_address("ps", options.task_index);
    let own = own.map_err(|error| typed.blame("--task-index", &error))?;
    let hosts = if options.cluster.is_some() { "--cluster" } else { "--ps-hosts" };
    let (flag, address) = match &options.listen {
        Some(address) => ("--listen", &**address),
        None => (hosts, own),
    };
    let mut config = config(options, cluster.clone())?.on_event(printer.told());
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

fn cluster(options: &Options, typed: &Typed) -> Result<ClusterSpec, Complaint> {
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
        .inbox_pushes(options.inbox_pushes)
        .integrity_full(options.integrity_full)
        .shared_memory(!options.no_shared_memory)
        .elastic_workers(options.elastic_workers)
        .durability(match options.durability {
            Survives::Process => Durability::Process,
            Survives::Power => Durability::Power,
        })
        .non_finite(match options.non_finite {
            OnNonFinite::Reject => NonFinite::Reject,
            OnNonFinite::Count => NonFinite::Count,
            OnNonFinite::Allow => NonFinite::Allow,
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
    fn a_mode_is_two_numbers() {
        let mode = Mode::Synchronous { replicas_to_aggregate: 3, total_num_replicas: 4 };
        assert_eq!(synchronous("3/4"), Ok(mode));
        for text in ["", "3", "3/", "/4", "0/4", "3/0", "3/4/5", "-3/4", "3 / 4", "4294967296/1"] {
            assert!(synchronous(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_loss_has_one_of_three_policies() {
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
    fn stale_gradients_have_one_of_three_policies() {
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
    fn the_flags_of_synchronous_mode_need_it_and_errors_name_the_value() {
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
