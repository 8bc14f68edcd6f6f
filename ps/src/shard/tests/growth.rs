//! The memory that tables grow into. What they may need is kept for them. If there is none, a push
//! waits and clients learn the cause; it is applied once there is memory.

use std::time::Duration;

use pushpull_common::ids::ShardId;
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Envelope, Message, Refusal, message};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, chief, index_of, place, worker};
use super::world::{ConnectionId, World};
use crate::event::Event;
use crate::shard::values::applier::WorkOutcome;
use crate::shard::{ShardInput, TICK};

/// A world with the table `users` alone (rows of 2 f32), which has no records yet.
fn ready() -> (World, ConnectionId) {
    let (mut world, _) =
        World::ready(vec![users()], Sgd::new(1.0), |config| config.inbox_pushes(2));
    let line = world.join(0, &mut worker(1));
    (world, line)
}

/// The table `users`.
fn users() -> VariableSpec {
    table_of("users")
}

/// A table of rows of 2 f32.
fn table_of(name: &str) -> VariableSpec {
    let rows = TableSpec::new(1 << 20).rows_at_once(4);
    VariableSpec::table(name, DType::F32, [2], rows).unwrap()
}

/// A world with the table `users` and a variable, and two workers.
fn with_dense() -> (World, [ConnectionId; 2]) {
    let variables = vec![VariableSpec::f32("w", [4]).unwrap(), users()];
    let (mut world, _) = World::ready(variables, Sgd::new(1.0), |config| config.inbox_pushes(2));
    let lines = [1, 2].map(|task| world.join(0, &mut worker(task)));
    (world, lines)
}

/// Sends a whole gradient for one row.
fn push(
    world: &mut World,
    line: ConnectionId,
    sequence: u64,
    id: u64,
) -> pushpull_common::ids::RequestId {
    let gradient: Push = world.gradient(line, sequence);
    let layout = world.catalogue.layout(ShardId { task: 0, shard: 0 });
    let table = &layout.tables()[0];
    let index_at = table.index.unwrap();
    let rows_at = table.offset;
    let index = index_of(&[id]);
    let row = bytes_of(&[5_f32, 6.0]);
    world.push(line, &gradient, &[(index_at, &index), (rows_at, &row)])
}

fn heartbeat(world: &mut World, line: ConnectionId) -> Message {
    let request = world.say(line, message::Heartbeat {}.into());
    world.answer(line, request).expect("a heartbeat is answered")
}

#[test]
fn a_push_waits_for_memory_and_is_then_applied() {
    let (mut world, line) = ready();
    let taken = world.fill();
    let request = push(&mut world, line, 1, 77);
    assert_eq!(world.work(), WorkOutcome::Growing);
    assert_eq!(world.answer(line, request), None, "it is neither applied nor refused");
    let metrics = world.metrics();
    assert_eq!((metrics.growths_failed, metrics.shards_waiting_to_grow), (1, 1));
    world.events.retain(|(_, event)| event.kind() != "worker-joined");
    let [(0, Event::GrowthFailed { shard, cause })] = &world.events[..] else {
        panic!("{:?}", world.events)
    };
    assert_eq!(*shard, ShardId { task: 0, shard: 0 });
    assert!(cause.contains("0 bytes of bytes_max are left"), "{cause}");
    let cause = cause.clone();
    // The shard retries every second, and reports the failure once.
    for _ in 0..TICKS_OF_A_SECOND - 1 {
        world.now += TICK;
        world.input(0, ShardInput::Tick);
        assert_eq!(world.slice(0), WorkOutcome::Growing);
    }
    assert_eq!(world.metrics().growths_failed, 1);
    world.now += TICK;
    assert_eq!((world.slice(0), world.metrics().growths_failed), (WorkOutcome::Growing, 2));
    assert_eq!(world.events.len(), 1);
    // A heartbeat is refused with the cause.
    let Message::Refused(refused) = heartbeat(&mut world, line) else { panic!("not refused") };
    let Refusal::Storage { detail } = &refused.refusal else { panic!("{refused:?}") };
    assert_eq!(detail.as_str(), cause);
    drop(taken);
    world.now += Duration::from_secs(1);
    assert_eq!(world.work(), WorkOutcome::Idle);
    let Some(Message::PushAnswer(_)) = world.answer(line, request) else { panic!("not applied") };
    assert_eq!(world.metrics().table_rows, 1);
    assert_eq!(world.metrics().shards_waiting_to_grow, 0);
    let waited = Duration::from_secs(2);
    let resumed = Event::GrowthResumed { shard: ShardId::default(), waited };
    assert_eq!(world.events.last(), Some(&(0, resumed)));
    assert!(matches!(heartbeat(&mut world, line), Message::HeartbeatAnswer(_)));
}

