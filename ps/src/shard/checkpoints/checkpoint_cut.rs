//! Checkpoint cuts: the pinned values that a shard writes to a checkpoint.
//!
//! In asynchronous mode the step owner cuts when it orders the save, so that its part has exactly
//! the step in the checkpoint's name. Every other shard cuts when its part is requested.
//!
//! In synchronous mode all shards cut after the same step. The step owner sends `KeepCut` over the
//! connections that also carry commits, when all shards have applied that step and none can have
//! applied the next. A shard that connects during the save receives it before the next commit. A
//! shard keeps its cut until its part is requested, and training continues meanwhile.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pushpull_common::ids::GlobalStep;
use pushpull_store::store::StoreImage;

use super::saver_order::{SaveRequester, SaverOrder};
use crate::aggregate::token_issuer::TokenIssuer;
use crate::checkpoint::{CallsEntry, CheckpointFault, CheckpointName, ClientWindow, DataEntry};
use crate::shard::checkpoints::ShardCheckpoints;
use crate::shard::output::{ShardOutput, ShardOutputs};
use crate::shard::peers::Peers;
use crate::shard::shard_files::record::RESTORED_LIMIT;
use crate::shard::steps::Steps;
use crate::shard::variables::{Variables, VariablesState};

/// The values of a shard at one moment, pinned, with its counts.
#[derive(Debug)]
pub(crate) struct CheckpointCut {
    /// The global step, as the shard knew it.
    step: GlobalStep,
    pub(in crate::shard) image: StoreImage,
    /// Set when the memory that the cut pins is needed.
    pub(in crate::shard) memory_needed: Arc<AtomicBool>,
    pub(in crate::shard) version: u64,
    pub(in crate::shard) gradients: u64,
    pub(in crate::shard) clients: Vec<ClientWindow>,
    /// The data position at that moment, on the step owner.
    pub(in crate::shard) data: Option<DataEntry>,
    /// The calls that have counted in the values.
    pub(in crate::shard) calls: Vec<CallsEntry>,
    since: Instant,
}

impl CheckpointCut {
    /// Cuts the current values, for a checkpoint of a global step that the shard need not know.
    fn take(
        variables: &mut Variables,
        peers: &Peers,
        steps: &Steps,
        now: Instant,
        of: GlobalStep,
    ) -> Option<CheckpointCut> {
        let step = steps.step();
        let VariablesState::Ready(store) = &mut variables.state else { return None };
        let memory_needed = Arc::new(AtomicBool::new(false));
        Some(CheckpointCut {
            step,
            image: store.image(of.0.max(step.0).min(RESTORED_LIMIT), memory_needed.clone()),
            memory_needed,
            version: variables.version,
            gradients: variables.gradients,
            clients: peers.registry.windows(),
            data: steps.owner.as_ref().and_then(data_entry),
            calls: steps.calls.entries().map(|(_, entry)| entry.into()).collect(),
            since: now,
        })
    }
}

/// Returns the data position of the committed values: the batches of tokens, and of pushes that are
/// admitted to the next step, are not spent.
fn data_entry(owner: &TokenIssuer) -> Option<DataEntry> {
    let (data, unspent) = owner.unspent_batches()?;
    let unspent = unspent.into_iter().map(|batch| batch.0).collect();
    Some(DataEntry::new(data.set(), data.next().0, unspent))
}

/// A queued request to save a checkpoint.
#[derive(Debug)]
pub(in crate::shard) struct SaveRequest {
    requester: SaveRequester,
    user: Vec<u8>,
    since: Instant,
}

/// The most save requests that wait for the running save.
const SAVE_REQUESTS_MAX: usize = 16;

/// How long a shard keeps a cut that is not requested, and how long a save request waits to begin.
const CUT_WAIT_MAX: Duration = Duration::from_secs(60);

fn expired(now: Instant, since: Instant) -> bool {
    now.saturating_duration_since(since) >= CUT_WAIT_MAX
}

impl ShardCheckpoints {
    /// Returns whether a cut or a save request has waited for too long. Nothing expires on the step
    /// owner while a save is running.
    pub(in crate::shard) fn has_expired(&self, now: Instant) -> bool {
        let kept = self.kept_cut.as_ref().map(|cut| cut.since);
        let waits = kept.into_iter().chain(self.requests.front().map(|request| request.since));
        !self.saves_a_cut && waits.into_iter().any(|since| expired(now, since))
    }

    /// Drops a cut and refuses saves that have waited for too long, for this event.
    pub(in crate::shard) fn expire(&mut self, out: &mut ShardOutputs, now: Instant, awaited: &str) {
        self.kept_cut.take_if(|cut| expired(now, cut.since));
        while self.requests.front().is_some_and(|request| expired(now, request.since))
            && let Some(request) = self.requests.pop_front()
        {
            let error = format!("it has waited {CUT_WAIT_MAX:?} for {awaited}");
            self.saved(out, request.requester, Err(CheckpointFault::Unavailable(error)));
        }
    }

    /// Drops the save requests of a connection that has ended. Its chief requests them again over
    /// another one.
    pub(in crate::shard) fn drop_save_requests_of(&mut self, ended: u64) {
        self.requests.retain(|save_request| {
            !matches!(save_request.requester, SaveRequester::Connection { connection, .. } if connection == ended)
        });
    }

