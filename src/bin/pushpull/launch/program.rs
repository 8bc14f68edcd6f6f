//! [`find_program`]: programs, before anything is started.

use std::fmt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

/// The reason why a program cannot be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProgramError {
    name: String,
    fault: &'static str,
}

impl std::error::Error for ProgramError {}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot run {}: {}", self.name, self.fault)
    }
}

/// Returns the path of a program: the name if it has a slash, else the first file of this name in
/// `path`, the value of `PATH`.
///
/// # Errors
/// If there is none, or it is no file that this user may execute.
pub(super) fn find_program(name: &str, path: &std::ffi::OsStr) -> Result<PathBuf, ProgramError> {
    let refuse = |fault| ProgramError { name: name.to_owned(), fault };
    if name.contains('/') {
        let fault = fault(Path::new(name));
        return fault.map_or_else(|| Ok(PathBuf::from(name)), |fault| Err(refuse(fault)));
    }
    let found = std::env::split_paths(path).map(|folder| folder.join(name));
    let mut found = found.filter(|program| !name.is_empty() && program.is_file()).peekable();
    match (found.peek().is_some(), found.find(|program| fault(program).is_none())) {
        (_, Some(program)) => Ok(program),
        (true, None) => Err(refuse("the file of this name in PATH is not executable")),
        (false, None) => Err(refuse("there is no such program in PATH")),
    }
}

/// Returns why a file is no program.
fn fault(program: &Path) -> Option<&'static str> {
    match program.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some("there is no such file"),
        Err(_) => Some("the file cannot be reached"),
        Ok(found) if !found.is_file() => Some("it is no file"),
        Ok(_) => access(program, Access::EXEC_OK).err().map(|_| "it is not executable"),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn programs_are_found_and_others_are_told_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        for (name, mode) in [("program", 0o700), ("text", 0o600)] {
            std::fs::write(path(name), "").unwrap();
            std::fs::set_permissions(path(name), PermissionsExt::from_mode(mode)).unwrap();
        }
        std::fs::create_dir(path("folder")).unwrap();
        let find = |name: &str| {
            let places = std::env::join_paths(["/nowhere".as_ref(), folder.path()]).unwrap();
            find_program(name, &places).map_err(|error| error.fault)
        };
        assert_eq!(find("program"), Ok(folder.path().join("program")));
        assert_eq!(find(&path("program")), Ok(folder.path().join("program")));
        let not_executable = "the file of this name in PATH is not executable";
        for (name, fault) in [
            ("text", not_executable),
            ("absent", "there is no such program in PATH"),
            ("folder", "there is no such program in PATH"),
            ("", "there is no such program in PATH"),
            (&path("text"), "it is not executable"),
            (&path("absent"), "there is no such file"),
            (&path("folder"), "it is no file"),
            (&path("text/below"), "the file cannot be reached"),
        ] {
            assert_eq!(find(name), Err(fault), "{name}");
        }
        let error = find_program("train", OsStr::new("")).unwrap_err().to_string();
        assert_eq!(error, "cannot run train: there is no such program in PATH");
    }
}
