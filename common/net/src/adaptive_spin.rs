//! Adaptive spinning: decides whether a thread that waits for a peer polls for a while or sleeps at
//! once.
//!
//! A wake-up takes about 20 us if the processor has gone idle. Polling occupies a processor that
//! another thread may need, often the peer itself. So a thread polls longer only if recent waits
//! have ended within that time, and it offers the processor to other threads while it polls: if
//! they go on taking it, no wait is polled for some time.

use std::time::{Duration, Instant};

use super::contention::Contention;

/// The limits on polling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinLimits {
    /// The time that is polled even if recent waits were long. A wait that ends within it says
    /// nothing about longer ones.
    pub unconditional: Duration,
    /// The longest poll.
    pub longest: Duration,
    /// The interval at which a polling thread yields the processor.
    pub yields: Duration,
}

impl SpinLimits {
    /// Returns these limits with another longest poll; zero disables polling.
    pub fn with_longest(self, longest: Duration) -> SpinLimits {
        SpinLimits { unconditional: self.unconditional.min(longest), longest, ..self }
    }
}

/// The number of short waits that pay for one failed poll. A failed poll costs 2 to 8 times what a
/// successful poll saves.
const SHORT_WAITS_PER_FAILED_POLL: u8 = 16;

/// The time that a wake-up adds to a wait during which the thread slept.
const WAKE_UP: Duration = Duration::from_micros(30);

/// A wait that ends within this time found its event ready, and is not counted.
const NO_WAIT: Duration = Duration::from_micros(2);

/// The time before a polling thread first yields the processor. By then it has sent its request, so
/// that a peer on the same processor can answer.
const FIRST_YIELD: Duration = Duration::from_micros(5);

/// Statistics of the waits of one kind.
#[derive(Clone, Debug)]
pub struct AdaptiveSpin {
    limits: SpinLimits,
    /// Rises by one with each short wait and falls by [`SHORT_WAITS_PER_FAILED_POLL`] with each
    /// failed poll; at most twice that.
    credit: u8,
    contention: Contention,
}

/// One wait.
#[derive(Clone, Copy, Debug)]
pub struct SpinWait {
    limits: SpinLimits,
    since: Instant,
    /// The time for which this wait is polled.
    polled: Duration,
    /// The length of the wait at which the thread yields the processor again.
    next_yield: Duration,
    sleeps: bool,
    /// Whether the thread slept before the longest poll was over.
    slept_early: bool,
    /// The yields that returned at once.
    prompt_yields: u8,
    /// Whether a yield returned late.
    yielded_late: bool,
}

impl SpinWait {
    /// Returns whether the thread polls once more; if not, it sleeps until it is woken.
    /// `yield_processor` lets another thread run on the processor and returns how long that took:
    /// see [`timed_yield`](crate::timed_yield).
    pub fn polls(&mut self, now: Instant, yield_processor: impl FnOnce() -> Duration) -> bool {
        if self.sleeps {
            return false;
        }
        // If the clock has gone back, the thread stops polling.
        let waited = now.checked_duration_since(self.since).unwrap_or(self.limits.longest);
        if waited >= self.polled {
            self.sleeps = true;
            self.slept_early = waited < self.limits.longest;
        } else if waited >= self.next_yield {
            self.next_yield = waited.saturating_add(self.limits.yields);
            match Contention::is_late(yield_processor()) {
                true => self.yielded_late = true,
                false => self.prompt_yields = self.prompt_yields.saturating_add(1),
            }
        }
        !self.sleeps
    }
}

impl AdaptiveSpin {
    /// Creates empty statistics.
    pub fn new(limits: SpinLimits) -> AdaptiveSpin {
        AdaptiveSpin { limits, credit: 0, contention: Contention::default() }
    }

    /// Begins a wait.
    pub fn begin(&self, now: Instant) -> SpinWait {
        let limits = self.limits;
        let is_paused = self.contention.pauses(now);
        SpinWait {
            limits,
            since: now,
            polled: if self.pays() { limits.longest } else { limits.unconditional },
            next_yield: FIRST_YIELD.min(limits.yields),
            sleeps: is_paused,
            slept_early: is_paused,
            prompt_yields: 0,
            yielded_late: false,
        }
    }

    /// Returns whether longer polls pay, because recent waits were short.
    fn pays(&self) -> bool {
        self.credit >= SHORT_WAITS_PER_FAILED_POLL
    }

    /// Records a wait whose event has happened.
    pub fn waited(&mut self, now: Instant, wait: &SpinWait) {
        self.record_yields(now, wait);
        self.record_length(now, wait);
    }

    /// Records a wait that was interrupted by other work. Its length counts only if the longest
    /// poll has failed.
    pub fn interrupted(&mut self, now: Instant, wait: &SpinWait) {
        self.record_yields(now, wait);
        let polled = !wait.slept_early;
        if polled && now.saturating_duration_since(wait.since) >= self.limits.longest {
            self.record_length(now, wait);
        }
    }

