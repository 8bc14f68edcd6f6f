//! Compares every rule with the results of TensorFlow: for pushes of whole gradients, of rows, and
//! of rows with repeated ids.

use serde_json::Value;

use super::*;

/// An element type, and the tolerance of its results.
trait GoldenFloat: OptimizerFloat + Into<f64> {
    /// The relative and the absolute tolerance.
    const TOLERANCE: (f64, f64);

    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, Self>);
}

impl GoldenFloat for f64 {
    const TOLERANCE: (f64, f64) = (1e-9, 0.0);

    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, f64>) {
        rule.apply_f64(at, run);
    }
}

impl GoldenFloat for f32 {
    const TOLERANCE: (f64, f64) = (2e-5, 2e-6);

    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, f32>) {
        rule.apply_f32(at, run);
    }
}

/// A variable with rows, and its slots.
struct GoldenTable<F> {
    width: usize,
    values: Vec<F>,
    slots: Vec<Vec<F>>,
}

impl<F: GoldenFloat> GoldenTable<F> {
    fn new(rule: &dyn Optimizer, init: &Value) -> Self {
        let values: Vec<F> = numbers(init);
        let rows = init.as_array().unwrap().len();
        let slots = rule.slots().iter().map(|slot| vec![F::of(slot.initial); values.len()]);
        GoldenTable { width: values.len() / rows, slots: slots.collect(), values }
    }

    fn push(&mut self, rule: &dyn Optimizer, at: ApplyAt, gradient: &[F]) {
        self.push_row(rule, at, 0, gradient);
    }

    /// Pushes rows as a server applies them: rows with the same id are added in order, and then
    /// each id is updated once.
    fn push_rows(&mut self, rule: &dyn Optimizer, at: ApplyAt, ids: &[usize], rows: &[F]) {
        let mut sums: Vec<(usize, Vec<F>)> = Vec::new();
        for (&id, row) in ids.iter().zip(rows.chunks(self.width)) {
            match sums.iter_mut().find(|(known, _)| *known == id) {
                Some((_, sum)) => {
                    sum.iter_mut().zip(row).for_each(|(sum, &more)| *sum = *sum + more)
                }
                None => sums.push((id, row.to_vec())),
            }
        }
        if rule.moves_absent_rows() {
            let absent = (0..self.values.len() / self.width).filter(|id| !ids.contains(id));
            sums.extend(absent.map(|id| (id, vec![F::default(); self.width])));
        }
        for (id, sum) in sums {
            self.push_row(rule, at, id * self.width, &sum);
        }
    }

    fn push_row(&mut self, rule: &dyn Optimizer, at: ApplyAt, first: usize, gradient: &[F]) {
        let within = first..first + gradient.len();
        let mut slots: Vec<&mut [F]> =
            self.slots.iter_mut().map(|slot| &mut slot[within.clone()]).collect();
        let values = &mut self.values[within.clone()];
        let slots = &mut slots[..];
        F::apply(rule, at, Run { values, slots, gradient });
    }

    /// Compares the values or a slot.
    fn check(found: &[F], expected: &[f64], what: &str) {
        let (relative, absolute) = F::TOLERANCE;
        assert_eq!(found.len(), expected.len(), "{what}");
        for (&found, expected) in found.iter().zip(expected) {
            let found: f64 = found.into();
            let tolerance: f64 = relative * expected.abs() + absolute;
            assert!((found - expected).abs() <= tolerance, "{what}: {found}, not {expected}");
        }
    }
}

/// Returns the numbers of an array of any depth.
fn numbers<F: OptimizerFloat>(value: &Value) -> Vec<F> {
    match value.as_array() {
        Some(values) => values.iter().flat_map(numbers).collect(),
        None => vec![F::of(value.as_f64().unwrap())],
    }
}

fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors.json")).unwrap()
}

