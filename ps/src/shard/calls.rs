//! Calls: the requests of coordinators, and pushes that calls make.

use std::time::Instant;

use pushpull_common::ids::{CallEpoch, CallSource, ShardId, TokenId};
use pushpull_common::protocol::message::{CallsAre, CallsClosed, CloseCalls, OpenCalls, Operation};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{CallRef, Outcome, Refusal};

use super::Shard;
use super::intake::Intake;
use super::intake::incoming_push::IncomingPart;
use super::output::{ShardOutput, ShardOutputs};
use super::peers::peer_request::PeerRequest;
use super::peers::{Peers, unsupported};
use super::steps::Steps;
use super::variables::Variables;
use crate::call_sources::{CallSourceEntry, CallVerdict};
use crate::client_key::ClientKey;
use crate::event::Event;

/// A request of a coordinator about its calls.
#[derive(Clone, Debug)]
pub(super) enum CoordinatorRequest {
    Open(OpenCalls),
    Query { name: String },
    Close(CloseCalls),
}

impl CoordinatorRequest {
    /// Answers the request. What it changes is committed before the answer leaves.
    pub(super) fn answer(
        self,
        steps: &mut Steps,
        variables: &Variables,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        request: &PeerRequest,
    ) {
        let is_ready = variables.is_ready();
        let ready = if is_ready { Ok(()) } else { Err(Refusal::NotInitialized {}) };
        let answer = ready.and_then(|()| match self {
            CoordinatorRequest::Open(open) => {
                steps.open_calls(peers, out, request, &open).map(CallsAre::into)
            }
            CoordinatorRequest::Query { name } => {
                let calls = steps.calls.query(&name);
                if let Ok(CallsAre { source, .. }) = &calls {
                    steps.heard_of_calls(request.since, *source);
                }
                calls.map(CallsAre::into)
            }
            CoordinatorRequest::Close(CloseCalls { name, epoch }) => {
                steps.calls.close(name.as_str(), epoch).map(|()| CallsClosed {}.into())
            }
        });
        match answer {
            Ok(message) => request.answer(out, message),
            Err(refusal) => request.refuse(out, refusal),
        }
    }
}

impl Steps {
    /// Opens the calls of a coordinator. The step owner assigns the epoch.
    fn open_calls(
        &mut self,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        open: &OpenCalls,
    ) -> Result<CallsAre, Refusal> {
        let opened = self.open_calls_as(peers, out, request, open)?;
        if let Some(place) = self.calls.place_of(opened.source) {
            self.calls_heard.opened(request.since, place, request.connection);
        }
        Ok(opened)
    }

    fn open_calls_as(
        &mut self,
        peers: &mut Peers,
        out: &mut ShardOutputs,
        request: &PeerRequest,
        open: &OpenCalls,
    ) -> Result<CallsAre, Refusal> {
        let &OpenCalls { ref name, source, epoch } = open;
        let refuse = |why| Err(unsupported(request.kind, why));
        if self.is_synchronous() {
            return refuse(NOT_SYNCHRONOUS);
        }
        if name.as_str().is_empty() {
            return refuse("a coordinator has a name");
        }
        let registry = &mut peers.registry;
        if self.owner.is_none() {
            let newest = registry.newest_from_owner(request.since);
            if epoch.0 > newest.max(self.calls.newest_epoch().0) {
                return Err(Refusal::Unavailable { detail: epoch_ahead(self.id, epoch, newest) });
            }
            // What is refused takes no place.
            self.calls.check_open_as(name.as_str(), source, epoch)?;
            self.make_call_place(name.as_str(), request.since, out);
            return self.calls.open_as(name.as_str(), source, epoch);
        }
        if (source.0, epoch.0) != (0, 0) {
            return refuse("the step owner assigns sources and epochs");
        }
        // Client epochs and call epochs come from one sequence, which follows the time: a step
        // owner that has lost its state assigns none again. Those of a restored checkpoint may be
        // above.
        registry.mint_above(self.calls.newest_epoch().0);
        let epoch = registry.mint(request.since)?;
        self.make_call_place(name.as_str(), request.since, out);
        self.calls.open(name.as_str(), epoch.0.into())
    }

    /// Forgets a source of calls if a new one needs its place.
    fn make_call_place(&mut self, name: &str, now: Instant, out: &mut ShardOutputs) {
        let idle = |place| self.calls_heard.idle(now, place);
        let kept = (self.config.lease, self.config.calls_kept);
        let Some(place) = self.calls.forgettable(name, idle, kept) else { return };
        let idle = idle(place);
        if let Some(entry) = self.calls.forget_at(place).filter(CallSourceEntry::has_settled) {
            let shard = self.id;
            let coordinator = entry.name;
            out.push(ShardOutput::Event(Event::CallsForgotten { shard, coordinator, idle }));
        }
    }

