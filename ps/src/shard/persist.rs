//! Commits the changes of a shard: stages every durable word that differs, and commits once per
//! input.
//!
//! The durable words are a function of the shard's state. After each input, the words that differ
//! are committed in one transaction, before any answer leaves the shard. So everything that an
//! answer promises is durable, and no code has to track its changes. The exceptions are clients and
//! the entries of their push windows, which are tracked.

use pushpull_common::protocol::limits::TOKENS_PER_CLIENT_MAX;
use smallvec::SmallVec;

use super::client_registry::ClientKey;
use super::record::{self, CLIENT_WORDS, ShardRecord, ShardStage};
use super::shard_files::GROWTH;
use super::{Shard, VariablesState};
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_owner::{Issued, StepOwner};
use crate::commit::{Address, CELL_WORDS};
use crate::error::StorageError;
use crate::inbox::{Inbox, map_words};

impl Shard {
    /// Ensures that the control file has a cell for one more client.
    pub(super) fn reserve_client(&mut self) -> Result<(), StorageError> {
        let cells = 1 + self.peers.registry.counts().0 + 1;
        if cells * CELL_WORDS > self.files.journal.control_words() {
            self.files.journal.grow_control((cells + GROWTH) * CELL_WORDS)?;
        }
        Ok(())
    }

    /// Commits all changes in one transaction. Answers sent after it are durable.
    pub(super) fn persist(&mut self) {
        self.stage_shard();
        let mut changed = std::mem::take(&mut self.files.changed);
        self.peers.registry.append_changed(&mut changed);
        if let Some(owner) = &mut self.steps.owner {
            owner.append_changed(&mut changed);
        }
        changed.sort_unstable();
        changed.dedup();
        // Clients that lost tokens precede clients that received tokens. If only the first of
        // several transactions is committed, no more tokens are granted than ever were before.
        changed.sort_by_key(|&client| self.steps.tokens_of(client).count());
        for &client in &changed {
            // Losing very many members at once takes several transactions. The state after each is
            // consistent.
            if self.files.journal.free_words() < CLIENT_WORDS {
                let made = self.files.journal.commit();
                self.count_commit(made);
            }
            self.stage_client(client);
        }
        changed.clear();
        self.files.changed = changed;
        let made = self.files.journal.commit();
        self.count_commit(made);
        let counts = self.counts();
        if let VariablesState::Declared(store) | VariablesState::Ready(store) =
            &mut self.variables.state
        {
            store.committed(counts);
        }
    }

    pub(super) fn record(&self) -> ShardRecord {
        let mut record = ShardRecord {
            version: self.variables.version,
            gradients: self.variables.gradients,
            steps: self.steps.owner.as_ref().map(StepOwner::steps).unwrap_or_default(),
            newest_epoch: self.peers.registry.newest_epoch(),
            chief: self.peers.chief.epoch,
            chief_client: self.peers.chief.client,
            stage: match &self.variables.state {
                VariablesState::Absent => ShardStage::Absent,
                VariablesState::Declared(_) => ShardStage::Declared,
                VariablesState::Ready(_) => ShardStage::Ready,
            },
            generation: self.files.generation,
            clients: self.peers.registry.counts().0,
            push_slots: self.intake.inbox.as_ref().map_or(0, Inbox::push_slots),
            lives: self.files.lives,
            restore_epoch: self.variables.epoch,
            restored_step: self.variables.restored_step,
            applied: self.steps.follower.as_ref().map_or(0, StepFollower::step),
            ..ShardRecord::default()
        };
        if let Some(coordinator) = self.steps.coordinator() {
            (record.goal, record.applying) = (coordinator.goal(), coordinator.is_applying());
        }
        if let VariablesState::Declared(store) | VariablesState::Ready(store) =
            &self.variables.state
        {
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
            self.files.journal.stage(Address::Control(index), value);
        }
        if let (VariablesState::Declared(store) | VariablesState::Ready(store), Some(inbox)) =
            (&self.variables.state, &self.intake.inbox)
        {
            let first = store.geometry().table_words() + map_words(store.layout());
            inbox.stage(&mut self.files.journal, store.layout(), first, store.has_integrity());
            if let Some(coordinator) = self.steps.owner.as_ref().and_then(StepOwner::coordinator) {
                let first = first + Inbox::table_words(store.layout(), inbox.push_slots());
                let words = record::encode_admitted(coordinator.admitted(), inbox.push_slots());
                for (index, value) in words.enumerate() {
                    self.files.journal.stage(Address::Tables(first + index), value);
                }
            }
        }
        if let VariablesState::Declared(store) | VariablesState::Ready(store) =
            &self.variables.state
        {
            // A checkpoint cut changes the headers of tables.
            store.tables().iter().for_each(|table| table.stage_head(&mut self.files.journal));
        }
        self.stage_assigned();
    }

    /// Stages the set of partitions that were assigned before the initialization.
    fn stage_assigned(&mut self) {
        let VariablesState::Declared(store) = &self.variables.state else { return };
        let (layout, first) = (store.layout(), store.geometry().table_words());
        let mut map = vec![0_u64; map_words(layout)];
        for (index, partition) in layout.partitions().iter().enumerate() {
            if self.variables.assigned.contains(&partition.id) {
                map[index / 64] |= 1 << (index % 64);
            }
        }
        for (index, bits) in map.into_iter().enumerate() {
            self.files.journal.stage(Address::Tables(first + index), bits);
        }
    }

    /// Asserts that the arena has every window word that is marked as saved.
    #[cfg(any(test, fuzzing))]
    pub(super) fn check_windows_are_saved(&self) {
        for key in self.peers.registry.keys() {
            let first = record::first_of_window(key.0 as usize);
            self.peers.registry.client(key).window.saved(|word, value| {
                let found = self.files.journal.load(Address::Control(first + word));
                assert_eq!(found, value, "word {word} of the window of {key:?}");
            });
        }
    }

    fn stage_client(&mut self, key: ClientKey) {
        let bounded_staleness = self.steps.owner.as_ref().and_then(StepOwner::bounded_staleness);
        let progress = bounded_staleness
            .map(|bounded_staleness| bounded_staleness.of(key))
            .unwrap_or_default();
        let tokens: SmallVec<[Issued; TOKENS_PER_CLIENT_MAX]> =
            self.steps.tokens_of(key).take(TOKENS_PER_CLIENT_MAX).collect();
        let first = record::first_of_client(key.0 as usize);
        let (client, journal) = (self.peers.registry.client_to_save(key), &mut self.files.journal);
        record::save_client(client, &tokens, progress, |word, value| {
            journal.stage(Address::Control(first + word), value);
        });
    }
}
