//! The bytes of a checkpoint of each format: what today's code saves, and what it still restores.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use super::memory::MemoryStorage;
use super::samples::{SLOTS, check_restored, place, save, variables};
use crate::manifest::FORMAT;
use crate::{CheckpointStorage, newest_good};

const NAME: &str = "ckpt-1-4";

/// Returns the table of the files of a checkpoint: the name and the bytes of each.
fn table(storage: &MemoryStorage) -> String {
    let mut text = format!("A checkpoint of format {FORMAT}: its files, in hexadecimal.\n");
    let mut files = storage.list(Some(NAME)).unwrap();
    files.sort();
    for file in files {
        let _ = writeln!(text, "\n= {file}");
        for row in storage.bytes_of(NAME, &file).chunks(32) {
            let digits: String = row.iter().map(|byte| format!("{byte:02x}")).collect();
            let _ = writeln!(text, "{digits}");
        }
    }
    text
}

/// Puts the files of a table into a storage.
fn filled(table: &str) -> MemoryStorage {
    let storage = MemoryStorage::default();
    storage.create_folder(NAME).unwrap();
    for entry in table.split("\n= ").skip(1) {
        let (file, rows) = entry.split_once('\n').unwrap();
        let digits: Vec<u8> = rows.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte =
            |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        let mut writer = storage.create(NAME, file).unwrap();
        writer.write(&digits.chunks(2).map(byte).collect::<Vec<u8>>()).unwrap();
    }
    storage
}

/// A change of the bytes needs another format, which older programs refuse by its number. This test
/// then writes another table, and the older ones stay to be restored or refused.
#[test]
fn a_checkpoint_has_the_bytes_of_its_format_and_is_restored_from_them() {
    let catalogue = place(variables(3), 2, 1);
    let storage = MemoryStorage::default();
    let saving: Arc<dyn CheckpointStorage> = Arc::new(storage.clone());
    save(&saving, &catalogue, 4).unwrap();
    let name = format!("src/tests/golden/format_{FORMAT}.txt");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name);
    let found = table(&storage);
    if std::env::var_os("PUSHPULL_BLESS").is_some() && !path.exists() {
        std::fs::write(&path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == golden, "a checkpoint has other bytes than {}: raise FORMAT", path.display());

    let stored: Arc<dyn CheckpointStorage> = Arc::new(filled(&golden));
    let (mut opened, refused) = newest_good(&stored).unwrap().unwrap();
    assert!(refused.is_empty());
    check_restored(&mut opened, &catalogue, &SLOTS, 4);
}
