//! [`not_regular`]: what a path is that has no bytes to read.

use std::fs::Metadata;
use std::os::unix::fs::FileTypeExt;

/// Returns what a path is, as the rest of a sentence; `None` for a regular file. Opening a pipe
/// would wait for its writer.
pub fn not_regular(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    match kind {
        _ if kind.is_file() => None,
        _ if kind.is_dir() => Some("a directory"),
        _ if kind.is_fifo() => Some("a pipe"),
        _ if kind.is_socket() => Some("a socket"),
        _ => Some("a device"),
    }
}
