//! Rows of sparse variables: pulls, pushes, refusals, and agreement with dense gradients.

use std::sync::Arc;

use proptest::prelude::*;
use pushpull_common::ids::{PartitionId, RestoreEpoch, ShardId, VariableId};
use pushpull_common::initializer::Initializer;
use pushpull_common::partition::Partitioner;
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Envelope, Message, Outcome, Refusal};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{
    Adadelta, Adagrad, Adam, AdamW, Ftrl, Momentum, Optimizer, OptimizerRules, RmsProp, Sgd,
};

use super::peers::{Push, bytes_of, chief, f32s, index_of, worker};
use super::world::{ConnectionId, World};
use crate::config::PsConfig;

/// `dense` (6 f32, at 0) and `table` (5 rows of 3 f32, at 24; its index at 88).
fn variables() -> Vec<VariableSpec> {
    vec![
        VariableSpec::f32("dense", [6]).unwrap(),
        VariableSpec::f32("table", [5, 3]).unwrap().sparse(),
    ]
}

const TABLE: u64 = 24;
const INDEX: u64 = 88;

fn ready(optimizer: impl Optimizer) -> (World, ConnectionId) {
    let (mut world, _) = World::ready(variables(), optimizer, |config| config.inbox_pushes(2));
    let line = world.join(0, &mut worker(1));
    (world, line)
}

/// Pulls the rows with these numbers, or returns the refusal.
fn pull(
    world: &mut World,
    line: ConnectionId,
    partition: u32,
    rows: &[u32],
) -> Result<Vec<f32>, Refusal> {
    let body: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
    let pull = message::PullRows { partition: PartitionId(partition) };
    let request = world.send(line, Envelope::default(), pull.into(), &body);
    world.work();
    match world.answer_with_body(line, request) {
        (Message::Rows(_), body) => Ok(f32s(&body)),
        (Message::Refused(refused), _) => Err(refused.refusal),
        (other, _) => panic!("rows are answered by {other:?}"),
    }
}

fn table(world: &mut World, line: ConnectionId) -> Vec<f32> {
    pull(world, line, 1, &[0, 1, 2, 3, 4]).unwrap()
}

/// Pushes gradients for rows, and for the variable `dense` unless there are none.
fn push(
    world: &mut World,
    line: ConnectionId,
    sequence: u64,
    rows: &[u32],
    values: &[f32],
    dense: &[f32],
) -> Message {
    let push = world.gradient(line, sequence);
    let index = index_of(rows);
    let values = bytes_of(values);
    let dense = bytes_of(dense);
    let parts = [(INDEX, &index[..]), (TABLE, &values), (0, &dense)];
    let parts: Vec<_> = parts.into_iter().filter(|(_, body)| !body.is_empty()).collect();
    world.push_answer(line, &push, &parts)
}

/// The index of rows is stored after all values. Its refusal names the variable of the rows.
#[test]
fn another_operation_for_an_index_is_refused_like_one_for_values() {
    let (mut world, line) = ready(Sgd::new(1.0));
    let gradient = world.gradient(line, 1);
    world.send(line, gradient.envelope(), gradient.part(0, None), &[0; 24]);
    let assign = Push { operation: Operation::Assign {}, ..gradient };
    let request = world.send(line, assign.envelope(), assign.part(INDEX, Some(32)), &[0; 8]);
    world.work();
    let Some(Message::Refused(refused)) = world.answer(line, request) else {
        panic!("an assignment in a push of gradients")
    };
    let of_rows = matches!(refused.refusal, Refusal::Operation { variable: VariableId(1), .. });
    assert!(of_rows, "{}", refused.refusal);
}

#[test]
fn rows_are_pulled_in_the_requested_order() {
    let (mut world, line) = ready(Sgd::new(1.0));
    let values: Vec<f32> = (0..15).map(|i| -(i as f32)).collect();
    push(&mut world, line, 1, &[0, 1, 2, 3, 4], &values, &[]);
    let rows = pull(&mut world, line, 1, &[4, 0, 4]).unwrap();
    assert_eq!(rows, [12.0, 13.0, 14.0, 0.0, 1.0, 2.0, 12.0, 13.0, 14.0]);
    assert_eq!(pull(&mut world, line, 1, &[]), Ok(vec![]));
    let variable = VariableId(1);
    let place = 1;
    let from = 0;
    let last = 4;
    let refused = Refusal::Row { variable, place, row: 5, from, last };
    assert_eq!(pull(&mut world, line, 1, &[0, 5]), Err(refused));
    for partition in [0, 2] {
        let refused = Refusal::UnknownPartition { partition: PartitionId(partition) };
        assert_eq!(pull(&mut world, line, partition, &[0]), Err(refused));
    }
    // Rows of 12 bytes in answers of at most 1 MiB.
    let limit = (1 << 20) / 12;
    let refused = Refusal::Rows { variable, rows: limit + 1, limit };
    assert_eq!(pull(&mut world, line, 1, &vec![0; limit as usize + 1]), Err(refused));
}

