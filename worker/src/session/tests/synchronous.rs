//! Synchronous mode: the step owner decides each push, and the values of a pull are of one step.

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
    OWNER, SentFrame, SessionWorld, applied, grant, ms, order, plan, push_answer, refused, shard,
};
use crate::error::Error;
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::scatter::Scatter;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::session::{OpId, PushOrder, ReadPoint, Reply, SessionCommand, SessionInput};

const HELD: Outcome = Outcome::Held {};
const ACCEPTED: Outcome = Outcome::Accepted { step: GlobalStep(5) };
const STALE: Outcome = Outcome::Stale { current: GlobalStep(6) };

/// Starts a session that has joined servers with synchronous steps.
fn joined(plan: &Arc<ShardingPlan>) -> SessionWorld {
    unjoined(|_| {}).join(plan)
}

fn unjoined(change: impl FnOnce(&mut crate::session::SessionConfig)) -> SessionWorld {
    let mut world = SessionWorld::with(change);
    world.mode = ModeIs::Synchronous { replicas_to_aggregate: 2, total_num_replicas: 3 };
    world
}

fn outcome(world: &mut SessionWorld, op: OpId) -> Outcome {
    match world.reply(op) {
        Ok(Reply::Pushed { outcome }) => outcome,
        other => panic!("{other:?}"),
    }
}

/// Returns the last part of a push that is sent to a shard.
fn last_part(world: &mut SessionWorld, link: usize) -> SentFrame {
    world.give_push_slot(link, 1).pop().expect("parts follow the push slot")
}

fn answer_push(world: &mut SessionWorld, frame: &SentFrame, outcome: Outcome) {
    world.answer(frame, push_answer(outcome));
}

/// Pushes the first variable alone, under this token.
fn push_one(world: &mut SessionWorld, plan: &ShardingPlan, token: u64) -> OpId {
    let parts =
        Scatter::new(plan, [VariableId(0)].into_iter()).parts(|range| vec![1; range.len()].into());
    let operation = Operation::Gradient {};
    let grant = Some(grant(token, 0));
    world.call(SessionCommand::Push {
        order: PushOrder::of_parts(operation, grant, ReadPoint::default(), parts),
    })
}

fn pull_for(world: &mut SessionWorld, plan: &Arc<ShardingPlan>, step: u64) -> OpId {
    let (plan, buffer) = (plan.clone(), AlignedBuffer::of_bytes(plan.bytes()));
    world.call(SessionCommand::Pull { plan, buffer, token: Some(GlobalStep(step)) })
}

/// Sends all values of a shard of two small variables, of this step.
fn values(world: &mut SessionWorld, frame: &SentFrame, step: u64) {
    let pulled = Pulled { version: step, gradients: step, offset: 0, last: true };
    world.answer_body(frame, GlobalStep(step), pulled, &[step as u8; 8]);
}

/// Returns the step of a pull, and the first byte of each of its variables.
fn pulled(world: &mut SessionWorld, plan: &ShardingPlan, op: OpId) -> (u64, Vec<u8>) {
    let Ok(Reply::Pulled { buffer, read }) = world.reply(op) else { panic!() };
    let variables = 0..plan.catalogue().variables().len() as u32;
    let first = variables.map(|id| buffer.bytes()[plan.range(VariableId(id)).start]);
    (read.step.0, first.collect())
}

#[test]
fn every_shard_gets_a_share_even_an_empty_one() {
    let plan = plan(3, 2);
    let mut world = joined(&plan);
    let op = push_one(&mut world, &plan, 4);
    for (link, bytes) in [(1, 0), (2, 0), (0, 8)] {
        let frame = last_part(&mut world, link);
        assert_eq!((frame.body.len() as u64, frame.part().whole), (bytes, Some(bytes)));
        assert_eq!((frame.part().token, frame.part().next), (TokenId(4), false));
        answer_push(&mut world, &frame, if link == OWNER { ACCEPTED } else { HELD });
    }
    assert_eq!(outcome(&mut world, op), ACCEPTED);
}

