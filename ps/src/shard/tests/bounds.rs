//! Bounded staleness in asynchronous mode: no replica runs far ahead, and no gradient that is too
//! old is applied.

use std::time::Duration;

use pushpull_common::ids::{RequestId, TokenId};
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, Refusal, message};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Peer, Push, bytes_of, f64s, worker};
use super::world::{ConnectionId, World};
use crate::config::{Asynchronous, PsConfig};
use crate::shard::TICK;

/// Workers that train one variable of two elements, at a learning rate of 1.
struct BoundedWorkers {
    world: World,
    peers: Vec<Peer>,
    lines: Vec<ConnectionId>,
    sequences: Vec<u64>,
}

impl BoundedWorkers {
    /// Creates workers of one variable of two elements.
    fn new(count: u32, configure: impl Fn(PsConfig) -> PsConfig) -> BoundedWorkers {
        BoundedWorkers::of(&["w"], count, configure)
    }

    /// Creates workers of variables of two elements each.
    fn of(names: &[&str], count: u32, configure: impl Fn(PsConfig) -> PsConfig) -> BoundedWorkers {
        let pair = |name: &&str| VariableSpec::new(*name, DType::F64, Shape::new([2]).unwrap());
        let variables = names.iter().map(|name| pair(name).unwrap()).collect();
        let (mut world, chief) = World::ready(variables, Sgd::new(1.0), configure);
        world.disconnect(chief[0]);
        let mut peers: Vec<Peer> = (1..=count).map(worker).collect();
        let lines = peers.iter_mut().map(|peer| world.join(0, peer)).collect();
        BoundedWorkers { world, sequences: vec![0; peers.len()], peers, lines }
    }

    fn ask(&mut self, index: usize, newest: u64) -> RequestId {
        let newest = TokenId(newest);
        self.world.say(self.lines[index], message::TokenRequest { newest }.into())
    }

    fn answer(&mut self, index: usize, request: RequestId) -> Option<Grant> {
        match self.world.answer(self.lines[index], request)? {
            Message::Granted(granted) => Some(granted.grant),
            other => panic!("no token but {other:?}"),
        }
    }

    fn token(&mut self, index: usize) -> Option<Grant> {
        let request = self.ask(index, u64::MAX);
        self.answer(index, request)
    }

    fn begin(&mut self, index: usize, grant: Grant, next: bool) -> Push {
        self.sequences[index] += 1;
        let push_slot = self.world.push_slot(self.lines[index]);
        Push { next, ..Push::gradient(self.sequences[index], grant, push_slot) }
    }

    fn push_for(&mut self, index: usize, grant: Grant, next: bool) -> message::PushAnswer {
        let push = self.begin(index, grant, next);
        let body = bytes_of(&[1.0, 1.0]);
        match self.world.push_answer(self.lines[index], &push, &[(0, &body)]) {
            Message::PushAnswer(answer) => answer,
            other => panic!("not answered but {other:?}"),
        }
    }

    fn push(&mut self, index: usize, grant: Grant) -> Outcome {
        self.push_for(index, grant, false).outcome
    }

    /// Requests a token and pushes a gradient. Returns whether it was applied.
    fn train(&mut self, index: usize) -> bool {
        let grant = self.token(index);
        grant.is_some_and(|grant| matches!(self.push(index, grant), Outcome::Applied { .. }))
    }

    fn has_ended(&mut self, index: usize) -> bool {
        let request = self.ask(index, u64::MAX);
        matches!(self.world.answer(self.lines[index], request), Some(Message::Ended(_)))
    }

    fn value(&mut self) -> f64 {
        let values = f64s(&self.world.values(self.lines[0]));
        assert_eq!(values[0], values[1]);
        values[0]
    }

    fn pass(&mut self, time: Duration, alive: &[usize]) {
        let alive: Vec<ConnectionId> = alive.iter().map(|&index| self.lines[index]).collect();
        self.world.pass(time, &alive);
    }
}

#[test]
fn a_replica_that_is_ahead_waits_for_the_slowest() {
    let mut workers =
        BoundedWorkers::new(3, |config| config.mode(Asynchronous::default().wait_ahead(2)));
    let slow = workers.token(2).unwrap();
    assert!(workers.train(0) && workers.train(0) && workers.train(1));
    let ahead = workers.ask(0, u64::MAX);
    assert_eq!(workers.answer(0, ahead), None, "it has pushed two more than the slowest");
    assert!(workers.train(1));
    let behind_it = workers.ask(1, u64::MAX);
    assert_eq!(workers.answer(1, behind_it), None);
    // Slower replicas overtake those that wait, and one gradient of the slowest lets both continue.
    let answer = workers.push_for(2, slow, true);
    assert!(answer.next.is_some(), "the slowest replica does not wait");
    assert!(workers.answer(0, ahead).is_some() && workers.answer(1, behind_it).is_some());
    assert_eq!(workers.token(0), None, "a gradient that is being computed counts");
    assert_eq!(workers.world.metrics().gradients_applied, 5);
}

