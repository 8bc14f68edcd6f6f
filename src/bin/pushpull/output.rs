//! What the tool prints.

use std::io::{self, Write};

/// Prints a line, or several; whoever reads them may go away.
pub(crate) fn say(lines: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{lines}")
}
