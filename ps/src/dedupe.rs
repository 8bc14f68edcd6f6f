//! What a shard remembers of a client's pushes, so that a resend is answered and not applied.

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::{Outcome, PushState};

/// The outcomes of the last pushes of one client epoch on one shard.
///
/// A client numbers its pushes from 1 and keeps the span from its oldest unacknowledged push to
/// its newest below [`WINDOW`]; a shard sees only the pushes that touch it, so gaps are ordinary.
///
/// Invariants: every remembered sequence lies in `newest - WINDOW < sequence <= newest`, in the
/// entry `sequence % WINDOW`; a sequence is settled at most once.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    newest: u64,
    entries: Box<[Option<(u64, Outcome)>]>,
}

impl Window {
    pub(crate) fn new() -> Self {
        Window { newest: 0, entries: vec![None; WINDOW as usize].into() }
    }

    /// What is known of a push; `Unknown` for one that may still come.
    pub(crate) fn state(&self, sequence: Sequence) -> PushState {
        if sequence.0 < self.oldest() {
            return PushState::TooOld { oldest: self.oldest() };
        }
        match self.entry(sequence.0) {
            Some((settled, outcome)) if *settled == sequence.0 => {
                PushState::Settled { outcome: *outcome }
            }
            _ => PushState::Unknown {},
        }
    }

    /// The oldest sequence that is remembered if it was settled.
    pub(crate) fn oldest(&self) -> u64 {
        self.newest.saturating_sub(WINDOW - 1).max(1)
    }

    /// Records what became of a push. One that newer pushes have moved out of the window while it
    /// waited to be applied is not remembered: a resend is told that it is too old.
    ///
    /// # Panics
    /// If the push is settled already: `state` is asked before a push is taken.
    pub(crate) fn settle(&mut self, sequence: Sequence, outcome: Outcome) {
        match self.state(sequence) {
            PushState::TooOld { .. } => return,
            state => assert_eq!(state, PushState::Unknown {}, "push {sequence} settles once"),
        }
        self.newest = self.newest.max(sequence.0);
        self.entries[(sequence.0 % WINDOW) as usize] = Some((sequence.0, outcome));
    }

    fn entry(&self, sequence: u64) -> Option<&(u64, Outcome)> {
        self.entries[(sequence % WINDOW) as usize].as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DONE: Outcome = Outcome::Withdrawn {};

    #[test]
    fn a_settled_push_is_answered_until_it_leaves_the_window() {
        let mut window = Window::new();
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
        // It was whole before the others came, and is applied after them.
        window.settle(Sequence(500), DONE);
        assert_eq!(window.state(Sequence(500)), PushState::TooOld { oldest: 937 });
        assert_eq!(window.newest, 1000);
    }

    #[test]
    fn the_last_sequence_there_is_is_a_sequence() {
        let mut window = Window::new();
        window.settle(Sequence(u64::MAX), DONE);
        assert_eq!(window.state(Sequence(u64::MAX)), PushState::Settled { outcome: DONE });
        assert_eq!(window.state(Sequence(1)), PushState::TooOld { oldest: u64::MAX - 63 });
    }

    #[test]
    #[should_panic(expected = "settles once")]
    fn nothing_settles_twice() {
        let mut window = Window::new();
        window.settle(Sequence(5), DONE);
        window.settle(Sequence(5), DONE);
    }
}
