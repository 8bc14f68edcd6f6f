//! The staleness of gradients, as each shard counts it.

use pushpull_common::ids::GlobalStep;
use pushpull_common::initializer::Initializer;
use pushpull_common::protocol::{Grant, Message, Outcome};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Peer, Push, bytes_of, unpack, worker};
use super::world::{ConnectionId, World};
use crate::config::PsConfig;
use crate::metrics::Metrics;

/// A vector of `f64` that is initialized to ones.
pub(super) fn ones(name: &str, elements: u64) -> VariableSpec {
    let shape = Shape::new([elements]).unwrap();
    VariableSpec::new(name, DType::F64, shape).unwrap().initializer(Initializer::Ones)
}

/// Two shards with two elements each.
fn two_shards(configure: impl Fn(PsConfig) -> PsConfig) -> World {
    let variables = vec![ones("a", 2), ones("b", 2)];
    World::ready(variables, Sgd::new(0.5), |config| configure(config.shards(2))).0
}

/// A client with a connection to each shard.
pub(super) struct Client {
    pub(super) lines: Vec<ConnectionId>,
    sequence: u64,
}

/// A token, the values that a client has pulled under it, and how many gradients each shard had
/// applied to them.
#[derive(Clone, Debug)]
pub(super) struct PulledStep {
    pub(super) grant: Grant,
    pub(super) read: Vec<Option<u64>>,
    /// The values of each shard.
    pub(super) values: Vec<Vec<u8>>,
}

impl Client {
    pub(super) fn join(world: &mut World, task: u32) -> Client {
        let mut peer: Peer = worker(task);
        let shards = 0..world.shards.len();
        let lines = shards.map(|shard| world.join(shard, &mut peer)).collect();
        Client { lines, sequence: 0 }
    }

    /// Requests a token and pulls all values. The tests push nothing but gradients, so versions are
    /// counts of gradients.
    pub(super) fn step(&self, world: &mut World) -> PulledStep {
        let grant = world.token(self.lines[0]);
        let mut step = PulledStep { grant, read: Vec::new(), values: Vec::new() };
        for &line in &self.lines {
            world.pull(line, grant.step.0);
            let (values, gradients) = unpack(world.streamed(line).expect("a pull is answered"));
            step.read.push(Some(gradients));
            step.values.push(values);
        }
        step.grant.step = GlobalStep(step.read[0].unwrap());
        step
    }

    /// Sends a push with these bytes to these shards, and does no work on it.
    pub(super) fn send(&mut self, world: &mut World, step: &PulledStep, parts: &[(usize, &[u8])]) {
        self.sequence += 1;
        for &(shard, body) in parts {
            let line = self.lines[shard];
            let push_slot = world.push_slot(line);
            let push = Push::gradient(self.sequence, step.grant, push_slot);
            world.push(line, &Push { read: step.read[shard], ..push }, &[(0, body)]);
        }
    }

    /// Sends a push and does all work. Returns the staleness that the step owner answers.
    pub(super) fn push(
        &mut self,
        world: &mut World,
        step: &PulledStep,
        parts: &[(usize, &[u8])],
    ) -> Option<u64> {
        self.send(world, step, parts);
        world.work();
        let received = world.received.remove(&self.lines[0])?;
        received.into_iter().find_map(|received| match received {
            super::world::Received::Message { message: Message::PushAnswer(answer), .. } => {
                match answer.outcome {
                    Outcome::Applied { staleness, .. } => Some(staleness),
                    other => panic!("{other:?}"),
                }
            }
            _ => None,
        })
    }
}

/// Returns the metrics of one shard.
pub(super) fn metrics(world: &World, shard: usize) -> Metrics {
    Metrics::sum([&*world.counters[shard]])
}

fn histogram(world: &World, shard: usize) -> String {
    metrics(world, shard).staleness.to_string()
}

