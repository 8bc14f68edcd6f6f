//! The files of a shard: creates them, and opens those of an earlier process.
//!
//! Every value from a file is verified before it is used. No memory is reserved for a count until
//! the files are known to be as long as it requires.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ShardId, TokenId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Outcome, PushState};
use pushpull_store::arena::{Arena, ArenaStorage, Budget, file_name};
use pushpull_store::commit::{
    Address, CELL_WORDS, Journal, is_unused_intent, offset_of, table_bytes,
};
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use pushpull_store::store::{Store, StoreGeometry, StorePlan};
use pushpull_store::table::Table;

use super::client_registry::{CLIENTS_MAX, ClientPresence, ClientRegistry};
use super::control_file::{OpenedControl, control_text, open_control};
use super::fused_ranges::FusedRanges;
use super::generation::{files_of_tables, need, open_catalogue, remove_leftovers, table_words};
use super::power::Power;
use super::push_job::PushJob;
use super::record::{CLIENT_WORDS, ShardRecord, ShardStage};
use super::work::ShardJob;
use super::{
    Applier, Intake, Outputs, Peers, Pulls, Shard, ShardCheckpoints, Steps, Variables,
    VariablesState, poison, record,
};
use crate::aggregate::step_coordinator::StepCoordinator;
use crate::aggregate::step_follower::StepFollower;
use crate::client_key::ClientKey;
use crate::config::{Durability, PsConfig};
use crate::error::StorageError;
use crate::inbox::{Inbox, WholeSlot, map_words, whole_slots};
use crate::metrics::Counters;

/// The identity of one run of the server, for the arenas that it opens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerRun {
    /// The boot id of the machine. State that was only in memory does not survive a reboot.
    pub(crate) boot: [u8; 16],
    /// The id of a new arena. Every arena has a different one.
    pub(crate) arena: u64,
    /// A number that is higher than all epochs of earlier runs.
    pub(crate) epoch_base: u64,
}

/// The clients that one transaction can hold in addition to a push.
const CLIENTS_AT_ONCE: usize = 16;

/// The cells by which the control file grows.
pub(super) const GROWTH: usize = 16;

/// The bytes of the longest control file.
pub(crate) const CONTROL_BYTES_MAX: usize = (1 + 1 + CLIENTS_MAX + 1 + GROWTH) * PAGE_BYTES;

/// Returns the words of a shard's largest transaction, for tables files of `table_words` words and
/// `tables` embedding tables. The index changes of the embedding tables come on top.
pub(super) fn transaction_words(table_words: usize, tables: usize) -> usize {
    // The table's own words, and its last commit number, which the tables file and the index both
    // have.
    let of_tables = tables * 8;
    table_words + of_tables + ShardRecord::WORDS + CLIENTS_AT_ONCE * CLIENT_WORDS
}

/// The environment of a shard: everything except its state.
#[derive(Clone, Debug)]
pub(crate) struct ShardSetup {
    pub(crate) id: ShardId,
    pub(crate) config: Arc<PsConfig>,
    pub(crate) identity: Arc<Identity>,
    pub(crate) budget: Budget,
    pub(crate) counters: Arc<Counters>,
}

/// The files of a shard, and what their names and words depend on.
#[derive(Debug)]
pub(super) struct ShardFiles {
    pub(super) arena: Arena,
    pub(super) budget: Budget,
    pub(super) journal: Journal,
    /// The number of declarations of variables. Each has its own files.
    pub(super) generation: u64,
    /// How many processes have opened the arena.
    pub(super) lives: u64,
}

impl Shard {
    /// Opens the shard in this storage, or creates one there.
    pub(crate) fn open(
        parts: ShardSetup,
        storage: ArenaStorage,
        run: ServerRun,
        now: Instant,
    ) -> Result<Shard, StorageError> {
        if parts.config.storage.durability == Durability::Power {
            storage.sync_way()?;
        }
        let control = storage.open(&file_name(Kind::Control, 0))?;
        let mut shard = match control {
            Some(control) => {
                let found = open_control(&parts, &storage, &run, control)?;
                let images = found.images;
                let mut shard = Shard::reopen(parts, storage, run, found, now)?;
                shard.resume_images_from(images);
                shard
            }
            None => Shard::create(parts, storage, run)?,
        };
        shard.peers.registry.begin(now);
        // Push slot numbers of earlier processes are not reused, because a client may still send
        // them.
        shard.files.lives += 1;
        shard.intake.next_push_slot = (shard.files.lives as u32 & 0xfff) << 20 | 1;
        if let Some(inbox) = &mut shard.intake.inbox {
            inbox.number_from(shard.intake.next_push_slot);
        }
        shard.stamp_answers();
        let Shard { steps, applier, intake, peers, out, .. } = &mut shard;
        steps.decide(applier, intake, peers, out, now);
        shard.persist();
        Ok(shard)
    }