#[test]
fn a_push_of_rows_changes_only_these_and_their_slots() {
    let (mut world, line) = ready(Momentum::new(1.0, 0.5));
    let one = [1.0_f32; 3];
    for sequence in 1..3 {
        let answer = push(&mut world, line, sequence, &[1, 3], &[one, one].concat(), &[1.0; 6]);
        let Message::PushAnswer(answer) = answer else { panic!("not applied: {answer:?}") };
        assert!(matches!(answer.outcome, Outcome::Applied { .. }));
    }
    // The momentum is 1, then 1.5. Rows that were never pushed have none.
    push(&mut world, line, 3, &[0, 1], &[one, one].concat(), &[]);
    let expected = [[-1.0; 3], [-2.5 - 1.75; 3], [0.0; 3], [-2.5; 3], [0.0; 3]].concat();
    assert_eq!(table(&mut world, line), expected);
    let dense = world.select(line, &[0]).unwrap();
    assert_eq!(f32s(&dense), [-2.5; 6]);
}

#[test]
fn bad_rows_are_refused_and_change_nothing() {
    let (mut world, line) = ready(Sgd::new(1.0));
    let variable = VariableId(1);
    let partition = PartitionId(1);
    let row = |place, row, from| Refusal::Row { variable, place, row, from, last: 4 };
    let incomplete = |bytes, expected| Refusal::Incomplete { partition, bytes, expected };
    let index = |numbers: &[u32], said: u64| {
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        let mut bytes: Vec<u8> = said.to_le_bytes().into_iter().chain(numbers).collect();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    };
    let values = |rows: usize| bytes_of(&vec![1.0_f32; 3 * rows]);
    let cases: Vec<(Vec<u8>, Vec<u8>, Refusal)> = vec![
        (index(&[1, 1], 2), values(2), row(1, 1, 2)),
        (index(&[3, 1], 2), values(2), row(1, 1, 4)),
        (index(&[1, 5], 2), values(2), row(1, 5, 2)),
        (index(&[u32::MAX], 1), values(1), row(0, u32::MAX.into(), 0)),
        (index(&[0, 1, 2, 3], 6), values(2), Refusal::Rows { variable, rows: 6, limit: 5 }),
        (index(&[1, 2], u64::MAX), values(2), Refusal::Rows { variable, rows: u64::MAX, limit: 5 }),
        (index(&[0, 1], 4), values(4), incomplete(16, 24)),
        (index(&[0, 1, 2], 1), values(1), incomplete(24, 16)),
        (index(&[0, 1], 2), values(1), incomplete(16, 24)),
        (index(&[0, 1], 2), values(3), incomplete(40, 24)),
        (index(&[0, 1], 2), vec![], incomplete(0, 24)),
        (vec![], values(1), incomplete(0, 8)),
    ];
    for (sequence, (index, values, refusal)) in (1..).zip(cases) {
        let push = world.gradient(line, sequence);
        let parts = [(INDEX, &index[..]), (TABLE, &values[..])];
        let parts: Vec<_> = parts.into_iter().filter(|(_, body)| !body.is_empty()).collect();
        match world.push_answer(line, &push, &parts) {
            Message::Refused(refused) => assert_eq!(refused.refusal, refusal, "push {sequence}"),
            other => panic!("push {sequence} is not refused but {other:?}"),
        }
        let returned =
            message::ReturnToken { token: push.grant.token, generation: push.grant.generation };
        world.say(line, returned.into());
    }
    assert_eq!(table(&mut world, line), [0.0; 15]);
    let push = world.gradient(line, 100);
    let request = world.send(line, push.envelope(), push.part(INDEX + 8, None), &[0; 8]);
    let answer = world.answer(line, request);
    let Some(Message::Refused(refused)) = answer else { panic!("not refused but {answer:?}") };
    assert!(matches!(refused.refusal, Refusal::Range { .. }), "an index begins with its count");
}

