//! Gradients that count once for an effect: the step owner first, then every shard of the plan.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber, VariableId};
use pushpull_common::protocol::message::{
    CoordinatorIs, EffectEncoded, EffectPart, Granted, OpenCoordinator, Operation, OutcomeIs,
    Reserved, Withdraw,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{EffectId, EffectRef, Message, Outcome, PushState, Refusal};

use super::world::{
    OWNER, SentFrame, SessionWorld, applied, grant, order, plan, push_answer, refused, shard,
};
use crate::error::Error;
use crate::gradients::parts::{EncodedRange, OutgoingPart};
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, PushOrder, ReadPoint, Reply, SessionCommand};

const EFFECT: EffectRef = EffectRef {
    id: EffectId {
        coordinator: CoordinatorId(8),
        epoch: CoordinatorEpoch(9),
        number: EffectNumber(7),
    },
    settled: EffectNumber(4),
    digest: 70,
};
const REPEATED: Outcome = Outcome::Repeated {};

/// A session whose tokens are granted over connections that are up.
fn joined(plan: &Arc<ShardingPlan>) -> SessionWorld {
    let mut world = SessionWorld::joined(plan);
    let token = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    let grant = grant(4, 0);
    world.answer(&request, Granted { grant });
    assert!(matches!(world.reply(token), Ok(Reply::Token(Some(_)))));
    world
}

/// Pushes the variables with these ids for the effect.
fn push(world: &mut SessionWorld, plan: &ShardingPlan, variables: &[u32]) -> OpId {
    let variables = variables.iter().copied().map(VariableId);
    let parts = Scatter::new(plan, variables).parts(|range| Bytes::from(vec![1; range.len()]));
    let operation = Operation::Gradient {};
    let grant = Some(grant(4, 0));
    let order = PushOrder::of_parts(operation, grant, ReadPoint::default(), parts);
    world.call(SessionCommand::Push { order: PushOrder { effect: Some(EFFECT), ..order } })
}

/// Takes the parts of the effect that were sent over a link.
fn parts(world: &mut SessionWorld, link: usize) -> Vec<SentFrame> {
    let mut parts = Vec::new();
    while !world.is_quiet(link) {
        let frame = world.next_frame(link, "EffectPart");
        assert_eq!(part(&frame).effect, EFFECT);
        parts.push(frame);
    }
    parts
}

fn part(frame: &SentFrame) -> &EffectPart {
    match &frame.message {
        Message::EffectPart(part) => part,
        other => panic!("not a part of an effect but {other:?}"),
    }
}

fn give_push_slot(world: &mut SessionWorld, link: usize) -> Vec<SentFrame> {
    let reserve = world.next_frame(link, "Reserve");
    let push_slot = 10 + link as u32;
    world.answer(&reserve, Reserved { push_slot });
    parts(world, link)
}

fn outcome(world: &mut SessionWorld, op: OpId) -> Outcome {
    match world.reply(op) {
        Ok(Reply::Pushed { outcome }) => outcome,
        other => panic!("{other:?}"),
    }
}

/// Returns the last part sent over a link, which must be whole and without contents.
fn last_part(world: &mut SessionWorld, link: usize) -> SentFrame {
    let last = parts(world, link).pop().unwrap();
    assert!(part(&last).part.whole.is_some() && last.body.is_empty());
    last
}

#[test]
fn every_shard_has_a_share_and_the_step_owner_decides_first() {
    let plan = plan(3, 3);
    let mut world = joined(&plan);
    // Without an effect, this push would be whole on two shards at once, and have no share on the
    // third.
    let op = push(&mut world, &plan, &[0, 1]);
    let owner = give_push_slot(&mut world, OWNER).pop().unwrap();
    assert!(part(&owner).part.whole.is_some());
    let ahead = give_push_slot(&mut world, 1);
    assert!(ahead.iter().all(|frame| part(frame).part.whole.is_none()) && !ahead.is_empty());
    assert!(give_push_slot(&mut world, 2).is_empty());
    world.answer(&owner, push_answer(applied(5)));
    let lasts = [1, 2].map(|link| last_part(&mut world, link));
    assert_eq!(lasts.each_ref().map(|last| part(last).part.whole), [Some(16), Some(0)]);
    for last in &lasts {
        assert!(world.is_pending(op));
        // The effect may have counted there before.
        world.answer(last, push_answer(REPEATED));
    }
    assert_eq!(outcome(&mut world, op), applied(5));
}

#[test]
fn an_effect_that_has_counted_on_the_step_owner_still_reaches_the_other_shards() {
    let plan = plan(2, 3);
    let mut world = joined(&plan);
    let op = push(&mut world, &plan, &[0, 1]);
    let owner = give_push_slot(&mut world, OWNER).pop().unwrap();
    give_push_slot(&mut world, 1);
    world.answer(&owner, push_answer(REPEATED));
    let last = last_part(&mut world, 1);
    assert!(world.is_pending(op));
    world.answer(&last, push_answer(applied(1)));
    assert_eq!(outcome(&mut world, op), REPEATED);
    assert!(world.is_quiet(OWNER), "the step owner has taken the token back");
}

