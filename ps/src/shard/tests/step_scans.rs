//! A synchronous step whose last gradient is in a push buffer: the scan of that gradient, and what may happen
//! before the scan is done.

use pushpull_common::ids::{RequestId, VariableId};
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::{Grant, Message, Outcome, Refusal};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use super::peers::{Push, bytes_of, f32s};
use super::push_buffers_synchronous::SharedBuffers;
use super::shared_values::LARGE;
use super::synchronous::{ACCEPTED, STALE};
use crate::config::{NonFinite, PsConfig};
use crate::optimizer::{ApplyAt, Optimizer, Run, SlotSpec};
use crate::shard::work::{SLICE_BYTES, Work};

const BYTES: u64 = 4 * LARGE as u64;

/// How many slices the scan of a gradient takes before the one that ends it.
const SCAN_SLICES: u64 = BYTES.div_ceil(SLICE_BYTES);

/// Beside it, what is no gradient may be assigned.
const PLAIN: u64 = 16;

/// Replicas with trays, a large variable, and a plain one behind it.
fn replicas(take: u32, of: u32, configure: impl Fn(PsConfig) -> PsConfig) -> SharedBuffers {
    let w = VariableSpec::f32("w", [LARGE as u64]).unwrap();
    let plain = VariableSpec::f32("plain", [PLAIN / 4]).unwrap().plain();
    SharedBuffers::with(vec![w, plain], 1, (take, of), configure)
}

impl SharedBuffers {
    /// Puts a gradient of one value into a room of a replica's tray, and says that it is whole; nothing is done
    /// about it yet.
    fn say(&mut self, replica: usize, place: usize, grant: Grant, gradient: &[f32]) -> RequestId {
        let it = &mut self.cluster.replicas[replica];
        it.sequence += 1;
        let (line, sequence) = (it.lines[0], it.sequence);
        let push_buffer = &self.push_buffers[replica][0];
        push_buffer.put(place, 0, &bytes_of(gradient));
        let push = Push::gradient(sequence, grant, push_buffer.push_slot(place));
        let said = push.shared(&[(0, BYTES)], Some(BYTES));
        self.cluster.world.send(line, push.envelope(), said, &[])
    }

    /// What a replica has been answered by now.
    fn heard(&mut self, replica: usize, request: RequestId) -> Option<Result<Outcome, Refusal>> {
        let line = self.cluster.replicas[replica].lines[0];
        match self.cluster.world.answer(line, request)? {
            Message::PushAnswer(answer) => Some(Ok(answer.outcome)),
            Message::Refused(message::Refused { refusal }) => Some(Err(refusal)),
            other => panic!("{other:?}"),
        }
    }

    /// Has all work done, in so many slices.
    fn slices(&mut self) -> usize {
        (1..).find(|_| self.cluster.world.slice(0) == Work::Idle).unwrap()
    }

    /// The first value, which all others must be like.
    fn value(&mut self) -> f32 {
        let line = self.cluster.replicas[0].lines[0];
        let values = f32s(&self.cluster.world.values(line));
        let values = &values[..LARGE];
        assert_eq!(values.iter().position(|value| *value != values[0]), None, "all are alike");
        values[0]
    }
}

/// A stretch of a gradient in parts that can be sent.
fn parts(gradient: &[u8], start: u64, end: u64) -> Vec<(u64, &[u8])> {
    const MOST: u64 = 1 << 20;
    let part = |at: u64| (at, &gradient[at as usize..end.min(at + MOST) as usize]);
    (start..end).step_by(MOST as usize).map(part).collect()
}

fn all(value: f32) -> Vec<f32> {
    vec![value; LARGE]
}

fn accepted(step: u64) -> Option<Result<Outcome, Refusal>> {
    ACCEPTED(step).map(Ok)
}

/// A rule of a user, which changes values where they lie.
#[derive(Debug)]
struct Less;