/// Sends rows of `table` as first values.
fn assign(
    world: &mut World,
    line: ConnectionId,
    sequence: u64,
    rows: &[u32],
    values: &[f32],
) -> Message {
    let push = Push::plain(sequence, Operation::Assign {}, world.push_slot(line));
    world.push_answer(line, &push, &[(INDEX, &index_of(rows)), (TABLE, &bytes_of(values))])
}

/// A shard with the variables declared, whose rows begin with ones, and the connection of its chief.
fn declared(chief: &mut super::peers::Peer) -> (World, ConnectionId) {
    let mut variables = variables();
    variables[1] = variables[1].clone().initializer(Initializer::Ones);
    let mut world = World::bare(variables, Sgd::new(1.0), |config| config);
    let line = world.join(0, chief);
    let catalogue = world.catalogue.clone();
    world.declare(line, &catalogue);
    (world, line)
}

#[test]
fn rows_assigned_before_initialization_are_kept() {
    let mut chief = chief();
    let (mut world, line) = declared(&mut chief);
    let values: Vec<f32> = (10..25).map(|value| value as f32).collect();
    let answer = assign(&mut world, line, 1, &[0, 1, 2], &values[..9]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    // The server is killed between two pushes of rows, and after the last.
    world.restart(0).unwrap();
    let line = world.join(0, &mut chief);
    let answer = assign(&mut world, line, 2, &[3, 4], &values[9..]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    world.restart(0).unwrap();
    let line = world.join(0, &mut chief);
    let refused = pull(&mut world, line, 1, &[0]);
    assert_eq!(refused, Err(Refusal::NotInitialized {}), "nobody reads rows that are being loaded");
    world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into());
    assert_eq!(table(&mut world, line), values);
}

/// A chief dies in the middle of its rows, the second time after another has sent all. No row of the
/// partition keeps what was sent, and none is left without a value.
#[test]
fn rows_of_an_unfinished_chief_are_initialized() {
    for has_earlier in [false, true] {
        let (mut world, line) = declared(&mut chief());
        if has_earlier {
            let answer = assign(&mut world, line, 1, &[0, 1, 2, 3, 4], &[6.0; 15]);
            assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
        }
        let answer = assign(&mut world, line, 2, &[0, 1, 2], &[7.0; 9]);
        assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
        world.ask(line, message::Leave {}.into());
        let line = world.join(0, &mut chief().restarted());
        let catalogue = world.catalogue.clone();
        world.declare(line, &catalogue);
        assert_eq!(pull(&mut world, line, 1, &[0]), Err(Refusal::NotInitialized {}));
        world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into());
        assert_eq!(table(&mut world, line), [1.0; 15]);
    }
}

#[test]
fn the_chief_assigns_first_rows_of_tables() {
    let users = VariableSpec::table("users", DType::F32, [2], TableSpec::new(1 << 20)).unwrap();
    let users = users.initializer(Initializer::Ones);
    let mut world = World::bare(vec![users], Sgd::new(1.0), |config| config);
    let mut peer = chief();
    let line = world.join(0, &mut peer);
    let catalogue = world.catalogue.clone();
    world.declare(line, &catalogue);
    let layout = catalogue.layout(ShardId { task: 0, shard: 0 });
    let index = layout.tables()[0].index.unwrap();
    let push = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    let parts = [
        (index, &index_of(&[7_u64, u64::MAX])[..]),
        (layout.tables()[0].offset, &bytes_of(&[1_f32, 2.0, 3.0, 4.0])),
    ];
    let answer = world.push_answer(line, &push, &parts);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    world.restart(0).unwrap();
    let line = world.join(0, &mut peer);
    world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into());
    let body = bytes_of(&[u64::MAX, 8, 7]);
    let pull = message::PullRows { partition: PartitionId(0) };
    let request = world.send(line, Envelope::default(), pull.into(), &body);
    world.work();
    let (_, rows) = world.answer_with_body(line, request);
    assert_eq!(f32s(&rows), [3.0, 4.0, 1.0, 1.0, 1.0, 2.0]);
}

