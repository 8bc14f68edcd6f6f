//! Asking shards of this host for their memory: once, of whom it can come, and never instead of anything.

use pushpull_common::codec::Encoding;
use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{ModeIs, ShareValues, SharedValues};
use pushpull_common::protocol::refusal::Detail;

use super::world::{OWNER, World, plan, refused, shard};
use crate::session::{Command, Start};
use crate::shared::MappedShard;

fn same_host(change: impl FnOnce(&mut Start)) -> World {
    let mut world = World::with(change);
    world.same_host = true;
    world
}

fn shared(shares: u64) -> SharedValues {
    SharedValues {
        shares,
        owner_generation: 0,
        block_table_bytes: 1,
        reader_slot_bytes: 1,
        values_bytes: 1,
        offset: 0,
        block_bytes: 8,
        stride: 16,
        blocks: 1,
        logical_blocks: 1,
    }
}

#[test]
fn each_shard_of_the_variables_is_asked_once_over_a_connection() {
    let plan = plan(2, 4);
    let mut world = same_host(|_| {});
    let open = world.call(Command::Open { shards: plan.shards().to_vec() });
    (0..2).for_each(|link| drop(world.accept(link)));
    world.reply(open).unwrap();
    assert!(world.is_quiet(0) && world.is_quiet(1), "nobody knows what the variables are");
    let joined = world.call(Command::Joined { plan: plan.clone() });
    world.reply(joined).unwrap();
    for link in 0..2 {
        let share = world.heard(link, "ShareValues");
        assert_eq!(share.message, ShareValues { wants: 1 }.into());
        assert!(world.is_quiet(link), "one thing at a time");
        world.answer(&share, shared(1));
        world.heard(link, "SharePushBuffer");
    }
    world.pull(&plan);
    for (link, &(of, mapped_shard)) in world.shared.clone().iter().enumerate() {
        world.heard(link, "Pull");
        assert!(world.is_quiet(link));
        let expected = MappedShard {
            shard: shard(link as u32),
            epoch: RestoreEpoch(0),
            owns_step: link == OWNER,
            synchronous: false,
        };
        assert_eq!((of, mapped_shard), (link, expected));
    }
    assert_eq!(world.shared.len(), 2);
    world.reconnect(1);
    world.heard(1, "Pull");
    let share = world.heard(1, "ShareValues");
    world.answer(&share, shared(1));
    assert_eq!(world.shared.len(), 3);
}

#[test]
fn a_shard_that_lends_nothing_is_asked_for_values() {
    let plan = plan(1, 4);
    let mut world = same_host(|_| {}).join(&plan);
    let share = world.heard(OWNER, "ShareValues");
    world.pull(&plan);
    world.heard(OWNER, "Pull");
    let detail = Detail::clipped("no");
    world.answer(&share, refused(Refusal::Unsupported { kind: 6, detail }));
    world.heard(OWNER, "SharePushBuffer");
    world.pull(&plan);
    world.heard(OWNER, "Pull");
    assert!(world.shared.is_empty() && world.closed.is_empty());
    world.reconnect(OWNER);
    (0..2).for_each(|_| drop(world.heard(OWNER, "Pull")));
    let share = world.heard(OWNER, "ShareValues");
    world.answer(&share, shared(2));
    assert!(world.shared.is_empty(), "that is nothing that is read here");
}

#[test]
fn nobody_is_asked_from_afar_or_where_it_is_switched_off() {
    let plan = plan(1, 4);
    assert!(World::joined(&plan).is_quiet(OWNER));
    assert!(same_host(|start| start.shared_memory = false).join(&plan).is_quiet(OWNER));
}

#[test]
fn values_that_are_to_come_in_a_shorter_form_are_asked_for() {
    let mut world = same_host(|start| start.values = Some(Encoding::Bf16)).join(&plan(1, 4));
    world.heard(OWNER, "SharePushBuffer");
    assert!(world.is_quiet(OWNER));
    world.pass(std::time::Duration::from_millis(1));
    assert!(world.shared.is_empty());
}

#[test]
fn whoever_answers_with_something_else_breaks_the_protocol() {
    let mut world = same_host(|_| {}).join(&plan(1, 4));
    let share = world.heard(OWNER, "ShareValues");
    world.answer(&share, pushpull_common::protocol::message::Left {});
    assert_eq!(world.closed.get(&OWNER), Some(&1));
}

#[test]
fn it_is_known_whether_steps_are_synchronous() {
    let mut world = same_host(|_| {});
    world.mode = ModeIs::Synchronous { replicas_to_aggregate: 1, total_num_replicas: 1 };
    let mut world = world.join(&plan(1, 4));
    let share = world.heard(OWNER, "ShareValues");
    world.answer(&share, shared(1));
    assert!(world.shared[0].1.synchronous);
}
