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
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{Hello, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_store::planted::{Bug, PlantedBugs};

use super::client_registry::ClientRegistry;
use crate::client_entry::ClientPresence;
use crate::client_key::ClientKey;

/// The newest chief. Older chiefs are fenced.
#[derive(Debug)]
pub(in crate::shard) struct ChiefFence {
    /// The fencing epoch.
    pub(in crate::shard) epoch: ClientEpoch,
    /// `None` if the client is unknown, as in an arena of an earlier version.
    pub(in crate::shard) client: Option<ClientKey>,
    /// On another shard than the step owner's: the epoch of the last `ChiefIs` on the current
    /// connection to the step owner.
    pub(in crate::shard) announced: Option<ClientEpoch>,
    planted: PlantedBugs,
}

impl ChiefFence {
    /// Returns the fence of a shard that knows no chief.
    pub(in crate::shard) fn new(planted: PlantedBugs) -> ChiefFence {
        ChiefFence { epoch: ClientEpoch(0), client: None, announced: None, planted }
    }

    /// A chief with this epoch has joined. Returns whether it is newer than the last one.
    pub(in crate::shard) fn raise(&mut self, key: ClientKey, epoch: ClientEpoch) -> bool {
        let is_newer = epoch > self.epoch;
        if is_newer {
            self.epoch = epoch;
            self.client = Some(key);
        }
        is_newer
    }

    /// Refuses the epoch of a chief that is fenced.
    pub(in crate::shard) fn check(&self, epoch: ClientEpoch) -> Result<(), Refusal> {
        // The chief of the last `ChiefIs` may not have connected to this shard yet.
        let current = self.epoch.max(self.announced.unwrap_or_default());
        match epoch < current && !self.planted.has(Bug::StaleChief) {
            true => Err(Refusal::Fenced { epoch, current }),
            false => Ok(()),
        }
    }

    /// Whether this client is the newest chief. On a shard that assigns no epochs, other clients
    /// may have its epoch.
    fn is_chief(&self, registry: &ClientRegistry, key: ClientKey) -> bool {
        let is_it = self.client.is_none_or(|chief| chief == key);
        is_it && self.epoch != ClientEpoch(0) && registry.client(key).epoch == self.epoch
    }

    /// Checks that a client may join in this role. A chief must be the current one, or replace one
    /// that is absent, under its own epoch.
    pub(in crate::shard) fn check_hello(
        &self,
        registry: &ClientRegistry,
        owns_step: bool,
        now: Instant,
        hello: &Hello,
        task: &TaskId,
    ) -> Result<(), Refusal> {
        let as_chief = hello.role == (Role::Chief {});
        let known = registry.find(task);
        let has_ended = known.is_some_and(|key| registry.client(key).has_ended());
        if has_ended && hello.client_epoch != ClientEpoch(0) {
            // The registry refuses a run that has ended, and says how it goes on.
            return Ok(());
        }
        // The same process under the epoch that it was given. If it sends no epoch, its welcome was
        // lost.
        let same = known.filter(|&key| {
            let client = registry.client(key);
            let epochs = [ClientEpoch(0), client.epoch];
            client.incarnation == hello.incarnation && epochs.contains(&hello.client_epoch)
        });
        let epoch = match (same, hello.client_epoch) {
            (Some(key), _) if self.is_chief(registry, key) == as_chief => return Ok(()),
            (Some(key), _) if as_chief => registry.client(key).epoch,
            // An epoch stands for one role, because shards that know it in the other role could not
            // tell.
            (Some(_), _) => return Err(wrong_role(hello.role)),
            (None, _) if !as_chief => return Ok(()),
            (None, epoch) => epoch,
        };
        if epoch != ClientEpoch(0) {
            self.check(epoch)?;
            if same.is_some() {
                return Err(wrong_role(hello.role));
            }
            if epoch == self.epoch && !self.planted.has(Bug::StaleChief) {
                // The epoch is another client's.
                return Err(Refusal::Fenced { epoch, current: self.epoch });
            }
        }
        if !owns_step && self.announced.is_some_and(|announced| epoch > announced) {
            // The next `ChiefIs` may be on its way.
            let what = format!("chiefs (the step owner has announced none with epoch {epoch})");
            return Err(Refusal::Busy { what: Detail::clipped(what), limit: 1 });
        }
        // Only the step owner knows whether the current chief's lease has ended.
        let current = registry.keys().find(|&key| {
            self.is_chief(registry, key) && registry.client(key).presence == ClientPresence::Present
        });
        match current.filter(|&key| owns_step && registry.client(key).task != *task) {
            None => Ok(()),
            Some(key) => {
                let what = format!("chiefs (the chief is {})", registry.describe(now, key));
                Err(Refusal::Busy { what: Detail::clipped(what), limit: 1 })
            }
        }
    }
}

/// Returns the refusal of a client that joins in another role than before.
fn wrong_role(role: Role) -> Refusal {
    let hello = 1;
    Refusal::Role { role: role.code(), kind: hello }
}
