//! Restores: the check of a checkpoint, and its values under a new restore epoch.

use pushpull_checkpoint::{CheckpointFault, CheckpointTraining};
use pushpull_common::error::Chain;
use pushpull_common::protocol::{Refusal, message};
use pushpull_store::arena::fence;
use pushpull_store::planted::Bug;

use crate::aggregate::data_position::{DataBatch, DataPosition};
use crate::coordinators::CoordinatorEntry;
use crate::error::StorageError;
use crate::event::Event;
use crate::shard::Shard;
use crate::shard::checkpoints::restore_check::{RestoreInProgress, RestoreOrder, abandoned};
use crate::shard::file_work::restore_work::{RestoreChecked, RestoreResult, ShardRestored};
use crate::shard::output::ShardOutput;
use crate::shard::request::PeerRequest;
use crate::shard::shard_files::generation::Generation;
use crate::shard::values::variables::VariablesState;

impl Shard {
    /// Checks a checkpoint before all shards restore it. The training goes on.
    pub(super) fn prepare_restore(&mut self, request: PeerRequest, order: RestoreOrder) {
        match self.check_restore(&request, &order) {
            Ok(true) => self.begin_check(request, order, false),
            Ok(false) => {}
            Err(refusal) => {
                self.checkpoints.refuse_restore(&mut self.out, &request, refusal);
            }
        }
    }

    /// Restores the values of a checkpoint, which is checked first if it has not been. Drops the
    /// state of older epochs once the check has succeeded.
    pub(super) fn restore(&mut self, request: PeerRequest, order: RestoreOrder) {
        match self.check_restore(&request, &order) {
            Ok(true) => {}
            Ok(false) => return,
            Err(refusal) => {
                return self.checkpoints.refuse_restore(&mut self.out, &request, refusal);
            }
        }
        let connection = request.connection;
        let digest = self.variables.digest();
        let checked = self.checkpoints.take_checked(digest, connection, &order.checkpoint);
        let Some(checked) = checked else {
            return self.begin_check(request, order, true);
        };
        if let Err(error) = self.end_epoch(connection) {
            return request.refuse_storage(&mut self.out, &Chain(&error).to_string());
        }
        let Some(store) = self.variables.take_declared() else { return };
        // Reports of the epoch that ends are ignored.
        self.steps.set_participants(std::iter::empty());
        let training = CheckpointTraining::new(store.catalogue(), &self.variables.rules);
        let work = self.checkpoints.begin_restore(store, training, &request, order, checked);
        self.out.push(ShardOutput::RestoreShard(Box::new(work)));
    }

    /// Checks a request to restore a checkpoint under a new epoch. Returns whether the restore is
    /// to begin, after a check of the checkpoint.
    fn check_restore(
        &mut self,
        request: &PeerRequest,
        order: &RestoreOrder,
    ) -> Result<bool, Refusal> {
        if let Some(joined) = self.checkpoints.join_restore(request, order) {
            return joined.map(|()| false);
        }
        let RestoreOrder { checkpoint, epoch } = order;
        let variables = &self.variables;
        if variables.is_ready()
            && *epoch == variables.epoch
            && checkpoint.step == variables.restored_step
        {
            request.answer(&mut self.out, variables.ready_message());
            return Ok(false);
        }
        if !variables.may_begin(*epoch, checkpoint.epoch) {
            return Err(variables.other_epoch(*epoch));
        }
        variables.store().ok_or(Refusal::NotInitialized {})?;
        self.checkpoints.check_place()?;
        Ok(true)
    }

    /// Begins to check a checkpoint for the declared variables. Abandons the check of another one.
    fn begin_check(&mut self, request: PeerRequest, order: RestoreOrder, restores: bool) {
        let Shard { variables, checkpoints, out, .. } = self;
        if checkpoints.join_check(request, &order, restores) {
            return;
        }
        checkpoints.drop_check(out, "another checkpoint is to be restored");
        let Some(store) = variables.store() else {
            return request.refuse(out, Refusal::NotInitialized {});
        };
        let catalogue = store.catalogue().clone();
        let training = CheckpointTraining::new(&catalogue, &variables.rules);
        let row_limits = store.tables().iter().map(|table| table.limit()).collect();
        let work =
            checkpoints.begin_check(request, order, restores, catalogue, training, row_limits);
        out.push(ShardOutput::RestoreShard(Box::new(work)));
    }

