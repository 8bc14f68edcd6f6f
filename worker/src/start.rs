//! How the chief begins: what it makes of the states it finds the shards in.

use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{CatalogueState, CheckpointId, Declared};

/// What one shard has said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) shard: ShardId,
    pub(crate) ready: bool,
    pub(crate) epoch: RestoreEpoch,
    /// Whether something has been made of its values; the step owner says so.
    pub(crate) trained: bool,
}

impl Found {
    pub(crate) fn new(shard: ShardId, declared: &Declared) -> Found {
        let Declared { state, restore_epoch: epoch, trained } = *declared;
        Found { shard, ready: matches!(state, CatalogueState::Ready { .. }), epoch, trained }
    }
}

/// How to give all variables values that belong together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Begin {
    /// Restore all shards, living ones too.
    Restore { checkpoint: CheckpointId, epoch: RestoreEpoch },
    /// Initialize these shards.
    Initialize { shards: Vec<ShardId>, epoch: RestoreEpoch },
    /// Some shards hold what others have lost, and there is no checkpoint: the first that has.
    Lost { shard: ShardId },
    /// A shard, or the checkpoint that the step owner knows, says an epoch after which there is none.
    NoEpoch { shard: ShardId, epoch: RestoreEpoch },
}

/// The epoch in which all shards live, if they do: their state is kept.
pub(crate) fn living(found: &[Found]) -> Option<RestoreEpoch> {
    let epoch = found.first()?.epoch;
    found.iter().all(|found| found.ready && found.epoch == epoch).then_some(epoch)
}

