//! Adversary tests of the machines of rings: valid messages with arbitrary numbers in every field,
//! and streams of arbitrary bytes.
//!
//! [`play`] reads its input as choices, so that a fuzzer and a property test drive the same code.
//! All messages pass through frames.

mod choices;
mod frames;
mod link_play;
mod member_play;
mod rendezvous_play;

use std::time::Instant;

use choices::RingChoices;
use link_play::LinkPlay;
use member_play::MemberPlay;
use rendezvous_play::RendezvousPlay;

/// Plays the choices of an input against the machine that its first byte chooses: a rendezvous with
/// any peers, a member with any rendezvous, or an operation with any predecessor. Returns how many
/// rings have formed, or how many operations have ended well.
///
/// # Panics
/// If a machine breaks its invariants.
pub fn play(now: Instant, input: &[u8]) -> usize {
    let mut choices = RingChoices::new(input);
    match choices.below(3) {
        0 => RendezvousPlay::new(now, choices).run(),
        1 => MemberPlay::new(now, choices).run(),
        _ => LinkPlay::new(choices).run(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    fn inputs() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 1..2000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        #[test]
        fn no_peer_breaks_a_machine_of_rings(input in inputs()) {
            super::play(Instant::now(), &input);
        }
    }

    /// The plays get past the checks. If every message were refused, the code behind the checks
    /// would not be tested.
    #[test]
    fn rings_form_and_operations_end() {
        let mut totals = [0; 3];
        let mut runner = TestRunner::deterministic();
        for at in 0..600 {
            let mut input = inputs().new_tree(&mut runner).expect("an input").current();
            input[0] = (at % 3) as u8;
            totals[at % 3] += super::play(Instant::now(), &input);
        }
        assert!(totals.iter().all(|&total| total > 40), "{totals:?}");
    }
}
