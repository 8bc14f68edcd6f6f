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

use super::call_record::CallRecord;
use super::client_record::ClientRecord;
use super::data_record::DataRecord;
use super::generation::{Generation, open_catalogue};
use super::record::{ShardRecord, ShardStage, admitted_words, decode_admitted};
use crate::aggregate::current_step::CurrentStep;
use crate::aggregate::step_follower::StepFollower;
use crate::client_key::ClientKey;
use crate::error::StorageError;
use crate::inbox::{Inbox, WholeSlot, map_words, whole_slots};
use crate::shard::Shard;
use crate::shard::applier::ShardJob;
use crate::shard::peers::Peers;
use crate::shard::peers::client_registry::ClientPresence;
use crate::shard::push_job::PushJob;
use crate::shard::shard_files::{ShardFiles, transaction_words};
use crate::shard::steps::Steps;
use crate::shard::variables::{Variables, VariablesState};

/// The words that an earlier process left, which a new one restores its owners from.
#[derive(Debug)]
pub(in crate::shard) struct Recovery {
    pub(in crate::shard) record: ShardRecord,
    /// When the files were opened. Leases and deadlines start again.
    pub(in crate::shard) now: Instant,
}

impl Recovery {
    /// Restores the counts, the step and the clients.
    pub(in crate::shard) fn restore_members(
        &self,
        files: &mut ShardFiles,
        variables: &mut Variables,
        peers: &mut Peers,
        steps: &mut Steps,
    ) -> Result<(), StorageError> {
        let record = &self.record;
        (variables.version, variables.gradients) = (record.version, record.gradients);
        (files.lives, files.generation) = (record.lives, record.generation);
        (variables.epoch, variables.restored_step) = (record.restore_epoch, record.restored_step);
        peers.registry.mint_above(record.newest_epoch);
        peers.registry.restore_forgotten(record.forgotten);
        (peers.chief.epoch, peers.chief.client) = (record.chief, record.chief_client);
        if let Some(owner) = &mut steps.owner {
            owner.restore(record.steps);
            steps.counters.global_step.set(record.steps.step);
            let data = DataRecord::load(&files.journal, files.config.planted).map_err(|fault| {
                files.arena.storage.corrupt(&file_name(Kind::Control, 0), fault)
            })?;
            owner.set_data(data);
        }
        if steps.follower.is_some() {
            steps.follower = Some(StepFollower::new(record.applied, files.config.planted));
        }
        steps.calls = CallRecord::load(&files.journal, files.config.planted)
            .map_err(|fault| files.arena.storage.corrupt(&file_name(Kind::Control, 0), fault))?;
        for number in 0..record.clients {
            self.restore_client(files, peers, steps, number).map_err(|fault| {
                files.arena.storage.corrupt(&file_name(Kind::Control, 0), fault)
            })?;
        }
        Ok(())
    }

    fn restore_client(
        &self,
        files: &ShardFiles,
        peers: &mut Peers,
        steps: &mut Steps,
        number: usize,
    ) -> Result<(), Fault> {
        let ClientRecord { client, tokens, progress } =
            ClientRecord::load(&files.journal, number, files.config.planted)?;
        let at = offset_of(Address::Control(ClientRecord::first_word(number)));
        let fault = |what| Err(Fault::at(at, what));
        let key = ClientKey(number as u32);
        for issued in tokens {
            let owner = steps.owner.as_mut();
            if !owner.is_some_and(|owner| owner.restore_token(key, issued, self.now)) {
                let token = issued.token;
                return fault(format!("a client whose token {token} no other client holds"));
            }
        }
        if let Some(tokens) = steps.asynchronous_tokens_mut() {
            tokens.restore_progress(key, progress);
        }
        match peers.registry.restore(client, self.now) {
            true => Ok(()),
            false => fault("a client whose task no earlier client has".to_owned()),
        }
    }

    /// Restores the partitions that were assigned before the initialization. Their map begins at
    /// this word.
    fn restore_assigned(
        &self,
        files: &ShardFiles,
        variables: &mut Variables,
        generation: &Generation,
        first: usize,
    ) {
        for (index, partition) in generation.layout.partitions().iter().enumerate() {
            let bits = files.journal.load(Address::Tables(first + index / 64));
            if bits >> (index % 64) & 1 == 1 {
                variables.assigned.insert(partition.id);
            }
        }
    }

    /// Restores the pushes that are admitted to the current synchronous step. Their words begin at
    /// this one.
    fn restore_admitted(
        &self,
        files: &ShardFiles,
        peers: &Peers,
        steps: &mut Steps,
        first: usize,
    ) -> Result<(), Fault> {
        if steps.coordinator().is_none() {
            return Ok(());
        }
        let record = &self.record;
        let words = 0..admitted_words(record.push_slots);
        let words: Vec<u64> =
            words.map(|word| files.journal.load(Address::Tables(first + word))).collect();
        let admitted = decode_admitted(&words, record.clients).map_err(|word| {
            let at = offset_of(Address::Tables(first + word));
            Fault::at(at, "pushes that are admitted to a step")
        })?;
        let joined = peers.registry.keys().collect();
        let present =
            |key: &ClientKey| peers.registry.client(*key).presence == ClientPresence::Present;
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
        files: &ShardFiles,
        peers: &Peers,
        steps: &Steps,
        generation: &Generation,
        first: usize,
    ) -> Result<Vec<WholeSlot>, Fault> {
        let record = &self.record;
        if record.from_image {
            // The push slots of an image may have been reused since. The pushes that were in them
            // were not answered.
            return Ok(Vec::new());
        }
        let (layout, push_slots) = (&generation.layout, record.push_slots);
        let whole = whole_slots(&files.journal, layout, first, push_slots, record.clients)?;
        self.check_whole_pushes(peers, steps, &whole, first)?;
        Ok(whole)
    }

