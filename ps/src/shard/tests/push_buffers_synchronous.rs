//! Push buffers in synchronous mode: a gradient is scanned before it is held, and read when its
//! step is applied.

use pushpull_common::ids::{RestoreEpoch, VariableId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, Refusal, message};
use pushpull_common::variable::VariableSpec;

use super::peers::{Push, bytes_of, f32s, index_of, pack, variables};
use super::push_buffers::MappedBuffer;
use super::shared_values::{LARGE, shareable};
use super::synchronous::{ACCEPTED, STALE, ShardCluster, synchronous};
use super::world::World;
use crate::config::{PsConfig, Synchronous};
use crate::shard::ShardInput;
use crate::shard::values::applier::WorkOutcome;

/// A cluster whose replicas have push buffers.
pub(super) struct SharedBuffers {
    pub(super) cluster: ShardCluster,
    /// By replica and shard.
    pub(super) push_buffers: Vec<Vec<MappedBuffer>>,
}

impl SharedBuffers {
    fn new(shards: u16, mode: Synchronous) -> SharedBuffers {
        SharedBuffers::with(variables(), shards, mode, |config| config)
    }

    pub(super) fn with(
        variables: Vec<VariableSpec>,
        shards: u16,
        mode: Synchronous,
        configure: impl Fn(PsConfig) -> PsConfig,
    ) -> SharedBuffers {
        let configure =
            |config: PsConfig| configure(config.shards(shards).mode(mode).inbox_pushes(1));
        let mut cluster = ShardCluster::of(shareable(variables, configure), mode);
        let lines: Vec<_> = cluster.replicas.iter().map(|replica| replica.lines.clone()).collect();
        let of = |lines: Vec<_>| {
            lines.into_iter().map(|line| MappedBuffer::new(&mut cluster.world, line)).collect()
        };
        let push_buffers = lines.into_iter().map(of).collect();
        SharedBuffers { cluster, push_buffers }
    }

    /// Puts a gradient of this value into buffer slot `place` of one shard, and pushes it. Returns
    /// the answer, if it has come by now.
    fn push_to(
        &mut self,
        shard: usize,
        replica: usize,
        place: usize,
        grant: Grant,
        value: f32,
    ) -> Option<Message> {
        let cluster = &mut self.cluster;
        let line = cluster.replicas[replica].lines[shard];
        let sequence = cluster.replicas[replica].sequence;
        let w = bytes_of(&[value; 3]);
        let d = bytes_of(&[f64::from(value); 2]);
        let body = match (self.push_buffers[replica].len(), shard) {
            (1, _) => [w, d].concat(),
            (_, 0) => w,
            _ => d,
        };
        let push_buffer = &self.push_buffers[replica][shard];
        let bytes = body.len() as u64;
        push_buffer.put(place, 0, &body);
        let push = Push::gradient(sequence, grant, push_buffer.push_slot(place));
        let said = push.shared(&[(0, bytes)], Some(bytes));
        let request = cluster.world.send(line, push.envelope(), said, &[]);
        cluster.settle();
        cluster.world.answer(line, request)
    }

