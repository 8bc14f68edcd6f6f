//! Encoded values in pulls and encoded gradients in pushes.

use std::collections::BTreeMap;
use std::sync::Arc;

use pushpull_common::codec::{Codec, Encoding, Encodings};
use pushpull_common::ids::{GlobalStep, PartitionId, VariableId};
use pushpull_common::protocol::message::{self, OutcomeIs, Pulled, PulledEncoded};
use pushpull_common::protocol::{Message, PushState};
use pushpull_common::tensor::{Element, bf16 as Brain};
use pushpull_common::variable::VariableSpec;

use super::world::{
    OWNER, SentFrame, SessionWorld, applied, grant, halves_plan, place, plan, push_answer, shard,
    welcome,
};
use crate::compression::{CodecRule, Compression};
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::row_requests::RowRequests;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::gradients::staged_parts::StagedParts;
use crate::session::{OpId, PushOrder, ReadPoint, Reply, SessionCommand};

/// Starts a session that pulls bf16, and its pull of 6 floats.
fn pulling() -> (SessionWorld, OpId, SentFrame) {
    let plan = plan(1, 6);
    let mut world = SessionWorld::with(|config| config.values = Some(Encoding::Bf16)).join(&plan);
    let op = world.pull(&plan);
    let frame = world.next_frame(OWNER, "PullEncoded");
    let Message::PullEncoded(asked) = &frame.message else { unreachable!() };
    assert_eq!(asked.encoding, Encoding::Bf16.code());
    (world, op, frame)
}

fn part(offset: u64, bytes: u64, last: bool) -> PulledEncoded {
    PulledEncoded { part: Pulled { version: 1, gradients: 1, offset, last }, bytes }
}

fn bf16(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Codec::Bf16.encode(values, &mut bytes).unwrap();
    bytes
}

#[test]
fn values_are_decoded_part_by_part() {
    let (mut world, op, frame) = pulling();
    world.answer_body(&frame, GlobalStep(3), part(0, 8, false), &bf16(&[1.0, 2.0]));
    world.answer_body(&frame, GlobalStep(3), part(8, 16, true), &bf16(&[3.0, 4.0, 5.0, -6.0]));
    let Ok(Reply::Pulled { buffer, .. }) = world.reply(op) else { panic!() };
    let values: &[f32] = bytemuck::cast_slice(buffer.bytes());
    assert_eq!(values, [1.0, 2.0, 3.0, 4.0, 5.0, -6.0]);
}

#[test]
fn values_of_another_length_reset_the_link() {
    let body = bf16(&[1.0; 6]);
    let mut damaged = body.clone();
    damaged[15] = 1;
    let wrong: [(PulledEncoded, &[u8]); 7] = [
        (part(0, 16, true), &body[..8]),
        (part(0, 24, true), &body[..8]),
        (part(0, 32, true), &body),
        (part(0, u64::MAX, true), &body),
        (part(4, 20, true), &body),
        (part(0, 0, true), &body),
        (part(0, 24, true), &damaged),
    ];
    for (message, body) in wrong {
        let (mut world, _, frame) = pulling();
        world.answer_header(&frame, GlobalStep(3), message.clone(), body.len());
        if !world.closed.contains_key(&OWNER) {
            world.deliver_body(OWNER, body);
        }
        assert_eq!(world.closed.get(&OWNER), Some(&1), "{message:?}");
        world.wait_for_connect(OWNER);
        world.accept(OWNER);
        world.next_frame(OWNER, "PullEncoded");
    }
}

/// Pulls `counts` rows of two variables with rows of `row_bytes` bytes.
fn pull_rows(
    world: &mut SessionWorld,
    plan: &Arc<ShardingPlan>,
    counts: [u64; 2],
    row_bytes: usize,
) -> [OpId; 2] {
    [0, 1].map(|index| {
        let ids: Vec<u64> = (0..counts[index]).collect();
        let mut wanted = RowRequests::default();
        wanted.build(plan, VariableId(index as u32), &ids);
        let plan = plan.clone();
        let wanted = Arc::new(wanted);
        let buffer = AlignedBuffer::of_bytes(ids.len() * row_bytes);
        world.call(SessionCommand::PullRows { plan, buffer, rows: wanted, token: None })
    })
}

/// Returns the values that two pulls have read, concatenated.
fn pulled_values<T: Element>(
    world: &mut SessionWorld,
    ops: [OpId; 2],
    counts: [usize; 2],
) -> Vec<T> {
    let of = |(op, count)| {
        let Ok(Reply::Pulled { buffer, .. }) = world.reply(op) else { panic!() };
        bytemuck::cast_slice::<u8, T>(buffer.bytes())[..count].to_vec()
    };
    ops.into_iter().zip(counts).flat_map(of).collect()
}

