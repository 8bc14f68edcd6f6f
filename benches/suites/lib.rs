//! The suites that measure pushpull beside the ceilings of the machine (`cargo bench -p benches
//! --bench suites -- --help`).
//!
//! The measuring code of the suites, and the suite of transports, are those of `pushpull bench`.

mod apply;
#[allow(dead_code, reason = "the rest is the command line of the tool")]
#[path = "../../src/bin/pushpull/bench/mod.rs"]
mod bench;
mod crowd;
mod daemon;
mod footprint;
#[path = "../../src/bin/options/local_path.rs"]
mod local_path;
mod memory;
mod mlp;
mod options;
#[path = "../../src/bin/pushpull/output.rs"]
mod output;
mod page;
mod probe;
mod restart;
mod rows;
mod saving;
mod scale;
mod served;
mod stalled;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

use clap::Parser;

use bench::report::Report;
use bench::{BenchError, Transport, bytes_of, transport};
use local_path::local_path;
use options::{Suite, SuitesOptions};
use pushpull::error::Chain;

/// Runs the suites of the command line and prints their rows.
pub fn main() -> ExitCode {
    match run(&SuitesOptions::parse()) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&Chain(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Runs the suites of the options. Returns the printed rows.
fn run(options: &SuitesOptions) -> Result<Report, BenchError> {
    let mut report = Report::new(options.output.json);
    for &suite in options.suites() {
        measure(suite, options, &mut report)?;
    }
    options.output.draw(&report)?;
    if let Some(path) = &options.page {
        page::write(path, report.lines())?;
    }
    Ok(report)
}

fn measure(suite: Suite, options: &SuitesOptions, report: &mut Report) -> Result<(), BenchError> {
    let SuitesOptions { transports, sizes, .. } = options;
    let pace = options.pace();
    match suite {
        Suite::Quick => quick(options, report),
        Suite::Transport => {
            transport::run(transports, &transports.transport_suite.sizes, pace, report)
        }
        Suite::Restart => restart::run(&sizes.restart_sizes, pace.rounds, report),
        Suite::Memory => {
            let bytes = bytes_of(&sizes.memory_size)?;
            memory::run(bytes, report)?;
            stalled::run(&sizes.stalled_size, pace, report)
        }
        Suite::Footprint => footprint::run(bytes_of(&sizes.memory_size)?, footprint::IDLE, report),
        Suite::Scale => scale::run(options, pace, report),
        Suite::Crowd => crowd::run(options, pace, report),
        Suite::Checkpoint => {
            let bytes = bytes_of(&sizes.checkpoint_size)?;
            saving::run(&sizes.checkpoint_size, bytes, pace.rounds, report)
        }
        Suite::Mlp => {
            transports.transport.iter().try_for_each(|&transport| mlp::run(transport, pace, report))
        }
        Suite::Rows => {
            rows::run(&[16, 64], pace, report)?;
            transports
                .transport
                .iter()
                .try_for_each(|&transport| served::run(&[16, 64], transport, pace, report))
        }
        Suite::Apply => apply::run(&apply::every_rule(), &sizes.apply_sizes, pace, report),
    }
}

/// Runs short rounds of the most telling suites.
fn quick(options: &SuitesOptions, report: &mut Report) -> Result<(), BenchError> {
    let pace = options.transports.quick_pace();
    bench::quick(&options.transports, report)?;
    apply::run(&apply::every_rule()[..2], &["32MiB"], pace, report)?;
    rows::run(&[16], pace, report)?;
    mlp::run(Transport::Shm, pace, report)?;
    restart::run(&["64MiB".to_owned()], pace.rounds, report)
}
