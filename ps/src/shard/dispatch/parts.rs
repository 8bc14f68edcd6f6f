//! Parts of pushes: from the message of each to the check of the whole push.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::message::{
    Operation, PushPart, PushShared, Reserved, Role, SharedRange,
};
use pushpull_common::protocol::{EffectRef, Header, PushState, Refusal};
use pushpull_store::planted::Bug;
use pushpull_store::store::Store;

use crate::aggregate::token_issuer::TokenIssuer;
use crate::client_key::ClientKey;
use crate::coordinators::EffectVerdict;
use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::intake::FoundPush;
use crate::shard::peers::ExpectedBody;
use crate::shard::request::encoded_part::{EncodedPart, PartEncoding};
use crate::shard::request::incoming_part::IncomingPart;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};
use crate::shard::request::{PeerRequest, unsupported};
use crate::shard::values::push_job::ArrivedPart;
use crate::shard::values::variables::VariablesState;

impl Shard {
    /// Reserves a push slot for a client that is ready to send, or parks the request.
    pub(super) fn reserve(&mut self, request: PeerRequest, client: ClientKey) {
        match self.intake.reserve(request.since, client) {
            Err(refusal) => request.refuse(&mut self.out, refusal),
            Ok(Some(push_slot)) => {
                request.answer(&mut self.out, Reserved { push_slot }.into());
            }
            Ok(None) => {
                let entry = ParkedRequest { request, wait: WaitReason::PushSlot };
                self.peers.park(&mut self.out, entry);
            }
        }
    }

    /// Gives free push slots to the parked requests, first come first served.
    pub(in crate::shard) fn give_parked_push_slots(&mut self, now: Instant) {
        let Shard { peers, intake, out, .. } = self;
        let waits = |entry: &ParkedRequest| matches!(entry.wait, WaitReason::PushSlot);
        while intake.inbox.is_some()
            && peers.parked.any(waits)
            && intake.frees_push_slot(now)
            && let Some(ParkedRequest { request, .. }) = peers.parked.take_first(waits)
        {
            let reserved = request.client.and_then(|client| intake.reserve_free(now, client));
            if let Some(push_slot) = reserved {
                request.answer(out, Reserved { push_slot }.into());
            }
        }
    }

    /// Returns a push slot for a client that has not requested one, if no request waits for one; 0
    /// for none.
    pub(super) fn offer_push_slot(&mut self, now: Instant, client: ClientKey) -> u32 {
        if self.peers.parked.any(|entry| matches!(entry.wait, WaitReason::PushSlot)) {
            return 0;
        }
        self.intake.offer(now, client)
    }

    /// Drops everything that depends on a client's connection that has ended or was replaced:
    /// incomplete pushes, and parked requests.
    pub(in crate::shard) fn drop_client_connection(&mut self, connection: u64, client: ClientKey) {
        self.peers.drop_requests(connection);
        self.intake.discard_incomplete(client);
    }

    /// Shares a push buffer with a client, or says why not.
    pub(super) fn share_push_buffer(&mut self, request: &PeerRequest, client: ClientKey) {
        let shared = self.peers.check_shareable(request).and_then(|()| {
            if self.steps.is_synchronous() && !self.files.arena.storage.is_shareable() {
                let why = "gradients held for a step survive this process in a directory, and push \
                           buffers do not";
                return Err(unsupported(request.kind, why));
            }
            if !self.variables.is_ready() {
                return Err(Refusal::NotInitialized {});
            }
            self.intake.share_push_buffer(&self.files.budget, request, client)
        });
        self.peers.send_shared(&mut self.out, request, shared);
    }

    /// Handles the message of a part: chooses the memory for its body. Returns what has changed.
    pub(super) fn part(
        &mut self,
        header: &Header,
        request: PeerRequest,
        client: ClientKey,
        part: PushPart,
        effect: Option<EffectRef>,
        form: Option<PartEncoding>,
    ) -> Changes {
        let store = self.variables.store();
        let body = match form {
            None => plain_range(store, &part, header.body_bytes).map(|range| (range, None)),
            Some(form) => EncodedPart::of(store, header, &part, form)
                .map(|(range, encoded)| (range, Some(encoded))),
        };
        let ((range, encoded), unfit) = match body {
            Ok(body) => (body, None),
            Err(refusal) => ((0..0, None), Some(refusal)),
        };
        let mut incoming = IncomingPart { request, client, part, effect, range, encoded };
        if !self.is_part_needed(&incoming) {
            return Changes::ALL;
        }
        let begun = match unfit {
            Some(refusal) => Err(refusal),
            None => self.find_or_begin_push(&incoming),
        };
        let body = begun.and_then(|needed| match needed {
            true => {
                let budget = &self.files.budget;
                let prepared = self.intake.prepare_body(budget, &mut incoming, header.body_bytes);
                prepared.map(|()| true)
            }
            false => Ok(false),
        });
        match body {
            Ok(true) => self.receive(&request, header, ExpectedBody::Part(incoming)),
            Ok(false) => Changes::NONE,
            Err(refusal) => {
                self.refuse_push(&incoming, refusal);
                Changes::ALL
            }
        }
    }

