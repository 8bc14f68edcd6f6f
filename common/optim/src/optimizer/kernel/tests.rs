//! Every loop of every rule against the loop over single elements, to the bit.

use proptest::prelude::*;
use pushpull_common::finite::Exponents;
use pushpull_common::tensor::DType;

use super::*;
use crate::optimizer::gradient::{GradientRun, SharedRun};
use crate::optimizer::{
    Adadelta, Adagrad, Adam, AdamW, ApplyAt, BuiltInRule, Ftrl, Lamb, MEAN_GRADIENTS_MAX, Momentum,
    Optimizer, RmsProp, Sgd,
};
use crate::volatile::Volatile;

/// A run that is updated by the baseline loop, in lines of `N` elements.
struct Baseline<const N: usize, R>(R);

impl<F: OptimizerFloat, const N: usize> RuleRun<F> for Baseline<N, Run<'_, F>> {
    fn update<R: UpdateRule<F, S>, const S: usize>(self, rule: R) {
        in_place::<F, R, S, false, N>(rule, self.0);
    }
}

impl<F: OptimizerFloat, const N: usize> RuleRun<F> for Baseline<N, StreamRun<'_, F>> {
    fn update<R: UpdateRule<F, S>, const S: usize>(self, rule: R) {
        streamed::<F, R, S, false, N>(rule, self.0);
    }
}

#[derive(Clone, Copy, Debug)]
struct KernelCase {
    seed: u64,
    length: usize,
    /// The offset of each stream in its first line, in elements.
    starts: [usize; 4],
    past_cache: bool,
}

fn cases() -> impl Strategy<Value = KernelCase> {
    let starts = prop_oneof![
        proptest::array::uniform4(0..16_usize),
        (0..16_usize).prop_map(|start| [start; 4])
    ];
    (any::<u64>(), 0..150_usize, starts, any::<bool>()).prop_map(
        |(seed, length, starts, past_cache)| KernelCase { seed, length, starts, past_cache },
    )
}

/// Generates numbers of the size of gradients, zeros, and numbers whose squares overflow or
/// underflow.
fn numbers<F: OptimizerFloat>(seed: &mut u64, length: usize) -> Vec<F> {
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x5851_f42d);
        let mantissa = (*seed >> 32) as f64 / 2.0_f64.powi(31) - 1.0;
        match *seed >> 8 & 15 {
            0 => mantissa * 0.0,
            1 => mantissa * 1e30,
            2 => mantissa * 1e-42,
            _ => mantissa,
        }
    };
    (0..length).map(|_| F::of(next())).collect()
}

/// A stream at the offset of its case.
struct PlacedStream<F>(Vec<F>, usize);

impl<F: OptimizerFloat> PlacedStream<F> {
    fn new(case: &KernelCase, stream: usize, numbers: &[F]) -> Self {
        let mut buffer = vec![F::default(); numbers.len() + 32];
        let start = buffer.as_ptr().align_offset(LINE_BYTES) + case.starts[stream];
        buffer[start..start + numbers.len()].copy_from_slice(numbers);
        PlacedStream(buffer, start)
    }

    fn all(case: &KernelCase, streams: &[Vec<F>]) -> Vec<Self> {
        streams.iter().enumerate().map(|(i, numbers)| PlacedStream::new(case, i, numbers)).collect()
    }

    fn slice(&mut self, length: usize) -> &mut [F] {
        &mut self.0[self.1..self.1 + length]
    }
}

/// Returns the bits of streams, with one bit pattern for all NaN: IEEE 754 does not say which
/// operand's NaN an operation returns.
fn bits<F: OptimizerFloat + Into<f64>>(streams: &[Vec<F>]) -> Vec<Vec<u64>> {
    let bits = |&number: &F| {
        let number: f64 = number.into();
        if number.is_nan() { f64::NAN.to_bits() } else { number.to_bits() }
    };
    streams.iter().map(|stream| stream.iter().map(bits).collect()).collect()
}

fn contents_of<F: OptimizerFloat>(mut streams: Vec<PlacedStream<F>>, length: usize) -> Vec<Vec<F>> {
    streams.iter_mut().map(|stream| stream.slice(length).to_vec()).collect()
}

