//! A push on its way into its push slot, part by part, until it is whole.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::ids::{GlobalStep, Sequence, VariableId};
use pushpull_common::protocol::message::{Operation, PushPart, Role};
use pushpull_common::protocol::{CallRef, Header, Refusal};
use pushpull_store::store::Store;

use super::encoded_parts::{EncodedPart, PartEncoding};
use crate::aggregate::current_step::PerPush;
use crate::client_key::ClientKey;
use crate::inbox::{Extents, PendingAnswer, PushArrival, PushedRows, is_for_trainable};
use crate::shard::applier::ShardJob;
use crate::shard::held_push::HeldPush;
use crate::shard::intake::Intake;
use crate::shard::peers::peer_request::PeerRequest;
use crate::shard::peers::{ExpectedBody, Peers, unsupported};
use crate::shard::push_job::{ArrivedPart, PushJob};
use crate::shard::shard_files::ShardFiles;
use crate::shard::steps::Steps;
use crate::shard::variables::{Variables, VariablesState};
use crate::shard::{Detail, Shard};

/// A part of a push whose message has arrived.
#[derive(Clone, Debug)]
pub(in crate::shard) struct IncomingPart {
    pub(in crate::shard) request: PeerRequest,
    pub(in crate::shard) client: ClientKey,
    /// The fields of its message.
    pub(in crate::shard) part: PushPart,
    /// The call that makes the push, if any.
    pub(in crate::shard) call: Option<CallRef>,
    /// The range in the shard's layout. Empty for a part without a body.
    pub(in crate::shard) range: Range<u64>,
    /// The encoding of the body, if it is encoded.
    pub(in crate::shard) encoded: Option<EncodedPart>,
}

impl IncomingPart {
    pub(in crate::shard) fn sequence(&self) -> Sequence {
        self.request.envelope.sequence
    }

    /// Returns the answer that its client waits for from now on, if this is the last part.
    fn pending_answer(&self, now: Instant) -> PendingAnswer {
        let PeerRequest { connection, envelope, deadline, .. } = self.request;
        let (request, next, since) = (envelope.request, self.part.next, Some(now));
        PendingAnswer { connection, request, next, since, deadline }
    }

