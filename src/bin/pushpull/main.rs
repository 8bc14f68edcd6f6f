//! The command-line tool: `pushpull bench` measures a server beside the ceilings of the machine,
//! `pushpull inspect` shows what a state or checkpoint directory holds, `pushpull export` writes a
//! checkpoint as a safetensors file, `pushpull devices` lists what a worker can compute on,
//! `pushpull launch` starts the tasks of a cluster, `pushpull rendezvous` gathers their addresses,
//! `pushpull resolve` shows the cluster that a launcher tells, `pushpull cert` and `pushpull token`
//! create what tasks prove themselves with, and `pushpull admin` administers a running training.

mod admin;
mod authority;
mod bench;
mod cert;
mod devices;
mod export;
mod inspect;
mod launch;
#[path = "../options/mod.rs"]
mod options;
mod output;
#[path = "../options/place.rs"]
mod place;
mod rendezvous;
mod resolve;
mod saved;
mod token;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use pushpull::error::Chain;

use options::{ExitWithParent, local_path};

/// Tools for pushpull clusters.
#[derive(Debug, Parser)]
#[command(name = "pushpull", version)]
struct ToolOptions {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Administer a running training: show its status, save, finish it, stop its servers.
    #[command(subcommand)]
    Admin(admin::AdminCommand),
    /// Measure pulls and pushes beside the ceiling of the same transport and size.
    Bench(Box<BenchCommand>),
    /// Create a certificate authority, and certificates of tasks.
    #[command(subcommand)]
    Cert(cert::CertCommand),
    /// Show the devices that a worker can compute on, as far as this process may use them.
    Devices(devices::DevicesOptions),
    /// Write a checkpoint as one safetensors file, with whole tensors under their own names.
    Export(export::ExportOptions),
    /// Show the contents and faults of a state or checkpoint directory; change nothing.
    Inspect(inspect::InspectOptions),
    /// Start the tasks of a cluster, here or on other hosts, and end them together.
    Launch(Box<launch::LaunchOptions>),
    /// Become a program that is killed when the launcher ends.
    #[command(hide = true)]
    LaunchChild(launch::ChildOptions),
    /// Gather the addresses of a cluster's tasks, and tell each all of them.
    Rendezvous(rendezvous::RendezvousCommand),
    /// Show the cluster and the task that the launcher of this process tells.
    Resolve(Box<resolve::ResolveCommand>),
    /// Create access tokens.
    #[command(subcommand)]
    Token(token::TokenCommand),
}

/// Options of `pushpull bench` as a process.
#[derive(Debug, Args)]
struct BenchCommand {
    #[command(flatten)]
    options: bench::BenchOptions,
    #[command(flatten)]
    parent: ExitWithParent,
}

fn main() -> ExitCode {
    let done = match ToolOptions::try_parse() {
        Ok(options) => run(&options.command),
        // clap reports --help and --version as errors, too.
        Err(error) => {
            let code = u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
            error.print().map(|()| code).map_err(|error| output::output_error(&error).into())
        }
    };
    match done {
        Ok(code) => code,
        // The reader has closed the pipe, as `head` does: not a failure.
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&Chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<ExitCode, Box<dyn Error>> {
    // A handler of this program would be none of the one that it becomes.
    if !matches!(command, Command::LaunchChild(_)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let _context = runtime.enter();
        options::fail_writes_instead()?;
    }
    match command {
        Command::Admin(command) => admin::run(command)?,
        Command::Cert(command) => cert::run(command)?,
        Command::Token(command) => token::run(command)?,
        Command::Bench(command) => {
            command.parent.apply()?;
            bench::run(&command.options)?;
        }
        Command::Devices(options) => devices::run(options)?,
        Command::Export(options) => export::run(options)?,
        Command::Inspect(options) => inspect::run(options)?,
        Command::Launch(options) => return launch::run(options),
        Command::LaunchChild(options) => return Ok(launch::become_child(options)),
        Command::Rendezvous(command) => rendezvous::run(command)?,
        Command::Resolve(command) => resolve::run(command)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
