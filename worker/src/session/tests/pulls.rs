//! Pulls: one request to each shard, whose answers fill one buffer.

use std::sync::Arc;

use pushpull_common::ids::{GlobalStep, VariableId};
use pushpull_common::protocol::message::{self, Pull, Pulled, Selection};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, Refusal};

use super::world::{OWNER, SentFrame, SessionWorld, plan, refused, shard, split_plan};
use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, ReadPoint, Reply, SessionCommand};

fn part(offset: u64, last: bool) -> Pulled {
    Pulled { version: 1, gradients: 1, offset, last }
}

/// Answers a pull in two parts; every byte is `byte`.
fn fill(world: &mut SessionWorld, plan: &ShardingPlan, frame: &SentFrame, byte: u8) {
    let bytes = plan.catalogue().layout(shard(frame.link as u32)).bytes();
    let half = (bytes / 2).next_multiple_of(8);
    let step = GlobalStep(u64::from(byte));
    world.answer_body(frame, step, part(0, false), &vec![byte; half as usize]);
    world.answer_body(frame, step, part(half, true), &vec![byte; (bytes - half) as usize]);
}

/// Returns the values pulled of each variable, and the step.
fn values(world: &mut SessionWorld, plan: &ShardingPlan, op: OpId) -> (Vec<Vec<u8>>, u64) {
    let Ok(Reply::Pulled { buffer, read }) = world.reply(op) else { panic!() };
    let variables = 0..plan.catalogue().variables().len() as u32;
    let bytes = variables.map(|id| buffer.bytes()[plan.range(VariableId(id))].to_vec());
    (bytes.collect(), read.step.0)
}

#[test]
fn shards_answer_in_any_order() {
    let plan = plan(3, 100);
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let frames: Vec<SentFrame> = (0..3).map(|link| world.next_frame(link, "Pull")).collect();
    let half = |byte| vec![byte; 200];
    // The parts of the three answers are interleaved.
    world.answer_body(&frames[2], GlobalStep(0), part(0, false), &half(3));
    world.answer_body(&frames[0], GlobalStep(9), part(0, false), &half(1));
    world.answer_body(&frames[2], GlobalStep(0), part(200, true), &half(3));
    fill(&mut world, &plan, &frames[1], 2);
    assert!(world.is_pending(op));
    world.answer_body(&frames[0], GlobalStep(9), part(200, true), &half(1));
    let expected = [1_u8, 2, 3].map(|byte| vec![byte; 400]).to_vec();
    assert_eq!(values(&mut world, &plan, op), (expected, 9));
}

#[test]
fn parts_of_a_split_variable_are_joined_without_padding() {
    let plan = split_plan();
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let mut whole = [vec![0; 84], vec![0; 4]];
    for link in [1, 0] {
        let frame = world.next_frame(link, "Pull");
        let layout = plan.catalogue().layout(shard(link as u32));
        let mut body = vec![0xee; layout.bytes() as usize];
        for partition in layout.partitions() {
            for at in 0..partition.bytes as usize {
                let place = partition.elements.start as usize * 4 + at;
                body[partition.offset as usize + at] = place as u8;
                whole[partition.variable.0 as usize][place] = place as u8;
            }
        }
        for (index, bytes) in body.chunks(8).enumerate() {
            let last = (index + 1) * 8 == body.len();
            world.answer_body(&frame, GlobalStep(1), part(index as u64 * 8, last), bytes);
        }
    }
    assert_eq!(whole[0], (0..84).collect::<Vec<u8>>());
    assert_eq!(values(&mut world, &plan, op).0, whole);
}

#[test]
fn the_step_of_a_pull_is_that_of_its_values() {
    let plan = plan(2, 2);
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let owner = world.next_frame(0, "Pull");
    let other = world.next_frame(1, "Pull");
    world.answer_body(&owner, GlobalStep(10), part(0, true), &[1; 8]);
    // The owner has advanced since its values were read.
    world.answers_heartbeats = false;
    world.advance(super::world::LEASE / 5);
    let beat = world.next_frame(OWNER, "Heartbeat");
    world.answer_body(&beat, GlobalStep(12), message::HeartbeatAnswer {}, &[]);
    world.answer_body(&other, GlobalStep(0), part(0, true), &[2; 8]);
    assert_eq!(values(&mut world, &plan, op).1, 10);
}

#[test]
fn an_asynchronous_pull_for_a_token_accepts_shards_at_any_step() {
    let plan = plan(2, 2);
    let mut world = SessionWorld::joined(&plan);
    let to = plan.clone();
    let buffer = AlignedBuffer::of_bytes(plan.bytes());
    let op = world.call(SessionCommand::Pull { plan: to, buffer, token: Some(GlobalStep(5)) });
    for (link, step) in [(1, 0), (0, 7)] {
        let frame = world.next_frame(link, "Pull");
        assert_eq!(frame.envelope.step, GlobalStep(5));
        world.answer_body(&frame, GlobalStep(step), part(0, true), &[1; 8]);
    }
    assert_eq!(values(&mut world, &plan, op).1, 7);
}