    /// Receives parts of a push that are in a push buffer. They arrive together, without a body.
    pub(super) fn push_shared(
        &mut self,
        request: PeerRequest,
        client: ClientKey,
        shared: &PushShared,
        effect: Option<EffectRef>,
    ) {
        let PushShared { operation, token, generation, push_slot, whole, next, read, .. } = *shared;
        let part =
            PushPart { operation, token, generation, push_slot, offset: 0, whole, next, read };
        let incoming = IncomingPart { request, client, part, effect, range: 0..0, encoded: None };
        if !self.is_part_needed(&incoming) {
            return;
        }
        if let Err(refusal) = self.receive_shared(&incoming, shared.ranges.items()) {
            self.refuse_push(&incoming, refusal);
        }
    }

    fn receive_shared(
        &mut self,
        incoming: &IncomingPart,
        ranges: &[SharedRange],
    ) -> Result<(), Refusal> {
        if !self.find_or_begin_push(incoming)? {
            return Ok(());
        }
        for &SharedRange { start, end } in ranges {
            let push = self.intake.push_in(incoming)?;
            self.variables.check_shared_range(push, &incoming.part, &(start..end))?;
            self.intake.add_shared_range(incoming, start..end)?;
        }
        self.complete_push(incoming.request.since, incoming)
    }

    /// Returns whether a part must be received. Otherwise the part is answered, if it needs an
    /// answer.
    fn is_part_needed(&mut self, incoming: &IncomingPart) -> bool {
        let IncomingPart { request, client, part, .. } = incoming;
        let client = *client;
        let sequence = incoming.sequence();
        if self.peers.skips(incoming) {
            return false;
        }
        match self.peers.registry.client(client).window.state(sequence) {
            PushState::Settled { outcome } => {
                if part.whole.is_some() {
                    self.counters.duplicates.add(1);
                    self.out.answer_push(request.connection, request.envelope, outcome, true);
                }
                return false;
            }
            PushState::TooOld { oldest } => {
                let oldest = Sequence(oldest);
                let newest = Sequence(u64::MAX);
                self.refuse_push(incoming, Refusal::Window { sequence, oldest, newest });
                return false;
            }
            _ => {}
        }
        if self.intake.has_whole(client, sequence) {
            return true;
        }
        if let Some(effect) = &incoming.effect
            && !self.counts_for_effect(incoming, effect)
        {
            return false;
        }
        if self.is_stale_part(incoming) {
            self.skip_stale_part(incoming);
            return false;
        }
        true
    }

    /// Returns whether a part of an effect's push, which no earlier connection has completed, must
    /// be received. Otherwise the part is answered, if it needs an answer.
    ///
    /// A repeated push is recognized at its first part, so that it is not applied on arrival.
    fn counts_for_effect(&mut self, incoming: &IncomingPart, effect: &EffectRef) -> bool {
        let IncomingPart { request, part, .. } = incoming;
        self.steps.heard_of_coordinator(request.since, effect.id.coordinator);
        match self.steps.check_effect(request.kind, part.operation, effect) {
            Ok(EffectVerdict::Counts) => return true,
            Ok(EffectVerdict::Repeated) => self.skip_repeated_part(incoming),
            Err(refusal) => self.refuse_push(incoming, refusal),
        }
        false
    }

