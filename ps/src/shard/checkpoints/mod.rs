//! [`ShardCheckpoints`]: the checkpoints that a shard takes part in, and their order.
//!
//! Other threads, which may wait for a disk, read and write the files (`file_work`). Their results
//! return to the shard as inputs.

pub(super) mod restore_check;
pub(super) mod save_requests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pushpull_checkpoint::{AbandonFlag, CheckpointFault, CheckpointName, CheckpointTraining};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::limits::PASSED_OVER_MAX;
use pushpull_common::protocol::message::{CheckpointId, PassedOver};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Refusal, message};

use super::file_work::saver_order::{SaveRequester, SaverOrder};
use super::file_work::shard_save::{CheckpointCut, ShardSave};
use super::output::{AnswerBody, ShardOutput, ShardOutputs};
use super::request::PeerRequest;
use crate::config::PsConfig;
use restore_check::{CheckInProgress, CheckedCheckpoint, RestoreInProgress};
use save_requests::SaveRequests;

/// The checkpoints that a shard takes part in.
///
/// Invariants: at most one save of this shard and one restore are running. While a restore is
/// running, the variables are absent. A check changes nothing.
#[derive(Debug)]
pub(super) struct ShardCheckpoints {
    id: ShardId,
    config: Arc<PsConfig>,
    /// This shard's part of a checkpoint while it is written.
    saving: Option<SaveInProgress>,
    /// The pinned cut for a checkpoint whose step may have passed. Every shard has one in
    /// synchronous mode, only the step owner in asynchronous mode.
    pub(super) kept_cut: Option<CheckpointCut>,
    /// On the step owner: the saves of all shards.
    pub(super) requests: SaveRequests,
    /// On the step owner: the unsound checkpoints that the last search skipped.
    pub(super) passed_over: Vec<PassedOver>,
    /// The check of a checkpoint, and the checked one that is about to be restored.
    checking: Option<CheckInProgress>,
    checked: Option<CheckedCheckpoint>,
    /// The number of checks that have begun.
    checks: u64,
    pub(super) restoring: Option<RestoreInProgress>,
}

/// A save of this shard's part that is running.
#[derive(Debug)]
struct SaveInProgress {
    /// The connection of the request.
    connection: u64,
    /// Set when the memory that the save pins is needed. It pins none while the file is read back.
    memory_needed: Arc<AtomicBool>,
    abandon_flag: AbandonFlag,
}

impl ShardCheckpoints {
    pub(super) fn new(id: ShardId, config: Arc<PsConfig>) -> ShardCheckpoints {
        ShardCheckpoints {
            id,
            config,
            saving: None,
            kept_cut: None,
            requests: SaveRequests::default(),
            passed_over: Vec::new(),
            checking: None,
            checked: None,
            checks: 0,
            restoring: None,
        }
    }

    /// Checks that a place for checkpoints is configured.
    pub(super) fn check_place(&self) -> Result<(), Refusal> {
        match self.config.checkpoints {
            Some(_) => Ok(()),
            None => Err(CheckpointFault::Unfit(NO_PLACE.to_owned()).refusal()),
        }
    }

    /// Checks that this shard is not writing a part.
    pub(super) fn check_idle(&self) -> Result<(), Refusal> {
        match self.saving {
            None => Ok(()),
            Some(_) => {
                let what = Detail::clipped("checkpoints being written");
                Err(Refusal::Busy { what, limit: 1 })
            }
        }
    }

    /// Begins to write this cut as the shard's part of a checkpoint. Returns the work.
    pub(super) fn begin_save(
        &mut self,
        request: &PeerRequest,
        name: CheckpointName,
        catalogue: Arc<Catalogue>,
        training: CheckpointTraining,
        cut: CheckpointCut,
    ) -> ShardSave {
        let connection = request.connection;
        let memory_needed = cut.memory_needed.clone();
        let abandon_flag = AbandonFlag::default();
        let save = ShardSave {
            connection,
            request: request.envelope,
            name,
            training,
            catalogue,
            shard: self.id,
            step_owner: self.config.cluster.step_owner().unwrap_or(self.config.task.clone()),
            cut,
            abandon_flag: abandon_flag.clone(),
        };
        self.saving = Some(SaveInProgress { connection, memory_needed, abandon_flag });
        save
    }