#[test]
fn a_wait_for_the_slowest_replica_names_it() {
    let mut workers =
        BoundedWorkers::new(2, |config| config.mode(Asynchronous::default().wait_ahead(1)));
    assert!(workers.token(1).is_some() && workers.train(0));
    let newest = TokenId(u64::MAX);
    let envelope = Envelope { deadline_ms: 300, ..Envelope::default() };
    let request = workers.world.send(
        workers.lines[0],
        envelope,
        message::TokenRequest { newest }.into(),
        &[],
    );
    workers.pass(Duration::from_millis(300) + TICK, &[0, 1]);
    let Some(Message::Refused(refused)) = workers.world.answer(workers.lines[0], request) else {
        panic!("the request waits beyond its deadline")
    };
    let Refusal::Deadline { awaited, .. } = refused.refusal else { panic!() };
    let awaited = awaited.to_string();
    let expected =
        "the slowest replicas, which have made 0 gradients: /job:worker/task:2 (heard from";
    assert!(awaited.starts_with(expected), "{awaited}");
}

#[test]
fn absent_and_idle_replicas_are_not_waited_for() {
    let lease = Duration::from_secs(5);
    for leaves in [true, false] {
        let mut workers = BoundedWorkers::new(3, |config| {
            config.mode(Asynchronous::default().wait_ahead(1)).lease(lease)
        });
        assert!(workers.token(1).is_some());
        // The third replica has joined, but requests no token.
        assert!(workers.train(0));
        let ahead = workers.ask(0, u64::MAX);
        assert_eq!(workers.answer(0, ahead), None);
        match leaves {
            true => _ = workers.world.ask(workers.lines[1], message::Leave {}.into()),
            false => workers.pass(lease + 2 * TICK, &[0, 2]),
        }
        let grant = workers.answer(0, ahead).expect("no replica is behind");
        assert!(matches!(workers.push(0, grant), Outcome::Applied { .. }));
        // A replica that comes back begins where the others are.
        workers.peers[1] = workers.peers[1].restarted();
        workers.lines[1] = workers.world.join(0, &mut workers.peers[1]);
        workers.sequences[1] = 0;
        let back = workers.token(1).unwrap();
        let next = workers.token(0).unwrap();
        workers.push(0, next);
        let ahead = workers.ask(0, u64::MAX);
        assert_eq!(workers.answer(0, ahead), None);
        workers.push(1, back);
        assert!(workers.answer(0, ahead).is_some());
    }
}

#[test]
fn a_killed_step_owner_knows_the_progress_of_each_replica() {
    let mut workers =
        BoundedWorkers::new(2, |config| config.mode(Asynchronous::default().wait_ahead(3)));
    let slow = workers.token(1).unwrap();
    assert!(workers.train(0) && workers.train(0));
    workers.world.restart(0).unwrap();
    for index in [0, 1] {
        workers.lines[index] = workers.world.join(0, &mut workers.peers[index]);
    }
    assert!(workers.train(0));
    let ahead = workers.ask(0, u64::MAX);
    assert_eq!(workers.answer(0, ahead), None);
    assert!(matches!(workers.push(1, slow), Outcome::Applied { .. }));
    let grant = workers.answer(0, ahead).unwrap();
    workers.push(0, grant);
    assert_eq!(workers.value(), -5.0);
}

#[test]
fn gradients_that_are_too_old_are_dropped_as_stale() {
    let mut workers =
        BoundedWorkers::new(2, |config| config.mode(Asynchronous::default().reject_older(1)));
    let [old, older] = [workers.token(1).unwrap(), workers.token(1).unwrap()];
    assert!(workers.train(0));
    assert!(matches!(workers.push(1, old), Outcome::Applied { staleness: 1, .. }));
    let stale = Outcome::Stale { current: 2.into() };
    let answer = workers.push_for(1, older, true);
    assert_eq!((answer.outcome, answer.duplicate, answer.next), (stale, false, None));
    assert_eq!(workers.value(), -2.0);
    // A resend has the same outcome, and the token is gone.
    workers.sequences[1] -= 1;
    let again = workers.push_for(1, older, false);
    assert_eq!((again.outcome, again.duplicate), (stale, true));
    let back = message::ReturnToken { token: older.token, generation: older.generation };
    let refused = workers.world.refused(workers.lines[1], back.into());
    assert!(matches!(refused, Refusal::Token { .. }), "{refused:?}");
    let metrics = workers.world.metrics();
    assert_eq!(
        (metrics.gradients_applied, metrics.gradients_stale, metrics.global_step),
        (2, 1, 2)
    );
    // A pull under the token makes the gradient fresh again.
    let young = workers.token(1).unwrap();
    assert!(workers.train(0) && workers.train(0));
    let read = Grant { step: 4.into(), ..young };
    assert!(matches!(workers.push(1, read), Outcome::Applied { staleness: 0, .. }));
}

