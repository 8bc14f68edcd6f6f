//! Calls of a coordinator: a gradient counts once for its call, however often the call is executed.

use std::time::Duration;

use pushpull_common::ids::{CallEpoch, CallNumber, CallSource};
use pushpull_common::protocol::limits::CALL_SOURCES_MAX;
use pushpull_common::protocol::message::{self, CallsAre, Operation, PushAnswer, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{CallId, CallRef, Message, Outcome, Refusal};
use pushpull_optim::optimizer::Sgd;
use pushpull_store::planted::PlantedBugs;

use super::peers::{Peer, Push, bytes_of, f32s, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::{Asynchronous, Durability, Mode, PsConfig, Storage};
use crate::event::Event;
use crate::shard::TICK;
use crate::shard::peers::client_registry::EPOCHS_AHEAD;

/// A world of some shards, and the connections of two workers to each.
struct Calls {
    world: World,
    workers: [Vec<ConnectionId>; 2],
    sequence: u64,
}

fn calls_of(shards: u16, configure: impl Fn(PsConfig) -> PsConfig) -> Calls {
    let configure = |config: PsConfig| configure(config.shards(shards).inbox_pushes(4));
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), configure);
    let workers = [1, 2].map(|task| {
        let mut peer = worker(task);
        (0..usize::from(shards)).map(|shard| world.join(shard, &mut peer)).collect()
    });
    Calls { world, workers, sequence: 0 }
}

fn one_shard() -> Calls {
    calls_of(1, |config| config)
}

pub(super) fn open(name: &str) -> Message {
    let source = CallSource(0);
    let epoch = CallEpoch(0);
    message::OpenCalls { name: Text::clipped(name), source, epoch }.into()
}

fn close(epoch: CallEpoch) -> Message {
    message::CloseCalls { name: Text::clipped("trainer"), epoch }.into()
}

pub(super) fn calls_are(answer: Message) -> CallsAre {
    match answer {
        Message::CallsAre(calls) => calls,
        other => panic!("not the calls of a coordinator but {other:?}"),
    }
}

/// The calls of a coordinator of which none has settled.
fn no_calls(source: CallSource, epoch: CallEpoch) -> CallsAre {
    let settled = CallNumber(0);
    let window = 0;
    let first_digest = 0;
    let digest_of = CallNumber(0);
    let digest = 0;
    CallsAre { source, epoch, settled, window, first_digest, digest_of, digest }
}

pub(super) fn call(calls: &CallsAre, number: u64) -> CallRef {
    let &CallsAre { source, epoch, .. } = calls;
    let id = CallId { source, epoch, number: CallNumber(number) };
    CallRef { id, settled: CallNumber(0), digest: 0 }
}

fn outcome(answer: Message) -> Result<Outcome, Refusal> {
    match answer {
        Message::PushAnswer(answer) => Ok(answer.outcome),
        Message::Refused(refused) => Err(refused.refusal),
        other => panic!("a push is answered {other:?}"),
    }
}

impl Calls {
    fn open(&mut self) -> CallsAre {
        let line = self.workers[0][0];
        calls_are(self.world.ask(line, open("trainer")))
    }

    /// Returns the calls without another epoch.
    fn query(&mut self) -> CallsAre {
        let line = self.workers[0][0];
        let name = Text::clipped("trainer");
        calls_are(self.world.ask(line, message::CallsQuery { name }.into()))
    }

    /// Returns a gradient of a worker for a call, with a token and a push slot of shard 0.
    fn gradient(&mut self, worker: usize, call: CallRef) -> Push {
        self.sequence += 1;
        let line = self.workers[worker][0];
        Push { call: Some(call), ..self.world.gradient(line, self.sequence) }
    }

    /// Pushes ones to shard 0 for a call.
    fn push(&mut self, worker: usize, call: CallRef) -> Result<Outcome, Refusal> {
        let push = self.gradient(worker, call);
        let line = self.workers[worker][0];
        outcome(self.world.push_answer(line, &push, &[(0, &ones())]))
    }

