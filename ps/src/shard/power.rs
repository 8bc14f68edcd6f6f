//! Surviving the loss of power: what has been answered is on the disk.
//!
//! The arena's files are mapped, and the system writes their pages whenever it likes, in any order.
//! So a *durable image* is kept beside them: the control words and the tables as they were at one
//! commit, written to two files in turn. An image names blocks that were flushed before it was
//! written, and a block that an image names is not written again before the next image is on
//! the disk. What an input causes is put out when an image that holds it is there: many commits
//! share one.

use std::collections::VecDeque;

use pushpull_common::protocol::Refusal;

use super::output::Output;
use super::record::FROM_IMAGE;
use super::{Detail, Shard, Variables};
use crate::arena::{Place, file_name};
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use crate::planted::{Bug, PlantedBugs};

/// What a shard that survives the loss of power knows of its disk.
#[derive(Debug, Default)]
pub(super) struct Power {
    /// Counts the commits.
    pub(super) made: u64,
    /// The newest commit that an image on the disk holds.
    durable: u64,
    /// The newest commit that the image being written holds.
    writing: Option<u64>,
    /// Counts the images.
    images: u64,
    /// What waits for the commit it depends on.
    held: VecDeque<(u64, Output)>,
    /// The commit since which files lie there that no newer image names.
    pub(super) unnamed_since: Option<u64>,
    /// Why nothing can be made durable any more.
    failed: Option<String>,
}

/// An image to be written.
#[derive(Debug)]
pub(crate) struct Flush {
    place: Place,
    stamp: Stamp,
    /// The files whose blocks it names.
    files: Vec<String>,
    number: u64,
    image: Vec<u8>,
    planted: PlantedBugs,
}

impl Flush {
    /// Writes it. May wait for a disk. What fails here is not tried again: the system may have
    /// thrown away what it could not write, and a second try would succeed in vain.
    pub(crate) fn run(self) -> Result<(), String> {
        self.write().map_err(|error| error.to_string())
    }

    fn write(self) -> Result<(), StorageError> {
        if !self.planted.has(Bug::SkipFsync) {
            for name in &self.files {
                self.place.sync(name)?;
            }
        }
        let name = image_name(self.number);
        let (kind, stamp, generation) = (Kind::Image, self.stamp, self.number);
        let text = (self.image.len() as u64).to_le_bytes();
        let crc = u64::from(crc32c::crc32c(&self.image)).to_le_bytes();
        let page = Page { kind, stamp, generation, text: [text, crc].concat() };
        let mut bytes = page.encode();
        bytes.extend_from_slice(&self.image);
        self.place.write_durably(&name, &bytes)
    }
}

/// Two files in turn: while one is written the other holds.
pub(crate) fn image_name(number: u64) -> String {
    format!("{}-{}", Kind::Image.name(), number % 2)
}

/// The newest image that is whole: its number, and the control and tables files as they were.
pub(super) fn newest_image(
    place: &Place,
    stamp: Stamp,
) -> Result<Option<(u64, Vec<u8>)>, StorageError> {
    let mut newest: Option<(u64, Vec<u8>)> = None;
    for turn in 0..2 {
        let Some(memory) = place.open(&image_name(turn))? else { continue };
        // One of the two may have been cut off in the middle of being written.
        if let Ok((number, image)) = read_image(memory.bytes(), stamp)
            && newest.as_ref().is_none_or(|(other, _)| *other < number)
        {
            newest = Some((number, image));
        }
    }
    Ok(newest)
}

