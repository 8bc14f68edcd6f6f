//! A generation of variables: what they need on a shard, and their files.
//!
//! Each declaration begins a generation with files of its own. They are created before a commit
//! names them, and removed once nothing names them.

use std::sync::Arc;

use pushpull_common::byte_size::ByteSize;
use pushpull_common::catalogue::{Catalogue, ShardLayout};
use pushpull_common::error::Chain;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::limits::CATALOGUE_BYTES_MAX;
use pushpull_optim::optimizer::VariableRules;
use pushpull_store::arena::{Arena, Memory, Reservation, file_name};
use pushpull_store::commit::table_bytes;
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES};
use pushpull_store::store::{Store, StoreGeometry, StorePlan};
use pushpull_store::table::Table;

use super::record::{ShardRecord, admitted_words};
use crate::config::{Durability, PsConfig};
use crate::error::StorageError;
use crate::inbox::{Inbox, SlotMemory, SlotSizes, map_words};
use crate::shard::shard_files::{ShardFiles, transaction_words};

/// The variables of one declaration on a shard, and the sizes of their files.
#[derive(Debug)]
pub(in crate::shard) struct Generation {
    pub(in crate::shard) catalogue: Arc<Catalogue>,
    pub(in crate::shard) layout: ShardLayout,
    pub(in crate::shard) rules: VariableRules,
    pub(in crate::shard) geometry: StoreGeometry,
    pub(in crate::shard) push_slots: usize,
    /// The number of push slots that keep their memory.
    kept_push_slots: usize,
    /// Whether the blocks that are needed while others are pinned are reserved.
    reserves_pins: bool,
}

impl Generation {
    /// Plans the generation that a declaration begins.
    pub(in crate::shard) fn new(
        id: ShardId,
        config: &PsConfig,
        catalogue: Arc<Catalogue>,
    ) -> Generation {
        let layout = catalogue.layout(id);
        let rules = config.rules.of_variables(&catalogue);
        let slots = rules.most_slots(&layout);
        let geometry =
            StoreGeometry::new(&layout, slots, config.block_bytes, config.storage.pin_bytes_max);
        let push_slots = config.push_slots();
        Generation::with_sizes(config, catalogue, layout, rules, geometry, push_slots)
    }

    /// Returns the generation that these words describe. Fails if its blocks do not fit the
    /// variables, with the number of optimizer slots that they have.
    pub(in crate::shard) fn of_record(
        id: ShardId,
        config: &PsConfig,
        catalogue: Arc<Catalogue>,
        record: &ShardRecord,
    ) -> Result<Generation, usize> {
        let layout = catalogue.layout(id);
        let rules = config.rules.of_variables(&catalogue);
        let slots = rules.most_slots(&layout);
        let geometry =
            StoreGeometry::of_words(&layout, record.slots, record.block_bytes, record.pinned);
        let geometry = geometry.filter(|geometry| geometry.slots == slots).ok_or(slots)?;
        let push_slots = record.push_slots;
        Ok(Generation::with_sizes(config, catalogue, layout, rules, geometry, push_slots))
    }

    fn with_sizes(
        config: &PsConfig,
        catalogue: Arc<Catalogue>,
        layout: ShardLayout,
        rules: VariableRules,
        geometry: StoreGeometry,
        push_slots: usize,
    ) -> Generation {
        // An earlier process may have had fewer slots than this one would keep.
        let kept_push_slots = config.kept_push_slots().min(push_slots);
        let reserves_pins = reserves_pins(config);
        Generation {
            catalogue,
            layout,
            rules,
            geometry,
            push_slots,
            kept_push_slots,
            reserves_pins,
        }
    }

    /// Returns the number of words of the tables file, without those of embedding tables.
    pub(in crate::shard) fn table_words(&self) -> usize {
        table_words(&self.geometry, &self.layout, self.push_slots)
    }

    /// Returns the number of embedding tables.
    pub(in crate::shard) fn tables(&self) -> usize {
        self.layout.tables().len()
    }

    /// Reserves the memory of the blocks, the inbox and the tables file.
    pub(in crate::shard) fn reserve(
        &self,
        files: &ShardFiles,
    ) -> Result<Reservation, StorageError> {
        files.budget.reserve(self.fixed_bytes())
    }

    fn fixed_bytes(&self) -> u64 {
        let inbox = Inbox::need(&self.layout, self.kept_push_slots);
        let tables = table_bytes(self.table_words());
        self.geometry.need(self.reserves_pins).saturating_add(inbox).saturating_add(tables)
    }

    /// Returns the bytes that the variables need. Embedding tables allocate memory as they grow;
    /// this counts what each needs at least.
    pub(in crate::shard) fn bytes_min(&self, is_synchronous: bool) -> u64 {
        let together = self.pushes_together(is_synchronous);
        let tables = self.layout.tables().iter().map(|partition| {
            Table::need(&self.catalogue, partition, self.rules.slots(partition), together).bytes()
        });
        tables.fold(self.fixed_bytes(), u64::saturating_add)
    }

    /// Returns the most pushes that are applied together.
    pub(in crate::shard) fn pushes_together(&self, is_synchronous: bool) -> u64 {
        if is_synchronous { self.push_slots as u64 } else { 1 }
    }

