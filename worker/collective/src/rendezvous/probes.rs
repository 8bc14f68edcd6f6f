//! [`Probes`]: the questions whether processes have ended.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::message::RankAddresses;

/// The processes that are asked, each by one attempt at a time, until the answer proves nothing any
/// more.
#[derive(Debug)]
pub(super) struct Probes {
    /// The time from an answer to the next attempt.
    pause: Duration,
    all: BTreeMap<Incarnation, Probe>,
}

#[derive(Debug)]
struct Probe {
    addresses: RankAddresses,
    /// The time until which the end of the process proves something.
    until: Instant,
    /// When to ask again; `None` while an attempt is under way.
    at: Option<Instant>,
}

impl Probes {
    pub(super) fn new(pause: Duration) -> Probes {
        Probes { pause, all: BTreeMap::new() }
    }

    /// Asks about a process, unless it is asked already.
    pub(super) fn add(
        &mut self,
        now: Instant,
        process: Incarnation,
        addresses: RankAddresses,
        until: Instant,
    ) {
        self.all.entry(process).or_insert(Probe { addresses, until, at: Some(now) });
    }

    /// Returns a process that is to be asked now. Its attempt is then under way.
    pub(super) fn begin(&mut self, now: Instant) -> Option<(Incarnation, RankAddresses)> {
        self.all.retain(|_, probe| now < probe.until);
        let is_due = |probe: &Probe| probe.at.is_some_and(|at| at <= now);
        let (&process, probe) = self.all.iter_mut().find(|(_, probe)| is_due(probe))?;
        probe.at = None;
        Some((process, probe.addresses.clone()))
    }

    /// Notes an answer. Returns whether it proves that the process had ended in time.
    pub(super) fn end(&mut self, now: Instant, process: Incarnation, gone: bool) -> bool {
        let Some(probe) = self.all.get_mut(&process) else { return false };
        probe.at = now.checked_add(self.pause);
        let is_proven = gone && now < probe.until;
        if is_proven {
            self.all.remove(&process);
        }
        is_proven
    }

    /// Returns when the next process is to be asked.
    pub(super) fn next(&self) -> Option<Instant> {
        self.all.values().filter_map(|probe| probe.at).min()
    }
}
