//! The sources of calls on a shard: for each coordinator its newest epoch, and which of its calls
//! have settled, so that a call that is executed again counts once.

use std::time::Duration;

use pushpull_common::call_window::{CallWindow, Settlement};
use pushpull_common::ids::{CallEpoch, CallNumber, CallSource};
use pushpull_common::protocol::limits::{CALL_SOURCES_MAX, COORDINATOR_NAME_BYTES_MAX};
use pushpull_common::protocol::message::CallsAre;
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{CallRef, Refusal};
use pushpull_store::planted::{Bug, PlantedBugs};

mod settled_digests;

pub(crate) use settled_digests::SettledDigests;

/// The limit of all epochs and sources.
pub(crate) const EPOCH_LIMIT: u64 = 1 << 63;

/// The calls of one coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallSourceEntry {
    /// The coordinator's name.
    pub(crate) name: String,
    pub(crate) source: CallSource,
    /// The newest epoch. Calls of others are refused.
    pub(crate) epoch: CallEpoch,
    pub(crate) window: CallWindow,
    pub(crate) digests: SettledDigests,
}

impl CallSourceEntry {
    /// Returns the calls as a client is told about them.
    pub(crate) fn answer(&self) -> CallsAre {
        let &CallSourceEntry { source, epoch, window, digests, .. } = self;
        let settled = window.settled();
        let window = window.bits();
        let SettledDigests { first: first_digest, settled: (digest_of, digest), .. } = digests;
        CallsAre { source, epoch, settled, window, first_digest, digest_of, digest }
    }

    /// Returns whether a call has settled, so that the entry says more than none would.
    pub(crate) fn has_settled(&self) -> bool {
        self.window != CallWindow::default()
    }

    /// Returns whether the name can be that of a coordinator.
    pub(crate) fn has_valid_name(&self) -> bool {
        (1..=COORDINATOR_NAME_BYTES_MAX).contains(&self.name.len())
    }
}

/// What a push of a call may do on a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallVerdict {
    /// The call has not settled: the push counts.
    Counts,
    /// The call has settled: the push has no effect.
    Repeated,
}

/// The sources of calls that are open on a shard.
///
/// The step owner assigns sources and epochs, both from one ascending sequence. Another shard takes
/// those that a coordinator repeats, and keeps the settled calls of a source that it knows.
///
/// A source may be forgotten for the sake of another, see [`CallSources::forgettable`]. What has
/// settled under it is unknown then, so a shard refuses it for good.
///
/// Invariants: each name and each source has one entry. The epoch of an entry never decreases, and
/// an entry that is created has an epoch above those of all closed ones. So a late request cannot
/// create again what was closed. A settled call stays settled until its source is closed, or a
/// restore goes back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallSources {
    /// An entry keeps its place, which is also its place in the durable words.
    places: Vec<Option<CallSourceEntry>>,
    /// The newest epoch of a closed source.
    closed: CallEpoch,
    /// The newest epoch of a source that was forgotten although calls of it had settled.
    forgotten: CallEpoch,
    /// The places that have changed since the last [`CallSources::take_changed`], one bit each.
    changed: u64,
    planted: PlantedBugs,
}

const _: () = assert!(CALL_SOURCES_MAX <= u64::BITS as usize);

impl CallSources {
    /// Creates the sources of a shard that knows none.
    pub(crate) fn new(planted: PlantedBugs) -> CallSources {
        let places = vec![None; CALL_SOURCES_MAX];
        let closed = CallEpoch(0);
        let forgotten = CallEpoch(0);
        CallSources { places, closed, forgotten, changed: 0, planted }
    }

    /// Restores sources from the places of an earlier process. Returns `None` if two of them have
    /// the same name or source.
    pub(crate) fn restored(
        places: Vec<Option<CallSourceEntry>>,
        (closed, forgotten): (CallEpoch, CallEpoch),
        planted: PlantedBugs,
    ) -> Option<CallSources> {
        let entries: Vec<&CallSourceEntry> = places.iter().flatten().collect();
        let twice = |(index, entry): (usize, &&CallSourceEntry)| {
            let mut before = entries[..index].iter();
            before.any(|other| other.source == entry.source || other.name == entry.name)
        };
        let unique = places.len() == CALL_SOURCES_MAX && !entries.iter().enumerate().any(twice);
        unique.then_some(CallSources { places, closed, forgotten, changed: 0, planted })
    }

