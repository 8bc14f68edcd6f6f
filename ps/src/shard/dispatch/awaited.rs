//! What requests wait for: as the text that a waiting worker gets, and as the tasks and shards that
//! it names.

use std::cmp::Ordering;
use std::time::Instant;

use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::message::Role;
use pushpull_common::status::Waiting;

use crate::client_entry::ClientPresence;
use crate::client_key::ClientKey;
use crate::inbox::Inbox;
use crate::shard::Shard;
use crate::shard::request::PeerRequest;
use crate::shard::request::parked_request::WaitReason;

/// The most tasks that have not joined whose names a text has.
const NAMES_MAX: usize = 8;

/// The most shards whose names a text has. The text is clipped, and replicas come after them.
const SHARDS_NAMED_MAX: usize = 2;

/// An event that requests wait for.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    /// The event with its causes.
    pub(crate) text: String,
    /// The workers that can cause it.
    pub(crate) workers: Vec<TaskId>,
    /// The shards that can cause it.
    pub(crate) shards: Vec<ShardId>,
}

impl Awaited {
    /// Returns an event that names no worker and no shard.
    pub(in crate::shard) fn event(text: impl Into<String>) -> Awaited {
        Awaited { text: text.into(), ..Awaited::default() }
    }
}

impl Shard {
    /// Returns what the oldest waiting request of a worker waits for: on the step owner.
    pub(in crate::shard) fn oldest_wait(&self, now: Instant) -> Option<Waiting> {
        self.steps.owner.as_ref()?;
        let parked = self.peers.parked.oldest_of_clients();
        // Gradients that some shard has not reported.
        let held = self.intake.inbox.as_ref().filter(|_| self.steps.is_synchronous());
        let held = held.and_then(|inbox| inbox.oldest_wait());
        let since = [parked.map(|entry| entry.request.since), held].into_iter().flatten().min()?;
        let awaited = match parked.filter(|entry| entry.request.since == since) {
            Some(entry) => match &entry.wait {
                WaitReason::Ready => {
                    let workers = self.config.cluster.chief().into_iter().collect();
                    let text = self.awaited(now, &entry.request, &entry.wait);
                    Awaited { text, workers, ..Awaited::default() }
                }
                WaitReason::PushSlot => Awaited::event(self.awaited_push_slot(now)),
                WaitReason::End => self.awaited_end(now),
                WaitReason::Token | WaitReason::Pull { .. } | WaitReason::Rows { .. } => {
                    let tokens = || self.awaited_tokens(now, entry.request.client);
                    self.awaited_step(now).unwrap_or_else(tokens)
                }
            },
            None => self.awaited_step(now).unwrap_or_default(),
        };
        Some(Waiting {
            reason: self.applier.with_growth(awaited.text),
            workers: awaited.workers,
            shards: awaited.shards,
            waited: now.saturating_duration_since(since),
        })
    }

    /// Describes the event that a request waits for.
    pub(super) fn awaited(&self, now: Instant, request: &PeerRequest, wait: &WaitReason) -> String {
        if request.role == (Role::Reader {}) && self.peers.has_proved_itself(request.connection) {
            return awaited_by_stranger(wait);
        }
        match wait {
            WaitReason::Ready => self.awaited_ready(now),
            WaitReason::Token => {
                let tokens = || self.awaited_tokens(now, request.client);
                self.awaited_step(now).unwrap_or_else(tokens).text
            }
            WaitReason::PushSlot => self.awaited_push_slot(now),
            WaitReason::End => self.awaited_end(now).text,
            WaitReason::Pull { at_least, .. } | WaitReason::Rows { at_least, .. } => {
                self.awaited_values(now, *at_least)
            }
        }
    }

    /// Describes what a pull waits for.
    fn awaited_values(&self, now: Instant, step: u64) -> String {
        let found = match (self.awaited_step(now), &self.steps.follower) {
            (Some(awaited), _) => format!("; {}", awaited.text),
            (None, Some(follower)) => {
                let owner = self.steps.owner_outage(now);
                format!("; this shard has applied {}{owner}", follower.step())
            }
            (None, None) => String::new(),
        };
        format!("global step {step}{found}")
    }

