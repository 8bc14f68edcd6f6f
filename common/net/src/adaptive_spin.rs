//! Adaptive spinning: whether a thread that waits for a peer polls for a while or sleeps at once.
//!
//! A wake-up takes some 20 us where the processor sleeps as well. Polling takes a processor that another thread may
//! want. So a thread polls longer only if waits have ended within that time again and again, and only while no more
//! threads are runnable than there are processors.

use std::time::{Duration, Instant};

/// How long a thread polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinLimits {
    /// Polled in any case; a wait that ends by then says nothing about longer ones.
    pub unconditional: Duration,
    /// Polled at most.
    pub longest: Duration,
    /// How often a polling thread asks whether another thread wants the processor.
    pub recheck: Duration,
}

impl SpinLimits {
    /// Polls for this long at most: never, if it is zero.
    pub fn with_longest(self, longest: Duration) -> SpinLimits {
        SpinLimits { unconditional: self.unconditional.min(longest), longest, ..self }
    }
}

/// The short waits that pay for one in vain. A poll in vain costs 2 to 8 times what a poll that succeeds saves.
const SHORT_WAITS_PER_VAIN: u8 = 16;

/// What a wake-up adds to a wait that a thread slept through.
const WAKE_UP: Duration = Duration::from_micros(30);

/// A wait that ends within this time found its event there already, and says nothing.
const NO_WAIT: Duration = Duration::from_micros(2);

/// What is known of the waits of one kind.
#[derive(Debug)]
pub struct AdaptiveSpin {
    limits: SpinLimits,
    /// Rises by one with each short wait and falls by [`SHORT_WAITS_PER_VAIN`] with each in vain; at most twice that.
    credit: u8,
}

/// One wait.
#[derive(Clone, Copy, Debug)]
pub struct SpinWait {
    limits: SpinLimits,
    since: Instant,
    /// How long the thread polls before it asks again.
    until: Duration,
    sleeps: bool,
    /// Whether it slept before the longest poll was over.
    slept_early: bool,
}

impl SpinWait {
    /// Whether the thread polls once more; if not, it sleeps until it is woken. `extend` says whether to poll
    /// beyond the time that is polled in any case: [`AdaptiveSpin::pays`], and no other thread wants the processor.
    pub fn polls(&mut self, now: Instant, extend: impl FnOnce() -> bool) -> bool {
        let limits = self.limits;
        // A clock that has gone back is no reason to poll.
        let waited = now.checked_duration_since(self.since).unwrap_or(limits.longest);
        if waited >= self.until && !self.sleeps {
            self.slept_early = waited < limits.longest && !extend();
            self.sleeps = waited >= limits.longest || self.slept_early;
            self.until = waited.saturating_add(limits.recheck).min(limits.longest);
        }
        !self.sleeps
    }
}

impl AdaptiveSpin {
    /// Nothing is known yet.
    pub fn new(limits: SpinLimits) -> AdaptiveSpin {
        AdaptiveSpin { limits, credit: 0 }
    }

    /// Begins a wait.
    pub fn begin(&self, now: Instant) -> SpinWait {
        let limits = self.limits;
        SpinWait {
            limits,
            since: now,
            until: limits.unconditional,
            sleeps: false,
            slept_early: false,
        }
    }

    /// Whether polling longer pays: waits have been short again and again.
    pub fn pays(&self) -> bool {
        self.credit >= SHORT_WAITS_PER_VAIN
    }

    /// What was waited for has happened.
    pub fn waited(&mut self, now: Instant, wait: &SpinWait) {
        let waited = now.saturating_duration_since(wait.since);
        if waited <= self.limits.unconditional.max(NO_WAIT) {
            return;
        }
        // A thread that slept early was woken, which is part of the wait.
        let short = self.limits.longest + if wait.slept_early { WAKE_UP } else { Duration::ZERO };
        match waited < short {
            true => self.credit = (self.credit + 1).min(2 * SHORT_WAITS_PER_VAIN),
            false => self.credit = self.credit.saturating_sub(SHORT_WAITS_PER_VAIN),
        }
    }

