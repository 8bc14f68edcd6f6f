//! Ends of calls, and the answers to their clients.

use std::time::Instant;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{CallEnded, CallOutcome, CallOutputs, NamedValue};
use pushpull_common::protocol::wire::Text;

use super::call_entry::{CallEnd, CallState};
use super::calls::next_is_blocking;
use super::io::{ExecutionId, Failure, ServiceOutput};
use super::{Service, detail};
use crate::value::Value;

impl Service {
    pub(super) fn returned(
        &mut self,
        execution: ExecutionId,
        result: Result<Vec<(String, Value)>, Failure>,
    ) {
        self.fetches.drop_execution(execution);
        let Some(ended) = self.executions.remove(execution) else { return };
        let client = ended.client;
        let call = ended.call;
        let runs = self.clients.get(client).and_then(|state| state.calls.get(&call)).is_some_and(
            |entry| matches!(entry.state, CallState::Running { execution: of } if of == execution),
        );
        // Otherwise the client is forgotten, or has been told that its deadline has passed.
        if runs {
            let end = match result {
                Ok(outputs) => self.end_of_outputs(client, call, &ended.function, outputs),
                Err(failure) => end_of_failure(failure),
            };
            self.end(client, call, end);
        }
    }

    fn end_of_outputs(
        &self,
        client: Incarnation,
        call: u64,
        function: &str,
        outputs: Vec<(String, Value)>,
    ) -> CallEnd {
        let failed = |problem: String| {
            let outcome = CallOutcome::Failed { retry: false, detail: detail(problem) };
            CallEnd::Outcome(outcome, Vec::new())
        };
        let signature = self.functions.get(function).and_then(|f| f.signature.as_ref());
        if let Some(Err(mismatch)) = signature.map(|signature| signature.check_outputs(&outputs)) {
            let name = mismatch.name;
            let problem = mismatch.detail;
            return failed(format!("output {name:?} of function {function:?}: {problem}"));
        }
        let bytes = outputs.iter().map(|(_, value)| value.value_type().padded_bytes()).sum();
        let entry = self.clients.get(client).and_then(|state| state.calls.get(&call));
        let charged = entry.map_or(0, |entry| entry.bytes);
        let what = format!("the outputs of function {function:?}");
        // The function has run, so this is no refusal: a caller repeats those.
        if let Err(refusal) = self.check_bytes(client, bytes, charged, &what) {
            return failed(refusal.to_string());
        }
        let mut named = Vec::with_capacity(outputs.len());
        for (name, value) in &outputs {
            let Some(text) = Text::new(name.as_str()) else {
                return failed(format!("the name of an output is too long: {name:?}"));
            };
            named.push(NamedValue { name: text, is: value.value_type().to_wire() });
        }
        let count = named.len();
        let Some(outputs_are) = CallOutputs::new(named) else {
            return failed(format!("function {function:?} has {count} outputs, which is too many"));
        };
        let outcome = CallOutcome::Done { outputs: outputs_are };
        CallEnd::Outcome(outcome, outputs.into_iter().map(|(_, value)| value).collect())
    }

    /// Ends a call and answers its client.
    pub(super) fn end(&mut self, client: Incarnation, call: u64, end: CallEnd) {
        let Some(state) = self.clients.get_mut(client) else { return };
        let Some(entry) = state.calls.get_mut(&call) else { return };
        if let Some(deadline) = entry.deadline {
            self.deadlines.remove(&(deadline, client, call));
        }
        let was_queued = matches!(entry.state, CallState::Queued { .. });
        let bytes = match &end {
            CallEnd::Outcome(_, values) => {
                values.iter().map(|v| v.value_type().padded_bytes()).sum()
            }
            CallEnd::Refused(_) => 0,
        };
        entry.state = CallState::Ended(end);
        state.charge(call, bytes);
        if was_queued {
            state.queued.retain(|&queued| queued != call);
            if state.queued.is_empty() {
                self.run_queue.remove(client);
            }
        }
        self.answer(client, call);
        self.call_ended(client, call);
    }

    /// Acknowledges a call: its client has the answer, has cancelled the call, or has lost it with
    /// its connection. A queued call does not begin, and a running function is told to stop.
    pub(super) fn acknowledge(&mut self, client: Incarnation, call: u64) {
        let entry = self.clients.get_mut(client).and_then(|state| state.calls.get_mut(&call));
        let Some(entry) = entry else { return };
        entry.request = None;
        self.cancel(client, call);
        if let Some(state) = self.clients.get_mut(client) {
            state.acknowledge(call);
        }
    }

