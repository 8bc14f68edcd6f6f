//! Tokens: one request at a time, no token granted twice, none lost.

use std::time::Duration;

use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::message::{self, EndReason, Granted, TokenRequest};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, PushState, Refusal};

use super::world::applied;
use super::world::{OWNER, SentFrame, SessionWorld, grant, ms, plan, push_answer, refused};
use crate::error::Error;
use crate::session::{OpId, Reply, SessionCommand, SessionInput};

fn world() -> SessionWorld {
    SessionWorld::joined(&plan(1, 4))
}

fn newest(frame: &SentFrame) -> u64 {
    let Message::TokenRequest(TokenRequest { newest }) = &frame.message else { panic!() };
    newest.0
}

fn returned(frame: &SentFrame) -> u64 {
    let Message::ReturnToken(returned) = &frame.message else { panic!() };
    returned.token.0
}

fn token(world: &mut SessionWorld, op: OpId) -> Option<u64> {
    let Ok(Reply::Token(grant)) = world.reply(op) else { panic!() };
    grant.map(|grant| grant.token.0)
}

fn give(world: &mut SessionWorld, frame: &SentFrame, token: u64) {
    world.answer(frame, Granted { grant: grant(token, 0) });
}

/// Pushes under token 1, and is granted token 2 with the answer.
fn prefetch(world: &mut SessionWorld) {
    let push = world.push(&plan(1, 4), 1);
    let part = world.give_push_slot(OWNER, 1).remove(0);
    assert!(part.part().next);
    let next = Some(grant(2, 0));
    world.answer(&part, message::PushAnswer { next, ..push_answer(applied(1)) });
    world.reply(push).unwrap();
}

// W-3.
#[test]
fn one_request_is_unanswered_at_a_time() {
    let mut world = world();
    let first = world.call(SessionCommand::Token);
    let second = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    assert!(world.is_quiet(OWNER));
    give(&mut world, &request, 1);
    assert_eq!(token(&mut world, first), Some(1));
    let request = world.next_frame(OWNER, "TokenRequest");
    assert_eq!(newest(&request), 1);
    give(&mut world, &request, 2);
    assert_eq!(token(&mut world, second), Some(2));
}

#[test]
fn a_lost_token_answer_is_requested_again_with_the_newest_token() {
    let mut world = world();
    let op = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    give(&mut world, &request, 5);
    token(&mut world, op);
    let op = world.call(SessionCommand::Token);
    world.next_frame(OWNER, "TokenRequest");
    world.reconnect(OWNER);
    let request = world.next_frame(OWNER, "TokenRequest");
    assert_eq!(newest(&request), 5);
    // The owner repeats a known token, which is not taken twice.
    give(&mut world, &request, 5);
    assert!(world.is_pending(op));
    let request = world.next_frame(OWNER, "TokenRequest");
    give(&mut world, &request, 6);
    assert_eq!(token(&mut world, op), Some(6));
}

/// Two tokens were granted in answers that were lost. Until both have been requested by the number
/// of the newest known one, no push requests another, which would hide them.
#[test]
fn tokens_granted_in_lost_answers_are_recovered() {
    let mut world = world();
    let plan = plan(1, 4);
    let pushes = [world.push(&plan, 1), world.push(&plan, 2)];
    for frame in [world.next_frame(OWNER, "Reserve"), world.next_frame(OWNER, "Reserve")] {
        world.answer(&frame, message::Reserved { push_slot: 1 });
        assert!(world.parts(OWNER)[0].part().next);
    }
    world.reconnect(OWNER);
    for frame in [world.next_frame(OWNER, "OutcomeQuery"), world.next_frame(OWNER, "OutcomeQuery")]
    {
        let state = PushState::Settled { outcome: applied(1) };
        world.answer(&frame, message::OutcomeIs { state });
    }
    for push in pushes {
        world.reply(push).unwrap();
    }
    for (lost, prefetch) in [(5, false), (6, true)] {
        let op = world.call(SessionCommand::Token);
        let request = world.next_frame(OWNER, "TokenRequest");
        give(&mut world, &request, lost);
        assert_eq!(token(&mut world, op), Some(lost));
        let push = world.push(&plan, lost);
        let part = world.give_push_slot(OWNER, 1).remove(0);
        assert_eq!(part.part().next, prefetch);
        world.answer(&part, push_answer(applied(lost)));
        world.reply(push).unwrap();
    }
}

