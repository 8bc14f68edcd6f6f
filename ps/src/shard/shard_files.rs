//! The files of a shard, and the durable words that they hold.
//!
//! The durable words are a function of the shard's state. After each input, the words that differ
//! are committed in one transaction, before any answer leaves the shard. So everything that an
//! answer promises is durable, and no code has to track its changes. The exceptions are clients and
//! the entries of their push windows, which are tracked.

pub(crate) mod call_record;
pub(crate) mod client_record;
pub(crate) mod control_file;
pub(crate) mod data_record;
pub(crate) mod generation;
pub(crate) mod poison;
pub(crate) mod power;
pub(crate) mod record;
pub(super) mod recovery;
pub(crate) mod shard_setup;

use std::sync::Arc;

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::limits::TOKENS_PER_CLIENT_MAX;
use pushpull_store::arena::{Arena, Budget, file_name};
use pushpull_store::commit::{Address, CELL_WORDS, Journal};
use pushpull_store::layout::{Kind, PAGE_BYTES};
use smallvec::SmallVec;

use super::Detail;
use super::intake::Intake;
use super::output::{ShardOutput, ShardOutputs};
use super::peers::Peers;
use super::peers::client_registry::CLIENTS_MAX;
use super::steps::Steps;
use super::variables::{Variables, VariablesState};
use crate::aggregate::asynchronous_tokens::AsynchronousTokens;
use crate::aggregate::data_position::{DataBatch, DataPosition};
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::token_issuer::TokenIssuer;
use crate::aggregate::token_ledger::Issued;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::error::StorageError;
use crate::inbox::{Inbox, map_words};
use call_record::CallRecord;
use client_record::ClientRecord;
use data_record::DataRecord;
use generation::{files_of_tables, remove_leftovers};
use poison::PoisonRecord;
use power::{Flush, FlushOutcome, Power};
use record::{FROM_IMAGE, ShardRecord, ShardStage, encode_admitted};

/// The files of a shard, and what their names and words depend on.
///
/// Invariants: between two inputs the durable words are those of the owners' state. With images, no
/// output leaves before its commit is in an image on disk.
#[derive(Debug)]
pub(super) struct ShardFiles {
    pub(super) config: Arc<PsConfig>,
    pub(super) arena: Arena,
    pub(super) budget: Budget,
    pub(super) journal: Journal,
    /// The number of declarations of variables. Each has its own files.
    pub(super) generation: u64,
    /// How many processes have opened the arena.
    pub(super) lives: u64,
    /// `Some` if answers must survive a loss of power.
    pub(super) power: Option<Power>,
}

/// The clients that one transaction can hold in addition to a push.
const CLIENTS_AT_ONCE: usize = 16;

/// The cells by which the control file grows.
pub(super) const GROWTH: usize = 16;

/// The bytes of the longest control file.
pub(crate) const CONTROL_BYTES_MAX: usize =
    (1 + 1 + DataRecord::CELLS + CallRecord::CELLS + CLIENTS_MAX + 1 + GROWTH) * PAGE_BYTES;

/// Returns the words of a shard's largest transaction, for tables files of `table_words` words and
/// `tables` embedding tables. The index changes of the embedding tables come on top.
pub(super) fn transaction_words(table_words: usize, tables: usize) -> usize {
    // The table's own words, and its last commit number, which the tables file and the index both
    // have.
    let of_tables = tables * 8;
    let of_clients = CLIENTS_AT_ONCE * ClientRecord::WORDS;
    let of_shard = ShardRecord::WORDS + DataRecord::WORDS + CallRecord::WORDS;
    table_words + of_tables + of_shard + of_clients
}

