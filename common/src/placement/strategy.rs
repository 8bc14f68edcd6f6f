//! [`PlacementStrategy`]: the rule that chooses a ps task.

use std::fmt;
use std::sync::Arc;

use crate::variable::VariableSpec;

/// The rule that chooses a ps task for a variable or a part of one.
///
/// A variable that is pinned to a task stays there under every strategy, and an explicit
/// [`Partitioner`](crate::partition::Partitioner) decides its parts.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum PlacementStrategy {
    /// Balances bytes, independently of the order of creation; the default.
    ///
    /// Variables of [`Partitioner::Automatic`] that are large for the model are cut by rows, into
    /// at most one part for each shard and parts of at least 64 KiB, tables of 1 MiB. Then the
    /// largest part comes first, each to the task with the fewest bytes, the lowest index on ties.
    /// Dense variables, sparse ones and tables are balanced separately, because a step moves all of
    /// the first and some rows of the others. Unless rows are large or variables pinned, the
    /// fullest task is less than a tenth above the mean, or a few parts of 64 KiB.
    ///
    /// The gradient of a variable that is cut is sent to its shards even on the same host, where
    /// that of a whole one is written in shared memory; [`Partitioner::None`] keeps a variable
    /// whole.
    ///
    /// Nothing is cut if a server has a rule that needs whole variables
    /// ([LAMB](https://arxiv.org/abs/1904.00962)).
    ///
    /// [`Partitioner::Automatic`]: crate::partition::Partitioner::Automatic
    /// [`Partitioner::None`]: crate::partition::Partitioner::None
    #[default]
    Balanced,
    /// Task after task in the order of creation, regardless of size; TensorFlow's default.
    #[doc(alias = "replica_device_setter")]
    RoundRobin,
    /// The task with the fewest bytes so far, the lowest index on ties. Depends on the order of
    /// creation: create large variables first.
    #[doc(alias = "GreedyLoadBalancingStrategy")]
    GreedyBytes,
    /// A hash of name and part. The order of creation does not matter, and a variable stays in
    /// place when others are added or removed. Balances only large numbers of parts.
    HashName,
    /// A user-defined function; see [`PlacementStrategy::custom`].
    Custom(CustomStrategy),
}

/// A function from a variable, a part of it and the ps tasks to one of those tasks.
#[derive(Clone)]
pub struct CustomStrategy(Arc<Choice>);

type Choice = dyn Fn(&VariableSpec, u32, &[u32]) -> u32 + Send + Sync;

impl PlacementStrategy {
    /// Creates a strategy from a function of the variable, the part's index and the ps task
    /// indices, ascending. It must return one of those indices, the same one on every machine.
    pub fn custom(
        choice: impl Fn(&VariableSpec, u32, &[u32]) -> u32 + Send + Sync + 'static,
    ) -> PlacementStrategy {
        PlacementStrategy::Custom(CustomStrategy(Arc::new(choice)))
    }

    /// Returns a stable name, for comparing configurations. All custom strategies share one name;
    /// the caller must ensure that they agree.
    pub fn name(&self) -> &'static str {
        match self {
            PlacementStrategy::Balanced => "balanced",
            PlacementStrategy::RoundRobin => "round_robin",
            PlacementStrategy::GreedyBytes => "greedy_bytes",
            PlacementStrategy::HashName => "hash_name",
            PlacementStrategy::Custom(_) => "custom",
        }
    }
}

impl CustomStrategy {
    pub(super) fn choose(&self, variable: &VariableSpec, part: u32, tasks: &[u32]) -> u32 {
        (self.0)(variable, part, tasks)
    }
}

impl fmt::Debug for CustomStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("_")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable() {
        let custom = PlacementStrategy::custom(|_, _, tasks| tasks[0]);
        let all = [
            PlacementStrategy::Balanced,
            PlacementStrategy::RoundRobin,
            PlacementStrategy::GreedyBytes,
            PlacementStrategy::HashName,
            custom,
        ];
        let names: Vec<_> = all.iter().map(PlacementStrategy::name).collect();
        assert_eq!(names, ["balanced", "round_robin", "greedy_bytes", "hash_name", "custom"]);
        assert_eq!(format!("{:?}", all[4]), "Custom(_)");
        assert_eq!(PlacementStrategy::default().name(), "balanced");
    }
}
