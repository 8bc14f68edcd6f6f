//! The numbers of the classic system, reproduced exactly.

use pushpull_common::ids::GlobalStep;
use pushpull_common::initializer::Initializer;
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Message, Outcome};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Adam, Sgd};

use super::peers::{Push, bytes_of, f32s, f64s, worker};
use super::world::World;

/// `async_sgd` of common/tests/vectors/semantics.json.
#[test]
fn a_second_gradient_from_the_same_values_is_one_step_stale() {
    let w = VariableSpec::new("w", DType::F64, Shape::scalar()).unwrap();
    let w = w.initializer(Initializer::Ones);
    let (mut world, _) = World::ready(vec![w], Sgd::new(0.1), |config| config);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    let token_a = world.token(a);
    let token_b = world.token(b);
    let read = [f64s(&world.values(a))[0], f64s(&world.values(b))[0]];
    assert_eq!(read, [1.0, 1.0]);
    for (line, grant, gradient, value, step, expected) in
        [(a, token_a, read[0], 0.9, 1, 0), (b, token_b, read[1], 0.8, 2, 1)]
    {
        let push_slot = world.push_slot(line);
        let push = Push::gradient(1, grant, push_slot);
        let answer = world.push_answer(line, &push, &[(0, &bytes_of(&[gradient]))]);
        let Message::PushAnswer(answer) = answer else { panic!("{answer:?}") };
        let step = GlobalStep(step);
        let outcome = Outcome::Applied { version: step.0, step, staleness: expected };
        assert_eq!(answer.outcome, outcome);
        let found = f64s(&world.values(line))[0];
        assert!((found - value).abs() < 1e-15, "{found}");
    }
}

#[test]
fn staleness_counts_from_the_values_that_were_read() {
    let w = VariableSpec::f32("w", [2]).unwrap();
    let (mut world, _) = World::ready(vec![w], Sgd::new(0.1), |config| config);
    let line = world.join(0, &mut worker(1));
    let body = bytes_of(&[1_f32, 1.0]);
    let early = world.token(line);
    for sequence in 1..=5 {
        let grant = world.token(line);
        let push_slot = world.push_slot(line);
        world.push_answer(line, &Push::gradient(sequence, grant, push_slot), &[(0, &body)]);
    }
    let late = world.token(line);
    // The step that a push names as read is clamped between the grant and now.
    for (sequence, grant, read, staleness) in
        [(6, early, 3, 2), (7, late, 0, 1), (8, world.token(line), 99, 0)]
    {
        let push_slot = world.push_slot(line);
        let mut push = Push::gradient(sequence, grant, push_slot);
        push.grant.step = GlobalStep(read);
        let answer = world.push_answer(line, &push, &[(0, &body)]);
        let Message::PushAnswer(answer) = answer else { panic!("{answer:?}") };
        let Outcome::Applied { staleness: found, .. } = answer.outcome else { panic!() };
        assert_eq!(found, staleness, "push {sequence}");
    }
}

#[test]
fn two_clients_with_a_thousand_pushes_each_lose_none() {
    let w = VariableSpec::f32("w", [3]).unwrap();
    let rate = 1.0 / 1024.0;
    let (mut world, _) = World::ready(vec![w], Sgd::new(rate), |c| c.last_step(2000));
    let lines = [world.join(0, &mut worker(1)), world.join(0, &mut worker(2))];
    let body = bytes_of(&[1_f32; 3]);
    for sequence in 1..=1000 {
        let pushed = lines.map(|line| {
            let grant = world.token(line);
            let push_slot = world.push_slot(line);
            (line, world.push(line, &Push::gradient(sequence, grant, push_slot), &[(0, &body)]))
        });
        world.work();
        for (line, request) in pushed {
            let answer = world.answer(line, request);
            assert!(matches!(answer, Some(Message::PushAnswer(_))), "{answer:?}");
        }
    }
    assert_eq!(f32s(&world.values(lines[0]))[..3], [-1.953125; 3]);
    let metrics = world.metrics();
    assert_eq!((metrics.global_step, metrics.gradients_applied), (2000, 2000));
}

/// `adam_lr0.1` of common/optim/src/optimizer/vectors.json, through the shard.
#[test]
fn adam_counts_the_gradients_of_the_shard_and_not_its_assignments() {
    let w = VariableSpec::new("w", DType::F64, Shape::new([3]).unwrap()).unwrap();
    let adam = Adam::new(0.1).betas(0.8, 0.99).epsilon(1e-4);
    let (mut world, _) = World::ready(vec![w], adam, |config| config);
    let line = world.join(0, &mut worker(1));
    let assign = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    world.push_answer(line, &assign, &[(0, &bytes_of(&[1.0, -2.0, 0.5]))]);
    let gradients = [[0.1, -0.2, 0.3], [0.4, 0.0, -0.1], [-0.3, 0.25, 0.5]];
    for (sequence, gradient) in (2..).zip(gradients) {
        let push = Push::gradient(sequence, world.token(line), world.push_slot(line));
        world.push_answer(line, &push, &[(0, &bytes_of(&gradient))]);
    }
    let expected = [0.798_294_049_247_721_8, -1.864_735_732_434_199, 0.292_449_336_757_202_75];
    for (found, expected) in f64s(&world.values(line)).into_iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-9 * f64::abs(expected), "{found}, not {expected}");
    }
}
