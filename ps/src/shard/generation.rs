//! The files of one generation of variables: creates them with a declaration, and removes them once
//! nothing names them.

use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, ShardLayout};
use pushpull_common::protocol::limits::CATALOGUE_BYTES_MAX;
use pushpull_optim::optimizer::VariableRules;
use pushpull_store::arena::{Arena, file_name};
use pushpull_store::commit::table_bytes;
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES};
use pushpull_store::store::{Store, StoreGeometry, StorePlan};
use pushpull_store::table::Table;

use super::fused_ranges::FusedRanges;
use super::record::{ShardRecord, admitted_words};
use super::shard_files::transaction_words;
use super::{Shard, VariablesState};
use crate::error::StorageError;
use crate::inbox::{Inbox, map_words};

impl Shard {
    /// Creates the files of a new generation of variables, and switches to them. The next
    /// transaction names them.
    pub(super) fn make_variables(&mut self, catalogue: Arc<Catalogue>) -> Result<(), StorageError> {
        let layout = catalogue.layout(self.id);
        let rules = self.config.rules.of_variables(&catalogue);
        let (push_slots, geometry) = (self.config.push_slots(), self.geometry(&layout, &rules));
        let reservation = self.files.budget.reserve(need(&geometry, &layout, push_slots))?;
        let words = table_words(&geometry, &layout, push_slots);
        let (generation, tables) = (self.files.generation + 1, layout.tables().len());
        for kind in OF_A_GENERATION {
            // An earlier attempt was killed, or ran out of space.
            self.files.arena.storage.remove(&file_name(kind, generation))?;
        }
        let encoded = catalogue.encode();
        let mut memory =
            self.files.arena.create(Kind::Catalogue, generation, encoded.len() as u64)?;
        memory.write(PAGE_BYTES, encoded);
        let bytes = Inbox::file_bytes(&layout, push_slots);
        let inbox = self.files.arena.create(Kind::Inbox, generation, bytes)?;
        let inbox = Inbox::new(inbox, &layout, push_slots, self.intake.next_push_slot);
        let memory =
            self.files.arena.create(Kind::Tables, generation, table_bytes(words + tables))?;
        // Checksums are needed to find pages that a loss of power kept from the disk.
        let integrity = self.config.storage.integrity_full || self.power.is_some();
        let plan = StorePlan {
            arena: self.files.arena.clone(),
            generation,
            catalogue,
            layout,
            geometry,
            integrity,
            power: self.power.is_some(),
            cached_bytes_max: self.config.cached_bytes_max,
            planted: self.config.planted,
        };
        let mut store = Store::create(plan, reservation, &rules)?;
        self.files.journal.reserve_intent(transaction_words(words, tables))?;
        self.files.journal.begin_tables(memory, generation, geometry.first_table());
        store.attach_tables(
            &self.files.arena,
            generation,
            &self.files.budget,
            &rules,
            |inputs| Table::create(inputs, &mut self.files.journal),
        )?;
        self.files.generation = generation;
        self.intake.inbox = Some(inbox);
        self.variables.fused_ranges = FusedRanges::new(store.layout(), &rules);
        self.steps.count_participants(store.catalogue().shards());
        self.variables.state = VariablesState::Declared(Box::new(store));
        self.variables.rules = rules;
        Ok(())
    }

    /// Forgets the variables durably, and then removes their files.
    pub(super) fn forget_variables(&mut self) -> Result<(), StorageError> {
        self.variables.state = VariablesState::Absent;
        self.steps.set_participants(std::iter::empty());
        self.pulls.last_pulls.clear();
        if let Some(inbox) = self.intake.inbox.take() {
            self.intake.next_push_slot = inbox.next_number();
        }
        self.variables.assigned.clear();
        self.persist();
        self.files.journal.unmap_tables();
        match &mut self.power {
            None => remove_leftovers(&self.files.arena, None, &[]),
            // The image on disk may name the files, and an image that is being written flushes
            // them.
            Some(power) => {
                power.unnamed_since = Some(power.made);
                Ok(())
            }
        }
    }