#[test]
fn an_effect_that_the_step_owner_refuses_counts_on_no_shard_and_its_token_is_returned() {
    let plan = plan(2, 3);
    let mut world = joined(&plan);
    let op = push(&mut world, &plan, &[0, 1]);
    let owner = give_push_slot(&mut world, OWNER).pop().unwrap();
    give_push_slot(&mut world, 1);
    let EffectId { coordinator, epoch, .. } = EFFECT.id;
    let fenced = Refusal::CoordinatorEpoch { coordinator, epoch, current: CoordinatorEpoch(12) };
    world.answer(&owner, refused(fenced.clone()));
    match world.reply(op) {
        Err(Error::Refused { refusal, .. }) => assert_eq!(refusal, fenced),
        other => panic!("{other:?}"),
    }
    assert_eq!(world.next_frame(1, "Withdraw").message, Withdraw {}.into());
    world.next_frame(OWNER, "ReturnToken");
}

#[test]
fn a_resend_carries_the_effect() {
    let plan = plan(2, 3);
    let mut world = joined(&plan);
    let op = push(&mut world, &plan, &[0, 1]);
    give_push_slot(&mut world, OWNER);
    give_push_slot(&mut world, 1);
    world.reconnect(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Unknown {} });
    let again = give_push_slot(&mut world, OWNER).pop().unwrap();
    assert!(part(&again).part.whole.is_some());
    world.reconnect(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: REPEATED } });
    let last = last_part(&mut world, 1);
    world.answer(&last, push_answer(applied(3)));
    assert_eq!(outcome(&mut world, op), REPEATED);
}

#[test]
fn a_push_without_an_effect_is_not_answered_as_repeated() {
    let plan = plan(1, 3);
    for queried in [false, true] {
        let mut world = SessionWorld::joined(&plan);
        let push = SessionCommand::Push { order: order(&plan, Some(grant(4, 0)), 1) };
        world.call(push);
        let owner = world.give_push_slot(OWNER, 1).pop().unwrap();
        match queried {
            false => world.answer(&owner, push_answer(REPEATED)),
            true => {
                world.reconnect(OWNER);
                let query = world.next_frame(OWNER, "OutcomeQuery");
                let state = PushState::Settled { outcome: REPEATED };
                world.answer(&query, OutcomeIs { state });
            }
        }
        assert_eq!(world.closed.get(&OWNER), Some(&1));
    }
}

#[test]
fn a_coordinator_is_opened_again_after_a_reconnect() {
    let plan = plan(1, 3);
    let mut world = SessionWorld::joined(&plan);
    let coordinator = CoordinatorId(0);
    let epoch = CoordinatorEpoch(0);
    let message: Message =
        OpenCoordinator { name: Text::clipped("trainer"), coordinator, epoch }.into();
    let body = Bytes::new();
    let wait_ms = None;
    let shard = shard(0);
    let op = world.call(SessionCommand::Request { shard, message: message.clone(), body, wait_ms });
    world.next_frame(OWNER, "OpenCoordinator");
    world.reconnect(OWNER);
    let again = world.next_frame(OWNER, "OpenCoordinator");
    assert_eq!(again.message, message);
    let coordinator = CoordinatorId(3);
    let epoch = CoordinatorEpoch(5);
    let settled = EffectNumber(1);
    let window = 4;
    let first_digest = 6;
    let digest_of = EffectNumber(1);
    let digest = 6;
    let opened =
        CoordinatorIs { coordinator, epoch, settled, window, first_digest, digest_of, digest };
    world.answer(&again, opened.clone());
    match world.reply(op) {
        Ok(Reply::Answer { message, .. }) => assert_eq!(message, opened.into()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_encoded_part_of_an_effect_has_the_effect() {
    let plan = super::world::halves_plan();
    let mut world = SessionWorld::joined(&plan);
    let layout = plan.catalogue().layout(shard(0));
    let encoded = EncodedRange::of(&layout.partitions()[0], 5, Encoding::Bf16);
    let body = Bytes::from(vec![0; encoded.bytes as usize]);
    let part = OutgoingPart { offset: 0, body: body.into(), encoded: Some(encoded) };
    let operation = Operation::Gradient {};
    let grant = Some(grant(4, 0));
    let parts = vec![(shard(0), vec![part])];
    let order = PushOrder::of_parts(operation, grant, ReadPoint::default(), parts);
    world.call(SessionCommand::Push { order: PushOrder { effect: Some(EFFECT), ..order } });
    let reserve = world.next_frame(OWNER, "Reserve");
    world.answer(&reserve, Reserved { push_slot: 3 });
    let frame = world.next_frame(OWNER, "EffectEncoded");
    let Message::EffectEncoded(EffectEncoded { encoded, effect }) = frame.message else {
        unreachable!()
    };
    assert_eq!((effect, encoded.elements, encoded.part.push_slot), (EFFECT, 5, 3));
}