    fn create(
        parts: ShardSetup,
        storage: ArenaStorage,
        run: ServerRun,
    ) -> Result<Shard, StorageError> {
        clear_unfinished(&storage)?;
        let stamp = Stamp { shard: parts.id, arena: run.arena };
        let text = control_text(&run, &parts.identity);
        let arena = Arena { storage, stamp };
        let bytes = (1 + 1 + GROWTH) * PAGE_BYTES;
        let mut control = arena.storage.create(CONTROL_NEW, bytes as u64)?;
        let page = Page { kind: Kind::Control, stamp, generation: 0, text };
        control.write(0, &page.encode());
        let journal =
            Journal::create(&arena, control, transaction_words(0, 0), parts.config.planted)?;
        if parts.config.storage.durability == Durability::Power {
            // The first page identifies the arena of an image.
            arena.storage.sync(CONTROL_NEW)?;
            // Nothing is committed before both names are on disk. An intent with a commit but
            // without a control file is an arena's state, and is not removed.
            arena.storage.sync_names()?;
        }
        arena.storage.rename(CONTROL_NEW, &file_name(Kind::Control, 0))?;
        Ok(Shard::with(parts, arena, journal, run))
    }

    fn with(parts: ShardSetup, arena: Arena, journal: Journal, run: ServerRun) -> Shard {
        let ShardSetup { id, config, identity, budget, counters } = parts;
        let power = (config.storage.durability == Durability::Power).then(Power::default);
        let registry = ClientRegistry::new(config.lease, run.epoch_base, config.planted);
        Shard {
            files: ShardFiles { arena, budget, journal, generation: 0, lives: 0 },
            power,
            variables: Variables::new(id, config.clone(), counters.clone()),
            peers: Peers::new(config.clone(), registry),
            intake: Intake::new(config.clone(), counters.clone()),
            applier: Applier::new(id, counters.clone()),
            steps: Steps::new(id, config.clone(), counters.clone()),
            pulls: Pulls::new(config.clone(), counters.clone()),
            checkpoints: ShardCheckpoints::new(id, config.clone()),
            out: Outputs::default(),
            id,
            config,
            identity,
            counters,
        }
    }

    fn reopen(
        parts: ShardSetup,
        storage: ArenaStorage,
        run: ServerRun,
        found: OpenedControl,
        now: Instant,
    ) -> Result<Shard, StorageError> {
        let OpenedControl { control, .. } = found;
        let name = file_name(Kind::Control, 0);
        let corrupt = |fault| storage.corrupt(&name, fault);
        let page = Page::decode(control.bytes()).map_err(corrupt)?;
        let stamp = Stamp { shard: parts.id, arena: page.stamp.arena };
        page.check(Kind::Control, stamp, 0).map_err(corrupt)?;
        let lengths = 2 * PAGE_BYTES..=CONTROL_BYTES_MAX;
        if !lengths.contains(&control.len()) {
            let what = format!("a file of {} to {} bytes", lengths.start(), lengths.end());
            return Err(storage.corrupt(&name, Fault::at(control.len(), what)));
        }
        let arena = Arena { storage, stamp };
        let corrupt = |fault| arena.storage.corrupt(&name, fault);
        let mut journal = Journal::open(&arena, control, parts.config.planted)?;
        let cell = journal.first_cell()?;
        if let Some(reason) = poison::decode(&cell).map_err(corrupt)? {
            return Err(StorageError::Poisoned { path: arena.storage.path(&name), reason });
        }
        let record = ShardRecord::decode(&cell).map_err(corrupt)?;
        let ShardRecord { generation, stage, clients, .. } = record;
        let declared = stage != ShardStage::Absent;
        if declared {
            journal.use_tables(arena.open(Kind::Tables, generation, None)?, generation);
            let layout = open_catalogue(&arena, &record)?.layout(parts.id);
            for (table, _) in (0..).zip(layout.tables()) {
                Table::map_index(&arena, generation, table, &mut journal)?;
            }
        }
        journal.redo()?;
        journal.verify_control((1 + clients) * CELL_WORDS)?;
        let mut shard = Shard::with(parts, arena, journal, run);
        shard.recover(&record, now)?;
        if declared {
            shard.recover_variables(&record, now)?;
        } else {
            shard.files.journal.check_intent(transaction_words(0, 0))?;
        }
        // Leftovers are removed only after every check, so that files which are refused stay
        // unchanged.
        if shard.power.is_none() {
            let of_tables = shard.variables.store().map(files_of_tables).unwrap_or_default();
            remove_leftovers(&shard.files.arena, declared.then_some(generation), &of_tables)?;
        }
        Ok(shard)
    }

