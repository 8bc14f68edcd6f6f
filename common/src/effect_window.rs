//! The effect window: which effects of a coordinator have settled.

use crate::ids::EffectNumber;
use crate::protocol::limits::EFFECT_WINDOW;

/// The limit of all epochs and ids of coordinators.
pub const COORDINATOR_EPOCH_LIMIT: u64 = 1 << 63;

/// The effects of one coordinator that have settled: all up to a watermark, and some of the
/// [`EFFECT_WINDOW`] numbers behind it.
///
/// A shard has one for each coordinator, so that an effect that is pushed again counts once there.
/// A coordinator merges those of all shards.
///
/// Invariants: the number behind the watermark is not settled. The watermark is below
/// [`EffectWindow::NUMBER_LIMIT`]. A settled number stays settled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EffectWindow {
    settled: u64,
    /// Bit i is for the number `settled + 1 + i`.
    bits: u64,
}

const _: () = assert!(EFFECT_WINDOW == u64::BITS as u64);

/// The state of an effect in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// It has settled.
    Settled,
    /// It has not settled.
    Unsettled,
    /// It is behind the window, or no number of an effect.
    Outside,
}

impl EffectWindow {
    /// The limit of all numbers. No coordinator schedules as many calls.
    pub const NUMBER_LIMIT: u64 = 1 << 56;

    /// Returns the window with this watermark and these bits; `None` if a number reaches the limit.
    pub fn of(settled: EffectNumber, bits: u64) -> Option<EffectWindow> {
        let last = settled.0.checked_add(u64::from(u64::BITS - bits.leading_zeros()))?;
        let window = EffectWindow { settled: settled.0, bits };
        (last < EffectWindow::NUMBER_LIMIT).then(|| window.normal())
    }

    /// Returns the watermark: every effect up to this number has settled.
    pub fn settled(self) -> EffectNumber {
        EffectNumber(self.settled)
    }

    /// Returns the settled effects behind the watermark: bit i is for the number
    /// `settled + 1 + i`.
    pub fn bits(self) -> u64 {
        self.bits
    }

    /// Returns the newest number that the window has room for.
    pub fn newest(self) -> EffectNumber {
        EffectNumber((self.settled + EFFECT_WINDOW).min(EffectWindow::NUMBER_LIMIT - 1))
    }

    /// Returns the state of an effect.
    pub fn state(self, number: EffectNumber) -> Settlement {
        if number.0 == 0 || number > self.newest() {
            return Settlement::Outside;
        }
        match number.0.checked_sub(self.settled + 1) {
            Some(index) if self.bits >> index & 1 == 0 => Settlement::Unsettled,
            _ => Settlement::Settled,
        }
    }

    /// Settles an effect. Does nothing for one outside the window.
    pub fn settle(&mut self, number: EffectNumber) {
        if self.state(number) == Settlement::Unsettled {
            self.bits |= 1 << (number.0 - self.settled - 1);
            *self = self.normal();
        }
    }

    /// Raises the watermark to this number, if that is higher and below the limit.
    pub fn raise(&mut self, settled: EffectNumber) {
        if (self.settled + 1..EffectWindow::NUMBER_LIMIT).contains(&settled.0) {
            let passed = u32::try_from(settled.0 - self.settled).unwrap_or(u32::MAX);
            let bits = self.bits.checked_shr(passed).unwrap_or(0);
            *self = EffectWindow { settled: settled.0, bits }.normal();
        }
    }

    /// Returns the effects that have settled in both windows.
    ///
    /// The result has exactly those: a number behind the window of one is not settled there.
    #[must_use]
    pub fn intersection(self, other: EffectWindow) -> EffectWindow {
        let (low, high) = if self.settled <= other.settled { (self, other) } else { (other, self) };
        let ahead = u32::try_from(high.settled - low.settled).unwrap_or(u32::MAX);
        // The bits of the higher window, counted from the lower watermark: the numbers up to its
        // own watermark have settled.
        let passed = 1_u64.checked_shl(ahead).map_or(u64::MAX, |bit| bit - 1);
        let behind = high.bits.checked_shl(ahead).unwrap_or(0);
        EffectWindow { settled: low.settled, bits: low.bits & (passed | behind) }.normal()
    }

    /// Yields the effects up to a number that have not settled.
    pub fn unsettled(self, last: EffectNumber) -> impl Iterator<Item = EffectNumber> {
        let numbers = (self.settled + 1..=last.0).map(EffectNumber);
        numbers.filter(move |&number| self.state(number) != Settlement::Settled)
    }

