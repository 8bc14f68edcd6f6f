//! The files of a shard: made, and opened again as an earlier process left them.
//!
//! Nothing that the files say is believed before it is verified, and no memory is had for a count
//! before it is known that the files are as long as it says.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::catalogue::{Catalogue, ShardLayout};
use pushpull_common::identity::Identity;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::PushState;
use pushpull_common::protocol::limits::CATALOGUE_BYTES_MAX;
use pushpull_common::protocol::message::{IdentityFields, Operation};
use pushpull_common::protocol::wire::{Reader, Wire};

use super::parked::Parked;
use super::power::{Power, newest_image};
use super::record::{self, CLIENT_WORDS, ShardRecord, Stage};
use super::replicas::{CLIENTS_MAX, ClientKey, Presence, Replicas};
use super::work::Job;
use super::{Shard, Variables, poison};
use crate::aggregate::step_owner::StepOwner;
use crate::arena::{Arena, Budget, Memory, Place, file_name};
use crate::commit::{Address, CELL_WORDS, Journal, has_seen_no_commit, offset_of, table_bytes};
use crate::config::{Durability, PsConfig};
use crate::error::StorageError;
use crate::inbox::{Inbox, WholeRoom, map_words, whole_rooms};
use crate::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use crate::metrics::Counters;
use crate::store::{Geometry, Plan, Store};

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

/// The words of the tables of a shard.
pub(crate) fn table_words(geometry: &Geometry, layout: &ShardLayout, rooms: usize) -> usize {
    geometry.table_words() + map_words(layout) + Inbox::table_words(layout, rooms)
}

