//! The restore of a shard's part of a checkpoint. Another thread, which may wait for a disk, does
//! the work.

use std::sync::Arc;

use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{CheckpointId, Restore};
use pushpull_common::protocol::{Envelope, Refusal};
use pushpull_optim::optimizer::VariableRules;
use pushpull_store::arena::fence;
use pushpull_store::store::Store;
use pushpull_store::testing::planted::Bug;

use crate::aggregate::data_position::{DataBatch, DataPosition};
use crate::checkpoint::{
    AbandonFlag, CallsEntry, CheckpointError, CheckpointName, CheckpointPiece, CheckpointStorage,
    CheckpointTraining, Opened, RestoredShard, RowHead,
};
use crate::error::StorageError;
use crate::event::Event;
use crate::shard::Shard;
use crate::shard::checkpoints::ShardCheckpoints;
use crate::shard::output::{ShardOutput, ShardOutputs};
use crate::shard::peers::peer_request::PeerRequest;
use crate::shard::shard_files::generation::Generation;
use crate::shard::shard_files::record::RESTORED_LIMIT;
use crate::shard::variables::{Variables, VariablesState};

/// The work of reading a shard's part of a checkpoint.
#[derive(Debug)]
pub(crate) struct ShardRestore {
    pub(in crate::shard) store: Box<Store>,
    pub(in crate::shard) shard: ShardId,
    pub(in crate::shard) checkpoint: CheckpointId,
    pub(in crate::shard) training: CheckpointTraining,
    pub(in crate::shard) abandon_flag: AbandonFlag,
}

/// The result of [`ShardRestore::run`].
#[derive(Debug)]
pub(crate) struct ShardRestored {
    pub(in crate::shard) store: Box<Store>,
    pub(in crate::shard) result: Result<RestoredShard, String>,
}

#[cfg(test)]
impl ShardRestored {
    /// Returns the error, if the part was not restored.
    pub(crate) fn error(self) -> Result<(), String> {
        self.result.map(|_| ())
    }
}

