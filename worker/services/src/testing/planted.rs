//! Planted bugs, which prove that the tests would find such bugs.
//!
//! The feature `planted` compiles them in; a value passed in then selects one. Without the feature
//! [`PlantedServiceBugs::has`] is `false` at compile time.

#![allow(unreachable_pub, reason = "public for the simulator alone")]

/// A plausible bug of a server of functions or a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServiceBug {
    /// A server of functions keeps the outputs of a client whose lease has passed.
    LeaseOutputsForEver,
    /// A pinned call whose worker is lost goes to any worker.
    RetryPinnedElsewhere,
    /// A scheduled call whose push has no effect ends well. Planted in the simulator's functions.
    #[cfg_attr(not(feature = "simulation"), allow(dead_code, reason = "planted there alone"))]
    EndWithoutEffect,
}

impl ServiceBug {
    /// Every bug that can be planted here.
    #[cfg(feature = "planted")]
    pub const ALL: &[ServiceBug] = &[
        ServiceBug::LeaseOutputsForEver,
        ServiceBug::RetryPinnedElsewhere,
        ServiceBug::EndWithoutEffect,
    ];
}

/// The planted bug, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlantedServiceBugs {
    #[cfg(feature = "planted")]
    bug: Option<ServiceBug>,
}

impl PlantedServiceBugs {
    /// Plants this bug alone.
    #[cfg(feature = "planted")]
    pub fn with(bug: ServiceBug) -> PlantedServiceBugs {
        PlantedServiceBugs { bug: Some(bug) }
    }

    /// Returns whether this bug is planted.
    #[cfg(feature = "planted")]
    #[inline]
    pub fn has(self, bug: ServiceBug) -> bool {
        self.bug == Some(bug)
    }

    /// Returns false: no bug is compiled in.
    #[cfg(not(feature = "planted"))]
    #[inline]
    pub fn has(self, _bug: ServiceBug) -> bool {
        false
    }
}
