//! Tokens: one request at a time, no token twice, none lost.

use std::time::Duration;

use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::message::{self, EndReason, Granted, TokenRequest};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, PushState, Refusal};

use super::world::applied;
use super::world::{Frame, OWNER, World, grant, ms, plan, push_answer, refused};
use crate::error::Error;
use crate::session::{Command, Input, OpId, Reply};

fn world() -> World {
    World::joined(&plan(1, 4))
}

fn newest(frame: &Frame) -> u64 {
    let Message::TokenRequest(TokenRequest { newest }) = &frame.message else { panic!() };
    newest.0
}

fn returned(frame: &Frame) -> u64 {
    let Message::ReturnToken(returned) = &frame.message else { panic!() };
    returned.token.0
}

fn token(world: &mut World, op: OpId) -> Option<u64> {
    let Ok(Reply::Token(grant)) = world.reply(op) else { panic!() };
    grant.map(|grant| grant.token.0)
}

fn give(world: &mut World, frame: &Frame, token: u64) {
    world.answer(frame, Granted { grant: grant(token, 0) });
}

/// Pushes under token 1, and is given token 2 with the answer.
fn prefetch(world: &mut World) {
    let push = world.push(&plan(1, 4), 1);
    let part = world.give_push_slot(OWNER, 1).remove(0);
    assert!(part.part().next);
    let next = Some(grant(2, 0));
    world.answer(&part, message::PushAnswer { next, ..push_answer(applied(1)) });
    world.reply(push).unwrap();
}

#[test]
fn one_request_is_unanswered_at_a_time() {
    let mut world = world();
    let (first, second) = (world.call(Command::Token), world.call(Command::Token));
    let request = world.heard(OWNER, "TokenRequest");
    assert!(world.is_quiet(OWNER));
    give(&mut world, &request, 1);
    assert_eq!(token(&mut world, first), Some(1));
    let request = world.heard(OWNER, "TokenRequest");
    assert_eq!(newest(&request), 1);
    give(&mut world, &request, 2);
    assert_eq!(token(&mut world, second), Some(2));
}

#[test]
fn a_lost_answer_is_asked_for_again_with_the_newest_token() {
    let mut world = world();
    let op = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    give(&mut world, &request, 5);
    token(&mut world, op);
    let op = world.call(Command::Token);
    world.heard(OWNER, "TokenRequest");
    world.reconnect(OWNER);
    let request = world.heard(OWNER, "TokenRequest");
    assert_eq!(newest(&request), 5);
    // The owner repeats a token that had come: it is not taken twice.
    give(&mut world, &request, 5);
    assert!(world.waits(op));
    let request = world.heard(OWNER, "TokenRequest");
    give(&mut world, &request, 6);
    assert_eq!(token(&mut world, op), Some(6));
}