#[test]
fn a_prefetched_token_is_the_next_token() {
    let mut world = world();
    prefetch(&mut world);
    let op = world.call(SessionCommand::Token);
    assert_eq!(token(&mut world, op), Some(2));
    assert!(world.is_quiet(OWNER));
    let op = world.call(SessionCommand::Token);
    assert_eq!(newest(&world.next_frame(OWNER, "TokenRequest")), 2);
    assert!(world.is_pending(op));
}

/// To the session, a token taken by a caller is like one it handed over.
#[test]
fn a_claimed_token_belongs_to_the_caller() {
    let mut world = world();
    prefetch(&mut world);
    let unclaimed = world.session.unclaimed().clone();
    let taken = unclaimed.claim().unwrap();
    assert_eq!((taken.token, unclaimed.claim()), (TokenId(2), None));
    world.advance(Duration::from_secs(2));
    assert!(world.is_quiet(OWNER), "a claimed token is not returned");
    world.input(SessionInput::TokenDropped { grant: taken });
    let frame = world.next_frame(OWNER, "ReturnToken");
    assert_eq!(returned(&frame), 2);
    world.answer(&frame, message::Returned {});
    world.call(SessionCommand::Token);
    assert_eq!(newest(&world.next_frame(OWNER, "TokenRequest")), 2);
}

#[test]
fn a_token_being_returned_cannot_be_claimed() {
    let mut world = world();
    prefetch(&mut world);
    world.advance(ms(500));
    assert_eq!(returned(&world.next_frame(OWNER, "ReturnToken")), 2);
    assert_eq!(world.session.unclaimed().claim(), None);
}

#[test]
fn an_ended_session_has_no_token_to_claim() {
    let mut world = world();
    prefetch(&mut world);
    let op = world.call(SessionCommand::Token);
    token(&mut world, op);
    let op = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    world.cancel(op);
    give(&mut world, &request, 3);
    let pull = world.pull(&plan(1, 4));
    let fenced = Refusal::Fenced { epoch: 3.into(), current: 4.into() };
    let frame = world.next_frame(OWNER, "Pull");
    world.answer(&frame, refused(fenced));
    assert_eq!(world.reply(pull).unwrap_err(), Error::Fenced);
    assert_eq!(world.session.unclaimed().claim(), None, "the session has ended");
    let op = world.call(SessionCommand::Token);
    assert_eq!(world.reply(op).unwrap_err(), Error::Fenced);
}

#[test]
fn an_unclaimed_token_is_returned_after_half_a_second() {
    let mut world = world();
    prefetch(&mut world);
    world.advance(ms(499));
    assert!(world.is_quiet(OWNER));
    world.advance(ms(1));
    let frame = world.next_frame(OWNER, "ReturnToken");
    assert_eq!(returned(&frame), 2);
    world.answer(&frame, message::Returned {});
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER));
}

#[test]
fn an_unclaimed_token_is_kept_while_the_owner_is_disconnected() {
    let mut world = world();
    prefetch(&mut world);
    world.disconnect(OWNER);
    world.advance(Duration::from_secs(3));
    let op = world.call(SessionCommand::Token);
    assert_eq!(token(&mut world, op), Some(2));
    let mut world = self::world();
    prefetch(&mut world);
    world.disconnect(OWNER);
    world.advance(Duration::from_secs(3));
    world.accept(OWNER);
    world.advance(ms(0));
    assert_eq!(returned(&world.next_frame(OWNER, "ReturnToken")), 2);
}

#[test]
fn a_dropped_token_is_returned_across_a_lost_connection() {
    let mut world = world();
    world.input(SessionInput::TokenDropped { grant: grant(1, 0) });
    assert_eq!(returned(&world.next_frame(OWNER, "ReturnToken")), 1);
    // The return may not have arrived, and the owner counts on the token until it has.
    world.disconnect(OWNER);
    world.input(SessionInput::TokenDropped { grant: grant(2, 0) });
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let frames = [world.next_frame(OWNER, "ReturnToken"), world.next_frame(OWNER, "ReturnToken")];
    assert_eq!(frames.each_ref().map(returned), [1, 2]);
    let unknown_token = Refusal::Token { token: TokenId(1), generation: 1 };
    world.answer(&frames[0], refused(unknown_token));
    world.answer(&frames[1], message::Returned {});
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER));
}

