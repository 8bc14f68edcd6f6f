//! Pushes from push buffers: the parts are referenced, and sent only where the slot is unusable.

use std::collections::BTreeMap;
use std::sync::Arc;

use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, VariableId};
use pushpull_common::protocol::message::{
    self, EffectShared, ModeIs, Operation, PushPart, PushShared, SharedPushBuffer, SharedRange,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{EffectId, EffectRef, Message, Outcome, PushState, Refusal};
use pushpull_common::variable::VariableSpec;

use super::world::*;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::gradient_buffer::{GradientBuffer, GradientSlot, PushBufferId};
use crate::gradients::scatter::Scatter;
use crate::gradients::scatter::ScatteredGradients;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, PushOrder, ReadPoint, Reply, SessionCommand};

/// Starts a session with a push buffer from each shard that has a variable that can use one.
fn world(plan: &Arc<ShardingPlan>, mode: ModeIs) -> SessionWorld {
    let mut world = SessionWorld::new();
    world.same_host = true;
    world.mode = mode;
    let mut world = world.join(plan);
    for (link, &shard) in plan.shards().iter().enumerate() {
        match plan.keeps_some_whole(shard) {
            true => share(&mut world, link),
            false => drop(world.next_frame(link, "ShareValues")),
        }
    }
    world
}

const ASYNCHRONOUS: ModeIs = ModeIs::Asynchronous { owner_first: false };

fn shared() -> SharedPushBuffer {
    SharedPushBuffer {
        bytes: 1 << 20,
        first: 0,
        stride: 4096,
        push_slots: List::new(vec![70, 71]).unwrap(),
    }
}

/// A shard refuses to share its values, and shares a push buffer.
fn share(world: &mut SessionWorld, link: usize) {
    let ask = world.next_frame(link, "ShareValues");
    let detail = Detail::clipped("no");
    world.answer(&ask, refused(Refusal::Unsupported { kind: 6, detail }));
    let ask = world.next_frame(link, "SharePushBuffer");
    world.answer(&ask, shared());
}

/// Writes gradients of these variables into slots of the newest push buffers; every byte is `fill`.
fn gradients(
    world: &SessionWorld,
    plan: &ShardingPlan,
    ids: &[u32],
    fill: u8,
) -> Arc<GradientBuffer> {
    let mut buffer = GradientBuffer::new(plan.bytes(), plan.runs(|_| true).into());
    let push_buffers: BTreeMap<usize, PushBufferId> = world.push_buffers.iter().copied().collect();
    let push_slot = |of| {
        let link = plan.shards().iter().position(|&shard| shard == of)?;
        let memory = Box::new(AlignedBuffer::of_bytes(1 << 16));
        Some(GradientSlot { shard: of, push_buffer: *push_buffers.get(&link)?, number: 70, memory })
    };
    buffer.renew(|_| true, push_slot);
    for &id in ids {
        let range = plan.range(VariableId(id));
        buffer.slice_mut(range.start..range.end.next_multiple_of(8)).fill(fill);
    }
    Arc::new(buffer)
}

/// Pushes these variables.
fn push(
    world: &mut SessionWorld,
    plan: &ShardingPlan,
    ids: &[u32],
    buffer: Arc<GradientBuffer>,
) -> OpId {
    push_for(world, plan, ids, buffer, None)
}

/// Pushes these variables for an effect.
fn push_for(
    world: &mut SessionWorld,
    plan: &ShardingPlan,
    ids: &[u32],
    buffer: Arc<GradientBuffer>,
    effect: Option<EffectRef>,
) -> OpId {
    let scatter = Arc::new(Scatter::new(plan, ids.iter().copied().map(VariableId)));
    let factors = BTreeMap::new();
    let scattered = Some(ScatteredGradients { scatter, buffer, factors });
    let operation = Operation::Gradient {};
    let grant = Some(grant(1, 0));
    let read = ReadPoint::default();
    let parts = Vec::new();
    world.call(SessionCommand::Push {
        order: PushOrder { operation, grant, effect, read, scattered, staged: None, parts },
    })
}

fn reference(frame: &SentFrame) -> (u32, Option<u64>, Vec<(u64, u64)>) {
    let Message::PushShared(PushShared { push_slot, whole, ranges, .. }) = &frame.message else {
        panic!("not a PushShared: {frame:?}")
    };
    let pair = |range: &SharedRange| (range.start, range.end);
    (*push_slot, *whole, ranges.items().iter().map(pair).collect())
}

