//! Polling of the sockets while a shard's thread waits for its peers.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use pushpull_net::{AdaptiveSpin, SpinLimits, SpinWait, timed_yield};
use tokio::sync::Notify;

/// Polls the sockets of a shard's thread while that pays.
#[derive(Debug)]
pub(super) struct PeerPolling {
    spin: RefCell<PeerSpin>,
    /// Notified when a wait for a peer begins that may be polled.
    begun: Notify,
}

impl PeerPolling {
    /// Creates a poller whose longest poll is this.
    pub(super) fn new(longest: Duration) -> PeerPolling {
        PeerPolling { spin: RefCell::new(PeerSpin::new(longest)), begun: Notify::new() }
    }

    /// Begins an adaptive spin for a peer: with `rest`, for the rest of a frame or of a write;
    /// otherwise for the next request.
    pub(super) fn wait_begins(&self, rest: bool) {
        let now = Instant::now();
        let mut spin = self.spin.borrow_mut();
        spin.begin(now, rest);
        if spin.polls(now) {
            self.begun.notify_one();
        }
    }

    /// Ends the wait: the peer's socket is ready.
    pub(super) fn socket_ready(&self) {
        self.spin.borrow_mut().waited(Instant::now());
    }

    /// Ends the wait: the thread has something else to do.
    pub(super) fn interrupted(&self, now: Instant) {
        self.spin.borrow_mut().interrupted(now);
    }

    /// Polls the sockets while a peer is expected soon.
    pub(super) async fn keep_polling(&self) {
        loop {
            self.begun.notified().await;
            while self.spin.borrow_mut().polls(Instant::now()) {
                // The runtime checks all sockets and timers before it returns here.
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The adaptive spins of a shard's thread.
///
/// Waits for the rest of a frame or of a write have a history of their own: a peer that computes
/// before a large request sends the whole request at once.
#[derive(Debug)]
struct PeerSpin {
    requests: AdaptiveSpin,
    rests: AdaptiveSpin,
    /// The current wait, and whether it is for a rest.
    wait: Option<(SpinWait, bool)>,
}

impl PeerSpin {
    fn new(longest: Duration) -> PeerSpin {
        let limits = SpinLimits { unconditional: Duration::ZERO, longest, yields: longest };
        let requests = AdaptiveSpin::new(limits);
        let rests = AdaptiveSpin::new(limits);
        PeerSpin { requests, rests, wait: None }
    }

    fn of(&mut self, rest: bool) -> &mut AdaptiveSpin {
        if rest { &mut self.rests } else { &mut self.requests }
    }

    fn begin(&mut self, now: Instant, rest: bool) {
        self.wait = Some((self.of(rest).begin(now), rest));
    }

    fn polls(&mut self, now: Instant) -> bool {
        self.wait.as_mut().is_some_and(|(wait, _)| wait.polls(now, timed_yield))
    }

    fn waited(&mut self, now: Instant) {
        if let Some((wait, rest)) = self.wait.take() {
            self.of(rest).waited(now, &wait);
        }
    }

    fn interrupted(&mut self, now: Instant) {
        if let Some((wait, rest)) = self.wait.take() {
            self.of(rest).interrupted(now, &wait);
        }
    }
}
