//! Paths of Unix sockets: how addresses name them, and what else may have such a path.

use std::fs::FileType;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Returns the path of a Unix socket's address. `unix:1234` is the port of a host called "unix".
pub(crate) fn socket_path(address: &str) -> Option<&str> {
    let path = address.strip_prefix("unix:")?;
    path.parse::<u16>().is_err().then_some(path)
}

/// Returns what has a path, if that is no socket: no server will ever listen there.
pub(crate) fn occupant(path: &Path) -> Option<&'static str> {
    // A link counts as what it leads to, unless it leads to nothing.
    let metadata = path.metadata().or_else(|_| path.symlink_metadata()).ok()?;
    let kind: FileType = metadata.file_type();
    match () {
        () if kind.is_socket() => None,
        () if kind.is_dir() => Some("directory"),
        () if kind.is_file() => Some("plain file"),
        () if kind.is_symlink() => Some("symbolic link to nothing"),
        () => Some("device or a pipe"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_has_the_path_is_named_unless_it_is_a_socket() {
        let folder = std::env::temp_dir().join(format!("pushpull-paths-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let [socket, file, link, absent] =
            ["socket", "file", "link", "absent"].map(|name| folder.join(name));
        let _listener = UnixListener::bind(&socket).unwrap();
        std::fs::write(&file, "").unwrap();
        symlink(&absent, &link).unwrap();
        let found = [&socket, &absent, &file, &folder, &link].map(|path| occupant(path));
        std::fs::remove_dir_all(&folder).unwrap();
        let named = [Some("plain file"), Some("directory"), Some("symbolic link to nothing")];
        assert_eq!(found, [&[None, None][..], &named].concat()[..]);
    }
}
