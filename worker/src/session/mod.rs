//! The conversation with all shards, as a pure state machine: what happened goes in, what to do
//! comes out. There is no socket, thread or clock in here.
//!
//! A session turns operations (a pull, a push, a token) into requests to shards, keeps what is
//! unanswered, and sends it again after a reconnect: to each shard what that shard has not
//! acknowledged, under the same sequence number, so that it counts once.

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
use crate::push_buffers::GradientBuffer;
use crate::selection::Selected;
use crate::sharding_plan::ShardingPlan;
pub(crate) use io::{
    Command, Counts, Input, OpId, Output, PushOrder, Read, Reply, Start, Welcomed,
};
use link::{Link, Status};
use pulls::{Ask, Requested};
use pushes::Push;
use tokens::Tokens;
pub(crate) use tokens::Unclaimed;

/// An operation that has not been answered.
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
    /// Waits until all shards of a plan live in one epoch.
    Join {
        plan: Arc<ShardingPlan>,
        links: Vec<usize>,
    },
    Request(requests::Request),
    Token,
    Pull(pulls::Pull),
    /// Waits for a push; `owns` if giving up the wait gives up the push.
    Push {
        sequence: Sequence,
        owns: bool,
    },
}

/// The worker's side of all its conversations.
///
/// What happened: [`Session::handle`]. What to do next: [`Session::poll_output`], and again at
/// [`Session::wake_at`] at the latest. [`Session::with_targets`] lends memory to receive into.
///
/// Invariants: an operation is answered exactly once, by its deadline; a push under way keeps its
/// number and its bytes until every shard it touches has settled it, or in synchronous mode the step
/// owner has; at most one token request is
/// unanswered; a request is pending on at most one link; once a member has joined, all shards it
/// uses live in one restore epoch, or it has failed.
#[derive(Debug)]
pub(crate) struct Session {
    start: Start,
    epoch: ClientEpoch,
    links: Vec<Link>,
    ops: BTreeMap<OpId, Op>,
    pushes: BTreeMap<Sequence, Push>,
    /// How the last pushes ended.
    settled: VecDeque<(Sequence, Result<Outcome, Error>)>,
    next_sequence: u64,
    tokens: Tokens,
    plan: Option<Arc<ShardingPlan>>,
    welcomed: Option<Welcomed>,
    step: GlobalStep,
    /// Whether steps are synchronous, as the step owner's last welcome said.
    synchronous: bool,
    /// Whether the step owner may find gradients too old, as it said then.
    owner_first: bool,
    /// How many trays were lent.
    push_buffers: u64,
    /// What shards may still have to apply of pushes that were accepted for a step: it lies in rooms.
    applying: Vec<(GlobalStep, Arc<GradientBuffer>)>,
    failed: Option<Error>,
    reported: Option<Instant>,
    /// For the jitter of reconnects, which must differ between workers but not between runs.
    random: u64,
    outputs: VecDeque<Output>,
}

impl Session {
    pub(crate) fn new(start: Start) -> Session {
        Session {
            epoch: ClientEpoch(0),
            links: Vec::new(),
            ops: BTreeMap::new(),
            pushes: BTreeMap::new(),
            settled: VecDeque::new(),
            next_sequence: 1,
            tokens: Tokens::default(),
            plan: None,
            welcomed: None,
            step: GlobalStep(0),
            synchronous: false,
            owner_first: false,
            push_buffers: 0,
            applying: Vec::new(),
            failed: None,
            reported: None,
            random: start.incarnation.0 | 1,
            start,
            outputs: VecDeque::new(),
        }
    }

    /// The tokens that have come and that nobody has taken, for callers to take one by themselves.
    pub(crate) fn unclaimed(&self) -> &Arc<Unclaimed> {
        self.tokens.unclaimed()
    }

