//! Requests of one link that have no answer yet.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use pushpull_common::ids::{RequestId, TaskId};
use pushpull_common::protocol::message::{self, FetchOutput, Input, NamedInput, OutputRef};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Message, limits};

use super::io::{Admission, CallCommand, CallOp};
use crate::value_body::{IncomingValues, ValueBody};

/// A request without an answer.
#[derive(Debug)]
pub(super) struct Pending {
    /// The operation that waits for the answer.
    pub(super) op: CallOp,
    pub(super) kind: CallCommand,
    pub(super) begun: Instant,
    pub(super) deadline: Option<Instant>,
    /// Whether the request was sent on the present connection. [`PendingRequests`] changes it.
    pub(super) sent: bool,
    /// Whether the request was ever sent, so that the function may have run.
    pub(super) was_sent: bool,
    /// The calls that the request acknowledges. Its answer shows that the server has read that.
    pub(super) acknowledges: Vec<u64>,
    /// The answer, while its values arrive.
    pub(super) answer: Option<IncomingAnswer>,
}

/// An answer while its values arrive.
#[derive(Debug)]
pub(super) struct IncomingAnswer {
    /// The names of the values; one without a name for a fetch or a description.
    pub(super) names: Vec<String>,
    pub(super) values: IncomingValues,
}

impl Pending {
    /// Creates a request that is to be sent.
    pub(super) fn new(
        op: CallOp,
        kind: CallCommand,
        begun: Instant,
        deadline: Option<Instant>,
    ) -> Pending {
        let sent = false;
        let was_sent = false;
        let acknowledges = Vec::new();
        let answer = None;
        Pending { op, kind, begun, deadline, sent, was_sent, acknowledges, answer }
    }
}

impl CallCommand {
    /// Returns the outputs of other calls that the request needs, with the tasks that hold them. A
    /// fetch asks `server` for its own.
    pub(super) fn needed_outputs(&self, server: Option<&TaskId>) -> Vec<(TaskId, &OutputRef)> {
        fn of_input(named: &NamedInput) -> Option<(TaskId, &OutputRef)> {
            match &named.input {
                Input::Output { job, task, of } => Some((TaskId::new(job.as_str(), *task), of)),
                _ => None,
            }
        }
        match (self, server) {
            (CallCommand::Call { order, .. }, _) => {
                order.inputs.items().iter().filter_map(of_input).collect()
            }
            (CallCommand::Fetch { of, .. }, Some(task)) => vec![(task.clone(), of)],
            _ => Vec::new(),
        }
    }

    /// Yields the outputs of [`Pending::needed_outputs`], to be changed.
    pub(super) fn needed_outputs_mut(&mut self) -> impl Iterator<Item = &mut OutputRef> {
        let (inputs, fetched) = match self {
            CallCommand::Call { order, .. } => (order.inputs.items_mut(), None),
            CallCommand::Fetch { of, .. } => (&mut [][..], Some(of)),
            CallCommand::Describe => (&mut [][..], None),
        };
        let of_inputs = inputs.iter_mut().filter_map(|named| match &mut named.input {
            Input::Output { of, .. } => Some(of),
            _ => None,
        });
        of_inputs.chain(fetched)
    }

    pub(super) fn is_call(&self) -> bool {
        matches!(self, CallCommand::Call { .. })
    }

    pub(super) fn is_fetch(&self) -> bool {
        matches!(self, CallCommand::Fetch { .. })
    }

    /// Returns the messages of the request with their bodies.
    pub(super) fn messages(&self, settled: u64, ended: Vec<u64>) -> Vec<(Message, ValueBody)> {
        match self {
            CallCommand::Describe => vec![(message::Describe {}.into(), ValueBody::default())],
            CallCommand::Fetch { of, admission } => {
                let principal = admission.as_ref().map_or("", Admission::principal);
                let fetch = FetchOutput { of: of.clone(), principal: Text::clipped(principal) };
                vec![(fetch.into(), ValueBody::default())]
            }
            CallCommand::Call { number, order } => {
                let mut parts = ValueBody::parts(&order.values).into_iter();
                let call = message::Call {
                    call: *number,
                    settled,
                    ended: List::new(ended).unwrap_or_default(),
                    depth: order.depth,
                    function: Text::clipped(order.function.as_str()),
                    device: Text::clipped(order.device.as_str()),
                    any_device: order.any_device,
                    retain: order.retain,
                    scheduled: order.scheduled,
                    inputs: order.inputs.clone(),
                };
                let mut messages = vec![(call.into(), parts.next().unwrap_or_default())];
                let mut offset = limits::PART_BYTES_MAX;
                for body in parts {
                    let part = message::InputPart { call: *number, offset };
                    offset += limits::PART_BYTES_MAX;
                    messages.push((part.into(), body));
                }
                messages
            }
        }
    }
}

/// The requests of one link that are not answered, by their ids.
///
/// A client may have any number of requests open, and each event concerns few of them. So each
/// lookup uses an index: one by deadline, and one of the requests that are to be sent.
///
/// Invariants: `by_deadline` has the requests with deadlines. `unsent` has those that were not sent
/// on the present connection. `calls_sent` and `fetches_sent` count the calls and the fetches that
/// were.
#[derive(Debug, Default)]
pub(super) struct PendingRequests {
    all: BTreeMap<u64, Pending>,
    /// The ids of the requests of calls, by call numbers.
    by_call: BTreeMap<u64, u64>,
    by_deadline: BTreeSet<(Instant, u64)>,
    unsent: UnsentRequests,
    calls_sent: usize,
    fetches_sent: usize,
    last: u64,
    /// The number of requests that were examined, for the test of the cost of an event.
    #[cfg(test)]
    pub(super) examined: std::cell::Cell<u64>,
}

