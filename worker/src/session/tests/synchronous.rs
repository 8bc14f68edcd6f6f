//! Synchronous mode: the step owner's answer is that of the push, and values are of one step.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, Sequence, TokenId, VariableId};
use pushpull_common::protocol::message::{
    self, ModeIs, Operation, OutcomeIs, Pulled, Role, Withdraw,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, Outcome, PushState, Refusal};

use super::world::{
    Frame, OWNER, World, applied, grant, ms, order, plan, push_answer, refused, shard,
};
use crate::error::Error;
use crate::params::Buffer;
use crate::session::{Command, Input, OpId, PushOrder, Read, Reply};
use crate::sharding_plan::ShardingPlan;

const HELD: Outcome = Outcome::Held {};
const ACCEPTED: Outcome = Outcome::Accepted { step: GlobalStep(5) };
const STALE: Outcome = Outcome::Stale { current: GlobalStep(6) };

/// A session that has joined servers with synchronous steps.
fn joined(plan: &Arc<ShardingPlan>) -> World {
    unjoined(|_| {}).join(plan)
}

fn unjoined(change: impl FnOnce(&mut crate::session::Start)) -> World {
    let mut world = World::with(change);
    world.mode = ModeIs::Synchronous { replicas_to_aggregate: 2, total_num_replicas: 3 };
    world
}

fn outcome(world: &mut World, op: OpId) -> Outcome {
    match world.reply(op) {
        Ok(Reply::Pushed { outcome }) => outcome,
        other => panic!("{other:?}"),
    }
}

/// The last part of a push that is sent to a shard.
fn last_part(world: &mut World, link: usize) -> Frame {
    world.give_push_slot(link, 1).pop().expect("parts follow the room")
}

fn say(world: &mut World, frame: &Frame, outcome: Outcome) {
    world.answer(frame, push_answer(outcome));
}

/// A push of the first variable alone, under this token.
fn push_one(world: &mut World, plan: &ShardingPlan, token: u64) -> OpId {
    let parts = plan.parts([VariableId(0)].into_iter(), |range| vec![1; range.len()].into());
    let (operation, grant) = (Operation::Gradient {}, Some(grant(token, 0)));
    world.call(Command::Push {
        order: PushOrder::of_parts(operation, grant, Read::default(), parts),
    })
}

fn pull_for(world: &mut World, plan: &Arc<ShardingPlan>, step: u64) -> OpId {
    let (plan, buffer) = (plan.clone(), Buffer::new(plan));
    world.call(Command::Pull { plan, buffer, token: Some(GlobalStep(step)) })
}

/// Sends all values of a shard of two small variables, of this step.
fn values(world: &mut World, frame: &Frame, step: u64) {
    let pulled = Pulled { version: step, gradients: step, offset: 0, last: true };
    world.answer_body(frame, GlobalStep(step), pulled, &[step as u8; 8]);
}

/// The step of a pull, and the first byte of each of its variables.
fn pulled(world: &mut World, plan: &ShardingPlan, op: OpId) -> (u64, Vec<u8>) {
    let Ok(Reply::Pulled { buffer, read }) = world.reply(op) else { panic!() };
    let variables = 0..plan.catalogue().variables().len() as u32;
    let first = variables.map(|id| buffer.bytes()[plan.range(VariableId(id)).start]);
    (read.step.0, first.collect())
}

#[test]
fn every_shard_has_a_share_empty_or_not() {
    let plan = plan(3, 2);
    let mut world = joined(&plan);
    let op = push_one(&mut world, &plan, 4);
    for (link, bytes) in [(1, 0), (2, 0), (0, 8)] {
        let frame = last_part(&mut world, link);
        assert_eq!((frame.body.len() as u64, frame.part().whole), (bytes, Some(bytes)));
        assert_eq!((frame.part().token, frame.part().next), (TokenId(4), false));
        say(&mut world, &frame, if link == OWNER { ACCEPTED } else { HELD });
    }
    assert_eq!(outcome(&mut world, op), ACCEPTED);
}

