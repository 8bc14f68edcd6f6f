//! Push audits: which gradients of a client that is absent or has ended are applied on some shards
//! only, in asynchronous mode.
//!
//! A gradient goes to all shards at once, and each applies it when it is whole there. A client that
//! dies or is cut off in between leaves it on some shards. So the step owner asks every shard which
//! gradients of such a client it has applied, and compares:
//!
//! - While the client may come back, the audit *watches*: the client may still complete its
//!   gradients. An audit that finds each gradient on all shards or on none is over.
//! - After two leases, and as soon as a newer incarnation says hello, the audit *ends* the client:
//!   every shard fences it before it answers. What is on some shards only then stays so.
//!
//! This module has no clock and no connections: the caller passes times and answers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pushpull_common::ids::{Sequence, ShardId, TokenId};

use crate::client_key::ClientKey;

/// The gradients of one client that a shard has applied, as far as it remembers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AppliedPushes {
    /// Older gradients are settled on every shard.
    pub(crate) oldest: Sequence,
    pub(crate) applied: BTreeMap<Sequence, TokenId>,
}

impl AppliedPushes {
    fn has(&self, sequence: Sequence) -> bool {
        sequence < self.oldest || self.applied.contains_key(&sequence)
    }
}

/// A gradient that is applied on some shards only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartlyAppliedPush {
    pub(crate) token: TokenId,
    pub(crate) applied: Vec<ShardId>,
    pub(crate) missing: Vec<ShardId>,
    /// The shards that could not be asked.
    pub(crate) unknown: Vec<ShardId>,
}

/// The audit of one client.
#[derive(Debug)]
struct PushAudit {
    /// When the client became absent.
    since: Instant,
    /// Whether the shards are told that the client has ended.
    ends: bool,
    /// Whether a newer incarnation waits to replace the client.
    is_replaced: bool,
    /// Whether they have been asked since the audit began, or since the client ended.
    is_asked: bool,
    answers: BTreeMap<ShardId, AppliedPushes>,
}

/// The audits of the step owner, by client.
///
/// Invariant: an audit that ends its client uses no answer from before that.
#[derive(Debug, Default)]
pub(crate) struct PushAudits(BTreeMap<ClientKey, PushAudit>);

impl PushAudits {
    /// Begins to watch a client that has become absent, unless it is audited already.
    pub(crate) fn watch(&mut self, client: ClientKey, now: Instant) {
        self.0.entry(client).or_insert_with(|| PushAudit {
            since: now,
            ends: false,
            is_replaced: false,
            is_asked: false,
            answers: BTreeMap::new(),
        });
    }

    /// Ends a client. Returns false if that has begun already.
    pub(crate) fn end(&mut self, client: ClientKey, now: Instant) -> bool {
        self.watch(client, now);
        let audit = self.0.get_mut(&client).filter(|audit| !audit.ends);
        audit.is_some_and(|audit| {
            audit.ends = true;
            audit.is_asked = false;
            audit.answers = BTreeMap::new();
            true
        })
    }

    /// Stops watching a client that is back. One that has ended cannot come back.
    pub(crate) fn came_back(&mut self, client: ClientKey) {
        if self.0.get(&client).is_some_and(|audit| !audit.ends) {
            self.0.remove(&client);
        }
    }

    /// Ends a client because a newer incarnation replaces it.
    pub(crate) fn replace(&mut self, client: ClientKey, now: Instant) {
        self.end(client, now);
        self.0.entry(client).and_modify(|audit| audit.is_replaced = true);
    }

    /// Returns whether a newer incarnation waits to replace the client.
    pub(crate) fn is_replaced(&self, client: ClientKey) -> bool {
        self.0.get(&client).is_some_and(|audit| audit.is_replaced)
    }

    /// Removes an audit that is over.
    pub(crate) fn remove(&mut self, client: ClientKey) {
        self.0.remove(&client);
    }

    /// Removes all audits, because another restore epoch begins.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns whether a client is audited.
    pub(crate) fn has(&self, client: ClientKey) -> bool {
        self.0.contains_key(&client)
    }

