//! Synchronous mode: the step owner decides about a push for all shards, when every shard holds it.

use std::time::Instant;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::refusal::Detail;

use super::pushes::{Phase, Push};
use super::requests::deadline_ms;
use super::{OpId, Session};
use crate::error::{Error, UnresponsiveShard, UnresponsiveShards};

impl Session {
    /// Whether it is known what became of a synchronous push as a whole. The step owner's outcome
    /// ends it: accepted, every shard holds it; stale, no shard needs the rest. A refusal by any shard
    /// ends it too: that shard will never hold it, and so the step owner would never answer. Its token
    /// goes back then, and with it what other shards hold.
    pub(super) fn is_decided(&self, push: &Push) -> bool {
        let owner = self.owner_link();
        push.shares.iter().any(|share| match share.phase {
            Phase::Settled(Ok(_)) => Some(share.link) == owner,
            Phase::Settled(Err(_)) => true,
            _ => false,
        })
    }

    /// How long somebody will still wait for a push, for the header of its last part; 0 if nobody
    /// waits, and the answer may come whenever it comes.
    pub(super) fn remaining_ms(&self, now: Instant, sequence: Sequence) -> u32 {
        let ops = self.waiting_for(sequence).filter_map(|id| self.ops.get(&id));
        ops.map(|op| deadline_ms(now, op.deadline)).max().unwrap_or(0)
    }

    /// The step owner has not decided in time: whoever waited when it was `asked` is told for whom it
    /// waits. The push stays where it is. For those who have come since it is asked again.
    pub(super) fn tell_undecided(
        &mut self,
        now: Instant,
        sequence: Sequence,
        link: usize,
        asked: Option<Instant>,
        awaited: &Detail,
    ) {
        let UnresponsiveShard { shard, address, .. } = self.silent(now, link);
        let silent = UnresponsiveShard { shard, address, last: awaited.to_string() };
        let mut is_awaited = false;
        let waiting: Vec<OpId> = self.waiting_for(sequence).collect();
        for id in waiting {
            let Some(op) = self.ops.get(&id) else { continue };
            if asked.is_some_and(|asked| asked < op.since) {
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
            self.ask_about_the_undecided();
        }
    }

    /// The caller is there: asks about the pushes that were not decided in time, once for each
    /// command. A step owner that says at once who is missing is not asked in a circle.
    pub(super) fn ask_about_the_undecided(&mut self) {
        let shares = self.pushes.values_mut().flat_map(|push| &mut push.shares);
        for share in shares.filter(|share| share.phase == Phase::Undecided) {
            share.phase = Phase::InDoubt;
        }
    }
}
