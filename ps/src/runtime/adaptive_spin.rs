//! Whether a shard's thread that has nothing to do stays awake for its peers, or sleeps at once.
//!
//! To be woken takes some 20 us where the processor has gone to sleep as well; to stay awake takes a processor
//! that others may want. So it is done only where peers have come again shortly, time after time: those that ask for
//! the next thing as soon as they have been answered, or that are in the midst of writing or reading, which is counted by
//! itself: who computes before a large request sends all of it at once. It is not done for those that compute for a
//! millisecond between two requests, nor where others want the processor.

use std::time::{Duration, Instant};

use pushpull_common::wait_history::WaitHistory;

/// How long the thread stays awake at the most: about twice what it takes to wake it.
pub(super) const AWAKE: Duration = Duration::from_micros(50);

/// What a wait of a thread that sleeps may take and be short: as long as the thread would have stayed awake, and its
/// wake, which is waited for as well.
const SHORT: Duration = Duration::from_micros(80);

/// What is there already when the thread looks was not waited for, and says nothing.
const THERE: Duration = Duration::from_micros(2);

/// How long it is believed that others want the processors, or do not: to ask takes 2 us.
const BELIEVED: Duration = Duration::from_millis(1);

/// What a shard's thread knows of how long it waits for its peers.
#[derive(Debug, Default)]
pub(super) struct AdaptiveSpin {
    /// Those for a next request, and those for the rest of what has come or gone in part.
    requests: WaitHistory,
    rests: WaitHistory,
    /// The wait that is on.
    wait: Option<SpinWait>,
    /// Whether others wanted the processors, and when that was asked.
    wanted: Option<(bool, Instant)>,
}

#[derive(Clone, Copy, Debug)]
struct SpinWait {
    since: Instant,
    awake: bool,
    /// For the rest of something.
    rest: bool,
}

impl AdaptiveSpin {
    /// A peer has been served, and nothing is to be done until one goes on: with the rest of what it is in the midst
    /// of, or with something else. Whether the thread is to stay awake meanwhile; `wanted` says whether others want the
    /// processors.
    pub(super) fn wait(&mut self, now: Instant, rest: bool, wanted: impl FnOnce() -> bool) -> bool {
        let awake = self.wait_history(rest).pay() && !self.is_wanted(now, wanted);
        self.wait = Some(SpinWait { since: now, awake, rest });
        awake
    }

    fn wait_history(&mut self, rest: bool) -> &mut WaitHistory {
        if rest { &mut self.rests } else { &mut self.requests }
    }

    fn is_wanted(&mut self, now: Instant, ask: impl FnOnce() -> bool) -> bool {
        match self.wanted {
            Some((wanted, asked)) if now.saturating_duration_since(asked) < BELIEVED => wanted,
            _ => self.wanted.insert((ask(), now)).0,
        }
    }

    /// A peer has gone on.
    pub(super) fn go_on(&mut self, now: Instant) {
        let Some(wait) = self.wait.take() else { return };
        let waited = now.saturating_duration_since(wait.since);
        if waited > if wait.awake { AWAKE } else { SHORT } {
            self.wait_history(wait.rest).was_in_vain();
        } else if waited > THERE {
            self.wait_history(wait.rest).was_short();
        }
    }

    /// Something else is done: how long that takes says nothing of the peers, but a wait in vain was one.
    pub(super) fn work(&mut self, now: Instant) {
        let Some(wait) = self.wait.take() else { return };
        if wait.awake && now.saturating_duration_since(wait.since) > AWAKE {
            self.wait_history(wait.rest).was_in_vain();
        }
    }

