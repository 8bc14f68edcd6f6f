//! Pushes cut anywhere and in any order, and withdrawn pushes.

use std::time::Duration;

use pushpull_common::ids::Sequence;
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Envelope, Message, Outcome, PushState, Refusal};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, bytes_of, f32s, f64s, variables, worker};
use super::world::{ConnectionId, World};
use crate::shard::values::applier::WorkOutcome;

fn ready() -> (World, ConnectionId) {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut worker(1));
    (world, line)
}

fn about(sequence: u64) -> Envelope {
    Envelope { sequence: Sequence(sequence), ..Envelope::default() }
}

fn state(world: &mut World, line: ConnectionId, sequence: u64) -> PushState {
    let request = world.send(line, about(sequence), message::OutcomeQuery {}.into(), &[]);
    match world.answer(line, request) {
        Some(Message::OutcomeIs(is)) => is.state,
        other => panic!("{other:?}"),
    }
}

pub(super) fn applied(answer: &Message) -> u64 {
    match answer {
        Message::PushAnswer(message::PushAnswer {
            outcome: Outcome::Applied { version, .. },
            duplicate: false,
            ..
        }) => *version,
        other => panic!("not applied but {other:?}"),
    }
}

#[test]
fn a_push_may_be_cut_anywhere_and_come_in_any_order_of_partitions() {
    let w = bytes_of(&[1_f32, 2.0, 3.0]);
    let d = bytes_of(&[4_f64, 5.0]);
    let all = [w.clone(), d.clone()].concat();
    let cuts: [&[(u64, &[u8])]; 7] = [
        &[(0, &all)],
        &[(0, &w), (16, &d)],
        &[(16, &d), (0, &w)],
        &[(0, &all[..8]), (8, &all[8..24]), (24, &all[24..])],
        &[(0, &all[..8]), (8, &all[8..]), (99, &[])],
        &[(16, &d[..8]), (0, &w[..8]), (24, &d[8..]), (8, &w[8..])],
        &[(0, &[]), (16, &d), (0, &all[..16])],
    ];
    for (index, cut) in cuts.iter().enumerate() {
        for chop in [usize::MAX, 5, 1] {
            let (mut world, line) = ready();
            world.chop = chop;
            let push = world.gradient(line, 1);
            let answer = world.push_answer(line, &push, cut);
            assert_eq!(applied(&answer), 1, "cut {index}");
            let values = world.values(line);
            assert_eq!(f32s(&values[..12]), [-1.0, -2.0, -3.0], "cut {index}");
            assert_eq!(f64s(&values[16..32]), [-4.0, -5.0], "cut {index}");
            assert_eq!(values[32..], [0; 24]);
        }
    }
}

#[test]
fn padding_is_ignored() {
    let (mut world, line) = ready();
    let mut body = bytes_of(&[1_f32, 2.0, 3.0]);
    body[12..].copy_from_slice(&f32::NAN.to_le_bytes());
    let push = world.gradient(line, 1);
    applied(&world.push_answer(line, &push, &[(0, &body)]));
    let values = world.values(line);
    assert_eq!((f32s(&values[..12]), &values[12..16]), (vec![-1.0, -2.0, -3.0], &[0; 4][..]));
}

#[test]
fn an_empty_push_advances_the_step_and_nothing_else() {
    let (mut world, line) = ready();
    for offset in [0, 1, 14, 57, u64::MAX] {
        let sequence = world.metrics().global_step + 1;
        let push = world.gradient(line, sequence);
        assert_eq!(applied(&world.push_answer(line, &push, &[(offset, &[])])), sequence);
    }
    assert_eq!(world.values(line), [0; 56]);
    assert_eq!(world.metrics().global_step, 5);
}