    /// Opens the calls of a coordinator on the step owner, which assigns `epoch`. It is above every
    /// epoch that any shard has seen.
    pub(crate) fn open(&mut self, name: &str, epoch: CallEpoch) -> Result<CallsAre, Refusal> {
        let known = self.find(name).and_then(|place| self.at(place));
        let source = known.map_or(CallSource(epoch.0), |entry| entry.source);
        self.open_as(name, source, epoch)
    }

    /// Opens the calls of a coordinator under a source and an epoch that the step owner has
    /// assigned.
    pub(crate) fn open_as(
        &mut self,
        name: &str,
        source: CallSource,
        epoch: CallEpoch,
    ) -> Result<CallsAre, Refusal> {
        self.check_open_as(name, source, epoch)?;
        let free = || self.places.iter().position(Option::is_none);
        let Some(place) = self.find(name).or_else(free) else {
            let what = Detail::clipped("coordinators with open calls");
            return Err(Refusal::Busy { what, limit: CALL_SOURCES_MAX as u64 });
        };
        // Under another source the calls before were closed, and the numbers begin again.
        let before = self.at(place).filter(|entry| entry.source == source);
        let known = before.map(|entry| (entry.window, entry.digests));
        let (window, digests) = known.unwrap_or_default();
        let entry = CallSourceEntry { name: name.to_owned(), source, epoch, window, digests };
        let answer = entry.answer();
        self.places[place] = Some(entry);
        self.changed |= 1 << place;
        Ok(answer)
    }

    /// Returns why the calls of a coordinator cannot be opened under a source and an epoch, whether
    /// or not a place is free.
    pub(crate) fn check_open_as(
        &self,
        name: &str,
        source: CallSource,
        epoch: CallEpoch,
    ) -> Result<(), Refusal> {
        let refuse = |current| Err(Refusal::CallEpoch { source, epoch, current });
        if source.0 == 0 || source.0 > epoch.0 {
            return refuse(self.closed);
        }
        if let Some(other) = self.of(source).filter(|other| other.name != name) {
            return refuse(other.epoch);
        }
        match self.find(name).and_then(|place| self.at(place)) {
            Some(entry) if epoch < entry.epoch => refuse(entry.epoch),
            Some(entry) if epoch == entry.epoch && source != entry.source => refuse(entry.epoch),
            None if epoch <= self.closed => refuse(self.closed),
            // Calls of this source may have settled here.
            None if source.0 <= self.forgotten.0 => refuse(self.forgotten),
            _ => Ok(()),
        }
    }

    /// Returns the open source to forget so that another coordinator can open its calls, if it needs
    /// that: all places are taken, and none is that of this name.
    ///
    /// `idle` says for how long nothing was heard of the source at a place. One under which nothing
    /// has settled is forgotten after `unsettled`, and loses nothing. Any other is forgotten after
    /// `settled`: a coordinator that resumes it later starts over.
    pub(crate) fn forgettable(
        &self,
        name: &str,
        idle: impl Fn(usize) -> Duration,
        (unsettled, settled): (Duration, Duration),
    ) -> Option<usize> {
        if self.find(name).is_some() || self.places.iter().any(Option::is_none) {
            return None;
        }
        let is_due = |&(place, entry): &(usize, &CallSourceEntry)| {
            idle(place) >= if entry.has_settled() { settled } else { unsettled }
        };
        let due = self.entries().filter(is_due);
        // Those that lose nothing go first, and of these the one that was idle for longest.
        let first = due.max_by_key(|&(place, entry)| (!entry.has_settled(), idle(place)));
        first.map(|(place, _)| place)
    }

    /// Forgets the source at a place.
    pub(crate) fn forget_at(&mut self, place: usize) -> Option<CallSourceEntry> {
        let entry = self.at(place)?.clone();
        if entry.has_settled() {
            self.forgotten = self.forgotten.max(entry.epoch);
        }
        self.forget(place);
        Some(entry)
    }

    /// Returns the calls of a coordinator.
    pub(crate) fn query(&self, name: &str) -> Result<CallsAre, Refusal> {
        let entry = self.find(name).and_then(|place| self.at(place));
        entry.map(CallSourceEntry::answer).ok_or(Refusal::UnknownCalls { source: CallSource(0) })
    }

    /// Forgets the calls of a coordinator, if this is its newest epoch.
    pub(crate) fn close(&mut self, name: &str, epoch: CallEpoch) -> Result<(), Refusal> {
        let Some(place) = self.find(name) else { return Ok(()) };
        if let Some(CallSourceEntry { source, epoch: current, .. }) = self.places[place]
            && current != epoch
        {
            return Err(Refusal::CallEpoch { source, epoch, current });
        }
        self.forget(place);
        Ok(())
    }

