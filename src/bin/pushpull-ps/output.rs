//! What the daemon prints. Whoever reads it may go away, and it goes on serving.

use std::fmt;
use std::io::{self, Write};

/// Prints a line; one that cannot be written is lost.
pub(crate) fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "pushpull-ps: {line}");
}

/// The same where errors are printed.
pub(crate) fn complain(line: &dyn fmt::Display) {
    let _ = writeln!(io::stderr(), "pushpull-ps: {line}");
}
