//! Cuts: what a shard's part of a checkpoint is made of, which its values at one moment are.
//!
//! In asynchronous mode the step owner cuts when it orders the save, so that its part has exactly the step
//! in the checkpoint's name. Each other shard cuts when it is asked for its part. In synchronous mode all cut
//! after the same step: the step owner tells them over the connections on which it also tells what is
//! committed, at a time when all have applied that step and none can have applied the next. A shard
//! keeps its cut until it is asked for its part, and training goes on meanwhile.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::{Envelope, message};

use super::checkpoints::Asker;
use super::record::RESTORED_LIMIT;
use super::{Shard, Variables};
use crate::checkpoint::{CheckpointName, ClientWindow};
use crate::store::Image;

/// A shard's values at one moment, pinned, and what it had counted.
#[derive(Debug)]
pub(crate) struct CheckpointCut {
    /// The global step, as far as the shard knew it.
    step: GlobalStep,
    pub(super) image: Image,
    /// Set when the memory that it pins is needed.
    pub(super) memory_needed: Arc<AtomicBool>,
    pub(super) version: u64,
    pub(super) gradients: u64,
    pub(super) clients: Vec<ClientWindow>,
    since: Instant,
}

/// A checkpoint that is to be saved when the moment has come.
#[derive(Debug)]
pub(super) struct SaveRequest {
    asker: Asker,
    user: Vec<u8>,
    since: Instant,
}

/// Checkpoints that may wait for the one that is being saved.
const SAVE_REQUESTS_MAX: usize = 16;

/// How long a shard keeps a cut that it is not asked for, and a wish waits for its moment.
const CUT_WAIT_MAX: Duration = Duration::from_secs(60);

impl Shard {
    /// What is here now; for a checkpoint of a global step, which the shard need not know.
    fn cut(&mut self, now: Instant, of: GlobalStep) -> Option<CheckpointCut> {
        let step = self.step();
        let Variables::Ready(store) = &mut self.variables else { return None };
        let memory_needed = Arc::new(AtomicBool::new(false));
        Some(CheckpointCut {
            step,
            image: store.image(of.0.max(step.0).min(RESTORED_LIMIT), memory_needed.clone()),
            memory_needed,
            version: self.version,
            gradients: self.gradients,
            clients: self.replicas.windows(),
            since: now,
        })
    }

    /// What is to be written to this checkpoint, or why there is nothing.
    pub(super) fn take_cut(
        &mut self,
        now: Instant,
        name: CheckpointName,
    ) -> Result<CheckpointCut, String> {
        let step = GlobalStep(name.global_step);
        if self.counts_steps() {
            let kept = self.kept_cut.take_if(|cut| cut.step == step);
            // What is still of that step has what was assigned since, too.
            if self.step() != step {
                let found = self.step();
                let none =
                    || format!("it has values of step {found}, and kept none of step {step}");
                return kept.ok_or_else(none);
            }
        }
        self.cut(now, step).ok_or_else(|| "the variables have no values".to_owned())
    }

    /// The step owner wants what is here after this step to be kept.
    pub(super) fn keep_cut(&mut self, now: Instant, step: GlobalStep) {
        if self.counts_steps() && self.step() == step {
            self.kept_cut = self.cut(now, step);
        }
    }

    /// Whether this shard knows the step of its values. In asynchronous mode only the step owner does.
    fn counts_steps(&self) -> bool {
        self.is_synchronous() || self.owner.is_some()
    }

    /// Drops a cut and refuses saves that have waited for too long. Nothing expires on the step owner while a
    /// save is under way.
    pub(super) fn end_waits_for_cuts(&mut self, now: Instant) {
        let late = |since: Instant| now.saturating_duration_since(since) >= CUT_WAIT_MAX;
        if self.saves_a_cut {
            return;
        }
        self.kept_cut.take_if(|cut| late(cut.since));
        while self.save_requests.front().is_some_and(|save_request| late(save_request.since))
            && let Some(save_request) = self.save_requests.pop_front()
        {
            let awaited = self.awaited_step(now).unwrap_or_default();
            self.saved(
                save_request.asker,
                Err(format!("it has waited {CUT_WAIT_MAX:?} for {awaited}")),
            );
        }
    }

    /// Queues a save on the step owner. It begins when the previous save has ended and, in synchronous mode,
    /// every shard has applied the same steps.
    pub(super) fn request_save(&mut self, now: Instant, asker: Asker, user: Vec<u8>) {
        // A save that is due by itself has its turn again in its next period.
        if asker.is_due() && (self.saves_a_cut || !self.save_requests.is_empty()) {
            return;
        }
        if self.save_requests.len() == SAVE_REQUESTS_MAX {
            let error = format!("cannot save now: {SAVE_REQUESTS_MAX} saves wait already");
            return self.saved(asker, Err(error));
        }
        self.save_requests.push_back(SaveRequest { asker, user, since: now });
        self.begin_requested_save(now);
    }

    /// Has all shards cut, if there is a wish and this is the moment.
    pub(super) fn begin_requested_save(&mut self, now: Instant) {
        let is_behind = self.coordinator().is_some_and(|coordinator| coordinator.is_behind());
        if self.saves_a_cut || is_behind {
            return;
        }
        let Some(SaveRequest { asker, user, .. }) = self.save_requests.pop_front() else { return };
        let step = self.step();
        if self.is_synchronous() {
            for connection in self.parts.values().copied().collect::<Vec<u64>>() {
                let envelope = Envelope { step, restore_epoch: self.epoch, ..Envelope::default() };
                self.send(connection, envelope, message::KeepCut {}.into());
            }
        }
        self.keep_cut(now, step);
        self.saves_a_cut = true;
        self.order_save(asker, user);
    }

    /// Ends the save under way and begins the next.
    pub(super) fn end_save_of_cut(&mut self, now: Instant) {
        self.saves_a_cut = false;
        // The saver may not have asked for it.
        self.kept_cut = None;
        self.save_requests.iter_mut().for_each(|save_request| save_request.since = now);
        self.begin_requested_save(now);
    }

    /// Nothing of the past is to be saved: another restore epoch begins.
    pub(super) fn drop_cuts(&mut self) {
        self.kept_cut = None;
        self.drop_save_requests("a checkpoint is restored", |_| true);
    }

    /// An older chief's wishes are no longer carried out.
    pub(super) fn drop_save_requests_of_chiefs(&mut self, reason: &str) {
        self.drop_save_requests(reason, |asker| matches!(asker, Asker::Connection { .. }));
    }

    /// Whoever wished for a checkpoint is gone, and asks again over another connection if it is not.
    pub(super) fn drop_save_requests_of(&mut self, gone: u64) {
        self.save_requests.retain(|save_request| {
            !matches!(save_request.asker, Asker::Connection { connection, .. } if connection == gone)
        });
    }

    fn drop_save_requests(&mut self, reason: &str, which: impl Fn(&Asker) -> bool) {
        for save_request in std::mem::take(&mut self.save_requests) {
            match which(&save_request.asker) {
                // It has its turn again in its next period.
                true if save_request.asker.is_due() => {}
                true => self.saved(save_request.asker, Err(reason.to_owned())),
                false => self.save_requests.push_back(save_request),
            }
        }
    }

    /// Keeps what is here for a checkpoint of any step.
    #[cfg(test)]
    pub(super) fn keep_cut_as_of(&mut self, now: Instant, step: GlobalStep) {
        self.kept_cut = self.cut(now, step).map(|cut| CheckpointCut { step, ..cut });
    }
}
