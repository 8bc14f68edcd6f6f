//! Synchronous mode: the step owner decides each push for all shards, once every shard holds it.

use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::refusal::Detail;

use super::pushes::{PendingPush, SharePhase};
use super::requests::deadline_ms;
use super::{OpId, Session};
use crate::error::{Error, UnresponsiveShard, UnresponsiveShards};

impl Session {
    /// Returns whether the fate of a synchronous push is known.
    ///
    /// - The step owner's outcome decides it. If accepted, every shard holds it; if stale, no shard
    ///   needs the rest.
    /// - A refusal by any shard decides it too. That shard will never hold the push, so the step
    ///   owner would never answer. The token is returned, which discards what the other shards
    ///   hold.
    pub(super) fn is_decided(&self, push: &PendingPush) -> bool {
        let owner = self.owner_link();
        push.shares.iter().any(|share| match share.phase {
            SharePhase::Settled(Ok(_)) => Some(share.link) == owner,
            SharePhase::Settled(Err(_)) => true,
            _ => false,
        })
    }

    /// Returns the longest time that an operation still waits for a push, for the header of its
    /// last part; 0 if none waits and the answer has no deadline.
    pub(super) fn remaining_ms(&self, now: Instant, sequence: Sequence) -> u32 {
        let ops = self.waiting_for(sequence).filter_map(|id| self.ops.get(&id));
        ops.map(|op| deadline_ms(now, op.deadline)).max().unwrap_or(0)
    }

    /// Handles a step owner that did not decide in time. Operations that began before
    /// `completed_at` fail with the list of stragglers. The push stays pending, and the owner is
    /// asked again for the later ones.
    pub(super) fn report_undecided(
        &mut self,
        now: Instant,
        sequence: Sequence,
        link: usize,
        completed_at: Option<Instant>,
        awaited: &Detail,
    ) {
        let UnresponsiveShard { shard, address, .. } = self.silent(now, link);
        let silent = UnresponsiveShard { shard, address, last: awaited.to_string() };
        let mut is_awaited = false;
        let waiting: Vec<OpId> = self.waiting_for(sequence).collect();
        for id in waiting {
            let Some(op) = self.ops.get(&id) else { continue };
            if completed_at.is_some_and(|at| at < op.since) {
                is_awaited = true;
                continue;
            }
            let error = Error::Timeout {
                doing: op.doing,
                waited: now.saturating_duration_since(op.since),
                awaited: UnresponsiveShards(vec![silent.clone()]),
                sequence: Some(sequence),
            };
            self.finish(id, Err(error));
        }
        if is_awaited {
            self.query_undecided();
        }
    }

    /// Asks about the undecided pushes: once for each command, so that a step owner that answers at
    /// once is not asked in a loop.
    pub(super) fn query_undecided(&mut self) {
        let shares = self.pushes.values_mut().flat_map(|push| &mut push.shares);
        for share in shares.filter(|share| share.phase == SharePhase::Undecided) {
            share.phase = SharePhase::InDoubt;
        }
    }
}
