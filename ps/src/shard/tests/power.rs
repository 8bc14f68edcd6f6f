//! Power cuts: acknowledged pushes survive, for any mixture of pages on the disk.

use std::collections::BTreeMap;

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message;
use pushpull_common::protocol::{Message, Outcome, Refusal};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;
use pushpull_store::arena::{Arena, ArenaStorage};
use pushpull_store::commit::{COMMITTED, Journal};
use pushpull_store::layout::{Kind, PAGE_BYTES, Stamp};
use pushpull_store::planted::PlantedBugs;
use pushpull_store::testing::test_files::{Content, TestFiles};

use super::kept::FileCopies;
use super::peers::{Push, bytes_of, chief, f32s, worker};
use super::random::Random;
use super::synchronous::synchronous;
use super::world::{ConnectionId, LIFE, World};
use crate::config::{Durability, PsConfig, Storage};
use crate::error::StorageError;
use crate::shard::file_work::saver_order::{SaverEvent, SaverOrder};
use crate::shard::{Shard, ShardInput};

const ELEMENTS: u64 = 4000;
const SEEDS: u64 = 40;

fn world(planted: PlantedBugs) -> (World, ConnectionId) {
    let variables = vec![VariableSpec::f32("w", [ELEMENTS]).unwrap()];
    let (world, lines) = World::ready(variables, Sgd::new(1.0), |config| {
        let config =
            config.storage(Storage::memory().durability(Durability::Power)).inbox_pushes(2);
        PsConfig { block_bytes: 2048, planted, ..config }
    });
    (world, lines[0])
}

/// Pushes a gradient that adds 1 to all elements, and holds back the flush.
fn push(world: &mut World, line: ConnectionId, sequence: u64) -> pushpull_common::ids::RequestId {
    let grant = world.token(line);
    let push_slot = world.push_slot(line);
    let body = bytes_of(&vec![-1_f32; ELEMENTS as usize]);
    world.holds_flushes = true;
    let request = world.push(line, &Push::gradient(sequence, grant, push_slot), &[(0, &body)]);
    world.work();
    request
}

/// Returns the files that a power cut leaves. Each page has, at random, what was flushed last or
/// what was written since.
fn cut(world: &World, random: &mut Random) -> FileCopies {
    let now = world.shard_files[0].contents();
    let disk = world.shard_files[0].disk().clone();
    let mut files = BTreeMap::new();
    for (name, content) in now {
        let bytes = content.to_vec();
        let old = disk.get(&name).cloned().unwrap_or_default();
        let mixed = bytes.chunks(4096).enumerate().flat_map(|(page, new)| {
            let start = page * 4096;
            let old = old.get(start..start + new.len());
            // A page that was never flushed may be on the disk all the same, or be zeros.
            let old = old.map_or_else(|| vec![0; new.len()], <[u8]>::to_vec);
            // The name and the length of an unflushed file may be on the disk.
            if random.one_in(2) { new.to_vec() } else { old }
        });
        let mixed: Vec<u8> = mixed.collect();
        // The first pages were flushed before anything was answered.
        files.insert(name, mixed);
    }
    // Images, what they name, and the control file were flushed together with their names.
    for (name, bytes) in &disk {
        if name.starts_with("image") || name.starts_with("catalogue") {
            files.insert(name.clone(), bytes.clone());
        }
    }
    let control = disk.get("control").cloned();
    let control = control.or_else(|| files.get("control").cloned());
    files.extend(control.map(|bytes| ("control".to_owned(), bytes)));
    files.into_iter().map(|(name, bytes)| (name, Content::of(&bytes))).collect()
}

#[test]
fn a_cut_while_an_arena_is_created_leaves_none() {
    let (world, _) = world(PlantedBugs::default());
    let open = |files: BTreeMap<String, Vec<u8>>| {
        let storage = ArenaStorage::TestFiles(TestFiles::with(files));
        Shard::open(world.parts(0), storage, LIFE, world.now)
    };
    // Creates both files as the creation of an arena does.
    let test_files = TestFiles::default();
    let stamp = Stamp { shard: Default::default(), arena: LIFE.arena };
    let arena = Arena { storage: ArenaStorage::TestFiles(test_files.clone()), stamp };
    Journal::idle_intent(&arena, 100, 0).unwrap();
    let control = arena.create(Kind::Control, 0, PAGE_BYTES as u64).unwrap();
    arena.storage.rename("control", "control.new").unwrap();
    drop(control);
    let made: BTreeMap<String, Vec<u8>> = test_files
        .contents()
        .iter()
        .map(|(name, content)| (name.clone(), content.to_vec()))
        .collect();
    // What a cut may leave of a file: no name, no length, no page, some pages, or all.
    let left = |name: &str| {
        let whole = made[name].clone();
        let mut pages: Vec<Vec<u8>> = (0..2)
            .map(|page| {
                let mut some = vec![0; whole.len()];
                let page = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
                some[page.clone()].copy_from_slice(&whole[page]);
                some
            })
            .collect();
        pages.extend([Vec::new(), vec![0; whole.len()], whole]);
        std::iter::once(None).chain(pages.into_iter().map(Some)).collect::<Vec<_>>()
    };
    let mut cuts = 0;
    let intents = left("intent");
    for control in left("control.new") {
        for intent in intents.clone() {
            let named = [("control.new", control.clone()), ("intent", intent)];
            let named = named.into_iter().filter_map(|(name, bytes)| Some((name.into(), bytes?)));
            open(named.collect()).unwrap();
            cuts += 1;
        }
    }
    assert_eq!(cuts, 36);
    // The files of an arena with commits are not taken for an unfinished creation.
    let committed = world.files(0);
    let others = ["values-1", "image-0", "image-1", "tables-1"];
    for alone in [&["intent"][..]].into_iter().chain(others.iter().map(std::slice::from_ref)) {
        let files = alone.iter().map(|&name| (name.to_owned(), committed[name].clone()));
        let mut files: BTreeMap<_, _> = files.collect();
        let error = open(files.clone()).unwrap_err();
        assert!(matches!(error, StorageError::Missing { .. }), "{alone:?}: {error}");
        if *alone != ["intent"] {
            files.insert("intent".to_owned(), made["intent"].clone());
            let error = open(files).unwrap_err();
            assert!(matches!(error, StorageError::Missing { .. }), "{alone:?}: {error}");
        }
    }
}

