//! The promises of [`CheckpointStorage`], checked on any storage.

use std::io::ErrorKind;

use pushpull_checkpoint::{CheckpointStorage, StorageFault};

/// A storage under test. Each call of `open` opens the same place, as another process does.
pub(crate) type Open<'a> = &'a (dyn Fn() -> Box<dyn CheckpointStorage> + Sync);

/// Checks all promises. The place must be empty, and is empty afterwards.
pub(crate) fn check(open: Open<'_>) {
    let storage = open();
    assert_eq!(sorted(storage.list(None)), [""; 0], "the place must be empty");
    folders_are_created_once(open);
    files_have_what_was_written(open);
    files_are_created_once(open);
    renames_publish_and_withdraw(open);
    removed_folders_are_gone(open);
    one_cluster_claims(open);
    assert_eq!(sorted(storage.list(None)), [""; 0], "the checks remove what they make");
}

fn folders_are_created_once(open: Open<'_>) {
    let storage = open();
    storage.create_folder("ckpt-1-0.tmp").unwrap();
    for bad in ["", ".hidden.tmp", "a/b.tmp", "../x.tmp", "ä.tmp", &"x".repeat(65)] {
        assert_eq!(kind(storage.create_folder(bad)), ErrorKind::InvalidInput, "{bad:?}");
        assert_eq!(kind(storage.remove_folder(bad)), ErrorKind::InvalidInput, "{bad:?}");
        assert_eq!(kind(storage.create("ckpt-1-0.tmp", bad)), ErrorKind::InvalidInput, "{bad:?}");
        assert_eq!(kind(storage.open("ckpt-1-0.tmp", bad)), ErrorKind::InvalidInput, "{bad:?}");
    }
    storage.remove_folder("ckpt-1-0.tmp").unwrap();
    // Of concurrent calls, one succeeds.
    let outcomes: Vec<bool> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| open().create_folder("ckpt-1-1.tmp").is_ok())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(outcomes.iter().filter(|created| **created).count(), 1, "{outcomes:?}");
    assert_eq!(kind(storage.create_folder("ckpt-1-1.tmp")), ErrorKind::AlreadyExists);
    storage.create_folder("ckpt-1-10.tmp").unwrap();
    storage.sync(None).unwrap();
    assert_eq!(sorted(storage.list(None)), ["ckpt-1-1.tmp", "ckpt-1-10.tmp"]);
    assert_eq!(sorted(storage.list(Some("ckpt-1-1.tmp"))), [""; 0]);
    storage.remove_folder("ckpt-1-1.tmp").unwrap();
    assert_eq!(sorted(storage.list(None)), ["ckpt-1-10.tmp"]);
    storage.remove_folder("ckpt-1-10.tmp").unwrap();
}

fn files_have_what_was_written(open: Open<'_>) {
    const FOLDER: &str = "ckpt-1-2.tmp";
    let storage = open();
    storage.create_folder(FOLDER).unwrap();
    let sizes = [0, 1, 4096, (1 << 20) + 3, 5 << 20, (17 << 20) + 1];
    for size in sizes {
        let name = format!("file-{size}");
        let bytes = content(size, size as u8);
        let mut file = storage.create(FOLDER, &name).unwrap();
        let third = size / 3;
        file.write(&bytes[..third]).unwrap();
        file.write(&[]).unwrap();
        file.write(&bytes[third..]).unwrap();
        file.sync().unwrap();
        drop(file);
    }
    storage.sync(Some(FOLDER)).unwrap();
    let reader = open();
    let mut names: Vec<String> = sizes.iter().map(|size| format!("file-{size}")).collect();
    names.sort();
    assert_eq!(sorted(reader.list(Some(FOLDER))), names);
    for size in sizes {
        let file = reader.open(FOLDER, &format!("file-{size}")).unwrap();
        let expected = content(size, size as u8);
        assert_eq!(file.bytes(), size as u64);
        let mut all = vec![0; size];
        for (index, piece) in all.chunks_mut(1 << 20).enumerate() {
            file.read((index << 20) as u64, piece).unwrap();
        }
        assert!(all == expected, "a file of {size} bytes");
        // Ranges in any order.
        for (from, to) in [(size / 2, size), (0, size / 2), (size / 3, size / 3), (size, size)] {
            let mut some = vec![0; to - from];
            file.read(from as u64, &mut some).unwrap();
            assert!(some == expected[from..to], "bytes {from} to {to} of {size}");
        }
        let mut beyond = [0; 2];
        assert_eq!(kind(file.read(size as u64, &mut beyond[..1])), ErrorKind::UnexpectedEof);
        assert!(file.read(u64::MAX, &mut beyond).is_err());
    }
    storage.remove_folder(FOLDER).unwrap();
}

