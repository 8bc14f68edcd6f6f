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
    AbandonFlag, CallsEntry, CheckpointError, CheckpointFault, CheckpointPiece, CheckpointStorage,
    CheckpointTraining, Opened, RestoredShard, RowHead,
};
use crate::error::StorageError;
use crate::event::Event;
use crate::shard::Shard;
use crate::shard::checkpoints::ShardCheckpoints;
use crate::shard::checkpoints::restore_check::{CheckedCheckpoint, RestoreCheck, RestoreChecked};
use crate::shard::output::{ShardOutput, ShardOutputs};
use crate::shard::peers::peer_request::PeerRequest;
use crate::shard::shard_files::generation::Generation;
use crate::shard::shard_files::record::RESTORED_LIMIT;
use crate::shard::variables::{Variables, VariablesState};

/// The checkpoint to restore, and the epoch that begins.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::shard) struct RestoreOrder {
    pub(super) checkpoint: CheckpointId,
    pub(super) epoch: RestoreEpoch,
}

impl From<Restore> for RestoreOrder {
    fn from(restore: Restore) -> RestoreOrder {
        let Restore { checkpoint, epoch } = restore;
        RestoreOrder { checkpoint, epoch }
    }
}

/// The work of a restore on checkpoint files.
#[derive(Debug)]
pub(crate) enum RestoreWork {
    /// Check the shard's part.
    Check(RestoreCheck),
    /// Read the part, which has been checked.
    Read(Box<ShardRestore>),
}

/// The result of [`RestoreWork::run`].
#[derive(Debug)]
pub(crate) enum RestoreResult {
    Checked(Box<RestoreChecked>),
    Read(ShardRestored),
}

impl RestoreWork {
    /// Does the work. May wait for a disk.
    pub(crate) fn run(self, storage: Arc<dyn CheckpointStorage>) -> RestoreResult {
        match self {
            RestoreWork::Check(check) => RestoreResult::Checked(Box::new(check.run(storage))),
            RestoreWork::Read(restore) => RestoreResult::Read(restore.run()),
        }
    }
}

#[cfg(test)]
impl RestoreResult {
    /// Returns the error, if the part was not checked or not read.
    pub(crate) fn error(self) -> Result<(), String> {
        let result = match self {
            RestoreResult::Checked(checked) => checked.result.map(|_| ()),
            RestoreResult::Read(restored) => restored.result.map(|_| ()),
        };
        result.map_err(|fault| fault.to_string())
    }
}

/// The work of reading a shard's part of a checkpoint.
#[derive(Debug)]
pub(crate) struct ShardRestore {
    store: Box<Store>,
    shard: ShardId,
    training: CheckpointTraining,
    opened: Opened,
}

/// The result of [`ShardRestore::run`].
#[derive(Debug)]
pub(crate) struct ShardRestored {
    store: Box<Store>,
    result: Result<RestoredShard, CheckpointFault>,
}

impl ShardRestore {
    fn run(mut self) -> ShardRestored {
        let result = self.read().map_err(CheckpointFault::from);
        ShardRestored { store: self.store, result }
    }

    fn read(&mut self) -> Result<RestoredShard, CheckpointError> {
        let ShardRestore { store, shard, training, opened } = self;
        let catalogue = store.catalogue().clone();
        opened.restore_shard(&catalogue, *shard, training, &mut |piece| match piece {
            CheckpointPiece::Range(stream, range, bytes) => {
                store.write_committed(stream, range.start, bytes);
                Ok(())
            }
            CheckpointPiece::Row(table, head, streams) => {
                let head = RowHead { step: head.step.min(RESTORED_LIMIT), ..head };
                let table = &mut store.tables_mut()[table];
                // The check has found that all rows fit the table.
                let restored = table.restore_row(head, streams);
                restored.map_err(|error| CheckpointError::Memory { reason: error.to_string() })
            }
        })
    }
}