    fn restart(&mut self) {
        self.world.restart(0).unwrap();
        self.workers = [1, 2].map(|task| vec![self.world.join(0, &mut worker(task))]);
    }

    /// Returns how many gradients the values of shard 0 contain, and the global step.
    fn counted(&mut self) -> (f32, u64) {
        let line = self.workers[1][0];
        (-f32s(&self.world.values(line))[0], self.world.metrics().global_step)
    }
}

/// A gradient of all variables of the only shard.
fn ones() -> Vec<u8> {
    [bytes_of(&[1_f32; 3]), bytes_of(&[1_f64; 2])].concat()
}

fn applied(step: u64) -> Result<Outcome, Refusal> {
    Ok(Outcome::Applied { version: step, step: step.into(), staleness: 0 })
}

const REPEATED: Result<Outcome, Refusal> = Ok(Outcome::Repeated {});

#[test]
fn a_call_that_is_executed_again_counts_once() {
    every_call_counts_once(PlantedBugs::default());
}

pub(super) fn every_call_counts_once(planted: PlantedBugs) {
    let mut calls = calls_of(1, |config| PsConfig { planted, ..config });
    let opened = calls.open();
    // The second call is faster than the first.
    assert_eq!(calls.push(0, call(&opened, 2)), applied(1));
    assert_eq!(calls.push(1, call(&opened, 1)), applied(2));
    for number in [1, 2] {
        assert_eq!(calls.push(1, call(&opened, number)), REPEATED);
    }
    assert_eq!(calls.counted(), (2.0, 2));
    calls.restart();
    assert_eq!(calls.push(0, call(&opened, 2)), REPEATED, "a restart keeps what has counted");
    assert_eq!(calls.push(0, call(&opened, 3)), applied(3));
    assert_eq!(calls.counted(), (3.0, 3));
    let found = calls.query();
    assert_eq!((found.settled, found.window, found.epoch), (CallNumber(3), 0, opened.epoch));
}

#[test]
fn a_repeated_push_returns_its_token_and_is_answered_the_same_again() {
    let mut calls = calls_of(1, |config| config.last_step(2));
    let opened = calls.open();
    assert_eq!(calls.push(0, call(&opened, 1)), applied(1));
    let line = calls.workers[1][0];
    let push = calls.gradient(1, call(&opened, 1));
    let answer = calls.world.push_answer(line, &push, &[(0, &ones())]);
    assert_eq!(outcome(answer), REPEATED);
    let again = calls.world.push_answer(line, &push, &[(0, &ones())]);
    let Message::PushAnswer(PushAnswer { outcome, duplicate, .. }) = again else {
        panic!("{again:?}");
    };
    assert_eq!((outcome, duplicate), (Outcome::Repeated {}, true));
    // With the last step promised to the token of the repeated push, there would be no other.
    assert_eq!(calls.push(0, call(&opened, 2)), applied(2));
    let metrics = calls.world.metrics();
    assert_eq!((metrics.gradients_repeated, metrics.gradients_applied), (1, 2));
    assert_eq!((metrics.duplicates, metrics.tokens_taken_back), (1, 0));
}

#[test]
fn two_executions_that_are_whole_at_once_count_once() {
    let mut calls = one_shard();
    let opened = calls.open();
    let pushes = [0, 1].map(|worker| calls.gradient(worker, call(&opened, 1)));
    let requests = [0, 1].map(|worker| {
        let line = calls.workers[worker][0];
        calls.world.push(line, &pushes[worker], &[(0, &ones())])
    });
    calls.world.work();
    let outcomes = [0, 1].map(|worker| {
        outcome(calls.world.answer(calls.workers[worker][0], requests[worker]).unwrap())
    });
    assert_eq!(outcomes, [applied(1), REPEATED]);
    assert_eq!(calls.counted(), (1.0, 1));
}