/// Two tokens were given with answers that got lost. Until both have been asked for by the number
/// of the newest one known, no push asks for another, which would hide them.
#[test]
fn tokens_that_came_with_lost_answers_are_found_again() {
    let mut world = world();
    let plan = plan(1, 4);
    let pushes = [world.push(&plan, 1), world.push(&plan, 2)];
    for frame in [world.heard(OWNER, "Reserve"), world.heard(OWNER, "Reserve")] {
        world.answer(&frame, message::Reserved { push_slot: 1 });
        assert!(world.parts(OWNER)[0].part().next);
    }
    world.reconnect(OWNER);
    for frame in [world.heard(OWNER, "OutcomeQuery"), world.heard(OWNER, "OutcomeQuery")] {
        let state = PushState::Settled { outcome: applied(1) };
        world.answer(&frame, message::OutcomeIs { state });
    }
    for push in pushes {
        world.reply(push).unwrap();
    }
    for (lost, prefetch) in [(5, false), (6, true)] {
        let op = world.call(Command::Token);
        let request = world.heard(OWNER, "TokenRequest");
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
fn the_token_that_came_with_an_answer_is_the_next() {
    let mut world = world();
    prefetch(&mut world);
    let op = world.call(Command::Token);
    assert_eq!(token(&mut world, op), Some(2));
    assert!(world.is_quiet(OWNER));
    let op = world.call(Command::Token);
    assert_eq!(newest(&world.heard(OWNER, "TokenRequest")), 2);
    assert!(world.waits(op));
}

/// A caller takes it out by itself: to the session it is as if it had handed it over.
#[test]
fn a_token_is_taken_without_asking_and_is_the_callers_then() {
    let mut world = world();
    prefetch(&mut world);
    let unclaimed = world.session.unclaimed().clone();
    let taken = unclaimed.claim().unwrap();
    assert_eq!((taken.token, unclaimed.claim()), (TokenId(2), None));
    world.pass(Duration::from_secs(2));
    assert!(world.is_quiet(OWNER), "what the caller has does not go back");
    world.input(Input::TokenDropped { grant: taken });
    let frame = world.heard(OWNER, "ReturnToken");
    assert_eq!(returned(&frame), 2);
    world.answer(&frame, message::Returned {});
    world.call(Command::Token);
    assert_eq!(newest(&world.heard(OWNER, "TokenRequest")), 2);
}

#[test]
fn a_token_that_goes_back_cannot_be_taken() {
    let mut world = world();
    prefetch(&mut world);
    world.pass(ms(500));
    assert_eq!(returned(&world.heard(OWNER, "ReturnToken")), 2);
    assert_eq!(world.session.unclaimed().claim(), None);
}

#[test]
fn a_session_that_has_ended_has_no_token_to_take() {
    let mut world = world();
    prefetch(&mut world);
    let op = world.call(Command::Token);
    token(&mut world, op);
    let op = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    world.cancel(op);
    give(&mut world, &request, 3);
    let pull = world.pull(&plan(1, 4));
    let fenced = Refusal::Fenced { epoch: 3.into(), current: 4.into() };
    let frame = world.heard(OWNER, "Pull");
    world.answer(&frame, refused(fenced));
    assert_eq!(world.reply(pull).unwrap_err(), Error::Fenced);
    assert_eq!(world.session.unclaimed().claim(), None, "it belongs to what has ended");
    let op = world.call(Command::Token);
    assert_eq!(world.reply(op).unwrap_err(), Error::Fenced);
}

#[test]
fn a_token_that_nobody_asks_for_goes_back_after_half_a_second() {
    let mut world = world();
    prefetch(&mut world);
    world.pass(ms(499));
    assert!(world.is_quiet(OWNER));
    world.pass(ms(1));
    let frame = world.heard(OWNER, "ReturnToken");
    assert_eq!(returned(&frame), 2);
    world.answer(&frame, message::Returned {});
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER));
}

#[test]
fn while_the_owner_is_away_a_token_is_kept() {
    let mut world = world();
    prefetch(&mut world);
    world.cut(OWNER);
    world.pass(Duration::from_secs(3));
    let op = world.call(Command::Token);
    assert_eq!(token(&mut world, op), Some(2));
    let mut world = self::world();
    prefetch(&mut world);
    world.cut(OWNER);
    world.pass(Duration::from_secs(3));
    world.accept(OWNER);
    world.pass(ms(0));
    assert_eq!(returned(&world.heard(OWNER, "ReturnToken")), 2);
}

#[test]
fn a_dropped_token_goes_back_even_if_the_connection_is_lost_meanwhile() {
    let mut world = world();
    world.input(Input::TokenDropped { grant: grant(1, 0) });
    assert_eq!(returned(&world.heard(OWNER, "ReturnToken")), 1);
    // Nobody knows whether it was heard. The owner counts on the token until it was.
    world.cut(OWNER);
    world.input(Input::TokenDropped { grant: grant(2, 0) });
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let frames = [world.heard(OWNER, "ReturnToken"), world.heard(OWNER, "ReturnToken")];
    assert_eq!(frames.each_ref().map(returned), [1, 2]);
    let gone = Refusal::Token { token: TokenId(1), generation: 1 };
    world.answer(&frames[0], refused(gone));
    world.answer(&frames[1], message::Returned {});
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER));
}