/// Returns the values and slots after an update in place.
fn result_in_place<F: OptimizerFloat>(
    case: &KernelCase,
    streams: &[Vec<F>],
    gradient: &[F],
    change: impl FnOnce(Run<'_, F>),
) -> Vec<Vec<F>> {
    let mut memory = PlacedStream::all(case, streams);
    let mut slices = memory.iter_mut().map(|stream| stream.slice(case.length));
    let values = slices.next().unwrap();
    let mut slots: Vec<&mut [F]> = slices.collect();
    change(Run { values, slots: &mut slots, gradient });
    contents_of(memory, case.length)
}

/// Returns the values and slots after an update into other memory.
fn streamed_result<F: OptimizerFloat>(
    case: &KernelCase,
    streams: &[Vec<F>],
    gradient: GradientRun<'_, F>,
    change: impl FnOnce(StreamRun<'_, F>),
) -> Vec<Vec<F>> {
    let mut overflowed = false;
    let mut memory = PlacedStream::all(case, &vec![vec![F::default(); case.length]; streams.len()]);
    let mut slices = memory.iter_mut().map(|stream| stream.slice(case.length));
    let values_out = slices.next().unwrap();
    let mut slots_out: Vec<&mut [F]> = slices.collect();
    let slots: Vec<&[F]> = streams[1..].iter().map(Vec::as_slice).collect();
    change(StreamRun {
        values: &streams[0],
        values_out,
        slots: &slots,
        slots_out: &mut slots_out,
        gradient,
        past_cache: case.past_cache,
        overflowed: &mut overflowed,
    });
    fence();
    let contents = contents_of(memory, case.length);
    // A product with zero is zero only for a finite number.
    let finite = contents[0].iter().all(|&value| value * F::default() == F::default());
    assert_eq!(overflowed, !finite, "{case:?}");
    contents
}

/// Returns the result of an update into other memory by the mean of shared gradients, which
/// follow 64 bytes of NaN. Also returns whether an exponent was full.
fn streamed_result_of_shared<F: OptimizerFloat>(
    case: &KernelCase,
    streams: &[Vec<F>],
    gradients: &[Vec<F>],
    change: impl FnOnce(StreamRun<'_, F>),
) -> (Vec<Vec<F>>, bool) {
    let before = LINE_BYTES / size_of::<F>();
    let place_stream = |gradient: &Vec<F>| {
        let all = [&vec![F::of(f64::NAN); before][..], gradient].concat();
        PlacedStream::new(case, 0, &all)
    };
    let mut memory = gradients.iter().map(place_stream).collect::<Vec<_>>();
    let mut full = false;
    let length = before + case.length;
    let bytes: Vec<&[u8]> =
        memory.iter_mut().map(|stream| bytemuck::cast_slice(stream.slice(length))).collect();
    let dtype = if size_of::<F>() == 4 { DType::F32 } else { DType::F64 };
    let shared = SharedRun {
        gradients: &bytes.into_iter().map(Volatile::of).collect::<Vec<_>>(),
        at: LINE_BYTES,
        divisor: gradients.len() as u32,
        exponents: Exponents::of(dtype),
    };
    let gradient = GradientRun::Shared { run: shared, full: &mut full };
    let found = streamed_result(case, streams, gradient, change);
    (found, full)
}

fn check_as<F, D, const N: usize>(rule: &D, case: &KernelCase)
where
    F: OptimizerFloat + Into<f64>,
    D: BuiltInRule + Optimizer,
    for<'a> Run<'a, F>: RuleRun<F>,
    for<'a> StreamRun<'a, F>: RuleRun<F>,
    for<'a, 'b> &'a mut Runs<'b, F>: RuleRun<F>,
{
    let at = ApplyAt::new(3, 2);
    let mut seed = case.seed;
    let mut streams: Vec<Vec<F>> =
        (0..=rule.slots().len()).map(|_| numbers(&mut seed, case.length)).collect();
    if rule.kind() != "momentum" && rule.kind() != "nesterov" {
        // These slots are sums of squares. The root of a negative one would be NaN.
        for sum in streams.iter_mut().skip(1).flatten() {
            *sum = sum.abs();
        }
    }
    let gradient: Vec<F> = numbers(&mut seed, case.length);
    // One element at a time, without vector instructions.
    let singly = |run: Run<'_, F>| rule.drive(at, Baseline::<1, _>(run));
    let reference = bits(&result_in_place(case, &streams, &gradient, singly));
    let baseline = |run: Run<'_, F>| rule.drive(at, Baseline::<N, _>(run));
    let dispatched = |run: Run<'_, F>| rule.drive(at, run);
    let in_runs = |Run { values, slots, gradient }: Run<'_, F>| {
        let mut runs = |change: &mut dyn FnMut(Run<'_, F>)| {
            for start in (0..values.len()).step_by(21) {
                let within = start..values.len().min(start + 21);
                let slots = slots.iter_mut().map(|slot| &mut slot[within.clone()]);
                let mut slots: Vec<&mut [F]> = slots.collect();
                let values = &mut values[within.clone()];
                let gradient = &gradient[within];
                change(Run { values, slots: &mut slots, gradient });
            }
        };
        rule.drive(at, &mut runs as &mut Runs<'_, F>);
    };
    let across = |run: StreamRun<'_, F>| rule.drive(at, Baseline::<N, _>(run));
    let across_dispatched = |run: StreamRun<'_, F>| rule.drive(at, run);
    for (way, found) in [
        ("in place, baseline", result_in_place(case, &streams, &gradient, baseline)),
        ("in place", result_in_place(case, &streams, &gradient, dispatched)),
        ("in runs", result_in_place(case, &streams, &gradient, in_runs)),
        (
            "streamed, baseline",
            streamed_result(case, &streams, GradientRun::Local(&gradient), across),
        ),
        (
            "streamed",
            streamed_result(case, &streams, GradientRun::Local(&gradient), across_dispatched),
        ),
    ] {
        assert_eq!(bits(&found), reference, "{rule:?} {way}, {case:?}");
    }
    // The same gradient in shared memory, and the mean of several.
    let mut gradients = vec![gradient];
    for count in 1..=MEAN_GRADIENTS_MAX as u32 {
        let length = 0..case.length;
        let sum = |at: usize| {
            let each = gradients.iter().map(|gradient| gradient[at]);
            each.reduce(|sum, more| sum + more).unwrap() / F::of(count.into())
        };
        let singly = |run: Run<'_, F>| rule.drive(at, Baseline::<1, _>(run));
        let mean: Vec<F> = length.map(sum).collect();
        let mean = bits(&result_in_place(case, &streams, &mean, singly));
        let (found, full) = streamed_result_of_shared(case, &streams, &gradients, across);
        assert_eq!((bits(&found), full), (mean.clone(), false), "{rule:?} baseline, {case:?}");
        let (found, full) =
            streamed_result_of_shared(case, &streams, &gradients, across_dispatched);
        assert_eq!((bits(&found), full), (mean, false), "{rule:?} of {count}, {case:?}");
        // A non-finite element is found at any position.
        if let Some(at) = (seed as usize).checked_rem(case.length) {
            let mut wrong = gradients.clone();
            let number = if seed & 64 == 0 { f64::NAN } else { f64::NEG_INFINITY };
            wrong[(seed >> 8) as usize % gradients.len()][at] = F::of(number);
            let (_, full) = streamed_result_of_shared(case, &streams, &wrong, across);
            assert!(full, "baseline, {at} of {case:?}");
            let (_, full) = streamed_result_of_shared(case, &streams, &wrong, across_dispatched);
            assert!(full, "{at} of {case:?}");
        }
        gradients.push(numbers(&mut seed, case.length));
    }
}

fn check(rule: &(impl BuiltInRule + Optimizer), case: &KernelCase) {
    check_as::<f32, _, { LINE_BYTES / 4 }>(rule, case);
    check_as::<f64, _, { LINE_BYTES / 8 }>(rule, case);
}

/// Terms with operations that a wider tier might round differently.
struct Quotients<'a>(&'a [f32]);

impl Terms<2> for Quotients<'_> {
    #[inline(always)]
    fn of<const LENGTH: usize>(&self, at: usize) -> [[f64; LENGTH]; 2] {
        let line: &[f32; LENGTH] = line(self.0, at);
        let quotients = line.map(|x| f64::from(x * 0.7 / (x.abs().sqrt() + 0.3)));
        [line.map(|x| f64::from(x) * f64::from(x) + 0.1), quotients]
    }
}

proptest! {
    /// For any division of a variable into runs.
    #[test]
    fn every_tier_computes_the_same_sums(
        elements in prop::collection::vec(-1e3_f32..1e3, 0..200),
        cuts in prop::collection::vec(0_usize..40, 0..10),
    ) {
        let mut widest = Sums::default();
        let mut baseline = Sums::default();
        let mut rest = &elements[..];
        for cut in cuts.into_iter().chain([usize::MAX]) {
            let (run, after) = rest.split_at(cut.min(rest.len()));
            add_up(&mut widest, run.len(), &Quotients(run));
            baseline.add(run.len(), |at| Quotients(run).of::<1>(at).map(|[term]| term));
            rest = after;
        }
        prop_assert_eq!(widest.totals().map(f64::to_bits), baseline.totals().map(f64::to_bits));
    }

    #[test]
    fn every_loop_computes_the_same_bits(case in cases()) {
        check(&Sgd::new(0.1).weight_decay(0.2), &case);
        check(&Momentum::new(0.1, 0.9), &case);
        check(&Momentum::new(0.1, 0.9).l2(0.1), &case);
        check(&Momentum::nesterov(0.1, 0.9), &case);
        check(&Momentum::nesterov(0.1, 0.9).l2(0.1).weight_decay(0.2), &case);
        check(&Adagrad::new(0.1), &case);
        check(&Adadelta::new(1.0), &case);
        check(&RmsProp::new(0.1).momentum(0.9), &case);
        check(&RmsProp::new(0.1).momentum(0.9).centered(), &case);
        check(&Adam::new(0.1), &case);
        check(&AdamW::new(0.1), &case);
        check(&Lamb::new(0.1).weight_decay(0.2), &case);
        check(&Ftrl::new(0.1).l1(0.1).l2(0.2).l2_shrinkage(0.05).beta(1.0), &case);
        check(&Ftrl::new(0.1).learning_rate_power(-0.7).l1(0.1), &case);
    }
}
