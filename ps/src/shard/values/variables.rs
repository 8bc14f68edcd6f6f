//! [`Variables`]: the variables of a shard, their store, the rules that train them, and their counts.

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::error::Chain;
use pushpull_common::ids::{GlobalStep, PartitionId, RestoreEpoch, ShardId};
use pushpull_common::protocol::limits::RESTORE_EPOCHS_AHEAD;
use pushpull_common::protocol::message::{CatalogueIs, CatalogueState, Ready};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, Refusal};
use pushpull_common::shared_values::ValueCounts;
use pushpull_optim::optimizer::{Untrainable, VariableRules};
use pushpull_store::arena::{Budget, fence};
use pushpull_store::commit::Journal;
use pushpull_store::store::Store;
use pushpull_store::table::Table;

use super::fused_ranges::FusedRanges;
use super::last_pulls::LastPulls;
use super::untrained_variables::UntrainedVariables;
use crate::client_key::ClientKey;
use crate::config::{Durability, NonFinite, PsConfig};
use crate::error::StorageError;
use crate::inbox::Inbox;
use crate::metrics::{Counters, Overflowed};
use crate::shard::output::{AnswerBody, ShardOutputs};
use crate::shard::request::{PeerRequest, unsupported};

/// The most tables on a shard. Each has a file for its index, and some for its rows.
const TABLES_MAX: usize = 1024;

/// The variables of a shard.
#[derive(Debug)]
pub(in crate::shard) struct Variables {
    pub(in crate::shard) id: ShardId,
    pub(in crate::shard) config: Arc<PsConfig>,
    pub(in crate::shard) counters: Arc<Counters>,
    pub(in crate::shard) state: VariablesState,
    /// The rules that train the variables.
    pub(in crate::shard) rules: VariableRules,
    /// Adjacent partitions that are updated together.
    pub(in crate::shard) fused_ranges: FusedRanges,
    /// The partitions that were assigned whole before the shard was initialized. A sparse one is, if
    /// the last push of its rows had the last row.
    pub(in crate::shard) assigned: BTreeSet<PartitionId>,
    /// The restore epoch, and the step at which it began. The epoch increases with each restore,
    /// and when the variables first have values.
    pub(in crate::shard) epoch: RestoreEpoch,
    pub(in crate::shard) restored_step: GlobalStep,
    /// The number of pushes applied, of every kind.
    pub(in crate::shard) version: u64,
    /// The number of gradients applied since the optimizer slots began: Adam's t. Equal on all shards
    /// but for pushes in flight, because every gradient has a share on each of them.
    pub(in crate::shard) gradients: u64,
    /// The trained variables that have got no gradient yet.
    untrained: UntrainedVariables,
    /// The values of each client's last pull, for delay compensation.
    pub(in crate::shard) last_pulls: LastPulls,
}