#[test]
fn plain_variables_are_applied_where_they_are() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let mut order = order(&plan, None, 3);
    order.parts.retain(|(to, _)| to.task == 1);
    let op = world.call(Command::Push { order });
    let frame = last_part(&mut world, 1);
    say(&mut world, &frame, applied(9));
    assert_eq!(outcome(&mut world, op), applied(9));
    assert!(world.is_quiet(OWNER));
}

/// What shard 1 says, and then the owner: what the push comes to.
#[test]
fn the_owner_decides() {
    let table = [
        (Some(HELD), ACCEPTED),
        (Some(HELD), STALE),
        // The shard has heard first that the token is over.
        (Some(STALE), STALE),
        (None, STALE),
        (None, ACCEPTED),
    ];
    for (other, owner) in table {
        let plan = plan(2, 2);
        let mut world = joined(&plan);
        let op = world.push(&plan, 4);
        let frames = [last_part(&mut world, OWNER), last_part(&mut world, 1)];
        if let Some(other) = other {
            say(&mut world, &frames[1], other);
            assert!(world.waits(op), "{other:?} says nothing of the push as a whole");
        }
        say(&mut world, &frames[0], owner);
        assert_eq!(outcome(&mut world, op), owner);
        assert!(world.sent.is_empty(), "nothing goes back, and nothing that is whole is withdrawn");
        if other.is_none() {
            say(&mut world, &frames[1], HELD);
        }
        assert!(world.closed.is_empty() && world.sent.is_empty());
    }
}

#[test]
fn what_a_shard_may_not_say_breaks_off_the_connection() {
    let applied = applied(1);
    for (link, said) in [(OWNER, HELD), (OWNER, applied), (1, ACCEPTED), (1, applied)] {
        for asked in [false, true] {
            let plan = plan(2, 2);
            let mut world = joined(&plan);
            let op = world.push(&plan, 4);
            let mut frames = [last_part(&mut world, OWNER), last_part(&mut world, 1)];
            if asked {
                world.reconnect(link);
                let query = world.heard(link, "OutcomeQuery");
                world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: said } });
            } else {
                say(&mut world, &frames[link], said);
            }
            assert_eq!(world.closed.get(&link), Some(&1), "{said:?} over link {link}");
            world.wait_for_connect(link);
            world.accept(link);
            let query = world.heard(link, "OutcomeQuery");
            world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 8 } });
            frames[link] = world.parts(link).remove(0);
            say(&mut world, &frames[1], HELD);
            say(&mut world, &frames[0], ACCEPTED);
            assert_eq!(outcome(&mut world, op), ACCEPTED);
        }
    }
    // Nor does anybody hold what is applied at once.
    let plan = plan(1, 2);
    let mut world = World::joined(&plan);
    world.push(&plan, 4);
    let frame = last_part(&mut world, OWNER);
    say(&mut world, &frame, HELD);
    assert_eq!(world.closed.get(&OWNER), Some(&1));
}

/// The owner says stale while shard 1 has nothing, a part, or all of its share.
#[test]
fn what_is_not_whole_is_given_up_when_the_step_has_passed() {
    for variables in 0..=2 {
        let plan = plan(2, 2);
        let mut world = joined(&plan);
        let mut order = order(&plan, Some(grant(4, 0)), 1);
        let mut parts = std::mem::take(&mut order.parts);
        let begin = world.call(Command::Begin { order });
        let Ok(Reply::Begun { sequence }) = world.reply(begin) else { panic!() };
        let mut frames = Vec::new();
        for (to, parts) in parts.drain(..variables) {
            let link = to.task as usize;
            let more = world.call(Command::More { sequence, own: None, parts: vec![(to, parts)] });
            world.reply(more).unwrap();
            frames.push(last_part(&mut world, link));
        }
        let Some(owner) = frames.first() else {
            // The owner has nothing to answer to.
            assert!(world.sent.is_empty());
            continue;
        };
        say(&mut world, owner, STALE);
        if variables == 2 {
            let withdraw = world.heard(1, "Withdraw");
            assert_eq!(
                (&withdraw.message, withdraw.envelope.sequence),
                (&Message::Withdraw(Withdraw {}), sequence)
            );
            say(&mut world, &withdraw, Outcome::Withdrawn {});
        }
        assert!(world.sent.is_empty(), "the token is spent");
        // The caller, who has gone on with it, is told at the end.
        let more = world.call(Command::More { sequence, own: None, parts: Vec::new() });
        world.reply(more).unwrap();
        let end = world.call(Command::End { sequence });
        assert_eq!(outcome(&mut world, end), STALE);
        assert!(world.sent.is_empty() && world.closed.is_empty());
    }
}

