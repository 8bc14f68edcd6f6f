//! Tests of the rules beyond the vectors of `golden`.

use super::*;

/// After one large gradient, the mean square converges to the square of the mean. Their difference
/// is a rounding error, which can be negative.
#[test]
fn constant_gradients_give_a_centered_rule_no_nan() {
    let rule = RmsProp::new(0.01).centered();
    let gradient: [f32; 64] = std::array::from_fn(|index| (index + 1) as f32 * 33.3);
    let mut values = [0.0; 64];
    let mut rms = [1.0; 64];
    let mut momentum = [0.0; 64];
    let mut mean = [0.0; 64];
    for count in 1..=1000 {
        let before = values;
        let gradient = if count == 1 { gradient.map(|g| 20.0 * g) } else { gradient };
        let slots: &mut [&mut [f32]] = &mut [&mut rms, &mut momentum, &mut mean];
        let run = Run { values: &mut values, slots, gradient: &gradient };
        rule.apply_f32(ApplyAt::new(count, 0), run);
        for (value, before) in values.iter().zip(before) {
            assert!(*value <= before, "{value} after {count} steps");
        }
    }
}

/// All numbers are sums of powers of two, so the results are exact.
#[test]
fn weight_decay_and_l2_follow_their_formulas() {
    let after = |rule: &dyn Optimizer, slot: f64| {
        let mut value = [4.0_f64];
        let mut momentum = [slot];
        let slots: &mut [&mut [f64]] = &mut [&mut momentum];
        let slots = &mut slots[..rule.slots().len()];
        let run = Run { values: &mut value, slots, gradient: &[2.0] };
        rule.apply_f64(ApplyAt::new(1, 0), run);
        (value[0], momentum[0])
    };
    // 4 - 0.5 (2 + 0.25 4)
    assert_eq!(after(&Sgd::new(0.5).weight_decay(0.25), 7.0), (2.5, 7.0));
    let plain = Momentum::new(0.5, 0.5);
    let nesterov = Momentum::nesterov(0.5, 0.5);
    // m = 0.5 2 + 2 + 0.25 4, w = 4 - 0.5 m
    assert_eq!(after(&plain.clone().l2(0.25), 2.0), (2.0, 4.0));
    // m = 0.5 2 + 2, w = 4 - 0.5 0.25 4 - 0.5 m
    assert_eq!(after(&plain.weight_decay(0.25), 2.0), (2.0, 3.0));
    // w = 4 - 0.5 (3 + 0.5 m), and 4 - 0.5 0.25 4 - 0.5 (2 + 0.5 m)
    assert_eq!(after(&nesterov.clone().l2(0.25), 2.0), (1.5, 4.0));
    assert_eq!(after(&nesterov.weight_decay(0.25), 2.0), (1.75, 3.0));
}

/// A decay of zero times infinity would be NaN.
#[test]
fn an_infinite_weight_without_decay_stays_infinite() {
    for rule in [&Sgd::new(0.5) as &dyn Optimizer, &Momentum::new(0.5, 0.5)] {
        let mut value = [f32::INFINITY];
        let mut momentum = [0.0];
        let slots: &mut [&mut [f32]] = &mut [&mut momentum];
        let slots = &mut slots[..rule.slots().len()];
        rule.apply_f32(ApplyAt::new(1, 0), Run { values: &mut value, slots, gradient: &[2.0] });
        assert_eq!(value, [f32::INFINITY], "{rule:?}");
    }
}

#[test]
fn a_weight_is_zero_until_its_gradients_add_up_to_l1() {
    let rule = Ftrl::new(0.5).l1(2.5);
    let mut value = [0.0_f64];
    let mut accum = [0.1];
    let mut linear = [0.0];
    let mut values = Vec::new();
    for count in 1..=4 {
        let slots: &mut [&mut [f64]] = &mut [&mut accum, &mut linear];
        let run = Run { values: &mut value, slots, gradient: &[1.0] };
        rule.apply_f64(ApplyAt::new(count, 0), run);
        values.push(value[0]);
    }
    assert_eq!(values[..2], [0.0; 2]);
    assert!(values[2] < 0.0 && values[3] < values[2], "{values:?}");
}

/// The rule divides by the rate, which must not make a weight infinite.
#[test]
fn a_decayed_rate_keeps_ftrl_finite() {
    let rule = Ftrl::new(Schedule::exponential(0.5, 0.5, 10)).beta(1.0);
    assert_eq!(rule.fault(), None);
    let mut value = [0.0_f32];
    let mut accum = [0.1];
    let mut linear = [0.0];
    for step in [0, 10, 100, 1_000, 100_000, u64::MAX] {
        let slots: &mut [&mut [f32]] = &mut [&mut accum, &mut linear];
        let run = Run { values: &mut value, slots, gradient: &[1.0] };
        rule.apply_f32(ApplyAt::new(1, step), run);
        assert!(value[0].is_finite() && linear[0].is_finite(), "{value:?} at {step}");
    }
}

