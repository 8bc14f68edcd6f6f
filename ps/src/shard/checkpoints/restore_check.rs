//! The check of a checkpoint before it is restored. Another thread, which may wait for a disk, does
//! the work, and the shard trains on meanwhile.

use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{self, CheckpointId, PrepareRestore};

use crate::checkpoint::{
    AbandonFlag, CheckpointError, CheckpointFault, CheckpointName, CheckpointStorage,
    CheckpointTraining, Opened,
};
use crate::shard::Shard;
use crate::shard::checkpoints::ShardCheckpoints;
use crate::shard::checkpoints::shard_restore::{RestoreOrder, RestoreWork, refuse_restore};
use crate::shard::output::{ShardOutput, ShardOutputs};
use crate::shard::peers::peer_request::PeerRequest;
use crate::shard::shard_files::record::RESTORED_LIMIT;
use crate::shard::variables::Variables;

/// The work of checking a shard's part of a checkpoint: its manifest, that the part fits the shard,
/// and the hashes of the files that have some of it.
#[derive(Debug)]
pub(crate) struct RestoreCheck {
    number: u64,
    shard: ShardId,
    checkpoint: CheckpointId,
    catalogue: Arc<Catalogue>,
    training: CheckpointTraining,
    /// The most rows of each table of the shard.
    row_limits: Vec<u64>,
    abandon_flag: AbandonFlag,
}

/// The result of [`RestoreCheck::run`].
#[derive(Debug)]
pub(crate) struct RestoreChecked {
    number: u64,
    pub(super) result: Result<Opened, CheckpointFault>,
}

impl RestoreCheck {
    /// Checks the part. May wait for a disk.
    pub(super) fn run(self, storage: Arc<dyn CheckpointStorage>) -> RestoreChecked {
        let storage = self.abandon_flag.watch(storage);
        let result = self.open(storage).map_err(CheckpointFault::from);
        RestoreChecked { number: self.number, result }
    }

    fn open(&self, storage: Arc<dyn CheckpointStorage>) -> Result<Opened, CheckpointError> {
        let name = self.checkpoint.name.as_str();
        let parsed = name.parse::<CheckpointName>();
        let unfit = |what, expected: String, found: String| {
            let checkpoint = name.to_owned();
            CheckpointError::Unfit { checkpoint, what, expected, found }
        };
        let parsed = parsed.map_err(|_| unfit("name", "a checkpoint's".into(), name.into()))?;
        // The name must match the epoch and the step that the chief knows and the shard will
        // continue from.
        let epoch = self.checkpoint.epoch;
        let step = self.checkpoint.step;
        if (parsed.restore_epoch, parsed.global_step) != (epoch.0, step.0) {
            return Err(unfit("name", format!("of epoch {epoch} and step {step}"), name.into()));
        }
        let mut opened = Opened::open(storage, parsed)?;
        let shards = opened.manifest().shards.iter();
        let counts =
            shards.flat_map(|s| [("version", s.version), ("count of gradients", s.gradients)]);
        for (what, found) in counts.chain([("step", step.0)]) {
            if found >= RESTORED_LIMIT {
                return Err(unfit(what, format!("below {RESTORED_LIMIT}"), found.to_string()));
            }
        }
        opened.check_shard(&self.catalogue, self.shard, &self.training, &self.row_limits)?;
        Ok(opened)
    }
}

/// A check that is running.
#[derive(Debug)]
pub(in crate::shard) struct CheckInProgress {
    number: u64,
    request: PeerRequest,
    order: RestoreOrder,
    /// The digest of the catalogue that the checkpoint is checked against.
    digest: [u8; 32],
    /// Whether the restore is to begin after the check.
    restores: bool,
    pub(super) abandon_flag: AbandonFlag,
}

/// A checkpoint that was checked for the chief of a connection. Its files stay open, so a restore
/// reads the verified bytes.
#[derive(Debug)]
pub(in crate::shard) struct CheckedCheckpoint {
    pub(super) connection: u64,
    checkpoint: CheckpointId,
    digest: [u8; 32],
    pub(super) opened: Opened,
    pub(super) abandon_flag: AbandonFlag,
}