#[test]
fn a_push_that_is_applied_on_arrival_is_discarded_if_its_call_counts_meanwhile() {
    let mut calls = one_shard();
    let opened = calls.open();
    let slow = calls.gradient(0, call(&opened, 1));
    let line = calls.workers[0][0];
    let body = ones();
    calls.world.send(line, slow.envelope(), slow.part(0, None), &body[..16]);
    assert_eq!(calls.push(1, call(&opened, 1)), applied(1));
    let last = slow.part(16, Some(body.len() as u64));
    let request = calls.world.send(line, slow.envelope(), last, &body[16..]);
    calls.world.work();
    assert_eq!(outcome(calls.world.answer(line, request).unwrap()), REPEATED);
    assert_eq!(calls.counted(), (1.0, 1));
    // No part of a call that has counted is received.
    let late = calls.gradient(0, call(&opened, 1));
    calls.world.send(line, late.envelope(), late.part(0, None), &body[..16]);
    let bytes = calls.world.metrics().push_bytes;
    let last = late.part(16, Some(body.len() as u64));
    let request = calls.world.send(line, late.envelope(), last, &body[16..]);
    assert_eq!(outcome(calls.world.answer(line, request).unwrap()), REPEATED);
    assert_eq!(calls.world.metrics().push_bytes, bytes);
}

#[test]
fn all_parts_of_a_push_are_of_one_call() {
    let mut calls = one_shard();
    let opened = calls.open();
    let line = calls.workers[0][0];
    let body = ones();
    let named = calls.gradient(0, call(&opened, 1));
    let unnamed = Push { call: None, ..named };
    for (first, second) in [(named, unnamed), (unnamed, named)] {
        let push_slot = calls.world.push_slot(line);
        let [first, second] = [first, second].map(|push| Push { push_slot, ..push });
        calls.world.send(line, first.envelope(), first.part(0, None), &body[..16]);
        let last = second.part(16, Some(body.len() as u64));
        let request = calls.world.send(line, second.envelope(), last, &body[16..]);
        let refused = outcome(calls.world.answer(line, request).unwrap());
        assert!(matches!(refused, Err(Refusal::Unsupported { .. })), "{refused:?}");
    }
    assert_eq!(calls.counted(), (0.0, 0));
}

#[test]
fn a_whole_push_keeps_its_call_across_a_restart() {
    let mut calls = one_shard();
    let opened = calls.open();
    let push = calls.gradient(0, call(&opened, 4));
    let line = calls.workers[0][0];
    calls.world.push(line, &push, &[(0, &ones())]);
    calls.restart();
    calls.world.tick();
    calls.world.work();
    assert_eq!(calls.counted(), (1.0, 1));
    assert_eq!(calls.push(1, call(&opened, 4)), REPEATED);
    assert_eq!(calls.query().window, 0b1000);
}

#[test]
fn a_higher_epoch_fences_the_calls_of_older_ones() {
    let mut calls = one_shard();
    let first = calls.open();
    assert_eq!(calls.push(0, call(&first, 2)), applied(1));
    let second = calls.open();
    assert!(second.epoch > first.epoch && second.source == first.source);
    assert_eq!((second.settled, second.window), (CallNumber(0), 0b10));
    let (source, epoch, current) = (first.source, first.epoch, second.epoch);
    let fenced = Refusal::CallEpoch { source, epoch, current };
    assert_eq!(calls.push(0, call(&first, 1)), Err(fenced.clone()));
    assert_eq!(calls.push(0, call(&second, 2)), REPEATED);
    assert_eq!(calls.push(0, call(&second, 1)), applied(2));
    // A push is whole when the coordinator resumes, and is refused before it changes anything.
    let push = calls.gradient(0, call(&second, 3));
    let line = calls.workers[0][0];
    let request = calls.world.push(line, &push, &[(0, &ones())]);
    let third = calls.open();
    calls.world.work();
    let refused = outcome(calls.world.answer(line, request).unwrap());
    let current = third.epoch;
    assert_eq!(refused, Err(Refusal::CallEpoch { source, epoch: second.epoch, current }));
    assert_eq!(calls.counted(), (2.0, 2));
    // The token was not spent.
    let push_slot = calls.world.push_slot(line);
    let push = Push { sequence: 90, call: Some(call(&third, 3)), push_slot, ..push };
    let answer = calls.world.push_answer(line, &push, &[(0, &ones())]);
    assert_eq!(outcome(answer), applied(3));
}

