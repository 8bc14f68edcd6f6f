//! Files with holes: on a file system, what is not used has no memory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::Operation;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;
use pushpull_store::arena::{ArenaStorage, Memory, StateDirectory};
use pushpull_store::store::Snapshot;

use super::peers::{Push, bytes_of, f32s, worker};
use super::shared_values::at;
use super::world::{LIFE, World};
use crate::shard::Shard;
use crate::shard::opening::shard_setup::ServerRun;

const MIB: u64 = 1 << 20;

/// The bytes of the values: 16 blocks of the default size.
const BYTES: usize = 1 << 20;

/// Returns the bytes that a file takes on disk, rounded down to sixteenths of the values.
fn sixteenths(folder: &Path, kind: &str) -> u64 {
    let named = |name: &str| name.split('-').next() == Some(kind);
    let entries = fs::read_dir(folder.join("shard-0")).unwrap().map(Result::unwrap);
    let files = entries.filter(|entry| named(&entry.file_name().to_string_lossy()));
    let bytes: u64 = files.map(|file| file.metadata().unwrap().blocks() * 512).sum();
    16 * bytes / MIB
}

/// Pins all blocks as they are, as a pull does.
fn pin_all(world: &World) -> Snapshot {
    let store = world.shards[0].variables.store().unwrap();
    store.snapshot(std::slice::from_ref(&(0..store.layout().bytes())))
}

/// Whether the file system makes holes in files. Without that memory stays with the files.
fn makes_holes(folder: &Path) -> bool {
    let options = fs::OpenOptions::new().read(true).write(true).create_new(true).clone();
    let probe = options.open(folder.join("probe")).unwrap();
    probe.set_len(MIB).unwrap();
    let mut probe = Memory::of_file(probe).unwrap();
    probe.occupy(0..MIB as usize).unwrap();
    probe.vacate(0..MIB as usize)
}

#[test]
fn only_what_is_used_has_memory_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    if !makes_holes(folder.path()) {
        return println!("skipped: this file system makes no holes in files");
    }
    let state = StateDirectory::open(&folder.path().join("state")).unwrap();
    let storage = || ArenaStorage::Folder(state.shard(0).unwrap());
    let sixteenths = |kind| sixteenths(&folder.path().join("state"), kind);
    let variables = vec![VariableSpec::f32("w", [BYTES as u64 / 4]).unwrap().plain()];
    let mut world = at(storage(), variables, |config| config);
    let chief = world.begin()[0];
    world.disconnect(chief);
    // Values and their shadows, and the push slot that keeps its memory.
    assert_eq!((sixteenths("values"), sixteenths("inbox")), (32, 16));

    let lines = [1, 2].map(|task| world.join(0, &mut worker(task)));
    let slots = lines.map(|line| world.push_slot(line));
    assert_eq!(sixteenths("inbox"), 32);
    let ones = bytes_of(&vec![1_f32; BYTES / 4]);
    let add = |sequence, push_slot| Push::plain(sequence, Operation::AssignAdd {}, push_slot);
    let push = |world: &mut World, line: usize, push: Push| {
        let answer = world.push_answer(lines[line], &push, &[(0, &ones)]);
        assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    };
    // The second push needs other blocks than those that a pull has pinned.
    let pinned = pin_all(&world);
    push(&mut world, 0, add(1, slots[0]));
    push(&mut world, 1, add(1, slots[1]));
    drop(pinned);
    assert_eq!((sixteenths("values"), sixteenths("inbox")), (48, 32));
    world.pass(Duration::from_secs(11), &lines);
    // A page at each end of a block belongs to its neighbour, too.
    assert!((32..36).contains(&sixteenths("values")), "{}", sixteenths("values"));
    assert_eq!(sixteenths("inbox"), 16);
    let slots = lines.map(|line| world.push_slot(line));
    let pinned = pin_all(&world);
    push(&mut world, 1, add(2, slots[1]));
    push(&mut world, 0, add(2, slots[0]));
    drop(pinned);
    assert_eq!((sixteenths("values"), sixteenths("inbox")), (48, 32));
    let values = world.values(lines[0]);
    assert!(f32s(&values).iter().all(|&value| value == 4.0));

    // A killed process leaves more than the next one needs.
    let life = ServerRun { arena: 2, ..LIFE };
    let next = Shard::open(world.parts(0), storage(), life, world.now).unwrap();
    std::mem::forget(std::mem::replace(&mut world.shards[0], next));
    assert!((32..36).contains(&sixteenths("values")), "{}", sixteenths("values"));
    assert_eq!(sixteenths("inbox"), 16);
    let line = world.join(0, &mut worker(3));
    assert_eq!(world.values(line), values);
}

/// Free blocks that a change counts on do not lose their memory, even if the next ones are due.
#[test]
fn an_update_under_way_keeps_the_blocks_that_it_needs() {
    const PARTS: u64 = 4;
    let variables = vec![VariableSpec::f32("w", [PARTS * MIB / 4]).unwrap().plain()];
    let (mut world, _) = World::ready(variables, Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut worker(1));
    let ones = bytes_of(&vec![1_f32; BYTES / 4]);
    let begin = |world: &mut World, sequence| {
        Push::plain(sequence, Operation::AssignAdd {}, world.push_slot(line))
    };
    let send = |world: &mut World, push: &Push, part: u64| {
        let whole = (part + 1 == PARTS).then_some(PARTS * MIB);
        world.send(line, push.envelope(), push.part(part * MIB, whole), &ones)
    };
    let pinned = pin_all(&world);
    for sequence in 1..=2 {
        let push = begin(&mut world, sequence);
        (0..PARTS).for_each(|part| _ = send(&mut world, &push, part));
        world.work();
    }
    drop(pinned);
    let before = world.bytes_left();
    world.pass(Duration::from_millis(4900), &[line]);
    assert_eq!(world.bytes_left(), before, "the blocks that the second push needed are there");
    let push = begin(&mut world, 3);
    (0..2).for_each(|part| _ = send(&mut world, &push, part));
    world.pass(Duration::from_millis(400), &[line]);
    let full = world.fill();
    (2..PARTS).for_each(|part| _ = send(&mut world, &push, part));
    world.work();
    assert!(f32s(&world.values(line)).iter().all(|&value| value == 3.0));
    drop(full);
    world.pass(Duration::from_secs(11), &[line]);
    assert!(world.bytes_left() >= before + PARTS * MIB, "they are given back afterwards");
}
