//! Push buffers: a push names ranges of its buffer, and is checked like a push that is sent. A
//! buffer is released with its client.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use pushpull_common::ids::{ClientEpoch, Sequence, ShardId, VariableId};
use pushpull_common::protocol::limits::{
    PUSH_BUFFERS_MAX, PUSH_SHARED_RANGES_MAX, SHARE_REQUESTS_MAX,
};
use pushpull_common::protocol::message::{
    Operation, PushShared, Role, SharePushBuffer, ShareValues, SharedPushBuffer, SharedRange,
};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Envelope, Message, PushState, Refusal, message};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Lamb, Sgd};
use pushpull_store::arena::{ArenaStorage, SharedBytes};
use pushpull_store::change::ByteSource;

use super::peers::{Peer, Push, bytes_of, f32s, f64s, index_of, variables, worker};
use super::pushes::applied;
use super::shared_values::{LARGE, SAME_HOST, all_are, at, large, same_host};
use super::staleness::Client;
use super::synchronous::synchronous;
use super::world::{ConnectionId, World};
use crate::config::{Asynchronous, Network, NonFinite, PsConfig, StalenessPolicy, Storage};
use crate::metrics::Counters;
use crate::shard::values::scan::{NonFiniteScan, ScanningInput};
use pushpull_common::peer_origin::PeerOrigin;

/// The push buffer of a client.
pub(super) struct MappedBuffer {
    file: File,
    pub(super) shared: SharedPushBuffer,
}

impl MappedBuffer {
    pub(super) fn new(world: &mut World, line: ConnectionId) -> MappedBuffer {
        let answer = world.ask(line, SharePushBuffer {}.into());
        let Message::SharedPushBuffer(shared) = answer else {
            panic!("not a push buffer but {answer:?}")
        };
        let mut descriptors = world.shared.remove(&line).expect("a descriptor");
        assert_eq!((descriptors.len(), shared.push_slots.items().len()), (1, 2));
        let file = File::from(descriptors.remove(0));
        assert_eq!(file.metadata().unwrap().len(), shared.bytes);
        assert!(shared.first + 2 * shared.stride <= shared.bytes);
        MappedBuffer { file, shared }
    }

    pub(super) fn push_slot(&self, place: usize) -> u32 {
        self.shared.push_slots.items()[place]
    }

    /// Writes bytes to one of its buffer slots.
    pub(super) fn put(&self, place: usize, offset: u64, bytes: &[u8]) {
        let start = self.shared.first + place as u64 * self.shared.stride;
        self.file.write_all_at(bytes, start + offset).unwrap();
    }
}

impl Push {
    /// Returns the message that names these ranges of the push buffer.
    pub(super) fn shared(&self, ranges: &[(u64, u64)], whole: Option<u64>) -> Message {
        let stretch = |&(start, end): &(u64, u64)| SharedRange { start, end };
        let shared = PushShared {
            operation: self.operation,
            token: self.grant.token,
            generation: self.grant.generation,
            push_slot: self.push_slot,
            whole,
            next: self.next,
            read: self.read,
            ranges: List::new(ranges.iter().map(stretch).collect()).unwrap(),
        };
        shared.into()
    }
}

/// Pushes these ranges as a whole push, and returns the answer.
fn push(world: &mut World, line: ConnectionId, push: &Push, ranges: &[(u64, u64)]) -> Message {
    let bytes = ranges.iter().map(|(start, end)| end - start).sum();
    let request = world.send(line, push.envelope(), push.shared(ranges, Some(bytes)), &[]);
    world.work();
    world.answer(line, request).expect("a push is answered")
}

fn refusal(answer: Message) -> Refusal {
    match answer {
        Message::Refused(refused) => refused.refusal,
        other => panic!("not refused but {other:?}"),
    }
}