#[test]
fn tables_with_too_many_partitions_are_refused() {
    let declare = |shards| {
        let table = VariableSpec::table("users", DType::F32, [1], TableSpec::new(1 << 30));
        let table = table.unwrap().partitioner(Partitioner::Fixed { shards });
        let mut world = World::bare(vec![table], Sgd::new(1.0), |config| config);
        let line = world.join(0, &mut chief());
        let catalogue = world.catalogue.clone();
        world.declare(line, &catalogue)
    };
    let Message::Refused(refused) = declare(1025) else { panic!("not refused") };
    let Refusal::Untrainable { variable, detail } = refused.refusal else { panic!("{refused:?}") };
    assert_eq!(variable.as_str(), "users");
    assert!(detail.as_str().contains("1025") && detail.as_str().contains("1024"), "{detail:?}");
}

/// A shard whose only variable is `table`, sparse or dense, with rows that straddle its blocks.
fn alone(optimizer: Arc<dyn Optimizer>, rows: u64, sparse: bool) -> (World, ConnectionId) {
    let table = VariableSpec::f32("table", [rows, 3]).unwrap();
    let table = if sparse { table.sparse() } else { table };
    let rules = OptimizerRules::new(optimizer);
    let configure = |config| PsConfig { rules: rules.clone(), block_bytes: 64, ..config };
    let (mut world, _) = World::ready(vec![table], Sgd::new(1.0), configure);
    let line = world.join(0, &mut worker(1));
    (world, line)
}

/// Every optimizer that a sparse variable may have.
fn rules() -> Vec<Arc<dyn Optimizer>> {
    vec![
        Arc::new(Sgd::new(0.1).weight_decay(0.2)),
        Arc::new(Momentum::new(0.1, 0.9)),
        Arc::new(Momentum::nesterov(0.1, 0.9).l2(0.1)),
        Arc::new(Adagrad::new(0.1)),
        Arc::new(Adadelta::new(1.0)),
        Arc::new(RmsProp::new(0.1).momentum(0.9)),
        Arc::new(RmsProp::new(0.1).momentum(0.9).centered()),
        Arc::new(Adam::new(0.1)),
        Arc::new(Adam::new(0.1).lazy()),
        Arc::new(AdamW::new(0.1)),
        Arc::new(Ftrl::new(0.1).l1(0.1).l2_shrinkage(0.05)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Rows that are absent from a push count as zeros for an optimizer that moves absent rows.
    /// For the others, a push of all rows equals a dense one.
    #[test]
    fn pushes_of_rows_equal_dense_gradients(
        pushes in prop::collection::vec(prop::collection::btree_set(0_u32..40, 0..40), 1..6),
        rule in prop::sample::select(rules()),
    ) {
        const ROWS: u32 = 40;
        let start = |sparse| alone(rule.clone(), ROWS.into(), sparse);
        let (mut sparse, a) = start(true);
        let (mut dense, b) = start(false);
        let moves_all = sparse.config.rules.default().moves_absent_rows();
        let index = u64::from(ROWS) * 12;
        for (sequence, rows) in (1..).zip(pushes) {
            let rows: Vec<u32> =
                if moves_all { rows.into_iter().collect() } else { (0..ROWS).collect() };
            let value = |row: u32, i: u32| (f64::from(row * 7 + i) + sequence as f64).sin() as f32;
            let row = |&row: &u32| (0..3).map(move |i| value(row, i));
            let values: Vec<f32> = rows.iter().flat_map(row).collect();
            let push = sparse.gradient(a, sequence);
            let parts = [(index, index_of(&rows)), (0, bytes_of(&values))];
            let parts: Vec<(u64, &[u8])> =
                parts.iter().map(|(at, body)| (*at, &body[..])).filter(|p| !p.1.is_empty()).collect();
            let answer = sparse.push_answer(a, &push, &parts);
            prop_assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
            let all = (0..ROWS).flat_map(|row| {
                let there = rows.binary_search(&row).is_ok();
                (0..3).map(move |i| if there { value(row, i) } else { 0.0 })
            });
            let push = dense.gradient(b, sequence);
            dense.push_answer(b, &push, &[(0, &bytes_of(&all.collect::<Vec<f32>>()))]);
        }
        let all: Vec<u32> = (0..ROWS).collect();
        let values = pull(&mut sparse, a, 0, &all).unwrap();
        prop_assert_eq!(bytes_of(&values), dense.values(b));
    }
}
