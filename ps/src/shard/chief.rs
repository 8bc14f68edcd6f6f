//! The chief: one at a time, by a lease on the step owner and a fencing epoch on every shard.
//!
//! The step owner gives every self of every client an epoch of its own, each higher than those
//! before. The epoch of the newest chief is the fence: a shard that has met it does nothing more that an
//! older one says as a chief, whether that is an older self of the same task or another task's, nor
//! goes on with what it was having restored. What it had asked for before was before. The fence is
//! durable, so that a restart does not let an older chief in. A task that is not the chief becomes it
//! once the lease of the one before has run out, or that has left.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, TaskId};
use pushpull_common::protocol::message::{Hello, Operation, Role};
use pushpull_common::protocol::{Message, Refusal};

use super::replicas::Presence;
use super::{Detail, Shard};
use crate::zoo::Bug;

/// Whether a chief says this as a chief: what only it may say, and the first values.
pub(super) fn is_of_chiefs(message: &Message) -> bool {
    let operation = match message {
        Message::PushPart(part) => Some(part.operation),
        Message::PushEncoded(encoded) => Some(encoded.part.operation),
        Message::PushLent(lent) => Some(lent.operation),
        _ => None,
    };
    is_for_chiefs(message) || operation == Some(Operation::Assign {})
}

/// Whether only a chief may say this.
pub(super) fn is_for_chiefs(message: &Message) -> bool {
    matches!(
        message,
        Message::Declare(_)
            | Message::Initialize(_)
            | Message::FindCheckpoint(_)
            | Message::Restore(_)
            | Message::Save(_)
            | Message::Finish(_)
    )
}

impl Shard {
    /// Whether a task may come in as the chief.
    pub(super) fn check_chief(
        &self,
        now: Instant,
        hello: &Hello,
        task: &TaskId,
    ) -> Result<(), Refusal> {
        if hello.role != (Role::Chief {}) {
            return Ok(());
        }
        let same = self.replicas.find(task).map(|key| self.replicas.client(key));
        let same = same.filter(|client| client.incarnation == hello.incarnation);
        let epoch = match (hello.client_epoch, same) {
            // Its welcome was lost.
            (ClientEpoch(0), Some(client)) => client.epoch,
            (epoch, _) => epoch,
        };
        if epoch != ClientEpoch(0) {
            return self.fence(epoch);
        }
        // A new one, of which the step owner knows whether there is room for it.
        let current = self.replicas.keys().find(|&key| {
            let client = self.replicas.client(key);
            client.epoch == self.chief && client.presence == Presence::Present
        });
        match current.filter(|&key| self.owner.is_some() && self.task_of(key) != task) {
            None => Ok(()),
            Some(key) => {
                let what = format!("chiefs, which is {}", self.last_word_of(now, key));
                Err(Refusal::Busy { what: Detail::clipped(what), limit: 1 })
            }
        }
    }

    /// A chief of this epoch has come: what an older one has begun is given up.
    pub(super) fn chief_is(&mut self, epoch: ClientEpoch) {
        if epoch > self.chief {
            self.chief = epoch;
            self.give_up_restoring("another chief has come");
            self.drop_wishes_of_chiefs("another chief has come");
        }
    }

    /// Why nothing is done for whoever speaks over this connection as the chief.
    pub(super) fn chief_refusal(&self, connection: u64) -> Option<Refusal> {
        let conversation = self.conversations.get(&connection)?;
        let client = conversation.client.filter(|_| conversation.role == Role::Chief {})?;
        self.fence(self.replicas.client(client).epoch).err()
    }

    fn fence(&self, epoch: ClientEpoch) -> Result<(), Refusal> {
        match epoch < self.chief && !self.config.zoo.has(Bug::StaleChief) {
            true => Err(Refusal::Fenced { epoch, current: self.chief }),
            false => Ok(()),
        }
    }
}