#[test]
fn calls_that_are_closed_are_refused_and_begin_again_under_another_source() {
    let mut calls = one_shard();
    let first = calls.open();
    assert_eq!(calls.push(0, call(&first, 1)), applied(1));
    let push = calls.gradient(0, call(&first, 2));
    let line = calls.workers[0][0];
    let request = calls.world.push(line, &push, &[(0, &ones())]);
    for _ in 0..2 {
        let closed = calls.world.say(line, close(first.epoch));
        assert!(matches!(calls.world.answer(line, closed), Some(Message::CallsClosed(_))));
    }
    calls.world.work();
    let unknown = Refusal::UnknownCalls { source: first.source };
    assert_eq!(outcome(calls.world.answer(line, request).unwrap()), Err(unknown.clone()));
    assert_eq!(calls.push(1, call(&first, 1)), Err(unknown.clone()));
    let second = calls.open();
    assert!(second.source != first.source);
    assert_eq!((second.settled, second.window), (CallNumber(0), 0));
    assert_eq!(calls.push(1, call(&first, 1)), Err(unknown));
    assert_eq!(calls.push(1, call(&second, 1)), applied(2));
    let (source, epoch, current) = (second.source, first.epoch, second.epoch);
    let refused = calls.world.refused(line, close(first.epoch));
    assert_eq!(refused, Refusal::CallEpoch { source, epoch, current });
    calls.restart();
    assert_eq!(calls.push(0, call(&second, 1)), REPEATED);
}

#[test]
fn a_call_outside_the_window_is_refused_and_settles_nothing() {
    let mut calls = one_shard();
    let opened = calls.open();
    for number in [0, 65, u64::MAX] {
        let refusal = calls.push(0, call(&opened, number)).unwrap_err();
        assert!(matches!(refusal, Refusal::CallWindow { .. }), "{number}: {refusal}");
    }
    let told = CallRef { settled: CallNumber(50), ..call(&opened, 70) };
    assert_eq!(calls.push(0, told), applied(1));
    let found = calls.query();
    assert_eq!((found.settled, found.window), (CallNumber(50), 1 << 19));
    let behind = CallRef { settled: CallNumber(70), ..call(&opened, 70) };
    assert!(matches!(calls.push(0, behind), Err(Refusal::CallWindow { .. })));
    assert_eq!(calls.push(0, call(&opened, 7)), REPEATED, "the coordinator says so");
    assert_eq!(calls.counted(), (1.0, 1));
}

#[test]
fn a_stale_gradient_settles_no_call_and_a_repeated_one_is_not_stale() {
    let mode = Mode::from(Asynchronous::default().reject_older(0));
    let mut calls = calls_of(1, |config| config.mode(mode));
    let opened = calls.open();
    let stale = calls.gradient(0, call(&opened, 1));
    let repeated = calls.gradient(0, call(&opened, 2));
    assert_eq!(calls.push(1, call(&opened, 2)), applied(1));
    let line = calls.workers[0][0];
    let answer = calls.world.push_answer(line, &stale, &[(0, &ones())]);
    assert!(matches!(outcome(answer), Ok(Outcome::Stale { .. })));
    let answer = calls.world.push_answer(line, &repeated, &[(0, &ones())]);
    assert_eq!(outcome(answer), REPEATED);
    assert_eq!(calls.query().window, 0b10);
    assert_eq!(calls.push(0, call(&opened, 1)), applied(2));
}

