//! [`TaskDevice`]: the devices of a task, and their choice by the name in a call.

use pushpull_common::device::DeviceSpec;
use pushpull_common::ids::TaskId;

/// A device of a server, usable or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TaskDevice {
    /// The full name of the device, such as `/job:worker/task:0/device:CPU:0`.
    pub(crate) name: DeviceSpec,
    /// The reason why the device cannot be used; `None` if it can.
    pub(crate) unusable: Option<String>,
}

impl TaskDevice {
    /// Creates a device of a task by its type and index.
    pub(crate) fn new(task: &TaskId, device_type: &str, index: u32) -> TaskDevice {
        let within: DeviceSpec = format!("/device:{device_type}:{index}")
            .parse()
            .expect("a type and an index are a device name");
        TaskDevice { name: DeviceSpec::of_task(task).merge(&within), unusable: None }
    }
}

/// Returns the index of the first device that has this name, or the reason why there is none. With
/// `or_any` a task that lacks such a device offers its first one.
pub(crate) fn find_device(
    name: &str,
    or_any: bool,
    task: &TaskId,
    devices: &[TaskDevice],
) -> Result<usize, String> {
    let wanted: DeviceSpec = name.parse().map_err(|error| format!("{error}"))?;
    let own = DeviceSpec::of_task(task);
    // A full name of the TensorFlow runtime has a replica, which is always 0.
    if wanted.replica().is_some_and(|replica| replica != 0) {
        return Err("a task has one replica, 0".to_owned());
    }
    let within = |outer: &DeviceSpec| {
        let job = wanted.job().is_none_or(|job| outer.job() == Some(job));
        job && wanted.task().is_none_or(|task| outer.task() == Some(task))
    };
    if !within(&own) {
        return Err(format!("this server is {own}"));
    }
    let device_type = wanted.device_type();
    let suits = |device: &&TaskDevice| {
        let same_type = device_type.is_none_or(|t| device.name.device_type() == Some(t));
        let index = wanted.device_index();
        same_type && index.is_none_or(|index| device.name.device_index() == Some(index))
    };
    let is_usable = |device: &TaskDevice| device.unusable.is_none();
    let found = devices.iter().position(|device| suits(&device) && is_usable(device));
    let any = || devices.iter().position(is_usable).filter(|_| or_any);
    found.or_else(any).ok_or_else(|| match devices.iter().find(suits) {
        Some(TaskDevice { unusable: Some(reason), .. }) => reason.clone(),
        _ => {
            let usable = devices.iter().filter(|device| is_usable(device));
            let names: Vec<_> = usable.map(|device| device.name.to_string()).collect();
            format!("this server has {}", names.join(", "))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_runs_on_the_first_device_of_its_name() {
        let task = TaskId::worker(1);
        let mut gpu = TaskDevice::new(&task, "GPU", 0);
        gpu.unusable = Some("no driver".to_owned());
        let devices = [TaskDevice::new(&task, "CPU", 0), gpu];
        let table: [(&str, Result<usize, &str>); 9] = [
            ("", Ok(0)),
            ("/cpu:0", Ok(0)),
            ("/job:worker/task:1", Ok(0)),
            ("/job:worker/replica:0/task:1/device:CPU:*", Ok(0)),
            ("/gpu:0", Err("no driver")),
            ("/cpu:1", Err("this server has /job:worker/task:1/device:CPU:0")),
            ("/job:ps/task:1", Err("this server is /job:worker/task:1")),
            ("/task:2/cpu:0", Err("this server is /job:worker/task:1")),
            ("/replica:1", Err("a task has one replica, 0")),
        ];
        for (name, expected) in table {
            let found = find_device(name, false, &task, &devices);
            assert_eq!(found, expected.map_err(str::to_owned), "{name}");
            let is_elsewhere = ["/job:ps/task:1", "/task:2/cpu:0", "/replica:1"].contains(&name);
            let any = find_device(name, true, &task, &devices);
            assert_eq!(any.ok(), (!is_elsewhere).then_some(0), "{name}, or any device");
        }
        for or_any in [false, true] {
            assert!(find_device("/task:x", or_any, &task, &devices).is_err());
        }
        let no_use = &devices[1..];
        assert_eq!(find_device("/cpu:0", true, &task, no_use), Err("this server has ".to_owned()));
    }
}
