//! What a shard remembers across a restart, as words; and how it is taken up again.
//!
//! The words are a function of the shard's tables. After each input those that differ are
//! committed in one transaction, before anything that was answered leaves the shard. So nothing is
//! promised that is not kept, and no place in the shard has to say what it changed but the tables
//! themselves.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::catalogue::{Catalogue, ShardLayout};
use pushpull_common::identity::Identity;
use pushpull_common::ids::{
    ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId, TokenId,
};
use pushpull_common::protocol::limits::{JOB_BYTES_MAX, TOKENS_PER_CLIENT_MAX};
use pushpull_common::protocol::message::IdentityFields;
use pushpull_common::protocol::wire::{Reader, Wire};

use super::parked::Parked;
use super::power::{Power, newest_image};
use super::replicas::{CLIENTS_MAX, ClientKey, Presence, Remembered, Replicas};
use super::work::Job;
use super::{Shard, Variables};
use crate::aggregate::step_owner::{Issued, StepOwner, Steps};
use crate::arena::{Arena, Budget, Memory, Place, file_name};
use crate::commit::{Address, CELL_WORDS, Journal};
use crate::config::{Durability, PsConfig};
use crate::dedupe::Window;
use crate::error::StorageError;
use crate::inbox::{Inbox, map_words};
use crate::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use crate::metrics::Counters;
use crate::store::{Geometry, Plan, Store};
use crate::zoo::Zoo;

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

/// The words of the shard, in the first cell of the control file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum Word {
    Version,
    Gradients,
    Step,
    NextToken,
    NewestEpoch,
    Finished,
    /// 0 for no variables, 1 for declared, 2 for ready.
    Variables,
    Generation,
    /// Four words.
    Digest,
    Clients = 12,
    Rooms,
    Lives,
    BlockBytes,
    Pinned,
    Slots,
    Integrity,
    RestoreEpoch,
    RestoredStep,
    /// How many of them there are.
    Count,
}

/// The cell of the first client.
const CLIENTS: usize = CELL_WORDS;

// The words of a client, in a cell of its own.
const JOB: usize = 4;
const TOKENS: usize = JOB + JOB_BYTES_MAX / 8;
const WINDOW: usize = TOKENS + 1 + 3 * TOKENS_PER_CLIENT_MAX;
const CLIENT_WORDS: usize = WINDOW + Window::WORDS;
const _: () = assert!(CLIENT_WORDS <= CELL_WORDS);

/// Clients that one transaction has room for beside a push.
const CLIENTS_AT_ONCE: usize = 16;

/// Cells by which the control file grows.
const GROWTH: usize = 16;

fn word(word: Word) -> Address {
    Address::Control(word as usize)
}

/// The words of the tables of a shard.
fn table_words(geometry: &Geometry, layout: &ShardLayout, rooms: usize) -> usize {
    geometry.table_words() + map_words(layout) + Inbox::table_words(layout, rooms)
}

/// The bytes of a tables file behind its first page.
pub(super) fn table_bytes(words: usize) -> u64 {
    (words.div_ceil(CELL_WORDS).max(1) * PAGE_BYTES) as u64
}

