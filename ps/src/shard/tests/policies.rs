//! The adjustment of stale gradients by each policy, to the bit.

use proptest::prelude::*;
use pushpull_common::initializer::Initializer;
use pushpull_common::protocol::message;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Adam, Optimizer, Sgd};

use super::peers::{Push, bytes_of, f32s, f64s};
use super::random::Random;
use super::staleness::{Client, PulledStep, metrics, ones};
use super::world::World;
use crate::config::{Asynchronous, PsConfig, StalenessPolicy, Storage};

const DAMP: StalenessPolicy = StalenessPolicy::Damp;
const HALF: StalenessPolicy = StalenessPolicy::DelayCompensation { lambda: 0.5 };

/// Two shards with two elements each, all ones, whose learning rate is 0.5.
fn two_shards(configure: impl Fn(PsConfig) -> PsConfig) -> (World, Client, Client) {
    let variables = vec![ones("a", 2), ones("b", 2)];
    let (mut world, _) =
        World::ready(variables, Sgd::new(0.5), |config| configure(config.shards(2)));
    let a = Client::join(&mut world, 1);
    let b = Client::join(&mut world, 2);
    (world, a, b)
}

fn values(world: &mut World, client: &Client) -> Vec<Vec<f64>> {
    client.step(world).values.iter().map(|bytes| f64s(bytes)).collect()
}

#[test]
fn a_damped_gradient_is_scaled_by_its_staleness() {
    let (mut world, mut a, mut b) =
        two_shards(|config| config.mode(Asynchronous::default().staleness(DAMP)));
    let stale = a.step(&mut world);
    for parts in [&[0, 1][..], &[0], &[0]] {
        let step = b.step(&mut world);
        let body = bytes_of(&[1_f64, -2.0]);
        let parts: Vec<(usize, &[u8])> = parts.iter().map(|&shard| (shard, &body[..])).collect();
        b.push(&mut world, &step, &parts);
    }
    assert_eq!(values(&mut world, &b), [[-0.5, 4.0], [0.5, 2.0]]);
    let body = bytes_of(&[1_f64, 8.0]);
    a.push(&mut world, &stale, &[(0, &body), (1, &body)]);
    // A quarter of the rate at staleness 3 on one shard, half of it at staleness 1 on the other.
    assert_eq!(values(&mut world, &b), [[-0.625, 3.0], [0.25, 0.0]]);
}

#[test]
fn a_gradient_is_compensated_for_the_change_of_its_shard() {
    let (mut world, mut a, mut b) =
        two_shards(|config| config.mode(Asynchronous::default().staleness(HALF)));
    let stale = a.step(&mut world);
    let fresh = b.step(&mut world);
    let bodies = [bytes_of(&[2_f64, -2.0]), bytes_of(&[1_f64, 0.0])];
    b.push(&mut world, &fresh, &[(0, &bodies[0]), (1, &bodies[1])]);
    assert_eq!(values(&mut world, &b), [[0.0, 2.0], [0.5, 1.0]]);
    let body = bytes_of(&[2_f64, 1.0]);
    a.push(&mut world, &stale, &[(0, &body), (1, &body)]);
    // 2 + 4/2 (0-1) = 0 and 1 + 1/2 (2-1) = 1.5; 2 + 4/2 (0.5-1) = 1 and 1 + 0 = 1.
    assert_eq!(values(&mut world, &b), [[0.0, 1.25], [0.0, 0.5]]);
    assert_eq!(world.metrics().gradients_uncompensated, 0);
}

/// A client pushes a gradient that was not computed from the values that it pulled last.
#[test]
fn a_gradient_whose_base_values_are_lost_is_not_compensated() {
    let (mut world, mut a, mut b) =
        two_shards(|config| config.mode(Asynchronous::default().staleness(HALF)));
    let ones = bytes_of(&[1_f64, 1.0]);
    let early = a.step(&mut world);
    let fresh = b.step(&mut world);
    b.push(&mut world, &fresh, &[(0, &ones), (1, &ones)]);
    let late = a.step(&mut world);
    a.push(&mut world, &early, &[(0, &ones), (1, &ones)]);
    assert_eq!(values(&mut world, &b), [[0.0; 2]; 2]);
    let lacking = [0, 1].map(|shard| metrics(&world, shard).gradients_uncompensated);
    assert_eq!(lacking, [1, 1]);
    // 1 + 1/2 (0-0.5) = 0.75: the values that were pulled later are kept.
    a.push(&mut world, &late, &[(0, &ones), (1, &ones)]);
    assert_eq!(values(&mut world, &b), [[-0.375; 2]; 2]);
    assert_eq!(world.metrics().gradients_uncompensated, 2);
}