#[test]
fn plain_variables_are_applied_by_their_shards_at_once() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let mut order = order(&plan, None, 3);
    order.parts.retain(|(to, _)| to.task == 1);
    let op = world.call(SessionCommand::Push { order });
    let frame = last_part(&mut world, 1);
    answer_push(&mut world, &frame, applied(9));
    assert_eq!(outcome(&mut world, op), applied(9));
    assert!(world.is_quiet(OWNER));
}

/// The outcome of shard 1 and then of the owner, which is that of the push.
#[test]
fn the_owner_decides_the_outcome_of_a_push() {
    let table = [
        (Some(HELD), ACCEPTED),
        (Some(HELD), STALE),
        // The shard has learned first that the token has expired.
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
            answer_push(&mut world, &frames[1], other);
            assert!(world.is_pending(op), "{other:?} does not decide the push");
        }
        answer_push(&mut world, &frames[0], owner);
        assert_eq!(outcome(&mut world, op), owner);
        assert!(world.sent.is_empty(), "no token is returned and no whole share is withdrawn");
        if other.is_none() {
            answer_push(&mut world, &frames[1], HELD);
        }
        assert!(world.closed.is_empty() && world.sent.is_empty());
    }
}

#[test]
fn an_outcome_that_a_shard_may_not_send_resets_the_link() {
    let applied = applied(1);
    for (link, sent_outcome) in [(OWNER, HELD), (OWNER, applied), (1, ACCEPTED), (1, applied)] {
        for asked in [false, true] {
            let plan = plan(2, 2);
            let mut world = joined(&plan);
            let op = world.push(&plan, 4);
            let mut frames = [last_part(&mut world, OWNER), last_part(&mut world, 1)];
            if asked {
                world.reconnect(link);
                let query = world.next_frame(link, "OutcomeQuery");
                world.answer(
                    &query,
                    OutcomeIs { state: PushState::Settled { outcome: sent_outcome } },
                );
            } else {
                answer_push(&mut world, &frames[link], sent_outcome);
            }
            assert_eq!(world.closed.get(&link), Some(&1), "{sent_outcome:?} over link {link}");
            world.wait_for_connect(link);
            world.accept(link);
            let query = world.next_frame(link, "OutcomeQuery");
            world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 8 } });
            frames[link] = world.parts(link).remove(0);
            answer_push(&mut world, &frames[1], HELD);
            answer_push(&mut world, &frames[0], ACCEPTED);
            assert_eq!(outcome(&mut world, op), ACCEPTED);
        }
    }
    // In asynchronous mode no shard may hold a push.
    let plan = plan(1, 2);
    let mut world = SessionWorld::joined(&plan);
    world.push(&plan, 4);
    let frame = last_part(&mut world, OWNER);
    answer_push(&mut world, &frame, HELD);
    assert_eq!(world.closed.get(&OWNER), Some(&1));
}

/// The owner answers stale while shard 1 has nothing, a part, or all of its share.
#[test]
fn an_incomplete_push_is_given_up_when_its_step_has_passed() {
    for variables in 0..=2 {
        let plan = plan(2, 2);
        let mut world = joined(&plan);
        let mut order = order(&plan, Some(grant(4, 0)), 1);
        let mut parts = std::mem::take(&mut order.parts);
        let begin = world.call(SessionCommand::Begin { order });
        let Ok(Reply::Begun { sequence }) = world.reply(begin) else { panic!() };
        let mut frames = Vec::new();
        for (to, parts) in parts.drain(..variables) {
            let link = to.task as usize;
            let more = world.call(SessionCommand::AddParts {
                sequence,
                staged: None,
                parts: vec![(to, parts)],
            });
            world.reply(more).unwrap();
            frames.push(last_part(&mut world, link));
        }
        let Some(owner) = frames.first() else {
            // The owner has nothing to answer to.
            assert!(world.sent.is_empty());
            continue;
        };
        answer_push(&mut world, owner, STALE);
        if variables == 2 {
            let withdraw = world.next_frame(1, "Withdraw");
            assert_eq!(
                (&withdraw.message, withdraw.envelope.sequence),
                (&Message::Withdraw(Withdraw {}), sequence)
            );
            answer_push(&mut world, &withdraw, Outcome::Withdrawn {});
        }
        assert!(world.sent.is_empty(), "the token is spent");
        // The caller, who continued the push, gets the outcome at its end.
        let more =
            world.call(SessionCommand::AddParts { sequence, staged: None, parts: Vec::new() });
        world.reply(more).unwrap();
        let end = world.call(SessionCommand::End { sequence });
        assert_eq!(outcome(&mut world, end), STALE);
        assert!(world.sent.is_empty() && world.closed.is_empty());
    }
}

