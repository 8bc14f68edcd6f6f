//! [`LineSplitter`]: the lines of a task, each behind the name of the task.

/// Maximum bytes of a line. A longer one continues on further lines.
pub(super) const LINE_BYTES_MAX: usize = 64 << 10;

/// Divides the output of a task into lines and puts a prefix before each. Bytes that are no text pass
/// through as they are.
///
/// Invariant: it keeps at most [`LINE_BYTES_MAX`] bytes, without a line break.
#[derive(Debug)]
pub(super) struct LineSplitter {
    prefix: Vec<u8>,
    /// The line that has not ended.
    rest: Vec<u8>,
}

impl LineSplitter {
    /// Returns a splitter for the start of a task: `worker:1`, and the number of its start from 0 on.
    pub(super) fn new(name: &str, incarnation: u32) -> LineSplitter {
        let prefix = format!("task={name} incarnation={incarnation} ").into_bytes();
        LineSplitter { prefix, rest: Vec::new() }
    }

    /// Takes output. Returns the lines that are complete with it, each with its line break.
    pub(super) fn take(&mut self, output: &[u8]) -> Vec<u8> {
        let mut lines = Vec::new();
        for part in output.split_inclusive(|&byte| byte == b'\n') {
            match part.split_last() {
                Some((b'\n', text)) => {
                    self.add(text, &mut lines);
                    self.end_line(&mut lines);
                }
                _ => self.add(part, &mut lines),
            }
        }
        lines
    }

    /// Returns the last line, with a line break, if it has none of its own.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        let mut lines = Vec::new();
        if !self.rest.is_empty() {
            self.end_line(&mut lines);
        }
        lines
    }

    /// Adds a part of a line. A full line ends only before further bytes: its line break may follow.
    fn add(&mut self, mut text: &[u8], lines: &mut Vec<u8>) {
        loop {
            let room = LINE_BYTES_MAX - self.rest.len();
            let (first, further) = text.split_at(text.len().min(room));
            self.rest.extend_from_slice(first);
            if further.is_empty() {
                return;
            }
            self.end_line(lines);
            text = further;
        }
    }

    fn end_line(&mut self, lines: &mut Vec<u8>) {
        lines.extend_from_slice(&self.prefix);
        lines.append(&mut self.rest);
        lines.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits output that arrives in these pieces.
    fn split(pieces: &[&[u8]]) -> String {
        let mut splitter = LineSplitter::new("w:1", 2);
        let mut lines: Vec<u8> = pieces.iter().flat_map(|piece| splitter.take(piece)).collect();
        lines.extend(splitter.finish());
        assert!(splitter.finish().is_empty());
        String::from_utf8_lossy(&lines).replace("task=w:1 incarnation=2 ", "> ")
    }

    #[test]
    fn each_line_has_the_prefix_however_it_arrives() {
        let table: [(&[&[u8]], &str); 7] = [
            (&[], ""),
            (&[b"a\nb\n"], "> a\n> b\n"),
            (&[b"a", b"b\nc", b"\n"], "> ab\n> c\n"),
            (&[b"no end"], "> no end\n"),
            (&[b"\n\n"], "> \n> \n"),
            (&[b"bar 1\rbar 2\r\n"], "> bar 1\rbar 2\r\n"),
            (&[b"\x00\xff\n"], "> \x00\u{fffd}\n"),
        ];
        for (pieces, expected) in table {
            assert_eq!(split(pieces), expected, "{pieces:?}");
        }
    }

    #[test]
    fn a_line_without_end_is_divided() {
        let letters = |count: usize| "x".repeat(count);
        let full = LINE_BYTES_MAX;
        for (count, end, expected) in [
            (full, "\n", format!("> {}\n", letters(full))),
            (full, "", format!("> {}\n", letters(full))),
            (full + 1, "\n", format!("> {}\n> x\n", letters(full))),
            (2 * full, "\n", format!("> {0}\n> {0}\n", letters(full))),
            (2 * full + 3, "\ny", format!("> {0}\n> {0}\n> xxx\n> y\n", letters(full))),
        ] {
            let text = letters(count) + end;
            assert_eq!(split(&[text.as_bytes()]), expected, "{count} at once");
            let pieces: Vec<&[u8]> = text.as_bytes().chunks(1000).collect();
            assert_eq!(split(&pieces), expected, "{count} in pieces");
        }
    }
}
