//! The check that a directory is private to its user: nobody else can create files in it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Checks that a directory is private. The error says why it is not.
pub fn check(metadata: &Metadata) -> Result<(), String> {
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
