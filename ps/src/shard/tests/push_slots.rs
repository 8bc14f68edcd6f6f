//! Push slots: granted in the order of requests, and taken back from clients that do not use them.

use std::time::Duration;

use pushpull_common::ids::{RestoreEpoch, Sequence};
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Envelope, Message, Outcome, Refusal};
use pushpull_optim::optimizer::Sgd;
use pushpull_store::testing::full_disk::FullDisk;

use super::peers::{Push, bytes_of, chief, f32s, place, variables, worker};
use super::synchronous::synchronous;
use super::world::{ConnectionId, World};
use crate::config::Storage;

const LEASE: Duration = Duration::from_secs(5);

fn ready(push_slots: usize, clients: u32) -> (World, Vec<ConnectionId>) {
    let configure = |config: crate::PsConfig| config.inbox_pushes(push_slots);
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), configure);
    world.disconnect(chief[0]);
    let lines = (1..=clients).map(|task| world.join(0, &mut worker(task))).collect();
    (world, lines)
}

fn add(sequence: u64, push_slot: u32) -> Push {
    Push::plain(sequence, Operation::AssignAdd {}, push_slot)
}

fn ones() -> Vec<u8> {
    bytes_of(&[1_f32; 4])
}

#[test]
fn a_client_that_asks_twice_has_one_push_slot() {
    let (mut world, lines) = ready(2, 2);
    let push_slot = world.push_slot(lines[0]);
    assert_eq!(world.push_slot(lines[0]), push_slot);
    let other = world.push_slot(lines[1]);
    assert_ne!(push_slot, other);
    let answer = world.push_answer(lines[1], &add(1, push_slot), &[(32, &ones())]);
    let Message::Refused(refused) = answer else { panic!("another's push slot") };
    assert_eq!(refused.refusal, Refusal::PushSlotTaken { push_slot });
    assert!(matches!(
        world.push_answer(lines[0], &add(1, push_slot), &[(32, &ones())]),
        Message::PushAnswer(_)
    ));
}

#[test]
fn waiting_clients_are_served_in_order() {
    let (mut world, lines) = ready(1, 4);
    let mut push_slot = world.push_slot(lines[0]);
    let waiting: Vec<_> = lines[1..]
        .iter()
        .map(|&line| (line, world.say(line, message::Reserve {}.into())))
        .collect();
    let mut sender = lines[0];
    for &(line, request) in &waiting {
        assert_eq!(world.answer(line, request), None);
        let answer = world.push_answer(sender, &add(1, push_slot), &[(32, &ones())]);
        let Message::PushAnswer(answer) = answer else { panic!("{answer:?}") };
        assert_eq!(answer.push_slot, 0, "another client waits");
        let Some(Message::Reserved(next)) = world.answer(line, request) else {
            panic!("the push slot is not granted")
        };
        sender = line;
        push_slot = next.push_slot;
    }
    let answer = world.push_answer(sender, &add(1, push_slot), &[(32, &ones())]);
    assert!(matches!(answer, Message::PushAnswer(answer) if answer.push_slot != 0));
}

#[test]
fn a_push_slot_granted_unasked_goes_to_a_client_that_asks() {
    let (mut world, lines) = ready(1, 2);
    let granted = world.token(lines[0]);
    assert_ne!(granted.push_slot, 0, "no other client wants it");
    let push_slot = world.push_slot(lines[1]);
    let push = Push::gradient(1, granted, granted.push_slot);
    let answer = world.push_answer(lines[0], &push, &[(0, &[0; 16])]);
    let Message::Refused(refused) = answer else { panic!("{answer:?}") };
    assert_eq!(refused.refusal, Refusal::PushSlotTaken { push_slot: granted.push_slot });
    let answer = world.push_answer(lines[1], &add(1, push_slot), &[(32, &ones())]);
    assert!(matches!(answer, Message::PushAnswer(_)));
}

