//! How long a caller that waits for an answer stays awake.

use std::time::{Duration, Instant};

use pushpull_common::wait_history::WaitHistory;

/// How long it looks for what it waits for, whatever there was before, until it lets itself be put to sleep: about
/// what it takes to wake it, and a processor that has gone to sleep with it.
pub(crate) const AWAKE: Duration = Duration::from_micros(50);

/// The same where waits have ended by then time after time, and nobody else wants the processor. A wake takes an eighth
/// of it.
const LONGER: Duration = Duration::from_micros(400);

/// What is known of how long callers wait.
#[derive(Debug, Default)]
pub(super) struct AdaptiveSpin(WaitHistory);

/// One wait.
#[derive(Debug)]
pub(super) struct SpinWait {
    since: Instant,
    /// How long it stays awake before it asks whether to.
    until: Duration,
    /// It has been told not to: it sleeps whenever nothing is there.
    sleeps: bool,
}

impl SpinWait {
    pub(super) fn new(now: Instant) -> SpinWait {
        SpinWait { since: now, until: AWAKE, sleeps: false }
    }

    /// Whether to look once more, or to sleep until something comes. `pays` says which once in [`AWAKE`], but for the
    /// first: who waits may be what keeps whom it waits for from a processor.
    pub(super) fn is_awake(&mut self, now: Instant, pays: impl FnOnce() -> bool) -> bool {
        // A clock that has gone back is no reason to stay.
        let waited = now.checked_duration_since(self.since).unwrap_or(LONGER);
        if waited >= self.until && !self.sleeps {
            self.sleeps = waited >= LONGER || !pays();
            self.until = waited.saturating_add(AWAKE).min(LONGER);
        }
        !self.sleeps
    }
}

impl AdaptiveSpin {
    /// Whether it pays to stay awake for longer, if nobody else wants the processor.
    pub(super) fn pays(&self) -> bool {
        self.0.pay()
    }

    /// A wait has ended.
    pub(super) fn waited(&mut self, now: Instant, wait: &SpinWait) {
        let waited = now.saturating_duration_since(wait.since);
        // What comes soon says nothing of what takes longer.
        if waited <= AWAKE {
            return;
        }
        // Who has slept from early on was woken, which is waited for as well.
        let wake = if wait.sleeps && wait.until < LONGER { AWAKE } else { Duration::ZERO };
        if waited < LONGER + wake { self.0.was_short() } else { self.0.was_in_vain() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Callers that wait, one after the other, in virtual time.
    struct WaitReport {
        adaptive_spin: AdaptiveSpin,
        now: Instant,
        asked: u64,
    }

    impl WaitReport {
        /// One waits for so long; for how long it is awake.
        fn wait(&mut self, micros: u64, row_requests: bool) -> u64 {
            let mut wait = SpinWait::new(self.now);
            let awake = (0..micros).take_while(|&at| {
                let now = self.now + Duration::from_micros(at);
                let asked = &mut self.asked;
                let adaptive_spin = &self.adaptive_spin;
                wait.is_awake(now, || {
                    adaptive_spin.pays() && {
                        *asked += 1;
                        !row_requests
                    }
                })
            });
            let awake = awake.count() as u64;
            self.now += Duration::from_micros(micros);
            self.adaptive_spin.waited(self.now, &wait);
            awake
        }
    }

    fn told() -> WaitReport {
        WaitReport { adaptive_spin: AdaptiveSpin::default(), now: Instant::now(), asked: 0 }
    }

    #[test]
    fn callers_stay_awake_for_longer_where_that_has_been_enough_time_after_time() {
        // How long they wait, how often; and for how long the last of them was awake.
        let wait_history = [
            (30, 100, 30, "what comes soon is awaited"),
            (200, 16, 50, "what takes longer is slept for"),
            (200, 100, 200, "until that is known"),
            (30, 100, 30, "what comes soon says nothing"),
            (399, 1, 399, "it was good for as long as that"),
            (5_000, 1, 400, "one in vain"),
            (5_000, 1, 400, "and another, which were paid for"),
            (5_000, 1, 50, "not three"),
            (430, 16, 50, "a wake is part of a wait that is slept through"),
            (430, 1, 400, "and not of one that is not"),
            (430, 1, 50, "which was in vain"),
        ];
        let mut told = told();
        for (micros, times, awake, why) in wait_history {
            let mut last = 0;
            (0..times).for_each(|_| last = told.wait(micros, false));
            assert_eq!(last, awake, "{why}");
        }
    }

    #[test]
    fn nobody_stays_where_others_want_the_processor() {
        let mut told = told();
        (0..100).for_each(|_| assert_eq!(told.wait(30, false), 30));
        (0..16).for_each(|_| assert_eq!(told.wait(200, false), 50));
        assert_eq!(told.asked, 0, "nothing depends on it yet");
        (0..5).for_each(|_| assert_eq!(told.wait(200, true), 50));
        assert_eq!(told.asked, 5, "once, and then it sleeps");
        assert_eq!(told.wait(200, false), 200);
        assert_eq!(told.asked, 8, "after 50, 100 and 150 us");
    }

    /// As when whom it waits for is woken, and there is no processor but its own.
    #[test]
    fn who_is_awake_sleeps_as_soon_as_others_want_the_processor() {
        let mut told = told();
        (0..16).for_each(|_| _ = told.wait(200, false));
        let (now, asked) = (told.now, std::cell::Cell::new(0));
        let mut wait = SpinWait::new(now);
        let row_requests = || asked.replace(asked.get() + 1) == 2;
        let awake = (0..300).take_while(|&at| {
            wait.is_awake(now + Duration::from_micros(at), || {
                told.adaptive_spin.pays() && !row_requests()
            })
        });
        assert_eq!(awake.count(), 150);
        assert!(!wait.is_awake(now + Duration::from_micros(301), || unreachable!("it sleeps")));
    }

    #[test]
    fn a_clock_that_goes_back_ends_it() {
        let now = Instant::now() + Duration::from_secs(1);
        let mut wait = SpinWait::new(now);
        assert!(wait.is_awake(now, || true));
        assert!(wait.is_awake(now + Duration::from_micros(399), || true));
        assert!(!wait.is_awake(now - Duration::from_millis(1), || true));
        let mut adaptive_spin = AdaptiveSpin::default();
        (0..100).for_each(|_| adaptive_spin.waited(now - Duration::from_millis(1), &wait));
        assert!(!adaptive_spin.pays(), "and says nothing");
    }
}