/// Queries the state of a push.
fn state(world: &mut World, line: ConnectionId, sequence: u64) -> PushState {
    let about = Envelope { sequence: Sequence(sequence), ..Envelope::default() };
    let request = world.send(line, about, message::OutcomeQuery {}.into(), &[]);
    match world.answer(line, request) {
        Some(Message::OutcomeIs(is)) => is.state,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_push_buffer_serves_many_pushes() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    for round in 1..=5_u64 {
        let place = (round % 2) as usize;
        push_buffer.put(place, 0, &bytes_of(&[1_f32, 2.0, 3.0]));
        push_buffer.put(place, 16, &bytes_of(&[0.5_f64, 0.0]));
        let gradient = Push::gradient(round, world.token(line), push_buffer.push_slot(place));
        assert_eq!(applied(&push(&mut world, line, &gradient, &[(0, 16), (16, 32)])), round);
    }
    let values = world.values(line);
    assert_eq!(f32s(&values[..12]), [-5.0, -10.0, -15.0]);
    assert_eq!(f64s(&values[16..32]), [-2.5, 0.0]);
    assert_eq!(world.metrics().push_bytes, 5 * 32);
    // A resend is not applied again.
    let gradient = Push::gradient(5, world.token(line), push_buffer.push_slot(1));
    let again = push(&mut world, line, &gradient, &[(0, 32)]);
    assert!(matches!(again, Message::PushAnswer(answer) if answer.duplicate));
    assert_eq!(world.values(line), values);
}

/// Variables that are longer than one copied piece, plain and damped for their staleness.
#[test]
fn gradients_in_a_push_buffer_are_applied_like_sent_ones() {
    let wide = || VariableSpec::new("d", DType::F64, Shape::new([3001]).unwrap()).unwrap();
    let variables = || vec![VariableSpec::f32("w", [5001]).unwrap(), wide()];
    let body = |seed: usize| {
        let number = |at: usize| ((at * 37 + seed * 11) % 101) as f64 / 50.0 - 1.0;
        let w: Vec<f32> = (0..5001).map(|at| number(at) as f32).collect();
        let d: Vec<f64> = (0..3001).map(number).collect();
        [bytes_of(&w), bytes_of(&d)].concat()
    };
    for policy in [StalenessPolicy::default(), StalenessPolicy::Damp] {
        let mut found = Vec::new();
        for in_push_buffer in [false, true] {
            let (mut world, ..) = same_host(variables(), |config| {
                config.mode(Asynchronous::default().staleness(policy))
            });
            let mut a = Client::join(&mut world, 2);
            let mut b = Client::join(&mut world, 3);
            let stale = a.step(&mut world);
            let fresh = b.step(&mut world);
            b.push(&mut world, &fresh, &[(0, &body(1))]);
            let line = a.lines[0];
            if in_push_buffer {
                let push_buffer = MappedBuffer::new(&mut world, line);
                let bytes = body(2).len() as u64;
                push_buffer.put(0, 0, &body(2));
                let gradient = Push::gradient(1, stale.grant, push_buffer.push_slot(0));
                let gradient = Push { read: stale.read[0], ..gradient };
                assert_eq!(applied(&push(&mut world, line, &gradient, &[(0, bytes)])), 2);
                let values = world.values(line);
                // The last but one element, in the piece that is copied after the rest is applied.
                push_buffer.put(1, 0, &body(3));
                push_buffer.put(1, bytes - 16, &bytes_of(&[f64::NAN]));
                let gradient = Push::gradient(2, world.token(line), push_buffer.push_slot(1));
                let gradient = Push { read: stale.read[0], ..gradient };
                let refused = refusal(push(&mut world, line, &gradient, &[(0, bytes)]));
                let Refusal::NonFinite { variable, element, .. } = refused else {
                    panic!("{refused:?}");
                };
                assert_eq!((variable, element), (VariableId(1), 2999));
                assert_eq!(world.values(line), values, "nothing of the push counts");
            } else {
                a.push(&mut world, &stale, &[(0, &body(2))]);
            }
            found.push(world.values(line));
        }
        assert_eq!(found[0], found[1], "{policy:?}");
    }
}

#[test]
fn shared_ranges_and_sent_parts_make_one_push() {
    // Dense values, then rows, whose numbers are sent over the connection.
    let dense = VariableSpec::f32("dense", [6]).unwrap();
    let table = VariableSpec::f32("table", [5, 3]).unwrap().sparse();
    let (mut world, _, line) = same_host(vec![dense, table], |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    let index = index_of(&[1_u32, 4]);
    let values = bytes_of(&[1_f32; 6]);
    for (sequence, first) in [(1, true), (2, false)] {
        push_buffer.put(0, 0, &bytes_of(&[2_f32; 6]));
        // The server ignores the bytes of the buffer where the numbers of rows would be.
        push_buffer.put(0, 24, &[0xff; 64]);
        let left = world.bytes_left();
        let gradient = Push::gradient(sequence, world.token(line), push_buffer.push_slot(0));
        let whole = (24 + 24 + index.len()) as u64;
        if first {
            world.send(line, gradient.envelope(), gradient.shared(&[(0, 24)], None), &[]);
        }
        world.send(line, gradient.envelope(), gradient.part(88, None), &index);
        let last = (!first).then_some(whole);
        assert_eq!(left > world.bytes_left(), first, "memory for sent parts is taken once");
        let mut request = world.send(
            line,
            gradient.envelope(),
            gradient.part(24, first.then_some(whole)),
            &values,
        );
        if !first {
            request = world.send(line, gradient.envelope(), gradient.shared(&[(0, 24)], last), &[]);
        }
        world.work();
        assert_eq!(applied(&world.answer(line, request).unwrap()), sequence);
    }
    let mut expected = vec![-4_f32; 6];
    expected
        .extend([0.0, 0.0, 0.0, -2.0, -2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -2.0, -2.0, -2.0]);
    assert_eq!(f32s(&world.values(line))[..21], expected);
}

#[test]
fn a_first_part_that_is_sent_does_not_stand_for_all() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    push_buffer.put(1, 16, &bytes_of(&[3_f64, 4.0]));
    let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(1));
    world.send(line, gradient.envelope(), gradient.part(0, None), &bytes_of(&[1_f32, 2.0, 0.0]));
    let request =
        world.send(line, gradient.envelope(), gradient.shared(&[(16, 32)], Some(32)), &[]);
    world.work();
    assert_eq!(applied(&world.answer(line, request).unwrap()), 1);
    let values = world.values(line);
    assert_eq!((f32s(&values[..8]), f64s(&values[16..32])), (vec![-1.0, -2.0], vec![-3.0, -4.0]));
}