    /// Returns the push that begins with this part, for a shard that has applied `step` steps, if
    /// it counts them.
    fn new_push(&self, step: Option<u64>) -> PushArrival {
        let (named, part) = (self.request.envelope.step, &self.part);
        PushArrival {
            sequence: self.sequence(),
            operation: part.operation,
            token: part.token,
            generation: part.generation,
            call: self.call,
            // No client can have read a step that was not made.
            step: step.map_or(named, |step| named.min(GlobalStep(step))),
            read: part.read,
            extents: Extents::default(),
            shared: Extents::default(),
            scanning: false,
            bytes: 0,
            whole: None,
            order: 0,
            squares: None,
        }
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

/// A push whose last part has arrived, and which counts once it passes the checks.
#[derive(Clone, Copy, Debug)]
struct WholePush {
    client: ClientKey,
    push_slot: u32,
    /// The number of bytes that the last part has named.
    named_bytes: u64,
}

impl Intake {
    /// Finds the push that a part belongs to, or begins it, and checks the part's range. Returns
    /// false if the part is to be skipped.
    pub(super) fn find_or_begin_push(
        &mut self,
        variables: &Variables,
        steps: &Steps,
        is_initializing: bool,
        incoming: &IncomingPart,
    ) -> Result<bool, Refusal> {
        let IncomingPart { request, client, part, call, range, .. } = incoming;
        let (client, sequence) = (*client, incoming.sequence());
        let assigns = matches!(part.operation, Operation::Assign {});
        match &variables.state {
            VariablesState::Ready(_) => {}
            VariablesState::Declared(_) if assigns && !is_initializing => {
                // Only a chief may assign the first values.
                if request.role != (Role::Chief {}) {
                    let (role, kind) = (request.role.code(), request.kind);
                    return Err(Refusal::Role { role, kind });
                }
            }
            _ => return Err(Refusal::NotInitialized {}),
        }
        let Some(inbox) = &self.inbox else {
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
                if let Some(inbox) = self.inbox.as_mut().filter(|_| part.whole.is_some()) {
                    inbox.set_whole(push_slot, incoming.pending_answer(request.since));
                }
                return Ok(false);
            }
            Some((_, push)) if push.call.map(|call| call.id) != call.map(|call| call.id) => {
                return Err(unsupported(request.kind, "all parts of a push are of one call"));
            }
            Some((push_slot, _)) if push_slot == part.push_slot => {}
            // A push has one push slot.
            Some((_, _)) => return Err(Refusal::PushSlotTaken { push_slot: part.push_slot }),
            None => {
                let unused = inbox.arrival(part.push_slot).is_none();
                if !inbox.holds(client, part.push_slot) || !unused {
                    return Err(Refusal::PushSlotTaken { push_slot: part.push_slot });
                }
                self.check_token(steps, client, part)?;
                let step = steps.follower.as_ref().map(|follower| follower.step());
                if let Some(inbox) = &mut self.inbox {
                    inbox.begin(part.push_slot, incoming.new_push(step), request.since);
                }
            }
        }
        if range.is_empty() {
            return Ok(true);
        }
        self.check_range(variables, part, range).map(|()| true)
    }

    /// Checks that a gradient that begins with this part has a token, on the step owner in
    /// asynchronous mode.
    ///
    /// The parts before it may have been skipped as stale, while the client held the token. Without
    /// them the push could only be refused for its range or its length, which its client cannot
    /// mend.
    fn check_token(
        &self,
        steps: &Steps,
        client: ClientKey,
        part: &PushPart,
    ) -> Result<(), Refusal> {
        let &PushPart { operation, token, generation, .. } = part;
        let Some(owner) = steps.owner.as_ref().filter(|_| !steps.is_synchronous()) else {
            return Ok(());
        };
        let is_held = || owner.ledger().holds(client, token, generation) && !self.is_whole(token);
        if operation == (Operation::Gradient {}) && !is_held() {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
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

    /// Provides the memory for a part's body. The first body of a slot beside a push buffer
    /// allocates it.
    fn prepare_body(
        &mut self,
        files: &ShardFiles,
        incoming: &mut IncomingPart,
        body_bytes: u64,
    ) -> Result<(), Refusal> {
        let push_slot = incoming.part.push_slot;
        if let Some(inbox) = self.inbox.as_mut().filter(|_| !incoming.range.is_empty()) {
            // There may be no memory for parts beside a push buffer. Other slots have theirs.
            let allocated = inbox.ensure_own_memory(push_slot, &files.budget);
            allocated.map_err(|_| Refusal::PushSlotTaken { push_slot })?;
        }
        if let Some(encoded) = &mut incoming.encoded {
            encoded.bytes = self.buffer_pool.take(body_bytes as usize);
            encoded.bytes.resize(body_bytes as usize, 0);
        }
        Ok(())
    }

    /// Counts the body of a part that has arrived, and decodes it into its push slot if it is
    /// encoded. Fails if the slot was reclaimed while the body was arriving.
    fn take_body(&mut self, incoming: &IncomingPart) -> Result<(), Refusal> {
        let (push_slot, range) = (incoming.part.push_slot, &incoming.range);
        let taken = Refusal::PushSlotTaken { push_slot };
        let Some(inbox) = self.inbox.as_mut().filter(|inbox| {
            inbox.holds(incoming.client, push_slot) && inbox.arrival(push_slot).is_some()
        }) else {
            return Err(taken);
        };
        match &incoming.encoded {
            None => self.counters.push_bytes.add(range.end - range.start),
            Some(encoded) => {
                self.counters.push_bytes.add(encoded.bytes.len() as u64);
                encoded.decode_into(inbox.bytes_mut(push_slot, range.clone()).ok_or(taken)?)?;
            }
        }
        Ok(())
    }

    /// Adds the range of a part whose body is in its push slot. Returns whether the push may be
    /// applied from this part on, as its parts arrive.
    fn add_range(&mut self, now: Instant, variables: &Variables, incoming: &IncomingPart) -> bool {
        let (push_slot, range) = (incoming.part.push_slot, &incoming.range);
        let Some(inbox) = &mut self.inbox else { return false };
        let first = inbox.arrival(push_slot).is_some_and(|push| push.bytes == 0);
        let shared = inbox.is_shared(push_slot);
        inbox.add(push_slot, range.clone(), now);
        // A push with ranges in a push buffer is applied once it is whole, as those ranges are; a
        // small push is applied in place then.
        let bytes = range.end - range.start;
        let small =
            incoming.part.whole.is_some() && variables.store().is_some_and(|s| s.is_small(bytes));
        first && !shared && !small
    }
}

impl WholePush {
    /// Checks everything about the push that only its end shows: its bytes, its rows and its token.
    fn check(
        &self,
        intake: &Intake,
        files: &ShardFiles,
        peers: &Peers,
        steps: &Steps,
        variables: &Variables,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&intake.inbox, variables.store()) else {
            return Err(Refusal::NotInitialized {});
        };
        let &WholePush { client, push_slot, named_bytes: named } = self;
        let Some(push) = inbox.arrival(push_slot) else {
            return Err(Refusal::PushSlotTaken { push_slot });
        };
        if push.bytes != named {
            return Err(Refusal::Length { named, received: push.bytes });
        }
        for extent in push.extents.ranges() {
            let cut = store.layout().cut_at(extent.end);
            if let Some(cut) = cut.filter(|cut| !cut.is_sparse()) {
                let start = cut.offset.max(extent.start);
                return Err(Refusal::Incomplete {
                    partition: cut.id,
                    bytes: extent.end - start,
                    expected: cut.end() - cut.offset,
                });
            }
        }
        inbox.check_rows(push_slot, store.layout())?;
        self.check_tables(intake, files, variables)?;
        let (token, generation) = (push.token, push.generation);
        let gradient = push.operation == Operation::Gradient {};
        let held = match &steps.owner {
            // In synchronous mode a push under a token that is over is stale. It is not refused.
            _ if steps.is_synchronous() => true,
            Some(owner) => owner.ledger().holds(client, token, generation),
            None => peers.could_hold_token(client, token, generation),
        };
        if let Some(call) = &push.call {
            steps.calls.check(call)?;
        }
        // A token pays for one push.
        let spent = inbox.whole_tokens().any(|other| other == token);
        if gradient && (token.0 == 0 || !held || spent) {
            return Err(Refusal::Token { token, generation });
        }
        Ok(())
    }

    /// Checks that the new rows of the push fit into the tables that evict nothing, together
    /// with those of the complete pushes before it. Checks for every table that assigned rows fit.
    fn check_tables(
        &self,
        intake: &Intake,
        files: &ShardFiles,
        variables: &Variables,
    ) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&intake.inbox, variables.store()) else {
            return Ok(());
        };
        let push_slot = self.push_slot;
        let operation = inbox.arrival(push_slot).map(|push| push.operation);
        let assigned = operation.is_some_and(|operation| operation != Operation::Gradient {});
        for table in store.tables() {
            let partition = table.partition();
            let Some(rows) = inbox.rows(push_slot, partition) else { continue };
            let (more, limit) = (rows.len() as u64, table.limit());
            if assigned && more > limit {
                let (variable, rows) = (partition.variable, table.rows());
                return Err(Refusal::TableFull { variable, rows, more, limit });
            }
            if !table.rejects_when_full() {
                continue;
            }
            let due = inbox.whole_slots().filter(|&other| other != push_slot).chain([push_slot]);
            let pushes: PerPush<_> =
                due.filter_map(|push_slot| inbox.rows(push_slot, partition)).collect();
            // New rows are counted only if they might exceed the limit.
            let most: u64 = pushes.iter().map(|rows| rows.len() as u64).sum();
            if table.rows() + most <= table.limit() {
                continue;
            }
            let mut ids: Vec<u64> = pushes.iter().flat_map(PushedRows::numbers).collect();
            ids.sort_unstable();
            let more = table.count_new(&files.journal, &ids, assigned);
            // Admission by chance admits few new rows, so only a table that is full refuses them.
            let sure = if table.admits_by_chance() && !assigned { more.min(1) } else { more };
            let rows = table.rows();
            if rows + sure > limit {
                return Err(Refusal::TableFull { variable: partition.variable, rows, more, limit });
            }
        }
        Ok(())
    }
}

