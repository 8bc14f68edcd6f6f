//! Heartbeats and silent servers.

use std::time::Duration;

use pushpull_common::protocol::message;

use super::world::{LEASE, OWNER, SessionWorld, ms, plan, shard, welcome};
use crate::session::{SessionCommand, SessionInput};

fn quiet() -> SessionWorld {
    let mut world = SessionWorld::joined(&plan(1, 4));
    world.answers_heartbeats = false;
    world
}

#[test]
fn a_heartbeat_is_sent_every_fifth_of_the_lease() {
    let mut world = quiet();
    for _ in 0..10 {
        world.advance(LEASE / 5 - ms(1));
        assert!(world.is_quiet(OWNER));
        world.advance(ms(1));
        let beat = world.next_frame(OWNER, "Heartbeat");
        world.answer(&beat, message::HeartbeatAnswer {});
    }
    assert!(world.closed.is_empty());
}

#[test]
fn other_requests_replace_heartbeats() {
    let mut world = quiet();
    let plan = plan(1, 4);
    for _ in 0..10 {
        world.advance(LEASE / 5 - ms(1));
        world.pull(&plan);
        world.next_frame(OWNER, "Pull");
        assert!(world.is_quiet(OWNER));
    }
    world.advance(LEASE / 5);
    world.next_frame(OWNER, "Heartbeat");
}

#[test]
fn a_server_silent_for_two_leases_is_reconnected() {
    let mut world = quiet();
    let plan = plan(1, 4);
    let pull = world.pull(&plan);
    world.next_frame(OWNER, "Pull");
    world.advance(2 * LEASE);
    assert!(world.closed.is_empty());
    world.advance(LEASE / 5 + ms(1));
    assert_eq!(world.closed.get(&OWNER), Some(&1));
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    world.next_frame(OWNER, "Pull");
    assert!(world.is_pending(pull));
}

#[test]
fn received_bytes_of_a_large_body_prevent_a_timeout() {
    let mut world = quiet();
    for _ in 0..100 {
        world.advance(LEASE / 10);
        world.input(SessionInput::BytesReceived { link: OWNER });
    }
    assert!(world.closed.is_empty());
}

#[test]
fn each_server_has_its_own_lease() {
    let mut world = SessionWorld::new();
    world.call(SessionCommand::Open { shards: vec![shard(0), shard(1)] });
    for (link, lease_ms) in [(0, 1_000), (1, 100_000)] {
        let hello = world.connect(link);
        world.answer(&hello, message::Welcome { lease_ms, ..welcome() });
    }
    world.answers_heartbeats = false;
    world.advance(ms(200));
    world.next_frame(OWNER, "Heartbeat");
    assert!(world.is_quiet(1));
    world.advance(Duration::from_secs(20));
    world.next_frame(1, "Heartbeat");
}

#[test]
fn extreme_leases_are_harmless() {
    for lease_ms in [0, 1, u32::MAX] {
        let mut world = SessionWorld::new();
        world.call(SessionCommand::Open { shards: vec![shard(0)] });
        let hello = world.connect(OWNER);
        world.answer(&hello, message::Welcome { lease_ms, ..welcome() });
        world.advance(ms(1_000));
        assert!(world.closed.is_empty());
    }
}