#[test]
fn a_push_with_nan_changes_nothing_not_even_the_rows_of_a_table() {
    let dense = VariableSpec::f32("dense", [LARGE as u64]).unwrap();
    let table = TableSpec::new(1 << 20);
    let table = VariableSpec::table("table", DType::F32, [2], table).unwrap();
    let (mut world, _, line) = same_host(vec![dense, table], |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    let bytes = 4 * LARGE as u64;
    let layout = world.catalogue.layout(ShardId { task: 0, shard: 0 });
    let index_at = layout.tables()[0].index.unwrap();
    let index = index_of(&[77_u64]);
    let row = bytes_of(&[5_f32, 6.0]);
    // A new row is written elsewhere; an existing row is changed in place.
    let mut grant = world.token(line);
    for (sequence, value, rows) in [(1, f32::NAN, 0), (2, 1.0, 1), (3, f32::NAN, 1), (4, 1.0, 1)] {
        push_buffer.put(0, bytes - 4, &value.to_le_bytes());
        let gradient = Push::gradient(sequence, grant, push_buffer.push_slot(0));
        world.send(line, gradient.envelope(), gradient.part(index_at, None), &index);
        world.send(line, gradient.envelope(), gradient.part(bytes, None), &row);
        let whole = bytes + (index.len() + row.len()) as u64;
        let last = gradient.shared(&[(0, bytes)], Some(whole));
        let request = world.send(line, gradient.envelope(), last, &[]);
        world.work();
        let answer = world.answer(line, request).unwrap();
        match value.is_nan() {
            true => assert!(matches!(refusal(answer), Refusal::NonFinite { .. })),
            false => {
                assert_eq!(applied(&answer), sequence / 2);
                grant = world.token(line);
            }
        }
        assert_eq!(world.metrics().table_rows, rows);
    }
}

#[test]
fn gradients_for_changes_in_place_are_scanned_first() {
    // More than one slice, and rows in too many blocks to copy any.
    let elements = (1 << 18) + 1024_u64;
    let dense = VariableSpec::f32("dense", [elements]).unwrap();
    let table = VariableSpec::f32("table", [1 << 20, 4]).unwrap().sparse();
    let (mut world, _, line) = same_host(vec![dense, table], |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    let rows: Vec<u32> = (0..256).map(|row| row << 12).collect();
    let index = index_of(&rows);
    let values = bytes_of(&[1_f32; 4 * 256]);
    let table = world.catalogue.layout(ShardId { task: 0, shard: 0 }).partitions()[1].clone();
    let grant = world.token(line);
    for (sequence, value) in [(1, f32::NAN), (2, 1.0)] {
        push_buffer.put(0, 4 * (elements - 1), &value.to_le_bytes());
        let gradient = Push::gradient(sequence, grant, push_buffer.push_slot(0));
        let parts = [(table.index.unwrap(), &index), (table.offset, &values)];
        for (offset, body) in parts {
            world.send(line, gradient.envelope(), gradient.part(offset, None), body);
        }
        let whole = 4 * elements + (index.len() + values.len()) as u64;
        let last = gradient.shared(&[(0, 4 * elements)], Some(whole));
        let request = world.send(line, gradient.envelope(), last, &[]);
        world.work();
        let answer = world.answer(line, request).unwrap();
        match value.is_nan() {
            true => assert!(matches!(refusal(answer), Refusal::NonFinite { .. })),
            false => assert_eq!(applied(&answer), 1),
        }
    }
    let found = f32s(&world.values(line));
    assert_eq!((found[elements as usize - 1], found[elements as usize]), (-1.0, -1.0));
}

#[test]
fn any_variables_may_be_in_the_push_buffer_and_the_others_sent() {
    let variables = ["a", "b", "c"].map(|name| VariableSpec::f32(name, [2]).unwrap()).to_vec();
    let (mut world, _, line) = same_host(variables, |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    // Variables that are sent are not read from the buffer.
    push_buffer.put(0, 0, &bytes_of(&[f32::NAN; 6]));
    for mask in 1..8_u64 {
        let gradient = Push::gradient(mask, world.token(line), push_buffer.push_slot(0));
        let mut shared = Vec::new();
        for n in 0..3 {
            // Each push has other values, because both kinds of memory keep the old ones.
            let value = bytes_of(&[((n + 1) * mask) as f32; 2]);
            let at = 8 * n;
            match mask >> n & 1 {
                1 => {
                    push_buffer.put(0, at, &value);
                    shared.push((at, at + 8));
                }
                _ => {
                    push_buffer.put(0, at, &bytes_of(&[f32::NAN; 2]));
                    world.send(line, gradient.envelope(), gradient.part(at, None), &value);
                }
            }
        }
        let last = gradient.shared(&shared, Some(24));
        let request = world.send(line, gradient.envelope(), last, &[]);
        world.work();
        assert_eq!(applied(&world.answer(line, request).unwrap()), mask);
        let expected =
            [1.0, 1.0, 2.0, 2.0, 3.0, 3.0].map(|value| -((mask * (mask + 1) / 2) as f32) * value);
        assert_eq!(f32s(&world.values(line)), expected);
    }
}

#[test]
fn invalid_ranges_are_refused_and_the_next_push_is_applied() {
    let dense = VariableSpec::f32("dense", [6]).unwrap();
    let odd = VariableSpec::f32("odd", [3]).unwrap();
    let table = VariableSpec::f32("table", [5, 3]).unwrap().sparse();
    let plain = VariableSpec::f32("plain", [2]).unwrap().plain();
    // The variables are at 0, 24, 40 and 104; the numbers of rows begin at 112.
    let (mut world, chief, line) = same_host(vec![dense, odd, table, plain], |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    let other = MappedBuffer::new(&mut world, chief);
    let ordinary = world.push_slot(line);
    let far = u64::MAX - 7;
    let range = |offset, bytes, limit| format!("{:?}", Refusal::Range { offset, bytes, limit });
    let no_push_slot = |push_slot| format!("{:?}", Refusal::PushSlotTaken { push_slot });
    type Ranges = &'static [(u64, u64)];
    let cases: &[(u32, Ranges, String)] = &[
        (push_buffer.push_slot(0), &[(8, 24)], range(8, 16, 0)),
        (push_buffer.push_slot(0), &[(0, 0)], range(0, 0, 144)),
        (push_buffer.push_slot(0), &[(24, 0)], range(24, 0, 144)),
        (push_buffer.push_slot(0), &[(u64::MAX - 7, 0)], range(far, 0, 144)),
        (push_buffer.push_slot(0), &[(0, u64::MAX - 7)], range(0, far, 144)),
        (push_buffer.push_slot(0), &[(u64::MAX - 7, u64::MAX)], range(far, 7, 144)),
        (push_buffer.push_slot(0), &[(0, 12)], range(0, 12, 144)),
        (push_buffer.push_slot(0), &[(0, 16)], range(0, 16, 24)),
        (push_buffer.push_slot(0), &[(0, 24), (0, 24)], range(0, 24, 0)),
        (push_buffer.push_slot(0), &[(24, 40), (0, 40)], range(0, 40, 24)),
        (push_buffer.push_slot(0), &[(0, 24), (24, 32)], range(24, 8, 40)),
        (push_buffer.push_slot(0), &[(0, 104)], range(0, 104, 40)),
        (push_buffer.push_slot(0), &[(40, 104)], range(40, 64, 40)),
        (push_buffer.push_slot(0), &[(112, 120)], range(112, 8, 112)),
        (push_buffer.push_slot(0), &[(112, 144)], range(112, 32, 112)),
        (push_buffer.push_slot(0), &[(104, 112)], "Operation".to_owned()),
        (push_buffer.push_slot(0), &[(0, 112)], "Operation".to_owned()),
        (ordinary, &[(0, 24)], no_push_slot(ordinary)),
        (other.push_slot(0), &[(0, 24)], no_push_slot(other.push_slot(0))),
        (77, &[(0, 24)], no_push_slot(77)),
        (0, &[], no_push_slot(0)),
    ];
    let grant = world.token(line);
    push_buffer.put(0, 0, &bytes_of(&[1_f32; 6]));
    let mut sequence = 0;
    for (push_slot, ranges, expected) in cases {
        for whole in [Some(24), None] {
            sequence += 1;
            let gradient = Push::gradient(sequence, grant, *push_slot);
            let message = gradient.shared(ranges, whole);
            let request = world.send(line, gradient.envelope(), message, &[]);
            let refused = refusal(world.answer(line, request).unwrap());
            let found = format!("{refused:?}");
            assert!(
                found.starts_with(expected),
                "{ranges:?} of {push_slot}: {found}, not {expected}"
            );
            // Later messages of the push are ignored.
            if whole.is_none() {
                let last = gradient.shared(&[(0, 24)], Some(24));
                let request = world.send(line, gradient.envelope(), last, &[]);
                assert_eq!(world.answer(line, request), None);
            }
        }
        sequence += 1;
        let gradient = Push::gradient(sequence, grant, push_buffer.push_slot(0));
        let wrong_length = gradient.shared(&[(0, 24)], Some(32));
        let request = world.send(line, gradient.envelope(), wrong_length, &[]);
        let refused = refusal(world.answer(line, request).unwrap());
        assert!(matches!(refused, Refusal::Length { named: 32, received: 24 }), "{refused:?}");
    }
    assert_eq!(f32s(&world.values(line)), [0_f32; 28]);
    let gradient = Push::gradient(sequence + 1, grant, push_buffer.push_slot(0));
    assert_eq!(applied(&push(&mut world, line, &gradient, &[(0, 24)])), 1);
    // A buffer slot serves one push at a time, and so does a token.
    let gradient = Push::gradient(sequence + 2, world.token(line), push_buffer.push_slot(0));
    world.send(line, gradient.envelope(), gradient.shared(&[(0, 24)], None), &[]);
    let next = Push { sequence: sequence + 3, ..gradient };
    let refused = refusal(push(&mut world, line, &next, &[(0, 24)]));
    assert_eq!(refused, Refusal::PushSlotTaken { push_slot: push_buffer.push_slot(0) });
    let elsewhere = Push { push_slot: push_buffer.push_slot(1), ..gradient };
    let refused = refusal(push(&mut world, line, &elsewhere, &[(24, 40)]));
    assert_eq!(refused, Refusal::PushSlotTaken { push_slot: push_buffer.push_slot(1) });
}

#[test]
fn the_maximum_number_of_ranges_is_accepted() {
    let scalars = 0..PUSH_SHARED_RANGES_MAX as u64 + 1;
    let variables = scalars.map(|n| VariableSpec::f32(format!("v{n}"), [2]).unwrap()).collect();
    let (mut world, _, line) = same_host(variables, |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    let all: Vec<(u64, u64)> =
        (0..PUSH_SHARED_RANGES_MAX as u64).map(|n| (8 * n, 8 * n + 8)).collect();
    push_buffer.put(0, 0, &bytes_of(&vec![1_f32; 2 * PUSH_SHARED_RANGES_MAX + 2]));
    let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(0));
    // Every other range first, so that none is merged with its neighbor.
    let (odd, even): (Vec<_>, Vec<_>) = all.into_iter().partition(|(start, _)| start % 16 == 8);
    let ranges: Vec<(u64, u64)> = odd.into_iter().chain(even).collect();
    world.send(line, gradient.envelope(), gradient.shared(&ranges, None), &[]);
    let rest = (8 * PUSH_SHARED_RANGES_MAX as u64, 8 * PUSH_SHARED_RANGES_MAX as u64 + 8);
    let last = gradient.shared(&[rest], Some(rest.1));
    let request = world.send(line, gradient.envelope(), last, &[]);
    world.work();
    assert_eq!(applied(&world.answer(line, request).unwrap()), 1);
    assert!(f32s(&world.values(line)).iter().all(|&value| value == -1.0));
}

#[test]
fn a_push_with_nan_of_any_size_changes_nothing() {
    let names = ["w", "x"];
    let two = |elements: usize| {
        names.map(|name| VariableSpec::f32(name, [elements as u64]).unwrap()).to_vec()
    };
    // The smallest push is applied in place and scanned before. The others are scanned as they are
    // applied, in one slice or several.
    for elements in [4, 40_000, LARGE / 2] {
        let bytes = 8 * elements as u64;
        let (mut world, _, line) = same_host(two(elements), |config| config);
        let push_buffer = MappedBuffer::new(&mut world, line);
        let grant = world.token(line);
        let mut values = vec![1_f32; 2 * elements];
        push_buffer.put(0, 0, &bytes_of(&values));
        let bad = f32::NAN.to_le_bytes();
        for (sequence, at) in [0, elements - 1, elements, 2 * elements - 1].into_iter().enumerate()
        {
            push_buffer.put(0, 4 * at as u64, &bad);
            let gradient = Push::gradient(sequence as u64 + 1, grant, push_buffer.push_slot(0));
            let refused = refusal(push(&mut world, line, &gradient, &[(0, bytes)]));
            let variable = VariableId((at / elements) as u32);
            let element = at % elements;
            let found = matches!(refused, Refusal::NonFinite { variable: v, element: e, value }
                if v == variable && e == element as u64 && value.is_nan());
            assert!(found, "element {at} of {elements}: {refused:?}");
            assert_eq!(state(&mut world, line, sequence as u64 + 1), PushState::Unknown {});
            push_buffer.put(0, 4 * at as u64, &1_f32.to_le_bytes());
        }
        assert!(f32s(&world.values(line)).iter().all(|&value| value == 0.0));
        assert_eq!(world.metrics().pushes_dropped, 4);
        // The client still holds the token.
        values[0] = 1.0;
        let gradient = Push::gradient(9, grant, push_buffer.push_slot(0));
        assert_eq!(applied(&push(&mut world, line, &gradient, &[(0, bytes)])), 1);
        assert!(f32s(&world.values(line)).iter().all(|&value| value == -1.0));
    }
}

/// The sums of the first pass of such an optimizer affect everything that the second pass changes.
#[test]
fn nan_that_is_overwritten_before_the_second_pass_is_refused() {
    let variables = vec![VariableSpec::f32("w", [LARGE as u64]).unwrap()];
    let (mut world, _, line) =
        same_host(variables, |config| config.optimizer_for("w", Lamb::default()));
    let push_buffer = MappedBuffer::new(&mut world, line);
    let bytes = 4 * LARGE as u64;
    push_buffer.put(0, 0, &f32::INFINITY.to_le_bytes());
    let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(0));
    let all = gradient.shared(&[(0, bytes)], Some(bytes));
    let request = world.send(line, gradient.envelope(), all, &[]);
    world.slice(0);
    push_buffer.put(0, 0, &1_f32.to_le_bytes());
    world.work();
    let refused = refusal(world.answer(line, request).expect("a push is answered"));
    assert!(matches!(refused, Refusal::NonFinite { element: 0, .. }), "{refused:?}");
    assert!(f32s(&world.values(line)).iter().all(|&value| value == 0.0));
}

#[test]
fn nan_is_counted_once_or_ignored_as_configured() {
    for (policy, counted) in [(NonFinite::Count, 3), (NonFinite::Allow, 0)] {
        for elements in [4, LARGE] {
            // An optimizer that makes two passes.
            let variables = vec![VariableSpec::f32("w", [elements as u64]).unwrap()];
            let configure =
                |config: PsConfig| config.non_finite(policy).optimizer_for("w", Lamb::default());
            let (mut world, _, line) = same_host(variables, configure);
            let push_buffer = MappedBuffer::new(&mut world, line);
            for at in [0, elements as u64 / 2, elements as u64 - 1] {
                push_buffer.put(0, 4 * at, &f32::INFINITY.to_le_bytes());
            }
            let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(0));
            let answer = push(&mut world, line, &gradient, &[(0, 4 * elements as u64)]);
            assert_eq!(applied(&answer), 1);
            assert_eq!(world.metrics().non_finite, counted, "{policy:?} of {elements}");
        }
    }
}

#[test]
fn a_whole_push_is_applied_although_its_client_is_gone() {
    let (mut world, chief, _) = large(80 << 16);
    let whole = |world: &mut World, sequence, peer: &mut Peer| {
        let line = world.join(0, peer);
        let push_buffer = MappedBuffer::new(world, line);
        push_buffer.put(1, 0, &bytes_of(&vec![1_f32; LARGE]));
        let gradient = Push::gradient(sequence, world.token(line), push_buffer.push_slot(1));
        let bytes = 4 * LARGE as u64;
        world.send(line, gradient.envelope(), gradient.shared(&[(0, bytes)], Some(bytes)), &[]);
        (line, gradient)
    };
    let left = world.bytes_left();
    // The connection is gone, and the client asks again over another.
    let mut peer = worker(5);
    let (line, gradient) = whole(&mut world, 1, &mut peer);
    world.disconnect(line);
    assert!(world.bytes_left() < left, "the push buffer is still in memory");
    let line = world.join(0, &mut peer);
    let bytes = 4 * LARGE as u64;
    assert_eq!(state(&mut world, line, 1), PushState::Receiving { bytes });
    let empty = gradient.part(0, Some(bytes));
    let request = world.send(line, gradient.envelope(), empty, &[]);
    world.work();
    assert_eq!(applied(&world.answer(line, request).unwrap()), 1);
    assert_eq!(world.bytes_left(), left, "the push buffer is released with the push");
    // The client is lost, has left, or is restarted.
    let (line, _) = whole(&mut world, 1, &mut worker(6));
    world.disconnect(line);
    world.pass(Duration::from_secs(60), &[chief]);
    assert_eq!(world.work(), crate::shard::values::applier::WorkOutcome::Idle);
    let (line, _) = whole(&mut world, 1, &mut worker(7));
    assert!(matches!(world.ask(line, message::Leave {}.into()), Message::Left(_)));
    let mut older = worker(8);
    whole(&mut world, 1, &mut older);
    let line = world.join(0, &mut older.restarted());
    world.work();
    all_are(&world.values(line), -4.0);
    assert_eq!(world.bytes_left(), left);
}

#[test]
fn an_incomplete_push_is_dropped_with_its_client() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    let left = world.bytes_left();
    let push_buffer = MappedBuffer::new(&mut world, line);
    let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(0));
    world.send(line, gradient.envelope(), gradient.shared(&[(0, 16)], None), &[]);
    world.send(line, gradient.envelope(), gradient.part(16, None), &bytes_of(&[1_f64]));
    assert_eq!(state(&mut world, line, 1), PushState::Receiving { bytes: 24 });
    let late = world.announce(line, gradient.envelope(), gradient.part(24, None), 8);
    // The client connects again: messages over the old connection are ignored.
    let mut again = Peer { epoch: ClientEpoch(2), ..worker(1) };
    let next = world.join(0, &mut again);
    assert_eq!((again.epoch, world.bytes_left()), (ClientEpoch(2), left));
    assert!(world.closed.contains(&line) && world.answer(line, late).is_none());
    assert_eq!(state(&mut world, next, 1), PushState::Unknown {});
    let refused = refusal(push(&mut world, next, &gradient, &[(0, 16)]));
    assert_eq!(refused, Refusal::PushSlotTaken { push_slot: push_buffer.push_slot(0) });
    let push_buffer = MappedBuffer::new(&mut world, next);
    push_buffer.put(0, 0, &bytes_of(&[1_f32; 3]));
    let gradient = Push { push_slot: push_buffer.push_slot(0), ..gradient };
    assert_eq!(applied(&push(&mut world, next, &gradient, &[(0, 16)])), 1);
    assert!(matches!(world.ask(next, message::Leave {}.into()), Message::Left(_)));
    assert_eq!(world.bytes_left(), left);
}