#[test]
fn plain_variables_add_and_integers_wrap() {
    let (mut world, line) = ready();
    let n = bytes_of(&[i64::MAX]);
    for (sequence, operation, offset, body) in [
        (1, Operation::Assign {}, 48, n.clone()),
        (2, Operation::AssignAdd {}, 48, bytes_of(&[1_i64])),
        (3, Operation::AssignAdd {}, 32, bytes_of(&[1_f32, 2.0, 3.0, 4.0])),
        (4, Operation::AssignAdd {}, 32, bytes_of(&[1_f32; 4])),
        (5, Operation::Assign {}, 0, bytes_of(&[9_f32; 3])),
    ] {
        let push_slot = world.push_slot(line);
        let push = Push::plain(sequence, operation, push_slot);
        assert_eq!(applied(&world.push_answer(line, &push, &[(offset, &body)])), sequence);
    }
    let values = world.values(line);
    assert_eq!(f32s(&values[32..48]), [2.0, 3.0, 4.0, 5.0]);
    assert_eq!((&values[48..], f32s(&values[..12])), (&i64::MIN.to_le_bytes()[..], vec![9.0; 3]));
    let metrics = world.metrics();
    assert_eq!(
        (metrics.global_step, metrics.assigns_applied),
        (0, 5),
        "pushes to plain variables are no steps"
    );
}

#[test]
fn slices_of_a_large_push_end_between_two_elements() {
    // The odd partition in front could shift the slices of the next off its elements.
    for (dtype, odd) in [(DType::F64, 1), (DType::F64, 3), (DType::F32, 1), (DType::F32, 5)] {
        let large = 5 << 17;
        let variables = vec![
            VariableSpec::f32("odd", [odd]).unwrap(),
            VariableSpec::new("large", dtype, Shape::new([large]).unwrap()).unwrap(),
        ];
        let (mut world, _) = World::ready(variables, Sgd::new(1.0), |config| config);
        let line = world.join(0, &mut worker(1));
        let mut body = bytes_of(&vec![1_f32; odd as usize]);
        body.extend(match dtype {
            DType::F64 => bytes_of(&vec![1_f64; large as usize]),
            _ => bytes_of(&vec![1_f32; large as usize]),
        });
        let parts: Vec<(u64, &[u8])> =
            (0_u64..).step_by(1 << 20).zip(body.chunks(1 << 20)).collect();
        // The first push is applied as it arrives; the second has to wait for it.
        let push = world.gradient(line, 1);
        world.push(line, &push, &parts);
        let push = world.gradient(line, 2);
        let request = world.push(line, &push, &parts);
        assert_eq!((world.slice(0), world.slice(0)), (WorkOutcome::More, WorkOutcome::More));
        assert_eq!(world.answer(line, request), None, "answered when it is applied");
        world.work();
        applied(&world.answer(line, request).unwrap());
        let values = world.values(line);
        let start = (4 * odd as usize).next_multiple_of(8);
        assert_eq!(f32s(&values[..4 * odd as usize]), vec![-2.0; odd as usize]);
        match dtype {
            DType::F64 => assert!(f64s(&values[start..]).iter().all(|&v| v == -2.0)),
            _ => assert!(f32s(&values[start..]).iter().all(|&v| v == -2.0)),
        }
    }
}

#[test]
fn an_answer_brings_the_next_token_and_a_push_slot() {
    let (mut world, line) = ready();
    let push = Push { next: true, ..world.gradient(line, 1) };
    let Message::PushAnswer(answer) = world.push_answer(line, &push, &[(0, &[0; 16])]) else {
        panic!()
    };
    let next = answer.next.expect("training has no last step");
    assert!(answer.push_slot != 0 && next.token > push.grant.token);
    let push = Push::gradient(2, next, answer.push_slot);
    applied(&world.push_answer(line, &push, &[(0, &[0; 16])]));
}

