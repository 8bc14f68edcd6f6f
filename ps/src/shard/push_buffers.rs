//! Trays: lent to clients, and pushes of which parts lie there already.
//!
//! A client changes what lies in its tray whenever it likes. What is looked at for NaN and then applied, or added
//! up, is the same, in asynchronous mode, where that is done as a push is applied; pushes that may be made in
//! place, and gradients that wait for a synchronous step, are looked at before, and a client that writes NaN
//! into its tray after that harms the training as any wrong gradient of its would.
//!
//! A tray goes with the process that has lent it, and what lies whole there with it. Where each push is
//! answered once it is applied nothing was promised of that, and its client sends it again; but a
//! shard that says of a gradient that it is held, and keeps its state in a directory, lends no trays.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::finite::Exponents;
use pushpull_common::protocol::limits::PUSH_BUFFERS_MAX;
use pushpull_common::protocol::message::{
    Operation, PushPart, PushShared, SharedPushBuffer, Stretch,
};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Header, Refusal};
use pushpull_common::tensor::DType;

use super::checks::{Found, Looker};
use super::replicas::{ClientKey, Presence};
use super::shared::unsupported;
use super::work::{Job, SLICE_BYTES};
use super::{Part, Shard, answer_to, deadline_of};
use crate::arena::SharedBytes;
use crate::config::NonFinite;
use crate::error::StorageError;
use crate::inbox::{Arrival, Values};
use crate::store::{Give, Input, SharedInput};
use crate::volatile::Volatile;

/// What a group of variables counts for at least, when it is looked at.
const GROUP_BYTES: u64 = 256;

/// How much of a tray is searched at a time for what is to be refused; a multiple of every element's size.
const FOUND_BYTES: usize = 4 << 10;

/// How far what a push has in a tray has been looked at.
#[derive(Debug, Default)]
pub(super) struct Look {
    range: usize,
    done_to: u64,
}

/// Looks at what a gradient that is to be held has in a tray.
#[derive(Debug)]
pub(super) struct LookJob {
    push_slot: u32,
    /// Which push it is of those that came whole.
    order: u64,
    look: Look,
    refusal: Option<Refusal>,
}

impl LookJob {
    pub(super) fn new(push_slot: u32, order: u64) -> LookJob {
        let (look, refusal) = (Look::default(), None);
        LookJob { push_slot, order, look, refusal }
    }
}

/// Values in a tray, looked at as they are taken out of it.
pub(super) struct Seen<'a> {
    gradient: Volatile<'a>,
    done: usize,
    looker: Looker<'a>,
    dtype: DType,
    /// Those of the type, if they are looked at.
    exponents: Exponents,
    /// Where they begin in the layout.
    start: u64,
    found: Option<Found>,
}

impl<'a> Seen<'a> {
    /// Values of one type that belong here in the layout, to be looked at or not.
    pub(super) fn new(
        (gradient, start): (Volatile<'a>, u64),
        dtype: DType,
        looker: Looker<'a>,
        looks: bool,
    ) -> Seen<'a> {
        let looks = looks && looker.policy != NonFinite::Allow;
        let exponents = if looks { Exponents::of(dtype) } else { Exponents::NONE };
        Seen { gradient, done: 0, looker, dtype, exponents, start, found: None }
    }

    /// The first of them that must not be applied. What was made of it is to be forgotten.
    pub(super) fn found(&self) -> Option<Found> {
        self.found
    }
}

impl Seen<'_> {
    /// Where the next of them belongs in the layout.
    fn at(&self) -> u64 {
        self.start + self.done as u64
    }

    /// Which of so many of the next is to be refused, as one is that has been taken. If its client has
    /// changed it since, the first of them is named for it.
    fn find_again(&self, bytes: usize) -> Option<Found> {
        let mut tile = [0; FOUND_BYTES];
        let found = (0..bytes).step_by(FOUND_BYTES).find_map(|from| {
            let tile = &mut tile[..FOUND_BYTES.min(bytes - from)];
            self.gradient.behind(self.done + from).copy(tile, Exponents::NONE);
            self.looker.find(self.dtype, self.at() + from as u64, tile)
        });
        let is_refused = self.looker.policy == NonFinite::Reject;
        found.or_else(|| is_refused.then(|| Found::gone(self.dtype, self.at())))
    }
}

