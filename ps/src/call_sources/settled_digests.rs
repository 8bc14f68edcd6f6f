//! What a shard knows of the calls that a coordinator has scheduled.

use pushpull_common::call_window::CallWindow;
use pushpull_common::ids::CallNumber;
use pushpull_common::protocol::CallRef;

/// The digests of settled calls: see [`CallRef::digest`]. A coordinator that resumes with other
/// calls is told by them, before it leaves those out that have settled.
///
/// Invariants: `settled` is the digest of a call up to the watermark, and `ahead` that of the
/// newest call that has counted. A digest of 0 is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SettledDigests {
    /// The digest of call 1.
    pub(crate) first: u64,
    pub(crate) settled: (CallNumber, u64),
    pub(crate) ahead: (CallNumber, u64),
}

impl SettledDigests {
    /// Records that a call has counted. The window has it.
    pub(super) fn settle(&mut self, call: &CallRef, window: CallWindow) {
        if call.digest == 0 {
            // The coordinator has left calls out, and those before this one are not known any more.
            *self = SettledDigests { first: self.first, ..SettledDigests::default() };
            return;
        }
        let newest = (call.id.number, call.digest);
        if newest.0 == CallNumber(1) {
            self.first = call.digest;
        }
        self.ahead = self.ahead.max(newest);
        let passed = [newest, self.ahead].into_iter().filter(|it| it.0 <= window.settled());
        self.settled = passed.fold(self.settled, std::cmp::max);
    }

    /// Returns what holds for two shards, whose common window is this.
    pub(crate) fn intersection(self, other: SettledDigests, window: CallWindow) -> SettledDigests {
        let is_settled = |it: &(CallNumber, u64)| it.0 <= window.settled();
        let of_both = [self.settled, other.settled].into_iter().filter(is_settled);
        let settled = of_both.max().unwrap_or_default();
        let first = if window.settled() >= CallNumber(1) { self.first } else { 0 };
        SettledDigests { first, settled, ahead: settled }
    }
}
