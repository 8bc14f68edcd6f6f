//! The files of a shard: made, and opened again as an earlier process left them.
//!
//! Nothing that the files say is believed before it is verified, and no memory is had for a count
//! before it is known that the files are as long as it says.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, RestoreEpoch, ShardId, TokenId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Outcome, PushState};

use super::fused_ranges::FusedRanges;
use super::generation::{files_of_tables, need, open_catalogue, remove_leftovers, table_words};
use super::parked::Parked;
use super::power::Power;
use super::record::{self, CLIENT_WORDS, ShardRecord, Stage};
use super::reopenable::{Reopenable, control_text, reopenable};
use super::replicas::{CLIENTS_MAX, ClientKey, Presence, Replicas};
use super::staleness::Backups;
use super::work::Job;
use super::{Shard, Variables, poison};
use crate::aggregate::step_coordinator::StepCoordinator;
use crate::aggregate::step_follower::StepFollower;
use crate::aggregate::step_owner::StepOwner;
use crate::arena::{Arena, Budget, Place, file_name};
use crate::commit::{Address, CELL_WORDS, Journal, has_seen_no_commit, offset_of, table_bytes};
use crate::config::{Durability, PsConfig};
use crate::error::StorageError;
use crate::inbox::{Inbox, WholeSlot, map_words, whole_slots};
use crate::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use crate::metrics::Counters;
use crate::optimizer::VariableRules;
use crate::store::{Geometry, Plan, Store};
use crate::table::Table;

/// What the process that opens an arena brings along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    /// The boot of the machine: what was in memory only is gone with it.
    pub(crate) boot: [u8; 16],
    /// What a new arena is called; no two are called the same.
    pub(crate) arena: u64,
    /// A number that is higher in each life of the server than all epochs of the lives before.
    pub(crate) epoch_base: u64,
}

/// Clients that one transaction has room for beside a push.
const CLIENTS_AT_ONCE: usize = 16;

/// Cells by which the control file grows.
pub(super) const GROWTH: usize = 16;

/// The longest control file.
pub(crate) const CONTROL_BYTES_MAX: usize = (1 + 1 + CLIENTS_MAX + 1 + GROWTH) * PAGE_BYTES;

/// The largest transaction of a shard whose tables have so many words, beside what changes in the
/// indices of so many tables that grow.
pub(super) fn transaction_words(table_words: usize, tables: usize) -> usize {
    // What belongs to the table itself, and the numbers of its last commit, here and there.
    let of_tables = tables * 8;
    table_words + of_tables + ShardRecord::WORDS + CLIENTS_AT_ONCE * CLIENT_WORDS
}

/// What a shard is made of beside its state.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) id: ShardId,
    pub(crate) config: Arc<PsConfig>,
    pub(crate) identity: Arc<Identity>,
    pub(crate) budget: Budget,
    pub(crate) counters: Arc<Counters>,
}

impl Shard {
    /// Opens the shard whose files are in this place, or makes a new one there.
    pub(crate) fn open(
        parts: Parts,
        place: Place,
        life: Life,
        now: Instant,
    ) -> Result<Shard, StorageError> {
        if parts.config.durability == Durability::Power {
            place.sync_way()?;
        }
        let control = place.open(&file_name(Kind::Control, 0))?;
        let mut shard = match control {
            Some(control) => {
                let found = reopenable(&parts, &place, &life, control)?;
                let images = found.images;
                let mut shard = Shard::reopen(parts, place, life, found, now)?;
                shard.images_go_on_from(images);
                shard
            }
            None => Shard::create(parts, place, life)?,
        };
        shard.replicas.begin(now);
        // Rooms of earlier lives are not given out again: somebody may still name them.
        shard.lives += 1;
        shard.next_push_slot = (shard.lives as u32 & 0xfff) << 20 | 1;
        if let Some(inbox) = &mut shard.inbox {
            inbox.number_from(shard.next_push_slot);
        }
        shard.persist();
        Ok(shard)
    }

