//! The metrics of a worker: how its time divides into waiting and computing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::outcome::{Pulled, Push};
use crate::token::Token;

/// What a worker has done since it connected, and where its time went, from
/// [`crate::Worker::metrics`].
///
/// An operation is awaited from its first poll to its end. If several are awaited at once, each
/// counts its own time. [`crate::Worker::push_and_pull`] counts its wait as one of the push.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerMetrics {
    /// Tokens taken.
    pub tokens: u64,
    /// Pulls that brought values: of all variables, of one, or of rows.
    pub pulls: u64,
    /// Pulls whose step had passed: [`Pulled::Stale`].
    pub pulls_stale: u64,
    /// Gradients that count: [`Push::Applied`] or [`Push::Accepted`].
    pub pushes: u64,
    /// Gradients that were stale: [`Push::Stale`].
    pub pushes_stale: u64,
    /// Gradients that were refused because of NaN or infinity, by this worker or by a server.
    pub pushes_non_finite: u64,
    /// Operations that ended with an error.
    pub errors: u64,
    /// Connections to servers that replaced a lost one.
    pub reconnects: u64,
    /// The time in which a token was awaited.
    pub token_time: Duration,
    /// The time in which pulls were awaited.
    pub pull_time: Duration,
    /// The time in which pushes were awaited.
    pub push_time: Duration,
    /// The time between operations, when none was awaited: the computation of gradients, the
    /// reading of samples, and all else that the caller does. Counted from the end of the first
    /// operation.
    pub compute_time: Duration,
}

impl WorkerMetrics {
    /// Returns what two workers have done together, such as those of two joins of one session.
    #[doc(hidden)]
    pub fn plus(self, other: WorkerMetrics) -> WorkerMetrics {
        WorkerMetrics {
            tokens: self.tokens + other.tokens,
            pulls: self.pulls + other.pulls,
            pulls_stale: self.pulls_stale + other.pulls_stale,
            pushes: self.pushes + other.pushes,
            pushes_stale: self.pushes_stale + other.pushes_stale,
            pushes_non_finite: self.pushes_non_finite + other.pushes_non_finite,
            errors: self.errors + other.errors,
            reconnects: self.reconnects + other.reconnects,
            token_time: self.token_time + other.token_time,
            pull_time: self.pull_time + other.pull_time,
            push_time: self.push_time + other.push_time,
            compute_time: self.compute_time + other.compute_time,
        }
    }
}

/// A kind of operation whose time is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimedOperation {
    Token,
    Pull,
    Push,
}

/// Counts the operations of a worker, and their times.
#[derive(Debug, Default)]
pub(crate) struct OperationTimes(Mutex<OperationLog>);

/// The counts so far.
///
/// Invariant: `idle_since` is set while no operation is awaited, after the first.
#[derive(Debug, Default)]
struct OperationLog {
    metrics: WorkerMetrics,
    awaited: usize,
    idle_since: Option<Instant>,
}

impl OperationLog {
    fn begin(&mut self, now: Instant) {
        if let Some(since) = self.idle_since.take() {
            self.metrics.compute_time += now.saturating_duration_since(since);
        }
        self.awaited += 1;
    }

    fn end(&mut self, now: Instant, kind: TimedOperation, began: Instant) {
        *match kind {
            TimedOperation::Token => &mut self.metrics.token_time,
            TimedOperation::Pull => &mut self.metrics.pull_time,
            TimedOperation::Push => &mut self.metrics.push_time,
        } += now.saturating_duration_since(began);
        self.awaited -= 1;
        if self.awaited == 0 {
            self.idle_since = Some(now);
        }
    }

    /// Returns the metrics, with the time since the last operation.
    fn metrics(&self, now: Instant) -> WorkerMetrics {
        let idle = self.idle_since.map(|since| now.saturating_duration_since(since));
        let compute_time = self.metrics.compute_time + idle.unwrap_or_default();
        WorkerMetrics { compute_time, ..self.metrics }
    }
}

impl OperationTimes {
    /// Returns the metrics at this time.
    pub(crate) fn metrics(&self, now: Instant) -> WorkerMetrics {
        self.log().metrics(now)
    }