#[test]
fn base_values_are_lost_with_the_process() {
    let (mut world, mut a, mut b) =
        two_shards(|config| config.mode(Asynchronous::default().staleness(HALF)));
    let ones = bytes_of(&[1_f64, 1.0]);
    let stale = a.step(&mut world);
    let fresh = b.step(&mut world);
    b.push(&mut world, &fresh, &[(0, &ones), (1, &ones)]);
    a.send(&mut world, &stale, &[(0, &ones), (1, &ones)]);
    for shard in [0, 1] {
        world.restart(shard).unwrap();
    }
    world.work();
    let a = Client::join(&mut world, 1);
    assert_eq!(values(&mut world, &a), [[0.0; 2]; 2], "each is applied once");
    assert_eq!(world.metrics().gradients_uncompensated, 2);
}

#[test]
fn copies_count_against_bytes_max_and_are_freed_with_their_clients() {
    let left = |world: &World| world.shards[0].files.budget.left();
    let (mut world, a, b) =
        two_shards(|config| config.mode(Asynchronous::default().staleness(HALF)));
    let before = left(&world);
    for _ in 0..3 {
        a.step(&mut world);
        b.step(&mut world);
    }
    assert_eq!(before - left(&world), 2 * 2 * 16, "two clients on two shards of 16 bytes");
    for &line in &a.lines {
        world.say(line, message::Leave {}.into());
        world.pull(line, 0);
    }
    assert_eq!(before - left(&world), 2 * 16);

    let bytes_max = Storage::BYTES_MAX - before + 16;
    let storage = Storage::memory().bytes_max(bytes_max);
    let (mut world, mut a, mut b) = two_shards(|config| {
        config.mode(Asynchronous::default().staleness(HALF)).storage(storage.clone())
    });
    let stale = a.step(&mut world);
    let fresh = b.step(&mut world);
    let ones = bytes_of(&[1_f64, 1.0]);
    b.push(&mut world, &fresh, &[(0, &ones), (1, &ones)]);
    a.push(&mut world, &stale, &[(0, &ones), (1, &ones)]);
    // 1 + 1/2 (0.5-1) = 0.75 where there was memory.
    assert_eq!(values(&mut world, &b), [[0.125; 2], [0.0; 2]]);
    let lacking = [0, 1].map(|shard| metrics(&world, shard).gradients_uncompensated);
    assert_eq!(lacking, [0, 1], "and the fresh one needed none");
}

#[test]
fn policies_that_need_no_copies_keep_none() {
    for policy in [StalenessPolicy::Ignore, DAMP] {
        let (mut world, a, _) =
            two_shards(|config| config.mode(Asynchronous::default().staleness(policy)));
        let before = world.shards[0].files.budget.left();
        a.step(&mut world);
        assert_eq!(world.shards[0].files.budget.left(), before);
    }
}

/// Elements that fill several tiles and several blocks.
const LARGE: usize = 3 * (64 << 10) / 4 + 5;

/// Returns arbitrary numbers, which differ from element to element.
fn some(seed: usize) -> Vec<f32> {
    (0..LARGE).map(|at| ((at * 37 + seed * 101) % 1000) as f32 / 500.0 - 1.0).collect()
}