impl ShardFiles {
    /// Commits all changes in one transaction. Answers sent after it are durable.
    pub(super) fn persist(
        &mut self,
        variables: &mut Variables,
        peers: &mut Peers,
        intake: &Intake,
        steps: &mut Steps,
    ) {
        self.stage_shard(variables, peers, intake, steps);
        let calls = steps.calls.take_changed();
        CallRecord::save(&steps.calls, calls, |address, value| self.journal.stage(address, value));
        let mut changed = Vec::new();
        peers.registry.append_changed(&mut changed);
        if let Some(owner) = &mut steps.owner {
            owner.append_changed(&mut changed);
        }
        changed.sort_unstable();
        changed.dedup();
        let several = changed.len() > CLIENTS_AT_ONCE;
        let data_changed = steps.owner.as_mut().is_some_and(TokenIssuer::take_data_changed);
        if data_changed {
            steps.count_batches();
            self.stage_data(steps, if several { &changed } else { &[] });
        }
        // Clients that lost tokens precede clients that received tokens. If only the first of
        // several transactions is committed, no more tokens are granted than ever were before.
        changed.sort_by_key(|&client| steps.tokens_of(client).count());
        for client in changed {
            // Losing very many members at once takes several transactions. The state after each is
            // consistent.
            if self.journal.free_words() < ClientRecord::WORDS {
                self.commit();
            }
            self.stage_client(peers, steps, client);
        }
        if data_changed && several {
            self.commit();
            self.stage_data(steps, &[]);
        }
        self.commit();
        let counts = variables.counts(steps);
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &mut variables.state
        {
            store.committed(counts);
        }
    }

    fn commit(&mut self) {
        let made = self.journal.commit();
        if let Some(power) = self.power.as_mut().filter(|_| made) {
            power.count_commit();
        }
    }

    /// Holds outputs back until their commit is on disk, and starts to write an image if one is
    /// due.
    pub(super) fn hold_outputs(&mut self, variables: &mut Variables, out: &mut ShardOutputs) {
        let Some(power) = &mut self.power else { return };
        power.hold(out);
        let Some(number) = power.begin_image() else { return };
        let mut files = Vec::new();
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &mut variables.state
        {
            let kinds = [Kind::Catalogue, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo];
            let slots = store.geometry().slots > 0;
            let kinds = kinds.into_iter().filter(|&kind| kind != Kind::Slots || slots);
            files.extend(kinds.map(|kind| file_name(kind, self.generation)));
            store.image_begun();
        }
        let flush = Flush {
            storage: self.arena.storage.clone(),
            stamp: self.arena.stamp,
            files,
            number,
            image: self.journal.image(FROM_IMAGE),
            planted: self.config.planted,
        };
        out.push(ShardOutput::Flush(Box::new(flush)));
    }

    /// Takes the result of a flush. Returns whether the shard is read-only from now on.
    pub(super) fn flushed(
        &mut self,
        variables: &mut Variables,
        is_restoring: bool,
        out: &mut ShardOutputs,
        result: Result<(), String>,
    ) -> bool {
        match self.power.as_mut().and_then(|power| power.flushed(out, result)) {
            None => false,
            Some(FlushOutcome::Durable { unnamed }) => {
                if unnamed {
                    // A file that cannot be removed costs space, and the next process tries again.
                    let _ = self.remove_unnamed(variables, is_restoring);
                }
                if let VariablesState::Declared(store) | VariablesState::Ready(store) =
                    &mut variables.state
                {
                    store.image_written();
                }
                false
            }
            Some(FlushOutcome::Failed(reason)) => {
                PoisonRecord { reason }.stage(&mut self.journal);
                true
            }
        }
    }

    /// Returns whether a commit waits for an image.
    pub(super) fn waits_for_image(&self) -> bool {
        self.power.as_ref().is_some_and(Power::waits_for_image)
    }

    /// Returns the refusal of everything except pulls after a failed flush.
    pub(super) fn poisoned(&self) -> Option<Refusal> {
        self.power.as_ref()?.refusal()
    }

    /// Removes the files of variables that no commit names any more. With images, that waits for
    /// the next one: an image on disk may name the files, and one that is being written flushes
    /// them.
    pub(super) fn remove_forgotten(&mut self) -> Result<(), StorageError> {
        self.journal.unmap_tables();
        match &mut self.power {
            None => remove_leftovers(&self.arena, None, &[]),
            Some(power) => {
                power.forget_files();
                Ok(())
            }
        }
    }