    fn record_yields(&mut self, now: Instant, wait: &SpinWait) {
        match wait.yielded_late {
            true => self.contention.record_late(now),
            false => self.contention.record_prompt(wait.prompt_yields),
        }
    }

    fn record_length(&mut self, now: Instant, wait: &SpinWait) {
        let waited = now.saturating_duration_since(wait.since);
        if waited <= self.limits.unconditional.max(NO_WAIT) {
            return;
        }
        // The wait of a thread that slept early includes the wake-up.
        let wake_up = if wait.slept_early { WAKE_UP } else { Duration::ZERO };
        let short = self.limits.longest.saturating_add(wake_up);
        match waited < short {
            true => self.credit = (self.credit + 1).min(2 * SHORT_WAITS_PER_FAILED_POLL),
            false => self.credit = self.credit.saturating_sub(SHORT_WAITS_PER_FAILED_POLL),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CALLER: SpinLimits = SpinLimits {
        unconditional: Duration::from_micros(50),
        longest: Duration::from_micros(400),
        yields: Duration::from_micros(50),
    };

    const SERVER: SpinLimits = SpinLimits {
        unconditional: Duration::ZERO,
        longest: Duration::from_micros(50),
        yields: Duration::from_micros(50),
    };

    /// The time of a yield of the processor.
    const PROMPT: Duration = Duration::from_nanos(300);
    const LATE: Duration = Duration::from_micros(20);

    /// A thread that waits repeatedly, in virtual time.
    struct SpinningThread {
        spin: AdaptiveSpin,
        now: Instant,
        yields: u64,
    }

    impl SpinningThread {
        fn new(limits: SpinLimits) -> SpinningThread {
            SpinningThread { spin: AdaptiveSpin::new(limits), now: Instant::now(), yields: 0 }
        }

        /// Waits for this many microseconds; returns the number of microseconds polled. On a busy
        /// processor another thread takes it.
        fn wait(&mut self, micros: u64, busy: bool) -> u64 {
            let mut wait = self.spin.begin(self.now);
            let yields = &mut self.yields;
            let mut yield_processor = || {
                *yields += 1;
                if busy { LATE } else { PROMPT }
            };
            let polled = (0..micros).take_while(|&at| {
                wait.polls(self.now + Duration::from_micros(at), &mut yield_processor)
            });
            let polled = polled.count() as u64;
            self.now += Duration::from_micros(micros);
            // The thread reads the clock once more before it finds the event.
            wait.polls(self.now, || PROMPT);
            self.spin.waited(self.now, &wait);
            polled
        }
    }

    #[test]
    fn repeated_short_waits_make_a_caller_poll_longer() {
        // The length of a wait in us, the number of waits, and the time polled in the last of them.
        let waits = [
            (30, 100, 30, "a wait within the unconditional time is polled"),
            (200, 16, 50, "a longer wait sleeps"),
            (200, 100, 200, "until 16 waits have been short"),
            (30, 100, 30, "a wait within the unconditional time is not counted"),
            (399, 1, 399, "the longest successful poll"),
            (5_000, 1, 400, "a failed poll"),
            (5_000, 1, 400, "a second failed poll, paid for by short waits"),
            (5_000, 1, 50, "no third failed poll"),
            (420, 16, 50, "a wait during which the thread slept includes a wake-up"),
            (420, 1, 400, "a polled wait does not"),
            (420, 1, 50, "so that poll failed"),
        ];
        let mut waiter = SpinningThread::new(CALLER);
        for (micros, times, polled, why) in waits {
            let mut last = 0;
            (0..times).for_each(|_| last = waiter.wait(micros, false));
            assert_eq!(last, polled, "{why}");
        }
    }

    #[test]
    fn repeated_short_waits_make_a_server_poll() {
        let waits = [
            (1_000, 50, 0, "a server sleeps while a peer computes between requests"),
            (10, 16, 0, "a few short waits are not enough"),
            (10, 100, 10, "more short waits start polling"),
            (1_000, 1, 50, "one failed poll"),
            (10, 20, 10, "is paid for by short waits"),
            (1_000, 2, 50, "two failed polls"),
            (10, 16, 0, "stop polling"),
            (10, 1, 10, "until short waits have paid again"),
            (1_000, 2, 0, "for one failed poll"),
            (1, 100, 0, "an event that is ready is not counted"),
            (70, 16, 0, "a wait with a wake-up counts as short"),
            (70, 1, 50, "a polled wait of that length does not"),
        ];
        let mut waiter = SpinningThread::new(SERVER);
        for (micros, times, polled, why) in waits {
            let mut last = 0;
            (0..times).for_each(|_| last = waiter.wait(micros, false));
            assert_eq!(last, polled, "{why}");
        }
    }

    #[test]
    fn a_polling_thread_yields_the_processor() {
        let mut waiter = SpinningThread::new(CALLER);
        let yields = [(1, 0), (5, 0), (6, 1), (50, 1), (5_000, 1)].map(|(micros, expected)| {
            waiter.yields = 0;
            waiter.wait(micros, false);
            (waiter.yields, expected)
        });
        for (count, expected) in yields {
            assert_eq!(count, expected, "{yields:?}");
        }
        (0..32).for_each(|_| _ = waiter.wait(200, false));
        waiter.yields = 0;
        assert_eq!(waiter.wait(200, false), 200);
        assert_eq!(waiter.yields, 4, "after 5, 55, 105 and 155 us");
    }

    #[test]
    fn a_thread_whose_processor_others_take_sleeps_at_once() {
        let mut waiter = SpinningThread::new(CALLER);
        (0..32).for_each(|_| _ = waiter.wait(200, false));
        let begun = waiter.now;
        while waiter.wait(200, true) > 0 {}
        let trial = waiter.now - begun;
        let range = Duration::from_millis(12)..Duration::from_millis(13);
        assert!(range.contains(&trial), "polling has paused after {trial:?}");
        let now = begun + Duration::from_millis(12);
        let yields = waiter.yields;
        while waiter.now < now + Duration::from_millis(50) {
            assert_eq!(waiter.wait(200, false), 0, "polling pauses");
        }
        assert_eq!(waiter.yields, yields, "the processor was yielded without a poll");
        assert_eq!(waiter.wait(1_000, false), 0);
        assert_eq!(waiter.wait(40, false), 40, "after the pause");
        let begun = waiter.now;
        while waiter.wait(30, true) > 0 {}
        assert!(waiter.now - begun < Duration::from_millis(13), "and pauses again");
    }

    #[test]
    fn a_poll_that_never_ends_in_time_is_cheap_on_a_busy_processor() {
        let mut waiter = SpinningThread::new(CALLER);
        let begun = waiter.now;
        let mut polled = 0;
        while waiter.now < begun + Duration::from_secs(10) {
            polled += waiter.wait(150, true);
        }
        assert!(polled < 300_000, "{polled} us of 10 s");
    }

    #[test]
    fn a_limit_of_zero_disables_polling() {
        let mut waiter = SpinningThread::new(CALLER.with_longest(Duration::ZERO));
        for micros in [1, 30, 200, 5_000] {
            (0..50).for_each(|_| assert_eq!(waiter.wait(micros, false), 0));
        }
    }

    #[test]
    fn an_interrupted_wait_counts_only_if_its_poll_failed() {
        let mut waiter = SpinningThread::new(SERVER);
        (0..40).for_each(|_| _ = waiter.wait(10, false));
        let mut interrupt = |after: Duration| {
            let mut wait = waiter.spin.begin(waiter.now);
            let polls = wait.polls(waiter.now, || PROMPT);
            waiter.now += after;
            // The poll ends, if it was that long, before the other work begins.
            wait.polls(waiter.now, || PROMPT);
            waiter.spin.interrupted(waiter.now, &wait);
            polls
        };
        (0..40).for_each(|_| assert!(interrupt(Duration::from_micros(1))));
        // Interrupted by a tick, long after the thread has gone to sleep.
        let polls = [0; 3].map(|_| interrupt(Duration::from_millis(50)));
        assert_eq!(polls, [true, true, false]);
    }

    #[test]
    fn a_jump_of_the_clock_ends_a_wait_uncounted() {
        let mut waiter = SpinningThread::new(SERVER);
        (0..40).for_each(|_| _ = waiter.wait(10, false));
        let before = waiter.now;
        let now = waiter.now + Duration::from_secs(3600);
        let mut wait = waiter.spin.begin(now);
        assert!(wait.polls(now, || PROMPT));
        assert!(!wait.clone().polls(before, || PROMPT), "polls for an hour");
        assert!(!wait.polls(now + Duration::from_secs(3600), || PROMPT));
        waiter.spin.waited(before, &wait);
        assert!(waiter.spin.pays());
    }

    proptest! {
        #[test]
        fn failed_polls_are_paid_for_by_short_waits(
            waits in prop::collection::vec((0_u64..200, 0..8_usize), 0..200),
        ) {
            let mut waiter = SpinningThread::new(SERVER);
            let mut failed = 0;
            let mut short = 0;
            for (micros, times) in waits {
                for _ in 0..times {
                    let polled = waiter.wait(micros, false);
                    failed += u64::from(polled > 0 && micros >= 50);
                    short += u64::from(micros < 80);
                }
            }
            prop_assert!(failed * u64::from(SHORT_WAITS_PER_FAILED_POLL) <= short, "{failed} of {short}");
        }
    }
}