#[test]
fn the_token_of_a_refused_push_is_free_once_its_client_is_gone() {
    let (mut world, _, line) = large(80 << 16);
    let push_buffer = MappedBuffer::new(&mut world, line);
    push_buffer.put(0, 4096, &f32::NAN.to_le_bytes());
    let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(0));
    let bytes = 4 * LARGE as u64;
    world.send(line, gradient.envelope(), gradient.shared(&[(0, bytes)], Some(bytes)), &[]);
    assert!(matches!(world.ask(line, message::Leave {}.into()), Message::Left(_)));
    world.work();
    let metrics = world.metrics();
    assert_eq!((metrics.tokens_taken_back, metrics.gradients_applied), (1, 0));
    let owner = world.shards[0].steps.owner.as_ref().unwrap();
    assert_eq!(owner.ledger().len(), 0);
}

#[test]
fn a_withdrawn_push_leaves_the_buffer_slot_to_its_client() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    push_buffer.put(0, 0, &bytes_of(&[1_f32; 3]));
    let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(0));
    world.send(line, gradient.envelope(), gradient.shared(&[(0, 16)], None), &[]);
    let request = world.send(line, gradient.envelope(), message::Withdraw {}.into(), &[]);
    let answer = world.answer(line, request);
    assert!(matches!(answer, Some(Message::PushAnswer(_))), "{answer:?}");
    let gradient = Push { sequence: 2, ..gradient };
    // No other client needs the buffer slot, so no pause is too long.
    world.send(line, gradient.envelope(), gradient.shared(&[(0, 16)], None), &[]);
    world.pass(Duration::from_secs(60), &[line]);
    let empty = gradient.part(0, Some(16));
    let request = world.send(line, gradient.envelope(), empty, &[]);
    world.work();
    assert_eq!(applied(&world.answer(line, request).unwrap()), 1);
}

