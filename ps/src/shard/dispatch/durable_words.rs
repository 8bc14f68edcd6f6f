//! The durable words: those of the shard, of its clients and of what they do, staged and committed
//! in one transaction.

use pushpull_common::protocol::limits::TOKENS_PER_CLIENT_MAX;
use pushpull_store::commit::{Address, Journal};
use smallvec::SmallVec;

use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::data_position::{DataBatch, DataPosition};
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::aggregate::token_ledger::Issued;
use crate::client_key::ClientKey;
use crate::inbox::{Inbox, map_words};
use crate::shard::Shard;
use crate::shard::shard_files::CLIENTS_AT_ONCE;
use crate::shard::shard_files::client_record::ClientRecord;
use crate::shard::shard_files::coordinator_record::CoordinatorRecord;
use crate::shard::shard_files::data_record::DataRecord;
use crate::shard::shard_files::record::{ShardRecord, ShardStage, encode_admitted};
use crate::shard::values::variables::{Variables, VariablesState};

impl Shard {
    /// Commits all changes in one transaction. Answers sent after it are durable.
    pub(in crate::shard) fn persist(&mut self) {
        self.stage_shard();
        let coordinators = self.steps.coordinators.take_changed();
        if coordinators != 0 {
            let journal = &mut self.files.journal;
            let stage = |address, value| journal.stage(address, value);
            CoordinatorRecord::save(&self.steps.coordinators, coordinators, stage);
        }
        let mut changed = Vec::new();
        self.peers.registry.append_changed(&mut changed);
        if let Some(owner) = &mut self.steps.owner {
            owner.append_changed(&mut changed);
        }
        changed.sort_unstable();
        changed.dedup();
        let several = changed.len() > CLIENTS_AT_ONCE;
        let owner = self.steps.owner.as_mut();
        let data_changed = owner.is_some_and(TokenIssuer::take_data_changed);
        if data_changed {
            self.steps.count_batches();
            self.stage_data(if several { &changed } else { &[] });
        }
        // Clients that lost tokens precede clients that received tokens. If only the first of
        // several transactions is committed, no more tokens are granted than ever were before.
        changed.sort_by_key(|&client| self.steps.tokens_of(client).count());
        for client in changed {
            self.files.make_room_for_client();
            self.stage_client(client);
        }
        if data_changed && several {
            self.files.commit();
            self.stage_data(&[]);
        }
        self.files.commit();
        let counts = self.variables.counts(self.steps.step(), self.steps.served_step());
        if let Some(store) = self.variables.store_mut() {
            store.committed(counts);
        }
    }

