//! Connections lost during a push, in each of its phases.

use std::sync::Arc;

use pushpull_common::protocol::message::{self, OutcomeIs};
use pushpull_common::protocol::{Outcome, PushState, Refusal};

use super::world::{OWNER, SentFrame, SessionWorld, applied, plan, push_answer};
use crate::error::Error;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, Reply};

/// Starts a push of three parts whose connection is lost after the parts were sent, up to the
/// outcome query.
fn in_doubt() -> (SessionWorld, OpId, Vec<SentFrame>, SentFrame) {
    let plan: Arc<ShardingPlan> = plan(1, 600_000);
    let mut world = SessionWorld::joined(&plan);
    let op = world.push(&plan, 1);
    let parts = world.give_push_slot(OWNER, 1);
    world.reconnect(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    assert_eq!(query.envelope.sequence, parts[0].envelope.sequence);
    assert!(world.is_quiet(OWNER), "nothing is sent before the query is answered");
    (world, op, parts, query)
}

fn is_settled(world: &mut SessionWorld, op: OpId, expected: Outcome) {
    assert!(matches!(world.reply(op), Ok(Reply::Pushed { outcome }) if outcome == expected));
}

fn same_parts(before: &[SentFrame], after: &[SentFrame]) {
    assert_eq!(before.len(), after.len());
    for (before, after) in before.iter().zip(after) {
        assert_eq!(before.envelope.sequence, after.envelope.sequence);
        assert_eq!(before.part().offset, after.part().offset);
        assert_eq!(before.part().whole, after.part().whole);
        assert_eq!(before.body, after.body);
        assert!(before.request() < after.request());
    }
}

#[test]
fn a_push_with_nothing_sent_is_not_in_doubt() {
    let plan = plan(1, 4);
    let mut world = SessionWorld::joined(&plan);
    world.disconnect(OWNER);
    let op = world.push(&plan, 1);
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    world.next_frame(OWNER, "Reserve");
    // The connection is lost during the reservation.
    world.reconnect(OWNER);
    let part = world.give_push_slot(OWNER, 1).remove(0);
    world.answer(&part, push_answer(applied(1)));
    is_settled(&mut world, op, applied(1));
}

// W-1.
#[test]
fn a_settled_push_is_not_sent_again() {
    let (mut world, op, _, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: applied(4) } });
    is_settled(&mut world, op, applied(4));
    assert!(world.is_quiet(OWNER));
}

// W-1.
#[test]
fn an_unknown_push_is_sent_again_into_a_new_slot() {
    let (mut world, op, parts, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::Unknown {} });
    let again = world.give_push_slot(OWNER, 2);
    same_parts(&parts, &again);
    assert_eq!(again[0].part().push_slot, 2);
    world.answer(&again[2], push_answer(applied(1)));
    is_settled(&mut world, op, applied(1));
}

#[test]
fn an_incomplete_push_is_sent_again_into_its_slot() {
    let (mut world, op, parts, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 100 } });
    let again = world.parts(OWNER);
    same_parts(&parts, &again);
    assert_eq!(again[0].part().push_slot, 1);
    world.answer(&again[2], push_answer(applied(1)));
    is_settled(&mut world, op, applied(1));
}

#[test]
fn a_push_outside_the_window_is_refused() {
    let (mut world, op, _, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::TooOld { oldest: 9 } });
    let Err(Error::Refused { refusal: Refusal::Window { oldest, .. }, .. }) = world.reply(op)
    else {
        panic!()
    };
    assert_eq!(oldest.0, 9);
}

#[test]
fn a_lost_outcome_query_is_repeated_each_time() {
    let (mut world, op, _, first) = in_doubt();
    world.reconnect(OWNER);
    let second = world.next_frame(OWNER, "OutcomeQuery");
    assert!(second.request() > first.request());
    world.answer(&second, OutcomeIs { state: PushState::Unknown {} });
    // The connection is lost again during the reservation.
    world.reconnect(OWNER);
    let parts = world.give_push_slot(OWNER, 5);
    world.reconnect(OWNER);
    let third = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&third, OutcomeIs { state: PushState::Receiving { bytes: 1 } });
    same_parts(&parts, &world.parts(OWNER));
    world.reconnect(OWNER);
    let fourth = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&fourth, OutcomeIs { state: PushState::Settled { outcome: applied(2) } });
    is_settled(&mut world, op, applied(2));
}

#[test]
fn only_the_disconnected_shard_is_queried() {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.push(&plan, 1);
    let owner = world.give_push_slot(OWNER, 1).remove(0);
    world.give_push_slot(1, 1);
    world.reconnect(1);
    assert!(world.is_quiet(OWNER));
    world.answer(&owner, push_answer(applied(1)));
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER), "the owner has settled the push");
    let query = world.next_frame(1, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: applied(8) } });
    is_settled(&mut world, op, applied(1));
}

#[test]
fn a_push_in_doubt_that_may_be_whole_is_not_withdrawn() {
    let (mut world, op, parts, query) = in_doubt();
    world.cancel(op);
    assert!(world.is_quiet(OWNER));
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 1 } });
    same_parts(&parts, &world.parts(OWNER));
}

#[test]
fn a_push_whole_on_no_shard_is_withdrawn_without_a_connection() {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.push(&plan, 1);
    world.disconnect(1);
    let reserve = world.next_frame(OWNER, "Reserve");
    world.disconnect(OWNER);
    world.cancel(op);
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let back = world.next_frame(OWNER, "ReturnToken");
    world.answer(&back, message::Returned {});
    assert!(world.is_quiet(OWNER), "{reserve:?} is not repeated");
}
