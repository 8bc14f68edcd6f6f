//! Gradients that the step owner may reject, as stale or because their token has expired. The other
//! shards wait for its outcome.

use std::sync::Arc;

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::message::{self, ModeIs, OutcomeIs, Role, Withdraw};
use pushpull_common::protocol::{Message, Outcome, PushState, Refusal};

use super::world::{
    OWNER, SentFrame, SessionWorld, applied, grant, order, plan, push_answer, refused,
};
use crate::error::Error;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, Reply, SessionCommand};

const STALE: Outcome = Outcome::Stale { current: GlobalStep(6) };

fn joined(plan: &Arc<ShardingPlan>) -> SessionWorld {
    let mut world = SessionWorld::with(|config| config.role = Role::Worker {});
    world.mode = ModeIs::Asynchronous { owner_first: true };
    world.join(plan)
}

/// Grants a push slot to a push and returns the parts that follow.
fn parts(world: &mut SessionWorld, link: usize) -> Vec<SentFrame> {
    world.give_push_slot(link, 1)
}

fn outcome(world: &mut SessionWorld, op: OpId) -> Outcome {
    match world.reply(op) {
        Ok(Reply::Pushed { outcome }) => outcome,
        other => panic!("{other:?}"),
    }
}

#[test]
fn no_shard_has_a_whole_push_before_the_owner_applied_it() {
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
        let last = world.next_frame(link, "PushPart");
        let bytes = plan.catalogue().layout(plan.shards()[link]).bytes();
        assert_eq!((last.part().whole, last.body.len()), (Some(bytes), 0));
        assert!(world.is_pending(op));
        world.answer(&last, push_answer(applied(1)));
    }
    assert_eq!(outcome(&mut world, op), applied(5));
}

#[test]
fn a_push_rejected_by_the_owner_is_applied_on_no_shard() {
    for (answer, taken) in [
        (Message::from(push_answer(STALE)), Ok(STALE)),
        (refused(Refusal::NotInitialized {}), Err(())),
    ] {
        let plan = plan(3, 3);
        let mut world = joined(&plan);
        let op = world.push(&plan, 4);
        let owner = parts(&mut world, OWNER).pop().unwrap();
        assert!(!parts(&mut world, 1).is_empty());
        // The third shard has not granted a push slot yet.
        world.next_frame(2, "Reserve");
        world.answer(&owner, answer);
        match taken {
            Ok(stale) => assert_eq!(outcome(&mut world, op), stale),
            Err(()) => assert!(matches!(world.reply(op), Err(Error::Refused { .. }))),
        }
        for link in [1, 2] {
            assert_eq!(world.next_frame(link, "Withdraw").message, Withdraw {}.into());
            assert!(world.is_quiet(link));
        }
    }
}

#[test]
fn a_lost_connection_to_another_shard_keeps_the_owner_first() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    assert!(!parts(&mut world, 1).is_empty());
    world.disconnect(1);
    world.reconnect(1);
    let asked = world.next_frame(1, "OutcomeQuery");
    world.answer(&asked, OutcomeIs { state: PushState::Unknown {} });
    assert!(parts(&mut world, 1).iter().all(|frame| frame.part().whole.is_none()));
    world.answer(&owner, push_answer(applied(5)));
    let last = world.next_frame(1, "PushPart");
    assert!(last.part().whole.is_some());
    world.answer(&last, push_answer(applied(1)));
    assert_eq!(outcome(&mut world, op), applied(5));
}

#[test]
fn leaving_waits_until_every_shard_has_the_pending_pushes() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    assert!(!parts(&mut world, 1).is_empty());
    world.cancel(op);
    for &shard in plan.shards() {
        let message = message::Leave {}.into();
        let body = Bytes::new();
        world.call(SessionCommand::Request { shard, message, body, wait_ms: None });
    }
    assert!(world.is_quiet(OWNER) && world.is_quiet(1), "the owner may have applied it");
    world.answer(&owner, push_answer(applied(5)));
    let last = world.next_frame(1, "PushPart");
    assert!(last.part().whole.is_some() && world.is_quiet(1));
    world.answer(&last, push_answer(applied(1)));
    world.next_frame(OWNER, "Leave");
    world.next_frame(1, "Leave");
}

#[test]
fn the_end_is_awaited_once_every_push_is_settled_on_every_shard() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    assert!(!parts(&mut world, 1).is_empty());
    let shard = plan.shards()[0];
    let message = message::AwaitEnd {}.into();
    let body = Bytes::new();
    let end = SessionCommand::Request { shard, message, body, wait_ms: Some(700) };
    let end = world.call(end);
    world.answer(&owner, push_answer(applied(5)));
    let last = world.next_frame(1, "PushPart");
    assert!(world.is_quiet(OWNER), "the other shard has not settled its share");
    world.answer(&last, push_answer(applied(1)));
    assert_eq!(outcome(&mut world, op), applied(5));
    let asked = world.next_frame(OWNER, "AwaitEnd");
    assert_eq!(asked.envelope.deadline_ms, 700, "the wait is shorter than the caller's");
    let reason = message::EndReason::Finished {};
    world.answer(&asked, message::Ended { reason });
    assert!(matches!(world.reply(end), Ok(Reply::Answer { .. })));
}

