//! Pushes whose parts come one by one.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::{Sequence, VariableId};
use pushpull_common::protocol::limits::WINDOW;
use pushpull_common::protocol::message::{self, OutcomeIs};
use pushpull_common::protocol::{Outcome, PushState, Refusal};

use super::world::{OWNER, SessionWorld, applied, grant, order, plan, push_answer, refused};
use crate::error::Error;
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, Reply, SessionCommand, SessionInput};

fn begin(world: &mut SessionWorld, plan: &ShardingPlan, token: u64) -> Sequence {
    let mut order = order(plan, Some(grant(token, 0)), 1);
    order.parts.clear();
    let op = world.call(SessionCommand::Begin { order });
    let Ok(Reply::Begun { sequence }) = world.reply(op) else { panic!() };
    sequence
}

fn more(world: &mut SessionWorld, plan: &ShardingPlan, sequence: Sequence, variable: u32) {
    let body = |range: std::ops::Range<usize>| Bytes::from(vec![variable as u8; range.len()]);
    let parts = Scatter::new(plan, [VariableId(variable)].into_iter()).parts(body);
    let op = world.call(SessionCommand::AddParts { sequence, staged: None, parts });
    assert!(matches!(world.reply(op), Ok(Reply::Done)));
}

fn end(world: &mut SessionWorld, sequence: Sequence) -> OpId {
    world.call(SessionCommand::End { sequence })
}

fn joined() -> (SessionWorld, Arc<ShardingPlan>) {
    let plan = plan(2, 4);
    (SessionWorld::joined(&plan), plan)
}

#[test]
fn parts_are_sent_as_they_come_and_the_last_is_marked() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    assert!(world.sent.is_empty());
    more(&mut world, &plan, sequence, 1);
    let first = world.give_push_slot(1, 1).remove(0);
    assert_eq!((first.part().whole, first.part().next), (None, false));
    let op = end(&mut world, sequence);
    // All parts were sent already, so an empty part marks the end.
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
fn parts_that_wait_for_a_slot_are_sent_together() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 0);
    let op = end(&mut world, sequence);
    let parts = world.give_push_slot(OWNER, 1);
    assert_eq!((parts.len(), parts[0].part().whole), (1, Some(16)), "no empty part is needed");
    let others = world.give_push_slot(1, 1);
    assert_eq!((others.len(), others[0].part().whole), (1, Some(0)), "it counts the gradient");
    world.answer(&parts[0], push_answer(applied(1)));
    world.answer(&others[0], push_answer(applied(1)));
    world.reply(op).unwrap();
}

#[test]
fn an_abandoned_push_is_withdrawn_and_its_token_returned() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 4);
    more(&mut world, &plan, sequence, 1);
    let part = world.give_push_slot(1, 1).remove(0);
    world.input(SessionInput::Abandoned { sequence });
    let withdraw = world.next_frame(1, "Withdraw");
    assert_eq!(withdraw.envelope.sequence, part.envelope.sequence);
    world.next_frame(OWNER, "ReturnToken");
    world.answer(&withdraw, push_answer(Outcome::Withdrawn {}));
    // The answer to the parts never comes. Now it would be unexpected.
    world.answer(&part, push_answer(applied(1)));
    assert_eq!(world.closed.get(&1), Some(&1));
    let op = world.call(SessionCommand::Outcome { sequence });
    assert_eq!(world.reply(op).unwrap_err(), Error::UnknownPush { sequence });
}

/// An incomplete push is whole on no shard, regardless of its connections. Left behind, it would
/// block the window for ever.
#[test]
fn a_push_can_be_abandoned_in_every_phase() {
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
            world.next_frame(1, "OutcomeQuery");
        }
        if phase == 3 {
            world.disconnect(1);
        }
        world.input(SessionInput::Abandoned { sequence });
        let back = world.next_frame(OWNER, "ReturnToken");
        world.answer(&back, message::Returned {});
        for token in 5..5 + WINDOW {
            let sequence = begin(&mut world, &plan, token);
            world.input(SessionInput::Abandoned { sequence });
        }
    }
}

#[test]
fn all_parts_are_sent_again_after_a_lost_connection() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 0);
    world.give_push_slot(OWNER, 1);
    world.disconnect(OWNER);
    more(&mut world, &plan, sequence, 1);
    let op = end(&mut world, sequence);
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Unknown {} });
    let again = world.give_push_slot(OWNER, 2);
    assert_eq!((again.len(), again[0].part().whole, again[0].body.len()), (1, Some(16), 16));
    let other = world.give_push_slot(1, 1);
    world.answer(&again[0], push_answer(applied(1)));
    world.answer(&other[0], push_answer(applied(1)));
    world.reply(op).unwrap();
}

#[test]
fn a_refusal_before_the_end_is_reported_at_the_end() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 1);
    let part = world.give_push_slot(1, 1).remove(0);
    let refusal = Refusal::NonFinite { variable: 1.into(), element: 0, value: 0.5 };
    world.answer(&part, refused(refusal.clone()));
    let op = end(&mut world, sequence);
    assert!(world.is_quiet(1), "the refusing shard is sent nothing more");
    let owner = world.give_push_slot(OWNER, 1).remove(0);
    world.answer(&owner, push_answer(applied(1)));
    let Err(Error::Refused { refusal: reported, .. }) = world.reply(op) else { panic!() };
    assert_eq!(reported, refusal);
}

#[test]
fn cancelling_the_end_withdraws_a_push_that_is_whole_on_no_shard() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 1);
    let op = end(&mut world, sequence);
    world.cancel(op);
    for link in [1, OWNER] {
        world.next_frame(link, "Reserve");
        world.next_frame(link, "Withdraw");
    }
    world.next_frame(OWNER, "ReturnToken");
}

/// A restarted server assigns the push slot numbers of its previous life again. A part for a slot
/// of that life is refused, and the rest under that number with it. If the push then used the same
/// number again, its parts would be skipped silently.
#[test]
fn a_push_slot_is_dropped_with_its_connection() {
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

/// A shard announces an unused push slot again. Here two pushes get the same number, one is given
/// up, and the parts of the other arrive after another client got the slot.
#[test]
fn a_refused_push_slot_is_not_used_again() {
    let (mut world, plan) = joined();
    let sequence = begin(&mut world, &plan, 1);
    more(&mut world, &plan, sequence, 1);
    let reserve = world.next_frame(1, "Reserve");
    let other = begin(&mut world, &plan, 2);
    more(&mut world, &plan, other, 1);
    let again = world.next_frame(1, "Reserve");
    world.answer(&reserve, message::Reserved { push_slot: 7 });
    let part = world.parts(1).remove(0);
    world.input(SessionInput::Abandoned { sequence: other });
    world.next_frame(1, "Withdraw");
    world.answer(&again, message::Reserved { push_slot: 7 });
    world.answer(&part, refused(Refusal::PushSlotTaken { push_slot: 7 }));
    let part = world.give_push_slot(1, 8).remove(0);
    assert_eq!((part.part().push_slot, part.part().whole), (8, None));
}