#[test]
fn a_pull_returns_how_many_gradients_each_shard_had_applied() {
    let plan = plan(2, 2);
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let part = |gradients| Pulled { gradients, ..part(0, true) };
    let owner = world.next_frame(0, "Pull");
    let other = world.next_frame(1, "Pull");
    world.answer_body(&owner, GlobalStep(7), part(4), &[1; 8]);
    // The other shard is asked again after a reconnect, and has advanced.
    world.answer_header(&other, GlobalStep(0), part(5), 8);
    world.disconnect(1);
    world.reconnect(1);
    let other = world.next_frame(1, "Pull");
    world.answer_body(&other, GlobalStep(0), part(6), &[1; 8]);
    let Ok(Reply::Pulled { read, .. }) = world.reply(op) else { panic!() };
    let gradients = [(shard(0), 4), (shard(1), 6)].into();
    assert_eq!(read, ReadPoint { step: GlobalStep(7), gradients });
}

// W-2.
#[test]
fn a_refused_pull_fails_and_later_answers_are_discarded() {
    let plan = plan(2, 2);
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let owner = world.next_frame(0, "Pull");
    let other = world.next_frame(1, "Pull");
    let refusal = Refusal::Deadline { waited_ms: 1, awaited: Detail::clipped("step 9") };
    world.answer(&owner, refused(refusal.clone()));
    let expected = Error::Refused { doing: "pull", shard: shard(0), refusal };
    assert_eq!(world.reply(op).unwrap_err(), expected);
    world.answer_header(&other, GlobalStep(0), part(0, true), 8);
    assert!(!world.deliver_body(1, &[1; 8]));
    assert!(world.closed.is_empty());
}

#[test]
fn an_interrupted_answer_is_requested_again() {
    let plan = plan(2, 4);
    // Cut before the answer, in its middle, and after its last header but before that body.
    for cut_at in 0..4 {
        let mut world = SessionWorld::joined(&plan);
        let op = world.pull(&plan);
        let first = world.next_frame(1, "Pull");
        if cut_at > 0 {
            world.answer_body(&first, GlobalStep(0), part(0, false), &[7; 8]);
        }
        match cut_at {
            2 => world.answer_header(&first, GlobalStep(0), part(8, true), 8),
            3 => world.answer_header(&first, GlobalStep(0), part(8, false), 4),
            _ => {}
        }
        world.reconnect(1);
        let again = world.next_frame(1, "Pull");
        assert!(again.request() > first.request());
        fill(&mut world, &plan, &again, 2);
        let owner = world.next_frame(0, "Pull");
        fill(&mut world, &plan, &owner, 1);
        let expected = vec![vec![1; 16], vec![2; 16]];
        assert_eq!(values(&mut world, &plan, op).0, expected, "cut at {cut_at}");
    }
}

#[test]
fn a_shard_that_has_answered_is_not_asked_again() {
    let plan = plan(2, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let owner = world.next_frame(0, "Pull");
    fill(&mut world, &plan, &owner, 1);
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER));
    let other = world.next_frame(1, "Pull");
    fill(&mut world, &plan, &other, 2);
    world.reply(op).unwrap();
}

