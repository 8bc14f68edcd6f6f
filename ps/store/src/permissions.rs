//! The check of who may change a directory: nobody but its user, or its group too if that is
//! accepted.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use rustix::process::{getegid, geteuid, getgroups};

/// The users who may write to a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Writers {
    /// Its owner, which is this user.
    #[default]
    Owner,
    /// Its owner, which is this user or root, and its group, if this process is in it. A volume of
    /// Kubernetes with `fsGroup` is like this after each mount.
    Group,
}

/// Checks that nobody else can write to a directory. The error says who can.
pub fn check(metadata: &Metadata, writers: Writers) -> Result<(), String> {
    let mode = metadata.mode() & 0o777;
    let owner = metadata.uid();
    let group = metadata.gid();
    if !metadata.is_dir() {
        return Err("it is not a directory".into());
    }
    let others = match writers {
        Writers::Owner => 0o022,
        Writers::Group => 0o002,
    };
    if mode & others != 0 {
        let hint =
            if mode & 0o002 == 0 { "; that its group may write can be accepted" } else { "" };
        return Err(format!("its mode {mode:o} lets others write{hint}"));
    }
    if writers == Writers::Group && mode & 0o020 != 0 && !is_in_group(group) {
        return Err(format!("its group {group} may write, and this process is not in it"));
    }
    let is_ours = owner == geteuid().as_raw();
    match is_ours || (writers == Writers::Group && owner == 0 && is_in_group(group)) {
        true => Ok(()),
        false => Err(format!("it belongs to user {owner}")),
    }
}

fn is_in_group(group: u32) -> bool {
    let is_it = |id: rustix::process::Gid| id.as_raw() == group;
    is_it(getegid()) || getgroups().is_ok_and(|groups| groups.into_iter().any(is_it))
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn a_group_may_write_only_if_that_is_accepted() {
        let directory = tempfile::tempdir().unwrap();
        let metadata = |mode: u32| {
            set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
            directory.path().metadata().unwrap()
        };
        for (mode, owner, group) in [
            (0o700, true, true),
            (0o755, true, true),
            (0o770, false, true),
            (0o2775, false, true),
            (0o777, false, false),
            (0o702, false, false),
        ] {
            let metadata = metadata(mode);
            assert_eq!(check(&metadata, Writers::Owner).is_ok(), owner, "{mode:o}");
            assert_eq!(check(&metadata, Writers::Group).is_ok(), group, "{mode:o}");
        }
        let said = check(&metadata(0o770), Writers::Owner).unwrap_err();
        assert!(said.contains("770") && said.contains("can be accepted"), "{said}");
    }

    #[test]
    fn a_foreign_group_or_owner_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        set_permissions(directory.path(), Permissions::from_mode(0o770)).unwrap();
        let foreign = 54_321;
        // Only root may give a directory away.
        if chown(directory.path(), None, Some(foreign)).is_err() {
            return println!("skipped: this user may not change groups");
        }
        let said = check(&directory.path().metadata().unwrap(), Writers::Group).unwrap_err();
        assert!(said.contains("its group 54321 may write"), "{said}");
        chown(directory.path(), Some(foreign), Some(getegid().as_raw())).unwrap();
        let said = check(&directory.path().metadata().unwrap(), Writers::Group).unwrap_err();
        assert_eq!(said, "it belongs to user 54321");
    }
}
