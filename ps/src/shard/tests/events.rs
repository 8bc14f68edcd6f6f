//! The events of workers, waits and steps. Time is virtual.

use std::time::Duration;

use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message;
use pushpull_common::status::TrainingPhase;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, variables, worker};
use super::status::with_workers;
use super::synchronous::{ACCEPTED, ShardCluster, synchronous};
use super::world::World;
use crate::config::PsConfig;
use crate::event::Event;
use crate::shard::TICK;

const LEASE: Duration = Duration::from_secs(5);

/// Takes the events that the shards have reported.
fn taken(world: &mut World) -> Vec<Event> {
    std::mem::take(&mut world.events).into_iter().map(|(_, event)| event).collect()
}

fn kinds(world: &mut World) -> Vec<&'static str> {
    taken(world).iter().map(Event::kind).collect()
}

#[test]
fn a_worker_joins_and_leaves_or_is_lost_and_joins_again() {
    // Only the step owner of the two shards reports.
    let configure = |config: PsConfig| config.shards(2).lease(LEASE);
    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let mut peer = worker(3);
    let task = TaskId::worker(3);
    let lines = [world.join(0, &mut peer), world.join(1, &mut peer)];
    let joined =
        |again| Event::WorkerJoined { task: task.clone(), step: 0, again, displaced: None };
    assert_eq!(taken(&mut world), [joined(false)]);
    let again = world.join(0, &mut peer);
    assert_eq!(taken(&mut world), [], "a new connection of a member is no event");
    for line in [again, lines[1], again] {
        world.ask(line, message::Leave {}.into());
    }
    assert_eq!(taken(&mut world), [Event::WorkerLeft { task: task.clone(), step: 0 }]);
    world.join(0, &mut peer);
    assert_eq!(taken(&mut world), [joined(true)]);
    world.pass(LEASE + TICK, &[]);
    let silent = LEASE;
    let tokens = 0;
    let lost = Event::WorkerLost { task: task.clone(), step: 0, silent, tokens };
    assert_eq!(taken(&mut world), [lost]);
    let mut restarted = peer.restarted();
    world.join(0, &mut restarted);
    assert_eq!(taken(&mut world), [joined(true)]);
    // Two processes as one task.
    world.now += TICK;
    world.join(0, &mut restarted.restarted());
    let displaced = Some(TICK);
    let second = Event::WorkerJoined { task: task.clone(), step: 0, again: true, displaced };
    assert_eq!(taken(&mut world), [second]);
}

#[test]
fn a_lost_worker_is_named_with_its_tokens() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config.lease(LEASE));
    world.token(lines[0]);
    world.token(lines[0]);
    taken(&mut world);
    world.pass(LEASE, &[]);
    let [Event::WorkerLost { tokens: 2, .. }] = taken(&mut world)[..] else {
        panic!("not lost with two tokens")
    };
}

#[test]
fn a_wait_is_reported_once_after_a_lease_and_so_is_its_end() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| with_workers(config, 2));
    let a = cluster.token(0);
    let b = cluster.token(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    assert_eq!(cluster.try_token(0), Ok(None));
    taken(&mut cluster.world);
    cluster.pass(LEASE - TICK, &[0, 1]);
    assert_eq!(taken(&mut cluster.world), []);
    cluster.pass(4 * LEASE, &[0, 1]);
    let events = taken(&mut cluster.world);
    let [Event::WaitBegan { step: 0, wait }] = &events[..] else { panic!("{events:?}") };
    assert_eq!((&wait.workers[..], wait.waited), (&[TaskId::worker(1)][..], LEASE));
    assert_eq!(cluster.push(1, b, 1.0), ACCEPTED(0));
    cluster.pass(TICK, &[0, 1]);
    let workers = vec![TaskId::worker(1)];
    let waited = 5 * LEASE;
    assert_eq!(taken(&mut cluster.world), [Event::WaitEnded { step: 1, workers, waited }]);
}

#[test]
fn a_wait_goes_on_if_its_request_is_repeated() {
    let mut cluster = ShardCluster::new(1, synchronous(2, 2), |config| config);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(0, a, 1.0);
    for _ in 0..3 {
        assert_eq!(cluster.try_token(0), Ok(None));
        cluster.pass(LEASE, &[0, 1]);
        // The worker gives up, connects again and asks again.
        cluster.world.disconnect(cluster.replicas[0].lines[0]);
        cluster.connect(0);
    }
    assert_eq!(cluster.try_token(0), Ok(None));
    cluster.push(1, b, 1.0);
    cluster.pass(TICK, &[0, 1]);
    let waits = kinds(&mut cluster.world).into_iter().filter(|kind| kind.starts_with("wait"));
    assert_eq!(waits.collect::<Vec<_>>(), ["wait-began", "wait-ended"]);
}

