//! Saves and restores a shard's part of a checkpoint.
//!
//! The shard decides and pins. Other threads, which may wait for a disk, read and write the files.
//! Their results return to the shard as inputs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::limits::PASSED_OVER_MAX;
use pushpull_common::protocol::message::{CheckpointId, PassedOver};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Refusal, message};
use pushpull_store::arena::fence;

use super::checkpoint_cut::{CheckpointCut, SaveRequest};
use super::generation::Generation;
use super::output::{AnswerBody, Outputs, ShardOutput};
use super::saver_order::{SaveRequester, SaverEvent, SaverOrder};
use super::shard_restore::{RestoreInProgress, ShardRestore, ShardRestored};
use super::shard_save::{SaveInProgress, ShardSave};
use super::steps::Steps;
use super::variables::Variables;
use super::{Detail, Shard, VariablesState};
use crate::checkpoint::{AbandonFlag, CheckpointName, CheckpointTraining};
use crate::config::PsConfig;

/// The checkpoints that a shard takes part in.
#[derive(Debug)]
pub(super) struct ShardCheckpoints {
    pub(super) id: ShardId,
    pub(super) config: Arc<PsConfig>,
    /// This shard's part of a checkpoint while it is written.
    pub(super) saving: Option<SaveInProgress>,
    /// The pinned cut for a checkpoint whose step may have passed. Every shard has one in
    /// synchronous mode, only the step owner in asynchronous mode.
    pub(super) kept_cut: Option<CheckpointCut>,
    /// On the step owner: whether a save is running, and the queued save requests.
    pub(super) saves_a_cut: bool,
    pub(super) requests: VecDeque<SaveRequest>,
    /// On the step owner: the unsound checkpoints that the last search skipped.
    pub(super) passed_over: Vec<PassedOver>,
    pub(super) restoring: Option<RestoreInProgress>,
}

impl Shard {
    /// Takes a cut of this shard, and starts to write it to a checkpoint.
    pub(super) fn save_shard(
        &mut self,
        now: Instant,
        connection: u64,
        request: Envelope,
        name: &str,
    ) {
        let Ok(name) = name.parse::<CheckpointName>() else {
            let error = format!("{name:?} is not the name of a checkpoint");
            return self.out.refuse_storage(connection, request, &error);
        };
        if self.config.checkpoints.is_none() {
            let error = "no place for checkpoints is configured";
            return self.out.refuse_storage(connection, request, error);
        }
        let store = self.variables.store().filter(|_| self.variables.is_ready());
        let Some(catalogue) = store.map(|store| store.catalogue().clone()) else {
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        };
        if self.checkpoints.saving.is_some() {
            let what = Detail::clipped("checkpoints being written");
            return self.out.refuse(connection, request, Refusal::Busy { what, limit: 1 });
        }
        let cut = match self.checkpoints.take_cut(
            &mut self.variables,
            &self.peers,
            &self.steps,
            now,
            name,
        ) {
            Ok(cut) => cut,
            Err(error) => return self.out.refuse_storage(connection, request, &error),
        };
        let (memory_needed, abandon_flag) = (cut.memory_needed.clone(), AbandonFlag::default());
        let save = ShardSave {
            connection,
            request,
            name,
            training: CheckpointTraining::new(&catalogue, &self.variables.rules),
            catalogue,
            shard: self.id,
            cut,
            abandon_flag: abandon_flag.clone(),
            planted: self.config.planted,
        };
        self.checkpoints.saving = Some(SaveInProgress { connection, memory_needed, abandon_flag });
        self.out.push(ShardOutput::SaveShard(Box::new(save)));
    }

