//! `DeviceFilters`: which tasks a task may see.

use super::{DeviceError, DeviceSpec};
use crate::ids::TaskId;

/// The devices a task is allowed to see, as partial names; an empty list means all of them.
///
/// A worker that trains between graphs needs `/job:ps` and itself only, so that a lost worker
/// never holds up another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFilters {
    filters: Vec<DeviceSpec>,
}

impl DeviceFilters {
    /// Takes filters that were read before.
    pub fn new(filters: impl Into<Vec<DeviceSpec>>) -> DeviceFilters {
        DeviceFilters { filters: filters.into() }
    }

    /// Reads each filter strictly; one that cannot be read is an error, never ignored.
    pub fn parse<'a>(
        filters: impl IntoIterator<Item = &'a str>,
    ) -> Result<DeviceFilters, DeviceError> {
        let filters = filters.into_iter().map(DeviceSpec::parse_strict);
        Ok(DeviceFilters { filters: filters.collect::<Result<_, _>>()? })
    }

    /// The filters, in the order given.
    pub fn filters(&self) -> &[DeviceSpec] {
        &self.filters
    }

    /// Whether the task `local` sees the task `other`: it intersects some filter, or there is no
    /// filter, or it is the task itself.
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
    fn no_filter_hides_nothing_and_none_hides_oneself() {
        let (me, other) = (TaskId::worker(0), TaskId::worker(1));
        assert!(DeviceFilters::default().sees(&me, &other));
        let filters = DeviceFilters::parse(["/job:ps"]).unwrap();
        assert!(filters.sees(&me, &me) && !filters.sees(&me, &other));
        assert!(DeviceFilters::parse(["/job:ps", "worker"]).is_err());
    }
}
