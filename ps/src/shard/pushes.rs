//! Receives pushes: chooses the memory of each part, and drops pushes that stay incomplete.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, Sequence, VariableId};
use pushpull_common::protocol::message::{Operation, OutcomeIs, PushPart, Role};
use pushpull_common::protocol::{Envelope, Header, Outcome, PushState, Refusal};

use super::client_registry::ClientPresence;
use super::encoded_parts::{PartBody, PartEncoding};
use super::held_push::HeldPush;
use super::intake::Intake;
use super::output::Outputs;
use super::peers::Peers;
use super::push_job::PushJob;
use super::steps::Steps;
use super::streaming_apply::ArrivedPart;
use super::variables::Variables;
use super::work::ShardJob;
use super::{Detail, ExpectedBody, IncomingPart, Shard, VariablesState, answer_to, deadline_of};
use crate::client_key::ClientKey;
use crate::inbox::{Extents, Inbox, PendingAnswer, PushArrival, is_for_trainable};

impl Shard {
    /// Handles the message of a part: chooses the memory for its body.
    pub(super) fn part(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        header: &Header,
        part: &PushPart,
        form: Option<PartEncoding>,
    ) {
        let (body, body_refusal) = match PartBody::of(self.variables.store(), header, part, form) {
            Ok(body) => (body, None),
            Err(refusal) => (PartBody::default(), Some(refusal)),
        };
        let PartBody { range, encoded } = body;
        let mut incoming = IncomingPart {
            connection,
            client,
            push_slot: part.push_slot,
            range,
            encoded,
            request: answer_to(header),
            whole: part.whole,
            next: part.next,
            deadline: deadline_of(now, header),
        };
        if !self.intake.is_part_needed(
            &mut self.peers,
            &mut self.steps,
            &mut self.out,
            header,
            part,
            &incoming,
        ) {
            return;
        }
        if let Some(refusal) = body_refusal {
            return self.intake.refuse_push(&mut self.peers, &mut self.out, &incoming, refusal);
        }
        let found = self.find_or_begin_push(now, connection, client, header, part, &incoming.range);
        match found {
            Ok(true) if self.intake.has_memory_for(&self.files, &incoming) => {
                if let Some(encoded) = &mut incoming.encoded {
                    encoded.bytes = self.intake.buffer_pool.take(header.body_bytes as usize);
                    encoded.bytes.resize(header.body_bytes as usize, 0);
                }
                self.receive(now, connection, ExpectedBody::Part(incoming), header);
            }
            // There is no memory for parts sent beside a push buffer. Other slots have theirs.
            Ok(true) => self.intake.refuse_push(
                &mut self.peers,
                &mut self.out,
                &incoming,
                Refusal::PushSlotTaken { push_slot: part.push_slot },
            ),
            Ok(false) => {}
            Err(refusal) => {
                self.intake.refuse_push(&mut self.peers, &mut self.out, &incoming, refusal)
            }
        }
    }

