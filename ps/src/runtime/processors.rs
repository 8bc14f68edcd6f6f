//! Whether there is a processor to spare.

use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::thread::available_parallelism;

/// Where Linux says, among other things, how many threads run or wait for a processor: `0.61 0.52 0.48 2/143 901`.
const LOAD: &str = "/proc/loadavg";

/// The processors of this machine, as far as this process may use them.
#[derive(Debug)]
pub(super) struct Processors {
    count: usize,
    load: Option<File>,
}

impl Processors {
    pub(super) fn new() -> Processors {
        let count = available_parallelism().map_or(1, NonZero::get);
        Processors { count, load: File::open(LOAD).ok() }
    }

    /// Whether more threads want a processor than there are, this one among them; they do where the system does not tell.
    /// Takes some 2 us.
    pub(super) fn are_wanted(&self) -> bool {
        let mut text = [0; 64];
        let read = self.load.as_ref().and_then(|load| load.read_at(&mut text, 0).ok());
        let running = read.and_then(|bytes| running(text.get(..bytes)?));
        running.is_none_or(|running| running > self.count)
    }
}

/// How many threads run or wait for a processor, by what [`LOAD`] says.
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
    fn where_nothing_is_said_the_processors_are_wanted() {
        let mut processors = Processors { count: usize::MAX, load: None };
        assert!(processors.are_wanted());
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"0.61 0.52 0.48 2/143 901\n", 0).unwrap();
        processors.load = Some(file);
        for (count, wanted) in [(1, true), (2, false), (3, false)] {
            processors.count = count;
            assert_eq!(processors.are_wanted(), wanted, "of {count}");
        }
    }
}
