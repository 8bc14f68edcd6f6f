//! The intake of pushes: push slots, parts on their way into them, and buffers for bodies.

pub(super) mod encoded_parts;
pub(super) mod incoming_push;
mod shared_parts;

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::ids::{Sequence, TokenId};
use pushpull_common::protocol::message::{Operation, OutcomeIs, Reserved};
use pushpull_common::protocol::{Envelope, Outcome, PushState, Refusal};
use pushpull_store::testing::planted::Bug;

use super::buffer_pool::BufferPool;
use super::output::ShardOutputs;
use super::peers::Peers;
use super::peers::client_registry::ClientPresence;
use super::peers::parked_requests::{ParkedRequest, WaitReason};
use super::peers::peer_request::PeerRequest;
use super::steps::Steps;
use crate::aggregate::current_step::PerPush;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::inbox::{Inbox, PendingAnswer};
use crate::metrics::Counters;
use incoming_push::IncomingPart;

/// The pushes that a shard is receiving or holds.
///
/// Invariants: a push is whole or belongs to a client with a connection. No token has two whole
/// pushes.
#[derive(Debug)]
pub(super) struct Intake {
    pub(super) config: Arc<PsConfig>,
    pub(super) counters: Arc<Counters>,
    /// `None` while no variables are declared.
    pub(super) inbox: Option<Inbox>,
    /// The number of the first push slot of the next inbox.
    pub(super) next_push_slot: u32,
    /// Pooled buffers for bodies.
    pub(super) buffer_pool: BufferPool,
}

impl Intake {
    pub(super) fn new(config: Arc<PsConfig>, counters: Arc<Counters>) -> Intake {
        Intake {
            config,
            counters,
            inbox: None,
            next_push_slot: 1,
            buffer_pool: BufferPool::default(),
        }
    }

    /// Returns the squared norm on this shard of the gradient in a push slot. `None` while it is
    /// being computed or scanned. 0 without clipping.
    pub(super) fn squares_of(&self, push_slot: u32) -> Option<f64> {
        let push = self.inbox.as_ref()?.arrival(push_slot)?;
        match self.config.mode.clip_by_global_norm() {
            None => (!push.scanning).then_some(0.0),
            Some(_) => push.squares,
        }
    }

    /// Returns whether the push of a token is complete in the inbox. Then it belongs to the server.
    pub(super) fn is_whole(&self, token: TokenId) -> bool {
        self.inbox.as_ref().is_some_and(|inbox| inbox.whole_tokens().any(|other| other == token))
    }

    /// Returns the tokens whose pushes are complete in the inbox.
    pub(super) fn whole_tokens(&self) -> PerPush<TokenId> {
        self.inbox.iter().flat_map(|inbox| inbox.whole_tokens()).collect()
    }

    /// Counts a complete push if parts of it are in a push buffer.
    pub(super) fn count_direct_push(&self, push_slot: u32) {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        if push.is_some_and(|push| !push.shared.ranges().is_empty()) {
            self.counters.direct_pushes.add(1);
        }
    }

    pub(super) fn release(&mut self, push_slot: u32) {
        if let Some(inbox) = &mut self.inbox {
            inbox.release(push_slot);
        }
    }

    /// Releases the push slot of a push of which it has received parts.
    pub(super) fn release_begun(&mut self, client: ClientKey, sequence: Sequence, push_slot: u32) {
        if let Some(inbox) = &mut self.inbox
            && inbox.find(client, sequence) == Some(push_slot)
        {
            inbox.release(push_slot);
        }
    }

    /// Drops the pushes that have made no progress for a lease. Their push slots go to others.
    pub(super) fn reclaim_stalled(&mut self, now: Instant) {
        if let Some(inbox) = &mut self.inbox {
            let stalled = inbox.reclaim_stalled(now, self.config.lease);
            self.counters.pushes_dropped.add(stalled as u64);
        }
    }

    /// Drops everything that depends on a client's connection that has ended or was replaced:
    /// incomplete pushes, and parked requests. A token granted to a closed connection would be
    /// lost.
    pub(super) fn drop_client_connection(
        &mut self,
        peers: &mut Peers,
        connection: u64,
        client: ClientKey,
    ) {
        peers.parked.drop_connection(connection);
        if let Some(state) = peers.connections.get_mut(&connection) {
            state.expected_body = None;
        }
        if let Some(inbox) = &mut self.inbox {
            self.counters.pushes_dropped.add(inbox.discard_incomplete(client) as u64);
        }
    }

    /// Reserves a push slot for a client that is ready to send, or parks the request.
    pub(super) fn reserve(
        &mut self,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        request: PeerRequest,
        client: ClientKey,
    ) {
        let now = request.since;
        let Some(inbox) = &mut self.inbox else {
            return request.refuse(out, Refusal::NotInitialized {});
        };
        // A slot that was offered to another client and is unused is taken back for it.
        let push_slot = inbox
            .reserve(client, now)
            .or_else(|| inbox.reclaim_offered().then(|| inbox.reserve(client, now)).flatten());
        match push_slot {
            Some(push_slot) => request.answer(out, Reserved { push_slot }.into()),
            None => peers.park(out, ParkedRequest { request, wait: WaitReason::PushSlot }),
        }
    }

