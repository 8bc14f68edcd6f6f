//! The worker's side of the protocol with all shards, as a pure state machine.
//!
//! Inputs are events, outputs are actions. The session has no socket, thread or clock.
//!
//! A session turns operations (a pull, a push, a token) into requests to shards. It keeps each
//! unanswered request and sends it again after a reconnect. A push keeps its sequence number, and a
//! shard gets again only what it has not acknowledged, so every push counts once.

mod encoded_values;
mod epochs;
mod handshake;
mod io;
mod link;
mod progress;
mod pulls;
mod push_answers;
mod push_parts;
mod pushes;
mod receiving;
mod requests;
mod settled;
mod shared_values;
mod synchronous;
mod tokens;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{ClientEpoch, GlobalStep, Sequence};
use pushpull_common::protocol::{Outcome, Refusal};

use crate::error::Error;
use crate::gradients::gradient_buffer::GradientBuffer;
use crate::gradients::selection::PartitionSelection;
use crate::gradients::sharding_plan::ShardingPlan;
pub(crate) use io::{
    GradientCounts, OpId, PushOrder, ReadPoint, Reply, ServerSettings, SessionCommand,
    SessionConfig, SessionInput, SessionOutput,
};
use link::{LinkStatus, ShardLink};
use pulls::{PullRequest, PullScope};
use pushes::PendingPush;
use tokens::Tokens;
pub(crate) use tokens::UnclaimedTokens;

/// An unanswered operation.
#[derive(Debug)]
struct Op {
    kind: OpKind,
    doing: &'static str,
    since: Instant,
    deadline: Instant,
}

#[derive(Debug)]
enum OpKind {
    Open {
        shards: Vec<usize>,
    },
    /// Waits until all shards of a plan are in one restore epoch.
    Join {
        plan: Arc<ShardingPlan>,
        links: Vec<usize>,
    },
    Request(requests::ShardRequest),
    Token,
    Pull(pulls::PendingPull),
    /// Waits for a push. If `owns`, cancelling the wait cancels the push.
    Push {
        sequence: Sequence,
        owns: bool,
    },
}

/// A worker's session with all shards of a cluster.
///
/// [`Session::handle`] takes an event. [`Session::poll_output`] returns the next action; call it
/// until it returns `None`, after every event and at [`Session::wake_at`] at the latest.
/// [`Session::with_targets`] gives out the memory to receive a body into.
///
/// Invariants:
///
/// - An operation is answered exactly once, by its deadline.
/// - A pending push keeps its number and its bytes until it is settled: by every shard it touches,
///   or in synchronous mode by the step owner.
/// - At most one token request is unanswered.
/// - A request is pending on at most one link.
/// - Once a member has joined, all shards it uses are in one restore epoch, or the session has
///   failed.
#[derive(Debug)]
pub(crate) struct Session {
    config: SessionConfig,
    epoch: ClientEpoch,
    links: Vec<ShardLink>,
    ops: BTreeMap<OpId, Op>,
    pushes: BTreeMap<Sequence, PendingPush>,
    /// The outcomes of the last pushes, oldest first.
    settled: VecDeque<(Sequence, Result<Outcome, Error>)>,
    next_sequence: u64,
    tokens: Tokens,
    plan: Option<Arc<ShardingPlan>>,
    server_settings: Option<ServerSettings>,
    step: GlobalStep,
    /// Whether the step owner's last welcome announced synchronous steps.
    synchronous: bool,
    /// Whether the step owner may reject gradients as stale, from the same welcome. Asynchronous
    /// mode only.
    owner_first: bool,
    /// How many push buffers shards have shared, over all connections.
    push_buffers: u64,
    /// Gradients in push slots that shards may still read: pushes accepted for these steps.
    applying: Vec<(GlobalStep, Arc<GradientBuffer>)>,
    failed: Option<Error>,
    last_report: Option<Instant>,
    /// State of the generator for reconnect jitter, seeded with the incarnation: workers differ,
    /// runs do not.
    random: u64,
    outputs: VecDeque<SessionOutput>,
}

impl Session {
    pub(crate) fn new(config: SessionConfig) -> Session {
        Session {
            epoch: ClientEpoch(0),
            links: Vec::new(),
            ops: BTreeMap::new(),
            pushes: BTreeMap::new(),
            settled: VecDeque::new(),
            next_sequence: 1,
            tokens: Tokens::default(),
            plan: None,
            server_settings: None,
            step: GlobalStep(0),
            synchronous: false,
            owner_first: false,
            push_buffers: 0,
            applying: Vec::new(),
            failed: None,
            last_report: None,
            random: config.incarnation.0 | 1,
            config,
            outputs: VecDeque::new(),
        }
    }

    /// The received tokens that no caller has taken. Callers take one without asking the session.
    pub(crate) fn unclaimed(&self) -> &Arc<UnclaimedTokens> {
        self.tokens.unclaimed()
    }

