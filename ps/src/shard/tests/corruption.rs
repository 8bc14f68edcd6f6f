//! The corruption matrix of an arena: flipped bits, wrong lengths, swapped and missing files.
//!
//! Every bit is flipped in the first bytes of each page. One bit is flipped in each other byte, or
//! in one byte of five unless the run is thorough.
//!
//! A shard that opens a damaged arena must do one of two things. It refuses the arena with an error
//! that names the file, the place and the expected content, or it recovers exactly the state from
//! before the damage. It never accepts damage silently.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pushpull_store::arena::{GAP_BYTES, SKEW_BYTES};
use pushpull_store::layout::PAGE_BYTES;

use super::arenas::{Decoded, Files, files_of, images, train, world};
use super::random::{PrintSeedOnPanic, Random, is_thorough};
use super::world::{LIFE, World};
use crate::error::StorageError;
use crate::shard::opening::shard_setup::ServerRun;

/// The results of all cases of one kind of file.
#[derive(Debug, Default)]
struct Tally {
    cases: usize,
    refused: usize,
    harmless: usize,
    /// Accepted changes to values, slots or bodies: they have checksums with full integrity only.
    uncovered: usize,
}

/// An arena that is damaged in one way at a time.
struct DamageMatrix {
    world: World,
    files: Files,
    right: Decoded,
    integrity: bool,
    image: &'static str,
    tallies: BTreeMap<String, Tally>,
}

impl DamageMatrix {
    /// Opens the arena with these files replaced, or removed where there are no bytes, and checks
    /// the result.
    fn judge(&mut self, file: &str, what: &str, changed: Vec<(String, Option<Vec<u8>>)>) {
        let mut files = self.files.clone();
        for (name, bytes) in changed {
            match bytes {
                Some(bytes) => files.insert(name, bytes.into()),
                None => files.remove(&name),
            };
        }
        let opened = catch_unwind(AssertUnwindSafe(|| Decoded::of(&self.world, files, LIFE)));
        let case = format!("{} of {file} ({})", what, self.image);
        let opened = opened.unwrap_or_else(|_| panic!("{case} panics"));
        let tally = self.tallies.entry(file.trim_end_matches(DIGITS).to_owned()).or_default();
        tally.cases += 1;
        let bulk = BULK.contains(&file.trim_end_matches(DIGITS));
        match opened {
            Err(error) => {
                check_refusal(&case, &error);
                tally.refused += 1;
            }
            Ok(decoded) if decoded == self.right => tally.harmless += 1,
            Ok(_) if bulk && !self.integrity => tally.uncovered += 1,
            Ok(_) => panic!("{case} is silently accepted"),
        }
    }

    /// Checks the arena with one change to one file.
    fn change(&mut self, file: &str, what: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.files[file].to_vec();
        change(&mut bytes);
        self.judge(file, what, vec![(file.to_owned(), Some(bytes))]);
    }

    fn flip(&mut self, file: &str, at: usize, bits: u8) {
        self.change(file, &format!("bits {bits:#x} of byte {at}"), |bytes| bytes[at] ^= bits);
    }

    /// Flips single bits in a range: every bit at the start of a page, and elsewhere one bit in
    /// each byte or in a sample of the bytes.
    fn flip_each(&mut self, file: &str, range: Range<usize>, random: &mut Random) {
        let every = if is_thorough() { 1 } else { SAMPLE };
        for at in range {
            match at % PAGE_BYTES {
                0..HEADER_BYTES => (0..8).for_each(|bit| self.flip(file, at, 1 << bit)),
                _ if random.one_in(every) => self.flip(file, at, 1 << random.below(8)),
                _ => {}
            }
        }
    }

    /// Flips one bit in every byte of a page at once, and one bit in one byte of each page.
    fn flip_pages(&mut self, file: &str, range: Range<usize>, random: &mut Random) {
        for start in range.clone().step_by(PAGE_BYTES) {
            let end = range.end.min(start + PAGE_BYTES);
            let flips: Vec<u8> = (start..end).map(|_| 1 << random.below(8)).collect();
            self.change(file, &format!("a flip in each byte of {start}..{end}"), |bytes| {
                bytes[start..end].iter_mut().zip(flips).for_each(|(byte, flip)| *byte ^= flip);
            });
            let at = start + random.below((end - start) as u64) as usize;
            self.flip(file, at, 1 << random.below(8));
        }
    }

