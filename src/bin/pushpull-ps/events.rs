//! Events as lines on stderr: at most one line of a kind in five seconds.
//!
//! A thread of its own writes them, as a stderr that nobody reads would stop whoever writes to it.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use pushpull::Event;

/// The shortest time between two lines of a kind.
const PAUSE: Duration = Duration::from_secs(5);

/// Events that wait to be written. More are only counted.
const WAITING_MAX: usize = 1024;

/// How long the end of the daemon waits for the last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Which lines are written, and when.
///
/// Invariant: a line is written for the newest event of each kind, [`PAUSE`] after the line before it at the
/// latest; it says how many events were left out between the two.
#[derive(Debug, Default)]
struct Limiter {
    kinds: BTreeMap<&'static str, Kind>,
}

#[derive(Debug)]
struct Kind {
    /// When the last line was written.
    last: Instant,
    /// The newest event since, and how many others there were.
    waiting: Option<(String, u64)>,
}

impl Limiter {
    /// Takes in an event; the line to be written at once, if one is.
    fn event(&mut self, now: Instant, kind: &'static str, text: String) -> Option<String> {
        match self.kinds.get_mut(kind) {
            Some(before) if now < before.last + PAUSE || before.waiting.is_some() => {
                let others = before.waiting.take().map_or(0, |(_, others)| others + 1);
                before.waiting = Some((text, others));
                None
            }
            _ => {
                self.kinds.insert(kind, Kind { last: now, waiting: None });
                Some(text)
            }
        }
    }

    /// When [`Limiter::lines_due`] has a line.
    fn due(&self) -> Option<Instant> {
        let waiting = self.kinds.values().filter(|kind| kind.waiting.is_some());
        waiting.map(|kind| kind.last + PAUSE).min()
    }

    /// The lines that are due by now.
    fn lines_due(&mut self, now: Instant) -> Vec<String> {
        self.lines(|kind| (now >= kind.last + PAUSE).then_some(now))
    }

    /// The lines that are left, due or not.
    fn last_lines(&mut self) -> Vec<String> {
        self.lines(|kind| Some(kind.last))
    }

    fn lines(&mut self, when: impl Fn(&Kind) -> Option<Instant>) -> Vec<String> {
        let lines = self.kinds.values_mut().filter_map(|kind| {
            let now = when(kind)?;
            let (text, others) = kind.waiting.take()?;
            kind.last = now;
            Some(match others {
                0 => text,
                others => format!("{text} (and {others} more)"),
            })
        });
        lines.collect()
    }
}

/// The thread that writes events.
pub(crate) struct Printer {
    events: SyncSender<(&'static str, String)>,
    lost: Arc<AtomicU64>,
    ended: mpsc::Receiver<()>,
}

impl Printer {
    /// Starts the thread. It ends when the printer and all that [`Printer::told`] gave are gone.
    pub(crate) fn start() -> std::io::Result<Printer> {
        let (events, received) = mpsc::sync_channel(WAITING_MAX);
        let (end, ended) = mpsc::sync_channel(1);
        let lost = Arc::new(AtomicU64::new(0));
        let left_out = lost.clone();
        let thread = std::thread::Builder::new().name("events".to_owned());
        thread.spawn(move || {
            write_events(&received, &left_out);
            // Nobody waits if the daemon has waited long enough.
            let _ = end.send(());
        })?;
        Ok(Printer { events, lost, ended })
    }

    /// A function that hands events to the thread, and never waits.
    pub(crate) fn told(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let (events, lost) = (self.events.clone(), self.lost.clone());
        move |event| {
            if events.try_send((event.kind(), event.to_string())).is_err() {
                lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Waits for the last lines, a second at the most. The server must have ended.
    pub(crate) fn finish(self) {
        drop(self.events);
        // A stderr that nobody reads holds nobody up.
        let _ = self.ended.recv_timeout(LAST_LINES);
    }
}

fn write_events(events: &mpsc::Receiver<(&'static str, String)>, lost: &AtomicU64) {
    let mut limiter = Limiter::default();
    loop {
        let received = match limiter.due() {
            Some(due) => events.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok((kind, text)) => {
                write(limiter.event(Instant::now(), kind, text));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                write(limiter.last_lines());
                return;
            }
        }
        write(limiter.lines_due(Instant::now()));
        let lost = lost.swap(0, Ordering::Relaxed);
        write((lost > 0).then(|| format!("{lost} events were left out: stderr is too slow")));
    }
}

fn write(lines: impl IntoIterator<Item = String>) {
    for line in lines {
        // There is nowhere to say that stderr cannot be written.
        let _ = writeln!(std::io::stderr(), "pushpull-ps: {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(limiter: &mut Limiter, now: Instant, text: &str) -> Option<String> {
        limiter.event(now, "save-failed", text.to_owned())
    }

    #[test]
    fn a_kind_has_a_line_in_five_seconds_and_the_newest_event_is_told() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut limiter = Limiter::default();
        assert_eq!(event(&mut limiter, at(0), "a").as_deref(), Some("a"));
        assert_eq!(limiter.due(), None);
        assert_eq!(event(&mut limiter, at(1000), "b"), None);
        assert_eq!(event(&mut limiter, at(2000), "c"), None);
        assert_eq!(event(&mut limiter, at(4999), "d"), None);
        assert_eq!(limiter.due(), Some(at(5000)));
        assert!(limiter.lines_due(at(4999)).is_empty());
        assert_eq!(limiter.lines_due(at(5000)), ["d (and 2 more)"]);
        assert_eq!(limiter.due(), None);
        // The pause begins with each line.
        assert_eq!(event(&mut limiter, at(9999), "e"), None);
        assert_eq!(limiter.lines_due(at(10_000)), ["e"]);
        assert_eq!(event(&mut limiter, at(15_000), "f").as_deref(), Some("f"));
    }

    #[test]
    fn kinds_do_not_wait_for_each_other() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        assert!(limiter.event(start, "save-failed", "a".to_owned()).is_some());
        assert!(limiter.event(start, "growth-failed", "b".to_owned()).is_some());
        assert!(limiter.event(start, "growth-failed", "c".to_owned()).is_none());
        assert!(limiter.event(start, "save-failed", "d".to_owned()).is_none());
        assert_eq!(limiter.last_lines(), ["c", "d"]);
        assert!(limiter.last_lines().is_empty());
    }

    #[test]
    fn an_event_that_comes_late_goes_behind_the_line_that_is_due() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        assert!(event(&mut limiter, start, "a").is_some());
        assert!(event(&mut limiter, start, "b").is_none());
        let late = start + 2 * PAUSE;
        assert!(event(&mut limiter, late, "c").is_none());
        assert_eq!(limiter.lines_due(late), ["c (and 1 more)"]);
    }
}
