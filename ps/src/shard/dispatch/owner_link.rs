//! The connection of a shard to the step owner: whether it is up, and its messages.

use std::time::Instant;

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::{Header, Message};

use crate::aggregate::clipping::BitwiseF64;
use crate::aggregate::current_step::{CommittedStep, PerPush};
use crate::shard::Shard;

impl Shard {
    /// Handles a change of the connection to the step owner.
    pub(in crate::shard) fn owner_link(&mut self, now: Instant, up: bool) {
        let is_lost = self.steps.to_owner.set_up(now, up);
        self.counters.owner_connections_lost.add(u64::from(is_lost));
        self.counters.shards_without_owner.set(u64::from(!up));
        self.peers.chief.announced = None;
    }

    /// Handles a message of the step owner.
    pub(in crate::shard) fn on_owner_message(
        &mut self,
        now: Instant,
        header: &Header,
        message: Message,
    ) {
        if let Message::ChiefIs(chief) = message {
            // Valid in any restore epoch, because the chief begins the next one.
            self.peers.chief.announced = Some(chief.client);
            return;
        }
        if header.restore_epoch != self.variables.epoch || self.files.poisoned().is_some() {
            return;
        }
        let epoch = self.variables.epoch;
        let gradients = self.variables.gradients;
        self.steps.to_owner.heard(epoch, header.step, gradients);
        match message {
            Message::Commit(commit) => {
                let pushes = commit.pushes.items().iter();
                let (tokens, factors): (PerPush<u64>, PerPush<BitwiseF64>) =
                    pushes.map(|&(token, factor)| (token.0, BitwiseF64::from(factor))).unzip();
                if !factors.iter().all(|factor| factor.get() > 0.0 && factor.get() <= 1.0) {
                    // No step owner sends that. A shard that accepted it would differ from the
                    // others.
                    return;
                }
                let all_here = tokens.iter().all(|&token| self.intake.is_whole(TokenId(token)));
                self.counters.steps_missed.add(u64::from(!all_here));
                if let Some(follower) = self.steps.follower.as_mut().filter(|_| all_here) {
                    follower.receive_commit(&CommittedStep {
                        step: header.step.0,
                        tokens,
                        factors,
                    });
                }
                self.begin_step();
            }
            Message::KeepCut(_) => self.keep_cut(now, header.step),
            Message::Recall(recall) => self.recall(recall.token, recall.client),
            Message::AuditPushes(audit) => self.answer_audit(audit.client, audit.ends),
            Message::TokenOver(over) => {
                if let Some(push_slot) = self.intake.whole_push_slot_of(over.token) {
                    self.drop_over(now, push_slot);
                }
            }
            _ => {}
        }
    }
}