#[test]
fn the_body_of_a_cancelled_pull_is_discarded() {
    let plan = plan(1, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let frame = world.next_frame(OWNER, "Pull");
    world.answer_header(&frame, GlobalStep(0), part(0, false), 8);
    assert!(world.session.with_targets(OWNER, |targets| targets.is_some()));
    world.cancel(op);
    assert!(!world.deliver_body(OWNER, &[1; 8]), "the buffer of the pull is gone");
    world.answer_body(&frame, GlobalStep(0), part(8, true), &[1; 8]);
    let next = world.pull(&plan);
    let frame = world.next_frame(OWNER, "Pull");
    fill(&mut world, &plan, &frame, 5);
    assert_eq!(values(&mut world, &plan, next).0, [vec![5; 16]]);
    assert!(world.closed.is_empty());
}

/// After a first part of 8 bytes of 16, sends a part that resets the connection. The pull is
/// repeated and succeeds.
fn resets_link(offset: u64, bytes: usize, last: bool) {
    let plan: Arc<ShardingPlan> = plan(1, 4);
    let mut world = SessionWorld::joined(&plan);
    let op = world.pull(&plan);
    let frame = world.next_frame(OWNER, "Pull");
    world.answer_body(&frame, GlobalStep(0), part(0, false), &[9; 8]);
    world.answer_header(&frame, GlobalStep(0), part(offset, last), bytes);
    assert_eq!(world.closed.get(&OWNER), Some(&1), "{offset} {bytes} {last}");
    assert!(world.session.with_targets(OWNER, |targets| targets.is_none()));
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let frame = world.next_frame(OWNER, "Pull");
    fill(&mut world, &plan, &frame, 5);
    assert_eq!(values(&mut world, &plan, op).0, [vec![5; 16]]);
}

#[test]
fn values_beyond_the_shard_reset_the_link() {
    for last in [false, true] {
        resets_link(8, 16, last);
        resets_link(16, 8, last);
        resets_link(u64::MAX, 8, last);
        resets_link(u64::MAX - 8, 8, last);
    }
}

#[test]
fn values_with_a_gap_reset_the_link() {
    resets_link(8, 0, true);
    resets_link(12, 4, true);
    resets_link(8, 4, true);
    resets_link(0, 16, true);
}

/// Pulls one variable of [`split_plan`], for a token of this step.
fn one(world: &mut SessionWorld, plan: &Arc<ShardingPlan>, variable: u32, step: u64) -> OpId {
    let variable = VariableId(variable);
    let token = Some(GlobalStep(step));
    let buffer = AlignedBuffer::of_bytes(plan.range(variable).len());
    world.call(SessionCommand::PullVariable { plan: plan.clone(), variable, buffer, token })
}

/// Returns the range of a variable's partition in the layout of a shard.
fn place(plan: &ShardingPlan, variable: u32, task: u32) -> std::ops::Range<u64> {
    let partitions = plan.catalogue().partitions_of(VariableId(variable));
    let found = partitions.iter().find(|partition| partition.shard == shard(task)).unwrap();
    found.offset..found.end()
}

#[test]
fn a_pull_of_one_variable_asks_its_shards_and_fills_its_own_buffer() {
    let plan = split_plan();
    let mut world = SessionWorld::joined(&plan);
    let split = one(&mut world, &plan, 0, 4);
    let small = one(&mut world, &plan, 1, 4);
    let asked = |frame: &SentFrame| match &frame.message {
        Message::Pull(Pull { selection: Selection::Partitions { partitions } }) => {
            partitions.items().len()
        }
        other => panic!("{other:?}"),
    };
    let frames =
        [world.next_frame(0, "Pull"), world.next_frame(1, "Pull"), world.next_frame(0, "Pull")];
    assert_eq!(frames.each_ref().map(asked), [1, 1, 1]);
    assert!(frames.iter().all(|frame| frame.envelope.step == GlobalStep(4)));
    assert!(world.is_quiet(1), "shard 1 has no part of the small variable");
    // The second pull is answered first. The first gets two parts from one shard, with padding
    // behind.
    let at = place(&plan, 1, 0);
    let values = vec![9; (at.end - at.start) as usize];
    world.answer_body(&frames[2], GlobalStep(5), part(at.start, true), &values);
    let Ok(Reply::Pulled { buffer, read }) = world.reply(small) else { panic!() };
    assert_eq!((&buffer.bytes()[..4], read.step), (&[9; 4][..], GlobalStep(5)));
    let mut expected = Vec::new();
    for (frame, task) in [(&frames[0], 0), (&frames[1], 1)] {
        let at = place(&plan, 0, task);
        let middle = at.start + 8;
        let fill = |bytes: u64| vec![task as u8 + 1; bytes as usize];
        world.answer_body(frame, GlobalStep(6), part(at.start, false), &fill(8));
        let rest = fill(at.end - middle);
        world.answer_body(frame, GlobalStep(6), part(middle, true), &rest);
        let bytes = plan.catalogue().partitions_of(VariableId(0))[task as usize].bytes;
        expected.extend(fill(bytes));
    }
    let Ok(Reply::Pulled { buffer, .. }) = world.reply(split) else { panic!() };
    assert_eq!(&buffer.bytes()[..84], expected);
}

#[test]
fn values_of_another_variable_reset_the_link() {
    let plan = split_plan();
    let at = place(&plan, 0, 0);
    let other = place(&plan, 1, 0);
    let bytes = |range: &std::ops::Range<u64>| (range.end - range.start) as usize;
    let answers = [
        (part(other.start, true), bytes(&other)),
        (part(at.start.min(other.start), true), bytes(&at) + bytes(&other)),
        (part(at.start + 8, true), bytes(&at) - 8),
        (part(at.start, true), bytes(&at) - 8),
        (part(u64::MAX - 7, true), 8),
    ];
    for (answer, bytes) in answers {
        let mut world = SessionWorld::joined(&plan);
        let op = one(&mut world, &plan, 0, 0);
        let frame = world.next_frame(0, "Pull");
        world.answer_header(&frame, GlobalStep(0), answer.clone(), bytes);
        assert_eq!(world.closed.get(&0), Some(&1), "{answer:?} of {bytes} bytes");
        // It is repeated over the next connection.
        world.wait_for_connect(0);
        world.accept(0);
        let frame = world.next_frame(0, "Pull");
        assert!(matches!(
            &frame.message,
            Message::Pull(Pull { selection: Selection::Partitions { .. } })
        ));
        assert!(world.is_pending(op));
    }
}
