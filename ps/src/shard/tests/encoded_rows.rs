//! Encoded rows, pushed and pulled.

use pushpull_common::codec::{Codec, Encoding, ScaleBlocks};
use pushpull_common::ids::{PartitionId, VariableId};
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Envelope, Message, Outcome, Refusal};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, f32s, index_of, worker};
use super::world::{ConnectionId, World};

/// `rows` (5 of 3 f32, at 0; its index at 152), `plain` (4 of 1 f32, at 64) and `users` (3 f32, 6
/// rows at once, at 80; its index at 208).
fn ready() -> (World, ConnectionId) {
    let variables = vec![
        VariableSpec::f32("rows", [5, 3]).unwrap().sparse(),
        VariableSpec::f32("plain", [4]).unwrap().sparse().plain(),
        VariableSpec::table("users", DType::F32, [3], TableSpec::new(1 << 20).rows_at_once(6))
            .unwrap(),
    ];
    let (mut world, _) = World::ready(variables, Sgd::new(1.0), |config| config.inbox_pushes(1));
    let line = world.join(0, &mut worker(1));
    (world, line)
}

const ROWS: (u64, u64) = (0, 152);
const USERS: (u64, u64) = (80, 208);

/// The values of two rows.
const VALUES: [f32; 6] = [1.27, 0.01, -0.5, 100.0, 127.0, -1.0];

/// Encodes a stretch of rows of three, which begins at element `before` of a row.
fn encode(codec: Codec, before: usize, values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec.encode_rows(ScaleBlocks::of_rows(3, before), values, &mut bytes).unwrap();
    bytes
}

fn decode(codec: Codec, before: usize, values: &[f32]) -> Vec<f32> {
    let bytes = encode(codec, before, values);
    let mut found = vec![0.0; values.len()];
    let blocks = ScaleBlocks::of_rows(3, before);
    codec.encoding().decode_rows(blocks, &bytes, &mut found).unwrap();
    found
}

/// A part of rows: offset, encoding, number of elements, body, and in the last part the bytes of
/// all parts of rows.
type Encoded<'a> = (u64, u8, u32, &'a [u8], Option<u64>);

