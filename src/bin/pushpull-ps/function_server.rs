//! Function servers: beside the ps of a task, and alone for a task of another job.

use pushpull::error::Chain;
use pushpull::security::Credentials;
use pushpull::services::{
    FunctionServer, FunctionServerConfig, FunctionServerError, FunctionServerListener, Functions,
};
use pushpull::{ClusterSpec, TaskId};

use super::complaint::{CommandLine, DaemonError};
use super::events::Printer;
use super::options::{DaemonOptions, FlagAddress, NetworkOptions};
use super::output::{print_error, print_line};
use super::own_name::{access_line, loopback_hint};
use super::shared::EndSignals;
use super::unused::check_socket;
use super::{EXIT_CONFIGURATION, start_after_predecessor};

/// Starts the function server whose clients the ps of this task accepts. Their inputs and
/// outputs have this many bytes.
///
/// # Errors
/// Returns an error if the system does not start its thread.
pub(crate) fn start_beside(
    cluster: &ClusterSpec,
    task: TaskId,
    credentials: Option<&Credentials>,
    cuda: bool,
    printer: &Printer,
    bytes: u64,
) -> Result<FunctionServer, DaemonError> {
    let config = config_of(cluster, task, functions(), credentials, bytes).cuda(cuda);
    let line = printer.line_sink();
    let config = config.on_access(move |event| line(event.kind(), event.to_string()));
    FunctionServer::beside(config).map_err(|error| Chain(&error).to_string().into())
}

/// Returns the configuration of a server. One client has at most half of the memory.
fn config_of(
    cluster: &ClusterSpec,
    task: TaskId,
    functions: Functions,
    credentials: Option<&Credentials>,
    bytes: u64,
) -> FunctionServerConfig {
    let config = FunctionServerConfig::new(cluster.clone(), task, functions).bytes_max(bytes);
    let config = config.client_bytes_max((bytes / 2).min(CLIENT_BYTES_MAX));
    config.credentials(credentials.cloned())
}

/// The most bytes of inputs and outputs of one client.
const CLIENT_BYTES_MAX: u64 = 1 << 30;

/// Serves functions alone until a signal. Errors carry the exit code.
pub(crate) async fn run(
    options: &DaemonOptions,
    typed: &CommandLine,
    cluster: &ClusterSpec,
    task: TaskId,
    at: FlagAddress<'_>,
    printer: &Printer,
    signals: &mut EndSignals,
) -> Result<(), (u8, DaemonError)> {
    let configuration = |error| (EXIT_CONFIGURATION, error);
    let bytes = options.bytes_of_functions_alone(typed, &task).map_err(configuration)?;
    let network = &options.network;
    let functions = functions();
    let cuda = options.functions.opens_cuda(&task.job);
    let start = async || {
        let listener = listen(network, typed, at)?;
        let functions = functions.clone();
        let config = config_of(cluster, task.clone(), functions, at.credentials, bytes).cuda(cuda);
        let line = printer.line_sink();
        let config = config.on_access(move |event| line(event.kind(), event.to_string()));
        let line = printer.line_sink();
        let config = config.on_out_of_descriptors(move |out| {
            line("out-of-descriptors", out.to_string());
        });
        listener.start(config).map_err(|error| Chain(&error).to_string().into())
    };
    options.memory_line(typed).iter().for_each(|line| print_error(line));
    let server = start_after_predecessor(start, signals).await;
    let server = server.map_err(configuration)?;
    let address = server.target();
    let hint = loopback_hint(at, address);
    let can = "call the functions";
    let line = hint.or_else(|| access_line(address, can, network.insecure, at.credentials));
    print_line(format_args!("{task} has the functions {}", functions.names().join(", ")));
    print_line(format_args!("{task} serves on {address}"));
    line.iter().for_each(|line| print_error(line));
    server.serve(signals.any()).await;
    print_line(format_args!("{task} is done"));
    Ok(())
}

/// The functions of every task.
fn functions() -> Functions {
    Functions::new().elementwise()
}

/// Binds the addresses of the task: the one that a flag gives, and its Unix socket.
fn listen(
    network: &NetworkOptions,
    typed: &CommandLine,
    at: FlagAddress<'_>,
) -> Result<FunctionServerListener, DaemonError> {
    let bind = |address: &str| match at.credentials {
        _ if network.insecure => FunctionServer::listen_insecure(address),
        Some(credentials) => FunctionServer::listen_secured(address, credentials),
        None => FunctionServer::listen(address),
    };
    let failed = |flag: &str, error: FunctionServerError| match error {
        FunctionServerError::Listen(error) => typed.cannot_listen(flag, &error),
        error => Chain(&error).to_string().into(),
    };
    let listener = bind(at.address).map_err(|error| failed(at.flag, error))?;
    let Some(path) = &network.unix_socket else {
        return Ok(listener);
    };
    check_socket(typed, at, path)?;
    let unix = FunctionServer::listen(&format!("unix:{}", path.display()));
    Ok(listener.also(unix.map_err(|error| failed("--unix-socket", error))?))
}