/// Every rule, for a learning rate.
const RULES: [fn(Schedule) -> Box<dyn Optimizer>; 15] = [
    |rate| Box::new(Sgd::new(rate)),
    |rate| Box::new(Momentum::new(rate, 0.9)),
    |rate| Box::new(Momentum::nesterov(rate, 0.9).l2(0.1).weight_decay(0.2)),
    |rate| Box::new(Adagrad::new(rate)),
    |rate| Box::new(Adadelta::new(rate)),
    |rate| Box::new(RmsProp::new(rate).momentum(0.9)),
    |rate| Box::new(RmsProp::new(rate).centered()),
    |rate| Box::new(Adam::new(rate)),
    |rate| Box::new(Adam::new(rate).lazy()),
    |rate| Box::new(Adam::new(rate).lazy_with_row_counts()),
    |rate| Box::new(Adam::new(rate).epsilon_after_correction()),
    |rate| Box::new(AdamW::new(rate)),
    |rate| Box::new(AdamW::new(rate).epsilon_after_correction()),
    |rate| Box::new(Lamb::new(rate).weight_decay(0.1)),
    |rate| Box::new(Ftrl::new(rate).beta(1.0)),
];

/// Returns values and slots after an update, in both types.
fn results_of(rule: &dyn Optimizer, at: ApplyAt) -> impl PartialEq + std::fmt::Debug + use<> {
    let count = rule.slots().len();
    let mut wide = [1.0_f64, -2.0, 0.3];
    let mut narrow = [1.0_f32, -2.0, 0.3];
    let mut wide_slots = vec![[0.5_f64; 3]; count];
    let mut narrow_slots = vec![[0.5_f32; 3]; count];
    let mut slots: Vec<&mut [f64]> = wide_slots.iter_mut().map(|slot| &mut slot[..]).collect();
    let values = &mut wide[..];
    let slots = &mut slots[..];
    rule.apply_f64(at, Run { values, slots, gradient: &[0.1, 0.2, -0.7] });
    let mut slots: Vec<&mut [f32]> = narrow_slots.iter_mut().map(|slot| &mut slot[..]).collect();
    let values = &mut narrow[..];
    let slots = &mut slots[..];
    rule.apply_f32(at, Run { values, slots, gradient: &[0.1, 0.2, -0.7] });
    (wide, narrow, wide_slots, narrow_slots)
}

/// Applies gradients of one element each, the first with this count, and returns the values after
/// each of them.
fn path_of(rule: &dyn Optimizer, first: u64, gradients: &[f32]) -> Vec<f32> {
    let mut value = [0.0_f32; 1];
    let mut stored = vec![[0.0_f32]; rule.slots().len()];
    let apply = |(count, &gradient): (u64, &f32)| {
        let mut slots: Vec<&mut [f32]> = stored.iter_mut().map(|slot| &mut slot[..]).collect();
        let run = Run { values: &mut value, slots: &mut slots, gradient: &[gradient] };
        rule.apply_f32(ApplyAt::new(count, 0), run);
        value[0]
    };
    (first..).zip(gradients).map(apply).collect()
}

#[test]
fn a_row_that_counts_for_itself_moves_the_same_whenever_it_is_first_pushed() {
    let gradients: Vec<f32> = (1..50).map(|n| (n as f32 * 0.7).sin()).collect();
    for epsilon_last in [false, true] {
        let adam = Adam::new(0.1).epsilon(0.01);
        let adam = if epsilon_last { adam.epsilon_after_correction() } else { adam };
        let expected = path_of(&adam, 1, &gradients);
        let counted = adam.clone().lazy_with_row_counts();
        for first in [1, 2, 1001, u64::MAX / 2] {
            assert_eq!(path_of(&counted, first, &gradients), expected, "first at {first}");
        }
        let late = path_of(&adam.lazy(), 1001, &gradients)[0] / expected[0];
        assert!(late > 1.5, "without counts the first step is {late} times as long");
    }
}