#[test]
fn clients_in_lockstep_do_not_starve_each_other() {
    let (mut world, lines) = ready(1, 2);
    let mut requests: Vec<_> =
        lines.iter().map(|&line| (line, world.say(line, message::Reserve {}.into()))).collect();
    for _ in 0..3 {
        // Each client acts on its answer, at the same time.
        for (line, request) in &mut requests {
            if let Some(Message::Reserved(push_slot)) = world.answer(*line, *request) {
                *request = world.push(*line, &add(1, push_slot.push_slot), &[(32, &ones())]);
            }
        }
        world.work();
    }
    assert_eq!(f32s(&world.values(lines[0])[32..48]), [2.0; 4]);
}

#[test]
fn an_unused_push_slot_is_taken_back_after_a_lease() {
    let (mut world, lines) = ready(1, 2);
    let push_slot = world.push_slot(lines[0]);
    world.pass(Duration::from_secs(4), &lines);
    let waiting = world.say(lines[1], message::Reserve {}.into());
    world.pass(Duration::from_millis(900), &lines);
    assert_eq!(world.answer(lines[1], waiting), None);
    world.pass(Duration::from_millis(100), &lines);
    assert!(matches!(world.answer(lines[1], waiting), Some(Message::Reserved(_))));
    let answer = world.push_answer(lines[0], &add(1, push_slot), &[(32, &ones())]);
    assert!(matches!(answer, Message::Refused(_)));
}

#[test]
fn a_stalled_push_loses_its_push_slot_after_a_lease_and_a_slow_one_does_not() {
    let (mut world, lines) = ready(1, 2);
    let push = add(1, world.push_slot(lines[0]));
    let waiting = world.say(lines[1], message::Reserve {}.into());
    let body = ones();
    let request = world.announce(lines[0], push.envelope(), push.part(32, Some(16)), 16);
    world.chop = 1;
    for end in 1..4 {
        world.pass(LEASE - Duration::from_millis(50), &lines[1..]);
        world.body_until(lines[0], &body, end);
    }
    assert_eq!(world.answer(lines[1], waiting), None, "the push makes progress");
    // The push makes no progress from here on. A pause of the server does not count.
    world.now += 10 * LEASE;
    world.pass(LEASE - Duration::from_millis(100), &lines[1..]);
    assert_eq!(world.answer(lines[1], waiting), None);
    world.pass(Duration::from_millis(150), &lines[1..]);
    assert!(matches!(world.answer(lines[1], waiting), Some(Message::Reserved(_))));
    world.body(lines[0], &body);
    world.work();
    // The client's lease has ended as well, so there is no connection to answer on.
    let answer = world.answer(lines[0], request);
    assert!(!matches!(answer, Some(Message::PushAnswer(_))), "{answer:?}");
    assert_eq!(world.values(lines[1])[32..48], [0; 16]);
}

#[test]
fn a_broken_connection_frees_its_push_slot_for_a_waiting_client() {
    for reconnects in [false, true] {
        let (mut world, lines) = ready(1, 2);
        let push = add(1, world.push_slot(lines[0]));
        world.send(lines[0], push.envelope(), push.part(32, None), &ones());
        let waiting = world.say(lines[1], message::Reserve {}.into());
        assert_eq!(world.answer(lines[1], waiting), None);
        if reconnects {
            world.join(0, &mut worker(1));
        } else {
            world.disconnect(lines[0]);
        }
        assert!(matches!(world.answer(lines[1], waiting), Some(Message::Reserved(_))));
    }
}

#[test]
fn a_wait_for_a_push_slot_ends_at_its_deadline() {
    let (mut world, lines) = ready(1, 2);
    world.push_slot(lines[0]);
    let envelope = pushpull_common::protocol::Envelope { deadline_ms: 200, ..Default::default() };
    let waiting = world.send(lines[1], envelope, message::Reserve {}.into(), &[]);
    world.pass(Duration::from_millis(200), &lines);
    let Some(Message::Refused(refused)) = world.answer(lines[1], waiting) else { panic!() };
    let Refusal::Deadline { waited_ms: 200, awaited } = refused.refusal else { panic!() };
    assert!(awaited.as_str().contains("push slot"), "{}", awaited.as_str());
}