#[test]
fn a_token_for_a_cancelled_wait_serves_the_next_or_is_returned() {
    for claimed in [true, false] {
        let mut world = world();
        let op = world.call(SessionCommand::Token);
        let request = world.next_frame(OWNER, "TokenRequest");
        world.cancel(op);
        give(&mut world, &request, 4);
        assert!(world.replies.is_empty());
        if claimed {
            let op = world.call(SessionCommand::Token);
            assert_eq!(token(&mut world, op), Some(4));
        } else {
            world.advance(ms(500));
            assert_eq!(returned(&world.next_frame(OWNER, "ReturnToken")), 4);
        }
    }
}

#[test]
fn no_token_is_requested_after_the_end() {
    let mut world = world();
    let op = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    world.answer(&request, message::Ended { reason: EndReason::LastStep {} });
    assert_eq!(token(&mut world, op), None);
    world.reconnect(OWNER);
    let op = world.call(SessionCommand::Token);
    assert_eq!(token(&mut world, op), None);
    assert!(world.is_quiet(OWNER));
    let push = world.push(&plan(1, 4), 1);
    assert!(!world.give_push_slot(OWNER, 1)[0].part().next, "no token is requested after the end");
    assert!(world.is_pending(push));
}

#[test]
fn the_end_can_arrive_with_the_answer_to_a_push() {
    let mut world = world();
    let push = world.push(&plan(1, 4), 1);
    let part = world.give_push_slot(OWNER, 1).remove(0);
    let waiting = world.call(SessionCommand::Token);
    world.next_frame(OWNER, "TokenRequest");
    let ended = Some(EndReason::LastStep {});
    world.answer(&part, message::PushAnswer { ended, ..push_answer(applied(1)) });
    world.reply(push).unwrap();
    assert_eq!(token(&mut world, waiting), None);
}

#[test]
fn a_token_refusal_ends_only_the_operation_that_requested_it() {
    let deadline = Refusal::Deadline { waited_ms: 900, awaited: Detail::clipped("tokens") };
    let mut world = world();
    let op = world.call_within(SessionCommand::Token, Duration::from_secs(1));
    let request = world.next_frame(OWNER, "TokenRequest");
    assert_eq!(request.envelope.deadline_ms, 950, "the answer must arrive in time");
    let other = world.call(SessionCommand::Token);
    world.answer(&request, refused(deadline.clone()));
    let refusal = deadline.clone();
    let Err(Error::Refused { refusal: reported, .. }) = world.reply(op) else { panic!() };
    assert_eq!(reported, refusal);
    let request = world.next_frame(OWNER, "TokenRequest");
    assert!(request.envelope.deadline_ms > 50_000 && world.is_pending(other));
    // The caller cancels. The next one still has its own time when the refusal arrives.
    world.cancel(other);
    let next = world.call(SessionCommand::Token);
    world.answer(&request, refused(deadline));
    assert!(world.is_pending(next));
    let request = world.next_frame(OWNER, "TokenRequest");
    give(&mut world, &request, 1);
    assert_eq!(token(&mut world, next), Some(1));
}

// W-6.
#[test]
fn a_fenced_session_fails_all_operations() {
    let mut world = world();
    let plan = plan(1, 4);
    let pull = world.pull(&plan);
    let push = world.push(&plan, 9);
    let op = world.call(SessionCommand::Token);
    world.next_frame(OWNER, "Pull");
    world.next_frame(OWNER, "Reserve");
    let request = world.next_frame(OWNER, "TokenRequest");
    let epoch = 3.into();
    let current = 4.into();
    world.answer(&request, refused(Refusal::Fenced { epoch, current }));
    for op in [pull, push, op] {
        assert_eq!(world.reply(op).unwrap_err(), Error::Fenced);
    }
    world.input(SessionInput::TokenDropped { grant: grant(1, 0) });
    world.advance(Duration::from_secs(60));
    assert!(world.sent.is_empty() && world.connects.is_empty());
    let late = message::HeartbeatAnswer {};
    world.answer_body(&request, GlobalStep(1), late, &[]);
}
