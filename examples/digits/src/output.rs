//! Output of the example.

use std::fmt;
use std::io::{self, Write};

/// Prints a line on stdout.
pub(crate) fn print_line(line: fmt::Arguments<'_>) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// Prints a line on stderr; a line that cannot be written is lost.
pub(crate) fn print_error(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}
