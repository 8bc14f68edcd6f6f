//! The tables that grow, beside what lies in blocks: they change with it, by the same commits.

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::PartitionId;

use super::{Change, Store};
use crate::arena::{Arena, Budget};
use crate::commit::Journal;
use crate::error::StorageError;
use crate::optimizer::VariableRules;
use crate::table::{Files, Making, Table};

impl Store {
    /// Has the tables made or opened, as `had` does it: with [`Table::create`] or [`Table::open`]. Then
    /// all is put back that a change which was not committed had changed in place.
    pub(crate) fn have_tables(
        &mut self,
        arena: &Arena,
        generation: u64,
        budget: &Budget,
        rules: &VariableRules,
        mut had: impl FnMut(Making<'_>) -> Result<Table, StorageError>,
    ) -> Result<(), StorageError> {
        let undone = std::mem::take(&mut self.undone);
        for (table, partition) in (0..).zip(self.layout.tables()) {
            let budget = budget.clone();
            let making = Making {
                files: Files { arena: arena.clone(), generation, table, budget },
                catalogue: &self.catalogue,
                partition,
                slots: rules.optimizer(partition.variable).slots(),
                integrity: self.integrity,
                undone: &undone,
            };
            self.tables.push(had(making)?);
        }
        self.undo.clear();
        Ok(())
    }

    pub(crate) fn tables(&self) -> &[Table] {
        &self.tables
    }

    pub(crate) fn tables_mut(&mut self) -> &mut [Table] {
        &mut self.tables
    }

    /// Makes sure that a transaction has room for what was begun of all tables together.
    pub(crate) fn make_room_for_tables(&self, journal: &mut Journal) -> Result<(), StorageError> {
        let words = self.tables.iter().map(Table::dirty_words).sum();
        journal.make_room(words)
    }

    /// Settles where the rows of tables will be that the change under way changes, which makes
    /// `version`, if that is not known yet: where they lie, if they are few enough that they can be
    /// kept, and nobody reads them. Then the rest of the change is made in one go.
    pub(crate) fn settle_tables(&mut self, version: u64) {
        if self.tables.iter().all(Table::is_settled) {
            return;
        }
        let need = self.tables.iter_mut().map(Table::undo_need).sum::<Option<usize>>();
        let fits = |need| need <= self.geometry.undo_bytes && self.undo.has_room(need);
        let in_place = !self.power && need.is_some_and(fits);
        if in_place {
            if !self.in_place {
                self.undo.begin(version);
            }
            self.tables_in_place = true;
        }
        self.tables.iter_mut().for_each(|table| table.settle(in_place));
    }

    /// Changes rows of a table, by their places among those that the change was begun with, once it is
    /// settled where they are; by rows that lie one behind the other.
    pub(crate) fn change_table(
        &mut self,
        table: usize,
        change: Change<'_>,
        logical_blocks: std::ops::Range<usize>,
        input: &[u8],
    ) {
        let (undo, planted) = (&mut self.undo, self.planted);
        let found = self.tables[table].change_rows(change, logical_blocks, input, undo, planted);
        self.note_overflow_of(table, found);
    }

    /// The table that a partition is.
    pub(crate) fn table(&self, id: PartitionId) -> Option<&Table> {
        self.tables.iter().find(|table| table.partition().id == id)
    }

    /// A partition of the shard that is pulled by rows.
    pub(crate) fn partition_of_rows(&self, id: PartitionId) -> Option<&Partition> {
        let stored = self.partition(id).filter(|partition| partition.is_sparse());
        stored.or_else(|| self.table(id).map(Table::partition))
    }

    /// Puts the indices of what was restored into the journal.
    pub(crate) fn tables_restored(&mut self, journal: &mut Journal) -> Result<(), StorageError> {
        self.tables.iter_mut().try_for_each(|table| table.restored(journal))
    }
}
