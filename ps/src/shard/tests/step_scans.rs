//! Synchronous steps whose last gradient is in a push buffer: the scan of that gradient, and events
//! during the scan.

use pushpull_common::ids::{RequestId, VariableId};
use pushpull_common::protocol::message::Operation;
use pushpull_common::protocol::{Grant, Message, Outcome, Refusal, message};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{ApplyAt, Optimizer, OptimizerSlot, Run};

use super::peers::{Push, bytes_of, f32s};
use super::push_buffers_synchronous::SharedBuffers;
use super::shared_values::LARGE;
use super::synchronous::{ACCEPTED, STALE, synchronous};
use crate::config::{NonFinite, PsConfig};
use crate::shard::values::SLICE_BYTES;
use crate::shard::values::applier::WorkOutcome;

const BYTES: u64 = 4 * LARGE as u64;

/// The slices of a gradient's scan before the last one.
const SCAN_SLICES: u64 = BYTES.div_ceil(SLICE_BYTES);

/// The bytes of a plain variable, which can be assigned during a scan.
const PLAIN: u64 = 16;

/// Returns replicas with push buffers, a large variable, and a plain one behind it.
fn replicas(take: u32, of: u32, configure: impl Fn(PsConfig) -> PsConfig) -> SharedBuffers {
    let w = VariableSpec::f32("w", [LARGE as u64]).unwrap();
    let plain = VariableSpec::f32("plain", [PLAIN / 4]).unwrap().plain();
    SharedBuffers::with(vec![w, plain], 1, synchronous(take, of), configure)
}

impl SharedBuffers {
    /// Puts a gradient into a slot of a replica's push buffer, and sends its last part. Does no
    /// work.
    fn push_in_place(
        &mut self,
        replica: usize,
        buffer_slot: usize,
        grant: Grant,
        gradient: &[f32],
    ) -> RequestId {
        let it = &mut self.cluster.replicas[replica];
        it.sequence += 1;
        let line = it.lines[0];
        let sequence = it.sequence;
        let push_buffer = &self.push_buffers[replica][0];
        push_buffer.put(buffer_slot, 0, &bytes_of(gradient));
        let push = Push::gradient(sequence, grant, push_buffer.push_slot(buffer_slot));
        let said = push.shared(&[(0, BYTES)], Some(BYTES));
        self.cluster.world.send(line, push.envelope(), said, &[])
    }

    /// Takes the answer that a replica has received, if there is one.
    fn outcome(&mut self, replica: usize, request: RequestId) -> Option<Result<Outcome, Refusal>> {
        let line = self.cluster.replicas[replica].lines[0];
        match self.cluster.world.answer(line, request)? {
            Message::PushAnswer(answer) => Some(Ok(answer.outcome)),
            Message::Refused(message::Refused { refusal }) => Some(Err(refusal)),
            other => panic!("{other:?}"),
        }
    }

    /// Does all work. Returns the number of slices.
    fn finish_work(&mut self) -> usize {
        (1..).find(|_| self.cluster.world.slice(0) == WorkOutcome::Idle).unwrap()
    }

    /// Returns the first value, after checking that all values of the large variable are equal.
    fn value(&mut self) -> f32 {
        let line = self.cluster.replicas[0].lines[0];
        let values = f32s(&self.cluster.world.values(line));
        let values = &values[..LARGE];
        assert_eq!(
            values.iter().position(|value| *value != values[0]),
            None,
            "all values are equal"
        );
        values[0]
    }
}

/// Returns a range of a gradient as parts of at most 1 MiB.
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

/// A user's rule, which changes values in place.
#[derive(Debug)]
struct Subtract;