/// Covers several tiles and blocks and variables of two types, for a push in one piece or in parts
/// that are applied as they arrive.
#[test]
fn every_element_of_a_large_push_is_compensated_by_its_own_values() {
    let w = VariableSpec::f32("w", [LARGE as u64]).unwrap();
    let v = VariableSpec::new("v", DType::F64, Shape::new([7]).unwrap()).unwrap();
    let wide = |seed: usize| -> Vec<f64> { some(seed)[..7].iter().map(|&x| x.into()).collect() };
    let body = |seed| [bytes_of(&some(seed)), bytes_of(&wide(seed))].concat();
    let first_of_v = bytes_of(&some(0)).len();
    for cuts in [vec![], vec![first_of_v / 2 / 8 * 8], vec![16, 16 << 10, first_of_v]] {
        let variables = vec![w.clone(), v.clone()];
        let (mut world, _) = World::ready(variables, Sgd::new(0.25), |c| {
            c.mode(Asynchronous::default().staleness(HALF))
        });
        let a = Client::join(&mut world, 1);
        let mut b = Client::join(&mut world, 2);
        let stale = a.step(&mut world);
        let fresh = b.step(&mut world);
        b.push(&mut world, &fresh, &[(0, &body(1))]);
        let push = Push::gradient(1, stale.grant, world.push_slot(a.lines[0]));
        let body = body(2);
        let mut parts = Vec::new();
        for (index, &start) in [0].iter().chain(&cuts).enumerate() {
            let end = cuts.get(index).copied().unwrap_or(body.len());
            parts.push((start as u64, &body[start..end]));
        }
        let push = Push { read: stale.read[0], ..push };
        world.push_answer(a.lines[0], &push, &parts);
        let found = &b.step(&mut world).values[0];
        let narrow = some(1).into_iter().zip(some(2)).map(|(moved, g)| {
            let now = 0.0 - 0.25 * moved;
            now - 0.25 * (g + (0.5 * g) * (g * (now - 0.0)))
        });
        assert!(narrow.eq(f32s(&found[..first_of_v])[..LARGE].iter().copied()), "{cuts:?}");
        let wide = wide(1).into_iter().zip(wide(2)).map(|(moved, g)| {
            let now = 0.0 - 0.25 * moved;
            now - 0.25 * (g + (0.5 * g) * (g * (now - 0.0)))
        });
        assert!(wide.eq(f64s(&found[first_of_v..])), "{cuts:?}");
        assert_eq!(world.metrics().gradients_uncompensated, 0);
    }
}

