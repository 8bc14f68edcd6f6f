//! [`Flush`]: an image of the durable words to be written, and images that are read.

use pushpull_common::error::Chain;
use pushpull_store::arena::ArenaStorage;
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};
use pushpull_store::planted::{Bug, PlantedBugs};

use crate::error::StorageError;

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
        self.write().map_err(|error| Chain(&error).to_string())
    }

    fn write(self) -> Result<(), StorageError> {
        if !self.planted.has(Bug::SkipFsync) {
            for name in &self.files {
                self.storage.sync(name)?;
            }
        }
        let name = image_name(self.number);
        let kind = Kind::Image;
        let stamp = self.stamp;
        let generation = self.number;
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