fn sent(frame: &SentFrame) -> (u32, Option<u64>, u64, &[u8]) {
    let PushPart { push_slot, whole, offset, .. } = frame.part();
    (*push_slot, *whole, *offset, &frame.body)
}

fn is_applied(world: &mut SessionWorld, op: OpId) {
    assert!(matches!(world.reply(op), Ok(Reply::Pushed { outcome }) if outcome == applied(1)));
}

#[test]
fn a_push_buffer_is_requested_only_if_the_session_can_use_it() {
    let plan = plan(1, 4);
    let world_of = |plan: &Arc<ShardingPlan>, change: fn(&mut crate::session::SessionConfig)| {
        let mut world = SessionWorld::with(change);
        world.same_host = true;
        world.join(plan)
    };
    let mut reads = world_of(&plan, |config| config.role = message::Role::Reader {});
    let ask = reads.next_frame(OWNER, "ShareValues");
    reads.answer(&ask, message::Refused { refusal: Refusal::NotInitialized {} });
    assert!(reads.is_quiet(OWNER));
    assert!(world_of(&plan, |config| config.shared_memory = false).is_quiet(OWNER));

    let rows = VariableSpec::f32("rows", [4, 2]).unwrap().sparse();
    for variable in [rows, VariableSpec::bf16("halves", [5]).unwrap()] {
        let mut world = world_of(&place(vec![variable], 1), |_| {});
        let ask = world.next_frame(OWNER, "ShareValues");
        world.answer(&ask, message::Refused { refusal: Refusal::NotInitialized {} });
        assert!(world.is_quiet(OWNER), "no variable can use a push buffer");
    }

    let mut world = world(&plan, ASYNCHRONOUS);
    assert_eq!(world.push_buffers, [(OWNER, PushBufferId(1))]);
    world.reconnect(OWNER);
    share(&mut world, OWNER);
    assert_eq!(world.push_buffers[1..], [(OWNER, PushBufferId(2))], "a new push buffer");
    world.pull(&plan);
    world.next_frame(OWNER, "Pull");
    assert!(world.is_quiet(OWNER), "once per connection");
}

#[test]
fn an_unexpected_answer_resets_the_link() {
    let mut world =
        SessionWorld::with(|config| config.values = Some(pushpull_common::codec::Encoding::Bf16));
    world.same_host = true;
    let mut world = world.join(&plan(1, 4));
    let ask = world.next_frame(OWNER, "SharePushBuffer");
    world.answer(&ask, message::Left {});
    assert_eq!((world.closed.get(&OWNER), world.push_buffers.len()), (Some(&1), 0));
}

#[test]
fn parts_in_a_push_buffer_are_referenced() {
    let plan = plan(2, 4);
    let mut world = world(&plan, ASYNCHRONOUS);
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer.clone());
    for link in 0..2 {
        let frame = world.next_frame(link, "PushShared");
        assert_eq!(reference(&frame), (70, Some(16), vec![(0, 16)]));
        assert!(frame.body.is_empty() && world.is_quiet(link));
        assert!(Arc::strong_count(&buffer) > 1, "the session holds the buffer");
        world.answer(&frame, push_answer(applied(1)));
    }
    is_applied(&mut world, op);
    assert_eq!(Arc::strong_count(&buffer), 1, "the session has released the buffer");
}