#[test]
fn another_shard_counts_a_call_that_has_counted_on_the_step_owner() {
    let mut calls = calls_of(2, |config| config);
    let opened = calls.open();
    let other = calls.workers[0][1];
    let CallsAre { source, epoch, .. } = opened;
    let named = |source, epoch| -> Message {
        message::OpenCalls { name: Text::clipped("trainer"), source, epoch }.into()
    };
    let unassigned = calls.world.refused(other, open("trainer"));
    assert!(matches!(unassigned, Refusal::CallEpoch { .. }), "{unassigned}");
    let ahead = CallEpoch(epoch.0 + 2 * EPOCHS_AHEAD);
    let false_epoch = calls.world.refused(other, named(source, ahead));
    // The coordinator tries again: the epoch is right if the step owner's clock is that fast.
    assert!(matches!(false_epoch, Refusal::Unavailable { .. }), "{false_epoch}");
    let owner = calls.workers[0][0];
    let assigned = calls.world.refused(owner, named(source, epoch));
    assert!(matches!(assigned, Refusal::Unsupported { .. }), "{assigned}");
    assert_eq!(calls_are(calls.world.ask(other, named(source, epoch))), opened);

    // The first execution ends before it reaches the other shard.
    let [w, d] = [bytes_of(&[1_f32; 3]), bytes_of(&[1_f64; 2])];
    let lines = calls.workers.clone();
    let first = calls.gradient(0, call(&opened, 1));
    let answer = calls.world.push_answer(lines[0][0], &first, &[(0, &w)]);
    assert!(matches!(outcome(answer), Ok(Outcome::Applied { .. })));
    for expected in [CallNumber(1), CallNumber(1)] {
        let again = calls.gradient(1, call(&opened, 1));
        let answer = calls.world.push_answer(lines[1][0], &again, &[(0, &w)]);
        assert_eq!(outcome(answer), REPEATED);
        let push_slot = calls.world.push_slot(lines[1][1]);
        let push = Push { push_slot, ..again };
        let answer = outcome(calls.world.push_answer(lines[1][1], &push, &[(0, &d)]));
        assert!(answer.is_ok(), "{answer:?}");
        assert_eq!(calls_are(calls.world.ask(other, named(source, epoch))).settled, expected);
    }
    let applied = [0, 1].map(|shard| calls.world.counters[shard].gradients_applied.read());
    assert_eq!((applied, calls.world.metrics().global_step), ([1, 1], 1));
}

#[test]
fn a_shard_refuses_one_coordinator_too_many() {
    let mut calls = one_shard();
    let line = calls.workers[0][0];
    for index in 0..CALL_SOURCES_MAX {
        calls_are(calls.world.ask(line, open(&format!("trainer {index}"))));
    }
    let refused = calls.world.refused(line, open("trainer"));
    let Refusal::Busy { what, limit } = refused else { panic!("{refused}") };
    assert_eq!((what.as_str(), limit), ("coordinators with open calls", 64));
    calls.restart();
    let line = calls.workers[0][0];
    assert!(matches!(calls.world.refused(line, open("trainer")), Refusal::Busy { .. }));
    calls_are(calls.world.ask(line, open("trainer 63")));
}

/// Fills all places of a shard with coordinators whose connection is closed. The first `settled`
/// have each settled a call.
fn fill(calls: &mut Calls, settled: usize) -> Vec<CallsAre> {
    let line = calls.world.join(0, &mut Peer { role: Role::Reader {}, ..worker(7) });
    let names = 0..CALL_SOURCES_MAX;
    let opened: Vec<CallsAre> = names
        .map(|index| calls_are(calls.world.ask(line, open(&format!("trainer {index}")))))
        .collect();
    for (step, source) in opened[..settled].iter().enumerate() {
        assert_eq!(calls.push(0, call(source, 1)), applied(step as u64 + 1));
    }
    calls.world.disconnect(line);
    calls.world.tick();
    opened
}

#[test]
fn a_coordinator_without_settled_calls_makes_place_for_another_after_a_lease() {
    let lease = Duration::from_secs(1);
    let mut calls = calls_of(1, |config| config.lease(lease));
    let opened = fill(&mut calls, CALL_SOURCES_MAX - 1);
    let [line, alive] = [calls.workers[0][0], calls.workers[1][0]];
    calls.world.pass(lease - TICK, &[line, alive]);
    assert!(matches!(calls.world.refused(line, open("another")), Refusal::Busy { .. }));
    calls.world.pass(TICK, &[line, alive]);
    let another = calls_are(calls.world.ask(line, open("another")));
    assert_eq!(calls.push(0, call(&another, 1)), applied(64));
    // What the forgotten one sends late is refused, and nobody lost what has settled.
    let source = opened[63].source;
    assert_eq!(calls.push(0, call(&opened[63], 1)), Err(Refusal::UnknownCalls { source }));
    assert_eq!(calls.push(0, call(&opened[0], 1)), REPEATED);
    assert!(matches!(calls.world.refused(line, open("one more")), Refusal::Busy { .. }));
    let is_forgotten = |event: &Event| matches!(event, Event::CallsForgotten { .. });
    let events = &calls.world.events;
    assert!(!events.iter().any(|(_, event)| is_forgotten(event)), "{events:?}");
}

