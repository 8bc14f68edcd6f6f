//! [`Intake`]: push slots, parts on their way into them, and buffers for bodies.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use pushpull_common::catalogue::ShardLayout;
use pushpull_common::ids::{Sequence, TokenId};
use pushpull_common::protocol::limits::PUSH_BUFFERS_MAX;
use pushpull_common::protocol::message::{Operation, SharedPushBuffer};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Message, Refusal};
use pushpull_store::arena::{Budget, SharedBytes};

use super::request::buffer_pool::BufferPool;
use super::request::incoming_part::IncomingPart;
use super::request::{PeerRequest, storage_refusal, unsupported};
use crate::aggregate::current_step::PerPush;
use crate::client_key::ClientKey;
use crate::config::PsConfig;
use crate::inbox::{Inbox, PushArrival};
use crate::metrics::Counters;

/// The pushes that a shard is receiving or holds.
///
/// Invariants: a push is whole or belongs to a client with a connection. No token has two whole
/// pushes.
#[derive(Debug)]
pub(super) struct Intake {
    config: Arc<PsConfig>,
    counters: Arc<Counters>,
    /// `None` while no variables are declared.
    pub(super) inbox: Option<Inbox>,
    /// The number of the first push slot of the next inbox.
    pub(super) next_push_slot: u32,
    /// Whether a push slot may be given to a client that makes no progress.
    pub(super) may_stall: bool,
    /// Pooled buffers for bodies.
    buffer_pool: BufferPool,
}

/// The state in which a part finds its push.
pub(super) enum FoundPush {
    /// Not a byte of it has arrived, and its slot is free for it.
    Unbegun,
    /// Some of it has arrived.
    Begun,
    /// It arrived completely over an earlier connection, and will be applied.
    Whole,
}

impl Intake {
    pub(super) fn new(config: Arc<PsConfig>, counters: Arc<Counters>) -> Intake {
        let inbox = None;
        let next_push_slot = 1;
        let buffer_pool = BufferPool::default();
        let may_stall = false;
        Intake { config, counters, inbox, next_push_slot, may_stall, buffer_pool }
    }

    /// Returns the push in a slot.
    pub(super) fn push(&self, push_slot: u32) -> Option<&PushArrival> {
        self.inbox.as_ref()?.arrival(push_slot)
    }

    /// Returns the push that a part belongs to.
    pub(super) fn push_in(&self, incoming: &IncomingPart) -> Result<&PushArrival, Refusal> {
        let push_slot = incoming.part.push_slot;
        let inbox = self.inbox.as_ref().ok_or(Refusal::NotInitialized {})?;
        inbox.arrival(push_slot).ok_or(Refusal::PushSlotTaken { push_slot })
    }

    /// Returns the push of a client with this sequence, and its slot.
    fn push_of(&self, client: ClientKey, sequence: Sequence) -> Option<(u32, &PushArrival)> {
        let inbox = self.inbox.as_ref()?;
        let push_slot = inbox.find(client, sequence)?;
        Some((push_slot, inbox.arrival(push_slot)?))
    }

    /// Returns the slot of a push of a client.
    pub(super) fn push_slot_of(&self, client: ClientKey, sequence: Sequence) -> Option<u32> {
        self.inbox.as_ref()?.find(client, sequence)
    }

    /// Returns whether the push of a client is complete in the inbox.
    pub(super) fn has_whole(&self, client: ClientKey, sequence: Sequence) -> bool {
        self.push_of(client, sequence).is_some_and(|(_, push)| push.whole.is_some())
    }

    /// Returns the bytes of a client's push that have been received, if it has begun.
    pub(super) fn bytes_of(&self, client: ClientKey, sequence: Sequence) -> Option<u64> {
        self.push_of(client, sequence).map(|(_, push)| push.bytes)
    }

