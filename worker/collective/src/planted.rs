//! Planted bugs, which prove that the simulator of rings would find such bugs.
//!
//! The feature `planted` compiles them into builds with debug assertions; a value passed in then
//! selects one. In every other build [`PlantedRingBugs::has`] is `false` at compile time.

/// A plausible bug of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RingBug {
    /// A gathered reduction folds the contributions in the order in which they arrive.
    FoldAsArrived,
    /// A finished chunk is stored in the place of the chunk before it.
    ChunkOffByOne,
    /// A rank takes the link of its predecessor in any epoch.
    EpochNotChecked,
    /// A program goes on after a shrink without a broadcast. Planted in the simulator's trainer.
    #[cfg(test)]
    NoBroadcast,
}

/// The planted bug, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct PlantedRingBugs {
    #[cfg(all(feature = "planted", debug_assertions))]
    bug: Option<RingBug>,
}

#[cfg(all(feature = "planted", debug_assertions))]
impl PlantedRingBugs {
    /// Plants this bug alone.
    #[cfg(test)]
    pub(crate) fn with(bug: RingBug) -> PlantedRingBugs {
        PlantedRingBugs { bug: Some(bug) }
    }

    /// Returns whether this bug is planted.
    #[inline]
    pub(crate) fn has(self, bug: RingBug) -> bool {
        self.bug == Some(bug)
    }
}

#[cfg(not(all(feature = "planted", debug_assertions)))]
impl PlantedRingBugs {
    /// Returns false: no bug is compiled in.
    #[inline]
    pub(crate) fn has(self, _bug: RingBug) -> bool {
        false
    }
}
