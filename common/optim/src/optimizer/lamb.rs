//! LAMB with corrected moments, as TensorFlow Addons computes it.

use super::float::OptimizerFloat;
use super::kernel::{RuleRun, UpdateRule, add_up, line};
use super::sums::{SumRun, Sums, Terms};
use super::{
    ApplyAt, BuiltInRule, HyperparameterFault, Optimizer, OptimizerSlot, Schedule, adam, fraction,
    impl_loops, not_negative,
};

/// LAMB: an update of Adam with decoupled weight decay, scaled to the norm of the variable's
/// values.
///
/// ```text
/// m = b1 m + (1 - b1) g
/// v = b2 v + (1 - b2) g^2
/// u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + d w
/// w -= lr |w| / |u| u
/// ```
///
/// `|w|` and `|u|` are the Euclidean norms over the whole variable before the update. If the square
/// of one of them is 0 in the variable's type, or their ratio is not finite, the ratio is 1. `t`
/// counts the gradients of the training, from 1.
///
/// Source: Y. You, J. Li, S. Reddi and others, "Large Batch Optimization for Deep Learning:
/// Training BERT in 76 minutes", 2020 (arXiv:1904.00962), algorithm 2, in the form of TensorFlow
/// Addons' LAMB.
///
/// Two slots, `m` and `v`, both initially 0. The paper's `phi` is the identity here. The moments
/// are corrected, as in its algorithm 2 and in TensorFlow Addons. NVIDIA's variant first divides
/// gradients by their global norm; this rule does not.
///
/// The norms need the whole variable. A partitioned or sparse variable is rejected when it is
/// declared, in both update modes. A push is applied when it is whole, in two passes: the first
/// reads all that the second changes. Biases and similar variables train better with another rule:
/// the server assigns one with `PsConfig::optimizer_for`.
#[derive(Clone, Debug, PartialEq)]
pub struct Lamb {
    learning_rate: Schedule,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
}

impl Lamb {
    /// Creates the rule with this learning rate and the defaults of TensorFlow Addons: beta1 0.9,
    /// beta2 0.999, epsilon 1e-6, no weight decay. The paper decays by 0.01.
    pub fn new(learning_rate: impl Into<Schedule>) -> Self {
        let learning_rate = learning_rate.into();
        Lamb { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.0 }
    }

    /// Sets the decay of the first and the second moment, each in `[0, 1)`. Default: 0.9, 0.999.
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        Lamb { beta1, beta2, ..self }
    }

    /// Sets the number that prevents a division by zero, in the unit of the gradient. Default:
    /// 1e-6.
    pub fn epsilon(self, epsilon: f64) -> Self {
        Lamb { epsilon, ..self }
    }

    /// Sets the share of a weight that is added to its update, at least 0. Default: 0.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        Lamb { weight_decay, ..self }
    }

    fn direction<F: OptimizerFloat>(&self, at: ApplyAt) -> LambDirection<F> {
        // Beyond 2^31 updates both powers are zero.
        let t = i32::try_from(at.count).unwrap_or(i32::MAX);
        let root2 = (1.0 - self.beta2.powi(t)).sqrt();
        LambDirection {
            beta1: F::of(self.beta1),
            beta2: F::of(self.beta2),
            rest1: F::of(1.0 - self.beta1),
            rest2: F::of(1.0 - self.beta2),
            corrected: F::of(root2 / (1.0 - self.beta1.powi(t))),
            epsilon: F::of(self.epsilon * root2),
            decay: F::of(self.weight_decay),
        }
    }

    fn sum<F: OptimizerFloat + Into<f64>>(&self, at: ApplyAt, run: SumRun<'_, F>, sums: &mut Sums) {
        let direction = self.direction::<F>(at);
        let (values, gradient) = (run.values, &run.gradient[..run.values.len()]);
        let &[m, v] = run.slots else { unreachable!("a run has the slots that the rule names") };
        let m = &m[..values.len()];
        let v = &v[..values.len()];
        add_up(sums, values.len(), &Squares { direction, values, m, v, gradient });
    }
}

