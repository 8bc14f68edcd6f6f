//! Pushes whose parts come one by one.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::{Sequence, VariableId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::message::{self, OutcomeIs};
use pushpull_common::protocol::{Outcome, PushState, Refusal};

use super::world::{OWNER, World, applied, grant, order, plan, push_answer, refused};
use crate::error::Error;
use crate::session::{Command, Input, OpId, Reply};
use crate::sharding_plan::ShardingPlan;

fn begin(world: &mut World, plan: &ShardingPlan, token: u64) -> Sequence {
    let mut order = order(plan, Some(grant(token, 0)), 1);
    order.parts.clear();
    let op = world.call(Command::Begin { order });
    let Ok(Reply::Begun { sequence }) = world.reply(op) else { panic!() };
    sequence
}

fn more(world: &mut World, plan: &ShardingPlan, sequence: Sequence, variable: u32) {
    let body = |range: std::ops::Range<usize>| Bytes::from(vec![variable as u8; range.len()]);
    let parts = plan.parts([VariableId(variable)].into_iter(), body);
    let op = world.call(Command::More { sequence, own: None, parts });
    assert!(matches!(world.reply(op), Ok(Reply::Done)));
}

fn end(world: &mut World, sequence: Sequence) -> OpId {
    world.call(Command::End { sequence })
}

fn joined() -> (World, Arc<ShardingPlan>) {
    let plan = plan(2, 4);
    (World::joined(&plan), plan)
}

#[test]
fn parts_go_out_as_they_come_and_the_last_says_so() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    assert!(world.sent.is_empty());
    more(&mut world, &plan, sequence, 1);
    let first = world.give_push_slot(1, 1).remove(0);
    assert_eq!((first.part().whole, first.part().next), (None, false));
    let op = end(&mut world, sequence);
    // All had been sent: an empty part says that it was all.
    let last = world.parts(1).remove(0);
    assert_eq!((last.part().whole, last.body.len()), (Some(16), 0));
    assert_eq!(last.request(), first.request());
    let owner = world.give_push_slot(OWNER, 2).remove(0);
    assert_eq!((owner.part().whole, owner.part().next), (Some(0), true));
    world.answer(&last, push_answer(applied(9)));
    world.answer(&owner, push_answer(applied(1)));
    assert!(matches!(world.reply(op), Ok(Reply::Pushed { outcome }) if outcome == applied(1)));
}

#[test]
fn parts_that_wait_for_room_go_out_together() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 0);
    let op = end(&mut world, sequence);
    let parts = world.give_push_slot(OWNER, 1);
    assert_eq!((parts.len(), parts[0].part().whole), (1, Some(16)), "no empty part is needed");
    world.answer(&parts[0], push_answer(applied(1)));
    world.reply(op).unwrap();
}

#[test]
fn an_abandoned_push_is_withdrawn_and_its_token_goes_back() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 4);
    more(&mut world, &plan, sequence, 1);
    let part = world.give_push_slot(1, 1).remove(0);
    world.input(Input::Abandoned { sequence });
    let withdraw = world.heard(1, "Withdraw");
    assert_eq!(withdraw.envelope.sequence, part.envelope.sequence);
    world.heard(OWNER, "ReturnToken");
    world.answer(&withdraw, push_answer(Outcome::Withdrawn {}));
    // The answer to the parts never comes, and would be unexpected now.
    world.answer(&part, push_answer(applied(1)));
    assert_eq!(world.closed.get(&1), Some(&1));
    let op = world.call(Command::Outcome { sequence });
    assert_eq!(world.reply(op).unwrap_err(), Error::UnknownPush { sequence });
}

/// A push that is not finished can be whole nowhere, whatever became of its connections: left
/// behind, it would block the window for ever.
#[test]
fn an_abandoned_push_is_given_up_in_every_phase() {
    for phase in 0..5 {
        let (mut world, plan) = joined();
        let sequence = begin(&mut world, &plan, 4);
        if phase > 0 {
            more(&mut world, &plan, sequence, 1);
        }
        if phase > 1 {
            let part = world.give_push_slot(1, 1).remove(0);
            if phase == 4 {
                world.answer(&part, refused(Refusal::NotInitialized {}));
            }
        }
        if phase == 2 {
            world.reconnect(1);
            world.heard(1, "OutcomeQuery");
        }
        if phase == 3 {
            world.cut(1);
        }
        world.input(Input::Abandoned { sequence });
        let back = world.heard(OWNER, "ReturnToken");
        world.answer(&back, message::Returned {});
        for token in 5..5 + WINDOW {
            let sequence = begin(&mut world, &plan, token);
            world.input(Input::Abandoned { sequence });
        }
    }
}

