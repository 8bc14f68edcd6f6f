//! Encoded parts of pushes: the inbox holds their decoded elements.

use pushpull_common::codec::{Codec, Encoding};
use pushpull_common::ids::VariableId;
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Message, Outcome, Refusal};
use pushpull_common::tensor::f16;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, f32s, f64s, unpack, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::NonFinite;

fn ready(policy: NonFinite) -> (World, ConnectionId) {
    let configure = |config: crate::PsConfig| config.non_finite(policy).inbox_pushes(1);
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), configure);
    let line = world.join(0, &mut worker(1));
    (world, line)
}

fn encode<T: pushpull_common::codec::Real>(codec: Codec, values: &[T]) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec.encode(values, &mut bytes).unwrap();
    bytes
}

fn is_applied(answer: Option<Message>) -> bool {
    matches!(
        answer,
        Some(Message::PushAnswer(message::PushAnswer { outcome: Outcome::Applied { .. }, .. }))
    )
}

#[test]
fn a_push_may_be_partly_encoded_and_cut_anywhere() {
    let w = encode(Codec::Bf16, &[1f32, 2.0, -3.0]);
    let first = encode(Codec::OneBit, &[1f32, 2.0]);
    let third = encode(Codec::TopK { fraction: 1.0 }, &[-3f32]);
    let d = encode(Codec::TopK { fraction: 0.5 }, &[4f64, 5.0]);
    let plain = bytes_of(&[4f64, 5.0]);
    let half = Some((Encoding::Bf16.code(), 3));
    let bits = Some((Encoding::OneBit.code(), 2));
    let one = Some((Encoding::Pairs.code(), 1));
    let two = Some((Encoding::Pairs.code(), 2));
    type PushCut<'a> = &'a [(Option<(u8, u32)>, u64, &'a [u8])];
    let cuts: [(PushCut<'_>, [f32; 3], [f64; 2]); 4] = [
        (&[(half, 0, &w), (two, 16, &d)], [-1.0, -2.0, 3.0], [0.0, -5.0]),
        (&[(None, 16, &plain), (half, 0, &w)], [-1.0, -2.0, 3.0], [-4.0, -5.0]),
        (
            &[(bits, 0, &first), (one, 8, &third), (None, 16, &plain)],
            [-1.5, -1.5, 3.0],
            [-4.0, -5.0],
        ),
        (
            &[(half, 0, &w), (None, 16, &plain[..8]), (None, 24, &plain[8..])],
            [-1.0, -2.0, 3.0],
            [-4.0, -5.0],
        ),
    ];
    for (index, (cut, w, d)) in cuts.iter().enumerate() {
        for chop in [usize::MAX, 5, 1] {
            let (mut world, line) = ready(NonFinite::Reject);
            world.chop = chop;
            let push = world.gradient(line, 1);
            let mut requests = Vec::new();
            for (at, (form, offset, body)) in cut.iter().enumerate() {
                // The length counts decoded elements.
                let whole = (at + 1 == cut.len()).then_some(32);
                let message = match form {
                    Some((encoding, elements)) => {
                        push.encoded(*encoding, *elements, *offset, whole)
                    }
                    None => push.part(*offset, whole),
                };
                requests.push(world.send(line, push.envelope(), message, body));
            }
            world.work();
            let last = requests.pop().unwrap();
            assert!(is_applied(world.answer(line, last)), "cut {index}");
            let values = world.values(line);
            assert_eq!(f32s(&values[..12]), w[..], "cut {index}");
            assert_eq!(f64s(&values[16..32]), d[..], "cut {index}");
        }
    }
}

/// Sends a part and returns its refusal, then checks that the push slot serves a valid push.
fn refused(policy: NonFinite, message: impl Fn(&Push) -> Message, body: &[u8]) -> Refusal {
    let (mut world, line) = ready(policy);
    let push = world.gradient(line, 1);
    let request = world.send(line, push.envelope(), message(&push), body);
    world.work();
    let refusal = match world.answer(line, request) {
        Some(Message::Refused(refused)) => refused.refusal,
        other => panic!("not refused but {other:?}"),
    };
    // Nothing of the refused push is left: the next one, in the only push slot, is applied alone.
    let push_slot = world.push_slot(line);
    let next = Push { sequence: 2, push_slot, ..push };
    let body = bytes_of(&[1f32, 1.0, 1.0]);
    assert!(is_applied(Some(world.push_answer(line, &next, &[(0, &body)]))));
    assert_eq!(f32s(&world.values(line)[..12]), [-1.0; 3]);
    refusal
}

#[test]
fn malformed_parts_are_refused_with_their_variable() {
    let w = encode(Codec::F16, &[1f32, 2.0, 3.0]);
    let f16 = Encoding::F16.code();
    let part = |encoding, elements, offset| {
        move |push: &Push| push.encoded(encoding, elements, offset, Some(16))
    };
    let encoding = |refusal: Refusal, words: &str| match refusal {
        Refusal::Encoding { variable, encoding, detail } => {
            assert!(detail.as_str().contains(words), "{detail}");
            (variable, encoding)
        }
        other => panic!("{other:?}"),
    };
    let reject = NonFinite::Reject;
    let found = encoding(refused(reject, part(77, 3, 0), &w), "is unknown");
    assert_eq!(found, (VariableId(0), 77));
    let found = encoding(refused(reject, part(f16, 3, 0), &[0; 16]), "16 bytes for 3 elements");
    assert_eq!(found, (VariableId(0), f16));
    encoding(refused(reject, part(f16, 3, 0), &[]), "0 bytes");
    encoding(refused(reject, part(Encoding::Pairs.code(), 3, 0), &[0; 40]), "40 bytes");
    encoding(refused(reject, part(Encoding::Pairs.code(), 3, 0), &[9; 8]), "padding");
    let mut scale = encode(Codec::Int8, &[1f32, 2.0, 3.0]);
    scale[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    encoding(refused(reject, part(Encoding::Int8.code(), 3, 0), &scale), "inf");
    encoding(refused(reject, part(f16, 1, 48), &[0; 8]), "i64");
    let assign = |push: &Push| {
        Push { operation: Operation::Assign {}, ..*push }.encoded(f16, 3, 0, Some(16))
    };
    encoding(refused(reject, assign, &w), "only gradients");
    // A plain variable takes parts only in its own type.
    let add = |push: &Push| {
        Push { operation: Operation::AssignAdd {}, ..*push }.encoded(f16, 2, 32, Some(8))
    };
    encoding(refused(reject, add, &[0; 8]), "only gradients");
    let scaled = |factor| {
        move |push: &Push| {
            let mut message = push.encoded(f16, 3, 0, Some(16));
            let Message::PushEncoded(encoded) = &mut message else { unreachable!() };
            encoded.factor = factor;
            message
        }
    };
    encoding(refused(reject, scaled(2.0), &w), "2 is not a valid factor");
    encoding(refused(reject, scaled(f64::NAN), &w), "NaN is not a valid factor");

    let tried = refused(reject, part(f16, 4, 32), &[0; 8]);
    assert!(matches!(tried, Refusal::Operation { variable: VariableId(2), .. }), "{tried}");

    let range = |offset, bytes, limit| Refusal::Range { offset, bytes, limit };
    assert_eq!(refused(reject, part(f16, 4, 0), &w), range(0, 16, 12));
    assert_eq!(refused(reject, part(f16, 0, 0), &[]), range(0, 0, 12));
    assert_eq!(refused(reject, part(f16, 1, 2), &w), range(2, 4, 12));
    assert_eq!(refused(reject, part(f16, 1, 14), &w), range(14, 4, 12));
    assert_eq!(refused(reject, part(f16, u32::MAX, 0), &w), range(0, 4 * u64::from(u32::MAX), 12));
    // The part ends inside a partition, where no part may end.
    assert_eq!(refused(reject, part(f16, 1, 0), &w), range(0, 4, 56));
    assert!(matches!(refused(reject, part(f16, 1, u64::MAX), &w), Refusal::Range { .. }));
}

#[test]
fn values_are_sent_only_in_encodings_of_values() {
    let (mut world, line) = ready(NonFinite::Reject);
    for encoding in [Encoding::Int8.code(), Encoding::Pairs.code(), 77] {
        let pull = message::Pull { selection: message::Selection::All {} };
        let refusal = world.refused(line, message::PullEncoded { pull, encoding }.into());
        let Refusal::Unsupported { detail, .. } = refusal else { panic!("{refusal}") };
        assert!(detail.as_str().contains(&format!("encoding {encoding}")), "{detail}");
    }
}

/// A shard keeps 16-bit floats in f32. For every operation it accepts them in their own type or in
/// f32, and it sends both.
#[test]
fn half_precision_values_travel_in_two_bytes_or_four() {
    let brains = VariableSpec::bf16("brains", [3]).unwrap();
    let plain = VariableSpec::f16("plain", [2]).unwrap().plain();
    let variables = vec![VariableSpec::f32("w", [1]).unwrap(), brains, plain];
    let (mut world, _) = World::ready(variables, Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut worker(1));
    let of_brains = Encoding::Bf16.code();
    let of_plain = Encoding::F16.code();
    let send = |world: &mut World, push: Push, form, offset, whole, body: &[u8]| {
        let message = match form {
            Some((encoding, elements)) => push.encoded(encoding, elements, offset, Some(whole)),
            None => push.part(offset, Some(whole)),
        };
        let request = world.send(line, push.envelope(), message, body);
        world.work();
        world.answer(line, request)
    };
    let brains = encode(Codec::Bf16, &[1f32, -2.5, 2f32.powi(-20)]);
    let assign = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    assert!(is_applied(send(&mut world, assign, Some((of_brains, 3)), 8, 16, &brains)));
    let add = Push::plain(2, Operation::AssignAdd {}, world.push_slot(line));
    let halves = encode(Codec::F16, &[0.1f32, 65504.0]);
    assert!(is_applied(send(&mut world, add, Some((of_plain, 2)), 24, 8, &halves)));
    let push = world.gradient(line, 3);
    let gradient = bytes_of(&[1e-3f32, 0.5, 0.0]);
    assert!(is_applied(send(&mut world, push, None, 8, 16, &gradient)));
    // The factor is multiplied in f32, which can hold the product.
    let push = world.gradient(line, 5);
    let mut message = push.encoded(of_brains, 3, 8, Some(16));
    let Message::PushEncoded(encoded) = &mut message else { unreachable!() };
    encoded.factor = 1e-9;
    let request =
        world.send(line, push.envelope(), message, &encode(Codec::Bf16, &[0f32, 0.0, 1.0]));
    world.work();
    assert!(is_applied(world.answer(line, request)));
    // Only a gradient may have the type of another variable.
    let assign = Push::plain(4, Operation::Assign {}, world.push_slot(line));
    let refused = send(&mut world, assign, Some((of_plain, 3)), 8, 16, &brains);
    assert!(matches!(refused, Some(Message::Refused(_))), "{refused:?}");

    let masters = [1f32 - 1e-3, -3.0, 2f32.powi(-20) - 1e-9, 0.0];
    assert_eq!(f32s(&world.values(line)[8..24]), masters);
    let tenth = f16::from_f32(0.1).to_f32();
    assert_eq!(f32s(&world.values(line)[24..32]), [tenth, 65504.0]);
    let pull = message::Pull { selection: message::Selection::All {} };
    world.say(line, message::PullEncoded { pull, encoding: 0 }.into());
    world.work();
    let (sent, _) = unpack(world.streamed(line).expect("a pull is answered"));
    let expected = [&bytes_of(&[0f32])[..], &encode(Codec::Bf16, &masters[..3]), &halves].concat();
    assert_eq!(sent, expected);
}

#[test]
fn decoded_elements_are_scanned_for_nan() {
    let body = encode(Codec::Bf16, &[1f32, f32::NAN, 3.0]);
    let message = |push: &Push| push.encoded(Encoding::Bf16.code(), 3, 0, Some(16));
    match refused(NonFinite::Reject, message, &body) {
        Refusal::NonFinite { variable: VariableId(0), element: 1, value } => {
            assert!(value.is_nan())
        }
        other => panic!("{other:?}"),
    }
}
