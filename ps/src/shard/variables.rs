//! Declares the variables and computes their initial values.

use super::fused_ranges::FusedRanges;
use crate::config::PsConfig;
use crate::metrics::Counters;
use crate::optimizer::VariableRules;
use pushpull_common::ids::ShardId;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, PartitionId, RestoreEpoch};
use pushpull_common::protocol::message::{CatalogueIs, Declared, Ready};
use pushpull_common::protocol::{Envelope, Refusal};

use super::output::AnswerBody;
use super::parked_requests::{ParkedRequest, WaitReason};
use super::work::ShardJob;
use super::{Detail, Shard};
use crate::aggregate::step_owner::StepOwner;
use crate::arena::fence;
use crate::error::StorageError;
use crate::optimizer::Untrainable;
use crate::store::Store;

/// The variables of a shard.
#[derive(Debug)]
pub(super) struct Variables {
    pub(super) id: ShardId,
    pub(super) config: Arc<PsConfig>,
    pub(super) counters: Arc<Counters>,
    pub(super) state: VariablesState,
    /// The rules that train the variables.
    pub(super) rules: VariableRules,
    /// Adjacent partitions that are updated together.
    pub(super) fused_ranges: FusedRanges,
    /// The partitions that were assigned before the shard was initialized.
    pub(super) assigned: BTreeSet<PartitionId>,
    /// The restore epoch, and the step at which it began. The epoch increases with each restore,
    /// and when the variables first have values.
    pub(super) epoch: RestoreEpoch,
    pub(super) restored_step: GlobalStep,
    /// The number of pushes applied, of every kind.
    pub(super) version: u64,
    /// The number of gradients applied.
    pub(super) gradients: u64,
}

impl Variables {
    pub(super) fn new(id: ShardId, config: Arc<PsConfig>, counters: Arc<Counters>) -> Variables {
        Variables {
            id,
            config,
            counters,
            state: VariablesState::Absent,
            rules: VariableRules::default(),
            fused_ranges: FusedRanges::default(),
            assigned: BTreeSet::new(),
            epoch: RestoreEpoch(0),
            restored_step: GlobalStep(0),
            version: 0,
            gradients: 0,
        }
    }
}

/// How far the declaration of the variables has progressed.
#[derive(Debug, Default)]
pub(super) enum VariablesState {
    #[default]
    Absent,
    Declared(Box<Store>),
    Ready(Box<Store>),
}

impl Shard {
    pub(super) fn declare(
        &mut self,
        connection: u64,
        request: Envelope,
        digest: [u8; 32],
        bytes: &[u8],
    ) {
        match self.try_declare(digest, bytes) {
            Ok(()) => {
                let state = self.catalogue_state();
                let restore_epoch = self.variables.epoch;
                let trained = self.steps.owner.as_ref().is_some_and(StepOwner::has_trained);
                let declared = Declared { state, restore_epoch, trained };
                self.out.answer(connection, request, declared.into());
            }
            Err(refusal) => self.out.refuse(connection, request, refusal),
        }
    }

    fn try_declare(&mut self, client: [u8; 32], bytes: &[u8]) -> Result<(), Refusal> {
        if self.checkpoints.restoring.is_some() {
            // A declaration waits until the restore that an older chief requested has ended.
            return Err(Refusal::NotInitialized {});
        }
        let current = self.store().map(|store| store.catalogue().clone());
        if current.as_ref().is_some_and(|current| current.digest() == client) {
            return Ok(());
        }
        let refuse = |server, differs: String| {
            Err(Refusal::Catalogue { server, client, differs: Detail::clipped(differs) })
        };
        let server = current.as_ref().map_or([0; 32], |current| current.digest());
        let catalogue = match Catalogue::decode(bytes) {
            Ok(catalogue) if catalogue.digest() == client => catalogue,
            Ok(_) => return refuse(server, "the catalogue does not match its digest".into()),
            Err(error) => return refuse(server, error.to_string()),
        };
        if let Some(current) = current
            && (self.is_ready() || !self.applier.jobs.is_empty())
        {
            let differs = current.difference(&catalogue);
            return refuse(server, differs.unwrap_or_else(|| "their placements differ".into()));
        }
        for shard in catalogue.shards() {
            let task = self.config.cluster.task_address("ps", shard.task);
            if task.is_err() || shard.shard >= self.config.shards {
                return refuse(
                    server,
                    format!("it places variables on {shard}, which does not exist"),
                );
            }
        }
        self.can_train(&catalogue).map_err(|Untrainable { variable, reason }| {
            Refusal::Untrainable {
                variable: Detail::clipped(variable),
                detail: Detail::clipped(reason),
            }
        })?;
        self.reserve_memory(Arc::new(catalogue)).map_err(|error| match error {
            StorageError::DoesNotFit { need, limit } => Refusal::DoesNotFit { need, limit },
            error => Refusal::Storage { detail: Detail::clipped(error.to_string()) },
        })
    }

