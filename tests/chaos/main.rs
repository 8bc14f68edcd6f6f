//! The chaos test: trains clusters of real processes while servers, workers, links, disks and files
//! fail.
//!
//! No acknowledged push may be lost, counted twice, torn, or applied on only some of the shards,
//! and the training must continue after every fault. In half of the clusters steps are synchronous,
//! and each takes exactly two whole gradients.
//!
//! Every push adds one to all elements of a dense variable on each of four shards, and one to an
//! element of its own in a ledger on the same shard. Rows, growing tables, partitioned variables,
//! and the slots of Adam and momentum must follow from the ledger, to the bit. Workers log every
//! push that they start and its outcome, so at the end every push can be checked.
//!
//! At each restore the state is lost twice: the second time on some servers or all, before the next
//! checkpoint, while a worker that has joined in between is away and must be told. Where links are
//! cut, a session starts the training, and a server is killed while its first checkpoint is written.
//!
//! A refused push is on no shard. A push without an outcome, because its worker was killed or was
//! retired after three leases of absence, is on all shards or on none in synchronous mode. In
//! asynchronous mode it may be on some of the shards, and the step owner must count it: then the
//! training has no final values.
//!
//! Run it with `cargo test --release --test chaos`:
//!
//! - `PUSHPULL_CHAOS_KILLS=N` kills N servers in each mode, 8 by default. With them come N/2 stops
//!   of workers and servers, N/2 cuts and N/4 stalls of links, N/10 disk faults, N/10 damaged files
//!   and N/20 restores. Hostile clients connect to two further clusters, of which N/2 servers each
//!   are killed. With 0 only workers are killed.
//! - `PUSHPULL_CHAOS_ONLY=NAME` runs only one of the clusters.
//! - `PUSHPULL_CHAOS_SECONDS=S` continues the faults of each cluster for at least S seconds.
//! - `PUSHPULL_SEED=N` draws the same faults again. Their effect still depends on the timing.
//!
//! The last line of the output is one JSON object.

mod chance;
mod daemons;
mod damage;
mod first_save;
mod history;
mod hostile;
mod ledger;
mod links;
mod place;
#[path = "../../benches/suites/probe.rs"]
mod probe;
mod process;
mod report;
mod rounds;
#[path = "../../common/tests/samples/mod.rs"]
#[allow(dead_code, reason = "the golden frames use more of a sample than its message")]
mod samples;
mod setting;
mod training;
mod workers;

use std::process::ExitCode;
use std::time::Duration;

use chance::Chance;
use daemons::DaemonTransport;
use place::RunFolder;
use report::ChaosReport;
use rounds::{Counts, Plan};

/// The default number of servers to kill in each mode.
const KILLS: u64 = 8;

/// The number of workers to kill in each cluster if no server is killed.
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
    let mut place = RunFolder::new();
    let path = place.path().display();
    println!("chaos: PUSHPULL_SEED={seed} PUSHPULL_CHAOS_KILLS={kills}, in {path}");
    if rustix::process::geteuid().is_root() {
        println!("SKIPPED: no directory is made read-only, since root can write to it");
    }
    let mut chance = Chance::new(seed);
    let mut report = ChaosReport::default();
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

/// Returns the plans of three clusters for each mode.
///
/// The first uses Unix sockets, shared values and push buffers. The tasks of the second reach each
/// other through links that can be cut. The third has hostile clients.
fn plans(kills: u64) -> [Plan; 6] {
    let worker_rounds = if kills == 0 { WORKER_ROUNDS } else { 0 };
    // Rounded down, but at least one of each.
    let part = |of: u64| if kills == 0 { 0 } else { (kills / of).max(1) };
    let one = Plan {
        name: "one-task",
        tasks: 1,
        transport: DaemonTransport::Unix,
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
        transport: DaemonTransport::Tcp,
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
        transport: DaemonTransport::Tcp,
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

/// Whether the arguments of the test runner select this test, as the default harness would decide.
fn is_wanted(arguments: &[String]) -> bool {
    let mut names = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
    let chosen = names.peek().is_none() || names.any(|name| "chaos".contains(name.as_str()));
    chosen && !arguments.iter().any(|argument| argument == "--list")
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {value:?}")))
}
