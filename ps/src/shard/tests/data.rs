//! The declared data set: which batch each token has, and what becomes of it.

use std::time::Duration;

use pushpull_common::data_set::{DataSet, SampleRange};
use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message::{self, DeclareData, EndReason};
use pushpull_common::protocol::{Grant, Message, Outcome, Refusal};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::{Asynchronous, PsConfig};
use crate::shard::TICK;

/// Two epochs of 7 samples in batches of 3.
fn data_set() -> DataSet {
    DataSet::new("train", 7, 3).unwrap().shuffle(5).epochs(2)
}

fn declare(set: &DataSet) -> Message {
    DeclareData::from(set).into()
}

fn ready(configure: impl Fn(PsConfig) -> PsConfig) -> (World, ConnectionId, ConnectionId) {
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), configure);
    world.disconnect(chief[0]);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    for line in [a, b] {
        let declared = world.ask(line, declare(&data_set()));
        assert!(matches!(declared, Message::DataDeclared(_)), "{declared:?}");
    }
    (world, a, b)
}

/// Returns the epoch, the start and the length of the samples of a grant.
fn samples(grant: Grant) -> (u64, u64, u32) {
    let SampleRange { epoch, start, len } = grant.samples.expect("a data set is declared");
    (epoch, start, len)
}

fn spend(world: &mut World, line: ConnectionId, sequence: u64, grant: Grant) -> Outcome {
    let push = Push::gradient(sequence, grant, world.push_slot(line));
    match world.push_answer(line, &push, &[(0, &bytes_of(&[1_f32, 1.0, 1.0]))]) {
        Message::PushAnswer(answer) => answer.outcome,
        other => panic!("not applied but {other:?}"),
    }
}

fn ask() -> Message {
    message::TokenRequest { newest: TokenId(u64::MAX) }.into()
}