    fn drop_save_requests(
        &mut self,
        out: &mut ShardOutputs,
        reason: &str,
        which: impl Fn(&SaveRequester) -> bool,
    ) {
        for save_request in std::mem::take(&mut self.requests) {
            match which(&save_request.requester) {
                // A periodic save is repeated in its next period.
                true if save_request.requester.is_periodic() => {}
                true => self.saved(
                    out,
                    save_request.requester,
                    Err(CheckpointFault::Unavailable(reason.to_owned())),
                ),
                false => self.requests.push_back(save_request),
            }
        }
    }

    /// Drops the cuts, the running save and the save requests, because another restore epoch
    /// begins.
    pub(in crate::shard) fn drop_saves(&mut self, out: &mut ShardOutputs) {
        // Its pinned values are obsolete, and it occupies the thread that must read.
        if let Some(saving) = &self.saving {
            saving.abandon_flag.abandon("a checkpoint is restored");
        }
        self.kept_cut = None;
        self.drop_save_requests(out, "a checkpoint is restored", |_| true);
    }

    /// Drops the save requests of an older chief.
    pub(in crate::shard) fn drop_save_requests_of_chiefs(
        &mut self,
        out: &mut ShardOutputs,
        reason: &str,
    ) {
        self.drop_save_requests(out, reason, |requester| {
            matches!(requester, SaveRequester::Connection { .. })
        });
    }

    /// Queues a save on the step owner. It begins when the previous save has ended and, in
    /// synchronous mode, every shard has applied the same steps.
    pub(in crate::shard) fn request_save(
        &mut self,
        out: &mut ShardOutputs,
        now: Instant,
        requester: SaveRequester,
        user: Vec<u8>,
    ) {
        // A periodic save is repeated in its next period.
        if requester.is_periodic() && (self.saves_a_cut || !self.requests.is_empty()) {
            return;
        }
        if self.requests.len() == SAVE_REQUESTS_MAX {
            let error = format!("cannot save now: {SAVE_REQUESTS_MAX} saves wait already");
            return self.saved(out, requester, Err(CheckpointFault::Unavailable(error)));
        }
        self.requests.push_back(SaveRequest { requester, user, since: now });
    }

    /// Ends the running save. The next may begin.
    pub(in crate::shard) fn end_save_of_cut(&mut self, now: Instant) {
        self.saves_a_cut = false;
        // The saver may not have requested it.
        self.kept_cut = None;
        self.requests.iter_mut().for_each(|save_request| save_request.since = now);
    }

    /// Returns the cut for this checkpoint, or why there is none.
    pub(in crate::shard) fn take_cut(
        &mut self,
        variables: &mut Variables,
        peers: &Peers,
        steps: &Steps,
        now: Instant,
        name: CheckpointName,
    ) -> Result<CheckpointCut, String> {
        let step = GlobalStep(name.global_step);
        if steps.counts_steps() {
            let kept = self.kept_cut.take_if(|cut| cut.step == step);
            // At the same step, a new cut also has the values that were assigned since.
            if steps.step() != step {
                let found = steps.step();
                let none =
                    || format!("it has values of step {found}, and kept none of step {step}");
                return kept.ok_or_else(none);
            }
        }
        CheckpointCut::take(variables, peers, steps, now, step)
            .ok_or_else(|| "the variables have no values".to_owned())
    }

    /// Keeps a cut of the values after this step, by order of the step owner.
    pub(in crate::shard) fn keep_cut(
        &mut self,
        variables: &mut Variables,
        peers: &Peers,
        steps: &Steps,
        now: Instant,
        step: GlobalStep,
    ) {
        if steps.counts_steps() && steps.step() == step {
            self.kept_cut = CheckpointCut::take(variables, peers, steps, now, step);
        }
    }

    /// Keeps a cut of the current values under any step.
    #[cfg(test)]
    pub(in crate::shard) fn keep_cut_as_of(
        &mut self,
        variables: &mut Variables,
        peers: &Peers,
        steps: &Steps,
        now: Instant,
        step: GlobalStep,
    ) {
        self.kept_cut = CheckpointCut::take(variables, peers, steps, now, step)
            .map(|cut| CheckpointCut { step, ..cut });
    }

    /// Begins the next requested save if none is running and all shards have applied the same
    /// steps.
    pub(in crate::shard) fn begin_requested_save(
        &mut self,
        variables: &mut Variables,
        peers: &Peers,
        steps: &mut Steps,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        let is_behind = steps.coordinator().is_some_and(|coordinator| coordinator.is_behind());
        if self.saves_a_cut || is_behind {
            return;
        }
        let Some(SaveRequest { requester, user, .. }) = self.requests.pop_front() else {
            return;
        };
        let step = steps.step();
        if steps.is_synchronous() {
            steps.shards.order_cut(out, step);
        }
        self.keep_cut(variables, peers, steps, now, step);
        self.saves_a_cut = true;
        if let Some(catalogue) = variables.store().map(|store| store.catalogue().clone()) {
            let epoch = variables.epoch;
            let order = SaverOrder::Save { requester, user, catalogue, epoch, step };
            out.push(ShardOutput::SaverOrder(order));
        }
    }
}
