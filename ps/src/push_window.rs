//! The push window: the outcomes of a client's last pushes on a shard, so that a resend is answered
//! and not applied again.

use pushpull_common::ids::{GlobalStep, Sequence, TokenId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::{Outcome, PushState};
use pushpull_store::planted::{Bug, PlantedBugs};

/// The outcomes of the last [`WINDOW`] pushes of one client epoch on one shard.
///
/// A client numbers its pushes from 1, and keeps the span from its oldest unacknowledged push to
/// its newest below [`WINDOW`]. A shard receives only the pushes that touch it, so gaps are normal.
///
/// Invariants: a sequence is stored in the entry `sequence % WINDOW` and is at most `newest`; it is
/// settled at most once. An entry that has left the window stays until it is overwritten;
/// [`PushWindow::state`] and [`PushWindow::settled`] ignore it.
#[derive(Clone, Debug)]
pub(crate) struct PushWindow {
    newest: u64,
    entries: Box<[Option<SettledPush>]>,
    /// The entries that have changed since the last [`PushWindow::save`], one bit each.
    unsaved: u64,
    planted: PlantedBugs,
}

const _: () = assert!(WINDOW == u64::BITS as u64);

/// The number of words of an entry.
const ENTRY_WORDS: usize = 5;

/// A settled push.
#[derive(Clone, Copy, Debug)]
struct SettledPush {
    sequence: u64,
    outcome: Outcome,
    /// The token that an asynchronous gradient was applied under; 0 for that of an effect, and for
    /// any other push.
    token: TokenId,
}

impl SettledPush {
    fn words(self) -> [u64; ENTRY_WORDS] {
        let SettledPush { sequence, outcome, token } = self;
        let (kind, version, step) = match outcome {
            Outcome::Applied { version, step, staleness } => (1 | staleness << 8, version, step.0),
            Outcome::Accepted { step } => (2, 0, step.0),
            Outcome::Stale { current } => (3, 0, current.0),
            Outcome::Withdrawn {} => (4, 0, 0),
            Outcome::Held {} => (5, 0, 0),
            Outcome::Repeated {} => (7, 0, 0),
        };
        [sequence, kind, version, step, token.0]
    }
}

impl PushWindow {
    /// The number of words that a window occupies in the arena.
    pub(crate) const WORDS: usize = 1 + ENTRY_WORDS * WINDOW as usize;

    pub(crate) fn new(planted: PlantedBugs) -> Self {
        // All entries are unsaved, because the arena may still hold the words of another window.
        PushWindow {
            newest: 0,
            entries: vec![None; WINDOW as usize].into(),
            unsaved: u64::MAX,
            planted,
        }
    }

    /// Returns the state of a push; `Unknown` for one that may still arrive.
    pub(crate) fn state(&self, sequence: Sequence) -> PushState {
        if sequence.0 < self.oldest() {
            return PushState::TooOld { oldest: self.oldest() };
        }
        match self.entry(sequence.0) {
            Some(entry) if entry.sequence == sequence.0 => {
                PushState::Settled { outcome: entry.outcome }
            }
            _ => PushState::Unknown {},
        }
    }

    /// Returns the oldest sequence whose outcome is remembered if it was settled.
    pub(crate) fn oldest(&self) -> u64 {
        self.newest.saturating_sub(WINDOW - 1).max(1)
    }

    /// Records the outcome of a push. A push that newer ones have moved out of the window while it
    /// waited to be applied is not recorded; a resend is answered with `TooOld`.
    ///
    /// # Panics
    /// If the push is already settled: callers check `state` before they accept a push.
    pub(crate) fn settle(&mut self, sequence: Sequence, outcome: Outcome) {
        self.settle_under(TokenId(0), sequence, outcome);
    }

    /// Records the outcome of an asynchronous gradient that was applied under a token. Otherwise like
    /// [`PushWindow::settle`].
    pub(crate) fn settle_under(&mut self, token: TokenId, sequence: Sequence, outcome: Outcome) {
        match self.state(sequence) {
            PushState::TooOld { .. } => return,
            state => assert_eq!(state, PushState::Unknown {}, "push {sequence} settles once"),
        }
        self.newest = self.newest.max(sequence.0);
        self.put(sequence.0, Some(SettledPush { sequence: sequence.0, outcome, token }));
        if self.planted.has(Bug::EvictLiveOutcome) {
            self.put(sequence.0.wrapping_sub(EVICTED_DISTANCE), None);
        }
    }

    fn put(&mut self, sequence: u64, entry: Option<SettledPush>) {
        let index = sequence % WINDOW;
        self.entries[index as usize] = entry;
        self.unsaved |= 1 << index;
    }

    /// Passes each word that may have changed since the last call to `put`, with its index below
    /// [`PushWindow::WORDS`]. Word 0 is the newest sequence; five words follow for each entry.
    pub(crate) fn save(&mut self, mut put: impl FnMut(usize, u64)) {
        put(0, self.newest);
        let mut unsaved = std::mem::take(&mut self.unsaved);
        while unsaved != 0 {
            let index = unsaved.trailing_zeros() as usize;
            unsaved &= unsaved - 1;
            let words = self.entries[index].map_or([0; ENTRY_WORDS], SettledPush::words);
            for (word, value) in words.into_iter().enumerate() {
                put(1 + ENTRY_WORDS * index + word, value);
            }
        }
    }

    /// Passes each word that [`PushWindow::save`] considers saved to `put`, with its index.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn saved(&self, put: impl FnMut(usize, u64)) {
        PushWindow { unsaved: !self.unsaved, ..self.clone() }.save(put);
    }

    /// Returns all words.
    #[cfg(test)]
    pub(crate) fn words(&self) -> Vec<u64> {
        let mut words = vec![0; PushWindow::WORDS];
        PushWindow { unsaved: u64::MAX, ..self.clone() }.save(|word, value| words[word] = value);
        words
    }

    /// Decodes a window from its words. Returns `None` if they are not valid.
    pub(crate) fn decode(words: &[u64], planted: PlantedBugs) -> Option<PushWindow> {
        let (&newest, entries) = words.get(..PushWindow::WORDS)?.split_first()?;
        let mut window = PushWindow { newest, ..PushWindow::new(planted) };
        let oldest = window.oldest();
        for (index, entry) in entries.chunks_exact(ENTRY_WORDS).enumerate() {
            let sequence = entry[0];
            if sequence == 0 {
                continue;
            }
            let token = TokenId(entry[4]);
            let outcome = match (entry[1] & 0xff, entry[1] >> 8) {
                (1, staleness) => {
                    Outcome::Applied { version: entry[2], step: GlobalStep(entry[3]), staleness }
                }
                (2, 0) => Outcome::Accepted { step: GlobalStep(entry[3]) },
                (3, 0) => Outcome::Stale { current: GlobalStep(entry[3]) },
                (4, 0) => Outcome::Withdrawn {},
                (5, 0) => Outcome::Held {},
                (7, 0) => Outcome::Repeated {},
                _ => return None,
            };
            if token.0 != 0 && !matches!(outcome, Outcome::Applied { .. }) {
                return None;
            }
            if sequence % WINDOW != index as u64 || sequence > newest {
                return None;
            }
            // An entry that has left the window since is not needed.
            if sequence >= oldest {
                window.entries[index] = Some(SettledPush { sequence, outcome, token });
            }
        }
        Some(window)
    }

    /// Returns whether a gradient is remembered as applied under this token.
    pub(crate) fn has_applied(&self, token: TokenId) -> bool {
        token.0 != 0 && self.entries.iter().flatten().any(|entry| entry.token == token)
    }

    /// Yields the remembered gradients that were applied under a token, with it.
    pub(crate) fn applied(&self) -> impl Iterator<Item = (Sequence, TokenId)> {
        let oldest = self.oldest();
        let entries = self.entries.iter().flatten();
        let applied = entries.filter(move |entry| entry.token.0 != 0 && entry.sequence >= oldest);
        applied.map(|entry| (Sequence(entry.sequence), entry.token))
    }

    /// Returns the newest settled sequence; 0 if there is none.
    pub(crate) fn newest(&self) -> u64 {
        self.newest
    }

    /// Returns the remembered outcomes, in ascending order of their sequences.
    pub(crate) fn settled(&self) -> impl Iterator<Item = (u64, Outcome)> {
        let oldest = self.oldest();
        let mut settled: Vec<(u64, Outcome)> =
            self.entries.iter().flatten().map(|entry| (entry.sequence, entry.outcome)).collect();
        settled.retain(|&(at, _)| at >= oldest);
        settled.sort_by_key(|&(sequence, _)| sequence);
        settled.into_iter()
    }

    fn entry(&self, sequence: u64) -> Option<&SettledPush> {
        self.entries[(sequence % WINDOW) as usize].as_ref()
    }
}