#[test]
fn a_share_that_waits_for_room_or_a_connection_is_given_up_when_the_step_has_passed() {
    let plan = plan(3, 2);
    let mut world = joined(&plan);
    world.cut(2);
    let op = world.push(&plan, 4);
    let (owner, reserve) = (last_part(&mut world, OWNER), world.heard(1, "Reserve"));
    say(&mut world, &owner, STALE);
    assert_eq!(outcome(&mut world, op), STALE);
    world.answer(&reserve, message::Reserved { push_slot: 9 });
    world.wait_for_connect(2);
    world.accept(2);
    assert!(world.sent.is_empty(), "not a byte of it is sent any more");
    // The room serves the next.
    world.push(&plan, 5);
    assert_eq!(world.parts(1)[0].part().push_slot, 9);
}

#[test]
fn a_push_that_one_shard_refuses_ends_and_its_token_goes_back() {
    let refusal = Refusal::Storage { detail: Detail::clipped("full") };
    for refusing in [OWNER, 1] {
        let plan = plan(2, 2);
        let mut world = joined(&plan);
        let op = world.push(&plan, 4);
        let frames = [last_part(&mut world, OWNER), last_part(&mut world, 1)];
        world.answer(&frames[refusing], refused(refusal.clone()));
        let to = shard(refusing as u32);
        let expected = Error::Refused { doing: "push", shard: to, refusal: refusal.clone() };
        assert_eq!(world.reply(op).unwrap_err(), expected);
        let back = world.heard(OWNER, "ReturnToken");
        world.answer(&back, message::Returned {});
        let rest = if refusing == OWNER { HELD } else { STALE };
        say(&mut world, &frames[1 - refusing], rest);
        assert!(world.sent.is_empty() && world.closed.is_empty());
    }
}

#[test]
fn a_lost_owner_is_asked_and_shards_that_hold_a_push_are_sent_nothing() {
    let states = [
        PushState::Settled { outcome: ACCEPTED },
        PushState::Settled { outcome: STALE },
        PushState::Receiving { bytes: 2_400_000 },
        PushState::Unknown {},
    ];
    for state in states {
        let plan = plan(2, 600_000);
        let mut world = joined(&plan);
        let op = world.push(&plan, 4);
        let owner = last_part(&mut world, OWNER);
        let other = last_part(&mut world, 1);
        say(&mut world, &other, HELD);
        world.reconnect(OWNER);
        assert!(world.waits(op));
        let query = world.heard(OWNER, "OutcomeQuery");
        assert_eq!(query.envelope.sequence, owner.envelope.sequence);
        world.answer(&query, OutcomeIs { state: state.clone() });
        let expected = match state {
            PushState::Settled { outcome } => outcome,
            PushState::Receiving { .. } => {
                // It holds all: only the answer is missing.
                let again = world.parts(OWNER);
                assert_eq!((again.len(), again[0].body.len()), (1, 0));
                assert_eq!(again[0].part().whole, Some(2_400_000));
                say(&mut world, &again[0], ACCEPTED);
                ACCEPTED
            }
            _ => {
                let again = world.give_push_slot(OWNER, 2);
                assert_eq!(again.iter().map(|frame| frame.body.len()).sum::<usize>(), 2_400_000);
                say(&mut world, &again[2], ACCEPTED);
                ACCEPTED
            }
        };
        assert_eq!(outcome(&mut world, op), expected);
        assert!(world.sent.is_empty());
    }
}

