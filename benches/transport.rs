//! `cargo bench`: pulls and pushes beside the ceilings of the machine, as `pushpull bench` does.

#![allow(
    dead_code,
    unused_imports,
    reason = "without a harness the tests of its modules do not run"
)]

#[path = "../src/bin/pushpull/apply.rs"]
mod apply;
#[path = "../src/bin/pushpull/bench.rs"]
mod bench;
#[path = "../src/bin/pushpull/ceiling.rs"]
mod ceiling;
#[path = "../src/bin/pushpull/mlp/mod.rs"]
mod mlp;
#[path = "../src/bin/pushpull/probe.rs"]
mod probe;
#[path = "../src/bin/pushpull/report.rs"]
mod report;
#[path = "../src/bin/pushpull/restart.rs"]
mod restart;
#[path = "../src/bin/pushpull/rows.rs"]
mod rows;
#[path = "../src/bin/pushpull/saving.rs"]
mod saving;

use clap::Parser;

/// The arguments that `cargo bench` adds, and ours.
#[derive(Debug, Parser)]
struct Options {
    /// Added by `cargo bench`.
    #[arg(long)]
    bench: bool,
    #[command(flatten)]
    options: bench::Options,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    // `cargo test --benches` builds and runs this without the flag: there is nothing to test.
    if options.bench { bench::run(&options.options) } else { Ok(()) }
}
