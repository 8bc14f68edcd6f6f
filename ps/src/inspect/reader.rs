//! The reader of a shard's folder: reads everything readable, and records what is wrong with the
//! rest.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, ShardId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::status::Presence;
use pushpull_optim::optimizer::OptimizerSlot;
use pushpull_store::arena::{Arena, ArenaStorage, Budget, file_name};
use pushpull_store::change::SLOTS_MAX;
use pushpull_store::commit::{Journal, table_bytes};
use pushpull_store::layout::{FORMAT, Fault, Kind, PAGE_BYTES, Page};
use pushpull_store::planted::PlantedBugs;
use pushpull_store::store::{Store, StoreGeometry, StorePlan, count_undo_rows};
use pushpull_store::table::{Table, TableFiles, TableInputs, TableNeed};
use pushpull_store::undo::UndoRow;

use super::report::{
    ArenaReport, ClientReport, CompletePush, CoordinatorReport, DataReport, FileReport,
    ShardInspection, ShardState, VariableReport, VariablesStage, Verdict,
};
use crate::client_entry::ClientPresence;
use crate::coordinators::CoordinatorEntry;
use crate::error::StorageError;
use crate::inbox::{Inbox, SlotMemory, WholeSlot, map_words, whole_slots};
use crate::runtime::boot;
use crate::shard::file_work::flush::{image_name, read_image};
use crate::shard::opening::control_file::control_fields;
use crate::shard::shard_files::client_record::ClientRecord;
use crate::shard::shard_files::coordinator_record::CoordinatorRecord;
use crate::shard::shard_files::data_record::DataRecord;
use crate::shard::shard_files::generation::{open_catalogue, table_words};
use crate::shard::shard_files::poison::PoisonRecord;
use crate::shard::shard_files::record::{ShardRecord, ShardStage};

/// Reads a shard's folder and collects the findings.
pub(super) struct ShardReader<'a> {
    storage: &'a ArenaStorage,
    found: ShardInspection,
    verdicts: BTreeMap<String, Verdict>,
}

