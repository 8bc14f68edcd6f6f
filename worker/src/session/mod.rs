//! The worker's side of the protocol with all shards, as a pure state machine.
//!
//! A session turns operations (a pull, a push, a token) into requests to shards. It keeps each
//! unanswered request and sends it again after a reconnect. A push keeps its sequence number, and a
//! shard gets again only what it has not acknowledged, so every push counts once.
//!
//! [`Session`] is made of owners of state, one in each module. No owner names another: an owner
//! takes an input, sends over the links, and returns what has changed. [`SessionWork`] has the
//! owners of requests, pushes, pulls and tokens do their part of an operation. The dispatch in this
//! file decides what follows from that. Below the owners are the links, which hold the queue of
//! outputs, and the membership, which owners only read.

mod encoded_values;
mod expectations;
mod io;
mod links;
mod membership;
mod operations;
mod progress;
mod pulls;
mod pushes;
mod requests;
mod sharing;
mod tokens;
mod work;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_common::ids::{RequestId, Sequence};
use pushpull_common::protocol::{Header, Message, Refusal};

use crate::error::Error;
pub(crate) use expectations::{Expectations, ExpectedMode};
pub(crate) use io::{
    GradientCounts, JoinedEpoch, OpId, PushOrder, ReadPoint, Reply, ServerSettings, SessionCommand,
    SessionConfig, SessionInput, SessionOutput,
};
use links::{BodyTarget, LinkFault, LinkStatus, OutgoingFrame, PendingRequest, SessionLinks};
use membership::Membership;
use operations::PendingOperation;
use progress::ProgressReports;
use pulls::PullEvent;
use pushes::PushEvent;
use sharing::MemorySharing;
use tokens::TokenAnswer;
pub(crate) use tokens::UnclaimedTokens;
use work::SessionWork;

/// A worker's session with all shards of a cluster.
///
/// **What goes in.** [`Session::handle`] takes every event: a command of a caller, the end of a
/// caller's interest, a change of a transport, a message, a received body, the passage of time. A
/// message with a body is followed by its body and by no other message of the same link; the body
/// is received into the memory that [`Session::with_targets`] gives out. Links have indices, which
/// the session chooses in [`SessionOutput::Connect`] and never changes.
///
/// **What comes out.** [`Session::poll_output`] returns the actions in the order in which they must
/// be carried out. Call it until it returns `None` after every event. The frames of a link are sent
/// in this order, and dropped when the link is closed. Every command gets one reply.
///
/// **What time does.** The session has no clock: each event comes with the time, which never falls.
/// A [`SessionInput::Tick`] is due at [`Session::wake_at`] at the latest. It fails operations at
/// their deadlines, connects and keeps links alive, returns tokens that nobody takes, and reports
/// progress. A late tick delays these, and breaks nothing.
///
/// **What may never happen.** Tests cite these by their numbers. Each owner's type states its own
/// invariants.
///
/// - W-1: No push counts twice: it keeps its number and its bytes until every shard, or in
///   synchronous mode the step owner, has settled it.
/// - W-2: No operation is answered twice, or after its cancellation.
/// - W-3: No request is pending on two links, and no two token requests are under way.
/// - W-4: No values of two restore epochs are mixed.
/// - W-5: No message of a server makes the session panic; one that breaks the protocol resets its
///   link.
/// - W-6: After a failure of the session nothing is sent.
#[derive(Debug)]
pub(crate) struct Session {
    membership: Membership,
    links: SessionLinks,
    work: SessionWork,
    sharing: MemorySharing,
    reports: ProgressReports,
    failed: Option<Error>,
}

impl Session {
    pub(crate) fn new(config: SessionConfig) -> Session {
        Session {
            links: SessionLinks::new(config.owner, config.incarnation.0 | 1),
            work: SessionWork::new(),
            sharing: MemorySharing::new(config.shared_memory, config.values.is_none()),
            reports: ProgressReports::new(config.progress_interval, config.addresses.clone()),
            membership: Membership::new(config),
            failed: None,
        }
    }

