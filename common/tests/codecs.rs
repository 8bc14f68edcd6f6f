//! Tests of the codecs: error bounds, golden bytes, residuals and hostile input.

#![allow(clippy::unwrap_used, reason = "a failed unwrap names its line")]

use proptest::collection::vec;
use proptest::prelude::*;
use pushpull_common::codec::{
    BLOCK, Codec, CodecError, DecodeError, Encoding, Real, Residual, ScaleBlocks,
};
use pushpull_common::tensor::DType;

/// One codec of each kind; top-k and threshold have parameters that leave some elements out.
const CODECS: [Codec; 6] = [
    Codec::F16,
    Codec::Bf16,
    Codec::Int8,
    Codec::OneBit,
    Codec::TopK { fraction: 0.1 },
    Codec::Threshold { magnitude: 0.5 },
];

fn codec() -> impl Strategy<Value = Codec> {
    prop_oneof![
        Just(Codec::F16),
        Just(Codec::Bf16),
        Just(Codec::Int8),
        Just(Codec::OneBit),
        (0.001..=1f64).prop_map(|fraction| Codec::TopK { fraction }),
        (1e-6..10f64).prop_map(|magnitude| Codec::Threshold { magnitude }),
    ]
}

/// Elements distributed like those of a gradient, with zeros and extreme values among them.
fn element() -> impl Strategy<Value = f64> {
    prop_oneof![
        8 => -1f64..1.0,
        2 => Just(0.0),
        1 => prop::num::f64::NORMAL | prop::num::f64::SUBNORMAL | prop::num::f64::ZERO,
        1 => prop::num::f32::NORMAL.prop_map(f64::from),
        1 => prop::num::f32::SUBNORMAL.prop_map(f64::from),
    ]
}

/// An element type of the tests: `f32` or `f64`.
trait Float: Real + From<f32> + Into<f64> {
    const LARGEST: f64;
    const SMALLEST: f64;
    fn of(value: f64) -> Self;
}

impl Float for f32 {
    const LARGEST: f64 = f32::MAX as f64;
    const SMALLEST: f64 = f32::MIN_POSITIVE as f64;
    fn of(value: f64) -> f32 {
        (value as f32).clamp(f32::MIN, f32::MAX)
    }
}

impl Float for f64 {
    const LARGEST: f64 = f64::MAX;
    const SMALLEST: f64 = f64::MIN_POSITIVE;
    fn of(value: f64) -> f64 {
        value
    }
}

fn elements<T: Float>() -> impl Strategy<Value = Vec<T>> {
    vec(element().prop_map(T::of), 0..3 * BLOCK)
}

fn decoded<T: Float>(encoding: Encoding, bytes: &[u8], elements: usize) -> Vec<T> {
    // A decoder that skips an element leaves this value in it.
    let mut target = vec![T::of(7e7); elements];
    encoding.decode(bytes, &mut target).unwrap();
    target
}

fn largest<T: Float>(values: &[T]) -> f64 {
    values.iter().map(|&value| value.into().abs()).fold(0.0, f64::max)
}

