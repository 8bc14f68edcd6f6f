//! Gradients that the step owner may not take, because it finds them too old or their token has run
//! out: the other shards wait for its word.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::message::{self, ModeIs, OutcomeIs, Role, Withdraw};
use pushpull_common::protocol::{Message, Outcome, PushState, Refusal};

use super::world::{Frame, OWNER, World, applied, grant, order, plan, push_answer, refused};
use crate::error::Error;
use crate::session::{Command, OpId, Reply};
use crate::sharding_plan::ShardingPlan;

const STALE: Outcome = Outcome::Stale { current: GlobalStep(6) };

fn joined(plan: &Arc<ShardingPlan>) -> World {
    let mut world = World::with(|start| start.role = Role::Worker {});
    world.mode = ModeIs::Asynchronous { owner_first: true };
    world.join(plan)
}

/// What is sent to a shard once it has given room, in order.
fn parts(world: &mut World, link: usize) -> Vec<Frame> {
    world.give_push_slot(link, 1)
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

/// A session of two shards that has been granted token 1, which it asked for.
fn with_token(plan: &Arc<ShardingPlan>) -> World {
    let mut world = World::joined(plan);
    ask(&mut world, 1);
    world
}

/// Asks for a token, and is granted this one.
fn ask(world: &mut World, token: u64) {
    let op = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    world.answer(&request, message::Granted { grant: grant(token, 0) });
    assert!(matches!(world.reply(op), Ok(Reply::Token(Some(grant))) if grant.token.0 == token));
}

/// Whether a push under this token is whole on the other shard before the owner has answered.
fn is_sent_at_once(world: &mut World, plan: &ShardingPlan, token: u64) -> bool {
    let op = world.push(plan, token);
    let owner = parts(world, OWNER).pop().unwrap();
    assert!(owner.part().whole.is_some());
    let other = parts(world, 1);
    let at_once = other.last().is_some_and(|last| last.part().whole.is_some());
    world.answer(&owner, push_answer(applied(5)));
    let last =
        if at_once { other.into_iter().next_back().unwrap() } else { world.heard(1, "PushPart") };
    assert!(last.part().whole.is_some());
    world.answer(&last, push_answer(applied(1)));
    assert_eq!(outcome(world, op), applied(5));
    at_once
}

#[test]
fn a_token_that_is_older_than_a_connection_is_the_owners_word_first() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    assert!(is_sent_at_once(&mut world, &plan, 1));
    ask(&mut world, 2);
    // The owner may have taken it back since, and had the shard close the connection.
    world.reconnect(1);
    assert!(!is_sent_at_once(&mut world, &plan, 2));
    // This one was asked for after the welcome.
    ask(&mut world, 3);
    assert!(is_sent_at_once(&mut world, &plan, 3));
}

#[test]
fn a_token_that_was_on_its_way_is_older_than_a_connection() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    let op = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    world.reconnect(1);
    world.answer(&request, message::Granted { grant: grant(2, 0) });
    world.reply(op).unwrap();
    assert!(!is_sent_at_once(&mut world, &plan, 2));
}

#[test]
fn a_token_that_comes_with_an_answer_is_granted_when_that_was_asked_for() {
    let plan = plan(2, 2);
    for reconnects in [false, true] {
        let mut world = with_token(&plan);
        world.reconnect(1);
        let op = world.push(&plan, 1);
        let owner = parts(&mut world, OWNER).pop().unwrap();
        assert!(owner.part().next);
        if reconnects {
            world.reconnect(1);
        }
        let answer = message::PushAnswer { next: Some(grant(2, 0)), ..push_answer(applied(5)) };
        world.answer(&owner, answer);
        while let Some(frame) = world.sent.pop_front() {
            match frame.message {
                Message::Reserve(_) => world.answer(&frame, message::Reserved { push_slot: 1 }),
                Message::PushPart(ref part) if part.whole.is_some() => {
                    world.answer(&frame, push_answer(applied(1)));
                }
                _ => {}
            }
        }
        assert_eq!(outcome(&mut world, op), applied(5));
        assert_eq!(is_sent_at_once(&mut world, &plan, 2), !reconnects);
    }
}

#[test]
fn a_token_that_the_owner_takes_back_is_pushed_on_no_shard() {
    let plan = plan(2, 2);
    let gone = Refusal::Token { token: TokenId(1), generation: 1 };
    let mut world = with_token(&plan);
    let op = world.push(&plan, 1);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    let other = parts(&mut world, 1).pop().unwrap();
    assert!(other.part().whole.is_some(), "it goes everywhere at once");
    // The owner has had the other shard close the connection before that arrived.
    world.cut(1);
    world.answer(&owner, refused(gone.clone()));
    assert!(world.waits(op), "the other shard may have it");
    world.wait_for_connect(1);
    world.accept(1);
    let asked = world.heard(1, "OutcomeQuery");
    world.answer(&asked, OutcomeIs { state: PushState::Unknown {} });
    let refused = world.reply(op);
    assert!(matches!(refused, Err(Error::Refused { refusal, .. }) if refusal == gone));
    assert!(world.is_quiet(1), "nothing is sent again");
}

#[test]
fn a_shard_that_has_a_push_whole_is_asked_for_its_answer_whatever_the_owner_has_said() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    let op = world.push(&plan, 1);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    let whole = parts(&mut world, 1).pop().unwrap().part().whole.unwrap();
    // A table of the owner is full, and the other shard waits for its own to grow.
    world.answer(&owner, refused(Refusal::NotInitialized {}));
    world.cut(1);
    world.wait_for_connect(1);
    world.accept(1);
    let asked = world.heard(1, "OutcomeQuery");
    world.answer(&asked, OutcomeIs { state: PushState::Receiving { bytes: whole } });
    let last = world.heard(1, "PushPart");
    assert_eq!((last.part().whole, last.body.len()), (Some(whole), 0));
    assert!(world.waits(op));
    world.answer(&last, push_answer(applied(1)));
    assert!(matches!(world.reply(op), Err(Error::Refused { .. })));
}

#[test]
fn what_is_assigned_needs_no_word_of_the_owner() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    world.reconnect(1);
    world.call(Command::Push { order: order(&plan, None, 1) });
    assert!(parts(&mut world, 1).pop().unwrap().part().whole.is_some());
}
