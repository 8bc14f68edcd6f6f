//! Events: what a server tells whoever runs it, beside what it counts in [`crate::Metrics`].

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::ids::ShardId;

/// Something that the person who runs a server must be told.
///
/// Events are rare. Each is counted in [`crate::Metrics`] as well, and its text is one sentence that names the
/// culprit and the cause. See [`crate::PsConfig::on_event`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A shard cannot have the memory that a push needs, because a table or an index must grow. The push and all
    /// behind it wait; the shard tries again every second. Told when it begins, and when the cause changes.
    GrowthFailed {
        /// The shard.
        shard: ShardId,
        /// The file, and what the operating system said; or the cap that is reached.
        cause: String,
    },
    /// A shard has the memory that it has waited for, and goes on.
    GrowthResumed {
        /// The shard.
        shard: ShardId,
        /// How long it has waited.
        waited: Duration,
    },
    /// A checkpoint was not saved, whoever asked for it. Earlier checkpoints are as they were.
    SaveFailed {
        /// Why not.
        cause: String,
        /// How many saves in a row have failed, with this one.
        in_a_row: u64,
        /// How long ago this process has saved one; `None` if it never has.
        since_success: Option<Duration>,
    },
    /// A checkpoint was saved after saves that had failed.
    SavesResumed {
        /// The checkpoint.
        checkpoint: String,
        /// How many saves in a row had failed.
        failed: u64,
    },
    /// A checkpoint was saved, and older ones that need not be kept could not be deleted.
    RetentionFailed {
        /// The checkpoint that was saved.
        checkpoint: String,
        /// Why not.
        cause: String,
    },
    /// A checkpoint is newer than the one that is restored, and is not sound. Told when the newest sound
    /// checkpoint is looked for.
    CheckpointPassedOver {
        /// The checkpoint that is not sound.
        checkpoint: String,
        /// What is wrong with it.
        cause: String,
        /// The checkpoint that is taken in its place; `None` if none is sound.
        taken: Option<String>,
    },
    /// A shard has lost its connection to the step owner, in synchronous mode. It takes part in no step
    /// meanwhile, and tries again all the time.
    OwnerLost {
        /// The shard that has lost it.
        shard: ShardId,
        /// Why.
        cause: String,
    },
    /// A shard is connected to the step owner again.
    OwnerFound {
        /// The shard.
        shard: ShardId,
        /// How long it was not.
        away: Duration,
    },
}

impl Event {
    /// A short name of the kind, for counting and filtering, such as `save-failed`.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::GrowthFailed { .. } => "growth-failed",
            Event::GrowthResumed { .. } => "growth-resumed",
            Event::SaveFailed { .. } => "save-failed",
            Event::SavesResumed { .. } => "saves-resumed",
            Event::RetentionFailed { .. } => "retention-failed",
            Event::CheckpointPassedOver { .. } => "checkpoint-passed-over",
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
                write!(f, "{shard} has grown after {} s, and goes on", waited.as_secs())
            }
            Event::SaveFailed { cause, in_a_row, since_success } => {
                write!(f, "cannot save a checkpoint: {cause} (failure {in_a_row} in a row, ")?;
                match since_success {
                    Some(since) => write!(f, "the last was saved {} s ago)", since.as_secs()),
                    None => write!(f, "none was saved since the start)"),
                }
            }
            Event::SavesResumed { checkpoint, failed } => {
                write!(f, "saved {checkpoint}, after {failed} saves that failed")
            }
            Event::RetentionFailed { checkpoint, cause } => {
                write!(f, "saved {checkpoint}, and cannot delete older checkpoints: {cause}")
            }
            Event::CheckpointPassedOver { checkpoint, cause, taken } => {
                write!(
                    f,
                    "passed over the checkpoint {checkpoint}, which is not sound: {cause}; "
                )?;
                match taken {
                    Some(taken) => write!(f, "took {taken}"),
                    None => write!(f, "no checkpoint is sound"),
                }
            }
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

/// What is called with each event.
type Callback = dyn Fn(&Event) + Send + Sync;

/// Who is told of events.
#[derive(Clone, Default)]
pub(crate) struct EventSink(Option<Arc<Callback>>);

impl EventSink {
    /// This function is told.
    pub(crate) fn new(told: impl Fn(&Event) + Send + Sync + 'static) -> EventSink {
        EventSink(Some(Arc::new(told)))
    }

    pub(crate) fn tell(&self, event: &Event) {
        if let Some(told) = &self.0 {
            // A function that panics, as one does that prints to a closed stderr, must not end a shard.
            let _ = catch_unwind(AssertUnwindSafe(|| told(event)));
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
    fn an_event_is_one_line_that_names_culprit_and_cause() {
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
            (Event::OwnerLost { shard, cause }, &*lost),
        ];
        for (event, named) in events {
            let text = event.to_string();
            assert!(text.contains("the disk is full") && text.contains(named), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn a_function_that_panics_ends_nothing() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let heard = told.clone();
        let sink = EventSink::new(move |event| {
            heard.lock().expect("no panic holds it").push(event.kind());
            panic!("stderr is closed");
        });
        let waited = Duration::from_secs(1);
        let event = Event::GrowthResumed { shard: ShardId::default(), waited };
        sink.tell(&event);
        sink.tell(&event);
        assert_eq!(*told.lock().unwrap(), ["growth-resumed"; 2]);
        EventSink::default().tell(&event);
    }
}
