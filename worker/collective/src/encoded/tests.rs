use proptest::collection::vec;
use proptest::prelude::*;
use pushpull_common::tensor::Element;

use super::*;
use crate::links::PART_BYTES;
use crate::schedule::Chunks;

fn codecs() -> impl Strategy<Value = Codec> {
    prop_oneof![
        Just(Codec::F16),
        Just(Codec::Bf16),
        Just(Codec::Int8),
        Just(Codec::OneBit),
        Just(Codec::TopK { fraction: 0.01 }),
        Just(Codec::TopK { fraction: 0.6 }),
    ]
}

/// The ranks of a ring, without links.
struct Ranks<T> {
    codec: Codec,
    residuals: Vec<Residual<T>>,
}

impl<T: Real + Send> Ranks<T> {
    fn new(codec: Codec, ranks: u32, elements: usize) -> Ranks<T> {
        let residuals = (0..ranks).map(|_| Residual::new(elements)).collect();
        Ranks { codec, residuals }
    }

    /// Sends each chunk from rank to rank. Returns the sum.
    fn sum(&mut self, contributions: &[Vec<T>]) -> Vec<T> {
        let ranks = self.residuals.len() as u32;
        let elements = contributions[0].len();
        let stretches = Stretches::new(self.codec, T::DTYPE, elements, ranks);
        let chunks = Chunks::new(stretches.count(), stretches.width(), ranks);
        let mut values = contributions.to_vec();
        let mut sums = vec![0xff; stretches.count() * stretches.width()];
        for chunk in 0..ranks {
            let bytes = chunks.bytes(chunk);
            for step in 0..ranks {
                let rank = ((chunk + step) % ranks) as usize;
                let mut own =
                    OwnElements::new(stretches, &mut values[rank], &mut self.residuals[rank]);
                let sums = &mut sums[bytes.clone()];
                let others = sums.to_vec();
                let added = match step {
                    0 => own.begin(bytes.clone(), sums),
                    _ => own.add(bytes.clone(), &others, sums),
                };
                added.unwrap();
            }
        }
        OwnElements::new(stretches, &mut values[0], &mut self.residuals[0]).finish(&sums).unwrap();
        values.swap_remove(0)
    }
}

/// Checks after each step that the sums and the residuals add up to the contributions.
fn sums_are_kept<T: Real + Send + Into<f64>>(codec: Codec, steps: &[Vec<Vec<T>>], epsilon: f64) {
    let elements = steps[0][0].len();
    let ranks = steps[0].len();
    let mut ring = Ranks::new(codec, ranks as u32, elements);
    let mut given = vec![0.0; elements];
    let mut arrived = vec![0.0; elements];
    let mut scale = 0.0;
    for contributions in steps {
        let sum = ring.sum(contributions);
        for at in 0..elements {
            given[at] += contributions.iter().map(|own| own[at].into()).sum::<f64>();
            arrived[at] += sum[at].into();
        }
        let left: Vec<f64> = (0..elements)
            .map(|at| ring.residuals.iter().map(|residual| residual.left()[at].into()).sum())
            .collect();
        let all = ring.residuals.iter().flat_map(|residual| residual.left());
        let largest = all.map(|&left| left.into().abs()).fold(ranks as f64, f64::max);
        scale += 4.0 * ranks as f64 * largest * epsilon;
        for at in 0..elements {
            let off = (given[at] - arrived[at] - left[at]).abs();
            assert!(off <= scale, "{codec}: element {at} is off by {off:e}");
        }
    }
}

fn steps<T: Element + Into<f64>>(
    values: impl Strategy<Value = T> + Clone,
) -> impl Strategy<Value = Vec<Vec<Vec<T>>>> {
    (1..5_usize, 1..700_usize, 1..6_usize).prop_flat_map(move |(ranks, elements, steps)| {
        vec(vec(vec(values.clone(), elements), ranks), steps)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn sums_and_residuals_add_up_to_the_contributions(
        codec in codecs(),
        steps in steps(-1f32..1.0),
    ) {
        sums_are_kept(codec, &steps, f32::EPSILON.into());
    }

    #[test]
    fn sums_of_f64_and_residuals_add_up_to_the_contributions(
        codec in codecs(),
        steps in steps(-1f64..1.0),
    ) {
        sums_are_kept(codec, &steps, f64::EPSILON);
    }

    /// Every stretch fits in the bytes of one, and in a part.
    #[test]
    fn stretches_cover_a_tensor(
        codec in codecs(),
        elements in prop_oneof![0..3000_usize, 0..1_usize << 20],
        ranks in 1..100_u32,
        is_wide in any::<bool>(),
    ) {
        let dtype = if is_wide { DType::F64 } else { DType::F32 };
        let stretches = Stretches::new(codec, dtype, elements, ranks);
        let mut end = 0;
        for stretch in 0..stretches.count() {
            let range = stretches.elements(stretch);
            prop_assert!(range.start == end && range.end > end);
            end = range.end;
            prop_assert!(codec.bytes_max(dtype, range.len()) <= stretches.width());
        }
        prop_assert_eq!(end, elements);
        prop_assert!(stretches.width() <= PART_BYTES);
    }

    /// Bytes that no honest rank has sent are added or refused, and leave a finite residual.
    #[test]
    fn hostile_stretches_are_added_or_refused(
        codec in codecs(),
        elements in 1..600_usize,
        bytes in vec(any::<u8>(), 1 << 10),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        is_honest in any::<bool>(),
    ) {
        let stretches = Stretches::new(codec, DType::F32, elements, 2);
        let width = stretches.width();
        let mut others: Vec<u8> = bytes.iter().copied().cycle().take(width).collect();
        if is_honest {
            others.clear();
            let values = vec![0.5_f32; stretches.elements(0).len()];
            codec.encode(&values, &mut others).unwrap();
            others.resize(width, 0);
        }
        for (at, byte) in changes {
            let at = at.index(width);
            others[at] = byte;
        }
        let mut values = vec![1.0_f32; elements];
        let mut residual = Residual::new(elements);
        let mut sums = vec![0; width];
        let mut own = OwnElements::new(stretches, &mut values, &mut residual);
        let _ = own.add(0..width, &others, &mut sums);
        prop_assert!(residual.left().iter().all(|left| left.is_finite()));
    }
}

/// A share of an even tensor has as many elements on each rank; a short one is not cut below a block.
#[test]
fn each_rank_begins_a_share() {
    let count = |elements, ranks| Stretches::new(Codec::Int8, DType::F32, elements, ranks).count();
    assert_eq!((count(0, 4), count(1, 4), count(257, 4)), (0, 1, 2));
    assert_eq!((count(4096, 4), count(1 << 20, 4)), (4, 64));
}

#[test]
fn a_stretch_that_does_not_decode_is_named_with_its_fault() {
    let stretches = Stretches::new(Codec::Int8, DType::F32, 300, 1);
    let mut values = vec![1.0_f32; 300];
    let mut residual = Residual::new(300);
    let own = OwnElements::new(stretches, &mut values, &mut residual);
    let mut sums = vec![0; stretches.width()];
    sums[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let fault = own.finish(&sums).unwrap_err();
    assert_eq!(fault, "encoded stretch 0: cannot decode block 0: NaN is not a valid scale or mean");
}
