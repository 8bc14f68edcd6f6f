//! Whether there is a processor to spare.

use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::thread::available_parallelism;

use pushpull_common::waits::{LOAD, are_wanted};

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
        are_wanted(self.count, |text| self.load.as_ref()?.read_at(text, 0).ok())
    }
}
