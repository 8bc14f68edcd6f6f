//! The update by one push, part by part as it arrives or by a job once it is whole in the inbox, and
//! its outcome.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message::{Operation, PushAnswer};
use pushpull_common::protocol::{Envelope, Outcome, Refusal};
use pushpull_common::tensor::DType;
use pushpull_optim::volatile::Volatile;
use pushpull_store::change::{NoFreeBlock, Stalled};
use pushpull_store::commit::Journal;
use pushpull_store::store::Store;
use pushpull_store::testing::planted::Bug;

use super::applier::Applier;
use super::intake::Intake;
use super::output::ShardOutput;
use super::peers::client_registry::ClientPresence;
use super::pulls::Pulls;
use super::scan::{NonFiniteScan, ScanningInput};
use super::staleness::StalenessAdjustment;
use super::steps::Steps;
use super::update::{
    DenseInput, InputRange, InputValues, Update, UpdateProgress, UpdatePushes, UpdateTarget,
};
use super::variables::Variables;
use super::{Shard, VariablesState};
use crate::client_key::ClientKey;
use crate::event::Event;
use crate::inbox::{PushArrival, PushSource, PushValues};

/// A push that is applied as its parts arrive.
#[derive(Debug)]
pub(super) struct StreamingApply {
    push_slot: u32,
    /// The update. Its staleness adjustment is decided at the first part.
    update: Update,
}

/// A part of a push that has just arrived in its slot.
pub(super) struct ArrivedPart<'a> {
    pub(super) push_slot: u32,
    pub(super) range: &'a Range<u64>,
    /// Whether it may be the first of a push that is applied as it arrives.
    pub(super) may_begin: bool,
}

/// A push that is whole in the inbox and is being applied.
#[derive(Debug)]
pub(super) struct PushJob {
    pub(super) push_slot: u32,
    update: Update,
    /// Whether a [`ScanJob`](super::scan::ScanJob) has scanned its ranges in a push buffer.
    /// Otherwise they are scanned as they are applied.
    is_scanned: bool,
    /// Why the push is refused, if it is.
    pub(super) refusal: Option<Refusal>,
}

/// The values of one push.
pub(super) struct PushInput<'a> {
    source: PushSource<'a>,
    /// Whether the values that were sent, and those in a push buffer, are scanned.
    scans_own: bool,
    scans_shared: bool,
}

impl<'a> PushInput<'a> {
    /// Returns the values at the start of a range, as far as they are in one memory.
    pub(super) fn next(
        &self,
        range: Range<u64>,
        dtype: DType,
        budget: u64,
        scan: Option<NonFiniteScan<'a>>,
    ) -> InputRange<'a> {
        let range = range.start..range.end.min(range.start.saturating_add(budget));
        let (values, end) = match self.source.values(range.clone()) {
            Some((values, end)) => (Some(values), end),
            None => (None, range.end),
        };
        let scanning = |values, scan| {
            InputValues::Scanned(ScanningInput::new(values, range.start, dtype, scan))
        };
        let values = values.map(|values| match values {
            PushValues::Own(bytes) if self.scans_own => scanning(Volatile::of(bytes), scan),
            PushValues::Own(bytes) => InputValues::Bytes(bytes),
            PushValues::Shared(shared) => scanning(shared, scan.filter(|_| self.scans_shared)),
        });
        InputRange { end, read: end - range.start, values }
    }
}