impl Variables {
    pub(in crate::shard) fn new(
        id: ShardId,
        config: Arc<PsConfig>,
        counters: Arc<Counters>,
    ) -> Variables {
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
            last_pulls: LastPulls::default(),
        }
    }

    /// Takes the variables of another generation, and the rules that train them.
    pub(in crate::shard) fn install(&mut self, state: VariablesState, rules: VariableRules) {
        self.state = state;
        self.fused_ranges =
            self.store().map(|store| FusedRanges::new(store.layout(), &rules)).unwrap_or_default();
        let untrained = self.store().map(|store| UntrainedVariables::new(store.layout(), &rules));
        self.untrained = untrained.unwrap_or_default();
        self.rules = rules;
    }

    pub(in crate::shard) fn store(&self) -> Option<&Store> {
        match &self.state {
            VariablesState::Absent => None,
            VariablesState::Declared(store) | VariablesState::Ready(store) => Some(store),
        }
    }

    pub(in crate::shard) fn store_mut(&mut self) -> Option<&mut Store> {
        match &mut self.state {
            VariablesState::Absent => None,
            VariablesState::Declared(store) | VariablesState::Ready(store) => Some(store),
        }
    }

    /// Returns the digest of the declared catalogue.
    pub(in crate::shard) fn digest(&self) -> Option<[u8; 32]> {
        self.store().map(|store| store.catalogue().digest())
    }

    /// Returns the store once all variables have values.
    pub(in crate::shard) fn ready(&self) -> Option<&Store> {
        match &self.state {
            VariablesState::Ready(store) => Some(store),
            _ => None,
        }
    }

    pub(in crate::shard) fn is_ready(&self) -> bool {
        matches!(self.state, VariablesState::Ready(_))
    }

    pub(in crate::shard) fn catalogue_state(&self) -> CatalogueState {
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
    pub(in crate::shard) fn may_begin(&self, epoch: RestoreEpoch, of: RestoreEpoch) -> bool {
        let last = self.epoch.max(of);
        let ahead = epoch.0.checked_sub(last.0);
        // The highest number is never used, so that another epoch can follow.
        ahead.is_some_and(|ahead| (1..=RESTORE_EPOCHS_AHEAD).contains(&ahead)) && epoch.0 < u32::MAX
    }

    /// Returns the refusal of a request that has another restore epoch.
    pub(in crate::shard) fn other_epoch(&self, found: RestoreEpoch) -> Refusal {
        Refusal::RestoreEpoch { found, current: self.epoch, step: self.restored_step }
    }

    /// Returns the refusal of a message that has another restore epoch. A client that does not know
    /// the epoch yet sends 0.
    pub(in crate::shard) fn epoch_refusal(&self, found: RestoreEpoch) -> Option<Refusal> {
        let is_known = found == RestoreEpoch(0) || found == self.epoch;
        (!is_known).then(|| self.other_epoch(found))
    }

    /// Counts an update that made values infinite or NaN. Returns such a value if it is the first.
    pub(in crate::shard) fn count_overflow(&mut self) -> Option<Overflowed> {
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
    pub(in crate::shard) fn count_tables(&mut self) {
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
    pub(in crate::shard) fn discard_change(&mut self) {
        if let VariablesState::Ready(store) = &mut self.state {
            store.discard();
        }
    }

    /// Revokes the values shared over a connection that has ended. Its pins no longer count.
    pub(in crate::shard) fn revoke_shared(&mut self, connection: u64) {
        if let VariablesState::Ready(store) = &mut self.state
            && store.is_shared()
        {
            let (pulls, bytes) = store.revoke_reader(connection);
            self.count_pulls(pulls, bytes);
        }
    }

    pub(in crate::shard) fn count_direct_pulls(&mut self) {
        if let VariablesState::Ready(store) = &mut self.state {
            let (pulls, bytes) = store.direct_pulls();
            self.count_pulls(pulls, bytes);
        }
    }

    fn count_pulls(&self, pulls: u64, bytes: u64) {
        self.counters.direct_pulls.add(pulls);
        self.counters.direct_pull_bytes.add(bytes);
    }

    /// Returns whether a client reads shared values. Such a reader does not report that it has
    /// unpinned a block, which work may be waiting for.
    pub(in crate::shard) fn is_shared(&self) -> bool {
        self.store().is_some_and(|store| store.is_shared())
    }

    /// Revokes the shared values of readers that have been in one pull for `stall_timeout`. Returns
    /// their connections, which must be closed.
    pub(in crate::shard) fn revoke_stalled_readers(
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
    pub(in crate::shard) fn revoke_slow_readers(&mut self) -> Vec<u64> {
        let VariablesState::Ready(store) = &self.state else { return Vec::new() };
        let slow = store.readers_of_retired_blocks();
        slow.iter().for_each(|&connection| self.revoke_shared(connection));
        slow
    }

    /// Returns the message that all variables have values.
    pub(in crate::shard) fn ready_message(&self) -> Message {
        Ready { digest: self.digest().unwrap_or([0; 32]) }.into()
    }

    pub(in crate::shard) fn send_catalogue(&self, out: &mut ShardOutputs, request: &PeerRequest) {
        let Some(store) = self.store() else {
            return request.refuse(out, Refusal::NotInitialized {});
        };
        let digest = store.catalogue().digest();
        let body = Bytes::from_owner(EncodedCatalogue(store.catalogue().clone()));
        let body = AnswerBody::Shared(body);
        let message = CatalogueIs { digest }.into();
        out.answer_with(request.connection, request.envelope, message, body, None);
    }

    /// Checks a declaration with this digest. Returns its catalogue, or `None` if these variables
    /// are declared already. Variables that have values, or that are being assigned, stay.
    pub(in crate::shard) fn check_declaration(
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
            Err(error) => return refuse(Chain(&error).to_string()),
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

    /// Makes the variables ready: the initial values are complete.
    pub(in crate::shard) fn initialized(
        &mut self,
        journal: &mut Journal,
        step: GlobalStep,
        epoch: RestoreEpoch,
    ) {
        match std::mem::replace(&mut self.state, VariablesState::Absent) {
            VariablesState::Declared(store) => {
                if store.has_integrity() {
                    store.seal(journal);
                }
                fence();
                self.epoch = epoch;
                self.restored_step = step;
                // The slots begin, also if earlier variables were trained and forgotten.
                self.gradients = 0;
                self.state = VariablesState::Ready(store);
            }
            other => self.state = other,
        }
    }

    /// Checks that the variables of a catalogue can be trained with the server's configuration.
    pub(in crate::shard) fn can_train(&self, catalogue: &Catalogue) -> Result<(), Untrainable> {
        self.config.rules.check(catalogue)?;
        let Some(table) = catalogue.variables().iter().find(|v| v.as_table().is_some()) else {
            return Ok(());
        };
        let here = catalogue.layout(self.id).tables().len();
        let reason = if self.config.storage.durability == Durability::Power {
            "a table survives a loss of power in checkpoints only, not with Durability::Power"
                .to_owned()
        } else if here > TABLES_MAX {
            format!("{} would have {here} parts of tables: the limit is {TABLES_MAX}", self.id)
        } else {
            return Ok(());
        };
        Err(Untrainable { variable: table.name().to_owned(), reason })
    }

    /// Shares the values with the client of a connection. Returns the answer and the descriptors.
    pub(in crate::shard) fn share(
        &mut self,
        budget: &Budget,
        counts: ValueCounts,
        request: &PeerRequest,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
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
            Err(error) => Err(unsupported(request.kind, &Chain(&error).to_string())),
        }
    }

    /// Returns the counts that clients read beside shared values, on a shard at this step that
    /// serves pulls up to another.
    pub(in crate::shard) fn counts(&self, step: GlobalStep, serves: u64) -> ValueCounts {
        ValueCounts {
            version: self.version,
            gradients: self.gradients,
            step: step.0,
            serves,
            epoch: self.epoch.0.into(),
        }
    }

    /// Adds the changed blocks to the transaction that commits this push.
    pub(in crate::shard) fn publish(&mut self, journal: &mut Journal) {
        if let VariablesState::Declared(store) | VariablesState::Ready(store) = &mut self.state {
            store.publish(journal);
        }
        self.count_tables();
    }

    /// Stores the current values as those of a client's pull, if its next gradient may need
    /// compensation.
    pub(in crate::shard) fn keep_last_pull(&mut self, client: ClientKey, budget: &Budget) {
        // Rows are read by other pulls, and a copy of all of them would be too large.
        if let VariablesState::Ready(store) = &self.state
            && self.config.compensates()
            && store.layout().sparse().len() == 0
        {
            self.last_pulls.keep(client, store, self.gradients, budget);
        }
    }

    /// Takes the store of declared variables without values. The variables are absent then.
    pub(in crate::shard) fn take_declared(&mut self) -> Option<Box<Store>> {
        match std::mem::take(&mut self.state) {
            VariablesState::Declared(store) => Some(store),
            VariablesState::Absent | VariablesState::Ready(_) => None,
        }
    }

    /// Forgets the variables.
    pub(in crate::shard) fn forget(&mut self) {
        self.state = VariablesState::Absent;
        self.last_pulls.clear();
        self.assigned.clear();
    }

    /// Records the partitions that a whole push assigns before the variables are initialized.
    ///
    /// Rows come in ascending order over several pushes. A sparse partition of which the last push
    /// lacks the last row was left by a chief that died, and its initializer writes all its rows.
    pub(in crate::shard) fn record_assigned(&mut self, inbox: &Inbox, push_slot: u32) {
        let VariablesState::Declared(store) = &self.state else { return };
        let Some(push) = inbox.arrival(push_slot) else { return };
        let has_last_row = |partition: &Partition| {
            let last = inbox.rows(push_slot, partition).and_then(|rows| rows.numbers().last());
            last.is_some_and(|row| row + 1 == partition.row_count())
        };
        for range in push.extents.ranges() {
            for partition in store.layout().within(range.clone()).filter(|p| !p.is_table()) {
                match !partition.is_sparse() || has_last_row(partition) {
                    true => self.assigned.insert(partition.id),
                    false => self.assigned.remove(&partition.id),
                };
            }
        }
    }

    /// Returns whether a push of this many bytes is applied in place.
    pub(in crate::shard) fn is_small(&self, bytes: u64) -> bool {
        self.store().is_some_and(|store| store.is_small(bytes))
    }

    /// Records the ranges of a gradient in the next update.
    pub(in crate::shard) fn add_gradient(&mut self, ranges: &[Range<u64>]) {
        if let VariablesState::Ready(store) = &self.state {
            self.untrained.add_gradient(store.layout(), ranges);
        }
    }

    /// Counts an update that is applied. Returns the names of variables that none has changed, each
    /// with the number of updates, to be reported.
    pub(in crate::shard) fn end_update(&mut self) -> Vec<(String, u32)> {
        let untrained = self.untrained.end_update();
        let Some(store) = self.store().filter(|_| !untrained.is_empty()) else {
            return Vec::new();
        };
        let name = |variable| store.catalogue().variable(variable).name().to_owned();
        untrained.into_iter().map(|(variable, updates)| (name(variable), updates)).collect()
    }
}

/// How far the declaration of the variables has progressed.
#[derive(Debug, Default)]
pub(in crate::shard) enum VariablesState {
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
