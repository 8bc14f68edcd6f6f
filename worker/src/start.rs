//! The chief's decision about the states in which it finds the shards.

use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::RESTORE_EPOCHS_AHEAD;
use pushpull_common::protocol::message::{CatalogueState, CheckpointId, Declared};

/// The answer of one shard to a declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeclaredShard {
    pub(crate) shard: ShardId,
    pub(crate) ready: bool,
    pub(crate) epoch: RestoreEpoch,
    /// Whether the variables have been trained; only the step owner reports it.
    pub(crate) trained: bool,
}

impl DeclaredShard {
    pub(crate) fn new(shard: ShardId, declared: &Declared) -> DeclaredShard {
        let Declared { state, restore_epoch: epoch, trained } = *declared;
        DeclaredShard {
            shard,
            ready: matches!(state, CatalogueState::Ready { .. }),
            epoch,
            trained,
        }
    }
}

/// How to give all variables consistent values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum StartDecision {
    /// Restore all shards, including those with values.
    Restore { checkpoint: CheckpointId, epoch: RestoreEpoch },
    /// Initialize these shards.
    Initialize { shards: Vec<ShardId>, epoch: RestoreEpoch },
    /// Some shards hold what others have lost, and there is no checkpoint. `shard` is the first
    /// without.
    Lost { shard: ShardId },
    /// A shard, or the newest checkpoint, has the highest epoch, so no restore can follow.
    NoEpoch { shard: ShardId, epoch: RestoreEpoch },
}

/// Returns the epoch of the shards, if all have values of the same one: their state is kept.
pub(crate) fn common_epoch(declared: &[DeclaredShard]) -> Option<RestoreEpoch> {
    let epoch = declared.first()?.epoch;
    declared.iter().all(|declared| declared.ready && declared.epoch == epoch).then_some(epoch)
}

/// Decides how to continue with shards that do not all have values of one epoch. The step owner is
/// the first of `declared`.
///
/// A chief that dies during a restore leaves shards in two epochs, and the next chief restores all
/// of them under a third. A chief that dies during the initialization has begun with the owner.
/// Then the owner is ready and nothing is trained, and the next chief initializes the rest under
/// the same epoch. In any other mixture a shard has lost what the others still have.
///
/// A new epoch has a higher number than those of all shards, of the checkpoint, and of `named`, the
/// highest in the name of any checkpoint. So shards have values of one number only if these are of
/// one restore, and the checkpoints of an epoch are newer than all before. If every shard and every
/// checkpoint of an epoch is lost, its number is used again. A client tells the two by the state in
/// which it has joined (`Welcome::arena`).
pub(crate) fn decide(
    declared: &[DeclaredShard],
    checkpoint: Option<CheckpointId>,
    named: RestoreEpoch,
) -> StartDecision {
    let epochs = declared.iter().map(|declared| (declared.epoch, declared.shard));
    let of_checkpoint = checkpoint.iter().zip(declared).map(|(it, owner)| (it.epoch, owner.shard));
    let newest = epochs.chain(of_checkpoint).max_by_key(|&(epoch, _)| epoch);
    // A number that the shards would refuse is in no name that a server has made.
    let newest = newest.map(|(epoch, shard)| {
        let is_near = named.0 <= epoch.0.saturating_add(RESTORE_EPOCHS_AHEAD / 2);
        (if is_near { epoch.max(named) } else { epoch }, shard)
    });
    let next = match newest {
        None => RestoreEpoch(1),
        // The highest number is never used, so that another epoch can follow.
        Some((epoch, shard)) => match epoch.0.checked_add(1).filter(|&next| next < u32::MAX) {
            Some(next) => RestoreEpoch(next),
            None => return StartDecision::NoEpoch { shard, epoch },
        },
    };
    let newest = declared.iter().map(|declared| declared.epoch).max();
    if let Some(checkpoint) = checkpoint {
        return StartDecision::Restore { checkpoint, epoch: next };
    }
    let unready = || declared.iter().filter(|declared| !declared.ready);
    let mut ready = declared.iter().filter(|declared| declared.ready);
    let shards = unready().map(|declared| declared.shard).collect();
    let Some(first) = ready.next() else {
        return StartDecision::Initialize { shards, epoch: next };
    };
    let begun = declared.first().is_some_and(|owner| owner.ready && !owner.trained)
        && ready.all(|other| other.epoch == first.epoch)
        && unready().all(|other| other.epoch < first.epoch);
    if begun {
        return StartDecision::Initialize { shards, epoch: first.epoch };
    }
    // If all shards are ready, those of an older epoch have missed a restore.
    let behind = declared.iter().find(|other| Some(other.epoch) != newest);
    let lost = unready().next().or(behind).unwrap_or(first);
    StartDecision::Lost { shard: lost.shard }
}