/// Starts a session of two shards that has been granted token 1.
fn with_token(plan: &Arc<ShardingPlan>) -> SessionWorld {
    let mut world = SessionWorld::joined(plan);
    ask(&mut world, 1);
    world
}

/// Requests a token, and is granted this one.
fn ask(world: &mut SessionWorld, token: u64) {
    let op = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    world.answer(&request, message::Granted { grant: grant(token, 0) });
    assert!(matches!(world.reply(op), Ok(Reply::Token(Some(grant))) if grant.token.0 == token));
}

/// Returns whether a push is whole on the other shard before the owner has answered.
fn is_sent_at_once(world: &mut SessionWorld, plan: &ShardingPlan, token: u64) -> bool {
    let op = world.push(plan, token);
    let owner = parts(world, OWNER).pop().unwrap();
    assert!(owner.part().whole.is_some());
    let other = parts(world, 1);
    let at_once = other.last().is_some_and(|last| last.part().whole.is_some());
    world.answer(&owner, push_answer(applied(5)));
    let last = if at_once {
        other.into_iter().next_back().unwrap()
    } else {
        world.next_frame(1, "PushPart")
    };
    assert!(last.part().whole.is_some());
    world.answer(&last, push_answer(applied(1)));
    assert_eq!(outcome(world, op), applied(5));
    at_once
}

#[test]
fn a_token_older_than_a_connection_needs_the_owners_outcome_first() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    assert!(is_sent_at_once(&mut world, &plan, 1));
    ask(&mut world, 2);
    // The owner may have recalled the token since, and made the shard close the connection.
    world.reconnect(1);
    assert!(!is_sent_at_once(&mut world, &plan, 2));
    // This token was requested after the welcome.
    ask(&mut world, 3);
    assert!(is_sent_at_once(&mut world, &plan, 3));
}

#[test]
fn a_token_in_flight_during_a_reconnect_is_older_than_the_connection() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    let op = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    world.reconnect(1);
    world.answer(&request, message::Granted { grant: grant(2, 0) });
    world.reply(op).unwrap();
    assert!(!is_sent_at_once(&mut world, &plan, 2));
}

#[test]
fn a_prefetched_token_is_as_old_as_its_request() {
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
fn a_push_under_a_recalled_token_counts_on_no_shard() {
    let plan = plan(2, 2);
    let unknown_token = Refusal::Token { token: TokenId(1), generation: 1 };
    let mut world = with_token(&plan);
    let op = world.push(&plan, 1);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    let other = parts(&mut world, 1).pop().unwrap();
    assert!(other.part().whole.is_some(), "the push goes to all shards at once");
    // The owner made the other shard close the connection before the push arrived.
    world.disconnect(1);
    world.answer(&owner, refused(unknown_token.clone()));
    assert!(world.is_pending(op), "the other shard may hold it");
    world.wait_for_connect(1);
    world.accept(1);
    let asked = world.next_frame(1, "OutcomeQuery");
    world.answer(&asked, OutcomeIs { state: PushState::Unknown {} });
    let refused = world.reply(op);
    assert!(matches!(refused, Err(Error::Refused { refusal, .. }) if refusal == unknown_token));
    assert!(world.is_quiet(1), "the push is not sent again");
}

#[test]
fn a_shard_with_a_whole_push_is_asked_for_its_answer_despite_a_refusal_by_the_owner() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    let op = world.push(&plan, 1);
    let owner = parts(&mut world, OWNER).pop().unwrap();
    let whole = parts(&mut world, 1).pop().unwrap().part().whole.unwrap();
    // A table of the owner is full, and the other shard waits for its own table to grow.
    world.answer(&owner, refused(Refusal::NotInitialized {}));
    world.disconnect(1);
    world.wait_for_connect(1);
    world.accept(1);
    let asked = world.next_frame(1, "OutcomeQuery");
    world.answer(&asked, OutcomeIs { state: PushState::Receiving { bytes: whole } });
    let last = world.next_frame(1, "PushPart");
    assert_eq!((last.part().whole, last.body.len()), (Some(whole), 0));
    assert!(world.is_pending(op));
    world.answer(&last, push_answer(applied(1)));
    assert!(matches!(world.reply(op), Err(Error::Refused { .. })));
}

#[test]
fn an_assignment_does_not_wait_for_the_owner() {
    let plan = plan(2, 2);
    let mut world = with_token(&plan);
    world.reconnect(1);
    world.call(SessionCommand::Push { order: order(&plan, None, 1) });
    assert!(parts(&mut world, 1).pop().unwrap().part().whole.is_some());
}