    /// Takes in what happened.
    pub(crate) fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Command { op, command, deadline } => self.command(now, op, command, deadline),
            Input::Cancelled { op } => self.cancelled(now, op),
            Input::Abandoned { sequence } => self.withdraw(now, sequence),
            Input::TokenDropped { grant } => self.return_token(now, grant),
            Input::Connected { link, same_host } => self.connected(now, link, same_host),
            Input::Disconnected { link, error } => self.disconnected(now, link, error),
            // Either way the peer lives: it speaks, or it reads. While a large push is under way it has
            // nothing to say, and a heartbeat waits behind the parts.
            Input::Heard { link } | Input::Written { link } => {
                self.links[link].last_heard = now;
            }
            Input::Message { link, header, message } => self.message(now, link, header, message),
            Input::Body { link } => self.body(now, link),
            Input::Tick => self.tick(now),
        }
    }

    /// The next thing to do.
    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Input::Tick`] is due at the latest.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let reports = self.start.progress_interval.filter(|_| !self.ops.is_empty());
        let report =
            reports.and_then(|interval| self.reported.unwrap_or(now).checked_add(interval));
        let links = self.links.iter().filter_map(Link::wake_at);
        let deadlines = self.ops.values().map(|op| op.deadline);
        let tokens = self.tokens.wake_at().filter(|_| self.owner_is_up());
        let wakes = links.chain(deadlines).chain(report).chain(tokens);
        wakes.min().unwrap_or(now + Duration::from_secs(3600))
    }

    fn command(&mut self, now: Instant, op: OpId, command: Command, deadline: Instant) {
        if let Some(error) = self.failed.clone() {
            return self.reply(op, Err(error));
        }
        self.ask_about_the_undecided();
        let (doing, kind) = match command {
            Command::Begin { order } => {
                let begun = self.begin_push(now, order, false);
                return self.reply(op, begun.map(|sequence| Reply::Begun { sequence }));
            }
            Command::More { sequence, own, parts } => {
                self.more_parts(now, sequence, own, parts);
                return self.reply(op, Ok(Reply::Done));
            }
            Command::Outcome { sequence } => {
                self.outcome(op, sequence);
                return self.drive(now);
            }
            Command::Open { shards } => {
                let shards = shards.into_iter().map(|shard| self.link_to(now, shard)).collect();
                ("connect", OpKind::Open { shards })
            }
            Command::Joined { plan } => {
                // The owner counts the steps, whether it holds variables or not.
                let owner = [self.start.owner];
                let shards = plan.shards().iter().chain(owner.iter()).copied();
                let links = shards.map(|shard| self.link_to(now, shard)).collect();
                ("join", OpKind::Join { plan, links })
            }
            Command::Request { shard, message, body } => {
                let link = self.link_to(now, shard);
                let request = requests::Request::new(link, message, body);
                (request.doing(), OpKind::Request(request))
            }
            Command::Token => ("take a token", OpKind::Token),
            Command::Pull { plan, buffer, token } => {
                let mut asks = Vec::new();
                let links = plan.shards().iter().map(|&shard| self.link_to(now, shard));
                asks.extend(links.map(Ask::values));
                ("pull", OpKind::Pull(pulls::Pull::new(plan, buffer, token, self.step, asks)))
            }
            Command::PullVariable { plan, variable, buffer, token } => {
                let mut asks = Vec::new();
                let selected = Selected::of(&plan, variable).into_iter();
                let of = |one: Selected| {
                    Ask::new(self.link_to(now, one.shard), Requested::Selected(one))
                };
                asks.extend(selected.map(of));
                let base = plan.range(variable).start;
                let pull = pulls::Pull::new(plan, buffer, token, self.step, asks);
                ("pull", OpKind::Pull(pulls::Pull { base, ..pull }))
            }
            Command::PullRows { plan, buffer, wanted, token } => {
                let mut asks = Vec::new();
                for (which, asked) in wanted.asks().iter().enumerate() {
                    let link = self.link_to(now, asked.shard);
                    asks.push(Ask::new(link, Requested::Rows(wanted.clone(), which)));
                }
                ("pull rows", OpKind::Pull(pulls::Pull::new(plan, buffer, token, self.step, asks)))
            }
            Command::Push { order } => match self.begin_push(now, order, true) {
                Ok(sequence) => ("push", OpKind::Push { sequence, owns: true }),
                Err(error) => return self.reply(op, Err(error)),
            },
            Command::End { sequence } => {
                self.end_push(sequence);
                ("push", OpKind::Push { sequence, owns: true })
            }
            Command::Await { sequence } => ("push", OpKind::Push { sequence, owns: false }),
        };
        if self.ops.is_empty() {
            self.reported = Some(now);
        }
        self.ops.insert(op, Op { kind, doing, since: now, deadline });
        self.drive(now);
    }

    /// Does for every operation what can be done now.
    fn drive(&mut self, now: Instant) {
        for index in 0..self.links.len() {
            self.connect_if_due(now, index);
        }
        // One after the other by number: driving one may end it, and others.
        let mut next = self.pushes.first_key_value().map(|(&sequence, _)| sequence);
        while let Some(sequence) = next {
            self.drive_push(now, sequence);
            next = self.pushes.range(Sequence(sequence.0 + 1)..).next().map(|(&next, _)| next);
        }
        // Behind them: leaving waits for pushes.
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
                let open = shards.iter().all(|&link| self.links[link].status == Status::Up);
                if let Some(welcomed) = self.welcomed.clone().filter(|_| open) {
                    self.finish(id, Ok(Reply::Opened(welcomed)));
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

    /// Ends an operation and tells its caller.
    fn finish(&mut self, id: OpId, reply: Result<Reply, Error>) -> Option<Op> {
        let op = self.ops.remove(&id)?;
        self.reply(id, reply);
        Some(op)
    }

    fn reply(&mut self, op: OpId, reply: Result<Reply, Error>) {
        self.outputs.push_back(Output::Reply { op, reply });
    }

    /// Ends everything: no operation can succeed any more.
    fn fail(&mut self, error: Error) {
        while let Some((&id, _)) = self.ops.first_key_value() {
            self.finish(id, Err(error.clone()));
        }
        // The rooms that pushes lie in are not written again while the trays may yet be thought lent, and while
        // a shard may yet read them: not by this session at all.
        for push in std::mem::take(&mut self.pushes).into_values() {
            let in_push_buffers = push.shares.into_iter().filter_map(|share| share.in_push_buffer);
            self.applying.extend(in_push_buffers.map(|there| (GlobalStep(u64::MAX), there.buffer)));
        }
        self.tokens.forget();
        for (index, link) in self.links.iter_mut().enumerate() {
            link.give_up(&error);
            self.outputs.push_back(Output::Disconnect { link: index });
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

    /// The link to the step owner.
    fn owner_link(&self) -> Option<usize> {
        self.links.iter().position(|link| link.shard == self.start.owner)
    }

    fn owner_is_up(&self) -> bool {
        self.owner_link().is_some_and(|link| self.links[link].status == Status::Up)
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