    /// Returns whether no client is audited.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Yields the audited clients, and whether they have ended.
    pub(crate) fn clients(&self) -> impl Iterator<Item = (ClientKey, bool)> {
        self.0.iter().map(|(&client, audit)| (client, audit.ends))
    }

    /// Returns whether a client has been absent for `limit`.
    pub(crate) fn is_overdue(&self, client: ClientKey, now: Instant, limit: Duration) -> bool {
        let since = self.0.get(&client).map(|audit| audit.since);
        since.is_some_and(|since| now.saturating_duration_since(since) >= limit)
    }

    /// Returns the clients about which the shards are to be asked, and whether they have ended: all
    /// of them `again`, otherwise those about which they have not been asked.
    pub(crate) fn take_due(&mut self, again: bool) -> Vec<(ClientKey, bool)> {
        let due = self.0.iter_mut().filter(|(_, audit)| again || !audit.is_asked);
        due.map(|(&client, audit)| {
            audit.is_asked = true;
            (client, audit.ends)
        })
        .collect()
    }

    /// Returns whether this shard still has to answer about the client. While the client may come
    /// back, its answers change.
    pub(crate) fn awaits(&self, client: ClientKey, shard: ShardId) -> bool {
        let audit = self.0.get(&client);
        audit.is_some_and(|audit| !audit.ends || !audit.answers.contains_key(&shard))
    }

    /// Returns those of the shards that have not answered about the client.
    pub(crate) fn unanswered(&self, client: ClientKey, shards: &[ShardId]) -> Vec<ShardId> {
        let Some(audit) = self.0.get(&client) else { return Vec::new() };
        shards.iter().copied().filter(|shard| !audit.answers.contains_key(shard)).collect()
    }

    /// Records a shard's answer. `ended` says whether the shard had fenced the client before.
    pub(crate) fn answered(
        &mut self,
        client: ClientKey,
        shard: ShardId,
        ended: bool,
        pushes: AppliedPushes,
    ) {
        if let Some(audit) = self.0.get_mut(&client).filter(|audit| ended || !audit.ends) {
            audit.answers.insert(shard, pushes);
        }
    }

    /// Returns the gradients of a client that are applied on some shards only; `None` while one of
    /// the other shards has not answered. `own` are those of the step owner.
    pub(crate) fn partly_applied(
        &self,
        client: ClientKey,
        own: (ShardId, &AppliedPushes),
        others: &[ShardId],
    ) -> Option<Vec<PartlyAppliedPush>> {
        let answers = &self.0.get(&client)?.answers;
        let answers = others.iter().map(|shard| Some((*shard, answers.get(shard)?)));
        let shards: Vec<(ShardId, &AppliedPushes)> =
            [Some(own)].into_iter().chain(answers).collect::<Option<_>>()?;
        let all: BTreeMap<Sequence, TokenId> =
            shards.iter().flat_map(|(_, pushes)| &pushes.applied).map(|(&s, &t)| (s, t)).collect();
        let partly = all.into_iter().filter_map(|(sequence, token)| {
            let names = |has: bool| {
                let with = shards.iter().filter(move |(_, pushes)| pushes.has(sequence) == has);
                with.map(|(shard, _)| *shard).collect::<Vec<ShardId>>()
            };
            let applied = names(true);
            let missing = names(false);
            let unknown = Vec::new();
            (!missing.is_empty()).then_some(PartlyAppliedPush { token, applied, missing, unknown })
        });
        Some(partly.collect())
    }