/// Starts a session that pulls bf16. It pulls two rows of a trainable variable and one of a plain
/// variable.
fn pulling_rows() -> (SessionWorld, [OpId; 2], [SentFrame; 2]) {
    let sparse = |name: &str| VariableSpec::f32(name, [4, 3]).unwrap().sparse();
    let plan = place(vec![sparse("trained"), sparse("plain").plain()], 1);
    let mut world = SessionWorld::with(|config| config.values = Some(Encoding::Bf16)).join(&plan);
    let ops = pull_rows(&mut world, &plan, [2, 1], 12);
    let short = world.next_frame(OWNER, "PullRowsEncoded");
    let Message::PullRowsEncoded(asked) = &short.message else { unreachable!() };
    assert_eq!((asked.encoding, asked.pull.partition), (Encoding::Bf16.code(), PartitionId(0)));
    let plain = world.next_frame(OWNER, "PullRows");
    (world, ops, [short, plain])
}

const ROWS: message::Rows = message::Rows { version: 1, gradients: 1 };

#[test]
fn rows_of_trainable_variables_are_decoded_in_place() {
    let (mut world, ops, [short, plain]) = pulling_rows();
    let rows = [1.0, 2.0, 3.0, 4.0, 5.0, -6.0];
    let body = [7f32, 8.0, 0.1].map(f32::to_le_bytes).concat();
    world.answer_body(&plain, GlobalStep(3), ROWS, &body);
    world.answer_body(&short, GlobalStep(3), ROWS, &bf16(&rows));
    let values: Vec<f32> = pulled_values(&mut world, ops, [6, 3]);
    assert_eq!(values, [1.0, 2.0, 3.0, 4.0, 5.0, -6.0, 7.0, 8.0, 0.1]);
}

#[test]
fn rows_of_another_length_reset_the_link() {
    let body = bf16(&[1.0; 6]);
    let mut damaged = body.clone();
    damaged[13] = 1;
    for body in [&body[..8], &[0; 24], &[], &damaged] {
        let (mut world, _, [short, _]) = pulling_rows();
        world.answer_header(&short, GlobalStep(3), ROWS, body.len());
        if !world.closed.contains_key(&OWNER) {
            world.deliver_body(OWNER, body);
        }
        assert_eq!(world.closed.get(&OWNER), Some(&1), "{body:?}");
        world.wait_for_connect(OWNER);
        world.accept(OWNER);
        world.next_frame(OWNER, "PullRowsEncoded");
    }
}

/// Rows of half-precision variables come in their own type, regardless of the chosen encoding, and
/// are stored unchanged. Any other encoding or non-zero padding resets the connection.
#[test]
fn half_precision_rows_keep_their_own_type() {
    let sparse = |name: &str| VariableSpec::bf16(name, [4, 3]).unwrap().sparse();
    let plan = place(vec![sparse("trained"), sparse("plain").plain()], 1);
    let begin = |chosen: Option<Encoding>| {
        let mut world = SessionWorld::with(|config| config.values = chosen).join(&plan);
        let ops = pull_rows(&mut world, &plan, [2, 1], 6);
        let frames = [(); 2].map(|()| world.next_frame(OWNER, "PullRowsEncoded"));
        for frame in &frames {
            let Message::PullRowsEncoded(asked) = &frame.message else { unreachable!() };
            assert_eq!(asked.encoding, Encoding::Bf16.code());
        }
        (world, ops, frames)
    };
    let rows = [1.0, 2.0, 3.0, 4.0, 5.0, -6.0];
    for chosen in [None, Some(Encoding::F16), Some(Encoding::Bf16)] {
        let (mut world, ops, [trained, plain]) = begin(chosen);
        world.answer_body(&plain, GlobalStep(3), ROWS, &bf16(&[7.0, 8.0, f32::INFINITY]));
        world.answer_body(&trained, GlobalStep(3), ROWS, &bf16(&rows));
        let values: Vec<Brain> = pulled_values(&mut world, ops, [6, 3]);
        let expected = [1.0, 2.0, 3.0, 4.0, 5.0, -6.0, 7.0, 8.0, f32::INFINITY];
        assert_eq!(values, expected.map(Brain::from_f32));
    }
    let mut damaged = bf16(&rows);
    damaged[13] = 1;
    for body in [&bf16(&rows)[..8], &[0; 24], &[0; 12], &[], &damaged] {
        let (mut world, _, [trained, _]) = begin(None);
        world.answer_header(&trained, GlobalStep(3), ROWS, body.len());
        if !world.closed.contains_key(&OWNER) {
            world.deliver_body(OWNER, body);
        }
        assert_eq!(world.closed.get(&OWNER), Some(&1), "{body:?}");
    }
}