/// Pushes these gradients one by one, each under the newest values. Returns the values at the end.
fn one_by_one(
    optimizer: impl Optimizer,
    policy: StalenessPolicy,
    gradients: &[([f32; 3], [f64; 2])],
    in_parts: bool,
) -> Vec<u8> {
    let shape = Shape::new([2]).unwrap();
    let variables = vec![
        VariableSpec::f32("w", [3]).unwrap().initializer(Initializer::Ones),
        VariableSpec::new("v", DType::F64, shape).unwrap(),
    ];
    let (mut world, _) =
        World::ready(variables, optimizer, |c| c.mode(Asynchronous::default().staleness(policy)));
    let client = Client::join(&mut world, 1);
    for (sequence, (narrow, wide)) in (1..).zip(gradients) {
        let PulledStep { grant, read, .. } = client.step(&mut world);
        let push = Push::gradient(sequence, grant, world.push_slot(client.lines[0]));
        let push = Push { read: read[0], ..push };
        let narrow = bytes_of(narrow);
        let wide = bytes_of(wide);
        let both = [&narrow[..], &wide[..]].concat();
        let parts: [(u64, &[u8]); 2] = [(0, &narrow), (16, &wide)];
        let parts = if in_parts { &parts[..] } else { &[(0, &both[..])] };
        world.push_answer(client.lines[0], &push, parts);
    }
    assert_eq!(world.metrics().staleness.to_string(), format!("0: {}", gradients.len()));
    client.step(&mut world).values.remove(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_policy_changes_a_fresh_gradient(
        gradients in prop::collection::vec(
            (prop::array::uniform3(-1e3_f32..1e3), prop::array::uniform2(-1e3_f64..1e3)), 1..6),
        in_parts: bool,
        adam: bool,
    ) {
        let train = |policy| match adam {
            true => one_by_one(Adam::new(0.1), policy, &gradients, in_parts),
            false => one_by_one(Sgd::new(0.1), policy, &gradients, in_parts),
        };
        let plain = train(StalenessPolicy::Ignore);
        prop_assert_eq!(&train(DAMP), &plain);
        prop_assert_eq!(&train(HALF), &plain);
    }
}

/// Eight workers in turn descend a parabola, with gradients of staleness 7. Plain steps diverge at
/// this rate; damped steps, at an eighth of it, converge.
#[test]
fn damped_steps_converge_where_plain_steps_diverge() {
    const WORKERS: u32 = 8;
    let train = |policy| {
        let variables = vec![ones("w", 1)];
        // w(t+1) = w(t) - rate w(t-7) diverges from a rate of 2 sin(pi/30) = 0.21 on.
        let (mut world, _) = World::ready(variables, Sgd::new(0.5), |c| {
            c.mode(Asynchronous::default().staleness(policy))
        });
        let mut workers: Vec<Client> =
            (1..=WORKERS).map(|task| Client::join(&mut world, task)).collect();
        let mut steps: Vec<PulledStep> =
            workers.iter().map(|worker| worker.step(&mut world)).collect();
        for _ in 0..50 {
            for (worker, step) in workers.iter_mut().zip(&mut steps) {
                // The gradient of w w / 2.
                let gradient = step.values[0].clone();
                worker.push(&mut world, step, &[(0, &gradient)]);
                *step = worker.step(&mut world);
            }
        }
        assert_eq!(world.metrics().staleness.quantile_at_most(0.9), Some(7));
        f64s(&workers[0].step(&mut world).values[0])[0].abs()
    };
    let plain = train(StalenessPolicy::Ignore);
    let damped = train(DAMP);
    assert!(plain > 1e6 && damped < 1e-3, "{plain} and {damped}");
}

/// Trains a logistic regression, and returns the values after each step. Workers compute the
/// gradients in turn, so each gradient misses the last ones of the others. The samples, one a step,
/// are in the same order for any number of workers.
fn regression(workers: u32, policy: StalenessPolicy) -> Vec<Vec<f64>> {
    const STEPS: usize = 600;
    let logistic = |x: &[f64], w: &[f64]| {
        let dot: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
        1.0 / (1.0 + (-dot).exp())
    };
    let mut random = Random::new(1);
    let mut unit = || random.below(1 << 32) as f64 / (1_u64 << 32) as f64;
    let zeros = ones("w", 4).initializer(Initializer::Zeros);
    let (mut world, _) = World::ready(vec![zeros], Sgd::new(0.2), |c| {
        c.mode(Asynchronous::default().staleness(policy))
    });
    let mut workers: Vec<(Client, PulledStep)> = (1..=workers)
        .map(|task| {
            let worker = Client::join(&mut world, task);
            let step = worker.step(&mut world);
            (worker, step)
        })
        .collect();
    let mut trajectory = Vec::new();
    for at in 0..STEPS {
        let turn = at % workers.len();
        let (worker, step) = &mut workers[turn];
        let x: Vec<f64> = (0..4).map(|_| 4.0 * unit() - 2.0).collect();
        let label = f64::from(unit() < logistic(&x, &[1.5, -1.0, 0.5, 2.0]));
        let error = logistic(&x, &f64s(&step.values[0])) - label;
        let gradient: Vec<f64> = x.iter().map(|x| error * x).collect();
        worker.push(&mut world, step, &[(0, &bytes_of(&gradient))]);
        *step = worker.step(&mut world);
        trajectory.push(f64s(&step.values[0]));
    }
    assert_eq!(world.metrics().gradients_uncompensated, 0);
    trajectory
}

#[test]
fn compensated_steps_with_a_modest_lambda_stay_closer_to_those_of_one_worker() {
    let alone = regression(1, StalenessPolicy::Ignore);
    let distance = |policy| {
        let trajectory = regression(8, policy);
        let elements = trajectory.iter().flatten().zip(alone.iter().flatten());
        elements.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
    };
    let plain = distance(StalenessPolicy::Ignore);
    let compensated = distance(HALF);
    assert!(compensated < 0.75 * plain, "{compensated} and {plain}");
    let too_much = distance(StalenessPolicy::DelayCompensation { lambda: 2.0 });
    assert!(too_much > plain, "{too_much} and {plain}");
}
