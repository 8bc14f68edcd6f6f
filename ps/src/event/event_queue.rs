//! The queue of one reader of events: bounded, and lossy if the reader is slow.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::Event;

/// The events of a server from a point in time on, from [`crate::PsHandle::events`].
///
/// The server never waits for a reader. It keeps at most [`Events::QUEUED_MAX`] events for each;
/// then the oldest are lost, and the reader receives [`Event::EventsLost`] in their place.
///
/// ```
/// # use pushpull_common::{cluster::ClusterSpec, ids::TaskId};
/// # use pushpull_ps::{Adam, Ps, PsConfig};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let listener = Ps::listen("127.0.0.1:0").await?;
/// # let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build()?;
/// # let ps = listener.start(PsConfig::new(cluster, TaskId::ps(0), Adam::default()))?;
/// let mut events = ps.handle().events();
/// let log = std::thread::spawn(move || {
///     while let Some(event) = events.blocking_next(std::time::Duration::MAX) {
///         println!("{event}");
///     }
/// });
/// # ps.handle().stop();
/// ps.serve(std::future::pending()).await?;
/// # log.join().unwrap();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Events {
    queue: Arc<EventQueue>,
}

impl Events {
    /// The maximum number of events that wait for a reader.
    pub const QUEUED_MAX: usize = 256;

    pub(super) fn new(queue: Arc<EventQueue>) -> Events {
        Events { queue }
    }

    /// Returns a reader of a server that has ended.
    pub(crate) fn ended() -> Events {
        let queue = EventQueue::default();
        queue.end();
        Events { queue: Arc::new(queue) }
    }

    /// Waits for the next event. `None` once the server has ended and every event is read. Runs on
    /// any executor.
    ///
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.queue.poll(context)).await
    }

    /// Returns the next event if there is one. Does not block.
    pub fn try_next(&mut self) -> Option<Event> {
        self.queue.lock().take()
    }

    /// Blocks until the next event, for at most `timeout`. `None` after that, and once the server
    /// has ended and every event is read ([`Events::has_ended`]).
    pub fn blocking_next(&mut self, timeout: Duration) -> Option<Event> {
        self.queue.wait(timeout)
    }

    /// Returns whether the server has ended and every event is read.
    pub fn has_ended(&self) -> bool {
        let state = self.queue.lock();
        state.is_ended && state.events.is_empty() && state.lost == 0
    }
}

/// The events that wait for a reader.
///
/// Invariant: at most [`Events::QUEUED_MAX`] events are queued, the newest.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    events: VecDeque<Event>,
    /// How many events before the first queued one were lost since the last read.
    lost: u64,
    is_ended: bool,
    waker: Option<Waker>,
}

impl QueueState {
    fn take(&mut self) -> Option<Event> {
        match std::mem::take(&mut self.lost) {
            0 => self.events.pop_front(),
            count => Some(Event::EventsLost { count }),
        }
    }
}

impl EventQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // No code that holds the lock can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event. Never waits for the reader.
    pub(super) fn add(&self, event: Event) {
        self.change(|state| {
            if state.events.len() == Events::QUEUED_MAX {
                state.events.pop_front();
                state.lost += 1;
            }
            state.events.push_back(event);
        });
    }

    /// Ends the queue: no event comes any more.
    pub(super) fn end(&self) {
        self.change(|state| state.is_ended = true);
    }

    fn change(&self, change: impl FnOnce(&mut QueueState)) {
        let mut state = self.lock();
        change(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_one();
        waker.into_iter().for_each(Waker::wake);
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.lock();
        match state.take() {
            Some(event) => Poll::Ready(Some(event)),
            None if state.is_ended => Poll::Ready(None),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    fn wait(&self, timeout: Duration) -> Option<Event> {
        // A timeout beyond the range of the clock never passes.
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        loop {
            if let Some(event) = state.take() {
                return Some(event);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if state.is_ended || left == Some(Duration::ZERO) {
                return None;
            }
            state = match left {
                Some(left) => {
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use pushpull_common::ids::TaskId;

    use super::*;

    fn left(index: u32) -> Event {
        Event::WorkerLeft { task: TaskId::worker(index), step: 7 }
    }

    #[test]
    fn a_slow_reader_loses_the_oldest_events_and_learns_how_many() {
        let queue = Arc::new(EventQueue::default());
        let mut events = Events::new(queue.clone());
        let more = 3;
        let all = Events::QUEUED_MAX as u32 + more;
        (0..all).for_each(|index| queue.add(left(index)));
        assert_eq!(events.try_next(), Some(Event::EventsLost { count: more.into() }));
        for index in more..all {
            assert_eq!(events.try_next(), Some(left(index)));
        }
        assert_eq!(events.try_next(), None);
        assert!(!events.has_ended());
        assert_eq!(events.blocking_next(Duration::ZERO), None);
    }

    /// Counts how often it is woken.
    #[derive(Default)]
    struct CountingWaker(AtomicUsize);

    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_reader_that_waits_is_woken_by_an_event_and_by_the_end() {
        let queue = Arc::new(EventQueue::default());
        let mut events = Events::new(queue.clone());
        let wakes = Arc::new(CountingWaker::default());
        let waker = Waker::from(wakes.clone());
        let mut context = Context::from_waker(&waker);
        assert_eq!(pin!(events.next()).poll(&mut context), Poll::Pending);
        queue.add(left(1));
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert_eq!(pin!(events.next()).poll(&mut context), Poll::Ready(Some(left(1))));
        assert_eq!(pin!(events.next()).poll(&mut context), Poll::Pending);
        queue.end();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        assert_eq!(pin!(events.next()).poll(&mut context), Poll::Ready(None));
        assert!(events.has_ended() && Events::ended().has_ended());
    }

    #[test]
    fn a_blocked_reader_returns_with_the_event_of_another_thread() {
        let queue = Arc::new(EventQueue::default());
        let mut events = Events::new(queue.clone());
        let writer = std::thread::spawn(move || queue.add(left(4)));
        assert_eq!(events.blocking_next(Duration::MAX), Some(left(4)));
        writer.join().unwrap();
    }
}
