//! Lists checkpoints, and opens those that can be trusted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::{Catalogue, Partition};
use pushpull_common::error::Chain;
use pushpull_common::ids::{PartitionId, ShardId, VariableId};
use pushpull_common::protocol::limits::CATALOGUE_BYTES_MAX;
use pushpull_common::stored_stream::StoredStream;

use crate::error::{CheckpointError, Refused, corrupt};
use crate::files::{FileEntry, read_pieces, verify};
use crate::manifest::{CATALOGUE, MANIFEST, MANIFEST_BYTES_MAX, Manifest};
use crate::name::CheckpointName;
use crate::shard_file::ShardFile;
use crate::storage::{CheckpointStorage, ReadFile};
use crate::table_file::{TableFile, TakeRows};

/// The checkpoints of a storage.
#[derive(Debug)]
#[non_exhaustive]
pub struct Listing {
    /// The checkpoints with a valid manifest, newest first. Their other files have not been read.
    pub checkpoints: Vec<CheckpointSummary>,
    /// The other checkpoints, newest first.
    pub refused: Vec<Refused>,
}

/// The summary of a checkpoint that its manifest contains.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckpointSummary {
    /// The checkpoint's name.
    pub name: String,
    /// The restore epoch: the number of times that the cluster had been restored.
    pub restore_epoch: u32,
    /// The global step.
    pub global_step: u64,
    /// The time of the save, in milliseconds since 1970.
    pub saved_unix_ms: u64,
    /// The kinds of the optimizers that train its variables, each once.
    pub optimizers: Vec<String>,
    /// The number of shards it was saved from.
    pub shards: usize,
    /// The total size of its files in bytes.
    pub bytes: u64,
    /// The user's own bytes.
    pub user: Vec<u8>,
}

/// Lists the checkpoints of a storage. Reads only the manifests. Fails if the storage cannot be
/// listed.
pub fn list(storage: &dyn CheckpointStorage) -> Result<Listing, CheckpointError> {
    let (checkpoints, refused) = scan(storage, |manifest| CheckpointSummary {
        name: manifest.checkpoint.to_string(),
        restore_epoch: manifest.checkpoint.restore_epoch,
        global_step: manifest.checkpoint.global_step,
        saved_unix_ms: manifest.saved_unix_ms,
        bytes: manifest.bytes(),
        shards: manifest.shards.len(),
        optimizers: manifest.training.kinds(),
        user: manifest.user,
    })?;
    Ok(Listing { checkpoints, refused })
}

/// Applies `take` to every valid manifest, newest first. Returns the checkpoints with other
/// manifests as refused.
pub(crate) fn scan<T>(
    storage: &dyn CheckpointStorage,
    take: impl Fn(Manifest) -> T,
) -> Result<(Vec<T>, Vec<Refused>), CheckpointError> {
    let mut taken = Vec::new();
    let mut refused = Vec::new();
    for name in names(storage)? {
        match read_manifest(storage, name) {
            Ok(manifest) => taken.push(take(manifest)),
            Err(reason @ CheckpointError::GivenUp { .. }) => return Err(reason),
            Err(reason) => refused.push(Refused { checkpoint: name.to_string(), reason }),
        }
    }
    Ok((taken, refused))
}

/// Opens the newest checkpoint whose files are all valid. Returns it with the newer checkpoints
/// that are not valid, or `None` if there is no checkpoint at all.
///
/// A checkpoint that may be valid is not passed over: the steps after the older one would be lost.
pub fn newest_good(
    storage: &Arc<dyn CheckpointStorage>,
) -> Result<Option<(Opened, Vec<Refused>)>, CheckpointError> {
    let mut refused = Vec::new();
    for name in names(&**storage)? {
        let opened = Opened::open(storage.clone(), name);
        match opened.and_then(|mut opened| opened.verify().map(|()| opened)) {
            Ok(opened) => return Ok(Some((opened, refused))),
            Err(reason) if may_be_valid(&reason) => return Err(reason),
            Err(reason) => refused.push(Refused { checkpoint: name.to_string(), reason }),
        }
    }
    if refused.is_empty() { Ok(None) } else { Err(CheckpointError::NoneGood { refused }) }
}

/// Whether an error leaves open whether a checkpoint is valid: it was not read, or another version
/// can read it.
fn may_be_valid(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::GivenUp { .. } | CheckpointError::OtherFormat { .. } => true,
        CheckpointError::Storage(fault) => !fault.is_not_found(),
        _ => false,
    }
}