#[test]
fn parts_outside_a_push_buffer_are_sent_into_the_same_slot() {
    let plan = split_plan();
    let mut world = world(&plan, ASYNCHRONOUS);
    assert_eq!(
        world.push_buffers,
        [(OWNER, PushBufferId(1))],
        "only the first shard has a whole variable"
    );
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer);
    let small = plan.catalogue().partitions_of(VariableId(1))[0].clone();
    let reference_frame = world.next_frame(0, "PushShared");
    let part = world.next_frame(0, "PushPart");
    let split = plan.catalogue().partitions_of(VariableId(0))[0].clone();
    let bytes = split.end() - split.offset;
    assert_eq!(reference(&reference_frame), (70, None, vec![(small.offset, small.end())]));
    let (push_slot, whole, offset, body) = sent(&part);
    assert_eq!((push_slot, whole, offset), (70, Some(bytes + 8), split.offset));
    assert_eq!(body.len() as u64, bytes);
    assert!(body[..split.bytes as usize].iter().all(|&byte| byte == 3));
    assert_eq!(part.request(), reference_frame.request());
    world.answer(&part, push_answer(applied(1)));
    let other = world.give_push_slot(1, 4).remove(0);
    world.answer(&other, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn parts_in_an_old_push_buffer_are_sent_into_an_ordinary_slot() {
    let plan = plan(1, 4);
    // Whether the old push buffer is lost before the push begins, or while it is pending.
    for early in [true, false] {
        let mut world = world(&plan, ASYNCHRONOUS);
        let buffer = gradients(&world, &plan, &[0], 3);
        let mut op = None;
        if !early {
            op = Some(push(&mut world, &plan, &[0], buffer.clone()));
            world.next_frame(OWNER, "PushShared");
        }
        world.reconnect(OWNER);
        match op {
            None => op = Some(push(&mut world, &plan, &[0], buffer)),
            Some(_) => {
                let asks = world.next_frame(OWNER, "OutcomeQuery");
                world.answer(&asks, message::OutcomeIs { state: PushState::Unknown {} });
            }
        }
        if early {
            share_beside(&mut world);
        }
        let reserve = world.sent.iter().position(|f| matches!(f.message, Message::Reserve(_)));
        let reserve = world.sent.remove(reserve.unwrap()).unwrap();
        world.answer(&reserve, message::Reserved { push_slot: 5 });
        let part = world.sent.iter().position(|f| matches!(f.message, Message::PushPart(_)));
        let part = world.sent.remove(part.unwrap()).unwrap();
        assert_eq!(sent(&part), (5, Some(16), 0, &[3; 16][..]));
        world.answer(&part, push_answer(applied(1)));
        is_applied(&mut world, op.unwrap());
    }
}

/// Like [`share`], with other frames in the queue.
fn share_beside(world: &mut SessionWorld) {
    for name in ["ShareValues", "SharePushBuffer"] {
        let ask = world.sent.iter().position(|frame| frame.message.name() == name).unwrap();
        let ask = world.sent.remove(ask).unwrap();
        let detail = Detail::clipped("no");
        match name {
            "ShareValues" => world.answer(&ask, refused(Refusal::Unsupported { kind: 6, detail })),
            _ => world.answer(&ask, shared()),
        }
    }
}

#[test]
fn a_share_held_whole_from_a_push_buffer_is_not_sent_again() {
    let plan = plan(1, 4);
    let mut world = world(&plan, ASYNCHRONOUS);
    let buffer = gradients(&world, &plan, &[0], 3);
    let op = push(&mut world, &plan, &[0], buffer);
    world.next_frame(OWNER, "PushShared");
    world.reconnect(OWNER);
    let asks = world.next_frame(OWNER, "OutcomeQuery");
    share(&mut world, OWNER);
    world.answer(&asks, message::OutcomeIs { state: PushState::Receiving { bytes: 16 } });
    let last = world.next_frame(OWNER, "PushPart");
    assert_eq!(sent(&last), (70, Some(16), 0, &[][..]));
    world.answer(&last, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn references_of_a_gradient_of_an_effect_have_the_effect() {
    let plan = plan(1, 4);
    let mut world = world(&plan, ASYNCHRONOUS);
    let buffer = gradients(&world, &plan, &[0], 3);
    let id = EffectId {
        coordinator: CoordinatorId(8),
        epoch: CoordinatorEpoch(9),
        number: EffectNumber(7),
    };
    let effect = EffectRef { id, settled: EffectNumber(4), digest: 0 };
    let op = push_for(&mut world, &plan, &[0], buffer, Some(effect));
    let frame = world.next_frame(OWNER, "EffectShared");
    let Message::EffectShared(EffectShared { shared, effect: found }) = &frame.message else {
        unreachable!()
    };
    assert_eq!((shared.whole, shared.ranges.items().len(), *found), (Some(16), 1, effect));
    world.answer(&frame, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn a_taken_slot_of_a_push_buffer_is_not_referenced_again() {
    let plan = plan(1, 4);
    let mut world = world(&plan, ASYNCHRONOUS);
    let buffer = gradients(&world, &plan, &[0], 3);
    let op = push(&mut world, &plan, &[0], buffer);
    let frame = world.next_frame(OWNER, "PushShared");
    world.answer(&frame, refused(Refusal::PushSlotTaken { push_slot: 70 }));
    let part = world.give_push_slot(OWNER, 5).remove(0);
    assert_eq!(sent(&part), (5, Some(16), 0, &[3; 16][..]));
    world.answer(&part, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn many_ranges_are_referenced_in_several_messages_and_the_last_is_whole() {
    let variable = |i| VariableSpec::f32(format!("v{i}"), [2]).unwrap();
    // The number of ranges, and how many of them each message references.
    for (count, expected) in
        [(6, vec![6]), (25, vec![6, 6, 6, 6, 1]), (48, vec![6; 8]), (1050, vec![1024, 26])]
    {
        let plan = place((0..2 * count).map(variable).collect(), 1);
        let mut world = world(&plan, ASYNCHRONOUS);
        let ids: Vec<u32> = (0..2 * count).step_by(2).collect();
        let buffer = gradients(&world, &plan, &ids, 3);
        let op = push(&mut world, &plan, &ids, buffer);
        let frames: Vec<_> =
            expected.iter().map(|_| world.next_frame(OWNER, "PushShared")).collect();
        assert!(world.is_quiet(OWNER), "{count}");
        let references: Vec<_> = frames.iter().map(reference).collect();
        let lengths: Vec<usize> = references.iter().map(|(_, _, ranges)| ranges.len()).collect();
        assert_eq!(lengths, expected);
        let (last, before) = references.split_last().unwrap();
        assert_eq!(last.1, Some(8 * u64::from(count)), "only the last message is whole");
        assert!(before.iter().all(|(_, whole, _)| whole.is_none()));
        let ranges = references.iter().flat_map(|(_, _, ranges)| ranges);
        assert!(ranges.zip(&ids).all(|(range, &id)| range.0 == 8 * u64::from(id)));
        assert!(frames.iter().all(|frame| frame.request() == frames[0].request()));
        world.answer(frames.last().unwrap(), push_answer(applied(1)));
        is_applied(&mut world, op);
    }
}

#[test]
fn other_shards_get_the_end_of_a_referenced_push_after_the_owners_outcome() {
    let plan = plan(2, 4);
    let mut world = world(&plan, ModeIs::Asynchronous { owner_first: true });
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer);
    assert_eq!(reference(&world.next_frame(1, "PushShared")), (70, None, vec![(0, 16)]));
    assert!(world.is_quiet(1));
    let owner = world.next_frame(OWNER, "PushShared");
    world.answer(&owner, push_answer(applied(1)));
    let last = world.next_frame(1, "PushPart");
    assert_eq!(sent(&last), (70, Some(16), 0, &[][..]));
    world.answer(&last, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn the_gradients_of_a_step_are_kept_until_all_shards_have_applied_them() {
    let plan = plan(2, 4);
    let mode = ModeIs::Synchronous { replicas_to_aggregate: 2, total_num_replicas: 2 };
    let mut world = world(&plan, mode);
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer.clone());
    let [owner, other] = [0, 1].map(|link| world.next_frame(link, "PushShared"));
    world.answer(&other, push_answer(Outcome::Held {}));
    world.answer(&owner, push_answer(Outcome::Accepted { step: GlobalStep(4) }));
    assert!(world.reply(op).is_ok());
    for (step, left_alone) in [(4, true), (5, false)] {
        assert!(Arc::strong_count(&buffer) > 1, "shards still read the buffer");
        world.call(SessionCommand::Token);
        let asks = world.next_frame(OWNER, "TokenRequest");
        let grant = pushpull_common::protocol::Grant { step: GlobalStep(step), ..grant(step, 0) };
        world.answer(&asks, message::Granted { grant });
        assert_eq!(Arc::strong_count(&buffer) > 1, left_alone);
    }

    // No step takes the gradient, so it is released.
    let op = push(&mut world, &plan, &[0, 1], buffer.clone());
    let [owner, other] = [0, 1].map(|link| world.next_frame(link, "PushShared"));
    world.answer(&other, push_answer(Outcome::Held {}));
    world.answer(&owner, push_answer(Outcome::Stale { current: GlobalStep(6) }));
    assert!(world.reply(op).is_ok() && Arc::strong_count(&buffer) == 1);
}
