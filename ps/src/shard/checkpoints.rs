//! Saves and restores a shard's part of a checkpoint.
//!
//! The shard decides and pins. Other threads, which may wait for a disk, read and write the files.
//! Their results return to the shard as inputs.

pub(super) mod checkpoint_cut;
pub(crate) mod restore_check;
pub(crate) mod saver_order;
pub(crate) mod shard_restore;
pub(crate) mod shard_save;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::PASSED_OVER_MAX;
use pushpull_common::protocol::message::{CheckpointId, PassedOver};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Refusal, message};

use super::Detail;
use super::output::{AnswerBody, ShardOutput, ShardOutputs};
use super::peers::Peers;
use super::peers::peer_request::PeerRequest;
use super::steps::Steps;
use super::variables::Variables;
use crate::checkpoint::{AbandonFlag, CheckpointFault, CheckpointName, CheckpointTraining};
use crate::config::PsConfig;
use checkpoint_cut::{CheckpointCut, SaveRequest};
use restore_check::{CheckInProgress, CheckedCheckpoint};
use saver_order::{SaveRequester, SaverEvent, SaverOrder};
use shard_restore::RestoreInProgress;
use shard_save::{SaveInProgress, ShardSave};

/// The checkpoints that a shard takes part in.
///
/// Invariants: at most one save of this shard and one restore are running. While a restore is
/// running, the variables are absent. A check changes nothing.
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
    /// The check of a checkpoint, and the checked one that is about to be restored.
    checking: Option<CheckInProgress>,
    checked: Option<CheckedCheckpoint>,
    /// The number of checks that have begun.
    checks: u64,
    pub(super) restoring: Option<RestoreInProgress>,
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
            checking: None,
            checked: None,
            checks: 0,
            restoring: None,
        }
    }

    /// Takes a cut of this shard, and starts to write it to a checkpoint.
    pub(super) fn save_shard(
        &mut self,
        variables: &mut Variables,
        peers: &Peers,
        steps: &Steps,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        name: &str,
    ) {
        match self.begin_save(variables, peers, steps, request, name) {
            Ok(save) => out.push(ShardOutput::SaveShard(Box::new(save))),
            Err(refusal) => request.refuse(out, refusal),
        }
    }

    fn begin_save(
        &mut self,
        variables: &mut Variables,
        peers: &Peers,
        steps: &Steps,
        request: &PeerRequest,
        name: &str,
    ) -> Result<ShardSave, Refusal> {
        let unfit = || CheckpointFault::Unfit(format!("{name:?} is not the name of a checkpoint"));
        let name = name.parse::<CheckpointName>().map_err(|_| unfit().refusal())?;
        self.check_place()?;
        let store = variables.ready().ok_or(Refusal::NotInitialized {})?;
        let catalogue = store.catalogue().clone();
        if self.saving.is_some() {
            let what = Detail::clipped("checkpoints being written");
            return Err(Refusal::Busy { what, limit: 1 });
        }
        let cut = self.take_cut(variables, peers, steps, request.since, name);
        let cut = cut.map_err(|cause| CheckpointFault::Unavailable(cause).refusal())?;
        let connection = request.connection;
        let (memory_needed, abandon_flag) = (cut.memory_needed.clone(), AbandonFlag::default());
        let save = ShardSave {
            connection,
            request: request.envelope,
            name,
            training: CheckpointTraining::new(&catalogue, &variables.rules),
            catalogue,
            shard: self.id,
            step_owner: self.config.cluster.step_owner().unwrap_or(self.config.task.clone()),
            cut,
            abandon_flag: abandon_flag.clone(),
            planted: self.config.planted,
        };
        self.saving = Some(SaveInProgress { connection, memory_needed, abandon_flag });
        Ok(save)
    }

    /// Checks that a place for checkpoints is configured.
    pub(super) fn check_place(&self) -> Result<(), Refusal> {
        match self.config.checkpoints {
            Some(_) => Ok(()),
            None => Err(CheckpointFault::Unfit(NO_PLACE.to_owned()).refusal()),
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

    /// Whether the part of a checkpoint is being written for this connection.
    pub(super) fn is_saving_for(&self, connection: u64) -> bool {
        self.saving.as_ref().is_some_and(|saving| saving.connection == connection)
    }

    /// Abandons the save for a requester whose connection has ended.
    pub(super) fn abandon_save_of(&self, connection: u64) {
        if let Some(saving) = self.saving.as_ref().filter(|s| s.connection == connection) {
            saving.abandon_flag.abandon("the requester is gone");
        }
    }

    /// Abandons all writing and reading of checkpoints, because the server stops.
    pub(super) fn abandon_files(&self) {
        let reason = "the server stops";
        self.saving.iter().for_each(|saving| saving.abandon_flag.abandon(reason));
        self.checking.iter().for_each(|checking| checking.abandon_flag.abandon(reason));
        self.checked.iter().for_each(|checked| checked.abandon_flag.abandon(reason));
        self.restoring.iter().for_each(|restoring| restoring.abandon_flag.abandon(reason));
    }

    /// Abandons the check and the restore of an older chief.
    pub(super) fn abandon_restore(&mut self, out: &mut ShardOutputs, reason: &'static str) {
        self.drop_check(out, reason);
        self.restoring.iter().for_each(|restoring| restoring.abandon_flag.abandon(reason));
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

    /// Orders a search for the newest sound checkpoint.
    pub(super) fn find_checkpoint(
        &self,
        steps: &Steps,
        out: &mut ShardOutputs,
        request: &PeerRequest,
    ) {
        if steps.owner.is_none() {
            let detail = Detail::clipped(format!("{} does not own the step", self.id));
            return request.refuse(out, Refusal::Unsupported { kind: request.kind, detail });
        }
        let (connection, request) = (request.connection, request.envelope);
        match self.config.checkpoints {
            Some(_) => out.push(ShardOutput::SaverOrder(SaverOrder::Find { connection, request })),
            None => {
                let none = Ok((None, RestoreEpoch(0)));
                checkpoint_found(out, self.id, (connection, request), none);
            }
        }
    }

    /// Requests a checkpoint of all shards, or refuses the request.
    pub(super) fn save(
        &mut self,
        variables: &Variables,
        steps: &Steps,
        out: &mut ShardOutputs,
        now: Instant,
        requester: SaveRequester,
        user: Vec<u8>,
    ) {
        let fault = match (&steps.owner, &self.config.checkpoints) {
            (None, _) => Some(CheckpointFault::Unfit(format!("{} does not own the step", self.id))),
            (_, None) => Some(CheckpointFault::Unfit(NO_PLACE.to_owned())),
            _ if !variables.is_ready() => Some(CheckpointFault::NotInitialized),
            _ => None,
        };
        if let Some(fault) = fault {
            return self.saved(out, requester, Err(fault));
        }
        self.request_save(out, now, requester, user);
    }

    pub(super) fn on_saver_message(
        &mut self,
        variables: &Variables,
        steps: &mut Steps,
        out: &mut ShardOutputs,
        now: Instant,
        news: SaverEvent,
    ) {
        match news {
            SaverEvent::Found { connection, request, result, passed_over, named } => {
                self.passed_over = passed_over;
                let result = result.map(|it| (it, named));
                checkpoint_found(out, self.id, (connection, request), result);
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
                steps.shards.forget_cut();
            }
        }
    }
}

/// The reason why a server without a checkpoint storage saves and restores nothing.
const NO_PLACE: &str = "no place for checkpoints is configured (--checkpoint-dir)";

/// Answers with the checkpoint that was found.
fn checkpoint_found(
    out: &mut ShardOutputs,
    shard: ShardId,
    (connection, request): (u64, Envelope),
    result: Result<(Option<CheckpointId>, RestoreEpoch), CheckpointFault>,
) {
    match result {
        Ok((checkpoint, named)) => {
            out.answer(connection, request, message::CheckpointFound { checkpoint, named }.into());
        }
        Err(fault) => {
            let of = (connection, request);
            out.refuse_chief(of, shard, "look for a checkpoint", fault.refusal());
        }
    }
}
