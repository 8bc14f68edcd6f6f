//! [`DeviceSetter`]: assigns a device to each operation, as TensorFlow's replica device setter
//! does.

use super::picker::{Picker, name_hashes};
use super::{PlacementError, PlacementStrategy};
use crate::cluster::ClusterSpec;
use crate::device::DeviceSpec;
use crate::ids::TaskId;

/// Assigns variables to ps tasks and everything else to a worker, as `replica_device_setter` does.
///
/// It merges by TensorFlow's rule ([`DeviceSpec::merge_tf`]). Each variable of the ps job draws
/// once from the strategy, in order of creation, even if it already names its task. Unlike
/// TensorFlow, it uses the cluster's task indices: a sparse job {1, 3} gets 1, 3, 1, 3, never an
/// absent task 0.
#[derive(Clone, Debug)]
#[doc(alias = "replica_device_setter")]
pub struct DeviceSetter {
    tasks: Vec<u32>,
    ps_device: DeviceSpec,
    worker_device: DeviceSpec,
    merge_devices: bool,
    picker: Picker,
}

impl DeviceSetter {
    /// Creates a setter for these ps tasks in drawing order; `None` if there are none.
    ///
    /// Defaults: `/job:ps`, `/job:worker`, merging, round robin.
    pub fn new(tasks: impl Into<Vec<u32>>) -> Option<DeviceSetter> {
        let tasks = tasks.into();
        (!tasks.is_empty()).then(|| DeviceSetter {
            picker: Picker::new(PlacementStrategy::RoundRobin, tasks.len()),
            tasks,
            ps_device: DeviceSpec::of_job(TaskId::PS_JOB),
            worker_device: DeviceSpec::of_job("worker"),
            merge_devices: true,
        })
    }

    /// Creates a setter for the tasks of the job that `ps_device` names; if it names none, for
    /// those of the job that holds the variables ([`ClusterSpec::variables_job`]). Returns `None`
    /// if the job is unknown or has no tasks.
    pub fn of_cluster(cluster: &ClusterSpec, ps_device: DeviceSpec) -> Option<DeviceSetter> {
        let job = ps_device.job().or(cluster.variables_job().ok())?;
        let tasks = cluster.task_indices(job).ok()?;
        let ps_device = DeviceSpec::of_job(job).merge_tf(&ps_device);
        DeviceSetter::new(tasks).map(|setter| setter.ps_device(ps_device))
    }

    /// Sets the device of variables; the task is added. Without a job, no task is drawn.
    pub fn ps_device(mut self, device: DeviceSpec) -> DeviceSetter {
        self.ps_device = device;
        self
    }

    /// Sets the device of operations that are not variables.
    pub fn worker_device(mut self, device: DeviceSpec) -> DeviceSetter {
        self.worker_device = device;
        self
    }

    /// Sets whether a device that is already set is completed (the default) or kept as it is.
    pub fn merge_devices(mut self, merge: bool) -> DeviceSetter {
        self.merge_devices = merge;
        self
    }

    /// Sets the strategy and restarts it. Rejects a custom one, which needs a whole variable: use
    /// [`super::Placement::plan`].
    pub fn strategy(mut self, strategy: PlacementStrategy) -> Result<DeviceSetter, PlacementError> {
        if let PlacementStrategy::Custom(_) = strategy {
            return Err(PlacementError::CustomSetter);
        }
        self.picker = Picker::new(strategy, self.tasks.len());
        Ok(self)
    }

    /// Returns the device of a variable of this name and size, with the inner scope `current`.
    pub fn variable(&mut self, name: &str, bytes: u64, current: &DeviceSpec) -> DeviceSpec {
        if !self.merge_devices && !current.is_empty() {
            return current.clone();
        }
        let drawn = match (self.ps_device.job(), current.job()) {
            (Some(job), current_job) if current_job.is_none_or(|current| current == job) => {
                let position = self.picker.draw(name_hashes(name, 0).0);
                self.picker.add(position, bytes);
                self.ps_device.with_task(self.tasks[position])
            }
            _ => self.ps_device.clone(),
        };
        drawn.merge_tf(current)
    }

    /// Returns the device of an operation that is not a variable, with the inner scope `current`.
    pub fn operation(&self, current: &DeviceSpec) -> DeviceSpec {
        if !self.merge_devices && !current.is_empty() {
            return current.clone();
        }
        self.worker_device.merge_tf(current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(text: &str) -> DeviceSpec {
        text.parse().unwrap()
    }

    #[test]
    fn without_a_ps_task_there_is_no_setter() {
        let cluster: ClusterSpec = "ps=;worker=a:1".parse().unwrap();
        assert!(DeviceSetter::new([]).is_none());
        for ps_device in ["/job:ps", "/job:other", "/task:0"] {
            assert!(DeviceSetter::of_cluster(&cluster, device(ps_device)).is_none());
        }
        assert!(DeviceSetter::of_cluster(&cluster, device("/job:worker")).is_some());
    }

    #[test]
    fn a_setter_of_a_cluster_draws_from_the_job_that_holds_the_variables() {
        let table = [
            ("ps=a:1,b:1", "", ["/job:ps/task:0", "/job:ps/task:1"]),
            ("local=1@a:1,3@b:1", "", ["/job:local/task:1", "/job:local/task:3"]),
            ("local=a:1;worker=b:1", "/cpu:0", ["/job:local/task:0/cpu:0"; 2]),
            ("cache=a:1;local=b:1", "/job:cache", ["/job:cache/task:0"; 2]),
        ];
        for (cluster, ps_device, expected) in table {
            let setter = DeviceSetter::of_cluster(&cluster.parse().unwrap(), device(ps_device));
            let mut setter = setter.unwrap();
            let drawn = [(); 2].map(|()| setter.variable("v", 4, &device("")));
            assert_eq!(drawn, expected.map(device), "{cluster} {ps_device}");
        }
        let several = "cache=a:1;local=b:1".parse().unwrap();
        assert!(DeviceSetter::of_cluster(&several, device("")).is_none());
    }

    #[test]
    fn a_ps_device_without_a_job_draws_nothing() {
        let mut setter = DeviceSetter::new([0, 1]).unwrap().ps_device(device("/cpu:0"));
        assert_eq!(setter.variable("v", 4, &device("")), device("/cpu:0"));
        assert_eq!(setter.variable("v", 4, &device("/task:3")), device("/task:3/cpu:0"));
    }

    #[test]
    fn hashed_names_do_not_depend_on_order() {
        let setter =
            || DeviceSetter::new([0, 1, 2]).unwrap().strategy(PlacementStrategy::HashName).unwrap();
        let place = |names: &[&str]| {
            let mut setter = setter();
            let mut placed: Vec<_> = names
                .iter()
                .map(|name| (name.to_string(), setter.variable(name, 4, &device(""))))
                .collect();
            placed.sort();
            placed
        };
        assert_eq!(place(&["a", "b", "c", "d"]), place(&["d", "b", "a", "c"]));
        let custom = PlacementStrategy::custom(|_, _, tasks| tasks[0]);
        assert_eq!(setter().strategy(custom).unwrap_err(), PlacementError::CustomSetter);
    }

    #[test]
    fn operations_go_to_the_worker() {
        let setter = DeviceSetter::new([0]).unwrap().worker_device(device("/job:worker/task:1"));
        assert_eq!(setter.operation(&device("/gpu:1")), device("/job:worker/task:1/gpu:1"));
        assert_eq!(setter.merge_devices(false).operation(&device("/gpu:1")), device("/gpu:1"));
    }
}
