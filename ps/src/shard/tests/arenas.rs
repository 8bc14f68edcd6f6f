//! Images of an arena's files as a killed process can leave them, and the state that a shard
//! recovers from them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::shard::shard_files::client_record::ClientRecord;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::Operation;
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Adam;
use pushpull_store::arena::ArenaStorage;
use pushpull_store::commit::{Address, CELL_WORDS, COMMITTED};
use pushpull_store::layout::PAGE_BYTES;
use pushpull_store::testing::test_files::TestFiles;

use super::peers::{Push, bytes_of, worker};
use super::world::{ConnectionId, LIFE, World};
use crate::config::{PsConfig, Storage};
use crate::error::StorageError;
use crate::shard::opening::shard_setup::ServerRun;
use crate::shard::{Shard, VariablesState};

/// Files by name.
pub(super) type Files = BTreeMap<String, Arc<Vec<u8>>>;

/// State word of an undo file that holds the old rows of an uncommitted change.
const PREPARED: u64 = 0xa5a5_5a5a_f00f_0ff0;

/// `w` spans blocks; `ledger` and `n` are plain.
fn variables() -> Vec<VariableSpec> {
    vec![
        VariableSpec::f32("w", [100]).unwrap(),
        VariableSpec::new("d", DType::F64, Shape::new([5]).unwrap()).unwrap(),
        VariableSpec::f32("ledger", [4]).unwrap().plain(),
        VariableSpec::new("n", DType::I64, Shape::new([1]).unwrap()).unwrap(),
    ]
}

/// Bytes of the trained variables `w` and `d`; the plain variables start at this offset.
const TRAINED: usize = 440;

/// A world with these variables, not yet declared.
pub(super) fn world(life: ServerRun, shards: u16, integrity: bool) -> World {
    World::bare_as(life, variables(), Adam::new(0.5), |config| {
        let config = config
            .shards(shards)
            .inbox_pushes(3)
            .storage(Storage::memory().integrity_full(integrity));
        PsConfig { block_bytes: 128, ..config }
    })
}

/// Lets two clients push three times each, and leaves one more push whole in the inbox. Returns the
/// connection of the first client.
pub(super) fn train(world: &mut World) -> ConnectionId {
    world.begin();
    let lines = [1, 2].map(|task| world.join(0, &mut worker(task)));
    let gradient: Vec<f32> = (0..TRAINED / 4).map(|i| i as f32 / 64.0).collect();
    let body = bytes_of(&gradient);
    for sequence in 1..=3 {
        for line in lines {
            let grant = world.token(line);
            let push_slot = world.push_slot(line);
            let push = Push::gradient(sequence, grant, push_slot);
            world.push_answer(line, &push, &[(0, &body)]);
        }
    }
    world.token(lines[0]);
    let grant = world.token(lines[1]);
    let push_slot = world.push_slot(lines[1]);
    let push = Push::gradient(4, grant, push_slot);
    world.push(lines[1], &push, &[(0, &body)]);
    lines[0]
}

/// Converts files that a shard has left, so that images can share their bytes.
pub(super) fn files_of(files: BTreeMap<String, Vec<u8>>) -> Files {
    files.into_iter().map(|(name, bytes)| (name, bytes.into())).collect()
}

