//! Calls: the requests of coordinators, and pushes that calls make.

use std::time::Instant;

use pushpull_common::ids::{CallEpoch, ShardId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{CallsAre, CallsClosed, CloseCalls, OpenCalls};
use pushpull_common::protocol::refusal::Detail;

use crate::call_sources::CallSourceEntry;
use crate::event::Event;
use crate::shard::Shard;
use crate::shard::output::ShardOutput;
use crate::shard::request::{PeerRequest, unsupported};
use crate::shard::steps::NOT_SYNCHRONOUS;

/// A request of a coordinator about its calls.
#[derive(Clone, Debug)]
pub(super) enum CoordinatorRequest {
    Open(OpenCalls),
    Query { name: String },
    Close(CloseCalls),
}

impl Shard {
    /// Answers a coordinator. What its request changes is committed before the answer leaves.
    pub(super) fn answer_coordinator(&mut self, request: &PeerRequest, asked: CoordinatorRequest) {
        let is_ready = self.variables.is_ready();
        let ready = if is_ready { Ok(()) } else { Err(Refusal::NotInitialized {}) };
        let answer = ready.and_then(|()| match asked {
            CoordinatorRequest::Open(open) => self.open_calls(request, &open).map(CallsAre::into),
            CoordinatorRequest::Query { name } => {
                let calls = self.steps.calls.query(&name);
                if let Ok(CallsAre { source, .. }) = &calls {
                    self.steps.heard_of_calls(request.since, *source);
                }
                calls.map(CallsAre::into)
            }
            CoordinatorRequest::Close(CloseCalls { name, epoch }) => {
                self.steps.calls.close(name.as_str(), epoch).map(|()| CallsClosed {}.into())
            }
        });
        match answer {
            Ok(message) => request.answer(&mut self.out, message),
            Err(refusal) => request.refuse(&mut self.out, refusal),
        }
    }

    /// Opens the calls of a coordinator. The step owner assigns the epoch.
    fn open_calls(&mut self, request: &PeerRequest, open: &OpenCalls) -> Result<CallsAre, Refusal> {
        let opened = self.open_calls_as(request, open)?;
        let steps = &mut self.steps;
        if let Some(place) = steps.calls.place_of(opened.source) {
            steps.calls_heard.opened(request.since, place, request.connection);
        }
        Ok(opened)
    }

    fn open_calls_as(
        &mut self,
        request: &PeerRequest,
        open: &OpenCalls,
    ) -> Result<CallsAre, Refusal> {
        let &OpenCalls { ref name, source, epoch } = open;
        let refuse = |why| Err(unsupported(request.kind, why));
        if self.steps.is_synchronous() {
            return refuse(NOT_SYNCHRONOUS);
        }
        let name = name.as_str();
        if name.is_empty() {
            return refuse("a coordinator has a name");
        }
        let calls = &self.steps.calls;
        let registry = &mut self.peers.registry;
        if self.steps.owner.is_none() {
            let newest = registry.newest_from_owner(request.since);
            if epoch.0 > newest.max(calls.newest_epoch().0) {
                return Err(Refusal::Unavailable { detail: epoch_ahead(self.id, epoch, newest) });
            }
            // What is refused takes no place.
            calls.check_open_as(name, source, epoch)?;
            self.make_call_place(name, request.since);
            return self.steps.calls.open_as(name, source, epoch);
        }
        if (source.0, epoch.0) != (0, 0) {
            return refuse("the step owner assigns sources and epochs");
        }
        // Client epochs and call epochs come from one sequence, which follows the time: a step
        // owner that has lost its state assigns none again. Those of a restored checkpoint may be
        // above.
        registry.mint_above(calls.newest_epoch().0);
        let epoch = registry.mint(request.since)?;
        self.make_call_place(name, request.since);
        self.steps.calls.open(name, epoch.0.into())
    }

    /// Forgets a source of calls if a new one needs its place.
    fn make_call_place(&mut self, name: &str, now: Instant) {
        let steps = &mut self.steps;
        let idle = |place| steps.calls_heard.idle(now, place);
        let kept = (self.config.lease, self.config.calls_kept);
        let Some(place) = steps.calls.forgettable(name, idle, kept) else { return };
        let idle = idle(place);
        if let Some(entry) = steps.calls.forget_at(place).filter(CallSourceEntry::has_settled) {
            let shard = self.id;
            let coordinator = entry.name;
            let event = Event::CallsForgotten { shard, coordinator, idle };
            self.out.push(ShardOutput::Event(event));
        }
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