#[cfg(test)]
mod tests {
    use pushpull_common::ids::GlobalStep;
    use pushpull_common::protocol::wire::Text;

    use super::*;

    /// Shards as in `R2 D0`: ready in epoch 2, declared in epoch 0. The step owner is the first.
    fn declared(text: &str) -> Vec<DeclaredShard> {
        let shards = text.split_whitespace().enumerate().map(|(task, word)| {
            let digest = [0; 32];
            let state = match &word[..1] {
                "R" => CatalogueState::Ready { digest },
                "D" => CatalogueState::Declared { digest },
                _ => CatalogueState::Absent {},
            };
            let shard = ShardId { task: task as u32, shard: 0 };
            let restore_epoch = RestoreEpoch(word[1..].parse().unwrap());
            DeclaredShard::new(shard, &Declared { state, restore_epoch, trained: false })
        });
        shards.collect()
    }

    fn checkpoint(epoch: u32) -> CheckpointId {
        let name = Text::clipped("checkpoint");
        let step = GlobalStep(7);
        CheckpointId { name, epoch: RestoreEpoch(epoch), step }
    }

    /// The decision as text, as in `restore in 3`, `initialize 0 1 in 1`, `lost 1`.
    fn summary(decision: StartDecision) -> String {
        match decision {
            StartDecision::Restore { epoch, .. } => format!("restore in {epoch}"),
            StartDecision::Initialize { shards, epoch } => {
                let tasks: Vec<String> = shards.iter().map(|s| s.task.to_string()).collect();
                format!("initialize {} in {epoch}", tasks.join(" "))
            }
            StartDecision::Lost { shard } => format!("lost {}", shard.task),
            StartDecision::NoEpoch { shard, epoch } => {
                format!("none after {epoch} of {}", shard.task)
            }
        }
    }

    #[test]
    fn only_shards_of_one_epoch_are_kept() {
        for (text, epoch) in [("R1", Some(1)), ("R3 R3", Some(3))] {
            assert_eq!(common_epoch(&declared(text)), epoch.map(RestoreEpoch));
        }
        for text in ["D0", "A0 A0", "R1 D0", "D0 R1", "R1 R2", "D1 D1"] {
            assert_eq!(common_epoch(&declared(text)), None, "{text}");
        }
    }

    #[test]
    fn the_decision_follows_from_the_shards_and_the_checkpoint() {
        // Shards, whether nothing is trained, the epoch of the newest checkpoint; the decision.
        let table: &[(&str, bool, Option<u32>, &str)] = &[
            // A new cluster.
            ("D0", true, None, "initialize 0 in 1"),
            ("D0 D0 D0", true, None, "initialize 0 1 2 in 1"),
            // All have lost their state.
            ("D0 D0", true, Some(1), "restore in 2"),
            ("D0 D0", true, Some(4), "restore in 5"),
            // One has an epoch, and the checkpoint is of an older one.
            ("D6 D0", true, Some(4), "restore in 7"),
            ("D6 D0", true, None, "initialize 0 1 in 7"),
            // A chief has died during the initialization.
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
            // A chief has died during a restore.
            ("R2 R1", false, Some(1), "restore in 3"),
            ("R2 D0", true, Some(1), "restore in 3"),
            ("R2 D1 R1", false, Some(1), "restore in 3"),
            // The same without a checkpoint.
            ("R2 R1", false, None, "lost 1"),
            ("R1 R2", true, None, "lost 0"),
            ("R2 R1 D0", true, None, "lost 2"),
            // No shard has a higher epoch than the ready ones while a chief initializes.
            ("R1 D1", true, None, "lost 1"),
        ];
        for &(text, untrained, epoch, expected) in table {
            let mut declared = declared(text);
            declared.iter_mut().take(1).for_each(|owner| owner.trained = !untrained);
            let named = RestoreEpoch(epoch.unwrap_or(0));
            let done = decide(&declared, epoch.map(checkpoint), named);
            assert_eq!(summary(done), expected, "{text}, untrained: {untrained}, {epoch:?}");
        }
    }

