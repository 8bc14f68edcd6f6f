//! Whether there is a processor to spare.

use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::thread::available_parallelism;

/// Where Linux says, among other things, how many threads run or wait for a processor: `0.61 0.52 0.48 2/143 901`.
const LOAD: &str = "/proc/loadavg";

/// The processors of this machine, as far as this process may use them.
#[derive(Debug)]
pub struct Processors {
    count: usize,
    load: Option<File>,
}

impl Processors {
    /// Those of this machine, as many as this process may use now.
    pub fn here() -> Processors {
        let count = available_parallelism().map_or(1, NonZero::get);
        Processors { count, load: File::open(LOAD).ok() }
    }

    /// Whether more threads want a processor than there are, this one among them; they do where the system does not tell.
    /// Takes some 2 us.
    pub fn are_wanted(&self) -> bool {
        self.running().is_none_or(|running| running > self.count)
    }

    /// How many threads run or wait for a processor.
    fn running(&self) -> Option<usize> {
        let mut text = [0; 64];
        let length = self.load.as_ref()?.read_at(&mut text, 0).ok()?;
        running(text.get(..length)?)
    }
}

/// The same by what [`LOAD`] says.
fn running(text: &[u8]) -> Option<usize> {
    let threads = std::str::from_utf8(text).ok()?.split_whitespace().nth(3)?;
    // Who asks runs: where none is said to, it is not told.
    threads.split_once('/')?.0.parse().ok().filter(|&running| running > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_that_run_are_read_from_what_the_system_says() {
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
    fn they_are_wanted_while_more_threads_run_than_there_are() {
        let file = tempfile::tempfile().unwrap();
        let processors = Processors { count: 2, load: Some(file.try_clone().unwrap()) };
        assert!(processors.are_wanted(), "nothing is told");
        for (running, wanted) in [(1, false), (2, false), (3, true), (12, true), (2, false)] {
            file.write_all_at(format!("0.61 0.52 0.48 {running}/143 901\n").as_bytes(), 0).unwrap();
            assert_eq!(processors.are_wanted(), wanted, "where {running} run");
        }
        assert!(Processors { count: 2, load: None }.are_wanted(), "nobody tells");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_tells() {
        let here = Processors::here();
        assert!(here.count > 0);
        assert!(here.running().is_some_and(|running| running > 0), "{here:?}");
    }
}
