//! The operations, and what is under way for them: requests, pushes, pulls, tokens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::{Envelope, Grant, Message, Refusal};

use super::links::{BodyTarget, LostRequests, PendingRequest, SessionLinks};
use super::membership::{Membership, refused};
use super::operations::{OperationKind, PendingOperation, PendingOperations};
use super::progress::AwaitedShard;
use super::pulls::{PendingPull, PendingPulls};
use super::pushes::PendingPushes;
use super::requests::{FollowedPushes, ShardRequest, ShardRequests};
use super::tokens::Tokens;
use super::{OpId, PushOrder, Reply, SessionCommand, SessionOutput};
use crate::error::{Error, UnresponsiveShards};
use crate::gradients::sharding_plan::ShardingPlan;

/// What a session has to do for its callers.
///
/// Invariants:
///
/// - A command is answered exactly once, at its deadline at the latest, unless it is cancelled.
/// - A request or a pull is under way exactly while its operation is unanswered. A push and a token
///   request may outlive their operations.
/// - A granted token is with a caller, in a pending push, unclaimed, or on its way back.
#[derive(Debug)]
pub(super) struct SessionWork {
    pub(super) operations: PendingOperations,
    pub(super) requests: ShardRequests,
    pub(super) pushes: PendingPushes,
    pub(super) pulls: PendingPulls,
    pub(super) tokens: Tokens,
}

impl SessionWork {
    pub(super) fn new() -> SessionWork {
        SessionWork {
            operations: PendingOperations::default(),
            requests: ShardRequests::default(),
            pushes: PendingPushes::new(),
            pulls: PendingPulls::default(),
            tokens: Tokens::default(),
        }
    }