#[test]
fn a_coordinator_whose_connection_is_open_is_not_forgotten() {
    let lease = Duration::from_secs(1);
    let mut calls = calls_of(1, |config| config.lease(lease));
    let [line, alive] = [calls.workers[0][0], calls.workers[1][0]];
    for index in 0..CALL_SOURCES_MAX {
        calls_are(calls.world.ask(line, open(&format!("trainer {index}"))));
    }
    calls.world.pass(10 * lease, &[line, alive]);
    assert!(matches!(calls.world.refused(alive, open("another")), Refusal::Busy { .. }));
}

#[test]
fn what_has_settled_is_forgotten_after_its_time_and_is_refused_for_good() {
    let lease = Duration::from_secs(1);
    let kept = Duration::from_secs(60);
    let mut calls = calls_of(2, |config| config.lease(lease).calls_kept(kept));
    let [owner, other] = [calls.workers[0][0], calls.workers[0][1]];
    let mut reader = Peer { role: Role::Reader {}, ..worker(7) };
    let line = calls.world.join(1, &mut reader);
    // The other shard knows 64 coordinators, whose calls have settled there.
    let as_opened = |name: String, opened: &CallsAre| -> Message {
        let CallsAre { source, epoch, .. } = *opened;
        message::OpenCalls { name: Text::clipped(&name), source, epoch }.into()
    };
    let d = bytes_of(&[1_f64; 2]);
    let mut first = None;
    for index in 0..CALL_SOURCES_MAX {
        let name = format!("trainer {index}");
        let opened = calls_are(calls.world.ask(owner, open(&name)));
        calls_are(calls.world.ask(line, as_opened(name, &opened)));
        let gradient = calls.gradient(0, call(&opened, 1));
        let push_slot = calls.world.push_slot(other);
        let push = Push { push_slot, ..gradient };
        assert!(outcome(calls.world.push_answer(other, &push, &[(0, &d)])).is_ok());
        calls.world.ask(
            owner,
            message::ReturnToken {
                token: gradient.grant.token,
                generation: gradient.grant.generation,
            }
            .into(),
        );
        first.get_or_insert(opened);
    }
    let first = first.unwrap();
    calls.world.disconnect(line);
    let alive = [owner, other, calls.workers[1][0], calls.workers[1][1]];
    calls.world.pass(kept - lease, &alive);
    let newest = CallsAre {
        source: CallSource(first.source.0 + 500),
        epoch: CallEpoch(first.epoch.0 + 500),
        ..first
    };
    let refused = calls.world.refused(other, as_opened("another".to_owned(), &newest));
    assert!(matches!(refused, Refusal::Busy { .. }), "{refused}");
    calls.world.pass(lease, &alive);
    // A request that is refused takes nobody's place.
    let zero = CallsAre { source: CallSource(0), ..newest };
    let refused = calls.world.refused(other, as_opened("another".to_owned(), &zero));
    assert!(matches!(refused, Refusal::CallEpoch { .. }), "{refused}");
    let forgotten = |event: &(usize, Event)| event.1.kind() == "calls-forgotten";
    assert!(!calls.world.events.iter().any(forgotten), "{:?}", calls.world.events);
    calls_are(calls.world.ask(other, as_opened("another".to_owned(), &newest)));
    let (shard, event) = calls.world.events.pop().unwrap();
    assert_eq!((shard, event.kind()), (1, "calls-forgotten"));
    assert!(
        event.to_string().contains("has forgotten the calls of coordinator \"trainer "),
        "{event}"
    );
    // The step owner still knows the source: its calls must not count here again.
    let Event::CallsForgotten { coordinator, .. } = event else { panic!() };
    let resumed = CallsAre { epoch: CallEpoch(newest.epoch.0 + 1), ..first };
    let refused = calls.world.refused(other, as_opened(coordinator, &resumed));
    assert!(matches!(refused, Refusal::CallEpoch { .. }), "{refused}");
}

