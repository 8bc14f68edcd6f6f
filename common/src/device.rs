//! [`DeviceSpec`]: names a device or a set of devices, as in `/job:ps/task:0/device:CPU:0`.

mod filters;
mod parse;

pub use filters::DeviceFilters;
pub use parse::DeviceError;

use std::fmt;
use std::sync::Arc;

use crate::ids::TaskId;

/// The partial name of a device: up to five fields, each of which may be open.
///
/// An index is never present without a type. The default has all fields open and is the empty text.
///
/// ```
/// use pushpull_common::device::DeviceSpec;
/// let device: DeviceSpec = "/task:0/cpu:0/job:ps".parse()?;
/// assert_eq!(device.to_string(), "/job:ps/task:0/device:CPU:0");
/// # Ok::<(), pushpull_common::device::DeviceError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[doc(alias = "tf.device")]
#[doc(alias = "tf.DeviceSpec")]
pub struct DeviceSpec {
    job: Option<Arc<str>>,
    replica: Option<u32>,
    task: Option<u32>,
    device_type: Option<Arc<str>>,
    device_index: Option<u32>,
}

impl DeviceSpec {
    /// The longest text in bytes.
    pub const TEXT_BYTES_MAX: usize = 1024;

    /// Returns the name of all devices of one task.
    pub fn of_task(task: &TaskId) -> DeviceSpec {
        DeviceSpec::of_job(&task.job).with_task(task.index)
    }

    /// Returns the name of all devices of one job.
    pub fn of_job(job: &str) -> DeviceSpec {
        DeviceSpec { job: Some(job.into()), ..DeviceSpec::default() }
    }

    /// Returns the job's name.
    pub fn job(&self) -> Option<&str> {
        self.job.as_deref()
    }

    /// Returns the replica's index, 0 in a fully qualified name of the TensorFlow runtime.
    pub fn replica(&self) -> Option<u32> {
        self.replica
    }

    /// Returns the task's index.
    pub fn task(&self) -> Option<u32> {
        self.task
    }

    /// Returns the device type, such as `CPU`.
    pub fn device_type(&self) -> Option<&str> {
        self.device_type.as_deref()
    }

    /// Returns the device's index among devices of its type; `None` with a type means any index.
    pub fn device_index(&self) -> Option<u32> {
        self.device_index
    }

    /// Returns whether every field is open.
    pub fn is_empty(&self) -> bool {
        *self == DeviceSpec::default()
    }

    /// Returns this name with another task.
    pub fn with_task(&self, task: u32) -> DeviceSpec {
        DeviceSpec { task: Some(task), ..self.clone() }
    }

    /// Merges an inner scope into this one: the inner fields win where they are set.
    ///
    /// Type and index belong together: an inner type brings its own index, even an open one. So
    /// `/cpu:*` within `/gpu:3` is any CPU. The rule of TensorFlow is [`DeviceSpec::merge_tf`].
    pub fn merge(&self, inner: &DeviceSpec) -> DeviceSpec {
        let device_index = match inner.device_type {
            Some(_) => inner.device_index,
            None => self.device_index,
        };
        DeviceSpec { device_index, ..self.merge_tf(inner) }
    }

    /// Merges each field on its own, as TensorFlow does: `/cpu:*` within `/gpu:3` is `CPU:3`.
    pub fn merge_tf(&self, inner: &DeviceSpec) -> DeviceSpec {
        DeviceSpec {
            job: inner.job.clone().or_else(|| self.job.clone()),
            replica: inner.replica.or(self.replica),
            task: inner.task.or(self.task),
            device_type: inner.device_type.clone().or_else(|| self.device_type.clone()),
            device_index: inner.device_index.or(self.device_index),
        }
    }

    /// Returns whether some device could match both names: no field is set to different values.
    pub fn intersects(&self, other: &DeviceSpec) -> bool {
        agree(&self.job, &other.job)
            && agree(&self.replica, &other.replica)
            && agree(&self.task, &other.task)
            && agree(&self.device_type, &other.device_type)
            && agree(&self.device_index, &other.device_index)
    }
}

/// Writes the canonical text: fields in a fixed order, open fields omitted, `*` for the index of a
/// type without one.
impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(replica) = self.replica {
            write!(f, "/replica:{replica}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        match (&self.device_type, self.device_index) {
            (Some(device_type), Some(index)) => write!(f, "/device:{device_type}:{index}"),
            (Some(device_type), None) => write!(f, "/device:{device_type}:*"),
            (None, _) => Ok(()),
        }
    }
}

fn agree<T: PartialEq>(one: &Option<T>, other: &Option<T>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(text: &str) -> DeviceSpec {
        text.parse().unwrap()
    }

    #[test]
    fn an_inner_type_brings_its_own_index() {
        let table = [
            ("/job:ps/task:0", "/job:ps/cpu:0", "/job:ps/task:0/device:CPU:0"),
            ("/job:worker/task:1/gpu:0", "/cpu:*", "/job:worker/task:1/device:CPU:*"),
            ("/gpu:0", "/task:2", "/task:2/device:GPU:0"),
            ("/job:a", "/job:b", "/job:b"),
            ("/job:a/replica:1", "", "/job:a/replica:1"),
        ];
        for (outer, inner, expected) in table {
            assert_eq!(device(outer).merge(&device(inner)).to_string(), expected);
        }
        let classic = device("/gpu:3").merge_tf(&device("/cpu:*"));
        assert_eq!(classic.to_string(), "/device:CPU:3");
    }

    #[test]
    fn open_fields_match_anything() {
        assert!(device("").intersects(&device("/job:ps/task:0")));
        assert!(device("/job:ps").intersects(&device("/task:3")));
        assert!(device("/job:ps/cpu:0").intersects(&device("/job:ps/cpu:*")));
        assert!(!device("/job:ps").intersects(&device("/job:worker")));
        assert!(!device("/task:1").intersects(&device("/job:ps/task:2")));
        assert!(!device("/cpu:0").intersects(&device("/gpu:0")));
        assert!(!device("/cpu:0").intersects(&device("/cpu:1")));
    }

    #[test]
    fn a_task_has_a_device_name() {
        let ps = DeviceSpec::of_task(&TaskId::ps(2));
        assert_eq!(ps.to_string(), TaskId::ps(2).to_string());
        assert_eq!((ps.job(), ps.task(), ps.replica()), (Some("ps"), Some(2), None));
        assert_eq!(ps.with_task(3), device("/job:ps/task:3"));
        assert!(DeviceSpec::default().is_empty() && !ps.is_empty());
    }
}