    /// Forgets all sources, because the values in which their calls have counted are lost.
    pub(crate) fn clear(&mut self) {
        (0..self.places.len()).for_each(|place| self.forget(place));
    }

    /// Goes back to the sources of a checkpoint, and fences every epoch from before: calls that a
    /// coordinator has seen settle may be undone, so what it says about them is not true any more.
    pub(crate) fn roll_back(&mut self, saved: Vec<CallSourceEntry>) {
        self.clear();
        for (place, entry) in saved.into_iter().take(CALL_SOURCES_MAX).enumerate() {
            // No coordinator has this epoch. The next one that the step owner assigns is above.
            let epoch = CallEpoch(entry.epoch.max(self.closed).0 + 1);
            self.places[place] = Some(CallSourceEntry { epoch, ..entry });
            self.changed |= 1 << place;
        }
    }

    /// Returns what a push of this call may do, or why it is refused.
    pub(crate) fn check(&self, call: &CallRef) -> Result<CallVerdict, Refusal> {
        let id = call.id;
        let entry = self.of(id.source).ok_or(Refusal::UnknownCalls { source: id.source })?;
        if id.epoch != entry.epoch {
            let (source, epoch, current) = (id.source, id.epoch, entry.epoch);
            return Err(Refusal::CallEpoch { source, epoch, current });
        }
        let mut window = entry.window;
        let outside = |settled: CallNumber, newest: CallNumber| Refusal::CallWindow {
            number: id.number,
            settled,
            newest,
        };
        if call.settled >= id.number {
            // A coordinator schedules no call that is settled.
            return Err(outside(call.settled, window.newest()));
        }
        window.raise(call.settled);
        match window.state(id.number) {
            Settlement::Settled => Ok(CallVerdict::Repeated),
            Settlement::Unsettled => Ok(CallVerdict::Counts),
            Settlement::Outside => Err(outside(window.settled(), window.newest())),
        }
    }

    /// Settles a call whose push is applied. Without effect if its source was closed meanwhile.
    pub(crate) fn settle(&mut self, call: &CallRef) {
        let entries = self.places.iter_mut().enumerate();
        let mut open = entries.filter_map(|(place, entry)| Some((place, entry.as_mut()?)));
        let Some((place, entry)) = open.find(|(_, entry)| entry.source == call.id.source) else {
            return;
        };
        if self.planted.has(Bug::CallNotRecorded) {
            return;
        }
        entry.window.raise(call.settled);
        if self.planted.has(Bug::CallWatermarkAhead) {
            entry.window.raise(call.id.number);
        }
        entry.window.settle(call.id.number);
        entry.digests.settle(call, entry.window);
        self.changed |= 1 << place;
    }

    /// Yields the open sources, each with its place.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (usize, &CallSourceEntry)> {
        self.places.iter().enumerate().filter_map(|(place, entry)| Some((place, entry.as_ref()?)))
    }

    /// Returns the entry at a place.
    pub(crate) fn at(&self, place: usize) -> Option<&CallSourceEntry> {
        self.places.get(place)?.as_ref()
    }

    /// Returns the newest epoch of all sources, open or closed.
    pub(crate) fn newest_epoch(&self) -> CallEpoch {
        let open = self.entries().map(|(_, entry)| entry.epoch);
        open.fold(self.closed, CallEpoch::max)
    }

    /// Returns the newest epoch of a closed source.
    pub(crate) fn closed(&self) -> CallEpoch {
        self.closed
    }

    /// Returns the newest epoch of a source that was forgotten although calls had settled.
    pub(crate) fn forgotten(&self) -> CallEpoch {
        self.forgotten
    }

    /// Returns the place of a source.
    pub(crate) fn place_of(&self, source: CallSource) -> Option<usize> {
        self.entries().find(|(_, entry)| entry.source == source).map(|(place, _)| place)
    }

    /// Returns the places that have changed since the last call, one bit each.
    pub(crate) fn take_changed(&mut self) -> u64 {
        std::mem::take(&mut self.changed)
    }

    /// Returns the places that [`CallSources::take_changed`] would return.
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

    fn of(&self, source: CallSource) -> Option<&CallSourceEntry> {
        self.entries().map(|(_, entry)| entry).find(|entry| entry.source == source)
    }
}

#[cfg(test)]
pub(crate) mod model;
#[cfg(test)]
mod tests;
