//! Growing tables of a store, which change together with its blocks, by the same commits.

use pushpull_common::catalogue::Partition;
use pushpull_common::ids::PartitionId;
use pushpull_optim::optimizer::VariableRules;

use super::Store;
use crate::arena::{Arena, Budget};
use crate::change::Change;
use crate::commit::Journal;
use crate::error::StorageError;
use crate::table::{Table, TableFiles, TableInputs};

impl Store {
    /// Attaches the tables, which `make` creates or opens with [`Table::create`] or
    /// [`Table::open`]. Then clears the undo, because every uncommitted change in place has been
    /// rolled back.
    pub fn attach_tables(
        &mut self,
        arena: &Arena,
        generation: u64,
        budget: &Budget,
        rules: &VariableRules,
        mut make: impl FnMut(TableInputs<'_>) -> Result<Table, StorageError>,
    ) -> Result<(), StorageError> {
        let undo_rows = std::mem::take(&mut self.undo_rows);
        for (table, partition) in (0..).zip(self.layout.tables()) {
            let budget = budget.clone();
            let inputs = TableInputs {
                files: TableFiles { arena: arena.clone(), generation, table, budget },
                catalogue: &self.catalogue,
                partition,
                slots: rules.optimizer(partition.variable).slots(),
                integrity: self.integrity,
                undo_rows: &undo_rows,
            };
            self.tables.push(make(inputs)?);
        }
        self.undo.clear();
        Ok(())
    }

    /// Returns the tables, in the order of the layout.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// Returns the tables, in the order of the layout, for changes.
    pub fn tables_mut(&mut self) -> &mut [Table] {
        &mut self.tables
    }

    /// Extends the intent for the current changes of all tables.
    pub fn reserve_intent_for_tables(&self, journal: &mut Journal) -> Result<(), StorageError> {
        let words = self.tables.iter().map(Table::dirty_words).sum();
        journal.grow_intent(words)
    }

    /// Decides for the current change, which makes `version`, whether rows of tables are changed in
    /// place. They are if the undo can hold them and nothing reads them; the rest of the change
    /// then runs without interruption. Does nothing if it is already decided.
    pub fn settle_tables(&mut self, version: u64) {
        if self.tables.iter().all(Table::is_settled) {
            return;
        }
        let need = self.tables.iter_mut().map(Table::undo_need).sum::<Option<usize>>();
        let fits = |need| need <= self.geometry.undo_bytes && self.undo.fits(need);
        let in_place = !self.power && need.is_some_and(fits);
        if in_place {
            if !self.in_place {
                self.undo.begin(version);
            }
            self.tables_in_place = true;
        }
        self.tables.iter_mut().for_each(|table| table.settle(in_place));
    }

    /// Changes rows of a table by consecutive rows of input. `rows` are positions among the rows
    /// that the change began with. [`Store::settle_tables`] must have been called.
    pub fn change_table(
        &mut self,
        table: usize,
        change: Change<'_>,
        rows: std::ops::Range<usize>,
        input: &[u8],
    ) {
        let (undo, planted) = (&mut self.undo, self.planted);
        let found = self.tables[table].change_rows(change, rows, input, undo, planted);
        self.record_table_overflow(table, found);
    }

    /// Returns the table with this partition id.
    pub fn table(&self, id: PartitionId) -> Option<&Table> {
        self.tables.iter().find(|table| table.partition().id == id)
    }

    /// Returns a partition that is pulled by rows.
    pub fn partition_of_rows(&self, id: PartitionId) -> Option<&Partition> {
        let stored = self.partition(id).filter(|partition| partition.is_sparse());
        stored.or_else(|| self.table(id).map(Table::partition))
    }

    /// Stages the indices of restored tables.
    pub fn tables_restored(&mut self, journal: &mut Journal) -> Result<(), StorageError> {
        self.tables.iter_mut().try_for_each(|table| table.restored(journal))
    }
}