    /// The received tokens that no caller has taken. Callers take one without asking the session.
    pub(crate) fn unclaimed(&self) -> &Arc<UnclaimedTokens> {
        self.work.tokens.unclaimed()
    }

    /// Processes one event.
    pub(crate) fn handle(&mut self, now: Instant, input: SessionInput) {
        let Session { links, work, .. } = self;
        match input {
            SessionInput::Command { op, command, deadline } => {
                self.command(now, op, command, deadline)
            }
            SessionInput::Cancelled { op } => work.cancel(now, op, links),
            SessionInput::Abandoned { sequence } => work.withdraw(now, sequence, links),
            SessionInput::TokenDropped { grant } => {
                if self.failed.is_none() {
                    work.return_token(now, grant, links);
                }
            }
            SessionInput::TokenSkipped { grant } => {
                if self.failed.is_none() {
                    work.skip_batch(now, grant, links);
                }
            }
            SessionInput::Connected { link, same_host } => self.connected(now, link, same_host),
            SessionInput::Disconnected { link, error } => self.disconnected(now, link, error),
            SessionInput::Unresolved { link, error } => self.unresolved(now, link, error),
            SessionInput::Unproven { link, reason } => {
                let shard = self.links[link].shard;
                self.link_failed(now, link, LinkFault::Session(Error::Unproven { shard, reason }));
            }
            // Either event proves that the peer is alive. During a large push the peer has nothing
            // to send, and a heartbeat queues behind the parts.
            SessionInput::BytesReceived { link } | SessionInput::BytesSent { link } => {
                links[link].last_received = now;
            }
            SessionInput::Message { link, header, message } => {
                if let Err(fault) = self.message(now, link, &header, message) {
                    self.link_failed(now, link, fault);
                }
            }
            SessionInput::Body { link } => {
                if let Err(fault) = self.body(now, link) {
                    self.link_failed(now, link, fault);
                }
            }
            SessionInput::Tick => self.tick(now),
        }
    }

    /// Returns the next action, or `None` if there is nothing to do.
    pub(crate) fn poll_output(&mut self) -> Option<SessionOutput> {
        self.links.outputs.pop_front()
    }

