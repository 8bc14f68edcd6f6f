//! Effects of a coordinator: a gradient counts once for its effect, however often it is pushed.

use std::time::Duration;

use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber};
use pushpull_common::protocol::limits::COORDINATORS_MAX;
use pushpull_common::protocol::message::{self, CoordinatorIs, Operation, PushAnswer, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{EffectId, EffectRef, Message, Outcome, Refusal};
use pushpull_optim::optimizer::Sgd;
use pushpull_store::planted::PlantedBugs;

use super::peers::{Peer, Push, bytes_of, f32s, variables, worker};
use super::world::{ConnectionId, World};
use crate::config::{Asynchronous, Durability, Mode, PsConfig, Storage};
use crate::event::Event;
use crate::shard::TICK;
use crate::shard::peers::client_registry::EPOCHS_AHEAD;

/// A world of some shards, and the connections of two workers to each.
struct EffectsTest {
    world: World,
    workers: [Vec<ConnectionId>; 2],
    sequence: u64,
}

fn effects_of(shards: u16, configure: impl Fn(PsConfig) -> PsConfig) -> EffectsTest {
    let configure = |config: PsConfig| configure(config.shards(shards).inbox_pushes(4));
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), configure);
    let workers = [1, 2].map(|task| {
        let mut peer = worker(task);
        (0..usize::from(shards)).map(|shard| world.join(shard, &mut peer)).collect()
    });
    EffectsTest { world, workers, sequence: 0 }
}

fn one_shard() -> EffectsTest {
    effects_of(1, |config| config)
}

pub(super) fn open(name: &str) -> Message {
    let coordinator = CoordinatorId(0);
    let epoch = CoordinatorEpoch(0);
    message::OpenCoordinator { name: Text::clipped(name), coordinator, epoch }.into()
}

fn close(epoch: CoordinatorEpoch) -> Message {
    message::CloseCoordinator { name: Text::clipped("trainer"), epoch }.into()
}

pub(super) fn coordinator_is(answer: Message) -> CoordinatorIs {
    match answer {
        Message::CoordinatorIs(known) => known,
        other => panic!("not a coordinator but {other:?}"),
    }
}

/// A coordinator of which no effect has settled.
fn no_effects(coordinator: CoordinatorId, epoch: CoordinatorEpoch) -> CoordinatorIs {
    let settled = EffectNumber(0);
    let window = 0;
    let first_digest = 0;
    let digest_of = EffectNumber(0);
    let digest = 0;
    CoordinatorIs { coordinator, epoch, settled, window, first_digest, digest_of, digest }
}

pub(super) fn effect(opened: &CoordinatorIs, number: u64) -> EffectRef {
    let &CoordinatorIs { coordinator, epoch, .. } = opened;
    let id = EffectId { coordinator, epoch, number: EffectNumber(number) };
    EffectRef { id, settled: EffectNumber(0), digest: 0 }
}

fn outcome(answer: Message) -> Result<Outcome, Refusal> {
    match answer {
        Message::PushAnswer(answer) => Ok(answer.outcome),
        Message::Refused(refused) => Err(refused.refusal),
        other => panic!("a push is answered {other:?}"),
    }
}

impl EffectsTest {
    fn open(&mut self) -> CoordinatorIs {
        let line = self.workers[0][0];
        coordinator_is(self.world.ask(line, open("trainer")))
    }

    /// Returns the coordinator without another epoch.
    fn query(&mut self) -> CoordinatorIs {
        let line = self.workers[0][0];
        let name = Text::clipped("trainer");
        coordinator_is(self.world.ask(line, message::CoordinatorQuery { name }.into()))
    }

    /// Returns a gradient of a worker for an effect, with a token and a push slot of shard 0.
    fn gradient(&mut self, worker: usize, effect: EffectRef) -> Push {
        self.sequence += 1;
        let line = self.workers[worker][0];
        Push { effect: Some(effect), ..self.world.gradient(line, self.sequence) }
    }

