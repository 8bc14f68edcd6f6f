//! Servers and workers of a training are killed without warning, stopped, cut off from each other, and lose
//! their disks and their files, again and again. Nothing that was acknowledged is lost, nothing counts
//! twice, nothing is torn or applied on some shards alone, and the training goes on. In half of the
//! clusters steps are synchronous, and each takes exactly two whole gradients.
//!
//! Every push adds one to all elements of a dense variable on each of four shards, and one at its
//! own place in a ledger beside it; rows, tables that grow, partitioned variables, and the slots of Adam and
//! of momentum must be what the ledger makes of them, to the bit. Workers write down what they begin and
//! what is acknowledged or refused, so that at the end every push can be looked up.
//!
//! A push that was refused is on no shard. One whose worker was killed before it was told, or was given up
//! after three leases away, may be on some of the shards in asynchronous mode; in synchronous mode it is on
//! all or on none.
//!
//! `cargo test --release --test chaos`. `PUSHPULL_CHAOS_KILLS=N` kills N servers in each mode in place of 8, with N/2 stops of
//! workers and servers, N/2 cuts and N/4 stalls of links between any two tasks, N/10 faults of disks, N/10 damaged
//! files and N/20 restores. Hostile clients connect to two further clusters, of which N/2 servers each are killed.
//! With 0 only workers are killed. `PUSHPULL_CHAOS_ONLY=NAME` leaves all clusters but
//! one out. `PUSHPULL_CHAOS_SECONDS=S` lets the faults of each cluster go on for S seconds at least. `PUSHPULL_SEED=N` draws the same faults again, though what they meet is up to the machine. The
//! last line is one JSON object.

mod chance;
mod daemons;
mod damage;
mod history;
mod hostile;
mod ledger;
mod links;
mod place;
#[path = "../../src/bin/pushpull/bench/probe.rs"]
mod probe;
mod process;
mod report;
mod rounds;
#[path = "../../common/tests/samples/mod.rs"]
#[allow(dead_code, reason = "the golden frames look at more of a sample than its message")]
mod samples;
mod setting;
mod training;
mod workers;

use std::process::ExitCode;
use std::time::Duration;

use chance::Chance;
use daemons::Transport;
use place::Place;
use report::Report;
use rounds::{Counts, Plan};

/// How many servers are killed in each mode, if nobody says otherwise.
const KILLS: u64 = 8;

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
    let path = place.path().display();
    println!("chaos: PUSHPULL_SEED={seed} PUSHPULL_CHAOS_KILLS={kills}, in {path}");
    if rustix::process::geteuid().is_root() {
        println!("SKIPPED: no directory is made read-only, as that hinders no superuser");
    }
    let mut chance = Chance::new(seed);
    let mut report = Report::default();
    let only = std::env::var("PUSHPULL_CHAOS_ONLY").ok();
    let is_wanted = |plan: &Plan| only.as_ref().is_none_or(|only| only == plan.name);
    for plan in plans(kills).into_iter().filter(is_wanted) {
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

/// For each mode a cluster behind Unix sockets, where values are read and gradients are written in lent
/// memory, one whose tasks reach each other through links that can be cut, and one with hostile clients.
fn plans(kills: u64) -> [Plan; 6] {
    let worker_rounds = if kills == 0 { WORKER_ROUNDS } else { 0 };
    // As many as come to a whole number, but some of each.
    let part = |of: u64| if kills == 0 { 0 } else { (kills / of).max(1) };
    let one = Plan {
        name: "one-task",
        tasks: 1,
        transport: Transport::Unix,
        has_links: false,
        is_attacked: false,
        synchronous: false,
        counts: Counts { kills: part(2), stops: part(8), ..Counts::default() },
        worker_rounds,
        lasts: Duration::from_secs(number("PUSHPULL_CHAOS_SECONDS").unwrap_or(0)),
    };
    let links = Plan {
        name: "links",
        tasks: 4,
        transport: Transport::Tcp,
        has_links: true,
        counts: Counts {
            kills: part(2),
            stops: part(2),
            cuts: part(2),
            stalls: part(4),
            disk_faults: part(10),
            damages: part(10),
            restores: part(20),
        },
        ..one
    };
    let hostile = Plan {
        name: "hostile",
        tasks: 2,
        transport: Transport::Tcp,
        is_attacked: true,
        counts: Counts { kills: part(2), ..Counts::default() },
        ..one
    };
    [
        one,
        links,
        hostile,
        Plan { name: "synchronous", tasks: 2, synchronous: true, ..one },
        Plan { name: "synchronous-links", synchronous: true, ..links },
        Plan { name: "synchronous-hostile", synchronous: true, ..hostile },
    ]
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