impl ShardReader<'_> {
    pub(super) fn read(
        storage: &ArenaStorage,
        folder: &Path,
    ) -> Result<ShardInspection, StorageError> {
        let found = ShardInspection {
            path: folder.to_owned(),
            arena: None,
            poisoned: None,
            state: None,
            variables: Vec::new(),
            data: None,
            coordinators: Vec::new(),
            clients: Vec::new(),
            whole: Vec::new(),
            committed_words: None,
            prepared_rows: None,
            newest_image: None,
            files: Vec::new(),
        };
        let mut reader = ShardReader { storage, found, verdicts: BTreeMap::new() };
        reader.read_all();
        let control = reader.verdicts.get(&file_name(Kind::Control, 0));
        // In another format nothing tells which of the other files are in use.
        let other = match control {
            Some(format @ Verdict::OtherFormat { .. }) => format.clone(),
            _ => Verdict::Unused,
        };
        for name in storage.names()? {
            reader.verdicts.entry(name).or_insert(other.clone());
        }
        let ShardReader { mut found, verdicts, .. } = reader;
        found.files.extend(verdicts.into_iter().map(|(name, verdict)| {
            let bytes = folder.join(&name).metadata().map_or(0, |metadata| metadata.len());
            FileReport { name, bytes, verdict }
        }));
        Ok(found)
    }

    /// Records an error as the verdict on its file, and returns `None`.
    fn note<T>(&mut self, result: Result<T, StorageError>) -> Option<T> {
        result.map_err(|error| self.note_error(error)).ok()
    }

    fn note_error(&mut self, error: StorageError) {
        let (path, verdict) = match error {
            StorageError::Corrupt { path, offset, expected } => {
                (path, Verdict::Fault { offset, expected })
            }
            StorageError::OtherFormat { path, found, format } => {
                (path, Verdict::OtherFormat { found, format })
            }
            StorageError::Missing { path } => (path, Verdict::Missing),
            StorageError::Io { path, source, doing } => {
                let expected = format!("something to {doing}: {source}");
                (path, Verdict::Fault { offset: 0, expected })
            }
            error => {
                let path = self.storage.path(&file_name(Kind::Control, 0));
                (path, Verdict::Fault { offset: 0, expected: Chain(&error).to_string() })
            }
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.verdicts.insert(name, verdict);
    }

    fn fault<T>(&mut self, kind: Kind, generation: u64, found: Result<T, Fault>) -> Option<T> {
        let name = file_name(kind, generation);
        let found = found.map_err(|fault| self.storage.corrupt(&name, fault));
        self.note(found)
    }

    /// Records the verdict on a file in use, unless a fault in it was recorded before.
    fn verified(&mut self, kind: Kind, generation: u64, verdict: Verdict) {
        self.verdicts.entry(file_name(kind, generation)).or_insert(verdict);
    }

    /// Reads the control words and the intent, and everything they name.
    fn read_all(&mut self) -> Option<()> {
        let name = file_name(Kind::Control, 0);
        let missing = || StorageError::Missing { path: self.storage.path(&name) };
        let control = self.storage.open(&name).and_then(|control| control.ok_or_else(missing));
        let control = self.note(control)?;
        let page = self.fault(Kind::Control, 0, Page::decode(control.bytes()))?;
        let fields = self.fault(Kind::Control, 0, control_fields(&page.text))?;
        let page_is = page.check(Kind::Control, page.stamp, 0);
        self.fault(Kind::Control, 0, page_is)?;
        self.found.arena = Some(ArenaReport {
            format: FORMAT,
            shard: page.stamp.shard,
            arena: page.stamp.arena,
            boot: fields.0,
            this_boot: fields.0 == boot(),
            identity: fields.1.fields().map(|(n, v)| (n.to_owned(), v.to_owned())).collect(),
        });
        if control.len() < 2 * PAGE_BYTES {
            let short = Fault::at(control.len(), "the page of the shard; the file ends");
            return self.fault(Kind::Control, 0, Err(short));
        }
        let arena = Arena { storage: self.storage.clone(), stamp: page.stamp };
        self.read_images(&arena);
        let journal = Journal::open(&arena, control, PlantedBugs::default());
        let mut journal = self.note(journal)?;
        self.found.committed_words = self.note(journal.intent())?;
        let cell = self.note(journal.first_cell())?;
        let poison = self.fault(Kind::Control, 0, PoisonRecord::decode(&cell))?;
        self.found.poisoned = poison.map(|poison| poison.reason);
        let record = self.fault(Kind::Control, 0, ShardRecord::decode(&cell))?;
        self.found.state = Some(state_of(&record));
        let tables = match record.stage {
            ShardStage::Absent => None,
            _ => self.note(arena.open(Kind::Tables, record.generation, None)),
        };
        let catalogue = match record.stage {
            ShardStage::Absent => None,
            _ => self.note(open_catalogue(&arena, &record)),
        };
        let mut has_tables = tables.is_some();
        if let Some(tables) = tables {
            journal.use_tables(tables, record.generation);
            let layout = catalogue.as_ref().map(|catalogue| catalogue.layout(arena.stamp.shard));
            has_tables = (0..).zip(layout.unwrap_or_default().tables()).all(|(table, _)| {
                let mapped = Table::map_index(&arena, record.generation, table, &mut journal);
                self.note(mapped).is_some()
            });
        }
        self.note(journal.redo())?;
        self.verified(Kind::Intent, 0, Verdict::Sound);
        self.note(journal.verify_control(ClientRecord::first_word(record.clients)))?;
        self.read_clients(&journal, &record)?;
        self.verified(Kind::Control, 0, Verdict::Sound);
        if record.stage != ShardStage::Absent {
            let bulk = catalogue.and_then(|catalogue| {
                self.read_variables(&arena, &mut journal, &record, &catalogue, has_tables)
            });
            self.check_first_pages(&arena, &record, bulk.is_some());
        }
        Some(())
    }

    /// Reads the durable images. One of the two may be half written; the other is then valid.
    fn read_images(&mut self, arena: &Arena) {
        for name in (0..2).map(image_name) {
            let Ok(Some(image)) = arena.storage.open(&name) else { continue };
            if let Ok((number, _)) = read_image(image.bytes(), arena.stamp) {
                self.found.newest_image = self.found.newest_image.max(Some(number));
                self.verdicts.insert(name, Verdict::Sound);
            }
        }
    }

    fn read_clients(&mut self, journal: &Journal, record: &ShardRecord) -> Option<()> {
        let data = DataRecord::load(journal, PlantedBugs::default());
        let mut data = self.fault(Kind::Control, 0, data)?;
        let coordinators = CoordinatorRecord::load(journal, PlantedBugs::default());
        let coordinators = self.fault(Kind::Control, 0, coordinators)?;
        self.found.coordinators.extend(coordinators.entries().map(|(_, entry)| {
            let CoordinatorEntry { name, coordinator, epoch, window, .. } = entry.clone();
            CoordinatorReport { name, coordinator, epoch, window }
        }));
        let mut held = 0;
        for number in 0..record.clients {
            let client = ClientRecord::load(journal, number, PlantedBugs::default());
            let ClientRecord { client, tokens, .. } = self.fault(Kind::Control, 0, client)?;
            self.found.clients.push(ClientReport {
                task: client.task,
                epoch: client.epoch.0,
                incarnation: client.incarnation,
                presence: match client.presence {
                    ClientPresence::Present => Presence::Present,
                    ClientPresence::Left => Presence::Left,
                    ClientPresence::Lost => Presence::Lost,
                },
                newest: client.window.newest(),
                settled: client.window.settled().count(),
                tokens: tokens.iter().map(|issued| issued.token.0).collect(),
            });
            for batch in tokens.iter().filter_map(|issued| issued.batch) {
                held += 1;
                data.iter_mut().for_each(|data| data.restore_held(batch));
            }
        }
        self.found.data = data.map(|data| DataReport {
            set: data.set().clone(),
            begun: data.next().0,
            free: data.free().len(),
            held,
        });
        Some(())
    }

    /// Reads the variables, the pushes and the undo rows, and verifies the checksums.
    fn read_variables(
        &mut self,
        arena: &Arena,
        journal: &mut Journal,
        record: &ShardRecord,
        catalogue: &Catalogue,
        has_tables: bool,
    ) -> Option<()> {
        let generation = record.generation;
        self.verified(Kind::Catalogue, generation, Verdict::Sound);
        let shard = arena.stamp.shard;
        self.found.variables = variables_of(catalogue, shard);
        let layout = catalogue.layout(shard);
        let geometry =
            StoreGeometry::of_words(&layout, record.slots, record.block_bytes, record.pinned);
        let geometry = geometry.ok_or_else(|| Fault::at(PAGE_BYTES, "blocks for its variables"));
        let geometry = self.fault(Kind::Control, 0, geometry)?;
        let tables = layout.tables().len();
        let undo = count_undo_rows(arena, generation, record.version, &geometry, tables);
        if let Some(rows) = self.note(undo) {
            self.found.prepared_rows = rows;
            self.verified(Kind::Undo, generation, Verdict::Sound);
        }
        if !has_tables {
            return None;
        }
        let words = table_words(&geometry, &layout, record.push_slots);
        self.note(journal.check_tables(generation, table_bytes(words + tables)))?;
        self.note(journal.verify_tables(generation))?;
        let first = geometry.table_words() + map_words(&layout);
        let whole = whole_slots(journal, &layout, first, record.push_slots, record.clients);
        let whole = self.fault(Kind::Tables, generation, whole)?;
        self.whole_pushes(&whole);
        let bytes = Some(Inbox::file_bytes(&layout, record.push_slots));
        if let Some(memory) = self.note(arena.open(Kind::Inbox, generation, bytes)) {
            let slot_bytes = Inbox::need(&layout, 1) as usize;
            let memory = SlotMemory::kept(memory, slot_bytes, record.push_slots);
            let mut inbox = Inbox::new(memory, &layout, record.push_slots, 1);
            let bodies = inbox.restore(whole, &layout, record.integrity, std::time::Instant::now());
            self.fault(Kind::Inbox, generation, bodies);
        }
        let plan = StorePlan {
            arena: arena.clone(),
            generation,
            catalogue: Arc::new(catalogue.clone()),
            layout,
            geometry,
            integrity: record.integrity,
            cached_bytes_max: 0,
            pin_budget: None,
            power: false,
            planted: PlantedBugs::default(),
        };
        let reservation = self.note(Budget::new(u64::MAX).reserve(0))?;
        let store = self.note(Store::open(plan, reservation, journal, record.version))?;
        self.verified(Kind::Tables, generation, Verdict::Sound);
        self.read_tables(arena, catalogue, journal, record, store.undo_rows());
        if record.integrity
            && record.stage == ShardStage::Ready
            && let Err((kind, fault)) = store.verify(journal)
        {
            self.fault::<()>(kind, generation, Err(fault));
        }
        let covered = record.integrity && record.stage == ShardStage::Ready;
        let verdict = if covered { Verdict::Sound } else { Verdict::Unchecked };
        for kind in [Kind::Values, Kind::Slots, Kind::Inbox] {
            if kind != Kind::Slots || record.slots > 0 {
                self.verified(kind, generation, verdict.clone());
            }
        }
        Some(())
    }

    /// Reads the growing tables.
    fn read_tables(
        &mut self,
        arena: &Arena,
        catalogue: &Catalogue,
        journal: &mut Journal,
        record: &ShardRecord,
        undo_rows: &[UndoRow],
    ) {
        let layout = catalogue.layout(arena.stamp.shard);
        for (table, partition) in (0..).zip(layout.tables()) {
            // An impossible number of slots is a fault of the index, found when the table is
            // opened.
            let slots = Table::slots_of(journal, table).min(SLOTS_MAX as u64) as usize;
            let generation = record.generation;
            let promises = TableNeed::default().promised(&Budget::new(u64::MAX));
            let inputs = TableInputs {
                files: TableFiles { arena: arena.clone(), generation, table, promises },
                catalogue,
                partition,
                slots: &vec![OptimizerSlot::new("", 0.0); slots],
                integrity: record.integrity,
                undo_rows,
            };
            let Some(opened) = self.note(Table::open(inputs, journal)) else { continue };
            let sound = if record.integrity { Verdict::Sound } else { Verdict::Unchecked };
            for name in opened.file_names() {
                let is_index = name.starts_with(Kind::Index.name());
                let verdict = if is_index { Verdict::Sound } else { sound.clone() };
                self.verdicts.entry(name).or_insert(verdict);
            }
            let name = catalogue.variable(partition.variable).name();
            let found = self.found.variables.iter_mut().find(|variable| variable.name == name);
            if let Some(variable) = found {
                *variable.table_rows.get_or_insert(0) += opened.rows();
                variable.bytes += opened.bytes();
            }
        }
    }

    fn whole_pushes(&mut self, whole: &[WholeSlot]) {
        let mut whole: Vec<&WholeSlot> = whole.iter().collect();
        whole.sort_by_key(|push_slot| push_slot.arrival.order);
        let clients = &self.found.clients;
        let pushes = whole.into_iter().map(|push_slot| CompletePush {
            push_slot: push_slot.number,
            client: push_slot.holder.map(|holder| clients[holder.0 as usize].task.clone()),
            sequence: push_slot.arrival.sequence.0,
            operation: match push_slot.arrival.operation {
                Operation::Gradient {} => "gradient",
                Operation::AssignAdd {} => "assign_add",
                _ => "assign",
            },
            token: push_slot.arrival.token.0,
            bytes: push_slot.arrival.bytes,
        });
        self.found.whole = pushes.collect();
    }

    /// Checks the first pages of the files that could not be read because of a fault in another
    /// file.
    fn check_first_pages(&mut self, arena: &Arena, record: &ShardRecord, read: bool) {
        let kinds =
            [Kind::Catalogue, Kind::Tables, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo];
        let kinds = kinds.into_iter().filter(|&kind| kind != Kind::Slots || record.slots > 0);
        for kind in kinds.filter(|_| !read) {
            let name = file_name(kind, record.generation);
            if !self.verdicts.contains_key(&name)
                && self.note(arena.open(kind, record.generation, None)).is_some()
            {
                self.verdicts.insert(name, Verdict::Unchecked);
            }
        }
    }
}

