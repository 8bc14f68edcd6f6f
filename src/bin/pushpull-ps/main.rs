//! The daemon: turns flags into the settings of a server and signals into a shutdown future. It
//! uses the public API only, so an embedder can do all that it does.

mod complaint;
mod ending;
mod events;
mod function_server;
mod modes;
mod optimizer_options;
mod options;
mod output;
mod own_name;
#[path = "../options/place.rs"]
mod place;
#[path = "../options/mod.rs"]
mod shared;
mod unused;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{CommandFactory, FromArgMatches};
use pushpull::error::Chain;
use pushpull::job::JobError;
use pushpull::server::{PsListener, raise_open_files_limit};
use pushpull::{ClusterSpec, Mode, Ps, TaskId};

use complaint::{CommandLine, DaemonError};
use ending::WorkSummary;
use events::Printer;
use options::{DaemonOptions, FlagAddress};
use output::{print_error, print_line, print_text};
use own_name::{access_line, loopback_hint};
use shared::{EndSignals, JobLine, accepts_underscores, needs_launcher, takes_hyphen};
use unused::check_socket;

/// Maximum time to wait for the address, socket and state of a predecessor. A killed process holds
/// them until its memory is torn down.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two attempts to start meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Exit code for an invalid command line or a failed start.
const EXIT_CONFIGURATION: u8 = 2;
/// Exit code for a failure while serving.
const EXIT_SERVING: u8 = 1;

/// The exit code of a server that ended well, but whose last save of a checkpoint failed.
const EXIT_UNSAVED: u8 = 3;

fn main() -> ExitCode {
    let command = DaemonOptions::command().mut_args(takes_hyphen).mut_args(accepts_underscores);
    let command = command.mut_args(needs_launcher);
    let line = match JobLine::read(&command, std::env::args_os(), &[], |_, _| true) {
        Ok(line) => line,
        Err(error) => {
            match &error {
                JobError::Unreadable { file, .. } | JobError::TooLarge { file, .. } => {
                    print_error(&format_args!("--job {}: {}", file.display(), Chain(&error)));
                }
                error => print_error(&Chain(error)),
            }
            return ExitCode::from(EXIT_CONFIGURATION);
        }
    };
    let parsed = command.clone().try_get_matches_from(&line.words);
    let parsed = parsed.and_then(|typed| Ok((DaemonOptions::from_arg_matches(&typed)?, typed)));
    let (options, typed) = match parsed {
        Ok((options, typed)) => (options, CommandLine::new(&command, line, typed)),
        // clap reports --help and --version as errors, too.
        Err(error) => {
            let code = u8::try_from(error.exit_code()).unwrap_or(EXIT_CONFIGURATION);
            let said = error.print();
            let notes = line.notes(&error.to_string());
            if error.use_stderr() && !notes.is_empty() {
                print_error(&format_args!("of the job file:\n{}", notes.trim_end()));
            }
            return ExitCode::from(said.map_or(EXIT_SERVING, |()| code));
        }
    };
    if let Err(error) = options.parent.apply() {
        print_error(&error);
        return ExitCode::from(EXIT_CONFIGURATION);
    }
    if options.job.print_config {
        return match print_text(&typed.printed(&command)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                print_error(&format_args!("--print-config: {error}"));
                ExitCode::from(EXIT_SERVING)
            }
        };
    }
    match raise_open_files_limit() {
        Ok(limit) => {
            if let Err(error) = options.check_open_files(limit) {
                print_error(&error);
                return ExitCode::from(EXIT_CONFIGURATION);
            }
        }
        Err(error) => {
            print_error(&format_args!("the limit of open files stays as it is: {error}"));
        }
    }
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

/// Serves the task until a signal or the end of training. Errors carry the exit code.
async fn run(
    options: &DaemonOptions,
    typed: &CommandLine,
    printer: &Printer,
) -> Result<(), (u8, DaemonError)> {
    let configuration = |error| (EXIT_CONFIGURATION, error);
    let mut signals =
        EndSignals::watch().map_err(|error| configuration(error.to_string().into()))?;
    let place = tokio::select! {
        place = options.cluster.place(typed, &options.network, &options.security) => place.map_err(configuration)?,
        // A task that waits for others can be ended.
        () = signals.any() => return Ok(()),
    };
    let Some(place) = place else { return Ok(()) };
    let own = options.cluster.address(&place, typed).map_err(configuration)?;
    let at = match &options.network.listen {
        Some(address) => FlagAddress { flag: "--listen", address, credentials: None },
        None => own,
    };
    let (cluster, task) = (&place.cluster, place.task.clone());
    let credentials = options.security.credentials(&task);
    let credentials = credentials.map_err(|error| configuration(error.into()))?;
    let at = FlagAddress { credentials: credentials.as_ref(), ..at };
    match cluster.variables_job() {
        Ok(job) if *job == *task.job => {
            run_ps(options, typed, cluster, task, at, printer, &mut signals).await
        }
        _ => function_server::run(options, typed, cluster, task, at, printer, &mut signals).await,
    }
}