/// A checkpoint whose manifest and catalogue are valid. The file of a shard or of a table's
/// partition is verified before any of it is used. It stays open, so the verified bytes are the
/// bytes read, also if the checkpoint is deleted meanwhile.
#[derive(Debug)]
pub struct Opened {
    storage: Arc<dyn CheckpointStorage>,
    manifest: Manifest,
    catalogue: Catalogue,
    plans: BTreeMap<ShardId, ShardFile>,
    tables: BTreeMap<PartitionId, (TableFile, FileEntry)>,
    verified: BTreeMap<ShardId, Box<dyn ReadFile>>,
    verified_tables: BTreeMap<PartitionId, Box<dyn ReadFile>>,
}

impl Opened {
    /// Opens the checkpoint of this name.
    pub fn open(
        storage: Arc<dyn CheckpointStorage>,
        name: CheckpointName,
    ) -> Result<Opened, CheckpointError> {
        let manifest = read_manifest(&*storage, name)?;
        let catalogue = read_catalogue(&*storage, &manifest)?;
        manifest.check_catalogue(&catalogue)?;
        let mut plans = BTreeMap::new();
        for shard in &manifest.shards {
            let plan = ShardFile::plan(&catalogue, shard.id(), &manifest.training, name)?;
            plan.check_entry(&name.to_string(), &shard.file)?;
            plans.insert(shard.id(), plan);
        }
        let mut tables = BTreeMap::new();
        for entry in manifest.shards.iter().flat_map(|shard| &shard.tables) {
            let partition = &catalogue.partitions()[entry.partition as usize];
            let training = &manifest.training;
            let plan = TableFile::plan(&catalogue, partition, training, entry.rows, name)?;
            plan.check_entry(&name.to_string(), &entry.file)?;
            tables.insert(partition.id, (plan, entry.file.clone()));
        }
        let verified = BTreeMap::new();
        let verified_tables = BTreeMap::new();
        Ok(Opened { storage, manifest, catalogue, plans, tables, verified, verified_tables })
    }

    /// Returns the manifest: step, epoch, the user's bytes, the shards' push windows.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the catalogue of the saved variables and their placement.
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Verifies every file, to the last byte. Shard files that are verified already are not read
    /// again.
    pub(crate) fn verify(&mut self) -> Result<(), CheckpointError> {
        let shards: Vec<ShardId> = self.plans.keys().copied().collect();
        shards.into_iter().try_for_each(|shard| self.verify_shard(shard))?;
        let folder = self.manifest.checkpoint.to_string();
        let mut tables = self.tables.values();
        tables.try_for_each(|(plan, entry)| plan.open(&*self.storage, &folder, entry).map(drop))
    }

    /// Reads all rows of a table's partition, in batches: their heads, and the bytes of these
    /// streams. Stream 0 is the values.
    pub(crate) fn read_rows(
        &mut self,
        partition: PartitionId,
        streams: &[usize],
        take: &mut TakeRows<'_>,
    ) -> Result<(), CheckpointError> {
        self.verify_table(partition)?;
        let (plan, _) = &self.tables[&partition];
        plan.read(&*self.verified_tables[&partition], streams, take)
    }

    fn verify_table(&mut self, partition: PartitionId) -> Result<(), CheckpointError> {
        if self.verified_tables.contains_key(&partition) {
            return Ok(());
        }
        let (plan, entry) = &self.tables[&partition];
        let folder = self.manifest.checkpoint.to_string();
        let file = plan.open(&*self.storage, &folder, entry)?;
        self.verified_tables.insert(partition, file);
        Ok(())
    }

    fn verify_shard(&mut self, shard: ShardId) -> Result<(), CheckpointError> {
        if self.verified.contains_key(&shard) {
            return Ok(());
        }
        let folder = self.manifest.checkpoint.to_string();
        let entry =
            self.manifest.shard(shard).expect("every shard has an entry, which was checked");
        let file = verify(&*self.storage, &folder, &entry.file)?;
        self.plans[&shard].check_head(&folder, &*file)?;
        self.verified.insert(shard, file);
        Ok(())
    }