    fn flips(&mut self, random: &mut Random) {
        for (file, bytes) in self.files.clone() {
            let kind = file.trim_end_matches(DIGITS);
            // Skips the files that the first image or the run with full integrity covers.
            let is_covered_here = match self.image {
                "committed" => self.integrity && ["control", "tables", "intent"].contains(&kind),
                "prepared" => self.integrity && kind == "undo",
                _ => self.integrity || BULK.contains(&kind),
            };
            if !is_covered_here {
                continue;
            }
            if self.image == "idle" && self.integrity {
                self.flip_each(&file, 0..PAGE_BYTES, random);
            }
            let mut at = PAGE_BYTES;
            for used in self.used(&file, bytes.len()) {
                self.flip_pages(&file, at..used.start, random);
                self.flip_each(&file, used.clone(), random);
                at = used.end;
            }
            self.flip_pages(&file, at..bytes.len(), random);
        }
    }

    /// Returns the ranges of a file that are in use. They are flipped byte by byte.
    fn used(&self, file: &str, length: usize) -> Vec<Range<usize>> {
        let end = PAGE_BYTES..length;
        let each = |start, stride, bytes| -> Vec<Range<usize>> {
            let starts = (PAGE_BYTES + start..length).step_by(stride);
            starts.map(|start| start..length.min(start + bytes)).collect()
        };
        match file.trim_end_matches(DIGITS) {
            // The words of the shard and its three clients.
            "control" => each(0, length, 4 * PAGE_BYTES),
            "tables" | "catalogue" => vec![end],
            // The whole record of a change, or the few words that say that there is none.
            "intent" if self.image == "committed" => each(0, length, 2 * PAGE_BYTES),
            "undo" if self.image == "prepared" => each(0, length, PAGE_BYTES),
            "intent" | "undo" => each(0, length, 64),
            "inbox" => each(0, PAGE_BYTES, 464),
            "values" => each(0, 128 + GAP_BYTES, 128),
            // The blocks of the first optimizer slot, then those of the second.
            "slots" => {
                let blocks = self.files[&file.replace("slots", "values")].len() - PAGE_BYTES;
                let region = blocks.next_multiple_of(PAGE_BYTES) + SKEW_BYTES;
                let firsts = [0, region].map(|region| PAGE_BYTES + SKEW_BYTES + region);
                let all = firsts.map(|first| (first..first + blocks).step_by(128 + GAP_BYTES));
                all.into_iter().flatten().map(|start| start..start + 128).collect()
            }
            other => panic!("a file {other}"),
        }
    }

    fn lengths(&mut self) {
        for (file, bytes) in self.files.clone() {
            let length = bytes.len();
            let pages = (0..length).step_by(PAGE_BYTES);
            let odd = [1, 7, 8, 4095, 4097, 4104, length - 8, length - 1];
            for cut in pages.chain(odd).filter(|&cut| cut < length) {
                self.change(&file, &format!("a cut at {cut}"), |bytes| bytes.truncate(cut));
            }
            for more in [1, 8, PAGE_BYTES, 1 << 20] {
                self.change(&file, &format!("{more} more bytes"), |bytes| {
                    bytes.resize(length + more, 0);
                });
            }
            for start in (0..length).step_by(PAGE_BYTES) {
                self.change(&file, &format!("zeros in the page at {start}"), |bytes| {
                    bytes[start..length.min(start + PAGE_BYTES)].fill(0);
                });
            }
            self.judge(&file, "the absence", vec![(file.clone(), None)]);
        }
    }

    /// Replaces each file by that of another arena, and swaps the files of this arena in pairs.
    fn swaps(&mut self, others: &[(&str, Files)]) {
        for (file, bytes) in self.files.clone() {
            let kind = file.trim_end_matches(DIGITS).to_owned();
            for (whose, other) in others {
                let theirs = other.iter().find(|(name, _)| name.trim_end_matches(DIGITS) == kind);
                let (_, theirs) = theirs.expect("each arena has each kind");
                let what = format!("the file of {whose} in place");
                self.judge(&file, &what, vec![(file.clone(), Some(theirs.to_vec()))]);
            }
            for (name, other) in self.files.clone().iter().filter(|(name, _)| **name != file) {
                let ours = Some(bytes.to_vec());
                let theirs = Some(other.to_vec());
                let swapped = vec![(file.clone(), theirs), (name.clone(), ours)];
                self.judge(&file, &format!("a swap with {name}"), swapped);
            }
        }
    }

    /// Changes the format number of each file, with a valid checksum.
    fn formats(&mut self) {
        for file in self.files.keys().cloned().collect::<Vec<_>>() {
            for by in [-1, 1] {
                self.change(&file, &format!("format {by:+}"), |bytes| {
                    bytes[8] = bytes[8].wrapping_add_signed(by);
                    let crc = crc32c::crc32c(&bytes[..PAGE_BYTES - 8]);
                    let crc = u64::from(crc).to_le_bytes();
                    bytes[PAGE_BYTES - 8..PAGE_BYTES].copy_from_slice(&crc);
                });
            }
        }
    }
}

