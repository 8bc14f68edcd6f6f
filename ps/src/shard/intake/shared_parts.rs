//! Pushes by push buffer: a client on the same host writes the values itself, and its messages name
//! the ranges.

use std::ops::Range;
use std::os::fd::OwnedFd;

use pushpull_common::protocol::limits::PUSH_BUFFERS_MAX;
use pushpull_common::protocol::message::{PushPart, PushShared, SharedPushBuffer, SharedRange};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{CallRef, Message, Refusal};
use pushpull_store::arena::SharedBytes;

use super::Intake;
use super::incoming_push::IncomingPart;
use crate::client_key::ClientKey;
use crate::shard::Shard;
use crate::shard::peers::peer_request::PeerRequest;
use crate::shard::peers::unsupported;
use crate::shard::shard_files::{ShardFiles, storage_refusal};
use crate::shard::steps::Steps;
use crate::shard::variables::Variables;

/// Parts of a push that are in its push buffer. They arrive together, without a body.
struct SharedParts<'a> {
    incoming: IncomingPart,
    ranges: &'a [SharedRange],
}

impl SharedParts<'_> {
    /// Returns the parts that a message names.
    fn new(
        request: PeerRequest,
        client: ClientKey,
        shared: &PushShared,
        call: Option<CallRef>,
    ) -> SharedParts<'_> {
        let PushShared { operation, token, generation, push_slot, whole, next, read, .. } = *shared;
        let part =
            PushPart { operation, token, generation, push_slot, offset: 0, whole, next, read };
        let incoming = IncomingPart { request, client, part, call, range: 0..0, encoded: None };
        SharedParts { incoming, ranges: shared.ranges.items() }
    }
}

impl Intake {
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
    pub(in crate::shard) fn share_push_buffer(
        &mut self,
        files: &ShardFiles,
        variables: &Variables,
        steps: &Steps,
        request: &PeerRequest,
        client: ClientKey,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        let (now, kind) = (request.since, request.kind);
        if steps.is_synchronous() && !files.arena.storage.is_shareable() {
            let why = "gradients held for a step survive this process in a directory, and push buffers do not";
            return Err(unsupported(kind, why));
        }
        let is_ready = variables.is_ready();
        let inbox = self.inbox.as_mut().filter(|_| is_ready).ok_or(Refusal::NotInitialized {})?;
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
        let reservation = files.budget.reserve(bytes).map_err(storage_refusal)?;
        let (memory, descriptor) = SharedBytes::new(bytes as usize)
            .map_err(|error| unsupported(kind, &format!("cannot share memory: {error}")))?;
        let push_slots = inbox.share_push_buffer(client, (memory, reservation), now);
        let push_slots = List::new(push_slots).expect("a push buffer has few slots");
        let push_buffer = SharedPushBuffer { bytes, first: 0, stride, push_slots };
        Ok((push_buffer.into(), vec![descriptor]))
    }

    /// Adds one range that is in a push buffer. It covers whole dense partitions.
    fn add_shared_range(
        &mut self,
        variables: &Variables,
        incoming: &IncomingPart,
        range: Range<u64>,
    ) -> Result<(), Refusal> {
        self.check_range(variables, &incoming.part, &range)?;
        let layout = variables.store().ok_or(Refusal::NotInitialized {})?.layout();
        let bytes = range.end - range.start;
        let cut = layout.cut_at(range.start).or_else(|| layout.cut_at(range.end));
        let sparse = variables.fused_ranges.first_touched(layout, &range, |sparse, _| sparse);
        let limit = match (cut, sparse) {
            _ if range.end > layout.bytes() => Some(layout.bytes()),
            (Some(cut), _) => Some(cut.end()),
            (_, sparse) => sparse.map(|sparse| sparse.offset),
        };
        if let Some(limit) = limit {
            return Err(Refusal::Range { offset: range.start, bytes, limit });
        }
        let push_slot = incoming.part.push_slot;
        let inbox = self.inbox.as_mut().filter(|inbox| inbox.is_shared(push_slot));
        let inbox = inbox.ok_or(Refusal::PushSlotTaken { push_slot })?;
        self.counters.push_bytes.add(bytes);
        inbox.add_shared(push_slot, range, incoming.request.since);
        Ok(())
    }
}

impl Shard {
    /// Receives parts of a push that are in a push buffer.
    pub(in crate::shard) fn push_shared(
        &mut self,
        request: PeerRequest,
        client: ClientKey,
        shared: &PushShared,
        call: Option<CallRef>,
    ) {
        let parts = SharedParts::new(request, client, shared, call);
        let Shard { peers, intake, steps, out, .. } = self;
        if !intake.is_part_needed(peers, steps, out, &parts.incoming) {
            return;
        }
        if let Err(refusal) = self.receive_shared(&parts) {
            self.intake.refuse_push(&mut self.peers, &mut self.out, &parts.incoming, refusal);
        }
    }

    fn receive_shared(&mut self, parts: &SharedParts<'_>) -> Result<(), Refusal> {
        let SharedParts { incoming, ranges } = parts;
        let Shard { variables, intake, applier, steps, .. } = self;
        let is_initializing = applier.is_initializing();
        if !intake.find_or_begin_push(variables, steps, is_initializing, incoming)? {
            return Ok(());
        }
        for &SharedRange { start, end } in *ranges {
            intake.add_shared_range(variables, incoming, start..end)?;
        }
        self.complete_push(incoming.request.since, incoming)
    }
}