#[test]
fn a_share_waiting_for_a_slot_or_a_connection_is_given_up_when_its_step_has_passed() {
    let plan = plan(3, 2);
    let mut world = joined(&plan);
    world.disconnect(2);
    let op = world.push(&plan, 4);
    let owner = last_part(&mut world, OWNER);
    let reserve = world.next_frame(1, "Reserve");
    answer_push(&mut world, &owner, STALE);
    assert_eq!(outcome(&mut world, op), STALE);
    world.next_frame(1, "Withdraw");
    world.answer(&reserve, message::Reserved { push_slot: 9 });
    world.wait_for_connect(2);
    world.accept(2);
    assert!(world.sent.is_empty(), "a stale push is not sent");
    // The push slot serves the next push.
    world.push(&plan, 5);
    assert_eq!(world.parts(1)[0].part().push_slot, 9);
}

#[test]
fn a_refusal_by_one_shard_ends_a_push_and_returns_its_token() {
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
        let back = world.next_frame(OWNER, "ReturnToken");
        world.answer(&back, message::Returned {});
        let rest = if refusing == OWNER { HELD } else { STALE };
        answer_push(&mut world, &frames[1 - refusing], rest);
        assert!(world.sent.is_empty() && world.closed.is_empty());
    }
}

#[test]
fn a_reconnected_owner_is_queried_and_holding_shards_are_sent_nothing() {
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
        answer_push(&mut world, &other, HELD);
        world.reconnect(OWNER);
        assert!(world.is_pending(op));
        let query = world.next_frame(OWNER, "OutcomeQuery");
        assert_eq!(query.envelope.sequence, owner.envelope.sequence);
        world.answer(&query, OutcomeIs { state: state.clone() });
        let expected = match state {
            PushState::Settled { outcome } => outcome,
            PushState::Receiving { .. } => {
                // The owner holds the whole share: only its answer is missing.
                let again = world.parts(OWNER);
                assert_eq!((again.len(), again[0].body.len()), (1, 0));
                assert_eq!(again[0].part().whole, Some(2_400_000));
                answer_push(&mut world, &again[0], ACCEPTED);
                ACCEPTED
            }
            _ => {
                let again = world.give_push_slot(OWNER, 2);
                assert_eq!(again.iter().map(|frame| frame.body.len()).sum::<usize>(), 2_400_000);
                answer_push(&mut world, &again[2], ACCEPTED);
                ACCEPTED
            }
        };
        assert_eq!(outcome(&mut world, op), expected);
        assert!(world.sent.is_empty());
    }
}

#[test]
fn a_reconnected_shard_that_holds_a_push_is_sent_nothing() {
    let plan = plan(2, 600_000);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = last_part(&mut world, OWNER);
    last_part(&mut world, 1);
    world.reconnect(1);
    let query = world.next_frame(1, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: HELD } });
    world.reconnect(1);
    assert!(world.is_quiet(1), "the shard holds the push");
    answer_push(&mut world, &owner, ACCEPTED);
    assert_eq!(outcome(&mut world, op), ACCEPTED);
}