#[test]
fn a_shard_that_is_lost_before_it_holds_is_sent_what_it_has_not() {
    let plan = plan(2, 600_000);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = last_part(&mut world, OWNER);
    last_part(&mut world, 1);
    world.reconnect(1);
    let query = world.heard(1, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: HELD } });
    world.reconnect(1);
    assert!(world.is_quiet(1), "it holds it");
    say(&mut world, &owner, ACCEPTED);
    assert_eq!(outcome(&mut world, op), ACCEPTED);
}

#[test]
fn a_push_that_is_not_decided_in_time_says_for_whom_it_waits() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let first = order(&plan, Some(grant(4, 0)), 1);
    let op = world.call_within(Command::Push { order: first }, ms(1000));
    let owner = last_part(&mut world, OWNER);
    assert_eq!(owner.envelope.deadline_ms, 950);
    let other = last_part(&mut world, 1);
    say(&mut world, &other, HELD);
    world.pass(ms(900));
    let awaited = Detail::clipped("/job:worker/task:2 is missing");
    let late = || refused(Refusal::Deadline { waited_ms: 900, awaited: awaited.clone() });
    world.answer(&owner, late());
    let Err(error) = world.reply(op) else { panic!() };
    assert!(error.to_string().contains("/job:worker/task:2 is missing"), "{error}");
    let Error::Timeout { sequence: Some(sequence), .. } = error else { panic!("{error}") };
    // Nobody waits, and nothing is said until the caller is there again.
    world.pass(Duration::from_secs(5));
    assert!(world.sent.is_empty());
    let known = world.call(Command::Outcome { sequence });
    assert!(matches!(world.reply(known), Ok(Reply::Outcome(None))));
    not_decided(&mut world, sequence, &late());
    assert!(world.sent.is_empty(), "once for each command");
    // Somebody waits on, in vain, and once more.
    let waits = world.call_within(Command::Await { sequence }, ms(500));
    not_decided(&mut world, sequence, &late());
    assert!(world.reply(waits).unwrap_err().to_string().contains("task:2 is missing"));
    let waits = world.call_within(Command::Await { sequence }, ms(500));
    let query = world.heard(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 8 } });
    let again = world.parts(OWNER).remove(0);
    assert_eq!((again.envelope.deadline_ms, again.body.len()), (450, 0));
    say(&mut world, &again, ACCEPTED);
    assert_eq!(outcome(&mut world, waits), ACCEPTED);
    assert!(world.sent.is_empty() && world.closed.is_empty());
}

#[test]
fn an_answer_that_was_late_ends_no_wait_that_has_begun_since() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let first = order(&plan, Some(grant(4, 0)), 1);
    let op = world.call_within(Command::Push { order: first }, ms(1000));
    let owner = last_part(&mut world, OWNER);
    world.pass(ms(1000));
    let Err(Error::Timeout { sequence: Some(sequence), .. }) = world.reply(op) else { panic!() };
    let waits = world.call_within(Command::Await { sequence }, ms(500));
    world.pass(ms(1));
    let awaited = Detail::clipped("nobody");
    let late = refused(Refusal::Deadline { waited_ms: 950, awaited });
    world.answer(&owner, late.clone());
    // That was for the first wait: it is asked for the second one.
    not_decided(&mut world, sequence, &late);
    let Err(Error::Timeout { waited, .. }) = world.reply(waits) else { panic!() };
    assert_eq!(waited, ms(1));
}

/// The owner is asked about a push, holds it, and does not decide.
fn not_decided(world: &mut World, sequence: Sequence, late: &Message) {
    let query = world.heard(OWNER, "OutcomeQuery");
    assert_eq!(query.envelope.sequence, sequence);
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 8 } });
    let again = world.parts(OWNER).remove(0);
    world.answer(&again, late.clone());
}