impl Default for Lamb {
    /// Creates the rule with TensorFlow Addons' default learning rate, 0.001.
    fn default() -> Self {
        Lamb::new(0.001)
    }
}

impl Optimizer for Lamb {
    fn kind(&self) -> &'static str {
        "lamb"
    }

    fn slots(&self) -> &[OptimizerSlot] {
        &adam::SLOTS
    }

    impl_loops!();

    fn sums_whole_variables(&self) -> bool {
        true
    }

    fn sum_f32(&self, at: ApplyAt, run: SumRun<'_, f32>, sums: &mut Sums) {
        self.sum(at, run, sums);
    }

    fn sum_f64(&self, at: ApplyAt, run: SumRun<'_, f64>, sums: &mut Sums) {
        self.sum(at, run, sums);
    }

    fn scales_rate(&self) -> bool {
        true
    }

    fn fault(&self) -> HyperparameterFault {
        fraction("beta1", self.beta1)
            .or(fraction("beta2", self.beta2))
            .or(not_negative("epsilon", self.epsilon))
            .or(not_negative("weight_decay", self.weight_decay))
            .or(self.learning_rate.fault())
    }
}

impl BuiltInRule for Lamb {
    fn drive<F: OptimizerFloat>(&self, at: ApplyAt, run: impl RuleRun<F>) {
        let [values, direction, ..] = at.sums;
        let ratio = values.sqrt() / direction.sqrt();
        let zero = F::default();
        let rate = self.learning_rate.of(at);
        // A sum that is 0 in the variable's type counts as 0. If a variable has had no gradients
        // for long, its moments are rounding errors, which are no direction.
        let some = F::of(values) > zero && F::of(direction) > zero;
        let usable = some && ratio.is_finite();
        let rate = F::of(if usable { rate * ratio } else { rate });
        run.update(LambUpdate { direction: self.direction(at), rate });
    }
}

/// The direction of an update: the ratio of the corrected moments, and the decay.
#[derive(Clone, Copy)]
struct LambDirection<F> {
    beta1: F,
    beta2: F,
    /// `1 - beta`, rounded from f64. In f32, 1 - 0.999 would lose three digits.
    rest1: F,
    rest2: F,
    /// Both corrections in one factor, `sqrt(1 - b2^t) / (1 - b1^t)`. `epsilon` is multiplied by
    /// its numerator to compensate.
    corrected: F,
    epsilon: F,
    decay: F,
}

impl<F: OptimizerFloat> LambDirection<F> {
    /// Returns the direction of an element, and its new slots.
    #[inline(always)]
    fn of(self, w: F, [m, v]: [F; 2], g: F) -> (F, [F; 2]) {
        let m = self.beta1 * m + self.rest1 * g;
        let v = self.beta2 * v + self.rest2 * (g * g);
        let u = self.corrected * m / (v.sqrt() + self.epsilon);
        (u.plus(self.decay, w), [m, v])
    }
}

/// The squares of values and of their directions.
struct Squares<'a, F> {
    direction: LambDirection<F>,
    values: &'a [F],
    m: &'a [F],
    v: &'a [F],
    gradient: &'a [F],
}

impl<F: OptimizerFloat + Into<f64>> Terms<2> for Squares<'_, F> {
    #[inline(always)]
    fn of<const LENGTH: usize>(&self, at: usize) -> [[f64; LENGTH]; 2] {
        let w: &[F; LENGTH] = line(self.values, at);
        let m: &[F; LENGTH] = line(self.m, at);
        let v: &[F; LENGTH] = line(self.v, at);
        let g: &[F; LENGTH] = line(self.gradient, at);
        let [mut values, mut directions] = [[0.0; LENGTH]; 2];
        for i in 0..LENGTH {
            let (u, _) = self.direction.of(w[i], [m[i], v[i]], g[i]);
            let w: f64 = w[i].into();
            let u: f64 = u.into();
            values[i] = w * w;
            directions[i] = u * u;
        }
        [values, directions]
    }
}

