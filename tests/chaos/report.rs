//! The figures of a run, and its last line.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::damage::Name;
use crate::hostile::Said;
use crate::ledger::Verdict;
use crate::rounds::Counts;

/// What was done, and what was found.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Servers killed, in rounds that are about that.
    pub(crate) kills: u64,
    /// Servers killed with or after something else, or before they have answered.
    pub(crate) kills_beside: u64,
    /// Workers and servers stopped for a while.
    pub(crate) stops: u64,
    pub(crate) cuts: u64,
    pub(crate) stalls: u64,
    pub(crate) disk_faults: u64,
    /// State files damaged, and how many of them were refused. The others were not in use, or were
    /// recovered.
    pub(crate) damages: u64,
    pub(crate) damages_refused: u64,
    pub(crate) damages_of_checkpoints: u64,
    pub(crate) restores: u64,
    /// Checkpoints that were seen, with the folders of their clusters.
    pub(crate) checkpoints: BTreeSet<(PathBuf, Name)>,
    /// How many of those had pushes under way that nobody had acknowledged.
    pub(crate) in_flight: u64,
    pub(crate) worker_kills: u64,
    /// Of those, workers that were the chief.
    pub(crate) chief_kills: u64,
    /// Workers that have ended because the servers had given them up with a push half made.
    pub(crate) given_up: u64,
    pub(crate) acknowledged: u64,
    /// Pushes that were begun, and never acknowledged because their worker was killed.
    pub(crate) unknown: u64,
    /// Pushes that came too late for their synchronous step.
    pub(crate) stale: u64,
    /// Pushes that were refused, as their tokens had expired or their workers had been taken for lost.
    pub(crate) refused: u64,
    /// From the exec of a killed server's next life to the first answer of its last shard.
    pub(crate) recoveries: Vec<Duration>,
    /// Panics that servers have logged.
    pub(crate) panics: u64,
    /// What hostile clients did.
    pub(crate) hostile: Said,
    /// Connections that servers no longer have room for, and nobody has.
    pub(crate) slots_lost: u64,
    pub(crate) verdict: Verdict,
}

/// The share of kills that must find a push under way, in percent: one that is seen may be answered before
/// its server is dead.
const IN_FLIGHT_PERCENT: u64 = 50;

impl Report {
    pub(crate) fn add(&mut self, other: Report) {
        self.kills += other.kills;
        self.kills_beside += other.kills_beside;
        self.stops += other.stops;
        self.cuts += other.cuts;
        self.stalls += other.stalls;
        self.disk_faults += other.disk_faults;
        self.damages += other.damages;
        self.damages_refused += other.damages_refused;
        self.damages_of_checkpoints += other.damages_of_checkpoints;
        self.restores += other.restores;
        self.checkpoints.extend(other.checkpoints);
        self.refused += other.refused;
        self.panics += other.panics;
        self.hostile.add(other.hostile);
        self.slots_lost += other.slots_lost;
        self.in_flight += other.in_flight;
        self.worker_kills += other.worker_kills;
        self.given_up += other.given_up;
        self.acknowledged += other.acknowledged;
        self.chief_kills += other.chief_kills;
        self.unknown += other.unknown;
        self.stale += other.stale;
        self.recoveries.extend(other.recoveries);
        self.verdict.add(other.verdict);
    }

    /// What has been done.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            kills: self.kills,
            stops: self.stops,
            cuts: self.cuts,
            stalls: self.stalls,
            disk_faults: self.disk_faults,
            damages: self.damages,
            restores: self.restores,
        }
    }

    /// What was done to one cluster, for people.
    pub(crate) fn told(&self) -> String {
        let (servers, workers) = (self.kills + self.kills_beside, self.worker_kills);
        let (damages, pushes) = (self.damages + self.damages_of_checkpoints, self.acknowledged);
        format!(
            "{servers} servers and {workers} workers killed, {} stops, {} cuts, {} stalls, {} disk faults, \
             {damages} damages, {} restores, {pushes} pushes acknowledged, {} unknown, {} stale, {} refused, {} workers given up, {} hostile messages over {} connections",
            self.stops,
            self.cuts,
            self.stalls,
            self.disk_faults,
            self.restores,
            self.unknown,
            self.stale,
            self.refused,
            self.given_up,
            self.hostile.messages,
            self.hostile.connections
        )
    }

    /// What the run fails for.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = self.verdict.names.clone();
        if !self.verdict.is_clean() && faults.is_empty() {
            faults.push("something is lost, duplicated, torn or half applied".to_owned());
        }
        if self.in_flight * 100 < self.kills * IN_FLIGHT_PERCENT {
            let (in_flight, kills) = (self.in_flight, self.kills);
            faults.push(format!("only {in_flight} of {kills} kills had a push under way"));
        }
        // Hardly any fault lasts that long.
        let faults_of_links = self.stops + self.cuts + self.stalls;
        if self.given_up * 4 > faults_of_links {
            let given_up = self.given_up;
            faults.push(format!("{given_up} workers were given up after {faults_of_links} faults"));
        }
        if self.panics > 0 {
            faults.push(format!("servers have logged {} panics", self.panics));
        }
        if self.slots_lost > 0 {
            faults.push(format!("servers have lost {} slots for connections", self.slots_lost));
        }
        if self.acknowledged == 0 {
            faults.push("nothing was acknowledged".to_owned());
        }
        if self.acknowledged >= 1_000 && self.verdict.evicted == 0 {
            faults.push("no row was evicted".to_owned());
        }
        faults
    }

    /// The last line, as JSON.
    pub(crate) fn json(&self) -> String {
        let mut sorted = self.recoveries.clone();
        sorted.sort();
        let percentile = |percent: usize| match sorted.len() {
            0 => "null".to_owned(),
            // The smallest value that so many percent of all values do not exceed.
            count => {
                let recovery = sorted[(count * percent).div_ceil(100) - 1];
                format!("{:.1}", recovery.as_secs_f64() * 1e3)
            }
        };
        format!(
            "{{\"test\":\"chaos\",\"kills\":{},\"in_flight_at_kill\":{},\"worker_kills\":{},\
             \"given_up\":{},\"stops\":{},\"cuts\":{},\"stalls\":{},\"disk_faults\":{},\"damages\":{},\"refused_damages\":{},\
             \"checkpoints\":{},\"restores\":{},\"acknowledged\":{},\"unknown\":{},\"stale\":{},\"refused\":{},\
             \"lost\":{},\"duplicated\":{},\"torn\":{},\"half_applied\":{},\"evicted\":{},\"panics\":{},\
             \"hostile_connections\":{},\"hostile_messages\":{},\"slots_lost\":{},\
             \"recovery_p50_ms\":{},\"recovery_p99_ms\":{}}}",
            self.kills + self.kills_beside,
            self.in_flight,
            self.worker_kills,
            self.given_up,
            self.stops,
            self.cuts,
            self.stalls,
            self.disk_faults,
            self.damages + self.damages_of_checkpoints,
            self.damages_refused + self.damages_of_checkpoints,
            self.checkpoints.len(),
            self.restores,
            self.acknowledged,
            self.unknown,
            self.stale,
            self.refused,
            self.verdict.lost,
            self.verdict.duplicated,
            self.verdict.torn,
            self.verdict.half_applied,
            self.verdict.evicted,
            self.panics,
            self.hostile.connections,
            self.hostile.messages,
            self.slots_lost,
            percentile(50),
            percentile(99)
        )
    }
}
