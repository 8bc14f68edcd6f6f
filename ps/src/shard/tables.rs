//! Checks of tables: catalogues that this shard cannot train, and pushes that exceed a full table.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;

use super::Shard;
use crate::aggregate::step_coordinator::PerPush;
use crate::config::Durability;
use crate::inbox::PushedRows;
use crate::optimizer::Untrainable;

/// The most tables on a shard. Each has a file for its index, and some for its rows.
const TABLES_MAX: usize = 1024;

impl Shard {
    /// Checks that the variables of a catalogue can be trained with the server's configuration.
    pub(super) fn can_train(&self, catalogue: &Catalogue) -> Result<(), Untrainable> {
        self.config.rules.check(catalogue)?;
        let Some(table) = catalogue.variables().iter().find(|v| v.as_table().is_some()) else {
            return Ok(());
        };
        let here = catalogue.layout(self.id).tables().len();
        let reason = if self.config.durability == Durability::Power {
            "a table survives a loss of power in checkpoints only, not with Durability::Power"
                .to_owned()
        } else if here > TABLES_MAX {
            format!("{} would have {here} parts of tables, the limit is {TABLES_MAX}", self.id)
        } else {
            return Ok(());
        };
        Err(Untrainable { variable: table.name().to_owned(), reason })
    }

    /// Checks that the new rows of a complete push fit into the tables that evict nothing, together
    /// with those of the complete pushes before it. Checks for every table that assigned rows fit.
    pub(super) fn check_tables(&self, push_slot: u32) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&self.intake.inbox, self.variables.store()) else {
            return Ok(());
        };
        let operation = inbox.arrival(push_slot).map(|push| push.operation);
        let assigned = operation.is_some_and(|operation| operation != Operation::Gradient {});
        for table in store.tables() {
            let partition = table.partition();
            let Some(rows) = inbox.rows(push_slot, partition) else { continue };
            let (more, limit) = (rows.len() as u64, table.limit());
            if assigned && more > limit {
                let (variable, rows) = (partition.variable, table.rows());
                return Err(Refusal::TableFull { variable, rows, more, limit });
            }
            if !table.rejects_when_full() {
                continue;
            }
            let due = inbox.whole_slots().filter(|&other| other != push_slot).chain([push_slot]);
            let pushes: PerPush<_> =
                due.filter_map(|push_slot| inbox.rows(push_slot, partition)).collect();
            // New rows are counted only if they might exceed the limit.
            let most: u64 = pushes.iter().map(|rows| rows.len() as u64).sum();
            if table.rows() + most <= table.limit() {
                continue;
            }
            let mut ids: Vec<u64> = pushes.iter().flat_map(PushedRows::numbers).collect();
            ids.sort_unstable();
            let more = table.count_new(&self.files.journal, &ids, assigned);
            // Admission by chance admits few new rows, so only a table that is full refuses them.
            let sure = if table.admits_by_chance() && !assigned { more.min(1) } else { more };
            let rows = table.rows();
            if rows + sure > limit {
                return Err(Refusal::TableFull { variable: partition.variable, rows, more, limit });
            }
        }
        Ok(())
    }
}
