//! Durability across a loss of power: an answer leaves after its commit is on disk.
//!
//! The arena's files are mapped, and the kernel writes their pages back at any time and in any
//! order. So a shard also keeps a *durable image*: the control words and the tables file as of one
//! commit, written alternately to two files. Blocks that an image names are flushed before the
//! image is written, and are not overwritten before the next image is on disk. The outputs of an
//! input are released once an image includes its commit. Many commits share one image.

use std::collections::VecDeque;

use pushpull_common::protocol::Refusal;
use pushpull_store::arena::{ArenaStorage, file_name};
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use pushpull_store::testing::planted::{Bug, PlantedBugs};

use super::output::ShardOutput;
use super::record::FROM_IMAGE;
use super::{Detail, Shard, VariablesState};
use crate::error::StorageError;

/// The state of the durable images of a shard.
#[derive(Debug, Default)]
pub(super) struct Power {
    /// The number of commits.
    pub(super) made: u64,
    /// The newest commit in an image on disk.
    durable: u64,
    /// The newest commit in the image that is being written.
    writing: Option<u64>,
    /// The number of images.
    images: u64,
    /// Outputs, each with the commit that must be on disk first.
    held: VecDeque<(u64, ShardOutput)>,
    /// The first commit whose image no longer names the leftover files.
    pub(super) unnamed_since: Option<u64>,
    /// Why no more images can be written.
    failed: Option<String>,
}

/// An image to be written.
#[derive(Debug)]
pub(crate) struct Flush {
    storage: ArenaStorage,
    stamp: Stamp,
    /// The files of the blocks that the image names.
    files: Vec<String>,
    number: u64,
    image: Vec<u8>,
    planted: PlantedBugs,
}

impl Flush {
    /// Writes the image. May wait for a disk. A failed flush is not repeated: the kernel may have
    /// dropped the pages it could not write, and would report success.
    pub(crate) fn run(self) -> Result<(), String> {
        self.write().map_err(|error| error.to_string())
    }

    fn write(self) -> Result<(), StorageError> {
        if !self.planted.has(Bug::SkipFsync) {
            for name in &self.files {
                self.storage.sync(name)?;
            }
        }
        let name = image_name(self.number);
        let (kind, stamp, generation) = (Kind::Image, self.stamp, self.number);
        let text = (self.image.len() as u64).to_le_bytes();
        let crc = u64::from(crc32c::crc32c(&self.image)).to_le_bytes();
        let page = Page { kind, stamp, generation, text: [text, crc].concat() };
        let mut bytes = page.encode();
        bytes.extend_from_slice(&self.image);
        self.storage.write_durably(&name, &bytes)
    }
}

/// Returns the file name of an image. Two files alternate, so that one is always complete.
pub(crate) fn image_name(number: u64) -> String {
    format!("{}-{}", Kind::Image.name(), number % 2)
}

/// Returns the newest complete image: its number, and the control and tables files.
pub(super) fn newest_image(
    storage: &ArenaStorage,
    stamp: Stamp,
) -> Result<Option<(u64, Vec<u8>)>, StorageError> {
    let mut newest: Option<(u64, Vec<u8>)> = None;
    for turn in 0..2 {
        let Some(memory) = storage.open(&image_name(turn))? else { continue };
        // One of the two may have been cut off while it was written.
        if let Ok((number, image)) = read_image(memory.bytes(), stamp)
            && newest.as_ref().is_none_or(|(other, _)| *other < number)
        {
            newest = Some((number, image));
        }
    }
    Ok(newest)
}