impl ShardRestore {
    /// Reads the part. May wait for a disk.
    pub(crate) fn run(mut self, storage: Arc<dyn CheckpointStorage>) -> ShardRestored {
        let storage = self.abandon_flag.watch(storage);
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
        // The name must match the epoch and the step that the chief knows and the shard will
        // continue from.
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
            CheckpointPiece::Range(stream, range, bytes) => {
                store.write_committed(stream, range.start, bytes);
                Ok(())
            }
            CheckpointPiece::Row(table, head, streams) => {
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

/// A restore that is running.
#[derive(Debug)]
pub(in crate::shard) struct RestoreInProgress {
    pub(in crate::shard) abandon_flag: AbandonFlag,
    pub(in crate::shard) connection: u64,
    pub(in crate::shard) request: Envelope,
    pub(in crate::shard) checkpoint: CheckpointId,
    pub(in crate::shard) epoch: RestoreEpoch,
}

impl ShardCheckpoints {
    /// Checks a request to restore a checkpoint under a new epoch. Returns whether the restore is
    /// to begin.
    fn check_restore(
        &mut self,
        variables: &Variables,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        restore: &Restore,
    ) -> Result<bool, Refusal> {
        let Restore { checkpoint, epoch } = restore;
        if let Some(restoring) = &mut self.restoring {
            // A chief that has reconnected asks again.
            if restoring.epoch == *epoch && restoring.checkpoint == *checkpoint {
                (restoring.connection, restoring.request) = (request.connection, request.envelope);
                return Ok(false);
            }
            // An earlier chief has requested it. Its successor begins again once this restore has
            // ended.
            return Err(Refusal::NotInitialized {});
        }
        if variables.is_ready()
            && *epoch == variables.epoch
            && checkpoint.step == variables.restored_step
        {
            variables.answer_ready(out, request.connection, request.envelope);
            return Ok(false);
        }
        if *epoch <= variables.epoch || *epoch <= checkpoint.epoch || epoch.0 == u32::MAX {
            return Err(variables.other_epoch(*epoch));
        }
        variables.store().ok_or(Refusal::NotInitialized {})?;
        self.check_place()?;
        Ok(true)
    }

    /// Begins to read a checkpoint into the store of the variables, which have no values.
    fn begin_restore(
        &mut self,
        store: Box<Store>,
        rules: &VariableRules,
        request: &PeerRequest,
        restore: Restore,
    ) -> ShardRestore {
        let Restore { checkpoint, epoch } = restore;
        let abandon_flag = AbandonFlag::default();
        self.restoring = Some(RestoreInProgress {
            connection: request.connection,
            request: request.envelope,
            checkpoint: checkpoint.clone(),
            epoch,
            abandon_flag: abandon_flag.clone(),
        });
        let training = CheckpointTraining::new(store.catalogue(), rules);
        ShardRestore { store, shard: self.id, checkpoint, training, abandon_flag }
    }
}

impl Shard {
    /// Starts to restore the values of a checkpoint, and drops the state of older epochs.
    pub(in crate::shard) fn restore(&mut self, request: PeerRequest, restore: Restore) {
        let Shard { variables, checkpoints, out, .. } = self;
        match checkpoints.check_restore(variables, out, &request, &restore) {
            Ok(true) => {}
            Ok(false) => return,
            Err(refusal) => return request.refuse(out, refusal),
        }
        if let Err(error) = self.end_epoch(request.connection) {
            return request.refuse_storage(&mut self.out, &error.to_string());
        }
        let Shard { variables, steps, checkpoints, out, .. } = self;
        let state = std::mem::replace(&mut variables.state, VariablesState::Absent);
        let VariablesState::Declared(store) = state else { return };
        // Reports of the epoch that ends are ignored.
        steps.set_participants(std::iter::empty());
        let restore = checkpoints.begin_restore(store, &variables.rules, &request, restore);
        out.push(ShardOutput::RestoreShard(Box::new(restore)));
    }

    /// Drops the state of the epoch that ends, and declares its variables again. Clients other than
    /// the one of this connection reconnect and learn of the new epoch.
    fn end_epoch(&mut self, connection: u64) -> Result<(), StorageError> {
        let Some(catalogue) = self.variables.store().map(|store| store.catalogue().clone()) else {
            return Ok(());
        };
        let Shard { peers, applier, steps, checkpoints, out, .. } = self;
        for &other in peers.connections.keys().filter(|&&other| other != connection) {
            peers.parked.drop_connection(other);
            out.close(other);
        }
        checkpoints.drop_saves(out);
        applier.jobs.clear();
        applier.streaming = None;
        steps.begin_follower(steps.step());
        peers.registry.forget_pushes();
        if let Some(owner) = &mut steps.owner {
            owner.forget_tokens();
        }
        self.forget_variables()?;
        self.make_variables(Generation::new(self.id, &self.config, catalogue))
    }

    /// Completes the restore: continues with the checkpoint's values, or forgets the variables.
    pub(in crate::shard) fn restored(&mut self, restored: ShardRestored) {
        let Some(RestoreInProgress { connection, request, checkpoint, epoch, .. }) =
            self.checkpoints.restoring.take()
        else {
            return;
        };
        let step = checkpoint.step;
        let ShardRestored { mut store, result } = restored;
        if let Some(refusal) = self.files.poisoned() {
            return self.out.refuse(connection, request, refusal);
        }
        let indexed = |counts| {
            let indexed = store.tables_restored(&mut self.files.journal);
            indexed.map(|()| counts).map_err(|error| error.to_string())
        };
        let counts = match result.and_then(indexed) {
            Ok(counts) => counts,
            Err(error) => {
                drop(store);
                // The declaration is dropped too, because no partly loaded state may remain.
                let forgotten = self.forget_variables().map_err(|error| error.to_string());
                let error = forgotten.err().unwrap_or(error);
                return self.out.refuse_storage(connection, request, &error);
            }
        };
        let planted = self.config.planted;
        let data = counts.data.as_ref().and_then(|entry| {
            let unspent = entry.unspent.iter().map(|&batch| DataBatch(batch));
            // The manifest has been checked.
            let set = entry.set().ok()?;
            Some(DataPosition::restored(set, DataBatch(entry.next), unspent, planted))
        });
        if store.has_integrity() {
            store.seal(&mut self.files.journal);
        }
        fence();
        (self.variables.epoch, self.variables.restored_step) = (epoch, step);
        (self.variables.version, self.variables.gradients) = (counts.version, counts.gradients);
        if let Some(owner) = &mut self.steps.owner {
            owner.forget_tokens();
            owner.roll_back(step);
            if !self.config.planted.has(Bug::PositionNotRestored) {
                owner.set_data(data);
            }
            self.counters.global_step.set(step.0);
        }
        // The manifest has been checked.
        self.steps.calls.roll_back(counts.calls.iter().filter_map(CallsEntry::entry).collect());
        self.steps.set_participants(store.catalogue().shards());
        self.variables.state = VariablesState::Ready(store);
        self.variables.count_tables();
        self.steps.begin_follower(step);
        self.stamp_answers();
        let checkpoint = checkpoint.name.to_string();
        let (step, epoch) = (step.0, epoch.0);
        self.report(Event::CheckpointRestored { checkpoint, step, epoch });
        self.peers.announce_ready(&self.variables, &mut self.out, connection, request);
    }
}
