//! The pushes under way, and the outcomes of the last ones.

mod push;

#[cfg(test)]
use std::collections::BTreeSet;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{GlobalStep, Sequence, ShardId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Grant, Message, Outcome, PushState, Refusal};

use super::PushOrder;
use super::links::{LinkFault, SessionLinks};
use super::membership::{Membership, refused};
use crate::error::Error;
use crate::gradients::gradient_buffer::GradientBuffer;
use crate::gradients::parts::OutgoingPart;
use crate::gradients::staged_parts::StagedParts;
use push::{PendingPush, SharePhase};

/// How many settled pushes the session remembers.
const SETTLED_MAX: usize = WINDOW as usize;

/// All pending pushes, in the order of their numbers, and the outcomes of the last settled ones.
///
/// Invariants:
///
/// - A pending push keeps its number and its bytes until it is settled: by every shard on which it
///   has a share, or in synchronous mode by the step owner.
/// - A gradient has a share on every shard of the plan, if an empty one.
/// - A number is given once. It is pending, settled, withdrawn or forgotten.
/// - At most [`WINDOW`] numbers lie between the oldest pending push and the next one.
/// - A gradient in a push buffer is kept while a shard may still read it.
#[derive(Debug)]
pub(super) struct PendingPushes {
    pending: BTreeMap<Sequence, PendingPush>,
    /// The outcomes of the last pushes, oldest first.
    settled: VecDeque<(Sequence, Result<Outcome, Error>)>,
    next_sequence: u64,
    /// Gradients in push buffers that shards may still read: pushes accepted for these steps.
    applying: Vec<(GlobalStep, Arc<GradientBuffer>)>,
}

/// What an answer changes.
#[derive(Debug)]
pub(super) enum PushEvent {
    /// Nothing: the session does not know the push any more.
    Ignored,
    /// More can be sent, or the push may be settled.
    Advanced,
    /// The step owner did not decide in time about a push completed then. It waits for `awaited`;
    /// its policy ends the wait if the step has been `short` of replicas.
    Undecided { completed_at: Option<Instant>, short: Option<Duration>, awaited: Detail },
}

/// A push that has been settled.
#[derive(Debug)]
pub(super) struct PushSettlement {
    pub(super) result: Result<Outcome, Error>,
    /// The token that the push did not spend.
    pub(super) unspent: Option<Grant>,
}

impl PendingPushes {
    pub(super) fn new() -> PendingPushes {
        PendingPushes {
            pending: BTreeMap::new(),
            settled: VecDeque::new(),
            next_sequence: 1,
            applying: Vec::new(),
        }
    }

    pub(super) fn first(&self) -> Option<Sequence> {
        self.pending.first_key_value().map(|(&sequence, _)| sequence)
    }

    /// Returns the next push. A number instead of an iterator: each step may settle pushes.
    pub(super) fn after(&self, sequence: Sequence) -> Option<Sequence> {
        self.pending.range(Sequence(sequence.0 + 1)..).next().map(|(&next, _)| next)
    }

    /// Returns whether a new push would be too far ahead of the oldest pending one.
    pub(super) fn window_is_full(&self) -> bool {
        self.first().is_some_and(|oldest| self.next_sequence - oldest.0 >= WINDOW)
    }

