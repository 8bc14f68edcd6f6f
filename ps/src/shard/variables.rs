//! The variables of a shard: their store, the rules that train them, and their counts.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, PartitionId, RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::RESTORE_EPOCHS_AHEAD;
use pushpull_common::protocol::message::{CatalogueIs, CatalogueState, Ready};
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::shared_values::ValueCounts;
use pushpull_optim::optimizer::{Untrainable, VariableRules};
use pushpull_store::arena::{Budget, fence};
use pushpull_store::store::Store;
use pushpull_store::table::Table;

use super::Detail;
use super::applier::{Applier, ShardJob};
use super::fused_ranges::FusedRanges;
use super::initialization::InitializeJob;
use super::output::{AnswerBody, ShardOutputs};
use super::peers::parked_requests::{ParkedRequest, WaitReason};
use super::peers::peer_request::PeerRequest;
use super::peers::{Peers, unsupported};
use super::shard_files::ShardFiles;
use super::steps::Steps;
use super::untrained_variables::UntrainedVariables;
use crate::config::{Durability, NonFinite, PsConfig};
use crate::error::StorageError;
use crate::metrics::{Counters, Overflowed};

/// The most tables on a shard. Each has a file for its index, and some for its rows.
const TABLES_MAX: usize = 1024;

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
    /// The number of gradients applied since the optimizer slots began: Adam's t. Equal on all shards
    /// but for pushes in flight, because every gradient has a share on each of them.
    pub(super) gradients: u64,
    /// The trained variables that have got no gradient yet.
    pub(super) untrained: UntrainedVariables,
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
            untrained: UntrainedVariables::default(),
        }
    }

    /// Takes the variables of another generation, and the rules that train them.
    pub(super) fn install(&mut self, state: VariablesState, rules: VariableRules) {
        self.state = state;
        self.fused_ranges =
            self.store().map(|store| FusedRanges::new(store.layout(), &rules)).unwrap_or_default();
        let untrained = self.store().map(|store| UntrainedVariables::new(store.layout(), &rules));
        self.untrained = untrained.unwrap_or_default();
        self.rules = rules;
    }

    pub(super) fn store(&self) -> Option<&Store> {
        match &self.state {
            VariablesState::Absent => None,
            VariablesState::Declared(store) | VariablesState::Ready(store) => Some(store),
        }
    }

    /// Returns the digest of the declared catalogue.
    pub(super) fn digest(&self) -> Option<[u8; 32]> {
        self.store().map(|store| store.catalogue().digest())
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

    /// Returns whether this restore epoch may begin here, with values of the epoch `of`.
    pub(super) fn may_begin(&self, epoch: RestoreEpoch, of: RestoreEpoch) -> bool {
        let last = self.epoch.max(of);
        let ahead = epoch.0.checked_sub(last.0);
        // The highest number is never used, so that another epoch can follow.
        ahead.is_some_and(|ahead| (1..=RESTORE_EPOCHS_AHEAD).contains(&ahead)) && epoch.0 < u32::MAX
    }

    /// Returns the refusal of a request that has another restore epoch.
    pub(super) fn other_epoch(&self, found: RestoreEpoch) -> Refusal {
        Refusal::RestoreEpoch { found, current: self.epoch, step: self.restored_step }
    }

    /// Returns the refusal of a message that has another restore epoch. A client that does not know
    /// the epoch yet sends 0.
    pub(super) fn epoch_refusal(&self, found: RestoreEpoch) -> Option<Refusal> {
        let is_known = found == RestoreEpoch(0) || found == self.epoch;
        (!is_known).then(|| self.other_epoch(found))
    }

    /// Counts an update that made values infinite or NaN. Returns such a value if it is the first.
    pub(super) fn count_overflow(&mut self) -> Option<Overflowed> {
        let (VariablesState::Declared(store) | VariablesState::Ready(store)) = &mut self.state
        else {
            return None;
        };
        let overflow = store.take_overflow()?;
        if self.config.non_finite == NonFinite::Allow {
            return None;
        }
        self.counters.overflows.add(1);
        if self.counters.first_overflow.get().is_some() {
            return None;
        }
        let variable = store.catalogue().variables().get(overflow.variable.0 as usize);
        let variable = variable.map_or_else(String::new, |variable| variable.name().to_owned());
        let value = overflow.value.to_string();
        let first = Overflowed { variable, element: overflow.element, value };
        self.counters.first_overflow.set(first.clone()).ok().map(|()| first)
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

    pub(super) fn answer_ready(&self, out: &mut ShardOutputs, connection: u64, request: Envelope) {
        let digest = self.store().map_or([0; 32], |store| store.catalogue().digest());
        out.answer(connection, request, Ready { digest }.into());
    }

    pub(super) fn send_catalogue(&self, out: &mut ShardOutputs, request: &PeerRequest) {
        let Some(store) = self.store() else {
            return request.refuse(out, Refusal::NotInitialized {});
        };
        let digest = store.catalogue().digest();
        let body = Bytes::from_owner(EncodedCatalogue(store.catalogue().clone()));
        let (body, message) = (AnswerBody::Shared(body), CatalogueIs { digest }.into());
        out.answer_with(request.connection, request.envelope, message, body, None);
    }

    /// Checks a declaration with this digest. Returns its catalogue, or `None` if these variables
    /// are declared already. Variables that have values, or that are being assigned, stay.
    pub(super) fn check_declaration(
        &self,
        client: [u8; 32],
        bytes: &[u8],
        is_busy: bool,
    ) -> Result<Option<Catalogue>, Refusal> {
        let current = self.store().map(|store| store.catalogue());
        if current.is_some_and(|current| current.digest() == client) {
            return Ok(None);
        }
        let server = current.map_or([0; 32], |current| current.digest());
        let refuse = |differs: String| {
            Err(Refusal::Catalogue { server, client, differs: Detail::clipped(differs) })
        };
        let catalogue = match Catalogue::decode(bytes) {
            Ok(catalogue) if catalogue.digest() == client => catalogue,
            Ok(_) => return refuse("the catalogue does not match its digest".into()),
            Err(error) => return refuse(error.to_string()),
        };
        if let Some(current) = current
            && (self.is_ready() || is_busy)
        {
            let differs = current.difference(&catalogue);
            return refuse(differs.unwrap_or_else(|| "their placements differ".into()));
        }
        for shard in catalogue.shards() {
            let task = self.config.cluster.require(self.config.job(), shard.task);
            if task.is_err() || shard.shard >= self.config.shards {
                return refuse(format!("it places variables on {shard}, which does not exist"));
            }
        }
        let untrainable = |Untrainable { variable, reason }| Refusal::Untrainable {
            variable: Detail::clipped(variable),
            detail: Detail::clipped(reason),
        };
        self.can_train(&catalogue).map_err(untrainable)?;
        Ok(Some(catalogue))
    }

    /// Computes the initial values of declared variables, or answers if they have values.
    pub(super) fn initialize(
        &self,
        applier: &mut Applier,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        request: PeerRequest,
        epoch: RestoreEpoch,
    ) {
        let (connection, envelope) = (request.connection, request.envelope);
        match &self.state {
            VariablesState::Absent => request.refuse(out, Refusal::NotInitialized {}),
            VariablesState::Ready(_) => self.answer_ready(out, connection, envelope),
            VariablesState::Declared(_) if applier.is_initializing() => {
                // A chief that reconnected asks again. The second request waits for the same
                // initialization, however long it takes.
                let request = PeerRequest { client: None, deadline: None, ..request };
                peers.park(out, ParkedRequest { request, wait: WaitReason::Ready });
            }
            VariablesState::Declared(_) if !self.may_begin(epoch, RestoreEpoch(0)) => {
                request.refuse(out, self.other_epoch(epoch));
            }
            VariablesState::Declared(_) => {
                applier.jobs.push_back(ShardJob::Initialize(InitializeJob::new(
                    connection, envelope, epoch,
                )));
            }
        }
    }

    /// Makes the variables ready: the initial values are complete.
    pub(super) fn initialized(
        &mut self,
        files: &mut ShardFiles,
        step: GlobalStep,
        epoch: RestoreEpoch,
    ) {
        match std::mem::replace(&mut self.state, VariablesState::Absent) {
            VariablesState::Declared(store) => {
                if store.has_integrity() {
                    store.seal(&mut files.journal);
                }
                fence();
                (self.epoch, self.restored_step) = (epoch, step);
                // The slots begin, also if earlier variables were trained and forgotten.
                self.gradients = 0;
                self.state = VariablesState::Ready(store);
            }
            other => self.state = other,
        }
    }

    /// Checks that the variables of a catalogue can be trained with the server's configuration.
    pub(super) fn can_train(&self, catalogue: &Catalogue) -> Result<(), Untrainable> {
        self.config.rules.check(catalogue)?;
        let Some(table) = catalogue.variables().iter().find(|v| v.as_table().is_some()) else {
            return Ok(());
        };
        let here = catalogue.layout(self.id).tables().len();
        let reason = if self.config.storage.durability == Durability::Power {
            "a table survives a loss of power in checkpoints only, not with Durability::Power"
                .to_owned()
        } else if here > TABLES_MAX {
            format!("{} would have {here} parts of tables, the limit is {TABLES_MAX}", self.id)
        } else {
            return Ok(());
        };
        Err(Untrainable { variable: table.name().to_owned(), reason })
    }

    /// Shares the values with the client of a connection. Returns the answer and the descriptors.
    pub(super) fn share(
        &mut self,
        budget: &Budget,
        steps: &Steps,
        request: &PeerRequest,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        let counts = self.counts(steps);
        let VariablesState::Ready(store) = &mut self.state else {
            return Err(Refusal::NotInitialized {});
        };
        match store.share(request.connection, counts, budget) {
            Ok((shared, descriptors)) => Ok((shared.into(), descriptors)),
            Err(StorageError::DoesNotFit { need, limit }) => {
                let made_of = Detail::clipped("memory to share with the client");
                Err(Refusal::DoesNotFit { need, limit, made_of })
            }
            // The memory cannot be shared, or no descriptors are left. The client continues with
            // pulls over its connection.
            Err(error) => Err(unsupported(request.kind, &error.to_string())),
        }
    }

    /// Returns the counts that clients read beside shared values.
    pub(super) fn counts(&self, steps: &Steps) -> ValueCounts {
        ValueCounts {
            version: self.version,
            gradients: self.gradients,
            step: steps.step().0,
            serves: steps.served_step(),
            epoch: self.epoch.0.into(),
        }
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

/// The encoded catalogue, shared by all answers that carry it.
struct EncodedCatalogue(Arc<Catalogue>);

impl AsRef<[u8]> for EncodedCatalogue {
    fn as_ref(&self) -> &[u8] {
        self.0.encode()
    }
}