#[test]
fn a_push_that_is_not_decided_when_its_connection_is_lost_is_asked_about_after_that() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = last_part(&mut world, OWNER);
    let awaited = Detail::clipped("nobody");
    world.answer(&owner, refused(Refusal::Deadline { waited_ms: 1, awaited }));
    world.reply(op).unwrap_err();
    world.reconnect(OWNER);
    let query = world.heard(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: STALE } });
    let sequence = owner.envelope.sequence;
    let known = world.call(Command::Outcome { sequence });
    assert!(matches!(world.reply(known), Ok(Reply::Outcome(Some(STALE)))));
}

#[test]
fn a_push_that_is_given_up_before_anybody_holds_it_gives_its_token_back() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    world.heard(OWNER, "Reserve");
    world.cancel(op);
    let back = world.heard(OWNER, "ReturnToken");
    // The step has passed meanwhile: there is nothing to give back, and no harm.
    let (token, generation) = (TokenId(4), 1);
    world.answer(&back, refused(Refusal::Token { token, generation }));
    assert!(world.is_quiet(OWNER) && world.closed.is_empty());
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER), "it is not said again");
}

#[test]
fn no_token_comes_with_an_answer_or_is_looked_for_after_one_was_lost() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    last_part(&mut world, OWNER);
    world.reconnect(OWNER);
    let query = world.heard(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: ACCEPTED } });
    assert_eq!(outcome(&mut world, op), ACCEPTED);
    assert!(world.sent.is_empty(), "nobody has asked for a token");
}

/// A caller who gave up waiting for a token does not keep others from it.
#[test]
fn a_token_for_a_caller_who_is_gone_goes_back() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    world.cancel(op);
    world.answer(&request, message::Granted { grant: grant(8, 3) });
    world.pass(ms(500));
    world.heard(OWNER, "ReturnToken");
}

#[test]
fn a_token_that_is_not_granted_in_time_says_for_whom_it_waits() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    let awaited = Detail::clipped("/job:worker/task:2 is missing");
    world.answer(&request, refused(Refusal::Deadline { waited_ms: 1, awaited }));
    let error = world.reply(op).unwrap_err().to_string();
    assert!(error.contains("/job:worker/task:2 is missing"), "{error}");
}

#[test]
fn a_pull_for_a_token_is_of_its_step_everywhere() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = pull_for(&mut world, &plan, 5);
    for link in [1, 0] {
        let frame = world.heard(link, "Pull");
        assert_eq!(frame.envelope.step, GlobalStep(5), "every shard waits for it");
        values(&mut world, &frame, 5);
    }
    assert_eq!(pulled(&mut world, &plan, op), (5, vec![5, 5]));
}

#[test]
fn a_pull_is_stale_if_any_shard_is_further() {
    for further in [OWNER, 1] {
        for before in [false, true] {
            let plan = plan(2, 2);
            let mut world = joined(&plan);
            let op = pull_for(&mut world, &plan, 5);
            let frames = [world.heard(OWNER, "Pull"), world.heard(1, "Pull")];
            if before {
                values(&mut world, &frames[1 - further], 5);
            }
            let pulled = Pulled { version: 6, gradients: 6, offset: 0, last: true };
            world.announce(&frames[further], GlobalStep(6), pulled, 8);
            assert!(matches!(world.reply(op), Ok(Reply::Stale { .. })));
            assert!(!world.body(further, &[6; 8]), "it is read past");
            if !before {
                let pulled = Pulled { version: 5, gradients: 5, offset: 0, last: true };
                world.announce(&frames[1 - further], GlobalStep(5), pulled, 8);
                assert!(!world.body(1 - further, &[5; 8]));
            }
            // The caller drops the token. The owner does not know it any more.
            world.input(Input::TokenDropped { grant: grant(4, 0) });
            let back = world.heard(OWNER, "ReturnToken");
            let (token, generation) = (TokenId(4), 1);
            world.answer(&back, refused(Refusal::Token { token, generation }));
            assert!(world.sent.is_empty() && world.closed.is_empty());
        }
    }
}

