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
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::TaskId;
use pushpull_ps::{Adam, Network, NonFinite, PsConfig, Sgd};

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
    let mut world = World::new(config(&input), input.eager % 4 != 0);
    if let Some(wide) = input.begun {
        world.begin(wide);
    }
    for action in input.actions.into_iter().take(ACTIONS_MAX) {
        world.act(action);
    }
    world.finish();
});

/// Returns the configuration of the only shard of a cluster with one task.
fn config(input: &Input) -> PsConfig {
    let cluster = ClusterSpec::builder().job("ps", ["localhost:1"]).build();
    let (cluster, task) = (cluster.expect("one task is a cluster"), TaskId::ps(0));
    let config = match input.adam {
        true => PsConfig::new(cluster, task, Adam::default()),
        false => PsConfig::new(cluster, task, Sgd::new(1.0)),
    };
    let token_timeout = input.token_timeout.map(|ms| Duration::from_millis(20 * u64::from(ms)));
    let config = config
        .non_finite(match input.policy % 4 {
            0 => NonFinite::Count,
            1 => NonFinite::Allow,
            _ => NonFinite::Reject,
        })
        .token_timeout(token_timeout)
        .lease(Duration::from_secs(1))
        .inbox_pushes(if input.inbox_pushes { 2 } else { 1 })
        .network(Network::default().connections_max(6));
    match input.last_step {
        Some(step) => config.last_step(step.into()),
        None => config,
    }
}
