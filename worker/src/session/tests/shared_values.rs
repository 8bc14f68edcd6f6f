//! Requests for shared memory: once per connection, only on the same host, and never in place of
//! another request.

use pushpull_common::codec::Encoding;
use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{ModeIs, ShareValues, SharedValues};
use pushpull_common::protocol::refusal::Detail;

use super::world::{OWNER, SessionWorld, plan, refused, shard};
use crate::mapped_values::MappedShard;
use crate::session::{SessionCommand, SessionConfig};

fn same_host(change: impl FnOnce(&mut SessionConfig)) -> SessionWorld {
    let mut world = SessionWorld::with(change);
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
fn each_shard_of_the_variables_is_asked_once_per_connection() {
    let plan = plan(2, 4);
    let mut world = same_host(|_| {});
    let open = world.call(SessionCommand::Open { shards: plan.shards().to_vec() });
    (0..2).for_each(|link| drop(world.accept(link)));
    world.reply(open).unwrap();
    assert!(world.is_quiet(0) && world.is_quiet(1), "the session has not joined any variables");
    let joined = world.call(SessionCommand::Join { plan: plan.clone() });
    world.reply(joined).unwrap();
    for link in 0..2 {
        let share = world.next_frame(link, "ShareValues");
        assert_eq!(share.message, ShareValues { wants: 1 }.into());
        assert!(world.is_quiet(link), "one request at a time");
        world.answer(&share, shared(1));
        world.next_frame(link, "SharePushBuffer");
    }
    world.pull(&plan);
    for (link, &(of, mapped_shard)) in world.shared.clone().iter().enumerate() {
        world.next_frame(link, "Pull");
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
    world.next_frame(1, "Pull");
    let share = world.next_frame(1, "ShareValues");
    world.answer(&share, shared(1));
    assert_eq!(world.shared.len(), 3);
}

#[test]
fn a_shard_that_shares_nothing_gets_pull_requests() {
    let plan = plan(1, 4);
    let mut world = same_host(|_| {}).join(&plan);
    let share = world.next_frame(OWNER, "ShareValues");
    world.pull(&plan);
    world.next_frame(OWNER, "Pull");
    let detail = Detail::clipped("no");
    world.answer(&share, refused(Refusal::Unsupported { kind: 6, detail }));
    world.next_frame(OWNER, "SharePushBuffer");
    world.pull(&plan);
    world.next_frame(OWNER, "Pull");
    assert!(world.shared.is_empty() && world.closed.is_empty());
    world.reconnect(OWNER);
    (0..2).for_each(|_| drop(world.next_frame(OWNER, "Pull")));
    let share = world.next_frame(OWNER, "ShareValues");
    world.answer(&share, shared(2));
    assert!(world.shared.is_empty(), "the answer shares no values");
}

#[test]
fn remote_shards_and_disabled_sessions_share_no_memory() {
    let plan = plan(1, 4);
    assert!(SessionWorld::joined(&plan).is_quiet(OWNER));
    assert!(same_host(|config| config.shared_memory = false).join(&plan).is_quiet(OWNER));
}

#[test]
fn values_to_be_pulled_encoded_are_not_shared() {
    let mut world = same_host(|config| config.values = Some(Encoding::Bf16)).join(&plan(1, 4));
    world.next_frame(OWNER, "SharePushBuffer");
    assert!(world.is_quiet(OWNER));
    world.advance(std::time::Duration::from_millis(1));
    assert!(world.shared.is_empty());
}

#[test]
fn an_unexpected_answer_resets_the_link() {
    let mut world = same_host(|_| {}).join(&plan(1, 4));
    let share = world.next_frame(OWNER, "ShareValues");
    world.answer(&share, pushpull_common::protocol::message::Left {});
    assert_eq!(world.closed.get(&OWNER), Some(&1));
}

#[test]
fn shared_values_record_whether_steps_are_synchronous() {
    let mut world = same_host(|_| {});
    world.mode = ModeIs::Synchronous { replicas_to_aggregate: 1, total_num_replicas: 1 };
    let mut world = world.join(&plan(1, 4));
    let share = world.next_frame(OWNER, "ShareValues");
    world.answer(&share, shared(1));
    assert!(world.shared[0].1.synchronous);
}