#[test]
fn waits_behind_a_push_without_memory_name_the_cause() {
    let (mut world, line) = ready();
    push(&mut world, line, 1, 77);
    push(&mut world, line, 2, 78);
    let _taken = world.fill();
    assert_eq!(world.work(), WorkOutcome::Growing);
    // Both push slots are taken by pushes that are not applied.
    let envelope = Envelope { deadline_ms: 500, ..Envelope::default() };
    let request = world.send(line, envelope, message::Reserve {}.into(), &[]);
    assert_eq!(world.answer(line, request), None);
    world.now += Duration::from_millis(500);
    world.tick();
    let Some(Message::Refused(refused)) = world.answer(line, request) else {
        panic!("not refused")
    };
    let Refusal::Deadline { awaited, .. } = refused.refusal else { panic!("{refused:?}") };
    assert!(awaited.as_str().contains("cannot grow: cannot reserve"), "{awaited}");
}

#[test]
fn a_push_that_waits_for_memory_survives_a_kill() {
    let (mut world, line) = ready();
    let taken = world.fill();
    push(&mut world, line, 1, 77);
    assert_eq!(world.work(), WorkOutcome::Growing);
    drop(taken);
    world.restart(0).unwrap();
    assert_eq!(world.work(), WorkOutcome::Idle);
    assert_eq!((world.metrics().table_rows, world.metrics().gradients_applied), (1, 1));
}

#[test]
fn a_heartbeat_is_answered_while_an_update_grows_its_table() {
    // Too large to be changed in place, and so done in slices.
    const ROWS: u32 = 1 << 17;
    let users = TableSpec::new(1 << 30).rows_at_once(ROWS);
    let users = VariableSpec::table("users", DType::F32, [32], users).unwrap();
    let (mut world, _) = World::ready(vec![users], Sgd::new(1.0), |config| config.inbox_pushes(2));
    let line = world.join(0, &mut worker(1));
    let gradient: Push = world.gradient(line, 1);
    let layout = world.catalogue.layout(ShardId { task: 0, shard: 0 });
    let table = &layout.tables()[0];
    let index_at = table.index.unwrap();
    let rows_at = table.offset;
    let ids: Vec<u64> = (0..u64::from(ROWS)).map(|id| 3 * id).collect();
    let rows = bytes_of(&vec![1_f32; 32 * ROWS as usize]);
    let index = index_of(&ids);
    let mut parts = Vec::new();
    for (values, first) in [(&index, index_at), (&rows, rows_at)] {
        let chunks = values.chunks(1 << 20).enumerate();
        parts.extend(chunks.map(|(part, values)| (first + ((part as u64) << 20), values)));
    }
    let request = world.push(line, &gradient, &parts);
    let mut slices = 1;
    while world.slice(0) == WorkOutcome::More {
        slices += 1;
        assert!(matches!(heartbeat(&mut world, line), Message::HeartbeatAnswer(_)));
    }
    assert!(slices > 1, "{slices} slice of an update of 16 MiB");
    let Some(Message::PushAnswer(_)) = world.answer(line, request) else { panic!("not applied") };
    assert_eq!(world.metrics().table_rows, u64::from(ROWS));
}

const TICKS_OF_A_SECOND: u32 = 20;

#[test]
fn bytes_that_a_table_has_taken_are_not_kept_for_it_too() {
    let (mut world, lines) = with_dense();
    let unpromised = world.bytes_left_unpromised();
    let slots = lines.map(|line| world.push_slot(line));
    let slot_bytes = unpromised - world.bytes_left_unpromised();
    assert!(slots.iter().all(|&slot| slot != 0) && slot_bytes > 0);
    world.pass(Duration::from_secs(11), &lines);
    assert_eq!(world.bytes_left_unpromised(), unpromised);

    let left = world.bytes_left();
    let request = push(&mut world, lines[0], 1, 77);
    world.work();
    assert!(matches!(world.answer(lines[0], request), Some(Message::PushAnswer(_))));
    assert!(world.bytes_left() < left, "the table has grown");
    world.pass(Duration::from_secs(11), &lines);
    assert_eq!(world.bytes_left_unpromised(), unpromised);
    // There is memory for one further push slot beside all that the table may still need.
    let _others = world.take(unpromised - slot_bytes);
    for line in lines {
        let request = world.say(line, message::Reserve {}.into());
        let answer = world.answer(line, request);
        assert!(matches!(answer, Some(Message::Reserved(_))), "{answer:?}");
    }
}

#[test]
fn another_declaration_may_use_the_memory_that_a_table_has_taken() {
    let mut world = World::bare(vec![users()], Sgd::new(1.0), |config| config.inbox_pushes(1));
    let line = world.join(0, &mut chief());
    let first = world.catalogue.clone();
    world.declare(line, &first);
    let _others = world.take(world.bytes_left_unpromised());
    let left = world.bytes_left();
    let layout = first.layout(ShardId::default());
    let table = &layout.tables()[0];
    let assign = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    let index = index_of(&[7_u64]);
    let row = bytes_of(&[1_f32, 2.0]);
    let rows = [(table.index.unwrap(), &index[..]), (table.offset, &row[..])];
    let answer = world.push_answer(line, &assign, &rows);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    assert!(world.bytes_left() < left, "the table has grown");
    // The chief has died meanwhile, and another names the table otherwise.
    let second = place(vec![table_of("clients")], 1);
    let declared = world.declare(line, &second);
    assert!(matches!(declared, Message::Declared(_)), "{declared:?}");
    assert_eq!(world.bytes_left(), left);
}
