//! [`RaceShadow`]: who accessed each byte last, to find accesses that nothing orders.

use std::ops::Range;

use super::access::{Access, Accessor};

/// The shadow of a memory for race detection: the last accesses of each byte.
///
/// Two accesses of a byte race if different threads make them, at least one writes, at least one is
/// not atomic, and no barrier orders them. A barrier orders the threads of its block or warp.
/// Nothing orders the blocks of a launch.
///
/// A page of the shadow has a mark for each word until a thread accesses a part of a word, then for
/// each byte. Marks of earlier launches are dropped when a page is used again.
#[derive(Clone, Debug, Default)]
pub(crate) struct RaceShadow {
    pages: Vec<Option<Box<ShadowPage>>>,
}

#[derive(Clone, Debug)]
struct ShadowPage {
    launch: u64,
    /// The bytes of a mark: 4 or 1.
    grain: usize,
    marks: Vec<Marks>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    written: Mark,
    read: Mark,
}

/// The bytes of an allocation that a launch has used, as sorted ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    pub(crate) read: Vec<Range<usize>>,
    pub(crate) written: Vec<Range<usize>>,
}

/// An earlier access that races with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Race {
    /// The first byte in question.
    pub(crate) at: usize,
    pub(crate) block: u32,
    pub(crate) thread: u32,
    pub(crate) wrote: bool,
}

impl RaceShadow {
    /// Notes an access, unless it races with an earlier one.
    #[inline]
    pub(crate) fn note(&mut self, at: usize, length: usize, access: Access) -> Result<(), Race> {
        // Most accesses are of one word in a page that is in use.
        if length == 4
            && let Some(Some(page)) = self.pages.get_mut(at / PAGE)
            && page.launch == access.by.launch
            && page.grain == 4
            && at.is_multiple_of(4)
        {
            return page.note_mark(at / PAGE * PAGE, at % PAGE / 4, access);
        }
        self.note_range(at, length, access)
    }

    /// Adds the ranges that a launch has read and written.
    pub(crate) fn footprint(&self, launch: u64, footprint: &mut Footprint) {
        for (number, page) in self.pages.iter().enumerate() {
            let Some(page) = page.as_ref().filter(|page| page.launch == launch) else { continue };
            for (place, marks) in page.marks.iter().enumerate() {
                let at = number * PAGE + place * page.grain;
                if marks.read.0 != 0 {
                    add(&mut footprint.read, at..at + page.grain);
                }
                if marks.written.0 != 0 {
                    add(&mut footprint.written, at..at + page.grain);
                }
            }
        }
    }

    fn note_range(&mut self, at: usize, length: usize, access: Access) -> Result<(), Race> {
        let (mut at, end) = (at, at + length);
        while at < end {
            let page = at / PAGE;
            let part = (end - at).min(PAGE - at % PAGE);
            if self.pages.len() <= page {
                self.pages.resize(page + 1, None);
            }
            let marks = self.pages[page].get_or_insert_with(|| ShadowPage::new(access.by.launch));
            marks.note(page * PAGE, at % PAGE, part, access)?;
            at += part;
        }
        Ok(())
    }
}

/// Adds a range behind sorted ones. If there are many, gaps count as used.
fn add(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    let is_full = ranges.len() >= RANGES_MAX;
    match ranges.last_mut() {
        Some(last) if last.end == range.start || is_full => last.end = range.end,
        _ => ranges.push(range),
    }
}

impl ShadowPage {
    fn new(launch: u64) -> Box<ShadowPage> {
        Box::new(ShadowPage { launch, grain: 4, marks: vec![Marks::default(); PAGE / 4] })
    }

    fn note(&mut self, page: usize, at: usize, length: usize, access: Access) -> Result<(), Race> {
        if self.launch != access.by.launch {
            self.launch = access.by.launch;
            self.marks.fill(Marks::default());
        }
        if self.grain == 4 && !(at | length).is_multiple_of(4) {
            self.grain = 1;
            self.marks = self.marks.iter().flat_map(|&marks| [marks; 4]).collect();
        }
        let grain = self.grain;
        for place in at / grain..(at + length) / grain {
            self.note_mark(page, place, access)?;
        }
        Ok(())
    }

    #[inline]
    fn note_mark(&mut self, page: usize, place: usize, access: Access) -> Result<(), Race> {
        let marks = &mut self.marks[place];
        if let Some((mark, wrote)) = marks.conflict(access) {
            let block = mark.block();
            let thread = mark.thread();
            return Err(Race { at: page + place * self.grain, block, thread, wrote });
        }
        marks.note(access);
        Ok(())
    }
}

impl Marks {
    /// Returns the mark that an access races with, and whether that one wrote.
    fn conflict(&self, access: Access) -> Option<(Mark, bool)> {
        if self.written.races(access) {
            return Some((self.written, true));
        }
        (access.writes && self.read.races(access)).then_some((self.read, false))
    }

    fn note(&mut self, access: Access) {
        if access.writes {
            self.written = self.written.joined(access);
        } else {
            self.read = self.read.joined(access);
        }
    }
}

/// The last access of a kind, or what stands for several.
///
/// | bits | meaning |
/// | --- | --- |
/// | 40 to 63 | block |
/// | 30 to 39 | thread |
/// | 12 to 29 | epoch |
/// | 4 to 11 | epoch of the warp |
/// | 3 | threads of several blocks |
/// | 2 | several threads of the block |
/// | 1 | atomic |
/// | 0 | there was an access |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Mark(u64);

impl Mark {
    fn new(access: Access) -> Mark {
        let Accessor { block, thread, epoch, warp_epoch, .. } = access.by;
        Mark(
            u64::from(block & 0xff_ffff) << 40
                | u64::from(thread & 0x3ff) << 30
                | u64::from(epoch & 0x3_ffff) << 12
                | u64::from(warp_epoch.min(0xff)) << 4
                | u64::from(access.atomic) << 1
                | 1,
        )
    }