#[test]
fn an_undecided_push_names_the_stragglers_at_its_deadline() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let first = order(&plan, Some(grant(4, 0)), 1);
    let op = world.call_within(SessionCommand::Push { order: first }, ms(1000));
    let owner = last_part(&mut world, OWNER);
    assert_eq!(owner.envelope.deadline_ms, 950);
    let other = last_part(&mut world, 1);
    answer_push(&mut world, &other, HELD);
    world.advance(ms(900));
    let awaited = Detail::clipped("/job:worker/task:2 is missing");
    let late = || refused(Refusal::Deadline { waited_ms: 900, awaited: awaited.clone() });
    world.answer(&owner, late());
    let Err(error) = world.reply(op) else { panic!() };
    assert!(error.to_string().contains("/job:worker/task:2 is missing"), "{error}");
    let Error::Timeout { sequence: Some(sequence), .. } = error else { panic!("{error}") };
    // No operation waits, and nothing is sent until the next command.
    world.advance(Duration::from_secs(5));
    assert!(world.sent.is_empty());
    let known = world.call(SessionCommand::Outcome { sequence });
    assert!(matches!(world.reply(known), Ok(Reply::Outcome(None))));
    not_decided(&mut world, sequence, &late());
    assert!(world.sent.is_empty(), "once for each command");
    // An operation waits in vain, and another one.
    let waits = world.call_within(SessionCommand::Await { sequence }, ms(500));
    not_decided(&mut world, sequence, &late());
    assert!(world.reply(waits).unwrap_err().to_string().contains("task:2 is missing"));
    let waits = world.call_within(SessionCommand::Await { sequence }, ms(500));
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 8 } });
    let again = world.parts(OWNER).remove(0);
    assert_eq!((again.envelope.deadline_ms, again.body.len()), (450, 0));
    answer_push(&mut world, &again, ACCEPTED);
    assert_eq!(outcome(&mut world, waits), ACCEPTED);
    assert!(world.sent.is_empty() && world.closed.is_empty());
}

#[test]
fn a_push_that_times_out_names_the_shard_that_is_cut_off_first() {
    let plan = plan(2, 2);
    for refuses in [true, false] {
        let mut world = joined(&plan);
        let first = order(&plan, Some(grant(4, 0)), 1);
        let op = world.call_within(SessionCommand::Push { order: first }, ms(1000));
        let owner = last_part(&mut world, OWNER);
        world.disconnect(1);
        if refuses {
            world.advance(ms(900));
            let awaited = Detail::clipped("the gradients of this step");
            world.answer(&owner, refused(Refusal::Deadline { waited_ms: 900, awaited }));
        } else {
            world.advance(ms(1000));
        }
        let Err(Error::Timeout { awaited, .. }) = world.reply(op) else { panic!() };
        let shards: Vec<_> = awaited.0.iter().map(|awaited| awaited.shard).collect();
        assert_eq!(shards, [shard(1), shard(0)], "{awaited}");
        assert!(!refuses || awaited.to_string().contains("the gradients of this step"));
    }
}

#[test]
fn a_stale_deadline_refusal_ends_no_newer_wait() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let first = order(&plan, Some(grant(4, 0)), 1);
    let op = world.call_within(SessionCommand::Push { order: first }, ms(1000));
    let owner = last_part(&mut world, OWNER);
    world.advance(ms(1000));
    let Err(Error::Timeout { sequence: Some(sequence), .. }) = world.reply(op) else { panic!() };
    let waits = world.call_within(SessionCommand::Await { sequence }, ms(500));
    world.advance(ms(1));
    let awaited = Detail::clipped("straggler");
    let late = refused(Refusal::Deadline { waited_ms: 950, awaited });
    world.answer(&owner, late.clone());
    // That answer was for the first wait: the session asks again for the second.
    not_decided(&mut world, sequence, &late);
    let Err(Error::Timeout { waited, .. }) = world.reply(waits) else { panic!() };
    assert_eq!(waited, ms(1));
}

/// The owner is asked about a push, holds it, and does not decide.
fn not_decided(world: &mut SessionWorld, sequence: Sequence, late: &Message) {
    let query = world.next_frame(OWNER, "OutcomeQuery");
    assert_eq!(query.envelope.sequence, sequence);
    world.answer(&query, OutcomeIs { state: PushState::Receiving { bytes: 8 } });
    let again = world.parts(OWNER).remove(0);
    world.answer(&again, late.clone());
}

#[test]
fn an_undecided_push_is_queried_after_a_reconnect() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    let owner = last_part(&mut world, OWNER);
    let awaited = Detail::clipped("straggler");
    world.answer(&owner, refused(Refusal::Deadline { waited_ms: 1, awaited }));
    world.reply(op).unwrap_err();
    world.reconnect(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: STALE } });
    let sequence = owner.envelope.sequence;
    let known = world.call(SessionCommand::Outcome { sequence });
    assert!(matches!(world.reply(known), Ok(Reply::Outcome(Some(STALE)))));
}

