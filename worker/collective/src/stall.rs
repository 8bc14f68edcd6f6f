//! [`RingStall`]: the report that an operation waits for another rank for too long.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An operation that has stood still, and the rank that this one waits for.
///
/// A rank waits for a neighbour, which may itself wait for its own. The rank that sends no report is
/// the one that holds up all others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingStall {
    /// The number of the operation since the ring has formed, from 1.
    pub number: u64,
    /// The operation, as in `all-reduce (sum) of "w": 10 x f32`.
    pub operation: String,
    /// The rank that is awaited.
    pub rank: u32,
    /// The host of that rank.
    pub host: String,
    /// How long no byte has come from it or gone to it.
    pub since: Duration,
}

impl fmt::Display for RingStall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RingStall { number, operation, rank, host, since } = self;
        write!(
            f,
            "operation {number}, {operation}, waits for rank {rank} on {host} since {since:?}"
        )
    }
}

/// When stalls are reported, and to which function.
#[derive(Clone)]
pub(crate) struct StallCheck {
    pub(crate) after: Duration,
    report: Arc<dyn Fn(&RingStall) + Send + Sync>,
}

impl StallCheck {
    pub(crate) fn new(
        after: Duration,
        report: impl Fn(&RingStall) + Send + Sync + 'static,
    ) -> StallCheck {
        StallCheck { after, report: Arc::new(report) }
    }
}

impl fmt::Debug for StallCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StallCheck").field("after", &self.after).finish_non_exhaustive()
    }
}

/// The reports of one wait: the first after the time of the check, and others in that interval.
#[derive(Debug)]
pub(crate) struct StallWatch<'a> {
    check: Option<&'a StallCheck>,
    /// How long the wait has lasted at the next report.
    next: Duration,
}

impl<'a> StallWatch<'a> {
    pub(crate) fn new(check: Option<&'a StallCheck>) -> StallWatch<'a> {
        StallWatch { check, next: check.map_or(Duration::MAX, |check| check.after) }
    }

    /// Notes that the operation has moved.
    pub(crate) fn moved(&mut self) {
        *self = StallWatch::new(self.check);
    }

    /// Reports a wait that is long enough. Returns the time until the next report.
    pub(crate) fn waits(
        &mut self,
        since: Duration,
        stall: impl FnOnce(Duration) -> RingStall,
    ) -> Duration {
        if let Some(check) = self.check.filter(|_| since >= self.next) {
            self.next = since.saturating_add(check.after);
            (check.report)(&stall(since));
        }
        self.next.saturating_sub(since)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn stall(since: Duration) -> RingStall {
        let operation = "barrier".to_owned();
        RingStall { number: 3, operation, rank: 1, host: "b".to_owned(), since }
    }

    #[test]
    fn a_wait_is_reported_in_intervals_until_the_operation_moves() {
        let reports: Arc<Mutex<Vec<String>>> = Arc::default();
        let heard = reports.clone();
        let seconds = Duration::from_secs;
        let check = StallCheck::new(seconds(60), move |stall: &RingStall| {
            heard.lock().unwrap().push(stall.to_string());
        });
        let mut watch = StallWatch::new(Some(&check));
        let waits = [(59, 1), (60, 60), (119, 1), (200, 60)];
        for (since, next) in waits {
            assert_eq!(watch.waits(seconds(since), stall), seconds(next), "{since}");
        }
        watch.moved();
        assert_eq!(watch.waits(seconds(0), stall), seconds(60));
        assert_eq!(watch.waits(seconds(60), stall), seconds(60));
        let words =
            |since: u64| format!("operation 3, barrier, waits for rank 1 on b since {since}s");
        assert_eq!(*reports.lock().unwrap(), [60, 200, 60].map(words));
    }

    #[test]
    fn without_a_check_nothing_is_reported() {
        let mut watch = StallWatch::new(None);
        let never = |_| panic!("a report");
        assert!(watch.waits(Duration::from_secs(1 << 40), never) > Duration::from_secs(1 << 40));
    }
}