    /// Pushes ones to shard 0 for an effect.
    fn push(&mut self, worker: usize, effect: EffectRef) -> Result<Outcome, Refusal> {
        let push = self.gradient(worker, effect);
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
fn an_effect_that_is_pushed_again_counts_once() {
    every_effect_counts_once(PlantedBugs::default());
}

pub(super) fn every_effect_counts_once(planted: PlantedBugs) {
    let mut test = effects_of(1, |config| PsConfig { planted, ..config });
    let opened = test.open();
    // The second effect is faster than the first.
    assert_eq!(test.push(0, effect(&opened, 2)), applied(1));
    assert_eq!(test.push(1, effect(&opened, 1)), applied(2));
    for number in [1, 2] {
        assert_eq!(test.push(1, effect(&opened, number)), REPEATED);
    }
    assert_eq!(test.counted(), (2.0, 2));
    test.restart();
    assert_eq!(test.push(0, effect(&opened, 2)), REPEATED, "a restart keeps what has counted");
    assert_eq!(test.push(0, effect(&opened, 3)), applied(3));
    assert_eq!(test.counted(), (3.0, 3));
    let found = test.query();
    assert_eq!((found.settled, found.window, found.epoch), (EffectNumber(3), 0, opened.epoch));
}

#[test]
fn a_repeated_push_returns_its_token_and_is_answered_the_same_again() {
    let mut test = effects_of(1, |config| config.last_step(2));
    let opened = test.open();
    assert_eq!(test.push(0, effect(&opened, 1)), applied(1));
    let line = test.workers[1][0];
    let push = test.gradient(1, effect(&opened, 1));
    let answer = test.world.push_answer(line, &push, &[(0, &ones())]);
    assert_eq!(outcome(answer), REPEATED);
    let again = test.world.push_answer(line, &push, &[(0, &ones())]);
    let Message::PushAnswer(PushAnswer { outcome, duplicate, .. }) = again else {
        panic!("{again:?}");
    };
    assert_eq!((outcome, duplicate), (Outcome::Repeated {}, true));
    // With the last step promised to the token of the repeated push, there would be no other.
    assert_eq!(test.push(0, effect(&opened, 2)), applied(2));
    let metrics = test.world.metrics();
    assert_eq!((metrics.gradients_repeated, metrics.gradients_applied), (1, 2));
    assert_eq!((metrics.duplicates, metrics.tokens_taken_back), (1, 0));
}

#[test]
fn two_executions_that_are_whole_at_once_count_once() {
    let mut test = one_shard();
    let opened = test.open();
    let pushes = [0, 1].map(|worker| test.gradient(worker, effect(&opened, 1)));
    let requests = [0, 1].map(|worker| {
        let line = test.workers[worker][0];
        test.world.push(line, &pushes[worker], &[(0, &ones())])
    });
    test.world.work();
    let outcomes = [0, 1].map(|worker| {
        outcome(test.world.answer(test.workers[worker][0], requests[worker]).unwrap())
    });
    assert_eq!(outcomes, [applied(1), REPEATED]);
    assert_eq!(test.counted(), (1.0, 1));
}

#[test]
fn a_push_that_is_applied_on_arrival_is_discarded_if_its_effect_counts_meanwhile() {
    let mut test = one_shard();
    let opened = test.open();
    let slow = test.gradient(0, effect(&opened, 1));
    let line = test.workers[0][0];
    let body = ones();
    test.world.send(line, slow.envelope(), slow.part(0, None), &body[..16]);
    assert_eq!(test.push(1, effect(&opened, 1)), applied(1));
    let last = slow.part(16, Some(body.len() as u64));
    let request = test.world.send(line, slow.envelope(), last, &body[16..]);
    test.world.work();
    assert_eq!(outcome(test.world.answer(line, request).unwrap()), REPEATED);
    assert_eq!(test.counted(), (1.0, 1));
    // No part of an effect that has counted is received.
    let late = test.gradient(0, effect(&opened, 1));
    test.world.send(line, late.envelope(), late.part(0, None), &body[..16]);
    let bytes = test.world.metrics().push_bytes;
    let last = late.part(16, Some(body.len() as u64));
    let request = test.world.send(line, late.envelope(), last, &body[16..]);
    assert_eq!(outcome(test.world.answer(line, request).unwrap()), REPEATED);
    assert_eq!(test.world.metrics().push_bytes, bytes);
}

#[test]
fn all_parts_of_a_push_are_of_one_effect() {
    let mut test = one_shard();
    let opened = test.open();
    let line = test.workers[0][0];
    let body = ones();
    let named = test.gradient(0, effect(&opened, 1));
    let unnamed = Push { effect: None, ..named };
    for (first, second) in [(named, unnamed), (unnamed, named)] {
        let push_slot = test.world.push_slot(line);
        let [first, second] = [first, second].map(|push| Push { push_slot, ..push });
        test.world.send(line, first.envelope(), first.part(0, None), &body[..16]);
        let last = second.part(16, Some(body.len() as u64));
        let request = test.world.send(line, second.envelope(), last, &body[16..]);
        let refused = outcome(test.world.answer(line, request).unwrap());
        assert!(matches!(refused, Err(Refusal::Unsupported { .. })), "{refused:?}");
    }
    assert_eq!(test.counted(), (0.0, 0));
}

#[test]
fn a_whole_push_keeps_its_effect_across_a_restart() {
    let mut test = one_shard();
    let opened = test.open();
    let push = test.gradient(0, effect(&opened, 4));
    let line = test.workers[0][0];
    test.world.push(line, &push, &[(0, &ones())]);
    test.restart();
    test.world.tick();
    test.world.work();
    assert_eq!(test.counted(), (1.0, 1));
    assert_eq!(test.push(1, effect(&opened, 4)), REPEATED);
    assert_eq!(test.query().window, 0b1000);
}

#[test]
fn a_higher_epoch_fences_the_effects_of_older_ones() {
    let mut test = one_shard();
    let first = test.open();
    assert_eq!(test.push(0, effect(&first, 2)), applied(1));
    let second = test.open();
    assert!(second.epoch > first.epoch && second.coordinator == first.coordinator);
    assert_eq!((second.settled, second.window), (EffectNumber(0), 0b10));
    let (coordinator, epoch, current) = (first.coordinator, first.epoch, second.epoch);
    let fenced = Refusal::CoordinatorEpoch { coordinator, epoch, current };
    assert_eq!(test.push(0, effect(&first, 1)), Err(fenced.clone()));
    assert_eq!(test.push(0, effect(&second, 2)), REPEATED);
    assert_eq!(test.push(0, effect(&second, 1)), applied(2));
    // A push is whole when the coordinator resumes, and is refused before it changes anything.
    let push = test.gradient(0, effect(&second, 3));
    let line = test.workers[0][0];
    let request = test.world.push(line, &push, &[(0, &ones())]);
    let third = test.open();
    test.world.work();
    let refused = outcome(test.world.answer(line, request).unwrap());
    let current = third.epoch;
    assert_eq!(
        refused,
        Err(Refusal::CoordinatorEpoch { coordinator, epoch: second.epoch, current })
    );
    assert_eq!(test.counted(), (2.0, 2));
    // The token was not spent.
    let push_slot = test.world.push_slot(line);
    let push = Push { sequence: 90, effect: Some(effect(&third, 3)), push_slot, ..push };
    let answer = test.world.push_answer(line, &push, &[(0, &ones())]);
    assert_eq!(outcome(answer), applied(3));
}

#[test]
fn a_closed_coordinator_is_refused_and_begins_again_under_another_id() {
    let mut test = one_shard();
    let first = test.open();
    assert_eq!(test.push(0, effect(&first, 1)), applied(1));
    let push = test.gradient(0, effect(&first, 2));
    let line = test.workers[0][0];
    let request = test.world.push(line, &push, &[(0, &ones())]);
    for _ in 0..2 {
        let closed = test.world.say(line, close(first.epoch));
        assert!(matches!(test.world.answer(line, closed), Some(Message::CoordinatorClosed(_))));
    }
    test.world.work();
    let unknown = Refusal::UnknownCoordinator { coordinator: first.coordinator };
    assert_eq!(outcome(test.world.answer(line, request).unwrap()), Err(unknown.clone()));
    assert_eq!(test.push(1, effect(&first, 1)), Err(unknown.clone()));
    let second = test.open();
    assert!(second.coordinator != first.coordinator);
    assert_eq!((second.settled, second.window), (EffectNumber(0), 0));
    assert_eq!(test.push(1, effect(&first, 1)), Err(unknown));
    assert_eq!(test.push(1, effect(&second, 1)), applied(2));
    let (coordinator, epoch, current) = (second.coordinator, first.epoch, second.epoch);
    let refused = test.world.refused(line, close(first.epoch));
    assert_eq!(refused, Refusal::CoordinatorEpoch { coordinator, epoch, current });
    test.restart();
    assert_eq!(test.push(0, effect(&second, 1)), REPEATED);
}

#[test]
fn an_effect_outside_the_window_is_refused_and_settles_nothing() {
    let mut test = one_shard();
    let opened = test.open();
    for number in [0, 65, u64::MAX] {
        let refusal = test.push(0, effect(&opened, number)).unwrap_err();
        assert!(matches!(refusal, Refusal::EffectWindow { .. }), "{number}: {refusal}");
    }
    let told = EffectRef { settled: EffectNumber(50), ..effect(&opened, 70) };
    assert_eq!(test.push(0, told), applied(1));
    let found = test.query();
    assert_eq!((found.settled, found.window), (EffectNumber(50), 1 << 19));
    let behind = EffectRef { settled: EffectNumber(70), ..effect(&opened, 70) };
    assert!(matches!(test.push(0, behind), Err(Refusal::EffectWindow { .. })));
    assert_eq!(test.push(0, effect(&opened, 7)), REPEATED, "the coordinator says so");
    assert_eq!(test.counted(), (1.0, 1));
}

#[test]
fn a_stale_gradient_settles_no_effect_and_a_repeated_one_is_not_stale() {
    let mode = Mode::from(Asynchronous::default().reject_older(0));
    let mut test = effects_of(1, |config| config.mode(mode));
    let opened = test.open();
    let stale = test.gradient(0, effect(&opened, 1));
    let repeated = test.gradient(0, effect(&opened, 2));
    assert_eq!(test.push(1, effect(&opened, 2)), applied(1));
    let line = test.workers[0][0];
    let answer = test.world.push_answer(line, &stale, &[(0, &ones())]);
    assert!(matches!(outcome(answer), Ok(Outcome::Stale { .. })));
    let answer = test.world.push_answer(line, &repeated, &[(0, &ones())]);
    assert_eq!(outcome(answer), REPEATED);
    assert_eq!(test.query().window, 0b10);
    assert_eq!(test.push(0, effect(&opened, 1)), applied(2));
}

#[test]
fn another_shard_counts_an_effect_that_has_counted_on_the_step_owner() {
    let mut test = effects_of(2, |config| config);
    let opened = test.open();
    let other = test.workers[0][1];
    let CoordinatorIs { coordinator, epoch, .. } = opened;
    let named = |coordinator, epoch| -> Message {
        message::OpenCoordinator { name: Text::clipped("trainer"), coordinator, epoch }.into()
    };
    let unassigned = test.world.refused(other, open("trainer"));
    assert!(matches!(unassigned, Refusal::CoordinatorEpoch { .. }), "{unassigned}");
    let ahead = CoordinatorEpoch(epoch.0 + 2 * EPOCHS_AHEAD);
    let false_epoch = test.world.refused(other, named(coordinator, ahead));
    // The coordinator tries again: the epoch is right if the step owner's clock is that fast.
    assert!(matches!(false_epoch, Refusal::Unavailable { .. }), "{false_epoch}");
    let owner = test.workers[0][0];
    let assigned = test.world.refused(owner, named(coordinator, epoch));
    assert!(matches!(assigned, Refusal::Unsupported { .. }), "{assigned}");
    assert_eq!(coordinator_is(test.world.ask(other, named(coordinator, epoch))), opened);

    // The first execution ends before it reaches the other shard.
    let [w, d] = [bytes_of(&[1_f32; 3]), bytes_of(&[1_f64; 2])];
    let lines = test.workers.clone();
    let first = test.gradient(0, effect(&opened, 1));
    let answer = test.world.push_answer(lines[0][0], &first, &[(0, &w)]);
    assert!(matches!(outcome(answer), Ok(Outcome::Applied { .. })));
    for expected in [EffectNumber(1), EffectNumber(1)] {
        let again = test.gradient(1, effect(&opened, 1));
        let answer = test.world.push_answer(lines[1][0], &again, &[(0, &w)]);
        assert_eq!(outcome(answer), REPEATED);
        let push_slot = test.world.push_slot(lines[1][1]);
        let push = Push { push_slot, ..again };
        let answer = outcome(test.world.push_answer(lines[1][1], &push, &[(0, &d)]));
        assert!(answer.is_ok(), "{answer:?}");
        assert_eq!(
            coordinator_is(test.world.ask(other, named(coordinator, epoch))).settled,
            expected
        );
    }
    let applied = [0, 1].map(|shard| test.world.counters[shard].gradients_applied.read());
    assert_eq!((applied, test.world.metrics().global_step), ([1, 1], 1));
}

#[test]
fn a_shard_refuses_one_coordinator_too_many() {
    let mut test = one_shard();
    let line = test.workers[0][0];
    for index in 0..COORDINATORS_MAX {
        coordinator_is(test.world.ask(line, open(&format!("trainer {index}"))));
    }
    let refused = test.world.refused(line, open("trainer"));
    let Refusal::Busy { what, limit } = refused else { panic!("{refused}") };
    assert_eq!((what.as_str(), limit), ("open coordinators", 64));
    test.restart();
    let line = test.workers[0][0];
    assert!(matches!(test.world.refused(line, open("trainer")), Refusal::Busy { .. }));
    coordinator_is(test.world.ask(line, open("trainer 63")));
}

/// Fills all places of a shard with coordinators whose connection is closed. The first `settled`
/// have each settled an effect.
fn fill(test: &mut EffectsTest, settled: usize) -> Vec<CoordinatorIs> {
    let line = test.world.join(0, &mut Peer { role: Role::Reader {}, ..worker(7) });
    let names = 0..COORDINATORS_MAX;
    let opened: Vec<CoordinatorIs> = names
        .map(|index| coordinator_is(test.world.ask(line, open(&format!("trainer {index}")))))
        .collect();
    for (step, coordinator) in opened[..settled].iter().enumerate() {
        assert_eq!(test.push(0, effect(coordinator, 1)), applied(step as u64 + 1));
    }
    test.world.disconnect(line);
    test.world.tick();
    opened
}

#[test]
fn a_coordinator_without_settled_effects_makes_place_for_another_after_a_lease() {
    let lease = Duration::from_secs(1);
    let mut test = effects_of(1, |config| config.lease(lease));
    let opened = fill(&mut test, COORDINATORS_MAX - 1);
    let [line, alive] = [test.workers[0][0], test.workers[1][0]];
    test.world.pass(lease - TICK, &[line, alive]);
    assert!(matches!(test.world.refused(line, open("another")), Refusal::Busy { .. }));
    test.world.pass(TICK, &[line, alive]);
    let another = coordinator_is(test.world.ask(line, open("another")));
    assert_eq!(test.push(0, effect(&another, 1)), applied(64));
    // What the forgotten one sends late is refused, and nobody lost what has settled.
    let coordinator = opened[63].coordinator;
    assert_eq!(
        test.push(0, effect(&opened[63], 1)),
        Err(Refusal::UnknownCoordinator { coordinator })
    );
    assert_eq!(test.push(0, effect(&opened[0], 1)), REPEATED);
    assert!(matches!(test.world.refused(line, open("one more")), Refusal::Busy { .. }));
    let is_forgotten = |event: &Event| matches!(event, Event::CoordinatorForgotten { .. });
    let events = &test.world.events;
    assert!(!events.iter().any(|(_, event)| is_forgotten(event)), "{events:?}");
}

#[test]
fn a_coordinator_whose_connection_is_open_is_not_forgotten() {
    let lease = Duration::from_secs(1);
    let mut test = effects_of(1, |config| config.lease(lease));
    let [line, alive] = [test.workers[0][0], test.workers[1][0]];
    for index in 0..COORDINATORS_MAX {
        coordinator_is(test.world.ask(line, open(&format!("trainer {index}"))));
    }
    test.world.pass(10 * lease, &[line, alive]);
    assert!(matches!(test.world.refused(alive, open("another")), Refusal::Busy { .. }));
}

#[test]
fn what_has_settled_is_forgotten_after_its_time_and_is_refused_for_good() {
    let lease = Duration::from_secs(1);
    let kept = Duration::from_secs(60);
    let mut test = effects_of(2, |config| config.lease(lease).effects_kept(kept));
    let [owner, other] = [test.workers[0][0], test.workers[0][1]];
    let mut reader = Peer { role: Role::Reader {}, ..worker(7) };
    let line = test.world.join(1, &mut reader);
    // The other shard knows 64 coordinators, whose effects have settled there.
    let as_opened = |name: String, opened: &CoordinatorIs| -> Message {
        let CoordinatorIs { coordinator, epoch, .. } = *opened;
        message::OpenCoordinator { name: Text::clipped(&name), coordinator, epoch }.into()
    };
    let d = bytes_of(&[1_f64; 2]);
    let mut first = None;
    for index in 0..COORDINATORS_MAX {
        let name = format!("trainer {index}");
        let opened = coordinator_is(test.world.ask(owner, open(&name)));
        coordinator_is(test.world.ask(line, as_opened(name, &opened)));
        let gradient = test.gradient(0, effect(&opened, 1));
        let push_slot = test.world.push_slot(other);
        let push = Push { push_slot, ..gradient };
        assert!(outcome(test.world.push_answer(other, &push, &[(0, &d)])).is_ok());
        test.world.ask(
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
    test.world.disconnect(line);
    let alive = [owner, other, test.workers[1][0], test.workers[1][1]];
    test.world.pass(kept - lease, &alive);
    let newest = CoordinatorIs {
        coordinator: CoordinatorId(first.coordinator.0 + 500),
        epoch: CoordinatorEpoch(first.epoch.0 + 500),
        ..first
    };
    let refused = test.world.refused(other, as_opened("another".to_owned(), &newest));
    assert!(matches!(refused, Refusal::Busy { .. }), "{refused}");
    test.world.pass(lease, &alive);
    // A request that is refused takes nobody's place.
    let zero = CoordinatorIs { coordinator: CoordinatorId(0), ..newest };
    let refused = test.world.refused(other, as_opened("another".to_owned(), &zero));
    assert!(matches!(refused, Refusal::CoordinatorEpoch { .. }), "{refused}");
    let forgotten = |event: &(usize, Event)| event.1.kind() == "coordinator-forgotten";
    assert!(!test.world.events.iter().any(forgotten), "{:?}", test.world.events);
    coordinator_is(test.world.ask(other, as_opened("another".to_owned(), &newest)));
    let (shard, event) = test.world.events.pop().unwrap();
    assert_eq!((shard, event.kind()), (1, "coordinator-forgotten"));
    assert!(
        event.to_string().contains("has forgotten the effects of coordinator \"trainer "),
        "{event}"
    );
    // The step owner still knows the coordinator: its effects must not count here again.
    let Event::CoordinatorForgotten { coordinator, .. } = event else { panic!() };
    let resumed = CoordinatorIs { epoch: CoordinatorEpoch(newest.epoch.0 + 1), ..first };
    let refused = test.world.refused(other, as_opened(coordinator, &resumed));
    assert!(matches!(refused, Refusal::CoordinatorEpoch { .. }), "{refused}");
}

#[test]
fn effects_need_values_a_name_asynchronous_mode_and_gradients() {
    let mut bare = World::bare(variables(), Sgd::new(1.0), |config| config);
    let line = bare.join(0, &mut super::peers::chief());
    for request in [open("trainer"), close(CoordinatorEpoch(1))] {
        assert_eq!(bare.refused(line, request), Refusal::NotInitialized {});
    }
    let synchronous = super::synchronous::synchronous(1, 1);
    let (mut world, lines) =
        World::ready(variables(), Sgd::new(1.0), |config| config.mode(synchronous));
    let refused = world.refused(lines[0], open("trainer"));
    assert!(matches!(refused, Refusal::Unsupported { kind: 70, .. }), "{refused}");
    let closed = no_effects(CoordinatorId(1), CoordinatorEpoch(1));
    let push = Push { effect: Some(effect(&closed, 1)), ..world.gradient(lines[0], 1) };
    let refused = outcome(world.push_answer(lines[0], &push, &[(0, &ones())]));
    assert!(matches!(refused, Err(Refusal::Unsupported { kind: 75, .. })), "{refused:?}");

    let mut test = one_shard();
    let line = test.workers[0][0];
    let refused = test.world.refused(line, open(""));
    assert!(matches!(refused, Refusal::Unsupported { .. }), "{refused}");
    let opened = test.open();
    let push_slot = test.world.push_slot(line);
    let assign = Push::plain(1, Operation::Assign {}, push_slot);
    let assign = Push { effect: Some(effect(&opened, 1)), ..assign };
    let refused = outcome(test.world.push_answer(line, &assign, &[(0, &ones())]));
    assert!(matches!(refused, Err(Refusal::Unsupported { .. })), "{refused:?}");
    let reader = Peer { role: Role::Reader {}, ..worker(7) };
    let (reader, _) = test.world.handshake(0, reader.hello(0), false).unwrap();
    // A coordinator need not be a member.
    let request = test.world.say(reader, open("trainer"));
    let opened = test.world.answer(reader, request);
    assert!(matches!(opened, Some(Message::CoordinatorIs(_))), "{opened:?}");
}

#[test]
fn a_repeated_push_under_a_token_of_another_complete_push_is_refused() {
    let mut test = one_shard();
    let opened = test.open();
    assert_eq!(test.push(0, effect(&opened, 1)), applied(1));
    let line = test.workers[0][0];
    let body = ones();
    let paid = test.gradient(0, effect(&opened, 2));
    let request = test.world.push(line, &paid, &[(0, &body)]);
    let sequence = 50;
    let push_slot = test.world.push_slot(line);
    let second = Push { sequence, push_slot, effect: Some(effect(&opened, 1)), ..paid };
    let refused = test.world.push(line, &second, &[(0, &body)]);
    let refused = outcome(test.world.answer(line, refused).unwrap());
    assert!(matches!(refused, Err(Refusal::Token { .. })), "{refused:?}");
    test.world.work();
    assert_eq!(outcome(test.world.answer(line, request).unwrap()), applied(2));
}

#[test]
fn effects_survive_a_loss_of_power() {
    let mut test =
        effects_of(1, |config| config.storage(Storage::memory().durability(Durability::Power)));
    let opened = test.open();
    assert_eq!(test.push(0, effect(&opened, 3)), applied(1));
    let disk = test.world.shard_files[0].disk().clone();
    test.world.reboot(0, disk).unwrap();
    test.workers = [1, 2].map(|task| vec![test.world.join(0, &mut worker(task))]);
    assert_eq!(test.push(1, effect(&opened, 3)), REPEATED);
    assert_eq!(test.counted(), (1.0, 1));
}