#[test]
fn a_push_cancelled_before_a_shard_holds_it_returns_its_token() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    world.next_frame(OWNER, "Reserve");
    world.cancel(op);
    world.next_frame(OWNER, "Withdraw");
    let back = world.next_frame(OWNER, "ReturnToken");
    // The step has passed in the meantime. The token cannot be returned, which does no harm.
    let token = TokenId(4);
    let generation = 1;
    world.answer(&back, refused(Refusal::Token { token, generation }));
    assert!(world.is_quiet(OWNER) && world.closed.is_empty());
    world.reconnect(OWNER);
    assert!(world.is_quiet(OWNER), "the return is not repeated");
}

#[test]
fn no_token_is_prefetched_in_synchronous_mode() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.push(&plan, 4);
    last_part(&mut world, OWNER);
    world.reconnect(OWNER);
    let query = world.next_frame(OWNER, "OutcomeQuery");
    world.answer(&query, OutcomeIs { state: PushState::Settled { outcome: ACCEPTED } });
    assert_eq!(outcome(&mut world, op), ACCEPTED);
    assert!(world.sent.is_empty(), "no token was requested");
}

/// A cancelled wait for a token does not keep the token from others.
#[test]
fn a_synchronous_token_for_a_cancelled_wait_is_returned() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    world.cancel(op);
    world.answer(&request, message::Granted { grant: grant(8, 3) });
    world.advance(ms(500));
    world.next_frame(OWNER, "ReturnToken");
}

#[test]
fn a_token_wait_names_the_stragglers_at_its_deadline() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    let awaited = Detail::clipped("/job:worker/task:2 is missing");
    world.answer(&request, refused(Refusal::Deadline { waited_ms: 1, awaited }));
    let error = world.reply(op).unwrap_err().to_string();
    assert!(error.contains("/job:worker/task:2 is missing"), "{error}");
}

#[test]
fn a_pull_for_a_token_reads_its_step_on_every_shard() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = pull_for(&mut world, &plan, 5);
    for link in [1, 0] {
        let frame = world.next_frame(link, "Pull");
        assert_eq!(frame.envelope.step, GlobalStep(5), "every shard waits for the step");
        values(&mut world, &frame, 5);
    }
    assert_eq!(pulled(&mut world, &plan, op), (5, vec![5, 5]));
}

#[test]
fn a_pull_is_stale_if_any_shard_has_advanced() {
    for further in [OWNER, 1] {
        for before in [false, true] {
            let plan = plan(2, 2);
            let mut world = joined(&plan);
            let op = pull_for(&mut world, &plan, 5);
            let frames = [world.next_frame(OWNER, "Pull"), world.next_frame(1, "Pull")];
            if before {
                values(&mut world, &frames[1 - further], 5);
            }
            let pulled = Pulled { version: 6, gradients: 6, offset: 0, last: true };
            world.answer_header(&frames[further], GlobalStep(6), pulled, 8);
            assert!(matches!(world.reply(op), Ok(Reply::Stale { .. })));
            assert!(!world.deliver_body(further, &[6; 8]), "the body is discarded");
            if !before {
                let pulled = Pulled { version: 5, gradients: 5, offset: 0, last: true };
                world.answer_header(&frames[1 - further], GlobalStep(5), pulled, 8);
                assert!(!world.deliver_body(1 - further, &[5; 8]));
            }
            // The caller drops the token, which the owner no longer knows.
            world.input(SessionInput::TokenDropped { grant: grant(4, 0) });
            let back = world.next_frame(OWNER, "ReturnToken");
            let token = TokenId(4);
            let generation = 1;
            world.answer(&back, refused(Refusal::Token { token, generation }));
            assert!(world.sent.is_empty() && world.closed.is_empty());
        }
    }
}

#[test]
fn a_shard_that_advances_between_two_parts_makes_a_pull_stale() {
    let plan = plan(1, 4);
    let mut world = joined(&plan);
    let op = pull_for(&mut world, &plan, 5);
    let frame = world.next_frame(OWNER, "Pull");
    let part = |offset, last| Pulled { version: 5, gradients: 5, offset, last };
    world.answer_body(&frame, GlobalStep(5), part(0, false), &[5; 8]);
    world.answer_header(&frame, GlobalStep(6), part(8, true), 8);
    assert!(matches!(world.reply(op), Ok(Reply::Stale { .. })));
    assert!(!world.deliver_body(OWNER, &[6; 8]));
}