#[test]
fn a_client_that_is_refused_a_push_buffer_learns_why_and_continues() {
    let refused = |world: &mut World, origin: PeerOrigin, role: Role| {
        let peer = Peer { role, ..worker(5) };
        let (line, _) = world.handshake_over(origin, 0, peer.hello(0)).unwrap();
        let refusal = world.refused(line, SharePushBuffer {}.into());
        assert!(world.shared.is_empty());
        let alive = world.ask(line, message::Heartbeat {}.into());
        assert!(matches!(alive, Message::HeartbeatAnswer(_)));
        world.disconnect(line);
        match refusal {
            Refusal::Unsupported { kind: 8, detail } => detail.as_str().to_owned(),
            other => format!("{other:?}"),
        }
    };
    let member = Role::Worker {};
    let (mut world, chief, line) = same_host(variables(), |config| config);
    let over_tcp = "memory is shared over Unix sockets only";
    assert_eq!(refused(&mut world, PeerOrigin::Remote, member), over_tcp);
    assert_eq!(refused(&mut world, PeerOrigin::Unix { same_user: false }, member), "Denied");
    for role in [Role::Reader {}, Role::Peer {}] {
        assert!(refused(&mut world, SAME_HOST, role).starts_with("Role"));
    }
    // A client has one push buffer, over one connection.
    MappedBuffer::new(&mut world, line);
    let again = format!("{:?}", world.refused(line, SharePushBuffer {}.into()));
    assert!(again.contains("this client has a push buffer"), "{again}");
    for _ in 1..SHARE_REQUESTS_MAX {
        assert!(matches!(
            world.ask(line, ShareValues { wants: 1 }.into()),
            Message::SharedValues(_)
        ));
    }
    let often = format!("{:?}", world.refused(line, SharePushBuffer {}.into()));
    assert!(often.contains("too often"), "{often}");
    world.shared.clear();
    // The maximum number of push buffers, and one more once one is released.
    let mut lines: Vec<ConnectionId> =
        (1..PUSH_BUFFERS_MAX as u32).map(|task| world.join(0, &mut worker(100 + task))).collect();
    lines.iter().for_each(|&line| _ = MappedBuffer::new(&mut world, line));
    let many = format!("{:?}", world.refused(chief, SharePushBuffer {}.into()));
    assert!(many.contains("the maximum number of push buffers is shared"), "{many}");
    world.disconnect(lines.remove(0));
    MappedBuffer::new(&mut world, chief);

    let mut bare = at(ArenaStorage::Shareable, variables(), |config| config);
    assert_eq!(refused(&mut bare, SAME_HOST, member), "NotInitialized");
    let (mut world, ..) =
        same_host(variables(), |config| config.network(Network::default().shared_memory(false)));
    assert_eq!(refused(&mut world, SAME_HOST, member), "shared memory is switched off");
    let mode = synchronous(1, 1);
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config.mode(mode));
    assert!(refused(&mut world, SAME_HOST, member).contains("survive this process"));
    let (mut world, ..) = same_host(vec![VariableSpec::f32("w", [0]).unwrap()], |config| config);
    assert!(refused(&mut world, SAME_HOST, member).contains("this shard has no values"));
}

