//! The coordinators that are open on a shard: for each its newest epoch, and which of its effects
//! have settled, so that an effect that is pushed again counts once.

use std::time::Duration;

use pushpull_checkpoint::SavedCoordinator;
use pushpull_common::effect_window::{EffectWindow, Settlement};
use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber};
use pushpull_common::protocol::limits::COORDINATORS_MAX;
use pushpull_common::protocol::message::CoordinatorIs;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{EffectRef, Refusal};
use pushpull_store::planted::{Bug, PlantedBugs};

mod settled_digests;

pub(crate) use settled_digests::SettledDigests;

/// An open coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CoordinatorEntry {
    /// The coordinator's name.
    pub(crate) name: String,
    pub(crate) coordinator: CoordinatorId,
    /// The newest epoch. Effects of others are refused.
    pub(crate) epoch: CoordinatorEpoch,
    pub(crate) window: EffectWindow,
    pub(crate) digests: SettledDigests,
}

impl CoordinatorEntry {
    /// Returns the coordinator as a client is told about it.
    pub(crate) fn answer(&self) -> CoordinatorIs {
        let &CoordinatorEntry { coordinator, epoch, window, digests, .. } = self;
        let settled = window.settled();
        let window = window.bits();
        let SettledDigests { first: first_digest, settled: (digest_of, digest), .. } = digests;
        CoordinatorIs { coordinator, epoch, settled, window, first_digest, digest_of, digest }
    }

    /// Returns whether an effect has settled, so that the entry says more than none would.
    pub(crate) fn has_settled(&self) -> bool {
        self.window != EffectWindow::default()
    }

    /// Returns the entry that a checkpoint has; `None` if no shard can have it.
    pub(crate) fn restored(saved: &SavedCoordinator) -> Option<CoordinatorEntry> {
        let settled = (EffectNumber(saved.digest_of), saved.digest);
        Some(CoordinatorEntry {
            name: saved.name.clone(),
            coordinator: CoordinatorId(saved.coordinator),
            epoch: CoordinatorEpoch(saved.epoch),
            window: saved.effects()?,
            digests: SettledDigests { first: saved.first_digest, settled, ahead: settled },
        })
    }
}

impl From<&CoordinatorEntry> for SavedCoordinator {
    fn from(entry: &CoordinatorEntry) -> SavedCoordinator {
        let CoordinatorEntry { name, coordinator, epoch, window, digests } = entry;
        SavedCoordinator {
            name: name.clone(),
            coordinator: coordinator.0,
            epoch: epoch.0,
            settled: window.settled().0,
            window: window.bits(),
            first_digest: digests.first,
            digest_of: digests.settled.0.0,
            digest: digests.settled.1,
        }
    }
}

/// The verdict of a shard on a push of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EffectVerdict {
    /// The effect has not settled: the push counts.
    Counts,
    /// The effect has settled: the push changes nothing.
    Repeated,
}

/// The coordinators that are open on a shard.
///
/// The step owner assigns ids and epochs, both from one ascending sequence. Another shard takes
/// those that a coordinator repeats, and keeps the settled effects of an id that it knows.
///
/// A coordinator may be forgotten for another one, see [`Coordinators::forgettable`]. What has
/// settled under it is unknown then, so a shard refuses it for good.
///
/// Invariants: each name and each id has one entry. The epoch of an entry never decreases, and an
/// entry that is created has an epoch above those of all closed ones. So a late request cannot
/// create again what was closed. A settled effect stays settled until its coordinator is closed, or
/// a restore goes back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Coordinators {
    /// An entry keeps its place, which is also its place in the durable words.
    places: Vec<Option<CoordinatorEntry>>,
    /// The newest epoch of a closed coordinator.
    closed: CoordinatorEpoch,
    /// The newest epoch of a coordinator that was forgotten although effects had settled.
    forgotten: CoordinatorEpoch,
    /// The places that have changed since the last [`Coordinators::take_changed`], one bit each.
    changed: u64,
    planted: PlantedBugs,
}

const _: () = assert!(COORDINATORS_MAX <= u64::BITS as usize);

impl Coordinators {
    /// Creates the coordinators of a shard that knows none.
    pub(crate) fn new(planted: PlantedBugs) -> Coordinators {
        let places = vec![None; COORDINATORS_MAX];
        let closed = CoordinatorEpoch(0);
        let forgotten = CoordinatorEpoch(0);
        Coordinators { places, closed, forgotten, changed: 0, planted }
    }

    /// Restores coordinators from the places of an earlier process. Returns `None` if two have
    /// the same name or id.
    pub(crate) fn restored(
        places: Vec<Option<CoordinatorEntry>>,
        closed: CoordinatorEpoch,
        forgotten: CoordinatorEpoch,
        planted: PlantedBugs,
    ) -> Option<Coordinators> {
        let entries: Vec<&CoordinatorEntry> = places.iter().flatten().collect();
        let twice = |(index, entry): (usize, &&CoordinatorEntry)| {
            let mut before = entries[..index].iter();
            before.any(|other| other.coordinator == entry.coordinator || other.name == entry.name)
        };
        let unique = places.len() == COORDINATORS_MAX && !entries.iter().enumerate().any(twice);
        unique.then_some(Coordinators { places, closed, forgotten, changed: 0, planted })
    }

