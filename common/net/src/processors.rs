//! Detects whether more threads are runnable than there are processors.

use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::thread::available_parallelism;

/// The file in which Linux reports the number of runnable threads: `0.61 0.52 0.48 2/143 901`.
const LOAD: &str = "/proc/loadavg";

/// The processors of this machine that this process may use.
#[derive(Debug)]
pub struct Processors {
    count: usize,
    load: Option<File>,
}

impl Processors {
    /// Returns the processors that this process may use now.
    pub fn current() -> Processors {
        let count = available_parallelism().map_or(1, NonZero::get);
        Processors { count, load: File::open(LOAD).ok() }
    }

    /// Returns whether more threads are runnable than there are processors, this thread included.
    /// True if the system does not report the number. Takes about 2 us.
    pub fn are_oversubscribed(&self) -> bool {
        self.running().is_none_or(|running| running > self.count)
    }

    /// Returns the number of runnable threads.
    fn running(&self) -> Option<usize> {
        let mut text = [0; 64];
        let length = self.load.as_ref()?.read_at(&mut text, 0).ok()?;
        running(text.get(..length)?)
    }
}

/// Parses the number of runnable threads from the content of [`LOAD`].
fn running(text: &[u8]) -> Option<usize> {
    let threads = std::str::from_utf8(text).ok()?.split_whitespace().nth(3)?;
    // The calling thread is runnable, so a count of 0 means that the system does not report it.
    threads.split_once('/')?.0.parse().ok().filter(|&running| running > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runnable_threads_are_parsed() {
        assert_eq!(running(b"0.61 0.52 0.48 2/143 901\n"), Some(2));
        assert_eq!(running(b"0.61 0.52 0.48 1200/3143 90144\n"), Some(1200));
        for strange in [
            &b""[..],
            b"0.61 0.52 0.48",
            b"0.61 0.52 0.48 2",
            b"0 0 0 x/1 2",
            b"0 0 0 0/0 0",
            b"\xff",
        ] {
            assert_eq!(running(strange), None, "{strange:?}");
        }
    }

    #[test]
    fn processors_are_oversubscribed_if_more_threads_are_runnable() {
        let file = tempfile::tempfile().unwrap();
        let processors = Processors { count: 2, load: Some(file.try_clone().unwrap()) };
        assert!(processors.are_oversubscribed(), "an empty file");
        for (running, oversubscribed) in [(1, false), (2, false), (3, true), (12, true), (2, false)]
        {
            file.write_all_at(format!("0.61 0.52 0.48 {running}/143 901\n").as_bytes(), 0).unwrap();
            assert_eq!(
                processors.are_oversubscribed(),
                oversubscribed,
                "{running} runnable threads"
            );
        }
        assert!(Processors { count: 2, load: None }.are_oversubscribed(), "no file");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn linux_reports_runnable_threads() {
        let current = Processors::current();
        assert!(current.count > 0);
        assert!(current.running().is_some_and(|running| running > 0), "{current:?}");
    }
}
