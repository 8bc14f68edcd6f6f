//! What callers wait for on one link.

use std::collections::BTreeMap;
use std::time::Instant;

use pushpull_common::ids::{RequestId, TaskId};
use pushpull_common::protocol::message::{self, FetchOutput, Input, NamedInput, OutputRef};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Message, limits};

use super::io::{CallCommand, CallOp};
use crate::services::value_body::{IncomingValues, ValueBody};

/// A request that is not answered.
#[derive(Debug)]
pub(super) struct Pending {
    /// Who waits.
    pub(super) op: CallOp,
    pub(super) kind: CallCommand,
    pub(super) begun: Instant,
    pub(super) deadline: Option<Instant>,
    /// Whether it was sent on the present connection.
    pub(super) sent: bool,
    /// Whether it was ever sent: the function may have run.
    pub(super) was_sent: bool,
    /// The calls that it acknowledges. Its answer shows that the server knows.
    pub(super) acknowledges: Vec<u64>,
    /// The answer, whose values arrive.
    pub(super) answer: Option<IncomingAnswer>,
}

/// An answer whose values arrive.
#[derive(Debug)]
pub(super) struct IncomingAnswer {
    /// The names of the values; one without a name for a fetch or a description.
    pub(super) names: Vec<String>,
    pub(super) values: IncomingValues,
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
            (CallCommand::Fetch { of }, Some(task)) => vec![(task.clone(), of)],
            _ => Vec::new(),
        }
    }

    /// Yields the same outputs, to be changed.
    pub(super) fn needed_outputs_mut(&mut self) -> impl Iterator<Item = &mut OutputRef> {
        let (inputs, fetched) = match self {
            CallCommand::Call { order, .. } => (order.inputs.items_mut(), None),
            CallCommand::Fetch { of } => (&mut [][..], Some(of)),
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

    /// Returns the messages of the request with their bodies.
    pub(super) fn messages(&self, settled: u64, ended: Vec<u64>) -> Vec<(Message, ValueBody)> {
        match self {
            CallCommand::Describe => vec![(message::Describe {}.into(), ValueBody::default())],
            CallCommand::Fetch { of } => {
                vec![(FetchOutput { of: of.clone() }.into(), ValueBody::default())]
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
#[derive(Debug, Default)]
pub(super) struct PendingRequests {
    all: BTreeMap<u64, Pending>,
    /// The requests of calls, by the numbers of these.
    by_call: BTreeMap<u64, u64>,
    last: u64,
}

impl PendingRequests {
    pub(super) fn add(&mut self, pending: Pending) -> RequestId {
        self.last += 1;
        if let CallCommand::Call { number, .. } = pending.kind {
            self.by_call.insert(number, self.last);
        }
        self.all.insert(self.last, pending);
        RequestId(self.last)
    }

    pub(super) fn get_mut(&mut self, request: RequestId) -> Option<&mut Pending> {
        self.all.get_mut(&request.0)
    }

    pub(super) fn remove(&mut self, request: RequestId) -> Option<Pending> {
        let removed = self.all.remove(&request.0)?;
        if let CallCommand::Call { number, .. } = removed.kind {
            self.by_call.remove(&number);
        }
        Some(removed)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (RequestId, &Pending)> {
        self.all.iter().map(|(&request, pending)| (RequestId(request), pending))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (RequestId, &mut Pending)> {
        self.all.iter_mut().map(|(&request, pending)| (RequestId(request), pending))
    }

    /// Returns a call that is under way.
    pub(super) fn call(&self, call: u64) -> Option<&Pending> {
        self.all.get(self.by_call.get(&call)?)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the requests that satisfy a predicate.
    pub(super) fn find(&self, of: impl Fn(&Pending) -> bool) -> Vec<RequestId> {
        self.iter().filter(|(_, pending)| of(pending)).map(|(request, _)| request).collect()
    }
}
