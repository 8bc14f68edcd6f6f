//! An object store in memory keeps the promises of a storage, and killed writers leave nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use pushpull_checkpoint::CheckpointStorage;
use pushpull_remote::{RemoteOptions, RemoteStorage};

#[path = "../../../common/checkpoint/tests/conformance/mod.rs"]
mod conformance;

const URL: &str = "s3://memory/run/1";

fn options() -> RemoteOptions {
    RemoteOptions::new().part_bytes(5 << 20).claim_lease(Duration::from_millis(400))
}

fn open(store: &Arc<InMemory>) -> RemoteStorage {
    RemoteStorage::with_store(URL, store.clone(), options()).unwrap()
}

fn keys(store: &Arc<InMemory>) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut found = store.list(None);
        let mut keys = Vec::new();
        while let Some(object) = futures_util::StreamExt::next(&mut found).await {
            keys.push(object.unwrap().location.to_string());
        }
        keys.sort();
        keys
    })
}

fn put(store: &Arc<InMemory>, key: &str, bytes: &'static [u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(store.put(&Path::from(key), bytes.into())).unwrap();
}

#[test]
fn an_object_store_keeps_the_promises() {
    let store = Arc::new(InMemory::new());
    conformance::check(&|| {
        let storage: Box<dyn CheckpointStorage> = Box::new(open(&store));
        storage
    });
    assert_eq!(keys(&store), [""; 0], "nothing is left");
}

/// The objects of a checkpoint have the names of its files, so that other programs find them.
#[test]
fn a_published_checkpoint_has_its_files_under_its_name() {
    let store = Arc::new(InMemory::new());
    let storage = open(&store);
    storage.create_folder("ckpt-0-5.tmp").unwrap();
    for file in ["ps-0-0.safetensors", "MANIFEST"] {
        let mut out = storage.create("ckpt-0-5.tmp", file).unwrap();
        out.write(b"x").unwrap();
        out.sync().unwrap();
    }
    let folder = "run/1/ckpt-0-5";
    let unpublished = keys(&store);
    assert!(!unpublished.contains(&format!("{folder}/MANIFEST")), "{unpublished:?}");
    storage.rename_folder("ckpt-0-5.tmp", "ckpt-0-5").unwrap();
    let names = [".folder", "MANIFEST", "ps-0-0.safetensors"];
    assert_eq!(keys(&store), names.map(|name| format!("{folder}/{name}")));
}

/// A folder on another level, and one that is no checkpoint, belong to others.
#[test]
fn other_objects_are_left_alone() {
    let store = Arc::new(InMemory::new());
    put(&store, "run/1/readme.txt", b"x");
    put(&store, "run/10/ckpt-0-1/MANIFEST", b"x");
    put(&store, "other/MANIFEST", b"x");
    let storage = open(&store);
    let claim = storage.claim().unwrap();
    assert_eq!(storage.list(None).unwrap(), [""; 0]);
    drop(claim);
    assert_eq!(keys(&store), ["other/MANIFEST", "run/1/readme.txt", "run/10/ckpt-0-1/MANIFEST"]);
}

#[test]
fn a_dropped_upload_is_aborted() {
    let store = Arc::new(InMemory::new());
    let storage = open(&store);
    storage.create_folder("ckpt-0-5.tmp").unwrap();
    let mut file = storage.create("ckpt-0-5.tmp", "data").unwrap();
    file.write(&conformance::content(12 << 20, 1)).unwrap();
    assert_eq!(uploads(&store), 1);
    drop(file);
    assert_eq!(uploads(&store), 0);
    let placeholder = conformance::read(&storage, "ckpt-0-5.tmp", "data");
    assert!(placeholder.starts_with(b"pushpull: this upload is not complete"));
}

/// A killed process drops nothing: its folder and its upload stay.
#[test]
fn the_next_claim_removes_what_a_killed_save_has_left() {
    let store = Arc::new(InMemory::new());
    let killed = open(&store);
    killed.create_folder("ckpt-0-5.tmp").unwrap();
    let mut file = killed.create("ckpt-0-5.tmp", "data").unwrap();
    file.write(&conformance::content(12 << 20, 1)).unwrap();
    std::mem::forget(file);
    assert_eq!(uploads(&store), 1);
    let next = open(&store);
    let claim = next.claim().unwrap();
    assert_eq!(uploads(&store), 0);
    assert_eq!(next.list(None).unwrap(), [""; 0]);
    drop(claim);
    assert_eq!(keys(&store), [""; 0]);
}

/// A holder that was suspended finds out before its next change.
#[test]
fn a_holder_that_lost_its_claim_changes_nothing() {
    let store = Arc::new(InMemory::new());
    let storage = open(&store);
    let claim = storage.claim().unwrap();
    put(&store, "run/1/.claims/2", b"{}");
    // Its next renewal, or its check, finds the higher number.
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let fault = loop {
        match storage.create_folder("ckpt-0-5.tmp") {
            Err(fault) => break fault,
            Ok(()) => storage.remove_folder("ckpt-0-5.tmp").unwrap_or_default(),
        }
        assert!(std::time::Instant::now() < deadline, "it never finds out");
    };
    assert_eq!(fault.source.kind(), ErrorKind::WouldBlock);
    assert!(fault.source.to_string().contains("taken over"), "{fault:?}");
    assert_eq!(fault.path, "s3://memory/run/1/ckpt-0-5.tmp");
    drop(claim);
    assert!(keys(&store).contains(&"run/1/.claims/2".to_owned()), "it is of another process");
}

#[test]
fn a_claim_that_is_not_renewed_is_taken_over() {
    let store = Arc::new(InMemory::new());
    put(&store, "run/1/.claims/7", br#"{"id":"x","renewals":3,"process":null}"#);
    let claim = open(&store).claim().unwrap();
    assert_eq!(keys(&store), ["run/1/.claims/8"], "it has the next number");
    drop(claim);
    assert_eq!(keys(&store), [""; 0]);
}

/// A restart after a kill does not wait for the lease of its predecessor.
#[test]
fn a_claim_of_an_ended_process_of_this_machine_is_taken_over_at_once() {
    let Ok(boot) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") else {
        return println!("skipped: there is no /proc");
    };
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap();
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let text = serde_json::json!({
        "id": "x",
        "renewals": 3,
        "process": {
            "boot": boot.trim(),
            "namespace": namespace.to_str().unwrap(),
            "process": ended.id(),
            "started": "1",
        },
    });
    let store = Arc::new(InMemory::new());
    put(&store, "run/1/.claims/7", text.to_string().leak().as_bytes());
    let long = options().claim_lease(Duration::from_secs(3600));
    let storage = RemoteStorage::with_store(URL, store.clone(), long).unwrap();
    drop(storage.claim().unwrap());
    assert_eq!(keys(&store), [""; 0]);
}

/// Returns 1 if uploads in parts are under way, which only the debug form of the store tells.
fn uploads(store: &Arc<InMemory>) -> usize {
    let text = format!("{store:?}");
    let (_, uploads) = text.split_once("uploads: {").unwrap();
    usize::from(!uploads.starts_with('}'))
}
