//! The manifest: the files of a checkpoint, and the other state that a cluster needs to resume.
//!
//! It is a line of JSON and a line with the SHA-256 of the first. The second line verifies the
//! first, and the hashes in the first verify all other files.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::data_set::UNSPENT_BATCHES_MAX;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::Outcome;
use pushpull_common::protocol::limits::WINDOW;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::data_entry::DataEntry;
use crate::error::{CheckpointError, corrupt, foreign};
use crate::files::FileEntry;
use crate::hex;
use crate::name::CheckpointName;
use crate::saved_coordinator::{self, SavedCoordinator};
use crate::shard_file::{file_name, tensor_name};
use crate::table_file::{self, TableEntry};
use crate::training::CheckpointTraining;

/// The publisher's part of a checkpoint's manifest; the rest follows from the catalogue.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The time of the save, in milliseconds since 1970; for display and for retention by age.
    pub saved_unix_ms: u64,
    /// The optimizers whose slots are saved.
    pub training: CheckpointTraining,
    /// Every shard that holds variables, and the other shards that have state to save.
    pub shards: Vec<ShardEntry>,
    /// The user's own bytes, such as the positions of data readers; at most 1 MiB.
    pub user: Vec<u8>,
}

/// One shard of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// The ps task.
    pub task: u32,
    /// The shard within it.
    pub shard: u16,
    /// Its file.
    pub file: FileEntry,
    /// Its partitions of growing tables, in the catalogue's order.
    pub tables: Vec<TableEntry>,
    /// The number of pushes it had applied.
    pub version: u64,
    /// The number of gradients it had applied: Adam's t.
    pub gradients: u64,
    /// The push windows of its clients.
    pub clients: Vec<ClientWindow>,
    /// The data position, on the step owner if a data set is declared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataEntry>,
    /// The coordinators, each with the effects that have counted in its values.
    #[serde(default, rename = "calls", skip_serializing_if = "Vec::is_empty")]
    pub coordinators: Vec<SavedCoordinator>,
}

impl ShardEntry {
    pub(crate) fn id(&self) -> ShardId {
        ShardId { task: self.task, shard: self.shard }
    }
}

/// The push window of one client on a shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientWindow {
    /// The client's job.
    pub job: String,
    /// The client's index in it.
    pub index: u32,
    /// The client's epoch.
    pub epoch: u64,
    /// The client's incarnation.
    pub incarnation: u64,
    /// The newest settled sequence.
    pub newest: u64,
    /// The remembered sequences, each with its outcome.
    pub settled: Vec<(u64, Settled)>,
}

/// The outcome of a push in a file. File formats change less often than the wire protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Settled {
    /// See [`Outcome::Applied`].
    Applied {
        /// The shard's version after the push.
        version: u64,
        /// The global step after the push.
        step: u64,
        /// The staleness of the gradient in global steps.
        staleness: u64,
    },
    /// See [`Outcome::Accepted`].
    Accepted {
        /// The step that the gradient is part of.
        step: u64,
    },
    /// See [`Outcome::Stale`].
    Stale {
        /// The step that was current then.
        current: u64,
    },
    /// See [`Outcome::Withdrawn`].
    Withdrawn,
    /// See [`Outcome::Held`].
    Held,
    /// See [`Outcome::Repeated`].
    Repeated,
}

impl From<Outcome> for Settled {
    fn from(outcome: Outcome) -> Settled {
        match outcome {
            Outcome::Applied { version, step, staleness } => {
                Settled::Applied { version, step: step.0, staleness }
            }
            Outcome::Accepted { step } => Settled::Accepted { step: step.0 },
            Outcome::Stale { current } => Settled::Stale { current: current.0 },
            Outcome::Withdrawn {} => Settled::Withdrawn,
            Outcome::Held {} => Settled::Held,
            Outcome::Repeated {} => Settled::Repeated,
        }
    }
}

impl From<Settled> for Outcome {
    fn from(settled: Settled) -> Outcome {
        match settled {
            Settled::Applied { version, step, staleness } => {
                Outcome::Applied { version, step: step.into(), staleness }
            }
            Settled::Accepted { step } => Outcome::Accepted { step: step.into() },
            Settled::Stale { current } => Outcome::Stale { current: current.into() },
            Settled::Withdrawn => Outcome::Withdrawn {},
            Settled::Held => Outcome::Held {},
            Settled::Repeated => Outcome::Repeated {},
        }
    }
}

