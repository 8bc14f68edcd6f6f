//! The loss of power: what was answered is there after it, whichever pages were.

use std::collections::BTreeMap;

use pushpull_common::ids::TokenId;
use pushpull_common::protocol::message;
use pushpull_common::protocol::{Message, Outcome, Refusal};
use pushpull_common::variable::VariableSpec;

use super::kept::Files;
use super::peers::{Push, bytes_of, chief, f32s, worker};
use super::random::Random;
use super::world::{LIFE, Line, World};
use crate::arena::shelf::{Content, Shelf};
use crate::arena::{Arena, Place};
use crate::commit::{COMMITTED, Journal};
use crate::config::{Durability, PsConfig};
use crate::error::StorageError;
use crate::layout::{Kind, PAGE_BYTES, Stamp};
use crate::optimizer::Sgd;
use crate::planted::PlantedBugs;
use crate::shard::checkpoints::{News, Order};
use crate::shard::{Input, Shard};

const ELEMENTS: u64 = 4000;
const SEEDS: u64 = 40;

fn world(planted: PlantedBugs) -> (World, Line) {
    let variables = vec![VariableSpec::f32("w", [ELEMENTS]).unwrap()];
    let (world, lines) = World::ready(variables, Sgd::new(1.0), |config| {
        let config = config.durability(Durability::Power).inbox_pushes(2);
        PsConfig { block_bytes: 2048, planted, ..config }
    });
    (world, lines[0])
}

/// Pushes ones to all elements, and holds the disk up.
fn push(world: &mut World, line: Line, sequence: u64) -> pushpull_common::ids::RequestId {
    let grant = world.token(line);
    let push_slot = world.push_slot(line);
    let body = bytes_of(&vec![-1_f32; ELEMENTS as usize]);
    world.holds_flushes = true;
    let request = world.push(line, &Push::gradient(sequence, grant, push_slot), &[(0, &body)]);
    world.work();
    request
}

