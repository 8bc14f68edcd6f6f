//! Events: what a server reports to its operator, in addition to the counters in
//! [`crate::Metrics`].

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{ShardId, VariableId};

/// Something that the operator of a server must know.
///
/// Events are rare. Each is also counted in [`crate::Metrics`]. Its text is one sentence that names
/// the source and the cause. See [`crate::PsConfig::on_event`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A shard cannot get the memory that a push needs, because a table or an index must grow. This
    /// push and all later ones wait; the shard retries every second. Reported when the wait begins,
    /// and whenever the cause changes.
    GrowthFailed {
        /// The shard.
        shard: ShardId,
        /// The file and the error of the operating system, or the memory limit that is reached.
        cause: String,
    },
    /// A shard got the memory that it waited for, and resumes.
    GrowthResumed {
        /// The shard.
        shard: ShardId,
        /// The length of the wait.
        waited: Duration,
    },
    /// A checkpoint save failed, automatic or requested. Earlier checkpoints are unaffected.
    SaveFailed {
        /// The cause.
        cause: String,
        /// The number of saves in a row that have failed, including this one.
        in_a_row: u64,
        /// The time since this process last saved a checkpoint; `None` if it never has.
        since_success: Option<Duration>,
    },
    /// A checkpoint was saved after failed saves.
    SavesResumed {
        /// The checkpoint.
        checkpoint: String,
        /// The number of saves in a row that had failed.
        failed: u64,
    },
    /// A checkpoint was saved, but older ones that are no longer retained could not be deleted.
    RetentionFailed {
        /// The checkpoint that was saved.
        checkpoint: String,
        /// The cause.
        cause: String,
    },
    /// A damaged checkpoint was skipped. Reported by the search for the newest sound checkpoint,
    /// for each damaged one that is newer.
    CheckpointPassedOver {
        /// The damaged checkpoint.
        checkpoint: String,
        /// The damage.
        cause: String,
        /// The checkpoint that is used instead; `None` if none is sound.
        taken: Option<String>,
    },
    /// The chief has declared variables, and their placement leaves one ps task with much more than
    /// the others. Reported by the step owner; see
    /// [`TaskLoads::is_skewed`](pushpull_common::placement::TaskLoads::is_skewed) for the bounds.
    SkewedPlacement {
        /// The index of the fullest ps task.
        task: u32,
        /// Its bytes, without optimizer slots.
        bytes: u64,
        /// The mean of all ps tasks.
        mean: u64,
        /// The variable with the most bytes on the task.
        variable: String,
        /// The bytes of that variable on the task.
        variable_bytes: u64,
    },
    /// A shard has had no connection to the step owner for a lease, in synchronous mode. It takes
    /// part in no step meanwhile, and keeps reconnecting.
    OwnerLost {
        /// The shard.
        shard: ShardId,
        /// The cause.
        cause: String,
    },
    /// A shard has reconnected to the step owner after [`Event::OwnerLost`].
    OwnerFound {
        /// The shard.
        shard: ShardId,
        /// The time without a connection.
        away: Duration,
    },
}

impl Event {
    /// Returns [`Event::SkewedPlacement`] if the variables of a catalogue are uneven on these ps
    /// tasks, ascending.
    pub(crate) fn skewed_placement(catalogue: &Catalogue, tasks: &[u32]) -> Option<Event> {
        let loads = catalogue.task_loads(tasks);
        let (task, bytes) = loads.fullest().filter(|_| loads.is_skewed())?;
        let of_variable = |variable| {
            let here = catalogue.partitions_of(variable).iter().filter(|p| p.shard.task == task);
            here.map(|partition| catalogue.stored_bytes(partition)).sum::<u64>()
        };
        let variables = (0..catalogue.variables().len() as u32).map(VariableId);
        let largest = variables.max_by_key(|&variable| of_variable(variable))?;
        Some(Event::SkewedPlacement {
            task,
            bytes,
            mean: loads.mean(),
            variable: catalogue.variable(largest).name().to_owned(),
            variable_bytes: of_variable(largest),
        })
    }