/// The rows of one run have different counts, and are updated as if each were alone.
#[test]
fn each_row_of_a_run_has_its_own_count() {
    let rule = Adam::new(0.1).lazy_with_row_counts();
    let rows = [3.0_f32, 3.0, 0.0, 7.0, 7.0, 3.0];
    let length = 3 * rows.len();
    let counts: Vec<f32> = (0..length).map(|index| rows[index / 3]).collect();
    let mut values = vec![1.0; length];
    let mut m = vec![0.25; length];
    let mut v = vec![0.5; length];
    let mut t = counts.clone();
    let slots: &mut [&mut [f32]] = &mut [&mut m, &mut v, &mut t];
    let gradient = vec![0.3; length];
    rule.apply_f32(ApplyAt::new(9, 0), Run { values: &mut values, slots, gradient: &gradient });
    for (index, (&value, &count)) in values.iter().zip(&counts).enumerate() {
        let mut alone = [1.0];
        let mut m = [0.25];
        let mut v = [0.5];
        let slots: &mut [&mut [f32]] = &mut [&mut m, &mut v];
        let at = ApplyAt::new(count as u64 + 1, 0);
        let run = Run { values: &mut alone, slots, gradient: &[0.3] };
        Adam::new(0.1).apply_f32(at, run);
        assert_eq!((value, t[index]), (alone[0], count + 1.0), "element {index}");
    }
}

/// Damaged slots and the largest counts give a number or none, but no panic.
#[test]
fn any_count_of_a_row_is_accepted() {
    let rule = Adam::new(0.1).lazy_with_row_counts();
    for count in [-1.0, f32::NAN, f32::INFINITY, f32::MAX, 16_777_216.0] {
        let mut value = [1.0];
        let mut m = [0.25];
        let mut v = [0.5];
        let mut t = [count];
        let slots: &mut [&mut [f32]] = &mut [&mut m, &mut v, &mut t];
        rule.apply_f32(ApplyAt::new(1, 0), Run { values: &mut value, slots, gradient: &[0.3] });
        assert_eq!(value[0].is_finite(), count > 0.0, "{count}");
    }
}

/// The formulas of the two forms, in `f64`.
#[test]
fn epsilon_is_added_before_or_after_the_correction() {
    let rate = 0.1_f64;
    let beta1 = 0.9_f64;
    let beta2 = 0.99_f64;
    let epsilon = 0.05;
    let adam = || Adam::new(rate).betas(beta1, beta2).epsilon(epsilon);
    let adamw = || AdamW::new(rate).betas(beta1, beta2).epsilon(epsilon).weight_decay(0.0);
    let after: [Box<dyn Optimizer>; 4] = [
        Box::new(adam().epsilon_after_correction()),
        Box::new(adam().lazy().epsilon_after_correction()),
        Box::new(adam().lazy_with_row_counts().epsilon_after_correction()),
        Box::new(adamw().epsilon_after_correction()),
    ];
    let before: [Box<dyn Optimizer>; 4] = [
        Box::new(adam()),
        Box::new(adam().lazy()),
        Box::new(adam().lazy_with_row_counts()),
        Box::new(adamw()),
    ];
    let kinds = [&after, &before].map(|rules| rules.each_ref().map(|rule| rule.kind()));
    assert!(kinds[0].iter().all(|kind| kind.ends_with("_epsilon_after_correction")));
    assert_eq!(kinds[1], ["adam", "lazy_adam", "lazy_adam_row_counts", "adamw"]);
    let gradients: Vec<f64> = (0..20).map(|n| (f64::from(n) * 0.7).cos()).collect();
    for (rules, is_after) in [(after, true), (before, false)] {
        let mut w = 1.0;
        let mut m = 0.0;
        let mut v = 0.0;
        let mut expected = Vec::new();
        for (t, g) in (1..).zip(&gradients) {
            m = beta1 * m + (1.0 - beta1) * g;
            v = beta2 * v + (1.0 - beta2) * g * g;
            let c1 = 1.0 - beta1.powi(t);
            let c2 = 1.0 - beta2.powi(t);
            w -= match is_after {
                true => rate * (m / c1) / ((v / c2).sqrt() + epsilon),
                false => rate * c2.sqrt() / c1 * m / (v.sqrt() + epsilon),
            };
            expected.push(w);
        }
        for rule in rules {
            let mut value = [1.0_f64];
            let mut stored = vec![[0.0_f64]; rule.slots().len()];
            for (count, (gradient, expected)) in (1..).zip(gradients.iter().zip(&expected)) {
                let mut slots: Vec<&mut [f64]> = stored.iter_mut().map(|s| &mut s[..]).collect();
                let run = Run { values: &mut value, slots: &mut slots, gradient: &[*gradient] };
                rule.apply_f64(ApplyAt::new(count, 0), run);
                let near = (value[0] - expected).abs() < 1e-12;
                assert!(near, "{} instead of {expected} by {}", value[0], rule.kind());
            }
        }
    }
}

