//! The check of a checkpoint before it is restored, and the restore that follows.

use std::sync::Arc;

use pushpull_checkpoint::{AbandonFlag, CheckpointFault, CheckpointTraining, Opened};
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::message::{CheckpointId, PrepareRestore, Restore};
use pushpull_common::protocol::{Envelope, Refusal};
use pushpull_store::store::Store;

use super::ShardCheckpoints;
use crate::shard::file_work::restore_work::{
    RestoreCheck, RestoreChecked, RestoreWork, ShardRestore,
};
use crate::shard::output::ShardOutputs;
use crate::shard::request::PeerRequest;

/// The checkpoint to restore, and the epoch that begins.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::shard) struct RestoreOrder {
    pub(in crate::shard) checkpoint: CheckpointId,
    pub(in crate::shard) epoch: RestoreEpoch,
}

impl From<Restore> for RestoreOrder {
    fn from(restore: Restore) -> RestoreOrder {
        let Restore { checkpoint, epoch } = restore;
        RestoreOrder { checkpoint, epoch }
    }
}

impl From<PrepareRestore> for RestoreOrder {
    fn from(prepare: PrepareRestore) -> RestoreOrder {
        let PrepareRestore { checkpoint, epoch } = prepare;
        RestoreOrder { checkpoint, epoch }
    }
}

/// A check that is running.
#[derive(Debug)]
pub(in crate::shard) struct CheckInProgress {
    number: u64,
    pub(in crate::shard) request: PeerRequest,
    pub(in crate::shard) order: RestoreOrder,
    /// The digest of the catalogue that the checkpoint is checked against.
    pub(in crate::shard) digest: [u8; 32],
    /// Whether the restore is to begin after the check.
    pub(in crate::shard) restores: bool,
    pub(in crate::shard) abandon_flag: AbandonFlag,
}

/// A checkpoint that was checked for the chief of a connection. Its files stay open, so a restore
/// reads the verified bytes.
#[derive(Debug)]
pub(in crate::shard) struct CheckedCheckpoint {
    pub(super) connection: u64,
    checkpoint: CheckpointId,
    digest: [u8; 32],
    opened: Opened,
    pub(super) abandon_flag: AbandonFlag,
}

/// A restore that is running.
#[derive(Debug)]
pub(in crate::shard) struct RestoreInProgress {
    pub(super) abandon_flag: AbandonFlag,
    pub(in crate::shard) connection: u64,
    pub(in crate::shard) request: Envelope,
    pub(in crate::shard) checkpoint: CheckpointId,
    pub(in crate::shard) epoch: RestoreEpoch,
}

/// The name of the request, in refusals of a restore.
const RESTORE: &str = "restore the variables";

impl ShardCheckpoints {
    /// Returns the answer to a request to restore while a restore is running: whether the request
    /// has joined it, or its refusal.
    pub(in crate::shard) fn join_restore(
        &mut self,
        request: &PeerRequest,
        order: &RestoreOrder,
    ) -> Option<Result<(), Refusal>> {
        let restoring = self.restoring.as_mut()?;
        // A chief that has reconnected asks again.
        if restoring.epoch == order.epoch && restoring.checkpoint == order.checkpoint {
            restoring.connection = request.connection;
            restoring.request = request.envelope;
            return Some(Ok(()));
        }
        // An earlier chief has requested it. Its successor begins again once this restore has ended.
        Some(Err(Refusal::NotInitialized {}))
    }

    /// Takes the checkpoint that was checked for this chief, if it is the one to restore into the
    /// variables of this digest.
    pub(in crate::shard) fn take_checked(
        &mut self,
        digest: Option<[u8; 32]>,
        connection: u64,
        checkpoint: &CheckpointId,
    ) -> Option<CheckedCheckpoint> {
        self.checked.take_if(|checked| {
            checked.connection == connection
                && checked.checkpoint == *checkpoint
                && digest == Some(checked.digest)
                && checked.abandon_flag.reason().is_none()
        })
    }

    /// Returns whether this order is being checked. The request is answered with its result then: a
    /// chief that has reconnected asks again.
    pub(in crate::shard) fn join_check(
        &mut self,
        request: PeerRequest,
        order: &RestoreOrder,
        restores: bool,
    ) -> bool {
        let Some(check) = self.checking.as_mut().filter(|check| check.order == *order) else {
            return false;
        };
        check.request = request;
        check.restores = restores;
        true
    }

    /// Begins to check a checkpoint for the declared variables, whose tables have these limits of
    /// rows. Returns the work.
    pub(in crate::shard) fn begin_check(
        &mut self,
        request: PeerRequest,
        order: RestoreOrder,
        restores: bool,
        catalogue: Arc<Catalogue>,
        training: CheckpointTraining,
        row_limits: Vec<u64>,
    ) -> RestoreWork {
        self.checks += 1;
        let check = RestoreCheck {
            number: self.checks,
            shard: self.id,
            checkpoint: order.checkpoint.clone(),
            training,
            row_limits,
            abandon_flag: AbandonFlag::default(),
            catalogue,
        };
        self.checking = Some(CheckInProgress {
            number: check.number,
            request,
            order,
            digest: check.catalogue.digest(),
            restores,
            abandon_flag: check.abandon_flag.clone(),
        });
        RestoreWork::Check(check)
    }

    /// Abandons the check that is running, and forgets the checked checkpoint.
    pub(in crate::shard) fn drop_check(&mut self, out: &mut ShardOutputs, reason: &'static str) {
        self.checked = None;
        if let Some(check) = self.checking.take() {
            check.abandon_flag.abandon(reason);
            self.refuse_restore(out, &check.request, abandoned(reason));
        }
    }

    /// Ends the check of this result. `None` if another one has displaced it, and it was answered.
    pub(in crate::shard) fn end_check(
        &mut self,
        checked: &RestoreChecked,
    ) -> Option<CheckInProgress> {
        self.checking.take_if(|check| check.number == checked.number)
    }

    /// Keeps a checked checkpoint until its chief has it restored.
    pub(in crate::shard) fn keep_checked(&mut self, check: &CheckInProgress, opened: Opened) {
        self.checked = Some(CheckedCheckpoint {
            connection: check.request.connection,
            checkpoint: check.order.checkpoint.clone(),
            digest: check.digest,
            opened,
            abandon_flag: check.abandon_flag.clone(),
        });
    }

    /// Begins to read a checked checkpoint into a store without values. Returns the work.
    pub(in crate::shard) fn begin_restore(
        &mut self,
        store: Box<Store>,
        training: CheckpointTraining,
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
        RestoreWork::Read(Box::new(ShardRestore { store, shard: self.id, training, opened }))
    }

    /// Refuses to restore a checkpoint or to prepare that.
    pub(in crate::shard) fn refuse_restore(
        &self,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        refusal: Refusal,
    ) {
        out.refuse_chief(request.connection, request.envelope, self.id, RESTORE, refusal);
    }

    /// Refuses the restore that has failed.
    pub(in crate::shard) fn refuse_restored(
        &self,
        out: &mut ShardOutputs,
        of: (u64, Envelope),
        refusal: Refusal,
    ) {
        let (connection, request) = of;
        out.refuse_chief(connection, request, self.id, RESTORE, refusal);
    }
}

/// Returns the refusal of a check that was abandoned.
pub(in crate::shard) fn abandoned(reason: &str) -> Refusal {
    CheckpointFault::Unavailable(format!("abandoned because {reason}")).refusal()
}
