//! Adversary tests of the machines behind calls: valid messages with arbitrary numbers in every
//! field.
//!
//! Both functions read their input as choices, so that a fuzzer and a property test drive the same
//! code. All messages of the machines go through frames.

mod call_session_play;
mod choices;
mod frames;
mod service_play;

use std::time::Instant;

use call_session_play::CallSessionPlay;
use choices::ServiceChoices;
use service_play::ServicePlay;

/// Plays the choices of an input as clients of a function server, and as its functions. Returns
/// how many functions have run.
///
/// # Panics
/// If the service breaks its invariants, executes a call twice or answers a request twice. If its
/// memory has another length than the body that arrives.
pub fn play_service(now: Instant, input: &[u8]) -> usize {
    ServicePlay::new(now, ServiceChoices::new(input)).run()
}

/// Plays the choices of an input as the servers of a client, and as its callers. Returns how many
/// commands have succeeded.
///
/// # Panics
/// If the session answers a command twice or never. If it sends a call again to a server that may
/// have executed and forgotten it.
pub fn play_call_session(now: Instant, input: &[u8]) -> usize {
    CallSessionPlay::new(now, ServiceChoices::new(input)).run()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    fn inputs() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 0..2000)
    }

    /// Plays inputs that are the same in every run, and returns the sum of what they return.
    fn total(play: fn(Instant, &[u8]) -> usize) -> usize {
        let mut runner = TestRunner::deterministic();
        let mut input = || inputs().new_tree(&mut runner).expect("an input").current();
        (0..300).map(|_| play(Instant::now(), &input())).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn no_client_breaks_a_service(input in inputs()) {
            super::play_service(Instant::now(), &input);
        }

        #[test]
        fn no_server_breaks_a_client(input in inputs()) {
            super::play_call_session(Instant::now(), &input);
        }
    }

    /// The plays get past the checks. If every message were refused, the code behind the checks
    /// would not be tested.
    #[test]
    fn functions_run_and_commands_succeed() {
        let executions = total(super::play_service);
        let replies = total(super::play_call_session);
        assert!(executions > 300 && replies > 100, "{executions} executions, {replies} replies");
    }
}