    /// Opens a coordinator on the step owner, which assigns `epoch`. It is above every epoch that
    /// any shard has seen.
    pub(crate) fn open(
        &mut self,
        name: &str,
        epoch: CoordinatorEpoch,
    ) -> Result<CoordinatorIs, Refusal> {
        let known = self.find(name).and_then(|place| self.at(place));
        let coordinator = known.map_or(CoordinatorId(epoch.0), |entry| entry.coordinator);
        self.open_as(name, coordinator, epoch)
    }

    /// Opens a coordinator under an id and an epoch that the step owner has assigned.
    pub(crate) fn open_as(
        &mut self,
        name: &str,
        coordinator: CoordinatorId,
        epoch: CoordinatorEpoch,
    ) -> Result<CoordinatorIs, Refusal> {
        self.check_open_as(name, coordinator, epoch)?;
        let free = || self.places.iter().position(Option::is_none);
        let Some(place) = self.find(name).or_else(free) else {
            let what = Detail::clipped("open coordinators");
            return Err(Refusal::Busy { what, limit: COORDINATORS_MAX as u64 });
        };
        // Under another id the coordinator before was closed, and the numbers begin again.
        let before = self.at(place).filter(|entry| entry.coordinator == coordinator);
        let known = before.map(|entry| (entry.window, entry.digests));
        let (window, digests) = known.unwrap_or_default();
        let entry = CoordinatorEntry { name: name.to_owned(), coordinator, epoch, window, digests };
        let answer = entry.answer();
        self.places[place] = Some(entry);
        self.changed |= 1 << place;
        Ok(answer)
    }

    /// Returns why a coordinator cannot be opened under an id and an epoch, whether
    /// or not a place is free.
    pub(crate) fn check_open_as(
        &self,
        name: &str,
        coordinator: CoordinatorId,
        epoch: CoordinatorEpoch,
    ) -> Result<(), Refusal> {
        let refuse = |current| Err(Refusal::CoordinatorEpoch { coordinator, epoch, current });
        if coordinator.0 == 0 || coordinator.0 > epoch.0 {
            return refuse(self.closed);
        }
        if let Some(other) = self.of(coordinator).filter(|other| other.name != name) {
            return refuse(other.epoch);
        }
        match self.find(name).and_then(|place| self.at(place)) {
            Some(entry) if epoch < entry.epoch => refuse(entry.epoch),
            Some(entry) if epoch == entry.epoch && coordinator != entry.coordinator => {
                refuse(entry.epoch)
            }
            None if epoch <= self.closed => refuse(self.closed),
            // Effects of this coordinator may have settled here.
            None if coordinator.0 <= self.forgotten.0 => refuse(self.forgotten),
            _ => Ok(()),
        }
    }

    /// Returns the coordinator to forget so that another one can be opened, if one must be: all
    /// places are taken, and none is that of this name.
    ///
    /// `idle` says for how long nothing was heard of the coordinator at a place. One of which
    /// nothing has settled is forgotten after `unsettled`, and loses nothing. Any other is
    /// forgotten after `settled`: a coordinator that resumes it later starts over.
    pub(crate) fn forgettable(
        &self,
        name: &str,
        idle: impl Fn(usize) -> Duration,
        unsettled: Duration,
        settled: Duration,
    ) -> Option<usize> {
        if self.find(name).is_some() || self.places.iter().any(Option::is_none) {
            return None;
        }
        let is_due = |&(place, entry): &(usize, &CoordinatorEntry)| {
            idle(place) >= if entry.has_settled() { settled } else { unsettled }
        };
        let due = self.entries().filter(is_due);
        // Those that lose nothing go first, and of these the one that was idle for longest.
        let first = due.max_by_key(|&(place, entry)| (!entry.has_settled(), idle(place)));
        first.map(|(place, _)| place)
    }

    /// Forgets the coordinator at a place.
    pub(crate) fn forget_at(&mut self, place: usize) -> Option<CoordinatorEntry> {
        let entry = self.at(place)?.clone();
        if entry.has_settled() {
            self.forgotten = self.forgotten.max(entry.epoch);
        }
        self.forget(place);
        Some(entry)
    }

    /// Returns a coordinator.
    pub(crate) fn query(&self, name: &str) -> Result<CoordinatorIs, Refusal> {
        let entry = self.find(name).and_then(|place| self.at(place));
        entry
            .map(CoordinatorEntry::answer)
            .ok_or(Refusal::UnknownCoordinator { coordinator: CoordinatorId(0) })
    }

    /// Forgets a coordinator, if this is its newest epoch.
    pub(crate) fn close(&mut self, name: &str, epoch: CoordinatorEpoch) -> Result<(), Refusal> {
        let Some(place) = self.find(name) else { return Ok(()) };
        if let Some(CoordinatorEntry { coordinator, epoch: current, .. }) = self.places[place]
            && current != epoch
        {
            return Err(Refusal::CoordinatorEpoch { coordinator, epoch, current });
        }
        self.forget(place);
        Ok(())
    }

