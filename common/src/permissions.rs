//! The check of who may change a directory: nobody but its user, or its group too if that is
//! accepted.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

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

/// The effective user of a process, and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUser {
    /// The number of the user.
    pub user: u32,
    /// The numbers of the effective group and of all others.
    pub groups: Vec<u32>,
}

/// Checks that nobody but `writers` can write to a directory that `process` uses. The error says
/// who can.
pub fn check(metadata: &Metadata, writers: Writers, process: &ProcessUser) -> Result<(), String> {
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
    let is_in_group = process.groups.contains(&group);
    if writers == Writers::Group && mode & 0o020 != 0 && !is_in_group {
        return Err(format!("its group {group} may write, and this process is not in it"));
    }
    let is_ours = owner == process.user;
    match is_ours || (writers == Writers::Group && owner == 0 && is_in_group) {
        true => Ok(()),
        false => Err(format!("it belongs to user {owner}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Returns the user and the group that a directory belongs to, as those of a process.
    fn owner_of(metadata: &Metadata) -> ProcessUser {
        ProcessUser { user: metadata.uid(), groups: vec![metadata.gid()] }
    }

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
            let process = owner_of(&metadata);
            assert_eq!(check(&metadata, Writers::Owner, &process).is_ok(), owner, "{mode:o}");
            assert_eq!(check(&metadata, Writers::Group, &process).is_ok(), group, "{mode:o}");
        }
        let metadata = metadata(0o770);
        let said = check(&metadata, Writers::Owner, &owner_of(&metadata)).unwrap_err();
        assert!(said.contains("770") && said.contains("can be accepted"), "{said}");
    }

    #[test]
    fn a_foreign_group_or_owner_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        set_permissions(directory.path(), Permissions::from_mode(0o770)).unwrap();
        let metadata = directory.path().metadata().unwrap();
        let group = metadata.gid();
        let other_group = ProcessUser { groups: vec![group + 1], ..owner_of(&metadata) };
        let said = check(&metadata, Writers::Group, &other_group).unwrap_err();
        assert!(said.contains(&format!("its group {group} may write")), "{said}");
        set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
        let metadata = directory.path().metadata().unwrap();
        let user = metadata.uid();
        let other_user = ProcessUser { user: user + 1, ..owner_of(&metadata) };
        let said = check(&metadata, Writers::Owner, &other_user).unwrap_err();
        assert_eq!(said, format!("it belongs to user {user}"));
    }
}
