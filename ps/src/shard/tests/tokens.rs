//! Tokens: training ends at exactly the last step, and no token is lost.

use std::time::Duration;

use pushpull_common::ids::{GlobalStep, TokenId};
use pushpull_common::protocol::message::{self, EndReason};
use pushpull_common::protocol::{Grant, Message, Outcome, Refusal};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::PsConfig;

const LEASE: Duration = Duration::from_secs(5);

fn ready(configure: impl Fn(PsConfig) -> PsConfig) -> (World, ConnectionId, ConnectionId) {
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), configure);
    world.disconnect(chief[0]);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    (world, a, b)
}

fn ask() -> Message {
    message::TokenRequest { newest: TokenId(u64::MAX) }.into()
}

fn return_token(grant: Grant) -> Message {
    message::ReturnToken { token: grant.token, generation: grant.generation }.into()
}

fn spend(
    world: &mut World,
    line: ConnectionId,
    sequence: u64,
    grant: Grant,
) -> message::PushAnswer {
    let push_slot = world.push_slot(line);
    let push = Push { next: true, ..Push::gradient(sequence, grant, push_slot) };
    match world.push_answer(line, &push, &[(0, &bytes_of(&[1_f32, 1.0, 1.0]))]) {
        Message::PushAnswer(answer) => answer,
        other => panic!("not applied but {other:?}"),
    }
}

#[test]
fn many_clients_reach_exactly_the_last_step() {
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), |c| c.last_step(37));
    world.disconnect(chief[0]);
    let lines: Vec<ConnectionId> = (1..=10).map(|task| world.join(0, &mut worker(task))).collect();
    let mut waiting: Vec<_> = lines.iter().map(|&line| (line, world.say(line, ask()))).collect();
    let mut sequence = 0;
    let mut steps = 0;
    let mut ended = 0;
    while let Some((line, request)) = waiting.pop() {
        match world.answer(line, request) {
            Some(Message::Granted(granted)) => {
                sequence += 1;
                let answer = spend(&mut world, line, sequence, granted.grant);
                steps += 1;
                let Outcome::Applied { step, .. } = answer.outcome else { panic!() };
                assert_eq!(step, GlobalStep(steps));
                match answer.next {
                    Some(grant) => {
                        assert_eq!(grant.step, step);
                        world.ask(line, return_token(grant));
                        waiting.insert(0, (line, world.say(line, ask())));
                    }
                    None if answer.ended.is_none() => {
                        waiting.insert(0, (line, world.say(line, ask())));
                    }
                    None => ended += 1,
                }
            }
            Some(Message::Ended(end)) => {
                assert_eq!((end.reason, steps), (EndReason::LastStep {}, 37));
                ended += 1;
            }
            None => waiting.insert(0, (line, request)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((steps, ended, world.metrics().global_step), (37, 10, 37));
}

#[test]
fn a_client_that_waits_for_the_last_step_gets_it_once_its_token_is_returned() {
    let (mut world, a, b) = ready(|config| config.last_step(1));
    let grant = world.token(a);
    let waiting = world.say(b, ask());
    assert_eq!(world.answer(b, waiting), None);
    assert!(
        matches!(world.refused(b, return_token(grant)), Refusal::Token { .. }),
        "another client holds it"
    );
    assert!(matches!(world.ask(a, return_token(grant)), Message::Returned(_)));
    let Some(Message::Granted(granted)) = world.answer(b, waiting) else {
        panic!("no token is granted")
    };
    assert_ne!(granted.grant.token, grant.token, "the token is a new one");
    assert!(
        matches!(world.refused(a, return_token(grant)), Refusal::Token { .. }),
        "the token is gone"
    );
    let waiting = world.say(a, ask());
    let answer = spend(&mut world, b, 1, granted.grant);
    // Waiting clients are served first, and all of them learn of the end.
    assert_eq!((answer.next, answer.ended), (None, None));
    let end = world.answer(a, waiting);
    assert_eq!(end, Some(message::Ended { reason: EndReason::LastStep {} }.into()));
    assert_eq!(world.ask(b, ask()), message::Ended { reason: EndReason::LastStep {} }.into());
}

// S-7.
#[test]
fn finish_ends_the_waits_and_a_token_that_is_out_may_be_spent() {
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), |c| c.last_step(1));
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    let grant = world.token(a);
    let waiting = world.say(b, ask());
    assert!(matches!(world.ask(chief[0], message::Finish {}.into()), Message::Finished(_)));
    let ended: Message = message::Ended { reason: EndReason::Finished {} }.into();
    assert_eq!(world.answer(b, waiting), Some(ended.clone()));
    let answer = spend(&mut world, a, 1, grant);
    assert_eq!(answer.ended, Some(EndReason::Finished {}));
    assert_eq!(world.ask(a, ask()), ended);
}

#[test]
fn the_token_of_a_lost_client_goes_to_a_waiting_client_and_not_to_itself() {
    let (mut world, a, b) = ready(|config| config.last_step(1));
    let grant = world.token(a);
    // Both clients wait; the one that will be lost was first.
    let own = world.say(a, ask());
    let waiting = world.say(b, ask());
    world.pass(LEASE, &[b]);
    assert!(world.closed.contains(&a));
    assert_eq!(world.answer(a, own), None);
    let Some(Message::Granted(granted)) = world.answer(b, waiting) else {
        panic!("no token is granted")
    };
    assert_ne!(granted.grant.token, grant.token);
    assert_eq!(world.metrics().tokens_taken_back, 1);
}