    fn create(parts: Parts, place: Place, life: Life) -> Result<Shard, StorageError> {
        clear_unborn(&place)?;
        let stamp = Stamp { shard: parts.id, arena: life.arena };
        let text = control_text(&life, &parts.identity);
        let arena = Arena { place, stamp };
        let bytes = (1 + 1 + GROWTH) * PAGE_BYTES;
        let mut control = arena.place.create(CONTROL_NEW, bytes as u64)?;
        let page = Page { kind: Kind::Control, stamp, generation: 0, text };
        control.write(0, &page.encode());
        let journal =
            Journal::create(&arena, control, transaction_words(0, 0), parts.config.planted)?;
        if parts.config.durability == Durability::Power {
            // Its first page says whose image it is.
            arena.place.sync(CONTROL_NEW)?;
            // Nothing is committed before both names are there: an intent without a control file
            // that has seen a commit is somebody's.
            arena.place.sync_names()?;
        }
        arena.place.rename(CONTROL_NEW, &file_name(Kind::Control, 0))?;
        Ok(Shard::with(parts, arena, journal, life))
    }

    fn with(parts: Parts, arena: Arena, journal: Journal, life: Life) -> Shard {
        let Parts { id, config, identity, budget, counters } = parts;
        let owns_step = id.shard == 0 && config.owns_step();
        let follower = config.rule().map(|_| StepFollower::new(0, config.planted));
        let owner = owns_step.then(|| {
            let coordinator =
                config.rule().map(|rule| StepCoordinator::new(rule, 1, config.planted));
            StepOwner::new(config.last_step, config.token_timeout, coordinator)
                .bounded(config.wait_ahead, config.reject_older)
        });
        let power = (config.durability == Durability::Power).then(Power::default);
        Shard {
            id,
            replicas: Replicas::new(config.lease, life.epoch_base, config.planted),
            chief: ClientEpoch(0),
            chief_client: None,
            owner,
            follower,
            tile: Vec::new(),
            shared_tile: Vec::new(),
            backups: Backups::default(),
            parts: BTreeMap::new(),
            told: None,
            asked_for_recalls: None,
            owner_is_up: false,
            owner_lost: None,
            parts_heard: BTreeMap::new(),
            told_owner: None,
            short_since: None,
            first_join: None,
            config,
            identity,
            arena,
            budget,
            journal,
            variables: Variables::Absent,
            rules: VariableRules::default(),
            fused_ranges: FusedRanges::default(),
            epoch: RestoreEpoch(0),
            restored_step: GlobalStep(0),
            generation: 0,
            lives: 0,
            next_push_slot: 1,
            inbox: None,
            parked: Parked::default(),
            conversations: HashMap::new(),
            jobs: VecDeque::new(),
            streaming_apply: None,
            saving: None,
            kept_cut: None,
            chief_told: None,
            saves_a_cut: false,
            save_requests: VecDeque::new(),
            restoring: None,
            power,
            version: 0,
            gradients: 0,
            assigned: BTreeSet::new(),
            growth: None,
            passed_over: Vec::new(),
            members: (0, 0),
            counters,
            outputs: VecDeque::new(),
            changed: Vec::new(),
            encoded_values: Vec::new(),
            rows: Default::default(),
            buffer_pool: Default::default(),
        }
    }