/// The largest error that the codec allows for each element.
fn bounds<T: Float>(codec: Codec, values: &[T]) -> Vec<f64> {
    const ROUNDING: f64 = 1.0 + 1e-6;
    let blocks = |bound: &dyn Fn(f64) -> f64| {
        let blocks = values.chunks(BLOCK).map(|block| (bound(largest(block)), block.len()));
        blocks.flat_map(|(bound, count)| std::iter::repeat_n(bound, count)).collect()
    };
    let each = |bound: &dyn Fn(f64) -> f64| {
        values.iter().map(|&value| bound(value.into().abs())).collect()
    };
    match codec {
        Codec::F16 => each(&|value| match value {
            value if value > 65504.0 => value - 65504.0,
            value => (value * 2f64.powi(-11)).max(2f64.powi(-25)),
        }),
        Codec::Bf16 => {
            let largest = 2f64.powi(127) * (2.0 - 2f64.powi(-7));
            each(&|value| match value {
                value if value > largest => value - largest,
                value => (value * 2f64.powi(-8)).max(2f64.powi(-134)),
            })
        }
        Codec::Int8 => blocks(&|largest| match largest {
            largest if largest < 127.0 * T::SMALLEST => 127.0 * T::SMALLEST,
            largest => largest / 254.0 * ROUNDING,
        }),
        Codec::OneBit => blocks(&|largest| (largest * ROUNDING).min(T::LARGEST)),
        Codec::TopK { fraction } => {
            let mut magnitudes: Vec<f64> = values.iter().map(|&v| v.into().abs()).collect();
            magnitudes.sort_by(|a, b| b.total_cmp(a));
            let count = (fraction * values.len() as f64).ceil() as usize;
            vec![magnitudes.get(count).copied().unwrap_or(0.0); values.len()]
        }
        Codec::Threshold { magnitude } => vec![magnitude; values.len()],
        other => panic!("the test has no bound for {other}"),
    }
}

fn keeps_its_bound<T: Float>(codec: Codec, values: &[T]) {
    // Encoding appends: the bytes before it stay.
    let mut out = vec![0xee; 3];
    codec.encode(values, &mut out).unwrap();
    assert_eq!(out[..3], [0xee; 3]);
    let bytes = out.split_off(3);
    let (encoding, most) = (codec.encoding(), codec.encoding().bytes_max(T::DTYPE, values.len()));
    assert!(bytes.len().is_multiple_of(8) && bytes.len() <= most);
    assert!(encoding == Encoding::Pairs || bytes.len() == most);
    let found = decoded::<T>(encoding, &bytes, values.len());
    let bounds = bounds(codec, values);
    for (index, ((&value, &found), bound)) in values.iter().zip(&found).zip(bounds).enumerate() {
        let value: f64 = value.into();
        let found: f64 = found.into();
        let off = (value - found).abs();
        assert!(off <= bound, "{codec}, {index}: {value:e} decodes to {found:e}, bound {bound:e}");
        assert!(found.is_finite());
    }
    if let Codec::TopK { fraction } = codec {
        let sent = found.iter().filter(|&&value| value.into() != 0.0).count();
        let most = (fraction * values.len() as f64).ceil() as usize;
        let others = values.iter().filter(|&&value| value.into() != 0.0).count();
        assert_eq!(sent, most.min(others));
    }
    if codec == Codec::OneBit {
        for (values, found) in values.chunks(BLOCK).zip(found.chunks(BLOCK)) {
            let sum = |values: &[T]| values.iter().map(|&v| v.into() / 256.0).sum::<f64>();
            let off = (sum(values) - sum(found)).abs();
            assert!(off <= largest(values) * 1e-6, "the sum of a block is off by {off:e}");
        }
    }
}

fn rows_keep_their_bounds<T: Float>(values: &[T], width: usize, before: usize) {
    let blocks = ScaleBlocks::of_rows(width, before);
    let cut = (width - before).min(values.len());
    let (first, others) = values.split_at(cut);
    let rows: Vec<&[T]> = std::iter::once(first).chain(others.chunks(width)).collect();
    for codec in CODECS.into_iter().filter(|codec| codec.encoding().is_for_rows()) {
        let encoding = codec.encoding();
        let mut bytes = Vec::new();
        codec.encode_rows(blocks, values, &mut bytes).unwrap();
        assert_eq!(bytes.len(), encoding.rows_bytes_max(blocks, T::DTYPE, values.len()));
        let mut found = vec![T::of(7e7); values.len()];
        encoding.decode_rows(blocks, &bytes, &mut found).unwrap();
        let alone = rows.iter().flat_map(|row| {
            let mut bytes = Vec::new();
            codec.encode(row, &mut bytes).unwrap();
            decoded::<T>(encoding, &bytes, row.len())
        });
        assert!(found.iter().copied().eq(alone), "{codec}");
        let bounds = rows.iter().flat_map(|row| bounds(codec, row));
        for ((&value, &found), bound) in values.iter().zip(&found).zip(bounds) {
            let off = (value.into() - found.into()).abs();
            assert!(off <= bound, "{codec}: off by {off:e}, bound {bound:e}");
        }
    }
}

