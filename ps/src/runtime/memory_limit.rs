//! The memory limit of the control group of this process, such as that of its container.

use std::fs;
use std::path::{Path, PathBuf};

use crate::config::Storage;

impl Storage {
    /// The limit of all shards of the task together, in bytes: [`Storage::bytes_max`] or its
    /// default.
    pub fn limit(&self) -> u64 {
        self.bytes_max.unwrap_or_else(|| default_bytes_max(Path::new("/")))
    }

    /// Returns the memory limit of the control groups of this process in bytes, if it is lower than
    /// [`Storage::bytes_max`]. The system may kill a process that reaches its limit.
    pub fn lower_limit(&self) -> Option<u64> {
        self.lower_limit_at(Path::new("/"))
    }

    /// Implements [`Storage::lower_limit`] with a file system at `root`.
    fn lower_limit_at(&self, root: &Path) -> Option<u64> {
        let bytes = self.bytes_max?;
        memory_limit(root).filter(|&limit| limit < bytes)
    }
}

/// Returns the default of `bytes_max`, with a file system at `root`: [`Storage::BYTES_MAX`], but at
/// most three quarters of the memory limit of this process. The rest is for threads, connections,
/// checkpoints and functions.
fn default_bytes_max(root: &Path) -> u64 {
    let limit = memory_limit(root);
    limit.map_or(Storage::BYTES_MAX, |limit| (limit / 4 * 3).min(Storage::BYTES_MAX))
}

/// A limit from this size on is none: version 1 has the largest multiple of a page for no limit.
const NO_LIMIT: u64 = 1 << 60;

/// Returns the lowest memory limit of the control groups, version 1 or 2, that this process is in,
/// with a file system at `root`. `None` if there is none, or if the system has no control groups.
fn memory_limit(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(under(root, path)).unwrap_or_default();
    let groups = read("/proc/self/cgroup");
    let mounts = read("/proc/self/mountinfo");
    let hierarchies = groups.lines().filter_map(|line| Hierarchy::of(line, &mounts));
    hierarchies.filter_map(|hierarchy| hierarchy.limit(root)).min()
}

