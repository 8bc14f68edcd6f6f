//! [`enter_private_folder`]: a folder of sockets that no other user can enter.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

/// Creates a folder that this user alone may enter, or checks that it is one.
///
/// Processes of one user meet there on Unix sockets. In a folder that others may write, another
/// user could listen first.
///
/// # Errors
/// Those of the file system; [`io::ErrorKind::PermissionDenied`] if the folder belongs to another
/// user or others may enter it. The parent of the folder must exist. The caller names the folder.
pub fn enter_private_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => return created,
    }
    let metadata = fs::symlink_metadata(folder)?;
    let is_private = metadata.is_dir()
        && metadata.uid() == rustix::process::geteuid().as_raw()
        && metadata.mode() & 0o077 == 0;
    match is_private {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it is not a private folder of this user",
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_folder_that_others_may_enter_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("own");
        enter_private_folder(&own).unwrap();
        enter_private_folder(&own).unwrap();
        fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let error = enter_private_folder(folder.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
        let file = folder.path().join("file");
        File::create(&file).unwrap();
        assert!(enter_private_folder(&file).is_err());
    }
}