/// A manifest in its stored form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: u32,
    /// The name of the checkpoint.
    pub checkpoint: CheckpointName,
    pub(crate) saved_unix_ms: u64,
    /// The time of the first save in this storage; retention by age counts from it.
    pub(crate) first_saved_unix_ms: u64,
    pub(crate) training: CheckpointTraining,
    pub(crate) catalogue: FileEntry,
    /// The shards in ascending order.
    pub shards: Vec<ShardEntry>,
    /// Every partition in the catalogue's order, so that other programs need no catalogue.
    partitions: Vec<PartitionEntry>,
    /// The user's own bytes.
    #[serde(with = "hex")]
    pub user: Vec<u8>,
}

/// The elements of a variable that a tensor holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartitionEntry {
    tensor: String,
    file: String,
    elements: (u64, u64),
}

impl Manifest {
    pub(crate) fn new(
        checkpoint: CheckpointName,
        first_saved_unix_ms: u64,
        catalogue: &Catalogue,
        mut contents: Contents,
    ) -> Result<Manifest, CheckpointError> {
        too_large("bytes of user data", contents.user.len(), USER_BYTES_MAX)?;
        contents.shards.sort_by_key(ShardEntry::id);
        let manifest = Manifest {
            format: FORMAT,
            checkpoint,
            saved_unix_ms: contents.saved_unix_ms,
            first_saved_unix_ms,
            training: contents.training,
            catalogue: FileEntry {
                file: CATALOGUE.to_owned(),
                bytes: catalogue.encode().len() as u64,
                sha256: catalogue.digest(),
            },
            shards: contents.shards,
            partitions: partitions_of(catalogue),
            user: contents.user,
        };
        match catalogue.shards().find(|shard| manifest.shard(*shard).is_none()) {
            None => Ok(manifest),
            Some(shard) => {
                Err(CheckpointError::ShardMissing { checkpoint: checkpoint.to_string(), shard })
            }
        }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes =
            serde_json::to_vec(self).expect("all keys are strings and there are no floats");
        bytes.push(b'\n');
        bytes.extend_from_slice(&seal_of(&bytes));
        too_large("bytes of the manifest", bytes.len(), MANIFEST_BYTES_MAX)?;
        Ok(bytes)
    }

    /// Decodes the manifest of the checkpoint of this name. The bytes are untrusted.
    pub(crate) fn decode(bytes: &[u8], name: CheckpointName) -> Result<Manifest, CheckpointError> {
        let file = format!("{name}/{MANIFEST}");
        let refuse = |offset: usize, expected: &str, found: &dyn std::fmt::Display| {
            Err(corrupt(&file, offset as u64, expected, found))
        };
        let (text, seal) = bytes.split_at(bytes.len().saturating_sub(SEAL_BYTES));
        let expected = seal_of(text);
        if seal != expected {
            if let Some(found) = foreign(bytes) {
                return Err(CheckpointError::OtherFile { file, found });
            }
            let found = String::from_utf8_lossy(seal);
            let expected = String::from_utf8_lossy(&expected);
            return refuse(text.len(), &format!("{expected:?}"), &format!("{found:?}"));
        }
        // The format version determines the other fields, so it is checked first.
        let at = |error: &serde_json::Error| error.column().saturating_sub(1);
        match serde_json::from_slice::<FormatVersion>(text) {
            Ok(FormatVersion { format: FORMAT }) => {}
            // The seal is right, so these are the bytes that were written.
            Ok(FormatVersion { format: found }) => {
                let checkpoint = name.to_string();
                return Err(CheckpointError::OtherFormat { checkpoint, found, format: FORMAT });
            }
            Err(error) => return refuse(at(&error), "a manifest", &error),
        }
        let manifest: Manifest = match serde_json::from_slice(text) {
            Ok(manifest) => manifest,
            Err(error) => return refuse(at(&error), "a manifest", &error),
        };
        if manifest.checkpoint != name {
            return refuse(0, &name.to_string(), &manifest.checkpoint);
        }
        manifest.check(&file)?;
        Ok(manifest)
    }