#[test]
fn a_leaving_client_returns_its_tokens_and_receives_no_more() {
    let (mut world, a, b) = ready(|config| config.last_step(2));
    world.token(a);
    world.token(b);
    let own = world.say(a, ask());
    let waiting = world.say(b, ask());
    assert!(matches!(world.ask(a, message::Leave {}.into()), Message::Left(_)));
    assert_eq!(world.answer(a, own), None, "the client has left");
    assert!(matches!(world.answer(b, waiting), Some(Message::Granted(_))));
    let refusal = world.refused(a, ask());
    assert!(matches!(refusal, Refusal::Unsupported { .. }), "it has left: {refusal}");
    let refusal = world.refused(a, message::Reserve {}.into());
    assert!(matches!(refusal, Refusal::Unsupported { .. }), "it has left: {refusal}");
}

#[test]
fn a_request_that_waited_on_a_replaced_connection_takes_no_token() {
    let (mut world, a, b) = ready(|config| config.last_step(1));
    let grant = world.token(b);
    world.say(a, ask());
    let mut peer = worker(1);
    let again = world.join(0, &mut peer);
    world.ask(b, return_token(grant));
    let granted = world.token(again);
    assert_ne!(granted.token, grant.token);
    assert!(world.received[&a].is_empty(), "nothing was granted over the replaced connection");
}

#[test]
fn a_lost_grant_is_given_again() {
    let (mut world, a, _) = ready(|config| config.last_step(2));
    let first = world.token_after(a, TokenId(0));
    let second = world.token_after(a, first.token);
    assert_ne!(first.token, second.token);
    world.disconnect(a);
    let mut peer = worker(1);
    let a = world.join(0, &mut peer);
    assert_eq!(
        world.token_after(a, first.token).token,
        second.token,
        "the client does not know the second token"
    );
    assert_eq!(world.token_after(a, TokenId(0)).token, first.token);
    let waiting = world.say(a, message::TokenRequest { newest: second.token }.into());
    assert_eq!(world.answer(a, waiting), None, "the client knows both tokens");
}

#[test]
fn a_token_held_too_long_goes_to_another_and_its_push_is_refused() {
    let timeout = Duration::from_secs(20);
    let (mut world, a, b) = ready(|config| config.last_step(1).token_timeout(Some(timeout)));
    let grant = world.token(a);
    let waiting = world.say(b, ask());
    world.pass(timeout - Duration::from_millis(50), &[a, b]);
    assert_eq!(world.answer(b, waiting), None);
    world.pass(Duration::from_millis(50), &[a, b]);
    assert!(matches!(world.answer(b, waiting), Some(Message::Granted(_))));
    let push_slot = world.push_slot(a);
    let push = Push::gradient(1, grant, push_slot);
    let Message::Refused(refused) = world.push_answer(a, &push, &[(0, &[0; 16])]) else { panic!() };
    let token = grant.token;
    let generation = grant.generation;
    assert_eq!(refused.refusal, Refusal::Token { token, generation });
}

#[test]
fn a_pause_of_the_server_takes_no_token_back() {
    let timeout = Duration::from_secs(20);
    let (mut world, a, b) = ready(|config| config.last_step(1).token_timeout(Some(timeout)));
    world.token(a);
    let waiting = world.say(b, ask());
    world.pass(Duration::from_secs(1), &[a, b]);
    world.now += Duration::from_secs(100);
    world.pass(Duration::from_secs(18), &[a, b]);
    assert_eq!((world.answer(b, waiting), world.members[0]), (None, (3, 2)));
    world.pass(Duration::from_millis(1100), &[a, b]);
    assert!(matches!(world.answer(b, waiting), Some(Message::Granted(_))));
}

// S-4.
#[test]
fn a_restarted_client_returns_its_tokens_but_not_those_of_whole_pushes() {
    let (mut world, a, b) = ready(|config| config.last_step(2));
    let spent = world.token(a);
    let _unspent = world.token(a);
    let waiting = world.say(b, ask());
    let push_slot = world.push_slot(a);
    world.push(a, &Push::gradient(1, spent, push_slot), &[(0, &bytes_of(&[1_f32, 1.0, 1.0]))]);
    let mut again = worker(1).restarted();
    let again = world.join(0, &mut again);
    assert!(
        matches!(world.answer(b, waiting), Some(Message::Granted(_))),
        "one token was returned"
    );
    // The new incarnation knows no token. The one of the whole push is not granted again.
    let waiting = world.say(again, message::TokenRequest { newest: TokenId(0) }.into());
    assert_eq!(world.answer(again, waiting), None);
    world.work();
    assert_eq!(world.metrics().global_step, 1, "the whole push belongs to the server");
    assert!(world.received[&again].is_empty(), "its answer is sent to nobody");
}

// S-4.
#[test]
fn whole_pushes_of_lost_and_leaving_clients_keep_their_tokens() {
    for leaves in [false, true] {
        let (mut world, a, b) = ready(|config| config.last_step(1));
        let grant = world.token(a);
        let push_slot = world.push_slot(a);
        world.push(a, &Push::gradient(1, grant, push_slot), &[(0, &bytes_of(&[1_f32, 1.0, 1.0]))]);
        let waiting = world.say(b, ask());
        assert!(matches!(world.refused(a, return_token(grant)), Refusal::Token { .. }));
        if leaves {
            world.say(a, message::Leave {}.into());
        } else {
            world.pass(LEASE, &[b]);
        }
        assert_eq!(world.answer(b, waiting), None, "its step is promised");
        world.work();
        let ended = message::Ended { reason: EndReason::LastStep {} };
        assert_eq!(world.answer(b, waiting), Some(ended.into()));
    }
}
