//! Tables that grow: what cannot be one here, pushes that a full one has no room for, and what they
//! count.

use pushpull_common::catalogue::Catalogue;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::Operation;

use super::{Shard, Variables};
use crate::aggregate::step_coordinator::PerPush;
use crate::config::Durability;
use crate::inbox::Rows;
use crate::optimizer::Untrainable;
use crate::table::Table;

/// Each has a file for its index, and some for its rows.
const TABLES_MAX: usize = 1024;

impl Shard {
    /// Whether the variables of a catalogue can be trained as the server is configured.
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
            format!(
                "there would be {here} parts of tables on {}, not {TABLES_MAX} at most",
                self.id
            )
        } else {
            return Ok(());
        };
        Err(Untrainable { variable: table.name().to_owned(), reason })
    }

    /// Whether tables that evict nothing have room for the new rows of a push whose last part has
    /// come, beside those of the pushes that came before it; and whether any table has for rows that
    /// are given values.
    pub(super) fn check_tables(&self, push_slot: u32) -> Result<(), Refusal> {
        let (Some(inbox), Some(store)) = (&self.inbox, self.store()) else { return Ok(()) };
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
            if !table.refuses() {
                continue;
            }
            let due = inbox.whole_slots().filter(|&other| other != push_slot).chain([push_slot]);
            let pushes: PerPush<_> =
                due.filter_map(|push_slot| inbox.rows(push_slot, partition)).collect();
            // Only where there may be too many are they looked for.
            let most: u64 = pushes.iter().map(|rows| rows.len() as u64).sum();
            if table.rows() + most <= table.limit() {
                continue;
            }
            let mut ids: Vec<u64> = pushes.iter().flat_map(Rows::numbers).collect();
            ids.sort_unstable();
            let more = table.count_new(&self.journal, &mut ids, assigned);
            // Few may be admitted of those that come by chance: only a table without any room refuses them.
            let sure = if table.draws() && !assigned { more.min(1) } else { more };
            let rows = table.rows();
            if rows + sure > limit {
                return Err(Refusal::TableFull { variable: partition.variable, rows, more, limit });
            }
        }
        Ok(())
    }

    /// Adds what the tables have counted to the counters.
    pub(super) fn count_tables(&mut self) {
        let (Variables::Declared(store) | Variables::Ready(store)) = &mut self.variables else {
            return;
        };
        let tables = store.tables_mut();
        if tables.is_empty() {
            return;
        }
        for counts in tables.iter_mut().map(Table::take_counts) {
            self.counters.table_hits.add(counts.hits);
            self.counters.table_misses.add(counts.misses);
            self.counters.table_rows_admitted.add(counts.admitted);
            self.counters.table_rows_turned_away.add(counts.turned_away);
            self.counters.table_rows_evicted.add(counts.evicted);
        }
        self.counters.table_rows.set(tables.iter().map(Table::rows).sum());
        self.counters.table_bytes.set(tables.iter().map(Table::bytes).sum());
    }
}