    /// Finds the push that a part belongs to, or begins it, and checks the part's range. Returns
    /// false if the part is to be skipped.
    pub(super) fn find_or_begin_push(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        header: &Header,
        part: &PushPart,
        range: &Range<u64>,
    ) -> Result<bool, Refusal> {
        let sequence = header.sequence;
        let assigns = matches!(part.operation, Operation::Assign {});
        match &self.variables.state {
            VariablesState::Ready(_) => {}
            VariablesState::Declared(_) if assigns && !self.applier.is_initializing() => {
                // Only a chief may assign the first values.
                let role = self.peers.connections.get(&connection).map(|state| state.role);
                if let Some(role) = role.filter(|&role| role != Role::Chief {}) {
                    return Err(Refusal::Role { role: role.code(), kind: header.kind });
                }
            }
            _ => return Err(Refusal::NotInitialized {}),
        }
        let Some(inbox) = &mut self.intake.inbox else {
            return Err(Refusal::NotInitialized {});
        };
        if sequence.0 == 0 {
            let (oldest, newest) = (Sequence(1), Sequence(u64::MAX));
            return Err(Refusal::Window { sequence, oldest, newest });
        }
        match inbox
            .find(client, sequence)
            .and_then(|push_slot| Some((push_slot, inbox.arrival(push_slot)?)))
        {
            // The push arrived completely over an earlier connection, and will be applied.
            Some((push_slot, push)) if push.whole.is_some() => {
                if part.whole.is_some() {
                    let (request, next) = (header.request, part.next);
                    let deadline = deadline_of(now, header);
                    inbox.set_whole(
                        push_slot,
                        PendingAnswer { connection, request, next, since: Some(now), deadline },
                    );
                }
                return Ok(false);
            }
            Some((push_slot, _)) if push_slot == part.push_slot => {}
            // A push has one push slot.
            Some((_, _)) => return Err(Refusal::PushSlotTaken { push_slot: part.push_slot }),
            None => {
                let unused = inbox.arrival(part.push_slot).is_none();
                if !inbox.holds(client, part.push_slot) || !unused {
                    return Err(Refusal::PushSlotTaken { push_slot: part.push_slot });
                }
                let arrival = PushArrival {
                    sequence,
                    operation: part.operation,
                    token: part.token,
                    generation: part.generation,
                    // No client can have read a step that was not made.
                    step: self.steps.follower.as_ref().map_or(header.step, |follower| {
                        header.step.min(GlobalStep(follower.step()))
                    }),
                    read: part.read,
                    extents: Extents::default(),
                    shared: Extents::default(),
                    scanning: false,
                    bytes: 0,
                    whole: None,
                    order: 0,
                    squares: None,
                };
                inbox.begin(part.push_slot, arrival, now);
            }
        }
        match range.is_empty() {
            true => Ok(true),
            false => self.intake.check_range(&self.variables, part, range).map(|()| true),
        }
    }

    /// The body of a part has arrived.
    pub(super) fn part_received(&mut self, now: Instant, part: IncomingPart) {
        if let Err(refusal) = self.receive_part(now, &part) {
            self.intake.refuse_push(&mut self.peers, &mut self.out, &part, refusal);
        }
        if let Some(encoded) = part.encoded {
            self.intake.buffer_pool.put(encoded.bytes);
        }
    }

    fn receive_part(&mut self, now: Instant, part: &IncomingPart) -> Result<(), Refusal> {
        let (client, push_slot, range) = (part.client, part.push_slot, &part.range);
        if let Some(refusal) = self.poisoned() {
            return Err(refusal);
        }
        let held =
            |inbox: &Inbox| inbox.holds(client, push_slot) && inbox.arrival(push_slot).is_some();
        if !self.intake.inbox.as_ref().is_some_and(held) {
            // The push slot was reclaimed while the body was arriving.
            return Err(Refusal::PushSlotTaken { push_slot });
        }
        match &part.encoded {
            None => self.counters.push_bytes.add(range.end - range.start),
            Some(encoded) => {
                self.counters.push_bytes.add(encoded.bytes.len() as u64);
                let target = self.intake.inbox.as_mut();
                let target = target.and_then(|inbox| inbox.bytes_mut(push_slot, range.clone()));
                encoded.decode_into(target.ok_or(Refusal::PushSlotTaken { push_slot })?)?;
            }
        }
        if let Some(inbox) = &mut self.intake.inbox
            && !range.is_empty()
        {
            let first = inbox.arrival(push_slot).is_some_and(|push| push.bytes == 0);
            let shared = inbox.is_shared(push_slot);
            inbox.add(push_slot, range.clone(), now);
            // A push with ranges in a push buffer is applied once it is whole, as those ranges are; a small push
            // is applied in place then.
            let bytes = range.end - range.start;
            let small =
                part.whole.is_some() && self.variables.store().is_some_and(|s| s.is_small(bytes));
            let may_begin = first && !shared && !small;
            let arrived = ArrivedPart { push_slot, range, may_begin };
            let Shard { applier, intake, variables, steps, pulls, .. } = self;
            if !applier.apply_on_arrival(intake, variables, steps, pulls, arrived)? {
                self.intake.scan_part(&self.variables, push_slot, range)?;
            }
        }
        match part.whole {
            None => Ok(()),
            Some(named) => self.push_complete(now, part, named),
        }
    }

