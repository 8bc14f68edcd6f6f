//! What happened in a run, as a sum that is equal for equal runs; and told, if somebody listens.

/// A trace.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    sum: u64,
    prints: bool,
}

impl Trace {
    pub(crate) fn new(prints: bool) -> Trace {
        Trace { sum: 0xcbf2_9ce4_8422_2325, prints }
    }

    /// Something that happened, in words.
    pub(crate) fn note(&mut self, words: impl FnOnce() -> String) {
        let words = words();
        if self.prints {
            println!("{words}");
        }
        self.bytes(words.as_bytes());
    }

    /// Bytes that arrived. The sum is FNV-1a.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.sum = (self.sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(crate) fn sum(&self) -> u64 {
        self.sum
    }
}