/// The largest transaction of a shard whose tables have so many words.
fn transaction_words(table_words: usize) -> usize {
    table_words + Word::Count as usize + CLIENTS_AT_ONCE * CLIENT_WORDS
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
        // Rooms of earlier lives are not given out again: somebody may still name them.
        shard.lives += 1;
        shard.next_room = (shard.lives as u32 & 0xfff) << 20 | 1;
        if let Some(inbox) = &mut shard.inbox {
            inbox.number_from(shard.next_room);
        }
        shard.persist();
        Ok(shard)
    }

    fn create(parts: Parts, place: Place, life: Life) -> Result<Shard, StorageError> {
        // A process may have been killed while it made the arena: it is one only once it has its
        // control file. But files of variables without one are somebody's state.
        for name in place.names()? {
            let unborn = [file_name(Kind::Intent, 0), CONTROL_NEW.to_owned()].contains(&name);
            if !unborn {
                let path = place.path(&file_name(Kind::Control, 0));
                return Err(StorageError::Missing { path });
            }
            place.remove(&name)?;
        }
        let stamp = Stamp { shard: parts.id, arena: life.arena };
        let text = control_text(&life, &parts.identity);
        let arena = Arena { place, stamp };
        let bytes = (1 + 1 + GROWTH) * PAGE_BYTES;
        let mut control = arena.place.create(CONTROL_NEW, bytes as u64)?;
        let page = Page { kind: Kind::Control, stamp, generation: 0, text };
        control.write(0, &page.encode());
        let journal = Journal::create(&arena, control, transaction_words(0), parts.config.zoo)?;
        if parts.config.durability == Durability::Power {
            // Its first page says whose image it is.
            arena.place.sync(CONTROL_NEW)?;
        }
        arena.place.rename(CONTROL_NEW, &file_name(Kind::Control, 0))?;
        Ok(Shard::with(parts, arena, journal, life))
    }

    fn with(parts: Parts, arena: Arena, journal: Journal, life: Life) -> Shard {
        let Parts { id, config, identity, budget, counters } = parts;
        let owns_step = id.shard == 0 && config.owns_step();
        let owner = owns_step.then(|| StepOwner::new(config.last_step, config.token_timeout));
        let power = (config.durability == Durability::Power).then(Power::default);
        Shard {
            id,
            replicas: Replicas::new(config.lease, life.epoch_base, config.zoo),
            owner,
            config,
            identity,
            arena,
            budget,
            journal,
            variables: Variables::Absent,
            epoch: RestoreEpoch(0),
            restored_step: GlobalStep(0),
            generation: 0,
            lives: 0,
            next_room: 1,
            inbox: None,
            parked: Parked::default(),
            conversations: HashMap::new(),
            jobs: VecDeque::new(),
            draft: None,
            saving: None,
            restoring: None,
            power,
            version: 0,
            gradients: 0,
            assigned: BTreeSet::new(),
            members: (0, 0),
            counters,
            outputs: VecDeque::new(),
        }
    }

    fn reopen(
        parts: Parts,
        place: Place,
        life: Life,
        found: Reopenable,
        now: Instant,
    ) -> Result<Shard, StorageError> {
        let Reopenable { control, from_image, .. } = found;
        let name = file_name(Kind::Control, 0);
        let corrupt = |fault| place.corrupt(&name, fault);
        let page = Page::decode(control.bytes()).map_err(corrupt)?;
        let stamp = Stamp { shard: parts.id, arena: page.stamp.arena };
        page.check(Kind::Control, stamp, 0).map_err(corrupt)?;
        if control.len() < 2 * PAGE_BYTES {
            let fault = Fault::at(control.len(), "the page of the shard; the file ends");
            return Err(place.corrupt(&name, fault));
        }
        let arena = Arena { place, stamp };
        let mut journal = Journal::open(&arena, control, parts.config.zoo)?;
        let generation = journal.load_committed(Word::Generation as usize)?;
        let declared = journal.load_committed(Word::Variables as usize)? != 0;
        if declared {
            journal.use_tables(arena.open(Kind::Tables, generation, None)?, generation);
        }
        journal.redo()?;
        journal.verify_control(CELL_WORDS)?;
        let clients = journal.load(word(Word::Clients));
        let clients = usize::try_from(clients).ok().filter(|&clients| clients <= CLIENTS_MAX);
        let clients = clients.ok_or_else(|| {
            arena
                .place
                .corrupt(&name, Fault::at(PAGE_BYTES + 8 * Word::Clients as usize, "clients"))
        })?;
        journal.verify_control((1 + clients) * CELL_WORDS)?;
        journal.verify_tables(generation)?;
        remove_leftovers(&arena, declared.then_some(generation))?;
        let mut shard = Shard::with(parts, arena, journal, life);
        shard.take_up(clients, now)?;
        if declared {
            shard.take_up_variables(from_image, now)?;
        }
        Ok(shard)
    }

    /// Takes up the step and the clients.
    fn take_up(&mut self, clients: usize, now: Instant) -> Result<(), StorageError> {
        let load = |at| self.journal.load(word(at));
        (self.version, self.gradients) = (load(Word::Version), load(Word::Gradients));
        (self.lives, self.generation) = (load(Word::Lives), load(Word::Generation));
        self.epoch = RestoreEpoch(load(Word::RestoreEpoch) as u32);
        self.restored_step = GlobalStep(load(Word::RestoredStep));
        self.replicas.mint_above(load(Word::NewestEpoch));
        let (step, next_token) = (load(Word::Step), load(Word::NextToken));
        let finished = load(Word::Finished) != 0;
        let zoo = self.config.zoo;
        if let Some(owner) = &mut self.owner {
            owner.restore(Steps { step, next_token, finished });
            self.counters.global_step.set(step);
        }
        for index in 0..clients {
            let first = CLIENTS + index * CELL_WORDS;
            let words: Vec<u64> = (first..first + CLIENT_WORDS)
                .map(|index| self.journal.load(Address::Control(index)))
                .collect();
            let taken_up = decode_client(&words, zoo).and_then(|(client, tokens)| {
                let key = ClientKey(index as u32);
                if let Some(owner) = &mut self.owner {
                    for issued in tokens {
                        owner.restore_token(key, issued, now);
                    }
                }
                self.replicas.restore(client, now).then_some(())
            });
            taken_up.ok_or_else(|| {
                let offset = (1 + 1 + index) * PAGE_BYTES;
                let fault = Fault::at(offset, format!("client {index}"));
                self.arena.place.corrupt(&file_name(Kind::Control, 0), fault)
            })?;
        }
        Ok(())
    }

    /// Takes up the variables and the pushes that lie whole in the inbox.
    fn take_up_variables(&mut self, from_image: bool, now: Instant) -> Result<(), StorageError> {
        let generation = self.generation;
        let corrupt = |kind, fault| self.arena.place.corrupt(&file_name(kind, generation), fault);
        let memory = self.arena.open(Kind::Catalogue, generation, None)?;
        let catalogue = Catalogue::decode(&memory.bytes()[PAGE_BYTES..]).map_err(|error| {
            corrupt(Kind::Catalogue, Fault::at(PAGE_BYTES, format!("a catalogue: {error}")))
        })?;
        let digest: Vec<u8> = (0..4)
            .flat_map(|i| {
                self.journal.load(Address::Control(Word::Digest as usize + i)).to_le_bytes()
            })
            .collect();
        if catalogue.digest()[..] != digest[..] {
            let fault = Fault::at(PAGE_BYTES, "the catalogue that was declared, not another");
            return Err(corrupt(Kind::Catalogue, fault));
        }
        let load = |at| usize::try_from(self.journal.load(word(at))).unwrap_or(usize::MAX);
        let layout = catalogue.layout(self.id);
        let (rooms, slots) = (load(Word::Rooms), load(Word::Slots));
        let block_bytes = load(Word::BlockBytes);
        let places = (layout.bytes() as usize).div_ceil(block_bytes.max(1));
        let geometry = Geometry { block_bytes, slots, places, pinned: load(Word::Pinned) };
        let integrity = load(Word::Integrity) != 0;
        if slots != self.config.optimizer.slots().len() {
            let fault = Fault::at(PAGE_BYTES, format!("the {slots} slots of its optimizer"));
            return Err(corrupt(Kind::Tables, fault));
        }
        let loan = self.budget.take(need(&geometry, &layout, rooms))?;
        let words = table_words(&geometry, &layout, rooms);
        self.journal.check_tables(generation, table_bytes(words))?;
        self.journal.reserve_intent(transaction_words(words))?;
        let bytes = Inbox::file_bytes(&layout, rooms);
        let memory = self.arena.open(Kind::Inbox, generation, Some(bytes))?;
        let mut inbox = Inbox::new(memory, &layout, rooms, 1);
        let first = geometry.table_words();
        for (index, partition) in layout.partitions().iter().enumerate() {
            let bits = self.journal.load(Address::Tables(first + index / 64));
            if bits >> (index % 64) & 1 == 1 {
                self.assigned.insert(partition.id);
            }
        }
        let first = first + map_words(&layout);
        let clients = self.replicas.counts().0 as u32;
        // The rooms of an image may have been used again since: what lay in them was not answered.
        let whole = match from_image {
            true => Some(Vec::new()),
            false => inbox.restore(&self.journal, &layout, first, clients, now),
        };
        let whole = whole
            .ok_or_else(|| corrupt(Kind::Tables, Fault::at(PAGE_BYTES, "rooms of its inbox")))?;
        let plan = Plan {
            arena: self.arena.clone(),
            generation,
            catalogue: Arc::new(catalogue),
            layout,
            geometry,
            integrity,
            cached_bytes_max: self.config.cached_bytes_max,
            power: self.power.is_some(),
            zoo: self.config.zoo,
        };
        let store = Box::new(Store::open(plan, loan, &self.journal, self.version)?);
        let ready = self.journal.load(word(Word::Variables)) == 2;
        if integrity && ready {
            store.verify(&self.journal).map_err(|(kind, fault)| corrupt(kind, fault))?;
        }
        self.variables = if ready { Variables::Ready(store) } else { Variables::Declared(store) };
        self.inbox = Some(inbox);
        self.jobs.extend(whole.into_iter().map(Job::push));
        Ok(())
    }

    /// Makes the files of a new generation of variables and takes them into use. Nothing names
    /// them before the next transaction.
    pub(super) fn make_variables(&mut self, catalogue: Arc<Catalogue>) -> Result<(), StorageError> {
        let layout = catalogue.layout(self.id);
        let (rooms, geometry) = (self.config.inbox_pushes, self.geometry(&layout));
        let loan = self.budget.take(need(&geometry, &layout, rooms))?;
        let words = table_words(&geometry, &layout, rooms);
        let generation = self.generation + 1;
        remove_leftovers(&self.arena, None)?;
        let encoded = catalogue.encode();
        let mut memory = self.arena.create(Kind::Catalogue, generation, encoded.len() as u64)?;
        memory.write(PAGE_BYTES, encoded);
        let bytes = Inbox::file_bytes(&layout, rooms);
        let inbox = self.arena.create(Kind::Inbox, generation, bytes)?;
        let inbox = Inbox::new(inbox, &layout, rooms, self.next_room);
        let tables = self.arena.create(Kind::Tables, generation, table_bytes(words))?;
        // Pages that a loss of power has kept from the disk must be found.
        let integrity = self.config.integrity_full || self.power.is_some();
        let plan = Plan {
            arena: self.arena.clone(),
            generation,
            catalogue,
            layout,
            geometry,
            integrity,
            power: self.power.is_some(),
            cached_bytes_max: self.config.cached_bytes_max,
            zoo: self.config.zoo,
        };
        let store = Store::create(plan, loan, &*self.config.optimizer)?;
        self.journal.reserve_intent(transaction_words(words))?;
        self.journal.begin_tables(tables, generation, geometry.first_table());
        self.generation = generation;
        self.inbox = Some(inbox);
        self.variables = Variables::Declared(Box::new(store));
        Ok(())
    }

    /// Forgets the variables, durably, and then removes their files.
    pub(super) fn forget_variables(&mut self) -> Result<(), StorageError> {
        self.variables = Variables::Absent;
        if let Some(inbox) = self.inbox.take() {
            self.next_room = inbox.next_number();
        }
        self.assigned.clear();
        self.persist();
        self.journal.forget_tables();
        remove_leftovers(&self.arena, None)
    }

    fn geometry(&self, layout: &ShardLayout) -> Geometry {
        let slots = self.config.optimizer.slots().len();
        Geometry::new(layout, slots, self.config.block_bytes, self.config.pin_bytes_max)
    }

    /// The bytes that the variables of a catalogue would take.
    pub(super) fn need(&self, catalogue: &Catalogue) -> u64 {
        let layout = catalogue.layout(self.id);
        need(&self.geometry(&layout), &layout, self.config.inbox_pushes)
    }

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
        let mut changed = self.replicas.take_changed();
        if let Some(owner) = &mut self.owner {
            changed.extend(owner.take_changed());
        }
        for client in changed {
            // Losing very many members at once takes more than one transaction; each is true.
            if self.journal.room() < CLIENT_WORDS {
                let made = self.journal.commit();
                self.count_commit(made);
            }
            self.stage_client(client);
        }
        let made = self.journal.commit();
        self.count_commit(made);
        if let Variables::Declared(store) | Variables::Ready(store) = &mut self.variables {
            store.committed();
        }
    }

    fn stage_shard(&mut self) {
        let steps = self.owner.as_ref().map(StepOwner::steps).unwrap_or_default();
        let state = match &self.variables {
            Variables::Absent => 0,
            Variables::Declared(_) => 1,
            Variables::Ready(_) => 2,
        };
        let mut words = [0; Word::Count as usize];
        let mut set = |at: Word, value: u64| words[at as usize] = value;
        set(Word::Version, self.version);
        set(Word::Gradients, self.gradients);
        set(Word::Step, steps.step);
        set(Word::NextToken, steps.next_token);
        set(Word::NewestEpoch, self.replicas.newest_epoch());
        set(Word::Finished, steps.finished.into());
        set(Word::Variables, state);
        set(Word::Generation, self.generation);
        set(Word::Clients, self.replicas.counts().0 as u64);
        set(Word::Lives, self.lives);
        set(Word::RestoreEpoch, self.epoch.0.into());
        set(Word::RestoredStep, self.restored_step.0);
        if let Variables::Declared(store) | Variables::Ready(store) = &self.variables {
            let geometry = store.geometry();
            set(Word::BlockBytes, geometry.block_bytes as u64);
            set(Word::Pinned, geometry.pinned as u64);
            set(Word::Slots, geometry.slots as u64);
            set(Word::Integrity, store.has_integrity().into());
            for (index, bytes) in store.catalogue().digest().chunks_exact(8).enumerate() {
                let bytes = bytes.try_into().expect("chunks of eight");
                words[Word::Digest as usize + index] = u64::from_le_bytes(bytes);
            }
        }
        words[Word::Rooms as usize] = self.inbox.as_ref().map_or(0, Inbox::rooms) as u64;
        for (index, &value) in words.iter().enumerate() {
            self.journal.stage(Address::Control(index), value);
        }
        if let (Variables::Declared(store) | Variables::Ready(store), Some(inbox)) =
            (&self.variables, &self.inbox)
        {
            let first = store.geometry().table_words() + map_words(store.layout());
            inbox.stage(&mut self.journal, store.layout(), first);
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

    fn stage_client(&mut self, key: ClientKey) {
        let client = self.replicas.client(key);
        let mut words = Vec::with_capacity(CLIENT_WORDS);
        words.push(match client.presence {
            Presence::Present => 1,
            Presence::Left => 2,
            Presence::Lost => 3,
        });
        words.extend([client.epoch.0, client.incarnation.0]);
        let job = client.task.job.as_bytes();
        words.push(u64::from(client.task.index) | (job.len() as u64) << 32);
        let mut padded = [0; JOB_BYTES_MAX];
        padded[..job.len()].copy_from_slice(job);
        for bytes in padded.chunks_exact(8) {
            words.push(u64::from_le_bytes(bytes.try_into().expect("chunks of eight")));
        }
        let tokens = self.owner.iter().flat_map(|owner| owner.tokens_of(key));
        let tokens: Vec<Issued> = tokens.take(TOKENS_PER_CLIENT_MAX).collect();
        words.push(tokens.len() as u64);
        for issued in tokens {
            words.extend([issued.token.0, issued.generation.into(), issued.step.0]);
        }
        words.resize(WINDOW, 0);
        words.extend(client.window.encode());
        let first = CLIENTS + key.0 as usize * CELL_WORDS;
        for (index, value) in words.into_iter().enumerate() {
            self.journal.stage(Address::Control(first + index), value);
        }
    }
}

/// What the control file is called while it is made.
const CONTROL_NEW: &str = "control.new";

/// The bytes of memory that the variables of a layout take, with all that belongs to them.
fn need(geometry: &Geometry, layout: &ShardLayout, rooms: usize) -> u64 {
    let tables = table_bytes(table_words(geometry, layout, rooms));
    geometry.need().saturating_add(Inbox::need(layout, rooms)).saturating_add(tables)
}

/// A control file whose boot is this one.
struct Reopenable {
    control: Memory,
    /// How many durable images there have been.
    images: u64,
    /// Whether the files are those of an image.
    from_image: bool,
}

/// Makes sure that the files of an arena are those of this boot and this configuration; if they are
/// of another boot, and a durable image of them was kept, makes the image of them.
fn reopenable(
    parts: &Parts,
    place: &Place,
    life: &Life,
    control: Memory,
) -> Result<Reopenable, StorageError> {
    let name = file_name(Kind::Control, 0);
    let page = Page::decode(control.bytes()).map_err(|fault| place.corrupt(&name, fault))?;
    let boot = check_text(&page.text, &parts.identity, place, &name)?;
    let stamp = Stamp { shard: parts.id, arena: page.stamp.arena };
    let image = match parts.config.durability {
        Durability::Power => newest_image(place, stamp)?,
        Durability::Process => None,
    };
    let images = image.as_ref().map_or(0, |(number, _)| *number);
    if boot == life.boot {
        return Ok(Reopenable { control, images, from_image: false });
    }
    let Some((_, image)) = image else {
        return Err(StorageError::OtherBoot { path: place.path(&name) });
    };
    drop(control);
    let split = Journal::split_image(&image).ok_or_else(|| {
        place.corrupt(Kind::Image.name(), Fault::at(PAGE_BYTES, "words of two files"))
    })?;
    // Everything but the control file first: as long as that is of the other boot, this is begun
    // anew by whoever comes after a crash.
    let arena = Arena { place: place.clone(), stamp };
    place.remove(&file_name(Kind::Intent, 0))?;
    Journal::idle_intent(&arena, split.tables.len() / 8)?;
    if split.generation != 0 {
        let tables = file_name(Kind::Tables, split.generation);
        place.remove(&tables)?;
        place.create(&tables, split.tables.len() as u64)?.write(0, split.tables);
        place.sync(&tables)?;
        place.remove(&file_name(Kind::Undo, split.generation))?;
        crate::store::idle_undo(&arena, split.generation)?;
        place.sync(&file_name(Kind::Undo, split.generation))?;
    }
    place.sync(&file_name(Kind::Intent, 0))?;
    place.remove(CONTROL_NEW)?;
    let mut control = place.create(CONTROL_NEW, split.control.len() as u64)?;
    control.write(0, split.control);
    let text = control_text(life, &parts.identity);
    let page = Page { kind: Kind::Control, stamp, generation: 0, text };
    control.write(0, &page.encode());
    drop(control);
    place.sync(CONTROL_NEW)?;
    place.rename(CONTROL_NEW, &name)?;
    place.sync_names()?;
    let control = place.open(&name)?;
    let control = control.ok_or_else(|| StorageError::Missing { path: place.path(&name) })?;
    Ok(Reopenable { control, images, from_image: true })
}

/// Removes the files of generations that are not in use: a process was killed while it made or
/// removed them.
fn remove_leftovers(arena: &Arena, generation: Option<u64>) -> Result<(), StorageError> {
    let mut kept = vec![file_name(Kind::Control, 0), file_name(Kind::Intent, 0)];
    kept.extend((0..2).map(|turn| format!("{}-{turn}", Kind::Image.name())));
    let kinds = Kind::ALL.into_iter();
    kept.extend(
        generation
            .into_iter()
            .flat_map(|generation| kinds.clone().map(move |kind| file_name(kind, generation))),
    );
    for name in arena.place.names()? {
        if !kept.contains(&name) {
            arena.place.remove(&name)?;
        }
    }
    Ok(())
}

/// The text of the control file's first page: the boot, and what must agree.
fn control_text(life: &Life, identity: &Identity) -> Vec<u8> {
    let mut text = life.boot.to_vec();
    identity.to_wire().put(&mut text);
    text
}

/// The boot that a control file is of, if it agrees with the configuration.
fn check_text(
    text: &[u8],
    identity: &Identity,
    place: &Place,
    name: &str,
) -> Result<[u8; 16], StorageError> {
    let corrupt = || place.corrupt(name, Fault::at(48, "a boot and an identity"));
    let (boot, fields) = text.split_at_checked(16).ok_or_else(corrupt)?;
    let mut reader = Reader::new("control", fields);
    let fields = IdentityFields::take(&mut reader).map_err(|_| corrupt())?;
    reader.finish().map_err(|_| corrupt())?;
    let found = Identity::from_wire(&fields);
    if let Some((field, expected, found)) = identity.difference(&found) {
        return Err(StorageError::Foreign {
            path: place.path(name),
            field: field.to_owned(),
            expected: expected.to_owned(),
            found: found.to_owned(),
        });
    }
    Ok(boot.try_into().expect("split after sixteen bytes"))
}

fn decode_client(words: &[u64], zoo: Zoo) -> Option<(Remembered, Vec<Issued>)> {
    let presence = match words[0] {
        1 => Presence::Present,
        2 => Presence::Left,
        3 => Presence::Lost,
        _ => return None,
    };
    let job: Vec<u8> = words[JOB..TOKENS].iter().flat_map(|word| word.to_le_bytes()).collect();
    let job = std::str::from_utf8(job.get(..(words[3] >> 32) as usize)?).ok()?;
    let count = usize::try_from(words[TOKENS]).ok().filter(|&n| n <= TOKENS_PER_CLIENT_MAX)?;
    let tokens = words[TOKENS + 1..].chunks_exact(3).take(count).map(|token| {
        let generation = u32::try_from(token[1]).ok()?;
        Some(Issued { token: TokenId(token[0]), generation, step: GlobalStep(token[2]) })
    });
    let client = Remembered {
        task: TaskId::new(job, words[3] as u32),
        epoch: ClientEpoch(words[1]),
        incarnation: Incarnation(words[2]),
        presence,
        window: Window::decode(&words[WINDOW..], zoo)?,
    };
    Some((client, tokens.collect::<Option<_>>()?))
}
