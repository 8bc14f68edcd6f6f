//! [`Leaks`]: what the host has not given back.

/// The counts of objects that the host has not released.
///
/// Objects of a released context count until the emulator is reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Leaks {
    /// Allocations of device memory.
    pub device_allocations: u64,
    /// Their bytes.
    pub device_bytes: u64,
    /// Page-locked allocations.
    pub pinned_allocations: u64,
    /// Registrations of the host's own memory.
    pub registrations: u64,
    /// Streams.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Modules.
    pub modules: u64,
    /// Contexts, each as many times as it is retained.
    pub contexts: u64,
}
