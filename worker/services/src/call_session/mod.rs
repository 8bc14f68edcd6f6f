//! The session of a client with the servers that it calls.

mod answers;
mod io;
mod link;
mod pending;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, RequestId, TaskId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{CancelCall, OutputRef};
use pushpull_common::protocol::refusal::Detail;
use pushpull_net::SendBody;

use self::io::envelope;
pub(crate) use self::io::{
    Admission, CallCommand, CallInput, CallOp, CallOrder, CallOutput, CallReply, LinkId, OutputId,
    doing_call,
};
use self::link::{CallLinkStatus, Link};
use self::pending::Pending;
use super::error::ServiceError;
use super::value_body::ValueBody;

/// The operations of a client on the servers that it calls, over one link to each.
///
/// **In**: commands, messages and ends of connections, and the time. **Out**: messages, connections
/// to make or to give up, replies. **Time**: a command is answered by its deadline. A broken link
/// connects again with back-off while a request waits for it. Heartbeats renew the lease, which
/// keeps the outputs.
///
/// **Never**: a call is sent twice to a server that may have executed it and has forgotten that. No
/// command is answered twice, and none is left without an answer.
#[derive(Debug)]
pub(crate) struct CallSession {
    incarnation: Incarnation,
    /// The job and the task of the client in hellos, which servers show in their messages.
    name: TaskId,
    /// The largest answer that the client accepts.
    answer_bytes_max: u64,
    links: Vec<Link>,
    ops: HashMap<CallOp, (LinkId, RequestId)>,
    connections: HashMap<u64, LinkId>,
    next_connection: u64,
    next_call: u64,
    /// The numbers of the calls that have no answer.
    unsettled: BTreeSet<u64>,
    outputs: VecDeque<CallOutput>,
}

