//! The chief: one at a time, by a lease on the step owner and a fencing epoch on every shard.
//!
//! The step owner gives every self of every client an epoch of its own, each higher than those
//! before. The epoch of the newest chief is the fence: a shard that has met it does nothing more that an
//! older one says as a chief, whether that is an older self of the same task or another task's, nor
//! goes on with what it was having restored. What it had asked for before was before. The fence is
//! durable, so that a restart does not let an older chief in. A task that is not the chief becomes it
//! once the lease of the one before has run out, or that has left, and under a new epoch: a client that has
//! come as a worker under its epoch does not come as the chief under the same, nor the other way round.
//!
//! A shard that does not own the step checks the fencing epoch and no lease. It accepts a chief with a higher
//! epoch, unless a worker has that epoch. While it is connected to the step owner, it accepts only the
//! epoch of the last `ChiefIs`.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, TaskId};
use pushpull_common::protocol::message::{Hello, Operation, Role};
use pushpull_common::protocol::{Message, Refusal};

use super::replicas::{ClientKey, Presence};
use super::{Detail, Shard};
use crate::planted::Bug;

/// Whether a chief says this as a chief: what only it may say, and the first values.
pub(super) fn is_of_chiefs(message: &Message) -> bool {
    let operation = match message {
        Message::PushPart(part) => Some(part.operation),
        Message::PushEncoded(encoded) => Some(encoded.part.operation),
        Message::PushShared(shared) => Some(shared.operation),
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
            | Message::PassedOverQuery(_)
            | Message::Restore(_)
            | Message::Save(_)
            | Message::Finish(_)
    )
}

impl Shard {
    /// Whether a client may come in with this role: as the chief it must be the one there is, or come in
    /// place of one that is gone, under an epoch of its own.
    pub(super) fn check_chief(
        &self,
        now: Instant,
        hello: &Hello,
        task: &TaskId,
    ) -> Result<(), Refusal> {
        let as_chief = hello.role == (Role::Chief {});
        let known = self.replicas.find(task);
        // The same process under the epoch that it was given; if it says none, its welcome was lost.
        let same = known.filter(|&key| {
            let client = self.replicas.client(key);
            let epochs = [ClientEpoch(0), client.epoch];
            client.incarnation == hello.incarnation && epochs.contains(&hello.client_epoch)
        });
        let epoch = match (same, hello.client_epoch) {
            (Some(key), _) if self.is_chief(key) == as_chief => return Ok(()),
            (Some(key), _) if as_chief => self.replicas.client(key).epoch,
            // An epoch stands for one role: shards that have met it in the other would not know.
            (Some(_), _) => return Err(wrong_role(hello.role)),
            (None, _) if !as_chief => return Ok(()),
            (None, epoch) => epoch,
        };
        if epoch != ClientEpoch(0) {
            self.fence(epoch)?;
            if same.is_some() {
                return Err(wrong_role(hello.role));
            }
            if epoch == self.chief && !self.config.planted.has(Bug::StaleChief) {
                // It is another's.
                return Err(Refusal::Fenced { epoch, current: self.chief });
            }
        }
        if self.owner.is_none() && self.chief_told.is_some_and(|told| epoch > told) {
            // The next `ChiefIs` may be under way.
            let what = format!("chiefs, as the step owner has told of none with epoch {epoch}");
            return Err(Refusal::Busy { what: Detail::clipped(what), limit: 1 });
        }
        // A new one, of which the step owner knows whether there is room for it.
        let current = self.replicas.keys().find(|&key| {
            self.is_chief(key) && self.replicas.client(key).presence == Presence::Present
        });
        match current.filter(|&key| self.owner.is_some() && self.task_of(key) != task) {
            None => Ok(()),
            Some(key) => {
                let what = format!("chiefs, which is {}", self.last_word_of(now, key));
                Err(Refusal::Busy { what: Detail::clipped(what), limit: 1 })
            }
        }
    }

    /// Whether this client is the newest chief. Others may have its epoch where none is minted.
    fn is_chief(&self, key: ClientKey) -> bool {
        let is_it = self.chief_client.is_none_or(|chief| chief == key);
        is_it && self.chief != ClientEpoch(0) && self.replicas.client(key).epoch == self.chief
    }

    /// A chief of this epoch has come: what an older one has begun is given up.
    pub(super) fn chief_is(&mut self, key: ClientKey, epoch: ClientEpoch) {
        if epoch > self.chief {
            (self.chief, self.chief_client) = (epoch, Some(key));
            self.give_up_restoring("another chief has come");
            self.drop_save_requests_of_chiefs("another chief has come");
            self.tell_chief();
        }
    }

    /// Why nothing is done for whoever speaks over this connection as the chief.
    pub(super) fn chief_refusal(&self, connection: u64) -> Option<Refusal> {
        let conversation = self.conversations.get(&connection)?;
        let client = conversation.client.filter(|_| conversation.role == Role::Chief {})?;
        self.fence(self.replicas.client(client).epoch).err()
    }

    fn fence(&self, epoch: ClientEpoch) -> Result<(), Refusal> {
        // The chief of the last `ChiefIs` may not have connected to this shard yet.
        let current = self.chief.max(self.chief_told.unwrap_or_default());
        match epoch < current && !self.config.planted.has(Bug::StaleChief) {
            true => Err(Refusal::Fenced { epoch, current }),
            false => Ok(()),
        }
    }
}

/// The refusal for a client that comes in another role than it came in before.
fn wrong_role(role: Role) -> Refusal {
    let hello = 1;
    Refusal::Role { role: role.code(), kind: hello }
}