/// Half-precision values come in their own type, regardless of the chosen encoding, and are stored
/// unchanged.
#[test]
fn half_precision_values_keep_their_own_type() {
    let plan = halves_plan();
    for (chosen, code) in [(None, 0), (Some(Encoding::F16), Encoding::F16.code())] {
        let mut world = SessionWorld::with(|config| config.values = chosen).join(&plan);
        let op = world.pull(&plan);
        let frame = world.next_frame(OWNER, "PullEncoded");
        let Message::PullEncoded(asked) = &frame.message else { unreachable!() };
        assert_eq!(asked.encoding, code);
        // Four of five, then the last with its padding.
        world.answer_body(&frame, GlobalStep(3), part(0, 16, false), &bf16(&[1.0, 2.0, 3.0, 4.0]));
        world.answer_body(&frame, GlobalStep(3), part(16, 8, true), &bf16(&[-5.0]));
        let Ok(Reply::Pulled { buffer, .. }) = world.reply(op) else { panic!() };
        let values: &[Brain] = bytemuck::cast_slice(buffer.bytes());
        assert_eq!(values[..5], [1.0, 2.0, 3.0, 4.0, -5.0].map(Brain::from_f32));
    }
}

#[test]
fn half_precision_values_in_another_encoding_reset_the_link() {
    let plan = halves_plan();
    let body = bf16(&[1.0; 5]);
    let mut damaged = body.clone();
    damaged[15] = 1;
    let short: [(Message, &[u8]); 3] = [
        // In the form in which servers store them.
        (part(0, 24, true).part.into(), &[0; 24]),
        (part(0, 24, true).into(), &body[..8]),
        (part(0, 24, true).into(), &damaged),
    ];
    for (message, body) in short {
        let mut world = SessionWorld::with(|_| ()).join(&plan);
        world.pull(&plan);
        let frame = world.next_frame(OWNER, "PullEncoded");
        world.answer_header(&frame, GlobalStep(3), message.clone(), body.len());
        if !world.closed.contains_key(&OWNER) {
            world.deliver_body(OWNER, body);
        }
        assert_eq!(world.closed.get(&OWNER), Some(&1), "{message:?}");
    }
}

#[test]
fn a_server_without_encodings_is_asked_for_plain_values() {
    let plan = plan(1, 6);
    let mut world = SessionWorld::with(|config| config.values = Some(Encoding::Bf16));
    let open = world.call(SessionCommand::Open { shards: vec![shard(0)] });
    let hello = world.connect(OWNER);
    world.answer(&hello, message::Welcome { encodings: Encodings(0), ..welcome() });
    let Ok(Reply::Opened(welcomed)) = world.reply(open) else { panic!() };
    assert_eq!(welcomed.encodings, BTreeMap::from([(shard(0), Encodings(0))]));
    world.pull(&plan);
    world.next_frame(OWNER, "Pull");
}

/// A gradient is encoded once. Repeats send the same bytes.
#[test]
fn an_encoded_push_is_repeated_without_encoding_it_again() {
    let plan = plan(1, 6);
    let names = plan.catalogue().variable(VariableId(0)).name().to_owned();
    let rules = [CodecRule { names: names.into(), codec: Some(Codec::OneBit) }];
    let mut compression = Compression::new(plan.catalogue(), &rules, &BTreeMap::new(), 0).unwrap();
    let gradient: Vec<u8> = [1f32, -2.0, 3.0, 0.5, 7.0, -1.0].map(f32::to_ne_bytes).concat();
    let words: Vec<u64> =
        gradient.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
    let mut staged = StagedParts::default();
    let bytes = bytemuck::cast_slice(&words);
    compression.encode(&plan, VariableId(0), bytes, 1.0, &mut staged.copies).unwrap();
    let saved = compression.save(plan.catalogue()).unwrap();
    let operation = message::Operation::Gradient {};
    let order = PushOrder::of_parts(operation, Some(grant(1, 0)), ReadPoint::default(), Vec::new());
    let order = PushOrder { staged: Some(Arc::new(staged)), ..order };

    let mut world = SessionWorld::joined(&plan);
    let op = world.call(SessionCommand::Push { order });
    let reserve = world.next_frame(OWNER, "Reserve");
    world.answer(&reserve, message::Reserved { push_slot: 1 });
    let first = world.next_frame(OWNER, "PushEncoded");
    world.reconnect(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Unknown {} });
    let reserve = world.next_frame(OWNER, "Reserve");
    world.answer(&reserve, message::Reserved { push_slot: 2 });
    let again = world.next_frame(OWNER, "PushEncoded");
    assert_eq!(again.body, first.body);
    let Message::PushEncoded(message) = &again.message else { unreachable!() };
    assert_eq!((message.encoding, message.elements), (Encoding::OneBit.code(), 6));
    assert_eq!((message.part.offset, message.part.whole), (0, Some(24)));
    // The server holds the whole push: the session repeats only the end of the last part.
    world.reconnect(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 24 } });
    let last = world.next_frame(OWNER, "PushPart");
    assert_eq!((last.body.len(), last.part().whole), (0, Some(24)));
    world.answer(&last, push_answer(applied(1)));
    assert!(matches!(world.reply(op), Ok(Reply::Pushed { .. })));
    assert_eq!(compression.save(plan.catalogue()).unwrap(), saved);
}