    /// Returns what a request for a token waits for. `None` if steps are not synchronous here, or
    /// on another shard.
    pub(crate) fn awaited_step(&self, now: Instant) -> Option<Awaited> {
        let coordinator = self.steps.coordinator()?;
        if coordinator.current.is_applying() || coordinator.is_behind() {
            let step = coordinator.step() - 1;
            let at: Vec<usize> = coordinator.shards_behind().collect();
            let behind = at.iter().filter_map(|&at| self.describe_shard(now, at));
            let behind = behind.collect::<Vec<String>>().join(", ");
            let behind = if behind.is_empty() { behind } else { format!("; not yet by {behind}") };
            let text = format!("step {step} to be applied by every shard{behind}");
            return Some(Awaited { text, workers: Vec::new(), shards: self.shards_at(&at) });
        }
        let given: Vec<ClientKey> =
            coordinator.current.admitted().iter().map(|g| g.holder).collect();
        // A step that is short needs the replicas that have left, even those that gave a gradient.
        let short = coordinator.is_short();
        let missing = self.peers.registry.keys().filter(|client| {
            let presence = self.peers.registry.client(*client).presence;
            let needed = presence != ClientPresence::Present && short;
            needed || (presence != ClientPresence::Left && !given.contains(client))
        });
        let missing: Vec<ClientKey> = missing.collect();
        // A shard's missing report is not the fault of the gradient's worker.
        let lacking: Vec<(usize, usize)> = coordinator.shards_lacking().collect();
        let shards = lacking.iter().take(SHARDS_NAMED_MAX).filter_map(|&(at, lacked)| {
            let shard = self.describe_shard(now, at)?;
            Some(format!("{shard}, which has not reported {lacked} of the pushes that others hold"))
        });
        let unnamed = lacking.len().saturating_sub(SHARDS_NAMED_MAX);
        let shards = shards.chain((unnamed > 0).then(|| format!("{unnamed} more of the shards")));
        let named = missing.iter().map(|&client| self.peers.registry.describe(now, client));
        let named = shards.chain(named).collect::<Vec<String>>().join(", ");
        let step = coordinator.step();
        let count = given.len();
        let goal = coordinator.current.goal();
        let joined = u32::try_from(self.peers.registry.keys().count()).unwrap_or(u32::MAX);
        let total = self.config.rule().map_or(0, |rule| rule.total);
        // Replicas that have not joined are expected for a limited time. A step that is short needs
        // them all the same.
        let not_joined = if short { total.saturating_sub(joined) } else { coordinator.expects() };
        let named = match (named, not_joined) {
            (named, 0) => named,
            (named, not_joined) if named.is_empty() => self.not_joined(not_joined),
            (named, not_joined) => format!("{named} and {}", self.not_joined(not_joined)),
        };
        let text = format!("step {step}, which has {count} of {goal} gradients; {named}");
        let registry = &self.peers.registry;
        let mut workers: Vec<TaskId> =
            missing.iter().map(|&client| registry.client(client).task.clone()).collect();
        if not_joined > 0 {
            workers.extend(registry.never_joined(&self.config.cluster));
        }
        let lacking: Vec<usize> = lacking.into_iter().map(|(at, _)| at).collect();
        Some(Awaited { text, workers, shards: self.shards_at(&lacking) })
    }

    /// Describes what the values wait for: the chief by its task, or the checkpoint that is read.
    pub(in crate::shard) fn awaited_ready(&self, now: Instant) -> String {
        if let Some(restoring) = &self.checkpoints.restoring {
            return format!("{} to restore {}", self.id, restoring.checkpoint.name);
        }
        let Some(chief) = self.config.cluster.chief() else {
            return "a chief to initialize the variables".to_owned();
        };
        let known = self.peers.registry.find(&chief);
        let chief = known.map_or_else(
            || format!("{chief} (not joined yet)"),
            |key| self.peers.registry.describe(now, key),
        );
        let refusal = self.out.chief_refusal().map(|refusal| format!("; {refusal}"));
        format!("the chief {chief} to initialize the variables{}", refusal.unwrap_or_default())
    }