    /// Gives a push its sequence number and keeps it until it is settled.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        order: PushOrder,
        complete: bool,
        membership: &Membership,
        links: &mut SessionLinks,
    ) -> Sequence {
        let sequence = Sequence(self.next_sequence);
        self.next_sequence += 1;
        let PushOrder { operation, grant, effect, read, scattered, staged, parts } = order;
        let is_gradient = operation == (Operation::Gradient {});
        let mut push = PendingPush {
            sequence,
            operation,
            synchronous: is_gradient && membership.synchronous,
            follows_owner: is_gradient && !membership.synchronous,
            grant,
            effect,
            read,
            shares: Vec::new(),
            complete,
        };
        push.add_parts(now, staged.as_ref(), parts, links);
        if let Some(scattered) = scattered {
            push.add_scattered(now, &scattered, links);
        }
        if is_gradient {
            // The owner counts the step when it applies its share, even an empty one. So does every
            // shard count the gradient: what depends on the count, such as Adam's bias correction,
            // does not depend on the placement.
            push.share(links.to(now, membership.owner()));
            for &shard in membership.plan().into_iter().flat_map(|plan| plan.shards()) {
                push.share(links.to(now, shard));
            }
        }
        self.pending.insert(sequence, push);
        sequence
    }

    /// Adds parts to a push that is not complete.
    pub(super) fn add_parts(
        &mut self,
        now: Instant,
        sequence: Sequence,
        staged: Option<&Arc<StagedParts>>,
        parts: Vec<(ShardId, Vec<OutgoingPart>)>,
        links: &mut SessionLinks,
    ) {
        if let Some(push) = self.pending.get_mut(&sequence) {
            push.add_parts(now, staged, parts, links);
        }
    }

    /// Completes a push: no more parts will come.
    pub(super) fn complete(&mut self, sequence: Sequence) {
        if let Some(push) = self.pending.get_mut(&sequence) {
            push.complete = true;
        }
    }

    /// Sends what can be sent of a push now. Returns whether that requests a token, which it does
    /// only if it `may_prefetch`. `remaining_ms` is the longest time that an operation still waits
    /// for a push.
    pub(super) fn send(
        &mut self,
        now: Instant,
        sequence: Sequence,
        links: &mut SessionLinks,
        may_prefetch: bool,
        remaining_ms: impl Fn(Sequence) -> u32,
    ) -> bool {
        let Some(push) = self.pending.get_mut(&sequence) else { return false };
        let mut prefetches = false;
        for index in 0..push.shares.len() {
            prefetches |= push.send_share(now, index, links, may_prefetch, &remaining_ms);
        }
        prefetches
    }

    /// Handles the answer to a reservation or to the parts of a push.
    pub(super) fn answered(
        &mut self,
        sequence: Sequence,
        link: usize,
        message: Message,
        links: &mut SessionLinks,
    ) -> Result<PushEvent, LinkFault> {
        let is_owner = links.is_owner(link);
        let Some(push) = self.pending.get_mut(&sequence) else {
            if let Message::Reserved(reserved) = message {
                links[link].push_slot = reserved.push_slot;
            }
            return Ok(PushEvent::Advanced);
        };
        let synchronous = push.synchronous;
        let has_effect = push.effect.is_some();
        let is_allowed = |outcome| is_allowed_outcome(outcome, synchronous, has_effect, is_owner);
        let Some(share) = push.share_on(link) else { return Ok(PushEvent::Ignored) };
        let awaits_decision = synchronous && is_owner && share.phase == SharePhase::Sent;
        match message {
            Message::Reserved(reserved) if share.phase == SharePhase::Reserving => {
                share.push_slot = reserved.push_slot;
                share.request = None;
                share.phase = SharePhase::Sending;
            }
            Message::PushAnswer(answer)
                if share.awaits(answer.outcome) && is_allowed(answer.outcome) =>
            {
                share.phase = SharePhase::Settled(Ok(answer.outcome));
            }
            Message::Refused(refused) => match refused.refusal {
                Refusal::Deadline { awaited, .. } if awaits_decision => {
                    let completed_at = share.undecided();
                    return Ok(PushEvent::Undecided { completed_at, short: None, awaited });
                }
                Refusal::ReplicasAbsent { waited_ms, awaited } if awaits_decision => {
                    let completed_at = share.undecided();
                    let short = Some(Duration::from_millis(waited_ms));
                    return Ok(PushEvent::Undecided { completed_at, short, awaited });
                }
                // The slot belongs to another push: reserve another one and send all parts again. A
                // reservation answered in the meantime may have returned the same slot. Parts sent
                // into that one would be taken for the rest of the refused parts, and be skipped.
                Refusal::PushSlotTaken { push_slot } => {
                    // A slot of a push buffer would be refused again at once: send the parts
                    // instead.
                    share.in_push_buffer =
                        share.in_push_buffer.take().filter(|_| !share.uses_push_buffer);
                    share.start_over();
                    if links[link].push_slot == push_slot {
                        links[link].push_slot = 0;
                    }
                }
                refusal => share.phase = SharePhase::Settled(Err(refusal)),
            },
            message => return Err(LinkFault::unexpected(&message)),
        }
        Ok(PushEvent::Advanced)
    }

    /// Handles what a shard says it has received of a push.
    pub(super) fn state_answered(
        &mut self,
        sequence: Sequence,
        link: usize,
        message: Message,
        links: &SessionLinks,
    ) -> Result<PushEvent, LinkFault> {
        let is_owner = links.is_owner(link);
        let Some(push) = self.pending.get_mut(&sequence) else { return Ok(PushEvent::Ignored) };
        let synchronous = push.synchronous;
        let has_effect = push.effect.is_some();
        let Some(share) = push.share_on(link) else { return Ok(PushEvent::Ignored) };
        match message {
            Message::OutcomeIs(answer) => match answer.state {
                PushState::Settled { outcome } => {
                    if !is_allowed_outcome(outcome, synchronous, has_effect, is_owner) {
                        share.phase = SharePhase::InDoubt;
                        return Err(LinkFault::unexpected(&Message::OutcomeIs(answer)));
                    }
                    share.phase = SharePhase::Settled(Ok(outcome));
                }
                PushState::TooOld { oldest } => {
                    let oldest = Sequence(oldest);
                    let newest = Sequence(u64::MAX);
                    let refusal = Refusal::Window { sequence, oldest, newest };
                    share.phase = SharePhase::Settled(Err(refusal));
                }
                // The push slot is still reserved there. A whole share needs no bytes again:
                // repeating the last part asks for the outcome.
                PushState::Receiving { bytes } => {
                    let has_all = share.whole && bytes == share.bytes();
                    share.whole = has_all;
                    share.sent = if has_all { share.parts.len() } else { 0 };
                    share.phase = SharePhase::Sending;
                }
                PushState::Unknown {} => share.start_over(),
            },
            Message::Refused(refused) => {
                share.phase = SharePhase::Settled(Err(refused.refusal));
            }
            message => return Err(LinkFault::unexpected(&message)),
        }
        Ok(PushEvent::Advanced)
    }

    /// Updates all pushes after the loss of a connection: frames in flight are lost, also parts
    /// that expect no answer.
    pub(super) fn lost(&mut self, link: usize) {
        self.pending.values_mut().filter_map(|push| push.share_on(link)).for_each(|of| of.lost());
    }

    /// Settles a push if every shard has settled it, or the step owner has for all of them.
    pub(super) fn settle(
        &mut self,
        now: Instant,
        sequence: Sequence,
        links: &mut SessionLinks,
    ) -> Option<PushSettlement> {
        if !self.pending.get(&sequence)?.is_decided(links.owner()) {
            return None;
        }
        let mut push = self.pending.remove(&sequence)?;
        push.withdraw_shares(now, links);
        let settled = result_of(&push, links);
        if let Ok(Outcome::Accepted { step }) = settled.result {
            let in_push_buffers =
                push.shares.iter_mut().filter_map(|share| share.in_push_buffer.take());
            self.applying.extend(in_push_buffers.map(|in_buffer| (step, in_buffer.buffer)));
        }
        if self.settled.len() == SETTLED_MAX {
            self.settled.pop_front();
        }
        self.settled.push_back((sequence, settled.result.clone()));
        Some(settled)
    }

    /// Returns the outcome of a push; `None` while it is pending. The session remembers the last
    /// [`SETTLED_MAX`].
    pub(super) fn result(&self, sequence: Sequence) -> Option<Result<Outcome, Error>> {
        let settled = self.settled.iter().find(|(settled, _)| *settled == sequence);
        match settled {
            Some((_, result)) => Some(result.clone()),
            None if self.pending.contains_key(&sequence) => None,
            None => Some(Err(Error::UnknownPush { sequence })),
        }
    }

    /// Withdraws a push whose caller has given up, if no shard can hold it whole. Otherwise it
    /// continues: a push counted by one shard must be counted by all. Returns its unspent token.
    pub(super) fn withdraw(
        &mut self,
        now: Instant,
        sequence: Sequence,
        links: &mut SessionLinks,
    ) -> Option<Grant> {
        if self.pending.get(&sequence)?.may_be_whole() {
            return None;
        }
        let push = self.pending.remove(&sequence)?;
        push.withdraw_shares(now, links);
        push.grant
    }

    /// Returns the shards whose answers a push waits for now; `None` if it is not pending.
    pub(super) fn awaited(
        &self,
        now: Instant,
        sequence: Sequence,
        links: &SessionLinks,
    ) -> Option<Vec<usize>> {
        let push = self.pending.get(&sequence)?;
        let is_awaited = |link: &usize| {
            // The owner may wait for the share of a shard that is cut off.
            push.may_complete_on(*link, links) || links[*link].holds_up(now)
        };
        Some(push.unsettled().filter(is_awaited).collect())
    }

    /// Returns whether a shard still has to count a push that another shard may have counted.
    pub(super) fn must_complete_on(&self, link: usize) -> bool {
        let blocks =
            |push: &PendingPush| push.must_complete() && push.unsettled().any(|l| l == link);
        self.pending.values().any(blocks)
    }

    /// Asks about the undecided pushes: once for each command, so that a step owner that answers at
    /// once is not asked in a loop.
    pub(super) fn query_undecided(&mut self) {
        let shares = self.pending.values_mut().flat_map(|push| &mut push.shares);
        for share in shares.filter(|share| share.phase == SharePhase::Undecided) {
            share.phase = SharePhase::InDoubt;
        }
    }

    /// Releases the gradients of steps before this one: a synchronous step begins only after every
    /// shard has applied the previous ones.
    pub(super) fn step_begins(&mut self, step: GlobalStep) {
        self.applying.retain(|(applied, _)| *applied >= step);
    }

    /// Ends all pushes: the session has failed. Their push slots are never reused, because a shard
    /// may still read them, and callers may still hold the push buffers.
    pub(super) fn give_up(&mut self) {
        for push in std::mem::take(&mut self.pending).into_values() {
            let in_push_buffers = push.shares.into_iter().filter_map(|share| share.in_push_buffer);
            self.applying
                .extend(in_push_buffers.map(|in_buffer| (GlobalStep(u64::MAX), in_buffer.buffer)));
        }
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        let oldest = self.first().map_or(self.next_sequence, |oldest| oldest.0);
        assert!(self.next_sequence - oldest <= WINDOW && self.settled.len() <= SETTLED_MAX);
        for (&sequence, push) in &self.pending {
            assert!(push.sequence == sequence && sequence.0 < self.next_sequence);
            assert!(self.settled.iter().all(|(settled, _)| *settled != sequence));
            let links: BTreeSet<usize> = push.shares.iter().map(|share| share.link).collect();
            assert_eq!(links.len(), push.shares.len(), "one share on each shard");
            for share in &push.shares {
                assert!(share.sent <= share.parts.len() + 1, "{share:?}");
                assert!(share.phase != SharePhase::Sending || share.push_slot != 0, "{share:?}");
            }
        }
    }
}