#[test]
fn push_buffers_and_the_parts_sent_beside_them_count_as_memory() {
    let memory = |bytes_max| {
        let storage = Storage::memory().bytes_max(bytes_max);
        let (mut world, _, line) = same_host(variables(), |config| config.storage(storage.clone()));
        let used = bytes_max - world.bytes_left();
        (world.ask(line, SharePushBuffer {}.into()), used, world, line)
    };
    let (_, used, ..) = memory(1 << 30);
    let (answer, ..) = memory(used + 8191);
    let refused = refusal(answer);
    assert!(matches!(refused, Refusal::DoesNotFit { need: 8192, limit: 8191, .. }), "{refused}");
    let (answer, _, mut world, line) = memory(used + 8192 + 4095);
    let Message::SharedPushBuffer(shared) = answer else { panic!("{answer:?}") };
    assert_eq!((shared.bytes, shared.first, shared.stride), (8192, 0, 4096));
    let gradient = Push::gradient(1, world.token(line), shared.push_slots.items()[0]);
    let request = world.announce(line, gradient.envelope(), gradient.part(16, None), 16);
    let refused = refusal(world.answer(line, request).unwrap());
    // The push slots that all clients share have their memory already.
    assert_eq!(refused, Refusal::PushSlotTaken { push_slot: shared.push_slots.items()[0] });
    world.body(line, &[0; 16]);
    let gradient = Push { sequence: 2, ..gradient };
    assert_eq!(applied(&push(&mut world, line, &gradient, &[(0, 16)])), 1);
}

