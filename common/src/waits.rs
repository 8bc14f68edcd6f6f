//! What waits have been like: whether it pays to stay awake for the next, and whether others want the processors
//! meanwhile.

/// How many waits that were worth staying awake for make up for one in vain. To stay awake for nothing takes 2 to 8
/// times what it gives otherwise, and takes it from whoever else could use the processor.
const PAYS: u8 = 16;

/// How somebody's last waits have been.
#[derive(Debug, Default)]
pub struct Waits {
    /// One more with each that was short, [`PAYS`] less with each in vain; from 0 to twice that many.
    short: u8,
}

impl Waits {
    /// Whether to stay awake pays: waits have been short time after time.
    pub fn pay(&self) -> bool {
        self.short >= PAYS
    }

    /// A wait was short enough to stay awake for.
    pub fn was_short(&mut self) {
        self.short = (self.short + 1).min(2 * PAYS);
    }

    /// One was not.
    pub fn was_in_vain(&mut self) {
        self.short = self.short.saturating_sub(PAYS);
    }
}

/// Where Linux says, among other things, how many threads run or wait for a processor: `0.61 0.52 0.48 2/143 901`.
pub const LOAD: &str = "/proc/loadavg";

/// Whether more threads want a processor than these, the one that asks among them; they do where it is not told. `read`
/// gives the beginning of what [`LOAD`] says, and its length.
pub fn are_wanted(processors: usize, read: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
    let mut text = [0; 64];
    let length = read(&mut text);
    let running = length.and_then(|length| running(text.get(..length)?));
    running.is_none_or(|running| running > processors)
}

/// How many threads run or wait for a processor, by what [`LOAD`] says.
fn running(text: &[u8]) -> Option<usize> {
    let threads = std::str::from_utf8(text).ok()?.split_whitespace().nth(3)?;
    // Who asks runs: where none is said to, it is not told.
    threads.split_once('/')?.0.parse().ok().filter(|&running| running > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_make_up_for_those_in_vain() {
        let mut waits = Waits::default();
        // What the waits are, how many of them, and whether it pays behind them.
        let told = [
            (true, 15, false, "a few do not tell"),
            (true, 1, true, "sixteen do"),
            (false, 1, false, "and are gone with one in vain"),
            (true, 100, true, "very many"),
            (false, 1, true, "make up for one"),
            (false, 1, false, "not for two"),
            (false, 100, false, "nor do many in vain"),
            (true, 16, true, "keep it from paying again"),
        ];
        for (short, times, pays, why) in told {
            for _ in 0..times {
                if short { waits.was_short() } else { waits.was_in_vain() }
            }
            assert_eq!(waits.pay(), pays, "{why}");
        }
    }

    #[test]
    fn the_threads_that_run_are_read_from_what_the_system_says() {
        assert_eq!(running(b"0.61 0.52 0.48 2/143 901\n"), Some(2));
        assert_eq!(running(b"0.61 0.52 0.48 1200/3143 90144\n"), Some(1200));
        for strange in [
            &b""[..],
            b"0.61 0.52 0.48",
            b"0.61 0.52 0.48 2",
            b"0 0 0 x/1 2",
            b"0 0 0 0/0 0",
            b"\xff",
        ] {
            assert_eq!(running(strange), None, "{strange:?}");
        }
    }

    #[test]
    fn where_nothing_is_said_the_processors_are_wanted() {
        assert!(are_wanted(usize::MAX, |_| None));
        assert!(are_wanted(usize::MAX, |_| Some(0)));
        assert!(are_wanted(usize::MAX, |text| Some(text.len() + 1)));
        let said = b"0.61 0.52 0.48 2/143 901\n";
        for (count, wanted) in [(1, true), (2, false), (3, false)] {
            let read = |text: &mut [u8]| {
                text[..said.len()].copy_from_slice(said);
                Some(said.len())
            };
            assert_eq!(are_wanted(count, read), wanted, "of {count}");
        }
    }
}
