//! The store trace: reports every store to a test before it is made, so that the test can stop
//! there and see what a crash would leave.
//!
//! Compiled only into tests.

use std::cell::RefCell;

/// An event in memory, reported before it happens, except for `Fenced`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreEvent {
    /// A byte range is borrowed for writing, in any order, until the next event.
    Borrowed {
        /// The address of the memory.
        address: usize,
        /// The first byte of the range.
        start: usize,
        /// Its length in bytes.
        bytes: usize,
    },
    /// A word is stored atomically.
    Storing {
        /// The address of the memory.
        address: usize,
        /// The byte offset of the word.
        start: usize,
    },
    /// A byte range is written with non-temporal stores, which complete by the next fence.
    Streaming {
        /// The address of the memory.
        address: usize,
        /// The first byte of the range.
        start: usize,
        /// Its length in bytes.
        bytes: usize,
    },
    /// All earlier non-temporal stores have completed.
    Fenced,
    /// A test file is created, renamed or removed.
    Filing,
    /// The memory moves to another address.
    Moved {
        /// The old address.
        from: usize,
        /// The new address.
        to: usize,
    },
}

type Watcher = Box<dyn FnMut(StoreEvent)>;

thread_local! {
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// Calls `watcher` for every event of this thread until the result is dropped.
pub fn watch(watcher: impl FnMut(StoreEvent) + 'static) -> Watch {
    WATCHER.set(Some(Box::new(watcher)));
    Watch
}

/// Ends the trace when it is dropped.
pub struct Watch;

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHER.set(None);
    }
}

fn report(event: StoreEvent) {
    // The watcher may use memory of its own, which is not traced.
    let Some(mut watcher) = WATCHER.take() else { return };
    watcher(event);
    WATCHER.with_borrow_mut(|slot| {
        slot.get_or_insert(watcher);
    });
}

pub(crate) fn borrowed(address: usize, start: usize, bytes: usize) {
    report(StoreEvent::Borrowed { address, start, bytes });
}

pub(crate) fn storing(address: usize, start: usize) {
    report(StoreEvent::Storing { address, start });
}

pub(crate) fn streaming(address: usize, start: usize, bytes: usize) {
    report(StoreEvent::Streaming { address, start, bytes });
}

pub(crate) fn fenced() {
    report(StoreEvent::Fenced);
}

pub(crate) fn filing() {
    report(StoreEvent::Filing);
}

pub(crate) fn moved(from: usize, to: usize) {
    report(StoreEvent::Moved { from, to });
}
