//! Events as lines on stderr, at most one line per kind in five seconds.
//!
//! A thread of its own writes them, because a write to a stderr that is not read blocks.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use pushpull::server::Event;

/// Minimum time between two lines of one kind.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of events queued for the writer thread. Further ones are only counted.
const QUEUED_EVENTS_MAX: usize = 1024;

/// Maximum time that the daemon waits at its end for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Rate limiter of event lines, one line per kind in [`LINE_INTERVAL`].
///
/// Invariant: the newest event of each kind is written at most [`LINE_INTERVAL`] after the line
/// before it. That line says how many events were left out between the two.
#[derive(Debug, Default)]
struct Limiter {
    kinds: BTreeMap<&'static str, KindState>,
}

#[derive(Debug)]
struct KindState {
    /// Time of the last line.
    last: Instant,
    /// Newest event since that line, and the number of events left out before it.
    waiting: Option<(String, u64)>,
}

impl Limiter {
    /// Takes an event. Returns its line if it is to be written at once.
    fn event(&mut self, now: Instant, kind: &'static str, text: String) -> Option<String> {
        match self.kinds.get_mut(kind) {
            Some(before) if now < before.last + LINE_INTERVAL || before.waiting.is_some() => {
                let others = before.waiting.take().map_or(0, |(_, others)| others + 1);
                before.waiting = Some((text, others));
                None
            }
            _ => {
                self.kinds.insert(kind, KindState { last: now, waiting: None });
                Some(text)
            }
        }
    }

    /// Returns when [`Limiter::lines_due`] next has a line.
    fn due(&self) -> Option<Instant> {
        let waiting = self.kinds.values().filter(|kind| kind.waiting.is_some());
        waiting.map(|kind| kind.last + LINE_INTERVAL).min()
    }

    /// Returns the lines that are due at `now`.
    fn lines_due(&mut self, now: Instant) -> Vec<String> {
        self.lines(|kind| (now >= kind.last + LINE_INTERVAL).then_some(now))
    }

    /// Returns all remaining lines, due or not.
    fn last_lines(&mut self) -> Vec<String> {
        self.lines(|kind| Some(kind.last))
    }

    fn lines(&mut self, when: impl Fn(&KindState) -> Option<Instant>) -> Vec<String> {
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
    /// Starts the thread. It ends when the printer and all its sinks are dropped.
    pub(crate) fn start() -> std::io::Result<Printer> {
        let (events, received) = mpsc::sync_channel(QUEUED_EVENTS_MAX);
        let (end, ended) = mpsc::sync_channel(1);
        let lost = Arc::new(AtomicU64::new(0));
        let left_out = lost.clone();
        let thread = std::thread::Builder::new().name("events".to_owned());
        thread.spawn(move || {
            write_events(&received, &left_out);
            // The receiver is gone if the daemon has stopped waiting.
            let _ = end.send(());
        })?;
        Ok(Printer { events, lost, ended })
    }

    /// Returns a function that queues an event for the thread and never blocks. If the queue is
    /// full, the event is only counted.
    pub(crate) fn event_sink(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let sink = self.line_sink();
        move |event| sink(event.kind(), event.to_string())
    }

    /// Returns a function that queues a line of a kind as [`Printer::event_sink`] does.
    pub(crate) fn line_sink(&self) -> impl Fn(&'static str, String) + Send + Sync + 'static {
        let events = self.events.clone();
        let lost = self.lost.clone();
        move |kind, line| {
            if events.try_send((kind, line)).is_err() {
                lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Waits up to [`FLUSH_TIMEOUT`] for the last lines. The server must have ended, so that no
    /// event sink is left.
    pub(crate) fn finish(self) {
        drop(self.events);
        // A stderr that is not read must not delay the end.
        let _ = self.ended.recv_timeout(FLUSH_TIMEOUT);
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
        // A failed write to stderr cannot be reported anywhere.
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
    fn a_kind_has_one_line_in_five_seconds_with_its_newest_event() {
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
        // The interval starts again with each line.
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
    fn a_new_event_joins_the_line_that_is_already_due() {
        let start = Instant::now();
        let mut limiter = Limiter::default();
        assert!(event(&mut limiter, start, "a").is_some());
        assert!(event(&mut limiter, start, "b").is_none());
        let late = start + 2 * LINE_INTERVAL;
        assert!(event(&mut limiter, late, "c").is_none());
        assert_eq!(limiter.lines_due(late), ["c (and 1 more)"]);
    }
}
