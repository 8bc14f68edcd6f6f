//! The messages of servers: links that open and break, and answers to requests.

use std::time::{Duration, Instant};

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, RequestId, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{
    BodyCrc, CallOutcome, CallOutputs, Described, FeatureOffer, Hello, Role, ServerIs,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Features, Header, Message, Refusal, limits, version};
use pushpull_common::tensor::Shape;
use pushpull_worker::Advice;

use super::io::{CallCommand, CallOutput, CallReply, LinkId, envelope};
use super::link::{CallLinkStatus, settings};
use super::pending::{IncomingAnswer, Pending};
use super::{CallSession, ServiceError};
use crate::value::{Elements, Value, ValueType};
use crate::value_body::{IncomingValues, ValueBody};

/// The request of every hello.
const HELLO: RequestId = RequestId(u64::MAX);

impl CallSession {
    pub(super) fn connected(&mut self, now: Instant, connection: u64) {
        let Some(&id) = self.connections.get(&connection) else { return };
        self.links[id.0].greeted(now, connection);
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: Role::Client {},
            job: Text::clipped(&*self.name.job),
            task: self.name.index,
            shard: ShardId::default(),
            incarnation: self.incarnation,
            client_epoch: ClientEpoch(0),
            seen_epoch: RestoreEpoch(0),
            seen_arena: 0,
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: Identity::new().with_protocol().to_wire(),
            auth: None,
            features: FeatureOffer::of(Features::ALL),
        };
        self.outputs.push_back(CallOutput::Send {
            connection,
            envelope: envelope(HELLO, 0),
            message: hello.into(),
            body: ValueBody::default(),
            crc: false,
        });
    }

    pub(super) fn link_failed(&mut self, now: Instant, id: LinkId, reason: String) {
        let link = &mut self.links[id.0];
        link.back_off(now, reason.clone());
        let ends = |pending: &Pending| matches!(&pending.kind, CallCommand::Call { order, .. } if order.ends_with_connection);
        self.fail_all(now, id, &reason, ends);
    }

    /// Fails the requests of a link that satisfy a predicate. A request that was sent is lost.
    fn fail_all(&mut self, now: Instant, id: LinkId, reason: &str, of: impl Fn(&Pending) -> bool) {
        for request in self.links[id.0].pending.find(of) {
            let link = &mut self.links[id.0];
            let task = link.task_name();
            let since = link.failure.as_ref().map(|(since, _)| *since);
            let Some(pending) = link.pending.get_mut(request) else { continue };
            let doing = pending.kind.doing();
            let reason = reason.to_owned();
            let error = match pending.was_sent {
                true => ServiceError::Lost { doing, task, reason },
                false => {
                    let waited = now.saturating_duration_since(since.unwrap_or(now));
                    ServiceError::Unavailable { doing, task, waited, reason }
                }
            };
            self.reply(id, request, Err(error));
        }
    }

    pub(super) fn on_message(
        &mut self,
        now: Instant,
        id: LinkId,
        connection: u64,
        header: &Header,
        message: Message,
    ) {
        self.links[id.0].receiving = None;
        let is_open = matches!(self.links[id.0].status, CallLinkStatus::Open { .. });
        match message {
            Message::ServerIs(server) if !is_open => self.accepted(now, id, connection, &server),
            Message::Refused(refused) if !is_open => {
                let reason = refused.refusal.to_string();
                if Advice::of_refusal(&refused.refusal) == Advice::Stop {
                    self.refuse_all(id, &refused.refusal);
                }
                self.give_up(now, id, connection, reason);
            }
            _ if !is_open => self.breach(now, id, connection, "a message before its welcome"),
            Message::HeartbeatAnswer(_) => {}
            Message::Released(_) => self.links[id.0].released(),
            Message::Goodbye(_) => {
                let reason = "it has stopped".to_owned();
                self.give_up(now, id, connection, reason.clone());
                self.fail_all(now, id, &reason, |_| true);
            }
            Message::Refused(refused) => self.refused(id, header.request, refused.refusal),
            Message::CallEnded(ended) => {
                self.call_ended(now, id, connection, header, ended.outcome);
            }
            Message::Fetched(fetched) => {
                let types = ValueType::from_wire(&fetched.is).map(|is| vec![is]);
                self.values_announced(now, id, connection, header, vec![String::new()], types);
            }
            Message::Described(Described { bytes }) => {
                let types = match bytes <= limits::DESCRIPTION_BYTES_MAX {
                    true => Shape::new([bytes])
                        .map(|shape| vec![ValueType::new(Elements::Bytes, shape)])
                        .map_err(|error| error.to_string()),
                    false => Err(format!("a description of {bytes} bytes")),
                };
                self.values_announced(now, id, connection, header, vec![String::new()], types);
            }
            Message::OutputPart(part) => {
                let pending = self.links[id.0].pending.get_mut(header.request);
                // Nobody waits any more: the part is discarded.
                let Some(answer) = pending.and_then(|pending| pending.answer.as_mut()) else {
                    return;
                };
                match header.body_bytes > 0
                    && answer.values.announce(part.offset, header.body_bytes)
                {
                    true => self.links[id.0].receiving = Some(header.request),
                    false => self.breach(now, id, connection, "a part of an answer out of place"),
                }
            }
            other => {
                let what = format!("an unexpected {} message", other.name());
                self.breach(now, id, connection, &what);
            }
        }
    }

    fn accepted(&mut self, now: Instant, id: LinkId, connection: u64, server: &ServerIs) {
        let link = &mut self.links[id.0];
        let found = TaskId::new(server.job.as_str(), server.task);
        if let Some(expected) = link.task.clone().filter(|expected| *expected != found) {
            let address = link.address.clone();
            let found = found.to_string();
            let expected = expected.to_string();
            for request in self.links[id.0].pending.find(|_| true) {
                let pending = self.links[id.0].pending.get_mut(request);
                let Some(doing) = pending.map(|pending| pending.kind.doing()) else { continue };
                let address = address.clone();
                let found = found.clone();
                let expected = expected.clone();
                let error = ServiceError::OtherTask { doing, address, found, expected };
                self.reply(id, request, Err(error));
            }
            return self.give_up(now, id, connection, "it is another task".to_owned());
        }
        link.task = Some(found);
        let is_same = link.server == Some(server.incarnation) && server.known;
        settings(link, server);
        link.opened(now, connection);
        if !is_same {
            link.forget_server();
            let reason = "it has restarted, or has forgotten this client";
            self.fail_all(now, id, reason, |pending| pending.was_sent && pending.kind.is_call());
        }
    }

    /// Fails the requests of a link whose server will never accept the client.
    fn refuse_all(&mut self, id: LinkId, refusal: &Refusal) {
        for request in self.links[id.0].pending.find(|_| true) {
            self.refused(id, request, refusal.clone());
        }
    }

    /// Ends a connection and tries again later.
    fn give_up(&mut self, now: Instant, id: LinkId, connection: u64, reason: String) {
        self.connections.remove(&connection);
        self.outputs.push_back(CallOutput::Disconnect { connection });
        self.link_failed(now, id, reason);
    }

    /// Ends the connection of a server that breaks the protocol, and fails the operations that wait
    /// for it.
    fn breach(&mut self, now: Instant, id: LinkId, connection: u64, what: &str) {
        let task = self.links[id.0].task_name();
        for request in self.links[id.0].pending.find(|pending| pending.was_sent) {
            let pending = self.links[id.0].pending.get_mut(request);
            let Some(doing) = pending.map(|pending| pending.kind.doing()) else { continue };
            let task = task.clone();
            let what = what.to_owned();
            self.reply(id, request, Err(ServiceError::Protocol { doing, task, what }));
        }
        self.give_up(now, id, connection, format!("it has sent {what}"));
    }

    pub(super) fn refused(&mut self, id: LinkId, request: RequestId, refusal: Refusal) {
        let link = &mut self.links[id.0];
        let task = link.task_name();
        let Some(pending) = link.pending.get_mut(request) else { return };
        let doing = pending.kind.doing();
        let error = match refusal {
            Refusal::Deadline { waited_ms, awaited } => {
                let waited = Duration::from_millis(waited_ms);
                let awaited = awaited.to_string();
                ServiceError::Timeout { doing, task, waited, awaited }
            }
            refusal => ServiceError::Refused { doing, task, refusal },
        };
        self.reply(id, request, Err(error));
    }

    fn call_ended(
        &mut self,
        now: Instant,
        id: LinkId,
        connection: u64,
        header: &Header,
        outcome: CallOutcome,
    ) {
        let link = &mut self.links[id.0];
        let task = link.task_name();
        let Some(pending) = link.pending.get_mut(header.request) else { return };
        let doing = pending.kind.doing();
        let CallCommand::Call { order, .. } = &pending.kind else {
            return self.breach(now, id, connection, "the end of a call in place of an answer");
        };
        let error = match outcome {
            CallOutcome::Done { outputs } => {
                let (names, types) = names_and_types(&outputs);
                if !order.retain {
                    return self.values_announced(now, id, connection, header, names, types);
                }
                let Ok(types) = types else {
                    return self.breach(now, id, connection, "an output of no type");
                };
                let kept = names.into_iter().zip(types).collect();
                return self.reply(id, header.request, Ok(CallReply::Kept(kept)));
            }
            CallOutcome::Failed { retry, detail } => {
                ServiceError::Failed { doing, task, retry, detail: detail.to_string() }
            }
            CallOutcome::Panicked { detail } => {
                ServiceError::Panicked { doing, task, detail: detail.to_string() }
            }
            CallOutcome::Cancelled {} => ServiceError::Cancelled { doing },
        };
        self.reply(id, header.request, Err(error));
    }

    /// Allocates memory for values of these types, which follow in answer to a request.
    fn values_announced(
        &mut self,
        now: Instant,
        id: LinkId,
        connection: u64,
        header: &Header,
        names: Vec<String>,
        types: Result<Vec<ValueType>, String>,
    ) {
        let request = header.request;
        let link = &mut self.links[id.0];
        let task = link.task_name();
        let Some(pending) = link.pending.get_mut(request) else { return };
        let Ok(types) = types else {
            return self.breach(now, id, connection, "values of no type");
        };
        let bytes = IncomingValues::bytes_of(&types).unwrap_or(u64::MAX);
        let limit = self.answer_bytes_max;
        if bytes > limit {
            // The body and its parts are discarded.
            let doing = pending.kind.doing();
            let error = ServiceError::AnswerTooLarge { doing, task, bytes, limit };
            return self.reply(id, request, Err(error));
        }
        let admission = match &pending.kind {
            CallCommand::Fetch { admission, .. } => admission.as_ref(),
            _ => None,
        };
        if let Some(Err(refusal)) = admission.map(|admission| admission.ask(bytes)) {
            return self.refused(id, request, refusal);
        }
        let Some(mut values) = IncomingValues::new(types) else {
            let doing = pending.kind.doing();
            return self.reply(id, request, Err(ServiceError::NoMemory { doing, task, bytes }));
        };
        let announced = header.body_bytes == 0 || values.announce(0, header.body_bytes);
        pending.answer = Some(IncomingAnswer { names, values });
        if !announced {
            return self.breach(now, id, connection, "more bytes than its values have");
        }
        match header.body_bytes {
            0 => self.answer_received(id, request),
            _ => self.links[id.0].receiving = Some(request),
        }
    }

    pub(super) fn body_received(&mut self, id: LinkId) {
        let link = &mut self.links[id.0];
        let Some(request) = link.receiving.take() else { return };
        let Some(pending) = link.pending.get_mut(request) else { return };
        if let Some(answer) = &mut pending.answer {
            answer.values.body_received();
        }
        self.answer_received(id, request);
    }

    /// Replies with the values of an answer if they are whole.
    fn answer_received(&mut self, id: LinkId, request: RequestId) {
        let link = &mut self.links[id.0];
        let task = link.task.clone();
        let Some(pending) = link.pending.get_mut(request) else { return };
        if !pending.answer.as_ref().is_some_and(|answer| answer.values.is_whole()) {
            return;
        }
        let Some(IncomingAnswer { names, values }) = pending.answer.take() else { return };
        let mut values: Vec<Value> = values.into_values();
        let reply = match &pending.kind {
            CallCommand::Call { .. } => CallReply::Done(names.into_iter().zip(values).collect()),
            CallCommand::Fetch { .. } => match values.pop() {
                Some(value) => CallReply::Fetched(value),
                None => return,
            },
            CallCommand::Describe => {
                let text = values.pop().map(|value| value.as_bytes().to_vec());
                let task = task.unwrap_or_else(|| TaskId::new("", 0));
                CallReply::Described(task, text.unwrap_or_default())
            }
        };
        self.reply(id, request, Ok(reply));
    }
}

fn names_and_types(outputs: &CallOutputs) -> (Vec<String>, Result<Vec<ValueType>, String>) {
    let names = outputs.items().iter().map(|output| output.name.as_str().to_owned()).collect();
    (names, outputs.items().iter().map(|output| ValueType::from_wire(&output.is)).collect())
}
