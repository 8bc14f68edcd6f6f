//! The quantile function of the normal distribution.
//!
//! Algorithm AS 241, PPND16: M. J. Wichura, "The percentage points of the normal distribution",
//! Applied Statistics 37 (1988), 477-484. Its relative error is about 1e-16. It needs one draw an
//! element and, for 85 of 100 elements, only a quotient of polynomials.

/// Returns the number that a normal deviate is below with probability `p`, for `p` within (0, 1).
pub(super) fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        return CENTRE.at(0.180625 - q * q, q);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let r = libm::sqrt(-libm::log(tail));
    let magnitude = if r <= 5.0 { MIDDLE.at(r - 1.6, 1.0) } else { TAIL.at(r - 5.0, 1.0) };
    if q < 0.0 { -magnitude } else { magnitude }
}

/// A quotient of two polynomials; the coefficients of the highest powers come first.
struct Quotient {
    above: [f64; 8],
    below: [f64; 8],
}

impl Quotient {
    /// Returns the quotient at `r`, times a factor that is applied before the division.
    fn at(&self, r: f64, factor: f64) -> f64 {
        let polynomial = |terms: &[f64; 8]| terms.iter().fold(0.0, |sum, term| sum * r + term);
        polynomial(&self.above) * factor / polynomial(&self.below)
    }
}

/// The quotient for probabilities from 0.075 to 0.925.
const CENTRE: Quotient = Quotient {
    above: [
        2_509.080_928_730_122_7,
        33_430.575_583_588_13,
        67_265.770_927_008_7,
        45_921.953_931_549_87,
        13_731.693_765_509_46,
        1_971.590_950_306_551_3,
        133.141_667_891_784_38,
        3.387_132_872_796_366_5,
    ],
    below: [
        5_226.495_278_852_854,
        28_729.085_735_721_943,
        39_307.895_800_092_71,
        21_213.794_301_586_597,
        5_394.196_021_424_751,
        687.187_007_492_057_9,
        42.313_330_701_600_91,
        1.0,
    ],
};
/// The quotient for probabilities outside that range, down to e^-25.
const MIDDLE: Quotient = Quotient {
    above: [
        0.000_774_545_014_278_341_4,
        0.022_723_844_989_269_184,
        0.241_780_725_177_450_6,
        1.270_458_252_452_368_4,
        3.647_848_324_763_204_5,
        5.769_497_221_460_691,
        4.630_337_846_156_546,
        1.423_437_110_749_683_5,
    ],
    below: [
        1.050_750_071_644_416_9e-9,
        0.000_547_593_808_499_534_5,
        0.015_198_666_563_616_457,
        0.148_103_976_427_480_08,
        0.689_767_334_985_1,
        1.676_384_830_183_803_8,
        2.053_191_626_637_759,
        1.0,
    ],
};
/// The quotient for the far tails.
const TAIL: Quotient = Quotient {
    above: [
        2.010_334_399_292_288_1e-7,
        2.711_555_568_743_487_6e-5,
        0.001_242_660_947_388_078_4,
        0.026_532_189_526_576_124,
        0.296_560_571_828_504_87,
        1.784_826_539_917_291_3,
        5.463_784_911_164_114,
        6.657_904_643_501_103,
    ],
    below: [
        2.044_263_103_389_939_7e-15,
        1.421_511_758_316_446e-7,
        1.846_318_317_510_054_8e-5,
        0.000_786_869_131_145_613_3,
        0.014_875_361_290_850_615,
        0.136_929_880_922_735_8,
        0.599_832_206_555_888,
        1.0,
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_match_published_values() {
        let table = [
            (0.5, 0.0),
            (0.6, 0.2533471031357998),
            (0.925, 1.439531470938456),
            (0.975, 1.9599639845400536),
            (0.99, 2.3263478740408408),
            (0.999999, 4.753424308817089),
            (1e-12, -7.034483825301132),
            (1e-16, -8.222082216130435),
            (0.25, -0.6744897501960817),
            (0.02275013194817921, -2.0),
        ];
        for (p, expected) in table {
            let found = normal_quantile(p);
            let error: f64 = found - expected;
            assert!(error.abs() <= 4e-16 * expected.abs(), "{p}: {found} is not {expected}");
        }
    }

    #[test]
    fn the_quantile_is_odd_and_monotonic() {
        for p in [0.001, 0.0749, 0.075, 0.3] {
            let sum = normal_quantile(p) + normal_quantile(1.0 - p);
            assert!(sum.abs() < 1e-13, "{p}: {sum}");
        }
        let mut last = f64::NEG_INFINITY;
        for step in 1..20_000 {
            let value = normal_quantile(f64::from(step) / 20_000.0);
            assert!(value > last);
            last = value;
        }
        let least = normal_quantile(0.5 / (1u64 << 52) as f64);
        assert!(least > -8.3 && least < -8.1, "{least}");
    }
}
