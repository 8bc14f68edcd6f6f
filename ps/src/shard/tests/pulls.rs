//! Pulls: the values of an answer are of one version, even while pushes are applied.

use pushpull_common::ids::{GlobalStep, PartitionId};
use pushpull_common::protocol::message::{self, Selection};
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, f32s, unpack, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::Storage;
use crate::shard::values::applier::WorkOutcome;

/// Five slices of values.
const LARGE: usize = 5 << 18;

/// More bytes than a test pins at once.
const PINNED_FREELY: u64 = 64 << 20;

fn large(pin_bytes: u64) -> (World, ConnectionId, ConnectionId) {
    let w = VariableSpec::f32("w", [LARGE as u64]).unwrap();
    let (mut world, _) = World::ready(vec![w], Sgd::new(1.0), |config| {
        config.storage(Storage::memory().pin_bytes_max(pin_bytes))
    });
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    (world, a, b)
}

fn push_large(world: &mut World, line: ConnectionId, sequence: u64) {
    let body = bytes_of(&vec![1_f32; LARGE]);
    let grant = world.token(line);
    let push = Push::gradient(sequence, grant, world.push_slot(line));
    let parts: Vec<(u64, &[u8])> = (0_u64..).step_by(1 << 20).zip(body.chunks(1 << 20)).collect();
    world.push(line, &push, &parts);
}

fn all_are(bytes: &[u8], value: f32) {
    let found = f32s(bytes);
    assert_eq!(found.len(), LARGE);
    let other = found.iter().position(|&found| found != value);
    assert_eq!(other.map(|index| (index, found[index])), None, "all are {value}");
}

#[test]
fn a_selection_is_sent_in_its_order_and_unknown_partitions_are_refused() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut worker(1));
    let push = Push::gradient(1, world.token(line), world.push_slot(line));
    world.push_answer(line, &push, &[(0, &bytes_of(&[1_f32, 2.0, 3.0]))]);
    let w = bytes_of(&[-1_f32, -2.0, -3.0]);
    assert_eq!(world.select(line, &[0]).unwrap(), w);
    assert_eq!(world.select(line, &[0, 1]).unwrap(), [&w[..], &[0; 16]].concat());
    assert_eq!(world.select(line, &[0, 3]).unwrap(), [&w[..], &[0; 8]].concat());
    assert!(world.select(line, &[]).unwrap().is_empty());
    for (partitions, culprit) in [(&[4][..], 4), (&[1, 0], 0), (&[2, 2], 2), (&[0, 9, 1], 9)] {
        let partition = PartitionId(culprit);
        assert_eq!(world.select(line, partitions), Err(Refusal::UnknownPartition { partition }));
    }
}

#[test]
fn pulls_are_refused_before_there_are_values() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut super::peers::chief());
    let pull = || message::Pull { selection: Selection::All {} }.into();
    assert_eq!(world.refused(line, pull()), Refusal::NotInitialized {});
    let catalogue = world.catalogue.clone();
    world.declare(line, &catalogue);
    assert_eq!(world.refused(line, pull()), Refusal::NotInitialized {});
}

#[test]
fn a_pull_waits_for_its_step_on_the_step_owner_only() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config.shards(2));
    let mut peer = worker(1);
    let lines = [world.join(0, &mut peer), world.join(1, &mut peer)];
    world.pull(lines[1], 1);
    assert!(world.streamed(lines[1]).is_some(), "the other shard has versions of its own");
    world.pull(lines[0], 1);
    let deadline = Envelope { step: GlobalStep(2), deadline_ms: 100, ..Envelope::default() };
    let pull = message::Pull { selection: Selection::All {} };
    let hasty = world.send(lines[0], deadline, pull.into(), &[]);
    assert!(world.streamed(lines[0]).is_none());
    let push = Push::gradient(1, world.token(lines[0]), world.push_slot(lines[0]));
    world.push_answer(lines[0], &push, &[(0, &[])]);
    assert!(world.streamed(lines[0]).is_some() && world.streamed(lines[0]).is_none());
    world.pass(std::time::Duration::from_millis(100), &lines);
    let Some(Message::Refused(refused)) = world.answer(lines[0], hasty) else { panic!() };
    let Refusal::Deadline { awaited, .. } = refused.refusal else { panic!() };
    assert_eq!(awaited.as_str(), "global step 2");
}

// S-3.
#[test]
fn a_pull_sees_all_of_a_push_or_nothing() {
    let (mut world, a, b) = large(PINNED_FREELY);
    push_large(&mut world, a, 1);
    push_large(&mut world, a, 2);
    let mut slices = 0;
    let mut seen = Vec::new();
    loop {
        world.pull(b, 0);
        let work = world.slice(0);
        slices += 1;
        while let Some(parts) = world.streamed(b) {
            let (bytes, version) = unpack(parts);
            all_are(&bytes, -(version as f32));
            seen.push(version);
        }
        if work == WorkOutcome::Idle {
            break;
        }
    }
    world.pull(b, 2);
    seen.push(unpack(world.streamed(b).unwrap()).1);
    assert!(slices >= 5, "the second push takes several slices");
    assert!(seen.is_sorted() && [0, 1, 2].iter().all(|version| seen.contains(version)), "{seen:?}");
}

// S-3.
#[test]
fn values_that_are_being_sent_do_not_change() {
    let (mut world, a, b) = large(PINNED_FREELY);
    world.pull(b, 0);
    let before = world.streamed(b).unwrap();
    push_large(&mut world, a, 1);
    assert_eq!(world.work(), WorkOutcome::Idle);
    world.pull(b, 1);
    let between = world.streamed(b).unwrap();
    push_large(&mut world, a, 2);
    assert_eq!(world.work(), WorkOutcome::Idle);
    for (parts, version) in [(before, 0), (between, 1)] {
        let (bytes, found) = unpack(parts);
        assert_eq!(found, version);
        all_are(&bytes, -(version as f32));
    }
    all_are(&world.values(b), -2.0);
}

#[test]
fn an_update_waits_for_free_blocks_and_resumes_when_a_pull_is_sent() {
    // A push needs as many blocks as it changes, 80, and 20 more may be pinned.
    let (mut world, a, b) = large(20 * (64 << 10));
    world.pull(b, 0);
    let pinned = world.streamed(b).unwrap();
    push_large(&mut world, a, 1);
    assert_eq!(world.work(), WorkOutcome::Idle);
    push_large(&mut world, a, 2);
    assert_eq!(world.work(), WorkOutcome::Blocked);
    assert_eq!(world.slice(0), WorkOutcome::Blocked, "the update still waits");
    // The update has not begun: others can still read, and read the same version.
    all_are(&world.values(a), -1.0);
    let heartbeat = world.say(b, message::Heartbeat {}.into());
    assert!(world.answer(b, heartbeat).is_some(), "other requests are served");
    all_are(&unpack(pinned).0, 0.0);
    assert_eq!(world.work(), WorkOutcome::Idle);
    all_are(&world.values(b), -2.0);
    // No block is lost after many pulls and pushes.
    for sequence in (3..13).step_by(2) {
        world.pull(b, 0);
        push_large(&mut world, a, sequence);
        assert_eq!(world.work(), WorkOutcome::Idle);
        push_large(&mut world, a, sequence + 1);
        assert_eq!(world.work(), WorkOutcome::Blocked);
        all_are(&unpack(world.streamed(b).unwrap()).0, 1.0 - sequence as f32);
        assert_eq!(world.work(), WorkOutcome::Idle);
    }
}
