//! Resent pushes are answered and not applied again, wherever the connection broke.

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Envelope, Message, Outcome, PushState};
use pushpull_optim::optimizer::Sgd;
use pushpull_store::planted::PlantedBugs;

use super::peers::{Peer, Push, bytes_of, f32s, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::PsConfig;

fn ready() -> (World, Peer, ConnectionId) {
    ready_with(PlantedBugs::default())
}

fn ready_with(planted: PlantedBugs) -> (World, Peer, ConnectionId) {
    let (mut world, _) =
        World::ready(variables(), Sgd::new(1.0), |config| PsConfig { planted, ..config });
    let mut peer = worker(1);
    let line = world.join(0, &mut peer);
    (world, peer, line)
}

fn outcome(answer: Option<Message>) -> (Outcome, bool) {
    match answer {
        Some(Message::PushAnswer(answer)) => (answer.outcome, answer.duplicate),
        other => panic!("{other:?}"),
    }
}

fn ones() -> Vec<u8> {
    bytes_of(&[1_f32; 3])
}

fn applied_once(world: &mut World, line: ConnectionId) {
    assert_eq!(f32s(&world.values(line)[..12]), [-1.0; 3]);
    assert_eq!(world.metrics().global_step, 1);
}

// S-2.
#[test]
fn a_resend_after_the_answer_was_lost_is_a_duplicate() {
    let (mut world, mut peer, line) = ready();
    let push = world.gradient(line, 1);
    let (first, _) = outcome(Some(world.push_answer(line, &push, &[(0, &ones())])));
    world.disconnect(line);
    let line = world.join(0, &mut peer);
    // The resend may name any push slot, and have any number of parts.
    let half = ones();
    for (push_slot, parts) in [
        (push.push_slot, vec![(0, &half[..])]),
        (0, vec![(0, &half[..8]), (8, &half[8..])]),
        (world.push_slot(line), vec![(0, &half[..])]),
    ] {
        let again = Push { push_slot, ..push };
        let answer = world.push_answer(line, &again, &parts);
        assert_eq!(outcome(Some(answer)), (first, true));
    }
    applied_once(&mut world, line);
    assert_eq!(world.metrics().duplicates, 3);
}

#[test]
fn a_push_cut_off_in_the_middle_starts_again() {
    let body = ones();
    for (lost_whole_part, new_push_slot) in
        [(false, false), (false, true), (true, false), (true, true)]
    {
        let (mut world, mut peer, line) = ready();
        let push = world.gradient(line, 1);
        world.send(line, push.envelope(), push.part(0, None), &[9; 8]);
        if lost_whole_part {
            world.announce(line, push.envelope(), push.part(8, Some(16)), 8);
            world.body_until(line, &body[8..], 5);
        }
        world.disconnect(line);
        let line = world.join(0, &mut peer);
        let query = Envelope { sequence: Sequence(1), ..Envelope::default() };
        let request = world.send(line, query, message::OutcomeQuery {}.into(), &[]);
        let known = world.answer(line, request);
        let state = PushState::Unknown {};
        assert_eq!(known, Some(message::OutcomeIs { state }.into()), "the push was dropped");
        let push_slot = if new_push_slot { world.push_slot(line) } else { push.push_slot };
        let push = Push { push_slot, ..push };
        let answer = world.push_answer(line, &push, &[(0, &body[..8]), (8, &body[8..])]);
        assert!(!outcome(Some(answer)).1);
        applied_once(&mut world, line);
    }
}

#[test]
fn a_second_connection_takes_over_while_a_body_is_under_way_on_the_first() {
    let body = ones();
    for first_is_last in [false, true] {
        let (mut world, mut peer, old) = ready();
        let push = world.gradient(old, 1);
        let whole = first_is_last.then_some(16);
        world.announce(old, push.envelope(), push.part(0, whole), 16);
        let line = world.join(0, &mut peer);
        assert!(world.closed.contains(&old));
        let first = world.send(line, push.envelope(), push.part(0, None), &body[..8]);
        // The rest of the older body still arrives, and is discarded.
        world.body(old, &[9; 16]);
        let last = world.send(line, push.envelope(), push.part(8, Some(16)), &body[8..]);
        world.work();
        assert_eq!(world.answer(line, first), None);
        assert!(!outcome(world.answer(line, last)).1);
        applied_once(&mut world, line);
        assert_eq!(
            world.received.get(&old).map_or(0, Vec::len),
            0,
            "nothing is sent over the old connection"
        );
    }
}

#[test]
fn a_resend_while_the_whole_push_is_queued_is_answered_once_it_is_applied() {
    let (mut world, mut peer, old) = ready();
    let push = Push { next: true, ..world.gradient(old, 1) };
    world.push(old, &push, &[(0, &ones())]);
    world.disconnect(old);
    let line = world.join(0, &mut peer);
    let body = ones();
    let request = world.push(line, &push, &[(0, &body[..8]), (8, &body[8..])]);
    assert_eq!(world.answer(line, request), None, "not before it is applied");
    world.work();
    let Some(Message::PushAnswer(answer)) = world.answer(line, request) else { panic!() };
    assert!(!answer.duplicate && answer.next.is_some());
    applied_once(&mut world, line);
}

#[test]
fn an_answer_goes_only_to_the_connection_that_asked() {
    let (mut world, mut peer, old) = ready();
    let push = Push { next: true, ..world.gradient(old, 1) };
    world.push(old, &push, &[(0, &ones())]);
    let line = world.join(0, &mut peer);
    world.work();
    assert!(
        world.received.get(&line).is_none_or(Vec::is_empty),
        "the new connection has asked for nothing"
    );
    // No token was granted with an answer that was never sent.
    let metrics = world.metrics();
    let grant = world.token_after(line, push.grant.token);
    assert_eq!((grant.token.0, metrics.global_step), (push.grant.token.0 + 1, 1));
    let request = world.push(line, &push, &[(0, &ones())]);
    assert!(outcome(world.answer(line, request)).1);
}

#[test]
fn a_restarted_client_numbers_its_pushes_from_the_start() {
    a_restarted_client_is_another(PlantedBugs::default());
}

pub(super) fn a_restarted_client_is_another(planted: PlantedBugs) {
    let (mut world, peer, old) = ready_with(planted);
    let push = world.gradient(old, 1);
    world.push_answer(old, &push, &[(0, &ones())]);
    // A second push is whole and not applied, a third is half received.
    let queued = world.gradient(old, 2);
    world.push(old, &queued, &[(0, &ones())]);
    let half = world.gradient(old, 3);
    world.send(old, half.envelope(), half.part(0, None), &ones());
    let line = world.join(0, &mut peer.restarted());
    for sequence in 1..=3 {
        let push = world.gradient(line, sequence);
        let answer = world.push_answer(line, &push, &[(0, &ones())]);
        assert!(!outcome(Some(answer)).1, "push {sequence} is new");
    }
    assert_eq!(f32s(&world.values(line)[..12]), [-5.0; 3]);
    assert_eq!(world.metrics().global_step, 5);
}

// S-2.
#[test]
fn a_push_that_newer_ones_overtake_while_it_waits_is_applied_once() {
    let (mut world, _, line) = ready();
    let ledger = bytes_of(&[1_f32; 4]);
    let operation = Operation::AssignAdd {};
    // Push 5 is begun, and its last body is under way, when push 100 is applied.
    let late = Push::plain(5, operation, world.push_slot(line));
    world.send(line, late.envelope(), late.part(32, None), &ledger[..8]);
    let newer = Push::plain(100, operation, world.push_slot(line));
    world.push(line, &newer, &[(32, &ledger)]);
    let request = world.announce(line, late.envelope(), late.part(40, Some(16)), 8);
    world.work();
    world.body(line, &ledger[8..]);
    world.work();
    assert!(!outcome(world.answer(line, request)).1);
    assert_eq!(f32s(&world.values(line)[32..48]), [2.0; 4]);
    let again = world.push(line, &late, &[(32, &ledger)]);
    let answer = world.answer(line, again);
    assert!(
        matches!(answer, Some(Message::Refused(_))),
        "its outcome has left the window: {answer:?}"
    );
    // Both pushes are whole, the newer one first.
    for sequence in [300, 200] {
        let push = Push::plain(sequence, operation, world.push_slot(line));
        world.push(line, &push, &[(32, &ledger)]);
    }
    world.work();
    assert_eq!(f32s(&world.values(line)[32..48]), [4.0; 4]);
}

#[test]
fn a_push_has_one_push_slot() {
    let (mut world, _, line) = ready();
    let operation = Operation::AssignAdd {};
    let ledger = bytes_of(&[1_f32; 4]);
    let push = Push::plain(1, operation, world.push_slot(line));
    world.send(line, push.envelope(), push.part(32, None), &ledger[..8]);
    let other = Push { push_slot: world.push_slot(line), ..push };
    assert_ne!(push.push_slot, other.push_slot);
    let elsewhere = world.push(line, &other, &[(32, &ledger)]);
    let last = world.send(line, push.envelope(), push.part(40, Some(16)), &ledger[8..]);
    world.work();
    assert!(matches!(world.answer(line, elsewhere), Some(Message::Refused(_))));
    assert!(!outcome(world.answer(line, last)).1);
    assert_eq!(f32s(&world.values(line)[32..48]), [1.0; 4]);
}
