//! The limit of open files of this process: what it is, and how to raise it.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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

/// The errors of a server for lack of descriptors, of which it reports one in a minute: newcomers
/// try again every second, each with an error.
#[derive(Debug, Default)]
pub struct DescriptorShortage {
    reported_at: Mutex<Option<Instant>>,
}

impl DescriptorShortage {
    const REPORT_INTERVAL: Duration = Duration::from_secs(60);

    /// Returns whether to report an error: it says that no descriptor is left, and none was reported
    /// in the last minute.
    pub fn is_news(&self, error: &io::Error) -> bool {
        if !is_out_of_descriptors(error) {
            return false;
        }
        let now = Instant::now();
        // A time is one value.
        let mut reported_at = self.reported_at.lock().unwrap_or_else(PoisonError::into_inner);
        let last = reported_at.map(|at| now.saturating_duration_since(at));
        let is_news = last.is_none_or(|since| since >= Self::REPORT_INTERVAL);
        if is_news {
            *reported_at = Some(now);
        }
        is_news
    }
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
