//! The processor's model and the memory that this process may use.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the model of the processor; empty if the system does not tell.
pub(crate) fn model(root: &Path) -> String {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let model = text.lines().find_map(|line| value_of(line, "model name"));
    model.unwrap_or_default().to_owned()
}

/// Returns the bytes of memory that this process may use: the memory of the machine, or less by the
/// limits of its control groups. `None` if the system does not tell.
pub(crate) fn memory_bytes(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let kibibytes = text.lines().find_map(|line| value_of(line, "MemTotal"));
    let total = kibibytes.and_then(|value| value.trim_end_matches("kB").trim().parse::<u64>().ok());
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().filter_map(limit_file).flat_map(|(mount, group, file)| {
        let mount = root.join("sys/fs/cgroup").join(mount);
        // A group is limited by those above it. Inside of a container its path may not be visible,
        // and the mount is its own group.
        let group = PathBuf::from(group.trim_start_matches('/'));
        let above: Vec<PathBuf> = group.ancestors().map(|group| mount.join(group)).collect();
        above.into_iter().filter_map(move |group| {
            fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok()
        })
    });
    total.map(|kibibytes| kibibytes.saturating_mul(1024)).into_iter().chain(limits).min()
}

/// Returns the mount, the group and the file of a limit of memory, from a line of
/// `/proc/self/cgroup`.
fn limit_file(line: &str) -> Option<(&'static str, &str, &'static str)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, group) = rest.split_once(':')?;
    match controllers {
        "" => Some(("", group, "memory.max")),
        _ if controllers.split(',').any(|name| name == "memory") => {
            Some(("memory", group, "memory.limit_in_bytes"))
        }
        _ => None,
    }
}

/// Returns the value of a line `key : value`.
fn value_of<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (found, value) = line.split_once(':')?;
    (found.trim() == key).then(|| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemFree: 7 kB\nMemTotal:    4096 kB\n");

    /// Creates files with these contents below a directory.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn memory_is_the_least_of_the_machine_and_the_limits_above_the_group() {
        let second = ("proc/self/cgroup", "0::/a/b\n");
        let first = ("proc/self/cgroup", "5:cpu:/\n4:memory,other:/a/b\n0::/\n");
        let limited =
            |group, path, text| memory_bytes(root(&[MEMINFO, group, (path, text)]).path());
        assert_eq!(memory_bytes(root(&[]).path()), None);
        assert_eq!(memory_bytes(root(&[MEMINFO]).path()), Some(4 << 20));
        let cases = [
            (second, "sys/fs/cgroup/a/b/memory.max", "max\n", 4 << 20),
            (second, "sys/fs/cgroup/a/b/memory.max", "1000\n", 1000),
            // A group above, the mount in a container, more than there is, another group.
            (second, "sys/fs/cgroup/a/memory.max", "900\n", 900),
            (second, "sys/fs/cgroup/memory.max", "800\n", 800),
            (second, "sys/fs/cgroup/memory.max", "9000000\n", 4 << 20),
            (second, "sys/fs/cgroup/c/memory.max", "1\n", 4 << 20),
            (first, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "700\n", 700),
        ];
        for (group, path, text, expected) in cases {
            assert_eq!(limited(group, path, text), Some(expected), "{path}: {text}");
        }
    }

    #[test]
    fn the_model_is_that_of_the_first_processor() {
        let files = [("proc/cpuinfo", "processor\t: 0\nmodel name\t: A: 1\nmodel name\t: B\n")];
        assert_eq!(model(root(&files).path()), "A: 1");
        assert_eq!(model(root(&[]).path()), "");
    }
}
