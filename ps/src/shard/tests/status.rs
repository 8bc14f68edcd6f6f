//! The status of a training, as the step owner publishes it.

use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::data_set::DataSet;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{self, DeclareData};
use pushpull_common::status::{DataStatus, HeldToken, Presence, Status, TrainingPhase};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, chief, variables, worker};
use super::synchronous::{ACCEPTED, ShardCluster, synchronous};
use super::world::World;
use crate::config::{Asynchronous, PsConfig};
use crate::shard::TICK;

const LEASE: Duration = Duration::from_secs(5);

/// Sets the cluster of one ps task and this many workers.
pub(super) fn with_workers(config: PsConfig, workers: u32) -> PsConfig {
    let workers = (2..workers + 2).map(|port| format!("127.0.0.1:{port}"));
    let cluster = ClusterSpec::builder().job("ps", ["127.0.0.1:1"]).job("worker", workers);
    PsConfig { cluster: cluster.build().unwrap(), ..config }
}

fn status(world: &World) -> Status {
    world.shards[0].status(world.now)
}

fn workers(indices: &[u32]) -> Vec<TaskId> {
    indices.iter().map(|&index| TaskId::worker(index)).collect()
}

#[test]
fn the_phase_follows_the_training() {
    let configure = |config: PsConfig| with_workers(config, 3).last_step(1);
    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let before = status(&world);
    assert_eq!((before.phase, before.restore_epoch), (TrainingPhase::NoVariables, 0));
    assert_eq!(before.never_joined, workers(&[0, 1, 2]));
    let early = world.join(0, &mut worker(1));
    world.say(early, message::AwaitReady {}.into());
    world.now += TICK;
    let waiting = status(&world).waiting.expect("a worker waits for the chief");
    assert_eq!((waiting.workers, waiting.waited), (workers(&[0]), TICK));
    assert_eq!(
        waiting.reason,
        "the chief /job:worker/task:0 (not joined yet) to initialize the variables"
    );

    let line = world.join(0, &mut chief());
    let catalogue = world.catalogue.clone();
    world.declare(line, &catalogue);
    assert_eq!(status(&world).phase, TrainingPhase::Declared);
    world.ask(line, message::Initialize { epoch: 1.into() }.into());
    let ready = status(&world);
    assert_eq!((ready.phase, ready.restore_epoch), (TrainingPhase::Training, 1));
    assert_eq!((ready.waiting, ready.never_joined), (None, workers(&[2])));

    let push = world.gradient(line, 1);
    world.push_answer(line, &push, &[(0, &[0; 16])]);
    let ended = status(&world);
    assert_eq!((ended.phase, ended.global_step), (TrainingPhase::LastStep, 1));
    world.restart(0).unwrap();
    assert_eq!(status(&world).phase, TrainingPhase::LastStep);
}

#[test]
fn a_worker_that_waits_for_a_refused_chief_is_told_the_refusal() {
    let configure = |config: PsConfig| with_workers(config, 2).rate_for("typo*", 0.5);
    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let line = world.join(0, &mut chief());
    let catalogue = world.catalogue.clone();
    let refused = world.declare(line, &catalogue);
    assert!(matches!(refused, Message::Refused(_)), "{refused:?}");
    let early = world.join(0, &mut worker(1));
    world.say(early, message::AwaitReady {}.into());
    let reason = status(&world).waiting.expect("a worker waits for the chief").reason;
    let expected = "to initialize the variables; /job:ps/task:0/shard:0 has refused to declare the \
                    variables: ";
    assert!(reason.contains(expected) && reason.contains("typo*"), "{reason}");
}

#[test]
fn a_chief_or_the_server_ends_a_training() {
    for synchronous_steps in [false, true] {
        let mode = |config: PsConfig| match synchronous_steps {
            true => config.mode(synchronous(1, 1)),
            false => config,
        };
        let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), mode);
        assert_eq!(status(&world).phase, TrainingPhase::Training);
        world.ask(lines[0], message::Finish {}.into());
        assert_eq!(status(&world).phase, TrainingPhase::Finished);
    }
}