    /// Moves the watermark over the settled effects behind it.
    fn normal(self) -> EffectWindow {
        let passed = self.bits.trailing_ones();
        let settled = self.settled + u64::from(passed);
        EffectWindow { settled, bits: self.bits.checked_shr(passed).unwrap_or(0) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn window(settled: u64, numbers: &[u64]) -> EffectWindow {
        let mut window = EffectWindow::of(EffectNumber(settled), 0).unwrap();
        numbers.iter().for_each(|&number| window.settle(EffectNumber(number)));
        window
    }

    /// The watermark, and the numbers behind it that have settled.
    fn parts(window: EffectWindow) -> (u64, Vec<u64>) {
        let settled = window.settled().0;
        let behind = (settled + 1..=window.newest().0)
            .filter(|&number| window.state(EffectNumber(number)) == Settlement::Settled);
        (settled, behind.collect())
    }

    #[test]
    fn the_watermark_moves_over_the_effects_that_have_settled() {
        for (settled, numbers, expected) in [
            (0, &[][..], (0, vec![])),
            (0, &[1], (1, vec![])),
            (0, &[2], (0, vec![2])),
            (0, &[2, 1], (2, vec![])),
            (0, &[3, 1], (1, vec![3])),
            (0, &[64], (0, vec![64])),
            (0, &[65], (0, vec![])),
            (0, &[0], (0, vec![])),
            (7, &[7, 3], (7, vec![])),
            (7, &[71, 9, 8], (9, vec![71])),
        ] {
            assert_eq!(parts(window(settled, numbers)), expected, "{settled}, {numbers:?}");
        }
        let all: Vec<u64> = (1..=64).rev().collect();
        assert_eq!(parts(window(0, &all)), (64, vec![]));
    }

    #[test]
    fn a_number_outside_the_window_is_neither_settled_nor_unsettled() {
        let window = window(10, &[12]);
        for (number, state) in [
            (0, Settlement::Outside),
            (1, Settlement::Settled),
            (10, Settlement::Settled),
            (11, Settlement::Unsettled),
            (12, Settlement::Settled),
            (74, Settlement::Unsettled),
            (75, Settlement::Outside),
            (u64::MAX, Settlement::Outside),
        ] {
            assert_eq!(window.state(EffectNumber(number)), state, "{number}");
        }
    }

    #[test]
    fn the_watermark_is_raised_and_never_lowered() {
        for (to, expected) in [
            (0, (10, vec![12, 20])),
            (10, (10, vec![12, 20])),
            (11, (12, vec![20])),
            (12, (12, vec![20])),
            (19, (20, vec![])),
            (74, (74, vec![])),
            (75, (75, vec![])),
            (EffectWindow::NUMBER_LIMIT - 1, (EffectWindow::NUMBER_LIMIT - 1, vec![])),
            (EffectWindow::NUMBER_LIMIT, (10, vec![12, 20])),
            (u64::MAX, (10, vec![12, 20])),
        ] {
            let mut window = window(10, &[12, 20]);
            window.raise(EffectNumber(to));
            assert_eq!(parts(window), expected, "raised to {to}");
        }
    }

    #[test]
    fn no_window_reaches_the_limit_of_numbers() {
        let last = EffectWindow::NUMBER_LIMIT - 1;
        assert_eq!(EffectWindow::of(EffectNumber(last + 1), 0), None);
        assert_eq!(EffectWindow::of(EffectNumber(last), 1), None);
        assert_eq!(EffectWindow::of(EffectNumber(last - 64), u64::MAX), window(last, &[]).into());
        assert_eq!(EffectWindow::of(EffectNumber(u64::MAX), u64::MAX), None);
        let mut window = window(last - 1, &[]);
        assert_eq!(window.newest().0, last);
        window.settle(EffectNumber(last));
        assert_eq!(window.state(EffectNumber(last + 1)), Settlement::Outside);
        window.settle(EffectNumber(last + 1));
        assert_eq!((window.settled().0, window.newest().0), (last, last));
    }

    proptest! {
        /// Compares a window with the set of all numbers that have settled.
        #[test]
        fn a_window_has_every_settled_number(
            events in vec((any::<bool>(), 1_u64..90), 0..200),
            wire in any::<u64>(),
        ) {
            let mut window = EffectWindow::default();
            let mut all = BTreeSet::new();
            for (raises, ahead) in events {
                if raises && ahead % 8 == 0 {
                    let to = window.settled().0 + ahead;
                    all.extend(1..=to);
                    window.raise(EffectNumber(to));
                } else {
                    let number = window.settled().0 + ahead;
                    if ahead <= EFFECT_WINDOW {
                        all.insert(number);
                    }
                    window.settle(EffectNumber(number));
                }
                for number in 1..=window.newest().0 {
                    let settled = window.state(EffectNumber(number)) == Settlement::Settled;
                    prop_assert_eq!(settled, all.contains(&number), "{} of {:?}", number, window);
                }
                prop_assert_eq!(EffectWindow::of(window.settled(), window.bits()), Some(window));
                prop_assert!(window.bits() & 1 == 0);
            }
            if let Some(window) = EffectWindow::of(EffectNumber(7), wire) {
                prop_assert!(window.bits() & 1 == 0);
            }
        }

        /// An effect has settled in the intersection exactly if it has in both windows.
        #[test]
        fn an_intersection_has_the_numbers_of_both(
            (first, first_bits) in (0_u64..200, any::<u64>()),
            (second, second_bits) in (0_u64..200, any::<u64>()),
        ) {
            let of = |settled, bits| EffectWindow::of(EffectNumber(settled), bits).unwrap();
            let a = of(first, first_bits);
            let b = of(second, second_bits);
            let both = a.intersection(b);
            prop_assert_eq!(both, b.intersection(a));
            prop_assert_eq!(a.intersection(a), a);
            let has = |window: EffectWindow, number| window.state(number) == Settlement::Settled;
            for number in (1..400).map(EffectNumber) {
                prop_assert_eq!(has(both, number), has(a, number) && has(b, number));
            }
            let unsettled: Vec<EffectNumber> = both.unsettled(EffectNumber(399)).collect();
            prop_assert!(unsettled.iter().all(|&number| !has(a, number) || !has(b, number)));
            prop_assert_eq!(unsettled.len(), (1..400).filter(|&n| !has(both, EffectNumber(n))).count());
        }
    }
}