/// Random runs that end with power cuts. Panics if an acknowledged push is lost. Returns the number
/// of cuts and of acknowledged pushes.
pub(super) fn cuts(seeds: std::ops::Range<u64>, planted: PlantedBugs) -> (usize, usize) {
    let mut cuts = 0;
    let mut acknowledged = 0;
    for seed in seeds {
        let seed_guard = super::random::PrintSeedOnPanic(seed);
        let mut random = Random::new(seed);
        let (mut world, mut reader) = world(planted);
        let mut peers = [worker(1), worker(2)];
        let mut known = 0;
        for _ in 0..4 {
            peers = peers.map(|peer| peer.restarted());
            let lines = [0, 1].map(|index| world.join(0, &mut peers[index]));
            for sequence in 1..=1 + random.below(5) {
                let begun = lines.map(|line| (line, world.token(line), world.push_slot(line)));
                world.holds_flushes = true;
                let asked = begun.map(|(line, grant, push_slot)| {
                    let body = bytes_of(&vec![-1_f32; ELEMENTS as usize]);
                    let push = Push::gradient(sequence, grant, push_slot);
                    let request = world.push(line, &push, &[(0, &body)]);
                    world.work();
                    if random.one_in(2) {
                        world.flush();
                    }
                    (line, request)
                });
                for (line, request) in asked {
                    let Some(answer) = world.answer(line, request) else { continue };
                    let Message::PushAnswer(answer) = answer else { panic!("{answer:?}") };
                    let Outcome::Applied { version, .. } = answer.outcome else { panic!() };
                    known = known.max(version);
                    acknowledged += 1;
                }
                if random.one_in(3) {
                    break;
                }
                world.flush();
                world.holds_flushes = false;
            }
            if random.one_in(2) {
                // The shard has committed more than is on the disk. Once killed and restarted, it
                // continues with the whole pushes in its inbox.
                world.flush();
                world.holds_flushes = false;
                let begun = lines.map(|line| (line, world.token(line), world.push_slot(line)));
                world.holds_flushes = true;
                let body = bytes_of(&vec![-1_f32; ELEMENTS as usize]);
                for (line, grant, push_slot) in begun {
                    world.work();
                    world.push(line, &Push::gradient(900, grant, push_slot), &[(0, &body)]);
                }
                world.restart(0).unwrap();
                world.work();
            }
            let files = cut(&world, &mut random);
            world.holds_flushes = false;
            world.reboot(0, files).unwrap();
            cuts += 1;
            reader = world.join(0, &mut chief());
            let values = f32s(&world.values(reader));
            assert!(values.iter().all(|&value| value == values[0]), "torn");
            assert!(values[0] >= known as f32, "{known} were answered, {} are there", values[0]);
            known = values[0] as u64;
        }
        let _ = reader;
        drop(seed_guard);
    }
    (cuts, acknowledged)
}

#[test]
fn acknowledged_pushes_survive_power_cuts() {
    let (cuts, acknowledged) = cuts(0..SEEDS, PlantedBugs::default());
    println!("{acknowledged} pushes acknowledged over {cuts} cuts, none lost");
}

// S-1.
#[test]
fn an_answer_waits_for_the_disk() {
    let (mut world, line) = world(PlantedBugs::default());
    let request = push(&mut world, line, 1);
    assert_eq!(world.answer(line, request), None);
    world.holds_flushes = false;
    world.flush();
    assert!(matches!(world.answer(line, request), Some(Message::PushAnswer(_))));
    // Without a flushed image of any boot, there is nothing to recover from.
    let mut files = world.shard_files[0].contents();
    files.retain(|name, _| !name.starts_with("image"));
    let error = world.reboot(0, files).unwrap_err().to_string();
    assert!(error.contains("rebooted"), "{error}");
}