    /// Starts to restore the values of a checkpoint, and drops the state of older epochs.
    pub(super) fn restore(
        &mut self,
        connection: u64,
        request: Envelope,
        restore: message::Restore,
    ) {
        let (checkpoint, epoch) = (restore.checkpoint, restore.epoch);
        if let Some(restoring) = &mut self.checkpoints.restoring {
            // A chief that has reconnected asks again.
            if restoring.epoch == epoch && restoring.checkpoint == checkpoint {
                (restoring.connection, restoring.request) = (connection, request);
                return;
            }
            // An earlier chief has requested it. Its successor begins again once this restore
            // has ended.
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        }
        if self.variables.is_ready()
            && epoch == self.variables.epoch
            && checkpoint.step == self.variables.restored_step
        {
            return self.variables.answer_ready(&mut self.out, connection, request);
        }
        if epoch <= self.variables.epoch || epoch <= checkpoint.epoch || epoch.0 == u32::MAX {
            let refusal = self.variables.other_epoch(epoch);
            return self.out.refuse(connection, request, refusal);
        }
        let Some(catalogue) = self.variables.store().map(|store| store.catalogue().clone()) else {
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        };
        if self.config.checkpoints.is_none() {
            let error = "no place for checkpoints is configured";
            return self.out.refuse_storage(connection, request, error);
        }
        if let Err(error) = self.begin_restore(connection, catalogue) {
            return self.out.refuse_storage(connection, request, &error.to_string());
        }
        let VariablesState::Declared(store) =
            std::mem::replace(&mut self.variables.state, VariablesState::Absent)
        else {
            return;
        };
        // Reports of the epoch that ends are ignored.
        self.steps.set_participants(std::iter::empty());
        let abandon_flag = AbandonFlag::default();
        self.checkpoints.restoring = Some(RestoreInProgress {
            connection,
            request,
            checkpoint: checkpoint.clone(),
            epoch,
            abandon_flag: abandon_flag.clone(),
        });
        let training = CheckpointTraining::new(store.catalogue(), &self.variables.rules);
        let restore = ShardRestore { store, shard: self.id, checkpoint, training, abandon_flag };
        self.out.push(ShardOutput::RestoreShard(Box::new(restore)));
    }

    /// Drops the state of the epoch that ends. Other clients reconnect and learn of the new epoch.
    fn begin_restore(
        &mut self,
        connection: u64,
        catalogue: Arc<Catalogue>,
    ) -> Result<(), crate::error::StorageError> {
        // Its pinned values are obsolete, and it occupies the thread that must read.
        if let Some(saving) = &self.checkpoints.saving {
            saving.abandon_flag.abandon("a checkpoint is restored");
        }
        let others: Vec<u64> =
            self.peers.connections.keys().copied().filter(|&other| other != connection).collect();
        for other in others {
            self.peers.parked.drop_connection(other);
            self.out.close(other);
        }
        self.checkpoints.drop_cuts(&mut self.out);
        self.applier.jobs.clear();
        self.applier.streaming = None;
        self.steps.begin_follower(self.steps.step());
        self.peers.registry.forget_pushes();
        if let Some(owner) = &mut self.steps.owner {
            owner.forget_tokens();
        }
        self.forget_variables()?;
        self.make_variables(Generation::new(self.id, &self.config, catalogue))
    }

    /// Completes the restore: continues with the checkpoint's values, or forgets the variables.
    pub(super) fn restored(&mut self, restored: ShardRestored) {
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
        if store.has_integrity() {
            store.seal(&mut self.files.journal);
        }
        fence();
        (self.variables.epoch, self.variables.restored_step) = (epoch, step);
        (self.variables.version, self.variables.gradients) = (counts.version, counts.gradients);
        if let Some(owner) = &mut self.steps.owner {
            owner.forget_tokens();
            owner.roll_back(step);
            self.counters.global_step.set(step.0);
        }
        self.steps.set_participants(store.catalogue().shards());
        self.variables.state = VariablesState::Ready(store);
        self.variables.count_tables();
        self.steps.begin_follower(step);
        self.stamp_answers();
        self.peers.announce_ready(&self.variables, &mut self.out, connection, request);
    }
}

impl ShardCheckpoints {
    pub(super) fn new(id: ShardId, config: Arc<PsConfig>) -> ShardCheckpoints {
        ShardCheckpoints {
            id,
            config,
            saving: None,
            kept_cut: None,
            saves_a_cut: false,
            requests: VecDeque::new(),
            passed_over: Vec::new(),
            restoring: None,
        }
    }

    /// Releases the blocks that a checkpoint pins, because pushes need them. A save that pins
    /// blocks fails.
    pub(super) fn release_checkpoint_pins(&mut self) {
        self.kept_cut = None;
        if let Some(saving) = &self.saving {
            saving.memory_needed.store(true, Ordering::Relaxed);
        }
    }

    /// Abandons the save for a requester whose connection has ended.
    pub(super) fn abandon_save_of(&self, connection: u64) {
        if let Some(saving) = self.saving.as_ref().filter(|s| s.connection == connection) {
            saving.abandon_flag.abandon("the requester is gone");
        }
    }

    /// Abandons all writing and reading of checkpoints, because the server stops.
    pub(super) fn abandon_files(&self) {
        self.saving.iter().for_each(|saving| saving.abandon_flag.abandon("the server stops"));
        self.abandon_restore("the server stops");
    }

