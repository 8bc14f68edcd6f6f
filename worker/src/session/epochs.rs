//! Restore epochs: the epoch of each shard, and the effect of a change on the session.
//!
//! Before it joins, a session follows every shard into a new epoch. After it has joined, its
//! tokens, its pending pushes and the values its caller computes with belong to one epoch. A member
//! that meets a newer epoch has been rolled back; an older one means that the shard has lost its
//! variables. A reader keeps no such state and follows.

use std::time::Instant;

use pushpull_common::ids::{GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{CatalogueState, Welcome};
use pushpull_common::protocol::{Header, Message, Refusal};

use super::link::{LinkStatus, PendingRequest};
use super::{OpId, OpKind, Reply, Session};
use crate::error::Error;

impl Session {
    /// Returns whether this session has joined and needs the shard: for its variables or as the
    /// step owner.
    pub(super) fn uses(&self, shard: ShardId) -> bool {
        let plan = self.plan.as_ref();
        plan.is_some_and(|plan| plan.shards().contains(&shard) || shard == self.config.owner)
    }

    /// Returns the epoch that a hello demands of the shard; 0 for any.
    pub(super) fn seen_epoch(&self, index: usize) -> RestoreEpoch {
        match self.config.role.is_member() && self.uses(self.links[index].shard) {
            true => self.links[index].restore_epoch,
            false => RestoreEpoch(0),
        }
    }

    /// Records a new epoch of a shard. The owner began it at this step.
    fn follow_epoch(&mut self, index: usize, epoch: RestoreEpoch, step: GlobalStep) {
        let link = &mut self.links[index];
        if link.restore_epoch != epoch {
            link.restore_epoch = epoch;
            if link.shard == self.config.owner {
                // The step falls if the previous epoch was ahead.
                self.step = step;
            }
        }
    }

    /// Returns the error that ends a joined member when a shard it uses is in another epoch.
    fn epoch_error(&self, index: usize, current: RestoreEpoch, step: GlobalStep) -> Option<Error> {
        let Session { links, .. } = self;
        let joined = self.config.role.is_member() && self.uses(links[index].shard);
        match current.cmp(&links[index].restore_epoch) {
            _ if !joined => None,
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Greater => {
                Some(Error::RolledBack { from_step: self.step.0, to_step: step.0 })
            }
            std::cmp::Ordering::Less => Some(Error::StateLost { shard: links[index].shard }),
        }
    }

    /// Records the epoch of a welcome. Returns false if the link or the session cannot continue.
    pub(super) fn welcome_epoch(&mut self, now: Instant, index: usize, welcome: &Welcome) -> bool {
        let shard = self.links[index].shard;
        let ready = matches!(welcome.catalogue, CatalogueState::Ready { .. });
        let uses = self.uses(shard);
        if uses && !ready && !self.config.role.is_member() {
            // The chief may still restore it. The next hello lets it compare the variables.
            self.reset_link(now, index, "its variables have no values".to_owned());
            return false;
        }
        let (epoch, step) = (welcome.restore_epoch, welcome.restored_step);
        let epoch_error = self.epoch_error(index, epoch, step);
        if let Some(error) = epoch_error.or((uses && !ready).then_some(Error::StateLost { shard }))
        {
            self.fail(error);
            return false;
        }
        self.follow_epoch(index, epoch, step);
        self.links[index].ready = ready;
        true
    }

    /// Handles the refusal of a hello because of its epoch. Returns false for any other refusal.
    pub(super) fn hello_epoch_refused(
        &mut self,
        now: Instant,
        index: usize,
        refusal: &Refusal,
    ) -> bool {
        let Refusal::RestoreEpoch { current, step, .. } = *refusal else { return false };
        match self.epoch_error(index, current, step) {
            Some(error) => self.fail(error),
            None => self.reset_link(now, index, refusal.to_string()),
        }
        true
    }

    /// Records the epoch of an answer before its content is used. Returns false if the answer must
    /// be ignored.
    pub(super) fn answer_epoch(
        &mut self,
        now: Instant,
        index: usize,
        pending: PendingRequest,
        header: &Header,
        message: &Message,
    ) -> bool {
        let link = &self.links[index];
        let known = link.restore_epoch;
        if let Message::Refused(refused) = message
            && let Refusal::RestoreEpoch { current, step, .. } = refused.refusal
        {
            if let Some(error) = self.epoch_error(index, current, step) {
                self.fail(error);
                return false;
            }
            if self.begins_an_epoch(pending)
                || (pending == PendingRequest::Heartbeat && current == known)
            {
                // The first was refused for the epoch it names. The heartbeat was in flight when
                // the epoch began.
                self.follow_epoch(index, current, header.step);
                return true;
            }
            // The next welcome tells the epoch in which to repeat the pending requests.
            self.reset_link(now, index, refused.refusal.to_string());
            return false;
        }
        if header.restore_epoch == known {
            return true;
        }
        if self.uses(link.shard) {
            // Pending pulls and pushes may be split between the epochs. The next welcome tells the
            // step at which the new epoch began.
            let error = format!("the shard has begun restore epoch {}", header.restore_epoch);
            self.reset_link(now, index, error);
            return false;
        }
        self.follow_epoch(index, header.restore_epoch, header.step);
        true
    }

    fn begins_an_epoch(&self, pending: PendingRequest) -> bool {
        let PendingRequest::Request(op) = pending else { return false };
        match self.ops.get(&op).map(|op| &op.kind) {
            Some(OpKind::Request(request)) => request.begins_an_epoch(),
            _ => false,
        }
    }

    /// Joins once all shards are connected and in one epoch. The chief is about to restore a shard
    /// in an older epoch. The restore closes its connections, and the next welcome tells the new
    /// epoch.
    pub(super) fn drive_join(&mut self, id: OpId) {
        let Some(OpKind::Join { plan, links }) = self.ops.get(&id).map(|op| &op.kind) else {
            return;
        };
        if links.iter().any(|&link| self.links[link].status != LinkStatus::Up) {
            return;
        }
        if let Some(&link) = links.iter().find(|&&link| !self.links[link].ready) {
            let error = self.refused("join", link, Refusal::NotInitialized {});
            self.finish(id, Err(error));
            return;
        }
        if self.outdated(links.iter().copied()).next().is_none() {
            self.plan = Some(plan.clone());
            self.finish(id, Ok(Reply::Done));
        }
    }

    /// Returns the links whose shards are not in the newest epoch among these.
    pub(super) fn outdated<'a>(
        &'a self,
        links: impl Iterator<Item = usize> + Clone + 'a,
    ) -> impl Iterator<Item = usize> + 'a {
        let newest = links.clone().map(|link| self.links[link].restore_epoch).max();
        links.filter(move |&link| Some(self.links[link].restore_epoch) != newest)
    }
}
