//! Saving a shard's part of a checkpoint, and taking a checkpoint's values.
//!
//! The shard decides and pins; files are read and written by others, on threads that may wait for a
//! disk, and what came of it is told to the shard like everything else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::PASSED_OVER_MAX;
use pushpull_common::protocol::message::{self, CheckpointId, PassedOver};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Refusal};

use super::checkpoint_cut::CheckpointCut;
use super::output::Body;
use super::output::Output;
use super::record::RESTORED_LIMIT;
use super::{Detail, Shard, Variables};
use crate::arena::fence;
use crate::checkpoint::{
    CheckpointError, CheckpointName, CheckpointStorage, GiveUp, Opened, Piece, RestoredShard,
    RowHead, ShardEntry, TableEntry, Training, write_shard, write_table,
};
use crate::planted::PlantedBugs;
use crate::store::Store;

/// Who asked for a checkpoint, and is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// A peer.
    Connection {
        /// Over this connection.
        connection: u64,
        /// By this request.
        request: Envelope,
    },
    /// Somebody in this process.
    Ticket(u64),
}

/// The ticket of the saves that are due: nobody waits for what comes of them.
pub(crate) const DUE: u64 = 0;

impl Asker {
    /// Whether it is the clock.
    pub(crate) fn is_due(self) -> bool {
        self == Asker::Ticket(DUE)
    }
}

/// What the owner's shard wants of the saver, who waits for disks and for other tasks.
#[derive(Debug)]
pub(crate) enum Order {
    /// Find the newest checkpoint that is sound.
    Find {
        /// Over this connection it was asked for.
        connection: u64,
        /// By this request.
        request: Envelope,
    },
    /// Save a checkpoint of all shards.
    Save {
        /// Who asks.
        asker: Asker,
        /// What is kept with it.
        user: Vec<u8>,
        /// What the variables are.
        catalogue: Arc<Catalogue>,
        /// The restore epoch.
        epoch: RestoreEpoch,
        /// The global step, of which there is a cut.
        step: GlobalStep,
    },
    /// Tell who has this ticket what came of its checkpoint.
    Tell {
        /// The ticket.
        ticket: u64,
        /// The checkpoint, or why there is none.
        result: Result<CheckpointId, String>,
    },
}

/// What the saver says.
#[derive(Debug)]
pub(crate) enum News {
    /// What came of [`Order::Find`].
    Found {
        /// Over this connection it was asked for.
        connection: u64,
        /// By this request.
        request: Envelope,
        /// What there is, or why it cannot be told.
        result: Result<Option<CheckpointId>, String>,
        /// Those that are newer and not sound, newest first: at most as many as an answer names.
        passed_over: Vec<PassedOver>,
    },
    /// Somebody in this process wants a checkpoint.
    Wished {
        /// Names the wish.
        ticket: u64,
        /// What is kept with it.
        user: Vec<u8>,
    },
    /// What came of [`Order::Save`].
    Saved {
        /// Who asked.
        asker: Asker,
        /// The checkpoint, or why there is none.
        result: Result<CheckpointId, String>,
    },
}

/// A shard's part of a checkpoint, to be written.
#[derive(Debug)]
pub(crate) struct ShardSave {
    pub(crate) connection: u64,
    pub(crate) request: Envelope,
    name: CheckpointName,
    catalogue: Arc<Catalogue>,
    shard: ShardId,
    training: Training,
    cut: CheckpointCut,
    give_up: GiveUp,
    planted: PlantedBugs,
}

