//! The other participating shards, as the step owner sees them.

use std::collections::BTreeMap;
use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, GlobalStep, ShardId, TokenId};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, message};

use crate::aggregate::current_step::CommittedStep;
use crate::shard::output::ShardOutputs;

/// The other participating shards.
#[derive(Debug, Default)]
pub(in crate::shard) struct PeerShards {
    connections: BTreeMap<ShardId, u64>,
    /// When each last sent a message.
    heard_at: BTreeMap<ShardId, Instant>,
    /// The last step that was announced as committed.
    announced_step: Option<u64>,
    /// The step of which they keep a cut for the running save.
    cut_step: Option<GlobalStep>,
}

impl PeerShards {
    /// Returns the connections of the shards that are connected.
    pub(in crate::shard) fn connections(&self) -> impl Iterator<Item = u64> {
        self.connections.values().copied()
    }

    pub(in crate::shard) fn connection_of(&self, shard: ShardId) -> Option<u64> {
        self.connections.get(&shard).copied()
    }

    /// Forgets a connection that has ended.
    pub(in crate::shard) fn forget_connection(&mut self, connection: u64) {
        self.connections.retain(|_, other| *other != connection);
    }

    /// Records the connection of a shard that takes part, and tells it the epoch of the newest
    /// chief. Returns false if the connection is another shard's.
    pub(in crate::shard) fn register(
        &mut self,
        out: &mut ShardOutputs,
        now: Instant,
        connection: u64,
        shard: ShardId,
        chief: ClientEpoch,
    ) -> bool {
        let speaks_for = self.connections.iter().find(|(_, other)| **other == connection);
        if speaks_for.is_some_and(|(other, _)| *other != shard) {
            return false;
        }
        self.heard_at.insert(shard, now);
        if self.connections.insert(shard, connection) != Some(connection) {
            send_chief(out, connection, chief);
            // It may not have been connected when the save began. It ignores the order if it has
            // applied a later step.
            if let Some(step) = self.cut_step {
                send_keep_cut(out, connection, step);
            }
        }
        true
    }

    /// Orders every shard to keep a cut of this step for the save that begins.
    pub(in crate::shard) fn order_cut(&mut self, out: &mut ShardOutputs, step: GlobalStep) {
        self.cut_step = Some(step);
        self.connections().for_each(|connection| send_keep_cut(out, connection, step));
    }

    /// The running save has ended.
    pub(in crate::shard) fn forget_cut(&mut self) {
        self.cut_step = None;
    }

    /// Announces the committed step, once. Returns whether it was announced now.
    pub(in crate::shard) fn announce_committed(
        &mut self,
        out: &mut ShardOutputs,
        committed: &CommittedStep,
    ) -> bool {
        let is_new = self.announced_step != Some(committed.step);
        if is_new {
            self.announced_step = Some(committed.step);
            self.connections().for_each(|connection| send_committed(out, connection, committed));
        }
        is_new
    }

    /// Forgets the steps that were announced or cut, because the steps begin again.
    pub(in crate::shard) fn forget_steps(&mut self) {
        self.announced_step = None;
        self.cut_step = None;
    }

    /// Announces that the push of a token is over.
    pub(in crate::shard) fn announce_over(&self, out: &mut ShardOutputs, token: u64) {
        self.connections().for_each(|connection| send_over(out, connection, TokenId(token)));
    }

    /// Announces the epoch of a new chief.
    pub(in crate::shard) fn announce_chief(&self, out: &mut ShardOutputs, chief: ClientEpoch) {
        self.connections().for_each(|connection| send_chief(out, connection, chief));
    }

    /// Describes a shard, and when it was last heard from.
    pub(in crate::shard) fn describe(&self, now: Instant, shard: ShardId) -> String {
        let link = if self.connections.contains_key(&shard) { "" } else { "not connected, " };
        match self.heard_at.get(&shard) {
            None => format!("{shard} ({link}not heard from yet)"),
            Some(&heard_at) => {
                let silent = now.saturating_duration_since(heard_at).as_millis();
                format!("{shard} ({link}heard from {silent} ms ago)")
            }
        }
    }
}

/// Sends a committed step to a shard.
pub(in crate::shard) fn send_committed(
    out: &mut ShardOutputs,
    connection: u64,
    committed: &CommittedStep,
) {
    let pushes = committed.tokens.iter().zip(&committed.factors);
    let pushes = pushes.map(|(&token, factor)| (TokenId(token), factor.get()));
    let Some(pushes) = List::of(pushes) else { return };
    let step = GlobalStep(committed.step);
    let envelope = Envelope { step, ..out.epoch_only() };
    let message = message::Commit { pushes }.into();
    out.send(connection, envelope, message);
}

fn send_keep_cut(out: &mut ShardOutputs, connection: u64, step: GlobalStep) {
    let envelope = Envelope { step, ..out.epoch_only() };
    out.send(connection, envelope, message::KeepCut {}.into());
}

/// Sends to a shard that the push of a token is over.
pub(in crate::shard) fn send_over(out: &mut ShardOutputs, connection: u64, token: TokenId) {
    let envelope = out.epoch_only();
    let message = message::TokenOver { token }.into();
    out.send(connection, envelope, message);
}

/// Sends the epoch of the newest chief to a shard.
fn send_chief(out: &mut ShardOutputs, connection: u64, chief: ClientEpoch) {
    let chief = message::ChiefIs { client: chief };
    out.send(connection, Envelope::default(), chief.into());
}
