//! Damaged files are refused by name, and the previous checkpoint is used.

use std::sync::Arc;

use super::memory::MemoryStorage;
use super::samples::{SLOTS, check_restored, place, saved, variables};
use crate::{CheckpointError, CheckpointStorage, newest_good};

const NEWEST: &str = "ckpt-1-9";

/// Checks that the newest checkpoint is refused for this file, and the previous one is used.
fn check_refused(memory: &MemoryStorage, file: &str, case: &str) -> CheckpointError {
    let storage: Arc<dyn CheckpointStorage> = Arc::new(memory.clone());
    let (opened, mut refused) = newest_good(&storage).unwrap().unwrap();
    assert_eq!(opened.manifest().checkpoint.global_step, 5, "{case}");
    let refused = refused.pop().unwrap_or_else(|| panic!("accepted: {case}"));
    assert_eq!(refused.checkpoint, NEWEST, "{case}");
    let named = match &refused.reason {
        CheckpointError::Corrupt { file, .. } | CheckpointError::OtherFile { file, .. } => file,
        CheckpointError::Storage(fault) => &fault.path,
        other => panic!("{case}: {other}"),
    };
    assert_eq!(named, &format!("{NEWEST}/{file}"), "{case}");
    refused.reason
}

fn two_checkpoints() -> MemoryStorage {
    saved(&place(variables(2), 2, 1), &[5, 9]).0
}

#[test]
fn no_byte_of_any_file_may_differ() {
    let memory = two_checkpoints();
    let mut cases = 0;
    for file in memory.list(Some(NEWEST)).unwrap() {
        let whole = memory.bytes_of(NEWEST, &file);
        for at in 0..whole.len() {
            for mask in [1 << (at % 8), 0x20, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= mask;
                memory.put(NEWEST, &file, bytes);
                check_refused(&memory, &file, &format!("{file}: byte {at} ^ {mask:#x}"));
                cases += 1;
            }
        }
        memory.put(NEWEST, &file, whole);
    }
    assert!(cases > 10_000, "only {cases} cases were tried");
    let storage: Arc<dyn CheckpointStorage> = Arc::new(memory);
    let (mut opened, refused) = newest_good(&storage).unwrap().unwrap();
    assert!(refused.is_empty(), "all files are as they were");
    check_restored(&mut opened, &place(variables(1), 1, 1), &SLOTS, 9);
}

#[test]
fn truncated_extended_and_missing_files_are_refused() {
    let memory = two_checkpoints();
    for file in memory.list(Some(NEWEST)).unwrap() {
        let whole = memory.bytes_of(NEWEST, &file);
        for length in 0..whole.len() {
            memory.put(NEWEST, &file, whole[..length].to_vec());
            let reason = check_refused(&memory, &file, &format!("{file} cut to {length}"));
            let CheckpointError::Corrupt { offset, .. } = reason else { panic!("{reason}") };
            assert!(offset <= length as u64, "the offset is in the file or at its end");
        }
        for more in [1, 4096] {
            let mut bytes = whole.clone();
            bytes.resize(whole.len() + more, b'\n');
            memory.put(NEWEST, &file, bytes);
            check_refused(&memory, &file, &format!("{file} with {more} bytes more"));
        }
        memory.remove(NEWEST, &file);
        check_refused(&memory, &file, &format!("{file} is gone"));
        memory.put(NEWEST, &file, whole);
    }
}

#[test]
fn files_of_other_checkpoints_and_shards_are_refused() {
    let memory = two_checkpoints();
    let [one, two] = ["shard-0-0.safetensors", "shard-1-0.safetensors"];
    let of = |folder: &str, file: &str| memory.bytes_of(folder, file);
    // Both checkpoints have the same catalogue, so another model's is used.
    let cases = [
        (one, of(NEWEST, two)),
        (two, of(NEWEST, one)),
        (one, of("ckpt-1-5", one)),
        ("MANIFEST", of("ckpt-1-5", "MANIFEST")),
        ("CATALOGUE", saved(&place(variables(1), 2, 1), &[9]).0.bytes_of(NEWEST, "CATALOGUE")),
    ];
    for (file, bytes) in cases {
        let fork = memory.fork();
        fork.put(NEWEST, file, bytes);
        check_refused(&fork, file, &format!("a foreign {file}"));
    }
    // A complete checkpoint under another one's name.
    memory.rename_folder(NEWEST, "ckpt-1-10").unwrap();
    let storage: Arc<dyn CheckpointStorage> = Arc::new(memory);
    let (opened, refused) = newest_good(&storage).unwrap().unwrap();
    assert_eq!(opened.manifest().checkpoint.global_step, 5);
    let reason = refused[0].reason.to_string();
    assert_eq!(reason, "cannot trust ckpt-1-10/MANIFEST: at byte 0 it has ckpt-1-9, not ckpt-1-10");
}

#[test]
fn a_file_that_stands_in_for_another_is_named() {
    let memory = two_checkpoints();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec();
    for file in memory.list(Some(NEWEST)).unwrap() {
        let whole = memory.bytes_of(NEWEST, &file);
        for (bytes, kind) in [
            (pointer.clone(), "a pointer of Git LFS: fetch the file with `git lfs pull`"),
            (b"\x1f\x8b\x08\0\0\0\0\0\0\x03".to_vec(), "packed with gzip"),
            (vec![0; whole.len()], "filled with zeros, as a file whose writer was interrupted is"),
        ] {
            memory.put(NEWEST, &file, bytes);
            let reason = check_refused(&memory, &file, kind).to_string();
            assert_eq!(reason, format!("cannot trust {NEWEST}/{file}: it is {kind}"));
        }
        memory.put(NEWEST, &file, whole);
    }
}

#[test]
fn the_error_names_every_checkpoint_if_none_is_valid() {
    let memory = two_checkpoints();
    memory.put(NEWEST, "MANIFEST", Vec::new());
    memory.remove("ckpt-1-5", "shard-1-0.safetensors");
    let storage: Arc<dyn CheckpointStorage> = Arc::new(memory);
    let error = newest_good(&storage).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("ckpt-1-9: cannot trust ckpt-1-9/MANIFEST"), "{text}");
    assert!(text.contains("ckpt-1-5: cannot use ckpt-1-5/shard-1-0.safetensors"), "{text}");
    let empty: Arc<dyn CheckpointStorage> = Arc::new(MemoryStorage::default());
    assert!(newest_good(&empty).unwrap().is_none());
}
