//! Manifests and headers with valid hashes and wrong contents, as an attacker could write them.

use std::sync::Arc;

use pushpull_common::error::Chain;
use sha2::{Digest, Sha256};

use super::memory::MemoryStorage;
use super::samples::{place, saved, variables};
use crate::{CheckpointError, CheckpointStorage, hex, newest_good};

const NAME: &str = "ckpt-1-9";
const SHARD: &str = "shard-0-0.safetensors";

fn sealed(text: &str) -> Vec<u8> {
    let text = format!("{text}\n");
    format!("{text}sha256 {}\n", hex::encode(&Sha256::digest(&text))).into_bytes()
}

fn refusal(memory: &MemoryStorage) -> String {
    let storage: Arc<dyn CheckpointStorage> = Arc::new(memory.clone());
    match newest_good(&storage) {
        Err(CheckpointError::NoneGood { mut refused }) => {
            Chain(&refused.remove(0).reason).to_string()
        }
        Err(error) => Chain(&error).to_string(),
        Ok(_) => panic!("accepted"),
    }
}

fn manifest(memory: &MemoryStorage) -> String {
    let text = String::from_utf8(memory.bytes_of(NAME, "MANIFEST")).unwrap();
    text.lines().next().unwrap().to_owned()
}

#[test]
fn an_inconsistent_manifest_is_refused() {
    let (memory, _) = saved(&place(variables(2), 2, 1), &[9]);
    let text = manifest(&memory);
    assert_eq!(memory.bytes_of(NAME, "MANIFEST"), sealed(&text), "the seal is as documented");
    let slots: Vec<String> = (0..17).map(|i| format!("\"s{i}\"")).collect();
    let slots = format!("[{}]", slots.join(","));
    let shard = format!("\"file\":\"{SHARD}\"");
    let cases = [
        ("\"format\":2", "\"format\":1", "has format 1, and this version reads format 2"),
        ("\"format\":2", "\"format\":2,\"format\":2", "duplicate field"),
        ("\"format\":2", "\"format\":2,\"more\":1", "unknown field `more`"),
        ("\"version\":9", "\"ready\":true,\"version\":9", "unknown field `ready`"),
        ("\"version\":9,", "", "missing field `version`"),
        ("\"revision\":0", "\"revision\":1", "ckpt-1-9.1, not ckpt-1-9"),
        ("\"file\":\"CATALOGUE\"", "\"file\":\"../CATALOGUE\"", "../CATALOGUE, not CATALOGUE"),
        (&shard, "\"file\":\"/etc/passwd\"", "/etc/passwd, not shard-0-0"),
        ("\"task\":1,", "\"task\":0,", "not each shard once, in order"),
        ("\"task\":1,", "\"task\":4294967296,", "invalid value"),
        ("[\"m\",\"v\"]", "[\"m\"]", "not shard-0-0.safetensors of"),
        ("[\"m\",\"v\"]", &slots, "17 slots, not at most 16"),
        ("[\"m\",\"v\"]", "[\"m\",\"m\"]", "\"m\", not slots with unique names"),
        ("\"of\":[0,0,null", "\"of\":[0,1,null", "1, not one of 1 optimizers"),
        ("\"of\":[0,0,null", "\"of\":[0,null", "6, not 7 optimizer entries"),
        ("\"of\":[0,0,null", "\"of\":[0,0,0", "an optimizer, not no optimizer for \"größe"),
        ("\"of\":[0,0,null", "\"of\":[0,null,null", "no optimizer, not an optimizer for \"layer"),
        ("[[7,", "[[10,", "others, not sequences 1 to 9 in order"),
        ("\"newest\":9", "\"newest\":700", "others, not sequences 637 to 700 in order"),
        ("\"elements\":[0,18]", "\"elements\":[0,17]", "elements: (0, 18)"),
        ("\"user\":\"00", "\"user\":\"0", "not hexadecimal"),
        ("\"user\":\"00ff", "\"user\":\"00FF", "not hexadecimal"),
        ("\"saved_unix_ms\":9000", "\"saved_unix_ms\":-1", "invalid value"),
    ];
    for (from, to, expected) in cases {
        let forged = text.replacen(from, to, 1);
        assert_ne!(forged, text, "{from}");
        memory.put(NAME, "MANIFEST", sealed(&forged));
        let found = refusal(&memory);
        assert!(found.contains(expected), "{from} -> {to}: {found}");
    }
    for odd in ["", "{}", "[]", "null", "{\"format\":2}", &"[".repeat(100_000)] {
        memory.put(NAME, "MANIFEST", sealed(odd));
        assert!(refusal(&memory).contains("not a manifest"), "{}", refusal(&memory));
    }
}

/// The steps since an older checkpoint would be lost, although another version can read them.
#[test]
fn a_checkpoint_of_another_format_is_not_passed_over() {
    let (memory, storage) = saved(&place(variables(2), 2, 1), &[3, 9]);
    let newer = manifest(&memory).replacen("\"format\":2", "\"format\":3", 1);
    memory.put(NAME, "MANIFEST", sealed(&newer));
    let error = newest_good(&storage).unwrap_err();
    assert!(matches!(error, CheckpointError::OtherFormat { found: 3, .. }), "{error}");
}

#[test]
fn a_header_must_match_the_catalogue() {
    let (memory, _) = saved(&place(variables(2), 2, 1), &[9]);
    let text = manifest(&memory);
    let whole = memory.bytes_of(NAME, SHARD);
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in 0..8 + length {
        let mut forged = whole.clone();
        forged[at] ^= 1;
        let hash = |bytes: &[u8]| hex::encode(&Sha256::digest(bytes));
        memory.put(NAME, SHARD, forged.clone());
        memory.put(NAME, "MANIFEST", sealed(&text.replace(&hash(&whole), &hash(&forged))));
        let found = refusal(&memory);
        assert!(found.contains(&format!("{NAME}/{SHARD}: at byte {at} it has")), "{found}");
    }
}
