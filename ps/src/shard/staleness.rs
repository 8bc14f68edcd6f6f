//! How stale a gradient is on this shard.

use pushpull_common::protocol::message::Operation;

use super::Shard;
use crate::inbox::Arrival;
use crate::optimizer::ApplyAt;

/// How a push is taken, decided when its first byte is applied.
///
/// That is before it is whole, if it is applied as its parts come. Nothing is committed in between,
/// or the draft is dropped: so the count of gradients, and the staleness with it, are the same at
/// its commit.
#[derive(Debug)]
pub(super) struct Treatment {
    /// Which update it is.
    pub(super) at: ApplyAt,
    /// How many gradients the shard has applied since it gave the values that this one was computed
    /// from; `None` if nobody knows.
    pub(super) staleness: Option<u64>,
}

impl Default for Treatment {
    fn default() -> Treatment {
        Treatment { at: ApplyAt::new(0, 0), staleness: None }
    }
}

impl Shard {
    /// How the push in a room is to be taken, if it is applied next.
    pub(super) fn treatment_of(&self, room: u32) -> Treatment {
        let push = self.inbox.as_ref().and_then(|inbox| inbox.arrival(room));
        let Some(push) = push.filter(|push| push.operation == Operation::Gradient {}) else {
            return Treatment::default();
        };
        let at = ApplyAt::new(self.gradients + 1, push.step.0);
        Treatment { at, staleness: self.staleness_of(push) }
    }

    fn staleness_of(&self, push: &Arrival) -> Option<u64> {
        match &self.owner {
            // Every gradient has a share here, so steps are gradients. Unlike the client's own count
            // the step outlives this process, and cannot be before the grant.
            Some(owner) => Some(owner.staleness(push.token, push.step)),
            // Nobody can have read what has not been made.
            None => push.read.map(|read| self.gradients.saturating_sub(read)),
        }
    }

    /// A gradient was applied as told.
    pub(super) fn count_staleness(&self, treatment: &Treatment) {
        debug_assert_eq!(treatment.at.count, self.gradients, "nothing came in between");
        match treatment.staleness {
            Some(staleness) => self.counters.staleness.add(staleness),
            None => self.counters.staleness_unknown.add(1),
        }
    }
}