/// What is to be done with shards that do not all live in one epoch; the step owner is the first.
///
/// A chief that dies in the middle of restoring leaves shards in two epochs, and the next one
/// restores them all again under a third. One that dies in the middle of initializing has begun with
/// the owner: that is ready then and nothing is trained, and the rest is initialized as it would have
/// been. Any other mixture is a shard that has lost what the others still have.
pub(crate) fn begin(found: &[Found], checkpoint: Option<CheckpointId>) -> Begin {
    let epochs = found.iter().map(|found| (found.epoch, found.shard));
    let of_checkpoint = checkpoint.iter().zip(found).map(|(it, owner)| (it.epoch, owner.shard));
    let newest = epochs.chain(of_checkpoint).max_by_key(|&(epoch, _)| epoch);
    let next = match newest {
        None => RestoreEpoch(1),
        // No shard begins with the last number there is.
        Some((epoch, shard)) => match epoch.0.checked_add(1).filter(|&next| next < u32::MAX) {
            Some(next) => RestoreEpoch(next),
            None => return Begin::NoEpoch { shard, epoch },
        },
    };
    let newest = newest.map(|(epoch, _)| epoch);
    if let Some(checkpoint) = checkpoint {
        return Begin::Restore { checkpoint, epoch: next };
    }
    let unready = || found.iter().filter(|found| !found.ready);
    let mut ready = found.iter().filter(|found| found.ready);
    let shards = unready().map(|found| found.shard).collect();
    let Some(first) = ready.next() else {
        return Begin::Initialize { shards, epoch: next };
    };
    let begun = found.first().is_some_and(|owner| owner.ready && !owner.trained)
        && ready.all(|other| other.epoch == first.epoch)
        && unready().all(|other| other.epoch < first.epoch);
    if begun {
        return Begin::Initialize { shards, epoch: first.epoch };
    }
    // Where all are ready, what is lost is what those of an older epoch have missed.
    let behind = found.iter().find(|other| Some(other.epoch) != newest);
    let lost = unready().next().or(behind).unwrap_or(first);
    Begin::Lost { shard: lost.shard }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::GlobalStep;
    use pushpull_common::protocol::wire::Text;

    use super::*;

    /// Shards as in `R2 D0`: ready in epoch 2, declared in epoch 0. The owner comes first.
    fn found(text: &str) -> Vec<Found> {
        let shards = text.split_whitespace().enumerate().map(|(task, word)| {
            let digest = [0; 32];
            let state = match &word[..1] {
                "R" => CatalogueState::Ready { digest },
                "D" => CatalogueState::Declared { digest },
                _ => CatalogueState::Absent {},
            };
            let shard = ShardId { task: task as u32, shard: 0 };
            let restore_epoch = RestoreEpoch(word[1..].parse().unwrap());
            Found::new(shard, &Declared { state, restore_epoch, trained: false })
        });
        shards.collect()
    }

    fn checkpoint(epoch: u32) -> CheckpointId {
        let (name, step) = (Text::clipped("checkpoint"), GlobalStep(7));
        CheckpointId { name, epoch: RestoreEpoch(epoch), step }
    }

    /// What is done, as in `restore 3`, `initialize 0 1 in 1`, `lost 1`.
    fn told(begin: Begin) -> String {
        match begin {
            Begin::Restore { epoch, .. } => format!("restore in {epoch}"),
            Begin::Initialize { shards, epoch } => {
                let tasks: Vec<String> = shards.iter().map(|s| s.task.to_string()).collect();
                format!("initialize {} in {epoch}", tasks.join(" "))
            }
            Begin::Lost { shard } => format!("lost {}", shard.task),
            Begin::NoEpoch { shard, epoch } => format!("none after {epoch} of {}", shard.task),
        }
    }

    #[test]
    fn only_shards_that_all_live_in_one_epoch_are_left_alone() {
        for (text, epoch) in [("R1", Some(1)), ("R3 R3", Some(3))] {
            assert_eq!(living(&found(text)), epoch.map(RestoreEpoch));
        }
        for text in ["D0", "A0 A0", "R1 D0", "D0 R1", "R1 R2", "D1 D1"] {
            assert_eq!(living(&found(text)), None, "{text}");
        }
    }

    #[test]
    fn what_is_done_by_what_is_found() {
        // Shards, whether nothing is trained, the epoch of the newest checkpoint; what is done.
        let table: &[(&str, bool, Option<u32>, &str)] = &[
            // A fresh cluster.
            ("D0", true, None, "initialize 0 in 1"),
            ("D0 D0 D0", true, None, "initialize 0 1 2 in 1"),
            // All have lost their state.
            ("D0 D0", true, Some(1), "restore in 2"),
            ("D0 D0", true, Some(4), "restore in 5"),
            // One remembers an epoch, the checkpoint is of an older one.
            ("D6 D0", true, Some(4), "restore in 7"),
            ("D6 D0", true, None, "initialize 0 1 in 7"),
            // A chief has died in the middle of initializing.
            ("R1 D0", true, None, "initialize 1 in 1"),
            ("R1 R1 D0", true, None, "initialize 2 in 1"),
            ("R1 D0 R1", true, None, "initialize 1 in 1"),
            // A shard has lost its state.
            ("R1 D0", false, None, "lost 1"),
            ("D0 R1", true, None, "lost 0"),
            ("D0 R1", false, None, "lost 0"),
            ("R1 D0", false, Some(1), "restore in 2"),
            ("R1 D0", true, Some(1), "restore in 2"),
            ("D0 R1", true, Some(1), "restore in 2"),
            // A chief has died in the middle of restoring.
            ("R2 R1", false, Some(1), "restore in 3"),
            ("R2 D0", true, Some(1), "restore in 3"),
            ("R2 D1 R1", false, Some(1), "restore in 3"),
            // The same, and its checkpoint is gone.
            ("R2 R1", false, None, "lost 1"),
            ("R1 R2", true, None, "lost 0"),
            ("R2 R1 D0", true, None, "lost 2"),
            // No shard has a higher epoch than the ready ones while a chief initializes.
            ("R1 D1", true, None, "lost 1"),
        ];
        for &(text, untrained, epoch, expected) in table {
            let mut found = found(text);
            found.iter_mut().take(1).for_each(|owner| owner.trained = !untrained);
            let done = begin(&found, epoch.map(checkpoint));
            assert_eq!(told(done), expected, "{text}, untrained: {untrained}, {epoch:?}");
        }
    }

    #[test]
    fn an_epoch_after_which_there_is_none_is_named_with_who_says_it() {
        let (last, most) = (u32::MAX, u32::MAX - 1);
        let cases = [
            (format!("D{last}"), None, format!("none after {last} of 0")),
            (format!("D0 R{most}"), Some(3), format!("none after {most} of 1")),
            ("D0 R1".to_owned(), Some(last), format!("none after {last} of 0")),
            (format!("D{} D0", most - 1), None, format!("initialize 0 1 in {most}")),
        ];
        for (text, epoch, expected) in cases {
            assert_eq!(told(begin(&found(&text), epoch.map(checkpoint))), expected, "{text}");
        }
    }

    #[test]
    fn whatever_is_found_the_epoch_that_begins_is_new_to_whom_it_is_told() {
        let words: Vec<String> =
            (0..3).flat_map(|epoch| ["R", "D"].map(|state| format!("{state}{epoch}"))).collect();
        for (a, b) in words.iter().flat_map(|a| words.iter().map(move |b| (a, b))) {
            for epoch in [None, Some(1), Some(5)] {
                let found = found(&format!("{a} {b}"));
                let told: Vec<(ShardId, RestoreEpoch)> = match begin(&found, epoch.map(checkpoint))
                {
                    Begin::Restore { epoch, .. } => {
                        found.iter().map(|found| (found.shard, epoch)).collect()
                    }
                    Begin::Initialize { shards, epoch } => {
                        shards.into_iter().map(|shard| (shard, epoch)).collect()
                    }
                    Begin::Lost { .. } | Begin::NoEpoch { .. } => continue,
                };
                let old = |shard| found.iter().find(|found| found.shard == shard).unwrap().epoch;
                assert!(told.iter().all(|&(shard, epoch)| epoch > old(shard)), "{a} {b}");
                let alone = told.len() < found.len();
                assert!(!alone || found.iter().any(|f| f.ready), "{a} {b}");
            }
        }
    }
}