    fn block(self) -> u32 {
        (self.0 >> 40) as u32
    }

    fn thread(self) -> u32 {
        (self.0 >> 30) as u32 & 0x3ff
    }

    fn epoch(self) -> u32 {
        (self.0 >> 12) as u32 & 0x3_ffff
    }

    fn warp_epoch(self) -> u32 {
        (self.0 >> 4) as u32 & 0xff
    }

    fn is_atomic(self) -> bool {
        self.0 & ATOMIC != 0
    }

    /// Whether nothing orders this access before another of a different thread.
    fn is_unordered(self, by: Accessor) -> bool {
        if self.0 & 1 == 0 {
            return false;
        }
        if self.0 & SEVERAL_BLOCKS != 0 || self.block() != by.block & 0xff_ffff {
            return true;
        }
        if self.epoch() < by.epoch {
            return false;
        }
        if self.0 & SEVERAL_THREADS != 0 {
            return true;
        }
        let same_warp = self.thread() / 32 == by.thread / 32;
        let ordered = same_warp && self.warp_epoch() < by.warp_epoch;
        self.thread() != by.thread && !ordered
    }

    fn races(self, access: Access) -> bool {
        self.is_unordered(access.by) && !(access.atomic && self.is_atomic())
    }

    /// The mark after one more access that does not race with this one.
    fn joined(self, access: Access) -> Mark {
        let new = Mark::new(access);
        if self.0 & 1 == 0 || self.is_ordered_by_barrier(access.by) {
            return new;
        }
        // An atomic access does not hide a plain one before it.
        let both = if self.is_atomic() { new.0 } else { new.0 & !ATOMIC };
        let several = self.0 & (SEVERAL_BLOCKS | SEVERAL_THREADS);
        if self.block() != new.block() {
            return Mark(both | several | SEVERAL_BLOCKS);
        }
        if self.is_unordered(access.by) {
            return Mark(both | several | SEVERAL_THREADS);
        }
        Mark(both | several)
    }

    fn is_ordered_by_barrier(self, by: Accessor) -> bool {
        let one_block = self.0 & SEVERAL_BLOCKS == 0 && self.block() == by.block & 0xff_ffff;
        one_block && self.epoch() < by.epoch
    }
}

const PAGE: usize = 1024;
/// The most ranges of a footprint.
const RANGES_MAX: usize = 4096;
const ATOMIC: u64 = 2;
const SEVERAL_THREADS: u64 = 4;
const SEVERAL_BLOCKS: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn access(block: u32, thread: u32, epoch: u32, what: &str) -> Access {
        let by = Accessor { launch: 1, block, thread, epoch, warp_epoch: 0 };
        Access { by, writes: what != "read", atomic: what == "atomic" }
    }

    /// Whether the last of some accesses of one word races with one before it.
    fn races(accesses: &[(u32, u32, u32, &str)]) -> bool {
        let mut shadow = RaceShadow::default();
        let mut result = Ok(());
        for &(block, thread, epoch, what) in accesses {
            result = shadow.note(8, 4, access(block, thread, epoch, what));
        }
        result.is_err()
    }

    #[test]
    fn accesses_race_as_a_table_says() {
        assert!(!races(&[(0, 0, 0, "read"), (0, 1, 0, "read"), (1, 0, 0, "read")]));
        assert!(!races(&[(0, 0, 0, "write"), (0, 0, 0, "read"), (0, 0, 0, "write")]));
        assert!(races(&[(0, 0, 0, "write"), (0, 1, 0, "read")]));
        assert!(races(&[(0, 0, 0, "read"), (0, 1, 0, "read"), (0, 1, 0, "write")]));
        assert!(!races(&[(0, 0, 0, "write"), (0, 1, 1, "read")]));
        assert!(!races(&[(0, 0, 0, "read"), (0, 1, 0, "read"), (0, 2, 1, "write")]));
        assert!(races(&[(0, 0, 0, "write"), (1, 0, 1, "read")]));
        assert!(races(&[(0, 0, 0, "read"), (1, 0, 0, "read"), (1, 0, 9, "write")]));
        assert!(!races(&[(0, 0, 0, "atomic"), (0, 1, 0, "atomic"), (1, 0, 0, "atomic")]));
        assert!(races(&[(0, 0, 0, "atomic"), (0, 1, 0, "atomic"), (0, 1, 0, "read")]));
        assert!(!races(&[(0, 0, 0, "atomic"), (0, 1, 0, "atomic"), (0, 1, 1, "read")]));
        assert!(races(&[(0, 0, 0, "write"), (0, 0, 0, "atomic"), (0, 1, 0, "atomic")]));
    }

    #[test]
    fn halves_of_a_word_are_apart() {
        let mut shadow = RaceShadow::default();
        shadow.note(0, 2, access(0, 0, 0, "write")).unwrap();
        shadow.note(2, 2, access(0, 1, 0, "write")).unwrap();
        assert!(shadow.note(0, 4, access(0, 1, 0, "read")).is_err());
    }

    #[test]
    fn a_warp_is_ordered_by_its_own_barrier() {
        let mut shadow = RaceShadow::default();
        let by =
            |thread, warp_epoch| Accessor { launch: 1, block: 0, thread, epoch: 0, warp_epoch };
        let write = Access { by: by(0, 0), writes: true, atomic: false };
        shadow.note(0, 4, write).unwrap();
        let read = |by| Access { by, writes: false, atomic: false };
        assert!(shadow.note(0, 4, read(by(40, 1))).is_err());
        assert!(shadow.note(0, 4, read(by(1, 1))).is_ok());
    }
}
