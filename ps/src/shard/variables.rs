//! Declares the variables and computes their initial values.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, PartitionId, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{CatalogueIs, CatalogueState, Declared, Ready};
use pushpull_common::protocol::{Envelope, Refusal};
use pushpull_optim::optimizer::{Untrainable, VariableRules};
use pushpull_store::arena::fence;
use pushpull_store::store::Store;
use pushpull_store::table::Table;

use super::fused_ranges::FusedRanges;
use super::initialization::InitializeJob;
use super::output::{AnswerBody, Outputs};
use super::parked_requests::{ParkedRequest, WaitReason};
use super::shard_files::ShardFiles;
use super::work::ShardJob;
use super::{Detail, Shard};
use crate::aggregate::token_issuer::TokenIssuer;
use crate::config::{NonFinite, PsConfig};
use crate::error::StorageError;
use crate::metrics::{Counters, Overflowed};

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

    pub(super) fn store(&self) -> Option<&Store> {
        match &self.state {
            VariablesState::Absent => None,
            VariablesState::Declared(store) | VariablesState::Ready(store) => Some(store),
        }
    }

    /// Returns the store once all variables have values.
    pub(super) fn ready(&self) -> Option<&Store> {
        match &self.state {
            VariablesState::Ready(store) => Some(store),
            _ => None,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, VariablesState::Ready(_))
    }

    pub(super) fn catalogue_state(&self) -> CatalogueState {
        match &self.state {
            VariablesState::Absent => CatalogueState::Absent {},
            VariablesState::Declared(store) => {
                CatalogueState::Declared { digest: store.catalogue().digest() }
            }
            VariablesState::Ready(store) => {
                CatalogueState::Ready { digest: store.catalogue().digest() }
            }
        }
    }

    /// Returns the refusal of a request that has another restore epoch.
    pub(super) fn other_epoch(&self, found: RestoreEpoch) -> Refusal {
        Refusal::RestoreEpoch { found, current: self.epoch, step: self.restored_step }
    }

    /// Counts an update that made values infinite or NaN, and records the first such value.
    pub(super) fn count_overflow(&mut self) {
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) = &mut self.state
        else {
            return;
        };
        let Some(overflow) = store.take_overflow() else { return };
        if self.config.non_finite == NonFinite::Allow {
            return;
        }
        self.counters.overflows.add(1);
        self.counters.first_overflow.get_or_init(|| {
            let variable = store.catalogue().variables().get(overflow.variable.0 as usize);
            let variable = variable.map_or_else(String::new, |variable| variable.name().to_owned());
            let value = overflow.value.to_string();
            Overflowed { variable, element: overflow.element, value }
        });
    }

    /// Adds the counts of the tables to the counters.
    pub(super) fn count_tables(&mut self) {
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) = &mut self.state
        else {
            return;
        };
        let tables = store.tables_mut();
        if tables.is_empty() {
            return;
        }
        for counts in tables.iter_mut().map(Table::take_counts) {
            self.counters.table_hits.add(counts.hits);
            self.counters.table_misses.add(counts.misses);
            self.counters.table_rows_admitted.add(counts.admitted);
            self.counters.table_rows_turned_away.add(counts.turned_away);
            self.counters.table_rows_evicted.add(counts.evicted);
        }
        self.counters.table_rows.set(tables.iter().map(Table::rows).sum());
        self.counters.table_bytes.set(tables.iter().map(Table::bytes).sum());
    }

    /// Discards an unfinished change.
    pub(super) fn discard_change(&mut self) {
        if let VariablesState::Ready(store) = &mut self.state {
            store.discard();
        }
    }

    /// Revokes the values shared over a connection that has ended. Its pins no longer count.
    pub(super) fn revoke_shared(&mut self, connection: u64) {
        if let VariablesState::Ready(store) = &mut self.state
            && store.is_shared()
        {
            let counted = store.revoke_reader(connection);
            self.count_pulls(counted);
        }
    }

    pub(super) fn count_direct_pulls(&mut self) {
        if let VariablesState::Ready(store) = &mut self.state {
            let counted = store.direct_pulls();
            self.count_pulls(counted);
        }
    }

    fn count_pulls(&self, (pulls, bytes): (u64, u64)) {
        self.counters.direct_pulls.add(pulls);
        self.counters.direct_pull_bytes.add(bytes);
    }

    /// Returns whether a client reads shared values. Such a reader does not report that it has
    /// unpinned a block, which work may be waiting for.
    pub(super) fn is_shared(&self) -> bool {
        self.store().is_some_and(|store| store.is_shared())
    }

    /// Revokes the shared values of readers that have been in one pull for `stall_timeout`. Returns
    /// their connections, which must be closed.
    pub(super) fn revoke_stalled_readers(
        &mut self,
        now: Instant,
        stall_timeout: Duration,
    ) -> Vec<u64> {
        let VariablesState::Ready(store) = &mut self.state else { return Vec::new() };
        let stalled = store.stalled_readers(now, stall_timeout);
        stalled.iter().for_each(|&connection| self.revoke_shared(connection));
        stalled
    }

    /// Revokes the shared values of readers that pin blocks an update needs, because they have read
    /// for too long. Returns their connections, which must be closed.
    pub(super) fn revoke_slow_readers(&mut self) -> Vec<u64> {
        let VariablesState::Ready(store) = &self.state else { return Vec::new() };
        let slow = store.readers_of_retired_blocks();
        slow.iter().for_each(|&connection| self.revoke_shared(connection));
        slow
    }

    pub(super) fn answer_ready(&self, out: &mut Outputs, connection: u64, request: Envelope) {
        let digest = self.store().map_or([0; 32], |store| store.catalogue().digest());
        out.answer(connection, request, Ready { digest }.into());
    }

    pub(super) fn send_catalogue(&self, out: &mut Outputs, connection: u64, request: Envelope) {
        let Some(store) = self.store() else {
            return out.refuse(connection, request, Refusal::NotInitialized {});
        };
        let digest = store.catalogue().digest();
        let body = Bytes::from_owner(EncodedCatalogue(store.catalogue().clone()));
        let body = AnswerBody::Shared(body);
        out.answer_with(connection, request, CatalogueIs { digest }.into(), body, None);
    }

    /// Adds the changed blocks to the transaction that commits this push.
    pub(super) fn publish(&mut self, files: &mut ShardFiles) {
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &mut self.state {
            store.publish(&mut files.journal);
        }
        self.count_tables();
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
                let state = self.variables.catalogue_state();
                let restore_epoch = self.variables.epoch;
                let trained = self.steps.owner.as_ref().is_some_and(TokenIssuer::has_trained);
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
        let current = self.variables.store().map(|store| store.catalogue().clone());
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
            && (self.variables.is_ready() || !self.applier.jobs.is_empty())
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
        let limit = self.files.budget.left() + self.variables.store().map_or(0, Store::reserved);
        if need > limit {
            return Err(StorageError::DoesNotFit { need, limit });
        }
        // The memory of an earlier declaration is released first, because both may not fit.
        self.forget_variables()?;
        self.make_variables(catalogue)
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
            VariablesState::Ready(_) => {
                self.variables.answer_ready(&mut self.out, connection, request)
            }
            VariablesState::Declared(_) => {
                // A chief that reconnected asks again. The second request waits for the same
                // initialization.
                if self.applier.is_initializing() {
                    return self.peers.park(
                        &mut self.out,
                        ParkedRequest::plain(connection, request, now, WaitReason::Ready),
                    );
                }
                if epoch <= self.variables.epoch || epoch.0 == u32::MAX {
                    let refusal = self.variables.other_epoch(epoch);
                    return self.out.refuse(connection, request, refusal);
                }
                self.applier.jobs.push_back(ShardJob::Initialize(InitializeJob::new(
                    connection, request, epoch,
                )));
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
                (self.variables.epoch, self.variables.restored_step) = (epoch, self.steps.step());
                self.stamp_answers();
                self.variables.state = VariablesState::Ready(store);
            }
            other => self.variables.state = other,
        }
        self.peers.announce_ready(&self.variables, &mut self.out, connection, request);
    }
}

/// The encoded catalogue, shared by all answers that carry it.
struct EncodedCatalogue(Arc<Catalogue>);

impl AsRef<[u8]> for EncodedCatalogue {
    fn as_ref(&self) -> &[u8] {
        self.0.encode()
    }
}
