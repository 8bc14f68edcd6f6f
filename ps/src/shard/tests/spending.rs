//! A token is spent once, by its holder, on a gradient.

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Grant, Message, Refusal};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::PsConfig;

fn ready(configure: impl Fn(PsConfig) -> PsConfig) -> (World, ConnectionId, ConnectionId) {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), configure);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    (world, a, b)
}

#[test]
fn two_pushes_under_one_token_are_one_step() {
    let (mut world, a, _) = ready(|config| config.last_step(1).inbox_pushes(2));
    let grant = world.token(a);
    let body = bytes_of(&[1_f32, 1.0, 1.0]);
    let push_slot = world.push_slot(a);
    let first = world.push(a, &Push::gradient(1, grant, push_slot), &[(0, &body)]);
    let push_slot = world.push_slot(a);
    let second = world.push(a, &Push::gradient(2, grant, push_slot), &[(0, &body)]);
    world.work();
    assert!(matches!(world.answer(a, first), Some(Message::PushAnswer(_))));
    let Some(Message::Refused(refused)) = world.answer(a, second) else { panic!("spent") };
    assert!(matches!(refused.refusal, Refusal::Token { .. }));
    assert_eq!(world.metrics().global_step, 1);
}

#[test]
fn an_assignment_does_not_hold_a_token() {
    let (mut world, a, b) = ready(|config| config.last_step(1));
    let grant = world.token(a);
    let push_slot = world.push_slot(b);
    let push = Push { grant, ..Push::plain(1, Operation::Assign {}, push_slot) };
    world.push(b, &push, &[(32, &[0; 16])]);
    let token = grant.token;
    let generation = grant.generation;
    let returned = world.say(a, message::ReturnToken { token, generation }.into());
    assert!(matches!(world.answer(a, returned), Some(Message::Returned(_))));
}

#[test]
fn a_gradient_needs_a_token() {
    let (mut world, a, b) = ready(|config| config);
    let grant = world.token(a);
    let none = Grant { token: TokenId(0), ..grant };
    let older = Grant { generation: grant.generation + 1, ..grant };
    for (sequence, line, grant) in [(1, a, none), (2, a, older), (3, b, grant)] {
        let push_slot = world.push_slot(line);
        let push = Push::gradient(sequence, grant, push_slot);
        let answer = world.push_answer(line, &push, &[(0, &[0; 16])]);
        let Message::Refused(refused) = answer else { panic!("{answer:?}") };
        assert!(matches!(refused.refusal, Refusal::Token { .. }), "{}", refused.refusal);
    }
    assert_eq!((world.metrics().global_step, world.metrics().pushes_dropped), (0, 3));
}

#[test]
fn a_shard_that_does_not_own_the_step_checks_holder_and_use_of_a_token() {
    let (mut world, lines) =
        World::ready(variables(), Sgd::new(1.0), |config| config.shards(2).inbox_pushes(3));
    let before = world.values(lines[1]);
    let mut b0 = worker(1);
    let mut b1 = worker(1);
    let other = world.join(0, &mut b0);
    b1.epoch = b0.epoch;
    let other = [other, world.join(1, &mut b1)];
    let grant = world.token(lines[0]);
    let of_other = world.token(other[0]);
    let made_up = Grant { token: TokenId(99), ..grant };
    let huge = Grant { token: TokenId(u64::MAX), ..grant };
    let none = Grant { token: TokenId(0), generation: 0, ..grant };
    let push = |world: &mut World, line: ConnectionId, sequence: u64, grant: Grant| {
        let push_slot = world.push_slot(line);
        world.push_answer(
            line,
            &Push::gradient(sequence, grant, push_slot),
            &[(0, &bytes_of(&[1_f64; 2]))],
        )
    };
    let mut sequence = 0;
    for wrong in [none, made_up, huge, of_other, Grant { generation: 1, ..grant }] {
        sequence += 1;
        let answer = push(&mut world, lines[1], sequence, wrong);
        let Message::Refused(refused) = answer else { panic!("{wrong:?}: {answer:?}") };
        assert!(matches!(refused.refusal, Refusal::Token { .. }), "{}", refused.refusal);
        assert_eq!(world.values(lines[1]), before, "a refusal changes nothing");
    }
    let answer = push(&mut world, lines[1], 10, grant);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    let answer = push(&mut world, other[1], 1, of_other);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    // A spent token stays spent for the next process.
    world.restart(1).unwrap();
    let mut first = super::peers::chief();
    first.epoch = pushpull_common::ids::ClientEpoch(1);
    let again = world.join(1, &mut first);
    let answer = push(&mut world, again, 11, grant);
    assert!(matches!(answer, Message::Refused(_)), "{answer:?}");
}

#[test]
fn an_answer_with_a_newer_token_never_hides_a_lost_one() {
    let (mut world, a, _) = ready(|config| config.last_step(2).inbox_pushes(2));
    let first = world.token_after(a, TokenId(0));
    // The answer with the second token is lost: the client knows only the first.
    let lost = world.token_after(a, first.token);
    let push_slot = world.push_slot(a);
    let push = Push::gradient(1, first, push_slot);
    let Message::PushAnswer(answer) = world.push_answer(a, &push, &[(0, &bytes_of(&[1_f32; 3]))])
    else {
        panic!("not applied")
    };
    assert_eq!(answer.next, None, "it would be newer than the lost one");
    assert_eq!(world.token_after(a, first.token).token, lost.token);
}
