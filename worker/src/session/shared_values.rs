//! Asks shards on the same host for shared memory: their values, which callers then read in place,
//! and push buffers, into which callers write gradients.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::protocol::message::{
    SharePushBuffer, ShareValues, SharedPushBuffer, SharedValues,
};
use pushpull_common::protocol::{Envelope, Message};

use super::link::{LinkStatus, PendingRequest};
use super::{Session, SessionOutput};
use crate::gradients::gradient_buffer::PushBufferId;
use crate::gradients::parts::FrameBody;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::mapped_values::MappedShard;

/// The bit for values in the sets `wants` and `shares`.
const VALUES: u64 = 1;

impl Session {
    /// Asks the shards of the joined variables, for each kind of memory once per connection. One
    /// request at a time, so that each descriptor belongs to a known answer.
    pub(super) fn drive_sharing(&mut self, now: Instant) {
        if !self.config.shared_memory {
            return;
        }
        for index in 0..self.links.len() {
            let link = &self.links[index];
            if !link.same_host || !link.ready || link.status != LinkStatus::Up {
                continue;
            }
            let holds = |plan: &&Arc<ShardingPlan>| plan.shards().contains(&link.shard);
            let Some(plan) = self.plan.as_ref().filter(holds) else { continue };
            // Values to be pulled encoded are not read in place.
            if !link.requested_values && self.config.values.is_none() {
                self.links[index].requested_values = true;
                let (envelope, share) = (Envelope::default(), ShareValues { wants: VALUES });
                self.send(
                    now,
                    index,
                    PendingRequest::ShareValues,
                    envelope,
                    share,
                    FrameBody::Empty,
                );
            } else if !link.requested_push_buffer
                && self.config.role.is_member()
                && plan.keeps_some_whole(link.shard)
                && !link.pending.values().any(|pending| *pending == PendingRequest::ShareValues)
            {
                self.links[index].requested_push_buffer = true;
                let envelope = Envelope::default();
                self.send(
                    now,
                    index,
                    PendingRequest::SharePushBuffer,
                    envelope,
                    SharePushBuffer {},
                    FrameBody::Empty,
                );
            }
        }
    }

    /// Handles the answer about shared values. A shard that refuses is sent pull requests.
    pub(super) fn share_answered(&mut self, now: Instant, index: usize, message: Message) {
        match message {
            Message::SharedValues(shared) => self.shared(index, shared),
            Message::Refused(_) => {}
            message => return self.unexpected(now, index, &message),
        }
        self.drive_sharing(now);
    }

    fn shared(&mut self, index: usize, shared: SharedValues) {
        let link = &self.links[index];
        if shared.shares & VALUES == 0 {
            return;
        }
        let mapped_shard = MappedShard {
            shard: link.shard,
            epoch: link.restore_epoch,
            owns_step: link.shard == self.config.owner,
            synchronous: self.synchronous,
        };
        self.outputs.push_back(SessionOutput::SharedValues { link: index, mapped_shard, shared });
    }

    /// Handles the answer about a push buffer. A shard that refuses is sent the gradients.
    pub(super) fn push_buffer_answered(&mut self, now: Instant, index: usize, message: Message) {
        match message {
            Message::SharedPushBuffer(shared) => self.push_buffer_shared(index, shared),
            Message::Refused(_) => {}
            message => self.unexpected(now, index, &message),
        }
    }

    fn push_buffer_shared(&mut self, index: usize, shared: SharedPushBuffer) {
        self.push_buffers += 1;
        let push_buffer = PushBufferId(self.push_buffers);
        let link = &mut self.links[index];
        link.push_buffer = Some(push_buffer);
        let shard = link.shard;
        self.outputs.push_back(SessionOutput::SharedPushBuffer {
            link: index,
            shard,
            push_buffer,
            shared,
        });
    }
}