impl Applier {
    /// Applies a part of a push on arrival, while it is in cache. Returns whether it was applied.
    ///
    /// If the part cannot be applied now, the inbox still has it, and the push is applied from
    /// there once it is whole.
    ///
    /// # Errors
    /// If the scan or the overflow check refuses the push.
    pub(super) fn apply_on_arrival(
        &mut self,
        intake: &Intake,
        variables: &mut Variables,
        steps: &Steps,
        pulls: &Pulls,
        part: ArrivedPart<'_>,
    ) -> Result<bool, Refusal> {
        let ArrivedPart { push_slot, range, may_begin } = part;
        let (Some(inbox), true) = (&intake.inbox, variables.is_ready()) else { return Ok(false) };
        if steps.is_synchronous() {
            // Gradients wait for their step, and other pushes are small.
            return Ok(false);
        }
        let is_current = |streaming: &StreamingApply| streaming.push_slot == push_slot;
        if variables.defers(range) {
            // The row ids, or the sums of a two-pass rule, are known only once the push is whole.
            if self.streaming.as_ref().is_some_and(is_current) {
                self.abandon_streaming(variables);
            }
            return Ok(false);
        }
        if may_begin && self.streaming.is_none() && self.jobs.is_empty() {
            let (owner, last_pulls) = (steps.asynchronous_tokens(), &pulls.last_pulls);
            let adjustment =
                StalenessAdjustment::of(push_slot, inbox, variables, owner, last_pulls);
            variables.discard_change();
            let update = Update::new(adjustment);
            self.streaming = Some(StreamingApply { push_slot, update });
        }
        let streaming = self.streaming.as_mut().filter(|streaming| is_current(streaming));
        let (Some(StreamingApply { update, .. }), Some(push), Some(source)) =
            (streaming, inbox.arrival(push_slot), inbox.source(push_slot))
        else {
            return Ok(false);
        };
        let (operation, at, scratch) = (push.operation, update.adjustment.at, &mut self.scratch);
        let input = PushInput { source, scans_own: true, scans_shared: true };
        let Some(mut target) = UpdateTarget::new(variables, operation, at, scratch) else {
            return Ok(false);
        };
        match update.apply_part(&mut target, DenseInput::Push(&input), range) {
            Ok(UpdateProgress::Done) => Ok(true),
            Ok(UpdateProgress::Unfinished) => Ok(false),
            Ok(UpdateProgress::Refused(refusal)) => {
                self.abandon_streaming(variables);
                Err(refusal)
            }
            Err(NoFreeBlock) => {
                self.abandon_streaming(variables);
                Ok(false)
            }
        }
    }

    fn abandon_streaming(&mut self, variables: &mut Variables) {
        self.streaming = None;
        variables.discard_change();
    }

    /// Discards the change of a push that was dropped before it was whole.
    pub(super) fn drop_stale_streaming(&mut self, intake: &Intake, variables: &mut Variables) {
        let Some(StreamingApply { push_slot, .. }) = self.streaming else { return };
        let inbox = intake.inbox.as_ref();
        if inbox.is_none_or(|inbox| inbox.arrival(push_slot).is_none()) {
            self.abandon_streaming(variables);
        }
    }
}

impl Variables {
    /// Returns whether a range is changed only once its push is whole: it has rows, or its rule
    /// needs sums over whole variables.
    fn defers(&self, range: &Range<u64>) -> bool {
        let has_index =
            |store: &Store| store.layout().touched_by_index(range.clone()).next().is_some();
        self.fused_ranges.within(range.clone()).any(|fused_range| fused_range.is_deferred)
            || self.store().is_some_and(has_index)
    }
}

impl PushJob {
    /// Creates the job for the push in this slot.
    pub(super) fn new(push_slot: u32, is_scanned: bool) -> PushJob {
        PushJob { push_slot, update: Update::default(), is_scanned, refusal: None }
    }

    /// Returns whether the job has begun to change values.
    pub(super) fn has_begun(&self) -> bool {
        self.update.has_begun()
    }

    /// Applies a slice; returns whether the job is done.
    pub(super) fn slice(
        &mut self,
        applier: &mut Applier,
        intake: &Intake,
        variables: &mut Variables,
        steps: &Steps,
        pulls: &Pulls,
        journal: &mut Journal,
    ) -> Result<bool, Stalled> {
        let push_slot = self.push_slot;
        if !self.has_begun()
            && let Some(streaming) =
                applier.streaming.take().filter(|streaming| streaming.push_slot == push_slot)
        {
            // The push was applied as it arrived, and nothing was committed since.
            self.update = streaming.update;
            return Ok(true);
        }
        let Some(inbox) = &intake.inbox else { return Ok(true) };
        let (Some(push), Some(source)) = (inbox.arrival(push_slot), inbox.source(push_slot)) else {
            return Ok(true);
        };
        let (operation, push_slots) = (push.operation, &[push_slot][..]);
        let pushes = UpdatePushes { inbox, push_slots, factors: &[], operation };
        if !self.has_begun() {
            let step = steps.made_step(variables, push.step).0;
            let (owner, last_pulls) = (steps.asynchronous_tokens(), &pulls.last_pulls);
            let adjustment =
                StalenessAdjustment::of(push_slot, inbox, variables, owner, last_pulls);
            self.update.begin(applier, variables, journal, pushes, adjustment, step)?;
        }
        // Parts that were sent were scanned on arrival.
        let (scans_own, scans_shared) = (false, !self.is_scanned);
        let input = PushInput { source, scans_own, scans_shared };
        match self.update.slice(applier, variables, pushes, DenseInput::Push(&input))? {
            UpdateProgress::Unfinished => return Ok(false),
            UpdateProgress::Done => {}
            UpdateProgress::Refused(refusal) => self.refusal = Some(refusal),
        }
        Ok(true)
    }
}

