//! The files that a crash may leave at each store.
//!
//! A killed process leaves the effects of its stores in program order, with two exceptions. The
//! compiler may reorder the stores to a borrowed stretch until the next word is stored in one
//! piece. Streaming stores, which bypass the cache, are certain to be in memory only after a fence.
//! An image may hold any part of these.

use pushpull_store::testing::store_trace::StoreEvent;
use pushpull_store::testing::test_files::TestFiles;

use super::kept::FileCopies;
use super::random::Random;

/// The bytes of a cache line, the unit of streaming stores.
const LINE: usize = 64;

/// The number of images for each event that hold the stretches in part.
const MIXED: usize = 2;

/// A stretch of a file whose stores may or may not be in memory.
#[derive(Debug)]
struct Stretch {
    file: String,
    start: usize,
    /// Its bytes before the stores.
    old: Vec<u8>,
}

impl Stretch {
    /// Restores the old bytes of each line for which `chance` returns `true`.
    fn put_back(&self, files: &mut FileCopies, mut chance: impl FnMut() -> bool) {
        let Some(content) = files.get_mut(&self.file) else { return };
        let bytes = content.stretch_mut(self.start, self.old.len());
        // The stretch may begin inside a line. The first line ends here.
        let (mut start, mut end) = (0, LINE - self.start % LINE);
        while start < bytes.len() {
            end = end.min(bytes.len());
            if chance() {
                bytes[start..end].copy_from_slice(&self.old[start..end]);
            }
            start = end;
            end += LINE;
        }
    }

    /// Restores the old bytes from `at` on, or up to `at`.
    fn cut(&self, files: &mut FileCopies, at: usize, from: bool) {
        let Some(content) = files.get_mut(&self.file) else { return };
        let range = if from { at..self.old.len() } else { 0..at };
        content.stretch_mut(self.start, self.old.len())[range.clone()]
            .copy_from_slice(&self.old[range]);
    }

    fn has_changed(&self, test_files: &TestFiles) -> bool {
        test_files.read(&self.file, self.start, self.old.len()) != self.old
    }
}

/// Follows the stores to test files, and builds the images of crashes.
pub(super) struct Images {
    test_files: TestFiles,
    shared: Vec<Stretch>,
    streamed: Vec<Stretch>,
    random: Random,
    last: FileCopies,
}

impl Images {
    pub(super) fn new(test_files: TestFiles, seed: u64) -> Images {
        let shared = Vec::new();
        let streamed = Vec::new();
        Images { test_files, shared, streamed, random: Random::new(seed), last: FileCopies::new() }
    }

    /// Returns the distinct images that a crash at this event may leave.
    pub(super) fn at(&mut self, event: StoreEvent) -> Vec<FileCopies> {
        let Some(opened) = self.stretch_of(event) else {
            // The event concerns memory that holds no file.
            return Vec::new();
        };
        let images = self.images();
        match event {
            StoreEvent::Borrowed { .. } => self.shared.extend(opened),
            StoreEvent::Streaming { .. } => self.streamed.extend(opened),
            // Borrowed stretches are written before a word is stored or a file is made or moved.
            StoreEvent::Storing { .. } | StoreEvent::Filing | StoreEvent::Moved { .. } => {
                self.shared.clear()
            }
            StoreEvent::Fenced => {
                self.shared.clear();
                self.streamed.clear();
            }
        }
        images
    }

    /// Returns the stretch that an event opens for stores in any order, if it does. Returns `None`
    /// if the event concerns no file.
    fn stretch_of(&self, event: StoreEvent) -> Option<Option<Stretch>> {
        match event {
            StoreEvent::Borrowed { address, start, bytes }
            | StoreEvent::Streaming { address, start, bytes } => {
                let file = self.test_files.name_of(address)?;
                let old = self.test_files.read(&file, start, bytes);
                Some(Some(Stretch { file, start, old }))
            }
            StoreEvent::Storing { address, .. } => self.test_files.name_of(address).map(|_| None),
            StoreEvent::Moved { .. } | StoreEvent::Filing | StoreEvent::Fenced => Some(None),
        }
    }

    fn images(&mut self) -> Vec<FileCopies> {
        let present = self.test_files.contents();
        let mut images = vec![present.clone()];
        for stretches in [&mut self.streamed, &mut self.shared] {
            stretches.retain(|stretch| self.test_files.has_open(&stretch.file));
        }
        if self.streamed.iter().any(|stretch| stretch.has_changed(&self.test_files)) {
            let mut absent = present.clone();
            // The oldest stretch is restored last: it has the original bytes.
            self.streamed.iter().rev().for_each(|stretch| stretch.put_back(&mut absent, || true));
            images.push(absent);
            for _ in 0..MIXED {
                let mut mixed = present.clone();
                let times = 2 + self.random.below(6);
                for stretch in self.streamed.iter().rev() {
                    stretch.put_back(&mut mixed, || self.random.one_in(times));
                }
                images.push(mixed);
            }
        }
        if self.shared.iter().any(|stretch| stretch.has_changed(&self.test_files)) {
            for _ in 0..MIXED {
                let of = self.random.below(images.len() as u64) as usize;
                let mut cut = images[of].clone();
                for stretch in self.shared.iter().rev() {
                    let at = self.random.below(stretch.old.len() as u64 + 1) as usize;
                    stretch.cut(&mut cut, at, self.random.one_in(2));
                }
                images.push(cut);
            }
        }
        let mut last = std::mem::take(&mut self.last);
        self.last = present;
        images.dedup();
        images.retain(|image| *image != last);
        last.clear();
        images
    }
}