impl Give for Seen<'_> {
    fn give(&mut self, to: &mut [u8]) {
        let full = self.gradient.behind(self.done).copy(to, self.exponents);
        if full && self.found.is_none() {
            self.found = self.looker.find(self.dtype, self.at(), to);
        }
        self.done += to.len();
    }

    fn shared(&self) -> Option<SharedInput<'_>> {
        let gradients = std::slice::from_ref(&self.gradient);
        Some(SharedInput { gradients, at: self.done, over: 1, exponents: self.exponents })
    }

    fn taken(&mut self, bytes: usize, full: bool) {
        if full && self.found.is_none() {
            self.found = self.find_again(bytes);
        }
        self.done += bytes;
    }
}

impl Shard {
    /// A client asks for a tray.
    pub(super) fn share_push_buffer(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        request: Envelope,
        kind: u16,
    ) -> Result<(), Refusal> {
        self.may_be_shared(connection, kind)?;
        if self.is_synchronous() && !self.arena.place.is_shareable() {
            let why = "what is held for a step in a directory survives this process, and no push buffer does";
            return Err(unsupported(kind, why));
        }
        let is_ready = self.is_ready();
        let inbox = self.inbox.as_mut().filter(|_| is_ready).ok_or(Refusal::NotInitialized {})?;
        let (bytes, stride) = inbox.push_buffer_bytes();
        if bytes == 0 {
            return Err(unsupported(kind, "no values of this shard lie in a push buffer"));
        }
        if inbox.has_push_buffer(client) {
            return Err(unsupported(kind, "this client has a push buffer"));
        }
        if inbox.push_buffers() >= PUSH_BUFFERS_MAX {
            return Err(unsupported(kind, "as many push buffers are shared as there can be"));
        }
        let loan = self.budget.take(bytes).map_err(does_not_fit)?;
        let (memory, descriptor) = SharedBytes::new(bytes as usize)
            .map_err(|error| unsupported(kind, &format!("cannot share memory: {error}")))?;
        let push_slots = inbox.share_push_buffer(client, (memory, loan), now);
        let push_slots = List::new(push_slots).expect("a push buffer has few slots");
        let push_buffer = SharedPushBuffer { bytes, first: 0, stride, push_slots };
        self.send_shared(connection, request, push_buffer.into(), vec![descriptor]);
        Ok(())
    }

    /// Parts of a push lie in a tray.
    pub(super) fn push_shared(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        header: &Header,
        shared: &PushShared,
    ) {
        let PushShared { operation, token, generation, push_slot, whole, next, read, .. } = *shared;
        let part =
            PushPart { operation, token, generation, push_slot, offset: 0, whole, next, read };
        let incoming = Part {
            connection,
            client,
            push_slot,
            range: 0..0,
            encoded: None,
            request: answer_to(header),
            whole,
            next,
            deadline: deadline_of(now, header),
        };
        if !self.is_of_use(now, header, &part, &incoming) {
            return;
        }
        let taken = self.take_shared(now, header, &part, &incoming, shared.ranges.items());
        if let Err(refusal) = taken {
            self.refuse_push(now, &incoming, refusal);
        }
    }

    fn take_shared(
        &mut self,
        now: Instant,
        header: &Header,
        part: &PushPart,
        incoming: &Part,
        ranges: &[Stretch],
    ) -> Result<(), Refusal> {
        let (connection, client) = (incoming.connection, incoming.client);
        if !self.place(now, connection, client, header, part, &(0..0))? {
            return Ok(());
        }
        for &Stretch { start, end } in ranges {
            self.take_stretch(now, part, start..end)?;
        }
        match part.whole {
            None => Ok(()),
            Some(named) => self.came_whole(now, incoming, named, true),
        }
    }

