//! Opens the shard of an arena, or creates one.
//!
//! Every value from a file is verified before it is used. No memory is reserved for a count until
//! the files are known to be as long as it requires.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::identity::Identity;
use pushpull_common::ids::ShardId;
use pushpull_store::arena::{Arena, ArenaStorage, Budget, file_name};
use pushpull_store::commit::{Journal, is_unused_intent};
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use pushpull_store::table::Table;

use super::control_file::{OpenedControl, SettingChange, control_text, open_control};
use super::recovery::Recovery;
use crate::config::{Durability, PsConfig};
use crate::error::StorageError;
use crate::event::Event;
use crate::metrics::Counters;
use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::checkpoints::ShardCheckpoints;
use crate::shard::intake::Intake;
use crate::shard::output::{ShardOutput, ShardOutputs};
use crate::shard::peers::Peers;
use crate::shard::peers::client_registry::ClientRegistry;
use crate::shard::pulls::Pulls;
use crate::shard::shard_files::client_record::ClientRecord;
use crate::shard::shard_files::coordinator_record::CoordinatorRecord;
use crate::shard::shard_files::data_record::DataRecord;
use crate::shard::shard_files::generation::{files_of_tables, open_catalogue, remove_leftovers};
use crate::shard::shard_files::poison::PoisonRecord;
use crate::shard::shard_files::power::Power;
use crate::shard::shard_files::record::{ShardRecord, ShardStage};
use crate::shard::shard_files::{CONTROL_BYTES_MAX, GROWTH, ShardFiles, transaction_words};
use crate::shard::steps::Steps;
use crate::shard::values::applier::Applier;
use crate::shard::values::variables::Variables;

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

/// The environment of a shard: everything except its state.
#[derive(Clone, Debug)]
pub(crate) struct ShardSetup {
    pub(crate) id: ShardId,
    pub(crate) config: Arc<PsConfig>,
    pub(crate) identity: Arc<Identity>,
    pub(crate) budget: Budget,
    pub(crate) counters: Arc<Counters>,
}

impl ShardSetup {
    /// Creates an arena in this storage, and its shard.
    fn create(self, storage: ArenaStorage, run: ServerRun) -> Result<Shard, StorageError> {
        clear_unfinished(&storage)?;
        let stamp = Stamp { shard: self.id, arena: run.arena };
        let text = control_text(&run, &self.identity);
        let arena = Arena { storage, stamp };
        let bytes = (1 + 1 + DataRecord::CELLS + CoordinatorRecord::CELLS + GROWTH) * PAGE_BYTES;
        let mut control = arena.storage.create(CONTROL_NEW, bytes as u64)?;
        let page = Page { kind: Kind::Control, stamp, generation: 0, text };
        control.write(0, &page.encode());
        let journal =
            Journal::create(&arena, control, transaction_words(0, 0), self.config.planted)?;
        if self.config.storage.durability == Durability::Power {
            // The first page identifies the arena of an image.
            arena.storage.sync(CONTROL_NEW)?;
            // Nothing is committed before both names are on disk. An intent with a commit but
            // without a control file is an arena's state, and is not removed.
            arena.storage.sync_names()?;
        }
        arena.storage.rename(CONTROL_NEW, &file_name(Kind::Control, 0))?;
        Ok(self.shard(arena, journal, run))
    }