    /// Reads a range of a variable's elements, in order and in pieces of at most 1 MiB, from all
    /// partitions that have some. The variable must have the range and the stream.
    pub(crate) fn read(
        &mut self,
        variable: VariableId,
        stream: StoredStream,
        elements: Range<u64>,
        take: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let mut next = elements.start;
        while next < elements.end {
            let parts = self.catalogue.partitions_of(variable);
            let part = &parts[parts.partition_point(|part| part.elements.end <= next)];
            let id = part.id;
            let shard = part.shard;
            let held = part.elements.clone();
            let size = part.dtype.size() as u64;
            self.verify_shard(shard)?;
            let start = self.start(shard, stream, id);
            let end = held.end.min(elements.end);
            let offset = start + (next - held.start) * size;
            read_pieces(&*self.verified[&shard], offset, (end - next) * size, take)?;
            next = end;
        }
        Ok(())
    }

    /// Verifies the files of all partitions that have some of these elements of a variable.
    pub(crate) fn verify_elements(
        &mut self,
        variable: VariableId,
        elements: &Range<u64>,
    ) -> Result<(), CheckpointError> {
        let parts = self.catalogue.partitions_of(variable).iter();
        let overlaps = |part: &&Partition| {
            part.elements.start < elements.end && elements.start < part.elements.end
        };
        let shards: Vec<ShardId> = parts.filter(overlaps).map(|part| part.shard).collect();
        shards.into_iter().try_for_each(|shard| self.verify_shard(shard))
    }

    fn start(&self, shard: ShardId, stream: StoredStream, partition: PartitionId) -> u64 {
        let start = self.plans[&shard].start(stream, partition);
        start.expect("the variable has the stream")
    }
}

/// Returns the published checkpoints, newest first.
fn names(storage: &dyn CheckpointStorage) -> Result<Vec<CheckpointName>, CheckpointError> {
    let folders = storage.list(None)?;
    let mut names: Vec<CheckpointName> = folders.iter().filter_map(|f| f.parse().ok()).collect();
    names.sort_by(|a, b| b.cmp(a));
    Ok(names)
}

/// Returns the highest restore epoch that the name of a checkpoint has, also of a corrupt or
/// unfinished one; 0 without any.
///
/// A restore begins a higher one, so that its checkpoints are newer than all that it has passed
/// over.
pub fn highest_epoch(storage: &dyn CheckpointStorage) -> Result<u32, CheckpointError> {
    let folders = storage.list(None)?;
    let named = folders
        .iter()
        .filter_map(|folder| folder.parse().ok().or_else(|| CheckpointName::of_temporary(folder)));
    let epochs = named.map(|name: CheckpointName| name.restore_epoch);
    Ok(epochs.max().unwrap_or(0))
}

fn read_manifest(
    storage: &dyn CheckpointStorage,
    name: CheckpointName,
) -> Result<Manifest, CheckpointError> {
    let bytes = read_small(storage, name, MANIFEST, MANIFEST_BYTES_MAX as u64)?;
    Manifest::decode(&bytes, name)
}

fn read_catalogue(
    storage: &dyn CheckpointStorage,
    manifest: &Manifest,
) -> Result<Catalogue, CheckpointError> {
    let name = manifest.checkpoint;
    let entry = &manifest.catalogue;
    verify(storage, &name.to_string(), entry)?;
    let bytes = read_small(storage, name, CATALOGUE, CATALOGUE_BYTES_MAX)?;
    let refuse = |found: String| corrupt(&format!("{name}/{CATALOGUE}"), 0, "the catalogue", found);
    let catalogue = Catalogue::decode(&bytes).map_err(|error| refuse(Chain(&error).to_string()))?;
    // The digest is the hash of the file, so this is the file that the manifest names.
    let same = catalogue.digest() == entry.sha256;
    if same { Ok(catalogue) } else { Err(refuse("another catalogue".into())) }
}

/// Reads a file that fits into memory. Its length is checked before it is read.
fn read_small(
    storage: &dyn CheckpointStorage,
    name: CheckpointName,
    file: &str,
    bytes_max: u64,
) -> Result<Vec<u8>, CheckpointError> {
    let opened = storage.open(&name.to_string(), file)?;
    let bytes = opened.bytes();
    if bytes > bytes_max {
        let path = format!("{name}/{file}");
        let expected = format!("at most {bytes_max} bytes");
        return Err(corrupt(&path, bytes_max, expected, format!("{bytes} bytes")));
    }
    let mut whole = vec![0; bytes as usize];
    opened.read(0, &mut whole)?;
    Ok(whole)
}