    /// Returns the shard's own words.
    pub(in crate::shard) fn record(&self) -> ShardRecord {
        let Shard { variables, files, peers, intake, steps, .. } = self;
        let mut record = ShardRecord {
            version: variables.version,
            gradients: variables.gradients,
            steps: steps.owner.as_ref().map(TokenIssuer::steps).unwrap_or_default(),
            newest_epoch: peers.registry.newest_epoch(),
            forgotten: peers.registry.forgotten(),
            chief: peers.chief.epoch,
            chief_client: peers.chief.client,
            stage: match &variables.state {
                VariablesState::Absent => ShardStage::Absent,
                VariablesState::Declared(_) => ShardStage::Declared,
                VariablesState::Ready(_) => ShardStage::Ready,
            },
            generation: files.generation,
            clients: peers.registry.counts().0,
            push_slots: intake.inbox.as_ref().map_or(0, Inbox::push_slots),
            lives: files.lives,
            restore_epoch: variables.epoch,
            restored_step: variables.restored_step,
            applied: steps.follower.as_ref().map_or(0, StepFollower::step),
            ..ShardRecord::default()
        };
        if let Some(coordinator) = steps.coordinator() {
            record.goal = coordinator.current.goal();
            record.applying = coordinator.current.is_applying();
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

    fn stage_shard(&mut self) {
        let record = self.record();
        let Shard { files, variables, intake, steps, .. } = self;
        let journal = &mut files.journal;
        for (index, value) in record.encode().into_iter().enumerate() {
            journal.stage(Address::Control(index), value);
        }
        if let (VariablesState::Declared(store) | VariablesState::Ready(store), Some(inbox)) =
            (&variables.state, &intake.inbox)
        {
            let first = store.geometry().table_words() + map_words(store.layout());
            inbox.stage(journal, store.layout(), first, store.has_integrity());
            if let Some(coordinator) = steps.owner.as_ref().and_then(TokenIssuer::coordinator) {
                let first = first + Inbox::table_words(store.layout(), inbox.push_slots());
                let words = encode_admitted(coordinator.current.admitted(), inbox.push_slots());
                for (index, value) in words.enumerate() {
                    journal.stage(Address::Tables(first + index), value);
                }
            }
        }
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &variables.state {
            // A checkpoint cut changes the headers of tables.
            store.tables().iter().for_each(|table| table.stage_head(journal));
        }
        stage_assigned(journal, variables);
    }

    /// Stages the data position. Batches that these clients hold are named as free too.
    fn stage_data(&mut self, clients: &[ClientKey]) {
        let Some(owner) = &self.steps.owner else { return };
        let data = owner.ledger().data.as_ref();
        let mut free: Vec<DataBatch> = data.into_iter().flat_map(DataPosition::free).collect();
        if !clients.is_empty() {
            let held = clients.iter().flat_map(|&client| owner.ledger().of(client));
            free.extend(held.filter_map(|issued| issued.batch));
            free.sort_unstable();
            free.dedup();
        }
        DataRecord::save(data, free.into_iter(), |address, value| {
            self.files.journal.stage(address, value);
        });
    }

    fn stage_client(&mut self, key: ClientKey) {
        let Shard { files, peers, steps, .. } = self;
        let bounded_staleness =
            steps.asynchronous_tokens().and_then(AsynchronousTokens::bounded_staleness);
        let progress = bounded_staleness
            .map(|bounded_staleness| bounded_staleness.of(key))
            .unwrap_or_default();
        let tokens: SmallVec<[Issued; TOKENS_PER_CLIENT_MAX]> =
            steps.tokens_of(key).take(TOKENS_PER_CLIENT_MAX).collect();
        let first = ClientRecord::first_word(key.0 as usize);
        let client = peers.registry.client_to_save(key);
        let journal = &mut files.journal;
        ClientRecord::save(client, &tokens, progress, |word, value| {
            journal.stage(Address::Control(first + word), value);
        });
    }

    /// Asserts that the arena has all durable words. An update under way commits the headers of the
    /// tables that it grows.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(in crate::shard) fn check_all_is_saved(&mut self) {
        self.stage_shard();
        let mut words = self.files.journal.unstage();
        if self.applier.has_work() || self.applier.streaming.is_some() {
            words.retain(|(address, _)| !matches!(address, Address::Index(..)));
        }
        assert!(words.is_empty(), "an input has changed {words:?} unnoticed");
        assert!(!self.peers.registry.has_changed(), "an input has changed a client unnoticed");
        assert_eq!(
            self.steps.coordinators.changed(),
            0,
            "an input has changed coordinators unnoticed"
        );
        let owner = self.steps.owner.as_ref();
        assert!(!owner.is_some_and(TokenIssuer::has_changed), "tokens have changed unnoticed");
    }

    /// Asserts that the arena has every window word that is marked as saved.
    #[cfg(any(test, fuzzing))]
    pub(in crate::shard) fn check_windows_are_saved(&self) {
        for key in self.peers.registry.keys() {
            let first = ClientRecord::first_window_word(key.0 as usize);
            self.peers.registry.client(key).window.saved(|word, value| {
                let found = self.files.journal.load(Address::Control(first + word));
                assert_eq!(found, value, "word {word} of the window of {key:?}");
            });
        }
    }

    /// Asserts that the arena has the words of every coordinator that is marked as saved.
    #[cfg(any(test, fuzzing))]
    pub(in crate::shard) fn check_coordinators_are_saved(&self) {
        if self.steps.coordinators.changed() == 0 {
            CoordinatorRecord::save(&self.steps.coordinators, u64::MAX, |address, value| {
                let found = self.files.journal.load(address);
                assert_eq!(found, value, "{address:?} of the coordinators");
            });
        }
    }
}

/// Stages the set of partitions that were assigned before the initialization.
fn stage_assigned(journal: &mut Journal, variables: &Variables) {
    let VariablesState::Declared(store) = &variables.state else { return };
    let layout = store.layout();
    let first = store.geometry().table_words();
    let mut map = vec![0_u64; map_words(layout)];
    for (index, partition) in layout.partitions().iter().enumerate() {
        if variables.assigned.contains(&partition.id) {
            map[index / 64] |= 1 << (index % 64);
        }
    }
    for (index, bits) in map.into_iter().enumerate() {
        journal.stage(Address::Tables(first + index), bits);
    }
}