    /// Checks everything that does not need the catalogue.
    pub(crate) fn check(&self, file: &str) -> Result<(), CheckpointError> {
        let refuse =
            |expected: &str, found: &dyn std::fmt::Display| Err(corrupt(file, 0, expected, found));
        if self.catalogue.file != CATALOGUE {
            return refuse(CATALOGUE, &self.catalogue.file);
        }
        if let Err((expected, found)) = self.training.check() {
            return refuse(&expected, &found);
        }
        if !self.shards.is_sorted_by(|a, b| a.id() < b.id()) {
            return refuse("each shard once, in order", &"others");
        }
        for shard in &self.shards {
            if shard.file.file != file_name(shard.id()) {
                return refuse(&file_name(shard.id()), &shard.file.file);
            }
            if let Some(Err((expected, found))) =
                shard.data.as_ref().map(|data| data.check(UNSPENT_BATCHES_MAX))
            {
                return refuse(&expected, &found);
            }
            if let Err((expected, found)) = saved_coordinator::check(&shard.coordinators) {
                return refuse(&expected, &found);
            }
            for client in &shard.clients {
                let oldest = client.newest.saturating_sub(WINDOW - 1).max(1);
                let inside = |sequence: u64| (oldest..=client.newest).contains(&sequence);
                let sequences = &client.settled;
                if !sequences.is_sorted_by(|a, b| a.0 < b.0)
                    || !sequences.iter().all(|(sequence, _)| inside(*sequence))
                {
                    let expected = format!("sequences {oldest} to {} in order", client.newest);
                    return refuse(&expected, &"others");
                }
            }
        }
        Ok(())
    }

    /// Checks that this manifest is for a checkpoint of this catalogue.
    pub(crate) fn check_catalogue(&self, catalogue: &Catalogue) -> Result<(), CheckpointError> {
        let file = format!("{}/{MANIFEST}", self.checkpoint);
        let refuse = |expected: String, found: String| Err(corrupt(&file, 0, expected, found));
        if let Err((expected, found)) = self.training.check_catalogue(catalogue) {
            return refuse(expected, found);
        }
        if let Some(shard) = catalogue.shards().find(|id| self.shard(*id).is_none()) {
            return refuse(format!("an entry for {shard}"), "none".into());
        }
        for shard in &self.shards {
            let layout = catalogue.layout(shard.id());
            let expected: Vec<u32> = layout.tables().iter().map(|table| table.id.0).collect();
            let found: Vec<u32> = shard.tables.iter().map(|table| table.partition).collect();
            if expected != found {
                let of = |tables| format!("tables {tables:?} of {}", shard.id());
                return refuse(of(expected), of(found));
            }
        }
        let expected = partitions_of(catalogue);
        if let Some((ours, theirs)) = expected.iter().zip(&self.partitions).find(|(a, b)| a != b) {
            return refuse(format!("{ours:?}"), format!("{theirs:?}"));
        }
        let ours = expected.len();
        let theirs = self.partitions.len();
        if ours != theirs {
            return refuse(format!("{ours} partitions"), format!("{theirs}"));
        }
        Ok(())
    }

    pub(crate) fn shard(&self, id: ShardId) -> Option<&ShardEntry> {
        let index = self.shards.binary_search_by_key(&id, ShardEntry::id).ok()?;
        Some(&self.shards[index])
    }

    /// Returns the total size of all files that the manifest names, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let tables = self.shards.iter().flat_map(|shard| &shard.tables).map(|table| &table.file);
        let files = self.shards.iter().map(|shard| &shard.file).chain([&self.catalogue]);
        let files = files.chain(tables);
        files.fold(0, |sum, file| file.bytes.saturating_add(sum))
    }
}

/// The name of the manifest's file.
pub(crate) const MANIFEST: &str = "MANIFEST";
/// The name of the file with the encoded catalogue.
pub(crate) const CATALOGUE: &str = "CATALOGUE";
/// The largest manifest: that of the largest catalogue, and a few thousand clients.
pub(crate) const MANIFEST_BYTES_MAX: usize = 256 << 20;

#[derive(Deserialize)]
struct FormatVersion {
    format: u32,
}

/// Returns the second line of a manifest. It is compared as bytes, so only one form is valid.
fn seal_of(text: &[u8]) -> Vec<u8> {
    format!("sha256 {}\n", hex::encode(&Sha256::digest(text))).into_bytes()
}

fn partitions_of(catalogue: &Catalogue) -> Vec<PartitionEntry> {
    let entry = |part: &pushpull_common::catalogue::Partition| PartitionEntry {
        tensor: tensor_name(catalogue, part),
        file: match part.is_table() {
            true => table_file::file_name(part),
            false => file_name(part.shard),
        },
        elements: (part.elements.start, part.elements.end),
    };
    catalogue.partitions().iter().map(entry).collect()
}

fn too_large(what: &'static str, found: usize, limit: usize) -> Result<(), CheckpointError> {
    let found = found as u64;
    let limit = limit as u64;
    if found > limit { Err(CheckpointError::TooLarge { what, found, limit }) } else { Ok(()) }
}

pub(crate) const FORMAT: u32 = 2;
/// The size of `sha256 `, the digits, and the line feed.
const SEAL_BYTES: usize = 7 + 64 + 1;
const USER_BYTES_MAX: usize = 1 << 20;
