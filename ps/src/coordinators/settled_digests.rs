//! The digests of the calls that a coordinator has scheduled, as far as a shard knows them.

use pushpull_common::effect_window::EffectWindow;
use pushpull_common::ids::EffectNumber;
use pushpull_common::protocol::EffectRef;

/// The digests of settled effects: see [`EffectRef::digest`]. A coordinator that resumes with other
/// calls is told by them, before it leaves those out that have settled.
///
/// Invariants: `settled` is the digest of an effect up to the watermark, and `ahead` that of the
/// newest effect that has counted. A digest of 0 is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct SettledDigests {
    /// The digest of effect 1.
    pub(crate) first: u64,
    pub(crate) settled: (EffectNumber, u64),
    pub(crate) ahead: (EffectNumber, u64),
}

impl SettledDigests {
    /// Records that an effect has counted. The window has it.
    pub(super) fn settle(&mut self, effect: &EffectRef, window: EffectWindow) {
        if effect.digest == 0 {
            // The coordinator has left calls out, and those before this one are not known any more.
            *self = SettledDigests { first: self.first, ..SettledDigests::default() };
            return;
        }
        let newest = (effect.id.number, effect.digest);
        if newest.0 == EffectNumber(1) {
            self.first = effect.digest;
        }
        self.ahead = self.ahead.max(newest);
        let passed = [newest, self.ahead].into_iter().filter(|it| it.0 <= window.settled());
        self.settled = passed.fold(self.settled, std::cmp::max);
    }
}