fn state_of(record: &ShardRecord) -> ShardState {
    ShardState {
        variables: match record.stage {
            ShardStage::Absent => VariablesStage::Absent,
            ShardStage::Declared => VariablesStage::Declared,
            ShardStage::Ready => VariablesStage::Ready,
        },
        version: record.version,
        gradients: record.gradients,
        step: GlobalStep(record.steps.step),
        finished: record.steps.finished,
        restore_epoch: record.restore_epoch,
        restored_step: record.restored_step,
        lives: record.lives,
        generation: record.generation,
        block_bytes: record.block_bytes,
        slots: record.slots,
        integrity: record.integrity,
        push_slots: record.push_slots,
    }
}

/// Returns the variables that are at least partly on a shard.
fn variables_of(catalogue: &Catalogue, shard: ShardId) -> Vec<VariableReport> {
    let mut variables: Vec<VariableReport> = Vec::new();
    for partition in catalogue.layout(shard).all() {
        let variable = catalogue.variable(partition.variable);
        // The size of a table is known only after it is read.
        let bytes = if partition.is_table() { 0 } else { partition.bytes };
        match variables.last_mut().filter(|last| last.name == variable.name()) {
            Some(last) => {
                last.partitions.push(partition.rows.clone());
                last.bytes += bytes;
            }
            None => variables.push(VariableReport {
                name: variable.name().to_owned(),
                dtype: variable.dtype(),
                shape: variable.shape().clone(),
                trainable: partition.trainable,
                replication: variable.replication(),
                partitions: vec![partition.rows.clone()],
                bytes,
                table_rows: partition.is_table().then_some(0),
            }),
        }
    }
    variables
}