/// Creates the rule of a case from its hyperparameters.
fn rule(case: &Value) -> Box<dyn Optimizer> {
    let hyper = |name: &str| case["hyper"][name].as_f64().unwrap();
    match case["optimizer"].as_str().unwrap() {
        "SGD" => Box::new(Sgd::new(hyper("lr"))),
        adam @ ("Adam" | "LazyAdam") => {
            let rule = Adam::new(hyper("lr")).betas(hyper("beta1"), hyper("beta2"));
            let rule = rule.epsilon(hyper("epsilon"));
            Box::new(if adam == "Adam" { rule } else { rule.lazy() })
        }
        "Momentum" if case["hyper"]["nesterov"] == true => {
            Box::new(Momentum::nesterov(hyper("lr"), hyper("momentum")))
        }
        "Momentum" => Box::new(Momentum::new(hyper("lr"), hyper("momentum"))),
        "Adagrad" => Box::new(Adagrad::new(hyper("lr")).initial_accumulator(hyper("init_acc"))),
        "Adadelta" => {
            Box::new(Adadelta::new(hyper("lr")).rho(hyper("rho")).epsilon(hyper("epsilon")))
        }
        "RMSProp" => {
            let rule = RmsProp::new(hyper("lr")).decay(hyper("decay")).epsilon(hyper("epsilon"));
            let rule = rule.momentum(hyper("momentum"));
            Box::new(if case["hyper"]["centered"] == true { rule.centered() } else { rule })
        }
        "AdamW" => Box::new(
            AdamW::new(hyper("lr"))
                .weight_decay(hyper("weight_decay"))
                .betas(hyper("beta1"), hyper("beta2"))
                .epsilon(hyper("epsilon")),
        ),
        "Ftrl" => Box::new(
            Ftrl::new(hyper("lr"))
                .learning_rate_power(hyper("lr_power"))
                .initial_accumulator(hyper("init_acc"))
                .l1(hyper("l1"))
                .l2(hyper("l2"))
                .l2_shrinkage(hyper("l2_shrinkage"))
                .beta(hyper("beta")),
        ),
        other => panic!("no rule {other}"),
    }
}

/// Applies a step of the inputs to a variable.
fn step<F: GoldenFloat>(
    table: &mut GoldenTable<F>,
    rule: &dyn Optimizer,
    inputs: &Value,
    step: usize,
) {
    let at = ApplyAt::new(step as u64, 0);
    match inputs["steps"].get(step - 1) {
        None => table.push(rule, at, &numbers::<F>(&inputs["grads"][step - 1])),
        Some(rows) => {
            let ids: Vec<f64> = numbers(&rows["indices"]);
            let ids: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            table.push_rows(rule, at, &ids, &numbers::<F>(&rows["values"]));
        }
    }
}

/// Checks all cases with this table. Returns their number.
fn check<F: GoldenFloat>(which: &str) -> usize {
    let vectors = vectors();
    let inputs = &vectors["inputs"][which];
    let mut checked = 0;
    for (name, case) in vectors["cases"].as_object().unwrap() {
        let Some(expected) = case[which].as_array() else { continue };
        let rule = rule(case);
        assert_eq!(rule.fault(), None);
        let mut table = GoldenTable::<F>::new(&*rule, &inputs["init"]);
        for (count, expected) in expected.iter().enumerate() {
            if count > 0 {
                step(&mut table, &*rule, inputs, count);
            }
            let what = format!("{name}, {which}, after {count} steps");
            GoldenTable::check(&table.values, &numbers(&expected["var"]), &what);
            for (slot, found) in rule.slots().iter().zip(&table.slots) {
                let what = format!("{} of {what}", slot.name);
                GoldenTable::check(found, &numbers(&expected["slots"][slot.name]), &what);
            }
            assert_eq!(expected["slots"].as_object().unwrap().len(), rule.slots().len(), "{name}");
        }
        checked += 1;
    }
    checked
}

#[test]
fn golden_dense() {
    assert_eq!((check::<f64>("dense"), check::<f32>("dense")), (18, 18));
}

#[test]
fn golden_sparse() {
    assert_eq!((check::<f64>("sparse"), check::<f32>("sparse")), (16, 16));
}

