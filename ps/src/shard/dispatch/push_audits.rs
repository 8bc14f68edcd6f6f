//! Push audits in asynchronous mode: the step owner asks the other shards which gradients of an
//! absent client they have applied, and they answer. The reasons are in `aggregate::push_audit`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use pushpull_common::ids::{ClientEpoch, Sequence, ShardId, TaskId, TokenId};
use pushpull_common::protocol::message::{self, Hello, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Refusal, limits};
use smallvec::SmallVec;

use crate::aggregate::push_audit::{AppliedPushes, PartlyAppliedPush};
use crate::client_key::ClientKey;
use crate::event::Event;
use crate::shard::Shard;

impl Shard {
    /// On the step owner: concludes the audits that can be, and asks the other shards: about every
    /// audited client `again`, otherwise about those that they have not been asked about.
    pub(in crate::shard) fn audit_pushes(&mut self, now: Instant, again: bool) {
        self.conclude_audits(now);
        let Shard { steps, peers, out, .. } = self;
        let shards = steps.shards_to_ask();
        let Some(tokens) = steps.asynchronous_tokens_mut() else { return };
        let due = tokens.audits.take_due(again);
        for (client, ends) in due {
            let epoch = peers.registry.client(client).epoch;
            let awaited = shards.iter().filter(|&&shard| {
                let tokens = steps.asynchronous_tokens();
                tokens.is_some_and(|tokens| tokens.audits.awaits(client, shard))
            });
            for connection in awaited.filter_map(|&shard| steps.shards.connection_of(shard)) {
                let envelope = out.epoch_only();
                let question = message::AuditPushes { client: epoch, ends };
                out.send(connection, envelope, question.into());
            }
        }
    }

    /// On another shard: answers an audit. A client that has ended is fenced first, so that nothing
    /// in transit arrives.
    pub(in crate::shard) fn answer_audit(&mut self, client: ClientEpoch, ends: bool) {
        // On a shard that assigns no epochs, several clients may claim an epoch.
        let holders: SmallVec<[ClientKey; 2]> = self.peers.registry.of_epoch(client).collect();
        for &holder in holders.iter().filter(|_| ends) {
            if let Some(connection) = self.peers.registry.end(holder) {
                self.out.close(connection);
                self.drop_client_connection(connection, holder);
            }
        }
        let pushes = self.applied_pushes(&holders);
        let newest = pushes.applied.into_iter().rev().take(limits::AUDITED_PUSHES_MAX);
        let Some(applied) = List::of(newest) else { return };
        let shard = self.id;
        let ended = ends;
        let oldest = pushes.oldest;
        let answer = message::PushesAudited { client, shard, ended, oldest, applied };
        self.steps.report_to_owner(&mut self.out, answer.into());
    }