    /// Returns the squared norm on this shard of the gradient in a push slot. `None` while it is
    /// being computed or scanned. 0 without clipping.
    pub(super) fn squares_of(&self, push_slot: u32) -> Option<f64> {
        let push = self.push(push_slot)?;
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

    /// Returns the slot of the complete push of a token.
    pub(super) fn whole_push_slot_of(&self, token: TokenId) -> Option<u32> {
        self.inbox.as_ref()?.whole_push_slot_of(token.0)
    }

    /// Counts a complete push if parts of it are in a push buffer.
    pub(super) fn count_direct_push(&self, push_slot: u32) {
        if self.push(push_slot).is_some_and(|push| !push.shared.ranges().is_empty()) {
            self.counters.direct_pushes.add(1);
        }
    }

    pub(super) fn release(&mut self, push_slot: u32) {
        if let Some(inbox) = &mut self.inbox {
            inbox.release(push_slot);
        }
    }

    /// Releases the push slot of a push of which it has received parts.
    pub(super) fn release_begun(&mut self, incoming: &IncomingPart) {
        let push_slot = incoming.part.push_slot;
        if self.push_slot_of(incoming.client, incoming.sequence()) == Some(push_slot) {
            self.release(push_slot);
        }
    }

    /// Drops the pushes that have made no progress for a lease. Their push slots go to others.
    /// Returns whether any slot has changed.
    pub(super) fn reclaim_stalled(&mut self, now: Instant) -> bool {
        let Some(inbox) = &mut self.inbox else { return false };
        self.may_stall = inbox.holds_any();
        let (stalled, has_changed) = inbox.reclaim_stalled(now, self.config.lease);
        self.counters.pushes_dropped.add(stalled as u64);
        has_changed
    }

    /// Drops the incomplete pushes of a client whose connection has ended or was replaced.
    pub(super) fn discard_incomplete(&mut self, client: ClientKey) {
        if let Some(inbox) = &mut self.inbox {
            self.counters.pushes_dropped.add(inbox.discard_incomplete(client) as u64);
        }
    }

    /// Reserves a push slot for a client that is ready to send, if one is free or can be freed.
    pub(super) fn reserve(
        &mut self,
        now: Instant,
        client: ClientKey,
    ) -> Result<Option<u32>, Refusal> {
        let inbox = self.inbox.as_mut().ok_or(Refusal::NotInitialized {})?;
        self.may_stall = true;
        let free = inbox.reserve(client, now);
        Ok(free.or_else(|| inbox.free_up(now).then(|| inbox.reserve(client, now)).flatten()))
    }

    /// Reserves a free push slot for a client.
    pub(super) fn reserve_free(&mut self, now: Instant, client: ClientKey) -> Option<u32> {
        self.may_stall = true;
        self.inbox.as_mut()?.reserve(client, now)
    }

    /// Frees a push slot, if none is free. Returns false if none can be freed.
    pub(super) fn frees_push_slot(&mut self, now: Instant) -> bool {
        self.inbox.as_mut().is_some_and(|inbox| inbox.free_up(now))
    }

    /// Takes back the memory of push slots that nobody has used for a time.
    pub(super) fn take_back_memory(&mut self, now: Instant) {
        if let Some(inbox) = self.inbox.as_mut().filter(|inbox| inbox.has_reclaimable_memory()) {
            inbox.take_back_memory(now);
        }
    }

    /// Returns a push slot for a client that has not requested one; 0 for none.
    pub(super) fn offer(&mut self, now: Instant, client: ClientKey) -> u32 {
        self.may_stall = true;
        self.inbox.as_mut().and_then(|inbox| inbox.offer(client, now)).unwrap_or(0)
    }

    /// Drops a push that is refused for this part. Its push slot goes to others.
    pub(super) fn drop_refused(&mut self, incoming: &IncomingPart) {
        let push_slot = incoming.part.push_slot;
        let sequence = incoming.sequence();
        self.counters.pushes_dropped.add(1);
        if let Some(inbox) = &mut self.inbox
            && inbox.holds(incoming.client, push_slot)
            && inbox
                .arrival(push_slot)
                .is_none_or(|push| push.sequence == sequence && push.whole.is_none())
        {
            inbox.release(push_slot);
        }
    }

    /// Takes a complete push out of its slot before it counts, with the client that sent it.
    pub(super) fn take_refused(
        &mut self,
        push_slot: u32,
    ) -> Option<(Option<ClientKey>, PushArrival)> {
        let taken = self.inbox.as_mut()?.take(push_slot)?;
        self.counters.pushes_dropped.add(1);
        Some(taken)
    }

    /// Finds the push that a part belongs to, or checks that the push may begin in the slot that
    /// the part names.
    pub(super) fn find_push(&mut self, incoming: &IncomingPart) -> Result<FoundPush, Refusal> {
        let IncomingPart { request, client, part, effect, .. } = incoming;
        let sequence = incoming.sequence();
        let Some(inbox) = &mut self.inbox else {
            return Err(Refusal::NotInitialized {});
        };
        if sequence.0 == 0 {
            let oldest = Sequence(1);
            return Err(Refusal::Window { sequence, oldest, newest: Sequence(u64::MAX) });
        }
        let found = inbox.find(*client, sequence);
        let found = found.and_then(|push_slot| Some((push_slot, inbox.arrival(push_slot)?)));
        match found {
            Some((push_slot, push)) if push.whole.is_some() => {
                if part.whole.is_some() {
                    inbox.set_whole(push_slot, incoming.pending_answer(request.since));
                }
                Ok(FoundPush::Whole)
            }
            Some((_, push))
                if push.effect.map(|effect| effect.id) != effect.map(|effect| effect.id) =>
            {
                Err(unsupported(request.kind, "all parts of a push are of one effect"))
            }
            Some((push_slot, _)) if push_slot == part.push_slot => Ok(FoundPush::Begun),
            // A push has one push slot.
            Some((_, _)) => Err(Refusal::PushSlotTaken { push_slot: part.push_slot }),
            None => {
                let is_used = inbox.arrival(part.push_slot).is_some();
                let is_theirs = inbox.holds(*client, part.push_slot) && !is_used;
                // A slot that was offered long ago may have lost its memory, and get none now.
                match is_theirs && inbox.ensure_memory(part.push_slot, request.since) {
                    true => Ok(FoundPush::Unbegun),
                    false => Err(Refusal::PushSlotTaken { push_slot: part.push_slot }),
                }
            }
        }
    }

    /// Begins the push of a part, on a shard that has applied `step` steps, if it counts them.
    pub(super) fn begin_push(&mut self, incoming: &IncomingPart, step: Option<u64>) {
        if let Some(inbox) = &mut self.inbox {
            let now = incoming.request.since;
            self.may_stall = true;
            inbox.begin(incoming.part.push_slot, incoming.new_push(step), now);
        }
    }

    /// Provides the memory for a part's body. The first body of a slot beside a push buffer
    /// allocates it.
    pub(super) fn prepare_body(
        &mut self,
        budget: &Budget,
        incoming: &mut IncomingPart,
        body_bytes: u64,
    ) -> Result<(), Refusal> {
        let push_slot = incoming.part.push_slot;
        if let Some(inbox) = self.inbox.as_mut().filter(|_| !incoming.range.is_empty()) {
            // There may be no memory for parts beside a push buffer. Other slots have theirs.
            let allocated = inbox.ensure_own_memory(push_slot, budget);
            allocated.map_err(|_| Refusal::PushSlotTaken { push_slot })?;
        }
        if let Some(encoded) = &mut incoming.encoded {
            encoded.bytes = self.buffer_pool.take(body_bytes as usize);
            encoded.bytes.resize(body_bytes as usize, 0);
        }
        Ok(())
    }

    /// Takes back the memory of an encoded body.
    pub(super) fn body_done(&mut self, incoming: IncomingPart) {
        if let Some(encoded) = incoming.encoded {
            self.buffer_pool.put(encoded.bytes);
        }
    }

    /// Returns the memory that receives the body of a part.
    pub(super) fn body_target(
        &mut self,
        client: ClientKey,
        push_slot: u32,
        range: Range<u64>,
    ) -> Option<&mut [u8]> {
        let inbox = self.inbox.as_mut().filter(|inbox| inbox.holds(client, push_slot))?;
        inbox.bytes_mut(push_slot, range)
    }

    /// Counts the body of a part that has arrived, and decodes it into its push slot if it is
    /// encoded. Fails if the slot was reclaimed while the body was arriving.
    pub(super) fn take_body(&mut self, incoming: &IncomingPart) -> Result<(), Refusal> {
        let push_slot = incoming.part.push_slot;
        let range = &incoming.range;
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
    /// applied from this part on, as its parts arrive: unless it is a push of one `small` part,
    /// which is applied in place once it is whole.
    pub(super) fn add_range(
        &mut self,
        now: Instant,
        incoming: &IncomingPart,
        is_small: bool,
    ) -> bool {
        let push_slot = incoming.part.push_slot;
        let Some(inbox) = &mut self.inbox else { return false };
        let is_first = inbox.arrival(push_slot).is_some_and(|push| push.bytes == 0);
        // A push with ranges in a push buffer is applied once it is whole, as those ranges are.
        let is_shared = inbox.is_shared(push_slot);
        inbox.add(push_slot, incoming.range.clone(), now);
        let is_small = incoming.part.whole.is_some() && is_small;
        is_first && !is_shared && !is_small
    }

    /// Adds a range that is in a push buffer.
    pub(super) fn add_shared_range(
        &mut self,
        incoming: &IncomingPart,
        range: Range<u64>,
    ) -> Result<(), Refusal> {
        let push_slot = incoming.part.push_slot;
        let inbox = self.inbox.as_mut().filter(|inbox| inbox.is_shared(push_slot));
        let inbox = inbox.ok_or(Refusal::PushSlotTaken { push_slot })?;
        self.counters.push_bytes.add(range.end - range.start);
        inbox.add_shared(push_slot, range, incoming.request.since);
        Ok(())
    }

    /// Checks the bytes and the rows of a push whose last part has named this number of bytes.
    pub(super) fn check_whole(
        &self,
        push_slot: u32,
        named: u64,
        layout: &ShardLayout,
    ) -> Result<&PushArrival, Refusal> {
        let inbox = self.inbox.as_ref().ok_or(Refusal::NotInitialized {})?;
        let push = inbox.arrival(push_slot).ok_or(Refusal::PushSlotTaken { push_slot })?;
        if push.bytes != named {
            return Err(Refusal::Length { named, received: push.bytes });
        }
        for extent in push.extents.ranges() {
            let cut = layout.cut_at(extent.end);
            if let Some(cut) = cut.filter(|cut| !cut.is_sparse()) {
                let start = cut.offset.max(extent.start);
                return Err(Refusal::Incomplete {
                    partition: cut.id,
                    bytes: extent.end - start,
                    expected: cut.end() - cut.offset,
                });
            }
        }
        inbox.check_rows(push_slot, layout)?;
        Ok(push)
    }

    /// Shares a push buffer with a client. Returns the answer and the descriptors.
    ///
    /// A client can write to its push buffer at any time. In asynchronous mode the update scans
    /// each value as it applies it, so the scanned value is the applied value. Updates in place and
    /// gradients of a synchronous step are scanned before they are applied. A client that writes
    /// NaN after that harms the training as any wrong gradient of its would.
    ///
    /// A push buffer ends with the process that shared it, together with the complete pushes in it.
    /// Where a push is answered only once it is applied, nothing was promised, and the client sends
    /// the push again. A shard that reports gradients as held and keeps its state in a directory
    /// shares no push buffers.
    pub(super) fn share_push_buffer(
        &mut self,
        budget: &Budget,
        request: &PeerRequest,
        client: ClientKey,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        let kind = request.kind;
        let inbox = self.inbox.as_mut().ok_or(Refusal::NotInitialized {})?;
        let (bytes, stride) = inbox.push_buffer_bytes();
        if bytes == 0 {
            return Err(unsupported(kind, "this shard has no values that a push buffer can hold"));
        }
        if inbox.has_push_buffer(client) {
            return Err(unsupported(kind, "this client has a push buffer"));
        }
        if inbox.push_buffers() >= PUSH_BUFFERS_MAX {
            return Err(unsupported(kind, "the maximum number of push buffers is shared"));
        }
        let reservation = budget.reserve_unpromised(bytes).map_err(storage_refusal)?;
        let (memory, descriptor) = SharedBytes::new(bytes as usize)
            .map_err(|error| unsupported(kind, &format!("cannot share memory: {error}")))?;
        self.may_stall = true;
        let push_slots = inbox.share_push_buffer(client, memory, reservation, request.since);
        let push_slots = List::new(push_slots).expect("a push buffer has few slots");
        let push_buffer = SharedPushBuffer { bytes, first: 0, stride, push_slots };
        Ok((push_buffer.into(), vec![descriptor]))
    }

    /// Yields the complete gradients of these clients, without those of effects: an effect that has
    /// not settled everywhere is executed again.
    pub(super) fn whole_gradients<'a>(
        &'a self,
        clients: &'a [ClientKey],
    ) -> impl Iterator<Item = &'a PushArrival> {
        self.inbox.iter().flat_map(move |inbox| {
            let is_theirs =
                |slot: &u32| inbox.holder(*slot).is_some_and(|holder| clients.contains(&holder));
            let whole = inbox.whole_slots().filter(is_theirs);
            whole
                .filter_map(|slot| inbox.arrival(slot))
                .filter(|push| push.operation == (Operation::Gradient {}) && push.effect.is_none())
        })
    }
}