/// Serves a task of the job that holds the variables, at the address that a flag gives.
async fn run_ps(
    options: &DaemonOptions,
    typed: &CommandLine,
    cluster: &ClusterSpec,
    ps_task: TaskId,
    at: FlagAddress<'_>,
    printer: &Printer,
    signals: &mut EndSignals,
) -> Result<(), (u8, DaemonError)> {
    let configuration = |error| (EXIT_CONFIGURATION, error);
    let task = ps_task.index;
    let owns_step = cluster.step_owner().is_some_and(|owner| owner == ps_task);
    let mode = typed.settings().mode(cluster).map_err(|error| configuration(error.into()))?;
    let synchronous = matches!(mode, Mode::Synchronous(_));
    let summary = WorkSummary { task, owns_step, synchronous };
    let cuda = options.functions.opens_cuda(&ps_task.job);
    let credentials = at.credentials;
    let beside = |bytes| {
        let task = ps_task.clone();
        function_server::start_beside(cluster, task, credentials, cuda, printer, bytes)
    };
    let functions = options.function_bytes().map(beside).transpose().map_err(configuration)?;
    let start = async || {
        let config = options.config(cluster.clone(), ps_task.clone(), typed)?;
        let config = config.on_event(printer.event_sink());
        let config = config.credentials(credentials.cloned());
        let mut listener = listen(options, typed, at).await?;
        if let Some(functions) = &functions {
            listener = listener.services(functions.peers());
        }
        let config = options.checkpoints.apply(config, options.storage.group_writable, typed)?;
        listener.start(config).map_err(|error| typed.cannot_start(&error))
    };
    // The system may end the process before it serves.
    options.memory_line(typed).iter().for_each(|line| print_error(line));
    let ps = start_after_predecessor(start, signals).await.map_err(configuration)?;
    let handle = ps.handle();
    let can = "change the variables and stop the server";
    let insecure = options.network.insecure;
    let hint = loopback_hint(at, handle.address());
    let line = hint.or_else(|| access_line(handle.address(), can, insecure, credentials));
    print_line(format_args!("task {task} serves on {}", handle.address()));
    line.iter().for_each(|line| print_error(line));
    let served = ps.serve(async {
        signals.any().await;
        // The calls under way end while the ps does.
        functions.iter().for_each(|functions| functions.handle().stop());
    });
    let served = served.await;
    if let Some(functions) = functions {
        functions.serve(std::future::ready(())).await;
    }
    served.map_err(|error| (EXIT_SERVING, Chain(&error).to_string().into()))?;
    let metrics = handle.metrics();
    print_line(format_args!("{}", summary.line(&metrics, &handle.metrics_by_shard())));
    if let Some(line) = options.unsaved(summary, metrics.global_step) {
        print_line(format_args!("{line}"));
    }
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
        // A supervisor reads the exit code: the steps since the last save are in no checkpoint.
        return Err((EXIT_UNSAVED, "the last save of a checkpoint failed".to_owned().into()));
    }
    Ok(())
}

/// Starts the server. Retries for up to [`HANDOVER_TIMEOUT`] while an exiting predecessor holds
/// what it needs.
async fn start_after_predecessor<S>(
    start: impl AsyncFn() -> Result<S, DaemonError>,
    signals: &mut EndSignals,
) -> Result<S, DaemonError> {
    let began = Instant::now();
    let mut reported = false;
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

/// Binds the addresses of a ps task: the one that a flag gives, and its Unix socket.
async fn listen(
    options: &DaemonOptions,
    typed: &CommandLine,
    at: FlagAddress<'_>,
) -> Result<PsListener, DaemonError> {
    let listener = match at.credentials {
        _ if options.network.insecure => Ps::listen_insecure(at.address).await,
        Some(credentials) => Ps::listen_secured(at.address, credentials).await,
        None => Ps::listen(at.address).await,
    };
    let listener = listener.map_err(|error| typed.cannot_listen(at.flag, &error))?;
    let Some(path) = &options.network.unix_socket else {
        return Ok(listener);
    };
    check_socket(typed, at, path)?;
    let unix = Ps::listen(&format!("unix:{}", path.display())).await;
    Ok(listener.also(unix.map_err(|error| typed.cannot_listen("--unix-socket", &error))?))
}
