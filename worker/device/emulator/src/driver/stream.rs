//! [`Stream`] and [`Event`]: a queue of work, and a place in it.

use std::collections::VecDeque;
use std::time::Instant;

use super::work::Work;

/// A queue of work.
///
/// Work has numbers from 1. It is done in their order, and only when somebody waits for it.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    /// Whether it is ordered with the stream that has handle 0.
    pub(crate) is_blocking: bool,
    pub(crate) queue: VecDeque<Work>,
    /// The number of the last work that was queued.
    pub(crate) queued: u64,
    /// The number of the last work that was done.
    pub(crate) done: u64,
    /// Whether the first work is a host function that runs.
    pub(crate) is_calling: bool,
    /// Whether the host has destroyed it. Its work is done nevertheless.
    pub(crate) is_destroyed: bool,
}

impl Stream {
    pub(crate) fn new(context: u64, is_blocking: bool) -> Stream {
        Stream {
            context,
            is_blocking,
            queue: VecDeque::new(),
            queued: 0,
            done: 0,
            is_calling: false,
            is_destroyed: false,
        }
    }

    pub(crate) fn push(&mut self, work: Work) -> u64 {
        self.queue.push_back(work);
        self.queued += 1;
        self.queued
    }

    /// Takes the first work out.
    pub(crate) fn finish_first(&mut self) {
        self.queue.pop_front();
        self.done += 1;
        self.is_calling = false;
    }

    /// Drops all work but a host function that runs.
    pub(crate) fn abandon(&mut self) {
        self.queue.truncate(usize::from(self.is_calling));
        self.done = self.queued - self.queue.len() as u64;
    }
}

/// A place in a stream.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) context: u64,
    pub(crate) has_time: bool,
    /// The stream and the number of the work that reaches the event, once recorded.
    pub(crate) place: Option<(u64, u64)>,
    pub(crate) reached: Option<Instant>,
}