#[test]
fn push_buffers_leave_to_tables_what_they_may_need() {
    let users = VariableSpec::table("users", DType::F32, [2], TableSpec::new(1 << 20)).unwrap();
    let variables = vec![VariableSpec::f32("w", [4]).unwrap(), users];
    let (mut world, _, line) = same_host(variables, |config| config);
    let others = world.take(world.bytes_left_unpromised() - 8191);
    assert!(world.bytes_left() > 1 << 20);
    let refused = refusal(world.ask(line, SharePushBuffer {}.into()));
    assert!(matches!(refused, Refusal::DoesNotFit { need: 8192, limit: 8191, .. }), "{refused}");
    drop(others);
    let answer = world.ask(line, SharePushBuffer {}.into());
    assert!(matches!(answer, Message::SharedPushBuffer(_)), "{answer:?}");
}

#[test]
fn values_are_assigned_from_a_push_buffer() {
    let (mut world, line, _) = same_host(variables(), |config| config);
    let push_buffer = MappedBuffer::new(&mut world, line);
    push_buffer.put(0, 32, &bytes_of(&[7_f32; 4]));
    let assign = Push::plain(1, Operation::Assign {}, push_buffer.push_slot(0));
    assert_eq!(applied(&push(&mut world, line, &assign, &[(32, 48)])), 1);
    assert_eq!(f32s(&world.values(line)[32..48]), [7.0; 4]);
}

