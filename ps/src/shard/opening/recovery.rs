//! Restores a shard's state from the words that an earlier process left.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Outcome, PushState};
use pushpull_store::arena::{Reservation, file_name};
use pushpull_store::commit::{Address, offset_of, table_bytes};
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES};
use pushpull_store::store::Store;
use pushpull_store::table::Table;

use crate::aggregate::current_step::CurrentStep;
use crate::aggregate::step_follower::StepFollower;
use crate::client_key::ClientKey;
use crate::error::StorageError;
use crate::inbox::{Inbox, WholeSlot, map_words, whole_slots};
use crate::shard::Shard;
use crate::shard::shard_files::client_record::ClientRecord;
use crate::shard::shard_files::coordinator_record::CoordinatorRecord;
use crate::shard::shard_files::data_record::DataRecord;
use crate::shard::shard_files::generation::{Generation, open_catalogue};
use crate::shard::shard_files::record::{ShardRecord, ShardStage, admitted_words, decode_admitted};
use crate::shard::shard_files::{ShardFiles, transaction_words};
use crate::shard::values::variables::VariablesState;

/// The words that an earlier process left, which a new one restores its owners from.
#[derive(Debug)]
pub(in crate::shard) struct Recovery {
    pub(in crate::shard) record: ShardRecord,
    /// When the files were opened. Leases and deadlines start again.
    pub(in crate::shard) now: Instant,
}

impl Shard {
    /// Restores the counts, the step and the clients.
    pub(super) fn recover_members(&mut self, recovery: &Recovery) -> Result<(), StorageError> {
        let record = &recovery.record;
        let Shard { files, variables, peers, steps, counters, .. } = self;
        variables.version = record.version;
        variables.gradients = record.gradients;
        files.lives = record.lives;
        files.generation = record.generation;
        variables.epoch = record.restore_epoch;
        variables.restored_step = record.restored_step;
        peers.registry.mint_above(record.newest_epoch);
        peers.registry.restore_forgotten(record.forgotten);
        peers.chief.epoch = record.chief;
        peers.chief.client = record.chief_client;
        if let Some(owner) = &mut steps.owner {
            owner.restore(record.steps);
            counters.global_step.set(record.steps.step);
            let data = DataRecord::load(&files.journal, files.config.planted).map_err(|fault| {
                files.arena.storage.corrupt(&file_name(Kind::Control, 0), fault)
            })?;
            owner.set_data(data);
        }
        if steps.follower.is_some() {
            steps.follower = Some(StepFollower::new(record.applied, files.config.planted));
        }
        steps.coordinators = CoordinatorRecord::load(&files.journal, files.config.planted)
            .map_err(|fault| files.arena.storage.corrupt(&file_name(Kind::Control, 0), fault))?;
        for number in 0..record.clients {
            self.recover_client(recovery.now, number).map_err(|fault| {
                self.files.arena.storage.corrupt(&file_name(Kind::Control, 0), fault)
            })?;
        }
        Ok(())
    }

    fn recover_client(&mut self, now: Instant, number: usize) -> Result<(), Fault> {
        let Shard { files, peers, steps, .. } = self;
        let ClientRecord { client, tokens, progress } =
            ClientRecord::load(&files.journal, number, files.config.planted)?;
        let at = offset_of(Address::Control(ClientRecord::first_word(number)));
        let fault = |what| Err(Fault::at(at, what));
        let key = ClientKey(number as u32);
        for issued in tokens {
            let owner = steps.owner.as_mut();
            if !owner.is_some_and(|owner| owner.restore_token(key, issued, now)) {
                let token = issued.token;
                return fault(format!("a client whose token {token} no other client holds"));
            }
        }
        if let Some(tokens) = steps.asynchronous_tokens_mut() {
            tokens.restore_progress(key, progress);
        }
        match peers.registry.restore(client, now) {
            true => Ok(()),
            false => fault("a client whose task no earlier client has".to_owned()),
        }
    }

    /// Restores the partitions that were assigned before the initialization. Their map begins at
    /// this word.
    fn recover_assigned(&mut self, generation: &Generation, first: usize) {
        let Shard { files, variables, .. } = self;
        for (index, partition) in generation.layout.partitions().iter().enumerate() {
            let bits = files.journal.load(Address::Tables(first + index / 64));
            if bits >> (index % 64) & 1 == 1 {
                variables.assigned.insert(partition.id);
            }
        }
    }

