//! The files of a state directory of this format.

use std::fmt::Write;
use std::path::PathBuf;

use pushpull_optim::optimizer::Adam;
use pushpull_store::layout::FORMAT;
use sha2::{Digest, Sha256};

use super::peers::{variables, worker};
use super::world::World;

/// A change of the bytes needs another format: `open` then refuses the older ones, and says what to
/// do. This test then writes another list.
#[test]
fn a_state_has_the_bytes_of_its_format() {
    let (mut world, _) = World::ready(variables(), Adam::new(0.5), |config| config);
    world.join(0, &mut worker(1));
    world.join(0, &mut worker(2));
    world.tick();
    let mut found = format!("A state of format {FORMAT}: its files, and the SHA-256 of each.\n");
    for (name, bytes) in world.files(0) {
        let digest = Sha256::digest(&bytes);
        let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let _ = writeln!(found, "{name} {} {digits}", bytes.len());
    }
    let name = format!("src/shard/tests/golden/format_{FORMAT}.txt");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name);
    if std::env::var_os("PUSHPULL_BLESS").is_some() && !path.exists() {
        std::fs::write(&path, &found).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, golden, "the files have other bytes: raise FORMAT");
}