/// The requests that are to be sent on the present connection.
#[derive(Debug, Default)]
struct UnsentRequests {
    calls: BTreeSet<u64>,
    fetches: BTreeSet<u64>,
    descriptions: BTreeSet<u64>,
}

impl UnsentRequests {
    /// Returns the set of the requests of this kind.
    fn of(&mut self, kind: &CallCommand) -> &mut BTreeSet<u64> {
        match kind {
            CallCommand::Call { .. } => &mut self.calls,
            CallCommand::Fetch { .. } => &mut self.fetches,
            CallCommand::Describe => &mut self.descriptions,
        }
    }
}

impl PendingRequests {
    pub(super) fn add(&mut self, pending: Pending) -> RequestId {
        self.last += 1;
        let request = self.last;
        if let CallCommand::Call { number, .. } = pending.kind {
            self.by_call.insert(number, request);
        }
        if let Some(deadline) = pending.deadline {
            self.by_deadline.insert((deadline, request));
        }
        self.unsent.of(&pending.kind).insert(request);
        self.all.insert(request, pending);
        RequestId(request)
    }

    pub(super) fn get(&self, request: RequestId) -> Option<&Pending> {
        self.all.get(&request.0)
    }

    pub(super) fn get_mut(&mut self, request: RequestId) -> Option<&mut Pending> {
        self.all.get_mut(&request.0)
    }

    pub(super) fn remove(&mut self, request: RequestId) -> Option<Pending> {
        let removed = self.all.remove(&request.0)?;
        if let CallCommand::Call { number, .. } = removed.kind {
            self.by_call.remove(&number);
        }
        if let Some(deadline) = removed.deadline {
            self.by_deadline.remove(&(deadline, request.0));
        }
        if removed.sent {
            self.calls_sent -= usize::from(removed.kind.is_call());
            self.fetches_sent -= usize::from(removed.kind.is_fetch());
        } else {
            self.unsent.of(&removed.kind).remove(&request.0);
        }
        Some(removed)
    }

    /// Marks a request as sent, and returns it.
    pub(super) fn send(&mut self, request: RequestId) -> Option<&mut Pending> {
        let pending = self.all.get_mut(&request.0)?;
        if !std::mem::replace(&mut pending.sent, true) {
            self.unsent.of(&pending.kind).remove(&request.0);
            self.calls_sent += usize::from(pending.kind.is_call());
            self.fetches_sent += usize::from(pending.kind.is_fetch());
        }
        pending.was_sent = true;
        Some(pending)
    }

    /// Marks all requests as to be sent again, because the connection has ended. Returns the calls
    /// that they have acknowledged.
    pub(super) fn disconnected(&mut self) -> Vec<u64> {
        let mut acknowledged = Vec::new();
        for (&request, pending) in &mut self.all {
            pending.sent = false;
            pending.answer = None;
            acknowledged.append(&mut pending.acknowledges);
            self.unsent.of(&pending.kind).insert(request);
        }
        self.calls_sent = 0;
        self.fetches_sent = 0;
        acknowledged
    }

    /// Returns the requests to send next, in their order. The server has `calls_max` places for
    /// calls, and `PARKED_PER_CONNECTION_MAX` for fetches of outputs of calls that have not ended.
    pub(super) fn next(&self, calls_max: usize) -> Vec<RequestId> {
        let places = calls_max.saturating_sub(self.calls_sent);
        let calls = self.unsent.calls.iter().take(places);
        let places = limits::PARKED_PER_CONNECTION_MAX.saturating_sub(self.fetches_sent);
        let fetches = self.unsent.fetches.iter().take(places);
        let all = calls.chain(fetches).chain(&self.unsent.descriptions);
        let mut next: Vec<RequestId> = all.copied().map(RequestId).collect();
        next.sort_unstable();
        self.examine(next.len());
        next
    }

    /// Returns the requests whose deadlines have passed.
    pub(super) fn late(&self, now: Instant) -> Vec<RequestId> {
        let late = self.by_deadline.iter().take_while(|(deadline, _)| *deadline <= now);
        let late: Vec<RequestId> = late.map(|&(_, request)| RequestId(request)).collect();
        self.examine(late.len());
        late
    }

    /// Returns the first deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.by_deadline.first().map(|&(deadline, _)| deadline)
    }

    /// Returns a call that is under way.
    pub(super) fn call(&self, call: u64) -> Option<&Pending> {
        self.all.get(self.by_call.get(&call)?)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the requests that satisfy a predicate. The scan examines all requests, so only
    /// events of whole connections may use it.
    pub(super) fn find(&self, of: impl Fn(&Pending) -> bool) -> Vec<RequestId> {
        self.examine(self.all.len());
        let found = self.all.iter().filter(|(_, pending)| of(pending));
        found.map(|(&request, _)| RequestId(request)).collect()
    }

    #[cfg(test)]
    fn examine(&self, requests: usize) {
        self.examined.set(self.examined.get() + requests as u64);
    }

    #[cfg(not(test))]
    fn examine(&self, _: usize) {}
}