impl Shard {
    /// Handles the message of a part: chooses the memory for its body.
    pub(in crate::shard) fn part(
        &mut self,
        header: &Header,
        request: PeerRequest,
        client: ClientKey,
        (part, call): (PushPart, Option<CallRef>),
        form: Option<PartEncoding>,
    ) {
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
        let mut incoming = IncomingPart { request, client, part, call, range, encoded };
        let Shard { variables, files, peers, intake, applier, steps, out, .. } = self;
        if !intake.is_part_needed(peers, steps, out, &incoming) {
            return;
        }
        let is_initializing = applier.is_initializing();
        let begun = match unfit {
            Some(refusal) => Err(refusal),
            None => intake.find_or_begin_push(variables, steps, is_initializing, &incoming),
        };
        let body = begun.and_then(|needed| match needed {
            true => intake.prepare_body(files, &mut incoming, header.body_bytes).map(|()| true),
            false => Ok(false),
        });
        match body {
            Ok(true) => self.receive(&request, header, ExpectedBody::Part(incoming)),
            Ok(false) => {}
            Err(refusal) => intake.refuse_push(peers, out, &incoming, refusal),
        }
    }

    /// The body of a part has arrived.
    pub(in crate::shard) fn part_received(&mut self, now: Instant, incoming: IncomingPart) {
        if let Err(refusal) = self.receive_part(now, &incoming) {
            self.intake.refuse_push(&mut self.peers, &mut self.out, &incoming, refusal);
        }
        if let Some(encoded) = incoming.encoded {
            self.intake.buffer_pool.put(encoded.bytes);
        }
    }

