//! The tool: `pushpull bench` measures a server beside the ceilings of the machine.

mod apply;
mod bench;
mod ceiling;
mod export;
mod probe;
mod report;
mod restart;
mod saving;

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
    /// Writes a checkpoint as one safetensors file, with whole tensors under their own names.
    Export(export::Options),
}

fn main() -> ExitCode {
    let done = match Options::parse().command {
        Command::Bench(options) => bench::run(&options),
        Command::Export(options) => export::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pushpull: {error}");
            ExitCode::FAILURE
        }
    }
}
