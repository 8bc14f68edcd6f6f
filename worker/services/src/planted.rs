//! Planted bugs, which prove that the tests would find such bugs.
//!
//! The feature `planted` compiles them into builds with debug assertions; a value passed in then
//! selects one. In every other build [`PlantedServiceBugs::has`] is `false` at compile time.

/// A plausible bug of a function server or a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServiceBug {
    /// A function server keeps the outputs of a client whose lease has passed.
    LeaseOutputsForEver,
    /// A pinned call whose worker is lost goes to any worker.
    RetryPinnedElsewhere,
    /// A scheduled call whose push has no effect ends well. Planted in the simulator's functions.
    EndWithoutEffect,
}

impl ServiceBug {
    /// Every bug that can be planted here.
    pub const ALL: &[ServiceBug] = &[
        ServiceBug::LeaseOutputsForEver,
        ServiceBug::RetryPinnedElsewhere,
        ServiceBug::EndWithoutEffect,
    ];
}

/// The planted bug, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlantedServiceBugs {
    #[cfg(all(feature = "planted", debug_assertions))]
    bug: Option<ServiceBug>,
}

#[cfg(all(feature = "planted", debug_assertions))]
impl PlantedServiceBugs {
    /// Plants this bug alone.
    pub fn with(bug: ServiceBug) -> PlantedServiceBugs {
        PlantedServiceBugs { bug: Some(bug) }
    }

    /// Returns whether this bug is planted.
    #[inline]
    pub fn has(self, bug: ServiceBug) -> bool {
        self.bug == Some(bug)
    }
}

#[cfg(not(all(feature = "planted", debug_assertions)))]
impl PlantedServiceBugs {
    /// Returns false: no bug is compiled in.
    #[inline]
    pub fn has(self, _bug: ServiceBug) -> bool {
        false
    }
}