    /// Restores the step and the clients.
    fn recover(&mut self, record: &ShardRecord, now: Instant) -> Result<(), StorageError> {
        (self.variables.version, self.variables.gradients) = (record.version, record.gradients);
        (self.files.lives, self.files.generation) = (record.lives, record.generation);
        (self.variables.epoch, self.variables.restored_step) =
            (record.restore_epoch, record.restored_step);
        self.peers.registry.mint_above(record.newest_epoch);
        (self.peers.chief.epoch, self.peers.chief.client) = (record.chief, record.chief_client);
        if let Some(owner) = &mut self.steps.owner {
            owner.restore(record.steps);
            self.counters.global_step.set(record.steps.step);
        }
        if self.steps.follower.is_some() {
            self.steps.follower = Some(StepFollower::new(record.applied, self.config.planted));
        }
        for number in 0..record.clients {
            self.recover_client(number, now).map_err(|fault| {
                self.files.arena.storage.corrupt(&file_name(Kind::Control, 0), fault)
            })?;
        }
        Ok(())
    }

    fn recover_client(&mut self, number: usize, now: Instant) -> Result<(), Fault> {
        let first = record::first_of_client(number);
        let words: Vec<u64> = (first..first + CLIENT_WORDS)
            .map(|index| self.files.journal.load(Address::Control(index)))
            .collect();
        let (client, tokens, progress) =
            record::decode_client(number, &words, self.config.planted)?;
        let fault = |what| Err(Fault::at(offset_of(Address::Control(first)), what));
        let key = ClientKey(number as u32);
        for issued in tokens {
            let owner = self.steps.owner.as_mut();
            if !owner.is_some_and(|owner| owner.restore_token(key, issued, now)) {
                return fault(format!(
                    "a client whose token {} no other client holds",
                    issued.token
                ));
            }
        }
        if let Some(tokens) = self.steps.asynchronous_tokens_mut() {
            tokens.restore_progress(key, progress);
        }
        match self.peers.registry.restore(client, now) {
            true => Ok(()),
            false => fault("a client whose task no earlier client has".to_owned()),
        }
    }