impl CallSession {
    pub(crate) fn new(
        incarnation: Incarnation,
        name: TaskId,
        answer_bytes_max: u64,
    ) -> CallSession {
        CallSession {
            incarnation,
            name,
            answer_bytes_max,
            links: Vec::new(),
            ops: HashMap::new(),
            connections: HashMap::new(),
            next_connection: 1,
            next_call: 1,
            unsettled: BTreeSet::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Returns the incarnation by which servers know the client.
    pub(crate) fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Adds a link to a server. It is connected when it is needed. With a task, another one at that
    /// address is an error.
    pub(crate) fn add_link(
        &mut self,
        now: Instant,
        address: String,
        task: Option<TaskId>,
    ) -> LinkId {
        self.links.push(Link::new(now, address, task));
        LinkId(self.links.len() - 1)
    }

    /// Returns the number of the next call. It is not settled until it has an answer.
    pub(crate) fn number_call(&mut self) -> u64 {
        let number = self.next_call;
        self.next_call += 1;
        self.unsettled.insert(number);
        number
    }

    /// Returns the next action.
    pub(crate) fn poll_output(&mut self) -> Option<CallOutput> {
        self.outputs.pop_front()
    }

    /// Returns when a [`CallInput::Tick`] is due; `None` while nothing depends on the time.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.links.iter().filter_map(Link::wake_at).min()
    }

    /// Handles an input and queues the outputs that follow from it.
    pub(crate) fn handle(&mut self, now: Instant, input: CallInput<'_>) {
        match input {
            CallInput::Command { op, link, command, deadline } => {
                self.command(now, op, link, command, deadline);
            }
            CallInput::Cancelled { op } => self.cancelled(op),
            CallInput::Release { link, calls } => {
                if let Some(link) = self.links.get_mut(link.0) {
                    link.release(calls);
                }
            }
            CallInput::Connected { connection } => self.connected(now, connection),
            CallInput::Message { connection, header, message } => {
                if let Some(&link) = self.connections.get(&connection) {
                    self.links[link.0].heard = now;
                    self.on_message(now, link, connection, header, message);
                }
            }
            CallInput::Body { connection } => {
                if let Some(&link) = self.connections.get(&connection) {
                    self.links[link.0].heard = now;
                    self.body_received(link);
                }
            }
            CallInput::Progress { connection } => {
                if let Some(&link) = self.connections.get(&connection) {
                    self.links[link.0].heard = now;
                }
            }
            CallInput::Disconnected { connection, reason } => {
                if let Some(link) = self.connections.remove(&connection) {
                    self.link_failed(now, link, reason);
                }
            }
            CallInput::Tick => {}
        }
        for index in 0..self.links.len() {
            self.drive(now, LinkId(index));
        }
    }

    /// Calls `receive` with the memory for the body that arrives on a connection, or with `None` if
    /// the body is to be discarded.
    pub(crate) fn with_body<R>(
        &mut self,
        connection: u64,
        receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R,
    ) -> R {
        let link = self.connections.get(&connection).map(|link| &mut self.links[link.0]);
        let answer = link.and_then(|link| {
            let request = link.receiving?;
            link.pending.get_mut(request)?.answer.as_mut()
        });
        match answer {
            Some(answer) => receive(Some(&mut [answer.values.target()])),
            None => receive(None),
        }
    }

    fn command(
        &mut self,
        now: Instant,
        op: CallOp,
        link: LinkId,
        command: CallCommand,
        deadline: Option<Instant>,
    ) {
        let pending = Pending::new(op, command, now, deadline);
        let request = self.links[link.0].pending.add(pending);
        self.ops.insert(op, (link, request));
    }

    fn cancelled(&mut self, op: CallOp) {
        let Some((link, request)) = self.ops.remove(&op) else { return };
        let at = &mut self.links[link.0];
        let Some(pending) = at.pending.remove(request) else { return };
        at.ended.extend(pending.acknowledges);
        if let CallLinkStatus::Open { connection } = at.status
            && pending.sent
            && pending.kind.is_fetch()
        {
            // A fetch has no number of a call: its request names it.
            self.outputs.push_back(CallOutput::Send {
                connection,
                envelope: envelope(request, 0),
                message: CancelCall { call: 0 }.into(),
                body: ValueBody::default(),
                crc: false,
            });
        }
        if let CallCommand::Call { number, .. } = pending.kind {
            self.unsettled.remove(&number);
            if pending.was_sent {
                at.cancels.push(number);
                at.releases.push(number);
            }
        }
    }

    /// Replies to the caller of a request, and forgets the request.
    fn reply(&mut self, link: LinkId, request: RequestId, reply: Result<CallReply, ServiceError>) {
        let at = &mut self.links[link.0];
        let Some(pending) = at.pending.remove(request) else { return };
        if reply.is_err() {
            at.ended.extend(&pending.acknowledges);
        }
        if let CallCommand::Call { number, order } = &pending.kind {
            self.unsettled.remove(number);
            match (order.retain, &reply) {
                // What stays on the server is released by its holder.
                (true, Ok(_)) => _ = at.kept.insert(*number),
                // It has no holder, and the function may leave it still.
                (true, Err(error)) if pending.was_sent && error.is_unsure() => {
                    at.releases.push(*number);
                }
                // The server remembers how the call has ended until the next one acknowledges that,
                // for those who fetch its outputs.
                _ => at.ended.push(*number),
            }
            let unsure = matches!(reply, Err(ServiceError::Timeout { .. }));
            if unsure && pending.was_sent {
                at.cancels.push(*number);
            }
        }
        self.ops.remove(&pending.op);
        self.outputs.push_back(CallOutput::Reply { op: pending.op, reply });
    }

    /// Returns the number up to which all calls have answers.
    fn settled(&self) -> u64 {
        self.unsettled.first().map_or(self.next_call, |&first| first) - 1
    }

    /// Sends all that is due on a link, and connects it.
    fn drive(&mut self, now: Instant, id: LinkId) {
        self.time_out(now, id);
        if let Some((connection, reason)) = self.links[id.0].silence(now) {
            self.outputs.push_back(CallOutput::Disconnect { connection });
            self.connections.remove(&connection);
            return self.link_failed(now, id, reason);
        }
        let link = &mut self.links[id.0];
        match link.status {
            CallLinkStatus::Idle if link.is_needed() => self.connect(id),
            CallLinkStatus::BackOff { until } if until <= now => match link.is_needed() {
                true => self.connect(id),
                false => link.status = CallLinkStatus::Idle,
            },
            CallLinkStatus::Open { connection } => {
                // A request that is refused leaves its place to another.
                while self.find_outputs(id) {}
                self.send_due(now, id, connection);
            }
            _ => {}
        }
    }

    fn connect(&mut self, id: LinkId) {
        let connection = self.next_connection;
        self.next_connection += 1;
        let link = &mut self.links[id.0];
        link.status = CallLinkStatus::Connecting { connection };
        let address = link.address.clone();
        self.connections.insert(connection, id);
        self.outputs.push_back(CallOutput::Connect { connection, address });
    }

    /// Fails the requests whose deadlines have passed.
    fn time_out(&mut self, now: Instant, id: LinkId) {
        for request in self.links[id.0].pending.late(now) {
            let link = &mut self.links[id.0];
            let Some(pending) = link.pending.get_mut(request) else { continue };
            let doing = pending.kind.doing();
            let waited = now - pending.begun;
            let was_sent = pending.was_sent;
            let is_open = matches!(link.status, CallLinkStatus::Open { .. });
            let task = link.task_name();
            let awaited = match &link.failure {
                _ if was_sent => format!("the answer of {task}"),
                Some((since, reason)) if !is_open => {
                    let waited = now.saturating_duration_since(*since);
                    let reason = reason.clone();
                    let error = ServiceError::Unavailable { doing, task, waited, reason };
                    self.reply(id, request, Err(error));
                    continue;
                }
                _ if is_open => {
                    let places = link.calls_max;
                    format!("a place among the {places} calls of this client on {task}")
                }
                _ => format!("a connection to {task}"),
            };
            let error = ServiceError::Timeout { doing, task, waited, awaited };
            self.reply(id, request, Err(error));
        }
    }

    /// Finds the servers of the kept outputs that the next requests of a link need. A request that
    /// needs a lost output is refused: a restarted server would wait for a call that never comes.
    /// Returns whether a request was refused.
    fn find_outputs(&mut self, id: LinkId) -> bool {
        let link = &self.links[id.0];
        let task = link.task.as_ref();
        let mut found = Vec::new();
        for request in link.next_requests() {
            let Some(pending) = link.pending.get(request) else { continue };
            // A call that was sent is known to its server, with what it needs.
            if pending.was_sent && pending.kind.is_call() {
                continue;
            }
            let outputs = pending.kind.needed_outputs(task);
            let holder = |(task, of): &(TaskId, &OutputRef)| {
                self.holder_of(task, of)
                    .ok_or_else(|| (of.call, Detail::clipped(of.output.as_str())))
            };
            if !outputs.is_empty() {
                let holders: Result<Vec<Incarnation>, _> = outputs.iter().map(holder).collect();
                found.push((request, holders));
            }
        }
        let mut is_refused = false;
        for (request, holders) in found {
            match (holders, self.links[id.0].pending.get_mut(request)) {
                (Ok(holders), Some(pending)) => {
                    let outputs = pending.kind.needed_outputs_mut();
                    outputs.zip(holders).for_each(|(of, holder)| of.server = holder);
                }
                (Err((call, output)), _) => {
                    let detail = Detail::clipped(
                        "its call has failed, its server has restarted, or it is released",
                    );
                    self.refused(id, request, Refusal::NoOutput { call, output, detail });
                    is_refused = true;
                }
                (Ok(_), None) => {}
            }
        }
        is_refused
    }

    /// Returns the server of a link that has the outputs of a call; 0 if that is unknown.
    pub(crate) fn holder_on(&self, link: LinkId, call: u64) -> Incarnation {
        self.links.get(link.0).and_then(|link| link.holder_of(call)).unwrap_or_default()
    }

    /// Returns the server that has an output, as far as it is known; `None` if it is lost.
    fn holder_of(&self, task: &TaskId, of: &OutputRef) -> Option<Incarnation> {
        if of.owner != self.incarnation {
            return Some(of.server);
        }
        // A server may have two links: by its address as a target, and by its task.
        let of_task = |link: &&Link| link.task.as_ref() == Some(task);
        let mut holders = self.links.iter().filter(of_task).map(|link| link.holder_of(of.call));
        match holders.clone().flatten().max() {
            Some(holder) => Some(holder),
            None if holders.next().is_none() => Some(Incarnation(0)),
            None => None,
        }
    }

    /// Sends the messages that are due, and a heartbeat if no message was due for long. Releases
    /// and cancellations go first, because they free the places that the calls take.
    fn send_due(&mut self, now: Instant, id: LinkId, connection: u64) {
        let settled = self.settled();
        let link = &mut self.links[id.0];
        let crc = link.crc;
        let control = |message| (envelope(RequestId(0), 0), message, ValueBody::default());
        let mut sent: Vec<_> = link.withdrawals().into_iter().map(control).collect();
        let has_withdrawn = !sent.is_empty();
        let next = link.next_requests();
        let ended = &mut link.ended;
        for request in next {
            let Some(pending) = link.pending.send(request) else { continue };
            let acknowledged = match pending.kind.is_call() {
                true => ended.drain(..ended.len().min(link::ENDED_MAX)).collect(),
                false => Vec::new(),
            };
            pending.acknowledges.clone_from(&acknowledged);
            let left = pending.deadline.map(|at| at.saturating_duration_since(now));
            let envelope = envelope(request, deadline_ms(left));
            for (message, body) in pending.kind.messages(settled, acknowledged) {
                sent.push((envelope, message, body));
            }
        }
        sent.extend(link.acknowledgements(now, has_withdrawn).into_iter().map(control));
        if !sent.is_empty() {
            link.last_sent = now;
        }
        for (envelope, message, body) in sent {
            let crc = crc && body.bytes() > 0;
            self.outputs.push_back(CallOutput::Send { connection, envelope, message, body, crc });
        }
    }
}

/// The longest time by which the deadline of a server precedes that of its client.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// Returns the time that a server has for a request, in milliseconds: at least 1, and 0 for no
/// deadline. It ends before the client's own deadline, because the server knows the reason for the
/// wait, and reports it.
fn deadline_ms(left: Option<Duration>) -> u32 {
    let of_server = |left: Duration| left - (left / 10).min(ANSWER_TIME);
    left.map_or(0, |left| u32::try_from(of_server(left).as_millis().max(1)).unwrap_or(u32::MAX))
}
