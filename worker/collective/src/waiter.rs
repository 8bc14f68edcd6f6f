//! [`Waiter`]: how a rank waits for its links.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull_net::{AdaptiveSpin, Readiness, SpinLimits, SpinWait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;

use crate::links::{LinkFault, Links};
use crate::runtime::WakeFlag;

/// How long a thread polls before it sleeps. Neighbours that reduce at the same time answer within
/// that; a wake-up takes as long.
const SPIN: SpinLimits = SpinLimits {
    unconditional: Duration::from_micros(50),
    longest: Duration::from_micros(400),
    yields: Duration::ZERO,
};

/// How a rank waits for its links.
#[derive(Debug)]
pub(crate) enum Waiter {
    /// The thread polls the sockets, and sleeps in the system.
    Blocking(BlockingWaiter),
    /// The task sleeps; a runtime watches the sockets.
    Async(Option<AsyncWaiter>),
}

/// Polls sockets on the calling thread.
#[derive(Debug)]
pub(crate) struct BlockingWaiter {
    spin: AdaptiveSpin,
    wait: Option<SpinWait>,
}

/// Watches sockets on the runtime of the control thread.
#[derive(Debug)]
pub(crate) struct AsyncWaiter {
    predecessor: Readiness,
    successor: Readiness,
    wake: Readiness,
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Bytes of the predecessor.
    pub(crate) reads: bool,
    /// Room in the socket to the successor.
    pub(crate) writes: bool,
    /// The end of the ring.
    pub(crate) end: bool,
}

impl BlockingWaiter {
    /// Creates a waiter without a history.
    pub(crate) fn new() -> BlockingWaiter {
        BlockingWaiter { spin: AdaptiveSpin::new(SPIN), wait: None }
    }

    /// Records that the wait is over.
    pub(crate) fn moved(&mut self) {
        if let Some(wait) = self.wait.take() {
            self.spin.waited(Instant::now(), &wait);
        }
    }

    /// Waits a little, or until one of the sockets is ready, the flag is raised, or `limit` has
    /// passed.
    pub(crate) fn wait(
        &mut self,
        links: &mut Links,
        wake: &WakeFlag,
        wanted: Wanted,
        limit: Duration,
    ) -> Result<(), LinkFault> {
        let now = Instant::now();
        let BlockingWaiter { spin, wait } = self;
        // A neighbour on the same processor runs meanwhile. That it does is no reason to sleep: most
        // often the thread waits for this very neighbour.
        let yield_to_neighbour = || {
            std::thread::yield_now();
            Duration::ZERO
        };
        if wait.get_or_insert_with(|| spin.begin(now)).polls(now, yield_to_neighbour) {
            return Ok(());
        }
        if links.begin_wait(wanted)? {
            return Ok(());
        }
        let room = match links.successor_waits_for_bytes() {
            true => PollFlags::IN,
            false => PollFlags::OUT,
        };
        let flags = |wanted: bool, flag: PollFlags| if wanted { flag } else { PollFlags::empty() };
        let predecessor = links.predecessor();
        let successor = links.successor();
        let mut sockets = [
            PollFd::from_borrowed_fd(predecessor, flags(wanted.reads, PollFlags::IN)),
            PollFd::from_borrowed_fd(successor, flags(wanted.writes, room)),
            PollFd::from_borrowed_fd(wake.as_fd(), flags(wanted.end, PollFlags::IN)),
        ];
        let timeout = Timespec::try_from(limit).ok();
        match poll(&mut sockets, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(LinkFault::Successor(error.into())),
        }
    }
}

impl AsyncWaiter {
    /// Registers the sockets of links with a runtime.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub(crate) fn new(
        links: &Links,
        wake: &Arc<WakeFlag>,
        runtime: &tokio::runtime::Handle,
    ) -> io::Result<AsyncWaiter> {
        let _entered = runtime.enter();
        let register = |descriptor: BorrowedFd<'_>, interest| {
            Readiness::new(descriptor.try_clone_to_owned()?, interest)
        };
        let room = match links.successor_waits_for_bytes() {
            true => Interest::READABLE,
            false => Interest::WRITABLE,
        };
        Ok(AsyncWaiter {
            predecessor: register(links.predecessor(), Interest::READABLE)?,
            successor: register(links.successor(), room)?,
            wake: register(wake.as_fd(), Interest::READABLE)?,
        })
    }

    /// Waits until one of the sockets may be ready or the flag is raised.
    pub(crate) async fn wait(&self, links: &mut Links, wanted: Wanted) -> Result<(), LinkFault> {
        if links.begin_wait(wanted)? {
            return Ok(());
        }
        let changed = tokio::select! {
            changed = self.predecessor.changed(), if wanted.reads => changed,
            changed = self.successor.changed(), if wanted.writes => changed,
            changed = self.wake.changed(), if wanted.end => changed,
            else => Ok(()),
        };
        changed.map_err(LinkFault::Successor)
    }
}
