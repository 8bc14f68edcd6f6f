//! Whether an arena is of this boot and configuration; after another boot, its files made anew of the
//! durable image.

use pushpull_common::identity::Identity;
use pushpull_common::protocol::message::IdentityFields;
use pushpull_common::protocol::wire::{Reader, Wire};

use super::durable::{CONTROL_NEW, Life, Parts, transaction_words};
use super::power::newest_image;
use crate::arena::{Arena, Memory, Place, file_name};
use crate::commit::Journal;
use crate::config::Durability;
use crate::error::StorageError;
use crate::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};

/// A control file whose boot is this one.
pub(super) struct Reopenable {
    pub(super) control: Memory,
    /// How many durable images there have been.
    pub(super) images: u64,
}

/// Makes sure that the files of an arena are those of this boot and this configuration; if they are
/// of another boot, and a durable image of them was kept, makes the image of them.
pub(super) fn reopenable(
    parts: &Parts,
    place: &Place,
    life: &Life,
    control: Memory,
) -> Result<Reopenable, StorageError> {
    let name = file_name(Kind::Control, 0);
    let page = Page::decode(control.bytes()).map_err(|fault| place.corrupt(&name, fault))?;
    let stamp = Stamp { shard: parts.id, arena: page.stamp.arena };
    page.check(Kind::Control, stamp, 0).map_err(|fault| place.corrupt(&name, fault))?;
    let boot = check_text(&page.text, &parts.identity, place, &name)?;
    let image = match parts.config.durability {
        Durability::Power => newest_image(place, stamp)?,
        Durability::Process => None,
    };
    let images = image.as_ref().map_or(0, |(number, _)| *number);
    if boot == life.boot {
        return Ok(Reopenable { control, images });
    }
    let Some((_, image)) = image else {
        return Err(StorageError::OtherBoot { path: place.path(&name) });
    };
    drop(control);
    let split = Journal::split_image(&image).ok_or_else(|| {
        place.corrupt(Kind::Image.name(), Fault::at(PAGE_BYTES, "words of two files"))
    })?;
    // Everything but the control file first: as long as that is of the other boot, this is begun
    // anew by whoever comes after a crash.
    let arena = Arena { place: place.clone(), stamp };
    place.remove(&file_name(Kind::Intent, 0))?;
    let words = transaction_words(split.tables.len() / 8, 0);
    Journal::idle_intent(&arena, words, split.commits)?;
    if split.generation != 0 {
        let tables = file_name(Kind::Tables, split.generation);
        place.remove(&tables)?;
        place.create(&tables, split.tables.len() as u64)?.write(0, split.tables);
        place.sync(&tables)?;
        place.remove(&file_name(Kind::Undo, split.generation))?;
        crate::store::idle_undo(&arena, split.generation)?;
        place.sync(&file_name(Kind::Undo, split.generation))?;
    }
    place.sync(&file_name(Kind::Intent, 0))?;
    place.remove(CONTROL_NEW)?;
    let mut control = place.create(CONTROL_NEW, split.control.len() as u64)?;
    control.write(0, split.control);
    let text = control_text(life, &parts.identity);
    let page = Page { kind: Kind::Control, stamp, generation: 0, text };
    control.write(0, &page.encode());
    drop(control);
    place.sync(CONTROL_NEW)?;
    place.rename(CONTROL_NEW, &name)?;
    place.sync_names()?;
    let control = place.open(&name)?;
    let control = control.ok_or_else(|| StorageError::Missing { path: place.path(&name) })?;
    Ok(Reopenable { control, images })
}

/// The text of the control file's first page: the boot, and what must agree.
pub(super) fn control_text(life: &Life, identity: &Identity) -> Vec<u8> {
    let mut text = life.boot.to_vec();
    identity.to_wire().put(&mut text);
    text
}

/// The boot that a control file is of, if it agrees with the configuration.
fn check_text(
    text: &[u8],
    identity: &Identity,
    place: &Place,
    name: &str,
) -> Result<[u8; 16], StorageError> {
    let fields = control_fields(text).map_err(|fault| place.corrupt(name, fault));
    let (boot, found) = fields?;
    if let Some((field, expected, found)) = identity.difference(&found) {
        return Err(StorageError::Foreign {
            path: place.path(name),
            field: field.to_owned(),
            expected: expected.to_owned(),
            found: found.to_owned(),
        });
    }
    Ok(boot)
}

/// The reverse of [`control_text`].
pub(crate) fn control_fields(text: &[u8]) -> Result<([u8; 16], Identity), Fault> {
    let fault = || Fault::at(48, "a boot and an identity");
    let (boot, fields) = text.split_first_chunk().ok_or_else(fault)?;
    let mut reader = Reader::new("control", fields);
    let fields = IdentityFields::take(&mut reader).map_err(|_| fault())?;
    reader.finish().map_err(|_| fault())?;
    Ok((*boot, Identity::from_wire(&fields)))
}
