//! Pushes: push slots, parts, and the merged answers of several shards.

use std::time::Duration;

use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::limits::{PART_BYTES_MAX, WINDOW};
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Message, Outcome, Refusal};

use super::world::{
    OWNER, SentFrame, SessionWorld, applied, grant, ms, order, plan, push_answer, refused, shard,
};
use crate::error::Error;
use crate::session::{OpId, PushOrder, ReadPoint, Reply, SessionCommand};

fn outcome(world: &mut SessionWorld, op: OpId) -> Outcome {
    match world.reply(op) {
        Ok(Reply::Pushed { outcome }) => outcome,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_push_reserves_a_slot_and_sends_all_parts_under_one_sequence_number() {
    let plan = plan(2, 600_000);
    let mut world = SessionWorld::joined(&plan);
    let grant = grant(5, 0);
    let mut order = order(&plan, Some(grant), 8);
    order.read = ReadPoint { step: GlobalStep(9), gradients: [(shard(1), 6)].into() };
    let op = world.call(SessionCommand::Push { order });
    for link in 0..2 {
        let parts = world.give_push_slot(link, 40 + link as u32);
        assert_eq!(parts.len(), 3);
        let mut end = 0;
        for (index, frame) in parts.iter().enumerate() {
            let part = frame.part();
            assert_eq!(
                (part.token, part.generation, part.push_slot),
                (TokenId(5), 1, 40 + link as u32)
            );
            assert_eq!((frame.envelope.sequence.0, frame.envelope.step.0), (1, 9));
            assert_eq!(part.read, (link == 1).then_some(6), "each shard has its own count");
            assert_eq!(frame.request(), parts[0].request(), "one request, one answer");
            assert_eq!(part.offset, end);
            assert!(frame.body.len() as u64 <= PART_BYTES_MAX);
            assert!(frame.body.iter().all(|&byte| byte == 8));
            end += frame.body.len() as u64;
            let last = index == 2;
            assert_eq!((part.whole, part.next), (last.then_some(2_400_000), last));
        }
        assert!(world.is_pending(op));
        world.answer(&parts[2], push_answer(applied(1)));
    }
    assert_eq!(outcome(&mut world, op), applied(1));
}

#[test]
fn a_push_slot_received_with_a_token_or_an_answer_is_used_once() {
    let plan = plan(1, 4);
    let mut world = SessionWorld::joined(&plan);
    let token = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    world.answer(&request, message::Granted { grant: grant(1, 31) });
    world.reply(token).unwrap();
    for push_slot in [31, 32] {
        let op = world.push(&plan, 1);
        let part = world.parts(OWNER).remove(0);
        assert_eq!(part.part().push_slot, push_slot);
        world.answer(
            &part,
            message::PushAnswer {
                push_slot: 32 * u32::from(push_slot == 31),
                ..push_answer(applied(1))
            },
        );
        outcome(&mut world, op);
    }
    world.push(&plan, 2);
    world.next_frame(OWNER, "Reserve");
}

#[test]
fn a_push_whose_slot_is_taken_reserves_again_and_sends_all_again() {
    let plan = plan(1, 600_000);
    let mut world = SessionWorld::joined(&plan);
    let op = world.push(&plan, 1);
    let first = world.give_push_slot(OWNER, 1);
    world.answer(&first[0], refused(Refusal::PushSlotTaken { push_slot: 1 }));
    let again = world.give_push_slot(OWNER, 2);
    assert_eq!(again.len(), 3);
    for (old, new) in first.iter().zip(&again) {
        assert_eq!(new.part().push_slot, 2);
        assert_ne!(new.request(), old.request());
        assert_eq!((new.part().offset, &new.body), (old.part().offset, &old.body));
        assert_eq!(new.envelope.sequence, old.envelope.sequence);
    }
    world.answer(&again[2], push_answer(applied(1)));
    outcome(&mut world, op);
}

/// Every shard counts every gradient: those without a part of it get an empty share.
#[test]
fn a_gradient_has_a_share_on_every_shard() {
    let plan = plan(3, 4);
    for only in 0..3 {
        let mut world = SessionWorld::joined(&plan);
        let mut order = order(&plan, Some(grant(1, 0)), 1);
        order.parts.retain(|(to, _)| *to == shard(only));
        let op = world.call(SessionCommand::Push { order });
        for link in 0..3 {
            let parts = world.give_push_slot(link, 1);
            let bytes = if link == only as usize { 16 } else { 0 };
            assert_eq!((parts.len(), parts[0].part().whole), (1, Some(bytes)), "shard {link}");
            assert_eq!(parts[0].body.len() as u64, bytes);
            assert!(world.is_pending(op), "the push waits for all shards");
            world.answer(&parts[0], push_answer(applied(7)));
        }
        assert_eq!(outcome(&mut world, op), applied(7));
    }
}

#[test]
fn the_owner_gets_an_empty_share_of_a_gradient_and_none_of_an_assignment() {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    let only = |mut order: PushOrder| {
        order.parts.retain(|(to, _)| *to == shard(1));
        SessionCommand::Push { order }
    };
    let op = world.call(only(order(&plan, Some(grant(1, 0)), 1)));
    let parts = world.give_push_slot(OWNER, 1);
    assert_eq!((parts.len(), parts[0].part().whole, parts[0].body.len()), (1, Some(0), 0));
    let other = world.give_push_slot(1, 1);
    assert_eq!(other[0].part().whole, Some(16));
    world.answer(&other[0], push_answer(applied(900)));
    world.answer(&parts[0], push_answer(applied(7)));
    assert_eq!(outcome(&mut world, op), applied(7), "the owner knows the step");
    let op = world.call(only(order(&plan, None, 1)));
    let parts = world.give_push_slot(1, 2);
    assert_eq!(parts[0].part().operation, Operation::Assign {});
    assert!(!parts[0].part().next);
    world.answer(&parts[0], push_answer(applied(901)));
    assert!(world.is_quiet(OWNER));
    assert_eq!(outcome(&mut world, op), applied(901));
}

/// Returns the result of a push that two shards answer like this, and whether its token goes back.
fn merged(
    owner: Result<u64, Refusal>,
    other: Result<u64, Refusal>,
) -> (Result<Reply, Error>, bool) {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.push(&plan, 1);
    let parts = [OWNER, 1].map(|link| world.give_push_slot(link, 1).remove(0));
    for (part, result) in parts.into_iter().zip([owner, other]) {
        assert!(world.is_pending(op), "the push waits for all shards");
        match result {
            Ok(step) => world.answer(&part, push_answer(applied(step))),
            Err(refusal) => world.answer(&part, refused(refusal)),
        }
    }
    (world.reply(op), !world.is_quiet(OWNER))
}

#[test]
fn the_outcome_of_a_push_merges_those_of_its_shards() {
    let token = Refusal::Token { token: TokenId(1), generation: 1 };
    let bad = Refusal::NonFinite { variable: 0.into(), element: 3, value: 0.5 };
    let (result, back) = merged(Ok(4), Ok(99));
    assert!(matches!(result, Ok(Reply::Pushed { outcome }) if outcome == applied(4)) && !back);
    let error = |result: Result<Reply, Error>| match result {
        Err(Error::Refused { refusal, shard, .. }) => (refusal, shard.task),
        other => panic!("{other:?}"),
    };
    let (result, back) = merged(Err(bad.clone()), Ok(1));
    assert_eq!((error(result), back), ((bad.clone(), 0), true));
    let (result, back) = merged(Ok(1), Err(bad.clone()));
    assert_eq!((error(result), back), ((bad.clone(), 1), false), "the owner has spent the token");
    let (result, back) = merged(Err(token.clone()), Ok(1));
    assert_eq!((error(result), back), ((token.clone(), 0), false), "there is no token to return");
    let (result, back) = merged(Err(bad.clone()), Err(token));
    assert_eq!((error(result), back), ((bad, 0), true));
}

#[test]
fn the_window_bounds_the_unsettled_pushes() {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    world.disconnect(1);
    let ops: Vec<OpId> = (0..WINDOW).map(|token| world.push(&plan, token)).collect();
    let over = world.push(&plan, 99);
    assert_eq!(world.reply(over).unwrap_err(), Error::Window { limit: WINDOW });
    let frames: Vec<SentFrame> = world.sent.drain(..).collect();
    let returns = |frame: &&SentFrame| matches!(&frame.message, Message::ReturnToken(returned) if returned.token == TokenId(99));
    assert_eq!(frames.iter().filter(returns).count(), 1);
    // The first push is settled, which frees a place in the window.
    world.answer(&frames[0], message::Reserved { push_slot: 1 });
    let owner = world.parts(OWNER).remove(0);
    world.answer(&owner, push_answer(applied(1)));
    world.wait_for_connect(1);
    world.accept(1);
    let reserve = world.next_frame(1, "Reserve");
    world.answer(&reserve, message::Reserved { push_slot: 1 });
    let at = world.sent.iter().position(|f| matches!(f.message, Message::PushPart(_))).unwrap();
    let part = world.sent.remove(at).unwrap();
    world.answer(&part, push_answer(applied(1)));
    outcome(&mut world, ops[0]);
    let fits = world.push(&plan, 100);
    assert!(world.is_pending(fits));
    // The span of the window is bounded, and the second push is the oldest now.
    let over = world.push(&plan, 101);
    assert_eq!(world.reply(over).unwrap_err(), Error::Window { limit: WINDOW });
}

#[test]
fn a_push_continues_after_a_timeout() {
    let plan = plan(1, 4);
    let mut world = SessionWorld::joined(&plan);
    let order = order(&plan, Some(grant(1, 0)), 1);
    let op = world.call_within(SessionCommand::Push { order }, ms(100));
    let part = world.give_push_slot(OWNER, 1).remove(0);
    world.advance(ms(100));
    let Err(Error::Timeout { sequence: Some(sequence), awaited, .. }) = world.reply(op) else {
        panic!()
    };
    assert_eq!(awaited.0[0].last, "connected, silent for 100ms");
    let unknown = world.call(SessionCommand::Outcome { sequence });
    assert!(matches!(world.reply(unknown), Ok(Reply::Outcome(None))));
    let first = world.call(SessionCommand::Await { sequence });
    let second = world.call(SessionCommand::Await { sequence });
    // Cancelling this wait does not cancel the push.
    world.cancel(first);
    world.answer(&part, push_answer(applied(3)));
    assert_eq!(outcome(&mut world, second), applied(3));
    let known = world.call(SessionCommand::Outcome { sequence });
    assert!(matches!(world.reply(known), Ok(Reply::Outcome(Some(o))) if o == applied(3)));
    let again = world.call(SessionCommand::Await { sequence });
    assert_eq!(outcome(&mut world, again), applied(3));
    for _ in 0..WINDOW {
        let op = world.push(&plan, 1);
        let part = world.give_push_slot(OWNER, 1).remove(0);
        world.answer(&part, push_answer(applied(4)));
        outcome(&mut world, op);
    }
    for command in [SessionCommand::Outcome { sequence }, SessionCommand::Await { sequence }] {
        let op = world.call(command);
        assert_eq!(world.reply(op).unwrap_err(), Error::UnknownPush { sequence });
    }
}

#[test]
fn a_push_cancelled_before_it_is_whole_is_withdrawn() {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.push(&plan, 6);
    let reserves = [OWNER, 1].map(|link| world.next_frame(link, "Reserve"));
    world.cancel(op);
    let withdrawals = [OWNER, 1].map(|link| world.next_frame(link, "Withdraw"));
    let back = world.next_frame(OWNER, "ReturnToken");
    world.answer(&back, message::Returned {});
    // The owner had answered already. That slot serves the next push.
    world.answer(&reserves[0], message::Reserved { push_slot: 3 });
    for (reserve, withdrawal) in reserves.iter().zip(&withdrawals) {
        assert_eq!(withdrawal.envelope.sequence, reserve.envelope.sequence);
        world.answer(withdrawal, push_answer(Outcome::Withdrawn {}));
    }
    world.push(&plan, 7);
    assert_eq!(world.parts(OWNER)[0].part().push_slot, 3);
    world.next_frame(1, "Reserve");
    // The other request gets no answer any more.
    world.answer(&reserves[1], message::Reserved { push_slot: 4 });
    assert_eq!(world.closed.get(&1), Some(&1));
}

// W-1, W-2.
#[test]
fn a_push_cancelled_once_it_may_be_whole_continues() {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.push(&plan, 6);
    let owner = world.give_push_slot(OWNER, 1).remove(0);
    world.cancel(op);
    assert!(world.is_quiet(OWNER), "the owner may hold its share whole");
    let other = world.give_push_slot(1, 1).remove(0);
    world.answer(&owner, push_answer(applied(1)));
    world.answer(&other, push_answer(applied(1)));
    world.advance(Duration::from_secs(5));
    let sequence = owner.envelope.sequence;
    let known = world.call(SessionCommand::Outcome { sequence });
    assert!(matches!(world.reply(known), Ok(Reply::Outcome(Some(_)))));
}
