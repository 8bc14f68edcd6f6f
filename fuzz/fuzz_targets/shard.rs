//! Fuzzes the conversation with a shard: it must not panic, apply a push twice or tear a pull.
//!
//! An input is a list of actions of a few clients that break every rule a client can break, with a
//! clock of its own. These properties must hold:
//!
//! - A push has one outcome, and a version belongs to one push.
//! - The global step is the number of gradients applied.
//! - All elements of a partition are equal in every answer to a pull, since every push here gives
//!   all of them the same value.

#![no_main]

mod model;

use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pushpull_ps::fuzzing::Settings;
use pushpull_ps::{Adam, NonFinite, Sgd};

use model::{Action, World};

/// The maximum number of actions that one input plays.
const ACTIONS_MAX: usize = 200;

#[derive(Arbitrary, Debug)]
struct Input {
    adam: bool,
    eager: u8,
    last_step: Option<u8>,
    policy: u8,
    token_timeout: Option<u8>,
    inbox_pushes: bool,
    /// If set, training has begun before the actions, with the wide catalogue if true.
    begun: Option<bool>,
    actions: Vec<Action>,
}

fuzz_target!(|input: Input| {
    let settings = Settings {
        last_step: input.last_step.map(u64::from),
        non_finite: match input.policy % 4 {
            0 => NonFinite::Count,
            1 => NonFinite::Allow,
            _ => NonFinite::Reject,
        },
        token_timeout: input.token_timeout.map(|ms| Duration::from_millis(20 * u64::from(ms))),
        lease: Duration::from_secs(1),
        inbox_pushes: if input.inbox_pushes { 2 } else { 1 },
        connections_max: 6,
    };
    let eager = input.eager % 4 != 0;
    let mut world = match input.adam {
        true => World::new(settings, Adam::default(), eager),
        false => World::new(settings, Sgd::new(1.0), eager),
    };
    if let Some(wide) = input.begun {
        world.begin(wide);
    }
    for action in input.actions.into_iter().take(ACTIONS_MAX) {
        world.act(action);
    }
    world.finish();
});