    fn reopen(
        parts: Parts,
        place: Place,
        life: Life,
        found: Reopenable,
        now: Instant,
    ) -> Result<Shard, StorageError> {
        let Reopenable { control, .. } = found;
        let name = file_name(Kind::Control, 0);
        let corrupt = |fault| place.corrupt(&name, fault);
        let page = Page::decode(control.bytes()).map_err(corrupt)?;
        let stamp = Stamp { shard: parts.id, arena: page.stamp.arena };
        page.check(Kind::Control, stamp, 0).map_err(corrupt)?;
        let lengths = 2 * PAGE_BYTES..=CONTROL_BYTES_MAX;
        if !lengths.contains(&control.len()) {
            let what = format!("a file of {} to {} bytes", lengths.start(), lengths.end());
            return Err(place.corrupt(&name, Fault::at(control.len(), what)));
        }
        let arena = Arena { place, stamp };
        let corrupt = |fault| arena.place.corrupt(&name, fault);
        let mut journal = Journal::open(&arena, control, parts.config.planted)?;
        let cell = journal.first_cell()?;
        if let Some(reason) = poison::decode(&cell).map_err(corrupt)? {
            return Err(StorageError::Poisoned { path: arena.place.path(&name), reason });
        }
        let record = ShardRecord::decode(&cell).map_err(corrupt)?;
        let ShardRecord { generation, stage, clients, .. } = record;
        let declared = stage != Stage::Absent;
        if declared {
            journal.use_tables(arena.open(Kind::Tables, generation, None)?, generation);
            let layout = open_catalogue(&arena, &record)?.layout(parts.id);
            for (table, _) in (0..).zip(layout.tables()) {
                Table::map_index(&arena, generation, table, &mut journal)?;
            }
        }
        journal.redo()?;
        journal.verify_control((1 + clients) * CELL_WORDS)?;
        let mut shard = Shard::with(parts, arena, journal, life);
        shard.recover(&record, now)?;
        if declared {
            shard.recover_variables(&record, now)?;
        } else {
            shard.journal.check_intent(transaction_words(0, 0))?;
        }
        // Not before all is known to be there: what is refused is left as it was found.
        if shard.power.is_none() {
            let of_tables = shard.store().map(files_of_tables).unwrap_or_default();
            remove_leftovers(&shard.arena, declared.then_some(generation), &of_tables)?;
        }
        Ok(shard)
    }

    /// Takes up the step and the clients.
    fn recover(&mut self, record: &ShardRecord, now: Instant) -> Result<(), StorageError> {
        (self.version, self.gradients) = (record.version, record.gradients);
        (self.lives, self.generation) = (record.lives, record.generation);
        (self.epoch, self.restored_step) = (record.restore_epoch, record.restored_step);
        self.replicas.mint_above(record.newest_epoch);
        (self.chief, self.chief_client) = (record.chief, record.chief_client);
        if let Some(owner) = &mut self.owner {
            owner.restore(record.steps);
            self.counters.global_step.set(record.steps.step);
        }
        if self.follower.is_some() {
            self.follower = Some(StepFollower::new(record.applied, self.config.planted));
        }
        for number in 0..record.clients {
            self.recover_client(number, now)
                .map_err(|fault| self.arena.place.corrupt(&file_name(Kind::Control, 0), fault))?;
        }
        Ok(())
    }

    fn recover_client(&mut self, number: usize, now: Instant) -> Result<(), Fault> {
        let first = record::first_of_client(number);
        let words: Vec<u64> = (first..first + CLIENT_WORDS)
            .map(|index| self.journal.load(Address::Control(index)))
            .collect();
        let (client, tokens, progress) =
            record::decode_client(number, &words, self.config.planted)?;
        let fault = |what| Err(Fault::at(offset_of(Address::Control(first)), what));
        let key = ClientKey(number as u32);
        for issued in tokens {
            let owner = self.owner.as_mut();
            if !owner.is_some_and(|owner| owner.restore_token(key, issued, now)) {
                return fault(format!("a client whose token {} is its own", issued.token));
            }
        }
        if let Some(owner) = &mut self.owner {
            owner.restore_progress(key, progress);
        }
        match self.replicas.restore(client, now) {
            true => Ok(()),
            false => fault("a client of another task than those before it".to_owned()),
        }
    }