    /// Processes one event.
    pub(crate) fn handle(&mut self, now: Instant, input: SessionInput) {
        match input {
            SessionInput::Command { op, command, deadline } => {
                self.command(now, op, command, deadline)
            }
            SessionInput::Cancelled { op } => self.cancelled(now, op),
            SessionInput::Abandoned { sequence } => self.withdraw(now, sequence),
            SessionInput::TokenDropped { grant } => self.return_token(now, grant),
            SessionInput::Connected { link, same_host } => self.connected(now, link, same_host),
            SessionInput::Disconnected { link, error } => self.disconnected(now, link, error),
            // Either event proves that the peer is alive. During a large push the peer has nothing
            // to send, and a heartbeat queues behind the parts.
            SessionInput::BytesReceived { link } | SessionInput::BytesSent { link } => {
                self.links[link].last_received = now;
            }
            SessionInput::Message { link, header, message } => {
                self.message(now, link, header, message)
            }
            SessionInput::Body { link } => self.body(now, link),
            SessionInput::Tick => self.tick(now),
        }
    }

    /// Returns the next action, or `None` if there is nothing to do.
    pub(crate) fn poll_output(&mut self) -> Option<SessionOutput> {
        self.outputs.pop_front()
    }

    /// Returns when the next [`SessionInput::Tick`] is due at the latest.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let reports = self.config.progress_interval.filter(|_| !self.ops.is_empty());
        let report =
            reports.and_then(|interval| self.last_report.unwrap_or(now).checked_add(interval));
        let links = self.links.iter().filter_map(ShardLink::wake_at);
        let deadlines = self.ops.values().map(|op| op.deadline);
        let tokens = self.tokens.wake_at().filter(|_| self.owner_is_up());
        let wakes = links.chain(deadlines).chain(report).chain(tokens);
        wakes.min().unwrap_or(now + Duration::from_secs(3600))
    }

    fn command(&mut self, now: Instant, op: OpId, command: SessionCommand, deadline: Instant) {
        if let Some(error) = self.failed.clone() {
            return self.reply(op, Err(error));
        }
        self.query_undecided();
        let (doing, kind) = match command {
            SessionCommand::Begin { order } => {
                let begun = self.begin_push(now, order, false);
                return self.reply(op, begun.map(|sequence| Reply::Begun { sequence }));
            }
            SessionCommand::AddParts { sequence, staged, parts } => {
                self.more_parts(now, sequence, staged, parts);
                return self.reply(op, Ok(Reply::Done));
            }
            SessionCommand::Outcome { sequence } => {
                self.outcome(op, sequence);
                return self.drive(now);
            }
            SessionCommand::Open { shards } => {
                let shards = shards.into_iter().map(|shard| self.link_to(now, shard)).collect();
                ("connect", OpKind::Open { shards })
            }
            SessionCommand::Join { plan } => {
                // The owner counts the steps, even if it holds no variables.
                let owner = [self.config.owner];
                let shards = plan.shards().iter().chain(owner.iter()).copied();
                let links = shards.map(|shard| self.link_to(now, shard)).collect();
                ("join", OpKind::Join { plan, links })
            }
            SessionCommand::Request { shard, message, body } => {
                let link = self.link_to(now, shard);
                let request = requests::ShardRequest::new(link, message, body);
                (request.doing(), OpKind::Request(request))
            }
            SessionCommand::Token => ("take a token", OpKind::Token),
            SessionCommand::Pull { plan, buffer, token } => {
                let mut requests = Vec::new();
                let links = plan.shards().iter().map(|&shard| self.link_to(now, shard));
                requests.extend(links.map(PullRequest::values));
                (
                    "pull",
                    OpKind::Pull(pulls::PendingPull::new(plan, buffer, token, self.step, requests)),
                )
            }
            SessionCommand::PullVariable { plan, variable, buffer, token } => {
                let mut requests = Vec::new();
                let selected = PartitionSelection::of(&plan, variable).into_iter();
                let of = |one: PartitionSelection| {
                    PullRequest::new(self.link_to(now, one.shard), PullScope::Selected(one))
                };
                requests.extend(selected.map(of));
                let base = plan.range(variable).start;
                let pull = pulls::PendingPull::new(plan, buffer, token, self.step, requests);
                ("pull", OpKind::Pull(pulls::PendingPull { base, ..pull }))
            }
            SessionCommand::PullRows { plan, buffer, rows, token } => {
                let mut requests = Vec::new();
                for (index, request) in rows.requests().iter().enumerate() {
                    let link = self.link_to(now, request.shard);
                    requests.push(PullRequest::new(link, PullScope::Rows(rows.clone(), index)));
                }
                (
                    "pull rows",
                    OpKind::Pull(pulls::PendingPull::new(plan, buffer, token, self.step, requests)),
                )
            }
            SessionCommand::Push { order } => match self.begin_push(now, order, true) {
                Ok(sequence) => ("push", OpKind::Push { sequence, owns: true }),
                Err(error) => return self.reply(op, Err(error)),
            },
            SessionCommand::End { sequence } => {
                self.end_push(sequence);
                ("push", OpKind::Push { sequence, owns: true })
            }
            SessionCommand::Await { sequence } => ("push", OpKind::Push { sequence, owns: false }),
        };
        if self.ops.is_empty() {
            self.last_report = Some(now);
        }
        self.ops.insert(op, Op { kind, doing, since: now, deadline });
        self.drive(now);
    }

    /// Makes all progress that is possible now, on every link, push and operation.
    fn drive(&mut self, now: Instant) {
        for index in 0..self.links.len() {
            self.connect_if_due(now, index);
        }
        // Looked up by number each time: driving one push may end it and others.
        let mut next = self.pushes.first_key_value().map(|(&sequence, _)| sequence);
        while let Some(sequence) = next {
            self.drive_push(now, sequence);
            next = self.pushes.range(Sequence(sequence.0 + 1)..).next().map(|(&next, _)| next);
        }
        // After the pushes: a `Leave` request waits for them.
        let mut next = self.ops.first_key_value().map(|(&id, _)| id);
        while let Some(id) = next {
            self.drive_op(now, id);
            next = self.ops.range(OpId(id.0 + 1)..).next().map(|(&next, _)| next);
        }
        self.drive_returns(now);
        self.drive_sharing(now);
    }

    fn drive_op(&mut self, now: Instant, id: OpId) {
        let Some(op) = self.ops.get(&id) else { return };
        match &op.kind {
            OpKind::Open { shards } => {
                let open = shards.iter().all(|&link| self.links[link].status == LinkStatus::Up);
                if let Some(settings) = self.server_settings.clone().filter(|_| open) {
                    self.finish(id, Ok(Reply::Opened(settings)));
                }
            }
            OpKind::Join { .. } => self.drive_join(id),
            OpKind::Request(_) => self.drive_request(now, id),
            OpKind::Token => self.drive_token(now, id),
            OpKind::Pull(_) => self.drive_pull(now, id),
            OpKind::Push { sequence, .. } => {
                let sequence = *sequence;
                if let Some(result) = self.settled_result(sequence) {
                    self.finish(id, result.map(|outcome| Reply::Pushed { outcome }));
                }
            }
        }
    }

    /// Answers an operation and removes it.
    fn finish(&mut self, id: OpId, reply: Result<Reply, Error>) -> Option<Op> {
        let op = self.ops.remove(&id)?;
        self.reply(id, reply);
        Some(op)
    }

    fn reply(&mut self, op: OpId, reply: Result<Reply, Error>) {
        self.outputs.push_back(SessionOutput::Reply { op, reply });
    }

    /// Ends the session: every operation fails with this error, now and later.
    fn fail(&mut self, error: Error) {
        while let Some((&id, _)) = self.ops.first_key_value() {
            self.finish(id, Err(error.clone()));
        }
        // Never reuse the push slots of pending pushes: a shard may still read them, and callers
        // may still hold the push buffers.
        for push in std::mem::take(&mut self.pushes).into_values() {
            let in_push_buffers = push.shares.into_iter().filter_map(|share| share.in_push_buffer);
            self.applying
                .extend(in_push_buffers.map(|in_buffer| (GlobalStep(u64::MAX), in_buffer.buffer)));
        }
        self.tokens.forget();
        for (index, link) in self.links.iter_mut().enumerate() {
            link.give_up(&error);
            self.outputs.push_back(SessionOutput::Disconnect { link: index });
        }
        self.failed = Some(error);
    }

    fn cancelled(&mut self, now: Instant, id: OpId) {
        if let Some(OpKind::Push { sequence, owns: true }) = self.ops.remove(&id).map(|op| op.kind)
        {
            self.withdraw(now, sequence);
        }
    }

    fn tick(&mut self, now: Instant) {
        let due: Vec<OpId> =
            self.ops.iter().filter(|(_, op)| op.deadline <= now).map(|(&id, _)| id).collect();
        for id in due {
            let Some(op) = self.ops.get(&id) else { continue };
            let error = Error::Timeout {
                doing: op.doing,
                waited: now.saturating_duration_since(op.since),
                awaited: self.awaited(now, op),
                sequence: match op.kind {
                    OpKind::Push { sequence, .. } => Some(sequence),
                    _ => None,
                },
            };
            self.finish(id, Err(error));
        }
        self.return_unclaimed_tokens(now);
        for index in 0..self.links.len() {
            self.keep_alive(now, index);
            self.connect_if_due(now, index);
        }
        self.report_progress(now);
    }

    /// Returns the index of the link to the step owner.
    fn owner_link(&self) -> Option<usize> {
        self.links.iter().position(|link| link.shard == self.config.owner)
    }

    fn owner_is_up(&self) -> bool {
        self.owner_link().is_some_and(|link| self.links[link].status == LinkStatus::Up)
    }

    fn refused(&self, doing: &'static str, link: usize, refusal: Refusal) -> Error {
        match refusal {
            Refusal::Fenced { .. } => Error::Fenced,
            refusal => Error::Refused { doing, shard: self.links[link].shard, refusal },
        }
    }
}

#[cfg(test)]
mod tests;
