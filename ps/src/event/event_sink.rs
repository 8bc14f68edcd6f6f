//! The receivers of a server's events: its callback, and the readers of its handle.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::Event;
use super::event_queue::{EventQueue, Events};

/// The function that is called with each event.
type Callback = dyn Fn(&Event) + Send + Sync;

/// The receivers of events.
#[derive(Clone, Default)]
pub(crate) struct EventSink {
    callback: Option<Arc<Callback>>,
    /// `Some` in a server that runs.
    readers: Option<Arc<EventReaders>>,
}

impl EventSink {
    /// Creates a sink that calls this function.
    pub(crate) fn new(callback: impl Fn(&Event) + Send + Sync + 'static) -> EventSink {
        EventSink { callback: Some(Arc::new(callback)), readers: None }
    }

    /// Returns a sink that also serves readers, which end when it and its clones are dropped.
    pub(crate) fn with_readers(&self) -> (EventSink, Weak<EventReaders>) {
        let readers = Arc::new(EventReaders::default());
        let weak = Arc::downgrade(&readers);
        (EventSink { callback: self.callback.clone(), readers: Some(readers) }, weak)
    }

    pub(crate) fn emit(&self, event: &Event) {
        if let Some(callback) = &self.callback {
            // A panic ends the thread, and so the server, whose `serve` returns it.
            callback(event);
        }
        self.readers.iter().for_each(|readers| readers.publish(event));
    }
}

impl fmt::Debug for EventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.callback.is_some() { "EventSink(..)" } else { "EventSink" })
    }
}

/// The readers of a server's events.
#[derive(Debug, Default)]
pub(crate) struct EventReaders {
    queues: Mutex<Vec<Weak<EventQueue>>>,
}

impl EventReaders {
    /// Adds a reader, which receives the events from now on.
    pub(crate) fn subscribe(&self) -> Events {
        let queue = Arc::new(EventQueue::default());
        // Each update of the list is one call, so it is consistent after a panic elsewhere.
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.push(Arc::downgrade(&queue));
        Events::new(queue)
    }

    fn publish(&self, event: &Event) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| match queue.upgrade() {
            Some(queue) => {
                queue.add(event.clone());
                true
            }
            None => false,
        });
    }
}

impl Drop for EventReaders {
    fn drop(&mut self) {
        let queues = self.queues.get_mut().unwrap_or_else(PoisonError::into_inner);
        queues.iter().filter_map(Weak::upgrade).for_each(|queue| queue.end());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pushpull_common::ids::TaskId;

    use super::*;

    #[test]
    fn a_reader_receives_what_comes_after_it_and_ends_with_the_server() {
        let left = |index| Event::WorkerLeft { task: TaskId::worker(index), step: 7 };
        let (sink, readers) = EventSink::default().with_readers();
        sink.emit(&left(0));
        let mut first = readers.upgrade().unwrap().subscribe();
        sink.emit(&left(1));
        let mut second = readers.upgrade().unwrap().subscribe();
        drop(readers.upgrade().unwrap().subscribe());
        let clone = sink.clone();
        clone.emit(&left(2));
        assert_eq!(readers.upgrade().unwrap().queues.lock().unwrap().len(), 2, "one was dropped");
        drop(sink);
        assert!(!second.has_ended());
        drop(clone);
        assert!(!first.has_ended(), "two events are left");
        assert_eq!([first.try_next(), first.try_next()], [Some(left(1)), Some(left(2))]);
        assert!(first.has_ended());
        assert_eq!(second.blocking_next(Duration::MAX), Some(left(2)));
        assert_eq!(second.blocking_next(Duration::MAX), None);
        assert!(readers.upgrade().is_none());
    }
}