impl Optimizer for Subtract {
    fn kind(&self) -> &'static str {
        "subtract"
    }

    fn slots(&self) -> &[OptimizerSlot] {
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
fn a_non_finite_gradient_is_refused_and_the_step_waits_for_another() {
    let places = [0, 1, 15, 16, 70_000, LARGE / 2 + 3, LARGE - 1];
    for (place, users) in places.into_iter().flat_map(|place| [(place, false), (place, true)]) {
        let mut shared = replicas(2, 2, |config| match users {
            true => config.optimizer_for("w", Subtract),
            false => config,
        });
        let first = shared.cluster.token(0);
        let last = shared.cluster.token(1);
        let request = shared.push_in_place(0, 0, first, &all(1.0));
        shared.finish_work();
        assert_eq!(shared.outcome(0, request), accepted(0));
        let mut gradient = all(5.0);
        gradient[place] = f32::INFINITY;
        let request = shared.push_in_place(1, 0, last, &gradient);
        shared.finish_work();
        let Some(Err(refusal)) = shared.outcome(1, request) else {
            panic!("the gradient was not refused")
        };
        let expected = Refusal::NonFinite {
            variable: VariableId(0),
            element: place as u64,
            value: f64::INFINITY,
        };
        assert_eq!(refusal, expected);
        assert_eq!((shared.value(), shared.cluster.world.metrics().gradients_admitted), (0.0, 1));
        let request = shared.push_in_place(1, 0, last, &all(3.0));
        shared.finish_work();
        assert_eq!((shared.outcome(1, request), shared.value()), (accepted(0), -2.0));
    }
}

/// A replica can spoil a step by changing its gradient after it was admitted, as with any gradient.
/// The gradient of another replica is not refused for that.
#[test]
fn a_gradient_is_not_refused_for_a_change_to_another() {
    let mut shared = replicas(2, 2, |config| config);
    let first = shared.cluster.token(0);
    let last = shared.cluster.token(1);
    shared.push_in_place(0, 0, first, &all(1.0));
    shared.finish_work();
    shared.push_buffers[0][0].put(0, 0, &bytes_of(&all(f32::NAN)));
    let request = shared.push_in_place(1, 0, last, &all(5.0));
    shared.finish_work();
    assert_eq!(shared.outcome(1, request), accepted(0));
    assert_eq!(shared.cluster.world.metrics().steps_applied, 1);
}

#[test]
fn non_finite_elements_are_counted_once() {
    let mut shared = replicas(2, 2, |config| config.non_finite(NonFinite::Count));
    let first = shared.cluster.token(0);
    let last = shared.cluster.token(1);
    shared.push_in_place(0, 0, first, &all(1.0));
    shared.finish_work();
    let mut gradient = all(5.0);
    gradient[3] = f32::NAN;
    gradient[LARGE - 1] = f32::INFINITY;
    let request = shared.push_in_place(1, 0, last, &gradient);
    shared.finish_work();
    assert_eq!(shared.outcome(1, request), accepted(0));
    assert_eq!(shared.cluster.world.metrics().non_finite, 2);
}

/// The gradient of a backup replica completes the step while another gradient is scanned.
#[test]
fn a_gradient_that_completes_the_step_during_a_scan_is_in_it() {
    for slices in 0..SCAN_SLICES {
        let mut shared = replicas(2, 3, |config| config);
        let grants = [0, 1, 2].map(|replica| shared.cluster.token(replica));
        shared.push_in_place(0, 0, grants[0], &all(1.0));
        shared.finish_work();
        let slow = shared.push_in_place(1, 0, grants[1], &all(100.0));
        for _ in 0..slices {
            assert_eq!(shared.cluster.world.slice(0), WorkOutcome::More, "the scan takes longer");
        }
        // A gradient that is sent is held as soon as it is complete.
        shared.cluster.replicas[2].sequence += 1;
        let line = shared.cluster.replicas[2].lines[0];
        let push_slot = shared.cluster.world.push_slot(line);
        let push = Push::gradient(1, grants[2], push_slot);
        let gradient = bytes_of(&all(5.0));
        let request = shared.cluster.world.push(line, &push, &parts(&gradient, 0, BYTES));
        shared.finish_work();
        assert_eq!(shared.outcome(2, request), accepted(0), "after {slices} slices");
        assert_eq!(shared.outcome(1, slow), STALE(1).map(Ok));
        assert_eq!(shared.value(), -3.0, "after {slices} slices");
        let grants = [0, 1].map(|replica| shared.cluster.token(replica));
        shared.push_in_place(0, 0, grants[0], &all(1.0));
        let request = shared.push_in_place(1, 0, grants[1], &all(2.0));
        shared.finish_work();
        assert_eq!((shared.outcome(1, request), shared.value()), (accepted(1), -4.5));
    }
}

/// A backup replica's gradient in a push buffer waits for its scan. The applied step is not applied
/// again.
#[test]
fn a_stale_gradient_behind_the_last_one_changes_nothing() {
    let counted = [false, true].map(|late| {
        let mut shared = replicas(2, 3, |config| config);
        let grants = [0, 1, 2].map(|replica| shared.cluster.token(replica));
        shared.push_in_place(0, 0, grants[0], &all(1.0));
        shared.finish_work();
        let last = shared.push_in_place(1, 0, grants[1], &all(3.0));
        assert_eq!(shared.cluster.world.slice(0), WorkOutcome::More);
        let backup = late.then(|| shared.push_in_place(2, 0, grants[2], &all(100.0)));
        let slices = shared.finish_work();
        assert_eq!((shared.outcome(1, last), shared.value()), (accepted(0), -2.0));
        if let Some(backup) = backup {
            assert_eq!(shared.outcome(2, backup), STALE(1).map(Ok));
        }
        slices
    });
    assert!(counted[1] <= counted[0] + 1, "{counted:?}");
}

/// A replica returns its token during the scan, and pushes another gradient in the same buffer
/// slot, in place or sent.
#[test]
fn a_gradient_withdrawn_during_its_scan_is_not_in_the_step() {
    for (slices, sends) in (0..SCAN_SLICES).flat_map(|slices| [(slices, false), (slices, true)]) {
        let mut shared = replicas(2, 2, |config| config);
        let grants = [0, 1].map(|replica| shared.cluster.token(replica));
        shared.push_in_place(0, 0, grants[0], &all(1.0));
        shared.finish_work();
        shared.push_in_place(1, 0, grants[1], &all(100.0));
        for _ in 0..slices {
            assert_eq!(shared.cluster.world.slice(0), WorkOutcome::More, "the scan takes longer");
        }
        let token = grants[1].token;
        let generation = grants[1].generation;
        let line = shared.cluster.replicas[1].lines[0];
        shared.cluster.world.say(line, message::ReturnToken { token, generation }.into());
        let asked = shared.cluster.world.say(line, message::TokenRequest { newest: token }.into());
        let Some(Message::Granted(granted)) = shared.cluster.world.answer(line, asked) else {
            panic!("no token")
        };
        let request = match sends {
            false => shared.push_in_place(1, 0, granted.grant, &all(3.0)),
            true => {
                let push = Push::gradient(2, granted.grant, shared.push_buffers[1][0].push_slot(0));
                let gradient = bytes_of(&all(3.0));
                shared.cluster.world.push(line, &push, &parts(&gradient, 0, BYTES))
            }
        };
        shared.finish_work();
        let message = format!("after {slices} slices, sent: {sends}");
        assert_eq!(shared.outcome(1, request), accepted(0), "{message}");
        assert_eq!(shared.value(), -2.0, "{message}");
    }
}

#[test]
fn an_assignment_during_a_scan_is_applied() {
    for slices in 0..SCAN_SLICES {
        let mut shared = replicas(2, 2, |config| config);
        let grants = [0, 1].map(|replica| shared.cluster.token(replica));
        shared.push_in_place(0, 0, grants[0], &all(1.0));
        shared.finish_work();
        let last = shared.push_in_place(1, 0, grants[1], &all(3.0));
        for _ in 0..slices {
            assert_eq!(shared.cluster.world.slice(0), WorkOutcome::More, "the scan takes longer");
        }
        let it = &mut shared.cluster.replicas[0];
        it.sequence += 1;
        let line = it.lines[0];
        let push_buffer = &shared.push_buffers[0][0];
        push_buffer.put(1, BYTES, &bytes_of(&[7_f32; PLAIN as usize / 4]));
        let push = Push::plain(it.sequence, Operation::Assign {}, push_buffer.push_slot(1));
        let said = push.shared(&[(BYTES, BYTES + PLAIN)], Some(PLAIN));
        let assigned = shared.cluster.world.send(line, push.envelope(), said, &[]);
        shared.finish_work();
        assert_eq!(shared.outcome(1, last), accepted(0));
        let assigned = shared.outcome(0, assigned);
        assert!(matches!(assigned, Some(Ok(Outcome::Applied { .. }))), "{assigned:?}");
        assert_eq!(shared.value(), -2.0, "after {slices} slices");
        let values = f32s(&shared.cluster.world.values(line));
        assert_eq!(values[LARGE..], [7.0; PLAIN as usize / 4]);
    }
}

/// Gradients in push buffers give the same values as sent ones, for variables of several types and
/// lengths.
#[test]
fn a_step_from_push_buffers_equals_one_from_sent_parts() {
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
    let mut shared = SharedBuffers::with(variables(), 1, synchronous(2, 2), |config| config);
    let mut sent = SharedBuffers::with(variables(), 1, synchronous(2, 2), |config| config);
    let extents: Vec<(u64, u64)> = shared.cluster.world.shards[0]
        .variables
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
            shared.finish_work();
            assert_eq!(shared.outcome(replica, request), accepted(step));
            let line = sent.cluster.replicas[replica].lines[0];
            let push = Push::gradient(step + 1, b, sent.cluster.world.push_slot(line));
            let parts: Vec<_> =
                extents.iter().flat_map(|&(start, end)| parts(&gradient, start, end)).collect();
            let request = sent.cluster.world.push(line, &push, &parts);
            sent.finish_work();
            assert_eq!(sent.outcome(replica, request), accepted(step));
        }
        let [a, b] = [&mut shared, &mut sent].map(|it| {
            let line = it.cluster.replicas[0].lines[0];
            it.cluster.world.values(line)
        });
        assert!(a == b, "step {step}");
        assert!(a.iter().any(|&byte| byte != 0));
    }
}
