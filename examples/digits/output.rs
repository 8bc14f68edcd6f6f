//! What the example prints.

use std::fmt;
use std::io::{self, Write};

/// Prints a line.
pub(crate) fn say(line: fmt::Arguments<'_>) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// Tells a line where errors are told; one that cannot be written is lost.
pub(crate) fn tell(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}