#[test]
fn values_of_a_step_before_the_tokens_reset_the_link() {
    let plan = plan(1, 2);
    let mut world = joined(&plan);
    let op = pull_for(&mut world, &plan, 5);
    let frame = world.next_frame(OWNER, "Pull");
    let early = Pulled { version: 4, gradients: 4, offset: 0, last: true };
    world.answer_header(&frame, GlobalStep(4), early, 8);
    assert_eq!(world.closed.get(&OWNER), Some(&1));
    world.wait_for_connect(OWNER);
    world.accept(OWNER);
    let frame = world.next_frame(OWNER, "Pull");
    values(&mut world, &frame, 5);
    assert_eq!(pulled(&mut world, &plan, op), (5, vec![5]));
}

/// Readers and `join` repeat a pull from the shards whose values were of an older step.
#[test]
fn values_of_two_steps_are_never_mixed() {
    for role in [Role::Reader {}, Role::Chief {}] {
        let plan = plan(3, 2);
        let mut world = unjoined(|config| config.role = role).join(&plan);
        let op = world.pull(&plan);
        let frames: Vec<SentFrame> = (0..3).map(|link| world.next_frame(link, "Pull")).collect();
        assert!(frames.iter().all(|frame| frame.envelope.step == GlobalStep(0)));
        values(&mut world, &frames[0], 5);
        values(&mut world, &frames[1], 6);
        let owner = world.next_frame(OWNER, "Pull");
        assert_eq!(owner.envelope.step, GlobalStep(6), "the owner answers at this step");
        assert!(world.is_quiet(1));
        values(&mut world, &frames[2], 6);
        assert!(world.is_pending(op));
        // The owner is a step further when it answers, so all others are asked again.
        values(&mut world, &owner, 7);
        for link in [1, 2] {
            let frame = world.next_frame(link, "Pull");
            assert_eq!(frame.envelope.step, GlobalStep(7));
            values(&mut world, &frame, 7);
        }
        assert_eq!(pulled(&mut world, &plan, op), (7, vec![7, 7, 7]));
        assert!(world.sent.is_empty());
    }
}