#[test]
fn golden_sparse_with_duplicates() {
    assert_eq!((check::<f64>("sparse_dup"), check::<f32>("sparse_dup")), (16, 16));
}

/// `AdamW` as in the paper, except that the learning rate scales the decay: the moments are
/// corrected separately, and epsilon is added to the root of the corrected one.
struct AdamWReference {
    values: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl AdamWReference {
    const RATE: f64 = 0.1;
    const DECAY: f64 = 0.25;
    const BETAS: (f64, f64) = (0.8, 0.99);

    fn push(&mut self, t: i32, gradient: &[f64]) {
        let (beta1, beta2) = Self::BETAS;
        for (i, g) in gradient.iter().enumerate() {
            self.m[i] = beta1 * self.m[i] + (1.0 - beta1) * g;
            self.v[i] = beta2 * self.v[i] + (1.0 - beta2) * g * g;
            let m = self.m[i] / (1.0 - beta1.powi(t));
            let v = self.v[i] / (1.0 - beta2.powi(t));
            if v > 0.0 {
                self.values[i] -= Self::RATE * (m / v.sqrt() + Self::DECAY * self.values[i]);
            } else {
                self.values[i] -= Self::RATE * Self::DECAY * self.values[i];
            }
        }
    }
}

/// The gradients are so large that epsilon, which the paper and TensorFlow add in different places,
/// has no effect.
fn check_adamw_against_reference<F: GoldenFloat>(which: &str) {
    let vectors = vectors();
    let inputs = &vectors["inputs"][which];
    let (beta1, beta2) = AdamWReference::BETAS;
    let rule =
        AdamW::new(AdamWReference::RATE).weight_decay(AdamWReference::DECAY).betas(beta1, beta2);
    let rule = rule.epsilon(1e-30);
    let mut table = GoldenTable::<F>::new(&rule, &inputs["init"]);
    let values: Vec<f64> = numbers(&inputs["init"]);
    let zeros = vec![0.0; values.len()];
    let mut reference = AdamWReference { values, m: zeros.clone(), v: zeros.clone() };
    for count in 1..=3 {
        step(&mut table, &rule, inputs, count);
        let gradient = match inputs["steps"].get(count - 1) {
            None => numbers(&inputs["grads"][count - 1]),
            Some(rows) => {
                let ids: Vec<f64> = numbers(&rows["indices"]);
                let rows: Vec<f64> = numbers(&rows["values"]);
                let mut gradient = zeros.clone();
                for (i, row) in rows.iter().enumerate() {
                    gradient[ids[i / table.width] as usize * table.width + i % table.width] += row;
                }
                gradient
            }
        };
        reference.push(count as i32, &gradient);
        let what = format!("{which} after {count} steps");
        GoldenTable::check(&table.values, &reference.values, &what);
        GoldenTable::check(&table.slots[0], &reference.m, &what);
        GoldenTable::check(&table.slots[1], &reference.v, &what);
    }
}

#[test]
fn golden_adamw_against_a_reference() {
    for which in ["dense", "sparse", "sparse_dup"] {
        check_adamw_against_reference::<f64>(which);
        check_adamw_against_reference::<f32>(which);
    }
}

/// The vectors named `_defaults` list every hyperparameter. The rules must have the same defaults.
#[test]
fn golden_defaults() {
    let vectors = vectors();
    let defaults: [(&str, Box<dyn Optimizer>); 6] = [
        ("adagrad", Box::new(Adagrad::new(0.1))),
        ("adadelta_defaults", Box::new(Adadelta::default())),
        ("rmsprop_defaults", Box::new(RmsProp::new(0.01))),
        ("adam_defaults", Box::new(Adam::default())),
        ("adamw_defaults", Box::new(AdamW::default())),
        ("ftrl_defaults", Box::new(Ftrl::new(0.1))),
    ];
    for (name, defaults) in defaults {
        assert_eq!(format!("{defaults:?}"), format!("{:?}", rule(&vectors["cases"][name])));
    }
}
