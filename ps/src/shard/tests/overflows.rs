//! Pushes of finite elements that would make values infinite. Where one shard can decide for the
//! whole push, it refuses the push and changes nothing. Elsewhere overflows are counted and named.

use pushpull_common::ids::{RequestId, ShardId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Message, Outcome, Refusal};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{ApplyAt, Momentum, Optimizer, OptimizerSlot, Run, Sgd};

use super::peers::{Push, bytes_of, f32s, index_of, worker};
use super::synchronous::{ShardCluster, synchronous};
use super::world::{ConnectionId, World};
use crate::config::{NonFinite, PsConfig};
use crate::metrics::Overflowed;

/// The learning rate, with which a gradient of [`LARGE`] overflows f32.
const RATE: f64 = 1e30;
const LARGE: f32 = -1e10;
/// A gradient that moves a value by -1.
const UNIT: f32 = 1e-30;

/// `small` (6 f32, at 0), `big` (40,000 f32, at 24), `rows` (5 rows of 3 f32; its index after all
/// values), and a table.
fn variables() -> Vec<VariableSpec> {
    let users = TableSpec::new(1 << 20).rows_at_once(6);
    vec![
        VariableSpec::f32("small", [6]).unwrap(),
        VariableSpec::f32("big", [BIG as u64]).unwrap(),
        VariableSpec::f32("rows", [5, 3]).unwrap().sparse(),
        VariableSpec::table("users", DType::F32, [3], users).unwrap(),
    ]
}

const BIG: usize = 40_000;

/// A custom optimizer, which has no loop from one block to another.
#[derive(Debug)]
struct CustomOptimizer;

impl Optimizer for CustomOptimizer {
    fn kind(&self) -> &'static str {
        "theirs"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        const { &[OptimizerSlot::new("count", 0.0)] }
    }

    fn apply_f32(&self, _: ApplyAt, run: Run<'_, f32>) {
        for (place, value) in run.values.iter_mut().enumerate() {
            *value -= RATE as f32 * run.gradient[place];
            run.slots[0][place] += 1.0;
        }
    }

    fn apply_f64(&self, _: ApplyAt, _: Run<'_, f64>) {}
}