#[test]
fn a_shard_that_has_moved_on_between_two_parts_makes_a_pull_stale() {
    let plan = plan(1, 4);
    let mut world = joined(&plan);
    let op = pull_for(&mut world, &plan, 5);
    let frame = world.heard(OWNER, "Pull");
    let part = |offset, last| Pulled { version: 5, gradients: 5, offset, last };
    world.answer_body(&frame, GlobalStep(5), part(0, false), &[5; 8]);
    world.announce(&frame, GlobalStep(6), part(8, true), 8);
    assert!(matches!(world.reply(op), Ok(Reply::Stale { .. })));
    assert!(!world.body(OWNER, &[6; 8]));
}

#[test]
fn values_of_a_step_before_the_tokens_break_off_the_connection() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = pull_for(&mut world, &plan, 5);
    let frame = world.heard(OWNER, "Pull");
    let early = Pulled { version: 4, gradients: 4, offset: 0, last: true };
    world.announce(&frame, GlobalStep(4), early, 8);
    assert_eq!(world.closed.get(&OWNER), Some(&1));
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let frame = world.heard(OWNER, "Pull");
    values(&mut world, &frame, 5);
    assert_eq!(pulled(&mut world, &plan, op), (5, vec![5]));
}

/// Pulls of readers and of `join` are asked again where they were of an older step.
#[test]
fn values_of_two_steps_are_never_put_together() {
    for role in [Role::Reader {}, Role::Chief {}] {
        let plan = plan(3, 2);
        let mut world = unjoined(|start| start.role = role).join(&plan);
        let op = world.pull(&plan);
        let frames: Vec<Frame> = (0..3).map(|link| world.heard(link, "Pull")).collect();
        assert!(frames.iter().all(|frame| frame.envelope.step == GlobalStep(0)));
        values(&mut world, &frames[0], 5);
        values(&mut world, &frames[1], 6);
        let owner = world.heard(OWNER, "Pull");
        assert_eq!(owner.envelope.step, GlobalStep(6), "it answers once it is there");
        assert!(world.is_quiet(1));
        values(&mut world, &frames[2], 6);
        assert!(world.waits(op));
        // It is further still when it answers, and all others are asked.
        values(&mut world, &owner, 7);
        for link in [1, 2] {
            let frame = world.heard(link, "Pull");
            assert_eq!(frame.envelope.step, GlobalStep(7));
            values(&mut world, &frame, 7);
        }
        assert_eq!(pulled(&mut world, &plan, op), (7, vec![7, 7, 7]));
        assert!(world.sent.is_empty());
    }
}

