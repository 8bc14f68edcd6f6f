//! [`ProgressHook`]: reports the failures of a session to the function of
//! [`WorkerConfig::on_progress`].

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::error::Chain;
use pushpull_common::ids::ShardId;
use pushpull_worker::internal::{ProgressCallback, contained};
use pushpull_worker::{Error, UnresponsiveShard, UnresponsiveShards, WorkerConfig};

use super::hook::{Flow, Hook, HookError, RetryReport};

/// Reports each failure from which a session tries to recover: a session that waits between two
/// attempts has no operation that could report.
pub(super) struct ProgressHook {
    progress: ProgressCallback,
    cluster: ClusterSpec,
    /// The save that has failed last, until its next attempt is announced: a final one is tried again
    /// at once, and is one failure.
    failed_save: Option<Error>,
}

impl ProgressHook {
    /// Returns the hook of a worker that has such a function.
    pub(super) fn of(config: &WorkerConfig) -> Option<Box<dyn Hook>> {
        let progress = config.progress.clone()?;
        let cluster = config.cluster.clone();
        Some(Box::new(ProgressHook { progress, cluster, failed_save: None }))
    }

    /// Returns the shards that an error is about, the step owner if it names none.
    fn shards(&self, error: &Error) -> UnresponsiveShards {
        let (shard, last) = match error {
            Error::Timeout { awaited, .. } if !awaited.0.is_empty() => return awaited.clone(),
            Error::Refused { doing, shard, refusal } => {
                (Some(*shard), format!("refuses to {doing}: {refusal}"))
            }
            Error::StateLost { shard } => (Some(*shard), Chain(error).to_string()),
            _ => (None, Chain(error).to_string()),
        };
        let owner = self.cluster.step_owner().map_or(0, |owner| owner.index);
        let shard = shard.unwrap_or(ShardId { task: owner, shard: 0 });
        let address = self.cluster.ps_tasks().find(|&(task, _)| task == shard.task);
        let address = address.map(|(_, address)| address.to_owned()).unwrap_or_default();
        UnresponsiveShards(vec![UnresponsiveShard::new(shard, address, last)])
    }

    /// Calls the function. A panic in it becomes the error of a report on the session's thread.
    fn report(&self, error: &Error) -> Result<Flow, HookError> {
        contained("on_progress", || (self.progress)(&self.shards(error)))?;
        Ok(Flow::Continue)
    }
}

impl Hook for ProgressHook {
    fn name(&self) -> &str {
        "on_progress"
    }

    fn retrying(&mut self, retry: &RetryReport) -> Result<Flow, HookError> {
        match self.failed_save.take().is_some_and(|reported| reported == retry.cause) {
            true => Ok(Flow::Continue),
            false => self.report(&retry.cause),
        }
    }

    fn save_failed(&mut self, error: &Error) -> Result<Flow, HookError> {
        self.failed_save = Some(error.clone());
        self.report(error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use pushpull_common::ids::TaskId;

    use super::*;
    use crate::lifecycle::tests::{Script, busy, saving};
    use crate::training_error::TrainingError;

    #[test]
    fn a_panic_of_the_function_is_named_as_in_a_report_of_the_session() {
        let cluster = "ps=127.0.0.1:1;worker=127.0.0.1:2".parse().unwrap();
        let config = WorkerConfig::new(cluster, TaskId::worker(0));
        let config = config.on_progress(Duration::from_secs(1), |_| panic!("a bug"));
        let mut script = Script { last_step: 3, ..Script::default() };
        script.faults = vec![("token", 2, Error::StateLost { shard: SHARD })];
        let ended = script.play(ProgressHook::of(&config).into_iter().collect()).ended;
        let Err(TrainingError::Worker(Error::Panicked { callback, message })) = ended else {
            panic!("{ended:?}")
        };
        assert_eq!((callback, message.as_str()), ("on_progress", "a bug"));
    }

    /// The second save is due again after its interval, the fourth is the final one.
    #[test]
    fn each_failed_save_is_reported_once() {
        let cluster = "ps=127.0.0.1:1;worker=127.0.0.1:2".parse().unwrap();
        let reports = Arc::new(AtomicUsize::new(0));
        let counted = reports.clone();
        let config = WorkerConfig::new(cluster, TaskId::worker(0));
        let config = config.on_progress(Duration::from_secs(1), move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let mut script = saving(2, 5);
        script.faults = vec![("save", 2, busy()), ("save", 4, busy())];
        let played = script.play(ProgressHook::of(&config).into_iter().collect());
        assert!(played.ended.is_ok(), "{:?}", played.ended);
        assert_eq!(reports.load(Ordering::Relaxed), 2);
    }

    const SHARD: ShardId = ShardId { task: 0, shard: 0 };
}