/// The kinds of files whose contents have checksums with full integrity only.
const BULK: [&str; 3] = ["values", "slots", "inbox"];
/// The characters of a generation in a file's name.
const DIGITS: &[char] = &['-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'];
/// One in this many bytes is flipped by itself, unless the run is thorough.
const SAMPLE: u64 = 5;
/// How many bytes at the start of a page have every bit flipped.
const HEADER_BYTES: usize = 64;

fn check_refusal(case: &str, error: &StorageError) {
    match error {
        StorageError::Corrupt { expected, .. } => assert!(!expected.is_empty()),
        StorageError::Missing { .. } => {}
        StorageError::OtherFormat { found, format, .. } => {
            assert!(case.starts_with("format") && case.contains(" of control "), "{case}: {error}");
            assert_ne!(found, format);
        }
        other => panic!("{case} is refused as {other}"),
    }
    assert!(error.to_string().contains("anonymous memory/"), "{case}: {error} names its file");
}

/// Other arenas: of the same shard in another process, of another shard of the task, and of the
/// same shard with the variables declared twice.
fn others(integrity: bool) -> Vec<(&'static str, Files)> {
    let mut foreign = world(ServerRun { arena: 99, ..LIFE }, 1, integrity);
    train(&mut foreign);
    let mut pair = world(LIFE, 2, integrity);
    pair.begin();
    let mut redeclared = world(LIFE, 1, integrity);
    let mut chief = super::peers::chief();
    let line = redeclared.join(0, &mut chief);
    let one = pushpull_common::variable::VariableSpec::f32("one", [1]).unwrap();
    let first = super::peers::place(vec![one], 1);
    redeclared.declare(line, &first);
    redeclared.disconnect(line);
    train(&mut redeclared);
    let redeclared = redeclared.files(0);
    assert!(redeclared.contains_key("values-2"), "{:?}", redeclared.keys());
    vec![
        ("another arena", files_of(foreign.files(0))),
        ("another shard", files_of(pair.files(1))),
        ("another generation", files_of(redeclared)),
    ]
}

fn run(integrity: bool) -> BTreeMap<String, Tally> {
    let seed = 0x5eed;
    let _seed_guard = PrintSeedOnPanic(seed);
    let mut random = Random::new(seed);
    let mut tallies = BTreeMap::new();
    let others = others(integrity);
    for image in images(integrity) {
        let world = world(LIFE, 1, integrity);
        let right = Decoded::of(&world, image.files.clone(), LIFE).unwrap();
        let files = image.files;
        let image = image.name;
        let mut matrix = DamageMatrix { world, files, right, integrity, image, tallies };
        matrix.flips(&mut random);
        matrix.lengths();
        matrix.swaps(&others);
        matrix.formats();
        tallies = matrix.tallies;
    }
    tallies
}

fn print(title: &str, tallies: &BTreeMap<String, Tally>) {
    println!("{title}: silently accepted 0");
    for (file, tally) in tallies {
        let Tally { cases, refused, harmless, uncovered } = tally;
        assert_eq!(*cases, refused + harmless + uncovered);
        println!(
            "  {file:9} {cases:6} cases, {refused:6} refused, {harmless:5} harmless, \
             {uncovered:5} of bytes without a checksum"
        );
    }
}

// S-8.
#[test]
fn damaged_arenas_are_never_silently_accepted() {
    print("with full integrity", &run(true));
}

#[test]
fn without_full_integrity_only_values_slots_and_bodies_lack_checksums() {
    let tallies = run(false);
    print("without full integrity", &tallies);
    for (file, tally) in &tallies {
        let bulk = BULK.contains(&file.as_str());
        assert_eq!(tally.uncovered > 0, bulk, "{file}");
    }
}

#[test]
fn an_arena_belongs_to_one_boot_and_one_shard() {
    let world = world(LIFE, 1, false);
    let files = images(false).remove(0).files;
    let life = ServerRun { boot: [8; 16], ..LIFE };
    let error = Decoded::of(&world, files.clone(), life).unwrap_err();
    assert!(matches!(error, StorageError::OtherBoot { .. }), "{error}");
    let pair = super::corruption::world(LIFE, 2, false);
    let error = Decoded::of_shard(&pair, 1, files, LIFE).unwrap_err();
    assert!(error.to_string().contains("a file of"), "{error}");
}