    /// Takes the result of work on checkpoint files.
    pub(in crate::shard) fn restore_advanced(&mut self, result: RestoreResult) {
        match result {
            RestoreResult::Checked(checked) => self.restore_checked(*checked),
            RestoreResult::Read(restored) => self.restored(restored),
        }
    }

    /// Takes the result of a check: begins the restore if it was requested, or keeps the checkpoint
    /// for the request.
    fn restore_checked(&mut self, checked: RestoreChecked) {
        let Shard { variables, files, peers, checkpoints, out, .. } = self;
        let Some(check) = checkpoints.end_check(&checked) else { return };
        let request = check.request;
        let opened = match checked.result {
            Ok(opened) => opened,
            Err(fault) => return checkpoints.refuse_restore(out, &request, fault.refusal()),
        };
        if let Some(reason) = check.abandon_flag.reason() {
            return checkpoints.refuse_restore(out, &request, abandoned(reason));
        }
        let connection = request.connection;
        let refusal = files.poisoned().or_else(|| peers.chief_refusal(connection));
        if let Some(refusal) = refusal {
            return request.refuse(out, refusal);
        }
        if variables.digest() != Some(check.digest) || !peers.connections.contains_key(&connection)
        {
            // The chief declares the variables and asks again.
            return request.refuse(out, Refusal::NotInitialized {});
        }
        checkpoints.keep_checked(&check, opened);
        match check.restores {
            true => self.restore(request, check.order),
            false => request.answer(out, message::RestorePrepared {}.into()),
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
        applier.drop_jobs();
        steps.begin_follower(steps.step());
        peers.registry.forget_pushes();
        if let Some(owner) = &mut steps.owner {
            owner.forget_tokens();
        }
        self.replace_generation(Generation::new(self.id, &self.config, catalogue))
    }

    /// Completes the restore: continues with the checkpoint's values, or forgets the variables.
    fn restored(&mut self, restored: ShardRestored) {
        let Some(restoring) = self.checkpoints.restoring.take() else { return };
        let RestoreInProgress { connection, request, checkpoint, epoch, .. } = restoring;
        let step = checkpoint.step;
        let ShardRestored { mut store, result } = restored;
        if let Some(refusal) = self.files.poisoned() {
            return self.out.refuse(connection, request, refusal);
        }
        let indexed = |counts| {
            let indexed = store.tables_restored(&mut self.files.journal);
            indexed
                .map(|()| counts)
                .map_err(|error| CheckpointFault::Storage(Chain(&error).to_string()))
        };
        let counts = match result.and_then(indexed) {
            Ok(counts) => counts,
            Err(fault) => {
                drop(store);
                // The declaration is dropped too, because no partly loaded state may remain.
                let forgotten = self.forget_variables();
                let fault = forgotten.map_or_else(
                    |error| CheckpointFault::Storage(Chain(&error).to_string()),
                    |()| fault,
                );
                let of = (connection, request);
                return self.checkpoints.refuse_restored(&mut self.out, of, fault.refusal());
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
        self.variables.epoch = epoch;
        self.variables.restored_step = step;
        self.variables.version = counts.version;
        self.variables.gradients = counts.gradients;
        if let Some(owner) = &mut self.steps.owner {
            owner.forget_tokens();
            owner.roll_back(step);
            if !self.config.planted.has(Bug::PositionNotRestored) {
                owner.set_data(data);
            }
            self.counters.global_step.set(step.0);
        }
        // The manifest has been checked.
        self.steps
            .coordinators
            .roll_back(counts.coordinators.iter().filter_map(CoordinatorEntry::restored).collect());
        self.steps.set_participants(store.catalogue().shards());
        self.variables.state = VariablesState::Ready(store);
        self.variables.count_tables();
        self.steps.begin_follower(step);
        self.stamp_answers();
        let checkpoint = checkpoint.name.to_string();
        let gradients_apart = counts.gradients_apart;
        self.report(Event::CheckpointRestored {
            checkpoint,
            step: step.0,
            epoch: epoch.0,
            gradients_apart,
        });
        self.announce_ready(connection, request);
    }
}