    /// Describes replicas that have not joined, by their tasks if the cluster lists them.
    fn not_joined(&self, count: u32) -> String {
        let cluster = &self.config.cluster;
        let listed: Vec<TaskId> = self.peers.registry.never_joined(cluster).collect();
        let lists_workers = cluster.chief().is_some();
        describe_not_joined(count, &listed, lists_workers && !self.config.elastic_workers)
    }

    /// Returns the shards with these indices among those that take part.
    fn shards_at(&self, at: &[usize]) -> Vec<ShardId> {
        at.iter().filter_map(|&at| self.steps.participants.get(at).copied()).collect()
    }

    /// Describes what a request for a push slot waits for.
    fn awaited_push_slot(&self, now: Instant) -> String {
        let outage = self.steps.owner_outage(now);
        match self.intake.inbox.as_ref().map_or(0, Inbox::without_memory) {
            0 => format!("a push slot{outage}"),
            slots => {
                let why = "bytes_max or the state directory has too little";
                format!("a push slot ({slots} have no memory: {why}){outage}")
            }
        }
    }

    /// On the step owner: describes a shard, by its index among those that take part, and when it
    /// was last heard from.
    fn describe_shard(&self, now: Instant, at: usize) -> Option<String> {
        let shard = *self.steps.participants.get(at)?;
        if shard == self.id {
            return Some(self.applier.with_growth(format!("{shard} itself")));
        }
        Some(self.steps.shards.describe(now, shard))
    }
}

/// Describes replicas that have not joined, of which the cluster lists some. It may list all workers
/// that can join.
fn describe_not_joined(count: u32, listed: &[TaskId], lists_all: bool) -> String {
    let names: Vec<String> = listed.iter().take(NAMES_MAX).map(TaskId::to_string).collect();
    let names = names.join(", ");
    let others = if listed.len() > NAMES_MAX { " and others" } else { "" };
    let unlisted = usize::try_from(count).unwrap_or(usize::MAX).saturating_sub(listed.len());
    let unlisted = match lists_all {
        true => format!("{unlisted} more than the cluster lists"),
        false => format!("{unlisted} more"),
    };
    match (count as usize).cmp(&listed.len()) {
        Ordering::Less => format!("{count} of {names}{others} (not joined yet)"),
        Ordering::Equal => format!("{names}{others} (not joined yet)"),
        Ordering::Greater if listed.is_empty() && !lists_all => format!("{count} not joined yet"),
        Ordering::Greater if listed.is_empty() => unlisted,
        Ordering::Greater => format!("{names}{others} (not joined yet) and {unlisted}"),
    }
}

/// Describes what a request waits for without the members of the training, of whom a reader that was
/// asked who it is learns nothing.
fn awaited_by_stranger(wait: &WaitReason) -> String {
    match wait {
        WaitReason::Ready => "the chief to initialize the variables".to_owned(),
        WaitReason::End => "the end of the training on all workers".to_owned(),
        WaitReason::Pull { at_least, .. } | WaitReason::Rows { at_least, .. } => {
            format!("global step {at_least}")
        }
        WaitReason::Token | WaitReason::PushSlot => "its turn".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_that_have_not_joined_are_named_or_counted() {
        let listed = [TaskId::worker(2), TaskId::worker(3)];
        let names = "/job:worker/task:2, /job:worker/task:3";
        for (count, listed, lists_all, expected) in [
            (1, &listed[..], true, format!("1 of {names} (not joined yet)")),
            (2, &listed, true, format!("{names} (not joined yet)")),
            (
                5,
                &listed,
                true,
                format!("{names} (not joined yet) and 3 more than the cluster lists"),
            ),
            (5, &listed, false, format!("{names} (not joined yet) and 3 more")),
            (2, &[], true, "2 more than the cluster lists".to_owned()),
            (2, &[], false, "2 not joined yet".to_owned()),
        ] {
            assert_eq!(describe_not_joined(count, listed, lists_all), expected);
        }
    }
}
