//! Durations in texts, rounded.

use core::time::Duration;

/// Rounds a duration to milliseconds for a text, so that it reads `5.001s` and not `5.000942973s`. One
/// of less than a millisecond is returned unchanged.
pub fn rounded(time: &Duration) -> Duration {
    const MILLISECOND: Duration = Duration::from_millis(1);
    match *time < MILLISECOND {
        true => *time,
        false => {
            let half = Duration::from_micros(500);
            let millis = time.saturating_add(half).as_millis();
            Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_to_milliseconds() {
        for (nanos, expected) in [
            (0, "0ns"),
            (999_999, "999.999µs"),
            (1_499_999, "1ms"),
            (1_500_000, "2ms"),
            (5_000_942_973, "5.001s"),
            (60_000_000_000, "60s"),
        ] {
            assert_eq!(format!("{:?}", rounded(&Duration::from_nanos(nanos))), expected);
        }
        assert!(rounded(&Duration::MAX) >= Duration::from_millis(u64::MAX));
    }
}
