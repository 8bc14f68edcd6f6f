//! Restore epochs: which one each shard lives in, and what becomes of the session when it changes.
//!
//! Before the session has joined it follows every shard. Once it has joined, what it holds (tokens,
//! pushes under way, the values its caller computes with) belongs to one epoch: a member that meets
//! another has been rolled back, or has met a shard that has lost its variables. A reader holds
//! nothing, and follows on.

use std::time::Instant;

use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{CatalogueState, Welcome};
use pushpull_common::protocol::{Header, Message, Refusal};

use super::link::{Pending, Status};
use super::{OpId, OpKind, Reply, Session};
use crate::error::Error;

impl Session {
    /// Whether this session has joined variables that lie on the shard, or depends on it as on the
    /// step owner.
    pub(super) fn uses(&self, shard: ShardId) -> bool {
        let plan = self.plan.as_ref();
        plan.is_some_and(|plan| plan.shards().contains(&shard) || shard == self.start.owner)
    }

    /// The epoch that a shard must still live in, for a hello; 0 if any will do.
    pub(super) fn seen_epoch(&self, index: usize) -> RestoreEpoch {
        match self.start.role.is_member() && self.uses(self.links[index].shard) {
            true => self.links[index].restore_epoch,
            false => RestoreEpoch(0),
        }
    }

    /// Follows a shard into its epoch, which the owner began at this step.
    fn follow(&mut self, index: usize, epoch: RestoreEpoch, step: GlobalStep) {
        let link = &mut self.links[index];
        if link.restore_epoch != epoch {
            link.restore_epoch = epoch;
            if link.shard == self.start.owner {
                // Steps of an older epoch may have been higher.
                self.step = step;
            }
        }
    }

    /// How a member that has joined ends when a shard of its variables lives in another epoch.
    fn parted(&self, index: usize, current: RestoreEpoch, step: GlobalStep) -> Option<Error> {
        let Session { links, .. } = self;
        let joined = self.start.role.is_member() && self.uses(links[index].shard);
        match current.cmp(&links[index].restore_epoch) {
            _ if !joined => None,
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Greater => {
                Some(Error::RolledBack { from_step: self.step.0, to_step: step.0 })
            }
            std::cmp::Ordering::Less => Some(Error::StateLost { shard: links[index].shard }),
        }
    }

    /// Takes the epoch of a welcome; false if the link is of no use then.
    pub(super) fn welcome_epoch(&mut self, now: Instant, index: usize, welcome: &Welcome) -> bool {
        let shard = self.links[index].shard;
        let ready = matches!(welcome.catalogue, CatalogueState::Ready { .. });
        let uses = self.uses(shard);
        if uses && !ready && !self.start.role.is_member() {
            // Its chief may restore it. A new hello lets it check that the variables are the same.
            self.break_off(now, index, "its variables have no values".to_owned());
            return false;
        }
        let (epoch, step) = (welcome.restore_epoch, welcome.restored_step);
        let parted = self.parted(index, epoch, step);
        if let Some(error) = parted.or((uses && !ready).then_some(Error::StateLost { shard })) {
            self.fail(error);
            return false;
        }
        self.follow(index, epoch, step);
        self.links[index].ready = ready;
        true
    }

    /// Whether a hello was refused because of its epoch, which is dealt with then.
    pub(super) fn hello_epoch_refused(
        &mut self,
        now: Instant,
        index: usize,
        refusal: &Refusal,
    ) -> bool {
        let Refusal::RestoreEpoch { current, step, .. } = *refusal else { return false };
        match self.parted(index, current, step) {
            Some(error) => self.fail(error),
            None => self.break_off(now, index, refusal.to_string()),
        }
        true
    }

    /// Takes the epoch that an answer was given in, before anything else of it is; false if the
    /// answer is not to be looked at.
    pub(super) fn answer_epoch(
        &mut self,
        now: Instant,
        index: usize,
        pending: Pending,
        header: &Header,
        message: &Message,
    ) -> bool {
        let link = &self.links[index];
        let known = link.restore_epoch;
        if let Message::Refused(refused) = message
            && let Refusal::RestoreEpoch { current, step, .. } = refused.refusal
        {
            if let Some(error) = self.parted(index, current, step) {
                self.fail(error);
                return false;
            }
            if self.begins_an_epoch(pending) || (pending == Pending::Heartbeat && current == known)
            {
                // The one was refused for what it asked; the other was on its way when the epoch
                // began.
                self.follow(index, current, header.step);
                return true;
            }
            // A new hello makes known in which epoch all that waits is asked again.
            self.break_off(now, index, refused.refusal.to_string());
            return false;
        }
        if header.restore_epoch == known {
            return true;
        }
        if self.uses(link.shard) {
            // What is under way may be half of either. The next welcome says at which step the new
            // epoch began.
            let error = format!("restore epoch {} has begun there", header.restore_epoch);
            self.break_off(now, index, error);
            return false;
        }
        self.follow(index, header.restore_epoch, header.step);
        true
    }

    fn begins_an_epoch(&self, pending: Pending) -> bool {
        let Pending::Request(op) = pending else { return false };
        match self.ops.get(&op).map(|op| &op.kind) {
            Some(OpKind::Request(request)) => request.begins_an_epoch(),
            _ => false,
        }
    }

    /// Joins, once all shards are connected and live in one epoch. A shard that is behind is about
    /// to be restored by the chief, which closes its connections: the next welcome tells.
    pub(super) fn drive_join(&mut self, id: OpId) {
        let Some(OpKind::Join { plan, links }) = self.ops.get(&id).map(|op| &op.kind) else {
            return;
        };
        if links.iter().any(|&link| self.links[link].status != Status::Up) {
            return;
        }
        if let Some(&link) = links.iter().find(|&&link| !self.links[link].ready) {
            let error = self.refused("join", link, Refusal::NotInitialized {});
            self.finish(id, Err(error));
            return;
        }
        if self.behind(links.iter().copied()).next().is_none() {
            self.plan = Some(plan.clone());
            self.finish(id, Ok(Reply::Done));
        }
    }

    /// Those of some links whose shards are not in the newest epoch of them.
    pub(super) fn behind<'a>(
        &'a self,
        links: impl Iterator<Item = usize> + Clone + 'a,
    ) -> impl Iterator<Item = usize> + 'a {
        let newest = links.clone().map(|link| self.links[link].restore_epoch).max();
        links.filter(move |&link| Some(self.links[link].restore_epoch) != newest)
    }
}