impl ShardSave {
    /// Writes it, and reads it back. May wait for a disk.
    pub(crate) fn run(self, storage: Arc<dyn CheckpointStorage>) -> Result<Vec<u8>, String> {
        let storage = &*self.give_up.watch(storage);
        let (catalogue, shard, training) = (&*self.catalogue, self.shard, &self.training);
        let CheckpointCut { mut image, version, gradients, clients, .. } = self.cut;
        let tables = std::mem::take(&mut image.tables);
        let file = write_shard(storage, self.name, catalogue, shard, training, image, self.planted);
        let file = file.map_err(|error| error.to_string())?;
        let layout = catalogue.layout(shard);
        let tables = layout.tables().iter().zip(tables).map(|(partition, source)| {
            write_table(storage, self.name, catalogue, partition, training, source)
        });
        let tables: Result<Vec<TableEntry>, CheckpointError> = tables.collect();
        let entry = ShardEntry {
            task: shard.task,
            shard: shard.shard,
            file,
            tables: tables.map_err(|error| error.to_string())?,
            version,
            gradients,
            clients,
        };
        serde_json::to_vec(&entry).map_err(|error| error.to_string())
    }
}

/// A checkpoint whose values a shard is to take.
#[derive(Debug)]
pub(crate) struct ShardRestore {
    store: Box<Store>,
    shard: ShardId,
    checkpoint: CheckpointId,
    training: Training,
    give_up: GiveUp,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct ShardRestored {
    store: Box<Store>,
    result: Result<RestoredShard, String>,
}

#[cfg(test)]
impl ShardRestored {
    /// Why it is not restored.
    pub(crate) fn error(self) -> Result<(), String> {
        self.result.map(|_| ())
    }
}

impl ShardRestore {
    /// Reads it. May wait for a disk.
    pub(crate) fn run(mut self, storage: Arc<dyn CheckpointStorage>) -> ShardRestored {
        let storage = self.give_up.watch(storage);
        let result = self.read(storage).map_err(|error| error.to_string());
        ShardRestored { store: self.store, result }
    }

    fn read(
        &mut self,
        storage: Arc<dyn CheckpointStorage>,
    ) -> Result<RestoredShard, CheckpointError> {
        let name = self.checkpoint.name.as_str();
        let parsed = name.parse::<CheckpointName>();
        let unfit = |what, expected: String, found: String| {
            let checkpoint = name.to_owned();
            CheckpointError::Unfit { checkpoint, what, expected, found }
        };
        let parsed = parsed.map_err(|_| unfit("name", "a checkpoint's".into(), name.into()))?;
        // What the chief was told, and the epoch and the step go by, is what is there.
        let (epoch, step) = (self.checkpoint.epoch, self.checkpoint.step);
        if (parsed.restore_epoch, parsed.global_step) != (epoch.0, step.0) {
            return Err(unfit("name", format!("of epoch {epoch} and step {step}"), name.into()));
        }
        let mut opened = Opened::open(storage, parsed)?;
        let manifest = opened.manifest();
        let shards = manifest.shards.iter();
        let counts =
            shards.flat_map(|s| [("version", s.version), ("count of gradients", s.gradients)]);
        for (what, found) in counts.chain([("step", step.0)]) {
            if found >= RESTORED_LIMIT {
                return Err(unfit(what, format!("below {RESTORED_LIMIT}"), found.to_string()));
            }
        }
        let (catalogue, store) = (self.store.catalogue().clone(), &mut self.store);
        let training = &self.training;
        opened.restore_shard(&catalogue, self.shard, training, &mut |piece| match piece {
            Piece::Range(stream, range, bytes) => {
                store.write_committed(stream, range.start, bytes);
                Ok(())
            }
            Piece::Row(table, head, streams) => {
                let head = RowHead { step: head.step.min(RESTORED_LIMIT), ..head };
                let table = &mut store.tables_mut()[table];
                let restored = table.restore_row(head, streams);
                restored.map_err(|error| match table.rows() >= table.limit() {
                    true => {
                        let variable = catalogue.variable(table.partition().variable).name();
                        let (variable, limit) = (variable.to_owned(), table.limit());
                        CheckpointError::TableFull { variable, limit }
                    }
                    false => CheckpointError::Memory { reason: error.to_string() },
                })
            }
        })
    }
}

/// The writing of this shard's part of a checkpoint, under way.
#[derive(Debug)]
pub(super) struct Saving {
    /// Over this connection it was asked for.
    connection: u64,
    /// Set when the memory that it pins is needed. It pins none while the file is read back.
    memory_needed: Arc<AtomicBool>,
    give_up: GiveUp,
}

/// A restore under way.
#[derive(Debug)]
pub(super) struct Restoring {
    give_up: GiveUp,
    connection: u64,
    request: Envelope,
    checkpoint: CheckpointId,
    epoch: RestoreEpoch,
}

impl Shard {
    pub(super) fn on_saver_message(&mut self, now: Instant, news: News) {
        match news {
            News::Found { connection, request, result, passed_over } => {
                self.passed_over = passed_over;
                self.checkpoint_found(connection, request, result);
            }
            News::Wished { ticket, user } => self.save(now, Asker::Ticket(ticket), user),
            News::Saved { asker, result } => {
                // The saver knows of those that are due by themselves.
                if !asker.is_due() {
                    self.saved(asker, result);
                }
                self.end_save_of_cut(now);
            }
        }
    }

