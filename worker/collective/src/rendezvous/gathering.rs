//! [`Gathering`]: whether the next ring forms now, and whom it waits for otherwise.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use pushpull_common::protocol::limits::{RING_MISSING_MAX, RING_SIZE_MAX};
use pushpull_common::protocol::message::RingWaits;
use pushpull_common::protocol::refusal::{Detail, Refusal};
use pushpull_common::protocol::wire::List;

use super::connections::Connections;
use super::io::RendezvousConfig;
use super::lineage::{Electorate, Lineage};
use super::places::{Claim, Places};
use super::ring::Ring;
use super::waiting_list::{Candidate, FormerRing, WaitingList};

/// The state that the formation of a ring depends on.
#[derive(Debug)]
pub(super) struct Gathering<'a> {
    pub(super) config: &'a RendezvousConfig,
    pub(super) connections: &'a Connections,
    pub(super) waiting: &'a WaitingList,
    pub(super) places: &'a Places,
    /// The present or the last ring.
    pub(super) ring: Option<&'a Ring>,
    /// The rings that the next one replaces.
    pub(super) lineage: &'a Lineage,
    /// The number of members of the first ring, as its members have named it.
    pub(super) first_size: Option<u32>,
}

/// The decision about the members that wait.
#[derive(Debug, PartialEq)]
pub(super) enum Decision {
    /// They wait on.
    Wait {
        /// The members that came and those that have not.
        waits: RingWaits,
        /// The time at which the decision changes without other members; `None` for never.
        until: Option<Instant>,
    },
    /// They form the next ring.
    Form,
    /// Those that were in a ring of another rendezvous are refused.
    RefuseFormer(Refusal),
}

/// The part of a run in which members wait.
enum Stage {
    /// A ring runs: its end comes first.
    Running,
    /// A ring is over, and members of it are here.
    Regrouping,
    /// Another rendezvous has formed the last ring.
    TakingOver(FormerRing),
    /// All members are new, or were lost.
    First { size: u32 },
}