/// How many sequences before the newest one [`Bug::EvictLiveOutcome`] forgets.
const EVICTED_DISTANCE: u64 = 2;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const DONE: Outcome = Outcome::Withdrawn {};

    /// Checks the guarantees of a window.
    pub(crate) fn suite(planted: PlantedBugs) {
        a_settled_push_is_answered(planted);
        outcomes_are_known_while_their_pushes_may_arrive(planted);
    }

    #[test]
    fn a_settled_push_is_answered_until_it_leaves_the_window() {
        suite(PlantedBugs::default());
    }

    /// Settles pushes in any order within the window, and sometimes decodes the window from its
    /// words.
    fn outcomes_are_known_while_their_pushes_may_arrive(planted: PlantedBugs) {
        let mut window = PushWindow::new(planted);
        let mut settled = std::collections::BTreeSet::new();
        let mut newest = 0_u64;
        let mut saved = vec![0; PushWindow::WORDS];
        for round in 0..2000_u64 {
            // Visits every sequence of a sliding window, out of order.
            let sequence = 1 + round / 2 + round * 37 % (WINDOW - 1);
            if window.state(Sequence(sequence)) == (PushState::Unknown {}) {
                assert!(settled.insert(sequence), "push {sequence} is not new");
                window.settle(Sequence(sequence), DONE);
                newest = newest.max(sequence);
            }
            if round % 7 == 0 {
                window.save(|word, value| saved[word] = value);
                assert_eq!(saved, window.words(), "every word that differs is passed");
            }
            if round % 97 == 0 {
                window.save(|word, value| saved[word] = value);
                window = PushWindow::decode(&saved, planted).unwrap();
            }
            for &sequence in settled.range(newest.saturating_sub(WINDOW - 1)..) {
                let state = window.state(Sequence(sequence));
                assert_eq!(state, PushState::Settled { outcome: DONE }, "push {sequence}");
            }
        }
    }

    fn a_settled_push_is_answered(planted: PlantedBugs) {
        let mut window = PushWindow::new(planted);
        for sequence in [1, 3, 2, 64] {
            assert_eq!(window.state(Sequence(sequence)), PushState::Unknown {});
            window.settle(Sequence(sequence), DONE);
            assert_eq!(window.state(Sequence(sequence)), PushState::Settled { outcome: DONE });
        }
        assert_eq!(window.state(Sequence(1)), PushState::Settled { outcome: DONE });
        window.settle(Sequence(65), DONE);
        assert_eq!(window.state(Sequence(1)), PushState::TooOld { oldest: 2 });
        assert_eq!(window.state(Sequence(4)), PushState::Unknown {}, "a gap inside the window");
        window.settle(Sequence(1000), DONE);
        assert_eq!(window.state(Sequence(64)), PushState::TooOld { oldest: 937 });
        assert_eq!(window.state(Sequence(999)), PushState::Unknown {});
        // This push was whole before the others arrived, and is applied after them.
        window.settle(Sequence(500), DONE);
        assert_eq!(window.state(Sequence(500)), PushState::TooOld { oldest: 937 });
        assert_eq!(window.newest, 1000);
    }

    #[test]
    fn a_saved_window_decodes_to_the_same_outcomes() {
        let mut window = PushWindow::new(PlantedBugs::default());
        let outcomes = [
            Outcome::Applied { version: 7, step: GlobalStep(9), staleness: 3 },
            Outcome::Accepted { step: GlobalStep(u64::MAX) },
            Outcome::Stale { current: GlobalStep(4) },
            Outcome::Withdrawn {},
            Outcome::Held {},
            Outcome::Repeated {},
        ];
        for (sequence, outcome) in (1..200).step_by(3).zip(outcomes.into_iter().cycle()) {
            window.settle(Sequence(sequence), outcome);
        }
        window.settle_under(TokenId(77), Sequence(200), outcomes[0]);
        let words: Vec<u64> = window.words();
        assert_eq!(words.len(), PushWindow::WORDS);
        let read = PushWindow::decode(&words, PlantedBugs::default()).unwrap();
        for sequence in 1..300 {
            assert_eq!(read.state(Sequence(sequence)), window.state(Sequence(sequence)));
        }
        assert_eq!(read.applied().collect::<Vec<_>>(), [(Sequence(200), TokenId(77))]);
        let mut wrong = words.clone();
        wrong[1] += 1;
        assert!(
            PushWindow::decode(&wrong, PlantedBugs::default()).is_none(),
            "a sequence in the wrong entry"
        );
    }

    #[test]
    fn the_largest_sequence_is_valid() {
        let mut window = PushWindow::new(PlantedBugs::default());
        window.settle(Sequence(u64::MAX), DONE);
        assert_eq!(window.state(Sequence(u64::MAX)), PushState::Settled { outcome: DONE });
        assert_eq!(window.state(Sequence(1)), PushState::TooOld { oldest: u64::MAX - 63 });
    }

    #[test]
    #[should_panic(expected = "settles once")]
    fn a_push_settles_only_once() {
        let mut window = PushWindow::new(PlantedBugs::default());
        window.settle(Sequence(5), DONE);
        window.settle(Sequence(5), DONE);
    }
}