    /// One stretch that lies in a tray: whole partitions, none of which comes by rows.
    fn take_stretch(
        &mut self,
        now: Instant,
        part: &PushPart,
        range: Range<u64>,
    ) -> Result<(), Refusal> {
        self.check_place(part, &range)?;
        let layout = self.store().ok_or(Refusal::NotInitialized {})?.layout();
        let bytes = range.end - range.start;
        let cut = layout.cut_at(range.start).or_else(|| layout.cut_at(range.end));
        let sparse = self.fused_ranges.first_touched(layout, &range, |sparse, _| sparse);
        let limit = match (cut, sparse) {
            _ if range.end > layout.bytes() => Some(layout.bytes()),
            (Some(cut), _) => Some(cut.end()),
            (_, sparse) => sparse.map(|sparse| sparse.offset),
        };
        if let Some(limit) = limit {
            return Err(Refusal::Range { offset: range.start, bytes, limit });
        }
        let push_slot = part.push_slot;
        let inbox = self.inbox.as_mut().filter(|inbox| inbox.is_shared(push_slot));
        let inbox = inbox.ok_or(Refusal::PushSlotTaken { push_slot })?;
        self.counters.push_bytes.add(bytes);
        inbox.add_shared(push_slot, range, now);
        Ok(())
    }

    /// Whether there is memory for the body of a part that comes over the connection, once it has been asked
    /// for.
    pub(super) fn has_memory_for(&mut self, part: &Part) -> bool {
        let inbox = self.inbox.as_mut().filter(|_| !part.range.is_empty());
        inbox.is_none_or(|inbox| inbox.have_own(part.push_slot, &self.budget).is_ok())
    }

    /// A push has come whole.
    pub(super) fn count_direct_push(&self, push_slot: u32) {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        if push.is_some_and(|push| !push.shared.ranges().is_empty()) {
            self.counters.direct_pushes.add(1);
        }
    }

    /// Whether a push has something in a tray that has to be looked at.
    pub(super) fn has_unseen(&self, push_slot: u32) -> bool {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        let shared = push.is_some_and(|push| !push.shared.ranges().is_empty());
        shared && self.config.non_finite != NonFinite::Allow
    }

    /// Whether what a push has in a tray is looked at before any of it is applied: where values may be
    /// changed where they lie, which is not given up. Else it is looked at as it is applied.
    pub(super) fn is_looked_at_first(&self, push_slot: u32) -> bool {
        self.may_stay(push_slot) && self.has_unseen(push_slot)
    }

    /// Whether what is sent in one part is looked at as it is applied, and not before.
    pub(super) fn is_looked_at_as_applied(&self, push_slot: u32) -> bool {
        let looks = self.config.non_finite != NonFinite::Allow;
        looks && !self.is_synchronous() && !self.may_stay(push_slot)
    }

    /// Whether what a push changes may not be given up.
    fn may_stay(&self, push_slot: u32) -> bool {
        let (Some(store), Some(inbox)) = (self.store(), &self.inbox) else { return false };
        let by_rows = store.layout().sparse().len() > 0;
        let small = inbox.arrival(push_slot).is_some_and(|push| {
            // What the change is begun with: no more and no less.
            let bytes = push.extents.ranges().iter().map(|range| range.end - range.start);
            store.is_small(bytes.fold(0, u64::saturating_add))
        });
        by_rows || small
    }

    /// Has what a gradient that is whole has in a tray looked at, before it is held.
    pub(super) fn begin_look(&mut self, push_slot: u32) {
        let Some(inbox) = &mut self.inbox else { return };
        let Some(order) = inbox.arrival(push_slot).map(|push| push.order) else { return };
        inbox.set_unseen(push_slot, order, true);
        self.jobs.push_back(Job::look(push_slot, order));
    }