    /// Asks for the newest checkpoint that is sound.
    pub(super) fn find_checkpoint(&mut self, connection: u64, request: Envelope) {
        if self.owner.is_none() {
            let detail = Detail::clipped(format!("{} does not own the step", self.id));
            return self.refuse(connection, request, Refusal::Unsupported { kind: 17, detail });
        }
        match self.config.checkpoints {
            Some(_) => self.outputs.push_back(Output::Order(Order::Find { connection, request })),
            None => self.checkpoint_found(connection, request, Ok(None)),
        }
    }

    fn checkpoint_found(
        &mut self,
        connection: u64,
        request: Envelope,
        result: Result<Option<CheckpointId>, String>,
    ) {
        match result {
            Ok(checkpoint) => {
                self.answer(connection, request, message::CheckpointFound { checkpoint }.into());
            }
            Err(error) => self.refuse_storage(connection, request, &error),
        }
    }

    /// Says which checkpoints were passed over when the newest sound one was looked for last.
    pub(super) fn tell_passed_over(&mut self, connection: u64, request: Envelope) {
        let newest = self.passed_over.iter().take(PASSED_OVER_MAX).cloned();
        let checkpoints = List::of(newest).expect("no more are taken");
        self.answer(connection, request, message::PassedOverAre { checkpoints }.into());
    }

    /// Asks for a checkpoint of all shards.
    pub(super) fn save(&mut self, now: Instant, asker: Asker, user: Vec<u8>) {
        let refusal = match (&self.owner, &self.config.checkpoints) {
            (None, _) => format!("{} does not own the step", self.id),
            (_, None) => "no place for checkpoints is configured".to_owned(),
            _ if !self.is_ready() => "the variables have no values yet".to_owned(),
            _ => String::new(),
        };
        if !refusal.is_empty() {
            return self.saved(asker, Err(refusal));
        }
        self.request_save(now, asker, user);
    }

    /// Has the saver save what shards have kept, or have when they are asked.
    pub(super) fn order_save(&mut self, asker: Asker, user: Vec<u8>) {
        let Some(catalogue) = self.store().map(|store| store.catalogue().clone()) else { return };
        let (epoch, step) = (self.epoch, self.step());
        let order = Order::Save { asker, user, catalogue, epoch, step };
        self.outputs.push_back(Output::Order(order));
    }

    /// A checkpoint of all shards is saved, or is not.
    pub(super) fn saved(&mut self, asker: Asker, result: Result<CheckpointId, String>) {
        match asker {
            Asker::Connection { connection, request } => match result {
                Ok(checkpoint) => {
                    self.answer(connection, request, message::Saved { checkpoint }.into());
                }
                Err(error) => self.refuse_storage(connection, request, &error),
            },
            Asker::Ticket(ticket) => {
                self.outputs.push_back(Output::Order(Order::Tell { ticket, result }));
            }
        }
    }