    /// Begins what a command asks for. Returns the reply if that is known at once.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        id: OpId,
        (command, deadline): (SessionCommand, Instant),
        membership: &Membership,
        links: &mut SessionLinks,
    ) -> Option<Result<Reply, Error>> {
        self.pushes.query_undecided();
        let step = membership.step;
        let (doing, kind) = match command {
            SessionCommand::Begin { order } => {
                let begun = self.begin_push(now, (order, false), membership, links);
                return Some(begun.map(|sequence| Reply::Begun { sequence }));
            }
            SessionCommand::AddParts { sequence, staged, parts } => {
                self.pushes.add_parts(now, sequence, staged.as_ref(), parts, links);
                self.drive_push(now, sequence, links);
                return Some(Ok(Reply::Done));
            }
            SessionCommand::Outcome { sequence } => {
                return Some(self.pushes.result(sequence).transpose().map(Reply::Outcome));
            }
            SessionCommand::Open { shards } => {
                let links = shards.into_iter().map(|shard| links.to(now, shard)).collect();
                ("connect", OperationKind::Open { links })
            }
            SessionCommand::Join { plan } => {
                // The owner counts the steps, even if it holds no variables.
                let owner = [membership.owner()];
                let shards = plan.shards().iter().chain(owner.iter()).copied();
                let links = shards.map(|shard| links.to(now, shard)).collect();
                ("join", OperationKind::Join { plan, links })
            }
            SessionCommand::Request { shard, message, body, wait_ms } => {
                let request = ShardRequest::new(links.to(now, shard), message, body, wait_ms);
                let doing = request.doing();
                self.requests.add(id, request);
                (doing, OperationKind::Request)
            }
            SessionCommand::Token => ("take a token", OperationKind::Token),
            SessionCommand::Pull { plan, buffer, token } => {
                let pull = PendingPull::of_values(plan, buffer, |shard| links.to(now, shard));
                self.pulls.add(id, pull.for_step(token, step));
                ("pull", OperationKind::Pull)
            }
            SessionCommand::PullVariable { plan, variable, buffer, token } => {
                let link_to = |shard| links.to(now, shard);
                let pull = PendingPull::of_variable(plan, buffer, variable, link_to);
                self.pulls.add(id, pull.for_step(token, step));
                ("pull", OperationKind::Pull)
            }
            SessionCommand::PullRows { plan, buffer, rows, token } => {
                let pull = PendingPull::of_rows(plan, buffer, &rows, |shard| links.to(now, shard));
                self.pulls.add(id, pull.for_step(token, step));
                ("pull rows", OperationKind::Pull)
            }
            SessionCommand::Push { order } => {
                match self.begin_push(now, (order, true), membership, links) {
                    Ok(sequence) => ("push", OperationKind::Push { sequence, owns: true }),
                    Err(error) => return Some(Err(error)),
                }
            }
            SessionCommand::End { sequence } => {
                self.pushes.complete(sequence);
                ("push", OperationKind::Push { sequence, owns: true })
            }
            SessionCommand::Await { sequence } => {
                ("push", OperationKind::Push { sequence, owns: false })
            }
        };
        self.operations.add(id, PendingOperation { kind, doing, since: now, deadline });
        None
    }

    fn begin_push(
        &mut self,
        now: Instant,
        (order, complete): (PushOrder, bool),
        membership: &Membership,
        links: &mut SessionLinks,
    ) -> Result<Sequence, Error> {
        if self.pushes.window_is_full() {
            if let Some(grant) = order.grant {
                self.return_token(now, grant, links);
            }
            return Err(Error::Window { limit: WINDOW });
        }
        Ok(self.pushes.begin(now, order, complete, membership, links))
    }

    /// Makes all progress that is possible now, on every push and operation. A request for a token
    /// waits for at most `token_wait_ms`. Returns the plan with which an operation has joined.
    pub(super) fn drive(
        &mut self,
        now: Instant,
        membership: &Membership,
        links: &mut SessionLinks,
        token_wait_ms: u32,
    ) -> Option<Arc<ShardingPlan>> {
        let mut next = self.pushes.first();
        while let Some(sequence) = next {
            self.drive_push(now, sequence, links);
            next = self.pushes.after(sequence);
        }
        // After the pushes: some requests wait for them.
        let mut joined = None;
        let mut next = self.operations.first();
        while let Some(id) = next {
            let reply = self.drive_operation(now, id, membership, links, token_wait_ms);
            if let Some(reply) = reply {
                let has_joined = matches!(reply, Ok(Reply::Joined(_)));
                let ended = self.finish(id, reply, links);
                if has_joined && let Some(OperationKind::Join { plan, .. }) = ended {
                    joined = Some(plan);
                }
            }
            next = self.operations.after(id);
        }
        self.tokens.send_returns(now, links);
        joined
    }

    /// Sends what can be sent of a push. If that settles it, answers the operations that wait.
    fn drive_push(&mut self, now: Instant, sequence: Sequence, links: &mut SessionLinks) {
        let may_prefetch = self.tokens.may_prefetch();
        let remaining_ms = |push| self.operations.remaining_ms(now, push);
        if self.pushes.send(now, sequence, links, may_prefetch, remaining_ms) {
            self.tokens.record_request();
        }
        let Some(settled) = self.pushes.settle(now, sequence, links) else { return };
        if let Some(grant) = settled.unspent {
            self.return_token(now, grant, links);
        }
        while let Some(id) = self.first_waiting_for(sequence) {
            let reply = settled.result.clone().map(|outcome| Reply::Pushed { outcome });
            self.finish(id, reply, links);
        }
    }

    fn first_waiting_for(&self, sequence: Sequence) -> Option<OpId> {
        self.operations.waiting_for(sequence).next()
    }

    /// Sends what can be sent for an operation. Returns the reply if there is one.
    fn drive_operation(
        &mut self,
        now: Instant,
        id: OpId,
        membership: &Membership,
        links: &mut SessionLinks,
        token_wait_ms: u32,
    ) -> Option<Result<Reply, Error>> {
        let operation = self.operations.get(id)?;
        let deadline_ms = operation.deadline_ms(now);
        match &operation.kind {
            OperationKind::Open { links: of } => {
                let open = of.iter().all(|&link| links[link].is_up());
                let settings = membership.settings().filter(|_| open)?;
                Some(Ok(Reply::Opened(settings.clone())))
            }
            OperationKind::Join { links: of, .. } => {
                let epoch = membership.epoch_to_join(of, links)?;
                Some(epoch.map(Reply::Joined))
            }
            OperationKind::Request => {
                let must_wait = match self.requests.followed_pushes(id) {
                    FollowedPushes::Nothing => false,
                    FollowedPushes::OfLink(link) => self.pushes.must_complete_on(link),
                    FollowedPushes::All => self.pushes.first().is_some(),
                };
                if !must_wait {
                    self.requests.send(now, id, deadline_ms, links);
                }
                None
            }
            OperationKind::Token => {
                let token = self.tokens.take();
                if token.is_none() {
                    let wait_ms = deadline_ms.min(token_wait_ms);
                    self.tokens.request(now, id, (wait_ms, deadline_ms), links);
                }
                token.map(|token| Ok(Reply::Token(token)))
            }
            OperationKind::Pull => {
                let envelope = Envelope { deadline_ms, ..Envelope::default() };
                let complete = self.pulls.send(now, id, envelope, membership, links);
                let finish = || self.pulls.finish(id, membership.synchronous, links);
                complete.then(finish)?.map(Ok)
            }
            OperationKind::Push { sequence, .. } => {
                let result = self.pushes.result(*sequence)?;
                Some(result.map(|outcome| Reply::Pushed { outcome }))
            }
        }
    }

    /// Answers an operation and removes it. Returns what it waited for.
    pub(super) fn finish(
        &mut self,
        id: OpId,
        reply: Result<Reply, Error>,
        links: &mut SessionLinks,
    ) -> Option<OperationKind> {
        let operation = self.remove(id)?;
        links.outputs.push_back(SessionOutput::Reply { op: id, reply });
        Some(operation.kind)
    }

    fn remove(&mut self, id: OpId) -> Option<PendingOperation> {
        let operation = self.operations.remove(id)?;
        match operation.kind {
            OperationKind::Request => self.requests.remove(id),
            OperationKind::Pull => _ = self.pulls.remove(id),
            _ => {}
        }
        Some(operation)
    }

    /// Ends an operation whose caller has stopped waiting.
    pub(super) fn cancel(&mut self, now: Instant, id: OpId, links: &mut SessionLinks) {
        let kind = self.remove(id).map(|operation| operation.kind);
        if let Some(OperationKind::Push { sequence, owns: true }) = kind {
            self.withdraw(now, sequence, links);
        }
    }

    /// Withdraws a push whose caller has given up, unless a shard may hold it whole.
    pub(super) fn withdraw(&mut self, now: Instant, sequence: Sequence, links: &mut SessionLinks) {
        if let Some(grant) = self.pushes.withdraw(now, sequence, links) {
            self.return_token(now, grant, links);
        }
    }

    /// Returns a token, now or as soon as the owner is connected.
    pub(super) fn return_token(&mut self, now: Instant, grant: Grant, links: &mut SessionLinks) {
        self.tokens.give_back(grant, false);
        self.tokens.send_returns(now, links);
    }

    /// Ends a token whose batch is to be spent without a gradient, now or as soon as the owner is
    /// connected.
    pub(super) fn skip_batch(&mut self, now: Instant, grant: Grant, links: &mut SessionLinks) {
        self.tokens.give_back(grant, true);
        self.tokens.send_returns(now, links);
    }

    /// Returns the tokens that no caller takes. While the owner is disconnected, callers may still
    /// claim them.
    pub(super) fn return_due_tokens(&mut self, now: Instant, links: &mut SessionLinks) {
        while links.connected_owner().is_some()
            && let Some(grant) = self.tokens.take_due(now)
        {
            self.return_token(now, grant, links);
        }
    }

    /// Handles the answer to a request.
    pub(super) fn request_answered(
        &mut self,
        id: OpId,
        link: usize,
        (message, body): (Message, Vec<u8>),
        links: &mut SessionLinks,
    ) {
        let Some(operation) = self.operations.get(id) else { return };
        let reply = match message {
            Message::Refused(refusal) => {
                Err(refused(operation.doing, links[link].shard, refusal.refusal))
            }
            message => Ok(Reply::Answer { message, body }),
        };
        self.finish(id, reply, links);
    }

    /// Fails the operation whose token request was refused. The request carried the deadline of
    /// this operation; other operations send their own. The last of several refusals names the wait
    /// of the whole operation.
    pub(super) fn token_refused(
        &mut self,
        now: Instant,
        id: OpId,
        link: usize,
        refusal: Refusal,
        links: &mut SessionLinks,
    ) {
        let refusal = match (refusal, self.tokens.awaited(), self.operations.get(id)) {
            (Refusal::Deadline { awaited, .. }, Some(_), Some(operation)) => {
                let waited = now.saturating_duration_since(operation.since).as_millis();
                let waited_ms = u64::try_from(waited).unwrap_or(u64::MAX);
                Refusal::Deadline { waited_ms, awaited }
            }
            (refusal, ..) => refusal,
        };
        let error = match (refusal, self.operations.get(id)) {
            (Refusal::ReplicasAbsent { waited_ms, awaited }, Some(operation)) => {
                let waited = Duration::from_millis(waited_ms);
                operation.without_replicas(waited, awaited.to_string())
            }
            (refusal, _) => refused("take a token", links[link].shard, refusal),
        };
        self.finish(id, Err(error), links);
    }

    /// Fails a pull of which the shard of a link has refused a request. The operation waits for
    /// `awaited`.
    pub(super) fn pull_refused(
        &mut self,
        now: Instant,
        id: OpId,
        link: usize,
        refusal: Refusal,
        awaited: UnresponsiveShards,
        links: &mut SessionLinks,
    ) {
        let Some(operation) = self.operations.get(id) else { return };
        let disagrees = self.pulls.disagreement(id, link).is_some();
        let error = match refusal {
            Refusal::Deadline { .. } if disagrees => operation.timeout(now, awaited),
            refusal => refused(operation.doing, links[link].shard, refusal),
        };
        self.finish(id, Err(error), links);
    }

    /// Handles a step owner that did not decide about a push in time. Operations that began before
    /// `completed_at` fail with what it waits for. The push stays pending, and the owner is
    /// asked again for the later ones.
    pub(super) fn push_undecided(
        &mut self,
        sequence: Sequence,
        completed_at: Option<Instant>,
        error: impl Fn(&PendingOperation) -> Error,
        links: &mut SessionLinks,
    ) {
        let waiting: Vec<OpId> = self.operations.waiting_for(sequence).collect();
        for id in waiting {
            let Some(operation) = self.operations.get(id) else { continue };
            if completed_at.is_some_and(|at| at < operation.since) {
                self.pushes.query_undecided();
                continue;
            }
            let error = error(operation);
            self.finish(id, Err(error), links);
        }
    }

    /// Fails an operation whose deadline has passed. It has waited for `awaited`.
    pub(super) fn time_out(
        &mut self,
        now: Instant,
        id: OpId,
        awaited: UnresponsiveShards,
        links: &mut SessionLinks,
    ) {
        let Some(operation) = self.operations.get(id) else { return };
        let error = operation.timeout(now, awaited);
        self.finish(id, Err(error), links);
    }

    /// Returns the shards that an operation waits for.
    pub(super) fn awaited(
        &self,
        now: Instant,
        id: OpId,
        links: &SessionLinks,
    ) -> Vec<AwaitedShard> {
        let Some(PendingOperation { kind, .. }) = self.operations.get(id) else {
            return Vec::new();
        };
        let is_down = |&link: &usize| !links[link].is_up();
        let awaited: Vec<usize> = match kind {
            OperationKind::Open { links } => links.iter().copied().filter(is_down).collect(),
            OperationKind::Join { links: of, .. } => {
                let down: Vec<usize> = of.iter().copied().filter(is_down).collect();
                match down.is_empty() {
                    true => links.outdated(of.iter().copied()).collect(),
                    false => down,
                }
            }
            OperationKind::Request => self.requests.link_of(id).into_iter().collect(),
            OperationKind::Token => links.owner().into_iter().collect(),
            OperationKind::Pull => self.pulls.awaited(id).into_iter().collect(),
            OperationKind::Push { sequence, .. } => {
                let awaited = self.pushes.awaited(now, *sequence, links);
                awaited.unwrap_or_else(|| (0..links.len()).collect())
            }
        };
        let detail = |link| match kind {
            OperationKind::Token => self.tokens.awaited().map(str::to_owned),
            OperationKind::Pull => self.pulls.disagreement(id, link).map(|(older, newest)| {
                format!("has the values of step {older}, others have step {newest}")
            }),
            _ => None,
        };
        awaited.into_iter().map(|link| AwaitedShard { link, detail: detail(link) }).collect()
    }

    /// Marks as unsent what a lost connection left unanswered.
    pub(super) fn lost(&mut self, index: usize, lost: LostRequests, grants_with_pushes: bool) {
        // An answer without its whole body does not count.
        match lost.receiving {
            Some(BodyTarget::Values { op, .. } | BodyTarget::EncodedValues { op, .. }) => {
                self.pulls.lost(op, index);
            }
            Some(BodyTarget::Answer { op, .. }) => self.requests.lost(op),
            None => {}
        }
        for pending in lost.pending.into_values() {
            match pending {
                PendingRequest::Request(op) => self.requests.lost(op),
                PendingRequest::Token => self.tokens.request_lost(),
                PendingRequest::Pull(op, _) => self.pulls.lost(op, index),
                PendingRequest::Push(_) if grants_with_pushes => self.tokens.prefetch_lost(),
                PendingRequest::Return(token) => self.tokens.return_lost(token),
                // Every push has a share that is lost, below. A withdrawal ends with its
                // connection, which drops the parts.
                PendingRequest::Reserve(_)
                | PendingRequest::Push(_)
                | PendingRequest::PushState(_)
                | PendingRequest::Withdraw(_)
                | PendingRequest::Hello
                | PendingRequest::Heartbeat
                | PendingRequest::ShareValues
                | PendingRequest::SharePushBuffer => {}
            }
        }
        self.pushes.lost(index);
    }

    /// Fails all operations and ends all pushes: the session has failed.
    pub(super) fn give_up(&mut self, error: &Error, links: &mut SessionLinks) {
        while let Some(id) = self.operations.first() {
            self.finish(id, Err(error.clone()), links);
        }
        self.pushes.give_up();
        self.tokens.forget();
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self, links: &SessionLinks) {
        let mut requests = 0;
        let mut pulls = 0;
        let mut next = self.operations.first();
        while let Some(id) = next {
            match self.operations.get(id).map(|operation| &operation.kind) {
                Some(OperationKind::Request) => {
                    requests += 1;
                    assert!(self.requests.link_of(id).is_some(), "{id:?} has no request");
                }
                Some(OperationKind::Pull) => pulls += 1,
                _ => {}
            }
            next = self.operations.after(id);
        }
        assert_eq!((requests, pulls), (self.requests.len(), self.pulls.len()));
        self.pulls.check_invariants(links);
        self.pushes.check_invariants();
        let pending = links.iter().flat_map(|link| link.pending.values());
        let token_requests = pending.filter(|pending| **pending == PendingRequest::Token).count();
        assert!(token_requests <= 1, "{token_requests} token requests are under way");
    }
}