impl ShardCheckpoints {
    /// Takes the checkpoint that was checked for this chief, if it is the one to restore.
    pub(super) fn take_checked(
        &mut self,
        variables: &Variables,
        connection: u64,
        checkpoint: &CheckpointId,
    ) -> Option<CheckedCheckpoint> {
        self.checked.take_if(|checked| {
            checked.connection == connection
                && checked.checkpoint == *checkpoint
                && variables.digest() == Some(checked.digest)
                && checked.abandon_flag.reason().is_none()
        })
    }

    /// Begins to check a checkpoint for the declared variables. Abandons the check of another one.
    pub(super) fn begin_check(
        &mut self,
        variables: &Variables,
        out: &mut ShardOutputs,
        request: PeerRequest,
        order: RestoreOrder,
        restores: bool,
    ) {
        if let Some(check) = self.checking.as_mut().filter(|check| check.order == order) {
            // A chief that has reconnected asks again.
            (check.request, check.restores) = (request, restores);
            return;
        }
        self.drop_check(out, "another checkpoint is to be restored");
        let Some(store) = variables.store() else {
            return request.refuse(out, Refusal::NotInitialized {});
        };
        self.checks += 1;
        let catalogue = store.catalogue().clone();
        let check = RestoreCheck {
            number: self.checks,
            shard: self.id,
            checkpoint: order.checkpoint.clone(),
            training: CheckpointTraining::new(&catalogue, &variables.rules),
            row_limits: store.tables().iter().map(|table| table.limit()).collect(),
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
        out.push(ShardOutput::RestoreShard(Box::new(RestoreWork::Check(check))));
    }

    /// Abandons the check that is running, and forgets the checked checkpoint.
    pub(super) fn drop_check(&mut self, out: &mut ShardOutputs, reason: &'static str) {
        self.checked = None;
        if let Some(check) = self.checking.take() {
            check.abandon_flag.abandon(reason);
            refuse_restore(out, self.id, &check.request, abandoned(reason));
        }
    }

    /// Forgets the checkpoint that was checked for a connection that has ended.
    pub(in crate::shard) fn forget_checked_for(&mut self, connection: u64) {
        self.checked.take_if(|checked| checked.connection == connection);
    }
}

/// Returns the refusal of a check that was abandoned.
fn abandoned(reason: &str) -> Refusal {
    CheckpointFault::Unavailable(format!("abandoned because {reason}")).refusal()
}

impl Shard {
    /// Checks a checkpoint before all shards restore it. The training goes on.
    pub(in crate::shard) fn prepare_restore(
        &mut self,
        request: PeerRequest,
        prepare: PrepareRestore,
    ) {
        let PrepareRestore { checkpoint, epoch } = prepare;
        let order = RestoreOrder { checkpoint, epoch };
        let Shard { variables, checkpoints, out, .. } = self;
        match checkpoints.check_restore(variables, out, &request, &order) {
            Ok(true) => checkpoints.begin_check(variables, out, request, order, false),
            Ok(false) => {}
            Err(refusal) => refuse_restore(out, checkpoints.id, &request, refusal),
        }
    }

    /// Takes the result of a check: begins the restore if it was requested, or keeps the checkpoint
    /// for the request.
    pub(in crate::shard) fn restore_checked(&mut self, checked: RestoreChecked) {
        let Shard { variables, files, peers, checkpoints, out, .. } = self;
        let is_it = |check: &mut CheckInProgress| check.number == checked.number;
        // A check that another one has displaced was answered.
        let Some(check) = checkpoints.checking.take_if(is_it) else { return };
        let CheckInProgress { request, order, digest, restores, abandon_flag, .. } = check;
        let opened = match checked.result {
            Ok(opened) => opened,
            Err(fault) => return refuse_restore(out, checkpoints.id, &request, fault.refusal()),
        };
        if let Some(reason) = abandon_flag.reason() {
            return refuse_restore(out, checkpoints.id, &request, abandoned(reason));
        }
        let connection = request.connection;
        let refusal = files.poisoned().or_else(|| peers.chief_refusal(connection));
        if let Some(refusal) = refusal {
            return request.refuse(out, refusal);
        }
        if variables.digest() != Some(digest) || !peers.connections.contains_key(&connection) {
            // The chief declares the variables and asks again.
            return request.refuse(out, Refusal::NotInitialized {});
        }
        let checkpoint = order.checkpoint.clone();
        checkpoints.checked =
            Some(CheckedCheckpoint { connection, checkpoint, digest, opened, abandon_flag });
        match restores {
            true => self.restore(request, order),
            false => request.answer(out, message::RestorePrepared {}.into()),
        }
    }
}
