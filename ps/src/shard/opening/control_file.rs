//! Opens the control file of an arena: checks its boot and configuration, and after a reboot
//! restores the files from the durable image.

use pushpull_common::identity::{FactDifference, Identity};
use pushpull_common::protocol::message::IdentityFields;
use pushpull_common::protocol::wire::{FieldReader, Wire};
use pushpull_store::arena::{Arena, ArenaStorage, Memory, file_name};
use pushpull_store::commit::Journal;
use pushpull_store::layout::{Fault, Kind, PAGE_BYTES, Page, Stamp};

use super::shard_setup::{CONTROL_NEW, ServerRun, ShardSetup};
use crate::config::Durability;
use crate::error::StorageError;
use crate::shard::file_work::flush::newest_image;
use crate::shard::shard_files::transaction_words;

/// A setting that may change between two runs of a server on one arena, and has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::shard) struct SettingChange {
    pub(in crate::shard) setting: String,
    pub(in crate::shard) before: String,
    pub(in crate::shard) now: String,
}

/// A control file of the current boot.
pub(in crate::shard) struct OpenedControl {
    pub(in crate::shard) control: Memory,
    /// The number of durable images so far.
    pub(in crate::shard) images: u64,
    /// The settings that have changed since the arena was created.
    pub(in crate::shard) changed: Vec<SettingChange>,
}

/// Opens the control file, after checking that the arena is of this boot and this configuration. If
/// it is of another boot and has a durable image, its files are first restored from the image.
pub(in crate::shard) fn open_control(
    parts: &ShardSetup,
    storage: &ArenaStorage,
    run: &ServerRun,
    control: Memory,
) -> Result<OpenedControl, StorageError> {
    let name = file_name(Kind::Control, 0);
    let page = Page::decode(control.bytes()).map_err(|fault| storage.corrupt(&name, fault))?;
    let stamp = Stamp { shard: parts.id, arena: page.stamp.arena };
    page.check(Kind::Control, stamp, 0).map_err(|fault| storage.corrupt(&name, fault))?;
    let (boot, changed) = check_text(&page.text, &parts.identity, storage, &name)?;
    let image = match parts.config.storage.durability {
        Durability::Power => newest_image(storage, stamp)?,
        Durability::Process => None,
    };
    let images = image.as_ref().map_or(0, |(number, _)| *number);
    if boot == run.boot {
        return Ok(OpenedControl { control, images, changed });
    }
    let Some((_, image)) = image else {
        return Err(StorageError::OtherBoot { path: storage.path(&name) });
    };
    drop(control);
    let split = Journal::split_image(&image).ok_or_else(|| {
        storage.corrupt(Kind::Image.name(), Fault::at(PAGE_BYTES, "words of two files"))
    })?;
    // The control file is replaced last. While it is of the other boot, a process that opens the
    // arena after a crash starts over.
    let arena = Arena { storage: storage.clone(), stamp };
    storage.remove(&file_name(Kind::Intent, 0))?;
    let words = transaction_words(split.tables.len() / 8, 0);
    Journal::idle_intent(&arena, words, split.commits)?;
    if split.generation != 0 {
        let tables = file_name(Kind::Tables, split.generation);
        storage.remove(&tables)?;
        storage.create(&tables, split.tables.len() as u64)?.write(0, split.tables);
        storage.sync(&tables)?;
        storage.remove(&file_name(Kind::Undo, split.generation))?;
        pushpull_store::store::idle_undo(&arena, split.generation)?;
        storage.sync(&file_name(Kind::Undo, split.generation))?;
    }
    storage.sync(&file_name(Kind::Intent, 0))?;
    storage.remove(CONTROL_NEW)?;
    let mut control = storage.create(CONTROL_NEW, split.control.len() as u64)?;
    control.write(0, split.control);
    let text = control_text(run, &parts.identity);
    let page = Page { kind: Kind::Control, stamp, generation: 0, text };
    control.write(0, &page.encode());
    drop(control);
    storage.sync(CONTROL_NEW)?;
    storage.rename(CONTROL_NEW, &name)?;
    storage.sync_names()?;
    let control = storage.open(&name)?;
    let control = control.ok_or_else(|| StorageError::Missing { path: storage.path(&name) })?;
    Ok(OpenedControl { control, images, changed })
}

/// Returns the text of the control file's first page: the boot, and the identity that must agree.
pub(in crate::shard) fn control_text(run: &ServerRun, identity: &Identity) -> Vec<u8> {
    let mut text = run.boot.to_vec();
    identity.of_state().to_wire().put(&mut text);
    text
}

/// Returns the boot of a control file, if its identity agrees with the configuration, and the
/// settings that have changed.
fn check_text(
    text: &[u8],
    identity: &Identity,
    storage: &ArenaStorage,
    name: &str,
) -> Result<([u8; 16], Vec<SettingChange>), StorageError> {
    let identity = identity.of_state();
    let fields = control_fields(text).map_err(|fault| storage.corrupt(name, fault));
    let (boot, found) = fields?;
    if let Some(difference) = identity.difference(&found) {
        let FactDifference { setting: field, ours: expected, theirs: found } = difference;
        return Err(StorageError::Foreign { path: storage.path(name), field, expected, found });
    }
    let changed = identity.free_differences(&found).map(|difference| {
        let FactDifference { setting, ours: now, theirs: before } = difference;
        SettingChange { setting, before, now }
    });
    Ok((boot, changed.collect()))
}

/// Decodes the text that [`control_text`] returns.
pub(crate) fn control_fields(text: &[u8]) -> Result<([u8; 16], Identity), Fault> {
    let fault = || Fault::at(48, "a boot and an identity");
    let (boot, fields) = text.split_first_chunk().ok_or_else(fault)?;
    let mut reader = FieldReader::new("control", fields);
    let fields = IdentityFields::take(&mut reader).map_err(|_| fault())?;
    reader.finish().map_err(|_| fault())?;
    Ok((*boot, Identity::from_wire(&fields)))
}