impl Optimizer for Less {
    fn kind(&self) -> &'static str {
        "less"
    }

    fn slots(&self) -> &[SlotSpec] {
        &[]
    }

    fn apply_f32(&self, _: ApplyAt, run: Run<'_, f32>) {
        run.values.iter_mut().zip(run.gradient).for_each(|(value, by)| *value -= by);
    }

    fn apply_f64(&self, _: ApplyAt, run: Run<'_, f64>) {
        run.values.iter_mut().zip(run.gradient).for_each(|(value, by)| *value -= by);
    }
}

#[test]
fn nan_in_what_would_complete_a_step_is_refused_and_the_step_waits_for_another() {
    let places = [0, 1, 15, 16, 70_000, LARGE / 2 + 3, LARGE - 1];
    for (place, users) in places.into_iter().flat_map(|place| [(place, false), (place, true)]) {
        let mut shared = replicas(2, 2, |config| match users {
            true => config.optimizer_for("w", Less),
            false => config,
        });
        let (first, last) = (shared.cluster.token(0), shared.cluster.token(1));
        let request = shared.say(0, 0, first, &all(1.0));
        shared.slices();
        assert_eq!(shared.heard(0, request), accepted(0));
        let mut gradient = all(5.0);
        gradient[place] = f32::INFINITY;
        let request = shared.say(1, 0, last, &gradient);
        shared.slices();
        let Some(Err(refusal)) = shared.heard(1, request) else { panic!("it was not refused") };
        let expected = Refusal::NonFinite {
            variable: VariableId(0),
            element: place as u64,
            value: f64::INFINITY,
        };
        assert_eq!(refusal, expected);
        assert_eq!((shared.value(), shared.cluster.world.metrics().gradients_admitted), (0.0, 1));
        let request = shared.say(1, 0, last, &all(3.0));
        shared.slices();
        assert_eq!((shared.heard(1, request), shared.value()), (accepted(0), -2.0));
    }
}

/// A replica that has been told that its gradient counts and then changes it spoils a step, as it could with
/// any gradient; what is refused for that is not the gradient of another.
#[test]
fn nobody_is_refused_for_what_another_has_changed() {
    let mut shared = replicas(2, 2, |config| config);
    let (first, last) = (shared.cluster.token(0), shared.cluster.token(1));
    shared.say(0, 0, first, &all(1.0));
    shared.slices();
    shared.push_buffers[0][0].put(0, 0, &bytes_of(&all(f32::NAN)));
    let request = shared.say(1, 0, last, &all(5.0));
    shared.slices();
    assert_eq!(shared.heard(1, request), accepted(0));
    assert_eq!(shared.cluster.world.metrics().steps_applied, 1);
}

#[test]
fn nan_is_counted_once() {
    let mut shared = replicas(2, 2, |config| config.non_finite(NonFinite::Count));
    let (first, last) = (shared.cluster.token(0), shared.cluster.token(1));
    shared.say(0, 0, first, &all(1.0));
    shared.slices();
    let mut gradient = all(5.0);
    (gradient[3], gradient[LARGE - 1]) = (f32::NAN, f32::INFINITY);
    let request = shared.say(1, 0, last, &gradient);
    shared.slices();
    assert_eq!(shared.heard(1, request), accepted(0));
    assert_eq!(shared.cluster.world.metrics().non_finite, 2);
}

