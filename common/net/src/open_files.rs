//! The limit of open files of this process: what it is, and how to raise it.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Returns how many files and sockets this process may have open; `None` if there is no limit.
pub fn open_files_limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Raises the limit of open files as far as this process may: the soft limit to the hard one.
/// Returns the limit from then on; `None` if there is none.
///
/// Changes the whole process, so programs call it, not libraries. It breaks code that uses
/// `select(2)` on descriptors above 1023.
///
/// # Errors
/// If the system rejects the limit.
pub fn raise_open_files_limit() -> io::Result<Option<u64>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    }
    Ok(maximum)
}

/// Returns whether the process or the system has no descriptor left.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    let codes = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let before = getrlimit(Resource::Nofile);
        let lower = before.current.map(|current| current.min(512));
        setrlimit(Resource::Nofile, Rlimit { current: lower, ..before }).unwrap();
        assert_eq!(open_files_limit(), lower);
        assert_eq!(raise_open_files_limit().unwrap(), before.maximum);
        assert_eq!(open_files_limit(), before.maximum);
        assert_eq!(raise_open_files_limit().unwrap(), before.maximum, "nothing is left to do");
        setrlimit(Resource::Nofile, before).unwrap();
    }

    #[test]
    fn errors_for_lack_of_descriptors_are_told_apart() {
        let of = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(
            is_out_of_descriptors(&of(Errno::MFILE)) && is_out_of_descriptors(&of(Errno::NFILE))
        );
        assert!(!is_out_of_descriptors(&of(Errno::CONNABORTED)));
        assert!(!is_out_of_descriptors(&io::ErrorKind::Other.into()));
    }
}