#[test]
fn each_shard_counts_the_gradients_applied_since_the_pull() {
    let mut world = two_shards(|config| config);
    let mut a = Client::join(&mut world, 1);
    let mut b = Client::join(&mut world, 2);
    let ones = bytes_of(&[1_f64, 1.0]);
    let stale = a.step(&mut world);
    for _ in 0..2 {
        let step = b.step(&mut world);
        assert_eq!(b.push(&mut world, &step, &[(0, &ones), (1, &ones)]), Some(0));
    }
    // Three more pushes have no part for the other shard.
    for _ in 0..3 {
        let step = b.step(&mut world);
        b.push(&mut world, &step, &[(0, &[])]);
    }
    assert_eq!(a.push(&mut world, &stale, &[(0, &ones), (1, &ones)]), Some(5));
    assert_eq!(histogram(&world, 0), "0: 5, 4-7: 1");
    assert_eq!(histogram(&world, 1), "0: 2, 2-3: 1");
    assert_eq!(metrics(&world, 1).staleness.mean(), Some(2.0 / 3.0));
    let all = world.metrics();
    assert_eq!((all.staleness.count(), all.gradients_applied), (9, 9));
    assert_eq!(all.staleness_unknown, 0);
}

#[test]
fn impossible_counts_are_clamped_and_missing_ones_are_counted() {
    let mut world = two_shards(|config| config);
    let mut a = Client::join(&mut world, 1);
    let ones = bytes_of(&[1_f64, 1.0]);
    for read in [Some(99), Some(u64::MAX), None] {
        let step = a.step(&mut world);
        let claimed = step.grant.step.0.saturating_add(read.unwrap_or(0));
        let grant = Grant { step: GlobalStep(claimed), ..step.grant };
        let step = PulledStep { grant, read: vec![read; 2], ..step };
        assert_eq!(a.push(&mut world, &step, &[(0, &ones), (1, &ones)]), Some(0));
    }
    assert_eq!((histogram(&world, 0), histogram(&world, 1)), ("0: 3".into(), "0: 2".into()));
    let unknown = [0, 1].map(|shard| metrics(&world, shard).staleness_unknown);
    assert_eq!(unknown, [0, 1], "the step owner knows when the token was granted");
}

#[test]
fn a_gradient_that_is_overtaken_while_it_arrives_is_one_staler() {
    let mut world = World::ready(vec![ones("a", 4)], Sgd::new(0.5), |config| config).0;
    let a = Client::join(&mut world, 1);
    let mut b = Client::join(&mut world, 2);
    let slow = a.step(&mut world);
    let fast = b.step(&mut world);
    let push = Push::gradient(1, slow.grant, world.push_slot(a.lines[0]));
    let push = Push { read: slow.read[0], ..push };
    let half = bytes_of(&[1_f64, 1.0]);
    // The first part is applied as it arrives, with staleness 0.
    world.send(a.lines[0], push.envelope(), push.part(0, None), &half);
    assert_eq!(b.push(&mut world, &fast, &[(0, &bytes_of(&[2_f64; 4]))]), Some(0));
    let last = world.send(a.lines[0], push.envelope(), push.part(16, Some(32)), &half);
    world.work();
    let Some(Message::PushAnswer(answer)) = world.answer(a.lines[0], last) else { panic!() };
    assert!(matches!(answer.outcome, Outcome::Applied { staleness: 1, .. }), "{answer:?}");
    assert_eq!(histogram(&world, 0), "0: 1, 1: 1");
    assert_eq!(a.step(&mut world).values[0], bytes_of(&[-0.5_f64; 4]));
}

#[test]
fn only_the_step_owner_knows_the_staleness_after_a_kill() {
    let mut world = two_shards(|config| config);
    let mut a = Client::join(&mut world, 1);
    let mut b = Client::join(&mut world, 2);
    let ones = bytes_of(&[1_f64, 1.0]);
    let stale = a.step(&mut world);
    let fresh = b.step(&mut world);
    b.push(&mut world, &fresh, &[(0, &ones), (1, &ones)]);
    a.send(&mut world, &stale, &[(0, &ones), (1, &ones)]);
    for shard in [0, 1] {
        world.restart(shard).unwrap();
    }
    world.work();
    assert_eq!((histogram(&world, 0), histogram(&world, 1)), ("0: 1, 1: 1".into(), "0: 1".into()));
    assert_eq!(metrics(&world, 1).staleness_unknown, 1);
    let a = Client::join(&mut world, 1);
    let values = a.step(&mut world).values;
    assert_eq!(values, [bytes_of(&[0_f64; 2]), bytes_of(&[0_f64; 2])], "each is applied once");
}
