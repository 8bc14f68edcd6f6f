//! What has changed, committed: the words that the shard's tables make, staged where they differ.
//!
//! The words are a function of the shard's tables. After each input those that differ are
//! committed in one transaction, before anything that was answered leaves the shard. So nothing is
//! promised that is not kept, and no place in the shard has to say what it changed but the tables
//! themselves: which clients have, and which entries of their windows.

use pushpull_common::protocol::limits::TOKENS_PER_CLIENT_MAX;
use smallvec::SmallVec;

use super::durable::GROWTH;
use super::record::{self, CLIENT_WORDS, ShardRecord, Stage};
use super::replicas::ClientKey;
use super::{Shard, Variables};
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_owner::{Issued, StepOwner};
use crate::commit::{Address, CELL_WORDS};
use crate::error::StorageError;
use crate::inbox::{Inbox, map_words};

impl Shard {
    /// Makes sure that a client that is not known yet would have its words.
    pub(super) fn reserve_client(&mut self) -> Result<(), StorageError> {
        let cells = 1 + self.replicas.counts().0 + 1;
        if cells * CELL_WORDS > self.journal.control_words() {
            self.journal.grow_control((cells + GROWTH) * CELL_WORDS)?;
        }
        Ok(())
    }

    /// Commits what has changed, whole. Whatever is answered after it is true for good.
    pub(super) fn persist(&mut self) {
        self.stage_shard();
        let mut changed = std::mem::take(&mut self.changed);
        self.replicas.append_changed(&mut changed);
        if let Some(owner) = &mut self.owner {
            owner.append_changed(&mut changed);
        }
        changed.sort_unstable();
        changed.dedup();
        // Who has lost its tokens comes before who was given others in their place: should only
        // the first of several transactions be made, no more tokens are out than were ever allowed.
        changed.sort_by_key(|&client| self.tokens_of(client).count());
        for &client in &changed {
            // Losing very many members at once takes more than one transaction; each is true.
            if self.journal.push_slot() < CLIENT_WORDS {
                let made = self.journal.commit();
                self.count_commit(made);
            }
            self.stage_client(client);
        }
        changed.clear();
        self.changed = changed;
        let made = self.journal.commit();
        self.count_commit(made);
        let counts = self.counts();
        if let Variables::Declared(store) | Variables::Ready(store) = &mut self.variables {
            store.committed(counts);
        }
    }

    pub(super) fn record(&self) -> ShardRecord {
        let mut record = ShardRecord {
            version: self.version,
            gradients: self.gradients,
            steps: self.owner.as_ref().map(StepOwner::steps).unwrap_or_default(),
            newest_epoch: self.replicas.newest_epoch(),
            chief: self.chief,
            chief_client: self.chief_client,
            stage: match &self.variables {
                Variables::Absent => Stage::Absent,
                Variables::Declared(_) => Stage::Declared,
                Variables::Ready(_) => Stage::Ready,
            },
            generation: self.generation,
            clients: self.replicas.counts().0,
            push_slots: self.inbox.as_ref().map_or(0, Inbox::push_slots),
            lives: self.lives,
            restore_epoch: self.epoch,
            restored_step: self.restored_step,
            applied: self.follower.as_ref().map_or(0, StepFollower::step),
            ..ShardRecord::default()
        };
        if let Some(coordinator) = self.coordinator() {
            (record.goal, record.applying) = (coordinator.goal(), coordinator.is_applying());
        }
        if let Variables::Declared(store) | Variables::Ready(store) = &self.variables {
            let geometry = store.geometry();
            record.block_bytes = geometry.block_bytes;
            record.pinned = geometry.pinned;
            record.slots = geometry.slots;
            record.integrity = store.has_integrity();
            record.digest = store.catalogue().digest();
        }
        record
    }

    fn stage_shard(&mut self) {
        for (index, value) in self.record().encode().into_iter().enumerate() {
            self.journal.stage(Address::Control(index), value);
        }
        if let (Variables::Declared(store) | Variables::Ready(store), Some(inbox)) =
            (&self.variables, &self.inbox)
        {
            let first = store.geometry().table_words() + map_words(store.layout());
            inbox.stage(&mut self.journal, store.layout(), first, store.has_integrity());
            if let Some(coordinator) = self.owner.as_ref().and_then(StepOwner::coordinator) {
                let first = first + Inbox::table_words(store.layout(), inbox.push_slots());
                let words = record::encode_admitted(coordinator.admitted(), inbox.push_slots());
                for (index, value) in words.enumerate() {
                    self.journal.stage(Address::Tables(first + index), value);
                }
            }
        }
        if let Variables::Declared(store) | Variables::Ready(store) = &self.variables {
            // What a checkpoint was made of is known to the tables from then on.
            store.tables().iter().for_each(|table| table.stage_head(&mut self.journal));
        }
        self.stage_assigned();
    }

    /// The partitions that were given values before there were initial ones.
    fn stage_assigned(&mut self) {
        let Variables::Declared(store) = &self.variables else { return };
        let (layout, first) = (store.layout(), store.geometry().table_words());
        let mut map = vec![0_u64; map_words(layout)];
        for (index, partition) in layout.partitions().iter().enumerate() {
            if self.assigned.contains(&partition.id) {
                map[index / 64] |= 1 << (index % 64);
            }
        }
        for (index, bits) in map.into_iter().enumerate() {
            self.journal.stage(Address::Tables(first + index), bits);
        }
    }

    fn tokens_of(&self, client: ClientKey) -> impl Iterator<Item = Issued> {
        self.owner.iter().flat_map(move |owner| owner.tokens_of(client))
    }

    /// Asserts that the arena has every word of a window that is taken for saved.
    #[cfg(any(test, fuzzing))]
    pub(super) fn check_windows_are_saved(&self) {
        for key in self.replicas.keys() {
            let first = record::first_of_window(key.0 as usize);
            self.replicas.client(key).window.saved(|word, value| {
                let found = self.journal.load(Address::Control(first + word));
                assert_eq!(found, value, "word {word} of the window of {key:?}");
            });
        }
    }

    fn stage_client(&mut self, key: ClientKey) {
        let bounded_staleness = self.owner.as_ref().and_then(StepOwner::bounded_staleness);
        let progress = bounded_staleness
            .map(|bounded_staleness| bounded_staleness.of(key))
            .unwrap_or_default();
        let tokens: SmallVec<[Issued; TOKENS_PER_CLIENT_MAX]> =
            self.tokens_of(key).take(TOKENS_PER_CLIENT_MAX).collect();
        let first = record::first_of_client(key.0 as usize);
        let (client, journal) = (self.replicas.client_to_save(key), &mut self.journal);
        record::save_client(client, &tokens, progress, |word, value| {
            journal.stage(Address::Control(first + word), value);
        });
    }
}