#[test]
fn an_image_that_is_still_in_the_outputs_blocks_nothing() {
    let (mut world, line) = world(PlantedBugs::default());
    world.works_at_once = true;
    for sequence in 1..=3 {
        let request = push(&mut world, line, sequence);
        world.holds_flushes = false;
        world.flush();
        world.tick();
        let answer = world.answer(line, request);
        assert!(matches!(answer, Some(Message::PushAnswer(_))), "{answer:?}");
    }
}

// S-5.
#[test]
fn a_failed_flush_ends_pushes_for_good() {
    let (mut world, line) = world(PlantedBugs::default());
    let request = push(&mut world, line, 1);
    world.fail_flush("the disk is gone");
    assert_eq!(world.answer(line, request), None, "a push that is not on the disk is not answered");
    assert!(world.closed.contains(&line));
    world.holds_flushes = false;
    world.disconnect(line);
    let line = world.join(0, &mut chief());
    let asked: [Message; 3] = [
        message::Reserve {}.into(),
        message::TokenRequest { newest: TokenId(0) }.into(),
        // The push is applied, but it is not on the disk.
        message::OutcomeQuery {}.into(),
    ];
    for message in asked {
        let refusal = world.refused(line, message);
        let Refusal::Storage { detail } = refusal else { panic!("{refusal}") };
        assert!(detail.as_str().contains("the disk is gone"), "{detail}");
    }
    assert_eq!(f32s(&world.values(line)).len(), ELEMENTS as usize, "the values can be read");
}

// S-5.
#[test]
fn a_failed_flush_ends_synchronous_steps_for_good() {
    let variables = vec![VariableSpec::f32("w", [ELEMENTS]).unwrap()];
    let (mut world, lines) = World::ready(variables, Sgd::new(1.0), |config| {
        config.storage(Storage::memory().durability(Durability::Power)).mode(synchronous(1, 1))
    });
    let grant = world.token(lines[0]);
    let push_slot = world.push_slot(lines[0]);
    world.holds_flushes = true;
    let body = bytes_of(&vec![-1_f32; ELEMENTS as usize]);
    world.push(lines[0], &Push::gradient(1, grant, push_slot), &[(0, &body)]);
    assert!(world.shards[0].has_work(), "the step is committed, and is to be applied");
    world.fail_flush("the disk is gone");
    world.tick();
    assert!(!world.shards[0].has_work(), "a step whose commit is not on the disk is not applied");
}

#[test]
fn the_saver_receives_its_orders_although_a_flush_fails() {
    let (mut world, line) = world(PlantedBugs::default());
    push(&mut world, line, 1);
    let save_request = SaverEvent::SaveRequested { ticket: 7, user: Vec::new() };
    world.input(0, ShardInput::SaverEvent(save_request));
    assert!(world.orders.is_empty(), "orders wait for the image");
    world.fail_flush("the disk is gone");
    let orders = std::mem::take(&mut world.orders);
    assert!(matches!(orders[..], [(_, SaverOrder::ReportSave { ticket: 7, .. })]), "{orders:?}");
}

#[test]
fn a_failed_flush_is_remembered_by_the_next_process() {
    let (mut world, line) = world(PlantedBugs::default());
    push(&mut world, line, 1);
    world.fail_flush("the disk is gone");
    world.holds_flushes = false;
    // Every attempt fails, because a refused arena is not changed.
    for _ in 0..2 {
        let error = world.restart(0).unwrap_err();
        let StorageError::Poisoned { path, reason } = &error else { panic!("{error}") };
        assert!(path.ends_with("control"), "{error}");
        assert_eq!(reason, "the disk is gone");
        assert!(error.to_string().contains("put the state directory aside"), "{error}");
    }
    // A reboot takes the shard back to the last flushed image.
    let files = world.shard_files[0].contents();
    world.reboot(0, files).unwrap();
    let line = world.join(0, &mut chief());
    assert_eq!(f32s(&world.values(line)), vec![0.0; ELEMENTS as usize], "the acknowledged values");
    world.restart(0).unwrap();
}

#[test]
fn a_failed_flush_is_remembered_even_if_its_commit_is_interrupted() {
    let (mut world, line) = world(PlantedBugs::default());
    push(&mut world, line, 1);
    let before = world.files(0);
    world.fail_flush("the disk is gone");
    let after = world.files(0);
    // The failure is committed in the intent, but none of its words is stored in place yet.
    let mut files = after.clone();
    files.insert("control".to_owned(), before["control"].clone());
    let state = PAGE_BYTES + 4..PAGE_BYTES + 8;
    let intent = files.get_mut("intent").unwrap();
    intent[state].copy_from_slice(&COMMITTED.to_le_bytes());
    let error = world.reopen(0, files).unwrap_err();
    assert!(matches!(error, StorageError::Poisoned { .. }), "{error}");
}
