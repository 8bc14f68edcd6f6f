//! [`ReplicaValues`]: what a pull does with a replica's own values.

/// What a pull of all values does with the variables that each replica changes by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplicaValues {
    /// The replica's values stay.
    Keep,
    /// The servers' values replace them.
    Replace,
}