#[test]
fn calls_need_values_a_name_asynchronous_mode_and_gradients() {
    let mut bare = World::bare(variables(), Sgd::new(1.0), |config| config);
    let line = bare.join(0, &mut super::peers::chief());
    for request in [open("trainer"), close(CallEpoch(1))] {
        assert_eq!(bare.refused(line, request), Refusal::NotInitialized {});
    }
    let synchronous = super::synchronous::synchronous(1, 1);
    let (mut world, lines) =
        World::ready(variables(), Sgd::new(1.0), |config| config.mode(synchronous));
    let refused = world.refused(lines[0], open("trainer"));
    assert!(matches!(refused, Refusal::Unsupported { kind: 70, .. }), "{refused}");
    let calls = no_calls(CallSource(1), CallEpoch(1));
    let push = Push { call: Some(call(&calls, 1)), ..world.gradient(lines[0], 1) };
    let refused = outcome(world.push_answer(lines[0], &push, &[(0, &ones())]));
    assert!(matches!(refused, Err(Refusal::Unsupported { kind: 75, .. })), "{refused:?}");

    let mut calls = one_shard();
    let line = calls.workers[0][0];
    let refused = calls.world.refused(line, open(""));
    assert!(matches!(refused, Refusal::Unsupported { .. }), "{refused}");
    let opened = calls.open();
    let push_slot = calls.world.push_slot(line);
    let assign = Push::plain(1, Operation::Assign {}, push_slot);
    let assign = Push { call: Some(call(&opened, 1)), ..assign };
    let refused = outcome(calls.world.push_answer(line, &assign, &[(0, &ones())]));
    assert!(matches!(refused, Err(Refusal::Unsupported { .. })), "{refused:?}");
    let reader = Peer { role: Role::Reader {}, ..worker(7) };
    let (reader, _) = calls.world.handshake(0, reader.hello(0), false).unwrap();
    // A coordinator need not be a member.
    let request = calls.world.say(reader, open("trainer"));
    let opened = calls.world.answer(reader, request);
    assert!(matches!(opened, Some(Message::CallsAre(_))), "{opened:?}");
}

#[test]
fn a_repeated_push_under_a_token_of_another_complete_push_is_refused() {
    let mut calls = one_shard();
    let opened = calls.open();
    assert_eq!(calls.push(0, call(&opened, 1)), applied(1));
    let line = calls.workers[0][0];
    let body = ones();
    let paid = calls.gradient(0, call(&opened, 2));
    let request = calls.world.push(line, &paid, &[(0, &body)]);
    let sequence = 50;
    let push_slot = calls.world.push_slot(line);
    let second = Push { sequence, push_slot, call: Some(call(&opened, 1)), ..paid };
    let refused = calls.world.push(line, &second, &[(0, &body)]);
    let refused = outcome(calls.world.answer(line, refused).unwrap());
    assert!(matches!(refused, Err(Refusal::Token { .. })), "{refused:?}");
    calls.world.work();
    assert_eq!(outcome(calls.world.answer(line, request).unwrap()), applied(2));
}

#[test]
fn calls_survive_a_loss_of_power() {
    let mut calls =
        calls_of(1, |config| config.storage(Storage::memory().durability(Durability::Power)));
    let opened = calls.open();
    assert_eq!(calls.push(0, call(&opened, 3)), applied(1));
    let disk = calls.world.shard_files[0].disk().clone();
    calls.world.reboot(0, disk).unwrap();
    calls.workers = [1, 2].map(|task| vec![calls.world.join(0, &mut worker(task))]);
    assert_eq!(calls.push(1, call(&opened, 3)), REPEATED);
    assert_eq!(calls.counted(), (1.0, 1));
}
