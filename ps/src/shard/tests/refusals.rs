//! Refused pushes: each is refused once, with its reason, and changes nothing.

use pushpull_common::ids::{PartitionId, Sequence, VariableId};
use pushpull_common::partition::Partitioner;
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Message, Refusal, message};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, f32s, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::{Durability, NonFinite, Storage};

const ADD: Operation = Operation::AssignAdd {};
const GRADIENT: Operation = Operation::Gradient {};

fn ready(policy: NonFinite) -> (World, ConnectionId) {
    let configure = |config: crate::PsConfig| config.non_finite(policy).inbox_pushes(1);
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), configure);
    let line = world.join(0, &mut worker(1));
    (world, line)
}

/// Sends parts, each with its own length of the whole push, if any. Returns the refusals.
fn refusals(
    world: &mut World,
    line: ConnectionId,
    operation: Operation,
    parts: &[(u64, usize, Option<u64>)],
) -> Vec<Refusal> {
    let grant = world.token(line);
    let push_slot = world.push_slot(line);
    let push = Push { operation, ..Push::gradient(1, grant, push_slot) };
    let mut requests = Vec::new();
    for &(offset, bytes, whole) in parts {
        let body = vec![0; bytes];
        requests.push(world.send(line, push.envelope(), push.part(offset, whole), &body));
        world.work();
    }
    let refused = |message| match message {
        Message::Refused(refused) => refused.refusal,
        other => panic!("not refused but {other:?}"),
    };
    requests.into_iter().filter_map(|request| world.answer(line, request)).map(refused).collect()
}

#[test]
fn parts_of_a_push_have_one_operation() {
    let (mut world, line) = ready(NonFinite::Reject);
    let grant = world.token(line);
    let push_slot = world.push_slot(line);
    let gradient = Push::gradient(1, grant, push_slot);
    world.send(line, gradient.envelope(), gradient.part(0, None), &[0; 16]);
    let assign = Push { operation: Operation::Assign {}, ..gradient };
    let request = world.send(line, assign.envelope(), assign.part(16, Some(32)), &[0; 16]);
    world.work();
    let Some(Message::Refused(refused)) = world.answer(line, request) else {
        panic!("an assignment in a push of gradients")
    };
    assert!(matches!(refused.refusal, Refusal::Operation { variable: VariableId(1), .. }));
}

