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

use pushpull_common::protocol::limits::PUSH_BUFFERS_MAX;
use pushpull_common::protocol::message::{PushPart, PushShared, SharedPushBuffer, Stretch};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Header, Refusal};

use super::replicas::ClientKey;
use super::shared::unsupported;
use super::{Part, Shard, answer_to, deadline_of};
use crate::arena::SharedBytes;
use crate::error::StorageError;

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
            Some(named) => self.came_whole(now, incoming, named),
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
}

fn does_not_fit(error: StorageError) -> Refusal {
    match error {
        StorageError::DoesNotFit { need, limit } => Refusal::DoesNotFit { need, limit },
        error => Refusal::Storage { detail: super::Detail::clipped(error.to_string()) },
    }
}