#[test]
fn another_declaration_has_new_push_slots_and_serves_waiting_clients() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config.inbox_pushes(1));
    let chief = world.join(0, &mut chief());
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    let refused = world.refused(a, message::Reserve {}.into());
    assert_eq!(refused, Refusal::NotInitialized {});
    let first = world.catalogue.clone();
    world.declare(chief, &first);
    let push = Push::plain(1, Operation::Assign {}, world.push_slot(a));
    world.announce(a, push.envelope(), push.part(0, Some(16)), 16);
    let waiting = world.say(b, message::Reserve {}.into());
    let second = place(variables()[2..].to_vec(), 1);
    world.declare(chief, &second);
    assert!(
        matches!(world.answer(b, waiting), Some(Message::Reserved(push_slot)) if push_slot.push_slot != push.push_slot)
    );
    world.body(a, &[1; 16]);
    world.ask(chief, message::Initialize { epoch: RestoreEpoch(1) }.into());
    assert_eq!(world.values(chief), [0; 24]);
}

#[test]
fn a_withdrawn_push_frees_its_push_slot_for_a_waiting_client() {
    let (mut world, lines) = ready(1, 2);
    let push = add(1, world.push_slot(lines[0]));
    world.send(lines[0], push.envelope(), push.part(32, None), &ones());
    let waiting = world.say(lines[1], message::Reserve {}.into());
    assert_eq!(world.answer(lines[1], waiting), None);
    world.send(lines[0], push.envelope(), message::Withdraw {}.into(), &[]);
    assert!(matches!(world.answer(lines[1], waiting), Some(Message::Reserved(_))));
}

#[test]
fn a_withdrawal_frees_a_push_slot_that_is_not_used_or_still_requested() {
    let (mut world, lines) = ready(1, 3);
    let envelope = Envelope { sequence: Sequence(1), ..Envelope::default() };
    let reserve =
        |world: &mut World, line| world.send(line, envelope, message::Reserve {}.into(), &[]);
    let has = reserve(&mut world, lines[0]);
    assert!(matches!(world.answer(lines[0], has), Some(Message::Reserved(_))));
    let requests = reserve(&mut world, lines[1]);
    let waits = reserve(&mut world, lines[2]);
    for (line, waiting) in [(1, requests), (2, waits)] {
        assert_eq!(world.answer(lines[line], waiting), None);
    }
    for line in [1, 0] {
        let request = world.send(lines[line], envelope, message::Withdraw {}.into(), &[]);
        let Some(Message::PushAnswer(answer)) = world.answer(lines[line], request) else {
            panic!()
        };
        assert_eq!(answer.outcome, Outcome::Withdrawn {});
    }
    assert_eq!(world.answer(lines[1], requests), None, "the request was withdrawn");
    assert!(matches!(world.answer(lines[2], waits), Some(Message::Reserved(_))));
}

#[test]
fn a_live_client_with_a_half_sent_push_loses_the_push_slot() {
    let (mut world, lines) = ready(1, 2);
    let push = add(1, world.push_slot(lines[0]));
    world.send(lines[0], push.envelope(), push.part(32, None), &[0; 8]);
    let waiting = world.say(lines[1], message::Reserve {}.into());
    world.pass(LEASE - Duration::from_millis(50), &lines);
    assert_eq!(world.answer(lines[1], waiting), None);
    world.pass(Duration::from_millis(50), &lines);
    assert!(matches!(world.answer(lines[1], waiting), Some(Message::Reserved(_))));
    let request = world.send(lines[0], push.envelope(), push.part(40, Some(16)), &[0; 8]);
    let Some(Message::Refused(refused)) = world.answer(lines[0], request) else { panic!() };
    assert_eq!(refused.refusal, Refusal::PushSlotTaken { push_slot: push.push_slot });
    assert_eq!((world.members[0].1, world.metrics().pushes_dropped), (2, 2));
}