#[test]
fn members_have_their_presence_their_tokens_and_their_step_time() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    world.disconnect(lines[0]);
    for (sequence, pause) in [(1, 100), (2, 300)] {
        world.pass(Duration::from_millis(pause), &[a, b]);
        let push = world.gradient(a, sequence);
        world.push_answer(a, &push, &[(0, &[0; 16])]);
    }
    let _held = world.token(b);
    world.pass(Duration::from_millis(200), &[a]);
    let members = status(&world).members;
    let [_, first, second] = &members[..] else { panic!("{members:?}") };
    assert_eq!((&first.task, first.presence), (&TaskId::worker(1), Presence::Present));
    assert_eq!((first.silent, first.step_time), (Duration::ZERO, Some(Duration::from_millis(300))));
    assert_eq!(first.tokens, []);
    let held = HeldToken { step: 2, held: Duration::from_millis(200) };
    assert_eq!((&second.tokens[..], second.silent), (&[held][..], held.held));
    assert_eq!(second.step_time, None, "it has pushed nothing");

    world.ask(a, message::Leave {}.into());
    world.pass(LEASE, &[]);
    let presences: Vec<Presence> = status(&world).members.iter().map(|m| m.presence).collect();
    assert_eq!(presences, [Presence::Lost, Presence::Left, Presence::Lost]);
    // A restart of the worker begins its step time again.
    let _again = world.join(0, &mut worker(1).restarted());
    let again = &status(&world).members[1];
    assert_eq!((again.presence, again.step_time), (Presence::Present, None));
}

#[test]
fn a_synchronous_step_names_whom_it_waits_for() {
    let mut cluster = ShardCluster::new(2, synchronous(2, 2), |config| with_workers(config, 2));
    let a = cluster.token(0);
    let b = cluster.token(1);
    assert_eq!(status(&cluster.world).waiting, None);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(0));
    assert_eq!(cluster.try_token(0), Ok(None));
    cluster.pass(Duration::from_secs(1), &[0, 1]);
    let waiting = status(&cluster.world).waiting.expect("the first worker waits");
    assert_eq!((waiting.workers, waiting.shards), (workers(&[1]), vec![]));
    assert_eq!(waiting.waited, Duration::from_secs(1));
    assert!(waiting.reason.starts_with("step 0, which has 1 of 2 gradients; /job:worker/task:1"));
    // Its gradient is whole on the step owner's shard only.
    cluster.replicas[1].sequence += 1;
    assert_eq!(cluster.push_to(0, 1, b, 1.0), None);
    let waiting = status(&cluster.world).waiting.unwrap();
    assert_eq!(waiting.shards, [cluster.world.parts(1).id]);
    cluster.push_to(1, 1, b, 1.0);
    let after = status(&cluster.world);
    assert_eq!((after.waiting, after.global_step), (None, 1));
    let times: Vec<_> = after.members.iter().map(|member| member.step_time).collect();
    assert_eq!(times, [None, None], "each has pushed once");
    assert_eq!(cluster.world.shards[1].status(cluster.world.now).waiting, None);
}

#[test]
fn a_worker_that_never_came_is_waited_for_by_name() {
    let configure = |config: PsConfig| with_workers(config, 2).mode(synchronous(2, 2)).lease(LEASE);
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), configure);
    let push = world.gradient(lines[0], 1);
    let answer = world.push_answer(lines[0], &push, &[(0, &[0; 32])]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    world.say(lines[0], message::TokenRequest { newest: push.grant.token }.into());
    let waiting = status(&world).waiting.expect("the chief waits");
    assert_eq!(waiting.workers, workers(&[1]));
}

#[test]
fn a_worker_ahead_waits_for_the_slowest() {
    let configure = |config: PsConfig| config.mode(Asynchronous::default().wait_ahead(1));
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), configure);
    world.disconnect(lines[0]);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    let _slow = world.token(b);
    let push = world.gradient(a, 1);
    world.push_answer(a, &push, &[(0, &[0; 16])]);
    world.say(a, message::TokenRequest { newest: push.grant.token }.into());
    let waiting = status(&world).waiting.expect("the fast one waits");
    assert_eq!(waiting.workers, workers(&[2]));
}

#[test]
fn the_data_position_is_part_of_the_status() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config);
    assert_eq!(status(&world).data, None);
    let set = DataSet::new("train", 7, 3).unwrap().epochs(2);
    world.ask(lines[0], DeclareData::from(&set).into());
    let mut expected = DataStatus { name: "train".to_owned(), epoch: 0, begun: 0, unspent: 0 };
    assert_eq!(status(&world).data.as_ref(), Some(&expected));
    for sequence in 1..=6 {
        let grant = world.token(lines[0]);
        let push = Push::gradient(sequence, grant, world.push_slot(lines[0]));
        world.push_answer(lines[0], &push, &[(0, &bytes_of(&[1_f32; 3]))]);
    }
    expected.epoch = 1;
    expected.begun = 6;
    let ended = status(&world);
    assert_eq!((ended.data, ended.phase), (Some(expected), TrainingPhase::DataEnd));
}
