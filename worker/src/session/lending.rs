//! Asking shards of this host for their memory, so that callers pull by themselves.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::protocol::message::{Lend, Lent};
use pushpull_common::protocol::{Envelope, Message};

use super::link::{Pending, Status};
use super::{Output, Session};
use crate::fanout::Plan;
use crate::lent::Lender;
use crate::parts::Body;

/// The bit of values among what is lent.
const VALUES: u64 = 1;

impl Session {
    /// Asks the shards of the variables that have joined, each once over a connection.
    pub(super) fn drive_lending(&mut self, now: Instant) {
        // Values that are to come in a shorter form are asked for in it.
        if !self.start.shared_memory || self.start.values.is_some() {
            return;
        }
        for index in 0..self.links.len() {
            let link = &self.links[index];
            let may = link.near && !link.asked_to_lend && link.ready && link.status == Status::Up;
            let holds = |plan: &Arc<Plan>| plan.shards().contains(&link.shard);
            if may && self.plan.as_ref().is_some_and(holds) {
                self.links[index].asked_to_lend = true;
                let (envelope, lend) = (Envelope::default(), Lend { wants: VALUES });
                self.send(now, index, Pending::Lend, envelope, lend, Body::Empty);
            }
        }
    }

    /// A shard has answered. One that lends nothing is asked for values as ever.
    pub(super) fn lend_answered(&mut self, now: Instant, index: usize, message: Message) {
        match message {
            Message::Lent(lent) => self.lent(index, lent),
            Message::Refused(_) => {}
            message => self.unexpected(now, index, &message),
        }
    }

    fn lent(&mut self, index: usize, lent: Lent) {
        let link = &self.links[index];
        if lent.lends & VALUES == 0 {
            return;
        }
        let lender = Lender {
            shard: link.shard,
            epoch: link.restore_epoch,
            owns_step: link.shard == self.start.owner,
            synchronous: self.synchronous,
        };
        self.outputs.push_back(Output::Lent { link: index, lender, lent });
    }
}