    /// On the step owner: handles a shard's answer.
    pub(in crate::shard) fn push_audit_answered(
        &mut self,
        now: Instant,
        connection: u64,
        answer: &message::PushesAudited,
    ) {
        let message::PushesAudited { client, shard, ended, oldest, ref applied } = *answer;
        if self.register_shard(now, connection, shard).is_none() {
            return;
        }
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return };
        let applied: BTreeMap<Sequence, TokenId> = applied.items().iter().copied().collect();
        for key in self.peers.registry.of_epoch(client) {
            let pushes = AppliedPushes { oldest, applied: applied.clone() };
            tokens.audits.answered(key, shard, ended, pushes);
        }
        // A client that has just ended is asked about at once.
        self.audit_pushes(now, false);
    }

    /// On the step owner: removes the audits that have found each gradient on all shards or on none,
    /// and ends the clients that stay away for two more leases, or that have ended.
    fn conclude_audits(&mut self, now: Instant) {
        let shards = self.steps.shards_to_ask();
        let Some(tokens) = self.steps.asynchronous_tokens() else { return };
        let clients: Vec<(ClientKey, bool)> = tokens.audits.clients().collect();
        for (client, has_ended) in clients {
            let own = self.applied_pushes(&[client]);
            let id = self.id;
            let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return };
            match tokens.audits.partly_applied(client, (id, &own), &shards) {
                None => {}
                Some(partly) if has_ended => self.end_client(now, client, partly),
                Some(partly) if partly.is_empty() => tokens.audits.remove(client),
                Some(_) if tokens.audits.is_overdue(client, now, self.config.lease * 2) => {
                    self.counters.clients_retired.add(1);
                    tokens.audits.end(client, now);
                }
                Some(_) => {}
            }
        }
    }

    /// On the step owner: retires a client that has ended on every shard, and reports its gradients
    /// that are applied on some shards only. A batch of such a gradient is not granted again: it
    /// counts at most once on each shard.
    fn end_client(&mut self, now: Instant, client: ClientKey, partly: Vec<PartlyAppliedPush>) {
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return };
        let is_replaced = tokens.audits.is_replaced(client);
        tokens.audits.remove(client);
        for push in partly {
            self.report_partly_applied(client, push);
        }
        if let Some(connection) = self.peers.registry.retire(client, is_replaced, now) {
            self.out.close(connection);
            self.drop_client_connection(connection, client);
        }
        if let Some(inbox) = &mut self.intake.inbox {
            inbox.orphan_whole(client);
        }
        self.drop_client(now, client, true);
    }

    fn report_partly_applied(&mut self, client: ClientKey, push: PartlyAppliedPush) {
        let PartlyAppliedPush { token, applied, missing, unknown } = push;
        // A push that is complete here spends its token when it is applied.
        let is_whole = self.intake.is_whole(token);
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return };
        tokens.ledger.steps.partly_applied += 1;
        if !is_whole && !applied.is_empty() && tokens.ledger.holder_of(token) == Some(client) {
            tokens.skip(token);
        }
        self.counters.gradients_partly_applied.add(1);
        let task = self.peers.registry.client(client).task.clone();
        let token = token.0;
        let step = self.steps.step().0;
        self.report(Event::PartlyApplied { task, token, step, applied, missing, unknown });
    }

    /// On the step owner: ends the incarnation that the client of this hello replaces. Refuses the
    /// hello while the other shards have not answered, so that none forgets what it has applied.
    ///
    /// The chief may have to restore a shard that cannot answer. It is not kept waiting for that:
    /// what the shard has applied stays unknown.
    pub(in crate::shard) fn end_replaced(
        &mut self,
        now: Instant,
        hello: &Hello,
    ) -> Result<(), Refusal> {
        let shards = self.steps.shards_to_ask();
        let replaced = self.replaced_by(hello).filter(|_| !shards.is_empty());
        let Some(client) = replaced else { return Ok(()) };
        let Some(tokens) = self.steps.asynchronous_tokens_mut() else { return Ok(()) };
        tokens.audits.replace(client, now);
        let mut unasked = shards.clone();
        unasked.retain(|shard| self.steps.shards.connection_of(*shard).is_none());
        if hello.role == (Role::Chief {}) && !unasked.is_empty() {
            let unknown = self.unknown_pushes(client, &unasked);
            self.end_client(now, client, unknown);
            return Ok(());
        }
        self.audit_pushes(now, false);
        let tokens = self.steps.asynchronous_tokens();
        let Some(tokens) = tokens.filter(|tokens| tokens.audits.has(client)) else { return Ok(()) };
        let awaited = tokens.audits.unanswered(client, &shards);
        let awaited: Vec<String> = awaited.iter().map(ShardId::to_string).collect();
        let what = format!(
            "runs of this worker (the earlier one ends as soon as {} say what they have applied of it)",
            awaited.join(", ")
        );
        Err(Refusal::Busy { what: Detail::clipped(&what), limit: 1 })
    }

    /// Returns the client whose task says hello as a newer incarnation, if gradients of the older
    /// one may be on some shards only.
    fn replaced_by(&self, hello: &Hello) -> Option<ClientKey> {
        let client = self.peers.registry.find(&TaskId::new(hello.job.as_str(), hello.task))?;
        let entry = self.peers.registry.client(client);
        if hello.client_epoch.0 != 0 || entry.incarnation == hello.incarnation {
            return None;
        }
        let tokens = self.steps.asynchronous_tokens()?;
        // A push of this run that is complete here may be missing on another shard. One of a run
        // before belongs to the server, and has been reported.
        let is_incomplete = |token| !self.intake.is_whole(token);
        let holds = tokens.ledger.of(client).any(|held| is_incomplete(held.token))
            || self.intake.whole_gradients(&[client]).next().is_some();
        let has_pushed = entry.window.applied().next().is_some();
        (holds || has_pushed || tokens.audits.has(client)).then_some(client)
    }

    /// Returns the gradients of a client that may be on some shards only: the last one that this
    /// shard has applied, those that are complete here, and those whose tokens the client holds.
    fn unknown_pushes(&self, client: ClientKey, unasked: &[ShardId]) -> Vec<PartlyAppliedPush> {
        let clients = [client];
        let own = self.applied_pushes(&clients);
        let last = own.applied.into_values().next_back();
        let whole = self.intake.whole_gradients(&clients).map(|push| push.token);
        let here: BTreeSet<TokenId> = whole.chain(last).collect();
        let held = self.steps.tokens_of(client).map(|held| held.token);
        let held = held.filter(|&token| !self.intake.is_whole(token));
        let here = here.into_iter().map(|token| (token, true));
        let all = here.chain(held.map(|token| (token, false)));
        all.map(|(token, is_here)| PartlyAppliedPush {
            token,
            applied: if is_here { vec![self.id] } else { vec![] },
            missing: if is_here { vec![] } else { vec![self.id] },
            unknown: unasked.to_vec(),
        })
        .collect()
    }

    /// Begins to watch a client that has become absent, if another shard may have applied a gradient
    /// of it that the step owner has not, or the reverse.
    pub(in crate::shard) fn watch_absent(&mut self, now: Instant, client: ClientKey) {
        let asks = !self.steps.shards_to_ask().is_empty();
        let has_pushed = self.peers.registry.client(client).window.applied().next().is_some();
        if let Some(tokens) = self.steps.asynchronous_tokens_mut()
            && asks
            && (has_pushed || tokens.ledger.count_of(client) > 0)
        {
            tokens.audits.watch(client, now);
        }
    }

    /// Returns the gradients of clients that this shard has applied, or holds whole and will,
    /// without those of effects.
    fn applied_pushes(&self, clients: &[ClientKey]) -> AppliedPushes {
        let windows = || clients.iter().map(|&client| &self.peers.registry.client(client).window);
        let oldest = windows().map(|window| window.oldest()).min().unwrap_or(1);
        let mut applied: BTreeMap<Sequence, TokenId> =
            windows().flat_map(|window| window.applied()).collect();
        let whole = self.intake.whole_gradients(clients);
        applied.extend(whole.map(|push| (push.sequence, push.token)));
        AppliedPushes { oldest: Sequence(oldest), applied }
    }
}