impl Gathering<'_> {
    /// Returns whether the window runs in which more members may come, though a ring could do
    /// without them.
    pub(super) fn has_window(&self) -> bool {
        match self.stage() {
            Stage::Running => false,
            Stage::Regrouping => self.absent().is_empty() && self.shortage().is_some(),
            Stage::TakingOver(former) => !self.connections.compute_after(former.epoch),
            Stage::First { size } => self.came() >= self.first_size_min(size),
        }
    }

    /// Decides about the members that wait, of whom there is at least one. `opened` is the time
    /// since which the window has been running.
    pub(super) fn decide(&self, now: Instant, opened: Option<Instant>) -> Decision {
        match self.stage() {
            Stage::Running => {
                let absent = self.absent();
                let size = self.came() + absent.len() as u32;
                self.wait(size, absent, None)
            }
            Stage::Regrouping => self.regroup(now, opened),
            Stage::TakingOver(former) => self.take_over(now, opened, &former),
            Stage::First { size } => {
                let size_min = self.first_size_min(size);
                let window = self.config.join_window;
                let until = self.window_ends(window, opened).filter(|_| self.came() >= size_min);
                match self.came() >= size || until.is_some_and(|until| until <= now) {
                    true => Decision::Form,
                    false => self.wait(size_min, self.unclaimed(size), until),
                }
            }
        }
    }

    fn stage(&self) -> Stage {
        match self.ring {
            Some(ring) if ring.is_running() => return Stage::Running,
            Some(ring) if ring.live().next().is_some() => return Stage::Regrouping,
            Some(_) => {}
            None => {
                if let Some(former) = self.waiting.former_ring() {
                    return Stage::TakingOver(former);
                }
            }
        }
        let size = self.first_size.or(self.ring.map(Ring::size));
        Stage::First { size: size.unwrap_or(1).max(1) }
    }

    /// Nobody waits for members that are lost, unless too few are left, or those that are lost may
    /// go on by themselves.
    fn regroup(&self, now: Instant, opened: Option<Instant>) -> Decision {
        let absent = self.absent();
        let size_min = self.size_min(self.first_size.unwrap_or(RING_SIZE_MAX as u32));
        if !absent.is_empty() {
            let size = self.came() + absent.len() as u32;
            return self.wait(size.max(size_min), absent, None);
        }
        if let Some(ring) = self.shortage() {
            let until = self.window_ends(self.config.succession_window, opened);
            if until.is_some_and(|until| until <= now) {
                return Decision::RefuseFormer(self.minority(now, opened, ring));
            }
            return self.wait(self.came() + 1, self.lost(), until);
        }
        match self.came() >= size_min {
            true => Decision::Form,
            false => self.wait(size_min, self.lost(), None),
        }
    }

    /// Returns the ring of which those that wait are no quorum. A rendezvous in no member needs
    /// none: it has no successor.
    fn shortage(&self) -> Option<&Electorate> {
        self.config.serving.and_then(|_| self.lineage.shortage(self.waiting))
    }

    /// Returns the refusal of those that are no quorum of a ring.
    fn minority(&self, now: Instant, opened: Option<Instant>, ring: &Electorate) -> Refusal {
        let waited = opened.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let size = ring.size();
        let epoch = ring.epoch();
        Refusal::Deadline {
            waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
            awaited: Detail::shortened(format!(
                "half of the {size} members of ring {epoch}: {} have come",
                ring.counted(self.waiting)
            )),
        }
    }

    /// A successor cannot know whether other members still have their rendezvous. Without them it
    /// forms a ring only of a majority, so that no two parts of one ring go on.
    /// It waits for members that are known to compute, however long their step is.
    fn take_over(&self, now: Instant, opened: Option<Instant>, former: &FormerRing) -> Decision {
        let until = self.window_ends(self.config.succession_window, opened);
        let has_passed = until.is_some_and(|until| until <= now);
        if has_passed && !former.is_complete() && !former.has_majority() {
            let FormerRing { epoch, size, came, .. } = former;
            let waited = opened.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
            return Decision::RefuseFormer(Refusal::Deadline {
                waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
                awaited: Detail::shortened(format!(
                    "more than half of the {size} members of ring {epoch}: {came} have come"
                )),
            });
        }
        let size_min = self.size_min(former.size);
        match (former.is_complete() || has_passed) && self.came() >= size_min {
            true => Decision::Form,
            false => {
                let size = former.size.saturating_sub(former.gone.len() as u32);
                let until = until.filter(|_| !has_passed);
                self.wait(size.max(size_min), former.missing(), until)
            }
        }
    }

    fn wait(&self, size: u32, mut missing: Vec<u32>, until: Option<Instant>) -> Decision {
        missing.truncate(RING_MISSING_MAX);
        let missing = List::new(missing).unwrap_or_default();
        Decision::Wait { waits: RingWaits { came: self.came(), size, missing }, until }
    }

    fn came(&self) -> u32 {
        self.waiting.len() as u32
    }

    /// Returns the least number of members of a first ring, where there are this many in all.
    fn first_size_min(&self, size: u32) -> u32 {
        self.config.first_size_min.clamp(1, size.max(1))
    }

    /// Returns the least number of members of a later ring.
    fn size_min(&self, size: u32) -> u32 {
        self.config.size_min.clamp(1, size.max(1))
    }

    /// Returns when the window ends: some time after the last arrival. Members that come and go
    /// prolong it to [`WINDOWS_MAX`] times its length at most.
    fn window_ends(&self, window: Duration, opened: Option<Instant>) -> Option<Instant> {
        let longest = opened?.checked_add(window.checked_mul(WINDOWS_MAX)?)?;
        let end = self.waiting.last_arrival()?.max(opened?).checked_add(window)?;
        Some(end.min(longest))
    }

    /// Returns the indices of the ring's members that are connected and have not asked for the
    /// next.
    fn absent(&self) -> Vec<u32> {
        let live = self.ring.into_iter().flat_map(Ring::live);
        let absent = live.filter(|(connection, _)| !self.waiting.contains(*connection));
        absent.map(|(_, seat)| seat.index).collect()
    }

    /// Returns the indices of the ring's members that are lost and have not come again.
    fn lost(&self) -> Vec<u32> {
        let here: BTreeSet<&str> = self.waiting.iter().map(|(_, of)| of.join.id.as_str()).collect();
        let seats = self.ring.into_iter().flat_map(Ring::seats);
        let lost = seats.filter(|seat| !here.contains(seat.id.as_str()));
        lost.map(|seat| seat.index).collect()
    }

    /// Returns the indices of a first ring that nobody would have if it formed now.
    fn unclaimed(&self, size: u32) -> Vec<u32> {
        let claims: Vec<Claim<'_>> = self.waiting.iter().map(|(_, of)| of.claim()).collect();
        let claimed: BTreeSet<u32> = self.places.assign(&claims).into_iter().collect();
        let missing = size.saturating_sub(self.came()) as usize;
        (0..size).filter(|index| !claimed.contains(index)).take(missing).collect()
    }
}

impl Candidate {
    /// Returns the claim of the member to an index.
    pub(super) fn claim(&self) -> Claim<'_> {
        Claim { id: self.join.id.as_str(), index: self.join.index }
    }
}

/// The longest window, in join windows.
const WINDOWS_MAX: u32 = 4;
