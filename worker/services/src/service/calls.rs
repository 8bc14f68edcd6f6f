//! Calls of a service: their arrival, their queue and their begin.

use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::protocol::message::{Call, Input, InputPart};
use pushpull_common::protocol::{Header, Refusal, limits};

use super::call_entry::{CallEntry, CallState};
use super::clients::Clients;
use super::io::{ExecutionId, ExecutionOrder, InputSource, ServiceOutput};
use super::{Service, detail};
use crate::device_name::find_device;
use crate::function_table::FunctionTable;
use crate::value::ValueType;
use crate::value_body::IncomingValues;

/// The most calls of one client whose outputs stay on a server, beside the limit of their bytes.
const RETAINED_MAX: usize = 1024;

/// A call that was checked: its order, and the values that arrive in its body.
struct CheckedCall {
    order: Box<ExecutionOrder>,
    /// The types of the values in the body.
    types: Vec<ValueType>,
    /// The indices of the inputs that these values are.
    values: Vec<usize>,
    bytes: u64,
}

impl Service {
    pub(super) fn on_call(&mut self, now: Instant, connection: u64, header: &Header, call: Call) {
        let Some(client) = self.connections.get(&connection).map(|at| at.client) else { return };
        let request = header.request;
        let Some(state) = self.clients.get_mut(client) else { return };
        let passed = state.settle(call.settled.min(call.call.saturating_sub(1)));
        let ended = call.ended.items().iter().copied();
        passed.into_iter().chain(ended).for_each(|number| self.acknowledge(client, number));
        let Some(state) = self.clients.get_mut(client) else { return };
        if let Some(entry) = state.calls.get_mut(&call.call) {
            // The client has lost its connection, or the answer. Inputs that it sends again are
            // discarded, unless they had not all arrived: then the entry went with the connection.
            if matches!(entry.state, CallState::Receiving { .. }) {
                return self.refuse(connection, request, misplaced(0, header.body_bytes, 0));
            }
            entry.request = Some((connection, request));
            return self.answer(client, call.call);
        }
        match self.check(now, client, header, &call) {
            Ok(checked) => self.accept(now, connection, header, &call, checked),
            Err(refusal) => self.refuse(connection, request, refusal),
        }
    }

    fn check(
        &self,
        now: Instant,
        client: Incarnation,
        header: &Header,
        call: &Call,
    ) -> Result<CheckedCall, Refusal> {
        let config = &self.config;
        let state = self.clients.get(client).ok_or(Refusal::Stopping {})?;
        // A nested call is part of one that a server has accepted.
        if self.draining && call.depth == 0 {
            return Err(Refusal::Stopping {});
        }
        if call.call <= state.settled {
            return Err(Refusal::Settled { call: call.call, settled: state.settled });
        }
        if state.unacknowledged() >= config.calls_max {
            let what = detail("calls at once");
            let limit = config.calls_max as u64;
            return Err(Refusal::Busy { what, limit });
        }
        if state.calls.len() >= config.calls_max + RETAINED_MAX {
            let what = detail("calls with retained outputs");
            let limit = RETAINED_MAX as u64;
            return Err(Refusal::Busy { what, limit });
        }
        if call.depth > limits::CALL_DEPTH_MAX {
            return Err(Refusal::Depth { depth: call.depth, limit: limits::CALL_DEPTH_MAX });
        }
        let name = call.function.as_str();
        // Nobody learns which functions there are that it may not call.
        let principal = state.principal.as_deref();
        if principal.is_some_and(|principal| !principal.rights.permit_call(name)) {
            return Err(Refusal::Denied {});
        }
        let Some(function) = self.functions.get(name) else {
            let known = detail(self.functions.names().join(", "));
            return Err(Refusal::UnknownFunction { function: detail(name), known });
        };
        let device = call.device.as_str();
        let found = find_device(device, call.any_device, &config.task, &config.devices);
        let device = found.map_err(|reason| Refusal::NoDevice {
            device: detail(device),
            detail: detail(reason),
        })?;
        let unreturned = self.executions.unreturned(now, client, name);
        if unreturned >= config.unreturned_max {
            let executions = unreturned as u32;
            return Err(Refusal::Unreturned { function: detail(name), executions });
        }
        let unsuitable = |input: &str, problem: String| Refusal::Input {
            function: detail(name),
            input: detail(input),
            detail: detail(problem),
        };
        let mut types = Vec::new();
        let mut values = Vec::new();
        let mut inputs = Vec::new();
        for (index, named) in call.inputs.items().iter().enumerate() {
            let input = named.name.as_str();
            if inputs.iter().any(|(other, _)| other == input) {
                return Err(unsuitable(input, "it is given twice".to_owned()));
            }
            let source = match &named.input {
                Input::Value { is } => {
                    let is = ValueType::from_wire(is).map_err(|why| unsuitable(input, why))?;
                    values.push(index);
                    types.push(is);
                    // Replaced once the body is whole.
                    InputSource::Variable(String::new())
                }
                Input::Variable { variable } => InputSource::Variable(variable.as_str().to_owned()),
                Input::Output { of, .. } if self.is_of_others(client, of.owner) => {
                    return Err(Refusal::Denied {});
                }
                Input::Output { job, task, of } => {
                    InputSource::Output { task: TaskId::new(job.as_str(), *task), of: of.clone() }
                }
            };
            inputs.push((input.to_owned(), source));
        }
        if let Some(signature) = &function.signature {
            let of_value = |index: usize| {
                values.iter().position(|&value| value == index).map(|position| &types[position])
            };
            let named = inputs.iter().enumerate();
            let named = named.map(|(index, (input, _))| (&input[..], of_value(index)));
            signature
                .check_inputs(named)
                .map_err(|mismatch| unsuitable(&mismatch.name, mismatch.detail))?;
        }
        let bytes = IncomingValues::bytes_of(&types).unwrap_or(u64::MAX);
        // A refusal for memory is repeated, because it may pass. This one never does.
        let most = config.bytes_max.min(config.total_bytes_max);
        let largest = values.iter().zip(&types).max_by_key(|(_, of)| of.padded_bytes());
        if let Some((&index, _)) = largest.filter(|_| bytes > most) {
            let problem = format!(
                "the inputs need {bytes} bytes, and a client may use {most} on this server"
            );
            return Err(unsuitable(&inputs[index].0, problem));
        }
        self.check_bytes(client, bytes, 0, "the inputs")?;
        if header.body_bytes > bytes {
            return Err(misplaced(0, header.body_bytes, bytes));
        }
        let wait = Duration::from_millis(header.deadline_ms.into());
        let order = ExecutionOrder {
            execution: ExecutionId(0),
            function: name.to_owned(),
            client,
            principal: self.clients.get(client).and_then(|state| state.principal.clone()),
            call: call.call,
            depth: call.depth,
            scheduled: call.scheduled,
            device,
            deadline: (!wait.is_zero()).then(|| now + wait),
            inputs,
        };
        Ok(CheckedCall { order: Box::new(order), types, values, bytes })
    }

