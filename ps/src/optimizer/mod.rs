//! How a gradient changes a variable: one trait, and one file per rule.

mod adam;
mod kernel;
mod sgd;

use std::fmt;

pub use adam::Adam;
pub use sgd::Sgd;

/// A slot: state that an optimizer keeps for every element of every trainable variable.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SlotSpec {
    /// The slot's name, such as `m`; part of checkpoints.
    pub name: &'static str,
    /// The value it starts with.
    pub initial: f64,
}

impl SlotSpec {
    /// A slot that starts with `initial` everywhere.
    pub const fn new(name: &'static str, initial: f64) -> Self {
        SlotSpec { name, initial }
    }
}

/// Which update this is.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ApplyAt {
    /// Counts the gradients that the shard has applied, this one included: 1 for the first.
    pub count: u64,
    /// The global step of the token the gradient was computed under; for schedules.
    pub step: u64,
    /// What the rule multiplies its learning rate by: 1, or less for a gradient that is damped
    /// because it is stale. See [`Optimizer::scales_rate`].
    pub rate: f64,
}

impl ApplyAt {
    /// The `count`-th gradient of a shard, computed under a token of global step `step`; at the
    /// rule's own learning rate.
    pub const fn new(count: u64, step: u64) -> Self {
        ApplyAt { count, step, rate: 1.0 }
    }

    /// The same at the rule's learning rate times `rate`.
    pub const fn at_rate(self, rate: f64) -> Self {
        ApplyAt { rate, ..self }
    }
}

/// A run of elements of one variable, with the same run of its slots and its gradient.
///
/// All slices are of one length.
#[derive(Debug)]
pub struct Run<'a, T> {
    /// The values, to be changed.
    pub values: &'a mut [T],
    /// The slots in the order of [`Optimizer::slots`], to be changed.
    pub slots: &'a mut [&'a mut [T]],
    /// The gradient.
    pub gradient: &'a [T],
}

/// A run whose result is written elsewhere: the slices that are read and those that are written do
/// not overlap. All are of one length.
#[derive(Debug)]
#[doc(hidden)]
pub struct StreamRun<'a, T> {
    /// The values.
    pub values: &'a [T],
    /// What they become.
    pub values_out: &'a mut [T],
    /// The slots in the order of [`Optimizer::slots`].
    pub slots: &'a [&'a [T]],
    /// What they become.
    pub slots_out: &'a mut [&'a mut [T]],
    /// The gradient.
    pub gradient: &'a [T],
    /// Whether the result is written past the cache: nobody reads it soon.
    pub past_cache: bool,
}

