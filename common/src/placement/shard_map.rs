//! [`ShardMap`]: the shards that variables can be placed on.

use std::sync::Arc;

use super::PlacementError;
use crate::cluster::ClusterSpec;
use crate::ids::{ShardId, TaskId};

/// The ps tasks and the number of shards of each.
///
/// A map has at least one shard and at most [`ShardMap::SHARDS_MAX`]. Its tasks ascend.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShardMap {
    job: Arc<str>,
    tasks: Vec<u32>,
    shards_per_task: u16,
}

impl ShardMap {
    /// The largest number of shards in a cluster.
    pub const SHARDS_MAX: usize = 1 << 16;

    /// Creates a map from the indices of the tasks of the job `ps`, in any order, and the number of
    /// shards of each.
    pub fn new(
        tasks: impl Into<Vec<u32>>,
        shards_per_task: u16,
    ) -> Result<ShardMap, PlacementError> {
        let mut tasks = tasks.into();
        if tasks.is_empty() {
            return Err(PlacementError::NoTasks);
        }
        let shards = tasks.len().checked_mul(usize::from(shards_per_task));
        if !shards.is_some_and(|shards| (1..=ShardMap::SHARDS_MAX).contains(&shards)) {
            return Err(PlacementError::Shards { tasks: tasks.len(), shards_per_task });
        }
        tasks.sort_unstable();
        match tasks.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(PlacementError::DuplicateTask { task: pair[0] }),
            None => Ok(ShardMap { job: TaskId::PS_JOB.into(), tasks, shards_per_task }),
        }
    }

    /// Creates the map of the job that holds a cluster's variables.
    pub fn of_cluster(
        cluster: &ClusterSpec,
        shards_per_task: u16,
    ) -> Result<ShardMap, PlacementError> {
        let job = cluster.variables_job();
        let job = job.map_err(|source| PlacementError::Cluster { source })?;
        let tasks: Vec<u32> = cluster.ps_tasks().map(|(index, _)| index).collect();
        Ok(ShardMap { job: job.into(), ..ShardMap::new(tasks, shards_per_task)? })
    }

    /// Returns the job that holds the variables, to which the tasks belong.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// Returns the indices of the ps tasks, ascending.
    pub fn tasks(&self) -> &[u32] {
        &self.tasks
    }

    /// Returns the number of shards of each task.
    pub fn shards_per_task(&self) -> u16 {
        self.shards_per_task
    }

    /// Returns every shard: by task, then by shard.
    pub fn shards(&self) -> impl Iterator<Item = ShardId> {
        self.tasks
            .iter()
            .flat_map(|&task| (0..self.shards_per_task).map(move |shard| ShardId { task, shard }))
    }

    /// Returns the position of a task among the ascending tasks.
    pub(super) fn position(&self, task: u32) -> Option<usize> {
        self.tasks.binary_search(&task).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Chain;

    #[test]
    fn a_map_lists_its_shards_and_checks_its_limits() {
        let map = ShardMap::new([3, 1], 2).unwrap();
        assert_eq!((map.tasks(), map.shards_per_task()), (&[1, 3][..], 2));
        let shards: Vec<_> = map.shards().map(|s| (s.task, s.shard)).collect();
        assert_eq!(shards, [(1, 0), (1, 1), (3, 0), (3, 1)]);
        assert_eq!((map.position(3), map.position(2)), (Some(1), None));
        assert_eq!(ShardMap::new([], 1), Err(PlacementError::NoTasks));
        assert_eq!(ShardMap::new([1, 2, 1], 1), Err(PlacementError::DuplicateTask { task: 1 }));
        for (tasks, shards_per_task) in [(1, 0), (2, 40_000), (65_537, 1)] {
            let error = ShardMap::new((0..tasks).collect::<Vec<_>>(), shards_per_task);
            assert!(matches!(error, Err(PlacementError::Shards { .. })));
        }
        assert!(ShardMap::new((0..65_536).collect::<Vec<_>>(), 1).is_ok());
    }

    #[test]
    fn a_map_is_made_from_a_cluster() {
        let cluster: ClusterSpec = "ps=1@a:1,3@b:1".parse().unwrap();
        assert_eq!(ShardMap::of_cluster(&cluster, 1), ShardMap::new([1, 3], 1));
        let cluster: ClusterSpec = "local=1@a:1,3@b:1;worker=-".parse().unwrap();
        let map = ShardMap::of_cluster(&cluster, 2).unwrap();
        assert_eq!((map.job(), map.tasks()), ("local", &[1, 3][..]));
        assert_ne!(Ok(map), ShardMap::new([1, 3], 2));
        let faults = [
            ("", "cannot place variables: cannot find the job that holds the variables: "),
            ("a=a:1;b=b:1", "cannot place variables: cannot choose the job that holds the"),
            ("ps=", "cannot place variables: there is no ps task"),
        ];
        for (cluster, expected) in faults {
            let error = ShardMap::of_cluster(&cluster.parse().unwrap(), 1).unwrap_err();
            let text = Chain(&error).to_string();
            assert!(text.starts_with(expected), "{text}");
        }
    }
}