    /// The last part of a push has arrived.
    pub(super) fn push_complete(
        &mut self,
        now: Instant,
        part: &IncomingPart,
        named: u64,
    ) -> Result<(), Refusal> {
        let (client, push_slot) = (part.client, part.push_slot);
        self.intake.check_whole(
            &self.files,
            &self.peers,
            &self.steps,
            &self.variables,
            (client, push_slot, named),
        )?;
        self.intake.count_direct_push(push_slot);
        let push = self.intake.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        let waits = push.is_some_and(|push| self.steps.waits_for_step(push));
        if let Some(inbox) = &mut self.intake.inbox {
            let (connection, request) = (part.connection, part.request.request);
            let (next, deadline) = (part.next, part.deadline);
            inbox.set_whole(
                push_slot,
                PendingAnswer { connection, request, next, since: Some(now), deadline },
            );
        }
        match waits {
            _ if self.intake.is_scanned_first(&self.variables, &self.steps, push_slot) => {
                self.applier.begin_scan(&mut self.intake, push_slot)
            }
            true => {
                let Shard { steps, applier, intake, peers, out, .. } = self;
                HeldPush { push_slot }.take_part(steps, applier, intake, peers, out, now);
            }
            false => self.applier.jobs.push_back(ShardJob::Push(PushJob::new(push_slot, false))),
        }
        Ok(())
    }

    /// Refuses a complete push before it counts. A present client keeps the token of the push; the
    /// token of an absent client is returned.
    pub(super) fn refuse_whole(&mut self, push_slot: u32, refusal: Refusal) {
        let Some((client, push)) =
            self.intake.inbox.as_mut().and_then(|inbox| inbox.take(push_slot))
        else {
            return;
        };
        self.counters.pushes_dropped.add(1);
        let holder = client.map(|client| self.peers.registry.client(client));
        let present = holder.is_some_and(|client| client.presence == ClientPresence::Present);
        let connection = holder.and_then(|client| client.connection);
        if let Some(whole) = push.whole.filter(|whole| connection == Some(whole.connection)) {
            let (request, sequence) = (whole.request, push.sequence);
            let request = Envelope { request, sequence, ..Envelope::default() };
            self.out.refuse(whole.connection, request, refusal);
        }
        if push.operation == (Operation::Gradient {}) && !present {
            self.steps.return_token_of(&push);
        }
    }
}

impl Intake {
    /// Refuses a push and drops it. Its push slot goes to others, and its other parts are skipped.
    pub(super) fn refuse_push(
        &mut self,
        peers: &mut Peers,
        out: &mut Outputs,
        part: &IncomingPart,
        refusal: Refusal,
    ) {
        let (push_slot, sequence) = (part.push_slot, part.request.sequence);
        self.counters.pushes_dropped.add(1);
        if let Some(inbox) = &mut self.inbox
            && inbox.holds(part.client, push_slot)
            && inbox
                .arrival(push_slot)
                .is_none_or(|push| push.sequence == sequence && push.whole.is_none())
        {
            inbox.release(push_slot);
        }
        if let Some(state) = peers.connections.get_mut(&part.connection) {
            state.refused = part.whole.is_none().then_some((sequence, push_slot));
        }
        out.refuse(part.connection, part.request, refusal);
    }