    #[test]
    fn a_new_epoch_is_above_all_that_checkpoints_name() {
        // Shards, the epoch of the newest sound checkpoint, the highest one named; the decision.
        let table = [
            // The checkpoints of epoch 4 are damaged, or none of its saves was finished.
            ("D0 D0", Some(1), 4, "restore in 5"),
            ("D0 D0", None, 4, "initialize 0 1 in 5"),
            ("R6 D0", Some(1), 4, "restore in 7"),
            // No server has made this name.
            ("R6 D0", Some(1), u32::MAX - 1, "restore in 7"),
            // Without a checkpoint, the shard that has lost its state is named as before.
            ("R2 R1", None, 4, "lost 1"),
        ];
        for (text, epoch, named, expected) in table {
            let mut declared = declared(text);
            declared[0].trained = true;
            let decision = decide(&declared, epoch.map(checkpoint), RestoreEpoch(named));
            assert_eq!(summary(decision), expected, "{text}, {epoch:?}, {named}");
        }
    }

    /// A cluster of two shards, and the facts that clients remember of it.
    #[derive(Clone, Default)]
    struct ModelCluster {
        /// For each shard its arena, its epoch, and the restore that its values are of; 0 without.
        shards: [(u64, u32, u32); 2],
        /// The epochs of the checkpoints, and whether each is sound.
        checkpoints: Vec<(u32, bool)>,
        /// Whether the step owner's values are trained: those of a checkpoint are.
        trained: bool,
        /// The arenas and the restores so far.
        arenas: u64,
        restores: u32,
        /// The shard, the arena and the epoch of each restore that values were of.
        seen: Vec<(usize, u64, u32, u32)>,
    }

    impl ModelCluster {
        fn new() -> ModelCluster {
            let mut cluster = ModelCluster::default();
            (0..2).for_each(|shard| cluster.lose(shard));
            cluster
        }

        fn lose(&mut self, shard: usize) {
            self.arenas += 1;
            self.trained &= shard != 0;
            self.shards[shard] = (self.arenas, 0, 0);
        }

        /// A chief decides, and gives the first `count` of the chosen shards values.
        fn start(&mut self, count: usize) {
            let words = self.shards.map(|(_, epoch, restore)| {
                format!("{}{epoch}", if restore == 0 { "D" } else { "R" })
            });
            let mut declared = declared(&words.join(" "));
            declared[0].trained = self.trained;
            if common_epoch(&declared).is_some() {
                return;
            }
            let sound = self.checkpoints.iter().filter(|(_, is_sound)| *is_sound);
            let newest = sound.map(|&(epoch, _)| epoch).max();
            let named = self.checkpoints.iter().map(|&(epoch, _)| epoch).max().unwrap_or(0);
            let chosen = match decide(&declared, newest.map(checkpoint), RestoreEpoch(named)) {
                StartDecision::Restore { epoch, .. } => {
                    self.trained = true;
                    vec![(0, epoch), (1, epoch)]
                }
                StartDecision::Initialize { shards, epoch } => {
                    shards.iter().map(|shard| (shard.task as usize, epoch)).collect()
                }
                StartDecision::Lost { .. } | StartDecision::NoEpoch { .. } => return,
            };
            // A chief that continues the initialization of another one continues its epoch.
            let epoch = chosen[0].1.0;
            let begun = self.shards.iter().find(|shard| shard.1 == epoch).map(|shard| shard.2);
            let restore = begun.unwrap_or(self.restores + 1);
            self.restores = self.restores.max(restore);
            for (shard, epoch) in chosen.into_iter().take(count) {
                assert!(epoch.0 > self.shards[shard].1, "the shard accepts the epoch");
                self.shards[shard].1 = epoch.0;
                self.shards[shard].2 = restore;
                self.seen.push((shard, self.shards[shard].0, epoch.0, restore));
            }
        }