#[test]
fn a_rate_factor_equals_a_smaller_learning_rate_to_the_bit() {
    for rule in RULES {
        let whole = rule(0.1.into());
        assert_eq!(whole.scales_rate(), whole.kind() != "ftrl");
        let at = ApplyAt::new(3, 0);
        for part in [1.0, 0.5, 1.0 / 3.0, 0.1].into_iter().filter(|_| whole.scales_rate()) {
            let smaller = results_of(&*rule((0.1 * part).into()), at);
            assert_eq!(results_of(&*whole, at.at_rate(part)), smaller, "{part} of {whole:?}");
        }
    }
}

#[test]
fn a_scheduled_rate_equals_the_constant_rate_of_its_step_to_the_bit() {
    for rule in RULES {
        let scheduled = rule(Schedule::steps(0.1, [(7, 0.02)]).warm_up(2));
        assert_eq!(scheduled.fault(), None);
        for (step, rate) in [(0, 0.05), (1, 0.1), (9, 0.1), (10, 0.02)] {
            let at = ApplyAt::new(3, step);
            let expected = results_of(&*rule(rate.into()), at);
            assert_eq!(results_of(&*scheduled, at), expected, "{scheduled:?} at {step}");
        }
    }
}

#[test]
fn invalid_hyperparameters_are_rejected_by_name() {
    let cases: [(Box<dyn Optimizer>, &str); 36] = [
        (Box::new(Sgd::new(f64::NAN)), "learning_rate"),
        (Box::new(Sgd::new(-0.1)), "learning_rate"),
        (Box::new(Adam::new(f64::INFINITY)), "learning_rate"),
        (Box::new(Adam::default().betas(1.0, 0.9)), "beta1"),
        (Box::new(Adam::default().betas(0.9, -0.1)), "beta2"),
        (Box::new(Adam::default().epsilon(f64::NAN)), "epsilon"),
        (Box::new(Momentum::new(-0.1, 0.9)), "learning_rate"),
        (Box::new(Momentum::new(0.1, 1.0)), "momentum"),
        (Box::new(Momentum::nesterov(0.1, -0.9)), "momentum"),
        (Box::new(Sgd::new(0.1).weight_decay(-0.1)), "weight_decay"),
        (Box::new(Momentum::new(0.1, 0.9).l2(f64::NAN)), "l2"),
        (Box::new(Momentum::nesterov(0.1, 0.9).weight_decay(-0.1)), "weight_decay"),
        (Box::new(Adagrad::new(f64::NAN)), "learning_rate"),
        (Box::new(Adagrad::new(0.1).initial_accumulator(0.0)), "initial_accumulator"),
        (Box::new(Adadelta::new(-1.0)), "learning_rate"),
        (Box::new(Adadelta::default().rho(1.0)), "rho"),
        (Box::new(Adadelta::default().epsilon(0.0)), "epsilon"),
        (Box::new(RmsProp::new(f64::INFINITY)), "learning_rate"),
        (Box::new(RmsProp::new(0.1).decay(1.5)), "decay"),
        (Box::new(RmsProp::new(0.1).momentum(1.0)), "momentum"),
        (Box::new(RmsProp::new(0.1).epsilon(0.0).centered()), "epsilon"),
        (Box::new(AdamW::default().weight_decay(-0.1)), "weight_decay"),
        (Box::new(AdamW::default().betas(1.0, 0.9)), "beta1"),
        (Box::new(Lamb::new(-0.1)), "learning_rate"),
        (Box::new(Lamb::default().betas(0.9, 1.0)), "beta2"),
        (Box::new(Lamb::default().epsilon(-1.0)), "epsilon"),
        (Box::new(Lamb::default().weight_decay(f64::NAN)), "weight_decay"),
        (Box::new(Ftrl::new(0.0)), "learning_rate"),
        (Box::new(Ftrl::new(Schedule::cosine(0.1, 0.0, 5))), "learning_rate"),
        (Box::new(AdamW::new(Schedule::cosine(0.1, 0.0, 0))), "decay_steps"),
        (Box::new(Ftrl::new(0.1).learning_rate_power(0.5)), "learning_rate_power"),
        (Box::new(Ftrl::new(0.1).initial_accumulator(-0.1)), "initial_accumulator"),
        (Box::new(Ftrl::new(0.1).l1(-1.0)), "l1"),
        (Box::new(Ftrl::new(0.1).l2(f64::NAN)), "l2"),
        (Box::new(Ftrl::new(0.1).l2_shrinkage(-1.0)), "l2_shrinkage"),
        (Box::new(Ftrl::new(0.1).beta(-1.0)), "beta"),
    ];
    for (rule, name) in cases {
        assert_eq!(rule.fault().map(|fault| fault.0), Some(name));
    }
}