    /// Opens the shard of the arena that has this control file.
    fn reopen(
        self,
        storage: ArenaStorage,
        run: ServerRun,
        found: OpenedControl,
        now: Instant,
    ) -> Result<Shard, StorageError> {
        let OpenedControl { control, images, .. } = found;
        let name = file_name(Kind::Control, 0);
        let corrupt = |fault| storage.corrupt(&name, fault);
        let page = Page::decode(control.bytes()).map_err(corrupt)?;
        let stamp = Stamp { shard: self.id, arena: page.stamp.arena };
        page.check(Kind::Control, stamp, 0).map_err(corrupt)?;
        let lengths = 2 * PAGE_BYTES..=CONTROL_BYTES_MAX;
        if !lengths.contains(&control.len()) {
            let what = format!("a file of {} to {} bytes", lengths.start(), lengths.end());
            return Err(storage.corrupt(&name, Fault::at(control.len(), what)));
        }
        let arena = Arena { storage, stamp };
        let corrupt = |fault| arena.storage.corrupt(&name, fault);
        let mut journal = Journal::open(&arena, control, self.config.planted)?;
        let cell = journal.first_cell()?;
        if let Some(PoisonRecord { reason }) = PoisonRecord::decode(&cell).map_err(corrupt)? {
            return Err(StorageError::Poisoned { path: arena.storage.path(&name), reason });
        }
        let record = ShardRecord::decode(&cell).map_err(corrupt)?;
        let ShardRecord { generation, stage, clients, .. } = record;
        let declared = stage != ShardStage::Absent;
        if declared {
            journal.use_tables(arena.open(Kind::Tables, generation, None)?, generation);
            let layout = open_catalogue(&arena, &record)?.layout(self.id);
            for (table, _) in (0..).zip(layout.tables()) {
                Table::map_index(&arena, generation, table, &mut journal)?;
            }
        }
        journal.redo()?;
        journal.verify_control(ClientRecord::first_word(clients))?;
        let mut shard = self.shard(arena, journal, run);
        let recovery = Recovery { record, now };
        shard.recover_members(&recovery)?;
        if declared {
            shard.recover_variables(&recovery)?;
        } else {
            shard.files.journal.check_intent(transaction_words(0, 0))?;
        }
        match &mut shard.files.power {
            Some(power) => *power = Power::resume(images),
            // Leftovers are removed only after every check, so that files which are refused stay
            // unchanged.
            None => {
                let of_tables = shard.variables.store().map(files_of_tables).unwrap_or_default();
                remove_leftovers(&shard.files.arena, declared.then_some(generation), &of_tables)?;
            }
        }
        Ok(shard)
    }

    /// Returns a shard without variables and clients.
    fn shard(self, arena: Arena, journal: Journal, run: ServerRun) -> Shard {
        let ShardSetup { id, config, identity, budget, counters } = self;
        let power = (config.storage.durability == Durability::Power).then(Power::default);
        let registry = ClientRegistry::new(config.lease, run.epoch_base, config.planted)
            .keeping(config.cluster.clone());
        let generation = 0;
        let lives = 0;
        Shard {
            files: ShardFiles {
                config: config.clone(),
                arena,
                budget,
                journal,
                generation,
                lives,
                power,
            },
            variables: Variables::new(id, config.clone(), counters.clone()),
            peers: Peers::new(config.clone(), registry),
            intake: Intake::new(config.clone(), counters.clone()),
            applier: Applier::new(id, counters.clone()),
            steps: Steps::new(id, config.clone(), counters.clone()),
            pulls: Pulls::new(id, counters.clone()),
            checkpoints: ShardCheckpoints::new(id, config.clone()),
            out: ShardOutputs::default(),
            changed: Changes::ALL,
            id,
            config,
            identity,
            counters,
        }
    }
}

impl Shard {
    /// Reports the settings that have changed since the arena was created.
    fn report_changes(&mut self, changed: Vec<SettingChange>) {
        for SettingChange { setting, before, now } in changed {
            let event = Event::SettingChanged { shard: self.id, setting, before, now };
            self.out.push(ShardOutput::Event(event));
        }
    }

    /// Opens the shard in this storage, or creates one there.
    pub(crate) fn open(
        setup: ShardSetup,
        storage: ArenaStorage,
        run: ServerRun,
        now: Instant,
    ) -> Result<Shard, StorageError> {
        if setup.config.storage.durability == Durability::Power {
            storage.sync_way()?;
        }
        let control = storage.open(&file_name(Kind::Control, 0))?;
        let mut shard = match control {
            Some(control) => {
                let mut found = open_control(&setup, &storage, &run, control)?;
                let changed = std::mem::take(&mut found.changed);
                let mut shard = setup.reopen(storage, run, found, now)?;
                shard.report_changes(changed);
                shard
            }
            None => setup.create(storage, run)?,
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
        shard.decide(now);
        shard.peers.report_members(&mut shard.out);
        shard.steps.note_tokens();
        shard.persist();
        Ok(shard)
    }
}

/// The name of the control file during its creation.
pub(in crate::shard) const CONTROL_NEW: &str = "control.new";

/// Removes the files of an unfinished creation, after a kill or a loss of power. An arena exists
/// once it has its control file. Any other files without one are an arena's state, and are an
/// error.
fn clear_unfinished(storage: &ArenaStorage) -> Result<(), StorageError> {
    let intent = file_name(Kind::Intent, 0);
    let names = storage.names()?;
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
