//! Bounded staleness in asynchronous mode: nobody runs far ahead, and nothing too old is applied.

use std::time::Duration;

use pushpull_common::ids::{RequestId, TokenId};
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, Refusal, message};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use super::peers::{Peer, Push, bytes_of, f64s, worker};
use super::world::{Line, World};
use crate::config::PsConfig;
use crate::optimizer::Sgd;
use crate::shard::TICK;

/// Workers of one variable of two elements, at a rate of 1.
struct Workers {
    world: World,
    peers: Vec<Peer>,
    lines: Vec<Line>,
    sequences: Vec<u64>,
}

impl Workers {
    fn new(count: u32, configure: impl Fn(PsConfig) -> PsConfig) -> Workers {
        let w = VariableSpec::new("w", DType::F64, Shape::new([2]).unwrap()).unwrap();
        let (mut world, chief) = World::ready(vec![w], Sgd::new(1.0), configure);
        world.disconnect(chief[0]);
        let mut peers: Vec<Peer> = (1..=count).map(worker).collect();
        let lines = peers.iter_mut().map(|peer| world.join(0, peer)).collect();
        Workers { world, sequences: vec![0; peers.len()], peers, lines }
    }

    fn ask(&mut self, who: usize, newest: u64) -> RequestId {
        let newest = TokenId(newest);
        self.world.say(self.lines[who], message::TokenRequest { newest }.into())
    }

    fn answer(&mut self, who: usize, request: RequestId) -> Option<Grant> {
        match self.world.answer(self.lines[who], request)? {
            Message::Granted(granted) => Some(granted.grant),
            other => panic!("no token but {other:?}"),
        }
    }

    fn token(&mut self, who: usize) -> Option<Grant> {
        let request = self.ask(who, u64::MAX);
        self.answer(who, request)
    }

    fn begin(&mut self, who: usize, grant: Grant, next: bool) -> Push {
        self.sequences[who] += 1;
        let push_slot = self.world.push_slot(self.lines[who]);
        Push { next, ..Push::gradient(self.sequences[who], grant, push_slot) }
    }

    fn push_for(&mut self, who: usize, grant: Grant, next: bool) -> message::PushAnswer {
        let push = self.begin(who, grant, next);
        let body = bytes_of(&[1.0, 1.0]);
        match self.world.push_answer(self.lines[who], &push, &[(0, &body)]) {
            Message::PushAnswer(answer) => answer,
            other => panic!("not answered but {other:?}"),
        }
    }

    fn push(&mut self, who: usize, grant: Grant) -> Outcome {
        self.push_for(who, grant, false).outcome
    }

    /// Makes a gradient from beginning to end.
    fn make(&mut self, who: usize) -> bool {
        let grant = self.token(who);
        grant.is_some_and(|grant| matches!(self.push(who, grant), Outcome::Applied { .. }))
    }

    fn has_ended(&mut self, who: usize) -> bool {
        let request = self.ask(who, u64::MAX);
        matches!(self.world.answer(self.lines[who], request), Some(Message::Ended(_)))
    }

    fn value(&mut self) -> f64 {
        let values = f64s(&self.world.values(self.lines[0]));
        assert_eq!(values[0], values[1]);
        values[0]
    }

    fn pass(&mut self, time: Duration, alive: &[usize]) {
        let alive: Vec<Line> = alive.iter().map(|&who| self.lines[who]).collect();
        self.world.pass(time, &alive);
    }
}

#[test]
fn whoever_is_ahead_waits_for_the_slowest() {
    let mut workers = Workers::new(3, |config| config.wait_ahead(2));
    let slow = workers.token(2).unwrap();
    assert!(workers.make(0) && workers.make(0) && workers.make(1));
    let ahead = workers.ask(0, u64::MAX);
    assert_eq!(workers.answer(0, ahead), None, "it has made two more than the slowest");
    assert!(workers.make(1));
    let behind_it = workers.ask(1, u64::MAX);
    assert_eq!(workers.answer(1, behind_it), None);
    // Who waits is passed by who is slower, and one gradient of the slowest lets both go on.
    let answer = workers.push_for(2, slow, true);
    assert!(answer.next.is_some(), "whom the others wait for is not kept waiting");
    assert!(workers.answer(0, ahead).is_some() && workers.answer(1, behind_it).is_some());
    assert_eq!(workers.token(0), None, "a gradient that is being made counts");
    assert_eq!(workers.world.metrics().gradients_applied, 5);
}

#[test]
fn who_waits_for_the_slowest_is_told_who_that_is() {
    let mut workers = Workers::new(2, |config| config.wait_ahead(1));
    assert!(workers.token(1).is_some() && workers.make(0));
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
        panic!("it waits for longer than it said")
    };
    let Refusal::Deadline { awaited, .. } = refused.refusal else { panic!() };
    let awaited = awaited.to_string();
    let expected =
        "the slowest replicas, which have made 0 gradients: /job:worker/task:2 (heard from";
    assert!(awaited.starts_with(expected), "{awaited}");
}