#[test]
fn a_step_with_fewer_gradients_names_the_absent_workers_once() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| with_workers(config, 3));
    let step = |cluster: &mut ShardCluster, replicas: &[usize]| {
        for &replica in replicas {
            let token = cluster.token(replica);
            cluster.push(replica, token, 1.0);
        }
        let mut events = taken(&mut cluster.world);
        events.retain(|event| event.kind() == "step-shrunk");
        events
    };
    assert_eq!(step(&mut cluster, &[0, 1]), []);
    cluster.leave(1);
    let absent = vec![TaskId::worker(1), TaskId::worker(2)];
    let shrunk =
        |step| Event::StepShrunk { step, gradients: 1, aggregate: 2, absent: absent.clone() };
    assert_eq!(step(&mut cluster, &[0]), [shrunk(2)]);
    assert_eq!(step(&mut cluster, &[0]), [], "the number is unchanged");
    cluster.connect(1);
    assert_eq!(step(&mut cluster, &[0, 1]), []);
    cluster.leave(1);
    assert_eq!(step(&mut cluster, &[0]), [shrunk(5)]);
}

#[test]
fn the_last_step_of_the_data_or_of_the_chief_is_not_shrunk() {
    let mut cluster = ShardCluster::new(1, synchronous(2, 2), |config| config);
    cluster.world.tick();
    let a = cluster.token(0);
    let line = cluster.replicas[0].lines[0];
    cluster.world.ask(line, message::Finish {}.into());
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    cluster.world.tick();
    let events = taken(&mut cluster.world);
    let ended = Event::TrainingEnded { step: 1, phase: TrainingPhase::Finished };
    assert_eq!(events.last(), Some(&ended));
    assert!(events.iter().all(|event| event.kind() != "step-shrunk"), "{events:?}");
}

#[test]
fn the_end_of_a_training_is_one_event_before_its_workers_leave() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config.last_step(1));
    world.tick();
    let push = world.gradient(lines[0], 1);
    world.push_answer(lines[0], &push, &[(0, &[0; 16])]);
    world.ask(lines[0], message::Leave {}.into());
    world.pass(2 * LEASE, &[]);
    assert_eq!(kinds(&mut world), ["worker-joined", "training-ended", "worker-left"]);
    // A server that finds the end in its state reports nothing.
    world.restart(0).unwrap();
    world.pass(LEASE, &[]);
    assert_eq!(taken(&mut world), []);
}

#[test]
fn a_variable_without_a_gradient_in_a_hundred_updates_is_reported_once() {
    for mode in [None, Some(synchronous(1, 1))] {
        let configure = |config: PsConfig| match mode {
            Some(mode) => config.mode(mode).rate_for("frozen", 0.0),
            None => config.rate_for("frozen", 0.0),
        };
        let mut all = variables();
        all.push(VariableSpec::f32("frozen", [2]).unwrap());
        let (mut world, lines) = World::ready(all, Sgd::new(1.0), configure);
        taken(&mut world);
        // `w` gets gradients, `d` gets none. The others are not trained.
        for sequence in 1..=300 {
            let grant = world.token(lines[0]);
            let push = Push::gradient(sequence, grant, world.push_slot(lines[0]));
            let answer = world.push_answer(lines[0], &push, &[(0, &[0; 16])]);
            assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
            assert_eq!(world.events.len(), usize::from(sequence >= 100), "push {sequence}");
        }
        let shard = ShardId::default();
        let variable = "d".to_owned();
        let updates = 100;
        assert_eq!(taken(&mut world), [Event::NeverTrained { shard, variable, updates }]);
    }
}

#[test]
fn a_variable_that_is_trained_by_every_hundredth_push_is_not_reported() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config);
    taken(&mut world);
    for sequence in 1..=200 {
        let push = world.gradient(lines[0], sequence);
        let bytes = if sequence % 100 == 0 { 32 } else { 16 };
        world.push_answer(lines[0], &push, &[(0, &vec![0; bytes])]);
    }
    assert_eq!(taken(&mut world), []);
}