/// The memory of one push slot of [`variables`], in bytes.
const SLOT_BYTES: u64 = 4096;

#[test]
fn a_push_slot_has_memory_only_while_it_is_used() {
    let (mut world, lines) = ready(3, 2);
    let before = world.bytes_left();
    let kept = world.push_slot(lines[0]);
    assert_eq!(world.bytes_left(), before, "the first push slot keeps its memory");
    let on_demand = world.push_slot(lines[1]);
    assert_eq!(world.bytes_left(), before - SLOT_BYTES);
    // The slots are offered again, the second to the second client.
    let offered = [(0, kept), (1, on_demand)].map(|(line, push_slot)| {
        let answer = world.push_answer(lines[line], &add(1, push_slot), &[(32, &ones())]);
        let Message::PushAnswer(answer) = answer else { panic!("{answer:?}") };
        assert_ne!(answer.push_slot, 0);
        answer.push_slot
    });
    world.pass(Duration::from_millis(4900), &lines);
    assert_eq!(world.bytes_left(), before - SLOT_BYTES, "it may be used soon");
    world.pass(Duration::from_millis(200), &lines);
    assert_eq!(world.bytes_left(), before, "an unused slot gives its memory back");
    // Both clients have been offered their slots still, and may use them.
    for (line, push_slot) in [(1, offered[1]), (0, offered[0])] {
        let answer = world.push_answer(lines[line], &add(2, push_slot), &[(32, &ones())]);
        assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    }
    assert_eq!(world.bytes_left(), before - SLOT_BYTES);
    assert_eq!(f32s(&world.values(lines[1])[32..48]), [4.0; 4]);
}

