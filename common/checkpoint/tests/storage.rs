//! A directory keeps the promises of a storage.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use pushpull_checkpoint::{CheckpointStorage, LocalDirectory};

mod conformance;

#[test]
fn a_directory_keeps_the_promises() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("checkpoints");
    conformance::check(&|| {
        let storage: Box<dyn CheckpointStorage> =
            Box::new(LocalDirectory::create(path.clone()).unwrap());
        storage
    });
}
