//! [`ShardFiles`]: the files of a shard, and the journal of its durable words.
//!
//! The durable words are a function of the shard's state. After each input, the words that differ
//! are committed in one transaction, before any answer leaves the shard. So everything that an
//! answer promises is durable, and no code has to track its changes. The exceptions are clients and
//! the entries of their push windows, which are tracked.

pub(crate) mod client_record;
pub(crate) mod coordinator_record;
pub(crate) mod data_record;
pub(crate) mod generation;
pub(crate) mod poison;
pub(crate) mod power;
pub(crate) mod record;

use std::sync::Arc;

use pushpull_common::protocol::Refusal;
use pushpull_store::arena::{Arena, Budget, file_name};
use pushpull_store::commit::{CELL_WORDS, Journal};
use pushpull_store::layout::{Kind, PAGE_BYTES};
use pushpull_store::store::Store;

use super::file_work::flush::Flush;
use super::output::{ShardOutput, ShardOutputs};
use crate::client_entry::CLIENTS_MAX;
use crate::config::PsConfig;
use crate::error::StorageError;
use client_record::ClientRecord;
use coordinator_record::CoordinatorRecord;
use data_record::DataRecord;
use generation::remove_leftovers;
use poison::PoisonRecord;
use power::{FlushOutcome, Power};
use record::{FROM_IMAGE, ShardRecord};

/// The files of a shard, and what their names and words depend on.
///
/// Invariants: between two inputs the durable words are those of the owners' state. With images, no
/// output leaves before its commit is in an image on disk.
#[derive(Debug)]
pub(super) struct ShardFiles {
    pub(super) config: Arc<PsConfig>,
    pub(super) arena: Arena,
    pub(super) budget: Budget,
    pub(super) journal: Journal,
    /// The number of declarations of variables. Each has its own files.
    pub(super) generation: u64,
    /// How many processes have opened the arena.
    pub(super) lives: u64,
    /// `Some` if answers must survive a loss of power.
    pub(super) power: Option<Power>,
}

/// The clients that one transaction can hold in addition to a push.
pub(super) const CLIENTS_AT_ONCE: usize = 16;

/// The cells by which the control file grows.
pub(super) const GROWTH: usize = 16;

/// The bytes of the longest control file.
pub(crate) const CONTROL_BYTES_MAX: usize =
    (1 + 1 + DataRecord::CELLS + CoordinatorRecord::CELLS + CLIENTS_MAX + 1 + GROWTH) * PAGE_BYTES;

/// Returns the words of a shard's largest transaction, for tables files of `table_words` words and
/// `tables` embedding tables. The index changes of the embedding tables come on top.
pub(super) fn transaction_words(table_words: usize, tables: usize) -> usize {
    // The table's own words, and its last commit number, which the tables file and the index both
    // have.
    let of_tables = tables * 8;
    let of_clients = CLIENTS_AT_ONCE * ClientRecord::WORDS;
    let of_shard = ShardRecord::WORDS + DataRecord::WORDS + CoordinatorRecord::WORDS;
    table_words + of_tables + of_shard + of_clients
}

impl ShardFiles {
    /// Commits the staged words in one transaction.
    pub(super) fn commit(&mut self) {
        let made = self.journal.commit();
        if let Some(power) = self.power.as_mut().filter(|_| made) {
            power.count_commit();
        }
    }

    /// Commits the staged words if those of one more client might not fit into the transaction.
    /// Losing very many members at once takes several. The state after each is consistent.
    pub(super) fn make_room_for_client(&mut self) {
        if self.journal.free_words() < ClientRecord::WORDS {
            self.commit();
        }
    }

    /// Holds outputs back until their commit is on disk, and starts to write an image if one is
    /// due. `store` has the variables, if any are declared.
    pub(super) fn hold_outputs(&mut self, store: Option<&mut Store>, out: &mut ShardOutputs) {
        let Some(power) = &mut self.power else { return };
        power.hold(out);
        let Some(number) = power.begin_image() else { return };
        let mut files = Vec::new();
        if let Some(store) = store {
            let kinds = [Kind::Catalogue, Kind::Values, Kind::Slots, Kind::Inbox, Kind::Undo];
            let slots = store.geometry().slots > 0;
            let kinds = kinds.into_iter().filter(|&kind| kind != Kind::Slots || slots);
            files.extend(kinds.map(|kind| file_name(kind, self.generation)));
            store.image_begun();
        }
        let flush = Flush {
            storage: self.arena.storage.clone(),
            stamp: self.arena.stamp,
            files,
            number,
            image: self.journal.image(FROM_IMAGE),
            planted: self.config.planted,
        };
        out.push(ShardOutput::Flush(Box::new(flush)));
    }

    /// Takes the result of a flush. `store` has the variables, if any are declared, and `of_tables`
    /// names the files of their tables; `None` if no files of variables are named.
    pub(super) fn flushed(
        &mut self,
        store: Option<&mut Store>,
        of_tables: Option<&[String]>,
        out: &mut ShardOutputs,
        result: Result<(), String>,
    ) -> FlushOutcome {
        let Some(power) = &mut self.power else { return FlushOutcome::None };
        let outcome = power.flushed(out, result);
        match &outcome {
            FlushOutcome::None => {}
            FlushOutcome::Durable { unnamed } => {
                if *unnamed {
                    let named = of_tables.map(|_| self.generation);
                    let of_tables = of_tables.unwrap_or_default();
                    // A file that cannot be removed costs space, and the next process tries again.
                    let _ = remove_leftovers(&self.arena, named, of_tables);
                }
                if let Some(store) = store {
                    store.image_written();
                }
            }
            FlushOutcome::Failed(reason) => {
                PoisonRecord { reason: reason.clone() }.stage(&mut self.journal);
            }
        }
        outcome
    }

    /// Returns whether a commit waits for an image.
    pub(super) fn waits_for_image(&self) -> bool {
        self.power.as_ref().is_some_and(Power::waits_for_image)
    }

    /// Returns the refusal of everything except pulls after a failed flush.
    pub(super) fn poisoned(&self) -> Option<Refusal> {
        self.power.as_ref()?.refusal()
    }

    /// Removes the files of variables that no commit names any more. With images, that waits for
    /// the next one: an image on disk may name the files, and one that is being written flushes
    /// them.
    pub(super) fn remove_forgotten(&mut self) -> Result<(), StorageError> {
        self.journal.unmap_tables();
        match &mut self.power {
            None => remove_leftovers(&self.arena, None, &[]),
            Some(power) => {
                power.forget_files();
                Ok(())
            }
        }
    }

    /// Ensures that the control file has a cell for one more client than these.
    pub(super) fn reserve_client(&mut self, clients: usize) -> Result<(), StorageError> {
        let words = ClientRecord::first_word(clients + 1);
        if words > self.journal.control_words() {
            self.journal.grow_control(words + GROWTH * CELL_WORDS)?;
        }
        Ok(())
    }
}