#[test]
fn nobody_waits_for_who_is_gone_or_has_not_begun() {
    let lease = Duration::from_secs(5);
    for leaves in [true, false] {
        let mut workers = Workers::new(3, |config| config.wait_ahead(1).lease(lease));
        assert!(workers.token(1).is_some());
        // The third has joined, and does something else.
        assert!(workers.make(0));
        let ahead = workers.ask(0, u64::MAX);
        assert_eq!(workers.answer(0, ahead), None);
        match leaves {
            true => _ = workers.world.ask(workers.lines[1], message::Leave {}.into()),
            false => workers.pass(lease + 2 * TICK, &[0, 2]),
        }
        let grant = workers.answer(0, ahead).expect("there is nobody to wait for");
        assert!(matches!(workers.push(0, grant), Outcome::Applied { .. }));
        // Who comes back begins where the others are.
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
fn a_step_owner_that_is_killed_knows_how_far_everybody_is() {
    let mut workers = Workers::new(2, |config| config.wait_ahead(3));
    let slow = workers.token(1).unwrap();
    assert!(workers.make(0) && workers.make(0));
    workers.world.restart(0).unwrap();
    for who in [0, 1] {
        workers.lines[who] = workers.world.join(0, &mut workers.peers[who]);
    }
    assert!(workers.make(0));
    let ahead = workers.ask(0, u64::MAX);
    assert_eq!(workers.answer(0, ahead), None);
    assert!(matches!(workers.push(1, slow), Outcome::Applied { .. }));
    let grant = workers.answer(0, ahead).unwrap();
    workers.push(0, grant);
    assert_eq!(workers.value(), -5.0);
}

#[test]
fn what_is_too_old_is_dropped_and_said_to_be_stale() {
    let mut workers = Workers::new(2, |config| config.reject_older(1));
    let [old, older] = [workers.token(1).unwrap(), workers.token(1).unwrap()];
    assert!(workers.make(0));
    assert!(matches!(workers.push(1, old), Outcome::Applied { staleness: 1, .. }));
    let stale = Outcome::Stale { current: 2.into() };
    let answer = workers.push_for(1, older, true);
    assert_eq!((answer.outcome, answer.duplicate, answer.next), (stale, false, None));
    assert_eq!(workers.value(), -2.0);
    // Said once more if asked once more, and the token is gone.
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
    // A pull under the token makes it young again.
    let young = workers.token(1).unwrap();
    assert!(workers.make(0) && workers.make(0));
    let read = Grant { step: 4.into(), ..young };
    assert!(matches!(workers.push(1, read), Outcome::Applied { staleness: 0, .. }));
}

#[test]
fn what_grows_too_old_on_its_way_is_dropped_whole() {
    let mut workers = Workers::new(3, |config| config.reject_older(0));
    let old = workers.token(1).unwrap();
    let push = workers.begin(1, old, false);
    let (line, half) = (workers.lines[1], bytes_of(&[9.0]));
    // Its first half is young enough, and is applied to blocks that nothing names.
    workers.world.send(line, push.envelope(), push.part(0, None), &half);
    assert!(workers.make(0));
    let request = workers.world.send(line, push.envelope(), push.part(8, Some(16)), &half);
    let Some(Message::PushAnswer(answer)) = workers.world.answer(line, request) else {
        panic!("it is not answered")
    };
    assert_eq!(answer.outcome, Outcome::Stale { current: 1.into() });
    assert_eq!(workers.value(), -1.0);
    // Two lie whole at once: the first makes the second too old.
    let grants = [1, 2].map(|who| workers.token(who).unwrap());
    let body = bytes_of(&[1.0, 1.0]);
    let requests: Vec<RequestId> = [1, 2]
        .into_iter()
        .zip(grants)
        .map(|(who, grant)| {
            let push = workers.begin(who, grant, false);
            workers.world.send(workers.lines[who], push.envelope(), push.part(0, Some(16)), &body)
        })
        .collect();
    workers.world.work();
    let outcomes = [1, 2].map(|who| {
        let answer = workers.world.answer(workers.lines[who], requests[who - 1]);
        let Some(Message::PushAnswer(answer)) = answer else { panic!("it is not answered") };
        answer.outcome
    });
    assert!(matches!(outcomes[0], Outcome::Applied { staleness: 0, .. }));
    assert_eq!(outcomes[1], Outcome::Stale { current: 2.into() });
    assert_eq!(workers.value(), -2.0);
    assert!((0..3).all(|who| workers.make(who)), "rooms and tokens are free");
}

#[test]
fn what_lies_whole_keeps_its_token_whatever_else_is_sent_under_it() {
    let mut workers = Workers::new(2, |config| config.reject_older(1).last_step(5));
    let token = workers.token(1).unwrap();
    assert!(workers.make(0) && workers.make(0));
    // Read just now, whole, and waiting for its turn.
    let young = Grant { step: 2.into(), ..token };
    let push = workers.begin(1, young, false);
    let (line, body) = (workers.lines[1], bytes_of(&[1.0, 1.0]));
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
    for who in [0, 1] {
        workers.lines[who] = workers.world.join(0, &mut workers.peers[who]);
    }
    assert_eq!(workers.value(), -3.0);
    assert!(workers.make(0) && workers.make(1) && workers.has_ended(0));
}
