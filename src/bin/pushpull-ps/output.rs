//! Output of the daemon. A line that cannot be written is lost: the daemon keeps serving if the
//! readers of its stdout and stderr have gone.

use std::fmt;
use std::io::{self, Write};

/// Prints a line on stdout; a line that cannot be written is lost.
pub(crate) fn print_line(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "pushpull-ps: {line}");
}

/// Prints a line on stderr; a line that cannot be written is lost.
pub(crate) fn print_error(line: &dyn fmt::Display) {
    let _ = writeln!(io::stderr(), "pushpull-ps: {line}");
}

/// Prints the text that a command line has asked for.
pub(crate) fn print_text(text: &str) -> io::Result<()> {
    let mut output = io::stdout();
    output.write_all(text.as_bytes())?;
    output.flush()
}
