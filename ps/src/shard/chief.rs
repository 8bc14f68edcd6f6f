//! The chief: there is one at a time, by a lease on the step owner and a fencing epoch on every
//! shard.
//!
//! The step owner gives each incarnation of each client an epoch that is higher than all before.
//! The epoch of the newest chief is the fencing epoch. A shard that knows it refuses the chief-only
//! messages of an older chief, which is an older incarnation of the same task or another task. It
//! also abandons a restore that an older chief requested. Requests that were carried out before
//! stay in force. The fencing epoch is durable, so that a restart does not admit an older chief.
//!
//! Another task becomes the chief once the lease of the current chief has expired, or the chief has
//! left. It needs a new epoch: a client that was admitted as a worker is not admitted as the chief
//! under the same epoch, nor the other way round.
//!
//! A shard that does not own the step checks the fencing epoch and no lease. It accepts a chief
//! with a higher epoch, unless a worker has that epoch. While it is connected to the step owner, it
//! accepts only the epoch of the last `ChiefIs`.

use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, TaskId};
use pushpull_common::protocol::message::{Hello, Operation, Role};
use pushpull_common::protocol::{Envelope, Message, Refusal, message};
use pushpull_store::testing::planted::Bug;

use super::client_registry::ClientPresence;
use super::output::Outputs;
use super::peers::Peers;
use super::steps::Steps;
use super::{Detail, Shard};
use crate::client_key::ClientKey;

/// Whether a chief sends this message as a chief: the chief-only messages, and the first values.
pub(super) fn acts_as_chief(message: &Message) -> bool {
    let operation = match message {
        Message::PushPart(part) => Some(part.operation),
        Message::PushEncoded(encoded) => Some(encoded.part.operation),
        Message::PushShared(shared) => Some(shared.operation),
        _ => None,
    };
    is_chief_only(message) || operation == Some(Operation::Assign {})
}

/// Whether only a chief may send this message.
pub(super) fn is_chief_only(message: &Message) -> bool {
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
    /// A chief with this epoch has joined. The work of an older one is abandoned.
    pub(super) fn chief_joined(&mut self, key: ClientKey, epoch: ClientEpoch) {
        if epoch > self.peers.chief.epoch {
            (self.peers.chief.epoch, self.peers.chief.client) = (epoch, Some(key));
            self.checkpoints.abandon_restore("another chief has joined");
            self.checkpoints
                .drop_save_requests_of_chiefs(&mut self.out, "another chief has joined");
            self.steps.shards.announce_chief(&self.peers, &mut self.out);
        }
    }
}

/// Returns the refusal of a client that joins in another role than before.
fn wrong_role(role: Role) -> Refusal {
    let hello = 1;
    Refusal::Role { role: role.code(), kind: hello }
}

impl Peers {
    /// Whether this client is the newest chief. On a shard that assigns no epochs, other clients
    /// may have its epoch.
    fn is_chief(&self, key: ClientKey) -> bool {
        let is_it = self.chief.client.is_none_or(|chief| chief == key);
        is_it
            && self.chief.epoch != ClientEpoch(0)
            && self.registry.client(key).epoch == self.chief.epoch
    }

    fn fence(&self, epoch: ClientEpoch) -> Result<(), Refusal> {
        // The chief of the last `ChiefIs` may not have connected to this shard yet.
        let current = self.chief.epoch.max(self.chief.announced.unwrap_or_default());
        match epoch < current && !self.config.planted.has(Bug::StaleChief) {
            true => Err(Refusal::Fenced { epoch, current }),
            false => Ok(()),
        }
    }

    /// Returns the refusal of a message from a chief that is fenced.
    pub(super) fn chief_refusal(&self, connection: u64) -> Option<Refusal> {
        let state = self.connections.get(&connection)?;
        let client = state.client.filter(|_| state.role == Role::Chief {})?;
        self.fence(self.registry.client(client).epoch).err()
    }

    pub(super) fn send_chief(&self, out: &mut Outputs, connection: u64) {
        out.send(
            connection,
            Envelope::default(),
            message::ChiefIs { client: self.chief.epoch }.into(),
        );
    }

    /// Checks that a client may join in this role. A chief must be the current one, or replace one
    /// that is absent, under its own epoch.
    pub(super) fn check_chief(
        &self,
        steps: &Steps,
        now: Instant,
        hello: &Hello,
        task: &TaskId,
    ) -> Result<(), Refusal> {
        let as_chief = hello.role == (Role::Chief {});
        let known = self.registry.find(task);
        // The same process under the epoch that it was given. If it sends no epoch, its welcome was
        // lost.
        let same = known.filter(|&key| {
            let client = self.registry.client(key);
            let epochs = [ClientEpoch(0), client.epoch];
            client.incarnation == hello.incarnation && epochs.contains(&hello.client_epoch)
        });
        let epoch = match (same, hello.client_epoch) {
            (Some(key), _) if self.is_chief(key) == as_chief => return Ok(()),
            (Some(key), _) if as_chief => self.registry.client(key).epoch,
            // An epoch stands for one role, because shards that know it in the other role could not
            // tell.
            (Some(_), _) => return Err(wrong_role(hello.role)),
            (None, _) if !as_chief => return Ok(()),
            (None, epoch) => epoch,
        };
        if epoch != ClientEpoch(0) {
            self.fence(epoch)?;
            if same.is_some() {
                return Err(wrong_role(hello.role));
            }
            if epoch == self.chief.epoch && !self.config.planted.has(Bug::StaleChief) {
                // The epoch is another client's.
                return Err(Refusal::Fenced { epoch, current: self.chief.epoch });
            }
        }
        if steps.owner.is_none() && self.chief.announced.is_some_and(|announced| epoch > announced)
        {
            // The next `ChiefIs` may be on its way.
            let what = format!("chiefs (the step owner has announced none with epoch {epoch})");
            return Err(Refusal::Busy { what: Detail::clipped(what), limit: 1 });
        }
        // Only the step owner knows whether the current chief's lease has ended.
        let current = self.registry.keys().find(|&key| {
            self.is_chief(key) && self.registry.client(key).presence == ClientPresence::Present
        });
        match current.filter(|&key| steps.owner.is_some() && self.task_of(key) != task) {
            None => Ok(()),
            Some(key) => {
                let what = format!("chiefs (the chief is {})", self.describe_client(now, key));
                Err(Refusal::Busy { what: Detail::clipped(what), limit: 1 })
            }
        }
    }
}
