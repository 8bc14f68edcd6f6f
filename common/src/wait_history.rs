//! What waits have been like: whether it pays to stay awake for the next.

/// How many waits that were worth staying awake for make up for one in vain. To stay awake for nothing takes 2 to 8
/// times what it gives otherwise, and takes it from whoever else could use the processor.
const PAYS: u8 = 16;

/// How somebody's last waits have been.
#[derive(Debug, Default)]
pub struct WaitHistory {
    /// One more with each that was short, [`PAYS`] less with each in vain; from 0 to twice that many.
    short: u8,
}

impl WaitHistory {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_make_up_for_those_in_vain() {
        let mut wait_history = WaitHistory::default();
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
                if short { wait_history.was_short() } else { wait_history.was_in_vain() }
            }
            assert_eq!(wait_history.pay(), pays, "{why}");
        }
    }
}
