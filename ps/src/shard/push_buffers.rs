//! Push buffers: shares them with clients, and receives pushes whose parts are in them.
//!
//! A client can write to its push buffer at any time. In asynchronous mode the update scans each
//! value as it applies it, so the scanned value is the applied value. Updates in place and
//! gradients of a synchronous step are scanned before they are applied. A client that writes NaN
//! after that harms the training as any wrong gradient of its would.
//!
//! A push buffer ends with the process that shared it, together with the complete pushes in it.
//! Where a push is answered only once it is applied, nothing was promised, and the client sends the
//! push again. A shard that reports gradients as held and keeps its state in a directory shares no
//! push buffers.

use std::ops::Range;
use std::time::Instant;

use pushpull_common::protocol::limits::PUSH_BUFFERS_MAX;
use pushpull_common::protocol::message::{PushPart, PushShared, SharedPushBuffer, SharedRange};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Header, Refusal};
use pushpull_store::arena::SharedBytes;

use super::intake::Intake;
use super::peers::unsupported;
use super::shard_files::ShardFiles;
use super::variables::Variables;
use super::{IncomingPart, Shard, answer_to, deadline_of};
use crate::client_key::ClientKey;
use crate::error::StorageError;

impl Shard {
    /// A client requests a push buffer.
    pub(super) fn share_push_buffer(
        &mut self,
        now: Instant,
        connection: u64,
        client: ClientKey,
        request: Envelope,
        kind: u16,
    ) -> Result<(), Refusal> {
        self.peers.check_shareable(connection, kind)?;
        if self.steps.is_synchronous() && !self.files.arena.storage.is_shareable() {
            let why = "gradients held for a step survive this process in a directory, and push buffers do not";
            return Err(unsupported(kind, why));
        }
        let is_ready = self.variables.is_ready();
        let inbox =
            self.intake.inbox.as_mut().filter(|_| is_ready).ok_or(Refusal::NotInitialized {})?;
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
        let reservation = self.files.budget.reserve(bytes).map_err(does_not_fit)?;
        let (memory, descriptor) = SharedBytes::new(bytes as usize)
            .map_err(|error| unsupported(kind, &format!("cannot share memory: {error}")))?;
        let push_slots = inbox.share_push_buffer(client, (memory, reservation), now);
        let push_slots = List::new(push_slots).expect("a push buffer has few slots");
        let push_buffer = SharedPushBuffer { bytes, first: 0, stride, push_slots };
        self.peers.send_shared(
            &mut self.out,
            connection,
            request,
            push_buffer.into(),
            vec![descriptor],
        );
        Ok(())
    }

    /// Receives parts of a push that are in a push buffer.
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
        let incoming = IncomingPart {
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
        if !self.intake.is_part_needed(
            &mut self.peers,
            &mut self.steps,
            &mut self.out,
            header,
            &part,
            &incoming,
        ) {
            return;
        }
        let taken = self.receive_shared(now, header, &part, &incoming, shared.ranges.items());
        if let Err(refusal) = taken {
            self.intake.refuse_push(&mut self.peers, &mut self.out, &incoming, refusal);
        }
    }

    fn receive_shared(
        &mut self,
        now: Instant,
        header: &Header,
        part: &PushPart,
        incoming: &IncomingPart,
        ranges: &[SharedRange],
    ) -> Result<(), Refusal> {
        let (connection, client) = (incoming.connection, incoming.client);
        if !self.find_or_begin_push(now, connection, client, header, part, &(0..0))? {
            return Ok(());
        }
        for &SharedRange { start, end } in ranges {
            self.intake.add_shared_range(&self.variables, now, part, start..end)?;
        }
        match part.whole {
            None => Ok(()),
            Some(named) => self.push_complete(now, incoming, named),
        }
    }
}

fn does_not_fit(error: StorageError) -> Refusal {
    match error {
        StorageError::DoesNotFit { need, limit } => Refusal::DoesNotFit { need, limit },
        error => Refusal::Storage { detail: super::Detail::clipped(error.to_string()) },
    }
}

impl Intake {
    /// Returns whether there is memory for a part's body that arrives over the connection. The
    /// first body of a slot allocates it.
    pub(super) fn has_memory_for(&mut self, files: &ShardFiles, part: &IncomingPart) -> bool {
        let inbox = self.inbox.as_mut().filter(|_| !part.range.is_empty());
        inbox.is_none_or(|inbox| inbox.ensure_own_memory(part.push_slot, &files.budget).is_ok())
    }

    /// Adds one range that is in a push buffer. It covers whole dense partitions.
    pub(super) fn add_shared_range(
        &mut self,
        variables: &Variables,
        now: Instant,
        part: &PushPart,
        range: Range<u64>,
    ) -> Result<(), Refusal> {
        self.check_range(variables, part, &range)?;
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
        let push_slot = part.push_slot;
        let inbox = self.inbox.as_mut().filter(|inbox| inbox.is_shared(push_slot));
        let inbox = inbox.ok_or(Refusal::PushSlotTaken { push_slot })?;
        self.counters.push_bytes.add(bytes);
        inbox.add_shared(push_slot, range, now);
        Ok(())
    }
}