#[test]
fn a_query_reports_each_state_of_a_push() {
    let (mut world, line) = ready();
    assert_eq!(state(&mut world, line, 70), PushState::Unknown {});
    let push = world.gradient(line, 70);
    let first = world.send(line, push.envelope(), push.part(0, None), &[0; 16]);
    assert_eq!(state(&mut world, line, 70), PushState::Receiving { bytes: 16 });
    assert_eq!(world.answer(line, first), None, "only the last part is answered");
    let request = world.send(line, push.envelope(), push.part(16, Some(32)), &[0; 16]);
    assert_eq!(state(&mut world, line, 70), PushState::Receiving { bytes: 32 }, "not applied yet");
    world.work();
    assert_eq!(applied(&world.answer(line, request).unwrap()), 1);
    let found = state(&mut world, line, 70);
    assert!(matches!(found, PushState::Settled { outcome: Outcome::Applied { version: 1, .. } }));
    assert_eq!(state(&mut world, line, 7), PushState::Unknown {});
    assert_eq!(state(&mut world, line, 6), PushState::TooOld { oldest: 7 });
}

#[test]
fn a_push_withdrawn_in_time_is_never_applied_and_frees_its_push_slot() {
    let (mut world, line) = ready();
    let push = world.gradient(line, 3);
    world.send(line, push.envelope(), push.part(0, None), &[1; 16]);
    let request = world.send(line, about(3), message::Withdraw {}.into(), &[]);
    let Some(Message::PushAnswer(answer)) = world.answer(line, request) else { panic!() };
    assert_eq!((answer.outcome, answer.duplicate), (Outcome::Withdrawn {}, false));
    // Other parts of the push may be under way.
    let late = world.send(line, push.envelope(), push.part(16, Some(32)), &[1; 16]);
    world.work();
    let Some(Message::PushAnswer(answer)) = world.answer(line, late) else { panic!() };
    assert_eq!((answer.outcome, answer.duplicate), (Outcome::Withdrawn {}, true));
    assert_eq!(world.values(line), [0; 56]);
    let settled = PushState::Settled { outcome: Outcome::Withdrawn {} };
    assert_eq!(state(&mut world, line, 3), settled);
    // The token is not spent, and a push that never came can be withdrawn as well.
    let push = Push { push_slot: world.push_slot(line), sequence: 4, ..push };
    world.send(line, about(9), message::Withdraw {}.into(), &[]);
    assert_eq!(applied(&world.push_answer(line, &push, &[(0, &[0; 16])])), 1);
    assert_eq!(state(&mut world, line, 9), settled);
}

#[test]
fn a_withdrawal_of_a_whole_push_is_answered_with_its_outcome() {
    let (mut world, line) = ready();
    let push = world.gradient(line, 1);
    world.push(line, &push, &[(0, &bytes_of(&[1_f32; 3]))]);
    let request = world.send(line, about(1), message::Withdraw {}.into(), &[]);
    assert_eq!(world.answer(line, request), None);
    world.work();
    assert_eq!(applied(&world.answer(line, request).unwrap()), 1);
    let request = world.send(line, about(1), message::Withdraw {}.into(), &[]);
    assert_eq!(applied(&world.answer(line, request).unwrap()), 1, "also after it is applied");
    assert_eq!(f32s(&world.values(line)[..12]), [-1.0; 3]);
    let refusal = {
        world.send(line, about(500), message::Withdraw {}.into(), &[]);
        let request = world.send(line, about(400), message::Withdraw {}.into(), &[]);
        world.answer(line, request)
    };
    let Some(Message::Refused(refused)) = refusal else { panic!("{refusal:?}") };
    assert!(matches!(refused.refusal, Refusal::Window { oldest: Sequence(437), .. }));
}

#[test]
fn waits_beyond_the_limit_of_a_connection_are_refused() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config.last_step(1));
    let line = world.join(0, &mut worker(1));
    let requests: Vec<_> = (0..129).map(|_| world.pull(line, 5)).collect();
    let Some(Message::Refused(refused)) = world.answer(line, requests[128]) else { panic!() };
    assert!(matches!(refused.refusal, Refusal::Busy { limit: 128, .. }), "{}", refused.refusal);
    world.pass(Duration::from_millis(100), &[line]);
    assert_eq!(world.answer(line, requests[127]), None, "the others still wait");
}