    /// Returns a short name of the kind, for counting and filtering, such as `save-failed`.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::GrowthFailed { .. } => "growth-failed",
            Event::GrowthResumed { .. } => "growth-resumed",
            Event::SaveFailed { .. } => "save-failed",
            Event::SavesResumed { .. } => "saves-resumed",
            Event::RetentionFailed { .. } => "retention-failed",
            Event::CheckpointPassedOver { .. } => "checkpoint-passed-over",
            Event::SkewedPlacement { .. } => "skewed-placement",
            Event::OwnerLost { .. } => "owner-lost",
            Event::OwnerFound { .. } => "owner-found",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::GrowthFailed { shard, cause } => {
                write!(f, "{shard} cannot grow, and its pushes wait: {cause}")
            }
            Event::GrowthResumed { shard, waited } => {
                write!(f, "{shard} has grown after {} s and resumes", waited.as_secs())
            }
            Event::SaveFailed { cause, in_a_row, since_success } => {
                write!(f, "cannot save a checkpoint: {cause} (failure {in_a_row} in a row, ")?;
                match since_success {
                    Some(since) => write!(f, "the last was saved {} s ago)", since.as_secs()),
                    None => write!(f, "none was saved since the start)"),
                }
            }
            Event::SavesResumed { checkpoint, failed } => {
                write!(f, "saved {checkpoint} after {failed} failed saves")
            }
            Event::RetentionFailed { checkpoint, cause } => {
                write!(f, "saved {checkpoint}, but cannot delete older checkpoints: {cause}")
            }
            Event::CheckpointPassedOver { checkpoint, cause, taken } => {
                write!(f, "skipped the damaged checkpoint {checkpoint}: {cause}; ")?;
                match taken {
                    Some(taken) => write!(f, "used {taken}"),
                    None => write!(f, "no checkpoint is sound"),
                }
            }
            Event::SkewedPlacement { task, bytes, mean, variable, variable_bytes } => write!(
                f,
                "the placement is uneven: ps task {task} holds {bytes} bytes, the mean is {mean}; \
                 {variable_bytes} of them are of {variable:?}: place by PlacementStrategy::Balanced, \
                 or cut it by a partitioner"
            ),
            Event::OwnerLost { shard, cause } => {
                write!(f, "{shard} has lost its connection to the step owner: {cause}")
            }
            Event::OwnerFound { shard, away } => {
                let away = away.as_millis();
                write!(f, "{shard} is connected to the step owner again, after {away} ms")
            }
        }
    }
}

/// The function that is called with each event.
type Callback = dyn Fn(&Event) + Send + Sync;

/// The receiver of events, if one is configured.
#[derive(Clone, Default)]
pub(crate) struct EventSink(Option<Arc<Callback>>);

impl EventSink {
    /// Creates a sink that calls this function.
    pub(crate) fn new(callback: impl Fn(&Event) + Send + Sync + 'static) -> EventSink {
        EventSink(Some(Arc::new(callback)))
    }

    pub(crate) fn emit(&self, event: &Event) {
        if let Some(callback) = &self.0 {
            // The function may panic, for example when it prints to a closed stderr. That must not
            // end a shard.
            let _ = catch_unwind(AssertUnwindSafe(|| callback(event)));
        }
    }
}

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "EventSink(..)" } else { "EventSink" })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn an_event_is_one_line_that_names_source_and_cause() {
        let shard = ShardId { task: 3, shard: 1 };
        let cause = "the disk is full".to_owned();
        let (checkpoint, taken) = ("ckpt-1-2".to_owned(), Some("ckpt-1-1".to_owned()));
        let lost = shard.to_string();
        let events = [
            (Event::GrowthFailed { shard, cause: cause.clone() }, &*lost),
            (
                Event::SaveFailed { cause: cause.clone(), in_a_row: 2, since_success: None },
                "failure 2 in a row",
            ),
            (
                Event::RetentionFailed { checkpoint: checkpoint.clone(), cause: cause.clone() },
                "ckpt-1-2",
            ),
            (Event::CheckpointPassedOver { checkpoint, cause: cause.clone(), taken }, "ckpt-1-2"),
            (
                Event::SkewedPlacement {
                    task: 3,
                    bytes: 300,
                    mean: 100,
                    variable: cause.clone(),
                    variable_bytes: 200,
                },
                "ps task 3 holds 300 bytes, the mean is 100; 200 of them",
            ),
            (Event::OwnerLost { shard, cause }, &*lost),
        ];
        for (event, named) in events {
            let text = event.to_string();
            assert!(text.contains("the disk is full") && text.contains(named), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn a_panicking_callback_is_contained() {
        let kinds = Arc::new(Mutex::new(Vec::new()));
        let received = kinds.clone();
        let sink = EventSink::new(move |event| {
            received.lock().expect("no panic holds the lock").push(event.kind());
            panic!("stderr is closed");
        });
        let waited = Duration::from_secs(1);
        let event = Event::GrowthResumed { shard: ShardId::default(), waited };
        sink.emit(&event);
        sink.emit(&event);
        assert_eq!(*kinds.lock().unwrap(), ["growth-resumed"; 2]);
        EventSink::default().emit(&event);
    }
}