/// A rule that changes variables by gradients, element by element.
///
/// A shard calls it for runs of at most a few thousand elements, in any order and from its own
/// thread; the result for an element must depend on that element, its slots, its gradient and
/// [`ApplyAt`] alone. Hyperparameters are `f64`; the rule rounds them once to the variable's type.
pub trait Optimizer: fmt::Debug + Send + Sync + 'static {
    /// The rule's name, such as `adam`. All ps tasks of a cluster must use the same.
    fn kind(&self) -> &'static str;

    /// The slots it keeps.
    fn slots(&self) -> &[SlotSpec];

    /// Changes a run of a variable of `f32`.
    fn apply_f32(&self, at: ApplyAt, run: Run<'_, f32>);

    /// Changes a run of a variable of `f64`.
    fn apply_f64(&self, at: ApplyAt, run: Run<'_, f64>);

    /// The same as `apply_f32`, from one place to another; `false` if the rule has no such loop, and
    /// nothing was done. The rules here have one: it saves a pass over the values.
    #[doc(hidden)]
    fn stream_f32(&self, _at: ApplyAt, _run: StreamRun<'_, f32>) -> bool {
        false
    }

    /// The same for `f64`.
    #[doc(hidden)]
    fn stream_f64(&self, _at: ApplyAt, _run: StreamRun<'_, f64>) -> bool {
        false
    }

    /// Whether the rule multiplies its learning rate by [`ApplyAt::rate`]. Only rules that do can be
    /// used with [`crate::StalenessPolicy::Damp`]: a smaller gradient is not the same as a smaller
    /// step for a rule that divides by how large gradients are.
    fn scales_rate(&self) -> bool {
        false
    }

    /// The first hyperparameter that cannot be used: its name, its value and why.
    fn fault(&self) -> Option<(&'static str, f64, &'static str)> {
        None
    }
}

/// A learning rate must be finite and not negative.
fn learning_rate_fault(rate: f64) -> Option<(&'static str, f64, &'static str)> {
    let usable = rate.is_finite() && rate >= 0.0;
    (!usable).then_some(("learning_rate", rate, "it must be finite and not negative"))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn numbers(value: &Value) -> Vec<f64> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
    }

    fn rule(case: &Value) -> Box<dyn Optimizer> {
        let hyper = |name: &str| case["hyper"][name].as_f64().unwrap();
        match case["optimizer"].as_str().unwrap() {
            "SGD" => Box::new(Sgd::new(hyper("lr"))),
            "Adam" => Box::new(
                Adam::new(hyper("lr"))
                    .betas(hyper("beta1"), hyper("beta2"))
                    .epsilon(hyper("epsilon")),
            ),
            other => panic!("no rule {other}"),
        }
    }

    fn check(found: &[f64], expected: &Value, relative: f64, absolute: f64, what: &str) {
        let expected = numbers(expected);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            let tolerance = relative * expected.abs() + absolute;
            assert!((found - expected).abs() <= tolerance, "{what}: {found}, not {expected}");
        }
    }

    #[test]
    fn values_and_slots_are_those_of_the_classic_rules() {
        let vectors: Value = serde_json::from_str(include_str!("vectors.json")).unwrap();
        let inputs = &vectors["inputs"]["dense"];
        for (name, case) in vectors["cases"].as_object().unwrap() {
            let rule = rule(case);
            assert_eq!(rule.fault(), None);
            let names: Vec<&str> = rule.slots().iter().map(|slot| slot.name).collect();
            let mut wide = numbers(&inputs["init"]);
            let mut narrow: Vec<f32> = wide.iter().map(|&value| value as f32).collect();
            let slots = |initial: f64| vec![initial; wide.len()];
            let mut wide_slots: Vec<Vec<f64>> =
                rule.slots().iter().map(|slot| slots(slot.initial)).collect();
            let mut narrow_slots: Vec<Vec<f32>> = wide_slots
                .iter()
                .map(|slot| slot.iter().map(|&value| value as f32).collect())
                .collect();
            for (step, expected) in case["dense"].as_array().unwrap().iter().enumerate() {
                if step > 0 {
                    let gradient = numbers(&inputs["grads"][step - 1]);
                    let at = ApplyAt::new(step as u64, 0);
                    let mut slots: Vec<&mut [f64]> =
                        wide_slots.iter_mut().map(Vec::as_mut_slice).collect();
                    let (values, slots) = (&mut wide[..], &mut slots[..]);
                    rule.apply_f64(at, Run { values, slots, gradient: &gradient });
                    let gradient: Vec<f32> = gradient.iter().map(|&g| g as f32).collect();
                    let mut slots: Vec<&mut [f32]> =
                        narrow_slots.iter_mut().map(Vec::as_mut_slice).collect();
                    let (values, slots) = (&mut narrow[..], &mut slots[..]);
                    rule.apply_f32(at, Run { values, slots, gradient: &gradient });
                }
                let widen = |narrow: &[f32]| -> Vec<f64> {
                    narrow.iter().map(|&value| value.into()).collect()
                };
                let what = format!("{name} after {step} steps");
                check(&wide, &expected["var"], 1e-9, 0.0, &what);
                check(&widen(&narrow), &expected["var"], 2e-5, 2e-6, &what);
                for (index, slot) in names.iter().enumerate() {
                    let what = format!("{slot} of {what}");
                    check(&wide_slots[index], &expected["slots"][slot], 1e-9, 0.0, &what);
                    let narrow = widen(&narrow_slots[index]);
                    check(&narrow, &expected["slots"][slot], 2e-5, 2e-6, &what);
                }
                assert_eq!(expected["slots"].as_object().unwrap().len(), names.len(), "{name}");
            }
        }
    }

    #[test]
    fn a_part_of_the_rate_is_a_smaller_learning_rate_to_the_bit() {
        let rules: [fn(f64) -> Box<dyn Optimizer>; 2] =
            [|rate| Box::new(Sgd::new(rate)), |rate| Box::new(Adam::new(rate))];
        for rule in rules {
            let apply = |rule: &dyn Optimizer, at: ApplyAt| {
                let count = rule.slots().len();
                let (mut wide, mut narrow) = ([1.0_f64, -2.0, 0.3], [1.0_f32, -2.0, 0.3]);
                let mut wide_slots = vec![[0.5_f64; 3]; count];
                let mut narrow_slots = vec![[0.5_f32; 3]; count];
                let mut slots: Vec<&mut [f64]> =
                    wide_slots.iter_mut().map(|slot| &mut slot[..]).collect();
                let (values, slots) = (&mut wide[..], &mut slots[..]);
                rule.apply_f64(at, Run { values, slots, gradient: &[0.1, 0.2, -0.7] });
                let mut slots: Vec<&mut [f32]> =
                    narrow_slots.iter_mut().map(|slot| &mut slot[..]).collect();
                let (values, slots) = (&mut narrow[..], &mut slots[..]);
                rule.apply_f32(at, Run { values, slots, gradient: &[0.1, 0.2, -0.7] });
                (wide, narrow, wide_slots, narrow_slots)
            };
            let whole = rule(0.1);
            assert!(whole.scales_rate());
            let at = ApplyAt::new(3, 0);
            for part in [1.0, 0.5, 1.0 / 3.0, 0.1] {
                let smaller = apply(&*rule(0.1 * part), at);
                assert_eq!(apply(&*whole, at.at_rate(part)), smaller, "{part} of {whole:?}");
            }
        }
    }

    #[test]
    fn a_hyperparameter_that_cannot_be_used_is_named() {
        let cases: [(Box<dyn Optimizer>, &str); 6] = [
            (Box::new(Sgd::new(f64::NAN)), "learning_rate"),
            (Box::new(Sgd::new(-0.1)), "learning_rate"),
            (Box::new(Adam::new(f64::INFINITY)), "learning_rate"),
            (Box::new(Adam::default().betas(1.0, 0.9)), "beta1"),
            (Box::new(Adam::default().betas(0.9, -0.1)), "beta2"),
            (Box::new(Adam::default().epsilon(f64::NAN)), "epsilon"),
        ];
        for (rule, name) in cases {
            assert_eq!(rule.fault().map(|fault| fault.0), Some(name));
        }
    }
}
