//! The figures of a run, and its last line.

use std::time::Duration;

use crate::ledger::Verdict;

/// What was done, and what was found.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Servers killed.
    pub(crate) kills: u64,
    /// How many of those had pushes under way that nobody had acknowledged.
    pub(crate) in_flight: u64,
    pub(crate) worker_kills: u64,
    /// Of those, workers that were the chief.
    pub(crate) chief_kills: u64,
    pub(crate) acknowledged: u64,
    /// Pushes that were begun, and never acknowledged because their worker was killed.
    pub(crate) unknown: u64,
    /// Pushes that came too late for their synchronous step.
    pub(crate) stale: u64,
    /// From the exec of a killed server's next life to the first answer of its last shard.
    pub(crate) recoveries: Vec<Duration>,
    pub(crate) verdict: Verdict,
}

/// The share of kills that must find a push under way, in percent.
const IN_FLIGHT_PERCENT: u64 = 90;

impl Report {
    pub(crate) fn add(&mut self, other: Report) {
        self.kills += other.kills;
        self.in_flight += other.in_flight;
        self.worker_kills += other.worker_kills;
        self.acknowledged += other.acknowledged;
        self.chief_kills += other.chief_kills;
        self.unknown += other.unknown;
        self.stale += other.stale;
        self.recoveries.extend(other.recoveries);
        self.verdict.add(other.verdict);
    }

    /// What the run fails for.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = self.verdict.names.clone();
        if !self.verdict.is_clean() && faults.is_empty() {
            faults.push("something is lost, duplicated or torn".to_owned());
        }
        if self.in_flight * 100 < self.kills * IN_FLIGHT_PERCENT {
            let (in_flight, kills) = (self.in_flight, self.kills);
            faults.push(format!("only {in_flight} of {kills} kills had a push under way"));
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
            "{{\"test\":\"chaos\",\"kills\":{},\"in_flight_at_kill\":{},\"acknowledged\":{},\
             \"unknown\":{},\"lost\":{},\"duplicated\":{},\"torn\":{},\"evicted\":{},\
             \"recovery_p50_ms\":{},\"recovery_p99_ms\":{}}}",
            self.kills,
            self.in_flight,
            self.acknowledged,
            self.unknown,
            self.verdict.lost,
            self.verdict.duplicated,
            self.verdict.torn,
            self.verdict.evicted,
            percentile(50),
            percentile(99)
        )
    }
}