    /// Removes the files that no image on disk names.
    fn remove_unnamed(
        &self,
        variables: &Variables,
        is_restoring: bool,
    ) -> Result<(), StorageError> {
        let named = is_restoring || !matches!(variables.state, VariablesState::Absent);
        let of_tables = variables.store().map(files_of_tables).unwrap_or_default();
        remove_leftovers(&self.arena, named.then_some(self.generation), &of_tables)
    }

    /// Ensures that the control file has a cell for one more client.
    pub(super) fn reserve_client(&mut self, peers: &Peers) -> Result<(), StorageError> {
        let words = ClientRecord::first_word(peers.registry.counts().0 + 1);
        if words > self.journal.control_words() {
            self.journal.grow_control(words + GROWTH * CELL_WORDS)?;
        }
        Ok(())
    }

    /// Asserts that the arena has every window word that is marked as saved.
    #[cfg(any(test, fuzzing))]
    pub(super) fn check_windows_are_saved(&self, peers: &Peers) {
        for key in peers.registry.keys() {
            let first = ClientRecord::first_window_word(key.0 as usize);
            peers.registry.client(key).window.saved(|word, value| {
                let found = self.journal.load(Address::Control(first + word));
                assert_eq!(found, value, "word {word} of the window of {key:?}");
            });
        }
    }

    /// Asserts that the arena has the words of every call source that is marked as saved.
    #[cfg(any(test, fuzzing))]
    pub(super) fn check_calls_are_saved(&self, steps: &Steps) {
        if steps.calls.changed() == 0 {
            CallRecord::save(&steps.calls, u64::MAX, |address, value| {
                assert_eq!(self.journal.load(address), value, "{address:?} of the call sources");
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

    /// Stages the data position. Batches that these clients hold are named as free too.
    fn stage_data(&mut self, steps: &Steps, clients: &[ClientKey]) {
        let Some(owner) = &steps.owner else { return };
        let data = owner.ledger().data.as_ref();
        let mut free: Vec<DataBatch> = data.into_iter().flat_map(DataPosition::free).collect();
        if !clients.is_empty() {
            let held = clients.iter().flat_map(|&client| owner.ledger().of(client));
            free.extend(held.filter_map(|issued| issued.batch));
            free.sort_unstable();
            free.dedup();
        }
        DataRecord::save(data, free.into_iter(), |address, value| {
            self.journal.stage(address, value);
        });
    }

    pub(super) fn stage_client(&mut self, peers: &mut Peers, steps: &Steps, key: ClientKey) {
        let bounded_staleness =
            steps.asynchronous_tokens().and_then(AsynchronousTokens::bounded_staleness);
        let progress = bounded_staleness
            .map(|bounded_staleness| bounded_staleness.of(key))
            .unwrap_or_default();
        let tokens: SmallVec<[Issued; TOKENS_PER_CLIENT_MAX]> =
            steps.tokens_of(key).take(TOKENS_PER_CLIENT_MAX).collect();
        let first = ClientRecord::first_word(key.0 as usize);
        let (client, journal) = (peers.registry.client_to_save(key), &mut self.journal);
        ClientRecord::save(client, &tokens, progress, |word, value| {
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
            forgotten: peers.registry.forgotten(),
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
            (record.goal, record.applying) =
                (coordinator.current.goal(), coordinator.current.is_applying());
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
                let words = encode_admitted(coordinator.current.admitted(), inbox.push_slots());
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

/// Returns the refusal of a request that the storage cannot serve.
pub(super) fn storage_refusal(error: StorageError) -> Refusal {
    match error {
        StorageError::DoesNotFit { need, limit } => {
            Refusal::DoesNotFit { need, limit, made_of: Detail::default() }
        }
        StorageError::DirectoryTooSmall { ref path, need, limit } => {
            let made_of = format!(
                "the file system of {} has no more; put the state directory on a larger one",
                path.display()
            );
            Refusal::DoesNotFit { need, limit, made_of: Detail::clipped(made_of) }
        }
        StorageError::ModelDoesNotFit { need, limit, made_of } => {
            Refusal::DoesNotFit { need, limit, made_of: Detail::clipped(made_of) }
        }
        error => Refusal::Storage { detail: Detail::clipped(error.to_string()) },
    }
}
