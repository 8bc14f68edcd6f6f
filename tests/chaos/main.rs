//! Servers and workers of a training are killed without warning, again and again. Nothing that was
//! acknowledged is lost, nothing counts twice, nothing is torn, and the training goes on. In one of
//! the clusters steps are synchronous, and each takes exactly two whole gradients.
//!
//! Every push adds one to all elements of a dense variable on each of two shards, and one at its
//! own place in a ledger beside it. Workers write down what they begin and what is acknowledged, so
//! that at the end every push can be looked up.
//!
//! `cargo test --release --test chaos`. `PUSHPULL_CHAOS_KILLS=N` kills N servers in place of 200, and three quarters of that
//! with synchronous steps;
//! with 0 only workers are killed. `PUSHPULL_SEED=N` draws the same kills again, though what they
//! meet is up to the machine. The last line is one JSON object.

mod chance;
mod daemons;
mod history;
mod ledger;
mod place;
#[path = "../../src/bin/pushpull/bench/probe.rs"]
mod probe;
mod process;
mod report;
mod rounds;
mod setting;
mod training;
mod workers;

use std::process::ExitCode;

use chance::Chance;
use daemons::Transport;
use place::Place;
use report::Report;
use rounds::Plan;

/// How many servers are killed, if nobody says otherwise.
const KILLS: u64 = 200;

/// How many workers are killed in each cluster, if no server is.
const WORKER_ROUNDS: u64 = 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, rest @ ..] = &arguments[..]
        && role == training::ROLE
    {
        return training::run(rest);
    }
    if !is_wanted(&arguments) {
        return ExitCode::SUCCESS;
    }
    let seed = number("PUSHPULL_SEED").unwrap_or_else(Chance::any_seed);
    let kills = number("PUSHPULL_CHAOS_KILLS").unwrap_or(KILLS);
    let mut place = Place::new();
    println!("chaos: PUSHPULL_SEED={seed}, {kills} kills, in {}", place.path().display());
    let mut chance = Chance::new(seed);
    let mut report = Report::default();
    for plan in plans(kills) {
        report.add(rounds::run(&plan, place.path(), &mut chance));
    }
    let faults = report.faults();
    for fault in &faults {
        eprintln!("FAULT: {fault}");
    }
    if !faults.is_empty() {
        place.keep();
    }
    drop(place);
    println!("{}", report.json());
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Both ways to have two shards, and both transports; and synchronous steps. Behind Unix sockets values
/// are read in lent memory.
fn plans(kills: u64) -> [Plan; 3] {
    let worker_rounds = if kills == 0 { WORKER_ROUNDS } else { 0 };
    let one = Plan {
        name: "one-task",
        tasks: 1,
        transport: Transport::Unix,
        synchronous: false,
        kills: kills.div_ceil(2),
        worker_rounds,
    };
    let two = Plan { name: "two-tasks", tasks: 2, transport: Transport::Tcp, ..one };
    // In turns a chief and another worker die with a server: at least 50 of each by default.
    let kills_of_synchronous = kills * 3 / 4;
    let synchronous = Plan {
        name: "synchronous",
        transport: Transport::Unix,
        synchronous: true,
        kills: kills_of_synchronous,
        ..two
    };
    [one, Plan { kills: kills / 2, ..two }, synchronous]
}

/// Whether the runner's arguments choose this test, as they would one of its own harness.
fn is_wanted(arguments: &[String]) -> bool {
    let mut names = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
    let chosen = names.peek().is_none() || names.any(|name| "chaos".contains(name.as_str()));
    chosen && !arguments.iter().any(|argument| argument == "--list")
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is a number, not {value:?}")))
}
