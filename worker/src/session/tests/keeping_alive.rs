//! Heartbeats, and servers that fall silent.

use std::time::Duration;

use pushpull_common::protocol::message;

use super::world::{LEASE, OWNER, World, ms, plan, shard, welcome};
use crate::session::{Command, Input};

fn quiet() -> World {
    let mut world = World::joined(&plan(1, 4));
    world.beats = false;
    world
}

#[test]
fn a_heartbeat_is_sent_every_fifth_of_the_lease() {
    let mut world = quiet();
    for _ in 0..10 {
        world.pass(LEASE / 5 - ms(1));
        assert!(world.is_quiet(OWNER));
        world.pass(ms(1));
        let beat = world.heard(OWNER, "Heartbeat");
        world.answer(&beat, message::HeartbeatAnswer {});
    }
    assert!(world.closed.is_empty());
}

#[test]
fn no_heartbeat_is_sent_beside_other_things() {
    let mut world = quiet();
    let plan = plan(1, 4);
    for _ in 0..10 {
        world.pass(LEASE / 5 - ms(1));
        world.pull(&plan);
        world.heard(OWNER, "Pull");
        assert!(world.is_quiet(OWNER));
    }
    world.pass(LEASE / 5);
    world.heard(OWNER, "Heartbeat");
}

#[test]
fn a_server_that_is_silent_for_two_leases_is_connected_anew() {
    let mut world = quiet();
    let plan = plan(1, 4);
    let pull = world.pull(&plan);
    world.heard(OWNER, "Pull");
    world.pass(2 * LEASE);
    assert!(world.closed.is_empty());
    world.pass(LEASE / 5 + ms(1));
    assert_eq!(world.closed.get(&OWNER), Some(&1));
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    world.heard(OWNER, "Pull");
    assert!(world.waits(pull));
}

#[test]
fn bytes_of_a_large_body_are_a_sign_of_life() {
    let mut world = quiet();
    for _ in 0..100 {
        world.pass(LEASE / 10);
        world.input(Input::Heard { link: OWNER });
    }
    assert!(world.closed.is_empty());
}

#[test]
fn each_server_is_kept_by_its_own_lease() {
    let mut world = World::new();
    world.call(Command::Open { shards: vec![shard(0), shard(1)] });
    for (link, lease_ms) in [(0, 1_000), (1, 100_000)] {
        let hello = world.connect(link);
        world.answer(&hello, message::Welcome { lease_ms, ..welcome() });
    }
    world.beats = false;
    world.pass(ms(200));
    world.heard(OWNER, "Heartbeat");
    assert!(world.is_quiet(1));
    world.pass(Duration::from_secs(20));
    world.heard(1, "Heartbeat");
}

#[test]
fn absurd_leases_do_no_harm() {
    for lease_ms in [0, 1, u32::MAX] {
        let mut world = World::new();
        world.call(Command::Open { shards: vec![shard(0)] });
        let hello = world.connect(OWNER);
        world.answer(&hello, message::Welcome { lease_ms, ..welcome() });
        world.pass(ms(1_000));
        assert!(world.closed.is_empty());
    }
}