#[test]
fn every_batch_is_granted_once_and_then_the_data_end() {
    let (mut world, a, b) = ready(|config| config);
    let expected = [(0, 0, 3), (0, 3, 3), (0, 6, 1), (1, 0, 3), (1, 3, 3), (1, 6, 1)];
    let mut seen = Vec::new();
    for sequence in 1..=3 {
        for line in [a, b] {
            let grant = world.token(line);
            assert_ne!(grant.samples, grant.ahead, "it reads another batch ahead");
            seen.push(samples(grant));
            assert!(matches!(spend(&mut world, line, sequence, grant), Outcome::Applied { .. }));
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, expected);
    for line in [a, b] {
        let ended = world.ask(line, ask());
        assert_eq!(ended, message::Ended { reason: EndReason::DataEnd {} }.into());
    }
}

#[test]
fn a_restarted_server_resumes_at_the_position() {
    let (mut world, a, b) = ready(|config| config);
    let held = world.token(a);
    let spent = world.token(b);
    assert!(matches!(spend(&mut world, b, 1, spent), Outcome::Applied { .. }));
    world.restart(0).unwrap();
    let b = world.join(0, &mut worker(3));
    world.ask(b, declare(&data_set()));
    let mut rest: Vec<_> = (0..4).map(|_| samples(world.token(b))).collect();
    rest.extend([held, spent].map(samples));
    rest.sort_unstable();
    assert_eq!(rest, [(0, 0, 3), (0, 3, 3), (0, 6, 1), (1, 0, 3), (1, 3, 3), (1, 6, 1)]);
}

#[test]
fn a_client_waits_for_batches_that_others_hold_at_the_end() {
    let (mut world, a, b) = ready(|config| config);
    let grants: Vec<Grant> = (0..6).map(|_| world.token(a)).collect();
    let waiting = world.say(b, ask());
    assert_eq!(world.answer(b, waiting), None);
    let last = grants[5];
    let token = last.token;
    let generation = last.generation;
    world.ask(a, message::ReturnToken { token, generation }.into());
    let Some(Message::Granted(granted)) = world.answer(b, waiting) else { panic!() };
    assert_eq!(samples(granted.grant), samples(last));
}

#[test]
fn the_batch_of_a_skipped_token_is_never_granted_again() {
    let (mut world, a, b) = ready(|config| config);
    let grant = world.token(a);
    let token = grant.token;
    let generation = grant.generation;
    let skip = || -> Message { message::SkipBatch { token, generation }.into() };
    assert_eq!(world.ask(a, skip()), message::Returned {}.into());
    assert_eq!(world.refused(a, skip()), Refusal::Token { token, generation });
    let mut rest: Vec<_> = (0..5).map(|_| samples(world.token(b))).collect();
    rest.sort_unstable();
    assert_eq!(rest, [(0, 3, 3), (0, 6, 1), (1, 0, 3), (1, 3, 3), (1, 6, 1)]);
    assert_eq!(world.metrics().batches_skipped, 1);
}

#[test]
fn the_batch_of_a_stale_gradient_is_granted_again() {
    let mode = || Asynchronous::default().reject_older(0);
    let (mut world, a, b) = ready(|config| config.mode(mode()));
    let old = world.token(a);
    let young = world.token(b);
    assert!(matches!(spend(&mut world, b, 1, young), Outcome::Applied { .. }));
    assert!(matches!(spend(&mut world, a, 1, old), Outcome::Stale { .. }));
    assert_eq!(samples(world.token(b)), samples(old));
}

#[test]
fn other_data_are_refused_by_their_first_difference() {
    let (mut world, a, _) = ready(|config| config);
    let refused = |world: &mut World, set: DataSet| match world.refused(a, declare(&set)) {
        Refusal::DataSet { differs } => differs.to_string(),
        other => panic!("{other:?}"),
    };
    let of = |text: &str| format!("of the declared data set {text}");
    let other = DataSet::new("train", 8, 3).unwrap().shuffle(5).epochs(2);
    assert_eq!(refused(&mut world, other), of("samples is 7, not 8"));
    assert_eq!(refused(&mut world, data_set().shuffle(6)), of("seed is 5, not 6"));
    assert_eq!(
        refused(&mut world, data_set().drop_remainder(true)),
        of("drop_remainder is false, not true")
    );
    let again = world.ask(a, declare(&data_set()));
    assert_eq!(again, message::DataDeclared { begun: 0, unspent: 0 }.into());
    // A declaration that no honest client sends.
    let mut hostile = DeclareData::from(&data_set());
    hostile.batch = 0;
    assert!(matches!(world.refused(a, hostile.into()), Refusal::Unsupported { .. }));
}

/// A training is extended by its first reader, for example after a restart. While others read, two
/// numbers of epochs are a mistake.
#[test]
fn a_training_continues_with_more_epochs_unless_others_read() {
    let (mut world, a, b) = ready(|config| config);
    for sequence in 1..=6 {
        let grant = world.token(a);
        spend(&mut world, a, sequence, grant);
    }
    let over = message::Ended { reason: EndReason::DataEnd {} };
    assert_eq!(world.ask(a, ask()), over.clone().into());
    let longer = data_set().epochs(3);
    let Refusal::DataSet { differs } = world.refused(a, declare(&longer)) else { panic!() };
    assert_eq!(differs.to_string(), "of the declared data set epochs is 2, not 3");
    world.ask(b, message::Leave {}.into());
    let extended = world.ask(a, declare(&longer));
    assert_eq!(extended, message::DataDeclared { begun: 6, unspent: 0 }.into());
    let shorter = world.refused(a, declare(&data_set()));
    assert!(matches!(shorter, Refusal::DataSet { .. }), "{shorter}");
    for (sequence, expected) in (7..).zip([(2, 0, 3), (2, 3, 3), (2, 6, 1)]) {
        let grant = world.token(a);
        assert_eq!(samples(grant), expected);
        spend(&mut world, a, sequence, grant);
    }
    assert_eq!(world.ask(a, ask()), over.into());
}

#[test]
fn a_client_without_data_gets_no_token_beside_clients_with_data() {
    let (mut world, _, _) = ready(|config| config);
    let line = world.join(0, &mut worker(3));
    let Refusal::DataSet { differs } = world.refused(line, ask()) else { panic!() };
    assert_eq!(differs.to_string(), "this worker has not declared the data set \"train\"");
}

/// A worker that has pushed without data would otherwise get no token any more.
#[test]
fn data_are_not_declared_beside_a_worker_that_has_trained_without() {
    for restarts in [false, true] {
        let lease = Duration::from_secs(5);
        let (mut world, chief) =
            World::ready(variables(), Sgd::new(1.0), |config| config.lease(lease));
        world.disconnect(chief[0]);
        let a = world.join(0, &mut worker(1));
        let grant = world.token(a);
        spend(&mut world, a, 1, grant);
        if restarts {
            world.restart(0).unwrap();
        }
        let mut late = worker(2);
        let b = world.join(0, &mut late);
        let Refusal::DataSet { differs } = world.refused(b, declare(&data_set())) else { panic!() };
        assert_eq!(differs.to_string(), "/job:worker/task:1 trains without a data set");
        match restarts {
            // Nothing is heard from it after the restart.
            true => world.pass(lease + 2 * TICK, &[b]),
            false => drop(world.ask(a, message::Leave {}.into())),
        }
        assert!(matches!(world.ask(b, declare(&data_set())), Message::DataDeclared(_)));
    }
}

#[test]
fn data_are_not_declared_while_tokens_without_a_batch_are_held() {
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), |config| config);
    world.disconnect(chief[0]);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    let grant = world.token(a);
    assert_eq!((grant.samples, grant.ahead), (None, None));
    let Refusal::DataSet { differs } = world.refused(b, declare(&data_set())) else { panic!() };
    assert!(differs.to_string().starts_with("1 tokens without a batch"), "{differs}");
    let token = grant.token;
    let generation = grant.generation;
    world.ask(a, message::ReturnToken { token, generation }.into());
    assert!(matches!(world.ask(b, declare(&data_set())), Message::DataDeclared(_)));
}
