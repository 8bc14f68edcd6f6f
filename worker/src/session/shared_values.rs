//! Asking shards of this host for memory: that of their values, so that callers pull by themselves, and
//! trays, into which callers write gradients.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::protocol::message::{
    SharePushBuffer, ShareValues, SharedPushBuffer, SharedValues,
};
use pushpull_common::protocol::{Envelope, Message};

use super::link::{Pending, Status};
use super::{Output, Session};
use crate::parts::Body;
use crate::push_buffers::PushBufferId;
use crate::sharding_plan::ShardingPlan;
use crate::shared::MappedShard;

/// The bit of values among what is lent.
const VALUES: u64 = 1;

impl Session {
    /// Asks the shards of the variables that have joined, for each thing once over a connection, and for
    /// one at a time: so it is known what the descriptors are of.
    pub(super) fn drive_sharing(&mut self, now: Instant) {
        if !self.start.shared_memory {
            return;
        }
        for index in 0..self.links.len() {
            let link = &self.links[index];
            if !link.same_host || !link.ready || link.status != Status::Up {
                continue;
            }
            let holds = |plan: &&Arc<ShardingPlan>| plan.shards().contains(&link.shard);
            let Some(plan) = self.plan.as_ref().filter(holds) else { continue };
            // Values that are to come in a shorter form are asked for in it.
            if !link.asked_to_share && self.start.values.is_none() {
                self.links[index].asked_to_share = true;
                let (envelope, share) = (Envelope::default(), ShareValues { wants: VALUES });
                self.send(now, index, Pending::ShareValues, envelope, share, Body::Empty);
            } else if !link.asked_for_push_buffer
                && self.start.role.is_member()
                && plan.keeps_some_whole(link.shard)
                && !link.pending.values().any(|pending| *pending == Pending::ShareValues)
            {
                self.links[index].asked_for_push_buffer = true;
                let envelope = Envelope::default();
                self.send(
                    now,
                    index,
                    Pending::SharePushBuffer,
                    envelope,
                    SharePushBuffer {},
                    Body::Empty,
                );
            }
        }
    }

    /// A shard has answered. One that lends nothing is asked for values as ever.
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
            owns_step: link.shard == self.start.owner,
            synchronous: self.synchronous,
        };
        self.outputs.push_back(Output::SharedValues { link: index, mapped_shard, shared });
    }

    /// A shard has answered. One that lends no tray is sent gradients as ever.
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
        self.outputs.push_back(Output::SharedPushBuffer {
            link: index,
            shard,
            push_buffer,
            shared,
        });
    }
}
