//! Every rule against what TensorFlow computes: pushes of whole gradients, of rows, and of rows that
//! are named more than once.

use serde_json::Value;

use super::*;

/// An element type, and how near to the vectors its results must be.
trait Trained: Float + Into<f64> {
    /// Of a number, and beside it.
    const TOLERANCE: (f64, f64);

    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, Self>);
}

impl Trained for f64 {
    const TOLERANCE: (f64, f64) = (1e-9, 0.0);

    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, f64>) {
        rule.apply_f64(at, run);
    }
}

impl Trained for f32 {
    const TOLERANCE: (f64, f64) = (2e-5, 2e-6);

    fn apply(rule: &dyn Optimizer, at: ApplyAt, run: Run<'_, f32>) {
        rule.apply_f32(at, run);
    }
}

/// A variable of rows and its slots.
struct Table<F> {
    width: usize,
    values: Vec<F>,
    slots: Vec<Vec<F>>,
}

impl<F: Trained> Table<F> {
    fn new(rule: &dyn Optimizer, init: &Value) -> Self {
        let values: Vec<F> = numbers(init);
        let rows = init.as_array().unwrap().len();
        let slots = rule.slots().iter().map(|slot| vec![F::of(slot.initial); values.len()]);
        Table { width: values.len() / rows, slots: slots.collect(), values }
    }

    fn push(&mut self, rule: &dyn Optimizer, at: ApplyAt, gradient: &[F]) {
        self.push_row(rule, at, 0, gradient);
    }

    /// As servers do it: the rows of an id are added up in the order in which they come, and then
    /// each id's is changed once.
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
        let (values, slots) = (&mut self.values[within.clone()], &mut slots[..]);
        F::apply(rule, at, Run { values, slots, gradient });
    }

    /// The values or a slot.
    fn check(found: &[F], expected: &[f64], what: &str) {
        let (relative, absolute) = F::TOLERANCE;
        assert_eq!(found.len(), expected.len(), "{what}");
        for (&found, expected) in found.iter().zip(expected) {
            let (found, tolerance): (f64, f64) =
                (found.into(), relative * expected.abs() + absolute);
            assert!((found - expected).abs() <= tolerance, "{what}: {found}, not {expected}");
        }
    }
}

/// The numbers of an array of any depth.
fn numbers<F: Float>(value: &Value) -> Vec<F> {
    match value.as_array() {
        Some(values) => values.iter().flat_map(numbers).collect(),
        None => vec![F::of(value.as_f64().unwrap())],
    }
}

fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors.json")).unwrap()
}

/// The rule of a case, by its hyperparameters.
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

/// A step of a table of inputs, taken to a variable.
fn step<F: Trained>(table: &mut Table<F>, rule: &dyn Optimizer, inputs: &Value, step: usize) {
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

/// All cases that have this table: how many.
fn check<F: Trained>(which: &str) -> usize {
    let vectors = vectors();
    let inputs = &vectors["inputs"][which];
    let mut checked = 0;
    for (name, case) in vectors["cases"].as_object().unwrap() {
        let Some(expected) = case[which].as_array() else { continue };
        let rule = rule(case);
        assert_eq!(rule.fault(), None);
        let mut table = Table::<F>::new(&*rule, &inputs["init"]);
        for (count, expected) in expected.iter().enumerate() {
            if count > 0 {
                step(&mut table, &*rule, inputs, count);
            }
            let what = format!("{name}, {which}, after {count} steps");
            Table::check(&table.values, &numbers(&expected["var"]), &what);
            for (slot, found) in rule.slots().iter().zip(&table.slots) {
                let what = format!("{} of {what}", slot.name);
                Table::check(found, &numbers(&expected["slots"][slot.name]), &what);
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

/// `AdamW` by itself, as the paper has it but for the learning rate on the decay: moments corrected
/// one by one, epsilon beside the root of the corrected one.
struct Reference {
    values: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Reference {
    const RATE: f64 = 0.1;
    const DECAY: f64 = 0.25;
    const BETAS: (f64, f64) = (0.8, 0.99);

    fn push(&mut self, t: i32, gradient: &[f64]) {
        let (beta1, beta2) = Self::BETAS;
        for (i, g) in gradient.iter().enumerate() {
            self.m[i] = beta1 * self.m[i] + (1.0 - beta1) * g;
            self.v[i] = beta2 * self.v[i] + (1.0 - beta2) * g * g;
            let (m, v) = (self.m[i] / (1.0 - beta1.powi(t)), self.v[i] / (1.0 - beta2.powi(t)));
            if v > 0.0 {
                self.values[i] -= Self::RATE * (m / v.sqrt() + Self::DECAY * self.values[i]);
            } else {
                self.values[i] -= Self::RATE * Self::DECAY * self.values[i];
            }
        }
    }
}

/// The gradients are such that epsilon, which the paper and TensorFlow add in two places, is nothing.
fn adamw_is_the_reference<F: Trained>(which: &str) {
    let vectors = vectors();
    let inputs = &vectors["inputs"][which];
    let (beta1, beta2) = Reference::BETAS;
    let rule = AdamW::new(Reference::RATE).weight_decay(Reference::DECAY).betas(beta1, beta2);
    let rule = rule.epsilon(1e-30);
    let mut table = Table::<F>::new(&rule, &inputs["init"]);
    let values: Vec<f64> = numbers(&inputs["init"]);
    let zeros = vec![0.0; values.len()];
    let mut reference = Reference { values, m: zeros.clone(), v: zeros.clone() };
    for count in 1..=3 {
        step(&mut table, &rule, inputs, count);
        let gradient = match inputs["steps"].get(count - 1) {
            None => numbers(&inputs["grads"][count - 1]),
            Some(rows) => {
                let (ids, rows): (Vec<f64>, Vec<f64>) =
                    (numbers(&rows["indices"]), numbers(&rows["values"]));
                let mut gradient = zeros.clone();
                for (i, row) in rows.iter().enumerate() {
                    gradient[ids[i / table.width] as usize * table.width + i % table.width] += row;
                }
                gradient
            }
        };
        reference.push(count as i32, &gradient);
        let what = format!("{which} after {count} steps");
        Table::check(&table.values, &reference.values, &what);
        Table::check(&table.slots[0], &reference.m, &what);
        Table::check(&table.slots[1], &reference.v, &what);
    }
}

#[test]
fn golden_adamw_against_a_reference() {
    for which in ["dense", "sparse", "sparse_dup"] {
        adamw_is_the_reference::<f64>(which);
        adamw_is_the_reference::<f32>(which);
    }
}

/// The vectors named `_defaults` hold every hyperparameter; the rules have the same ones by
/// themselves.
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
