//! Gradients that the step owner may find too old: the other shards wait for its word.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::GlobalStep;
use pushpull_common::protocol::message::{self, ModeIs, OutcomeIs, Role, Withdraw};
use pushpull_common::protocol::{Message, Outcome, PushState, Refusal};

use super::world::{Frame, OWNER, World, applied, plan, push_answer, refused};
use crate::error::Error;
use crate::fanout::Plan;
use crate::session::{Command, OpId, Reply};

const STALE: Outcome = Outcome::Stale { current: GlobalStep(6) };

fn joined(plan: &Arc<Plan>) -> World {
    let mut world = World::with(|start| start.role = Role::Worker {});
    world.mode = ModeIs::Asynchronous { owner_first: true };
    world.join(plan)
}

/// What is sent to a shard once it has given room, in order.
fn parts(world: &mut World, link: usize) -> Vec<Frame> {
    world.give_room(link, 1)
}

fn outcome(world: &mut World, op: OpId) -> Outcome {
    match world.reply(op) {
        Ok(Reply::Pushed { outcome }) => outcome,
        other => panic!("{other:?}"),
    }
}

#[test]
fn no_shard_has_it_whole_before_the_owner_has_applied_it() {
    let plan = plan(3, 3);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    assert!(owner.part().whole.is_some());
    for link in [1, 2] {
        let sent = parts(&mut world, link);
        assert!(!sent.is_empty() && sent.iter().all(|frame| frame.part().whole.is_none()));
        let bytes: usize = sent.iter().map(|frame| frame.body.len()).sum();
        assert_eq!(bytes as u64, plan.catalogue().layout(plan.shards()[link]).bytes());
    }
    world.answer(&owner, push_answer(applied(5)));
    for link in [1, 2] {
        let last = world.heard(link, "PushPart");
        let bytes = plan.catalogue().layout(plan.shards()[link]).bytes();
        assert_eq!((last.part().whole, last.body.len()), (Some(bytes), 0));
        assert!(world.waits(op));
        world.answer(&last, push_answer(applied(1)));
    }
    assert_eq!(outcome(&mut world, op), applied(5));
}

#[test]
fn what_the_owner_does_not_take_no_shard_applies() {
    for (word, taken) in [
        (Message::from(push_answer(STALE)), Ok(STALE)),
        (refused(Refusal::NotInitialized {}), Err(())),
    ] {
        let plan = plan(3, 3);
        let mut world = joined(&plan);
        let op = world.push(&plan, 4);
        let owner = parts(&mut world, OWNER).pop().unwrap();
        assert!(!parts(&mut world, 1).is_empty());
        // The third has not even given room.
        world.answer(&owner, word);
        match taken {
            Ok(stale) => assert_eq!(outcome(&mut world, op), stale),
            Err(()) => assert!(matches!(world.reply(op), Err(Error::Refused { .. }))),
        }
        assert_eq!(world.heard(1, "Withdraw").message, Withdraw {}.into());
        assert!(parts(&mut world, 2).is_empty());
    }
}

#[test]
fn a_lost_connection_to_another_shard_changes_nothing_of_that() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    assert!(!parts(&mut world, 1).is_empty());
    world.cut(1);
    world.reconnect(1);
    let asked = world.heard(1, "OutcomeQuery");
    world.answer(&asked, OutcomeIs { state: PushState::Unknown {} });
    assert!(parts(&mut world, 1).iter().all(|frame| frame.part().whole.is_none()));
    world.answer(&owner, push_answer(applied(5)));
    let last = world.heard(1, "PushPart");
    assert!(last.part().whole.is_some());
    world.answer(&last, push_answer(applied(1)));
    assert_eq!(outcome(&mut world, op), applied(5));
}

#[test]
fn no_shard_hears_that_the_worker_leaves_before_it_has_what_others_have() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    assert!(!parts(&mut world, 1).is_empty());
    world.cancel(op);
    for &shard in plan.shards() {
        let (message, body) = (message::Leave {}.into(), Bytes::new());
        world.call(Command::Request { shard, message, body });
    }
    assert!(world.is_quiet(OWNER) && world.is_quiet(1), "the owner may have applied it");
    world.answer(&owner, push_answer(applied(5)));
    let last = world.heard(1, "PushPart");
    assert!(last.part().whole.is_some() && world.is_quiet(1));
    world.answer(&last, push_answer(applied(1)));
    world.heard(OWNER, "Leave");
    world.heard(1, "Leave");
}