    fn accept(
        &mut self,
        now: Instant,
        connection: u64,
        header: &Header,
        call: &Call,
        checked: CheckedCall,
    ) {
        let CheckedCall { order, types, values, bytes } = checked;
        let client = order.client;
        let number = order.call;
        let deadline = order.deadline;
        let Some(mut incoming) = IncomingValues::new(types) else {
            let what = detail("the inputs, for which the system has no memory,");
            let refusal = Refusal::Memory { what, bytes, left: 0 };
            return self.refuse(connection, header.request, refusal);
        };
        incoming.announce(0, header.body_bytes);
        let entry = CallEntry {
            function: order.function.clone(),
            retain: call.retain,
            deadline,
            arrived: now,
            request: Some((connection, header.request)),
            acknowledged: false,
            bytes,
            state: CallState::Receiving { connection, incoming, order, values },
        };
        let Some(state) = self.clients.get_mut(client) else { return };
        state.bytes += bytes;
        state.calls.insert(number, entry);
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, client, number));
        }
        match header.body_bytes {
            0 => self.inputs_received(client, number),
            _ => {
                if let Some(at) = self.connections.get_mut(&connection) {
                    at.receiving = Some(number);
                }
            }
        }
    }

    pub(super) fn on_part(
        &mut self,
        connection: u64,
        client: Incarnation,
        header: &Header,
        part: &InputPart,
    ) {
        let entry = self.clients.get_mut(client).and_then(|state| state.calls.get_mut(&part.call));
        // Parts of a call that was refused, has ended or is executed already are discarded.
        let Some(CallEntry {
            state: CallState::Receiving { connection: from, incoming, .. }, ..
        }) = entry
        else {
            return;
        };
        if *from != connection {
            return;
        }
        if header.body_bytes == 0 || !incoming.announce(part.offset, header.body_bytes) {
            let refusal = misplaced(part.offset, header.body_bytes, 0);
            self.drop_call(client, part.call);
            return self.refuse(connection, header.request, refusal);
        }
        if let Some(at) = self.connections.get_mut(&connection) {
            at.receiving = Some(part.call);
        }
    }

    pub(super) fn body_received(&mut self, connection: u64) {
        let Some(at) = self.connections.get_mut(&connection) else { return };
        let Some(call) = at.receiving.take() else { return };
        let client = at.client;
        let entry = self.clients.get_mut(client).and_then(|state| state.calls.get_mut(&call));
        if let Some(CallEntry { state: CallState::Receiving { incoming, .. }, .. }) = entry {
            incoming.body_received();
            self.inputs_received(client, call);
        }
    }

    /// Queues a call if its inputs are whole.
    fn inputs_received(&mut self, client: Incarnation, call: u64) {
        let Some(state) = self.clients.get_mut(client) else { return };
        let Some(entry) = state.calls.get_mut(&call) else { return };
        let is_whole = |state: &CallState| matches!(state, CallState::Receiving { incoming, .. } if incoming.is_whole());
        if !is_whole(&entry.state) {
            return;
        }
        let placeholder = CallState::Running { execution: ExecutionId(0) };
        let CallState::Receiving { incoming, mut order, values, .. } =
            std::mem::replace(&mut entry.state, placeholder)
        else {
            return;
        };
        for (index, value) in values.into_iter().zip(incoming.into_values()) {
            order.inputs[index].1 = InputSource::Value(value);
        }
        entry.state = CallState::Queued { order };
        state.queued.push_back(call);
        self.run_queue.add(client);
    }

    /// Runs queued calls while threads are free.
    pub(super) fn run_queued(&mut self) {
        loop {
            let next_is_blocking =
                |client| next_is_blocking(&self.clients, &self.functions, client);
            let may_run = |client| {
                let blocking = next_is_blocking(client);
                let may_begin = |it| self.executions.may_begin(&self.config, client, it);
                blocking.is_some_and(may_begin)
            };
            let Some(client) = self.run_queue.next(may_run) else { return };
            let blocking = next_is_blocking(client).unwrap_or(true);
            self.run_next(client, blocking);
        }
    }

    fn run_next(&mut self, client: Incarnation, blocking: bool) {
        let Some(state) = self.clients.get_mut(client) else { return };
        let Some(call) = state.queued.pop_front() else { return };
        if state.queued.is_empty() {
            self.run_queue.remove(client);
        }
        let Some(entry) = state.calls.get_mut(&call) else { return };
        let execution = self.executions.begin(client, call, &entry.function, blocking);
        let running = CallState::Running { execution };
        let CallState::Queued { mut order } = std::mem::replace(&mut entry.state, running) else {
            return;
        };
        order.execution = execution;
        self.outputs.push_back(ServiceOutput::Execute(order));
    }

    /// Charges an input that arrives from elsewhere, before its memory is allocated. The charge
    /// ends when the function returns, like the charge of the inputs in the call itself.
    pub(crate) fn charge_input(
        &mut self,
        execution: ExecutionId,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let of = self.executions.get(execution).map(|it| (it.client, it.call, it.function.clone()));
        // A call that has ended needs no input. Nobody hears of the refusal.
        let (client, call, function) = of.ok_or(Refusal::Stopping {})?;
        let entry = self.clients.get(client).and_then(|state| state.calls.get(&call));
        let charged = entry.filter(|entry| entry.execution() == Some(execution));
        let charged = charged.map(|entry| entry.bytes).ok_or(Refusal::Stopping {})?;
        let what = format!("the inputs of function {function:?}");
        self.check_bytes(client, bytes, 0, &what)?;
        if let Some(state) = self.clients.get_mut(client) {
            state.charge(call, charged + bytes);
        }
        Ok(())
    }

    /// Checks that a client may be charged `bytes` in place of `charged`: that both its budget and
    /// the total of all clients allow it.
    pub(super) fn check_bytes(
        &self,
        client: Incarnation,
        bytes: u64,
        charged: u64,
        what: &str,
    ) -> Result<(), Refusal> {
        let own = self.clients.get(client).map_or(0, |state| state.bytes);
        let own = (own + self.executions.held(client)).saturating_sub(charged);
        let all = (self.clients.bytes() + self.executions.held_by_all()).saturating_sub(charged);
        let left = self.config.bytes_max.saturating_sub(own);
        let left_of_all = self.config.total_bytes_max.saturating_sub(all);
        if bytes <= left.min(left_of_all) {
            return Ok(());
        }
        let what = match left <= left_of_all {
            true => detail(what),
            false => detail(format!("{what}, beside those of other clients,")),
        };
        Err(Refusal::Memory { what, bytes, left: left.min(left_of_all) })
    }
}

/// Returns whether the function of a client's next call blocks, if a call is queued.
pub(super) fn next_is_blocking(
    clients: &Clients,
    functions: &FunctionTable,
    client: Incarnation,
) -> Option<bool> {
    let state = clients.get(client)?;
    let entry = state.calls.get(state.queued.front()?)?;
    Some(functions.get(&entry.function)?.is_blocking())
}

/// Returns the refusal of bytes at a wrong place of the inputs.
fn misplaced(offset: u64, bytes: u64, limit: u64) -> Refusal {
    Refusal::Range { offset, bytes, limit }
}