        fn save(&mut self, is_sound: bool) {
            let [(_, epoch, restore), (_, other, of)] = self.shards;
            if restore != 0 && of != 0 && epoch == other {
                self.checkpoints.push((epoch, is_sound));
            }
        }

        fn check(&self) {
            let [(_, epoch, restore), (_, other, of)] = self.shards;
            if restore != 0 && of != 0 && epoch == other {
                assert_eq!(restore, of, "values of two restores pass as one: {:?}", self.shards);
            }
            for a in &self.seen {
                let same = |b: &&(usize, u64, u32, u32)| (b.0, b.1, b.2) == (a.0, a.1, a.2);
                for b in self.seen.iter().filter(same) {
                    assert_eq!(a.3, b.3, "an epoch of one state is of two restores");
                }
            }
        }
    }

    /// Any six losses, starts by chiefs that may die, saves and damages: 8^6 histories.
    #[test]
    fn no_epoch_of_a_state_repeats_whatever_is_lost() {
        let mut histories = 0;
        let mut repeated = 0;
        let mut pending = vec![(ModelCluster::new(), 0)];
        while let Some((cluster, length)) = pending.pop() {
            cluster.check();
            if length == 6 {
                histories += 1;
                let numbers = |a: &(usize, u64, u32, u32)| {
                    cluster.seen.iter().any(|b| (b.0, b.2) == (a.0, a.2) && b.3 != a.3)
                };
                repeated += u32::from(cluster.seen.iter().any(numbers));
                continue;
            }
            for event in 0..8 {
                let mut next = cluster.clone();
                match event {
                    0 | 1 => next.lose(event),
                    2 => (0..2).for_each(|shard| next.lose(shard)),
                    3 | 4 => next.start(event - 2),
                    5 => next.save(true),
                    6 => next.save(false),
                    _ => next.checkpoints.clear(),
                }
                pending.push((next, length + 1));
            }
        }
        assert_eq!(histories, 8_u32.pow(6));
        assert!(repeated > 0, "numbers repeat in no history, so the test shows nothing");
    }

    #[test]
    fn the_highest_epoch_is_reported_with_its_shard() {
        let last = u32::MAX;
        let most = u32::MAX - 1;
        let cases = [
            (format!("D{last}"), None, format!("none after {last} of 0")),
            (format!("D0 R{most}"), Some(3), format!("none after {most} of 1")),
            ("D0 R1".to_owned(), Some(last), format!("none after {last} of 0")),
            (format!("D{} D0", most - 1), None, format!("initialize 0 1 in {most}")),
        ];
        for (text, epoch, expected) in cases {
            assert_eq!(
                summary(decide(&declared(&text), epoch.map(checkpoint), RestoreEpoch(0))),
                expected,
                "{text}"
            );
        }
    }

    #[test]
    fn a_new_epoch_is_above_that_of_every_shard_that_receives_it() {
        let words: Vec<String> =
            (0..3).flat_map(|epoch| ["R", "D"].map(|state| format!("{state}{epoch}"))).collect();
        for (a, b) in words.iter().flat_map(|a| words.iter().map(move |b| (a, b))) {
            for epoch in [None, Some(1), Some(5)] {
                let declared = declared(&format!("{a} {b}"));
                let receivers: Vec<(ShardId, RestoreEpoch)> =
                    match decide(&declared, epoch.map(checkpoint), RestoreEpoch(0)) {
                        StartDecision::Restore { epoch, .. } => {
                            declared.iter().map(|declared| (declared.shard, epoch)).collect()
                        }
                        StartDecision::Initialize { shards, epoch } => {
                            shards.into_iter().map(|shard| (shard, epoch)).collect()
                        }
                        StartDecision::Lost { .. } | StartDecision::NoEpoch { .. } => continue,
                    };
                let old =
                    |shard| declared.iter().find(|declared| declared.shard == shard).unwrap().epoch;
                assert!(receivers.iter().all(|&(shard, epoch)| epoch > old(shard)), "{a} {b}");
                let partial = receivers.len() < declared.len();
                assert!(!partial || declared.iter().any(|f| f.ready), "{a} {b}");
            }
        }
    }
}