    /// Returns whether a part belongs to a gradient that is stale as far as this shard knows, and
    /// is not worth receiving.
    fn is_stale_part(&self, incoming: &IncomingPart) -> bool {
        let IncomingPart { request, client, part, .. } = incoming;
        let step = request.envelope.step;
        if part.operation != (Operation::Gradient {}) {
            return false;
        }
        match (&self.steps.owner, &self.steps.follower) {
            (Some(owner), Some(_)) if self.config.planted.has(Bug::KeyByReplica) => {
                !owner.has_out(*client)
            }
            (Some(owner), Some(_)) => !owner.ledger().holds(*client, part.token, part.generation),
            (None, Some(follower)) => step.0 < follower.step(),
            // A complete push owns its token, even if other parts are sent under it.
            (Some(owner), None) => {
                let tokens = owner.asynchronous_tokens();
                owner.ledger().holds(*client, part.token, part.generation)
                    && tokens.is_some_and(|tokens| tokens.is_too_old(part.token, step))
                    && !self.intake.is_whole(part.token)
            }
            (None, None) => false,
        }
    }

    /// Skips a part of a stale gradient. The last part is answered with the outcome.
    fn skip_stale_part(&mut self, incoming: &IncomingPart) {
        let IncomingPart { request, client, part, .. } = incoming;
        self.intake.release_begun(incoming);
        if part.whole.is_none() {
            return;
        }
        let outcome = self.steps.stale_outcome(part.token);
        let window = &mut self.peers.registry.client_mut(*client).window;
        window.settle(incoming.sequence(), outcome);
        self.out.answer_push(request.connection, request.envelope, outcome, false);
    }

    /// Skips a part of a gradient whose effect has counted before. The last part is answered.
    fn skip_repeated_part(&mut self, incoming: &IncomingPart) {
        let IncomingPart { request, client, part, .. } = incoming;
        self.intake.release_begun(incoming);
        if part.whole.is_none() {
            return;
        }
        let token = part.token;
        let generation = part.generation;
        if self.intake.is_whole(token) {
            // Another push, which is complete, pays with the token.
            return request.refuse(&mut self.out, Refusal::Token { token, generation });
        }
        let outcome = self.steps.repeated_outcome(Some(*client), token, generation);
        let window = &mut self.peers.registry.client_mut(*client).window;
        window.settle(incoming.sequence(), outcome);
        self.out.answer_push(request.connection, request.envelope, outcome, false);
    }

    /// Refuses a push and drops it. Its push slot goes to others, and its other parts are skipped.
    fn refuse_push(&mut self, incoming: &IncomingPart, refusal: Refusal) {
        self.intake.drop_refused(incoming);
        self.peers.skip_rest(incoming);
        incoming.request.refuse(&mut self.out, refusal);
    }

    /// Finds the push that a part belongs to, or begins it, and checks the part's range. Returns
    /// false if the part is to be skipped.
    fn find_or_begin_push(&mut self, incoming: &IncomingPart) -> Result<bool, Refusal> {
        let IncomingPart { request, client, part, range, .. } = incoming;
        let assigns = matches!(part.operation, Operation::Assign {});
        match &self.variables.state {
            VariablesState::Ready(_) => {}
            VariablesState::Declared(_) if assigns && !self.applier.is_initializing() => {
                // Only a chief may assign the first values.
                if request.role != (Role::Chief {}) {
                    let role = request.role.code();
                    return Err(Refusal::Role { role, kind: request.kind });
                }
            }
            _ => return Err(Refusal::NotInitialized {}),
        }
        match self.intake.find_push(incoming)? {
            FoundPush::Whole => return Ok(false),
            FoundPush::Begun => {}
            FoundPush::Unbegun => {
                self.check_token(*client, part)?;
                let step = self.steps.follower.as_ref().map(|follower| follower.step());
                self.intake.begin_push(incoming, step);
            }
        }
        if !range.is_empty() {
            let push = self.intake.push_in(incoming)?;
            self.variables.check_range(push, part, range)?;
        }
        Ok(true)
    }

