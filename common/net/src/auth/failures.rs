//! [`AuthFailures`]: hosts whose peers have failed to prove who they are, and how long each waits for
//! the answer. Pure: the time is an argument.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Failed attempts by host.
///
/// Invariant: there are at most [`HOSTS_MAX`] entries.
#[derive(Debug)]
pub(crate) struct AuthFailures<H> {
    hosts: BTreeMap<H, HostFailures>,
}

#[derive(Debug)]
struct HostFailures {
    /// The attempts that failed since the last pause of [`FORGOTTEN_AFTER`].
    count: u32,
    last: Instant,
    /// The attempts that no report has counted, and when the last one was due.
    unreported: u64,
    reported: Option<Instant>,
}

/// What follows a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FailedAttempt {
    /// The time until the peer is told.
    pub(crate) delay: Duration,
    /// The number of attempts to report, if a report is due.
    pub(crate) report: Option<u64>,
}

/// The most hosts that are remembered. Of more, the one that has been quiet for longest is forgotten.
const HOSTS_MAX: usize = 1024;

/// The delay of the first failure of a host; each further one doubles it.
const DELAY_MIN: Duration = Duration::from_millis(100);

/// The longest delay.
const DELAY_MAX: Duration = Duration::from_millis(3200);

/// The time without a failure after which a host starts again.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);

/// The time between two reports of one host: attempts in a loop do not fill a log.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

impl<H: Ord + Copy> AuthFailures<H> {
    /// Counts a failed attempt of a host.
    pub(crate) fn failed(&mut self, now: Instant, host: H) -> FailedAttempt {
        if !self.hosts.contains_key(&host) && self.hosts.len() == HOSTS_MAX {
            let quiet = self.hosts.iter().min_by_key(|(_, failures)| failures.last);
            if let Some((&quiet, _)) = quiet {
                self.hosts.remove(&quiet);
            }
        }
        let new = HostFailures { count: 0, last: now, unreported: 0, reported: None };
        let failures = self.hosts.entry(host).or_insert(new);
        if now.saturating_duration_since(failures.last) >= FORGOTTEN_AFTER {
            failures.count = 0;
        }
        let doublings = failures.count.min(DELAY_MAX.div_duration_f64(DELAY_MIN).log2() as u32);
        failures.count = failures.count.saturating_add(1);
        failures.last = now;
        failures.unreported += 1;
        let since = failures.reported.map(|at| now.saturating_duration_since(at));
        let is_due = since.is_none_or(|since| since >= REPORT_INTERVAL);
        let report = is_due.then(|| {
            failures.reported = Some(now);
            std::mem::take(&mut failures.unreported)
        });
        FailedAttempt { delay: DELAY_MIN * 2u32.pow(doublings), report }
    }
}

impl<H> Default for AuthFailures<H> {
    fn default() -> AuthFailures<H> {
        AuthFailures { hosts: BTreeMap::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delays(
        failures: &mut AuthFailures<u32>,
        now: Instant,
        host: u32,
        count: usize,
    ) -> Vec<u128> {
        (0..count).map(|_| failures.failed(now, host).delay.as_millis()).collect()
    }

    #[test]
    fn each_failure_of_a_host_doubles_its_delay() {
        let mut failures = AuthFailures::default();
        let now = Instant::now();
        let doubled = [100, 200, 400, 800, 1600, 3200, 3200, 3200];
        assert_eq!(delays(&mut failures, now, 1, 8), doubled);
        assert_eq!(delays(&mut failures, now, 2, 2), [100, 200], "another host");
        let later = now + FORGOTTEN_AFTER - Duration::from_millis(1);
        assert_eq!(delays(&mut failures, later, 1, 1), [3200]);
        assert_eq!(delays(&mut failures, later + FORGOTTEN_AFTER, 1, 2), [100, 200]);
    }

    #[test]
    fn the_first_failure_is_reported_at_once_and_the_others_together() {
        let mut failures = AuthFailures::default();
        let now = Instant::now();
        assert_eq!(failures.failed(now, 1).report, Some(1));
        let soon = now + REPORT_INTERVAL - Duration::from_millis(1);
        assert!((0..500).all(|_| failures.failed(soon, 1).report.is_none()));
        assert_eq!(failures.failed(now, 2).report, Some(1));
        assert_eq!(failures.failed(now + REPORT_INTERVAL, 1).report, Some(501));
    }

    #[test]
    fn the_hosts_are_bounded_and_the_quiet_one_is_forgotten() {
        let mut failures = AuthFailures::default();
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_millis(seconds);
        for host in 0..HOSTS_MAX as u32 {
            failures.failed(at(host.into()), host);
        }
        failures.failed(at(5000), 0);
        failures.failed(at(5001), u32::MAX);
        assert_eq!(failures.hosts.len(), HOSTS_MAX);
        assert!(failures.hosts.contains_key(&0) && !failures.hosts.contains_key(&1));
    }
}
