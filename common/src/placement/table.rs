//! The text table of a placement, with its skew.

use std::fmt::Write;

use super::{PlacedPartition, Placement, TaskLoads};
use crate::ids::ShardId;

impl Placement {
    /// Returns the bytes on each ps task.
    pub fn task_loads(&self) -> TaskLoads {
        let partitions = self.partitions.iter();
        TaskLoads::new(self.map.tasks(), partitions.map(|placed| (placed.shard.task, placed.bytes)))
    }

    /// Returns the bytes on each ps task, by ascending index.
    pub fn task_bytes(&self) -> Vec<(u32, u64)> {
        self.task_loads().tasks().to_vec()
    }

    /// Returns the bytes on the fullest ps task over the mean of all tasks; see
    /// [`TaskLoads::skew`].
    pub fn skew(&self) -> f64 {
        self.task_loads().skew()
    }

    /// Formats a table of partitions and bytes for each shard, with the skew. Warns if
    /// [`TaskLoads::is_skewed`]; a model that is too small to be cut has no better placement.
    pub fn table(&self) -> String {
        let shards_per_task = self.map.shards_per_task();
        let mut rows = vec![["task", "shard", "partitions", "bytes"].map(str::to_owned)];
        let mut rest = &self.loads()[..];
        for (task, bytes) in self.task_bytes() {
            let (shards, others) = rest.split_at(usize::from(shards_per_task));
            rest = others;
            let partitions: usize = shards.iter().map(|load| load.partitions).sum();
            rows.push(row(task, "all", partitions, bytes));
            // A single shard would only repeat its task.
            for (index, load) in shards.iter().enumerate().filter(|_| shards_per_task > 1) {
                rows.push(row(task, &index.to_string(), load.partitions, load.bytes));
            }
        }
        let mut text = format!("placement by {}\n", self.strategy);
        write_rows(&mut text, &rows);
        // Writing to a String never fails.
        let _ = writeln!(text, "skew {:.2}: the fullest task over the mean", self.skew());
        text + &self.warning().unwrap_or_default()
    }

    /// The skew above which [`Placement::table`] warns.
    pub const SKEW_WARNING: f64 = TaskLoads::SKEW_WARNING;

    fn warning(&self) -> Option<String> {
        let loads = self.task_loads();
        let (task, _) = loads.fullest().filter(|_| loads.is_skewed())?;
        let skew = loads.skew();
        let on_task = self.partitions.iter().filter(|placed| placed.shard.task == task);
        let PlacedPartition { variable, part, bytes, .. } =
            on_task.rev().max_by_key(|placed| placed.bytes)?;
        Some(format!(
            "warning: ps task {task} holds {skew:.2} times the mean; its largest partition is \
             part {part} of variable {variable} with {bytes} bytes: cut it into more parts, or \
             place by balanced\n"
        ))
    }

    /// Returns the load of each shard of the map, in the map's order.
    fn loads(&self) -> Vec<Load> {
        let per_task = usize::from(self.map.shards_per_task());
        let mut loads = vec![Load::default(); self.map.tasks().len() * per_task];
        for placed in &self.partitions {
            let ShardId { task, shard } = placed.shard;
            let index = self.map.position(task).map(|task| task * per_task + usize::from(shard));
            if let Some(load) = index.and_then(|index| loads.get_mut(index)) {
                load.partitions += 1;
                load.bytes += placed.bytes;
            }
        }
        loads
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    partitions: usize,
    bytes: u64,
}

fn row(task: u32, shard: &str, partitions: usize, bytes: u64) -> [String; 4] {
    [task.to_string(), shard.to_owned(), partitions.to_string(), bytes.to_string()]
}

fn write_rows(text: &mut String, rows: &[[String; 4]]) {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), width(3)];
    for row in rows {
        let cells: Vec<_> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        text.push_str(&cells.join("  "));
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PlacementStrategy, ShardMap};
    use super::*;
    use crate::variable::VariableSpec;

    fn plan(sizes: &[u64], shards_per_task: u16, strategy: PlacementStrategy) -> Placement {
        let name = |index: usize| format!("v{index}");
        let variable = |(index, &size): (usize, _)| VariableSpec::f32(name(index), [size]).unwrap();
        let variables: Vec<_> = sizes.iter().enumerate().map(variable).collect();
        Placement::plan(&variables, &ShardMap::new([1, 3], shards_per_task).unwrap(), &strategy)
            .unwrap()
    }

    #[test]
    fn an_uneven_table_warns() {
        let small = plan(&[1000, 10, 300, 10], 1, PlacementStrategy::RoundRobin);
        assert_eq!(small.task_bytes(), [(1, 5200), (3, 80)]);
        assert!(
            small.table().ends_with("\nskew 1.97: the fullest task over the mean\n"),
            "no advice"
        );
        let placement = plan(&[100_000, 10, 30_000, 10], 1, PlacementStrategy::RoundRobin);
        assert_eq!(placement.task_bytes(), [(1, 520_000), (3, 80)]);
        let expected = "\
placement by round_robin
task  shard  partitions   bytes
   1    all           2  520000
   3    all           2      80
skew 2.00: the fullest task over the mean
warning: ps task 1 holds 2.00 times the mean; its largest partition is part 0 of variable 0 with \
400000 bytes: cut it into more parts, or place by balanced
";
        assert_eq!(placement.table(), expected);
    }

    #[test]
    fn an_even_table_lists_shards() {
        let placement = plan(&[30, 10, 20, 30], 2, PlacementStrategy::GreedyBytes);
        let expected = "\
placement by greedy_bytes
task  shard  partitions  bytes
   1    all           2    240
   1      0           1    120
   1      1           1    120
   3    all           2    120
   3      0           1     40
   3      1           1     80
skew 1.33: the fullest task over the mean
";
        assert_eq!(placement.table(), expected);
    }

    #[test]
    fn an_empty_placement_is_even() {
        let placement = plan(&[], 1, PlacementStrategy::HashName);
        assert_eq!(placement.skew(), 1.0);
        assert!(!placement.table().contains("warning"));
    }
}
