//! Optimizers that need sums over a whole variable before they update any part of it.

use pushpull::optim::{ApplyAt, OptimizerSlot, Run, SumRun, Sums};
use pushpull::optim::{Lamb, Optimizer};
use pushpull::server::StalenessPolicy;
use pushpull::worker::InitialValues;
use pushpull::{Adam, Asynchronous, PsConfig, Push, Synchronous, VariableSpec};

use crate::cluster::{TestCluster, vector};

/// More than one part of a push, and not a whole number of blocks.
const ELEMENTS: usize = 300_001;

/// A custom optimizer: the norm of each step is a fixed share of the norm of the values. It sums
/// the squares of values and gradient.
#[derive(Clone, Debug)]
struct Share(f64);

impl Optimizer for Share {
    fn kind(&self) -> &'static str {
        "share"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        &[]
    }

    fn sums_whole_variables(&self) -> bool {
        true
    }

    fn sum_f32(&self, _: ApplyAt, run: SumRun<'_, f32>, sums: &mut Sums) {
        let square = |x: f32| f64::from(x) * f64::from(x);
        sums.add(run.values.len(), |i| [square(run.values[i]), square(run.gradient[i])]);
    }

    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>) {
        let [values, gradient, ..] = at.sums;
        let rate = (self.0 * (values / gradient).sqrt()) as f32;
        run.values.iter_mut().zip(run.gradient).for_each(|(value, g)| *value -= rate * g);
    }

    fn apply_f64(&self, _: ApplyAt, _: Run<'_, f64>) {
        unreachable!("the variables here are f32")
    }
}

fn gradient(worker: u32, step: u64) -> Vec<f32> {
    let salt = step as f32 + 0.25 + worker as f32;
    (0..ELEMENTS).map(|index| (index as f32 * salt).sin()).collect()
}

/// Reference: one variable in memory, to which each gradient is applied in one piece.
struct ReferenceVariable<'a> {
    rule: &'a dyn Optimizer,
    values: Vec<f32>,
    slots: Vec<Vec<f32>>,
    count: u64,
}

impl<'a> ReferenceVariable<'a> {
    fn new(rule: &'a dyn Optimizer) -> Self {
        let slots = vec![vec![0.0; ELEMENTS]; rule.slots().len()];
        ReferenceVariable { rule, values: start(), slots, count: 0 }
    }

    fn push(&mut self, gradient: &[f32]) {
        self.count += 1;
        let at = ApplyAt::new(self.count, 0);
        let mut sums = Sums::default();
        let held: Vec<&[f32]> = self.slots.iter().map(Vec::as_slice).collect();
        self.rule.sum_f32(at, SumRun::new(&self.values, &held, gradient), &mut sums);
        let slots = &mut self.slots.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>()[..];
        let run = Run { values: &mut self.values, slots, gradient };
        self.rule.apply_f32(at.with_sums(sums.totals()), run);
    }
}

/// Returns the values after `rule` has applied these gradients.
fn expected(rule: &dyn Optimizer, gradients: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    let mut reference = ReferenceVariable::new(rule);
    gradients.for_each(|gradient| reference.push(&gradient));
    reference.values
}

fn start() -> Vec<f32> {
    (0..ELEMENTS).map(|index| (index as f32 * 0.1).cos()).collect()
}

/// The variable under test, between two that have another optimizer.
fn variables() -> [VariableSpec; 3] {
    [vector("before", 5), vector("w", ELEMENTS as u64), vector("behind", 3)]
}

/// Returns the values of all variables after `steps` steps of `workers` workers. In each step, all
/// workers pull before the first one pushes.
fn trained(
    rule: impl Optimizer + Clone,
    shards: u16,
    workers: u32,
    steps: u64,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> [Vec<f32>; 3] {
    let configure =
        |config: PsConfig| configure(config.optimizer_for("w", rule.clone())).shards(shards);
    let cluster = TestCluster::start(1, workers as usize, Adam::new(0.25), configure);
    let mut all: Vec<_> = (0..workers)
        .map(|index| {
            let mut worker = cluster.worker(index);
            let first = start();
            let fill = |initial: &mut InitialValues| _ = initial.set("w", &first);
            let params = worker.join(&variables(), fill).unwrap();
            (worker, params)
        })
        .collect();
    for step in 0..steps {
        let mut tokens = Vec::new();
        for (worker, params) in &mut all {
            let token = worker.token().unwrap().unwrap();
            worker.pull(&token, params).unwrap();
            tokens.push(token);
        }
        for ((index, (worker, _)), token) in (0..).zip(&mut all).zip(tokens) {
            let mut gradients = worker.gradients();
            gradients.view_mut::<f32>("before").unwrap().fill(1.0 + step as f32);
            gradients.view_mut::<f32>("behind").unwrap().fill(2.0);
            gradients.view_mut::<f32>("w").unwrap().copy_from_slice(&gradient(index, step));
            let push = worker.push(token, gradients).unwrap();
            assert!(!matches!(push, Push::Stale { .. }), "{push:?}");
        }
    }
    let (worker, params) = &mut all[0];
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, params).unwrap();
    let values = ["before", "w", "behind"].map(|name| params.view::<f32>(name).unwrap().to_vec());
    cluster.stop();
    values
}

#[test]
fn an_optimizer_with_norms_sees_the_whole_variable_on_any_number_of_shards() {
    let gradients = || (0..3).map(|step| gradient(0, step));
    let lamb = Lamb::new(0.1).weight_decay(0.5);
    let by_lamb = expected(&lamb, gradients());
    let by_share = expected(&Share(0.1), gradients());
    let mut others = Vec::new();
    for shards in [1, 2] {
        let [before, w, behind] = trained(lamb.clone(), shards, 1, 3, |config| config);
        assert!(w == by_lamb, "{shards} shards");
        others.push((before, behind));
        let [before, w, behind] = trained(Share(0.1), shards, 1, 3, |config| config);
        assert!(w == by_share, "{shards} shards");
        others.push((before, behind));
    }
    assert!(others.iter().all(|other| *other == others[0] && other.0[0] < 0.0), "{others:?}");
    assert!(by_lamb != by_share);
}

#[test]
fn an_optimizer_with_norms_uses_the_mean_of_a_step() {
    let mode = Synchronous::new(2);
    let mean = |step| {
        let both = gradient(0, step).into_iter().zip(gradient(1, step));
        both.map(|(a, b)| (a + b) / 2.0).collect::<Vec<f32>>()
    };
    let lamb = Lamb::new(0.1);
    let [_, w, _] = trained(lamb.clone(), 2, 2, 3, |config| config.mode(mode));
    assert!(w == expected(&lamb, (0..3).map(mean)));
}

#[test]
fn an_optimizer_with_norms_uses_the_compensated_gradient() {
    const LAMBDA: f32 = 64.0;
    let lamb = Lamb::new(0.1);
    let policy = StalenessPolicy::DelayCompensation { lambda: LAMBDA.into() };
    let [_, w, _] = trained(lamb.clone(), 2, 2, 2, |config| {
        config.mode(Asynchronous::default().staleness(policy))
    });
    let mut reference = ReferenceVariable::new(&lamb);
    for step in 0..2 {
        let read = reference.values.clone();
        reference.push(&gradient(0, step));
        let drift = reference.values.iter().zip(read).map(|(now, read)| now - read);
        let compensated = gradient(1, step).into_iter().zip(drift);
        reference.push(
            &compensated.map(|(g, drift)| g + (LAMBDA * g) * (g * drift)).collect::<Vec<f32>>(),
        );
    }
    assert!(w == reference.values);
}