    /// Releases the blocks that a checkpoint pins, because pushes need them. A save that pins
    /// blocks fails.
    pub(super) fn release_checkpoint_pins(&mut self) {
        self.kept_cut = None;
        if let Some(saving) = &self.saving {
            saving.memory_needed.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether a cut or a request to save waits.
    pub(super) fn waits(&self) -> bool {
        self.kept_cut.is_some() || !self.requests.waiting.is_empty()
    }

    /// Whether the part of a checkpoint is being written for this connection.
    pub(super) fn is_saving_for(&self, connection: u64) -> bool {
        self.saving.as_ref().is_some_and(|saving| saving.connection == connection)
    }

    /// A connection has ended: abandons the save that it requested, and forgets the checkpoint that
    /// was checked for it and its requests to save, which its chief repeats over another one.
    pub(super) fn connection_ended(&mut self, connection: u64) {
        if let Some(saving) = self.saving.as_ref().filter(|s| s.connection == connection) {
            saving.abandon_flag.abandon("the requester is gone");
        }
        self.checked.take_if(|checked| checked.connection == connection);
        self.requests.drop_of(connection);
    }

    /// Abandons all writing and reading of checkpoints, because the server stops.
    pub(super) fn abandon_files(&self) {
        let reason = "the server stops";
        self.saving.iter().for_each(|saving| saving.abandon_flag.abandon(reason));
        self.checking.iter().for_each(|checking| checking.abandon_flag.abandon(reason));
        self.checked.iter().for_each(|checked| checked.abandon_flag.abandon(reason));
        self.restoring.iter().for_each(|restoring| restoring.abandon_flag.abandon(reason));
    }

    /// Abandons the work of an older chief: the check, the restore and the requests to save, over
    /// connections that are a chief's.
    pub(super) fn chief_replaced(
        &mut self,
        out: &mut ShardOutputs,
        is_chiefs: impl Fn(u64) -> bool,
    ) {
        let reason = "another chief has joined";
        self.drop_check(out, reason);
        self.restoring.iter().for_each(|restoring| restoring.abandon_flag.abandon(reason));
        self.drop_save_requests(out, reason, |requester| match requester {
            SaveRequester::Connection { connection, .. } => is_chiefs(*connection),
            SaveRequester::Ticket(_) => false,
        });
    }

    /// Drops the cuts, the running save and the save requests, because another restore epoch
    /// begins.
    pub(super) fn drop_saves(&mut self, out: &mut ShardOutputs) {
        // Its pinned values are obsolete, and it occupies the thread that must read.
        if let Some(saving) = &self.saving {
            saving.abandon_flag.abandon("a checkpoint is restored");
        }
        self.kept_cut = None;
        self.drop_save_requests(out, "a checkpoint is restored", |_| true);
    }

    fn drop_save_requests(
        &mut self,
        out: &mut ShardOutputs,
        reason: &str,
        which: impl Fn(&SaveRequester) -> bool,
    ) {
        for requester in self.requests.take(which) {
            let fault = CheckpointFault::Unavailable(reason.to_owned());
            self.saved(out, requester, Err(fault));
        }
    }

    /// Reports the result of a save to its requester.
    pub(super) fn saved(
        &self,
        out: &mut ShardOutputs,
        requester: SaveRequester,
        result: Result<CheckpointId, CheckpointFault>,
    ) {
        match requester {
            SaveRequester::Connection { connection, request } => match result {
                Ok(checkpoint) => {
                    out.answer(connection, request, message::Saved { checkpoint }.into());
                }
                Err(fault) => out.refuse(connection, request, fault.refusal()),
            },
            SaveRequester::Ticket(ticket) => {
                out.push(ShardOutput::SaverOrder(SaverOrder::ReportSave { ticket, result }));
            }
        }
    }

    /// Answers with the checkpoints that the last search skipped.
    pub(super) fn answer_passed_over(&self, out: &mut ShardOutputs, request: &PeerRequest) {
        let newest = self.passed_over.iter().take(PASSED_OVER_MAX).cloned();
        let checkpoints = List::of(newest).expect("at most as many as fit");
        request.answer(out, message::PassedOverAre { checkpoints }.into());
    }

    /// Answers with the result of writing this shard's part.
    pub(super) fn shard_saved(
        &mut self,
        out: &mut ShardOutputs,
        connection: u64,
        request: Envelope,
        result: Result<Vec<u8>, CheckpointFault>,
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
            Err(fault) => out.refuse(connection, request, fault.refusal()),
        }
    }
}

/// The reason why a server without a checkpoint storage saves and restores nothing.
pub(super) const NO_PLACE: &str = "no place for checkpoints is configured (--checkpoint-dir)";
