//! A shard's orders for the saver, which wait until its channel takes them.

use std::cell::RefCell;
use std::collections::VecDeque;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::shard::checkpoints::saver_order::SaverOrder;

/// The orders of a shard for the saver, in order. Without a saver they are dropped.
#[derive(Debug)]
pub(super) struct SaverOrders {
    saver: Option<mpsc::Sender<SaverOrder>>,
    /// Orders that did not fit into the channel yet.
    queue: RefCell<VecDeque<SaverOrder>>,
}

impl SaverOrders {
    /// Creates an empty queue for this saver.
    pub(super) fn new(saver: Option<mpsc::Sender<SaverOrder>>) -> SaverOrders {
        SaverOrders { saver, queue: RefCell::default() }
    }

    /// Queues an order and sends what the channel takes.
    pub(super) fn add(&self, order: SaverOrder) {
        self.queue.borrow_mut().push_back(order);
        self.send();
    }

    /// Sends what the channel takes.
    pub(super) fn send(&self) {
        let mut queue = self.queue.borrow_mut();
        while let (Some(saver), Some(order)) = (&self.saver, queue.pop_front()) {
            if let Err(TrySendError::Full(order)) = saver.try_send(order) {
                return queue.push_front(order);
            }
        }
        queue.clear();
    }
}
