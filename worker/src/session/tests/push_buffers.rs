//! Pushes of gradients that lie in rooms which shards have lent: they are named, and sent only where the room
//! is of no use.

use std::collections::BTreeMap;
use std::sync::Arc;

use pushpull_common::ids::{GlobalStep, VariableId};
use pushpull_common::protocol::message::{
    self, ModeIs, Operation, PushPart, PushShared, SharedPushBuffer, Stretch,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Message, Outcome, PushState, Refusal};
use pushpull_common::variable::VariableSpec;

use super::world::*;
use crate::params::Buffer;
use crate::parts::Scattered;
use crate::push_buffers::{BufferSlot, GradientBuffer, PushBufferId};
use crate::session::{Command, OpId, PushOrder, Read, Reply};
use crate::sharding_plan::ShardingPlan;

/// A session that has been lent a tray by each of the shards of a plan that has something to lie there.
fn world(plan: &Arc<ShardingPlan>, mode: ModeIs) -> World {
    let mut world = World::new();
    (world.same_host, world.mode) = (true, mode);
    let mut world = world.join(plan);
    for (link, &shard) in plan.shards().iter().enumerate() {
        match plan.keeps_some_whole(shard) {
            true => share(&mut world, link),
            false => drop(world.heard(link, "ShareValues")),
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

/// A shard lends no values, and a tray.
fn share(world: &mut World, link: usize) {
    let ask = world.heard(link, "ShareValues");
    let detail = Detail::clipped("no");
    world.answer(&ask, refused(Refusal::Unsupported { kind: 6, detail }));
    let ask = world.heard(link, "SharePushBuffer");
    world.answer(&ask, shared());
}

/// Gradients that are written to rooms of the trays that were lent last: those of these variables,
/// every byte of which is `fill`.
fn gradients(world: &World, plan: &ShardingPlan, ids: &[u32], fill: u8) -> Arc<GradientBuffer> {
    let mut buffer = GradientBuffer::new(plan, plan.runs(|_| true).into());
    let push_buffers: BTreeMap<usize, PushBufferId> = world.push_buffers.iter().copied().collect();
    let push_slot = |of| {
        let link = plan.shards().iter().position(|&shard| shard == of)?;
        let memory = Box::new(Buffer::of_bytes(1 << 16));
        Some(BufferSlot { shard: of, push_buffer: *push_buffers.get(&link)?, number: 70, memory })
    };
    buffer.renew(|_| true, push_slot);
    for &id in ids {
        let range = plan.range(VariableId(id));
        buffer.slice_mut(range.start..range.end.next_multiple_of(8)).fill(fill);
    }
    Arc::new(buffer)
}

/// Pushes these variables.
fn push(world: &mut World, plan: &ShardingPlan, ids: &[u32], buffer: Arc<GradientBuffer>) -> OpId {
    let scatter = Arc::new(plan.scatter(ids.iter().copied().map(VariableId)));
    let factors = BTreeMap::new();
    let scattered = Some(Scattered { scatter, buffer, factors });
    let (operation, grant) = (Operation::Gradient {}, Some(grant(1, 0)));
    let (read, parts) = (Read::default(), Vec::new());
    world.call(Command::Push {
        order: PushOrder { operation, grant, read, scattered, own: None, parts },
    })
}

fn named(frame: &Frame) -> (u32, Option<u64>, Vec<(u64, u64)>) {
    let Message::PushShared(PushShared { push_slot, whole, ranges, .. }) = &frame.message else {
        panic!("nothing is named: {frame:?}")
    };
    let pair = |range: &Stretch| (range.start, range.end);
    (*push_slot, *whole, ranges.items().iter().map(pair).collect())
}

fn sent(frame: &Frame) -> (u32, Option<u64>, u64, &[u8]) {
    let PushPart { push_slot, whole, offset, .. } = frame.part();
    (*push_slot, *whole, *offset, &frame.body)
}

fn is_applied(world: &mut World, op: OpId) {
    assert!(matches!(world.reply(op), Ok(Reply::Pushed { outcome }) if outcome == applied(1)));
}

#[test]
fn a_tray_is_asked_for_by_those_who_push_what_can_lie_there() {
    let plan = plan(1, 4);
    let world_of = |plan: &Arc<ShardingPlan>, change: fn(&mut crate::session::Start)| {
        let mut world = World::with(change);
        world.same_host = true;
        world.join(plan)
    };
    let mut reads = world_of(&plan, |start| start.role = message::Role::Reader {});
    let ask = reads.heard(OWNER, "ShareValues");
    reads.answer(&ask, message::Refused { refusal: Refusal::NotInitialized {} });
    assert!(reads.is_quiet(OWNER));
    assert!(world_of(&plan, |start| start.shared_memory = false).is_quiet(OWNER));

    let rows = VariableSpec::f32("rows", [4, 2]).unwrap().sparse();
    for variable in [rows, VariableSpec::bf16("halves", [5]).unwrap()] {
        let mut world = world_of(&place(vec![variable], 1), |_| {});
        let ask = world.heard(OWNER, "ShareValues");
        world.answer(&ask, message::Refused { refusal: Refusal::NotInitialized {} });
        assert!(world.is_quiet(OWNER), "nothing would lie there");
    }

    let mut world = world(&plan, ASYNCHRONOUS);
    assert_eq!(world.push_buffers, [(OWNER, PushBufferId(1))]);
    world.reconnect(OWNER);
    share(&mut world, OWNER);
    assert_eq!(world.push_buffers[1..], [(OWNER, PushBufferId(2))], "it is another");
    world.pull(&plan);
    world.heard(OWNER, "Pull");
    assert!(world.is_quiet(OWNER), "once over a connection");
}

#[test]
fn whoever_answers_with_something_else_breaks_the_protocol() {
    let mut world =
        World::with(|start| start.values = Some(pushpull_common::codec::Encoding::Bf16));
    world.same_host = true;
    let mut world = world.join(&plan(1, 4));
    let ask = world.heard(OWNER, "SharePushBuffer");
    world.answer(&ask, message::Left {});
    assert_eq!((world.closed.get(&OWNER), world.push_buffers.len()), (Some(&1), 0));
}

#[test]
fn what_lies_in_a_room_is_named() {
    let plan = plan(2, 4);
    let mut world = world(&plan, ASYNCHRONOUS);
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer.clone());
    for link in 0..2 {
        let frame = world.heard(link, "PushShared");
        assert_eq!(named(&frame), (70, Some(16), vec![(0, 16)]));
        assert!(frame.body.is_empty() && world.is_quiet(link));
        assert!(Arc::strong_count(&buffer) > 1, "the session keeps it");
        world.answer(&frame, push_answer(applied(1)));
    }
    is_applied(&mut world, op);
    assert_eq!(Arc::strong_count(&buffer), 1, "it can be written again");
}

#[test]
fn what_lies_elsewhere_is_sent_into_the_same_room() {
    let plan = split_plan();
    let mut world = world(&plan, ASYNCHRONOUS);
    assert_eq!(world.push_buffers, [(OWNER, PushBufferId(1))], "only the first keeps one whole");
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer);
    let small = plan.catalogue().partitions_of(VariableId(1))[0].clone();
    let (named_frame, part) = (world.heard(0, "PushShared"), world.heard(0, "PushPart"));
    let split = plan.catalogue().partitions_of(VariableId(0))[0].clone();
    let bytes = split.end() - split.offset;
    assert_eq!(named(&named_frame), (70, None, vec![(small.offset, small.end())]));
    let (push_slot, whole, offset, body) = sent(&part);
    assert_eq!((push_slot, whole, offset), (70, Some(bytes + 8), split.offset));
    assert_eq!(body.len() as u64, bytes);
    assert!(body[..split.bytes as usize].iter().all(|&byte| byte == 3));
    assert_eq!(part.request(), named_frame.request());
    world.answer(&part, push_answer(applied(1)));
    let other = world.give_push_slot(1, 4).remove(0);
    world.answer(&other, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn over_another_connection_the_same_is_sent_into_an_ordinary_room() {
    let plan = plan(1, 4);
    // Whether the old tray is known to be gone before the push begins, or while it is under way.
    for early in [true, false] {
        let mut world = world(&plan, ASYNCHRONOUS);
        let buffer = gradients(&world, &plan, &[0], 3);
        let mut op = None;
        if !early {
            op = Some(push(&mut world, &plan, &[0], buffer.clone()));
            world.heard(OWNER, "PushShared");
        }
        world.reconnect(OWNER);
        match op {
            None => op = Some(push(&mut world, &plan, &[0], buffer)),
            Some(_) => {
                let asks = world.heard(OWNER, "OutcomeQuery");
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

/// As [`share`], with something behind it.
fn share_beside(world: &mut World) {
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
fn what_a_shard_kept_whole_of_a_room_needs_no_bytes() {
    let plan = plan(1, 4);
    let mut world = world(&plan, ASYNCHRONOUS);
    let buffer = gradients(&world, &plan, &[0], 3);
    let op = push(&mut world, &plan, &[0], buffer);
    world.heard(OWNER, "PushShared");
    world.reconnect(OWNER);
    let asks = world.heard(OWNER, "OutcomeQuery");
    share(&mut world, OWNER);
    world.answer(&asks, message::OutcomeIs { state: PushState::Receiving { bytes: 16 } });
    let last = world.heard(OWNER, "PushPart");
    assert_eq!(sent(&last), (70, Some(16), 0, &[][..]));
    world.answer(&last, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn a_room_that_is_not_free_there_is_not_named_again() {
    let plan = plan(1, 4);
    let mut world = world(&plan, ASYNCHRONOUS);
    let buffer = gradients(&world, &plan, &[0], 3);
    let op = push(&mut world, &plan, &[0], buffer);
    let frame = world.heard(OWNER, "PushShared");
    world.answer(&frame, refused(Refusal::PushSlotTaken { push_slot: 70 }));
    let part = world.give_push_slot(OWNER, 5).remove(0);
    assert_eq!(sent(&part), (5, Some(16), 0, &[3; 16][..]));
    world.answer(&part, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn many_ranges_are_named_in_several_messages_of_which_the_last_is_whole() {
    let variable = |i| VariableSpec::f32(format!("v{i}"), [2]).unwrap();
    // How many ranges there are, and how many each message names.
    for (count, expected) in
        [(6, vec![6]), (25, vec![6, 6, 6, 6, 1]), (48, vec![6; 8]), (1050, vec![1024, 26])]
    {
        let plan = place((0..2 * count).map(variable).collect(), 1);
        let mut world = world(&plan, ASYNCHRONOUS);
        let ids: Vec<u32> = (0..2 * count).step_by(2).collect();
        let buffer = gradients(&world, &plan, &ids, 3);
        let op = push(&mut world, &plan, &ids, buffer);
        let frames: Vec<_> = expected.iter().map(|_| world.heard(OWNER, "PushShared")).collect();
        assert!(world.is_quiet(OWNER), "{count}");
        let said: Vec<_> = frames.iter().map(named).collect();
        let lengths: Vec<usize> = said.iter().map(|(_, _, ranges)| ranges.len()).collect();
        assert_eq!(lengths, expected);
        let (last, before) = said.split_last().unwrap();
        assert_eq!(last.1, Some(8 * u64::from(count)), "only the last is whole");
        assert!(before.iter().all(|(_, whole, _)| whole.is_none()));
        let ranges = said.iter().flat_map(|(_, _, ranges)| ranges);
        assert!(ranges.zip(&ids).all(|(range, &id)| range.0 == 8 * u64::from(id)));
        assert!(frames.iter().all(|frame| frame.request() == frames[0].request()));
        world.answer(frames.last().unwrap(), push_answer(applied(1)));
        is_applied(&mut world, op);
    }
}

#[test]
fn where_the_owner_has_the_first_word_others_are_told_last_that_it_is_whole() {
    let plan = plan(2, 4);
    let mut world = world(&plan, ModeIs::Asynchronous { owner_first: true });
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer);
    assert_eq!(named(&world.heard(1, "PushShared")), (70, None, vec![(0, 16)]));
    assert!(world.is_quiet(1));
    let owner = world.heard(OWNER, "PushShared");
    world.answer(&owner, push_answer(applied(1)));
    let last = world.heard(1, "PushPart");
    assert_eq!(sent(&last), (70, Some(16), 0, &[][..]));
    world.answer(&last, push_answer(applied(1)));
    is_applied(&mut world, op);
}

#[test]
fn what_is_a_part_of_a_step_is_left_alone_until_all_have_applied_it() {
    let plan = plan(2, 4);
    let mode = ModeIs::Synchronous { replicas_to_aggregate: 2, total_num_replicas: 2 };
    let mut world = world(&plan, mode);
    let buffer = gradients(&world, &plan, &[0, 1], 3);
    let op = push(&mut world, &plan, &[0, 1], buffer.clone());
    let [owner, other] = [0, 1].map(|link| world.heard(link, "PushShared"));
    world.answer(&other, push_answer(Outcome::Held {}));
    world.answer(&owner, push_answer(Outcome::Accepted { step: GlobalStep(4) }));
    assert!(world.reply(op).is_ok());
    for (step, left_alone) in [(4, true), (5, false)] {
        assert!(Arc::strong_count(&buffer) > 1, "it is still read there");
        world.call(Command::Token);
        let asks = world.heard(OWNER, "TokenRequest");
        let grant = pushpull_common::protocol::Grant { step: GlobalStep(step), ..grant(step, 0) };
        world.answer(&asks, message::Granted { grant });
        assert_eq!(Arc::strong_count(&buffer) > 1, left_alone);
    }

    // What no step takes is nobody's.
    let op = push(&mut world, &plan, &[0, 1], buffer.clone());
    let [owner, other] = [0, 1].map(|link| world.heard(link, "PushShared"));
    world.answer(&other, push_answer(Outcome::Held {}));
    world.answer(&owner, push_answer(Outcome::Stale { current: GlobalStep(6) }));
    assert!(world.reply(op).is_ok() && Arc::strong_count(&buffer) == 1);
}