    fn receive_part(&mut self, now: Instant, incoming: &IncomingPart) -> Result<(), Refusal> {
        if let Some(refusal) = self.files.poisoned() {
            return Err(refusal);
        }
        self.intake.take_body(incoming)?;
        let (push_slot, range) = (incoming.part.push_slot, &incoming.range);
        if !range.is_empty() {
            let may_begin = self.intake.add_range(now, &self.variables, incoming);
            let arrived = ArrivedPart { push_slot, range, may_begin };
            let Shard { applier, intake, variables, steps, pulls, .. } = self;
            if !applier.apply_on_arrival(intake, variables, steps, pulls, arrived)? {
                intake.scan_part(variables, push_slot, range)?;
            }
        }
        self.complete_push(now, incoming)
    }

    /// Queues a push whose last part this is.
    pub(super) fn complete_push(
        &mut self,
        now: Instant,
        incoming: &IncomingPart,
    ) -> Result<(), Refusal> {
        let Some(named_bytes) = incoming.part.whole else { return Ok(()) };
        let (client, push_slot) = (incoming.client, incoming.part.push_slot);
        let Shard { variables, files, peers, intake, applier, steps, out, .. } = self;
        WholePush { client, push_slot, named_bytes }
            .check(intake, files, peers, steps, variables)?;
        intake.count_direct_push(push_slot);
        let push = intake.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        let waits = push.is_some_and(|push| steps.waits_for_step(push));
        if let Some(inbox) = &mut intake.inbox {
            inbox.set_whole(push_slot, incoming.pending_answer(now));
        }
        match waits {
            _ if intake.is_scanned_first(variables, steps, push_slot) => {
                applier.begin_scan(intake, push_slot)
            }
            true => {
                HeldPush { push_slot }.take_part(steps, applier, intake, peers, out, now);
            }
            false => applier.jobs.push_back(ShardJob::Push(PushJob::new(push_slot, false))),
        }
        Ok(())
    }
}