    /// Removes the files that no image on disk names.
    pub(super) fn remove_unnamed(&self) -> Result<(), StorageError> {
        let named = self.checkpoints.restoring.is_some()
            || !matches!(self.variables.state, VariablesState::Absent);
        let of_tables = self.variables.store().map(files_of_tables).unwrap_or_default();
        remove_leftovers(&self.files.arena, named.then_some(self.files.generation), &of_tables)
    }

    fn geometry(&self, layout: &ShardLayout, rules: &VariableRules) -> StoreGeometry {
        let slots = rules.most_slots(layout);
        StoreGeometry::new(
            layout,
            slots,
            self.config.block_bytes,
            self.config.storage.pin_bytes_max,
        )
    }

    /// Returns the bytes that the variables of a catalogue need.
    pub(super) fn need(&self, catalogue: &Catalogue) -> u64 {
        let (layout, rules) =
            (catalogue.layout(self.id), self.config.rules.of_variables(catalogue));
        let stored = need(&self.geometry(&layout, &rules), &layout, self.config.push_slots());
        // Tables allocate memory as they grow. This counts what each needs at least.
        let together =
            if self.steps.is_synchronous() { self.config.push_slots() as u64 } else { 1 };
        let tables = layout
            .tables()
            .iter()
            .map(|partition| Table::need(catalogue, partition, rules.slots(partition), together));
        tables.fold(stored, u64::saturating_add)
    }
}

/// Returns the number of words of a shard's tables file.
pub(crate) fn table_words(
    geometry: &StoreGeometry,
    layout: &ShardLayout,
    push_slots: usize,
) -> usize {
    let inbox = map_words(layout) + Inbox::table_words(layout, push_slots);
    geometry.table_words() + inbox + admitted_words(push_slots)
}

/// Returns the bytes of memory for the variables of a layout, with the inbox and the tables file.
pub(super) fn need(geometry: &StoreGeometry, layout: &ShardLayout, push_slots: usize) -> u64 {
    let tables = table_bytes(table_words(geometry, layout, push_slots));
    geometry.need().saturating_add(Inbox::need(layout, push_slots)).saturating_add(tables)
}

/// Returns the names of the files of a store's embedding tables.
pub(super) fn files_of_tables(store: &Store) -> Vec<String> {
    store.tables().iter().flat_map(Table::file_names).collect()
}

/// Opens the declared catalogue.
pub(crate) fn open_catalogue(
    arena: &Arena,
    record: &ShardRecord,
) -> Result<Catalogue, StorageError> {
    let name = file_name(Kind::Catalogue, record.generation);
    let memory = arena.open(Kind::Catalogue, record.generation, None)?;
    let bytes = &memory.bytes()[PAGE_BYTES..];
    let fault = |what| Err(arena.storage.corrupt(&name, Fault::at(PAGE_BYTES, what)));
    if bytes.len() as u64 > CATALOGUE_BYTES_MAX {
        return fault(format!("a catalogue of at most {CATALOGUE_BYTES_MAX} bytes"));
    }
    match Catalogue::decode(bytes) {
        Ok(catalogue) if catalogue.digest() == record.digest => Ok(catalogue),
        Ok(_) => fault("the catalogue that was declared".to_owned()),
        Err(error) => fault(format!("a catalogue: {error}")),
    }
}

/// The kinds of files that each generation has.
const OF_A_GENERATION: [Kind; 6] =
    [Kind::Tables, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo, Kind::Catalogue];

/// Removes the files of unused generations, which a process left that was killed while it created
/// or removed them.
pub(super) fn remove_leftovers(
    arena: &Arena,
    generation: Option<u64>,
    of_tables: &[String],
) -> Result<(), StorageError> {
    let mut retained = vec![file_name(Kind::Control, 0), file_name(Kind::Intent, 0)];
    retained.extend((0..2).map(|turn| format!("{}-{turn}", Kind::Image.name())));
    let kinds = Kind::ALL.into_iter();
    retained.extend(
        generation
            .into_iter()
            .flat_map(|generation| kinds.clone().map(move |kind| file_name(kind, generation))),
    );
    for name in arena.storage.names()? {
        if !retained.contains(&name) && !of_tables.contains(&name) {
            arena.storage.remove(&name)?;
        }
    }
    Ok(())
}