/// Returns the number of an image and its content, if it is complete.
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
    /// Holds outputs back until their commit is on disk.
    pub(super) fn hold_outputs(&mut self) {
        let Some(power) = self.power.as_mut().filter(|power| power.failed.is_none()) else {
            return;
        };
        let mark = power.made;
        for output in std::mem::take(&mut self.out.queue) {
            match output {
                // A flush was not taken yet. It waits for no image, because it writes the one that
                // the others wait for.
                ShardOutput::Flush(_) => self.out.push(output),
                output => power.held.push_back((mark, output)),
            }
        }
        while power.held.front().is_some_and(|&(mark, _)| mark <= power.durable) {
            self.out.queue.extend(power.held.pop_front().map(|(_, output)| output));
        }
        self.flush_if_due();
    }

    /// Counts a commit.
    pub(super) fn count_commit(&mut self, made: bool) {
        if let Some(power) = self.power.as_mut().filter(|_| made) {
            power.made += 1;
        }
    }

    /// Starts to write an image if there are new commits and none is being written.
    fn flush_if_due(&mut self) {
        let Some(power) = &mut self.power else { return };
        if power.writing.is_some() || power.made == power.durable || power.failed.is_some() {
            return;
        }
        power.writing = Some(power.made);
        power.images += 1;
        let mut files = Vec::new();
        if let VariablesState::Declared(store) | VariablesState::Ready(store) =
            &self.variables.state
        {
            let kinds = [Kind::Catalogue, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo];
            let slots = store.geometry().slots > 0;
            let kinds = kinds.into_iter().filter(|&kind| kind != Kind::Slots || slots);
            files.extend(kinds.map(|kind| file_name(kind, self.files.generation)));
        }
        let flush = Flush {
            storage: self.files.arena.storage.clone(),
            stamp: self.files.arena.stamp,
            files,
            number: power.images,
            image: self.files.journal.image(FROM_IMAGE),
            planted: self.config.planted,
        };
        if let VariablesState::Declared(store) | VariablesState::Ready(store) =
            &mut self.variables.state
        {
            store.image_begun();
        }
        self.out.push(ShardOutput::Flush(Box::new(flush)));
    }

    /// The image is on disk, or the flush has failed, which is final.
    pub(super) fn flushed(&mut self, result: Result<(), String>) {
        let Some(power) = &mut self.power else { return };
        let Some(mark) = power.writing.take() else { return };
        match result {
            Ok(()) => {
                power.durable = mark;
                let unnamed = power.unnamed_since.take_if(|since| *since <= mark).is_some();
                if unnamed {
                    // A file that cannot be removed costs space, and the next process tries again.
                    let _ = self.remove_unnamed();
                }
                if let VariablesState::Declared(store) | VariablesState::Ready(store) =
                    &mut self.variables.state
                {
                    store.image_written();
                }
            }
            Err(error) => {
                power.failed = Some(error.clone());
                self.applier.jobs.clear();
                self.applier.streaming = None;
                // Answers that are not durable are dropped, and a client that asks again gets the
                // reason. Orders, events and counts are kept, because a caller of the saver would
                // wait forever.
                let within = |output: &ShardOutput| {
                    matches!(
                        output,
                        ShardOutput::SaverOrder(_)
                            | ShardOutput::Event(_)
                            | ShardOutput::Members { .. }
                    )
                };
                let held = power.held.drain(..).map(|(_, output)| output);
                self.out.queue.extend(held.filter(within));
                self.files.stage_poison(&error);
                let connections: Vec<u64> = self.peers.connections.keys().copied().collect();
                for connection in connections {
                    self.out.close(connection);
                }
            }
        }
    }

    /// Returns whether a commit waits for an image.
    pub(crate) fn waits_for_image(&self) -> bool {
        self.power.as_ref().is_some_and(|power| {
            power.failed.is_none() && (power.writing.is_some() || power.made != power.durable)
        })
    }

    /// Returns whether an image is being written.
    pub(crate) fn is_flushing(&self) -> bool {
        self.power.as_ref().is_some_and(|power| power.writing.is_some())
    }

    /// Returns the refusal of everything except pulls after a failed flush.
    pub(super) fn poisoned(&self) -> Option<Refusal> {
        let failed = self.power.as_ref()?.failed.as_ref()?;
        let detail = format!("the shard is read-only since a flush failed: {failed}");
        Some(Refusal::Storage { detail: Detail::clipped(detail) })
    }

    /// Continues the numbers of the images of an earlier process.
    pub(super) fn resume_images_from(&mut self, number: u64) {
        if let Some(power) = &mut self.power {
            power.images = number;
            // This process has flushed nothing yet. Files that only the old image names are removed
            // once the next image is on disk.
            power.made = 1;
            power.unnamed_since = Some(1);
        }
    }
}
