//! Commits the changes of a shard: stages every durable word that differs, and commits once per
//! input.
//!
//! The durable words are a function of the shard's state. After each input, the words that differ
//! are committed in one transaction, before any answer leaves the shard. So everything that an
//! answer promises is durable, and no code has to track its changes. The exceptions are clients and
//! the entries of their push windows, which are tracked.

use pushpull_common::protocol::limits::TOKENS_PER_CLIENT_MAX;
use pushpull_store::commit::{Address, CELL_WORDS};
use smallvec::SmallVec;

use super::intake::Intake;
use super::peers::Peers;
use super::record::{CLIENT_WORDS, ShardRecord, ShardStage};
use super::shard_files::{GROWTH, ShardFiles};
use super::steps::Steps;
use super::variables::Variables;
use super::{Shard, VariablesState, record};
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::aggregate::token_ledger::Issued;
use crate::client_key::ClientKey;
use crate::error::StorageError;
use crate::inbox::{Inbox, map_words};

impl Shard {
    /// Commits all changes in one transaction. Answers sent after it are durable.
    pub(super) fn persist(&mut self) {
        self.files.stage_shard(&self.variables, &self.peers, &self.intake, &self.steps);
        let mut changed = Vec::new();
        self.peers.registry.append_changed(&mut changed);
        if let Some(owner) = &mut self.steps.owner {
            owner.append_changed(&mut changed);
        }
        changed.sort_unstable();
        changed.dedup();
        // Clients that lost tokens precede clients that received tokens. If only the first of
        // several transactions is committed, no more tokens are granted than ever were before.
        changed.sort_by_key(|&client| self.steps.tokens_of(client).count());
        for client in changed {
            // Losing very many members at once takes several transactions. The state after each is
            // consistent.
            if self.files.journal.free_words() < CLIENT_WORDS {
                let made = self.files.journal.commit();
                self.count_commit(made);
            }
            self.files.stage_client(&mut self.peers, &self.steps, client);
        }
        let made = self.files.journal.commit();
        self.count_commit(made);
        let counts = self.variables.counts(&self.steps);
        if let VariablesState::Declared(store) | VariablesState::Ready(store) =
            &mut self.variables.state
        {
            store.committed(counts);
        }
    }
}

impl ShardFiles {
    /// Ensures that the control file has a cell for one more client.
    pub(super) fn reserve_client(&mut self, peers: &Peers) -> Result<(), StorageError> {
        let cells = 1 + peers.registry.counts().0 + 1;
        if cells * CELL_WORDS > self.journal.control_words() {
            self.journal.grow_control((cells + GROWTH) * CELL_WORDS)?;
        }
        Ok(())
    }

    /// Asserts that the arena has every window word that is marked as saved.
    #[cfg(any(test, fuzzing))]
    pub(super) fn check_windows_are_saved(&self, peers: &Peers) {
        for key in peers.registry.keys() {
            let first = record::first_of_window(key.0 as usize);
            peers.registry.client(key).window.saved(|word, value| {
                let found = self.journal.load(Address::Control(first + word));
                assert_eq!(found, value, "word {word} of the window of {key:?}");
            });
        }
    }

    /// Stages the set of partitions that were assigned before the initialization.
    pub(super) fn stage_assigned(&mut self, variables: &Variables) {
        let VariablesState::Declared(store) = &variables.state else { return };
        let (layout, first) = (store.layout(), store.geometry().table_words());
        let mut map = vec![0_u64; map_words(layout)];
        for (index, partition) in layout.partitions().iter().enumerate() {
            if variables.assigned.contains(&partition.id) {
                map[index / 64] |= 1 << (index % 64);
            }
        }
        for (index, bits) in map.into_iter().enumerate() {
            self.journal.stage(Address::Tables(first + index), bits);
        }
    }

    pub(super) fn stage_client(&mut self, peers: &mut Peers, steps: &Steps, key: ClientKey) {
        let bounded_staleness =
            steps.asynchronous_tokens().and_then(AsynchronousTokens::bounded_staleness);
        let progress = bounded_staleness
            .map(|bounded_staleness| bounded_staleness.of(key))
            .unwrap_or_default();
        let tokens: SmallVec<[Issued; TOKENS_PER_CLIENT_MAX]> =
            steps.tokens_of(key).take(TOKENS_PER_CLIENT_MAX).collect();
        let first = record::first_of_client(key.0 as usize);
        let (client, journal) = (peers.registry.client_to_save(key), &mut self.journal);
        record::save_client(client, &tokens, progress, |word, value| {
            journal.stage(Address::Control(first + word), value);
        });
    }

    pub(super) fn record(
        &self,
        variables: &Variables,
        peers: &Peers,
        intake: &Intake,
        steps: &Steps,
    ) -> ShardRecord {
        let mut record = ShardRecord {
            version: variables.version,
            gradients: variables.gradients,
            steps: steps.owner.as_ref().map(TokenIssuer::steps).unwrap_or_default(),
            newest_epoch: peers.registry.newest_epoch(),
            chief: peers.chief.epoch,
            chief_client: peers.chief.client,
            stage: match &variables.state {
                VariablesState::Absent => ShardStage::Absent,
                VariablesState::Declared(_) => ShardStage::Declared,
                VariablesState::Ready(_) => ShardStage::Ready,
            },
            generation: self.generation,
            clients: peers.registry.counts().0,
            push_slots: intake.inbox.as_ref().map_or(0, Inbox::push_slots),
            lives: self.lives,
            restore_epoch: variables.epoch,
            restored_step: variables.restored_step,
            applied: steps.follower.as_ref().map_or(0, StepFollower::step),
            ..ShardRecord::default()
        };
        if let Some(coordinator) = steps.coordinator() {
            (record.goal, record.applying) = (coordinator.goal(), coordinator.is_applying());
        }
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &variables.state {
            let geometry = store.geometry();
            record.block_bytes = geometry.block_bytes;
            record.pinned = geometry.pinned;
            record.slots = geometry.slots;
            record.integrity = store.has_integrity();
            record.digest = store.catalogue().digest();
        }
        record
    }

    pub(super) fn stage_shard(
        &mut self,
        variables: &Variables,
        peers: &Peers,
        intake: &Intake,
        steps: &Steps,
    ) {
        for (index, value) in
            self.record(variables, peers, intake, steps).encode().into_iter().enumerate()
        {
            self.journal.stage(Address::Control(index), value);
        }
        if let (VariablesState::Declared(store) | VariablesState::Ready(store), Some(inbox)) =
            (&variables.state, &intake.inbox)
        {
            let first = store.geometry().table_words() + map_words(store.layout());
            inbox.stage(&mut self.journal, store.layout(), first, store.has_integrity());
            if let Some(coordinator) = steps.owner.as_ref().and_then(TokenIssuer::coordinator) {
                let first = first + Inbox::table_words(store.layout(), inbox.push_slots());
                let words = record::encode_admitted(coordinator.admitted(), inbox.push_slots());
                for (index, value) in words.enumerate() {
                    self.journal.stage(Address::Tables(first + index), value);
                }
            }
        }
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &variables.state {
            // A checkpoint cut changes the headers of tables.
            store.tables().iter().for_each(|table| table.stage_head(&mut self.journal));
        }
        self.stage_assigned(variables);
    }
}