/// Checks after every step that the decoded values and the residual add up to the gradients.
fn sums_stay<T: Float>(codec: Codec, steps: &[Vec<T>]) {
    let count = steps[0].len();
    let mut residual = Residual::<T>::new(count);
    let mut given = vec![0f64; count];
    let mut arrived = vec![0f64; count];
    let mut scale = 0f64;
    // In two stretches: a large variable is sent in several.
    let cut = count / 3;
    for values in steps {
        for (stretch, first) in [(&values[..cut], 0), (&values[cut..], cut)] {
            let mut bytes = Vec::new();
            residual.encode(&codec, ScaleBlocks::THROUGH, first, stretch, &mut bytes).unwrap();
            let found = decoded::<T>(codec.encoding(), &bytes, stretch.len());
            for (arrived, found) in arrived[first..].iter_mut().zip(found) {
                *arrived += found.into();
            }
        }
        for (given, &value) in given.iter_mut().zip(values) {
            *given += value.into();
        }
        scale += largest(values).max(largest(residual.left()));
        let epsilon = if T::DTYPE == DType::F32 { f32::EPSILON.into() } else { f64::EPSILON };
        for index in 0..count {
            let left: f64 = residual.left()[index].into();
            let off = (given[index] - arrived[index] - left).abs();
            assert!(off <= 4.0 * epsilon * scale, "{codec}: the running sum is off by {off:e}");
        }
    }
}

