//! [`RingMetrics`]: where a rank's time in collective operations goes.

use std::time::Duration;

/// The counts and times of one rank since it joined.
///
/// The times are those of the thread that performs an operation.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RingMetrics {
    /// Operations that have ended.
    pub operations: u64,
    /// Tensors that were reduced together with others.
    pub fused_tensors: u64,
    /// Operations on several tensors together.
    pub fused_operations: u64,
    /// Bytes of tensors sent to successors.
    pub bytes_sent: u64,
    /// Bytes of tensors received from predecessors.
    pub bytes_received: u64,
    /// Time in which the rank waited for a neighbour.
    pub wait: Duration,
    /// Time spent in sends.
    pub send: Duration,
    /// Time spent in receives, and in combining what was received.
    pub fold: Duration,
    /// The rank that this one waits for, or has waited for last: its predecessor, or its successor
    /// if that does not read.
    pub waits_for: Option<u32>,
    /// Rings that this rank has been in.
    pub rings: u64,
}