    /// Abandons the running restore.
    pub(super) fn abandon_restore(&self, reason: &'static str) {
        self.restoring.iter().for_each(|restoring| restoring.abandon_flag.abandon(reason));
    }

    /// Reports the result of a save to its requester.
    pub(super) fn saved(
        &self,
        out: &mut Outputs,
        requester: SaveRequester,
        result: Result<CheckpointId, String>,
    ) {
        match requester {
            SaveRequester::Connection { connection, request } => match result {
                Ok(checkpoint) => {
                    out.answer(connection, request, message::Saved { checkpoint }.into());
                }
                Err(error) => out.refuse_storage(connection, request, &error),
            },
            SaveRequester::Ticket(ticket) => {
                out.push(ShardOutput::SaverOrder(SaverOrder::ReportSave { ticket, result }));
            }
        }
    }

    /// Answers with the checkpoints that the last search skipped.
    pub(super) fn answer_passed_over(&self, out: &mut Outputs, connection: u64, request: Envelope) {
        let newest = self.passed_over.iter().take(PASSED_OVER_MAX).cloned();
        let checkpoints = List::of(newest).expect("at most as many as fit");
        out.answer(connection, request, message::PassedOverAre { checkpoints }.into());
    }

    /// Answers with the result of writing this shard's part.
    pub(super) fn shard_saved(
        &mut self,
        out: &mut Outputs,
        connection: u64,
        request: Envelope,
        result: Result<Vec<u8>, String>,
    ) {
        self.saving = None;
        match result {
            Ok(entry) => {
                out.answer_with(
                    connection,
                    request,
                    message::ShardSaved {}.into(),
                    AnswerBody::Shared(entry.into()),
                    None,
                );
            }
            Err(error) => out.refuse_storage(connection, request, &error),
        }
    }

    /// Orders a search for the newest sound checkpoint.
    pub(super) fn find_checkpoint(
        &self,
        steps: &Steps,
        out: &mut Outputs,
        connection: u64,
        request: Envelope,
    ) {
        if steps.owner.is_none() {
            let detail = Detail::clipped(format!("{} does not own the step", self.id));
            return out.refuse(connection, request, Refusal::Unsupported { kind: 17, detail });
        }
        match self.config.checkpoints {
            Some(_) => out.push(ShardOutput::SaverOrder(SaverOrder::Find { connection, request })),
            None => checkpoint_found(out, connection, request, Ok(None)),
        }
    }

    /// Requests a checkpoint of all shards, or refuses the request.
    pub(super) fn save(
        &mut self,
        variables: &Variables,
        steps: &Steps,
        out: &mut Outputs,
        now: Instant,
        requester: SaveRequester,
        user: Vec<u8>,
    ) {
        let refusal = match (&steps.owner, &self.config.checkpoints) {
            (None, _) => format!("{} does not own the step", self.id),
            (_, None) => "no place for checkpoints is configured".to_owned(),
            _ if !variables.is_ready() => "the variables have no values yet".to_owned(),
            _ => String::new(),
        };
        if !refusal.is_empty() {
            return self.saved(out, requester, Err(refusal));
        }
        self.request_save(out, now, requester, user);
    }

    pub(super) fn on_saver_message(
        &mut self,
        variables: &Variables,
        steps: &Steps,
        out: &mut Outputs,
        now: Instant,
        news: SaverEvent,
    ) {
        match news {
            SaverEvent::Found { connection, request, result, passed_over } => {
                self.passed_over = passed_over;
                checkpoint_found(out, connection, request, result);
            }
            SaverEvent::SaveRequested { ticket, user } => {
                self.save(variables, steps, out, now, SaveRequester::Ticket(ticket), user)
            }
            SaverEvent::Saved { requester, result } => {
                // The saver keeps the status of periodic saves.
                if !requester.is_periodic() {
                    self.saved(out, requester, result);
                }
                self.end_save_of_cut(now);
            }
        }
    }
}

/// Answers with the checkpoint that was found.
fn checkpoint_found(
    out: &mut Outputs,
    connection: u64,
    request: Envelope,
    result: Result<Option<CheckpointId>, String>,
) {
    match result {
        Ok(checkpoint) => {
            out.answer(connection, request, message::CheckpointFound { checkpoint }.into());
        }
        Err(error) => out.refuse_storage(connection, request, &error),
    }
}
