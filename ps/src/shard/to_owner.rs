//! The connection of a shard to the step owner: reports to it, and its messages.

use std::time::{Duration, Instant};

use pushpull_common::ids::{GlobalStep, RestoreEpoch, TokenId};
use pushpull_common::protocol::limits::STEP_PUSHES_MAX;
use pushpull_common::protocol::{Header, Message};

use super::Shard;
use super::held_push::HeldPush;
use super::variables::Variables;
use crate::aggregate::clipping::BitwiseF64;
use crate::aggregate::current_step::{CommittedStep, PerPush};

/// The connection to the step owner. Unused on the step owner itself.
#[derive(Debug, Default)]
pub(super) struct ToOwner {
    is_up: bool,
    /// Since when there is none.
    lost_at: Option<Instant>,
    /// When this shard last reported over it.
    reported_at: Option<Instant>,
    /// The last step that the step owner has told.
    heard: HeardStep,
}

/// A step that the step owner has told.
#[derive(Clone, Copy, Debug, Default)]
struct HeardStep {
    epoch: RestoreEpoch,
    step: GlobalStep,
    /// The gradients that the shard had applied then.
    gradients: u64,
}

/// By how many steps the step owner can be ahead of what it has told and of the gradients that the
/// shard has applied since: the most pushes that are whole on the owner and not here yet.
const STEPS_IN_FLIGHT: u64 = STEP_PUSHES_MAX as u64;

impl ToOwner {
    pub(super) fn is_up(&self) -> bool {
        self.is_up
    }

    /// Returns whether all reports are to be repeated now, and notes it.
    pub(super) fn reports_are_due(&mut self, now: Instant, interval: Duration) -> bool {
        let due = self.is_up && self.reported_at.is_none_or(|last| now >= last + interval);
        if due {
            self.reported_at = Some(now);
        }
        due
    }

    /// Returns a step that the step owner cannot have passed yet. Every gradient has a share on
    /// every shard, so the shard counts what the owner has not told.
    pub(super) fn newest_step(&self, variables: &Variables) -> GlobalStep {
        let HeardStep { epoch, step, gradients } = self.heard;
        let (step, counted) = match epoch == variables.epoch {
            true => (step, variables.gradients.saturating_sub(gradients)),
            false => (variables.restored_step, variables.gradients),
        };
        GlobalStep(step.0.saturating_add(counted).saturating_add(STEPS_IN_FLIGHT))
    }

    /// Describes since when the step owner cannot be reached. `None` if it can.
    pub(super) fn outage(&self, now: Instant) -> Option<String> {
        match self.lost_at {
            _ if self.is_up => None,
            None => Some("has not reached the step owner yet".into()),
            Some(since) => {
                let away = now.saturating_duration_since(since).as_millis();
                Some(format!("has had no connection to the step owner for {away} ms"))
            }
        }
    }
}

impl Shard {
    /// Handles a change of the connection to the step owner. A restarted step owner has lost the
    /// reports, and an owner of another restore epoch has refused them. So reports are repeated
    /// once there is a connection, and at intervals.
    pub(super) fn owner_link(&mut self, now: Instant, up: bool) {
        let was_up = self.steps.to_owner.is_up;
        self.counters.owner_connections_lost.add(u64::from(was_up && !up));
        self.counters.shards_without_owner.set(u64::from(!up));
        let lost_at = (!up).then_some(now);
        let heard = self.steps.to_owner.heard;
        self.steps.to_owner = ToOwner { is_up: up, lost_at, reported_at: None, heard };
        self.peers.chief.announced = None;
    }

    /// Handles a message of the step owner.
    pub(super) fn on_owner_message(&mut self, now: Instant, header: &Header, message: Message) {
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
        let heard = &mut self.steps.to_owner.heard;
        if heard.epoch != epoch || heard.step < header.step {
            *heard = HeardStep { epoch, step: header.step, gradients };
        }
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
                self.applier.begin_step(&self.intake, &self.steps);
            }
            Message::KeepCut(_) => self.checkpoints.keep_cut(
                &mut self.variables,
                &self.peers,
                &self.steps,
                now,
                header.step,
            ),
            Message::Recall(recall) => self.recall(recall.token, recall.client),
            Message::AuditPushes(audit) => self.answer_audit(audit.client, audit.ends),
            Message::TokenOver(over) => {
                let push_slot =
                    self.intake.inbox.as_ref().and_then(|i| i.whole_push_slot_of(over.token.0));
                if let Some(push_slot) = push_slot {
                    let Shard { steps, intake, peers, out, .. } = self;
                    HeldPush { push_slot }.drop_over(steps, intake, peers, out, now);
                }
            }
            _ => {}
        }
    }
}