/// The largest transaction of a shard whose tables have so many words.
fn transaction_words(table_words: usize) -> usize {
    table_words + ShardRecord::WORDS + CLIENTS_AT_ONCE * CLIENT_WORDS
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
        clear_unborn(&place)?;
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
        let mut journal = Journal::open(&arena, control, parts.config.zoo)?;
        let cell = journal.first_cell()?;
        if let Some(reason) = poison::decode(&cell).map_err(corrupt)? {
            return Err(StorageError::Poisoned { path: arena.place.path(&name), reason });
        }
        let record = ShardRecord::decode(&cell).map_err(corrupt)?;
        let ShardRecord { generation, stage, clients, .. } = record;
        let declared = stage != Stage::Absent;
        if declared {
            journal.use_tables(arena.open(Kind::Tables, generation, None)?, generation);
        }
        journal.redo()?;
        journal.verify_control((1 + clients) * CELL_WORDS)?;
        let mut shard = Shard::with(parts, arena, journal, life);
        shard.take_up(&record, now)?;
        if declared {
            shard.take_up_variables(&record, now)?;
        } else {
            shard.journal.check_intent(transaction_words(0))?;
        }
        // Not before all is known to be there: what is refused is left as it was found.
        if shard.power.is_none() {
            remove_leftovers(&shard.arena, declared.then_some(generation))?;
        }
        Ok(shard)
    }

    /// Takes up the step and the clients.
    fn take_up(&mut self, record: &ShardRecord, now: Instant) -> Result<(), StorageError> {
        (self.version, self.gradients) = (record.version, record.gradients);
        (self.lives, self.generation) = (record.lives, record.generation);
        (self.epoch, self.restored_step) = (record.restore_epoch, record.restored_step);
        self.replicas.mint_above(record.newest_epoch);
        if let Some(owner) = &mut self.owner {
            owner.restore(record.steps);
            self.counters.global_step.set(record.steps.step);
        }
        for number in 0..record.clients {
            self.take_up_client(number, now)
                .map_err(|fault| self.arena.place.corrupt(&file_name(Kind::Control, 0), fault))?;
        }
        Ok(())
    }

    fn take_up_client(&mut self, number: usize, now: Instant) -> Result<(), Fault> {
        let first = record::first_of_client(number);
        let words: Vec<u64> = (first..first + CLIENT_WORDS)
            .map(|index| self.journal.load(Address::Control(index)))
            .collect();
        let (client, tokens) = record::decode_client(number, &words, self.config.zoo)?;
        let fault = |what| Err(Fault::at(offset_of(Address::Control(first)), what));
        for issued in tokens {
            let owner = self.owner.as_mut();
            if !owner.is_some_and(|o| o.restore_token(ClientKey(number as u32), issued, now)) {
                return fault(format!("a client whose token {} is its own", issued.token));
            }
        }
        match self.replicas.restore(client, now) {
            true => Ok(()),
            false => fault("a client of another task than those before it".to_owned()),
        }
    }

    /// Takes up the variables and the pushes that lie whole in the inbox.
    fn take_up_variables(
        &mut self,
        record: &ShardRecord,
        now: Instant,
    ) -> Result<(), StorageError> {
        let &ShardRecord { generation, rooms, integrity, .. } = record;
        let place = self.arena.place.clone();
        let corrupt = |kind, fault| place.corrupt(&file_name(kind, generation), fault);
        let catalogue = open_catalogue(&self.arena, record)?;
        let layout = catalogue.layout(self.id);
        let geometry = Geometry::of_words(&layout, record.slots, record.block_bytes, record.pinned);
        let slots = self.config.optimizer.slots().len();
        let geometry = geometry.filter(|geometry| geometry.slots == slots).ok_or_else(|| {
            let what = format!("blocks for these variables, with {slots} slots");
            self.arena.place.corrupt(&file_name(Kind::Control, 0), Fault::at(PAGE_BYTES, what))
        })?;
        let words = table_words(&geometry, &layout, rooms);
        self.journal.check_tables(generation, table_bytes(words))?;
        self.journal.verify_tables(generation)?;
        self.journal.check_intent(transaction_words(words))?;
        let loan = self.budget.take(need(&geometry, &layout, rooms))?;
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
        // The rooms of an image may have been used again since: what lay in them was not answered.
        let whole = match record.from_image {
            true => self.return_tokens_of_the_gone(),
            false => whole_rooms(&self.journal, &layout, first, rooms, record.clients)
                .and_then(|whole| self.check_whole_rooms(whole, record.stage, first))
                .map_err(|fault| corrupt(Kind::Tables, fault))?,
        };
        let whole =
            inbox.restore(whole, integrity, now).map_err(|fault| corrupt(Kind::Inbox, fault))?;
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
        let ready = record.stage == Stage::Ready;
        if integrity && ready {
            store.verify(&self.journal).map_err(|(kind, fault)| corrupt(kind, fault))?;
        }
        self.variables = if ready { Variables::Ready(store) } else { Variables::Declared(store) };
        self.inbox = Some(inbox);
        self.jobs.extend(whole.into_iter().map(Job::push));
        Ok(())
    }

    /// Takes back the tokens of clients that are gone: their pushes lay whole, and are lost. Returns
    /// what is left of those.
    fn return_tokens_of_the_gone(&mut self) -> Vec<WholeRoom> {
        if let Some(owner) = &mut self.owner {
            let holders: Vec<ClientKey> = owner.holders().collect();
            let present = |holder| self.replicas.client(holder).presence == Presence::Present;
            for gone in holders.into_iter().filter(|&holder| !present(holder)) {
                owner.drop_client(gone, |_| false);
            }
        }
        Vec::new()
    }

    /// Whether the whole pushes are ones that the clients, the tokens and the variables allow.
    fn check_whole_rooms(
        &self,
        whole: Vec<WholeRoom>,
        stage: Stage,
        first: usize,
    ) -> Result<Vec<WholeRoom>, Fault> {
        let mut spent = BTreeSet::new();
        for WholeRoom { arrival: push, holder, .. } in &whole {
            let window = holder.map(|holder| &self.replicas.client(holder).window);
            let settled = window.is_some_and(|window| {
                matches!(window.state(push.sequence), PushState::Settled { .. })
            });
            let gradient = push.operation == Operation::Gradient {};
            let allowed = stage == Stage::Ready || push.operation == Operation::Assign {};
            let paid = !gradient
                || self.owner.as_ref().is_none_or(|owner| {
                    owner.is_out(push.token, push.generation) && spent.insert(push.token)
                });
            if settled || !allowed || !paid {
                let what = format!("pushes that can be applied, not push {}", push.sequence);
                return Err(Fault::at(offset_of(Address::Tables(first)), what));
            }
        }
        // A client that is gone holds no token but those of its whole pushes.
        let gone = self.owner.iter().flat_map(StepOwner::outstanding).find(|&(token, holder)| {
            self.replicas.client(holder).presence != Presence::Present && !spent.contains(&token)
        });
        match gone {
            None => Ok(whole),
            Some((token, _)) => {
                let what = format!("the push of token {token}, whose holder is gone");
                Err(Fault::at(offset_of(Address::Tables(first)), what))
            }
        }
    }

    /// Makes the files of a new generation of variables and takes them into use. Nothing names
    /// them before the next transaction.
    pub(super) fn make_variables(&mut self, catalogue: Arc<Catalogue>) -> Result<(), StorageError> {
        let layout = catalogue.layout(self.id);
        let (rooms, geometry) = (self.config.inbox_pushes, self.geometry(&layout));
        let loan = self.budget.take(need(&geometry, &layout, rooms))?;
        let words = table_words(&geometry, &layout, rooms);
        let generation = self.generation + 1;
        for kind in OF_A_GENERATION {
            // A process may have been killed, or refused space, while it made them.
            self.arena.place.remove(&file_name(kind, generation))?;
        }
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
        match &mut self.power {
            None => remove_leftovers(&self.arena, None),
            // The image on the disk may name them, and one that is being written flushes them.
            Some(power) => {
                power.unnamed_since = Some(power.made);
                Ok(())
            }
        }
    }

    /// Removes the files that no image on the disk names any more.
    pub(super) fn remove_unnamed(&self) -> Result<(), StorageError> {
        let named = self.restoring.is_some() || !matches!(self.variables, Variables::Absent);
        remove_leftovers(&self.arena, named.then_some(self.generation))
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
}

