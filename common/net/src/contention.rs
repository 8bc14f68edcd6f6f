//! [`Contention`]: whether other threads want the processor of a thread that polls.
//!
//! A thread that yields its processor runs again at once if no other thread waits for it. A process
//! in a container can see that, while the counts of the system are those of the whole machine.

use std::time::{Duration, Instant};

/// A yield of a processor that nobody wants takes 0.2 to 1 us. Two changes of threads take longer
/// than this.
const LATE: Duration = Duration::from_micros(3);

/// The time for which late yields go on before polling pauses. It lets the scheduler move
/// one of two threads to a processor that is free: it does so when a timer ticks, every 1 to 10 ms.
const TRIAL: Duration = Duration::from_millis(12);

/// The prompt yields in a row that end a trial. Threads of the system run at times on a processor
/// that is otherwise free.
const PROMPT_YIELDS_TO_ACQUIT: u8 = 8;

/// The prompt yields in a row after which the next pause is a first one.
const PROMPT_YIELDS_TO_FORGET: u8 = 64;

/// The first pause of polling. Each pause is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause of polling: how late a thread notices that a processor is free.
const LONGEST_PAUSE: Duration = Duration::from_millis(800);

/// Yields of a polling thread, and the pauses of polling that follow from them.
#[derive(Clone, Debug)]
pub(crate) struct Contention {
    /// When the first late yield of the current trial was.
    late_since: Option<Instant>,
    /// The prompt yields since the last late one.
    prompt: u8,
    next_pause: Duration,
    paused_until: Option<Instant>,
}

impl Default for Contention {
    fn default() -> Contention {
        Contention { late_since: None, prompt: 0, next_pause: FIRST_PAUSE, paused_until: None }
    }
}

impl Contention {
    /// Returns whether another thread ran during a yield that took this long.
    pub(crate) fn is_late(took: Duration) -> bool {
        took >= LATE
    }

    /// Returns whether no wait is polled at this time.
    pub(crate) fn pauses(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Records yields that returned at once.
    pub(crate) fn record_prompt(&mut self, yields: u8) {
        self.prompt = self.prompt.saturating_add(yields);
        if self.prompt >= PROMPT_YIELDS_TO_ACQUIT {
            self.late_since = None;
        }
        if self.prompt >= PROMPT_YIELDS_TO_FORGET {
            self.next_pause = FIRST_PAUSE;
        }
    }

    /// Records a yield during which another thread ran.
    pub(crate) fn record_late(&mut self, now: Instant) {
        self.prompt = 0;
        let since = *self.late_since.get_or_insert(now);
        if now.saturating_duration_since(since) < TRIAL {
            return;
        }
        self.late_since = None;
        self.paused_until = now.checked_add(self.next_pause);
        self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records yields in virtual time, one each millisecond: a late one for each `true`. Returns the
    /// milliseconds of each pause.
    fn pauses(yields: &[(usize, bool)]) -> Vec<u128> {
        let mut contention = Contention::default();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for &(count, is_late) in yields {
            for _ in 0..count {
                now += Duration::from_millis(1);
                match is_late {
                    true => contention.record_late(now),
                    false => contention.record_prompt(1),
                }
                if let Some(until) = contention.paused_until.filter(|&until| now < until) {
                    assert!(contention.pauses(now));
                    pauses.push((until - now).as_millis());
                    now = until;
                    assert!(!contention.pauses(now), "at the end of the pause");
                }
            }
        }
        pauses
    }

    #[test]
    fn late_yields_that_go_on_pause_polling() {
        // Numbers of yields, and whether they are late.
        type Yields = &'static [(usize, bool)];
        let cases: [(Yields, &[u128], &str); 7] = [
            (&[(1000, false)], &[], "nobody wants the processor"),
            (&[(12, true), (8, false), (12, true), (8, false)], &[], "two threads are moved apart"),
            (&[(13, true)], &[50], "the processor is shared"),
            (&[(6, true), (7, false), (1, true)], &[50], "with a few prompt yields between"),
            (&[(13 * 6, true)], &[50, 100, 200, 400, 800, 800], "pauses grow up to a limit"),
            (
                &[(26, true), (8, false), (13, true)],
                &[50, 100, 200],
                "a free moment does not make pauses short",
            ),
            (&[(26, true), (64, false), (13, true)], &[50, 100, 50], "but a free time does"),
        ];
        for (yields, expected, why) in cases {
            assert_eq!(pauses(yields), expected, "{why}");
        }
    }

    #[test]
    fn a_yield_is_late_if_another_thread_ran() {
        for (micros, is_late) in [(0, false), (1, false), (2, false), (3, true), (3000, true)] {
            assert_eq!(Contention::is_late(Duration::from_micros(micros)), is_late, "{micros} us");
        }
    }
}
