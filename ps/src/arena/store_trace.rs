//! Who watches the memory: tells a test of every store before it is made, so that the test can
//! stop the world there and see what a crash would leave.
//!
//! Compiled into tests only.

use std::cell::RefCell;

/// What happens to memory. It is told before it happens, but for `Fenced`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A stretch is lent to somebody who writes it in any order until the next event.
    Shared {
        /// The memory.
        address: usize,
        /// Where the stretch starts.
        start: usize,
        /// Its length.
        bytes: usize,
    },
    /// A word is stored in one piece.
    Storing {
        /// The memory.
        address: usize,
        /// Where the word lies.
        start: usize,
    },
    /// A stretch is written past the cache: it is there for sure after the next fence.
    Streaming {
        /// The memory.
        address: usize,
        /// Where the stretch starts.
        start: usize,
        /// Its length.
        bytes: usize,
    },
    /// What was streamed is there.
    Fenced,
    /// A file of a shelf is made, renamed or removed.
    Filing,
    /// The memory lies elsewhere from now on.
    Moved {
        /// Where it was.
        from: usize,
        /// Where it is.
        to: usize,
    },
}

type Watcher = Box<dyn FnMut(Event)>;

thread_local! {
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// Has this thread's stores watched until the result is dropped.
pub(crate) fn watch(watcher: impl FnMut(Event) + 'static) -> Watch {
    WATCHER.set(Some(Box::new(watcher)));
    Watch
}

/// Ends the watch when it is dropped.
pub(crate) struct Watch;

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHER.set(None);
    }
}

fn tell(event: Event) {
    // The watcher may use memory of its own, of which it is not told.
    let Some(mut watcher) = WATCHER.take() else { return };
    watcher(event);
    WATCHER.with_borrow_mut(|slot| {
        slot.get_or_insert(watcher);
    });
}

pub(super) fn shared(address: usize, start: usize, bytes: usize) {
    tell(Event::Shared { address, start, bytes });
}

pub(super) fn storing(address: usize, start: usize) {
    tell(Event::Storing { address, start });
}

pub(super) fn streaming(address: usize, start: usize, bytes: usize) {
    tell(Event::Streaming { address, start, bytes });
}

pub(super) fn fenced() {
    tell(Event::Fenced);
}

pub(super) fn filing() {
    tell(Event::Filing);
}

pub(super) fn moved(from: usize, to: usize) {
    tell(Event::Moved { from, to });
}
