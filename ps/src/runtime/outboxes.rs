//! The outboxes of a shard's connections.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::outbox::Outbox;

/// The outboxes of a shard's connections, by number. Numbers are never repeated.
#[derive(Debug, Default)]
pub(super) struct Outboxes {
    outboxes: RefCell<HashMap<u64, Rc<Outbox>>>,
    last_number: Cell<u64>,
    /// Outboxes with a corked frame.
    corked: RefCell<Vec<Rc<Outbox>>>,
    removed: Notify,
}

impl Outboxes {
    /// Adds the outbox of a new connection. Returns it and the connection's number.
    pub(super) fn add(&self) -> (u64, Rc<Outbox>) {
        let connection = self.last_number.get() + 1;
        self.last_number.set(connection);
        let outbox = Rc::<Outbox>::default();
        self.outboxes.borrow_mut().insert(connection, outbox.clone());
        (connection, outbox)
    }

    /// Returns the outbox of a connection.
    pub(super) fn of(&self, connection: u64) -> Option<Rc<Outbox>> {
        self.outboxes.borrow().get(&connection).cloned()
    }

    /// Removes the outbox of a connection that has ended.
    pub(super) fn remove(&self, connection: u64) {
        if let Some(outbox) = self.outboxes.borrow_mut().remove(&connection) {
            self.corked.borrow_mut().retain(|other| !Rc::ptr_eq(other, &outbox));
        }
        self.removed.notify_one();
    }

    /// Delays the last frame of an outbox until [`Outboxes::send_corked`], or until its next frame.
    pub(super) fn cork(&self, outbox: Rc<Outbox>) {
        self.corked.borrow_mut().push(outbox);
    }

    /// Sends the corked frames.
    pub(super) fn send_corked(&self) {
        self.corked.borrow_mut().drain(..).for_each(|outbox| outbox.send_all());
    }

    /// Returns the outbox whose pull has been in progress for longest.
    pub(super) fn slowest_pull(&self) -> Option<Rc<Outbox>> {
        let outboxes = self.outboxes.borrow();
        let pulls = outboxes.values().filter(|outbox| outbox.pull_since.get().is_some());
        pulls.min_by_key(|outbox| outbox.pull_since.get()).cloned()
    }

    /// Yields the outboxes whose connections have made no progress for `limit`.
    pub(super) fn stalled(&self, now: Instant, limit: Duration) -> Vec<Rc<Outbox>> {
        let is_stalled = |outbox: &&Rc<Outbox>| {
            let since = [outbox.stuck_since.get(), outbox.partial_since.get()];
            let mut since = since.into_iter().flatten();
            let stalled = since.any(|since| now.saturating_duration_since(since) >= limit);
            stalled && !outbox.broken.get()
        };
        self.outboxes.borrow().values().filter(is_stalled).cloned().collect()
    }

    /// Closes every connection once its frames are sent, and waits for the ends.
    pub(super) async fn close(&self) {
        self.outboxes.borrow().values().for_each(|outbox| outbox.close());
        while !self.outboxes.borrow().is_empty() {
            self.removed.notified().await;
        }
    }

    /// Closes every connection at once.
    pub(super) fn break_off(&self) {
        self.outboxes.borrow().values().for_each(|outbox| outbox.break_off());
    }
}