/// Adds to a few bytes of a plain variable in place.
fn touch(world: &mut World, line: ConnectionId, sequence: u64) {
    let push_slot = world.push_slot(line);
    let push = Push::plain(sequence, Operation::AssignAdd {}, push_slot);
    let body = bytes_of(&[7_i64]);
    let answer = world.push_answer(line, &push, &[(TRAINED as u64 + 16, &body)]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
}

/// One state of the files that a killed process can leave.
pub(super) struct Image {
    pub(super) name: &'static str,
    pub(super) files: Files,
}

pub(super) fn images(integrity: bool) -> Vec<Image> {
    let mut world = world(LIFE, 1, integrity);
    let line = train(&mut world);
    let idle = files_of(world.files(0));
    // Applies the push in the inbox, then changes a few bytes in place.
    world.work();
    let applied = files_of(world.files(0));
    touch(&mut world, line, 5);
    let touched = files_of(world.files(0));
    let part = |file: &str, from: &Files| (file.to_owned(), from[file].clone());
    // The push is committed in the intent, but none of its words is stored in place yet.
    let mut committed = applied.clone();
    committed.extend([part("control", &idle), part("tables-1", &idle)]);
    commit(file_mut(&mut committed, "intent"));
    // The bytes are changed in place, but not committed.
    let mut prepared = applied.clone();
    prepared.extend([part("values-1", &touched), part("slots-1", &touched)]);
    prepared.extend([part("undo-1", &touched)]);
    set_word(file_mut(&mut prepared, "undo-1"), 0, PREPARED);

    let decode = |files: &Files| Decoded::of(&world, files.clone(), LIFE).unwrap();
    assert_eq!(decode(&committed), decode(&applied), "recovery completes the commit");
    assert_ne!(decode(&idle), decode(&applied));
    assert_ne!(applied["values-1"], touched["values-1"], "the values are changed in place");
    assert_eq!(decode(&prepared).values, decode(&applied).values, "recovery undoes the change");
    vec![
        Image { name: "idle", files: idle },
        Image { name: "committed", files: committed },
        Image { name: "prepared", files: prepared },
    ]
}

/// Returns the bytes of a file for a change.
pub(super) fn file_mut<'a>(files: &'a mut Files, name: &str) -> &'a mut Vec<u8> {
    Arc::make_mut(files.get_mut(name).unwrap())
}

/// Marks a finished intent as committed, so that recovery completes it again.
fn commit(intent: &mut [u8]) {
    intent[PAGE_BYTES + 4..PAGE_BYTES + 8].copy_from_slice(&COMMITTED.to_le_bytes());
}

/// Sets a word after the first page.
fn set_word(file: &mut [u8], word: usize, value: u64) {
    let at = PAGE_BYTES + 8 * word;
    file[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Everything that a shard has recovered from its files.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    control: Vec<u64>,
    tables: Vec<u64>,
    values: Vec<u8>,
    slots: Vec<u8>,
    /// The bodies of whole pushes.
    bodies: Vec<u8>,
    jobs: usize,
}

impl Decoded {
    /// Opens these files as the first shard of this world and returns what it recovered.
    pub(super) fn of(
        world: &World,
        files: Files,
        life: ServerRun,
    ) -> Result<Decoded, StorageError> {
        Decoded::of_shard(world, 0, files, life)
    }

    pub(super) fn of_shard(
        world: &World,
        shard: usize,
        files: Files,
        life: ServerRun,
    ) -> Result<Decoded, StorageError> {
        let storage = ArenaStorage::TestFiles(TestFiles::with(files));
        let shard = Shard::open(world.parts(shard), storage, life, Instant::now())?;
        shard.check_invariants();
        let used = ClientRecord::first_word(shard.peers.registry.counts().0);
        let mut bodies = Vec::new();
        let inbox = shard.intake.inbox.as_ref();
        for (number, arrival) in inbox.into_iter().flat_map(|inbox| inbox.arrivals()) {
            for extent in arrival.extents.ranges() {
                bodies.extend_from_slice(inbox.unwrap().bytes(number, extent.clone()).unwrap());
            }
        }
        let mut tables = 0;
        let mut contents = Vec::new();
        if let VariablesState::Declared(store) | VariablesState::Ready(store) =
            &shard.variables.state
        {
            tables = CELL_WORDS;
            contents = store.contents();
        }
        let load = |words: usize, address: fn(usize) -> Address| {
            (0..words).map(|index| shard.files.journal.load(address(index))).collect()
        };
        let mut contents = contents.into_iter();
        let values = contents.next().unwrap_or_default();
        let slots = contents.collect::<Vec<Vec<u8>>>().concat();
        Ok(Decoded {
            control: load(used, Address::Control),
            tables: load(tables, Address::Tables),
            values,
            slots,
            bodies,
            jobs: shard.applier.jobs.len(),
        })
    }
}