#[derive(Clone, Copy)]
struct LambUpdate<F> {
    direction: LambDirection<F>,
    rate: F,
}

impl<F: OptimizerFloat> UpdateRule<F, 2> for LambUpdate<F> {
    #[inline(always)]
    fn step(self, w: F, slots: [F; 2], g: F) -> (F, [F; 2]) {
        let (u, slots) = self.direction.of(w, slots, g);
        (w - self.rate * u, slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::Run;

    /// Algorithm 2 of the paper, line by line, in `f64`.
    struct LambReference {
        x: Vec<f64>,
        m: Vec<f64>,
        v: Vec<f64>,
    }

    const RATE: f64 = 0.1;
    const BETAS: (f64, f64) = (0.8, 0.99);
    const EPSILON: f64 = 1e-3;

    fn norm(vector: &[f64]) -> f64 {
        vector.iter().map(|x| x * x).sum::<f64>().sqrt()
    }

    impl LambReference {
        fn push(&mut self, t: i32, lambda: f64, g: &[f64]) {
            let (beta1, beta2) = BETAS;
            let mut update = Vec::new();
            for (i, g) in g.iter().enumerate() {
                self.m[i] = beta1 * self.m[i] + (1.0 - beta1) * g;
                self.v[i] = beta2 * self.v[i] + (1.0 - beta2) * g.powi(2);
                let m = self.m[i] / (1.0 - beta1.powi(t));
                let v = self.v[i] / (1.0 - beta2.powi(t));
                update.push(m / (v.sqrt() + EPSILON) + lambda * self.x[i]);
            }
            let of_values = norm(&self.x);
            let of_update = norm(&update);
            let ratio =
                if of_values == 0.0 || of_update == 0.0 { 1.0 } else { of_values / of_update };
            self.x.iter_mut().zip(update).for_each(|(x, u)| *x -= RATE * ratio * u);
        }
    }

    /// An element type, and the tolerance of its results.
    trait LambFloat: OptimizerFloat + Into<f64> {
        const TOLERANCE: (f64, f64);

        fn sum(rule: &Lamb, at: ApplyAt, run: SumRun<'_, Self>, sums: &mut Sums);
        fn apply(rule: &Lamb, at: ApplyAt, run: Run<'_, Self>);
    }

    impl LambFloat for f64 {
        const TOLERANCE: (f64, f64) = (1e-9, 0.0);

        fn sum(rule: &Lamb, at: ApplyAt, run: SumRun<'_, f64>, sums: &mut Sums) {
            rule.sum_f64(at, run, sums);
        }

        fn apply(rule: &Lamb, at: ApplyAt, run: Run<'_, f64>) {
            rule.apply_f64(at, run);
        }
    }

    impl LambFloat for f32 {
        const TOLERANCE: (f64, f64) = (2e-5, 2e-6);

        fn sum(rule: &Lamb, at: ApplyAt, run: SumRun<'_, f32>, sums: &mut Sums) {
            rule.sum_f32(at, run, sums);
        }

        fn apply(rule: &Lamb, at: ApplyAt, run: Run<'_, f32>) {
            rule.apply_f32(at, run);
        }
    }

    /// Applies one update in both passes, each in two runs.
    fn push<F: LambFloat>(rule: &Lamb, count: u64, streams: &mut [Vec<F>; 3], gradient: &[F]) {
        let mut sums = Sums::default();
        let at = ApplyAt::new(count, 0);
        let runs = [0..gradient.len() / 3, gradient.len() / 3..gradient.len()];
        for run in runs.clone() {
            let [values, m, v] = streams.each_ref().map(|stream| &stream[run.clone()]);
            F::sum(rule, at, SumRun::new(values, &[m, v], &gradient[run]), &mut sums);
        }
        for run in runs {
            let [values, m, v] = streams.each_mut().map(|stream| &mut stream[run.clone()]);
            let run = Run { values, slots: &mut [m, v], gradient: &gradient[run] };
            F::apply(rule, at.with_sums(sums.totals()), run);
        }
    }

    fn check_against_reference<F: LambFloat>(lambda: f64, values: &[f64]) {
        let rule = Lamb::new(RATE).betas(BETAS.0, BETAS.1).epsilon(EPSILON).weight_decay(lambda);
        let zeros = vec![0.0; values.len()];
        let mut reference = LambReference { x: values.to_vec(), m: zeros.clone(), v: zeros };
        let typed = |stream: &[f64]| stream.iter().map(|&number| F::of(number)).collect::<Vec<F>>();
        let mut streams = [&reference.x, &reference.m, &reference.v].map(|stream| typed(stream));
        for count in 1..=20 {
            let gradient = |i| f64::from(i as u32 * 7 + count).sin() * f64::from(i as u32 % 3);
            let gradient: Vec<f64> = (0..values.len()).map(gradient).collect();
            reference.push(count as i32, lambda, &gradient);
            push(&rule, count.into(), &mut streams, &typed(&gradient));
            for (found, expected) in streams.iter().zip([&reference.x, &reference.m, &reference.v])
            {
                for (&found, expected) in found.iter().zip(expected) {
                    let (relative, absolute) = F::TOLERANCE;
                    let found: f64 = found.into();
                    let tolerance = relative * expected.abs() + absolute;
                    let near = (found - expected).abs() <= tolerance;
                    assert!(near, "{found}, not {expected}, after {count} steps");
                }
            }
        }
    }

    #[test]
    fn golden_lamb_against_a_reference() {
        let values: Vec<f64> = (0..37).map(|i| f64::from(i).cos()).collect();
        for lambda in [0.0, 0.25] {
            check_against_reference::<f64>(lambda, &values);
            check_against_reference::<f32>(lambda, &values);
            // With zero values, the ratio of the first step is 1.
            check_against_reference::<f64>(lambda, &[0.0; 5]);
        }
    }

    #[test]
    fn a_variable_without_gradients_comes_to_rest() {
        let rule = Lamb::new(0.01);
        let mut m = vec![0.0_f32; 100];
        let mut v = vec![0.0_f32; 100];
        let mut values: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        for count in 1..4000 {
            let gradient =
                |i: usize| if count < 100 { (i as f32 + count as f32).cos() } else { 0.0 };
            let gradient: Vec<f32> = (0..100).map(gradient).collect();
            let at = ApplyAt::new(count, count);
            let mut sums = Sums::default();
            rule.sum_f32(at, SumRun::new(&values, &[&m[..], &v], &gradient), &mut sums);
            let slots: &mut [&mut [f32]] = &mut [&mut m, &mut v];
            let at = at.with_sums(sums.totals());
            rule.apply_f32(at, Run { values: &mut values, slots, gradient: &gradient });
            assert!(values.iter().all(|value| value.is_finite()), "update {count}");
        }
    }

    #[test]
    fn a_non_finite_ratio_counts_as_one() {
        let rule = Lamb::new(0.5).betas(0.0, 0.0).epsilon(0.0);
        let at = ApplyAt::new(1, 0);
        let after = |values, direction| {
            let mut value = [4.0_f64];
            let mut m = [0.0];
            let mut v = [0.0];
            let slots: &mut [&mut [f64]] = &mut [&mut m, &mut v];
            let at = at.with_sums([values, direction, 0.0, 0.0]);
            rule.apply_f64(at, Run { values: &mut value, slots, gradient: &[2.0] });
            value[0]
        };
        assert_eq!(after(16.0, 4.0), 3.0);
        for (values, direction) in [(0.0, 4.0), (16.0, 0.0), (f64::INFINITY, 4.0), (f64::NAN, 4.0)]
        {
            assert_eq!(after(values, direction), 3.5, "{values} over {direction}");
        }
    }
}
