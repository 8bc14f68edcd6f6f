//! Forged arenas: the checksums are valid and some words are wrong. A shard refuses such an arena,
//! or opens it and works.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use pushpull_common::protocol::{Message, message};
use pushpull_store::commit::reseal;
use pushpull_store::layout::{Kind, PAGE_BYTES};
use pushpull_store::undo;

use super::arenas::{Files, file_mut, images, train, world};
use super::peers::{Push, bytes_of, worker};
use super::random::{PrintSeedOnPanic, Random, is_thorough};
use super::world::{LIFE, World};

/// The number of forged arenas, normally and in a thorough run. `PUSHPULL_LIARS` overrides it.
const FORGED_ARENAS: u64 = 1_000;
const FORGED_ARENAS_THOROUGH: u64 = 5_000;

/// The words of the shard and the numbers of its commits.
const SHARD_WORDS: [std::ops::Range<usize>; 2] = [0..19, 509..511];

/// Wrong numbers of special interest, besides those close to the right one.
const NUMBERS: [u64; 12] =
    [0, 1, 2, 3, 8, 64, 4096, 1 << 31, u32::MAX as u64, 1 << 40, 1 << 62, u64::MAX];

/// Overwrites a word of a file with a wrong number.
fn overwrite_word(file: &mut [u8], word: usize, random: &mut Random) {
    let at = word * 8;
    if file.len() < at + 8 {
        return;
    }
    let right = u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let other = random.below((file.len() / 8) as u64) as usize * 8;
    let wrong = match random.below(8) {
        0..=2 => NUMBERS[random.below(NUMBERS.len() as u64) as usize],
        3 => right.wrapping_add(1),
        4 => right.wrapping_sub(1),
        5 => right ^ 1 << random.below(64),
        6 => random.below(1 << 12),
        _ => u64::from_le_bytes(file[other..other + 8].try_into().unwrap()),
    };
    file[at..at + 8].copy_from_slice(&wrong.to_le_bytes());
}

/// Chooses the word of a file to overwrite.
fn choose_word(kind: &str, random: &mut Random) -> usize {
    let behind = PAGE_BYTES / 8;
    match kind {
        "control" if random.one_in(2) => {
            let words = SHARD_WORDS[usize::from(random.one_in(8))].clone();
            behind + words.start + random.below(words.len() as u64) as usize
        }
        // Of one of the three clients.
        "control" => behind * (2 + random.below(3) as usize) + random.below(330) as usize,
        "tables" => behind + random.below(64) as usize,
        "intent" => behind + random.below(400) as usize,
        "undo" => behind + random.below(24) as usize,
        "catalogue" => behind + random.below(24) as usize,
        // A word of the first page.
        _ => random.below(24) as usize,
    }
}

/// Overwrites words of these files and recomputes their checksums. Returns what was changed.
fn forge(files: &mut Files, random: &mut Random) -> Vec<String> {
    let names: Vec<String> = files.keys().cloned().collect();
    let mut changes = Vec::new();
    for _ in 0..1 + random.below(3) {
        let kinds = ["control", "control", "tables", "tables", "intent", "undo", "catalogue"];
        let kind = match random.below(10) as usize {
            index if index < kinds.len() => kinds[index],
            _ => "",
        };
        let any = &names[random.below(names.len() as u64) as usize];
        let name = names.iter().find(|name| name.starts_with(kind) && !kind.is_empty());
        let name = name.unwrap_or(any);
        let word = choose_word(kind, random);
        overwrite_word(file_mut(files, name), word, random);
        changes.push(format!("word {word} of {name}"));
        if random.one_in(16) {
            let length = random.below(files[name].len() as u64 * 2) as usize;
            file_mut(files, name).resize(length, 0);
            changes.push(format!("{length} bytes of {name}"));
        }
    }
    let catalogue = &files["catalogue-1"];
    if let Some(encoded) = catalogue.get(PAGE_BYTES..) {
        use sha2::Digest;
        let digest: [u8; 32] = sha2::Sha256::digest(encoded).into();
        if let Some(words) = file_mut(files, "control").get_mut(PAGE_BYTES + 64..PAGE_BYTES + 96) {
            words.copy_from_slice(&digest);
        }
    }
    for name in names {
        let file = file_mut(files, &name);
        if file.len() < PAGE_BYTES {
            continue;
        }
        let crc = u64::from(crc32c::crc32c(&file[..PAGE_BYTES - 8]));
        file[PAGE_BYTES - 8..PAGE_BYTES].copy_from_slice(&crc.to_le_bytes());
        match name.as_str() {
            "control" => reseal(file, LIFE.arena, Kind::Control, 0),
            "tables-1" => reseal(file, LIFE.arena, Kind::Tables, 1),
            "intent" => reseal(file, LIFE.arena, Kind::Intent, 0),
            "undo-1" => undo::reseal(file),
            _ => {}
        }
    }
    changes
}

/// Exercises a shard: it finishes its work, serves clients that train and pull, and restarts.
fn exercise(world: &mut World) {
    world.work();
    for task in [7, 1] {
        let Ok(line) = world.try_join(0, &mut worker(task).restarted()) else { continue };
        let newest = pushpull_common::ids::TokenId(u64::MAX);
        let token = world.say(line, message::TokenRequest { newest }.into());
        let push_slot = world.say(line, message::Reserve {}.into());
        world.work();
        if let Some(Message::Granted(granted)) = world.answer(line, token)
            && let Some(Message::Reserved(push_slot)) = world.answer(line, push_slot)
        {
            let push = Push::gradient(1, granted.grant, push_slot.push_slot);
            world.push(line, &push, &[(0, &bytes_of(&[1.0_f32; 110]))]);
        }
        world.work();
        world.pull(line, 0);
        world.work();
        drop(world.streamed(line));
    }
    world.pass(Duration::from_millis(100), &[]);
    world.restart(0).expect("the shard opens its own files");
    world.work();
}

#[test]
fn forged_arenas_are_refused_or_work() {
    let seed = std::env::var("PUSHPULL_SEED").ok().and_then(|seed| seed.parse().ok());
    let arena_count = if is_thorough() { FORGED_ARENAS_THOROUGH } else { FORGED_ARENAS };
    let arena_count =
        std::env::var("PUSHPULL_LIARS").map_or(arena_count, |count| count.parse().unwrap());
    let seeds = seed.map_or(0..arena_count, |seed: u64| seed..seed + 1);
    let states: Vec<_> = [false, true].map(images).into_iter().flatten().collect();
    let mut refused = 0;
    let mut works = 0;
    for seed in seeds {
        let _seed_guard = PrintSeedOnPanic(seed);
        let mut random = Random::new(seed);
        let image = &states[random.below(states.len() as u64) as usize];
        let mut files = image.files.clone();
        let changes = forge(&mut files, &mut random);
        let mut world = world(LIFE, 1, false);
        let plain = files.into_iter().map(|(name, bytes)| (name, bytes.to_vec())).collect();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let opened = world.reopen(0, plain);
            opened.map(|()| exercise(&mut world))
        }));
        match outcome {
            Ok(Ok(())) => works += 1,
            Ok(Err(error)) => {
                assert!(error.to_string().len() > 20, "{error}");
                refused += 1;
            }
            Err(_) => panic!("{changes:?} of {} panics", image.name),
        }
    }
    println!("{refused} forged arenas are refused, {works} work");
}

#[test]
fn an_intact_arena_works() {
    let mut world = world(LIFE, 1, true);
    train(&mut world);
    world.restart(0).unwrap();
    exercise(&mut world);
}