    /// Pins this shard's memory, to be written to a checkpoint.
    pub(super) fn save_shard(
        &mut self,
        now: Instant,
        connection: u64,
        request: Envelope,
        name: &str,
    ) {
        let Ok(name) = name.parse::<CheckpointName>() else {
            let error = format!("{name:?} is no checkpoint's name");
            return self.refuse_storage(connection, request, &error);
        };
        if self.config.checkpoints.is_none() {
            let error = "no place for checkpoints is configured";
            return self.refuse_storage(connection, request, error);
        }
        let store = self.store().filter(|_| self.is_ready());
        let Some(catalogue) = store.map(|store| store.catalogue().clone()) else {
            return self.refuse(connection, request, Refusal::NotInitialized {});
        };
        if self.saving.is_some() {
            let what = Detail::clipped("checkpoints being written");
            return self.refuse(connection, request, Refusal::Busy { what, limit: 1 });
        }
        let cut = match self.take_cut(now, name) {
            Ok(cut) => cut,
            Err(error) => return self.refuse_storage(connection, request, &error),
        };
        let (memory_needed, give_up) = (cut.memory_needed.clone(), GiveUp::default());
        let save = ShardSave {
            connection,
            request,
            name,
            training: Training::new(&catalogue, &self.rules),
            catalogue,
            shard: self.id,
            cut,
            give_up: give_up.clone(),
            planted: self.config.planted,
        };
        self.saving = Some(Saving { connection, memory_needed, give_up });
        self.outputs.push_back(Output::SaveShard(Box::new(save)));
    }

    /// This shard's part is written, or is not.
    pub(super) fn shard_saved(
        &mut self,
        connection: u64,
        request: Envelope,
        result: Result<Vec<u8>, String>,
    ) {
        self.saving = None;
        match result {
            Ok(entry) => {
                self.answer_with(
                    connection,
                    request,
                    message::ShardSaved {}.into(),
                    Body::Shared(entry.into()),
                    None,
                );
            }
            Err(error) => self.refuse_storage(connection, request, &error),
        }
    }

    /// Gives up what is being written to a checkpoint if it pins memory: pushes need it.
    pub(super) fn give_up_saving(&mut self) {
        self.kept_cut = None;
        if let Some(saving) = &self.saving {
            saving.memory_needed.store(true, Ordering::Relaxed);
        }
    }

    /// Gives up what is being written for an asker that is gone.
    pub(super) fn give_up_saving_for(&self, connection: u64) {
        if let Some(saving) = self.saving.as_ref().filter(|s| s.connection == connection) {
            saving.give_up.give_up("whoever has asked for it is gone");
        }
    }

    /// Gives up what is being written to a checkpoint, or read of one: the server stops.
    pub(crate) fn give_up_files(&self) {
        self.saving.iter().for_each(|saving| saving.give_up.give_up("the server stops"));
        self.give_up_restoring("the server stops");
    }

    /// Gives up what is being read of a checkpoint.
    pub(super) fn give_up_restoring(&self, reason: &'static str) {
        self.restoring.iter().for_each(|restoring| restoring.give_up.give_up(reason));
    }

