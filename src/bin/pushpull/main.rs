//! The tool: `pushpull bench` measures a server beside the ceilings of the machine, and `pushpull
//! inspect` says what a directory of a server holds.

mod apply;
mod bench;
mod ceiling;
mod inspect;
mod report;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tools for pushpull clusters.
#[derive(Debug, Parser)]
#[command(name = "pushpull", version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measures pulls and pushes beside the ceiling of the same transport and size.
    Bench(bench::Options),
    /// Says what a state directory holds, and whether it is sound.
    Inspect(inspect::Options),
}

fn main() -> ExitCode {
    let result = match Options::parse().command {
        Command::Bench(options) => bench::run(&options),
        Command::Inspect(options) => inspect::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pushpull: {error}");
            ExitCode::FAILURE
        }
    }
}