/// What a cut leaves: of every page what was last put on the disk, or what was written since.
fn cut(world: &World, random: &mut Random) -> Files {
    let now = world.shelves[0].contents();
    let disk = world.shelves[0].disk().clone();
    let mut files = BTreeMap::new();
    for (name, content) in now {
        let bytes = content.to_vec();
        let old = disk.get(&name).cloned().unwrap_or_default();
        let mixed = bytes.chunks(4096).enumerate().flat_map(|(page, new)| {
            let start = page * 4096;
            let old = old.get(start..start + new.len());
            // What was never put on the disk may be there all the same, or be zeros.
            let old = old.map_or_else(|| vec![0; new.len()], <[u8]>::to_vec);
            // The name and the length of a file that was never flushed may be there.
            if random.one_in(2) { new.to_vec() } else { old }
        });
        let mixed: Vec<u8> = mixed.collect();
        // The first pages were there before anything was answered.
        files.insert(name, mixed);
    }
    // What an image names, and the control file's first page, were flushed with their names.
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
fn what_a_cut_leaves_of_a_birth_is_no_arena() {
    let (world, _) = world(PlantedBugs::default());
    let open = |files: BTreeMap<String, Vec<u8>>| {
        let place = Place::Shelf(Shelf::with(files));
        Shard::open(world.parts(0), place, LIFE, world.now)
    };
    // Both files as they are made.
    let shelf = Shelf::default();
    let stamp = Stamp { shard: Default::default(), arena: LIFE.arena };
    let arena = Arena { place: Place::Shelf(shelf.clone()), stamp };
    Journal::idle_intent(&arena, 100, 0).unwrap();
    let control = arena.create(Kind::Control, 0, PAGE_BYTES as u64).unwrap();
    arena.place.rename("control", "control.new").unwrap();
    drop(control);
    let made: BTreeMap<String, Vec<u8>> =
        shelf.contents().iter().map(|(name, content)| (name.clone(), content.to_vec())).collect();
    // What may be there of a file: no name, no length, no page, some pages, all.
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
    let (mut cuts, intents) = (0, left("intent"));
    for control in left("control.new") {
        for intent in intents.clone() {
            let named = [("control.new", control.clone()), ("intent", intent)];
            let named = named.into_iter().filter_map(|(name, bytes)| Some((name.into(), bytes?)));
            open(named.collect()).unwrap();
            cuts += 1;
        }
    }
    assert_eq!(cuts, 36);
    // What somebody has committed to is not such.
    let lived = world.files(0);
    let others = ["values-1", "image-0", "image-1", "tables-1"];
    for alone in [&["intent"][..]].into_iter().chain(others.iter().map(std::slice::from_ref)) {
        let files = alone.iter().map(|&name| (name.to_owned(), lived[name].clone()));
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

/// Lives that end with a cut; panics if anything answered is lost.
pub(super) fn cuts(seeds: std::ops::Range<u64>, planted: PlantedBugs) -> (usize, usize) {
    let (mut cuts, mut acknowledged) = (0, 0);
    for seed in seeds {
        let told = super::random::TellSeed(seed);
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
                // It has committed more than is on the disk. Killed, and started again, it would go
                // on with what lies whole in its inbox.
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
        drop(told);
    }
    (cuts, acknowledged)
}

#[test]
fn what_was_answered_survives_the_loss_of_power() {
    let (cuts, acknowledged) = cuts(0..SEEDS, PlantedBugs::default());
    println!("{acknowledged} pushes acknowledged over {cuts} cuts, none lost");
}

#[test]
fn an_answer_waits_for_the_disk() {
    let (mut world, line) = world(PlantedBugs::default());
    let request = push(&mut world, line, 1);
    assert_eq!(world.answer(line, request), None);
    world.holds_flushes = false;
    world.flush();
    assert!(matches!(world.answer(line, request), Some(Message::PushAnswer(_))));
    // Without a durable image of this boot or another, there is nothing to go on from.
    let mut files = world.shelves[0].contents();
    files.retain(|name, _| !name.starts_with("image"));
    let error = world.reboot(0, files).unwrap_err().to_string();
    assert!(error.contains("started anew"), "{error}");
}

#[test]
fn an_image_that_nobody_has_taken_yet_waits_for_nothing() {
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

#[test]
fn a_flush_that_fails_ends_pushes_for_good() {
    let (mut world, line) = world(PlantedBugs::default());
    let request = push(&mut world, line, 1);
    world.fail_flush("the disk is gone");
    assert_eq!(world.answer(line, request), None, "what is not on the disk is not answered");
    assert!(world.closed.contains(&line));
    world.holds_flushes = false;
    world.disconnect(line);
    let line = world.join(0, &mut chief());
    let asked: [Message; 3] = [
        message::Reserve {}.into(),
        message::TokenRequest { newest: TokenId(0) }.into(),
        // The push is applied, and is not on the disk.
        message::OutcomeQuery {}.into(),
    ];
    for message in asked {
        let refusal = world.refused(line, message);
        let Refusal::Storage { detail } = refusal else { panic!("{refusal}") };
        assert!(detail.as_str().contains("the disk is gone"), "{detail}");
    }
    assert_eq!(f32s(&world.values(line)).len(), ELEMENTS as usize, "but it can be read");
}

#[test]
fn the_saver_has_its_orders_though_a_flush_fails() {
    let (mut world, line) = world(PlantedBugs::default());
    push(&mut world, line, 1);
    let wished = News::Wished { ticket: 7, user: Vec::new() };
    world.input(0, Input::News(wished));
    assert!(world.orders.is_empty(), "an image is waited for");
    world.fail_flush("the disk is gone");
    let orders = std::mem::take(&mut world.orders);
    assert!(matches!(orders[..], [(_, Order::Tell { ticket: 7, .. })]), "{orders:?}");
}

#[test]
fn a_flush_that_failed_is_not_forgotten_by_the_next_process() {
    let (mut world, line) = world(PlantedBugs::default());
    push(&mut world, line, 1);
    world.fail_flush("the disk is gone");
    world.holds_flushes = false;
    // As often as it is tried: what is refused is left as it was.
    for _ in 0..2 {
        let error = world.restart(0).unwrap_err();
        let StorageError::Poisoned { path, reason } = &error else { panic!("{error}") };
        assert!(path.ends_with("control"), "{error}");
        assert_eq!(reason, "the disk is gone");
        assert!(error.to_string().contains("put the state directory aside"), "{error}");
    }
    // Once the machine was started anew, it is as if the process had not come that far.
    let files = world.shelves[0].contents();
    world.reboot(0, files).unwrap();
    let line = world.join(0, &mut chief());
    assert_eq!(f32s(&world.values(line)), vec![0.0; ELEMENTS as usize], "what was answered");
    world.restart(0).unwrap();
}

#[test]
fn a_flush_that_failed_is_not_forgotten_whenever_the_process_is_killed() {
    let (mut world, line) = world(PlantedBugs::default());
    push(&mut world, line, 1);
    let before = world.files(0);
    world.fail_flush("the disk is gone");
    let after = world.files(0);
    // The commit is made, and no word of it is stored where it belongs.
    let mut files = after.clone();
    files.insert("control".to_owned(), before["control"].clone());
    let state = PAGE_BYTES + 4..PAGE_BYTES + 8;
    let intent = files.get_mut("intent").unwrap();
    intent[state].copy_from_slice(&COMMITTED.to_le_bytes());
    let error = world.reopen(0, files).unwrap_err();
    assert!(matches!(error, StorageError::Poisoned { .. }), "{error}");
}
