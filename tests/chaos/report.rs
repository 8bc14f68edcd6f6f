//! The figures of a run and its last line of output.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::damage::DamagedName;
use crate::hostile::HostileCounts;
use crate::ledger::LedgerVerdict;
use crate::rounds::Counts;

/// The counts of faults and pushes, and the verdict.
#[derive(Debug, Default)]
pub(crate) struct ChaosReport {
    /// Servers killed in the rounds for kills.
    pub(crate) kills: u64,
    /// Servers killed as part of another fault, or before they answered.
    pub(crate) other_kills: u64,
    /// Workers and servers stopped for some time.
    pub(crate) stops: u64,
    pub(crate) cuts: u64,
    pub(crate) stalls: u64,
    pub(crate) disk_faults: u64,
    /// State files damaged. Those that were not refused were not in use or were recovered.
    pub(crate) damages: u64,
    pub(crate) damages_refused: u64,
    pub(crate) damages_of_checkpoints: u64,
    pub(crate) restores: u64,
    /// Restores after which the state was lost again before the next checkpoint.
    pub(crate) second_losses: u64,
    /// First saves of a session during which a server was killed.
    pub(crate) first_saves: u64,
    /// Gradients of killed workers that are on some shards only, as the step owners count them.
    pub(crate) partly_applied: u64,
    /// The checkpoints that were found, with the folders of their clusters.
    pub(crate) checkpoints: BTreeSet<(PathBuf, DamagedName)>,
    /// Server kills (`kills`) with a push in flight.
    pub(crate) in_flight: u64,
    pub(crate) worker_kills: u64,
    /// Worker kills (`worker_kills`) of the chief.
    pub(crate) chief_kills: u64,
    /// Workers that ended because the step owner had retired them with an incomplete push.
    pub(crate) given_up: u64,
    pub(crate) acknowledged: u64,
    /// Pushes without an outcome because their worker was killed.
    pub(crate) unknown: u64,
    /// Pushes that were stale for their synchronous step.
    pub(crate) stale: u64,
    /// Pushes that were refused because their tokens had expired or their workers had lost their
    /// leases.
    pub(crate) refused: u64,
    /// Times from the restart of a killed server to the first answer of its last shard.
    pub(crate) recoveries: Vec<Duration>,
    /// Panics that servers have logged.
    pub(crate) panics: u64,
    /// The figures of the hostile clients.
    pub(crate) hostile: HostileCounts,
    /// Connection slots that servers have leaked: in use without a connection.
    pub(crate) slots_lost: u64,
    pub(crate) verdict: LedgerVerdict,
}

/// The least percentage of kills with a push in flight. Not 100, since a push may be answered
/// between the check and the kill.
const IN_FLIGHT_PERCENT: u64 = 50;

impl ChaosReport {
    pub(crate) fn add(&mut self, other: ChaosReport) {
        self.kills += other.kills;
        self.other_kills += other.other_kills;
        self.stops += other.stops;
        self.cuts += other.cuts;
        self.stalls += other.stalls;
        self.disk_faults += other.disk_faults;
        self.damages += other.damages;
        self.damages_refused += other.damages_refused;
        self.damages_of_checkpoints += other.damages_of_checkpoints;
        self.restores += other.restores;
        self.second_losses += other.second_losses;
        self.partly_applied += other.partly_applied;
        self.first_saves += other.first_saves;
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

    /// Returns how often each fault was injected.
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

    /// Summarizes the run of one cluster in a readable line.
    pub(crate) fn summary(&self) -> String {
        let servers = self.kills + self.other_kills;
        let workers = self.worker_kills;
        let damages = self.damages + self.damages_of_checkpoints;
        let pushes = self.acknowledged;
        format!(
            "{servers} servers and {workers} workers killed, {} stops, {} cuts, {} stalls, {} disk faults, \
             {damages} damages, {} restores, {pushes} pushes acknowledged, {} unknown, {} stale, {} refused, {} workers retired, {} hostile messages over {} connections, of which {} were welcomed",
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
            self.hostile.connections,
            self.hostile.welcomed
        )
    }

    /// Returns the reasons for which the run fails; none if it passes.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = self.verdict.names.clone();
        if !self.verdict.is_clean() && faults.is_empty() {
            faults.push("a push is lost, duplicated, torn or half applied".to_owned());
        }
        if self.in_flight * 100 < self.kills * IN_FLIGHT_PERCENT {
            let in_flight = self.in_flight;
            let kills = self.kills;
            faults.push(format!("only {in_flight} of {kills} kills had a push in flight"));
        }
        // Few faults last for three leases, after which a worker is retired.
        let faults_of_links = self.stops + self.cuts + self.stalls;
        if self.given_up * 4 > faults_of_links {
            let given_up = self.given_up;
            faults.push(format!("{given_up} workers were retired after {faults_of_links} faults"));
        }
        if self.panics > 0 {
            faults.push(format!("servers have logged {} panics", self.panics));
        }
        if self.slots_lost > 0 {
            faults.push(format!("servers have leaked {} connection slots", self.slots_lost));
        }
        if self.acknowledged == 0 {
            faults.push("no push was acknowledged".to_owned());
        }
        if self.acknowledged >= 1_000 && self.verdict.evicted == 0 {
            faults.push("no row was evicted".to_owned());
        }
        faults
    }

    /// Returns the last line of the output as JSON.
    pub(crate) fn json(&self) -> String {
        let mut sorted = self.recoveries.clone();
        sorted.sort();
        let percentile = |percent: usize| match sorted.len() {
            0 => "null".to_owned(),
            // The nearest-rank percentile.
            count => {
                let recovery = sorted[(count * percent).div_ceil(100) - 1];
                format!("{:.1}", recovery.as_secs_f64() * 1e3)
            }
        };
        format!(
            "{{\"test\":\"chaos\",\"kills\":{},\"in_flight_at_kill\":{},\"worker_kills\":{},\
             \"given_up\":{},\"stops\":{},\"cuts\":{},\"stalls\":{},\"disk_faults\":{},\"damages\":{},\"refused_damages\":{},\
             \"checkpoints\":{},\"restores\":{},\"second_losses\":{},\"first_saves\":{},\"acknowledged\":{},\"unknown\":{},\"stale\":{},\"refused\":{},\
             \"lost\":{},\"duplicated\":{},\"torn\":{},\"half_applied\":{},\"partly_applied\":{},\"evicted\":{},\"panics\":{},\
             \"hostile_connections\":{},\"hostile_messages\":{},\"slots_lost\":{},\
             \"recovery_p50_ms\":{},\"recovery_p99_ms\":{}}}",
            self.kills + self.other_kills,
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
            self.second_losses,
            self.first_saves,
            self.acknowledged,
            self.unknown,
            self.stale,
            self.refused,
            self.verdict.lost,
            self.verdict.duplicated,
            self.verdict.torn,
            self.verdict.half_applied,
            self.partly_applied,
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
