//! Durability across a loss of power: an answer leaves after its commit is on disk.
//!
//! The arena's files are mapped, and the kernel writes their pages back at any time and in any
//! order. So a shard also keeps a *durable image*: the control words and the tables file as of one
//! commit, written alternately to two files. Blocks that an image names are flushed before the
//! image is written, and are not overwritten before the next image is on disk. The outputs of an
//! input are released once an image includes its commit. Many commits share one image.

use std::collections::VecDeque;

use pushpull_common::protocol::Refusal;
use pushpull_store::arena::ArenaStorage;
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use pushpull_store::testing::planted::{Bug, PlantedBugs};

use crate::error::StorageError;
use crate::shard::Detail;
use crate::shard::output::{ShardOutput, ShardOutputs};

/// The state of the durable images of a shard.
#[derive(Debug, Default)]
pub(in crate::shard) struct Power {
    /// The number of commits.
    made: u64,
    /// The newest commit in an image on disk.
    durable: u64,
    /// The newest commit in the image that is being written.
    writing: Option<u64>,
    /// The number of images.
    images: u64,
    /// Outputs, each with the commit that must be on disk first.
    held: VecDeque<(u64, ShardOutput)>,
    /// The first commit whose image no longer names the leftover files.
    unnamed_since: Option<u64>,
    /// Why no more images can be written.
    failed: Option<String>,
}

/// The effect of a flush that has ended.
#[derive(Debug)]
pub(in crate::shard) enum FlushOutcome {
    /// The image is on disk. `unnamed` says whether no image names the leftover files any more.
    Durable { unnamed: bool },
    /// The shard is read-only from now on, for this reason.
    Failed(String),
}

/// An image to be written.
#[derive(Debug)]
pub(crate) struct Flush {
    pub(in crate::shard) storage: ArenaStorage,
    pub(in crate::shard) stamp: Stamp,
    /// The files of the blocks that the image names.
    pub(in crate::shard) files: Vec<String>,
    pub(in crate::shard) number: u64,
    pub(in crate::shard) image: Vec<u8>,
    pub(in crate::shard) planted: PlantedBugs,
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
pub(in crate::shard) fn newest_image(
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

impl Power {
    /// Continues the numbers of the images of an earlier process.
    pub(in crate::shard) fn resume(images: u64) -> Power {
        // This process has flushed nothing yet. Files that only the old image names are removed
        // once the next image is on disk.
        Power { images, made: 1, unnamed_since: Some(1), ..Power::default() }
    }

    /// Counts a commit.
    pub(in crate::shard) fn count_commit(&mut self) {
        self.made += 1;
    }

    /// Records that no later commit names the files of the variables.
    pub(in crate::shard) fn forget_files(&mut self) {
        self.unnamed_since = Some(self.made);
    }

    /// Holds outputs back until their commit is on disk.
    pub(in crate::shard) fn hold(&mut self, out: &mut ShardOutputs) {
        if self.failed.is_some() {
            return;
        }
        for output in std::mem::take(&mut out.queue) {
            match output {
                // A flush was not taken yet. It waits for no image, because it writes the one that
                // the others wait for.
                ShardOutput::Flush(_) => out.push(output),
                output => self.held.push_back((self.made, output)),
            }
        }
        while self.held.front().is_some_and(|&(mark, _)| mark <= self.durable) {
            out.queue.extend(self.held.pop_front().map(|(_, output)| output));
        }
    }

    /// Returns the number of the next image if there are new commits and none is being written.
    pub(in crate::shard) fn begin_image(&mut self) -> Option<u64> {
        if self.writing.is_some() || self.made == self.durable || self.failed.is_some() {
            return None;
        }
        self.writing = Some(self.made);
        self.images += 1;
        Some(self.images)
    }

    /// Takes the result of a flush. A failure is final. Returns `None` if no image was being
    /// written.
    pub(in crate::shard) fn flushed(
        &mut self,
        out: &mut ShardOutputs,
        result: Result<(), String>,
    ) -> Option<FlushOutcome> {
        let mark = self.writing.take()?;
        let Err(error) = result else {
            self.durable = mark;
            let unnamed = self.unnamed_since.take_if(|since| *since <= mark).is_some();
            return Some(FlushOutcome::Durable { unnamed });
        };
        // Answers that are not durable are dropped, and a client that asks again gets the reason.
        // Orders, events and counts are kept, because a caller of the saver would wait forever.
        let is_kept = |output: &ShardOutput| {
            matches!(
                output,
                ShardOutput::SaverOrder(_) | ShardOutput::Event(_) | ShardOutput::Members { .. }
            )
        };
        out.queue.extend(self.held.drain(..).map(|(_, output)| output).filter(is_kept));
        self.failed = Some(error.clone());
        Some(FlushOutcome::Failed(error))
    }

    /// Returns whether a commit waits for an image.
    pub(in crate::shard) fn waits_for_image(&self) -> bool {
        self.failed.is_none() && (self.is_flushing() || self.made != self.durable)
    }

    /// Returns whether an image is being written.
    pub(in crate::shard) fn is_flushing(&self) -> bool {
        self.writing.is_some()
    }

    /// Returns the refusal of everything except pulls after a failed flush.
    pub(in crate::shard) fn refusal(&self) -> Option<Refusal> {
        let failed = self.failed.as_ref()?;
        let detail = format!("the shard is read-only since a flush failed: {failed}");
        Some(Refusal::Storage { detail: Detail::clipped(detail) })
    }
}
