//! Tests of initializers: golden values, independence of the layout, and moments.

use proptest::prelude::*;

use super::*;

const RANDOM: [Initializer; 7] = [
    Initializer::Uniform { low: -1.0, high: 3.0 },
    Initializer::Normal { mean: 1.0, stddev: 2.0 },
    Initializer::TruncatedNormal { mean: -1.0, stddev: 0.5 },
    Initializer::GlorotUniform,
    Initializer::GlorotNormal,
    Initializer::HeUniform,
    Initializer::HeNormal,
];

fn shape(extents: &[u64]) -> Shape {
    Shape::new(extents).unwrap()
}

fn filled(initializer: Initializer, seed: u64, name: &str, shape: &Shape) -> Vec<f64> {
    let mut out = vec![f64::NAN; shape.elements() as usize];
    initializer.fill(seed, name, shape, 0, &mut out);
    out
}

#[test]
fn fans_follow_the_layer() {
    let table: [(&[u64], (u64, u64)); 6] = [
        (&[], (1, 1)),
        (&[7], (7, 7)),
        (&[784, 100], (784, 100)),
        (&[3, 3, 16, 32], (144, 288)),
        (&[5, 4, 2], (20, 10)),
        (&[0, 4], (0, 4)),
    ];
    for (extents, (fan_in, fan_out)) in table {
        assert_eq!(Fans::of(&shape(extents)), Fans { fan_in, fan_out }, "{extents:?}");
    }
}

#[test]
fn constants_are_constant() {
    let table =
        [(Initializer::Zeros, 0.0), (Initializer::Ones, 1.0), (Initializer::Constant(0.1), 0.1)];
    for (initializer, expected) in table {
        assert_eq!(filled(initializer, 1, "b", &shape(&[3])), [expected; 3]);
    }
    let mut counts = [0i64; 2];
    Initializer::Constant(-2.9).fill(0, "n", &shape(&[2]), 0, &mut counts);
    assert_eq!(counts, [-2, -2]);
}

#[test]
fn arguments_are_checked() {
    use Initializer::*;
    for initializer in RANDOM.into_iter().chain([Zeros, Ones, Constant(-1.0), Default::default()]) {
        assert_eq!(initializer.validate(), Ok(()));
    }
    assert_eq!(Uniform { low: 1.0, high: 1.0 }.validate(), Ok(()));
    let not_finite = [
        Constant(f64::NAN),
        Constant(f64::INFINITY),
        Uniform { low: f64::NEG_INFINITY, high: 0.0 },
        Uniform { low: f64::MIN, high: f64::MAX },
        Normal { mean: f64::NAN, stddev: 1.0 },
        Normal { mean: 0.0, stddev: f64::MAX },
        TruncatedNormal { mean: 0.0, stddev: f64::NAN },
    ];
    for initializer in not_finite {
        let error = initializer.validate().unwrap_err();
        assert!(matches!(error, InitializerError::NotFinite { .. }), "{initializer:?}");
    }
    assert_eq!(
        Uniform { low: 2.0, high: 1.0 }.validate().unwrap_err().to_string(),
        "cannot initialize with uniform(2.0,1.0): the lower bound is above the upper bound"
    );
    let error = Normal { mean: 0.0, stddev: -1.0 }.validate().unwrap_err();
    assert!(matches!(error, InitializerError::NegativeStddev { .. }));
}

/// Must not change: it would change every model that was ever initialized. The numbers were checked
/// against an independent program with another library's quantile function. They were equal except
/// for one last digit, where the logarithms differ.
#[test]
fn golden_values() {
    let table = [
        (RANDOM[0], [2.9289711356589962, -0.4856742172866668, 2.2726879690876003]),
        (RANDOM[1], [5.20488727146488, -1.266244630789596, 2.8168413159804633]),
        (RANDOM[2], [-0.12290740489645613, -1.5280066092002698, -0.5725530019363435]),
        (RANDOM[3], [1.181248752730382, -0.9097859390902792, 0.7793590315109076]),
        (RANDOM[4], [1.4101410388528475, -0.8488998682413222, 0.6872256786444054]),
        (RANDOM[5], [2.362497505460764, -1.8195718781805583, 1.5587180630218151]),
        (RANDOM[6], [2.820282077705695, -1.6977997364826445, 1.3744513572888108]),
    ];
    for (initializer, expected) in table {
        let values = filled(initializer, 42, "layer/w", &shape(&[1, 3]));
        assert_eq!(values, expected, "{initializer}");
    }
}