/// The number of an image that is whole, and the image.
pub(crate) fn read_image(bytes: &[u8], stamp: Stamp) -> Result<(u64, Vec<u8>), Fault> {
    let page = Page::decode(bytes)?;
    page.check(Kind::Image, stamp, page.generation)?;
    let short = || Fault::at(PAGE_BYTES, "an image");
    let word = |at: usize| {
        let bytes = page.text.get(at..at + 8).ok_or_else(short)?;
        Ok::<_, Fault>(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    };
    let length = usize::try_from(word(0)?).map_err(|_| short())?;
    let image = bytes[PAGE_BYTES..].get(..length).ok_or_else(short)?;
    match u64::from(crc32c::crc32c(image)) == word(8)? {
        true => Ok((page.generation, image.to_vec())),
        false => Err(short()),
    }
}

impl Shard {
    /// Puts out only what is on the disk.
    pub(super) fn hold_outputs(&mut self) {
        let Some(power) = self.power.as_mut().filter(|power| power.failed.is_none()) else {
            return;
        };
        let mark = power.made;
        for output in std::mem::take(&mut self.outputs) {
            match output {
                // Nobody has taken it yet. It waits for no image: it is the one the others wait for.
                Output::Flush(_) => self.outputs.push_back(output),
                output => power.held.push_back((mark, output)),
            }
        }
        while power.held.front().is_some_and(|&(mark, _)| mark <= power.durable) {
            self.outputs.extend(power.held.pop_front().map(|(_, output)| output));
        }
        self.flush_if_due();
    }

    /// Counts a commit.
    pub(super) fn count_commit(&mut self, made: bool) {
        if let Some(power) = self.power.as_mut().filter(|_| made) {
            power.made += 1;
        }
    }

    /// Has an image written if there is something new, one at a time.
    fn flush_if_due(&mut self) {
        let Some(power) = &mut self.power else { return };
        if power.writing.is_some() || power.made == power.durable || power.failed.is_some() {
            return;
        }
        power.writing = Some(power.made);
        power.images += 1;
        let mut files = Vec::new();
        if let Variables::Declared(store) | Variables::Ready(store) = &self.variables {
            let kinds = [Kind::Catalogue, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo];
            let slots = store.geometry().slots > 0;
            let kinds = kinds.into_iter().filter(|&kind| kind != Kind::Slots || slots);
            files.extend(kinds.map(|kind| file_name(kind, self.generation)));
        }
        let flush = Flush {
            place: self.arena.place.clone(),
            stamp: self.arena.stamp,
            files,
            number: power.images,
            image: self.journal.image(FROM_IMAGE),
            planted: self.config.planted,
        };
        if let Variables::Declared(store) | Variables::Ready(store) = &mut self.variables {
            store.image_begun();
        }
        self.outputs.push_back(Output::Flush(Box::new(flush)));
    }

    /// The image is on the disk, or nothing will ever be again.
    pub(super) fn flushed(&mut self, result: Result<(), String>) {
        let Some(power) = &mut self.power else { return };
        let Some(mark) = power.writing.take() else { return };
        match result {
            Ok(()) => {
                power.durable = mark;
                let unnamed = power.unnamed_since.take_if(|since| *since <= mark).is_some();
                if unnamed {
                    // What cannot be removed costs space, and the next opening tries again.
                    let _ = self.remove_unnamed();
                }
                if let Variables::Declared(store) | Variables::Ready(store) = &mut self.variables {
                    store.image_written();
                }
            }
            Err(error) => {
                power.failed = Some(error.clone());
                self.jobs.clear();
                self.streaming_apply = None;
                // Answers that are not durable are dropped; a client that asks again is told why. Orders,
                // events and counts stay: a caller of the saver would wait for ever.
                let within = |output: &Output| {
                    matches!(output, Output::Order(_) | Output::Event(_) | Output::Members { .. })
                };
                let held = power.held.drain(..).map(|(_, output)| output);
                self.outputs.extend(held.filter(within));
                self.stage_poison(&error);
                let connections: Vec<u64> = self.conversations.keys().copied().collect();
                for connection in connections {
                    self.outputs.push_back(Output::Close { connection });
                }
            }
        }
    }

    /// Whether something waits for an image to be on the disk.
    pub(crate) fn waits_for_image(&self) -> bool {
        self.power.as_ref().is_some_and(|power| {
            power.failed.is_none() && (power.writing.is_some() || power.made != power.durable)
        })
    }

    /// Whether an image is being written.
    pub(crate) fn is_flushing(&self) -> bool {
        self.power.as_ref().is_some_and(|power| power.writing.is_some())
    }

    /// Why this shard only answers pulls: a disk has failed it.
    pub(super) fn poisoned(&self) -> Option<Refusal> {
        let failed = self.power.as_ref()?.failed.as_ref()?;
        let detail = format!("the shard is read-only since a flush failed: {failed}");
        Some(Refusal::Storage { detail: Detail::clipped(detail) })
    }

    /// The number of the image that an earlier process wrote last.
    pub(super) fn images_go_on_from(&mut self, number: u64) {
        if let Some(power) = &mut self.power {
            power.images = number;
            // Whatever is here was not put on the disk by this process; and what the image there names,
            // and nobody else, goes when the next one is there.
            power.made = 1;
            power.unnamed_since = Some(1);
        }
    }
}
