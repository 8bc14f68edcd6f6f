//! The tool: `pushpull bench` measures a server beside the ceilings of the machine.

mod apply;
mod bench;
mod ceiling;
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
}

fn main() -> ExitCode {
    let Command::Bench(options) = Options::parse().command;
    match bench::run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pushpull: {error}");
            ExitCode::FAILURE
        }
    }
}