    /// Answers the request of a call if it has ended.
    pub(super) fn answer(&mut self, client: Incarnation, call: u64) {
        let Some(state) = self.clients.get_mut(client) else { return };
        let Some(entry) = state.calls.get_mut(&call) else { return };
        let CallState::Ended(end) = &entry.state else { return };
        let Some((connection, request)) = entry.request.take() else { return };
        match end {
            CallEnd::Refused(refusal) => {
                let refusal = refusal.clone();
                self.refuse(connection, request, refusal);
            }
            CallEnd::Outcome(outcome, values) => {
                let outcome = outcome.clone();
                let sent = if entry.retain { Vec::new() } else { values.clone() };
                self.send_values(connection, request, CallEnded { outcome }, &sent);
            }
        }
    }

    /// Ends a call that has not ended. A running function is told to stop, and gives up its place:
    /// a thread cannot be ended from outside.
    pub(super) fn cancel(&mut self, client: Incarnation, call: u64) {
        let entry = self.clients.get(client).and_then(|state| state.calls.get(&call));
        let Some(entry) = entry.filter(|entry| !entry.has_ended()) else { return };
        self.abandon(entry.execution(), entry.deadline, entry.bytes);
        self.end(client, call, CallEnd::Outcome(CallOutcome::Cancelled {}, Vec::new()));
    }

    /// Tells the function of a call that its caller has stopped waiting, if it runs.
    pub(super) fn abandon(
        &mut self,
        execution: Option<ExecutionId>,
        until: Option<Instant>,
        held: u64,
    ) {
        let Some(execution) = execution else { return };
        self.executions.abandon(execution, until, held);
        self.outputs.push_back(ServiceOutput::Cancel { execution });
    }

    /// Ends a call whose deadline has passed.
    pub(super) fn deadline_passed(&mut self, now: Instant, client: Incarnation, call: u64) {
        let Some(entry) = self.clients.get(client).and_then(|state| state.calls.get(&call)) else {
            return;
        };
        let function = &entry.function;
        let task = &self.config.task;
        let awaited = match &entry.state {
            CallState::Receiving { .. } => format!("the inputs of function {function:?}"),
            // The calls of a client begin in their order, so it waits for what the first one lacks.
            CallState::Queued { .. } => {
                let is_blocking = next_is_blocking(&self.clients, &self.functions, client);
                let is_blocking = is_blocking.unwrap_or(true);
                let reason = self.executions.place_awaited(&self.config, client, is_blocking);
                let reason = reason.unwrap_or_else(|| "other calls come first".to_owned());
                let place = if is_blocking { "a thread" } else { "a place" };
                format!("{place} for function {function:?}: {reason}")
            }
            CallState::Running { execution } => {
                let awaited = self.executions.get(*execution).and_then(|it| it.awaited.as_ref());
                let result = || format!("the result of function {function:?}");
                awaited.map_or_else(result, |what| format!("{what}, for function {function:?}"))
            }
            CallState::Ended(_) => return,
        };
        let awaited = detail(format!("{awaited} on {task}"));
        let waited_ms = now.saturating_duration_since(entry.arrived).as_millis() as u64;
        self.abandon(entry.execution(), Some(now), entry.bytes);
        self.end(client, call, CallEnd::Refused(Refusal::Deadline { waited_ms, awaited }));
    }

    /// Drops the kept outputs of calls. Their client has the answers, or does not want them.
    pub(super) fn release(&mut self, client: Incarnation, calls: &[u64]) {
        for &call in calls {
            let entry = self.clients.get_mut(client).and_then(|state| state.calls.get_mut(&call));
            let Some(entry) = entry else { continue };
            entry.retain = false;
            self.acknowledge(client, call);
        }
    }
}

fn end_of_failure(failure: Failure) -> CallEnd {
    let outcome = match failure {
        Failure::Refused(refusal) => return CallEnd::Refused(refusal),
        Failure::Failed { retry, detail: text } => {
            CallOutcome::Failed { retry, detail: detail(text) }
        }
        Failure::Panicked { detail: text } => CallOutcome::Panicked { detail: detail(text) },
        Failure::Cancelled => CallOutcome::Cancelled {},
    };
    CallEnd::Outcome(outcome, Vec::new())
}
