//! [`Replication`]: whose values of a variable a replica uses.

use std::fmt;

/// Whose values of a variable a replica uses: those of the servers, or its own.
///
/// Gradients do not train the running statistics of a batch normalization: each replica computes
/// them from its own batches. If it pulled the servers' values before each step, it would lose
/// what it has computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias = "VariableSynchronization")]
#[doc(alias = "VariableAggregation")]
pub enum Replication {
    /// Every pull brings the servers' values.
    #[default]
    Shared,
    /// Each replica begins with the servers' values and keeps its own from then on. The chief
    /// publishes its values, so checkpoints and readers have those.
    #[doc(alias = "ON_READ")]
    Local,
    /// Each replica begins with the servers' values and keeps its own between two averages. In an
    /// average it adds its share of what it has changed to the servers' values, and takes the sum.
    #[doc(alias = "MEAN")]
    Mean {
        /// The number of steps of a replica from one average to the next, at least 1.
        every: u64,
    },
}

impl Replication {
    /// Whether a replica has values of its own.
    pub fn is_replicated(self) -> bool {
        self != Replication::Shared
    }
}

impl fmt::Display for Replication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Replication::Shared => f.write_str("shared"),
            Replication::Local => f.write_str("local"),
            Replication::Mean { every } => write!(f, "mean every {every} steps"),
        }
    }
}