fn ready(
    optimizer: impl Optimizer,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> (World, ConnectionId) {
    let (mut world, _) =
        World::ready(variables(), optimizer, |config| configure(config.inbox_pushes(1)));
    let line = world.join(0, &mut worker(1));
    (world, line)
}

/// The parts of a push for `small`, `big` or both, with [`LARGE`] at element `at` of the last one.
fn dense(small: bool, big: bool, at: usize) -> Vec<(u64, Vec<u8>)> {
    let mut of_small = vec![UNIT; 6];
    let mut of_big = vec![UNIT; BIG];
    match big {
        true => of_big[at] = LARGE,
        false => of_small[at] = LARGE,
    }
    match (small, big) {
        (true, true) => vec![(0, bytes_of(&[of_small, of_big].concat()))],
        (true, false) => vec![(0, bytes_of(&of_small))],
        _ => {
            // In parts, so that they are applied as they arrive.
            let bytes = bytes_of(&of_big);
            let parts = bytes.chunks(60_000).scan(24, |at, part| {
                let start = *at;
                *at += part.len() as u64;
                Some((start, part.to_vec()))
            });
            parts.collect()
        }
    }
}

fn push_parts(
    world: &mut World,
    line: ConnectionId,
    push: &Push,
    parts: &[(u64, Vec<u8>)],
) -> Message {
    let parts: Vec<(u64, &[u8])> = parts.iter().map(|(at, body)| (*at, &body[..])).collect();
    let last = world.push(line, push, &parts);
    world.work();
    if let Some(answer) = world.answer(line, last) {
        return answer;
    }
    // It was refused before its last part, under the request of the part with the overflow.
    let mut earlier = (1..=last.0).rev().map(RequestId);
    earlier.find_map(|request| world.answer(line, request)).expect("the push is refused")
}

/// The offsets of the rows of a variable and of their index.
fn offsets(world: &World, variable: u32) -> (u64, u64) {
    let layout = world.catalogue.layout(ShardId::default());
    let partition = layout.all().iter().find(|partition| partition.variable.0 == variable).unwrap();
    (partition.offset, partition.index.unwrap())
}

fn refusal(answer: Message) -> (u32, u64, f64) {
    let Message::Refused(refused) = answer else { panic!("not refused: {answer:?}") };
    let Refusal::Overflow { variable, element, value } = refused.refusal else {
        panic!("refused otherwise: {}", refused.refusal)
    };
    (variable.0, element, value)
}

/// Everything that a push may change.
fn state(world: &mut World, line: ConnectionId) -> (Vec<u8>, u64, u64) {
    let metrics = world.metrics();
    (world.values(line), metrics.global_step, metrics.gradients_applied)
}

#[test]
fn a_push_that_would_overflow_a_value_changes_nothing_and_names_it() {
    let rules: [fn() -> (World, ConnectionId); 3] = [
        || ready(Sgd::new(RATE), |config| config),
        || ready(Momentum::new(RATE, 0.9), |config| config),
        || ready(CustomOptimizer, |config| config),
    ];
    for (rule, begin) in rules.into_iter().enumerate() {
        // In place, from block to block, and as parts arrive.
        for (small, big, at, variable) in [
            (true, false, 5, 0),
            (true, true, 0, 1),
            (true, true, 39_999, 1),
            (false, true, 17_000, 1),
            (false, true, 39_999, 1),
        ] {
            let (mut world, line) = begin();
            let grant = world.token(line);
            let mut push_slot = world.push_slot(line);
            let before = state(&mut world, line);
            for sequence in 1..3 {
                let push = Push::gradient(sequence, grant, push_slot);
                let answer = push_parts(&mut world, line, &push, &dense(small, big, at));
                let expected = (variable, at as u64, f64::INFINITY);
                assert_eq!(refusal(answer), expected, "rule {rule}, {small}, {big}");
                assert!(state(&mut world, line) == before, "rule {rule}, {small}, {big}, {at}");
                push_slot = world.push_slot(line);
            }
            let metrics = world.metrics();
            assert_eq!((metrics.overflows_refused, metrics.overflows), (2, 0));
            // The client still holds the token, and a smaller gradient is accepted.
            let push = Push::gradient(3, grant, push_slot);
            let answer = push_parts(&mut world, line, &push, &[(0, bytes_of(&[UNIT; 6]))]);
            assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
            assert_eq!(f32s(&world.select(line, &[0]).unwrap()), [-1.0; 6]);
            // The discarded values are not in the files either.
            world.restart(0).unwrap();
            let line = world.join(0, &mut worker(2));
            assert_eq!(f32s(&world.select(line, &[0]).unwrap()), [-1.0; 6]);
            let big = f32s(&world.select(line, &[1]).unwrap());
            assert!(big.iter().all(|&value| value == 0.0));
        }
    }
}

#[test]
fn rows_and_sums_that_overflow_are_refused_too() {
    let (mut world, line) = ready(Sgd::new(RATE), |config| config);
    let push = world.gradient(line, 1);
    let before = state(&mut world, line);
    let values = bytes_of(&[UNIT, UNIT, UNIT, UNIT, LARGE, UNIT]);
    let (at, index) = offsets(&world, 2);
    let parts = [(index, index_of(&[1_u32, 4])), (at, values)];
    assert_eq!(refusal(push_parts(&mut world, line, &push, &parts)), (2, 13, f64::INFINITY));
    assert!(state(&mut world, line) == before);
    // A sum of finite values in the plain variable `ledger`.
    let (mut world, _) = World::ready(super::peers::variables(), Sgd::new(RATE), |config| config);
    let line = world.join(0, &mut worker(1));
    for (sequence, refused) in [(1, false), (2, true)] {
        let push_slot = world.push_slot(line);
        let add = Push::plain(sequence, Operation::AssignAdd {}, push_slot);
        let answer = push_parts(&mut world, line, &add, &[(32, bytes_of(&[f32::MIN; 4]))]);
        match refused {
            false => assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}"),
            true => assert_eq!(refusal(answer), (2, 0, f64::NEG_INFINITY)),
        }
        assert_eq!(f32s(&world.select(line, &[2]).unwrap()), [f32::MIN; 4]);
    }
}

#[test]
fn overflows_are_accepted_and_counted_or_ignored_by_policy() {
    for (policy, counted) in [(NonFinite::Count, 1), (NonFinite::Allow, 0)] {
        for (small, big, at) in [(true, false, 2), (true, true, 9), (false, true, 9)] {
            let (mut world, line) = ready(Sgd::new(RATE), |config| config.non_finite(policy));
            let push = world.gradient(line, 1);
            let answer = push_parts(&mut world, line, &push, &dense(small, big, at));
            assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
            let metrics = world.metrics();
            assert_eq!((metrics.overflows, metrics.overflows_refused), (counted, 0));
            let variable = if big { "big" } else { "small" };
            let first = metrics.first_overflow.map(|first| first.to_string());
            let expected = format!("element {at} of {variable:?} became inf");
            assert_eq!(first, (counted > 0).then_some(expected));
            // A value that is already infinite does not count again, and no push is refused for it.
            let push = world.gradient(line, 2);
            let answer = push_parts(&mut world, line, &push, &dense(small, big, at));
            assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
            assert_eq!(world.metrics().overflows, counted);
        }
    }
}