    /// Checks that a gradient that begins with this part has a token, on the step owner in
    /// asynchronous mode.
    ///
    /// The parts before it may have been skipped as stale, while the client held the token. Without
    /// them the push could only be refused for its range or its length, which its client cannot
    /// mend.
    fn check_token(&self, client: ClientKey, part: &PushPart) -> Result<(), Refusal> {
        let &PushPart { operation, token, generation, .. } = part;
        let owner = self.steps.owner.as_ref().filter(|_| !self.steps.is_synchronous());
        let Some(ledger) = owner.map(TokenIssuer::ledger) else { return Ok(()) };
        let is_held = || ledger.holds(client, token, generation) && !self.intake.is_whole(token);
        if operation == (Operation::Gradient {}) && !is_held() {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
    }

    /// The body of a part has arrived. Returns what has changed: nothing before the last part.
    pub(super) fn part_received(&mut self, now: Instant, incoming: IncomingPart) -> Changes {
        let is_last = incoming.part.whole.is_some();
        let changes = match self.receive_part(now, &incoming) {
            // A held push is settled at once, or is stale.
            Ok(()) if is_last && self.steps.is_synchronous() => Changes::ALL,
            Ok(()) if is_last => Changes::SLOTS,
            Ok(()) => Changes::NONE,
            Err(refusal) => {
                self.refuse_push(&incoming, refusal);
                Changes::ALL
            }
        };
        self.intake.body_done(incoming);
        changes
    }

    fn receive_part(&mut self, now: Instant, incoming: &IncomingPart) -> Result<(), Refusal> {
        if let Some(refusal) = self.files.poisoned() {
            return Err(refusal);
        }
        self.intake.take_body(incoming)?;
        let push_slot = incoming.part.push_slot;
        let range = &incoming.range;
        if !range.is_empty() {
            let is_small = self.variables.is_small(range.end - range.start);
            let may_begin = self.intake.add_range(now, incoming, is_small);
            let part = ArrivedPart { push_slot, range, may_begin };
            // In synchronous mode gradients wait for their step, and other pushes are small.
            let applies = !self.steps.is_synchronous();
            let Shard { applier, intake, variables, steps, .. } = self;
            let Some(inbox) = &intake.inbox else { return Ok(()) };
            let tokens = steps.asynchronous_tokens();
            if !(applies && applier.apply_on_arrival(inbox, variables, tokens, part)?) {
                variables.scan_part(inbox, push_slot, range)?;
            }
        }
        self.complete_push(now, incoming)
    }

    /// Queues a push whose last part this is.
    fn complete_push(&mut self, now: Instant, incoming: &IncomingPart) -> Result<(), Refusal> {
        let Some(named) = incoming.part.whole else { return Ok(()) };
        let push_slot = incoming.part.push_slot;
        self.check_whole(incoming.client, push_slot, named)?;
        self.intake.count_direct_push(push_slot);
        let Some(inbox) = &mut self.intake.inbox else { return Ok(()) };
        let waits = inbox.arrival(push_slot).is_some_and(|push| self.steps.waits_for_step(push));
        inbox.set_whole(push_slot, incoming.pending_answer(now));
        if self.variables.is_scanned_first(inbox, push_slot, waits) {
            self.applier.begin_scan(inbox, push_slot);
        } else if waits {
            self.hold(now, push_slot);
        } else {
            self.applier.begin_push(push_slot);
        }
        Ok(())
    }

    /// Checks everything about a push that only its end shows: its bytes, its rows and its token.
    fn check_whole(&self, client: ClientKey, push_slot: u32, named: u64) -> Result<(), Refusal> {
        let Shard { intake, files, variables, steps, peers, .. } = self;
        let store = variables.store().ok_or(Refusal::NotInitialized {})?;
        let push = intake.check_whole(push_slot, named, store.layout())?;
        if let Some(inbox) = &intake.inbox {
            variables.check_tables(inbox, push_slot, &files.journal)?;
        }
        let token = push.token;
        let generation = push.generation;
        let held = match &steps.owner {
            // In synchronous mode a push under a token that is over is stale. It is not refused.
            _ if steps.is_synchronous() => true,
            Some(owner) => owner.ledger().holds(client, token, generation),
            None => peers.could_hold_token(client, token, generation),
        };
        if let Some(effect) = &push.effect {
            steps.coordinators.check(effect)?;
        }
        // A token pays for one push.
        let is_gradient = push.operation == Operation::Gradient {};
        if is_gradient && (token.0 == 0 || !held || intake.is_whole(token)) {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
    }
}

/// Returns the range in the shard's layout of a part whose body is not encoded.
fn plain_range(store: Option<&Store>, part: &PushPart, bytes: u64) -> Result<Range<u64>, Refusal> {
    if bytes == 0 {
        // A part without a body has an empty range at any offset.
        return Ok(0..0);
    }
    // With a clamped end, a body would have an empty range.
    match part.offset.checked_add(bytes) {
        Some(end) => Ok(part.offset..end),
        None => {
            let limit = store.map_or(0, |store| store.layout().push_bytes());
            Err(Refusal::Range { offset: part.offset, bytes, limit })
        }
    }
}