    /// Restores the pushes that are admitted to the current synchronous step. Their words begin at
    /// this one.
    fn recover_admitted(&mut self, record: &ShardRecord, first: usize) -> Result<(), Fault> {
        let Shard { files, peers, steps, .. } = self;
        if steps.coordinator().is_none() {
            return Ok(());
        }
        let words = 0..admitted_words(record.push_slots);
        let words: Vec<u64> =
            words.map(|word| files.journal.load(Address::Tables(first + word))).collect();
        let admitted = decode_admitted(&words, record.clients).map_err(|word| {
            let at = offset_of(Address::Tables(first + word));
            Fault::at(at, "pushes that are admitted to a step")
        })?;
        let joined = peers.registry.keys().collect();
        let present = |key: &ClientKey| peers.is_present(*key);
        let live = peers.registry.keys().filter(present);
        let live = live.map(|key| (key, peers.registry.client(key).task.index)).collect();
        if let Some(coordinator) = steps.coordinator_mut() {
            coordinator.restore_step(CurrentStep::restored(admitted, record.applying, record.goal));
            coordinator.restore_live(live, joined);
        }
        Ok(())
    }

    /// Returns the complete pushes of the inbox, whose words begin at this one.
    fn whole_pushes(
        &self,
        record: &ShardRecord,
        generation: &Generation,
        first: usize,
    ) -> Result<Vec<WholeSlot>, Fault> {
        if record.from_image {
            // The push slots of an image may have been reused since. The pushes that were in them
            // were not answered.
            return Ok(Vec::new());
        }
        let layout = &generation.layout;
        let push_slots = record.push_slots;
        let journal = &self.files.journal;
        let whole = whole_slots(journal, layout, first, push_slots, record.clients)?;
        self.check_whole_pushes(record.stage, &whole, first)?;
        Ok(whole)
    }

    /// Checks that the complete pushes are consistent with the clients, the tokens and the
    /// variables.
    fn check_whole_pushes(
        &self,
        stage: ShardStage,
        whole: &[WholeSlot],
        first: usize,
    ) -> Result<(), Fault> {
        let Shard { peers, steps, .. } = self;
        let mut spent = BTreeSet::new();
        let coordinator = steps.coordinator();
        let admitted = |token| coordinator.is_some_and(|owner| owner.current.has(token));
        for WholeSlot { arrival: push, holder, .. } in whole {
            let window = holder.map(|holder| &peers.registry.client(holder).window);
            let settled = window.is_some_and(|window| {
                let state = window.state(push.sequence);
                let held = PushState::Settled { outcome: Outcome::Held {} };
                let is_admitted = admitted(push.token.0);
                matches!(state, PushState::Settled { .. }) && state != held && !is_admitted
            });
            let gradient = push.operation == Operation::Gradient {};
            let is_ready = stage == ShardStage::Ready;
            let allowed = is_ready || push.operation == Operation::Assign {};
            let paid = !gradient
                || steps.owner.as_ref().is_none_or(|owner| {
                    let out = owner.ledger().get(push.token.0);
                    let out = out.is_some_and(|out| out.issued.generation == push.generation);
                    (out || admitted(push.token.0)) && spent.insert(push.token)
                });
            if settled || !allowed || !paid {
                let what = format!("pushes that can be applied, not push {}", push.sequence);
                return Err(Fault::at(offset_of(Address::Tables(first)), what));
            }
        }
        Ok(())
    }

    /// Returns the tokens of absent clients, except those of complete pushes in the inbox. Other
    /// complete pushes were in a push buffer, or in slots of an image, and are lost. Other shards
    /// that may have applied their shares are asked first.
    fn return_tokens_of_absent_clients(&mut self, now: Instant, complete: &BTreeSet<TokenId>) {
        let asks = !self.steps.shards_to_ask().is_empty();
        let Shard { peers, steps, .. } = self;
        let absent = |holder| !peers.is_present(holder);
        let timeout = self.config.token_timeout;
        if asks && let Some(tokens) = steps.asynchronous_tokens_mut() {
            tokens.recall(now, timeout, absent, |token| complete.contains(&token));
            let absent: Vec<ClientKey> =
                peers.registry.keys().filter(|&client| absent(client)).collect();
            absent.into_iter().for_each(|client| self.watch_absent(now, client));
            return;
        }
        let Some(owner) = &mut steps.owner else { return };
        let lost = owner.ledger().iter();
        let lost = lost.filter(|out| absent(out.holder) && !complete.contains(&out.issued.token));
        let lost: BTreeSet<ClientKey> = lost.map(|out| out.holder).collect();
        for holder in lost {
            owner.drop_client(holder, false, |token| complete.contains(&token));
        }
    }