/// Returns a path of the file system at `root`.
fn under(root: &Path, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A hierarchy of control groups that limits memory, as this process sees it.
#[derive(Debug)]
struct Hierarchy {
    mount: PathBuf,
    /// The folder of the control group of this process, at or below the mount.
    group: PathBuf,
    /// The file of a control group that holds its limit.
    file: &'static str,
}

impl Hierarchy {
    /// Returns the hierarchy of a line of `/proc/self/cgroup`, which has the number of the
    /// hierarchy, its controllers and the path of the group. Version 2 has no controllers there.
    fn of(line: &str, mounts: &str) -> Option<Hierarchy> {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_second = controllers.is_empty();
        if !is_second && !controllers.split(',').any(|controller| controller == "memory") {
            return None;
        }
        let mut found = mounts.lines().filter_map(|mount| mount_of(mount, is_second));
        let (mounted, mount) = found.next()?;
        // In a container the mount may show the group of this process as its root.
        let below = Path::new(path).strip_prefix(mounted).unwrap_or(Path::new(""));
        let group = mount.join(below);
        let file = if is_second { "memory.max" } else { "memory.limit_in_bytes" };
        Some(Hierarchy { mount, group, file })
    }

    /// Returns the lowest limit of the group and of those above it.
    fn limit(&self, root: &Path) -> Option<u64> {
        let groups = self.group.ancestors().take_while(|group| group.starts_with(&self.mount));
        let limits = groups.filter_map(|group| {
            let text = fs::read_to_string(under(root, group.join(self.file))).ok()?;
            text.trim().parse::<u64>().ok().filter(|&limit| limit < NO_LIMIT)
        });
        limits.min()
    }
}

/// Returns what a line of `/proc/self/mountinfo` mounts of a hierarchy that limits memory, and
/// where.
fn mount_of(line: &str, is_second: bool) -> Option<(&str, PathBuf)> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut mount = mount.split(' ').skip(3);
    let mounted = mount.next()?;
    let at = mount.next()?;
    let mut file_system = file_system.split(' ');
    let kind = file_system.next()?;
    let options = file_system.nth(1).unwrap_or_default();
    let is_wanted = match is_second {
        true => kind == "cgroup2",
        false => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
    };
    is_wanted.then(|| (mounted, PathBuf::from(at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the root of a file system with these files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = under(root.path(), path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    /// Returns the limit on a system with these files.
    fn limit(files: &[(&str, &str)]) -> Option<u64> {
        memory_limit(system(files).path())
    }

    const CGROUP: &str = "/proc/self/cgroup";
    const MOUNTS: &str = "/proc/self/mountinfo";
    const SECOND: &str = "30 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const FIRST: &str = "24 1 0:20 / /proc rw - proc proc rw\n\
                         33 32 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                         34 32 0:30 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";

    #[test]
    fn the_lowest_limit_on_the_way_to_the_root_counts() {
        let group = "/sys/fs/cgroup/system.slice/ps.service/memory.max";
        let above = "/sys/fs/cgroup/system.slice/memory.max";
        let line = "0::/system.slice/ps.service\n";
        let of = |own: &str, parent: &str| {
            limit(&[(CGROUP, line), (MOUNTS, SECOND), (group, own), (above, parent)])
        };
        assert_eq!(of("536870912\n", "max\n"), Some(512 << 20));
        assert_eq!(of("max\n", "1073741824\n"), Some(1 << 30));
        assert_eq!(of("536870912\n", "1073741824\n"), Some(512 << 20));
        assert_eq!(of("max\n", "max\n"), None);
    }

    #[test]
    fn the_default_leaves_a_quarter_of_the_limit_to_others() {
        let of = |limit_text: &str| {
            let limit_file = ("/sys/fs/cgroup/memory.max", limit_text);
            default_bytes_max(system(&[(CGROUP, "0::/\n"), (MOUNTS, SECOND), limit_file]).path())
        };
        assert_eq!(of("1073741824\n"), 768 << 20);
        assert_eq!(of("21474836480\n"), 15 << 30);
        // Three quarters of 32 GiB are more than the maximum. The last system has no limit.
        assert_eq!(of("34359738368\n"), Storage::BYTES_MAX);
        assert_eq!(of("max\n"), Storage::BYTES_MAX);
    }

    #[test]
    fn a_limit_below_the_bytes_that_are_set_is_found() {
        let limit_file = ("/sys/fs/cgroup/memory.max", "1048576\n");
        let root = system(&[(CGROUP, "0::/\n"), (MOUNTS, SECOND), limit_file]);
        let of = |storage: Storage| storage.lower_limit_at(root.path());
        assert_eq!(of(Storage::memory().bytes_max((1 << 20) + 1)), Some(1 << 20));
        assert_eq!(of(Storage::memory().bytes_max(1 << 20)), None);
        assert_eq!(of(Storage::memory()), None, "the default is below the limit");
        assert_eq!(Storage::memory().bytes_max(2).lower_limit_at(system(&[]).path()), None);
    }

    #[test]
    fn a_container_sees_its_group_as_the_root() {
        let files =
            [(CGROUP, "0::/\n"), (MOUNTS, SECOND), ("/sys/fs/cgroup/memory.max", "1048576\n")];
        assert_eq!(limit(&files), Some(1 << 20));
        // Without a namespace of its own it sees a path that its mount does not have.
        let files = [(CGROUP, "0::/../../kube/pod\n"), files[1], files[2]];
        assert_eq!(limit(&files), Some(1 << 20));
    }

    #[test]
    fn version_1_is_known_with_and_without_a_namespace() {
        let limits = "/sys/fs/cgroup/memory/memory.limit_in_bytes";
        for path in ["/docker/ab", "/"] {
            let groups = format!("12:cpu,cpuacct:/docker/ab\n11:memory:{path}\n");
            let of = |limit_text: &str| {
                limit(&[(CGROUP, &groups), (MOUNTS, FIRST), (limits, limit_text)])
            };
            assert_eq!(of("536870912\n"), Some(512 << 20), "{path}");
            assert_eq!(of("9223372036854771712\n"), None, "no limit");
        }
    }

    #[test]
    fn a_system_without_control_groups_or_with_other_text_has_no_limit() {
        assert_eq!(limit(&[]), None);
        assert_eq!(limit(&[(CGROUP, "::::\n\n0:\n"), (MOUNTS, "a - b\n - cgroup2\n")]), None);
        let garbled = [(CGROUP, "0::/\n"), (MOUNTS, SECOND), ("/sys/fs/cgroup/memory.max", "-1\n")];
        assert_eq!(limit(&garbled), None);
    }
}