    /// Restores the variables, and the complete pushes in the inbox.
    fn recover_variables(
        &mut self,
        record: &ShardRecord,
        now: Instant,
    ) -> Result<(), StorageError> {
        let &ShardRecord { generation, push_slots, integrity, .. } = record;
        let storage = self.files.arena.storage.clone();
        let corrupt = |kind, fault| storage.corrupt(&file_name(kind, generation), fault);
        let catalogue = open_catalogue(&self.files.arena, record)?;
        let layout = catalogue.layout(self.id);
        let geometry =
            StoreGeometry::of_words(&layout, record.slots, record.block_bytes, record.pinned);
        self.can_train(&catalogue)?;
        let rules = self.config.rules.of_variables(&catalogue);
        let slots = rules.most_slots(&layout);
        let geometry = geometry.filter(|geometry| geometry.slots == slots).ok_or_else(|| {
            let what = format!("blocks for these variables, with {slots} slots");
            self.files
                .arena
                .storage
                .corrupt(&file_name(Kind::Control, 0), Fault::at(PAGE_BYTES, what))
        })?;
        let words = table_words(&geometry, &layout, push_slots);
        let tables = layout.tables().len();
        self.files.journal.check_tables(generation, table_bytes(words + tables))?;
        self.files.journal.verify_tables(generation)?;
        self.files.journal.check_intent(transaction_words(words, tables))?;
        let reservation = self.files.budget.reserve(need(&geometry, &layout, push_slots))?;
        let bytes = Inbox::file_bytes(&layout, push_slots);
        let memory = self.files.arena.open(Kind::Inbox, generation, Some(bytes))?;
        let mut inbox = Inbox::new(memory, &layout, push_slots, 1);
        let first = geometry.table_words();
        for (index, partition) in layout.partitions().iter().enumerate() {
            let bits = self.files.journal.load(Address::Tables(first + index / 64));
            if bits >> (index % 64) & 1 == 1 {
                self.variables.assigned.insert(partition.id);
            }
        }
        let first = first + map_words(&layout);
        let admitted = first + Inbox::table_words(&layout, push_slots);
        self.recover_admitted(record, admitted).map_err(|fault| corrupt(Kind::Tables, fault))?;
        // The push slots of an image may have been reused since. The pushes that were in them were
        // not answered.
        let whole = match record.from_image {
            true => Vec::new(),
            false => whole_slots(&self.files.journal, &layout, first, push_slots, record.clients)
                .and_then(|whole| self.check_whole_slots(whole, record.stage, first))
                .map_err(|fault| corrupt(Kind::Tables, fault))?,
        };
        let gradients = whole.iter().map(|push_slot| &push_slot.arrival);
        let gradients = gradients.filter(|push| push.operation == Operation::Gradient {});
        let complete: BTreeSet<TokenId> = gradients.map(|push| push.token).collect();
        let whole = inbox
            .restore(whole, &layout, integrity, now)
            .map_err(|fault| corrupt(Kind::Inbox, fault))?;
        let plan = StorePlan {
            arena: self.files.arena.clone(),
            generation,
            catalogue: Arc::new(catalogue),
            layout,
            geometry,
            integrity,
            cached_bytes_max: self.config.cached_bytes_max,
            power: self.power.is_some(),
            planted: self.config.planted,
        };
        let mut store =
            Box::new(Store::open(plan, reservation, &self.files.journal, self.variables.version)?);
        store.attach_tables(
            &self.files.arena,
            generation,
            &self.files.budget,
            &rules,
            |inputs| Table::open(inputs, &mut self.files.journal),
        )?;
        let ready = record.stage == ShardStage::Ready;
        if integrity && ready {
            store.verify(&self.files.journal).map_err(|(kind, fault)| corrupt(kind, fault))?;
        }
        self.variables.fused_ranges = FusedRanges::new(store.layout(), &rules);
        self.steps.count_participants(store.catalogue().shards());
        self.variables.state =
            if ready { VariablesState::Ready(store) } else { VariablesState::Declared(store) };
        self.variables.rules = rules;
        self.return_tokens_of_absent_clients(now, &complete);
        let waits = |push_slot: &u32| {
            inbox.arrival(*push_slot).is_some_and(|push| self.steps.waits_for_step(push))
        };
        let due: Vec<u32> = whole.into_iter().filter(|push_slot| !waits(push_slot)).collect();
        self.intake.inbox = Some(inbox);
        // These pushes were sent, and scanned on arrival: push buffers end with their process.
        self.applier
            .jobs
            .extend(due.into_iter().map(|push_slot| ShardJob::Push(PushJob::new(push_slot, true))));
        self.steps.recover_held(&mut self.applier, &self.intake);
        Ok(())
    }

    /// Restores the pushes that are admitted to the current synchronous step.
    fn recover_admitted(&mut self, record: &ShardRecord, first: usize) -> Result<(), Fault> {
        if self.steps.coordinator().is_none() {
            return Ok(());
        }
        let words = 0..record::admitted_words(record.push_slots);
        let words: Vec<u64> =
            words.map(|word| self.files.journal.load(Address::Tables(first + word))).collect();
        let admitted = record::decode_admitted(&words, record.clients).map_err(|word| {
            let at = offset_of(Address::Tables(first + word));
            Fault::at(at, "pushes that are admitted to a step")
        })?;
        let joined = self.peers.registry.keys().collect();
        let present =
            |key: &ClientKey| self.peers.registry.client(*key).presence == ClientPresence::Present;
        let live = self.peers.registry.keys().filter(present);
        let live = live.map(|key| (key, self.peers.registry.client(key).task.index)).collect();
        if let Some(coordinator) = self.steps.coordinator_mut() {
            coordinator.restore_admitted(admitted, record.applying, record.goal);
            coordinator.restore_live(live, joined);
        }
        Ok(())
    }