/// A world that keeps its state, and a worker with a gradient in its push buffer.
fn with_state() -> (World, ConnectionId, MappedBuffer, Push) {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut worker(1));
    let push_buffer = MappedBuffer::new(&mut world, line);
    push_buffer.put(0, 0, &bytes_of(&[1_f32; 3]));
    let gradient = Push::gradient(1, world.token(line), push_buffer.push_slot(0));
    (world, line, push_buffer, gradient)
}

#[test]
fn a_whole_push_in_a_push_buffer_is_sent_again_after_a_kill() {
    let (mut world, line, _push_buffer, gradient) = with_state();
    let files = world.files(0).into_keys().collect::<Vec<_>>();
    world.send(line, gradient.envelope(), gradient.shared(&[(0, 16)], Some(16)), &[]);
    assert_eq!(world.files(0).into_keys().collect::<Vec<_>>(), files);
    world.restart(0).unwrap();
    let mut peer = Peer { epoch: ClientEpoch(2), ..worker(1) };
    let line = world.join(0, &mut peer);
    assert_eq!(
        (world.shards[0].has_work(), state(&mut world, line, 1)),
        (false, PushState::Unknown {})
    );
    // The push buffer is gone, but the token is not.
    let refused = refusal(push(&mut world, line, &gradient, &[(0, 16)]));
    assert_eq!(refused, Refusal::PushSlotTaken { push_slot: gradient.push_slot });
    let gradient = Push { push_slot: world.push_slot(line), ..gradient };
    let answer = world.push_answer(line, &gradient, &[(0, &bytes_of(&[1_f32; 3]))]);
    assert_eq!(applied(&answer), 1);
    assert_eq!(f32s(&world.values(line)[..12]), [-1.0; 3]);
}

#[test]
fn a_push_that_was_applied_from_a_push_buffer_is_not_applied_again_after_a_kill() {
    let (mut world, line, _push_buffer, gradient) = with_state();
    assert_eq!(applied(&push(&mut world, line, &gradient, &[(0, 16)])), 1);
    world.restart(0).unwrap();
    let line = world.join(0, &mut Peer { epoch: ClientEpoch(2), ..worker(1) });
    assert!(matches!(state(&mut world, line, 1), PushState::Settled { .. }));
    let again = push(&mut world, line, &gradient, &[(0, 16)]);
    assert!(matches!(again, Message::PushAnswer(answer) if answer.duplicate));
    assert_eq!(f32s(&world.values(line)[..12]), [-1.0; 3]);
}

#[test]
fn the_token_of_a_push_that_is_lost_with_client_and_server_is_free() {
    let (mut world, line, _push_buffer, gradient) = with_state();
    world.send(line, gradient.envelope(), gradient.shared(&[(0, 16)], Some(16)), &[]);
    let left = world.say(line, message::Leave {}.into());
    assert!(matches!(world.answer(line, left), Some(Message::Left(_))));
    let owner = |world: &World| world.shards[0].steps.owner.as_ref().unwrap().ledger().len();
    assert_eq!(owner(&world), 1, "the push belongs to the server");
    world.restart(0).unwrap();
    assert_eq!((owner(&world), world.shards[0].has_work()), (0, false));
    world.tick();
    world.restart(0).unwrap();
    assert_eq!(owner(&world), 0);
}

/// The client may have overwritten a refused element before the scan searches for its position.
#[test]
#[cfg(target_os = "linux")]
fn nan_that_is_overwritten_before_the_search_is_refused() {
    let counters = Counters::default();
    let (memory, descriptor) = SharedBytes::new(16384).unwrap();
    let file = File::from(descriptor);
    file.write_all_at(&f32::INFINITY.to_le_bytes(), 12_000).unwrap();
    for (policy, there, found) in [
        (NonFinite::Reject, 12_000, Some((12_000, f64::INFINITY))),
        (NonFinite::Reject, 0, Some((8_000, f64::NAN))),
        (NonFinite::Count, 12_000, None),
        (NonFinite::Count, 0, None),
    ] {
        let scan = NonFiniteScan { policy, counters: &counters };
        let gradient = memory.bytes(0, if there == 0 { 12_000 } else { 16_384 });
        let mut seen = ScanningInput::new(gradient, 0, DType::F32, Some(scan));
        seen.consume_shared(8_000, false);
        assert!(seen.found().is_none());
        seen.consume_shared(if there == 0 { 4_000 } else { 8_384 }, true);
        let is = seen.found().map(|found| (found.at as usize, found.value.to_bits()));
        assert_eq!(is, found.map(|(at, value)| (at, value.to_bits())), "{policy:?}, {there}");
    }
    assert_eq!(counters.non_finite.read(), 1);
}