/// A backup replica is first after all: the step that was being applied is not the one that is made.
#[test]
fn another_gradient_that_completes_the_step_first_is_in_it() {
    for slices in 0..SCAN_SLICES {
        let mut shared = replicas(2, 3, |config| config);
        let grants = [0, 1, 2].map(|replica| shared.cluster.token(replica));
        shared.say(0, 0, grants[0], &all(1.0));
        shared.slices();
        let slow = shared.say(1, 0, grants[1], &all(100.0));
        for _ in 0..slices {
            assert_eq!(shared.cluster.world.slice(0), Work::More, "the scan takes longer");
        }
        // It is sent, and so held as soon as it is here.
        shared.cluster.replicas[2].sequence += 1;
        let line = shared.cluster.replicas[2].lines[0];
        let push_slot = shared.cluster.world.push_slot(line);
        let push = Push::gradient(1, grants[2], push_slot);
        let gradient = bytes_of(&all(5.0));
        let request = shared.cluster.world.push(line, &push, &parts(&gradient, 0, BYTES));
        shared.slices();
        assert_eq!(shared.heard(2, request), accepted(0), "after {slices} slices");
        assert_eq!(shared.heard(1, slow), STALE(1).map(Ok));
        assert_eq!(shared.value(), -3.0, "after {slices} slices");
        let grants = [0, 1].map(|replica| shared.cluster.token(replica));
        shared.say(0, 0, grants[0], &all(1.0));
        let request = shared.say(1, 0, grants[1], &all(2.0));
        shared.slices();
        assert_eq!((shared.heard(1, request), shared.value()), (accepted(1), -4.5));
    }
}

/// A backup replica's lies in a tray, too, and waits to be looked at: what was applied is not applied again.
#[test]
fn what_comes_behind_it_and_too_late_takes_nothing_back() {
    let counted = [false, true].map(|late| {
        let mut shared = replicas(2, 3, |config| config);
        let grants = [0, 1, 2].map(|replica| shared.cluster.token(replica));
        shared.say(0, 0, grants[0], &all(1.0));
        shared.slices();
        let last = shared.say(1, 0, grants[1], &all(3.0));
        assert_eq!(shared.cluster.world.slice(0), Work::More);
        let backup = late.then(|| shared.say(2, 0, grants[2], &all(100.0)));
        let slices = shared.slices();
        assert_eq!((shared.heard(1, last), shared.value()), (accepted(0), -2.0));
        if let Some(backup) = backup {
            assert_eq!(shared.heard(2, backup), STALE(1).map(Ok));
        }
        slices
    });
    assert!(counted[1] <= counted[0] + 1, "{counted:?}");
}

/// Its replica takes it back, and has another in the same room, in the tray or sent.
#[test]
fn what_is_withdrawn_meanwhile_is_not_in_the_step() {
    for (slices, sends) in (0..SCAN_SLICES).flat_map(|slices| [(slices, false), (slices, true)]) {
        let mut shared = replicas(2, 2, |config| config);
        let grants = [0, 1].map(|replica| shared.cluster.token(replica));
        shared.say(0, 0, grants[0], &all(1.0));
        shared.slices();
        shared.say(1, 0, grants[1], &all(100.0));
        for _ in 0..slices {
            assert_eq!(shared.cluster.world.slice(0), Work::More, "the scan takes longer");
        }
        let (token, generation) = (grants[1].token, grants[1].generation);
        let line = shared.cluster.replicas[1].lines[0];
        shared.cluster.world.say(line, message::ReturnToken { token, generation }.into());
        let asked = shared.cluster.world.say(line, message::TokenRequest { newest: token }.into());
        let Some(Message::Granted(granted)) = shared.cluster.world.answer(line, asked) else {
            panic!("no token")
        };
        let request = match sends {
            false => shared.say(1, 0, granted.grant, &all(3.0)),
            true => {
                let push = Push::gradient(2, granted.grant, shared.push_buffers[1][0].push_slot(0));
                let gradient = bytes_of(&all(3.0));
                shared.cluster.world.push(line, &push, &parts(&gradient, 0, BYTES))
            }
        };
        shared.slices();
        let message = format!("after {slices} slices, sent: {sends}");
        assert_eq!(shared.heard(1, request), accepted(0), "{message}");
        assert_eq!(shared.value(), -2.0, "{message}");
    }
}

