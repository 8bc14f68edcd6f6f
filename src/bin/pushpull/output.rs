//! Standard output of the tool.

use std::fmt::Display;
use std::io::{self, Write};

/// Prints one or more lines. Fails with `BrokenPipe` if the reader has closed the pipe.
pub(crate) fn print_lines(lines: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{lines}").map_err(|error| output_error(&error))
}

/// Prints a line on stderr. If that cannot be written, the line is lost.
pub(crate) fn print_error(line: &dyn Display) {
    let _ = writeln!(io::stderr(), "pushpull: {line}");
}

/// Names the standard output in a write error.
pub(crate) fn output_error(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write to the standard output: {error}"))
}