/// The name of the request, in refusals of a restore.
const RESTORE: &str = "restore the variables";

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
    /// to begin, after a check of the checkpoint.
    pub(super) fn check_restore(
        &mut self,
        variables: &Variables,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        order: &RestoreOrder,
    ) -> Result<bool, Refusal> {
        let RestoreOrder { checkpoint, epoch } = order;
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
        if !variables.may_begin(*epoch, checkpoint.epoch) {
            return Err(variables.other_epoch(*epoch));
        }
        variables.store().ok_or(Refusal::NotInitialized {})?;
        self.check_place()?;
        Ok(true)
    }

    /// Begins to read a checked checkpoint into the store of the variables, which have no values.
    fn begin_restore(
        &mut self,
        store: Box<Store>,
        rules: &VariableRules,
        request: &PeerRequest,
        order: RestoreOrder,
        checked: CheckedCheckpoint,
    ) -> RestoreWork {
        let RestoreOrder { checkpoint, epoch } = order;
        let CheckedCheckpoint { opened, abandon_flag, .. } = checked;
        self.restoring = Some(RestoreInProgress {
            connection: request.connection,
            request: request.envelope,
            checkpoint,
            epoch,
            abandon_flag,
        });
        let training = CheckpointTraining::new(store.catalogue(), rules);
        RestoreWork::Read(Box::new(ShardRestore { store, shard: self.id, training, opened }))
    }
}

/// Refuses to restore a checkpoint or to prepare that.
pub(super) fn refuse_restore(
    out: &mut ShardOutputs,
    shard: ShardId,
    request: &PeerRequest,
    refusal: Refusal,
) {
    out.refuse_chief((request.connection, request.envelope), shard, RESTORE, refusal);
}

impl Shard {
    /// Restores the values of a checkpoint, which is checked first if it has not been. Drops the
    /// state of older epochs once the check has succeeded.
    pub(in crate::shard) fn restore(&mut self, request: PeerRequest, order: RestoreOrder) {
        let Shard { variables, checkpoints, out, .. } = self;
        match checkpoints.check_restore(variables, out, &request, &order) {
            Ok(true) => {}
            Ok(false) => return,
            Err(refusal) => return refuse_restore(out, checkpoints.id, &request, refusal),
        }
        let connection = request.connection;
        let Some(checked) = checkpoints.take_checked(variables, connection, &order.checkpoint)
        else {
            return checkpoints.begin_check(variables, out, request, order, true);
        };
        if let Err(error) = self.end_epoch(connection) {
            return request.refuse_storage(&mut self.out, &error.to_string());
        }
        let Shard { variables, steps, checkpoints, out, .. } = self;
        let state = std::mem::replace(&mut variables.state, VariablesState::Absent);
        let VariablesState::Declared(store) = state else { return };
        // Reports of the epoch that ends are ignored.
        steps.set_participants(std::iter::empty());
        let work = checkpoints.begin_restore(store, &variables.rules, &request, order, checked);
        out.push(ShardOutput::RestoreShard(Box::new(work)));
    }

    /// Takes the result of work on checkpoint files.
    pub(in crate::shard) fn restore_advanced(&mut self, result: RestoreResult) {
        match result {
            RestoreResult::Checked(checked) => self.restore_checked(*checked),
            RestoreResult::Read(restored) => self.restored(restored),
        }
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
    fn restored(&mut self, restored: ShardRestored) {
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
            indexed.map(|()| counts).map_err(|error| CheckpointFault::Storage(error.to_string()))
        };
        let counts = match result.and_then(indexed) {
            Ok(counts) => counts,
            Err(fault) => {
                drop(store);
                // The declaration is dropped too, because no partly loaded state may remain.
                let forgotten = self.forget_variables();
                let fault = forgotten
                    .map_or_else(|error| CheckpointFault::Storage(error.to_string()), |()| fault);
                let of = (connection, request);
                return self.out.refuse_chief(of, self.id, RESTORE, fault.refusal());
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
        let gradients_apart = counts.gradients_apart;
        self.report(Event::CheckpointRestored { checkpoint, step, epoch, gradients_apart });
        self.peers.announce_ready(&self.variables, &mut self.out, connection, request);
    }
}
