//! [`EmulatedStream`] and [`EmulatedEvent`]: a queue of work, and a place in it.

use std::collections::VecDeque;
use std::time::Instant;

use super::order::Clock;
use super::work::StreamWork;

/// A queue of work.
///
/// Work has numbers from 1. It is done in their order, and only when a caller waits for it.
#[derive(Debug)]
pub(crate) struct EmulatedStream {
    pub(crate) context: u64,
    /// Whether it is ordered with the stream that has handle 0.
    pub(crate) is_blocking: bool,
    pub(crate) queue: VecDeque<StreamWork>,
    /// The vector clock of each work in the queue: the work that is done before it begins.
    clocks: VecDeque<Clock>,
    /// The vector clock of the next work.
    pub(crate) clock: Clock,
    /// The vector clock of a thread that has waited for all work that is done.
    pub(crate) done_clock: Clock,
    /// The number of the last work that was queued.
    pub(crate) queued: u64,
    /// The number of the last work that was done.
    pub(crate) done: u64,
    /// Whether the first work is a host function that runs.
    pub(crate) is_calling: bool,
    /// Whether the host has destroyed it. Its work is done nevertheless.
    pub(crate) is_destroyed: bool,
}

impl EmulatedStream {
    pub(crate) fn new(context: u64, is_blocking: bool) -> EmulatedStream {
        EmulatedStream {
            context,
            is_blocking,
            queue: VecDeque::new(),
            clocks: VecDeque::new(),
            clock: Clock::default(),
            done_clock: Clock::default(),
            queued: 0,
            done: 0,
            is_calling: false,
            is_destroyed: false,
        }
    }

    /// Queues work of the stream with this handle.
    pub(crate) fn push(&mut self, handle: u64, work: StreamWork) -> u64 {
        self.queue.push_back(work);
        self.queued += 1;
        self.clock.advance(handle, self.queued);
        self.clocks.push_back(self.clock.clone());
        self.queued
    }

    /// Returns the vector clock of the first work in the queue.
    pub(crate) fn first_clock(&self) -> Clock {
        self.clocks.front().cloned().unwrap_or_default()
    }

    /// Takes the first work out.
    pub(crate) fn finish_first(&mut self) {
        self.queue.pop_front();
        if let Some(clock) = self.clocks.pop_front() {
            self.done_clock = clock;
        }
        self.done += 1;
        self.is_calling = false;
    }

    /// Drops all work but a host function that runs.
    pub(crate) fn abandon(&mut self) {
        self.queue.truncate(usize::from(self.is_calling));
        self.clocks.truncate(self.queue.len());
        self.done = self.queued - self.queue.len() as u64;
    }
}

/// A place in a stream.
#[derive(Clone, Debug)]
pub(crate) struct EmulatedEvent {
    pub(crate) context: u64,
    pub(crate) has_time: bool,
    /// The stream and the number of the work that reaches the event, once recorded.
    pub(crate) place: Option<(u64, u64)>,
    /// The vector clock of a thread or stream that has waited for the event.
    pub(crate) clock: Clock,
    pub(crate) reached: Option<Instant>,
}
