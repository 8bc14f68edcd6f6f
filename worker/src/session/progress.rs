//! Reports about the shards and replicas that operations wait for.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::links::SessionLinks;
use crate::error::{UnresponsiveShard, UnresponsiveShards};
use pushpull_common::rounding::rounded;

/// When the next report is due, and the addresses that reports name.
///
/// Invariant: there is at most one report in an interval, and none while no operation waits.
#[derive(Debug)]
pub(super) struct ProgressReports {
    interval: Option<Duration>,
    last: Option<Instant>,
    addresses: BTreeMap<u32, String>,
}

/// A shard that an operation waits for.
#[derive(Debug)]
pub(super) struct AwaitedShard {
    pub(super) link: usize,
    /// What the operation lacks, beyond the state of the link.
    pub(super) detail: Option<String>,
}

impl ProgressReports {
    pub(super) fn new(
        interval: Option<Duration>,
        addresses: BTreeMap<u32, String>,
    ) -> ProgressReports {
        ProgressReports { interval, last: None, addresses }
    }

    /// Returns a report of one shard, whenever the next is due; `None` if nobody wants reports.
    pub(super) fn report_link(
        &self,
        now: Instant,
        index: usize,
        links: &SessionLinks,
    ) -> Option<UnresponsiveShards> {
        self.interval.map(|_| UnresponsiveShards(vec![self.describe(now, index, links)]))
    }

    /// Starts the interval: an operation begins to wait.
    pub(super) fn restart(&mut self, now: Instant) {
        self.last = Some(now);
    }

    /// Returns when a report is due while operations wait.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.last.unwrap_or(now).checked_add(self.interval?)
    }

    /// Returns a report about the shards that hold operations up, if one is due.
    pub(super) fn take_due(
        &mut self,
        now: Instant,
        is_waiting: bool,
        links: &SessionLinks,
    ) -> Option<UnresponsiveShards> {
        let interval = self.interval?;
        if !is_waiting {
            self.last = None;
            return None;
        }
        let since = self.last.map(|last| now.saturating_duration_since(last));
        if since.is_some_and(|since| since < interval) {
            return None;
        }
        self.last = Some(now);
        Some(UnresponsiveShards(self.unresponsive_shards(now, None, links)))
            .filter(|silent| !silent.0.is_empty())
    }

    /// Returns a report of what a token waits for, as the step owner says, and of the shards that
    /// block operations.
    pub(super) fn report_wait(
        &mut self,
        now: Instant,
        owner: usize,
        awaited: &str,
        links: &SessionLinks,
    ) -> UnresponsiveShards {
        self.last = Some(now);
        let mut silent = self.unresponsive_shards(now, Some(owner), links);
        let of_owner = silent.iter_mut().filter(|silent| silent.shard == links[owner].shard);
        of_owner.for_each(|owner| owner.last = format!("{}; {awaited}", owner.last));
        UnresponsiveShards(silent)
    }

    /// Returns what a push waits for that the step owner has not decided in time, as it says. The
    /// owner decides only once every shard has its share, so shards that are cut off come first.
    pub(super) fn undecided(
        &self,
        now: Instant,
        owner: usize,
        awaited: &str,
        links: &SessionLinks,
    ) -> UnresponsiveShards {
        let mut silent = self.unresponsive_shards(now, None, links);
        silent.retain(|silent| silent.shard != links[owner].shard);
        silent.push(UnresponsiveShard {
            last: awaited.to_owned(),
            ..self.describe(now, owner, links)
        });
        UnresponsiveShards(silent)
    }

    /// Describes the shards that an operation waits for. Those that are cut off come first: the
    /// others may wait for them.
    pub(super) fn describe_awaited(
        &self,
        now: Instant,
        mut awaited: Vec<AwaitedShard>,
        links: &SessionLinks,
    ) -> UnresponsiveShards {
        awaited.sort_by_key(|awaited| !links[awaited.link].holds_up(now));
        let describe = |awaited: AwaitedShard| {
            let mut shard = self.describe(now, awaited.link, links);
            if let Some(detail) = awaited.detail {
                shard.last = format!("{}; {detail}", shard.last);
            }
            shard
        };
        UnresponsiveShards(awaited.into_iter().map(describe).collect())
    }

    /// Returns the shards that block operations, and the shard of link `also`.
    fn unresponsive_shards(
        &self,
        now: Instant,
        also: Option<usize>,
        links: &SessionLinks,
    ) -> Vec<UnresponsiveShard> {
        let all = links.iter().enumerate();
        let silent = all.filter(|(index, link)| Some(*index) == also || link.holds_up(now));
        silent.map(|(index, _)| self.describe(now, index, links)).collect()
    }

    /// Returns a shard with its address and the state of its link.
    pub(super) fn describe(
        &self,
        now: Instant,
        index: usize,
        links: &SessionLinks,
    ) -> UnresponsiveShard {
        let link = &links[index];
        let silence = rounded(&now.saturating_duration_since(link.last_received));
        let last = if link.is_up() {
            if awaits_restore(index, links) {
                "connected, has not been restored yet".to_owned()
            } else if link.is_unresponsive(now) {
                format!("connected, and unresponsive: no answer to a heartbeat for {silence:?}")
            } else if !link.blocked_reason.is_empty() {
                format!("connected, waits: {}", link.blocked_reason)
            } else {
                match silence < Duration::from_millis(1) {
                    true => "connected, has not answered yet".to_owned(),
                    false => format!("connected, silent for {silence:?}"),
                }
            }
        } else if link.last_error.is_empty() {
            "not connected yet".to_owned()
        } else {
            link.last_error.clone()
        };
        let address = self.addresses.get(&link.shard.task).cloned().unwrap_or_default();
        UnresponsiveShard { shard: link.shard, address, last }
    }

    /// Returns how long the step owner may at most hold a token request before it answers with a
    /// refusal. In synchronous mode a token waits for other replicas, which only the owner knows,
    /// so the session asks once per interval. In asynchronous mode a repeated request would lose
    /// its place in the queue.
    pub(super) fn token_wait_ms(&self, synchronous: bool) -> u32 {
        match self.interval.filter(|_| synchronous) {
            None => u32::MAX,
            Some(interval) => {
                let report = interval.max(TOKEN_WAIT_MIN).as_millis();
                u32::try_from(report).unwrap_or(u32::MAX)
            }
        }
    }
}

