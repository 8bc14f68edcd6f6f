//! Device filters: which tasks of a cluster a client or a server uses.

use super::{DeviceError, DeviceSpec};
use crate::ids::TaskId;

/// The tasks that a client or a server uses: those that a partial device name matches. Without a
/// name, all tasks.
///
/// ```
/// use pushpull_common::device::DeviceFilters;
/// use pushpull_common::ids::TaskId;
///
/// let filters = DeviceFilters::new(["/job:ps", "/job:worker/task:0"])?;
/// assert!(filters.allow(&TaskId::ps(3)));
/// assert!(!filters.allow(&TaskId::worker(1)));
/// # Ok::<(), pushpull_common::device::DeviceError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[doc(alias = "device_filters")]
pub struct DeviceFilters(Vec<DeviceSpec>);

impl DeviceFilters {
    /// Filters of these names.
    ///
    /// # Errors
    /// [`DeviceError`] for the first that is no device name.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<DeviceFilters, DeviceError> {
        let names: Result<Vec<DeviceSpec>, _> = names.into_iter().map(str::parse).collect();
        Ok(DeviceFilters(names?))
    }

    /// Adds a task to those that are allowed. Without a name all tasks are.
    pub fn and_task(mut self, task: &TaskId) -> DeviceFilters {
        if !self.allow(task) {
            self.0.push(DeviceSpec::of_task(task));
        }
        self
    }

    /// Whether a name matches a device of the task. Fields that a name leaves open match
    /// everything. A task has one replica, 0.
    pub fn allow(&self, task: &TaskId) -> bool {
        let devices = DeviceSpec::of_task(task);
        let matches = |name: &DeviceSpec| {
            name.intersects(&devices) && name.replica().is_none_or(|replica| replica == 0)
        };
        self.0.is_empty() || self.0.iter().any(matches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_allowed_if_a_name_matches_a_device_of_it() {
        let table: [(&[&str], &str); 8] = [
            (&[], "ps 0, ps 1, worker 0, worker 1"),
            (&["/job:ps"], "ps 0, ps 1"),
            (&["/job:ps", "/job:worker/task:1"], "ps 0, ps 1, worker 1"),
            (&["/task:0"], "ps 0, worker 0"),
            (&["/job:worker/replica:0/task:1/gpu:0"], "worker 1"),
            (&["/cpu:0"], "ps 0, ps 1, worker 0, worker 1"),
            (&["/job:evaluator"], ""),
            (&["/job:worker/replica:1"], ""),
        ];
        let tasks = [TaskId::ps(0), TaskId::ps(1), TaskId::worker(0), TaskId::worker(1)];
        for (names, expected) in table {
            let filters = DeviceFilters::new(names.iter().copied()).unwrap();
            let allowed = tasks.iter().filter(|task| filters.allow(task));
            let allowed: Vec<_> = allowed.map(|t| format!("{} {}", t.job, t.index)).collect();
            assert_eq!(allowed.join(", "), expected, "{names:?}");
        }
        let own = DeviceFilters::new(["/job:ps"]).unwrap().and_task(&TaskId::worker(1));
        assert!(own.allow(&TaskId::worker(1)) && !own.allow(&TaskId::worker(0)));
        let all = DeviceFilters::default().and_task(&TaskId::worker(1));
        assert!(all.allow(&TaskId::worker(0)), "no filter is not one for this task");
        assert!(DeviceFilters::new(["/job:ps", "/jab:ps"]).is_err());
    }
}
