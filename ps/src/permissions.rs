//! Whether a directory is its user's alone: nobody else may put anything into it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Why a directory is not private, if it is not.
pub(crate) fn check(metadata: &Metadata) -> Result<(), String> {
    if !metadata.is_dir() {
        return Err("it is not a directory".into());
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(format!("its mode {:o} lets others write", metadata.mode() & 0o777));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(format!("it belongs to user {}", metadata.uid()));
    }
    Ok(())
}