    /// The thread does something else: the length of the wait says nothing, unless it was polled in vain.
    pub fn interrupted(&mut self, now: Instant, wait: &SpinWait) {
        if !wait.sleeps && now.saturating_duration_since(wait.since) >= self.limits.longest {
            self.waited(now, wait);
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
        recheck: Duration::from_micros(50),
    };

    const SERVER: SpinLimits = SpinLimits {
        unconditional: Duration::ZERO,
        longest: Duration::from_micros(50),
        recheck: Duration::from_micros(50),
    };

    /// A thread that waits, one wait after the other, in virtual time.
    struct Waiter {
        spin: AdaptiveSpin,
        now: Instant,
        asked: u64,
    }

    impl Waiter {
        fn new(limits: SpinLimits) -> Waiter {
            Waiter { spin: AdaptiveSpin::new(limits), now: Instant::now(), asked: 0 }
        }

        /// Waits for this many microseconds; returns for how many of them the thread polls.
        fn wait(&mut self, micros: u64, busy: bool) -> u64 {
            let mut wait = self.spin.begin(self.now);
            let polled = (0..micros).take_while(|&at| {
                let (asked, spin) = (&mut self.asked, &self.spin);
                wait.polls(self.now + Duration::from_micros(at), || {
                    spin.pays() && {
                        *asked += 1;
                        !busy
                    }
                })
            });
            let polled = polled.count() as u64;
            self.now += Duration::from_micros(micros);
            // The thread looks at the clock once more before it sees what it waited for.
            wait.polls(self.now, || false);
            self.spin.waited(self.now, &wait);
            polled
        }
    }

    #[test]
    fn a_caller_polls_longer_if_that_has_been_enough_again_and_again() {
        // How long it waits, how often, and for how long it polls the last time.
        let waits = [
            (30, 100, 30, "a wait that ends soon is polled for"),
            (200, 16, 50, "a longer one is slept for"),
            (200, 100, 200, "until it has been short often enough"),
            (30, 100, 30, "a wait that ends soon says nothing"),
            (399, 1, 399, "the longest that is polled"),
            (5_000, 1, 400, "one in vain"),
            (5_000, 1, 400, "and another, which short ones have paid for"),
            (5_000, 1, 50, "but not a third"),
            (420, 16, 50, "a wake-up is part of a wait that is slept through"),
            (420, 1, 400, "and not of one that is polled"),
            (420, 1, 50, "which was in vain"),
        ];
        let mut waiter = Waiter::new(CALLER);
        for (micros, times, polled, why) in waits {
            let mut last = 0;
            (0..times).for_each(|_| last = waiter.wait(micros, false));
            assert_eq!(last, polled, "{why}");
        }
    }

    #[test]
    fn a_server_polls_only_for_peers_that_come_soon_again_and_again() {
        let waits = [
            (1_000, 50, 0, "a peer that computes between requests finds it asleep"),
            (10, 16, 0, "a few short waits are not enough"),
            (10, 100, 10, "from then on it polls"),
            (1_000, 1, 50, "once in vain"),
            (10, 20, 10, "which short waits have paid for"),
            (1_000, 2, 50, "twice in vain"),
            (10, 16, 0, "is too often"),
            (10, 1, 10, "until short waits have paid again"),
            (1_000, 2, 0, "for one"),
            (1, 100, 0, "an event that is there already says nothing"),
            (70, 16, 0, "a wait is short if a wake-up is part of it"),
            (70, 1, 50, "and too long without"),
        ];
        let mut waiter = Waiter::new(SERVER);
        for (micros, times, polled, why) in waits {
            let mut last = 0;
            (0..times).for_each(|_| last = waiter.wait(micros, false));
            assert_eq!(last, polled, "{why}");
        }
    }

    #[test]
    fn no_thread_polls_on_while_others_want_the_processor() {
        let mut waiter = Waiter::new(CALLER);
        (0..100).for_each(|_| assert_eq!(waiter.wait(30, false), 30));
        (0..16).for_each(|_| assert_eq!(waiter.wait(200, false), 50));
        assert_eq!(waiter.asked, 0, "nothing depends on it yet");
        (0..5).for_each(|_| assert_eq!(waiter.wait(200, true), 50));
        assert_eq!(waiter.asked, 5, "once per wait");
        assert_eq!(waiter.wait(200, false), 200);
        assert_eq!(waiter.asked, 8, "after 50, 100 and 150 us");
    }

    #[test]
    fn a_polling_thread_sleeps_as_soon_as_others_want_the_processor() {
        let mut waiter = Waiter::new(CALLER);
        (0..16).for_each(|_| _ = waiter.wait(200, false));
        let (now, mut asked) = (waiter.now, 0);
        let mut wait = waiter.spin.begin(now);
        let polled = (0..300).take_while(|&at| {
            wait.polls(now + Duration::from_micros(at), || {
                asked += 1;
                asked < 3
            })
        });
        assert_eq!(polled.count(), 150);
        assert!(!wait.polls(now + Duration::from_micros(301), || unreachable!("it sleeps")));
    }

    #[test]
    fn a_limit_of_zero_polls_never() {
        let mut waiter = Waiter::new(CALLER.with_longest(Duration::ZERO));
        for micros in [1, 30, 200, 5_000] {
            (0..50).for_each(|_| assert_eq!(waiter.wait(micros, false), 0));
        }
    }

    #[test]
    fn an_interrupted_wait_counts_only_if_it_was_in_vain() {
        let mut waiter = Waiter::new(SERVER);
        (0..40).for_each(|_| _ = waiter.wait(10, false));
        let mut interrupt = |after: Duration| {
            let mut wait = waiter.spin.begin(waiter.now);
            let polls = wait.polls(waiter.now, || waiter.spin.pays());
            waiter.now += after;
            waiter.spin.interrupted(waiter.now, &wait);
            polls
        };
        (0..40).for_each(|_| assert!(interrupt(Duration::from_micros(1))));
        // As by a tick, long after the thread has gone to sleep.
        let polls = [0; 3].map(|_| interrupt(Duration::from_millis(50)));
        assert_eq!(polls, [true, true, false]);
    }

    #[test]
    fn a_clock_that_jumps_ends_a_wait_and_says_nothing() {
        let mut waiter = Waiter::new(SERVER);
        (0..40).for_each(|_| _ = waiter.wait(10, false));
        let (before, now) = (waiter.now, waiter.now + Duration::from_secs(3600));
        let mut wait = waiter.spin.begin(now);
        assert!(wait.polls(now, || true));
        assert!(!wait.clone().polls(before, || true), "an hour is not polled");
        assert!(!wait.polls(now + Duration::from_secs(3600), || true));
        waiter.spin.waited(before, &wait);
        assert!(waiter.spin.pays());
    }

    proptest! {
        #[test]
        fn polls_in_vain_have_been_paid_for(
            waits in prop::collection::vec((0_u64..200, 0..8_usize), 0..200),
        ) {
            let (mut waiter, mut vain, mut short) = (Waiter::new(SERVER), 0, 0);
            for (micros, times) in waits {
                for _ in 0..times {
                    let polled = waiter.wait(micros, false);
                    vain += u64::from(polled > 0 && micros >= 50);
                    short += u64::from(micros < 80);
                }
            }
            prop_assert!(vain * u64::from(SHORT_WAITS_PER_VAIN) <= short, "{vain} of {short}");
        }
    }
}