    /// Returns a push slot for a client that has not requested one, if no request waits for one; 0
    /// for none.
    pub(super) fn free_push_slot(&mut self, peers: &Peers, now: Instant, client: ClientKey) -> u32 {
        if peers.parked.any(|entry| matches!(entry.wait, WaitReason::PushSlot)) {
            return 0;
        }
        self.inbox.as_mut().and_then(|inbox| inbox.offer(client, now)).unwrap_or(0)
    }

    /// Gives free push slots to the parked requests, first come first served.
    pub(super) fn give_parked_push_slots(
        &mut self,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        now: Instant,
    ) {
        let waits = |entry: &ParkedRequest| matches!(entry.wait, WaitReason::PushSlot);
        while let Some(inbox) = &mut self.inbox
            && peers.parked.any(waits)
            && (inbox.has_free() || inbox.reclaim_offered())
            && let Some(ParkedRequest { request, .. }) = peers.parked.take_first(waits)
        {
            if let Some(push_slot) = request.client.and_then(|client| inbox.reserve(client, now)) {
                request.answer(out, Reserved { push_slot }.into());
            }
        }
    }

    /// Refuses a push and drops it. Its push slot goes to others, and its other parts are skipped.
    pub(super) fn refuse_push(
        &mut self,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        incoming: &IncomingPart,
        refusal: Refusal,
    ) {
        let IncomingPart { request, client, part, .. } = incoming;
        let (push_slot, sequence) = (part.push_slot, incoming.sequence());
        self.counters.pushes_dropped.add(1);
        if let Some(inbox) = &mut self.inbox
            && inbox.holds(*client, push_slot)
            && inbox
                .arrival(push_slot)
                .is_none_or(|push| push.sequence == sequence && push.whole.is_none())
        {
            inbox.release(push_slot);
        }
        if let Some(state) = peers.connections.get_mut(&request.connection) {
            state.refused = part.whole.is_none().then_some((sequence, push_slot));
        }
        request.refuse(out, refusal);
    }

    /// Withdraws a push that is not whole here, and its request for a push slot. A slot that the
    /// client has not used goes to any client that requests one. A whole push is the server's, and
    /// its outcome answers this request.
    pub(super) fn withdraw(
        &mut self,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        client: ClientKey,
    ) {
        let PeerRequest { connection, envelope, since, .. } = *request;
        let sequence = envelope.sequence;
        peers.parked.take(|ParkedRequest { request, wait }| {
            matches!(wait, WaitReason::PushSlot)
                && request.connection == connection
                && request.envelope.sequence == sequence
        });
        if let Some(inbox) = &mut self.inbox {
            inbox.offer_unused(client);
        }
        let push_slot = self.inbox.as_ref().and_then(|inbox| inbox.find(client, sequence));
        let whole = push_slot.is_some_and(|push_slot| {
            let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
            push.is_some_and(|push| push.whole.is_some())
        });
        let settled = peers.registry.client(client).window.state(sequence);
        if whole && !matches!(settled, PushState::Settled { .. }) {
            if let (Some(push_slot), Some(inbox)) = (push_slot, &mut self.inbox) {
                let (request, next, deadline) = (envelope.request, false, None);
                let since = Some(since);
                inbox.set_whole(
                    push_slot,
                    PendingAnswer { connection, request, next, since, deadline },
                );
            }
            return;
        }
        let window = &mut peers.registry.client_mut(client).window;
        let outcome = match window.state(sequence) {
            PushState::Settled { outcome } => outcome,
            PushState::TooOld { oldest } => {
                let (oldest, newest) = (Sequence(oldest), Sequence(u64::MAX));
                return request.refuse(out, Refusal::Window { sequence, oldest, newest });
            }
            _ => {
                // The outcome is settled as withdrawn, so that parts in transit are never applied.
                window.settle(sequence, Outcome::Withdrawn {});
                Outcome::Withdrawn {}
            }
        };
        if let (Some(push_slot), Some(inbox)) = (push_slot.filter(|_| !whole), &mut self.inbox) {
            inbox.release(push_slot);
        }
        out.answer_push(connection, envelope, outcome, false);
    }

    /// Answers what has become of a push.
    pub(super) fn outcome_query(
        &self,
        peers: &Peers,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        client: ClientKey,
    ) {
        let sequence = request.envelope.sequence;
        let arrival = self
            .inbox
            .as_ref()
            .and_then(|inbox| inbox.arrival(inbox.find(client, sequence)?).map(|push| push.bytes));
        let state = match (peers.registry.client(client).window.state(sequence), arrival) {
            (PushState::Unknown {}, Some(bytes)) => PushState::Receiving { bytes },
            (state, _) => state,
        };
        request.answer(out, OutcomeIs { state }.into());
    }

