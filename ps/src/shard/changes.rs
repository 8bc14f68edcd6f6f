//! [`Changes`]: which parts of a shard's state an input has changed.

use std::ops::{BitOr, BitOrAssign};

/// The parts of a shard's state that an input, a job or the time has changed. What follows from a
/// change concerns only some of the owners: a heartbeat changes nothing, and asks nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Changes(u8);

impl Changes {
    /// Nothing that a request could wait for, and no durable word.
    pub(super) const NONE: Changes = Changes(0);
    /// Push slots, and the pushes in them.
    pub(super) const SLOTS: Changes = Changes(1);
    /// Tokens, and the batches of the data set that they have.
    pub(super) const TOKENS: Changes = Changes(2);
    /// The global step, or how far a shard is with it.
    pub(super) const STEP: Changes = Changes(4);
    /// The variables and their values.
    pub(super) const VALUES: Changes = Changes(8);
    /// Clients: whether they are members, and their push windows.
    pub(super) const MEMBERS: Changes = Changes(16);
    /// Checkpoints: requests to save one, and saves that have ended.
    pub(super) const FILES: Changes = Changes(32);
    pub(super) const ALL: Changes = Changes(63);

    /// Returns whether any of these parts has changed.
    pub(super) fn any(self, of: Changes) -> bool {
        self.0 & of.0 != 0
    }
}

impl BitOr for Changes {
    type Output = Changes;

    fn bitor(self, other: Changes) -> Changes {
        Changes(self.0 | other.0)
    }
}

impl BitOrAssign for Changes {
    fn bitor_assign(&mut self, other: Changes) {
        self.0 |= other.0;
    }
}
