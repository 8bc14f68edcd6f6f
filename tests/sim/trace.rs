//! The trace of a run: a hash of its events, equal for equal runs.

/// A running hash (FNV-1a) of the events of a run, which can also print them.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    sum: u64,
    prints: bool,
}

impl Trace {
    pub(crate) fn new(prints: bool) -> Trace {
        Trace { sum: 0xcbf2_9ce4_8422_2325, prints }
    }

    /// Adds an event, and prints it if the trace prints.
    pub(crate) fn note(&mut self, words: impl FnOnce() -> String) {
        let words = words();
        if self.prints {
            println!("{words}");
        }
        self.bytes(words.as_bytes());
    }

    /// Adds bytes that arrived.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.sum = (self.sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(crate) fn sum(&self) -> u64 {
        self.sum
    }
}