    /// Takes the values of a checkpoint, and drops what belongs to older epochs.
    pub(super) fn restore(
        &mut self,
        now: Instant,
        connection: u64,
        request: Envelope,
        restore: message::Restore,
    ) {
        let (checkpoint, epoch) = (restore.checkpoint, restore.epoch);
        if let Some(restoring) = &mut self.restoring {
            // Asked again, by a chief that has reconnected.
            if restoring.epoch == epoch && restoring.checkpoint == checkpoint {
                (restoring.connection, restoring.request) = (connection, request);
                return;
            }
            // A chief that died has asked for it: its successor begins again when this is over.
            return self.refuse(connection, request, Refusal::NotInitialized {});
        }
        if self.is_ready() && epoch == self.epoch && checkpoint.step == self.restored_step {
            return self.answer_ready(connection, request);
        }
        if epoch <= self.epoch || epoch <= checkpoint.epoch || epoch.0 == u32::MAX {
            let refusal = self.other_epoch(epoch);
            return self.refuse(connection, request, refusal);
        }
        let Some(catalogue) = self.store().map(|store| store.catalogue().clone()) else {
            return self.refuse(connection, request, Refusal::NotInitialized {});
        };
        if self.config.checkpoints.is_none() {
            let error = "no place for checkpoints is configured";
            return self.refuse_storage(connection, request, error);
        }
        if let Err(error) = self.begin_restore(now, connection, catalogue) {
            return self.refuse_storage(connection, request, &error.to_string());
        }
        let Variables::Declared(store) = std::mem::replace(&mut self.variables, Variables::Absent)
        else {
            return;
        };
        let give_up = GiveUp::default();
        self.restoring = Some(Restoring {
            connection,
            request,
            checkpoint: checkpoint.clone(),
            epoch,
            give_up: give_up.clone(),
        });
        let training = Training::new(store.catalogue(), &self.rules);
        let restore = ShardRestore { store, shard: self.id, checkpoint, training, give_up };
        self.outputs.push_back(Output::RestoreShard(Box::new(restore)));
    }

    /// Drops everything of the epoch that ends: everybody else comes back and is told.
    fn begin_restore(
        &mut self,
        now: Instant,
        connection: u64,
        catalogue: Arc<Catalogue>,
    ) -> Result<(), crate::error::StorageError> {
        // What it had pinned belongs to the past, and holds the thread that is to read.
        if let Some(saving) = &self.saving {
            saving.give_up.give_up("a checkpoint is restored");
        }
        let others: Vec<u64> =
            self.conversations.keys().copied().filter(|&other| other != connection).collect();
        for other in others {
            self.parked.drop_connection(other);
            self.outputs.push_back(Output::Close { connection: other });
        }
        self.drop_cuts();
        self.jobs.clear();
        self.streaming_apply = None;
        self.begin_follower(self.step());
        self.replicas.forget_pushes();
        if let Some(owner) = &mut self.owner {
            owner.forget_tokens();
        }
        self.forget_variables()?;
        let made = self.make_variables(catalogue);
        self.give_parked_push_slots(now);
        made
    }

    /// The checkpoint's values are here, or are not to be had.
    pub(super) fn restored(&mut self, now: Instant, restored: ShardRestored) {
        let Some(Restoring { connection, request, checkpoint, epoch, .. }) = self.restoring.take()
        else {
            return;
        };
        let step = checkpoint.step;
        let ShardRestored { mut store, result } = restored;
        if let Some(refusal) = self.poisoned() {
            return self.refuse(connection, request, refusal);
        }
        let indexed = |counts| {
            let indexed = store.tables_restored(&mut self.journal);
            indexed.map(|()| counts).map_err(|error| error.to_string())
        };
        let counts = match result.and_then(indexed) {
            Ok(counts) => counts,
            Err(error) => {
                drop(store);
                // What was declared goes, too: nothing is loaded in part.
                let forgotten = self.forget_variables().map_err(|error| error.to_string());
                let error = forgotten.err().unwrap_or(error);
                return self.refuse_storage(connection, request, &error);
            }
        };
        if store.has_integrity() {
            store.seal(&mut self.journal);
        }
        fence();
        (self.epoch, self.restored_step) = (epoch, step);
        (self.version, self.gradients) = (counts.version, counts.gradients);
        if let Some(owner) = &mut self.owner {
            owner.forget_tokens();
            owner.go_back(step);
            self.counters.global_step.set(step.0);
        }
        self.variables = Variables::Ready(store);
        self.count_tables();
        self.begin_follower(step);
        self.ready_now(connection, request);
        self.grant_parked_tokens(now);
    }

    fn refuse_storage(&mut self, connection: u64, request: Envelope, error: &str) {
        let detail = Detail::clipped(error);
        self.refuse(connection, request, Refusal::Storage { detail });
    }
}
