//! A buffer of whole entries in front of an output that may fail for some time.

use std::collections::VecDeque;
use std::io::{self, Write};

/// Buffers entries, and writes each completely or not at all, unless the process ends.
///
/// [`std::io::BufWriter`] passes a long write through, and forgets how much of it a failing output
/// has taken. This buffer holds an entry until all of it is written, so a later call continues at
/// the exact byte.
///
/// Invariants: `written <= buffer.len()`. `ends` ascends, each end is above `written`, and the last
/// one is the length of the buffer.
#[derive(Debug)]
pub(crate) struct AppendBuffer<W: Write> {
    output: W,
    /// Whole entries, of which the first `written` bytes are in the output.
    buffer: Vec<u8>,
    written: usize,
    /// End of each entry in `buffer` that is not completely written.
    ends: VecDeque<usize>,
}

impl<W: Write> AppendBuffer<W> {
    /// Size of the buffer, unless one entry is longer.
    pub(crate) const BYTES: usize = 64 << 10;

    pub(crate) fn new(output: W) -> AppendBuffer<W> {
        AppendBuffer { output, buffer: Vec::new(), written: 0, ends: VecDeque::new() }
    }

    /// Appends an entry that consists of several parts. An error refuses it.
    pub(crate) fn append(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if !self.buffer.is_empty() && self.buffer.len() + bytes > Self::BYTES {
            self.write_all()?;
        }
        self.buffer.reserve(bytes);
        parts.iter().for_each(|part| self.buffer.extend_from_slice(part));
        self.ends.push_back(self.buffer.len());
        Ok(())
    }

    /// Writes all entries, and flushes the output.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.write_all()?;
        self.output.flush()
    }

    /// Returns the number of entries that are not completely written.
    pub(crate) fn buffered(&self) -> usize {
        self.ends.len()
    }

    /// Returns the output. What the caller writes to it is between two entries only after a flush.
    pub(crate) fn output_mut(&mut self) -> &mut W {
        &mut self.output
    }

    #[cfg(test)]
    pub(crate) fn memory_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    fn write_all(&mut self) -> io::Result<()> {
        while self.written < self.buffer.len() {
            match self.output.write(&self.buffer[self.written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.record_written(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.buffer.clear();
        self.written = 0;
        // One long entry does not keep its memory.
        self.buffer.shrink_to(Self::BYTES);
        Ok(())
    }

    fn record_written(&mut self, count: usize) {
        // An output that claims more than it was given has taken no more than that.
        self.written = (self.written + count).min(self.buffer.len());
        while self.ends.front().is_some_and(|&end| end <= self.written) {
            self.ends.pop_front();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
