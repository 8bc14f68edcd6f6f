//! [`Backoff`]: growing pauses between attempts.

use std::time::Duration;

/// Pauses between attempts: the n-th is at most 0.1 s times 2^n, at most 5 s, and at least half of
/// that.
///
/// The jitter spreads the attempts of workers that have lost the same server. It is a function of
/// the seed and the number of the attempt.
#[derive(Clone, Debug)]
pub(super) struct Backoff {
    seed: u64,
    attempts: u32,
}

impl Backoff {
    /// The ceiling of the first pause.
    pub(super) const FIRST: Duration = Duration::from_millis(100);
    /// The ceiling of all pauses.
    pub(super) const LONGEST: Duration = Duration::from_secs(5);

    pub(super) fn new(seed: u64) -> Backoff {
        Backoff { seed, attempts: 0 }
    }

    /// Returns the next pause.
    pub(super) fn pause(&mut self) -> Duration {
        let ceiling = Self::FIRST.saturating_mul(1 << self.attempts.min(16)).min(Self::LONGEST);
        let random = mix(self.seed.wrapping_add(u64::from(self.attempts)));
        self.attempts = self.attempts.saturating_add(1);
        let half = ceiling / 2;
        // The upper 32 bits are a fraction of the other half.
        half + half.mul_f64((random >> 32) as f64 / f64::from(u32::MAX))
    }

    /// Returns how many pauses were taken since the last reset.
    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Begins again with the shortest pause.
    pub(super) fn reset(&mut self) {
        self.attempts = 0;
    }
}

/// Spreads a number over 64 bits (the finalizer of SplitMix64; Steele and others, 2014).
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ceilings of the pauses, in milliseconds.
    const CEILINGS: [u64; 9] = [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000];

    #[test]
    fn pauses_double_from_a_tenth_of_a_second_to_five() {
        for seed in 0..1_000 {
            let mut backoff = Backoff::new(seed);
            for (attempt, ceiling) in CEILINGS.map(Duration::from_millis).into_iter().enumerate() {
                let pause = backoff.pause();
                assert!(pause >= ceiling / 2 && pause <= ceiling, "{seed} {attempt}: {pause:?}");
            }
            backoff.reset();
            assert!(backoff.pause() <= Backoff::FIRST);
        }
    }

    #[test]
    fn the_jitter_depends_on_the_seed_only() {
        let pauses = |seed| {
            let mut backoff = Backoff::new(seed);
            [(); 8].map(|()| backoff.pause())
        };
        assert_eq!(pauses(7), pauses(7));
        let firsts: Vec<Duration> = (0..100).map(|seed| pauses(seed)[7]).collect();
        let mean = firsts.iter().sum::<Duration>() / 100;
        let middle = Backoff::LONGEST.mul_f64(0.75);
        assert!(mean.abs_diff(middle) < Duration::from_millis(400), "{mean:?}");
    }

    #[test]
    fn any_number_of_attempts_has_a_pause() {
        let mut backoff = Backoff { seed: 1, attempts: u32::MAX - 1 };
        assert!(backoff.pause() <= Backoff::LONGEST);
        assert!(backoff.pause() <= Backoff::LONGEST);
        assert_eq!(backoff.attempts(), u32::MAX);
    }
}