    /// Opens the store of the variables.
    fn open_store(
        &mut self,
        record: &ShardRecord,
        generation: &Generation,
        reservation: Reservation,
    ) -> Result<Box<Store>, StorageError> {
        let files = &mut self.files;
        let &ShardRecord { generation: number, integrity, version, stage, .. } = record;
        let plan = generation.store_plan(files, number, integrity);
        let mut store = Box::new(Store::open(plan, reservation, &files.journal, version)?);
        let together = generation.pushes_together(files.config.mode.synchronous().is_some());
        let ShardFiles { arena, budget, journal, .. } = files;
        store.attach_tables(arena, number, budget, &generation.rules, together, |inputs| {
            Table::open(inputs, journal)
        })?;
        if integrity && stage == ShardStage::Ready {
            store
                .verify(journal)
                .map_err(|(kind, fault)| arena.storage.corrupt(&file_name(kind, number), fault))?;
        }
        Ok(store)
    }

    /// Restores the variables, and the complete pushes in the inbox.
    pub(super) fn recover_variables(&mut self, recovery: &Recovery) -> Result<(), StorageError> {
        let record = &recovery.record;
        let &ShardRecord { generation: number, push_slots, integrity, .. } = record;
        let storage = self.files.arena.storage.clone();
        let corrupt = |kind, fault| storage.corrupt(&file_name(kind, number), fault);
        let catalogue = Arc::new(open_catalogue(&self.files.arena, record)?);
        self.variables.can_train(&catalogue)?;
        let generation = Generation::of_record(self.id, &self.config, catalogue, record);
        let generation = generation.map_err(|slots| {
            let what = format!("blocks for these variables, with {slots} slots");
            storage.corrupt(&file_name(Kind::Control, 0), Fault::at(PAGE_BYTES, what))
        })?;
        let words = generation.table_words();
        let tables = generation.tables();
        let journal = &mut self.files.journal;
        journal.check_tables(number, table_bytes(words + tables))?;
        journal.verify_tables(number)?;
        journal.check_intent(transaction_words(words, tables))?;
        let reservation = generation.reserve(&self.files)?;
        let layout = &generation.layout;
        let bytes = Inbox::file_bytes(layout, push_slots);
        let memory = self.files.arena.open(Kind::Inbox, number, Some(bytes))?;
        let memory = generation.slot_memory(&self.files, memory);
        let mut inbox = Inbox::new(memory, layout, push_slots, 1);
        let first = generation.geometry.table_words();
        self.recover_assigned(&generation, first);
        let first = first + map_words(layout);
        let admitted = first + Inbox::table_words(layout, push_slots);
        let whole = self
            .recover_admitted(record, admitted)
            .and_then(|()| self.whole_pushes(record, &generation, first))
            .map_err(|fault| corrupt(Kind::Tables, fault))?;
        let gradients = whole.iter().map(|push_slot| &push_slot.arrival);
        let gradients = gradients.filter(|push| push.operation == Operation::Gradient {});
        let complete: BTreeSet<TokenId> = gradients.map(|push| push.token).collect();
        let whole = inbox
            .restore(whole, layout, integrity, recovery.now)
            .map_err(|fault| corrupt(Kind::Inbox, fault))?;
        inbox.settle_memory().map_err(|source| {
            let path = storage.path(&file_name(Kind::Inbox, number));
            StorageError::Io { doing: "reserve space for", path, source }
        })?;
        let store = self.open_store(record, &generation, reservation)?;
        self.steps.count_participants(store.catalogue().shards());
        let state = match record.stage {
            ShardStage::Ready => VariablesState::Ready(store),
            _ => VariablesState::Declared(store),
        };
        self.variables.install(state, generation.rules);
        self.return_tokens_of_absent_clients(recovery.now, &complete);
        let waits = |push_slot: &u32| {
            inbox.arrival(*push_slot).is_some_and(|push| self.steps.waits_for_step(push))
        };
        let due: Vec<u32> = whole.into_iter().filter(|push_slot| !waits(push_slot)).collect();
        self.intake.inbox = Some(inbox);
        self.applier.begin_recovered(due);
        self.recover_held();
        Ok(())
    }
}