#[test]
fn names_and_seeds_are_independent() {
    let wide = shape(&[1000]);
    let base = filled(RANDOM[1], 1, "w", &wide);
    for (seed, name) in [(2, "w"), (1, "v"), (1, "w2"), (1, ""), (1 << 63, "w")] {
        let other = filled(RANDOM[1], seed, name, &wide);
        assert!(base.iter().zip(&other).all(|(one, two)| one != two), "{seed} {name}");
        let product: f64 = base.iter().zip(&other).map(|(a, b)| (a - 1.0) * (b - 1.0)).sum();
        assert!((product / 4000.0).abs() < 0.15, "{seed} {name}: {product}");
    }
}

/// Mean and standard deviation over 100,000 elements, each within five standard errors.
#[test]
fn moments_and_bounds() {
    let fan_in = 200.0f64;
    let fan_out = 500.0f64;
    let glorot = (2.0 / (fan_in + fan_out)).sqrt();
    let he = (2.0 / fan_in).sqrt();
    let cut = |stddev: f64| 2.0 * stddev / TRUNCATED_STDDEV;
    let table = [
        (RANDOM[0], 1.0, 4.0 / 12.0f64.sqrt(), 2.0),
        (RANDOM[1], 1.0, 2.0, 2.0 * QUANTILE_BOUND),
        (RANDOM[2], -1.0, 0.5 * TRUNCATED_STDDEV, 1.0),
        (RANDOM[3], 0.0, glorot, glorot * 3.0f64.sqrt()),
        (RANDOM[4], 0.0, glorot, cut(glorot)),
        (RANDOM[5], 0.0, he, he * 3.0f64.sqrt()),
        (RANDOM[6], 0.0, he, cut(he)),
    ];
    for (initializer, mean, stddev, bound) in table {
        let values = filled(initializer, 7, "w", &shape(&[200, 500]));
        let n = values.len() as f64;
        let found = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|v| (v - found).powi(2)).sum::<f64>() / n;
        let error = 5.0 * stddev / n.sqrt();
        assert!((found - mean).abs() < error, "{initializer}: mean {found}");
        assert!((variance.sqrt() - stddev).abs() < error, "{initializer}: {}", variance.sqrt());
        let slack = bound * 1e-12;
        assert!(values.iter().all(|v| (v - mean).abs() <= bound + slack), "{initializer}");
        let farthest = values.iter().map(|v| (v - mean).abs()).fold(0.0, f64::max);
        assert!(farthest > bound * 0.4, "{initializer}: {farthest} of {bound}");
    }
}

proptest! {
    #[test]
    fn any_range_gives_the_same_values(
        which in 0..RANDOM.len(),
        start in 0usize..600,
        len in 0usize..600,
    ) {
        let whole = shape(&[30, 20]);
        let expected = filled(RANDOM[which], 3, "w", &whole);
        let end = (start + len).min(600);
        let mut part = vec![0f64; end - start];
        RANDOM[which].fill(3, "w", &whole, start as u64, &mut part);
        prop_assert_eq!(&part, &expected[start..end]);
        let mut narrow = vec![0f32; end - start];
        RANDOM[which].fill(3, "w", &whole, start as u64, &mut narrow);
        prop_assert!(narrow.iter().zip(&part).all(|(&one, &two)| one == two as f32));
        if let Some(&first) = part.first() {
            let key = InitialKey::new(3, "w");
            prop_assert_eq!(RANDOM[which].value(key, start as u64, Fans::of(&whole)), first);
        }
    }
}