fn send(
    world: &mut World,
    line: ConnectionId,
    push: &Push,
    index: (u64, &[u8]),
    parts: &[Encoded<'_>],
) -> Message {
    world.send(line, push.envelope(), push.part(index.0, None), index.1);
    let mut last = None;
    for &(offset, encoding, elements, body, whole) in parts {
        let whole = whole.map(|bytes| bytes + index.1.len() as u64);
        let message = push.encoded(encoding, elements, offset, whole);
        last = Some(world.send(line, push.envelope(), message, body));
    }
    world.work();
    world.answer(line, last.unwrap()).unwrap()
}

/// Pushes rows 1 and 4 in encoded parts, and returns the answer.
fn push(world: &mut World, line: ConnectionId, parts: &[Encoded<'_>]) -> Message {
    let gradient = world.gradient(line, 1);
    send(world, line, &gradient, (ROWS.1, &index_of(&[1_u32, 4])), parts)
}

/// Pulls rows by their numbers, plain or in an encoding.
fn pull<T: bytemuck::Pod>(
    world: &mut World,
    line: ConnectionId,
    partition: u32,
    rows: &[T],
    encoding: Option<u8>,
) -> Result<Vec<u8>, Refusal> {
    let pull = message::PullRows { partition: PartitionId(partition) };
    let message = match encoding {
        None => pull.into(),
        Some(encoding) => message::PullRowsEncoded { pull, encoding }.into(),
    };
    let numbers = &bytes_of(rows)[..size_of_val(rows)];
    let request = world.send(line, Envelope::default(), message, numbers);
    world.work();
    match world.answer_with_body(line, request) {
        (Message::Rows(_), body) => Ok(body),
        (Message::Refused(refused), _) => Err(refused.refusal),
        (other, _) => panic!("rows are answered by {other:?}"),
    }
}

fn is_applied(answer: &Message) -> bool {
    matches!(
        answer,
        Message::PushAnswer(message::PushAnswer { outcome: Outcome::Applied { .. }, .. })
    )
}

#[test]
fn encoded_rows_are_decoded_into_the_inbox() {
    for codec in [Codec::F16, Codec::Bf16, Codec::Int8] {
        let code = codec.encoding().code();
        let all = encode(codec, 0, &VALUES);
        let head = encode(codec, 0, &VALUES[..4]);
        let tail = encode(codec, 1, &VALUES[4..]);
        let whole: &[Encoded<'_>] = &[(0, code, 6, &all, Some(24))];
        // The second part begins within a row, which then has two scales.
        let cut: &[Encoded<'_>] = &[(0, code, 4, &head, None), (16, code, 2, &tail, Some(24))];
        for (parts, expected) in [
            (whole, decode(codec, 0, &VALUES)),
            (cut, [decode(codec, 0, &VALUES[..4]), decode(codec, 1, &VALUES[4..])].concat()),
        ] {
            for chop in [usize::MAX, 5, 1] {
                let (mut world, line) = ready();
                world.chop = chop;
                let answer = push(&mut world, line, parts);
                assert!(is_applied(&answer), "{codec}: {answer:?}");
                let rows = f32s(&pull(&mut world, line, 0, &[1_u32, 4], None).unwrap());
                assert!(rows.iter().zip(&expected).all(|(row, value)| *row == -value), "{codec}");
                let others = pull(&mut world, line, 0, &[0_u32, 2, 3], None).unwrap();
                assert_eq!(f32s(&others), [0.0; 9]);
            }
        }
    }
}

#[test]
fn encoded_rows_of_growing_tables_are_decoded_into_the_inbox() {
    let (mut world, line) = ready();
    let code = Encoding::Int8.code();
    // Three rows: an odd number, so that padding follows.
    let ids = [7_u64, 1 << 40, u64::MAX];
    let values = [&VALUES[..], &[0.25, 0.5, 3.0]].concat();
    let body = encode(Codec::Int8, 0, &values);
    let gradient = world.gradient(line, 1);
    let parts = [(USERS.0, code, 9, &body[..], Some(40))];
    let answer = send(&mut world, line, &gradient, (USERS.1, &index_of(&ids)), &parts);
    assert!(is_applied(&answer), "{answer:?}");
    let rows = f32s(&pull(&mut world, line, 2, &ids, None).unwrap());
    let expected: Vec<f32> = decode(Codec::Int8, 0, &values).iter().map(|value| -value).collect();
    assert_eq!(rows, expected);
    // A pull returns them in a shorter form.
    let short = pull(&mut world, line, 2, &ids, Some(Encoding::Bf16.code())).unwrap();
    assert_eq!(short, encode(Codec::Bf16, 0, &rows));
}

/// Malformed rows are refused and change nothing, and the push slot serves the next push.
#[test]
fn malformed_rows_are_refused_with_their_variable() {
    let f16 = Encoding::F16.code();
    let int8 = Encoding::Int8.code();
    let body = encode(Codec::Int8, 0, &VALUES);
    let refused = |parts: &[Encoded<'_>]| {
        let (mut world, line) = ready();
        let refusal = match push(&mut world, line, parts) {
            Message::Refused(refused) => refused.refusal,
            other => panic!("not refused but {other:?}"),
        };
        let push_slot = world.push_slot(line);
        let grant = world.token(line);
        let push = Push::gradient(2, grant, push_slot);
        let index = index_of(&[0_u32, 1]);
        let values = bytes_of(&[1f32; 6]);
        let answer = world.push_answer(line, &push, &[(ROWS.1, &index), (ROWS.0, &values)]);
        assert!(is_applied(&answer), "{answer:?}");
        let rows = pull(&mut world, line, 0, &[0_u32, 1, 4], None).unwrap();
        assert_eq!(f32s(&rows), [-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0]);
        refusal
    };
    let encoding = |refusal: Refusal, words: &str| match refusal {
        Refusal::Encoding { variable, detail, .. } => {
            assert!(variable == VariableId(0) && detail.as_str().contains(words), "{detail}");
        }
        other => panic!("{other:?}"),
    };
    for other in [Encoding::OneBit, Encoding::Pairs] {
        encoding(refused(&[(0, other.code(), 6, &[0; 16], Some(24))]), "rows cannot have it");
    }
    encoding(refused(&[(0, 77, 6, &body, Some(24))]), "is unknown");
    // The length that it would have if the rows shared one scale.
    encoding(refused(&[(0, int8, 6, &body[..10], Some(24))]), "10 bytes for 6 elements");
    let mut scale = body.clone();
    scale[7..11].copy_from_slice(&f32::NAN.to_le_bytes());
    encoding(refused(&[(0, int8, 6, &scale, Some(24))]), "block 1");
    let mut padding = body.clone();
    *padding.last_mut().unwrap() = 1;
    encoding(refused(&[(0, int8, 6, &padding, Some(24))]), "padding");

    let half = |values: &[f32]| encode(Codec::F16, 0, values);
    let range = |offset, bytes, limit| Refusal::Range { offset, bytes, limit };
    let long = [(0, f16, 16, &half(&[1.0; 16])[..], Some(64))];
    assert_eq!(refused(&long), range(0, 64, 60));
    assert_eq!(refused(&[(0, f16, u32::MAX, &[], Some(24))]), range(0, 4 * 0xffff_ffff, 60));
    assert_eq!(refused(&[(0, f16, 0, &[], Some(24))]), range(0, 0, 60));
    assert_eq!(refused(&[(2, f16, 1, &[0; 8], Some(24))]), range(2, 4, 60));
    assert_eq!(refused(&[(152, f16, 1, &[0; 8], Some(24))]), range(152, 8, 152));
    assert!(matches!(refused(&[(u64::MAX, f16, 1, &[0; 8], Some(24))]), Refusal::Range { .. }));
    // Fewer rows than the index says, and more.
    let incomplete = |bytes| Refusal::Incomplete { partition: PartitionId(0), bytes, expected: 24 };
    assert_eq!(refused(&[(0, f16, 3, &half(&VALUES[..3]), Some(16))]), incomplete(16));
    assert_eq!(refused(&[(0, f16, 9, &half(&[1.0; 9]), Some(40))]), incomplete(40));
    let nan = half(&[1.0, 2.0, 3.0, f32::NAN, 5.0, 6.0]);
    let Refusal::NonFinite { variable, .. } = refused(&[(0, f16, 6, &nan, Some(24))]) else {
        panic!("NaN is accepted")
    };
    assert_eq!(variable, VariableId(0));

    let (mut world, line) = ready();
    let assign = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    let index = index_of(&[1_u32, 4]);
    let parts = [(0, int8, 6, &body[..], Some(24))];
    let answer = send(&mut world, line, &assign, (ROWS.1, &index), &parts);
    let Message::Refused(refused) = answer else { panic!("not refused but {answer:?}") };
    encoding(refused.refusal, "only gradients");
}

/// A shard keeps rows of 16-bit floats in f32. Rows of trained and plain variables and of tables
/// travel in two bytes an element, in their own type only, or in four.
#[test]
fn half_precision_rows_travel_in_two_bytes_or_four() {
    let spec = TableSpec::new(1 << 20).rows_at_once(6);
    let variables = vec![
        VariableSpec::f16("rows", [5, 3]).unwrap().sparse(),
        VariableSpec::bf16("plain", [4]).unwrap().sparse().plain(),
        VariableSpec::table("users", DType::Bf16, [3], spec).unwrap(),
    ];
    // The layout is that of f32.
    let (mut world, _) = World::ready(variables, Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut worker(1));
    let f16 = Encoding::F16.code();
    let bf16 = Encoding::Bf16.code();
    let index = index_of(&[1_u32, 4]);
    let values = [1.0, -2.5, 0.1, 65504.0, 2f32.powi(-20), 3.0];
    let body = encode(Codec::F16, 0, &values);
    let rounded = decode(Codec::F16, 0, &values);
    // An assignment, then a gradient in f32 that f16 cannot represent.
    let assign = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    let answer = send(&mut world, line, &assign, (ROWS.1, &index), &[(0, f16, 6, &body, Some(24))]);
    assert!(is_applied(&answer), "{answer:?}");
    let push = world.gradient(line, 2);
    let gradient = bytes_of(&[1e-9f32, 0.0, 0.0, 0.0, 1e-9, 0.0]);
    let answer = world.push_answer(line, &push, &[(ROWS.1, &index), (ROWS.0, &gradient)]);
    assert!(is_applied(&answer), "{answer:?}");
    let mut masters = rounded.clone();
    masters[0] -= 1e-9;
    masters[4] -= 1e-9;
    let found = pull(&mut world, line, 0, &[1_u32, 4], None).unwrap();
    assert_eq!(f32s(&found), masters);
    let short = pull(&mut world, line, 0, &[4_u32, 1], Some(f16)).unwrap();
    let turned = [&masters[3..], &masters[..3]].concat();
    assert_eq!(short, encode(Codec::F16, 0, &turned));

    // The factor is multiplied in f32, which can hold the product.
    let push = world.gradient(line, 3);
    world.send(line, push.envelope(), push.part(USERS.1, None), &index_of(&[9_u64]));
    let mut message = push.encoded(bf16, 3, USERS.0, Some(32));
    let Message::PushEncoded(encoded) = &mut message else { unreachable!() };
    encoded.factor = 1.0 / 3.0;
    let ones = encode(Codec::Bf16, 0, &[1.0; 3]);
    let request = world.send(line, push.envelope(), message, &ones);
    world.work();
    assert!(is_applied(&world.answer(line, request).unwrap()));
    assert_eq!(f32s(&pull(&mut world, line, 2, &[9_u64], None).unwrap()), [-1.0 / 3.0; 3]);
    let short = pull(&mut world, line, 2, &[9_u64], Some(bf16)).unwrap();
    assert_eq!(short, encode(Codec::Bf16, 0, &[-1.0 / 3.0; 3]));

    // Plain rows also travel in their own type, and no rows in another 16-bit type.
    let zeros = pull(&mut world, line, 1, &[3_u32], Some(bf16)).unwrap();
    assert_eq!(zeros, [0; 8]);
    for (partition, other) in [(0, bf16), (1, f16), (2, f16)] {
        let refusal = pull(&mut world, line, partition, &[0_u64], Some(other)).unwrap_err();
        let Refusal::Encoding { variable, detail, .. } = refusal else { panic!("{refusal}") };
        assert_eq!(variable, VariableId(partition));
        assert!(detail.as_str().contains("in its own format"), "{detail}");
    }
    let assign = Push::plain(4, Operation::Assign {}, world.push_slot(line));
    let answer =
        send(&mut world, line, &assign, (ROWS.1, &index), &[(0, bf16, 6, &body, Some(24))]);
    let Message::Refused(refused) = answer else { panic!("not refused but {answer:?}") };
    assert!(refused.refusal.to_string().contains("only gradients"), "{}", refused.refusal);
    let found = pull(&mut world, line, 0, &[1_u32, 4], None).unwrap();
    assert_eq!(f32s(&found), masters, "nothing of it is applied");
}

#[test]
fn rows_are_sent_only_in_encodings_of_values() {
    let (mut world, line) = ready();
    for encoding in [0, Encoding::Int8.code(), Encoding::Pairs.code(), 77] {
        let refusal = pull(&mut world, line, 0, &[0_u32], Some(encoding)).unwrap_err();
        let Refusal::Unsupported { detail, .. } = refusal else { panic!("{refusal}") };
        assert!(detail.as_str().contains(&format!("encoding {encoding}")), "{detail}");
    }
    let f16 = Encoding::F16.code();
    let refusal = pull(&mut world, line, 1, &[0_u32], Some(f16)).unwrap_err();
    let is_plain = matches!(refusal, Refusal::Encoding { variable: VariableId(1), .. });
    assert!(is_plain && refusal.to_string().contains("plain"), "{refusal}");
    let refusal = pull(&mut world, line, 0, &[5_u32], Some(f16)).unwrap_err();
    assert!(matches!(refusal, Refusal::Row { row: 5, .. }), "{refusal}");
    let unknown = Refusal::UnknownPartition { partition: PartitionId(9) };
    assert_eq!(pull(&mut world, line, 9, &[0_u32], Some(f16)), Err(unknown));
    assert_eq!(pull::<u32>(&mut world, line, 0, &[], Some(f16)), Ok(vec![]));
}