    /// Whether the thread is to look for its peers once more, or to sleep.
    pub(super) fn is_awake(&self, now: Instant) -> bool {
        // A clock that has gone back is no reason to stay.
        let waited = |wait: SpinWait| now.checked_duration_since(wait.since);
        self.wait.filter(|wait| wait.awake).and_then(waited).is_some_and(|waited| waited < AWAKE)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As [`WaitHistory`] has it.
    const PAYS: u64 = 16;

    /// A thread and its peers, in virtual time.
    struct WaitReport {
        adaptive_spin: AdaptiveSpin,
        now: Instant,
        /// How long it has been awake, and how often in vain.
        awake: Duration,
        vain: u64,
        short: u64,
        asked: u64,
    }

    impl WaitReport {
        fn new() -> WaitReport {
            let (adaptive_spin, now) = (AdaptiveSpin::default(), Instant::now());
            WaitReport { adaptive_spin, now, awake: Duration::ZERO, vain: 0, short: 0, asked: 0 }
        }

        /// A peer goes on after so long, with something else; whether the thread was awake meanwhile, and until
        /// then.
        fn after(&mut self, micros: u64, wanted: bool) -> (bool, bool) {
            self.goes_on(micros, false, wanted)
        }

        /// The same, maybe with the rest of what it is in the midst of.
        fn goes_on(&mut self, micros: u64, rest: bool, wanted: bool) -> (bool, bool) {
            let (since, waited) = (self.now, Duration::from_micros(micros));
            let awake = self.adaptive_spin.wait(since, rest, || {
                self.asked += 1;
                wanted
            });
            self.now += waited;
            let until_then = self.adaptive_spin.is_awake(self.now);
            assert!(awake || !until_then, "it sleeps or it does not");
            assert!(!self.adaptive_spin.is_awake(since + AWAKE), "never for longer than that");
            self.awake += if awake { waited.min(AWAKE) } else { Duration::ZERO };
            self.vain += u64::from(awake && waited > AWAKE);
            self.short += u64::from(waited <= if awake { AWAKE } else { SHORT });
            self.adaptive_spin.go_on(self.now);
            (awake, until_then)
        }
    }

    #[test]
    fn it_stays_awake_for_those_who_come_shortly_time_after_time() {
        // How long it is waited for a peer, how often; and how often the thread is awake then.
        let wait_history = [
            (1_000, 50, 0, "who computes between two requests finds it asleep"),
            (10, 16, 0, "a few short waits do not tell"),
            (10, 100, 100, "from then on it is awake"),
            (1_000, 1, 1, "once in vain"),
            (10, 20, 20, "and that has been paid for before"),
            (1_000, 3, 2, "but twice are too often"),
            (10, 16, 0, "as at first"),
            (10, 1, 1, "and then again"),
            (1_000, 2, 1, "until they compute"),
            (1, 100, 0, "what was there already was not waited for"),
            (70, 17, 1, "which is short where a wake is part of it"),
            (70, 3, 0, "and was too long without"),
        ];
        let mut told = WaitReport::new();
        for (micros, times, awake, why) in wait_history {
            let count = (0..times).filter(|_| told.after(micros, false).0).count();
            assert_eq!(count, awake, "{why}");
        }
    }

    /// As of who computes for a while and then sends more than the sockets take at once.
    #[test]
    fn the_rest_of_a_large_request_is_waited_for_though_the_request_was_not() {
        let mut told = WaitReport::new();
        let request = |told: &mut WaitReport| {
            let awake = told.after(1_000, false).0;
            (awake, (0..6).filter(|_| told.goes_on(10, true, false).0).count())
        };
        let asleep = [request(&mut told), request(&mut told)];
        assert_eq!(asleep, [(false, 0); 2], "a few short waits do not tell");
        let awake = (0..100).map(|_| request(&mut told));
        assert_eq!(awake.skip(1).position(|it| it != (false, 6)), None);
        // One that stops in the midst of it twice is not waited for.
        let stops = [true, true, false].map(|_| told.goes_on(1_000, true, false).0);
        assert_eq!(stops, [true, true, false]);
        assert_eq!(request(&mut told), (false, 0));
    }

    #[test]
    fn it_sleeps_where_others_want_the_processor_and_asks_once_in_a_while() {
        let mut told = WaitReport::new();
        (0..20).for_each(|_| assert!(!told.after(10, true).0));
        assert_eq!(told.asked, 1, "not before it would stay awake, and not again at once");
        told.now += BELIEVED;
        assert_eq!(told.after(10, false), (true, true));
        assert!(told.after(10, true).0, "what was said is believed for a while");
        told.now += BELIEVED;
        assert!(!told.after(10, true).0);
        assert_eq!(told.asked, 3);
    }

    #[test]
    fn what_else_is_done_ends_a_wait_that_then_says_nothing() {
        let mut told = WaitReport::new();
        (0..20).for_each(|_| _ = told.after(10, false));
        for _ in 0..20 {
            assert!(told.adaptive_spin.wait(told.now, false, || false));
            assert!(told.adaptive_spin.is_awake(told.now));
            told.adaptive_spin.work(told.now);
            assert!(!told.adaptive_spin.is_awake(told.now));
            told.now += Duration::from_millis(1);
            told.adaptive_spin.go_on(told.now);
        }
        assert!(told.after(10, false).0);
    }

    /// As by a tick, long after the thread has gone to sleep.
    #[test]
    fn a_wait_in_vain_counts_whatever_ends_it() {
        let mut told = WaitReport::new();
        (0..100).for_each(|_| _ = told.after(10, false));
        for awake in [true, true, false] {
            assert_eq!(told.adaptive_spin.wait(told.now, false, || false), awake);
            told.now += Duration::from_millis(50);
            told.adaptive_spin.work(told.now);
        }
    }

    #[test]
    fn a_clock_that_jumps_ends_a_wait() {
        let mut told = WaitReport::new();
        (0..20).for_each(|_| _ = told.after(10, false));
        let (before, now) = (told.now, told.now + Duration::from_secs(3600));
        assert!(told.adaptive_spin.wait(now, false, || false));
        assert!(told.adaptive_spin.is_awake(now));
        assert!(!told.adaptive_spin.is_awake(before), "an hour is not waited for");
        assert!(!told.adaptive_spin.is_awake(now + Duration::from_secs(3600)));
        told.adaptive_spin.go_on(before);
        assert!(told.adaptive_spin.wait(before, false, || false), "and says nothing of the peer");
    }

    proptest! {
        #[test]
        fn what_it_is_awake_for_in_vain_has_been_paid_for(
            wait_history in prop::collection::vec((0_u64..200, any::<bool>(), 0..8_usize), 0..200),
        ) {
            let mut told = WaitReport::new();
            for (micros, rest, times) in wait_history {
                for _ in 0..times {
                    let (awake, until_then) = told.goes_on(micros, rest, false);
                    prop_assert!(!awake || until_then == (micros < 50));
                }
            }
            prop_assert!(told.vain * PAYS <= told.short, "{} of {}", told.vain, told.short);
        }
    }
}