    /// Takes up the variables and the pushes that lie whole in the inbox.
    fn recover_variables(
        &mut self,
        record: &ShardRecord,
        now: Instant,
    ) -> Result<(), StorageError> {
        let &ShardRecord { generation, push_slots, integrity, .. } = record;
        let place = self.arena.place.clone();
        let corrupt = |kind, fault| place.corrupt(&file_name(kind, generation), fault);
        let catalogue = open_catalogue(&self.arena, record)?;
        let layout = catalogue.layout(self.id);
        let geometry = Geometry::of_words(&layout, record.slots, record.block_bytes, record.pinned);
        self.can_train(&catalogue)?;
        let rules = self.config.rules.of_variables(&catalogue);
        let slots = rules.most_slots(&layout);
        let geometry = geometry.filter(|geometry| geometry.slots == slots).ok_or_else(|| {
            let what = format!("blocks for these variables, with {slots} slots");
            self.arena.place.corrupt(&file_name(Kind::Control, 0), Fault::at(PAGE_BYTES, what))
        })?;
        let words = table_words(&geometry, &layout, push_slots);
        let tables = layout.tables().len();
        self.journal.check_tables(generation, table_bytes(words + tables))?;
        self.journal.verify_tables(generation)?;
        self.journal.check_intent(transaction_words(words, tables))?;
        let loan = self.budget.take(need(&geometry, &layout, push_slots))?;
        let bytes = Inbox::file_bytes(&layout, push_slots);
        let memory = self.arena.open(Kind::Inbox, generation, Some(bytes))?;
        let mut inbox = Inbox::new(memory, &layout, push_slots, 1);
        let first = geometry.table_words();
        for (index, partition) in layout.partitions().iter().enumerate() {
            let bits = self.journal.load(Address::Tables(first + index / 64));
            if bits >> (index % 64) & 1 == 1 {
                self.assigned.insert(partition.id);
            }
        }
        let first = first + map_words(&layout);
        let admitted = first + Inbox::table_words(&layout, push_slots);
        self.recover_admitted(record, admitted).map_err(|fault| corrupt(Kind::Tables, fault))?;
        // The rooms of an image may have been used again since: what lay in them was not answered.
        let whole = match record.from_image {
            true => Vec::new(),
            false => whole_slots(&self.journal, &layout, first, push_slots, record.clients)
                .and_then(|whole| self.check_whole_slots(whole, record.stage, first))
                .map_err(|fault| corrupt(Kind::Tables, fault))?,
        };
        let gradients = whole.iter().map(|push_slot| &push_slot.arrival);
        let gradients = gradients.filter(|push| push.operation == Operation::Gradient {});
        let kept: BTreeSet<TokenId> = gradients.map(|push| push.token).collect();
        let whole = inbox
            .restore(whole, &layout, integrity, now)
            .map_err(|fault| corrupt(Kind::Inbox, fault))?;
        let plan = Plan {
            arena: self.arena.clone(),
            generation,
            catalogue: Arc::new(catalogue),
            layout,
            geometry,
            integrity,
            cached_bytes_max: self.config.cached_bytes_max,
            power: self.power.is_some(),
            planted: self.config.planted,
        };
        let mut store = Box::new(Store::open(plan, loan, &self.journal, self.version)?);
        store.have_tables(&self.arena, generation, &self.budget, &rules, |making| {
            Table::open(making, &mut self.journal)
        })?;
        let ready = record.stage == Stage::Ready;
        if integrity && ready {
            store.verify(&self.journal).map_err(|(kind, fault)| corrupt(kind, fault))?;
        }
        self.fused_ranges = FusedRanges::new(store.layout(), &rules);
        self.variables = if ready { Variables::Ready(store) } else { Variables::Declared(store) };
        self.rules = rules;
        self.shards_are_known();
        self.return_tokens_of_the_gone(now, &kept);
        let waits = |push_slot: &u32| {
            inbox.arrival(*push_slot).is_some_and(|push| self.waits_for_step(push))
        };
        let due: Vec<u32> = whole.into_iter().filter(|push_slot| !waits(push_slot)).collect();
        self.inbox = Some(inbox);
        // Their parts were sent, and scanned on arrival: a push buffer goes with its process.
        self.jobs.extend(due.into_iter().map(|push_slot| Job::push(push_slot, true)));
        self.recover_held(now);
        Ok(())
    }

