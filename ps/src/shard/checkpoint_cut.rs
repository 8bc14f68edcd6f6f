//! Checkpoint cuts: the pinned values that a shard writes to a checkpoint.
//!
//! In asynchronous mode the step owner cuts when it orders the save, so that its part has exactly
//! the step in the checkpoint's name. Every other shard cuts when its part is requested.
//!
//! In synchronous mode all shards cut after the same step. The step owner sends `KeepCut` over the
//! connections that also carry commits, when all shards have applied that step and none can have
//! applied the next. A shard keeps its cut until its part is requested, and training continues
//! meanwhile.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::{Envelope, message};
use pushpull_store::store::StoreImage;

use super::checkpoints::{SaveRequester, SaverOrder, ShardCheckpoints};
use super::output::{Outputs, ShardOutput};
use super::peers::Peers;
use super::record::RESTORED_LIMIT;
use super::steps::Steps;
use super::variables::Variables;
use super::{Shard, VariablesState};
use crate::checkpoint::{CheckpointName, ClientWindow};

/// The values of a shard at one moment, pinned, with its counts.
#[derive(Debug)]
pub(crate) struct CheckpointCut {
    /// The global step, as the shard knew it.
    step: GlobalStep,
    pub(super) image: StoreImage,
    /// Set when the memory that the cut pins is needed.
    pub(super) memory_needed: Arc<AtomicBool>,
    pub(super) version: u64,
    pub(super) gradients: u64,
    pub(super) clients: Vec<ClientWindow>,
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
            since: now,
        })
    }
}

/// A queued request to save a checkpoint.
#[derive(Debug)]
pub(super) struct SaveRequest {
    requester: SaveRequester,
    user: Vec<u8>,
    since: Instant,
}

/// The most save requests that wait for the running save.
const SAVE_REQUESTS_MAX: usize = 16;

/// How long a shard keeps a cut that is not requested, and how long a save request waits to begin.
const CUT_WAIT_MAX: Duration = Duration::from_secs(60);

impl Shard {
    /// Drops a cut and refuses saves that have waited for too long. Nothing expires on the step
    /// owner while a save is running.
    pub(super) fn expire_cuts(&mut self, now: Instant) {
        let expired = |since: Instant| now.saturating_duration_since(since) >= CUT_WAIT_MAX;
        if self.checkpoints.saves_a_cut {
            return;
        }
        self.checkpoints.kept_cut.take_if(|cut| expired(cut.since));
        while self
            .checkpoints
            .requests
            .front()
            .is_some_and(|save_request| expired(save_request.since))
            && let Some(save_request) = self.checkpoints.requests.pop_front()
        {
            let awaited = self.awaited_step(now).unwrap_or_default();
            self.checkpoints.saved(
                &mut self.out,
                save_request.requester,
                Err(format!("it has waited {CUT_WAIT_MAX:?} for {awaited}")),
            );
        }
    }
}

impl ShardCheckpoints {
    /// Drops the save requests of a connection that has ended. Its chief requests them again over
    /// another one.
    pub(super) fn drop_save_requests_of(&mut self, ended: u64) {
        self.requests.retain(|save_request| {
            !matches!(save_request.requester, SaveRequester::Connection { connection, .. } if connection == ended)
        });
    }

    fn drop_save_requests(
        &mut self,
        out: &mut Outputs,
        reason: &str,
        which: impl Fn(&SaveRequester) -> bool,
    ) {
        for save_request in std::mem::take(&mut self.requests) {
            match which(&save_request.requester) {
                // A periodic save is repeated in its next period.
                true if save_request.requester.is_periodic() => {}
                true => self.saved(out, save_request.requester, Err(reason.to_owned())),
                false => self.requests.push_back(save_request),
            }
        }
    }

    /// Drops all cuts and save requests, because another restore epoch begins.
    pub(super) fn drop_cuts(&mut self, out: &mut Outputs) {
        self.kept_cut = None;
        self.drop_save_requests(out, "a checkpoint is restored", |_| true);
    }

    /// Drops the save requests of an older chief.
    pub(super) fn drop_save_requests_of_chiefs(&mut self, out: &mut Outputs, reason: &str) {
        self.drop_save_requests(out, reason, |requester| {
            matches!(requester, SaveRequester::Connection { .. })
        });
    }

    /// Queues a save on the step owner. It begins when the previous save has ended and, in
    /// synchronous mode, every shard has applied the same steps.
    pub(super) fn request_save(
        &mut self,
        out: &mut Outputs,
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
            return self.saved(out, requester, Err(error));
        }
        self.requests.push_back(SaveRequest { requester, user, since: now });
    }

    /// Ends the running save. The next may begin.
    pub(super) fn end_save_of_cut(&mut self, now: Instant) {
        self.saves_a_cut = false;
        // The saver may not have requested it.
        self.kept_cut = None;
        self.requests.iter_mut().for_each(|save_request| save_request.since = now);
    }

    /// Returns the cut for this checkpoint, or why there is none.
    pub(super) fn take_cut(
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
    pub(super) fn keep_cut(
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
    pub(super) fn keep_cut_as_of(
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
    pub(super) fn begin_requested_save(
        &mut self,
        variables: &mut Variables,
        peers: &Peers,
        steps: &Steps,
        out: &mut Outputs,
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
            for connection in steps.shards.connections() {
                let envelope = out.stamped(Envelope::default());
                out.send(connection, envelope, message::KeepCut {}.into());
            }
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