    fn reserve_memory(&mut self, catalogue: Arc<Catalogue>) -> Result<(), StorageError> {
        // The check covers everything that the shard needs, so that a refusal names the sum. It
        // comes first, so that a refusal changes nothing.
        let need = self.need(&catalogue);
        let limit = self.files.budget.left() + self.store().map_or(0, Store::reserved);
        if need > limit {
            return Err(StorageError::DoesNotFit { need, limit });
        }
        // The memory of an earlier declaration is released first, because both may not fit.
        self.forget_variables()?;
        self.make_variables(catalogue)
    }

    /// Returns whether the initial values are being computed.
    pub(super) fn is_initializing(&self) -> bool {
        self.applier.jobs.iter().any(|job| matches!(job, ShardJob::Initialize(_)))
    }

    pub(super) fn initialize(
        &mut self,
        now: Instant,
        connection: u64,
        request: Envelope,
        epoch: RestoreEpoch,
    ) {
        match &self.variables.state {
            VariablesState::Absent => {
                self.out.refuse(connection, request, Refusal::NotInitialized {})
            }
            VariablesState::Ready(_) => self.answer_ready(connection, request),
            VariablesState::Declared(_) => {
                // A chief that reconnected asks again. The second request waits for the same
                // initialization.
                if self.is_initializing() {
                    return self.park(ParkedRequest::plain(
                        connection,
                        request,
                        now,
                        WaitReason::Ready,
                    ));
                }
                if epoch <= self.variables.epoch || epoch.0 == u32::MAX {
                    let refusal = self.other_epoch(epoch);
                    return self.out.refuse(connection, request, refusal);
                }
                self.applier.jobs.push_back(ShardJob::initialize(connection, request, epoch));
            }
        }
    }

    /// The initial values are complete.
    pub(super) fn initialized(&mut self, connection: u64, request: Envelope, epoch: RestoreEpoch) {
        match std::mem::replace(&mut self.variables.state, VariablesState::Absent) {
            VariablesState::Declared(store) => {
                if store.has_integrity() {
                    store.seal(&mut self.files.journal);
                }
                fence();
                (self.variables.epoch, self.variables.restored_step) = (epoch, self.step());
                self.stamp_answers();
                self.variables.state = VariablesState::Ready(store);
            }
            other => self.variables.state = other,
        }
        self.announce_ready(connection, request);
    }

    /// Answers the requests that wait for values of all variables.
    pub(super) fn announce_ready(&mut self, connection: u64, request: Envelope) {
        self.answer_ready(connection, request);
        for entry in self.peers.parked.take(|entry| matches!(entry.wait, WaitReason::Ready)) {
            self.answer_ready(entry.connection, entry.request);
        }
    }

    pub(super) fn await_ready(&mut self, entry: ParkedRequest) {
        match self.is_ready() {
            true => self.answer_ready(entry.connection, entry.request),
            false => self.park(entry),
        }
    }

    pub(super) fn answer_ready(&mut self, connection: u64, request: Envelope) {
        let digest = self.store().map_or([0; 32], |store| store.catalogue().digest());
        self.out.answer(connection, request, Ready { digest }.into());
    }

    pub(super) fn send_catalogue(&mut self, connection: u64, request: Envelope) {
        let Some(store) = self.store() else {
            return self.out.refuse(connection, request, Refusal::NotInitialized {});
        };
        let digest = store.catalogue().digest();
        let body = Bytes::from_owner(EncodedCatalogue(store.catalogue().clone()));
        let body = AnswerBody::Shared(body);
        self.out.answer_with(connection, request, CatalogueIs { digest }.into(), body, None);
    }
}

/// The encoded catalogue, shared by all answers that carry it.
struct EncodedCatalogue(Arc<Catalogue>);

impl AsRef<[u8]> for EncodedCatalogue {
    fn as_ref(&self) -> &[u8] {
        self.0.encode()
    }
}