    /// Returns a timer of an operation that is not awaited yet.
    pub(crate) fn timer(self: &Arc<Self>, kind: TimedOperation) -> OperationTimer {
        OperationTimer { times: self.clone(), kind, began: None }
    }

    /// Changes the counts.
    pub(crate) fn count(&self, count: impl FnOnce(&mut WorkerMetrics)) {
        count(&mut self.log().metrics);
    }

    pub(crate) fn count_token(&self, token: &Result<Option<Token>, Error>) {
        self.count(|metrics| match token {
            Ok(Some(_)) => metrics.tokens += 1,
            Ok(None) => {}
            Err(_) => metrics.errors += 1,
        });
    }

    pub(crate) fn count_pull(&self, pulled: &Result<Pulled, Error>) {
        self.count(|metrics| match pulled {
            Ok(Pulled::Pulled { .. }) => metrics.pulls += 1,
            Ok(Pulled::Stale) => metrics.pulls_stale += 1,
            Err(_) => metrics.errors += 1,
        });
    }

    pub(crate) fn count_push(&self, pushed: &Result<Push, Error>) {
        self.count(|metrics| match pushed {
            Ok(Push::Applied { .. } | Push::Accepted { .. }) => metrics.pushes += 1,
            Ok(Push::Stale { .. }) => metrics.pushes_stale += 1,
            Ok(Push::Withdrawn | Push::Repeated) => {}
            Err(error) => {
                metrics.pushes_non_finite += u64::from(error.is_non_finite());
                metrics.errors += 1;
            }
        });
    }

    fn log(&self) -> MutexGuard<'_, OperationLog> {
        // Counts are valid even if another thread panicked between two of them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts the time of one operation, from [`OperationTimer::start`] until it is dropped.
#[derive(Debug)]
pub(crate) struct OperationTimer {
    times: Arc<OperationTimes>,
    kind: TimedOperation,
    began: Option<Instant>,
}

impl OperationTimer {
    /// Begins to count, at the first call.
    pub(crate) fn start(&mut self) {
        if self.began.is_none() {
            let now = Instant::now();
            self.times.log().begin(now);
            self.began = Some(now);
        }
    }

    /// Begins to count.
    pub(crate) fn started(mut self) -> OperationTimer {
        self.start();
        self
    }

    pub(crate) fn times(&self) -> &OperationTimes {
        &self.times
    }
}

impl Drop for OperationTimer {
    fn drop(&mut self) {
        if let Some(began) = self.began {
            self.times.log().end(Instant::now(), self.kind, began);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_of_the_awaited_operations_or_of_the_caller() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut log = OperationLog::default();
        assert_eq!(log.metrics(at(1000)), WorkerMetrics::default());
        log.begin(at(1000));
        log.end(at(1010), TimedOperation::Token, at(1000));
        log.begin(at(1030));
        // A push and a pull at once.
        log.begin(at(1040));
        log.end(at(1060), TimedOperation::Pull, at(1040));
        log.end(at(1090), TimedOperation::Push, at(1030));
        let millis = Duration::from_millis;
        let expected = WorkerMetrics {
            token_time: millis(10),
            pull_time: millis(20),
            push_time: millis(60),
            compute_time: millis(20 + 5),
            ..WorkerMetrics::default()
        };
        assert_eq!(log.metrics(at(1095)), expected);
        log.begin(at(1100));
        let compute_time = millis(20 + 10);
        assert_eq!(log.metrics(at(2000)), WorkerMetrics { compute_time, ..expected });
    }

    #[test]
    fn a_timer_that_never_started_counts_nothing() {
        let times = Arc::new(OperationTimes::default());
        drop(times.timer(TimedOperation::Pull));
        assert_eq!(times.metrics(Instant::now()), WorkerMetrics::default());
        let mut timer = times.timer(TimedOperation::Push).started();
        timer.start();
        assert_eq!(times.log().awaited, 1);
        drop(timer);
        let log = times.log();
        assert!(log.awaited == 0 && log.idle_since.is_some());
    }
}
