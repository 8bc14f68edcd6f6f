//! What the tool prints.

use std::io::{self, Write};

/// Prints a line, or several; whoever reads them may go away.
pub(crate) fn say(lines: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{lines}").map_err(|error| unwritten(&error))
}

/// Why nothing could be printed.
pub(crate) fn unwritten(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write to the standard output: {error}"))
}
