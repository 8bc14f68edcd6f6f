//! Hands a ring to another thread, and takes it back.

use pushpull_common::protocol::message::RingEnd;
use pushpull_common::protocol::refusal::Detail;

use super::Ring;
use crate::error::RingError;
use crate::waiter::{AsyncWaiter, BlockingWaiter, Waiter};

impl Ring {
    /// Moves the ring out, for another thread. The ring that stays answers as before what its rank
    /// and its size are, and its operations return [`RingError::Fenced`]. Assign the ring to it
    /// again afterwards. Dropping it does nothing to the ring.
    pub fn take(&mut self) -> Ring {
        let detail = "another thread has its ring".to_owned();
        let stays = Ring {
            config: self.config.clone(),
            control: None,
            ring: self.ring.clone(),
            links: None,
            transports: self.transports,
            waiter: Waiter::Blocking(BlockingWaiter::new()),
            number: self.number,
            over: Some(RingError::Fenced { detail }),
            scratch: Vec::new(),
            metrics: self.metrics(),
            home: self.home.clone(),
        };
        std::mem::replace(self, stays)
    }

    /// Returns whether operations block the thread that polls them, as those of a ring of
    /// [`crate::blocking::Ring`] do.
    pub fn is_blocking(&self) -> bool {
        matches!(self.waiter, Waiter::Blocking(_))
    }

    /// Chooses whether operations block the thread that polls them, or wait as a task. A thread that
    /// has nothing else to do saves the wake-ups of the runtime.
    ///
    /// Costs three registrations with the runtime of the ring if they wait as a task from now on.
    ///
    /// # Errors
    /// [`RingError::System`] if the process has no descriptor left. Operations block then.
    pub fn set_blocking(&mut self, is_blocking: bool) -> Result<(), RingError> {
        match (is_blocking, &self.waiter) {
            (true, Waiter::Async(_)) => self.waiter = Waiter::Blocking(BlockingWaiter::new()),
            (false, Waiter::Blocking(_)) => self.waiter = Waiter::Async(self.watch_links()?),
            (true, Waiter::Blocking(_)) | (false, Waiter::Async(_)) => {}
        }
        Ok(())
    }

    /// Registers the links with the runtime of the control thread, if there are some.
    pub(super) fn watch_links(&self) -> Result<Option<AsyncWaiter>, RingError> {
        let (Some(links), Some(control)) = (&self.links, &self.control) else { return Ok(None) };
        let waiter = AsyncWaiter::new(links, control.wake(), control.runtime());
        waiter.map(Some).map_err(|error| RingError::System {
            doing: "watch the links".to_owned(),
            cause: error.to_string(),
        })
    }

    /// Ends the ring for all ranks, as [`Ring::give_up`] does, without waiting: the reason that this
    /// rank gets is its own.
    pub fn try_give_up(&mut self, reason: &str) {
        let end = RingEnd::GivenUp { rank: self.ring.rank, detail: Detail::shortened(reason) };
        self.over.get_or_insert(RingError::of_end(&end, u32::MAX, self.ring.epoch));
        if let Some(control) = &self.control {
            control.try_report(self.ring.epoch, end);
        }
    }
}