#[test]
fn a_gradient_that_becomes_too_old_while_it_arrives_is_dropped_whole() {
    let mut workers =
        BoundedWorkers::new(3, |config| config.mode(Asynchronous::default().reject_older(0)));
    let old = workers.token(1).unwrap();
    let push = workers.begin(1, old, false);
    let line = workers.lines[1];
    let half = bytes_of(&[9.0]);
    // The first half is fresh enough, and is applied to shadow blocks.
    workers.world.send(line, push.envelope(), push.part(0, None), &half);
    assert!(workers.train(0));
    let request = workers.world.send(line, push.envelope(), push.part(8, Some(16)), &half);
    let Some(Message::PushAnswer(answer)) = workers.world.answer(line, request) else {
        panic!("the push is not answered")
    };
    assert_eq!(answer.outcome, Outcome::Stale { current: 1.into() });
    assert_eq!(workers.value(), -1.0);
    // Two pushes are whole at once, and the first makes the second too old.
    let grants = [1, 2].map(|index| workers.token(index).unwrap());
    let body = bytes_of(&[1.0, 1.0]);
    let requests: Vec<RequestId> = [1, 2]
        .into_iter()
        .zip(grants)
        .map(|(index, grant)| {
            let push = workers.begin(index, grant, false);
            workers.world.send(workers.lines[index], push.envelope(), push.part(0, Some(16)), &body)
        })
        .collect();
    workers.world.work();
    let outcomes = [1, 2].map(|index| {
        let answer = workers.world.answer(workers.lines[index], requests[index - 1]);
        let Some(Message::PushAnswer(answer)) = answer else { panic!("the push is not answered") };
        answer.outcome
    });
    assert!(matches!(outcomes[0], Outcome::Applied { staleness: 0, .. }));
    assert_eq!(outcomes[1], Outcome::Stale { current: 2.into() });
    assert_eq!(workers.value(), -2.0);
    assert!((0..3).all(|index| workers.train(index)), "push slots and tokens are free");
}

/// The parts before are skipped as stale, so the push begins with a later one: within a variable,
/// with another variable, or with a last part that is empty.
#[test]
fn a_stale_push_whose_token_is_taken_back_between_its_parts_is_refused_for_its_token() {
    let timeout = Duration::from_secs(1);
    for skipped in [8, 16, 32] {
        let mut workers = BoundedWorkers::of(&["v", "w"], 2, |config| {
            config.mode(Asynchronous::default().reject_older(0)).token_timeout(Some(timeout))
        });
        let old = workers.token(1).unwrap();
        assert!(workers.train(0));
        let push = workers.begin(1, old, false);
        let line = workers.lines[1];
        let body = bytes_of(&[9.0; 4]);
        let (before, after) = body.split_at(skipped);
        workers.world.send(line, push.envelope(), push.part(0, None), before);
        workers.pass(timeout + 2 * TICK, &[0, 1]);
        let last = push.part(skipped as u64, Some(32));
        let request = workers.world.send(line, push.envelope(), last, after);
        match workers.world.answer(line, request) {
            Some(Message::Refused(message::Refused { refusal: Refusal::Token { token, .. } })) => {
                assert_eq!(token, old.token);
            }
            other => panic!("{skipped} bytes skipped: {other:?}"),
        }
        assert!(workers.train(1), "its push slot and its next token are free");
        assert_eq!(workers.value(), -2.0);
    }
}

#[test]
fn a_whole_push_keeps_its_token_when_another_is_sent_under_it() {
    let mut workers = BoundedWorkers::new(2, |config| {
        config.mode(Asynchronous::default().reject_older(1)).last_step(5)
    });
    let token = workers.token(1).unwrap();
    assert!(workers.train(0) && workers.train(0));
    // A whole push of the newest values, which is queued.
    let young = Grant { step: 2.into(), ..token };
    let push = workers.begin(1, young, false);
    let line = workers.lines[1];
    let body = bytes_of(&[1.0, 1.0]);
    let first = workers.world.send(line, push.envelope(), push.part(0, Some(16)), &body);
    let push = workers.begin(1, token, false);
    let second = workers.world.send(line, push.envelope(), push.part(0, Some(16)), &body);
    let Some(Message::Refused(refused)) = workers.world.answer(line, second) else {
        panic!("one token is spent twice")
    };
    assert!(matches!(refused.refusal, Refusal::Token { .. }), "{}", refused.refusal);
    workers.world.restart(0).unwrap();
    workers.world.work();
    assert_eq!(workers.world.answer(line, first), None, "the process was killed");
    for index in [0, 1] {
        workers.lines[index] = workers.world.join(0, &mut workers.peers[index]);
    }
    assert_eq!(workers.value(), -3.0);
    assert!(workers.train(0) && workers.train(1) && workers.has_ended(0));
}
