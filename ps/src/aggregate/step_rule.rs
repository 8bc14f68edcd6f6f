//! The parameters of synchronous steps.

use super::clipping::BitwiseF64;

/// How many gradients make a synchronous step, and from whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StepRule {
    /// The number of gradients in a step (`replicas_to_aggregate`).
    pub(crate) aggregate: u32,
    /// The number of expected replicas (`total_num_replicas`).
    pub(crate) total: u32,
    /// The minimum number of gradients in a step, however few replicas are left.
    pub(crate) floor: u32,
    /// Whether gradients are admitted in the order of the replicas' ranks, so that every run adds
    /// them in the same order.
    pub(crate) ordered: bool,
    /// The maximum number of outstanding tokens and admitted pushes: every shard has a push slot
    /// for each. At least `aggregate`, because pushes occupy their slots until the step is applied.
    pub(crate) push_slots: usize,
    /// The number of steps after which training ends.
    pub(crate) last_step: Option<u64>,
    /// The bound of a gradient's norm over all shards. Larger gradients are scaled down to it.
    pub(crate) clip: Option<BitwiseF64>,
}

impl StepRule {
    /// Returns how many gradients one replica may contribute to a step: `ceil(aggregate / total)`.
    pub(crate) fn share(&self) -> u32 {
        self.aggregate.div_ceil(self.total.max(1))
    }
}