impl Shard {
    /// Drops a complete gradient if it has become too old since to be applied. Returns whether it
    /// was dropped.
    pub(super) fn drop_if_too_old(&mut self, now: Instant, push_slot: u32) -> bool {
        let (Some(owner), Some(inbox)) = (&self.steps.owner, &mut self.intake.inbox) else {
            return false;
        };
        let too_old = inbox.arrival(push_slot).is_some_and(|push| {
            let tokens = owner.asynchronous_tokens();
            push.operation == Operation::Gradient {}
                && tokens.is_some_and(|tokens| tokens.is_too_old(push.token, push.step))
        });
        if !too_old {
            return false;
        }
        let Some((client, push)) = inbox.take(push_slot) else { return false };
        let outcome = self.steps.stale_outcome(push.token);
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        true
    }

    /// Counts an update that made values infinite or NaN, and reports the first.
    pub(super) fn count_overflow(&mut self) {
        if let Some(first) = self.variables.count_overflow() {
            let shard = self.id;
            self.out.push(ShardOutput::Event(Event::ValueOverflowed { shard, first }));
        }
    }

    /// Settles a push that has been applied, frees its slot, and answers.
    pub(super) fn push_applied(&mut self, now: Instant, job: PushJob) {
        let Some(inbox) = &mut self.intake.inbox else { return };
        let Some((client, push)) = inbox.take(job.push_slot) else {
            return;
        };
        self.count_overflow();
        if !self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.variables.publish(&mut self.files);
        }
        self.variables.version += 1;
        let gradient = push.operation == Operation::Gradient {};
        let mut staleness = 0;
        if gradient {
            self.variables.gradients += 1;
            self.counters.gradients_applied.add(1);
            debug_assert_eq!(
                job.update.adjustment.at.count, self.variables.gradients,
                "no gradient was applied in between"
            );
            job.update.adjustment.count(&self.counters);
            self.variables.add_gradient(push.extents.ranges());
            self.report_untrained();
            if let Some(tokens) = self.steps.asynchronous_tokens_mut() {
                staleness = tokens.spend(push.token, push.step);
                debug_assert_eq!(
                    job.update.adjustment.staleness,
                    Some(staleness),
                    "the staleness has changed since the push began"
                );
                self.counters.global_step.set(tokens.ledger.steps.step);
                self.stamp_answers();
            }
        } else {
            self.counters.assigns_applied.add(1);
            if let VariablesState::Declared(store) = &self.variables.state {
                for extent in push.extents.ranges() {
                    let stored = store.layout().within(extent.clone()).filter(|p| !p.is_table());
                    self.variables.assigned.extend(stored.map(|partition| partition.id));
                }
            }
        }
        if let Some(call) = &push.call {
            self.steps.calls.settle(call);
        }
        let outcome = Outcome::Applied {
            version: self.variables.version,
            step: self.steps.step(),
            staleness,
        };
        self.applier.rows.clear();
        if let Some(client) = client {
            self.settle_and_answer(now, client, &push, outcome);
        }
        if self.config.planted.has(Bug::SequenceBeforeFlip) {
            self.persist();
            self.variables.publish(&mut self.files);
        }
    }

    /// Settles a push in its client's window, and only then acknowledges it.
    pub(super) fn settle_and_answer(
        &mut self,
        now: Instant,
        client: ClientKey,
        push: &PushArrival,
        outcome: Outcome,
    ) {
        let entry = self.peers.registry.client_mut(client);
        let is_applied = matches!(outcome, Outcome::Applied { .. });
        // A call has a window of its own, and is executed again until it has settled everywhere.
        let is_audited = push.operation == (Operation::Gradient {}) && push.call.is_none();
        let token = if is_applied && is_audited { push.token } else { TokenId(0) };
        entry.window.settle_under(token, push.sequence, outcome);
        if push.operation == (Operation::Gradient {}) {
            entry.gradient_settled(now);
        }
        let (Some(connection), Some(whole)) = (entry.connection, push.whole) else {
            return;
        };
        if whole.connection != connection {
            // The request came over a connection that has ended. A repeated request is answered.
            return;
        }
        let present = entry.presence == ClientPresence::Present;
        let (next, ended) = match whole.next && present {
            true => self.steps.next_token(&mut self.peers, now, client),
            false => (None, None),
        };
        let push_slot =
            if present { self.intake.free_push_slot(&self.peers, now, client) } else { 0 };
        let answer = PushAnswer { outcome, duplicate: false, next, ended, push_slot };
        let (request, sequence) = (whole.request, push.sequence);
        let request = Envelope { request, sequence, ..Envelope::default() };
        self.out.answer(connection, request, answer.into());
    }
}