    /// Returns when the next [`SessionInput::Tick`] is due at the latest.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let is_waiting = !self.work.operations.is_empty();
        let report = is_waiting.then(|| self.reports.wake_at(now)).flatten();
        let tokens = self.work.tokens.wake_at().filter(|_| self.links.connected_owner().is_some());
        let wakes = [self.links.wake_at(), self.work.operations.wake_at(), report, tokens];
        wakes.into_iter().flatten().min().unwrap_or(now + Duration::from_secs(3600))
    }

    /// Calls `receive` with the memory for the body of the link's last message, in order, or with
    /// `None` if the body is to be discarded.
    pub(crate) fn with_targets<R>(
        &mut self,
        link: usize,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        self.work.pulls.with_targets(link, &mut self.links, receive)
    }

    /// Treats every token as granted while all connections were up. Planted bug of the simulator.
    #[cfg(feature = "simulation")]
    pub(crate) fn trust_connections(&mut self) {
        self.links.trust_connections();
    }

    /// Returns what is under way, in words; `None` if nothing.
    #[cfg(feature = "simulation")]
    pub(crate) fn unfinished(&self) -> Option<String> {
        // A request or a pull is under way exactly while its operation is.
        match (self.work.operations.is_empty(), self.work.pushes.first()) {
            (false, _) => Some("an operation".to_owned()),
            (true, Some(push)) => Some(format!("push {push}")),
            (true, None) => None,
        }
    }

    fn command(&mut self, now: Instant, id: OpId, command: SessionCommand, deadline: Instant) {
        if let Some(error) = self.failed.clone() {
            let reply = Err(error);
            return self.links.outputs.push_back(SessionOutput::Reply { op: id, reply });
        }
        let was_idle = self.work.operations.is_empty();
        // The question about an undecided push is sent now: no wait follows that would send it.
        let asks = matches!(command, SessionCommand::Outcome { .. });
        let command = (command, deadline);
        let Session { work, membership, links, .. } = self;
        match work.begin(now, id, command, membership, links) {
            Some(reply) => {
                links.outputs.push_back(SessionOutput::Reply { op: id, reply });
                if !asks {
                    return;
                }
            }
            None if was_idle => self.reports.restart(now),
            None => {}
        }
        self.drive(now);
    }

    /// Makes all progress that is possible now, on every link, push and operation.
    fn drive(&mut self, now: Instant) {
        for index in 0..self.links.len() {
            self.connect_if_due(now, index);
        }
        let Session { work, membership, links, sharing, reports, .. } = self;
        let token_wait_ms = reports.token_wait_ms(membership.synchronous);
        if let Some(plan) = work.drive(now, membership, links, token_wait_ms) {
            membership.join(plan);
        }
        sharing.send(now, membership, links);
    }

    fn connect_if_due(&mut self, now: Instant, index: usize) {
        let has_epoch = self.membership.has_epoch();
        self.links.connect_if_due(now, index, has_epoch);
    }

    #[cfg(test)]
    pub(crate) fn check_invariants(&self) {
        self.links.check_invariants();
        self.work.check_invariants(&self.links);
    }

    /// Sends the hello once the transport is connected.
    fn connected(&mut self, now: Instant, index: usize, same_host: bool) {
        let link = &mut self.links[index];
        if link.status != LinkStatus::Connecting {
            return;
        }
        link.connected(same_host);
        let hello = OutgoingFrame::of(self.membership.hello(link));
        self.links.send(now, index, PendingRequest::Hello, hello);
    }

    /// Handles a message: the answer to a pending request of its link.
    fn message(
        &mut self,
        now: Instant,
        index: usize,
        header: &Header,
        message: Message,
    ) -> Result<(), LinkFault> {
        let link = &mut self.links[index];
        link.last_received = now;
        if let (Message::Goodbye(_), shard) = (&message, link.shard) {
            return Err(match self.membership.uses(shard) && !link.has_left {
                true => LinkFault::Session(Error::ServerStopped { shard }),
                false => LinkFault::Reset(format!("{shard} has stopped")),
            });
        }
        let Some(pending) = link.pending.get(&header.request).copied() else {
            return Err(LinkFault::Reset(format!("unexpected {}", message.name())));
        };
        if pending == PendingRequest::Hello {
            link.pending.remove(&header.request);
            return self.hello_answered(now, index, header, message);
        }
        let begins_an_epoch = match pending {
            PendingRequest::Request(id) => self.work.requests.begins_an_epoch(id),
            _ => false,
        };
        self.membership.check_epoch(link, pending, header, &message, begins_an_epoch)?;
        link.answered(header.request, &message);
        if self.links.is_owner(index) {
            self.membership.step = self.membership.step.max(header.step);
        }
        if let Message::Refused(refused) = &message
            && matches!(refused.refusal, Refusal::Fenced { .. })
        {
            return Err(LinkFault::Session(Error::Fenced));
        }
        let Session { membership, links, work, sharing, .. } = self;
        match pending {
            PendingRequest::Hello => Err(LinkFault::unexpected(&message)),
            PendingRequest::Heartbeat => links[index].heartbeat_answered(&message),
            PendingRequest::Request(id) => {
                let answer = work.requests.answered(id, &mut links[index], header, message)?;
                if let Some(answer) = answer {
                    self.request_answered(now, id, index, (answer, Vec::new()));
                }
                Ok(())
            }
            PendingRequest::ShareValues => {
                sharing.values_answered(index, message, membership, links)?;
                sharing.send(now, membership, links);
                Ok(())
            }
            PendingRequest::SharePushBuffer => sharing.push_buffer_answered(index, message, links),
            PendingRequest::Token => self.token_answered(now, index, header.request, message),
            PendingRequest::Return(token) => work.tokens.return_answered(token, &message),
            PendingRequest::Pull(id, request) => {
                let of = (id, request);
                let synchronous = membership.synchronous;
                let event = work.pulls.answered(of, index, header, message, synchronous, links)?;
                self.pull_advanced(now, id, index, event);
                Ok(())
            }
            PendingRequest::Reserve(sequence) | PendingRequest::Push(sequence) => {
                self.push_answered(now, sequence, index, header.request, message)
            }
            PendingRequest::PushState(sequence) => {
                let event = work.pushes.state_answered(sequence, index, message, links)?;
                self.push_advanced(now, sequence, index, event);
                Ok(())
            }
            PendingRequest::Withdraw(parts) => links[index].withdrawal_answered(parts, &message),
        }
    }

    fn hello_answered(
        &mut self,
        now: Instant,
        index: usize,
        header: &Header,
        message: Message,
    ) -> Result<(), LinkFault> {
        match message {
            Message::Welcome(welcome) => {
                let has_lost_state = self.links[index].has_lost(welcome.arena);
                self.membership.welcomed(index, header, &welcome, &mut self.links)?;
                self.links.welcomed(index, self.work.tokens.was_ever_requested());
                if has_lost_state && !self.membership.is_member() {
                    self.ask_again(now, index);
                }
                self.drive(now);
                Ok(())
            }
            Message::Refused(refused) => {
                Err(self.membership.hello_refused(&self.links[index], refused.refusal))
            }
            message => Err(LinkFault::unexpected(&message)),
        }
    }

    /// Pulls again, and connects to all other shards again, after one has lost its state.
    fn ask_again(&mut self, now: Instant, found: usize) {
        self.work.pulls.forget_answers();
        for other in (0..self.links.len()).filter(|&other| other != found) {
            let fault = LinkFault::Reset("another shard has lost its state".to_owned());
            self.link_failed(now, other, fault);
        }
    }

    fn request_answered(
        &mut self,
        now: Instant,
        id: OpId,
        index: usize,
        answer: (Message, Vec<u8>),
    ) {
        self.work.request_answered(id, index, answer, &mut self.links);
        self.drive(now);
    }

    /// Handles the answer to a token request. A token of a synchronous step says that every shard
    /// has applied the steps before.
    fn token_answered(
        &mut self,
        now: Instant,
        index: usize,
        request: RequestId,
        message: Message,
    ) -> Result<(), LinkFault> {
        let Session { links, work, reports, .. } = self;
        match work.tokens.answered(now, index, request, message, links)? {
            TokenAnswer::Granted { step } => work.pushes.step_begins(step),
            TokenAnswer::Ended | TokenAnswer::Refused(None, _) => {}
            TokenAnswer::Refused(Some(id), refusal) => {
                match work.tokens.record_partial_wait(&refusal) {
                    // The next drive asks again.
                    Some(awaited) => {
                        let silent = reports.report_wait(now, index, awaited, links);
                        links.outputs.push_back(SessionOutput::Progress { silent });
                    }
                    None => work.token_refused(now, id, index, refusal, links),
                }
            }
        }
        self.drive(now);
        Ok(())
    }

    /// Handles the answer to a reservation or to the parts of a push. With the outcome come the
    /// next push slot of the shard and, from the step owner, the next token.
    fn push_answered(
        &mut self,
        now: Instant,
        sequence: Sequence,
        index: usize,
        request: RequestId,
        message: Message,
    ) -> Result<(), LinkFault> {
        let Session { links, work, .. } = self;
        if let Message::PushAnswer(answer) = &message {
            if answer.push_slot != 0 {
                links[index].push_slot = answer.push_slot;
            }
            work.tokens.push_answered(now, request, answer, links);
        }
        let event = work.pushes.answered(sequence, index, message, links)?;
        self.push_advanced(now, sequence, index, event);
        Ok(())
    }

    fn push_advanced(&mut self, now: Instant, sequence: Sequence, index: usize, event: PushEvent) {
        match event {
            PushEvent::Ignored => return,
            PushEvent::Advanced => {}
            PushEvent::Undecided { completed_at, short, awaited } => {
                let silent = self.reports.undecided(now, index, awaited.as_str(), &self.links);
                let error = |operation: &PendingOperation| match short {
                    Some(short) => operation.without_replicas(short, awaited.to_string()),
                    None => operation.timeout(now, silent.clone()),
                };
                self.work.push_undecided(sequence, completed_at, error, &mut self.links);
            }
        }
        self.drive(now);
    }

    fn pull_advanced(&mut self, now: Instant, id: OpId, index: usize, event: PullEvent) {
        let Session { links, work, reports, .. } = self;
        match event {
            PullEvent::Received => {}
            PullEvent::Advanced => self.drive(now),
            PullEvent::Stale => {
                if let Some(pull) = work.pulls.remove(id) {
                    work.finish(id, Ok(Reply::Stale { buffer: pull.buffer }), links);
                }
                self.drive(now);
            }
            PullEvent::Refused(refusal) => {
                let awaited = work.awaited(now, id, links);
                let awaited = reports.describe_awaited(now, awaited, links);
                work.pull_refused(now, id, index, refusal, awaited, links);
            }
        }
    }

    /// Handles a completely received body.
    fn body(&mut self, now: Instant, index: usize) -> Result<(), LinkFault> {
        let Session { links, work, membership, .. } = self;
        links[index].last_received = now;
        let synchronous = membership.synchronous;
        let (id, event) = match links[index].receiving.take() {
            None => return Ok(()),
            Some(BodyTarget::Answer { op, message, body }) => {
                self.request_answered(now, op, index, (message, body));
                return Ok(());
            }
            Some(BodyTarget::Values { op, request, last }) => {
                (op, work.pulls.received((op, request), index, last, synchronous, links))
            }
            Some(BodyTarget::EncodedValues { op, request, part, last }) => {
                let of = (op, request);
                let part = (&part, last);
                (op, work.pulls.received_encoded(of, index, part, synchronous, links)?)
            }
        };
        self.pull_advanced(now, id, index, event);
        Ok(())
    }

    /// Handles a link or a session that cannot continue. A link is closed and connected again.
    fn link_failed(&mut self, now: Instant, index: usize, fault: LinkFault) {
        match fault {
            LinkFault::Reset(error) => {
                self.links.outputs.push_back(SessionOutput::Disconnect { link: index });
                self.disconnected(now, index, error);
            }
            LinkFault::Session(error) => self.fail(error),
        }
    }

    /// Takes a link down, and marks as unsent what was unanswered.
    fn disconnected(&mut self, now: Instant, index: usize, error: String) {
        let Some(lost) = self.links.lose(now, index, error) else { return };
        let grants_with_pushes = self.links.is_owner(index) && !self.membership.synchronous;
        self.work.lost(index, lost, grants_with_pushes);
    }

    /// Takes a link down, and reports at once what no wait may heal.
    fn unresolved(&mut self, now: Instant, index: usize, error: String) {
        let is_news = self.links[index].last_error != error;
        self.disconnected(now, index, error);
        let silent = self.reports.report_link(now, index, &self.links).filter(|_| is_news);
        self.links.outputs.extend(silent.map(|silent| SessionOutput::Progress { silent }));
    }

    fn tick(&mut self, now: Instant) {
        let Session { links, work, reports, .. } = self;
        for id in work.operations.due(now) {
            let awaited = work.awaited(now, id, links);
            let awaited = reports.describe_awaited(now, awaited, links);
            work.time_out(now, id, awaited, links);
        }
        work.return_due_tokens(now, links);
        for index in 0..self.links.len() {
            if let Err(fault) = self.links.keep_alive(now, index) {
                self.link_failed(now, index, fault);
            }
            self.connect_if_due(now, index);
        }
        let is_waiting = !self.work.operations.is_empty();
        if let Some(silent) = self.reports.take_due(now, is_waiting, &self.links) {
            self.links.outputs.push_back(SessionOutput::Progress { silent });
        }
    }

    /// Ends the session: every operation fails with this error, now and later.
    pub(crate) fn fail(&mut self, error: Error) {
        self.work.give_up(&error, &mut self.links);
        self.links.give_up(&error);
        self.failed = Some(error);
    }
}

#[cfg(test)]
mod tests;