    /// Returns whether a part must be received. Otherwise the part is answered, if it needs an
    /// answer.
    pub(super) fn is_part_needed(
        &mut self,
        peers: &mut Peers,
        steps: &mut Steps,
        out: &mut ShardOutputs,
        incoming: &IncomingPart,
    ) -> bool {
        let IncomingPart { request, client, part, .. } = incoming;
        let (client, sequence) = (*client, incoming.sequence());
        let connection = request.connection;
        let Some(state) = peers.connections.get_mut(&connection) else {
            return false;
        };
        if state.refused == Some((sequence, part.push_slot)) {
            if part.whole.is_some() {
                state.refused = None;
            }
            return false;
        }
        match peers.registry.client(client).window.state(sequence) {
            PushState::Settled { outcome } => {
                if part.whole.is_some() {
                    self.counters.duplicates.add(1);
                    out.answer_push(connection, request.envelope, outcome, true);
                }
                return false;
            }
            PushState::TooOld { oldest } => {
                let (oldest, newest) = (Sequence(oldest), Sequence(u64::MAX));
                let refusal = Refusal::Window { sequence, oldest, newest };
                self.refuse_push(peers, out, incoming, refusal);
                return false;
            }
            _ => {}
        }
        let whole_here = self.inbox.as_ref().is_some_and(|inbox| {
            let push = inbox.find(client, sequence).and_then(|push_slot| inbox.arrival(push_slot));
            push.is_some_and(|push| push.whole.is_some())
        });
        if whole_here {
            return true;
        }
        if let Some(call) = &incoming.call
            && !self.counts_for_call(peers, steps, out, incoming, call)
        {
            return false;
        }
        if self.is_stale_part(steps, incoming) {
            self.skip_stale_part(peers, steps, out, incoming);
            return false;
        }
        true
    }

    /// Returns whether a part belongs to a gradient that is stale as far as this shard knows, and
    /// is not worth receiving.
    fn is_stale_part(&self, steps: &Steps, incoming: &IncomingPart) -> bool {
        let IncomingPart { request, client, part, .. } = incoming;
        let (client, step) = (*client, request.envelope.step);
        if part.operation != (Operation::Gradient {}) {
            return false;
        }
        match (&steps.owner, &steps.follower) {
            (Some(owner), Some(_)) if self.config.planted.has(Bug::KeyByReplica) => {
                !owner.has_out(client)
            }
            (Some(owner), Some(_)) => !owner.ledger().holds(client, part.token, part.generation),
            (None, Some(follower)) => step.0 < follower.step(),
            // A complete push owns its token, even if other parts are sent under it.
            (Some(owner), None) => {
                let tokens = owner.asynchronous_tokens();
                owner.ledger().holds(client, part.token, part.generation)
                    && tokens.is_some_and(|tokens| tokens.is_too_old(part.token, step))
                    && !self.is_whole(part.token)
            }
            (None, None) => false,
        }
    }

    /// Skips a part of a stale gradient. The last part is answered with the outcome.
    fn skip_stale_part(
        &mut self,
        peers: &mut Peers,
        steps: &mut Steps,
        out: &mut ShardOutputs,
        incoming: &IncomingPart,
    ) {
        let IncomingPart { request, client, part, .. } = incoming;
        let (client, push_slot, sequence) = (*client, part.push_slot, incoming.sequence());
        self.release_begun(client, sequence, push_slot);
        if part.whole.is_none() {
            return;
        }
        let outcome = steps.stale_outcome(part.token);
        peers.registry.client_mut(client).window.settle(sequence, outcome);
        out.answer_push(request.connection, request.envelope, outcome, false);
    }

    /// Refuses a complete push before it counts. A present client keeps the token of the push; the
    /// token of an absent client is returned.
    pub(super) fn refuse_whole(
        &mut self,
        peers: &Peers,
        steps: &mut Steps,
        out: &mut ShardOutputs,
        push_slot: u32,
        refusal: Refusal,
    ) {
        let Some((client, push)) = self.inbox.as_mut().and_then(|inbox| inbox.take(push_slot))
        else {
            return;
        };
        self.counters.pushes_dropped.add(1);
        let holder = client.map(|client| peers.registry.client(client));
        let present = holder.is_some_and(|client| client.presence == ClientPresence::Present);
        let connection = holder.and_then(|client| client.connection);
        if let Some(whole) = push.whole.filter(|whole| connection == Some(whole.connection)) {
            let (request, sequence) = (whole.request, push.sequence);
            let request = Envelope { request, sequence, ..Envelope::default() };
            out.refuse(whole.connection, request, refusal);
        }
        if push.operation == (Operation::Gradient {}) && !present {
            steps.return_token_of(&push);
        }
    }
}