#[test]
fn what_is_assigned_meanwhile_is_assigned() {
    for slices in 0..SCAN_SLICES {
        let mut shared = replicas(2, 2, |config| config);
        let grants = [0, 1].map(|replica| shared.cluster.token(replica));
        shared.say(0, 0, grants[0], &all(1.0));
        shared.slices();
        let last = shared.say(1, 0, grants[1], &all(3.0));
        for _ in 0..slices {
            assert_eq!(shared.cluster.world.slice(0), Work::More, "the scan takes longer");
        }
        let it = &mut shared.cluster.replicas[0];
        it.sequence += 1;
        let (line, push_buffer) = (it.lines[0], &shared.push_buffers[0][0]);
        push_buffer.put(1, BYTES, &bytes_of(&[7_f32; PLAIN as usize / 4]));
        let push = Push::plain(it.sequence, Operation::Assign {}, push_buffer.push_slot(1));
        let said = push.shared(&[(BYTES, BYTES + PLAIN)], Some(PLAIN));
        let assigned = shared.cluster.world.send(line, push.envelope(), said, &[]);
        shared.slices();
        assert_eq!(shared.heard(1, last), accepted(0));
        let assigned = shared.heard(0, assigned);
        assert!(matches!(assigned, Some(Ok(Outcome::Applied { .. }))), "{assigned:?}");
        assert_eq!(shared.value(), -2.0, "after {slices} slices");
        let values = f32s(&shared.cluster.world.values(line));
        assert_eq!(values[LARGE..], [7.0; PLAIN as usize / 4]);
    }
}

/// Whatever the variables are, and however they lie: as if all had been sent.
#[test]
fn a_step_that_is_applied_at_once_is_the_step() {
    let of = |name, dtype, elements: usize| {
        VariableSpec::new(name, dtype, Shape::new([elements as u64]).unwrap()).unwrap()
    };
    let third = LARGE / 3;
    let variables = || {
        vec![
            of("odd", DType::F32, 3),
            of("a", DType::F32, third),
            of("f64", DType::F64, third / 2 + 1),
            of("half", DType::Bf16, third + 5),
            of("short", DType::F32, 1),
        ]
    };
    let mut shared = SharedBuffers::with(variables(), 1, (2, 2), |config| config);
    let mut sent = SharedBuffers::with(variables(), 1, (2, 2), |config| config);
    let extents: Vec<(u64, u64)> = shared.cluster.world.shards[0]
        .store()
        .unwrap()
        .layout()
        .partitions()
        .iter()
        .map(|partition| (partition.offset, partition.end()))
        .collect();
    let bytes: u64 = extents.iter().map(|(start, end)| end - start).sum();
    for step in 0..3 {
        for replica in 0..2 {
            let [a, b] = [&mut shared, &mut sent].map(|it| it.cluster.token(replica));
            // Small numbers of every type.
            let gradient: Vec<u8> = (0..extents.last().unwrap().1)
                .map(|at| if at % 2 == 1 { 0x3c } else { (at * 7 + step + replica as u64) as u8 })
                .collect();
            let push_buffer = &shared.push_buffers[replica][0];
            push_buffer.put(0, 0, &gradient);
            let push = Push::gradient(step + 1, a, push_buffer.push_slot(0));
            let line = shared.cluster.replicas[replica].lines[0];
            let said = push.shared(&extents, Some(bytes));
            let request = shared.cluster.world.send(line, push.envelope(), said, &[]);
            shared.slices();
            assert_eq!(shared.heard(replica, request), accepted(step));
            let line = sent.cluster.replicas[replica].lines[0];
            let push = Push::gradient(step + 1, b, sent.cluster.world.push_slot(line));
            let parts: Vec<_> =
                extents.iter().flat_map(|&(start, end)| parts(&gradient, start, end)).collect();
            let request = sent.cluster.world.push(line, &push, &parts);
            sent.slices();
            assert_eq!(sent.heard(replica, request), accepted(step));
        }
        let [a, b] = [&mut shared, &mut sent].map(|it| {
            let line = it.cluster.replicas[0].lines[0];
            it.cluster.world.values(line)
        });
        assert!(a == b, "step {step}");
        assert!(a.iter().any(|&byte| byte != 0));
    }
}
