//! Asks shards on the same host for shared memory: their values, which callers then read in place,
//! and push buffers, into which callers write gradients.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{SharePushBuffer, ShareValues};

use super::SessionOutput;
use super::links::{LinkFault, OutgoingFrame, PendingRequest, SessionLinks};
use super::membership::Membership;
use crate::gradients::gradient_buffer::PushBufferId;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::mapped_values::MappedShard;

/// The bit for values in the sets `wants` and `shares`.
const VALUES: u64 = 1;

/// The requests for shared memory.
///
/// Invariants: a shard is asked for each kind of memory once per connection, and only if it holds
/// joined variables. One request at a time, so that each descriptor belongs to a known answer.
#[derive(Debug)]
pub(super) struct MemorySharing {
    /// Whether to ask at all.
    enabled: bool,
    /// Whether values are read in place. Values to be pulled encoded are not.
    values: bool,
    /// How many push buffers shards have shared, over all connections.
    push_buffers: u64,
}

impl MemorySharing {
    pub(super) fn new(enabled: bool, values: bool) -> MemorySharing {
        MemorySharing { enabled, values, push_buffers: 0 }
    }

    /// Sends the requests that are due.
    pub(super) fn send(&self, now: Instant, membership: &Membership, links: &mut SessionLinks) {
        for index in (0..links.len()).filter(|_| self.enabled) {
            let link = &mut links[index];
            if !link.same_host || !link.ready || !link.is_up() {
                continue;
            }
            let holds = |plan: &&Arc<ShardingPlan>| plan.shards().contains(&link.shard);
            let Some(plan) = membership.plan().filter(holds) else { continue };
            if !link.requested_values && self.values {
                link.requested_values = true;
                let frame = OutgoingFrame::of(ShareValues { wants: VALUES });
                links.send(now, index, PendingRequest::ShareValues, frame);
            } else if !link.requested_push_buffer
                && membership.is_member()
                && plan.keeps_some_whole(link.shard)
                && !link.awaits(PendingRequest::ShareValues)
            {
                link.requested_push_buffer = true;
                let frame = OutgoingFrame::of(SharePushBuffer {});
                links.send(now, index, PendingRequest::SharePushBuffer, frame);
            }
        }
    }

    /// Handles the answer about shared values. A shard that refuses is sent pull requests.
    pub(super) fn values_answered(
        &self,
        index: usize,
        message: Message,
        membership: &Membership,
        links: &mut SessionLinks,
    ) -> Result<(), LinkFault> {
        let shared = match message {
            Message::SharedValues(shared) => shared,
            Message::Refused(_) => return Ok(()),
            message => return Err(LinkFault::unexpected(&message)),
        };
        if shared.shares & VALUES != 0 {
            let mapped_shard = MappedShard {
                shard: links[index].shard,
                epoch: links[index].restore_epoch,
                owns_step: links.is_owner(index),
                synchronous: membership.synchronous,
            };
            links.outputs.push_back(SessionOutput::SharedValues {
                link: index,
                mapped_shard,
                shared,
            });
        }
        Ok(())
    }

    /// Handles the answer about a push buffer. A shard that refuses is sent the gradients.
    pub(super) fn push_buffer_answered(
        &mut self,
        index: usize,
        message: Message,
        links: &mut SessionLinks,
    ) -> Result<(), LinkFault> {
        let shared = match message {
            Message::SharedPushBuffer(shared) => shared,
            Message::Refused(_) => return Ok(()),
            message => return Err(LinkFault::unexpected(&message)),
        };
        self.push_buffers += 1;
        let push_buffer = PushBufferId(self.push_buffers);
        let shard = links[index].shard;
        links[index].push_buffer = Some(push_buffer);
        let output = SessionOutput::SharedPushBuffer { link: index, shard, push_buffer, shared };
        links.outputs.push_back(output);
        Ok(())
    }
}
