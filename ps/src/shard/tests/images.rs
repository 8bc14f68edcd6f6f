//! What a crash may leave, told store by store.
//!
//! A killed process leaves what its stores had done, in program order. Two kinds of stores are in no
//! such order: those of a stretch that somebody was lent, which the compiler may move about until
//! the next word is stored in one piece; and those past the cache, which are in memory for sure only
//! after a fence. Of those an image holds any part.

use crate::arena::shelf::Shelf;
use crate::arena::store_trace::Event;

use super::kept::Files;
use super::random::Random;

/// Past the cache, memory is written in lines.
const LINE: usize = 64;

/// Images that hold each of the stretches in part, for each event.
const MIXED: usize = 2;

/// A stretch whose stores may be there or not.
#[derive(Debug)]
struct Stretch {
    file: String,
    start: usize,
    /// What it held before.
    old: Vec<u8>,
}

impl Stretch {
    /// Puts back what each line of it held, where the chance says so.
    fn put_back(&self, files: &mut Files, mut chance: impl FnMut() -> bool) {
        let Some(content) = files.get_mut(&self.file) else { return };
        let bytes = content.stretch_mut(self.start, self.old.len());
        // Where the first line ends that the stretch is part of.
        let (mut start, mut end) = (0, LINE - self.start % LINE);
        while start < bytes.len() {
            end = end.min(bytes.len());
            if chance() {
                bytes[start..end].copy_from_slice(&self.old[start..end]);
            }
            (start, end) = (end, end + LINE);
        }
    }

    /// Puts back what it held from a byte on, or up to it.
    fn cut(&self, files: &mut Files, at: usize, from: bool) {
        let Some(content) = files.get_mut(&self.file) else { return };
        let range = if from { at..self.old.len() } else { 0..at };
        content.stretch_mut(self.start, self.old.len())[range.clone()]
            .copy_from_slice(&self.old[range]);
    }

    fn has_changed(&self, shelf: &Shelf) -> bool {
        shelf.read(&self.file, self.start, self.old.len()) != self.old
    }
}

/// Follows the stores to the files of a shelf.
pub(super) struct Images {
    shelf: Shelf,
    shared: Vec<Stretch>,
    streamed: Vec<Stretch>,
    random: Random,
    last: Files,
}

impl Images {
    pub(super) fn new(shelf: Shelf, seed: u64) -> Images {
        let (shared, streamed) = (Vec::new(), Vec::new());
        Images { shelf, shared, streamed, random: Random::new(seed), last: Files::new() }
    }

    /// The different images that a crash at this event may leave.
    pub(super) fn at(&mut self, event: Event) -> Vec<Files> {
        let Some(opened) = self.stretch_of(event) else {
            // It is of memory that holds no file.
            return Vec::new();
        };
        let images = self.images();
        match event {
            Event::Shared { .. } => self.shared.extend(opened),
            Event::Streaming { .. } => self.streamed.extend(opened),
            // What was lent is written before a word is stored; so is what makes or moves a file.
            Event::Storing { .. } | Event::Filing | Event::Moved { .. } => self.shared.clear(),
            Event::Fenced => {
                self.shared.clear();
                self.streamed.clear();
            }
        }
        images
    }

    /// The stretch that an event is about to change in any order, if it does that; `None` if the
    /// event is of no file.
    fn stretch_of(&self, event: Event) -> Option<Option<Stretch>> {
        match event {
            Event::Shared { address, start, bytes }
            | Event::Streaming { address, start, bytes } => {
                let file = self.shelf.name_of(address)?;
                let old = self.shelf.read(&file, start, bytes);
                Some(Some(Stretch { file, start, old }))
            }
            Event::Storing { address, .. } => self.shelf.name_of(address).map(|_| None),
            Event::Moved { .. } | Event::Filing | Event::Fenced => Some(None),
        }
    }

    fn images(&mut self) -> Vec<Files> {
        let present = self.shelf.contents();
        let mut images = vec![present.clone()];
        for stretches in [&mut self.streamed, &mut self.shared] {
            stretches.retain(|stretch| self.shelf.has_open(&stretch.file));
        }
        if self.streamed.iter().any(|stretch| stretch.has_changed(&self.shelf)) {
            let mut absent = present.clone();
            // The older a stretch, the later it is put back: it knows what was there first.
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
        if self.shared.iter().any(|stretch| stretch.has_changed(&self.shelf)) {
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