    /// Says what the bytes that the variables need are for, and which setting allows more.
    pub(in crate::shard) fn made_of(&self, need: u64) -> String {
        let values = self.layout.bytes().max(1);
        let (of_values, of_slots) = self.geometry.need_by_kind(self.reserves_pins);
        let inbox = Inbox::need(&self.layout, self.kept_push_slots);
        let rest = need.saturating_sub(of_values).saturating_sub(of_slots).saturating_sub(inbox);
        let push_slots = match self.kept_push_slots {
            1 => "a push slot".to_owned(),
            kept => format!("{kept} push slots"),
        };
        format!(
            "{:.1} times the {} of its values: {} for them with the copies that {} need, {} for {} \
             optimizer slots likewise, {} for {}, {} for tables and the rest; raise bytes_max \
             (--bytes-max), or add shards or ps tasks",
            need as f64 / values as f64,
            ByteSize(values),
            ByteSize(of_values),
            if self.reserves_pins { "updates and checkpoints" } else { "updates" },
            ByteSize(of_slots),
            self.geometry.slots,
            ByteSize(inbox),
            push_slots,
            ByteSize(rest)
        )
    }

    /// Returns the plan of the store whose files have this number.
    pub(in crate::shard) fn store_plan(
        &self,
        files: &ShardFiles,
        generation: u64,
        integrity: bool,
    ) -> StorePlan {
        StorePlan {
            arena: files.arena.clone(),
            generation,
            catalogue: self.catalogue.clone(),
            layout: self.layout.clone(),
            geometry: self.geometry,
            integrity,
            pin_budget: (!self.reserves_pins).then(|| files.budget.clone()),
            power: files.power.is_some(),
            cached_bytes_max: files.config.cached_bytes_max,
            planted: files.config.planted,
        }
    }

    /// Divides the memory of the inbox among the push slots.
    pub(in crate::shard) fn slot_memory(&self, files: &ShardFiles, memory: Memory) -> SlotMemory {
        let sizes = SlotSizes {
            stride: Inbox::need(&self.layout, 1) as usize,
            slots: self.push_slots,
            kept: self.kept_push_slots,
        };
        SlotMemory::new(memory, sizes, &files.budget, files.config.planted)
    }

    /// Creates the files of a new generation. The next transaction names them. The inbox numbers
    /// its push slots from `first_push_slot`.
    pub(in crate::shard) fn create(
        &self,
        files: &mut ShardFiles,
        first_push_slot: u32,
    ) -> Result<(Box<Store>, Inbox), StorageError> {
        let Generation { catalogue, layout, rules, geometry, push_slots, .. } = self;
        let reservation = self.reserve(files)?;
        let words = self.table_words();
        let tables = self.tables();
        let together = self.pushes_together(files.config.mode.synchronous().is_some());
        let generation = files.generation + 1;
        for kind in OF_A_GENERATION {
            // An earlier attempt was killed, or ran out of space.
            files.arena.storage.remove(&file_name(kind, generation))?;
        }
        let encoded = catalogue.encode();
        let mut memory = files.arena.create(Kind::Catalogue, generation, encoded.len() as u64)?;
        memory.write(PAGE_BYTES, encoded);
        let bytes = Inbox::file_bytes(layout, *push_slots);
        let kept = PAGE_BYTES..PAGE_BYTES + Inbox::need(layout, self.kept_push_slots) as usize;
        let memory = files.arena.create_sparse(Kind::Inbox, generation, bytes, [kept])?;
        let memory = self.slot_memory(files, memory);
        let inbox = Inbox::new(memory, layout, *push_slots, first_push_slot);
        let memory = files.arena.create(Kind::Tables, generation, table_bytes(words + tables))?;
        // Checksums are needed to find pages that a loss of power kept from the disk.
        let integrity = files.config.storage.integrity_full || files.power.is_some();
        let mut store =
            Store::create(self.store_plan(files, generation, integrity), reservation, rules)?;
        files.journal.reserve_intent(transaction_words(words, tables))?;
        files.journal.begin_tables(memory, generation, geometry.first_table());
        let ShardFiles { arena, budget, journal, .. } = files;
        store.attach_tables(arena, generation, budget, rules, together, |inputs| {
            Table::create(inputs, journal)
        })?;
        files.generation = generation;
        Ok((Box::new(store), inbox))
    }
}

/// Returns whether the memory of blocks that are needed while others are pinned is reserved: images
/// need them all the time, and a checkpoint that found none would be abandoned.
fn reserves_pins(config: &PsConfig) -> bool {
    config.checkpoints.is_some() || config.storage.durability == Durability::Power
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

/// Returns the names of the files of a store's embedding tables.
pub(in crate::shard) fn files_of_tables(store: &Store) -> Vec<String> {
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
        Err(error) => fault(format!("a catalogue: {}", Chain(&error))),
    }
}

/// The kinds of files that each generation has.
const OF_A_GENERATION: [Kind; 6] =
    [Kind::Tables, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo, Kind::Catalogue];

/// Removes the files of unused generations, which a process left that was killed while it created
/// or removed them.
pub(in crate::shard) fn remove_leftovers(
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