    /// Takes up what is admitted to the synchronous step under way.
    fn recover_admitted(&mut self, record: &ShardRecord, first: usize) -> Result<(), Fault> {
        if self.coordinator().is_none() {
            return Ok(());
        }
        let words = 0..record::admitted_words(record.push_slots);
        let words: Vec<u64> =
            words.map(|word| self.journal.load(Address::Tables(first + word))).collect();
        let admitted = record::decode_admitted(&words, record.clients).map_err(|word| {
            let at = offset_of(Address::Tables(first + word));
            Fault::at(at, "pushes that are admitted to a step")
        })?;
        let seen = self.replicas.keys().collect();
        let present = |key: &ClientKey| self.replicas.client(*key).presence == Presence::Present;
        let live = self.replicas.keys().filter(present);
        let live = live.map(|key| (key, self.replicas.client(key).task.index)).collect();
        if let Some(coordinator) = self.coordinator_mut() {
            coordinator.restore_admitted(admitted, record.applying, record.goal);
            coordinator.restore_live(live, seen);
        }
        Ok(())
    }

    /// Takes back the tokens of clients that are gone, but for those of their pushes that lie whole: the
    /// others lay whole, too, in a tray or in rooms that are those of an image, and are lost. Where other
    /// shards may have applied their shares, they are asked first.
    fn return_tokens_of_the_gone(&mut self, now: Instant, kept: &BTreeSet<TokenId>) {
        let asks = !self.shards_to_ask().is_empty();
        let Some(owner) = &mut self.owner else { return };
        let gone = |holder| self.replicas.client(holder).presence != Presence::Present;
        if asks {
            owner.recall(now, gone, |token| kept.contains(&token));
            return;
        }
        let lost =
            owner.outstanding().filter(|&(token, holder)| gone(holder) && !kept.contains(&token));
        let lost: BTreeSet<ClientKey> = lost.map(|(_, holder)| holder).collect();
        for holder in lost {
            owner.drop_client(holder, |token| kept.contains(&token));
        }
    }

    /// Whether the whole pushes are ones that the clients, the tokens and the variables allow.
    fn check_whole_slots(
        &self,
        whole: Vec<WholeSlot>,
        stage: Stage,
        first: usize,
    ) -> Result<Vec<WholeSlot>, Fault> {
        let mut spent = BTreeSet::new();
        let coordinator = self.coordinator();
        let admitted = |token| {
            let admitted = coordinator.map(StepCoordinator::admitted).unwrap_or_default();
            admitted.iter().any(|grant| grant.token == token)
        };
        for WholeSlot { arrival: push, holder, .. } in &whole {
            let window = holder.map(|holder| &self.replicas.client(holder).window);
            let settled = window.is_some_and(|window| {
                let state = window.state(push.sequence);
                let kept = PushState::Settled { outcome: Outcome::Held {} };
                let is_admitted = admitted(push.token.0);
                matches!(state, PushState::Settled { .. }) && state != kept && !is_admitted
            });
            let gradient = push.operation == Operation::Gradient {};
            let allowed = stage == Stage::Ready || push.operation == Operation::Assign {};
            let paid = !gradient
                || self.owner.as_ref().is_none_or(|owner| {
                    let out = owner.is_out(push.token, push.generation);
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

/// What the control file is called while it is made.
pub(super) const CONTROL_NEW: &str = "control.new";

/// Removes what a process has left that was killed, or whose machine lost its power, while it made
/// an arena: that is one only once it has its control file. Anything else without one is somebody's
/// state.
fn clear_unborn(place: &Place) -> Result<(), StorageError> {
    let (intent, names) = (file_name(Kind::Intent, 0), place.names()?);
    let mut unborn = names.iter().all(|name| *name == CONTROL_NEW || *name == intent);
    // The intent comes after the new control file, but a cut may leave its name alone.
    if unborn && names == [intent.as_str()] {
        let memory = place.open(&intent)?;
        unborn = memory.is_none_or(|memory| has_seen_no_commit(memory.bytes()));
    }
    if !unborn {
        return Err(StorageError::Missing { path: place.path(&file_name(Kind::Control, 0)) });
    }
    place.remove(&intent)?;
    place.remove(CONTROL_NEW)
}