    /// Records that something was heard of the calls of a source.
    fn heard_of_calls(&mut self, now: Instant, source: CallSource) {
        if let Some(place) = self.calls.place_of(source) {
            self.calls_heard.heard(now, place);
        }
    }

    /// Returns what a gradient of this call may do.
    fn check_call(
        &self,
        kind: u16,
        operation: Operation,
        call: &CallRef,
    ) -> Result<CallVerdict, Refusal> {
        match operation {
            _ if self.is_synchronous() => Err(unsupported(kind, NOT_SYNCHRONOUS)),
            Operation::Gradient {} => self.calls.check(call),
            _ => Err(unsupported(kind, "only gradients count for calls")),
        }
    }

    /// Returns the outcome of a gradient whose call has counted before. On the step owner, the
    /// token that would have paid for it is returned.
    fn repeated_outcome(
        &mut self,
        holder: Option<ClientKey>,
        token: TokenId,
        generation: u32,
    ) -> Outcome {
        self.counters.gradients_repeated.add(1);
        if let Some((owner, holder)) = self.owner.as_mut().zip(holder) {
            owner.give_back(holder, token, generation);
        }
        Outcome::Repeated {}
    }
}

impl Intake {
    /// Returns whether a part of a call's push, which no earlier connection has completed, must be
    /// received. Otherwise the part is answered, if it needs an answer.
    ///
    /// A repeated push is recognized at its first part, so that it is not applied on arrival.
    pub(super) fn counts_for_call(
        &mut self,
        peers: &mut Peers,
        steps: &mut Steps,
        out: &mut ShardOutputs,
        incoming: &IncomingPart,
        call: &CallRef,
    ) -> bool {
        let IncomingPart { request, part, .. } = incoming;
        steps.heard_of_calls(request.since, call.id.source);
        match steps.check_call(request.kind, part.operation, call) {
            Ok(CallVerdict::Counts) => true,
            Ok(CallVerdict::Repeated) => {
                self.skip_repeated_part(peers, steps, out, incoming);
                false
            }
            Err(refusal) => {
                self.refuse_push(peers, out, incoming, refusal);
                false
            }
        }
    }

    /// Skips a part of a gradient whose call has counted before. The last part is answered.
    fn skip_repeated_part(
        &mut self,
        peers: &mut Peers,
        steps: &mut Steps,
        out: &mut ShardOutputs,
        incoming: &IncomingPart,
    ) {
        let IncomingPart { request, client, part, .. } = incoming;
        let (client, sequence) = (*client, incoming.sequence());
        self.release_begun(client, sequence, part.push_slot);
        if part.whole.is_none() {
            return;
        }
        let (token, generation) = (part.token, part.generation);
        if self.is_whole(token) {
            // Another push, which is complete, pays with the token.
            return request.refuse(out, Refusal::Token { token, generation });
        }
        let outcome = steps.repeated_outcome(Some(client), token, generation);
        peers.registry.client_mut(client).window.settle(sequence, outcome);
        out.answer_push(request.connection, request.envelope, outcome, false);
    }
}

impl Shard {
    /// Drops a complete gradient whose call has settled since, and refuses one whose call is not
    /// valid any more. Returns whether it did.
    ///
    /// Complete pushes are applied one after the other, and this precedes each. So of two complete
    /// pushes of one call the second has no effect.
    pub(super) fn drop_if_repeated(&mut self, now: Instant, push_slot: u32) -> bool {
        let Some(inbox) = &mut self.intake.inbox else { return false };
        let Some(call) = inbox.arrival(push_slot).and_then(|push| push.call) else { return false };
        match self.steps.calls.check(&call) {
            Ok(CallVerdict::Counts) => return false,
            Ok(CallVerdict::Repeated) => {
                let Some((client, push)) = inbox.take(push_slot) else { return false };
                let owner = self.steps.owner.as_ref();
                let holder = owner.and_then(|owner| owner.ledger().holder_of(push.token));
                let outcome = self.steps.repeated_outcome(holder, push.token, push.generation);
                if let Some(client) = client {
                    self.settle_and_answer(now, client, &push, outcome);
                }
            }
            Err(refusal) => {
                let Shard { peers, intake, steps, out, .. } = self;
                intake.refuse_whole(peers, steps, out, push_slot, refusal);
            }
        }
        true
    }
}

/// Says that a shard cannot judge an epoch. The step owner assigned it by a faster clock, and the
/// shard has not connected to it since one of them was started.
fn epoch_ahead(shard: ShardId, epoch: CallEpoch, newest: u64) -> Detail {
    let text = format!(
        "{shard} cannot accept call epoch {epoch} yet: it expects at most {newest} until the step \
         owner has told it the time"
    );
    Detail::clipped(&text)
}

const NOT_SYNCHRONOUS: &str = "calls count in asynchronous mode";
