//! [`ClusterSize`]: the numbers of tasks of a cluster that has yet to gather.

use super::ClusterError;

/// The numbers of tasks of a cluster whose tasks meet at a rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterSize {
    num_ps: u32,
    num_workers: u32,
}

impl ClusterSize {
    /// The largest number of tasks: as many as a launcher may number.
    pub const TASKS_MAX: u32 = 1024;

    /// Creates a size.
    ///
    /// # Errors
    /// [`ClusterError::Size`] without a ps task, and for more than [`ClusterSize::TASKS_MAX`] tasks.
    pub fn new(num_ps: u32, num_workers: u32) -> Result<ClusterSize, ClusterError> {
        let size = ClusterSize { num_ps, num_workers };
        let tasks =
            num_ps.checked_add(num_workers).filter(|&tasks| tasks <= ClusterSize::TASKS_MAX);
        match tasks.filter(|_| num_ps > 0) {
            Some(_) => Ok(size),
            None => Err(ClusterError::Size { num_ps, num_workers }),
        }
    }

    /// Returns the number of ps tasks.
    pub fn num_ps(self) -> u32 {
        self.num_ps
    }

    /// Returns the number of workers.
    pub fn num_workers(self) -> u32 {
        self.num_workers
    }

    /// Returns the number of all tasks.
    pub fn tasks(self) -> u32 {
        self.num_ps + self.num_workers
    }
}