    /// Forgets all coordinators, because the values in which their effects have counted are lost.
    pub(crate) fn clear(&mut self) {
        (0..self.places.len()).for_each(|place| self.forget(place));
    }

    /// Goes back to the coordinators of a checkpoint, and fences every epoch from before: effects
    /// that a coordinator has seen settle may be undone, so what it says about them is not true any
    /// more.
    pub(crate) fn roll_back(&mut self, saved: Vec<CoordinatorEntry>) {
        self.clear();
        for (place, entry) in saved.into_iter().take(COORDINATORS_MAX).enumerate() {
            // No coordinator has this epoch. The next one that the step owner assigns is above.
            let epoch = CoordinatorEpoch(entry.epoch.max(self.closed).0 + 1);
            self.places[place] = Some(CoordinatorEntry { epoch, ..entry });
            self.changed |= 1 << place;
        }
    }

    /// Returns the verdict on a push of this effect, or why it is refused.
    pub(crate) fn check(&self, effect: &EffectRef) -> Result<EffectVerdict, Refusal> {
        let id = effect.id;
        let entry = self
            .of(id.coordinator)
            .ok_or(Refusal::UnknownCoordinator { coordinator: id.coordinator })?;
        if id.epoch != entry.epoch {
            let (coordinator, epoch, current) = (id.coordinator, id.epoch, entry.epoch);
            return Err(Refusal::CoordinatorEpoch { coordinator, epoch, current });
        }
        let mut window = entry.window;
        let outside = |settled: EffectNumber, newest: EffectNumber| Refusal::EffectWindow {
            number: id.number,
            settled,
            newest,
        };
        if effect.settled >= id.number {
            // A coordinator schedules no call whose effect is settled.
            return Err(outside(effect.settled, window.newest()));
        }
        window.raise(effect.settled);
        match window.state(id.number) {
            Settlement::Settled => Ok(EffectVerdict::Repeated),
            Settlement::Unsettled => Ok(EffectVerdict::Counts),
            Settlement::Outside => Err(outside(window.settled(), window.newest())),
        }
    }

    /// Settles an effect whose push is applied. Does nothing if its coordinator was closed
    /// meanwhile.
    pub(crate) fn settle(&mut self, effect: &EffectRef) {
        let entries = self.places.iter_mut().enumerate();
        let mut open = entries.filter_map(|(place, entry)| Some((place, entry.as_mut()?)));
        let Some((place, entry)) =
            open.find(|(_, entry)| entry.coordinator == effect.id.coordinator)
        else {
            return;
        };
        if self.planted.has(Bug::EffectNotRecorded) {
            return;
        }
        entry.window.raise(effect.settled);
        if self.planted.has(Bug::EffectWatermarkAhead) {
            entry.window.raise(effect.id.number);
        }
        entry.window.settle(effect.id.number);
        entry.digests.settle(effect, entry.window);
        self.changed |= 1 << place;
    }

    /// Yields the open coordinators, each with its place.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (usize, &CoordinatorEntry)> {
        self.places.iter().enumerate().filter_map(|(place, entry)| Some((place, entry.as_ref()?)))
    }

    /// Returns the entry at a place.
    pub(crate) fn at(&self, place: usize) -> Option<&CoordinatorEntry> {
        self.places.get(place)?.as_ref()
    }

    /// Returns the newest epoch of all coordinators, open or closed.
    pub(crate) fn newest_epoch(&self) -> CoordinatorEpoch {
        let open = self.entries().map(|(_, entry)| entry.epoch);
        open.fold(self.closed, CoordinatorEpoch::max)
    }

    /// Returns the newest epoch of a closed coordinator.
    pub(crate) fn closed(&self) -> CoordinatorEpoch {
        self.closed
    }

    /// Returns the newest epoch of a coordinator that was forgotten although effects had settled.
    pub(crate) fn forgotten(&self) -> CoordinatorEpoch {
        self.forgotten
    }

    /// Returns the place of a coordinator.
    pub(crate) fn place_of(&self, coordinator: CoordinatorId) -> Option<usize> {
        self.entries().find(|(_, entry)| entry.coordinator == coordinator).map(|(place, _)| place)
    }

    /// Returns the places that have changed since the last call, one bit each.
    pub(crate) fn take_changed(&mut self) -> u64 {
        std::mem::take(&mut self.changed)
    }

    /// Returns the places that [`Coordinators::take_changed`] would return.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn changed(&self) -> u64 {
        self.changed
    }

    fn forget(&mut self, place: usize) {
        if let Some(entry) = self.places[place].take() {
            self.closed = self.closed.max(entry.epoch);
            self.changed |= 1 << place;
        }
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.entries().find(|(_, entry)| entry.name == name).map(|(place, _)| place)
    }

    fn of(&self, coordinator: CoordinatorId) -> Option<&CoordinatorEntry> {
        self.entries().map(|(_, entry)| entry).find(|entry| entry.coordinator == coordinator)
    }
}

#[cfg(test)]
pub(crate) mod model;
#[cfg(test)]
mod tests;
