//! Fetches of kept outputs, and their answers.

use std::time::{Duration, Instant};

use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::protocol::message::{CallOutcome, FetchOutput, Fetched, OutputRef, Role};
use pushpull_common::protocol::{Header, Refusal, limits};

use super::call_entry::{CallEnd, CallState};
use super::io::OutputUser;
use super::parked_fetches::{ParkedFetch, Requester};
use super::{Service, ServiceOutput, detail, lease_check};
use crate::value::Value;

/// The reason for a fetch that has lost its call: the server has forgotten the client of the call.
const CLIENT_GONE: &str = "its client is gone";

/// Returns the cause of a wait for an output of another call, in words.
pub(crate) fn output_awaited(of: &OutputRef, task: &TaskId) -> String {
    format!("the output {:?} of call {} on {task}", of.output.as_str(), of.call)
}

fn no_output(of: &OutputRef, reason: &str) -> Refusal {
    let call = of.call;
    let output = detail(of.output.as_str());
    Refusal::NoOutput { call, output, detail: detail(reason) }
}

impl Service {
    pub(super) fn on_fetch(
        &mut self,
        now: Instant,
        connection: u64,
        header: &Header,
        fetch: FetchOutput,
    ) {
        if self.fetches.count_of(connection) >= limits::PARKED_PER_CONNECTION_MAX {
            let what = detail("waiting fetches");
            let limit = limits::PARKED_PER_CONNECTION_MAX as u64;
            return self.refuse(connection, header.request, Refusal::Busy { what, limit });
        }
        let Some(client) = self.connections.get(&connection).map(|at| at.client) else { return };
        let principal = self.clients.get(client).and_then(|state| state.principal.as_deref());
        let named = fetch.principal.as_str();
        let user = match principal {
            _ if named.is_empty() => OutputUser::of(client, principal, fetch.of.owner),
            None => OutputUser::PrincipalOrUnasked(named.to_owned()),
            // Another server fetches for the principal that it names, and nobody else for another.
            Some(own) if own.name == named || own.rights.roles.contains(Role::Peer {}) => {
                OutputUser::Principal(named.to_owned())
            }
            Some(_) => return self.refuse(connection, header.request, Refusal::Denied {}),
        };
        let wait = Duration::from_millis(header.deadline_ms.into());
        let fetch = ParkedFetch {
            requester: Requester::Connection(connection, header.request),
            of: fetch.of,
            user,
            arrived: now,
            deadline: (!wait.is_zero()).then(|| now + wait),
        };
        self.park(fetch);
    }

    pub(super) fn on_local_fetch(
        &mut self,
        now: Instant,
        requester: Requester,
        client: Incarnation,
        user: OutputUser,
        of: OutputRef,
        deadline: Option<Instant>,
    ) {
        if of.owner == client && self.clients.get(client).is_none() {
            // The client has called the function that fetches, so it will not come any more.
            return self.refuse_fetch(requester, no_output(&of, CLIENT_GONE));
        }
        self.park(ParkedFetch { requester, of, user, arrived: now, deadline });
    }

    /// Answers a fetch, or keeps it until its call has ended.
    fn park(&mut self, fetch: ParkedFetch) {
        if !self.serve(&fetch) {
            self.leases_at.get_or_insert(fetch.arrived + lease_check(self.config.lease));
            self.fetches.park(fetch);
        }
    }

    fn refuse_fetch(&mut self, requester: Requester, refusal: Refusal) {
        match requester {
            Requester::Connection(connection, request) => self.refuse(connection, request, refusal),
            Requester::Local(fetch, _) => {
                let result = Err(refusal);
                self.outputs.push_back(ServiceOutput::LocalFetched { fetch, result });
            }
        }
    }

    fn answer_fetch(&mut self, requester: Requester, value: Value) {
        match requester {
            Requester::Connection(connection, request) => {
                let is = value.value_type().to_wire();
                self.send_values(connection, request, Fetched { is }, [&value]);
            }
            Requester::Local(fetch, _) => {
                let result = Ok(value);
                self.outputs.push_back(ServiceOutput::LocalFetched { fetch, result });
            }
        }
    }

