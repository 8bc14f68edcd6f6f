//! Connections that are lost under a push, in each of its phases.

use std::sync::Arc;

use pushpull_common::protocol::message::{self, OutcomeIs};
use pushpull_common::protocol::{Outcome, PushState, Refusal};

use super::world::{Frame, OWNER, World, applied, plan, push_answer};
use crate::error::Error;
use crate::session::{OpId, Reply};
use crate::sharding_plan::ShardingPlan;

/// A push of three parts, asked about after its parts had been sent and the connection was lost.
fn in_doubt() -> (World, OpId, Vec<Frame>, Frame) {
    let plan: Arc<ShardingPlan> = plan(1, 600_000);
    let mut world = World::joined(&plan);
    let op = world.push(&plan, 1);
    let parts = world.give_push_slot(OWNER, 1);
    world.reconnect(OWNER);
    let query = world.heard(OWNER, "OutcomeQuery");
    assert_eq!(query.envelope.sequence, parts[0].envelope.sequence);
    assert!(world.is_quiet(OWNER), "nothing is sent before that is known");
    (world, op, parts, query)
}

fn is_settled(world: &mut World, op: OpId, expected: Outcome) {
    assert!(matches!(world.reply(op), Ok(Reply::Pushed { outcome }) if outcome == expected));
}

fn same_parts(before: &[Frame], after: &[Frame]) {
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
fn nothing_sent_is_nothing_in_doubt() {
    let plan = plan(1, 4);
    let mut world = World::joined(&plan);
    world.cut(OWNER);
    let op = world.push(&plan, 1);
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    world.heard(OWNER, "Reserve");
    // The room was asked for, and the connection is lost.
    world.reconnect(OWNER);
    let part = world.give_push_slot(OWNER, 1).remove(0);
    world.answer(&part, push_answer(applied(1)));
    is_settled(&mut world, op, applied(1));
}

#[test]
fn a_push_that_is_settled_is_not_sent_again() {
    let (mut world, op, _, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: applied(4) } });
    is_settled(&mut world, op, applied(4));
    assert!(world.is_quiet(OWNER));
}

#[test]
fn a_push_that_is_unknown_is_sent_again_into_a_new_room() {
    let (mut world, op, parts, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::Unknown {} });
    let again = world.give_push_slot(OWNER, 2);
    same_parts(&parts, &again);
    assert_eq!(again[0].part().push_slot, 2);
    world.answer(&again[2], push_answer(applied(1)));
    is_settled(&mut world, op, applied(1));
}

#[test]
fn a_push_that_is_being_received_is_sent_again_into_its_room() {
    let (mut world, op, parts, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 100 } });
    let again = world.parts(OWNER);
    same_parts(&parts, &again);
    assert_eq!(again[0].part().push_slot, 1);
    world.answer(&again[2], push_answer(applied(1)));
    is_settled(&mut world, op, applied(1));
}

#[test]
fn a_push_that_is_too_old_is_refused() {
    let (mut world, op, _, query) = in_doubt();
    world.answer(&query, OutcomeIs { state: PushState::TooOld { oldest: 9 } });
    let Err(Error::Refused { refusal: Refusal::Window { oldest, .. }, .. }) = world.reply(op)
    else {
        panic!()
    };
    assert_eq!(oldest.0, 9);
}

#[test]
fn a_question_that_is_lost_is_asked_again_each_time() {
    let (mut world, op, _, first) = in_doubt();
    world.reconnect(OWNER);
    let second = world.heard(OWNER, "OutcomeQuery");
    assert!(second.request() > first.request());
    world.answer(&second, OutcomeIs { state: PushState::Unknown {} });
    // Its room was asked for when the connection is lost once more.
    world.reconnect(OWNER);
    let parts = world.give_push_slot(OWNER, 5);
    world.reconnect(OWNER);
    let third = world.heard(OWNER, "OutcomeQuery");
    world.answer(&third, OutcomeIs { state: PushState::Receiving { bytes: 1 } });
    same_parts(&parts, &world.parts(OWNER));
    world.reconnect(OWNER);
    let fourth = world.heard(OWNER, "OutcomeQuery");
    world.answer(&fourth, OutcomeIs { state: PushState::Settled { outcome: applied(2) } });
    is_settled(&mut world, op, applied(2));
}

#[test]
fn only_the_shard_that_was_lost_is_asked() {
    let plan = plan(2, 4);
    let mut world = World::joined(&plan);
    let op = world.push(&plan, 1);
    let owner = world.give_push_slot(OWNER, 1).remove(0);
    world.give_push_slot(1, 1);
    world.reconnect(1);
    assert!(world.is_quiet(OWNER));
    world.answer(&owner, push_answer(applied(1)));
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER), "it has settled it");
    let query = world.heard(1, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: applied(8) } });
    is_settled(&mut world, op, applied(1));
}

#[test]
fn a_push_in_doubt_that_was_whole_is_not_withdrawn() {
    let (mut world, op, parts, query) = in_doubt();
    world.cancel(op);
    assert!(world.is_quiet(OWNER));
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 1 } });
    same_parts(&parts, &world.parts(OWNER));
}

#[test]
fn a_push_that_no_shard_got_whole_is_withdrawn_even_without_a_connection() {
    let plan = plan(2, 4);
    let mut world = World::joined(&plan);
    let op = world.push(&plan, 1);
    world.cut(1);
    let reserve = world.heard(OWNER, "Reserve");
    world.cut(OWNER);
    world.cancel(op);
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let back = world.heard(OWNER, "ReturnToken");
    world.answer(&back, message::Returned {});
    assert!(world.is_quiet(OWNER), "{reserve:?} is not asked again");
}
