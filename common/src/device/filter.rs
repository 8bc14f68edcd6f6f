//! [`DeviceFilters`]: the tasks that a task may see.

use super::{DeviceError, DeviceSpec};
use crate::ids::TaskId;

/// The devices that a task may see, as partial names; an empty list means all devices.
///
/// A worker of between-graph replication needs only `/job:ps` and itself, so a lost worker never
/// delays another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFilters {
    filters: Vec<DeviceSpec>,
}

impl DeviceFilters {
    /// Creates filters from parsed names.
    pub fn new(filters: impl Into<Vec<DeviceSpec>>) -> DeviceFilters {
        DeviceFilters { filters: filters.into() }
    }

    /// Parses each filter strictly; a malformed filter is an error, never ignored.
    pub fn parse<'a>(
        filters: impl IntoIterator<Item = &'a str>,
    ) -> Result<DeviceFilters, DeviceError> {
        let filters = filters.into_iter().map(DeviceSpec::parse_strict);
        Ok(DeviceFilters { filters: filters.collect::<Result<_, _>>()? })
    }

    /// Returns the filters in the order given.
    pub fn filters(&self) -> &[DeviceSpec] {
        &self.filters
    }

    /// Returns whether the task `local` sees the task `other`. It does if there is no filter, if
    /// `other` intersects a filter, or if both are the same task.
    pub fn sees(&self, local: &TaskId, other: &TaskId) -> bool {
        let device = DeviceSpec::of_task(other);
        self.filters.is_empty()
            || local == other
            || self.filters.iter().any(|filter| filter.intersects(&device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_sees_the_ps_tasks_and_itself() {
        let filters = DeviceFilters::parse(["/job:ps", "/job:worker/task:1"]).unwrap();
        let me = TaskId::worker(1);
        assert!(filters.sees(&me, &TaskId::ps(0)) && filters.sees(&me, &TaskId::ps(7)));
        assert!(filters.sees(&me, &me));
        assert!(!filters.sees(&me, &TaskId::worker(0)));
        assert!(!filters.sees(&me, &TaskId::new("chief", 0)));
    }

    #[test]
    fn filters_never_hide_the_task_itself() {
        let (me, other) = (TaskId::worker(0), TaskId::worker(1));
        assert!(DeviceFilters::default().sees(&me, &other));
        let filters = DeviceFilters::parse(["/job:ps"]).unwrap();
        assert!(filters.sees(&me, &me) && !filters.sees(&me, &other));
        assert!(DeviceFilters::parse(["/job:ps", "worker"]).is_err());
    }
}