    /// Pushes a gradient to every shard, last to the step owner's. Returns the outcome there, if it
    /// is known by now.
    fn push(&mut self, replica: usize, place: usize, grant: Grant, value: f32) -> Option<Outcome> {
        self.cluster.replicas[replica].sequence += 1;
        let mut answer = None;
        for shard in (0..self.push_buffers[replica].len()).rev() {
            answer = self.push_to(shard, replica, place, grant, value);
        }
        match answer {
            Some(Message::PushAnswer(answer)) => Some(answer.outcome),
            None => None,
            Some(other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_step_is_the_mean_of_gradients_in_push_buffers_and_sent_ones() {
    for shards in [1, 2] {
        let mut shared = SharedBuffers::new(shards, synchronous(3, 3));
        for step in 0..4 {
            let tokens = [0, 1, 2].map(|replica| shared.cluster.token(replica));
            let place = (step % 2) as usize;
            assert_eq!(shared.push(0, place, tokens[0], 1.0), ACCEPTED(step));
            // Another replica sends its gradient.
            assert_eq!(shared.cluster.push(1, tokens[1], 2.0), ACCEPTED(step));
            assert_eq!(shared.push(2, place, tokens[2], 6.0), ACCEPTED(step));
            let sum = -3.0 * (step + 1) as f32;
            assert_eq!(shared.cluster.values(step + 1), (sum, sum.into()), "{shards} shards");
        }
    }
}

#[test]
fn gradients_in_push_buffers_are_clipped_by_their_norm() {
    for shards in [1, 2] {
        // Five elements of 2 have a norm of the root of 20.
        let norm = 20_f64.sqrt();
        let mode = synchronous(2, 2).clip_by_global_norm(norm / 2.0);
        let mut shared = SharedBuffers::new(shards, mode);
        let a = shared.cluster.token(0);
        let b = shared.cluster.token(1);
        assert_eq!(shared.push(0, 0, a, 2.0), ACCEPTED(0));
        assert_eq!(shared.push(1, 0, b, 0.5), ACCEPTED(0));
        let (w, d) = shared.cluster.values(1);
        assert!((w + 0.75).abs() < 1e-6 && (d + 0.75).abs() < 1e-6, "{w} and {d}");
    }
}

#[test]
fn nan_is_refused_before_a_shard_reports_that_it_holds_the_push() {
    for shards in [1_u16, 2] {
        for clips in [false, true] {
            let clip = |mode: Synchronous| match clips {
                true => mode.clip_by_global_norm(1e9),
                false => mode,
            };
            let mut shared = SharedBuffers::new(shards, clip(synchronous(1, 1)));
            let grant = shared.cluster.token(0);
            shared.cluster.replicas[0].sequence += 1;
            let last = usize::from(shards) - 1;
            let answer = shared.push_to(last, 0, 0, grant, f32::NAN);
            let Some(Message::Refused(message::Refused { refusal })) = answer else {
                panic!("not refused but {answer:?}");
            };
            let variable = VariableId(last as u32);
            let found = matches!(refusal, Refusal::NonFinite { variable: v, element: 0, value }
                if v == variable && value.is_nan());
            assert!(found, "{refusal:?}");
            assert_eq!(shared.cluster.world.metrics().gradients_admitted, 0);
            // The token serves another push, in the same buffer slot.
            assert_eq!(shared.push(0, 0, grant, 1.0), ACCEPTED(0));
            assert_eq!(shared.cluster.values(1), (-1.0, -1.0));
        }
    }
}

#[test]
fn a_stale_push_frees_its_buffer_slot_and_a_held_one_does_not() {
    let mut shared = SharedBuffers::new(2, synchronous(1, 2));
    let fast = shared.cluster.token(0);
    let slow = shared.cluster.token(1);
    // One shard holds the slow replica's part before the step is made without it.
    shared.cluster.replicas[1].sequence += 1;
    let held = shared.push_to(1, 1, 0, slow, 9.0);
    assert!(matches!(held, Some(Message::PushAnswer(ref a)) if a.outcome == Outcome::Held {}));
    let next = Push::gradient(99, slow, shared.push_buffers[1][1].push_slot(0));
    let line = shared.cluster.replicas[1].lines[1];
    let said = next.shared(&[(0, 16)], Some(16));
    let refused = shared.cluster.world.refused(line, said);
    assert!(
        matches!(refused, Refusal::Window { .. } | Refusal::PushSlotTaken { .. }),
        "{refused:?}"
    );
    assert_eq!(shared.push(0, 0, fast, 1.0), ACCEPTED(0));
    let answer = shared.push_to(0, 1, 0, slow, 9.0);
    assert!(matches!(answer, Some(Message::PushAnswer(ref a)) if Some(a.outcome) == STALE(1)));
    let slow = shared.cluster.token(1);
    assert_eq!(shared.push(1, 0, slow, 2.0), ACCEPTED(1));
    assert_eq!(shared.cluster.values(2), (-3.0, -3.0));
}

#[test]
fn work_due_on_a_push_is_not_done_on_the_next_in_its_buffer_slot() {
    for clips in [false, true] {
        let clip = |mode: Synchronous| match clips {
            true => mode.clip_by_global_norm(1e9),
            false => mode,
        };
        let mut shared = SharedBuffers::new(1, clip(synchronous(1, 1)));
        let grant = shared.cluster.token(0);
        let line = shared.cluster.replicas[0].lines[0];
        let push_buffer = &shared.push_buffers[0][0];
        push_buffer.put(0, 0, &[0; 56]);
        let world = &mut shared.cluster.world;
        let push = Push::gradient(1, grant, push_buffer.push_slot(0));
        world.send(line, push.envelope(), push.shared(&[(0, 32)], Some(32)), &[]);
        if clips {
            assert_eq!(world.slice(0), WorkOutcome::More, "it is scanned, and not measured yet");
        }
        let token = grant.token;
        let generation = grant.generation;
        world.say(line, message::ReturnToken { token, generation }.into());
        let dropped = world.shards[0].intake.inbox.as_ref().unwrap().arrivals().count() == 0;
        assert!(dropped, "a push without a token is dropped");
        let assign = Push::plain(2, Operation::Assign {}, push_buffer.push_slot(0));
        let said = assign.shared(&[(32, 48)], Some(16));
        let request = world.send(line, assign.envelope(), said, &[]);
        shared.cluster.settle();
        let answer = shared.cluster.world.answer(line, request);
        let applied = matches!(&answer, Some(Message::PushAnswer(answer))
            if matches!(answer.outcome, Outcome::Applied { version: 1, .. }));
        assert!(applied, "{answer:?}");
    }
}

#[test]
fn an_unscanned_push_is_not_reported_as_held() {
    let mut shared = SharedBuffers::new(2, synchronous(1, 1));
    let grant = shared.cluster.token(0);
    let line = shared.cluster.replicas[0].lines[1];
    let push_buffer = &shared.push_buffers[0][1];
    push_buffer.put(0, 0, &bytes_of(&[f64::NAN, 1.0]));
    let world = &mut shared.cluster.world;
    let push = Push::gradient(1, grant, push_buffer.push_slot(0));
    let request = world.send(line, push.envelope(), push.shared(&[(0, 16)], Some(16)), &[]);
    // The shard repeats its reports, as to a restarted step owner.
    world.input(1, ShardInput::OwnerLink { up: false });
    world.input(1, ShardInput::OwnerLink { up: true });
    world.input(1, ShardInput::Tick);
    let holds = |world: &World| {
        world.to_owner.iter().any(|(_, _, message)| matches!(message, Message::Held(_)))
    };
    assert!(!holds(world));
    world.work();
    assert!(!holds(world) && matches!(world.answer(line, request), Some(Message::Refused(_))));
}

/// A push that is whole on a shard and not scanned yet when its step is over is answered like a
/// stale one.
#[test]
fn an_unscanned_push_is_answered_when_its_step_is_over() {
    let mut shared = SharedBuffers::new(2, synchronous(1, 2));
    let slow = shared.cluster.token(1);
    let line = shared.cluster.replicas[1].lines[1];
    let push_buffer = &shared.push_buffers[1][1];
    push_buffer.put(0, 0, &bytes_of(&[9.0, 9.0]));
    let world = &mut shared.cluster.world;
    let push = Push::gradient(1, slow, push_buffer.push_slot(0));
    let request = world.send(line, push.envelope(), push.shared(&[(0, 16)], Some(16)), &[]);
    let envelope = Envelope { restore_epoch: RestoreEpoch(1), ..Envelope::default() };
    let (header, message) = pack(&envelope, &message::TokenOver { token: slow.token }.into(), 0);
    world.input(1, ShardInput::Owner { header: &header, message });
    let Some(Message::PushAnswer(answer)) = world.answer(line, request) else {
        panic!("the push is not answered")
    };
    assert!(matches!(answer.outcome, Outcome::Stale { .. }), "{answer:?}");
    world.work();
    assert!(world.shards[1].intake.inbox.as_ref().unwrap().arrivals().next().is_none());
}

#[test]
fn a_gradient_is_measured_alone_after_an_unfinished_one_in_its_buffer_slot() {
    let w = VariableSpec::f32("w", [LARGE as u64]).unwrap();
    let norm = (LARGE as f64).sqrt();
    let mode = synchronous(1, 1).clip_by_global_norm(norm + 1.0);
    let mut shared = SharedBuffers::with(vec![w], 1, mode, |config| config);
    let first = shared.cluster.token(0);
    let line = shared.cluster.replicas[0].lines[0];
    let push_buffer = &shared.push_buffers[0][0];
    let bytes = 4 * LARGE as u64;
    let say = |sequence, grant| {
        let push = Push::gradient(sequence, grant, push_buffer.push_slot(0));
        (push.envelope(), push.shared(&[(0, bytes)], Some(bytes)))
    };
    push_buffer.put(0, 0, &bytes_of(&vec![100_f32; LARGE]));
    let world = &mut shared.cluster.world;
    let (envelope, said) = say(1, first);
    world.send(line, envelope, said, &[]);
    // The scan takes as many slices as the measuring, of which one is done.
    for _ in 0..bytes.div_ceil(1 << 20) + 2 {
        assert_eq!(world.slice(0), WorkOutcome::More);
    }
    let token = first.token;
    let generation = first.generation;
    world.say(line, message::ReturnToken { token, generation }.into());
    let asked = world.say(line, message::TokenRequest { newest: token }.into());
    let Some(Message::Granted(granted)) = world.answer(line, asked) else { panic!("no token") };
    push_buffer.put(0, 0, &bytes_of(&vec![1_f32; LARGE]));
    let (envelope, said) = say(2, granted.grant);
    let request = world.send(line, envelope, said, &[]);
    shared.cluster.settle();
    let answer = shared.cluster.world.answer(line, request);
    assert!(matches!(&answer, Some(Message::PushAnswer(a)) if Some(a.outcome) == ACCEPTED(0)));
    let values = shared.cluster.world.values(line);
    assert!(f32s(&values).iter().all(|&value| value == -1.0), "it is not clipped");
}

/// Slices end between two elements, for any number of gradients that share them.
#[test]
fn large_gradients_are_averaged_in_slices() {
    let ramp = |at: usize| (at % 7) as f32;
    let norm = (0..LARGE).map(|at| f64::from(ramp(at)).powi(2)).sum::<f64>().sqrt();
    for (replicas, clips) in (1_u32..6).flat_map(|n| [(n, false), (n, true)]) {
        let w = VariableSpec::f32("w", [LARGE as u64]).unwrap();
        let clip = |mode: Synchronous| match clips {
            true => mode.clip_by_global_norm(norm),
            false => mode,
        };
        let mode = clip(synchronous(replicas, replicas));
        let mut shared = SharedBuffers::with(vec![w], 1, mode, |config| config);
        let bytes = 4 * LARGE as u64;
        for replica in 0..replicas as usize {
            let grant = shared.cluster.token(replica);
            let line = shared.cluster.replicas[replica].lines[0];
            let push_buffer = &shared.push_buffers[replica][0];
            let gradient: Vec<f32> = (0..LARGE).map(|at| ramp(at) * (1 + replica) as f32).collect();
            push_buffer.put(0, 0, &bytes_of(&gradient));
            let push = Push::gradient(1, grant, push_buffer.push_slot(0));
            let said = push.shared(&[(0, bytes)], Some(bytes));
            let request = shared.cluster.world.send(line, push.envelope(), said, &[]);
            shared.cluster.settle();
            let answer = shared.cluster.world.answer(line, request);
            let accepted = |a: &message::PushAnswer| Some(a.outcome) == ACCEPTED(0);
            assert!(matches!(&answer, Some(Message::PushAnswer(a)) if accepted(a)), "{answer:?}");
        }
        let values = shared.cluster.world.values(shared.cluster.replicas[0].lines[0]);
        // Each clipped gradient is as large as the first one.
        let sum = if clips { replicas } else { (1..=replicas).sum() };
        let mean = sum as f32 / replicas as f32;
        let most = if clips { 1e-5 } else { 0.0 };
        let differs = |(at, value): (usize, &f32)| (*value + ramp(at) * mean).abs() > most;
        assert_eq!(f32s(&values).iter().enumerate().position(differs), None);
    }
}

#[test]
fn a_gradient_without_rows_of_a_sparse_variable_is_measured() {
    let dense = VariableSpec::f32("dense", [6]).unwrap();
    let table = VariableSpec::f32("table", [5, 3]).unwrap().sparse();
    let mode = synchronous(1, 1).clip_by_global_norm(12_f64.sqrt());
    let mut shared = SharedBuffers::with(vec![dense, table], 1, mode, |config| config);
    let grant = shared.cluster.token(0);
    let line = shared.cluster.replicas[0].lines[0];
    let push_buffer = &shared.push_buffers[0][0];
    push_buffer.put(0, 0, &bytes_of(&[2_f32, 2.0, 2.0, -2.0, -4.0, -4.0]));
    let world = &mut shared.cluster.world;
    let push = Push::gradient(1, grant, push_buffer.push_slot(0));
    world.send(line, push.envelope(), push.part(88, None), &index_of::<u32>(&[]));
    let request = world.send(line, push.envelope(), push.shared(&[(0, 24)], Some(32)), &[]);
    shared.cluster.settle();
    let answer = shared.cluster.world.answer(line, request);
    assert!(matches!(&answer, Some(Message::PushAnswer(a)) if Some(a.outcome) == ACCEPTED(0)));
    let values = f32s(&shared.cluster.world.values(line));
    assert_eq!(values[..6], [-1.0, -1.0, -1.0, 1.0, 2.0, 2.0]);
}
