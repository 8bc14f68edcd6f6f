//! [`TaskLoads`]: the bytes on each ps task, and how uneven they are.

/// The bytes of variables on each ps task, as stored, without optimizer slots. A slot has as many
/// bytes as its variable, so slots change no ratio if all variables have the same optimizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskLoads {
    tasks: Vec<(u32, u64)>,
}

impl TaskLoads {
    /// The skew above which a placement is reported.
    pub const SKEW_WARNING: f64 = 1.5;

    /// The bytes of the fullest task above the mean from which a placement is reported: two of the
    /// smallest parts that [`PlacementStrategy::Balanced`] makes. A model below them stays whole.
    ///
    /// [`PlacementStrategy::Balanced`]: super::PlacementStrategy::Balanced
    pub const EXCESS_WARNING: u64 = 128 << 10;

    /// Adds up the bytes of partitions by task. `tasks` are the indices of all ps tasks, ascending;
    /// partitions on others are left out.
    pub fn new(tasks: &[u32], partitions: impl IntoIterator<Item = (u32, u64)>) -> TaskLoads {
        let mut loads: Vec<(u32, u64)> = tasks.iter().map(|&task| (task, 0)).collect();
        for (task, bytes) in partitions {
            if let Ok(position) = loads.binary_search_by_key(&task, |&(task, _)| task) {
                loads[position].1 = loads[position].1.saturating_add(bytes);
            }
        }
        TaskLoads { tasks: loads }
    }

    /// Returns the bytes on each task, by ascending index.
    pub fn tasks(&self) -> &[(u32, u64)] {
        &self.tasks
    }

    /// Returns the task with the most bytes, the lowest index on ties, and its bytes.
    pub fn fullest(&self) -> Option<(u32, u64)> {
        self.tasks.iter().copied().rev().max_by_key(|&(_, bytes)| bytes)
    }

    /// Returns the mean of all tasks, rounded down; 0 if there are none.
    pub fn mean(&self) -> u64 {
        let sum: u128 = self.tasks.iter().map(|&(_, bytes)| u128::from(bytes)).sum();
        // Fits: a mean is at most the maximum.
        sum.checked_div(self.tasks.len() as u128).unwrap_or(0) as u64
    }

    /// Returns the bytes on the fullest task over the mean of all tasks.
    ///
    /// 1 is even; the number of tasks means that one task holds everything. 1 if there are no
    /// bytes.
    pub fn skew(&self) -> f64 {
        let sum: u128 = self.tasks.iter().map(|&(_, bytes)| u128::from(bytes)).sum();
        match self.fullest() {
            Some((_, most)) if sum > 0 => most as f64 * self.tasks.len() as f64 / sum as f64,
            _ => 1.0,
        }
    }

    /// Returns whether the operator should know: the skew is above [`TaskLoads::SKEW_WARNING`], and
    /// the fullest task at least [`TaskLoads::EXCESS_WARNING`] above the mean.
    pub fn is_skewed(&self) -> bool {
        let excess = self.fullest().map_or(0, |(_, most)| most - self.mean());
        excess >= TaskLoads::EXCESS_WARNING && self.skew() > TaskLoads::SKEW_WARNING
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_skew_is_the_fullest_task_over_the_mean() {
        let loads = |partitions: &[(u32, u64)]| TaskLoads::new(&[1, 3], partitions.iter().copied());
        let uneven = loads(&[(1, 300), (3, 80), (1, 20), (2, 1000)]);
        assert_eq!(uneven.tasks(), [(1, 320), (3, 80)]);
        assert_eq!((uneven.fullest(), uneven.mean(), uneven.skew()), (Some((1, 320)), 200, 1.6));
        assert_eq!(loads(&[(1, 5), (3, 5)]).fullest(), Some((1, 5)));
        let huge = loads(&[(1, u64::MAX), (1, 1), (3, u64::MAX)]);
        assert_eq!((huge.mean(), huge.skew()), (u64::MAX, 1.0));
        for none in [loads(&[]), TaskLoads::new(&[], [(0, 1)])] {
            assert_eq!((none.mean(), none.skew(), none.is_skewed()), (0, 1.0, false));
        }
    }

    #[test]
    fn small_and_even_loads_are_not_reported() {
        let on_two = |left, right| TaskLoads::new(&[0, 1], [(0, left), (1, right)]).is_skewed();
        let excess = TaskLoads::EXCESS_WARNING;
        assert!(on_two(2 * excess, 0) && on_two(0, 2 * excess) && on_two(8 * excess, excess));
        assert!(!on_two(2 * excess - 2, 0), "too small");
        assert!(!on_two(30 * excess, 10 * excess), "a skew of 1.5");
    }
}