proptest! {
    #[test]
    fn a_round_trip_keeps_its_bound(codec in codec(), values in elements::<f32>()) {
        keeps_its_bound(codec, &values);
    }

    #[test]
    fn a_round_trip_of_f64_keeps_its_bound(codec in codec(), values in elements::<f64>()) {
        keeps_its_bound(codec, &values);
    }

    /// Rows of any width in a stretch that begins and ends within a row: each row decodes as if it
    /// had been encoded alone.
    #[test]
    fn each_row_keeps_its_own_bound(
        values in elements::<f32>(),
        width in 1..600usize,
        before in 0..600usize,
    ) {
        rows_keep_their_bounds(&values, width, before % width);
        let wide: Vec<f64> = values.iter().copied().map(f64::from).collect();
        rows_keep_their_bounds(&wide, width, before % width);
    }

    #[test]
    fn error_feedback_keeps_the_running_sum(
        codec in codec(),
        steps in vec(vec(-1f32..1.0, 300), 1..12),
    ) {
        sums_stay(codec, &steps);
    }

    #[test]
    fn error_feedback_keeps_the_running_sum_of_f64(
        codec in codec(),
        steps in vec(vec(-1f64..1.0, 300), 1..12),
    ) {
        sums_stay(codec, &steps);
    }

    /// Random bytes, and valid ones with a few bytes changed, decode or are refused.
    #[test]
    fn hostile_bytes_decode_or_are_refused(
        codec in codec(),
        values in elements::<f32>(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        other in vec(any::<u8>(), 0..600),
        elements in 0..600usize,
        width in 0..40usize,
        before in 0..40usize,
    ) {
        let encoding = codec.encoding();
        let mut bytes = Vec::new();
        codec.encode(&values, &mut bytes).unwrap();
        for (at, byte) in changes.iter().take(bytes.len()) {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        let _ = encoding.decode(&bytes, &mut vec![0f32; values.len()]);
        let _ = encoding.decode(&bytes, &mut vec![0f64; values.len()]);
        let _ = encoding.decode(&bytes, &mut vec![0f32; elements]);
        let _ = encoding.decode(&other, &mut vec![0f32; elements]);
        let _ = encoding.decode(&other, &mut vec![0f64; elements]);
        let blocks = ScaleBlocks::of_rows(width, before);
        let _ = encoding.decode_rows(blocks, &bytes, &mut vec![0f32; values.len()]);
        let _ = encoding.decode_rows(blocks, &other, &mut vec![0f64; elements]);
        let _ = encoding.decode_padded(&bytes, &mut vec![0f32; values.len()]);
        let _ = encoding.decode_padded(&other, &mut vec![0f32; elements]);
        let _ = encoding.decode_padded(&other, &mut vec![0f64; elements]);
        let mut target = other.clone();
        let _ = encoding.decode_into(blocks, DType::F32, &bytes, &mut target);
    }
}

proptest! {
    /// Zeros may follow a stretch up to the most bytes of its codec, and nothing else may.
    #[test]
    fn a_padded_stretch_decodes_as_the_stretch_alone(
        codec in codec(),
        values in elements::<f32>(),
        more in 0..40usize,
    ) {
        let encoding = codec.encoding();
        let mut bytes = Vec::new();
        codec.encode(&values, &mut bytes).unwrap();
        let most = codec.bytes_max(DType::F32, values.len());
        prop_assert!(bytes.len() <= most && most <= encoding.bytes_max(DType::F32, values.len()));
        let alone = decoded::<f32>(encoding, &bytes, values.len());
        let length = bytes.len();
        bytes.resize(most + more, 0);
        let mut padded = vec![0f32; values.len()];
        encoding.decode_padded(&bytes, &mut padded).unwrap();
        prop_assert_eq!(padded, alone);
        let mut target = vec![0f32; values.len()];
        let shorter = encoding.decode_padded(&bytes[..length - length.min(8)], &mut target);
        prop_assert_eq!(shorter.is_err(), length > 0);
        if let Some(last) = bytes[length..].last_mut() {
            *last = 1;
            prop_assert_eq!(encoding.decode_padded(&bytes, &mut target), Err(DecodeError::Padding));
        }
    }

    /// Two ranks encode a sum, one after the other: what arrives and both residuals add up to what
    /// both have given.
    #[test]
    fn an_encoded_sum_leaves_its_error_with_the_rank_that_encodes_it(
        codec in codec(),
        first in vec(-1f32..1.0, 300),
        second in vec(-1f32..1.0, 300),
    ) {
        let [mut left, mut right] = [(); 2].map(|()| Residual::<f32>::new(300));
        let mut bytes = Vec::new();
        left.encode_onto(&codec, 0, &first, &[0.0; 300], &mut bytes).unwrap();
        let mut alone = Vec::new();
        Residual::new(300).encode(&codec, ScaleBlocks::THROUGH, 0, &first, &mut alone).unwrap();
        prop_assert_eq!(&bytes, &alone, "a sum that begins is the stretch of one rank");
        let sum = decoded::<f32>(codec.encoding(), &bytes, 300);
        bytes.clear();
        right.encode_onto(&codec, 0, &second, &sum, &mut bytes).unwrap();
        let sum = decoded::<f32>(codec.encoding(), &bytes, 300);
        for at in 0..300 {
            let off = first[at] + second[at] - sum[at] - left.left()[at] - right.left()[at];
            prop_assert!(off.abs() < 1e-5, "{codec}: element {at} is off by {off:e}");
        }
    }
}

/// A gradient far below the magnitudes that a codec sends at once arrives through the residual.
#[test]
fn the_residual_delivers_small_gradients_in_the_end() {
    let mut gradient = vec![1e-3f32; 1000];
    gradient[0] = 1.0;
    for codec in CODECS {
        let mut residual = Residual::new(gradient.len());
        let mut sum = vec![0f64; gradient.len()];
        for _ in 0..10_000 {
            let mut bytes = Vec::new();
            residual.encode(&codec, ScaleBlocks::THROUGH, 0, &gradient, &mut bytes).unwrap();
            for (sum, found) in sum.iter_mut().zip(decoded::<f32>(codec.encoding(), &bytes, 1000)) {
                *sum += f64::from(found);
            }
        }
        // Each element was given 10 in all. The residual holds at most a threshold, or the largest
        // magnitudes of a few blocks.
        let pending = sum.iter().skip(1).map(|sum| (sum - 10.0).abs()).fold(0.0, f64::max);
        assert!(pending <= 1.0, "{codec}: {pending}");
    }
}

#[test]
fn non_finite_elements_are_encoded_or_named_in_the_error() {
    let values = [1.0, -2.0, f32::NEG_INFINITY, f32::NAN, 5.0];
    for codec in CODECS {
        let mut residual = Residual::new(values.len());
        residual.encode(&codec, ScaleBlocks::THROUGH, 0, &[0.3; 5], &mut Vec::new()).unwrap();
        let before = residual.clone();
        let mut out = vec![9];
        let result = residual.encode(&codec, ScaleBlocks::THROUGH, 0, &values, &mut out);
        if codec.encoding().takes_non_finite() {
            result.unwrap();
            let found = decoded::<f32>(codec.encoding(), &out[1..], 5);
            assert!(found[2] == f32::NEG_INFINITY && found[3].is_nan(), "{found:?}");
            assert_eq!(residual.left()[2..4], [0.0; 2]);
        } else {
            let value = f64::NEG_INFINITY;
            assert_eq!(result, Err(CodecError::NonFinite { codec, element: 2, value }));
            assert_eq!((out, residual.left()), (vec![9], before.left()));
        }
    }
}

/// NaN and infinities of other ranks pass, where the codec has them, and leave no residual.
#[test]
fn non_finite_sums_of_others_pass_or_are_refused() {
    let others = [1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let values = [1.0, f32::NEG_INFINITY, 2.0, 3.0];
    for codec in CODECS {
        let mut residual = Residual::new(4);
        let mut out = Vec::new();
        let result = residual.encode_onto(&codec, 0, &[1.0; 4], &others, &mut out);
        if codec.encoding().takes_non_finite() {
            result.unwrap();
            out.clear();
            residual.encode_onto(&codec, 0, &values, &others, &mut out).unwrap();
            let found = decoded::<f32>(codec.encoding(), &out, 4);
            assert!(found[0] == 2.0 && found[2] == f32::NEG_INFINITY, "{found:?}");
            assert!(found[1].is_nan() && found[3].is_nan(), "{found:?}");
        } else {
            let value = f64::INFINITY;
            assert_eq!(result, Err(CodecError::NonFinite { codec, element: 1, value }));
            assert!(out.is_empty());
        }
        assert_eq!(residual.left(), [0.0; 4]);
    }
}

#[test]
fn top_k_sends_the_first_of_equal_magnitudes() {
    let values = [0f32, -2.0, 1.0, 2.0, 0.0, 2.0, -1.0, 0.5];
    let sent = |fraction| {
        let mut bytes = Vec::new();
        Codec::TopK { fraction }.encode(&values, &mut bytes).unwrap();
        decoded::<f32>(Encoding::Pairs, &bytes, values.len())
    };
    assert_eq!(sent(0.2), [0.0, -2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(sent(0.5), [0.0, -2.0, 1.0, 2.0, 0.0, 2.0, 0.0, 0.0]);
    assert_eq!(sent(1.0), values);
}

#[test]
fn each_decode_error_names_the_fault() {
    let mut target = [0f32; 3];
    let mut decode = |encoding: Encoding, bytes: &[u8]| encoding.decode(bytes, &mut target);
    let length = |encoding, bytes, expected| {
        Err(DecodeError::Length { encoding, elements: 3, bytes, expected })
    };
    assert_eq!(decode(Encoding::F16, &[0; 16]), length(Encoding::F16, 16, 8));
    assert_eq!(decode(Encoding::OneBit, &[]), length(Encoding::OneBit, 0, 16));
    assert_eq!(decode(Encoding::Pairs, &[0; 7]), length(Encoding::Pairs, 7, 8));
    assert_eq!(decode(Encoding::Bf16, &[0, 0, 0, 0, 0, 0, 0, 1]), Err(DecodeError::Padding));
    let scale = [f32::NAN.to_le_bytes(), [1, 2, 3, 0]].concat();
    assert!(matches!(decode(Encoding::Int8, &scale), Err(DecodeError::Scale { block: 0, .. })));
    let means = [1f32.to_le_bytes(), 0f32.to_le_bytes(), [8, 0, 0, 0], [0; 4]].concat();
    assert_eq!(decode(Encoding::OneBit, &means), Err(DecodeError::Padding));
    let means = [1f32.to_le_bytes(), 1f32.to_le_bytes(), [1, 0, 0, 0], [0; 4]].concat();
    let error = Err(DecodeError::Scale { block: 0, value: 1.0 });
    assert_eq!(decode(Encoding::OneBit, &means), error);

    let pairs = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let count = Err(DecodeError::Count { pairs: u32::MAX, elements: 3 });
    assert_eq!(decode(Encoding::Pairs, &pairs(&[u32::MAX, 0])), count);
    let index = |pair, index| Err(DecodeError::Index { pair, index, elements: 3 });
    assert_eq!(decode(Encoding::Pairs, &pairs(&[2, 0, 1, 1, 0, 0])), index(1, 1));
    assert_eq!(decode(Encoding::Pairs, &pairs(&[1, 0, 3, 0, 0, 0])), index(0, 3));
    assert_eq!(decode(Encoding::Pairs, &pairs(&[1, 0, 2, 9, 0, 0])), Err(DecodeError::Padding));
    assert_eq!(decode(Encoding::Pairs, &pairs(&[1, 9, 2, 0, 0, 0])), Err(DecodeError::Padding));
    assert_eq!(decode(Encoding::Pairs, &pairs(&[1, 0, 2, 0, 0, 0])), Ok(()));

    let dtype = DType::I64;
    let bytes = 8;
    let unfit = Err(DecodeError::Target { dtype, bytes });
    assert_eq!(
        Encoding::F16.decode_into(ScaleBlocks::THROUGH, DType::I64, &[0; 8], &mut [0; 8]),
        unfit
    );
    let dtype = DType::F32;
    let bytes = 7;
    let unfit = Err(DecodeError::Target { dtype, bytes });
    assert_eq!(
        Encoding::F16.decode_into(ScaleBlocks::THROUGH, DType::F32, &[0; 8], &mut [0; 7]),
        unfit
    );
}

/// The bytes of each encoding. Other versions must read them.
#[test]
fn golden_bytes_of_each_codec() {
    let values = [1.0f32, -2.5, 0.0, 0.1, -1e9];
    let text = include_str!("golden/codecs.txt");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(lines.len(), 2 * CODECS.len() + 2);
    for line in lines {
        let [dtype, codec, golden, ref width @ ..] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let codec: Codec = codec.parse().unwrap();
        let mut bytes = Vec::new();
        let blocks = match width {
            [width] => ScaleBlocks::of_rows(width.parse().unwrap(), 0),
            _ => ScaleBlocks::THROUGH,
        };
        match dtype {
            "f32" => codec.encode_rows(blocks, &values, &mut bytes).unwrap(),
            _ => codec.encode_rows(blocks, &values.map(f64::from), &mut bytes).unwrap(),
        }
        let found: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, golden, "{dtype} {codec}");
    }
}