/// What the control file is called while it is made.
const CONTROL_NEW: &str = "control.new";

/// The bytes of memory that the variables of a layout take, with all that belongs to them.
fn need(geometry: &Geometry, layout: &ShardLayout, rooms: usize) -> u64 {
    let tables = table_bytes(table_words(geometry, layout, rooms));
    geometry.need().saturating_add(Inbox::need(layout, rooms)).saturating_add(tables)
}

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

/// The catalogue that was declared.
pub(crate) fn open_catalogue(
    arena: &Arena,
    record: &ShardRecord,
) -> Result<Catalogue, StorageError> {
    let name = file_name(Kind::Catalogue, record.generation);
    let memory = arena.open(Kind::Catalogue, record.generation, None)?;
    let bytes = &memory.bytes()[PAGE_BYTES..];
    let fault = |what| Err(arena.place.corrupt(&name, Fault::at(PAGE_BYTES, what)));
    if bytes.len() as u64 > CATALOGUE_BYTES_MAX {
        return fault(format!("a catalogue of at most {CATALOGUE_BYTES_MAX} bytes"));
    }
    match Catalogue::decode(bytes) {
        Ok(catalogue) if catalogue.digest() == record.digest => Ok(catalogue),
        Ok(_) => fault("the catalogue that was declared, not another".to_owned()),
        Err(error) => fault(format!("a catalogue: {error}")),
    }
}

/// A control file whose boot is this one.
struct Reopenable {
    control: Memory,
    /// How many durable images there have been.
    images: u64,
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
    let stamp = Stamp { shard: parts.id, arena: page.stamp.arena };
    page.check(Kind::Control, stamp, 0).map_err(|fault| place.corrupt(&name, fault))?;
    let boot = check_text(&page.text, &parts.identity, place, &name)?;
    let image = match parts.config.durability {
        Durability::Power => newest_image(place, stamp)?,
        Durability::Process => None,
    };
    let images = image.as_ref().map_or(0, |(number, _)| *number);
    if boot == life.boot {
        return Ok(Reopenable { control, images });
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
    let words = transaction_words(split.tables.len() / 8);
    Journal::idle_intent(&arena, words, split.commits)?;
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
    Ok(Reopenable { control, images })
}

/// The files that each declaration of variables has of its own.
const OF_A_GENERATION: [Kind; 6] =
    [Kind::Tables, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo, Kind::Catalogue];

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
    let fields = control_fields(text).map_err(|fault| place.corrupt(name, fault));
    let (boot, found) = fields?;
    if let Some((field, expected, found)) = identity.difference(&found) {
        return Err(StorageError::Foreign {
            path: place.path(name),
            field: field.to_owned(),
            expected: expected.to_owned(),
            found: found.to_owned(),
        });
    }
    Ok(boot)
}

/// The reverse of [`control_text`].
pub(crate) fn control_fields(text: &[u8]) -> Result<([u8; 16], Identity), Fault> {
    let fault = || Fault::at(48, "a boot and an identity");
    let (boot, fields) = text.split_first_chunk().ok_or_else(fault)?;
    let mut reader = Reader::new("control", fields);
    let fields = IdentityFields::take(&mut reader).map_err(|_| fault())?;
    reader.finish().map_err(|_| fault())?;
    Ok((*boot, Identity::from_wire(&fields)))
}