fn files_are_created_once(open: Open<'_>) {
    const FOLDER: &str = "ckpt-1-3.tmp";
    let storage = open();
    assert_eq!(kind(storage.create(FOLDER, "data")), ErrorKind::NotFound);
    assert_eq!(kind(storage.open(FOLDER, "data")), ErrorKind::NotFound);
    assert_eq!(kind(storage.list(Some(FOLDER))), ErrorKind::NotFound);
    storage.create_folder(FOLDER).unwrap();
    assert_eq!(kind(storage.open(FOLDER, "data")), ErrorKind::NotFound);
    let outcomes: Vec<bool> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|index| {
                scope.spawn(move || {
                    let Ok(mut file) = open().create(FOLDER, "data") else { return false };
                    file.write(&content(100, index)).unwrap();
                    file.sync().unwrap();
                    true
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let winner = outcomes.iter().position(|created| *created).unwrap();
    assert_eq!(outcomes.iter().filter(|created| **created).count(), 1, "{outcomes:?}");
    assert_eq!(kind(storage.create(FOLDER, "data")), ErrorKind::AlreadyExists);
    assert_eq!(read(&*storage, FOLDER, "data"), content(100, winner as u8));
    storage.remove_folder(FOLDER).unwrap();
    assert_eq!(kind(storage.create(FOLDER, "data")), ErrorKind::NotFound);
}

fn renames_publish_and_withdraw(open: Open<'_>) {
    let storage = open();
    let write_checkpoint = |folder: &str, seed: u8| {
        storage.create_folder(folder).unwrap();
        for (file, bytes) in [("data", 1000), ("MANIFEST", 10)] {
            let mut out = storage.create(folder, file).unwrap();
            out.write(&content(bytes, seed)).unwrap();
            out.sync().unwrap();
        }
        storage.sync(Some(folder)).unwrap();
    };
    write_checkpoint("ckpt-2-5.tmp", 7);
    assert_eq!(sorted(storage.list(None)), ["ckpt-2-5.tmp"]);
    assert_eq!(kind(storage.open("ckpt-2-5", "MANIFEST")), ErrorKind::NotFound);
    storage.rename_folder("ckpt-2-5.tmp", "ckpt-2-5").unwrap();
    storage.sync(None).unwrap();
    let reader = open();
    assert_eq!(sorted(reader.list(None)), ["ckpt-2-5"]);
    assert_eq!(sorted(reader.list(Some("ckpt-2-5"))), ["MANIFEST", "data"]);
    assert_eq!(kind(reader.list(Some("ckpt-2-5.tmp"))), ErrorKind::NotFound);
    assert_eq!(kind(reader.open("ckpt-2-5.tmp", "data")), ErrorKind::NotFound);
    assert_eq!(read(&*reader, "ckpt-2-5", "data"), content(1000, 7));
    assert_eq!(read(&*reader, "ckpt-2-5", "MANIFEST"), content(10, 7));
    assert!(storage.rename_folder("ckpt-2-5.tmp", "ckpt-2-5").is_err(), "it has no such folder");
    // Retention withdraws a checkpoint before it removes its files.
    storage.rename_folder("ckpt-2-5", "ckpt-2-5.tmp").unwrap();
    assert_eq!(sorted(reader.list(None)), ["ckpt-2-5.tmp"]);
    assert_eq!(kind(reader.open("ckpt-2-5", "MANIFEST")), ErrorKind::NotFound);
    assert_eq!(sorted(reader.list(Some("ckpt-2-5.tmp"))), ["MANIFEST", "data"]);
    storage.remove_folder("ckpt-2-5.tmp").unwrap();
    assert!(storage.rename_folder("ckpt-9-9.tmp", "ckpt-9-9").is_err());
}

fn removed_folders_are_gone(open: Open<'_>) {
    const FOLDER: &str = "ckpt-1-4.tmp";
    let storage = open();
    assert_eq!(kind(storage.remove_folder(FOLDER)), ErrorKind::NotFound);
    storage.create_folder(FOLDER).unwrap();
    let bytes = content(1 << 20, 4);
    let mut file = storage.create(FOLDER, "data").unwrap();
    file.write(&bytes).unwrap();
    file.sync().unwrap();
    // It is not synced, and goes with its folder.
    let mut unfinished = storage.create(FOLDER, "unfinished").unwrap();
    unfinished.write(&bytes).unwrap();
    drop(unfinished);
    let opened = storage.open(FOLDER, "data").unwrap();
    storage.remove_folder(FOLDER).unwrap();
    let mut now = vec![0; bytes.len()];
    if opened.read(0, &mut now).is_ok() {
        assert!(now == bytes, "an open file has other bytes after its removal");
    }
    assert_eq!(kind(storage.open(FOLDER, "data")), ErrorKind::NotFound);
    assert_eq!(sorted(storage.list(None)), [""; 0]);
    // A name can be used again.
    storage.create_folder(FOLDER).unwrap();
    assert_eq!(sorted(storage.list(Some(FOLDER))), [""; 0]);
    storage.remove_folder(FOLDER).unwrap();
}

fn one_cluster_claims(open: Open<'_>) {
    let first = open();
    let claim = first.claim().unwrap();
    let second = open();
    assert_eq!(kind(second.claim()), ErrorKind::WouldBlock);
    // The holder is not disturbed.
    first.create_folder("ckpt-1-6.tmp").unwrap();
    first.remove_folder("ckpt-1-6.tmp").unwrap();
    drop(claim);
    let claim = second.claim().unwrap();
    assert_eq!(kind(first.claim()), ErrorKind::WouldBlock);
    drop(claim);
}

/// Reads a whole file.
pub(crate) fn read(storage: &dyn CheckpointStorage, folder: &str, file: &str) -> Vec<u8> {
    let file = storage.open(folder, file).unwrap();
    let mut bytes = vec![0; file.bytes() as usize];
    file.read(0, &mut bytes).unwrap();
    bytes
}

/// Returns bytes that differ for each length and seed.
pub(crate) fn content(bytes: usize, seed: u8) -> Vec<u8> {
    let word = |index: u64| (index ^ u64::from(seed) << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let words = (0..bytes.div_ceil(8) as u64).flat_map(|index| word(index + 1).to_le_bytes());
    words.take(bytes).collect()
}

/// Returns the kind of the failure.
pub(crate) fn kind<T>(result: Result<T, StorageFault>) -> ErrorKind {
    match result {
        Ok(_) => panic!("it succeeds"),
        Err(fault) => fault.source.kind(),
    }
}

fn sorted(names: Result<Vec<String>, StorageFault>) -> Vec<String> {
    let mut names = names.unwrap();
    names.sort();
    names
}