#[test]
fn an_offered_push_slot_for_which_there_is_no_memory_any_more_is_taken() {
    let (mut world, lines) = ready(2, 2);
    let kept = world.push_slot(lines[0]);
    let on_demand = world.push_slot(lines[1]);
    let Message::PushAnswer(answer) =
        world.push_answer(lines[1], &add(1, on_demand), &[(32, &ones())])
    else {
        panic!("the push is refused")
    };
    let offered = answer.push_slot;
    world.pass(Duration::from_secs(3), &lines);
    world.push_answer(lines[0], &add(1, kept), &[(32, &ones())]);
    world.pass(Duration::from_secs(3), &lines);
    let full = world.fill();
    let answer = world.push_answer(lines[1], &add(2, offered), &[(32, &ones())]);
    let Message::Refused(refused) = answer else { panic!("{answer:?}") };
    assert_eq!(refused.refusal, Refusal::PushSlotTaken { push_slot: offered });
    // The client requests another one, and gets the one that the other client does not use.
    let push_slot = world.push_slot(lines[1]);
    let answer = world.push_answer(lines[1], &add(2, push_slot), &[(32, &ones())]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    drop(full);
}

#[test]
fn a_push_that_is_abandoned_gives_the_memory_of_its_slot_back() {
    let (mut world, lines) = ready(3, 2);
    let before = world.bytes_left();
    world.push_slot(lines[0]);
    let push = add(1, world.push_slot(lines[1]));
    world.send(lines[1], push.envelope(), push.part(32, None), &ones()[..8]);
    assert_eq!(world.bytes_left(), before - SLOT_BYTES);
    // The lease of the client ends while its push makes no progress.
    world.pass(LEASE + Duration::from_millis(5200), &lines[..1]);
    assert_eq!(world.bytes_left(), before);
}

#[test]
fn requests_without_memory_take_turns_until_there_is_some() {
    let (mut world, lines) = ready(4, 3);
    let full = world.fill();
    let first = world.push_slot(lines[0]);
    let envelope = Envelope { deadline_ms: 50, ..Default::default() };
    let expired = world.send(lines[1], envelope, message::Reserve {}.into(), &[]);
    world.pass(Duration::from_millis(50), &lines);
    let Some(Message::Refused(refused)) = world.answer(lines[1], expired) else {
        panic!("not refused")
    };
    let text = refused.refusal.to_string();
    assert!(text.contains("a push slot (3 have no memory: bytes_max or"), "{text}");
    let waiting = [1, 2].map(|line| world.say(lines[line], message::Reserve {}.into()));
    assert_eq!(world.answer(lines[1], waiting[0]), None, "there is memory for one push slot");
    // First come, first served.
    world.push_answer(lines[0], &add(1, first), &[(32, &ones())]);
    let Some(Message::Reserved(second)) = world.answer(lines[1], waiting[0]) else {
        panic!("the push slot is not granted")
    };
    assert_eq!(world.answer(lines[2], waiting[1]), None);
    // Another shard of the task returns its memory.
    drop(full);
    world.pass(Duration::from_millis(50), &lines);
    let Some(Message::Reserved(third)) = world.answer(lines[2], waiting[1]) else {
        panic!("the push slot is not granted although there is memory")
    };
    for (line, push_slot) in [(2, third), (1, second)] {
        let push = add(1, push_slot.push_slot);
        let answer = world.push_answer(lines[line], &push, &[(32, &ones())]);
        assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    }
    assert_eq!(f32s(&world.values(lines[1])[32..48]), [3.0; 4]);
}

#[test]
fn complete_pushes_are_recovered_even_if_their_memory_exceeds_the_budget() {
    let (mut world, lines) = ready(3, 3);
    let need = Storage::BYTES_MAX - world.bytes_left();
    let slots = [0, 1, 2].map(|line| world.push_slot(lines[line]));
    for (line, push_slot) in (0..).zip(slots) {
        let push = add(1, push_slot);
        world.announce(lines[line], push.envelope(), push.part(32, Some(16)), 16);
        world.body(lines[line], &ones());
    }
    world.limit_memory(need + SLOT_BYTES);
    world.restart(0).unwrap();
    assert_eq!(world.bytes_left(), SLOT_BYTES, "other shards open before it is taken");
    world.work();
    let line = world.join(0, &mut worker(4));
    assert_eq!(f32s(&world.values(line)[32..48]), [3.0; 4]);
    // The memory of two further pushes is still there, and the budget has bytes for one.
    let others = [5, 6].map(|task| world.join(0, &mut worker(task)));
    world.push_slot(line);
    world.push_slot(others[0]);
    assert_eq!(world.bytes_left(), 0);
    let waiting = world.say(others[1], message::Reserve {}.into());
    assert_eq!(world.answer(others[1], waiting), None);
    others.into_iter().for_each(|other| world.disconnect(other));
    world.pass(Duration::from_millis(5100), &[line]);
    assert_eq!(world.bytes_left(), SLOT_BYTES);
}

#[test]
fn the_gradients_of_a_step_have_memory_whatever_else_uses_the_budget() {
    let mode = synchronous(3, 3);
    let configure = |config: crate::PsConfig| config.mode(mode).inbox_pushes(2);
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), configure);
    world.disconnect(chief[0]);
    let lines: Vec<_> = (1..=3).map(|task| world.join(0, &mut worker(task))).collect();
    let _full = world.fill();
    let slots = lines.iter().map(|&line| world.push_slot(line)).collect::<Vec<_>>();
    assert!(slots.iter().all(|&push_slot| push_slot != 0), "{slots:?}");
}

#[test]
fn a_full_file_system_is_asked_for_a_push_slot_once_a_second() {
    let (mut world, lines) = ready(2, 2);
    world.push_slot(lines[0]);
    let disk = FullDisk::fill();
    let before = world.bytes_left();
    let waiting = world.say(lines[1], message::Reserve {}.into());
    world.pass(Duration::from_millis(950), &lines);
    assert_eq!((disk.refused(), world.bytes_left()), (1, before));
    world.pass(Duration::from_millis(1050), &lines);
    assert_eq!((disk.refused(), world.answer(lines[1], waiting)), (3, None));
    drop(disk);
    world.pass(Duration::from_secs(1), &lines);
    assert!(matches!(world.answer(lines[1], waiting), Some(Message::Reserved(_))));
}