#[test]
fn shards_that_stay_of_two_steps_are_named() {
    let plan = plan(2, 2);
    for refuses in [false, true] {
        let mut world = joined(&plan);
        let op = world.pull(&plan);
        let frames = [world.heard(OWNER, "Pull"), world.heard(1, "Pull")];
        values(&mut world, &frames[0], 6);
        values(&mut world, &frames[1], 5);
        let again = world.heard(1, "Pull");
        world.pass(Duration::from_secs(59));
        if refuses {
            let awaited = Detail::clipped("step 6");
            world.answer(&again, refused(Refusal::Deadline { waited_ms: 1, awaited }));
        } else {
            world.pass(Duration::from_secs(1));
        }
        let error = world.reply(op).unwrap_err();
        let Error::Timeout { awaited, .. } = &error else { panic!("{error}") };
        assert_eq!(awaited.0.iter().map(|silent| silent.shard).collect::<Vec<_>>(), [shard(1)]);
        let text = "has the values of step 5, others those of step 6";
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_pull_that_lost_a_shard_is_of_one_step_all_the_same() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.pull(&plan);
    let first = [world.heard(OWNER, "Pull"), world.heard(1, "Pull")];
    values(&mut world, &first[0], 5);
    world.reconnect(1);
    let again = world.heard(1, "Pull");
    assert_eq!(again.envelope.step, GlobalStep(5));
    values(&mut world, &again, 6);
    let owner = world.heard(OWNER, "Pull");
    values(&mut world, &owner, 6);
    assert_eq!(pulled(&mut world, &plan, op), (6, vec![6, 6]));
}

#[test]
fn a_streamed_push_ends_with_an_empty_part_where_nothing_was_sent() {
    let plan = plan(3, 2);
    let mut world = joined(&plan);
    let mut order = order(&plan, Some(grant(4, 0)), 1);
    order.parts.clear();
    let begin = world.call(Command::Begin { order });
    let Ok(Reply::Begun { sequence }) = world.reply(begin) else { panic!() };
    let parts = plan.parts([VariableId(2)].into_iter(), |range| Bytes::from(vec![7; range.len()]));
    let more = world.call(Command::More { sequence, own: None, parts });
    world.reply(more).unwrap();
    assert_eq!(last_part(&mut world, 2).part().whole, None);
    assert!(world.sent.is_empty());
    let end = world.call(Command::End { sequence });
    for (link, bytes) in [(0, 0), (1, 0)] {
        assert_eq!(last_part(&mut world, link).part().whole, Some(bytes));
    }
    assert_eq!(world.parts(2)[0].part().whole, Some(8));
    assert!(world.waits(end));
}

/// What the step owner says that has let a request for a token wait for so long.
fn waits_for(waited_ms: u64, awaited: &str) -> Message {
    refused(Refusal::Deadline { waited_ms, awaited: Detail::clipped(awaited) })
}

#[test]
fn a_wait_for_a_token_tells_who_is_missing_at_each_interval() {
    let plan = plan(2, 1);
    let mut world = joined(&plan);
    let token = world.call(Command::Token);
    for round in 1..=3 {
        let request = world.heard(OWNER, "TokenRequest");
        assert_eq!(request.envelope.deadline_ms, 10_000);
        world.pass(Duration::from_secs(10));
        assert_eq!(world.progress.len(), round - 1, "nobody is silent");
        world.answer(&request, waits_for(10_020, "step 4; /job:worker/task:1 (lost)"));
        assert!(world.waits(token));
        let (_, silent) = world.progress.last().unwrap();
        let [owner] = &silent.0[..] else { panic!("{silent}") };
        assert_eq!(owner.shard, shard(0));
        assert!(owner.last.ends_with("; step 4; /job:worker/task:1 (lost)"), "{owner}");
        assert_eq!(world.progress.len(), round);
    }
    let request = world.heard(OWNER, "TokenRequest");
    world.answer(&request, message::Granted { grant: grant(7, 0) });
    assert!(matches!(world.reply(token), Ok(Reply::Token(Some(_)))));
}

#[test]
fn a_wait_for_a_token_ends_with_its_own_deadline_or_as_the_servers_say() {
    let plan = plan(2, 1);
    let mut world = joined(&plan);
    let token = world.call_within(Command::Token, Duration::from_secs(15));
    let request = world.heard(OWNER, "TokenRequest");
    world.pass(Duration::from_secs(10));
    world.answer(&request, waits_for(10_000, "step 4"));
    let last = world.heard(OWNER, "TokenRequest");
    assert_eq!(last.envelope.deadline_ms, 4_950);
    world.pass(ms(4_950));
    world.answer(&last, waits_for(4_950, "step 5"));
    let Err(Error::Refused { refusal: Refusal::Deadline { waited_ms, awaited }, .. }) =
        world.reply(token)
    else {
        panic!("it goes on")
    };
    assert_eq!((waited_ms, awaited.as_str()), (14_950, "step 5"), "all of it has been waited");
    // The policy for replicas that are lost says that nobody waits.
    let token = world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    world.answer(&request, waits_for(30, "step 5; /job:worker/task:1 (lost)"));
    assert!(matches!(world.reply(token), Err(Error::Refused { .. })));
}

#[test]
fn a_wait_for_a_token_is_asked_for_once_where_nobody_hears_of_progress() {
    let plan = plan(2, 1);
    let mode = ModeIs::Synchronous { replicas_to_aggregate: 2, total_num_replicas: 2 };
    let mut world = World::with(|start| start.progress_interval = None);
    world.mode = mode;
    let mut world = world.join(&plan);
    world.call(Command::Token);
    let request = world.heard(OWNER, "TokenRequest");
    assert_eq!(request.envelope.deadline_ms, 59_950);
}