    /// Answers a fetch if its call has ended or will never come. Returns whether it is answered.
    fn serve(&mut self, fetch: &ParkedFetch) -> bool {
        let of = &fetch.of;
        let is_elsewhere = of.server != Incarnation(0) && of.server != self.config.incarnation;
        let refusal = match self.clients.get(of.owner) {
            _ if is_elsewhere => no_output(of, "its server has restarted"),
            // The server had accepted the client before that sent the call.
            None if of.server != Incarnation(0) => no_output(of, CLIENT_GONE),
            // The call may be on its way: a consumer may be faster than the client.
            None => return false,
            Some(owner) if !fetch.user.may_use(owner.principal.as_deref()) => {
                self.refuse_fetch(fetch.requester, Refusal::Denied {});
                return true;
            }
            Some(_) => return self.serve_from(fetch),
        };
        self.refuse_fetch(fetch.requester, refusal);
        true
    }

    /// Answers a fetch like [`Service::serve`], if the client of the call is known.
    fn serve_from(&mut self, fetch: &ParkedFetch) -> bool {
        let of = &fetch.of;
        let Some(state) = self.clients.get(of.owner) else { return false };
        let gone = |reason: &str| no_output(of, reason);
        let refusal = match state.calls.get(&of.call).map(|entry| (entry, &entry.state)) {
            None if of.call > state.settled => return false,
            None => gone("it was not kept, or it is released"),
            Some((
                entry,
                CallState::Ended(CallEnd::Outcome(CallOutcome::Done { outputs }, values)),
            )) => {
                let named = outputs.items().iter().position(|o| o.name == of.output);
                match named.and_then(|index| values.get(index)) {
                    Some(value) => {
                        let value = value.clone();
                        self.answer_fetch(fetch.requester, value);
                        return true;
                    }
                    None => {
                        let names = outputs.items().iter().map(|output| output.name.as_str());
                        let names = names.collect::<Vec<_>>().join(", ");
                        gone(&format!("function {:?} has left {names:?}", entry.function))
                    }
                }
            }
            Some((entry, CallState::Ended(end))) => {
                let how = match end {
                    CallEnd::Refused(refusal) => refusal.to_string(),
                    CallEnd::Outcome(CallOutcome::Failed { detail, .. }, _) => detail.to_string(),
                    CallEnd::Outcome(CallOutcome::Panicked { detail }, _) => {
                        format!("it panicked: {detail}")
                    }
                    CallEnd::Outcome(_, _) => "it was cancelled".to_owned(),
                };
                gone(&format!("function {:?} did not end well: {how}", entry.function))
            }
            Some(_) => return false,
        };
        self.refuse_fetch(fetch.requester, refusal);
        true
    }

    /// Answers the fetches of a call that has ended.
    pub(super) fn call_ended(&mut self, client: Incarnation, call: u64) {
        for fetch in self.fetches.take_of_call(client, call) {
            if !self.serve(&fetch) {
                self.fetches.park(fetch);
            }
        }
    }

    /// Refuses the fetches from a client that is forgotten: its calls will not come.
    pub(super) fn owner_forgotten(&mut self, client: Incarnation) {
        for fetch in self.fetches.take_of_client(client) {
            self.refuse_fetch(fetch.requester, no_output(&fetch.of, CLIENT_GONE));
        }
    }

    /// Refuses the fetches whose client has not come within a lease.
    pub(super) fn fetches_lose_clients(&mut self, now: Instant) {
        let is_known = |client| self.clients.get(client).is_some();
        for fetch in self.fetches.take_lost(now, self.config.lease, is_known) {
            self.refuse_fetch(fetch.requester, no_output(&fetch.of, CLIENT_GONE));
        }
    }

    /// Refuses the fetches whose deadlines have passed.
    pub(super) fn fetches_time_out(&mut self, now: Instant) {
        for fetch in self.fetches.take_late(now) {
            let waited_ms = now.saturating_duration_since(fetch.arrived).as_millis() as u64;
            let awaited = detail(output_awaited(&fetch.of, &self.config.task));
            let refusal = Refusal::Deadline { waited_ms, awaited };
            self.refuse_fetch(fetch.requester, refusal);
        }
    }
}
