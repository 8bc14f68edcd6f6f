//! An adversary test of one shard: valid messages with arbitrary numbers in every field.
//!
//! Peers of every role send messages in any order, between ticks, lost connections and kills.
//! [`play`] reads its input as choices, so that a fuzzer and a property test drive the same code.
//! Peers are mostly honest, since otherwise no push would ever be complete; now and then a field is
//! wrong. The shard asserts its invariants after every input. These properties must hold as well:
//!
//! - A killed shard opens again with the same values and counts.
//! - A push has one outcome, and a version belongs to one push.
//! - A gradient counts once: in asynchronous mode the count of applied gradients is that of the
//!   pushes which peers know or must assume to be applied. The only shard counts the same steps.
//! - In half of the inputs each push gives all elements of a partition the same value. All elements
//!   of a partition are then equal in every pull.

mod choices;
mod messages;
mod peer_line;
mod play;
mod push_records;
mod setting;

use choices::Choices;
use play::Play;

/// Plays the choices of an input against a shard. Returns how many gradients the shard has applied,
/// and whether it is the step owner.
///
/// # Panics
/// If the shard breaks its invariants or one of the properties above, or returns target memory of
/// another length than the body.
pub fn play(input: &[u8]) -> (u64, bool) {
    Play::new(Choices::new(input)).run()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    fn inputs() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 0..3000)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        // S-8.
        #[test]
        fn any_valid_messages_leave_a_shard_that_opens_again(input in inputs()) {
            super::play(&input);
        }
    }

    /// If the shard refused every push, the code behind its checks would not be tested.
    #[test]
    fn gradients_are_applied_on_the_step_owner_and_on_other_shards() {
        let mut runner = TestRunner::deterministic();
        let mut applied = [0, 0];
        for _ in 0..300 {
            let input = inputs().new_tree(&mut runner).expect("an input").current();
            let (gradients, owns_the_step) = super::play(&input);
            applied[usize::from(!owns_the_step)] += gradients;
        }
        assert!(applied.iter().all(|&applied| applied >= 10), "{applied:?}");
    }
}