#[test]
fn a_lost_connection_brings_all_parts_again() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 0);
    world.give_push_slot(OWNER, 1);
    world.cut(OWNER);
    more(&mut world, &plan, sequence, 1);
    let op = end(&mut world, sequence);
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let query = world.heard(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Unknown {} });
    let again = world.give_push_slot(OWNER, 2);
    assert_eq!((again.len(), again[0].part().whole, again[0].body.len()), (1, Some(16), 16));
    let other = world.give_push_slot(1, 1);
    world.answer(&again[0], push_answer(applied(1)));
    world.answer(&other[0], push_answer(applied(1)));
    world.reply(op).unwrap();
}

#[test]
fn a_refusal_in_the_middle_is_told_at_the_end() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 1);
    let part = world.give_push_slot(1, 1).remove(0);
    let refusal = Refusal::NonFinite { variable: 1.into(), element: 0, value: 0.5 };
    world.answer(&part, refused(refusal.clone()));
    let op = end(&mut world, sequence);
    assert!(world.is_quiet(1), "nothing more of it is sent there");
    let owner = world.give_push_slot(OWNER, 1).remove(0);
    world.answer(&owner, push_answer(applied(1)));
    let Err(Error::Refused { refusal: said, .. }) = world.reply(op) else { panic!() };
    assert_eq!(said, refusal);
}

#[test]
fn giving_up_the_end_withdraws_what_is_whole_nowhere() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 1);
    let op = end(&mut world, sequence);
    world.cancel(op);
    world.heard(1, "Reserve");
    world.heard(OWNER, "Reserve");
    world.heard(OWNER, "ReturnToken");
}

/// A server that was killed and started again gives its rooms the numbers of its life before. A part
/// that went into a room of that life was refused, and with it the rest under that number: if the
/// push was then given the room that bears it now, its parts would be passed over without a word.
#[test]
fn a_room_is_forgotten_with_its_connection() {
    let (mut world, plan) = joined();
    let first = begin(&mut world, &plan, 1);
    more(&mut world, &plan, first, 1);
    let op = end(&mut world, first);
    let parts = [world.give_push_slot(1, 1), world.give_push_slot(OWNER, 1)].concat();
    for last in parts.iter().filter(|part| part.part().whole.is_some()) {
        let push_slot = message::PushAnswer { push_slot: 2, ..push_answer(applied(1)) };
        world.answer(last, push_slot);
    }
    assert!(matches!(world.reply(op), Ok(Reply::Pushed { .. })));
    world.reconnect(1);
    let second = begin(&mut world, &plan, 2);
    more(&mut world, &plan, second, 1);
    let part = world.give_push_slot(1, 2).remove(0);
    assert_eq!((part.part().push_slot, part.part().whole), (2, None));
}

/// A shard repeats the number of a room that lies unused. Two pushes were told the same; one was
/// given up, the other's parts came when the room had gone to somebody else.
#[test]
fn a_room_that_was_refused_is_not_used_again() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 1);
    let reserve = world.heard(1, "Reserve");
    let other = begin(&mut world, &plan, 2);
    more(&mut world, &plan, other, 1);
    let again = world.heard(1, "Reserve");
    world.answer(&reserve, message::Reserved { push_slot: 7 });
    let part = world.parts(1).remove(0);
    world.input(Input::Abandoned { sequence: other });
    world.answer(&again, message::Reserved { push_slot: 7 });
    world.answer(&part, refused(Refusal::PushSlotTaken { push_slot: 7 }));
    let part = world.give_push_slot(1, 8).remove(0);
    assert_eq!((part.part().push_slot, part.part().whole), (8, None));
}