    pub(super) fn withdraw(
        &mut self,
        peers: &mut Peers,
        out: &mut Outputs,
        now: Instant,
        connection: u64,
        client: ClientKey,
        request: Envelope,
    ) {
        let sequence = request.sequence;
        let push_slot = self.inbox.as_ref().and_then(|inbox| inbox.find(client, sequence));
        let whole = push_slot.is_some_and(|push_slot| {
            let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
            push.is_some_and(|push| push.whole.is_some())
        });
        let settled = peers.registry.client(client).window.state(sequence);
        if whole && !matches!(settled, PushState::Settled { .. }) {
            // The push is the server's already, and its outcome answers this request.
            if let (Some(push_slot), Some(inbox)) = (push_slot, &mut self.inbox) {
                let request = request.request;
                let (next, deadline) = (false, None);
                inbox.set_whole(
                    push_slot,
                    PendingAnswer { connection, request, next, since: Some(now), deadline },
                );
            }
            return;
        }
        let window = &mut peers.registry.client_mut(client).window;
        let outcome = match window.state(sequence) {
            PushState::Settled { outcome } => outcome,
            PushState::TooOld { oldest } => {
                let (oldest, newest) = (Sequence(oldest), Sequence(u64::MAX));
                let refusal = Refusal::Window { sequence, oldest, newest };
                return out.refuse(connection, request, refusal);
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
        out.answer_push(connection, request, outcome, false);
    }

    pub(super) fn outcome_query(
        &self,
        peers: &Peers,
        out: &mut Outputs,
        connection: u64,
        client: ClientKey,
        request: Envelope,
    ) {
        let sequence = request.sequence;
        let arrival = self
            .inbox
            .as_ref()
            .and_then(|inbox| inbox.arrival(inbox.find(client, sequence)?).map(|push| push.bytes));
        let state = match (peers.registry.client(client).window.state(sequence), arrival) {
            (PushState::Unknown {}, Some(bytes)) => PushState::Receiving { bytes },
            (state, _) => state,
        };
        out.answer(connection, request, OutcomeIs { state }.into());
    }

    /// Checks the range of a part of a push that has begun.
    pub(super) fn check_range(
        &self,
        variables: &Variables,
        part: &PushPart,
        range: &Range<u64>,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&self.inbox, variables.store()) else {
            return Err(Refusal::NotInitialized {});
        };
        let push = inbox
            .arrival(part.push_slot)
            .ok_or(Refusal::PushSlotTaken { push_slot: part.push_slot })?;
        let (layout, is_ready) = (store.layout(), variables.is_ready());
        push.extents.check(range, layout).map_err(|misplaced| Refusal::Range {
            offset: range.start,
            bytes: range.end.saturating_sub(range.start),
            limit: misplaced.limit,
        })?;
        let trainable = is_for_trainable(push.operation);
        let wrong = variables
            .fused_ranges
            .first_touched(layout, range, |_, it| trainable.is_some_and(|t| t != it));
        if push.operation != part.operation {
            let tried = Detail::clipped("an operation other than that of its first part");
            // The range may be the index of a sparse partition, which is behind all values.
            let variable = layout.touched(range.clone()).next();
            let variable = variable.map_or(VariableId(0), |partition| partition.variable);
            return Err(Refusal::Operation { variable, tried });
        }
        let first =
            variables.fused_ranges.first_touched(layout, range, |sparse, _| sparse && !is_ready);
        if let Some(partition) = first {
            let tried = Detail::clipped("first values by rows: its initializer makes them");
            return Err(Refusal::Operation { variable: partition.variable, tried });
        }
        if let Some(partition) = wrong {
            let tried = Detail::clipped(match push.operation {
                Operation::Gradient {} => "gradients: it is a plain variable",
                _ => "assign_add: it is trained by the optimizer",
            });
            return Err(Refusal::Operation { variable: partition.variable, tried });
        }
        Ok(())
    }

    /// Returns whether a part must be received. Otherwise the part is answered, if it needs an
    /// answer.
    pub(super) fn is_part_needed(
        &mut self,
        peers: &mut Peers,
        steps: &mut Steps,
        out: &mut Outputs,
        header: &Header,
        part: &PushPart,
        incoming: &IncomingPart,
    ) -> bool {
        let (connection, client, sequence) =
            (incoming.connection, incoming.client, header.sequence);
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
                    out.answer_push(connection, incoming.request, outcome, true);
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
        if !whole_here && self.is_stale_part(steps, client, header.step, part) {
            self.skip_stale_part(peers, steps, out, client, incoming, part.token);
            return false;
        }
        true
    }
}