#[test]
fn a_value_that_is_already_infinite_causes_no_refusal() {
    let counts = |config: PsConfig| config.non_finite(NonFinite::Count);
    let (mut world, line) = ready(Sgd::new(RATE), counts);
    let push = world.gradient(line, 1);
    push_parts(&mut world, line, &push, &dense(true, true, 7));
    let files = world.files(0);
    let (mut world, _) = ready(Sgd::new(RATE), |config| config);
    world.reopen(0, files).unwrap();
    let line = world.join(0, &mut worker(2));
    let push = world.gradient(line, 1);
    let answer = push_parts(&mut world, line, &push, &dense(true, true, 7));
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    let push = world.gradient(line, 2);
    let answer = push_parts(&mut world, line, &push, &dense(true, true, 8));
    assert_eq!(refusal(answer), (1, 8, f64::INFINITY));
}

/// Another shard may have applied its part: a refusal would leave the push half applied.
#[test]
fn several_shards_refuse_no_overflow_and_each_counts_its_own() {
    let variables = super::peers::variables();
    let configure = |config: PsConfig| config.shards(2).inbox_pushes(1);
    let (mut world, lines) = World::ready(variables, Sgd::new(RATE), configure);
    let push = world.gradient(lines[0], 1);
    // `w` is on the first shard, `d` on the second.
    let answer = push_parts(&mut world, lines[0], &push, &[(0, bytes_of(&[UNIT, LARGE, UNIT]))]);
    let applied = |answer: &Message| {
        let Message::PushAnswer(answer) = answer else { return false };
        matches!(answer.outcome, Outcome::Applied { .. })
    };
    assert!(applied(&answer), "{answer:?}");
    let push = Push { push_slot: world.push_slot(lines[1]), ..push };
    let answer = push_parts(&mut world, lines[1], &push, &[(0, bytes_of(&[f64::MAX, -1.0]))]);
    assert!(applied(&answer), "{answer:?}");
    let metrics = world.metrics();
    assert_eq!((metrics.overflows, metrics.overflows_refused), (2, 0));
    let first = metrics.first_overflow.unwrap();
    let value = "inf".to_owned();
    assert_eq!(first, Overflowed { variable: "w".to_owned(), element: 1, value });
    // Each shard reports its own at once, and only the first.
    let push = world.gradient(lines[0], 2);
    push_parts(&mut world, lines[0], &push, &[(0, bytes_of(&[LARGE, UNIT, UNIT]))]);
    let events = world.events.iter().filter(|(_, event)| event.kind() == "value-overflowed");
    let texts: Vec<String> = events.map(|(_, event)| event.to_string()).collect();
    let names = [
        "element 1 of \"w\" became inf on /job:ps/task:0/shard:0",
        "element 0 of \"d\" became -inf on /job:ps/task:0/shard:1",
    ];
    assert_eq!(texts.len(), names.len(), "{texts:?}");
    assert!(texts.iter().zip(names).all(|(text, name)| text.starts_with(name)), "{texts:?}");
}

/// All shards must apply a committed step.
#[test]
fn a_synchronous_step_that_overflows_is_applied_and_counted() {
    let variables = super::peers::variables();
    let mode = synchronous(2, 2);
    let world = World::bare(variables, Sgd::new(RATE), |config| config.mode(mode).inbox_pushes(1));
    let mut cluster = ShardCluster::of(world, mode);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(0, a, LARGE);
    cluster.push(1, b, LARGE);
    assert_eq!(cluster.values(1).0, f32::INFINITY);
    let metrics = cluster.world.metrics();
    assert_eq!((metrics.steps_applied, metrics.overflows), (1, 1));
    assert_eq!(metrics.first_overflow.unwrap().element, 0);
}

#[test]
fn overflows_of_table_rows_in_place_are_counted() {
    let (mut world, line) = ready(Sgd::new(RATE), |config| config);
    let (values, index) = offsets(&world, 3);
    for (sequence, last) in [(1, UNIT), (2, LARGE)] {
        let push = world.gradient(line, sequence);
        let rows = bytes_of(&[UNIT, UNIT, last]);
        let parts = [(index, index_of(&[77_u64])), (values, rows)];
        let answer = push_parts(&mut world, line, &push, &parts);
        let refused = matches!(&answer, Message::Refused(_));
        let metrics = world.metrics();
        // A new row is written elsewhere, and can be discarded.
        let counted = metrics.overflows + metrics.overflows_refused;
        assert_eq!(counted, u64::from(last == LARGE), "{answer:?}");
        assert_eq!(metrics.overflows_refused, u64::from(refused));
    }
}