    /// Returns the tokens of absent clients, except those of complete pushes in the inbox. Other
    /// complete pushes were in a push buffer, or in slots of an image, and are lost. Other shards
    /// that may have applied their shares are asked first.
    fn return_tokens_of_absent_clients(&mut self, now: Instant, complete: &BTreeSet<TokenId>) {
        let asks = !self.steps.shards_to_ask().is_empty();
        let absent =
            |holder| self.peers.registry.client(holder).presence != ClientPresence::Present;
        if asks && let Some(tokens) = self.steps.asynchronous_tokens_mut() {
            let timeout = self.config.token_timeout;
            tokens.recall(now, timeout, absent, |token| complete.contains(&token));
            return;
        }
        let Some(owner) = &mut self.steps.owner else { return };
        let lost = owner.ledger().iter();
        let lost = lost.filter(|out| absent(out.holder) && !complete.contains(&out.issued.token));
        let lost: BTreeSet<ClientKey> = lost.map(|out| out.holder).collect();
        for holder in lost {
            owner.drop_client(holder, false, |token| complete.contains(&token));
        }
    }

    /// Checks that the complete pushes are consistent with the clients, the tokens and the
    /// variables.
    fn check_whole_slots(
        &self,
        whole: Vec<WholeSlot>,
        stage: ShardStage,
        first: usize,
    ) -> Result<Vec<WholeSlot>, Fault> {
        let mut spent = BTreeSet::new();
        let coordinator = self.steps.coordinator();
        let admitted = |token| {
            let admitted = coordinator.map(StepCoordinator::admitted).unwrap_or_default();
            admitted.iter().any(|grant| grant.token == token)
        };
        for WholeSlot { arrival: push, holder, .. } in &whole {
            let window = holder.map(|holder| &self.peers.registry.client(holder).window);
            let settled = window.is_some_and(|window| {
                let state = window.state(push.sequence);
                let held = PushState::Settled { outcome: Outcome::Held {} };
                let is_admitted = admitted(push.token.0);
                matches!(state, PushState::Settled { .. }) && state != held && !is_admitted
            });
            let gradient = push.operation == Operation::Gradient {};
            let allowed = stage == ShardStage::Ready || push.operation == Operation::Assign {};
            let paid = !gradient
                || self.steps.owner.as_ref().is_none_or(|owner| {
                    let out = owner.ledger().get(push.token.0);
                    let out = out.is_some_and(|out| out.issued.generation == push.generation);
                    (out || admitted(push.token.0)) && spent.insert(push.token)
                });
            if settled || !allowed || !paid {
                let what = format!("pushes that can be applied, not push {}", push.sequence);
                return Err(Fault::at(offset_of(Address::Tables(first)), what));
            }
        }
        Ok(whole)
    }
}

/// The name of the control file during its creation.
pub(super) const CONTROL_NEW: &str = "control.new";

/// Removes the files of an unfinished creation, after a kill or a loss of power. An arena exists
/// once it has its control file. Any other files without one are an arena's state, and are an
/// error.
fn clear_unfinished(storage: &ArenaStorage) -> Result<(), StorageError> {
    let (intent, names) = (file_name(Kind::Intent, 0), storage.names()?);
    let mut unfinished = names.iter().all(|name| *name == CONTROL_NEW || *name == intent);
    // The intent is created after the new control file, but a power cut may leave only the intent's
    // name.
    if unfinished && names == [intent.as_str()] {
        let memory = storage.open(&intent)?;
        unfinished = memory.is_none_or(|memory| is_unused_intent(memory.bytes()));
    }
    if !unfinished {
        return Err(StorageError::Missing { path: storage.path(&file_name(Kind::Control, 0)) });
    }
    storage.remove(&intent)?;
    storage.remove(CONTROL_NEW)
}