    /// Has the squares of a gradient that is whole added up.
    pub(super) fn begin_norm(&mut self, push_slot: u32) {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(push_slot));
        let order = push.map(|push| push.order);
        self.jobs.extend(order.map(|order| Job::measure(push_slot, order)));
    }

    /// A slice of the work on a gradient; whether it is done.
    pub(super) fn work_on_look(&mut self, job: &mut LookJob) -> bool {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(job.push_slot));
        if push.is_none_or(|push| push.order != job.order) {
            // It has been dropped, and its room may hold another.
            return true;
        }
        match self.scan_shared(job.push_slot, &mut job.look) {
            Ok(done) => done,
            Err(refusal) => {
                job.refusal = Some(refusal);
                true
            }
        }
    }

    /// What a gradient has in a tray has been looked at: now it is held, or refused.
    pub(super) fn looked(&mut self, now: Instant, job: LookJob) {
        // It may have been dropped meanwhile, and its room hold another.
        let inbox = self.inbox.as_mut();
        let is_there = inbox.is_some_and(|inbox| inbox.set_unseen(job.push_slot, job.order, false));
        match job.refusal {
            _ if !is_there => {}
            None => self.push_held(now, job.push_slot),
            Some(refusal) => self.refuse_whole(now, job.push_slot, refusal),
        }
    }

    /// Looks at a slice of what a push has in a tray; whether that was the last of it.
    pub(super) fn scan_shared(&self, push_slot: u32, look: &mut Look) -> Result<bool, Refusal> {
        let (Some(inbox), Some(store)) = (&self.inbox, self.store()) else { return Ok(true) };
        let (Some(push), Some(source)) = (inbox.arrival(push_slot), inbox.source(push_slot)) else {
            return Ok(true);
        };
        let looker = Looker { policy: self.config.non_finite, counters: &self.counters };
        let mut budget = SLICE_BYTES;
        while let Some(range) = push.shared.ranges().get(look.range) {
            if budget == 0 {
                return Ok(false);
            }
            let left = look.done_to.max(range.start)..range.end;
            let Some(fused_range) = self.fused_ranges.within(left.clone()).next() else {
                look.range += 1;
                continue;
            };
            let mut part = fused_range.part_of(&left);
            part.end = part.end.min(part.start.saturating_add(budget));
            let bytes = part.end - part.start;
            if let Some((Values::Shared(shared), _)) = source.values(part.clone()) {
                let mut seen = Seen::new((shared, part.start), fused_range.dtype, looker, true);
                Input::Given(&mut seen).each(0..bytes as usize, |_, _| {});
                if let Some(found) = seen.found() {
                    return Err(found.refusal(store.layout()));
                }
            }
            // In whole words, so that the next slice begins with an element of any type; a group takes some
            // time, however short it is.
            budget = budget.saturating_sub(bytes.next_multiple_of(8).max(GROUP_BYTES));
            look.done_to = part.end;
        }
        Ok(true)
    }

    /// Refuses a push that is whole, before anything of it counts. Its token is its client's still, and
    /// goes to others if that is gone.
    pub(super) fn refuse_whole(&mut self, now: Instant, push_slot: u32, refusal: Refusal) {
        let Some((client, push)) = self.inbox.as_mut().and_then(|inbox| inbox.take(push_slot))
        else {
            return;
        };
        self.counters.pushes_dropped.add(1);
        let heard = client.map(|client| self.replicas.client(client));
        let present = heard.is_some_and(|client| client.presence == Presence::Present);
        let listens = heard.and_then(|client| client.connection);
        if let Some(whole) = push.whole.filter(|whole| listens == Some(whole.connection)) {
            let (request, sequence) = (whole.request, push.sequence);
            let request = Envelope { request, sequence, ..Envelope::default() };
            self.refuse(whole.connection, request, refusal);
        }
        if push.operation == (Operation::Gradient {}) && !present {
            self.return_token_of(&push);
            self.decide(now);
        }
        self.give_parked_push_slots(now);
        self.grant_parked_tokens(now);
    }

    /// A gradient whose client is gone is not applied: others may have its token.
    fn return_token_of(&mut self, push: &Arrival) {
        let Some(owner) = &mut self.owner else { return };
        let holder = owner.outstanding().find(|(token, _)| *token == push.token);
        if let Some((token, holder)) = holder
            && owner.give_back(holder, token, push.generation)
        {
            self.counters.tokens_taken_back.add(1);
        }
    }
}

fn does_not_fit(error: StorageError) -> Refusal {
    match error {
        StorageError::DoesNotFit { need, limit } => Refusal::DoesNotFit { need, limit },
        error => Refusal::Storage { detail: super::Detail::clipped(error.to_string()) },
    }
}