#[test]
fn shards_that_stay_at_two_steps_are_named() {
    let plan = plan(2, 2);
    for refuses in [false, true] {
        let mut world = joined(&plan);
        let op = world.pull(&plan);
        let frames = [world.next_frame(OWNER, "Pull"), world.next_frame(1, "Pull")];
        values(&mut world, &frames[0], 6);
        values(&mut world, &frames[1], 5);
        let again = world.next_frame(1, "Pull");
        world.advance(Duration::from_secs(59));
        if refuses {
            let awaited = Detail::clipped("step 6");
            world.answer(&again, refused(Refusal::Deadline { waited_ms: 1, awaited }));
        } else {
            world.advance(Duration::from_secs(1));
        }
        let error = world.reply(op).unwrap_err();
        let Error::Timeout { awaited, .. } = &error else { panic!("{error}") };
        assert_eq!(awaited.0.iter().map(|silent| silent.shard).collect::<Vec<_>>(), [shard(1)]);
        let text = "has the values of step 5, others have step 6";
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_pull_interrupted_by_a_reconnect_is_still_of_one_step() {
    let plan = plan(2, 2);
    let mut world = joined(&plan);
    let op = world.pull(&plan);
    let first = [world.next_frame(OWNER, "Pull"), world.next_frame(1, "Pull")];
    values(&mut world, &first[0], 5);
    world.reconnect(1);
    let again = world.next_frame(1, "Pull");
    assert_eq!(again.envelope.step, GlobalStep(5));
    values(&mut world, &again, 6);
    let owner = world.next_frame(OWNER, "Pull");
    values(&mut world, &owner, 6);
    assert_eq!(pulled(&mut world, &plan, op), (6, vec![6, 6]));
}

#[test]
fn a_streamed_push_sends_an_empty_last_part_to_the_other_shards() {
    let plan = plan(3, 2);
    let mut world = joined(&plan);
    let mut order = order(&plan, Some(grant(4, 0)), 1);
    order.parts.clear();
    let begin = world.call(SessionCommand::Begin { order });
    let Ok(Reply::Begun { sequence }) = world.reply(begin) else { panic!() };
    let parts = Scatter::new(&plan, [VariableId(2)].into_iter())
        .parts(|range| Bytes::from(vec![7; range.len()]));
    let more = world.call(SessionCommand::AddParts { sequence, staged: None, parts });
    world.reply(more).unwrap();
    assert_eq!(last_part(&mut world, 2).part().whole, None);
    assert!(world.sent.is_empty());
    let end = world.call(SessionCommand::End { sequence });
    for (link, bytes) in [(0, 0), (1, 0)] {
        assert_eq!(last_part(&mut world, link).part().whole, Some(bytes));
    }
    assert_eq!(world.parts(2)[0].part().whole, Some(8));
    assert!(world.is_pending(end));
}

/// Returns the refusal of a token request that has waited this long.
fn waits_for(waited_ms: u64, awaited: &str) -> Message {
    refused(Refusal::Deadline { waited_ms, awaited: Detail::clipped(awaited) })
}

#[test]
fn a_token_wait_reports_the_stragglers_at_each_interval() {
    let plan = plan(2, 1);
    let mut world = joined(&plan);
    let token = world.call(SessionCommand::Token);
    for round in 1..=3 {
        let request = world.next_frame(OWNER, "TokenRequest");
        assert_eq!(request.envelope.deadline_ms, 10_000);
        world.advance(Duration::from_secs(10));
        assert_eq!(world.progress.len(), round - 1, "no shard is silent");
        world.answer(&request, waits_for(10_020, "step 4; /job:worker/task:1 (lost)"));
        assert!(world.is_pending(token));
        let (_, silent) = world.progress.last().unwrap();
        let [owner] = &silent.0[..] else { panic!("{silent}") };
        assert_eq!(owner.shard, shard(0));
        assert!(owner.last.ends_with("; step 4; /job:worker/task:1 (lost)"), "{owner}");
        assert_eq!(world.progress.len(), round);
    }
    let request = world.next_frame(OWNER, "TokenRequest");
    world.answer(&request, message::Granted { grant: grant(7, 0) });
    assert!(matches!(world.reply(token), Ok(Reply::Token(Some(_)))));
}

#[test]
fn a_token_wait_ends_at_its_own_deadline_or_by_the_servers_policy() {
    let plan = plan(2, 1);
    let mut world = joined(&plan);
    let token = world.call_within(SessionCommand::Token, Duration::from_secs(15));
    let request = world.next_frame(OWNER, "TokenRequest");
    world.advance(Duration::from_secs(10));
    world.answer(&request, waits_for(10_000, "step 4"));
    let last = world.next_frame(OWNER, "TokenRequest");
    assert_eq!(last.envelope.deadline_ms, 4_950);
    world.advance(ms(4_950));
    world.answer(&last, waits_for(4_950, "step 5"));
    let Err(Error::Refused { refusal: Refusal::Deadline { waited_ms, awaited }, .. }) =
        world.reply(token)
    else {
        panic!("the wait has not ended")
    };
    assert_eq!(
        (waited_ms, awaited.as_str()),
        (14_950, "step 5"),
        "the wait time is that of the whole operation"
    );
    // The policy for lost replicas does not allow a wait.
    let token = world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    world.answer(&request, waits_for(30, "step 5; /job:worker/task:1 (lost)"));
    assert!(matches!(world.reply(token), Err(Error::Refused { .. })));
}

#[test]
fn a_token_is_requested_once_without_progress_reports() {
    let plan = plan(2, 1);
    let mode = ModeIs::Synchronous { replicas_to_aggregate: 2, total_num_replicas: 2 };
    let mut world = SessionWorld::with(|config| config.progress_interval = None);
    world.mode = mode;
    let mut world = world.join(&plan);
    world.call(SessionCommand::Token);
    let request = world.next_frame(OWNER, "TokenRequest");
    assert_eq!(request.envelope.deadline_ms, 59_950);
}