/// Merges the answers of all shards: the first refusal, or the owner's outcome, which has the step.
/// Without a share of the owner, the first outcome.
fn result_of(push: &PendingPush, links: &SessionLinks) -> PushSettlement {
    let owner = links.owner();
    let mut result = None;
    for share in &push.shares {
        match &share.phase {
            SharePhase::Settled(Err(refusal)) => {
                let token_is_gone = matches!(refusal, Refusal::Token { .. });
                let owner_spent_it = push.shares.iter().any(|share| {
                    Some(share.link) == owner && matches!(share.phase, SharePhase::Settled(Ok(_)))
                });
                let unspent = push.grant.filter(|_| !token_is_gone && !owner_spent_it);
                let error = refused("push", links[share.link].shard, refusal.clone());
                return PushSettlement { result: Err(error), unspent };
            }
            SharePhase::Settled(Ok(outcome)) if result.is_none() || Some(share.link) == owner => {
                result = Some(*outcome);
            }
            _ => {}
        }
    }
    PushSettlement { result: result.ok_or(Error::EmptyPush), unspent: None }
}

/// Returns whether a shard may send this outcome. In synchronous mode the step owner decides and
/// the other shards hold.
fn is_allowed_outcome(
    outcome: Outcome,
    synchronous: bool,
    has_effect: bool,
    is_owner: bool,
) -> bool {
    match outcome {
        Outcome::Repeated {} => has_effect && !synchronous,
        Outcome::Applied { .. } => !synchronous,
        Outcome::Accepted { .. } => synchronous && is_owner,
        Outcome::Held {} => synchronous && !is_owner,
        Outcome::Stale { .. } | Outcome::Withdrawn {} => true,
    }
}

#[cfg(test)]
mod tests;