    /// Checks that the complete pushes are consistent with the clients, the tokens and the
    /// variables.
    fn check_whole_pushes(
        &self,
        peers: &Peers,
        steps: &Steps,
        whole: &[WholeSlot],
        first: usize,
    ) -> Result<(), Fault> {
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
            let is_ready = self.record.stage == ShardStage::Ready;
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
    fn return_tokens_of_absent_clients(
        &self,
        peers: &Peers,
        steps: &mut Steps,
        complete: &BTreeSet<TokenId>,
    ) {
        let asks = !steps.shards_to_ask().is_empty();
        let absent = |holder| peers.registry.client(holder).presence != ClientPresence::Present;
        let timeout = steps.config.token_timeout;
        if asks && let Some(tokens) = steps.asynchronous_tokens_mut() {
            tokens.recall(self.now, timeout, absent, |token| complete.contains(&token));
            for client in peers.registry.keys().filter(|&client| absent(client)) {
                steps.watch_absent(peers, self.now, client);
            }
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
        &self,
        files: &mut ShardFiles,
        generation: &Generation,
        reservation: Reservation,
    ) -> Result<Box<Store>, StorageError> {
        let ShardRecord { generation: number, integrity, version, .. } = self.record;
        let plan = generation.store_plan(files, number, integrity);
        let mut store = Box::new(Store::open(plan, reservation, &files.journal, version)?);
        let ShardFiles { arena, budget, journal, .. } = files;
        store.attach_tables(arena, number, budget, &generation.rules, |inputs| {
            Table::open(inputs, journal)
        })?;
        if integrity && self.record.stage == ShardStage::Ready {
            store.verify(&files.journal).map_err(|(kind, fault)| {
                files.arena.storage.corrupt(&file_name(kind, number), fault)
            })?;
        }
        Ok(store)
    }
}

impl Shard {
    /// Restores the variables, and the complete pushes in the inbox.
    pub(in crate::shard) fn recover_variables(
        &mut self,
        recovery: &Recovery,
    ) -> Result<(), StorageError> {
        let &ShardRecord { generation: number, push_slots, integrity, .. } = &recovery.record;
        let Shard { id, config, files, variables, peers, intake, applier, steps, .. } = self;
        let storage = files.arena.storage.clone();
        let corrupt = |kind, fault| storage.corrupt(&file_name(kind, number), fault);
        let catalogue = Arc::new(open_catalogue(&files.arena, &recovery.record)?);
        variables.can_train(&catalogue)?;
        let generation = Generation::of_record(*id, config, catalogue, &recovery.record);
        let generation = generation.map_err(|slots| {
            let what = format!("blocks for these variables, with {slots} slots");
            storage.corrupt(&file_name(Kind::Control, 0), Fault::at(PAGE_BYTES, what))
        })?;
        let (words, tables) = (generation.table_words(), generation.tables());
        files.journal.check_tables(number, table_bytes(words + tables))?;
        files.journal.verify_tables(number)?;
        files.journal.check_intent(transaction_words(words, tables))?;
        let reservation = generation.reserve(files)?;
        let layout = &generation.layout;
        let bytes = Inbox::file_bytes(layout, push_slots);
        let memory = files.arena.open(Kind::Inbox, number, Some(bytes))?;
        let mut inbox = Inbox::new(memory, layout, push_slots, 1);
        let first = generation.geometry.table_words();
        recovery.restore_assigned(files, variables, &generation, first);
        let first = first + map_words(layout);
        let admitted = first + Inbox::table_words(layout, push_slots);
        let whole = recovery
            .restore_admitted(files, peers, steps, admitted)
            .and_then(|()| recovery.whole_pushes(files, peers, steps, &generation, first))
            .map_err(|fault| corrupt(Kind::Tables, fault))?;
        let gradients = whole.iter().map(|push_slot| &push_slot.arrival);
        let gradients = gradients.filter(|push| push.operation == Operation::Gradient {});
        let complete: BTreeSet<TokenId> = gradients.map(|push| push.token).collect();
        let whole = inbox
            .restore(whole, layout, integrity, recovery.now)
            .map_err(|fault| corrupt(Kind::Inbox, fault))?;
        let store = recovery.open_store(files, &generation, reservation)?;
        steps.count_participants(store.catalogue().shards());
        let state = match recovery.record.stage {
            ShardStage::Ready => VariablesState::Ready(store),
            _ => VariablesState::Declared(store),
        };
        variables.install(state, generation.rules);
        recovery.return_tokens_of_absent_clients(peers, steps, &complete);
        let waits = |push_slot: &u32| {
            inbox.arrival(*push_slot).is_some_and(|push| steps.waits_for_step(push))
        };
        let due: Vec<u32> = whole.into_iter().filter(|push_slot| !waits(push_slot)).collect();
        intake.inbox = Some(inbox);
        // These pushes were sent, and scanned on arrival: push buffers end with their process.
        applier
            .jobs
            .extend(due.into_iter().map(|push_slot| ShardJob::Push(PushJob::new(push_slot, true))));
        steps.recover_held(applier, intake);
        Ok(())
    }
}