/// Returns whether a shard is in an older restore epoch than others.
fn awaits_restore(index: usize, links: &SessionLinks) -> bool {
    let ready = (0..links.len()).filter(|&link| links[link].ready);
    links.outdated(ready).any(|outdated| outdated == index)
}

/// The shortest wait that is asked of the step owner for a token. The owner checks its waits every
/// 50 ms.
const TOKEN_WAIT_MIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use pushpull_common::ids::ShardId;

    use super::*;

    #[test]
    fn there_is_one_report_in_an_interval_and_none_without_a_wait() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut links = SessionLinks::new(ShardId { task: 0, shard: 0 }, 1);
        links.to(start, ShardId { task: 3, shard: 0 });
        let addresses = [(3, "host3:1".to_owned())].into();
        let mut reports = ProgressReports::new(Some(second), addresses);
        reports.restart(start);
        assert_eq!(reports.wake_at(start), Some(start + second));
        assert!(reports.take_due(start, true, &links).is_none(), "not due");
        let due = reports.take_due(start + second, true, &links).unwrap();
        assert_eq!((due.0.len(), &*due.0[0].address), (1, "host3:1"));
        assert!(reports.take_due(start + second, true, &links).is_none(), "reported already");
        assert!(reports.take_due(start + 2 * second, false, &links).is_none(), "nobody waits");
        assert!(ProgressReports::new(None, BTreeMap::new()).wake_at(start).is_none());
    }

    #[test]
    fn a_synchronous_token_request_is_repeated_for_each_report() {
        let reports = |ms| ProgressReports::new(Some(Duration::from_millis(ms)), BTreeMap::new());
        assert_eq!(reports(5_000).token_wait_ms(true), 5_000);
        assert_eq!(reports(5_000).token_wait_ms(false), u32::MAX, "the deadline is the only limit");
        assert_eq!(reports(1).token_wait_ms(true), 100, "the owner checks every 50 ms");
    }
}
