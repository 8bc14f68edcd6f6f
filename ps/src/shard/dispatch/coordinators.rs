//! The requests of coordinators.

use std::time::Instant;

use pushpull_common::ids::{CoordinatorEpoch, ShardId};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{
    CloseCoordinator, CoordinatorClosed, CoordinatorIs, OpenCoordinator,
};
use pushpull_common::protocol::refusal::Detail;

use crate::coordinators::CoordinatorEntry;
use crate::event::Event;
use crate::shard::Shard;
use crate::shard::output::ShardOutput;
use crate::shard::request::{PeerRequest, unsupported};
use crate::shard::steps::NOT_SYNCHRONOUS;

/// A request of a coordinator.
#[derive(Clone, Debug)]
pub(super) enum CoordinatorRequest {
    Open(OpenCoordinator),
    Query { name: String },
    Close(CloseCoordinator),
}

impl Shard {
    /// Answers a coordinator. What its request changes is committed before the answer leaves.
    pub(super) fn answer_coordinator(&mut self, request: &PeerRequest, asked: CoordinatorRequest) {
        let is_ready = self.variables.is_ready();
        let ready = if is_ready { Ok(()) } else { Err(Refusal::NotInitialized {}) };
        let answer = ready.and_then(|()| match asked {
            CoordinatorRequest::Open(open) => {
                self.open_coordinator(request, &open).map(CoordinatorIs::into)
            }
            CoordinatorRequest::Query { name } => {
                let coordinators = self.steps.coordinators.query(&name);
                if let Ok(CoordinatorIs { coordinator, .. }) = &coordinators {
                    self.steps.heard_of_coordinator(request.since, *coordinator);
                }
                coordinators.map(CoordinatorIs::into)
            }
            CoordinatorRequest::Close(CloseCoordinator { name, epoch }) => self
                .steps
                .coordinators
                .close(name.as_str(), epoch)
                .map(|()| CoordinatorClosed {}.into()),
        });
        match answer {
            Ok(message) => request.answer(&mut self.out, message),
            Err(refusal) => request.refuse(&mut self.out, refusal),
        }
    }

    /// Opens a coordinator. The step owner assigns the epoch.
    fn open_coordinator(
        &mut self,
        request: &PeerRequest,
        open: &OpenCoordinator,
    ) -> Result<CoordinatorIs, Refusal> {
        let opened = self.open_coordinator_as(request, open)?;
        let steps = &mut self.steps;
        if let Some(place) = steps.coordinators.place_of(opened.coordinator) {
            steps.coordinators_heard.opened(request.since, place, request.connection);
        }
        Ok(opened)
    }

    fn open_coordinator_as(
        &mut self,
        request: &PeerRequest,
        open: &OpenCoordinator,
    ) -> Result<CoordinatorIs, Refusal> {
        let &OpenCoordinator { ref name, coordinator, epoch } = open;
        let refuse = |why| Err(unsupported(request.kind, why));
        if self.steps.is_synchronous() {
            return refuse(NOT_SYNCHRONOUS);
        }
        let name = name.as_str();
        if name.is_empty() {
            return refuse("a coordinator has a name");
        }
        let coordinators = &self.steps.coordinators;
        let registry = &mut self.peers.registry;
        if self.steps.owner.is_none() {
            let newest = registry.newest_from_owner(request.since);
            if epoch.0 > newest.max(coordinators.newest_epoch().0) {
                return Err(Refusal::Unavailable { detail: epoch_ahead(self.id, epoch, newest) });
            }
            // What is refused takes no place.
            coordinators.check_open_as(name, coordinator, epoch)?;
            self.make_coordinator_place(name, request.since);
            return self.steps.coordinators.open_as(name, coordinator, epoch);
        }
        if (coordinator.0, epoch.0) != (0, 0) {
            return refuse("the step owner assigns ids and epochs");
        }
        // Client epochs and coordinator epochs come from one sequence, which follows the time: a
        // step owner that has lost its state assigns none again. Those of a restored checkpoint may
        // be above.
        registry.mint_above(coordinators.newest_epoch().0);
        let epoch = registry.mint(request.since)?;
        self.make_coordinator_place(name, request.since);
        self.steps.coordinators.open(name, epoch.0.into())
    }

    /// Forgets a coordinator if a new one needs its place.
    fn make_coordinator_place(&mut self, name: &str, now: Instant) {
        let steps = &mut self.steps;
        let idle = |place| steps.coordinators_heard.idle(now, place);
        let lease = self.config.lease;
        let kept = self.config.effects_kept;
        let found = steps.coordinators.forgettable(name, idle, lease, kept);
        let Some(place) = found else { return };
        let idle = idle(place);
        if let Some(entry) =
            steps.coordinators.forget_at(place).filter(CoordinatorEntry::has_settled)
        {
            let shard = self.id;
            let coordinator = entry.name;
            let event = Event::CoordinatorForgotten { shard, coordinator, idle };
            self.out.push(ShardOutput::Event(event));
        }
    }
}

/// Says that a shard cannot judge an epoch. The step owner assigned it by a faster clock, and the
/// shard has not connected to it since one of them was started.
fn epoch_ahead(shard: ShardId, epoch: CoordinatorEpoch, newest: u64) -> Detail {
    let text = format!(
        "{shard} cannot accept coordinator epoch {epoch} yet: it expects at most {newest} until the step \
         owner has told it the time"
    );
    Detail::clipped(&text)
}
