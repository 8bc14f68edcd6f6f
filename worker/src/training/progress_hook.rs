//! [`ProgressHook`]: reports the failures of a session to the function of
//! [`WorkerConfig::on_progress`].

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::ShardId;

use super::hook::{Flow, Hook, HookError, RetryReport};
use crate::config::{ProgressCallback, WorkerConfig};
use crate::error::{Error, UnresponsiveShard, UnresponsiveShards};
use crate::panic_message::contained;

/// Reports each failure from which a session tries to recover: a session that waits between two
/// attempts has no operation that could report.
pub(super) struct ProgressHook {
    progress: ProgressCallback,
    cluster: ClusterSpec,
}

impl ProgressHook {
    /// Returns the hook of a worker that has such a function.
    pub(super) fn of(config: &WorkerConfig) -> Option<Box<dyn Hook>> {
        let progress = config.progress.clone()?;
        let cluster = config.cluster.clone();
        Some(Box::new(ProgressHook { progress, cluster }))
    }

    /// Returns the shards that an error is about, the step owner if it names none.
    fn shards(&self, error: &Error) -> UnresponsiveShards {
        let (shard, last) = match error {
            Error::Timeout { awaited, .. } if !awaited.0.is_empty() => return awaited.clone(),
            Error::Refused { doing, shard, refusal } => {
                (Some(*shard), format!("refuses to {doing}: {refusal}"))
            }
            Error::StateLost { shard } => (Some(*shard), error.to_string()),
            _ => (None, error.to_string()),
        };
        let owner = self.cluster.step_owner().map_or(0, |owner| owner.index);
        let shard = shard.unwrap_or(ShardId { task: owner, shard: 0 });
        let address = self.cluster.ps_tasks().find(|&(task, _)| task == shard.task);
        let address = address.map(|(_, address)| address.to_owned()).unwrap_or_default();
        UnresponsiveShards(vec![UnresponsiveShard { shard, address, last }])
    }

    /// Calls the function. Its panic has the same error as in a report of the session's thread.
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
        self.report(&retry.cause)
    }

    fn save_failed(&mut self, error: &Error) -> Result<Flow, HookError> {
        self.report(error)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pushpull_common::ids::TaskId;

    use super::*;
    use crate::training::lifecycle::tests::Script;
    use crate::training::training_error::TrainingError;

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

    const SHARD: ShardId = ShardId { task: 0, shard: 0 };
}