    /// Extends the time limits by a pause of this server, during which no shard could answer.
    pub(crate) fn extend_deadlines(&mut self, pause: Duration, now: Instant) {
        for audit in self.0.values_mut() {
            audit.since = (audit.since + pause).min(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: ClientKey = ClientKey(3);
    const OWNER: ShardId = ShardId { task: 0, shard: 0 };
    const OTHERS: [ShardId; 2] = [ShardId { task: 0, shard: 1 }, ShardId { task: 1, shard: 0 }];

    fn pushes(oldest: u64, applied: &[u64]) -> AppliedPushes {
        let applied = applied.iter().map(|&at| (Sequence(at), TokenId(100 + at))).collect();
        AppliedPushes { oldest: Sequence(oldest), applied }
    }

    /// Audits a client whose gradients with these sequences are applied on the three shards.
    fn audit(own: &[u64], others: [&[u64]; 2]) -> Vec<PartlyAppliedPush> {
        let mut audits = PushAudits::default();
        audits.watch(CLIENT, Instant::now());
        for (shard, applied) in OTHERS.into_iter().zip(others) {
            let own = (OWNER, &pushes(1, own));
            assert_eq!(audits.partly_applied(CLIENT, own, &OTHERS), None, "{shard} is asked");
            audits.answered(CLIENT, shard, false, pushes(1, applied));
        }
        audits.partly_applied(CLIENT, (OWNER, &pushes(1, own)), &OTHERS).unwrap()
    }

    #[test]
    fn a_gradient_is_on_all_shards_or_on_none_or_it_is_named() {
        assert_eq!(audit(&[1, 2], [&[1, 2], &[2, 1]]), []);
        assert_eq!(audit(&[], [&[], &[]]), []);
        let [first, second] = OTHERS;
        let found = |token, applied: &[ShardId], missing: &[ShardId]| PartlyAppliedPush {
            token: TokenId(token),
            applied: applied.to_vec(),
            missing: missing.to_vec(),
            unknown: vec![],
        };
        assert_eq!(audit(&[1, 2], [&[1], &[1, 2]]), [found(102, &[OWNER, second], &[first])]);
        assert_eq!(
            audit(&[1], [&[1, 2], &[]]),
            [found(101, &[OWNER, first], &[second]), found(102, &[first], &[OWNER, second])]
        );
    }

    #[test]
    fn a_gradient_behind_a_window_is_settled_there() {
        let mut audits = PushAudits::default();
        audits.watch(CLIENT, Instant::now());
        audits.answered(CLIENT, OTHERS[0], false, pushes(9, &[9, 10]));
        let partly =
            |own| audits.partly_applied(CLIENT, (OWNER, &pushes(1, own)), &OTHERS[..1]).unwrap();
        assert_eq!(partly(&[7, 8, 9, 10]), []);
        assert_eq!(partly(&[7, 8, 9])[0].missing, [OWNER]);
    }

    #[test]
    fn an_audit_that_ends_a_client_uses_no_answer_from_before() {
        let now = Instant::now();
        let mut audits = PushAudits::default();
        audits.watch(CLIENT, now);
        audits.answered(CLIENT, OTHERS[0], false, pushes(1, &[]));
        assert!(audits.end(CLIENT, now) && !audits.end(CLIENT, now));
        let own = pushes(1, &[]);
        let partly = |audits: &PushAudits| {
            audits.partly_applied(CLIENT, (OWNER, &own), &OTHERS[..1]).map(|partly| partly.len())
        };
        assert!(audits.awaits(CLIENT, OTHERS[0]) && partly(&audits).is_none());
        assert_eq!(audits.take_due(false), [(CLIENT, true)]);
        assert!(audits.take_due(false).is_empty() && audits.take_due(true).len() == 1);
        audits.answered(CLIENT, OTHERS[0], false, pushes(1, &[]));
        assert!(partly(&audits).is_none(), "this answer was under way");
        audits.answered(CLIENT, OTHERS[0], true, pushes(1, &[1]));
        assert!(!audits.awaits(CLIENT, OTHERS[0]) && partly(&audits) == Some(1));
        audits.came_back(CLIENT);
        assert!(audits.has(CLIENT) && !audits.is_replaced(CLIENT), "it has ended");
        audits.replace(CLIENT, now);
        assert!(audits.is_replaced(CLIENT) && partly(&audits) == Some(1));
    }

    #[test]
    fn a_client_is_overdue_after_the_limit_without_the_pauses_of_the_server() {
        let now = Instant::now();
        let limit = Duration::from_secs(10);
        let mut audits = PushAudits::default();
        audits.watch(CLIENT, now);
        assert!(!audits.is_overdue(CLIENT, now + limit / 2, limit));
        audits.extend_deadlines(limit / 2, now + limit / 2);
        assert!(!audits.is_overdue(CLIENT, now + limit, limit));
        assert!(audits.is_overdue(CLIENT, now + limit * 2, limit));
        audits.came_back(CLIENT);
        assert!(audits.is_empty());
    }
}