#[test]
fn a_token_that_comes_for_nobody_serves_the_next_or_goes_back() {
    for claimed in [true, false] {
        let mut world = world();
        let op = world.call(Command::Token);
        let request = world.heard(OWNER, "TokenRequest");
        world.cancel(op);
        give(&mut world, &request, 4);
        assert!(world.replies.is_empty());
        if claimed {
            let op = world.call(Command::Token);
            assert_eq!(token(&mut world, op), Some(4));
        } else {
            world.pass(ms(500));
            assert_eq!(returned(&world.heard(OWNER, "ReturnToken")), 4);
        }
    }
}

#[test]
fn the_end_is_the_end() {
    let mut world = world();
    let op = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    world.answer(&request, message::Ended { reason: EndReason::LastStep {} });
    assert_eq!(token(&mut world, op), None);
    world.reconnect(OWNER);
    let op = world.call(Command::Token);
    assert_eq!(token(&mut world, op), None);
    assert!(world.is_quiet(OWNER));
    let push = world.push(&plan(1, 4), 1);
    assert!(!world.give_push_slot(OWNER, 1)[0].part().next, "no token is asked for any more");
    assert!(world.waits(push));
}

#[test]
fn the_end_may_come_with_the_answer_to_a_push() {
    let mut world = world();
    let push = world.push(&plan(1, 4), 1);
    let part = world.give_push_slot(OWNER, 1).remove(0);
    let waiting = world.call(Command::Token);
    world.heard(OWNER, "TokenRequest");
    let ended = Some(EndReason::LastStep {});
    world.answer(&part, message::PushAnswer { ended, ..push_answer(applied(1)) });
    world.reply(push).unwrap();
    assert_eq!(token(&mut world, waiting), None);
}

#[test]
fn a_refusal_is_for_whoever_asked() {
    let deadline = Refusal::Deadline { waited_ms: 900, awaited: Detail::clipped("tokens") };
    let mut world = world();
    let op = world.call_within(Command::Token, Duration::from_secs(1));
    let request = world.heard(OWNER, "TokenRequest");
    assert_eq!(request.envelope.deadline_ms, 950, "the answer is to arrive in time");
    let other = world.call(Command::Token);
    world.answer(&request, refused(deadline.clone()));
    let refusal = deadline.clone();
    let Err(Error::Refused { refusal: said, .. }) = world.reply(op) else { panic!() };
    assert_eq!(said, refusal);
    let request = world.heard(OWNER, "TokenRequest");
    assert!(request.envelope.deadline_ms > 50_000 && world.waits(other));
    // Whoever asked gives up; the next still has its own time when the refusal comes.
    world.cancel(other);
    let next = world.call(Command::Token);
    world.answer(&request, refused(deadline));
    assert!(world.waits(next));
    let request = world.heard(OWNER, "TokenRequest");
    give(&mut world, &request, 1);
    assert_eq!(token(&mut world, next), Some(1));
}

#[test]
fn who_is_fenced_is_told_so_everywhere() {
    let mut world = world();
    let plan = plan(1, 4);
    let (pull, push) = (world.pull(&plan), world.push(&plan, 9));
    let op = world.call(Command::Token);
    world.heard(OWNER, "Pull");
    world.heard(OWNER, "Reserve");
    let request = world.heard(OWNER, "TokenRequest");
    let (epoch, current) = (3.into(), 4.into());
    world.answer(&request, refused(Refusal::Fenced { epoch, current }));
    for op in [pull, push, op] {
        assert_eq!(world.reply(op).unwrap_err(), Error::Fenced);
    }
    world.input(Input::TokenDropped { grant: grant(1, 0) });
    world.pass(Duration::from_secs(60));
    assert!(world.sent.is_empty() && world.connects.is_empty());
    let late = message::HeartbeatAnswer {};
    world.answer_body(&request, GlobalStep(1), late, &[]);
}