#[test]
fn misplaced_parts_are_refused_once_and_the_rest_is_ignored() {
    let range = |offset, bytes, limit| Refusal::Range { offset, bytes, limit };
    let operation = |variable, tried: &str| {
        let tried = pushpull_common::protocol::refusal::Detail::clipped(tried);
        Refusal::Operation { variable: VariableId(variable), tried }
    };
    let plain = "gradients: it is a plain variable";
    let trained = "assign_add: it is trained by the optimizer";
    let incomplete = |partition, bytes, expected| Refusal::Incomplete {
        partition: PartitionId(partition),
        bytes,
        expected,
    };
    type Case = (&'static str, Operation, Vec<(u64, usize, Option<u64>)>, Refusal);
    let cases: Vec<Case> = vec![
        ("twice", GRADIENT, vec![(0, 16, None), (0, 16, Some(32))], range(0, 16, 0)),
        ("overlap", GRADIENT, vec![(16, 16, None), (0, 24, Some(40))], range(0, 24, 16)),
        ("gap", GRADIENT, vec![(0, 8, None), (24, 8, Some(16))], range(24, 8, 0)),
        ("inside", GRADIENT, vec![(8, 8, None), (16, 16, Some(24))], range(8, 8, 0)),
        ("beyond", ADD, vec![(48, 16, Some(16))], range(48, 16, 56)),
        ("far beyond", ADD, vec![(1 << 60, 8, Some(8))], range(1 << 60, 8, 56)),
        ("overflow", ADD, vec![(u64::MAX - 3, 8, None)], range(u64::MAX - 3, 8, 56)),
        ("no word", GRADIENT, vec![(0, 12, None), (16, 16, None)], range(0, 12, 56)),
        ("unaligned", GRADIENT, vec![(1, 8, None), (16, 16, None)], range(1, 8, 56)),
        ("plain", GRADIENT, vec![(0, 56, Some(56))], operation(2, plain)),
        ("integer", GRADIENT, vec![(0, 32, None), (48, 8, Some(40))], operation(3, plain)),
        ("trained", ADD, vec![(16, 32, None), (48, 8, Some(40))], operation(1, trained)),
        ("short", GRADIENT, vec![(0, 16, None), (16, 8, Some(24))], incomplete(1, 8, 16)),
        ("only begun", GRADIENT, vec![(0, 8, Some(8))], incomplete(0, 8, 16)),
        (
            "length",
            GRADIENT,
            vec![(0, 16, None), (16, 16, Some(33))],
            Refusal::Length { named: 33, received: 32 },
        ),
    ];
    let (mut world, line) = ready(NonFinite::Reject);
    for (index, (name, operation, parts, refusal)) in cases.into_iter().enumerate() {
        let refused = refusals(&mut world, line, operation, &parts);
        assert_eq!(refused, [refusal], "{name}");
        assert_eq!(world.metrics().pushes_dropped, index as u64 + 1, "{name}");
    }
    // The only push slot was free each time, and the sequence can be used again.
    assert_eq!(world.values(line), [0; 56]);
    assert!(refusals(&mut world, line, ADD, &[(32, 24, None)]).is_empty());
}

/// The step owner asks for the token of a gradient at its first part, other shards once the push is
/// whole.
#[test]
fn a_part_that_ends_beyond_the_last_address_is_refused_by_every_shard() {
    let (mut world, lines) =
        World::ready(variables(), Sgd::new(1.0), |config| config.shards(2).inbox_pushes(1));
    let mut sequence = 0;
    for &line in &lines {
        let limit = world.shards[line.shard].variables.store().unwrap().layout().push_bytes();
        for operation in [GRADIENT, ADD, Operation::Assign {}] {
            for offset in [u64::MAX, u64::MAX - 7, 1 << 63] {
                sequence += 1;
                let plain = Push::plain(sequence, operation, world.push_slot(line));
                let grant = match operation {
                    GRADIENT if line.shard == 0 => world.token(line),
                    _ => plain.grant,
                };
                let push = Push { grant, ..plain };
                let request = world.send(line, push.envelope(), push.part(offset, None), &[0; 8]);
                let Some(Message::Refused(refused)) = world.answer(line, request) else {
                    panic!("{operation:?} at {offset} is accepted")
                };
                assert_eq!(refused.refusal, Refusal::Range { offset, bytes: 8, limit });
            }
        }
    }
}

#[test]
fn a_refused_push_frees_its_push_slot_for_a_waiting_client() {
    let (mut world, line) = ready(NonFinite::Reject);
    let other = world.join(0, &mut worker(2));
    let push = Push::plain(1, ADD, world.push_slot(line));
    world.send(line, push.envelope(), push.part(32, None), &[0; 16]);
    let waiting = world.say(other, pushpull_common::protocol::message::Reserve {}.into());
    assert_eq!(world.answer(other, waiting), None);
    let request = world.send(line, push.envelope(), push.part(32, None), &[0; 16]);
    assert!(matches!(world.answer(line, request), Some(Message::Refused(_))));
    assert!(matches!(world.answer(other, waiting), Some(Message::Reserved(_))));
}

#[test]
fn a_refused_push_is_ignored_only_until_its_last_part() {
    let (mut world, line) = ready(NonFinite::Reject);
    let push = Push::plain(1, ADD, 77);
    for _ in 0..2 {
        let first = world.send(line, push.envelope(), push.part(32, None), &[0; 16]);
        let last = world.send(line, push.envelope(), push.part(48, Some(24)), &[0; 8]);
        let Some(Message::Refused(refused)) = world.answer(line, first) else { panic!() };
        assert_eq!(refused.refusal, Refusal::PushSlotTaken { push_slot: 77 });
        assert_eq!(world.answer(line, last), None);
    }
}

/// Variables of odd lengths are changed together with their padding. The scan still finds bad
/// values in the padding and after it.
#[test]
fn bad_values_beside_padding_are_refused_and_named() {
    let variables = ["a", "b"].map(|name| VariableSpec::f32(name, [3]).unwrap()).to_vec();
    for (word, named) in [(2, (0, 2)), (3, (0, 3)), (4, (1, 0)), (6, (1, 2))] {
        let (mut world, line) = World::ready(variables.clone(), Sgd::new(1.0), |config| config);
        let grant = world.token(line[0]);
        let push = Push::gradient(1, grant, world.push_slot(line[0]));
        let mut gradient = [1_f32; 8];
        gradient[word] = f32::NAN;
        let body = bytes_of(&gradient);
        let request = world.send(line[0], push.envelope(), push.part(0, Some(32)), &body);
        let Some(Message::Refused(refused)) = world.answer(line[0], request) else { panic!() };
        let Refusal::NonFinite { variable, element, .. } = refused.refusal else {
            panic!("{}", refused.refusal)
        };
        // The padding counts as one element more.
        assert_eq!((variable.0, element), named, "word {word}");
        assert!(world.values(line[0]).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn bad_values_are_refused_and_named() {
    let variables = || {
        let part = Partitioner::Fixed { shards: 2 };
        let w = VariableSpec::f32("w", [4, 3]).unwrap().partitioner(part);
        vec![VariableSpec::f32("a", [1]).unwrap(), w]
    };
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config.shards(2));
    // Round robin distributes over tasks; the shards of a task are filled by bytes.
    let catalogue = world.catalogue.clone();
    for &line in &lines {
        let id = pushpull_common::ids::ShardId { task: 0, shard: line.shard as u16 };
        let layout = catalogue.layout(id);
        let partition = layout.partitions().iter().find(|p| p.variable.0 == 1).unwrap();
        for (at, value) in [(0, f32::NAN), (4, f32::INFINITY), (5, f32::NEG_INFINITY)] {
            let mut gradient = vec![1_f32; 6];
            gradient[at] = value;
            let grant = world.token(lines[0]);
            let push_slot = world.push_slot(line);
            let push = Push::gradient(1, grant, push_slot);
            let body = bytes_of(&gradient);
            let offset = partition.offset;
            // In two parts: the element still counts over the whole variable.
            let parts = [(offset, &body[..16]), (offset + 16, &body[16..])];
            let first = world.send(line, push.envelope(), push.part(parts[0].0, None), parts[0].1);
            let second =
                world.send(line, push.envelope(), push.part(parts[1].0, Some(24)), parts[1].1);
            let answers = [first, second].map(|request| world.answer(line, request));
            let mut answers = answers.into_iter().flatten();
            let (Some(Message::Refused(refused)), None) = (answers.next(), answers.next()) else {
                panic!("refused once")
            };
            let Refusal::NonFinite { variable, element, value: found } = refused.refusal else {
                panic!("{}", refused.refusal)
            };
            assert_eq!((variable.0, element), (1, partition.elements.start + at as u64));
            assert_eq!(found.to_bits(), f64::from(value).to_bits());
        }
        assert!(world.values(line).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn doubles_are_scanned_and_integers_are_not() {
    let (mut world, line) = ready(NonFinite::Reject);
    let grant = world.token(line);
    let push = Push::gradient(1, grant, world.push_slot(line));
    let answer = world.push_answer(line, &push, &[(16, &bytes_of(&[0.0, f64::NAN]))]);
    let Message::Refused(refused) = answer else { panic!("{answer:?}") };
    let named = matches!(refused.refusal, Refusal::NonFinite { element: 1, variable, .. }
        if variable == VariableId(1));
    assert!(named, "{}", refused.refusal);
    // The bits of a NaN are a number like any other.
    let push = Push::plain(2, ADD, world.push_slot(line));
    let answer = world.push_answer(line, &push, &[(48, &bytes_of(&[f64::NAN]))]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
}

#[test]
fn the_other_policies_accept_bad_values() {
    for (policy, counted) in [(NonFinite::Count, 2), (NonFinite::Allow, 0)] {
        let (mut world, line) = ready(policy);
        let grant = world.token(line);
        let push = Push::gradient(1, grant, world.push_slot(line));
        let body = bytes_of(&[f32::NAN, 1.0, f32::INFINITY]);
        let answer = world.push_answer(line, &push, &[(0, &body)]);
        assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
        assert_eq!(world.metrics().non_finite, counted);
        let values = f32s(&world.values(line)[..12]);
        assert!(values[0].is_nan() && values[1] == -1.0 && values[2] == f32::NEG_INFINITY);
    }
}

/// Covers parts of a block and a half, or one part, which the apply loop scans. While other work is
/// due, no part is applied as it arrives.
#[test]
fn parts_applied_as_they_arrive_are_scanned_once() {
    const ELEMENTS: usize = 3 * (96 << 10) / 4 + 2;
    const PART: usize = (96 << 10) / 4;
    let places = [0, 1, PART - 1, PART, 2 * PART + 1_000, ELEMENTS - 1];
    let cases = places.into_iter().flat_map(|place| [(place, false), (place, true)]);
    for ((place, busy), part) in cases.flat_map(|case| [(case, PART), (case, ELEMENTS)]) {
        for policy in [NonFinite::Reject, NonFinite::Count] {
            let w = VariableSpec::f32("w", [ELEMENTS as u64]).unwrap();
            let plain = VariableSpec::f32("plain", [4]).unwrap().plain();
            let configure = |config: crate::PsConfig| config.non_finite(policy);
            let (mut world, _) = World::ready(vec![w, plain], Sgd::new(1.0), configure);
            let line = world.join(0, &mut worker(1));
            let other = world.join(0, &mut worker(2));
            let push = |world: &mut World, sequence, gradient: &[f32]| {
                let grant = world.token(line);
                let push = Push::gradient(sequence, grant, world.push_slot(line));
                if busy {
                    let assign =
                        Push::plain(sequence, Operation::Assign {}, world.push_slot(other));
                    let offset =
                        world.shards[0].variables.store().unwrap().layout().partitions()[1].offset;
                    world.push(other, &assign, &[(offset, &[0; 16])]);
                }
                let body = bytes_of(gradient);
                let parts: Vec<(u64, &[u8])> =
                    (0..).step_by(4 * part).zip(body.chunks(4 * part)).collect();
                let mut refused = Vec::new();
                for (index, (offset, part)) in parts.iter().enumerate() {
                    let whole = (index + 1 == parts.len()).then_some(body.len() as u64);
                    let said = push.part(*offset, whole);
                    let request = world.send(line, push.envelope(), said, part);
                    world.work();
                    if let Some(Message::Refused(message)) = world.answer(line, request) {
                        refused.push(message.refusal);
                    }
                }
                refused
            };
            let mut gradient = vec![1.0; ELEMENTS];
            gradient[place] = f32::NEG_INFINITY;
            let refused = push(&mut world, 1, &gradient);
            let values = f32s(&world.values(line));
            match policy {
                NonFinite::Reject => {
                    let element = place as u64;
                    let value = f64::NEG_INFINITY;
                    let expected = Refusal::NonFinite { variable: VariableId(0), element, value };
                    assert_eq!(refused, [expected], "busy: {busy}");
                    assert!(values.iter().all(|&value| value == 0.0), "nothing of the push counts");
                    assert_eq!(push(&mut world, 2, &vec![1.0; ELEMENTS]), []);
                    let values = f32s(&world.values(line));
                    assert!(values[..ELEMENTS].iter().all(|&value| value == -1.0));
                }
                _ => {
                    assert_eq!(refused, []);
                    assert_eq!(world.metrics().non_finite, 1, "{place}, busy: {busy}");
                    assert_eq!((values[place], values[place ^ 1]), (f32::INFINITY, -1.0));
                }
            }
        }
    }
}

/// A push that is refused as it is applied gives its slot to the client that waits for one.
#[test]
fn the_slot_of_a_push_that_is_refused_as_it_is_applied_goes_to_the_client_that_waits() {
    const ELEMENTS: usize = 4;
    let w = VariableSpec::f32("w", [ELEMENTS as u64]).unwrap();
    let (mut world, _) = World::ready(vec![w], Sgd::new(1.0), |config| config.inbox_pushes(1));
    let line = world.join(0, &mut worker(1));
    let other = world.join(0, &mut worker(2));
    let push = |world: &mut World, sequence| {
        let grant = world.token(line);
        let push = Push::gradient(sequence, grant, world.push_slot(line));
        world.push(line, &push, &[(0, &bytes_of(&[f32::MAX; ELEMENTS]))])
    };
    let request = push(&mut world, 1);
    world.work();
    assert!(matches!(world.answer(line, request), Some(Message::PushAnswer(_))));
    // The second one would make every value infinite.
    let request = push(&mut world, 2);
    let waits = world.say(other, message::Reserve {}.into());
    assert!(world.answer(other, waits).is_none(), "there is one push slot");
    world.work();
    let Some(Message::Refused(refused)) = world.answer(line, request) else { panic!("applied") };
    assert!(matches!(refused.refusal, Refusal::Overflow { .. }), "{}", refused.refusal);
    assert!(matches!(world.answer(other, waits), Some(Message::Reserved(_))));
}

/// A push that was accepted under another policy is scanned as it is applied. If it is applied in
/// place, its results are scanned instead, and the change is undone.
#[test]
fn a_whole_push_accepted_under_another_policy_does_no_harm() {
    for elements in [4, 80 << 10] {
        let w = VariableSpec::f32("w", [elements as u64]).unwrap();
        let take = |config: crate::PsConfig| config.non_finite(NonFinite::Allow);
        let (mut world, _) = World::ready(vec![w], Sgd::new(1.0), take);
        let line = world.join(0, &mut worker(1));
        let grant = world.token(line);
        let push = Push::gradient(1, grant, world.push_slot(line));
        let mut gradient = vec![1_f32; elements];
        gradient[1] = f32::INFINITY;
        world.push(line, &push, &[(0, &bytes_of(&gradient))]);
        let refuse = crate::PsConfig::clone(&world.config).non_finite(NonFinite::Reject);
        world.config = refuse.into();
        world.restart(0).unwrap();
        world.work();
        let line = world.join(0, &mut worker(1));
        let values = f32s(&world.values(line));
        assert_eq!((values[0], values[1]), (0.0, 0.0), "{elements} elements");
    }
}

/// A push small enough for a change in place is scanned before it is whole. With power durability
/// nothing is changed in place, but the process that applies the push may be configured without it.
#[test]
fn a_bad_push_received_with_power_durability_is_not_applied_without_it() {
    let w = VariableSpec::f32("w", [4]).unwrap();
    let power =
        |config: crate::PsConfig| config.storage(Storage::memory().durability(Durability::Power));
    let (mut world, _) = World::ready(vec![w], Sgd::new(1.0), power);
    let line = world.join(0, &mut worker(1));
    let grant = world.token(line);
    let push = Push::gradient(1, grant, world.push_slot(line));
    world.push(line, &push, &[(0, &bytes_of(&[1.0, f32::NAN, 1.0, 1.0]))]);
    world.config = crate::PsConfig::clone(&world.config)
        .storage(Storage::memory().durability(Durability::Process))
        .into();
    world.restart(0).unwrap();
    world.work();
    let line = world.join(0, &mut worker(1));
    assert_eq!(f32s(&world.values(line)), [0.0; 4]);
}

#[test]
fn sequences_outside_the_window_are_refused() {
    let (mut world, line) = ready(NonFinite::Reject);
    let push = |world: &mut World, sequence| {
        let push = Push::plain(sequence, ADD, world.push_slot(line));
        world.push_answer(line, &push, &[(48, &bytes_of(&[1_i64]))])
    };
    let window = |answer: Message, wanted: u64, first: u64| {
        let Message::Refused(refused) = answer else { panic!("{answer:?}") };
        let Refusal::Window { sequence, oldest, .. } = refused.refusal else { panic!() };
        assert_eq!((sequence, oldest), (Sequence(wanted), Sequence(first)));
    };
    window(push(&mut world, 0), 0, 1);
    assert!(matches!(push(&mut world, 100), Message::PushAnswer(_)));
    assert!(matches!(push(&mut world, 37), Message::PushAnswer(_)), "the oldest there is");
    window(push(&mut world, 36), 36, 37);
    assert!(matches!(push(&mut world, u64::MAX), Message::PushAnswer(_)));
    window(push(&mut world, 100), 100, u64::MAX - 63);
    assert_eq!(world.values(line)[48..], bytes_of(&[3_i64]));
}
