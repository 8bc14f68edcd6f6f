//! [`Access`]: one access of memory by one thread.

/// A thread of a launch, at a moment between two barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Accessor {
    /// The number of the launch, or of the block of shared memory. Marks of another one are
    /// ignored.
    pub(crate) launch: u64,
    /// The linear index of the block.
    pub(crate) block: u32,
    /// The linear index of the thread in the block.
    pub(crate) thread: u32,
    /// The number of barriers that the block has passed.
    pub(crate) epoch: u32,
    /// The number of barriers that the warp has passed since the block's last one.
    pub(crate) warp_epoch: u32,
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) by: Accessor,
    pub(crate) writes: bool,
    /// Whether it may happen at the same time as another such access.
    pub(crate) atomic: bool,
}
