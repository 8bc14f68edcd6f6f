//! Checks of tables: catalogues that this shard cannot train, and pushes that exceed a full table.

use pushpull_common::catalogue::Catalogue;
use pushpull_optim::optimizer::Untrainable;

use super::Shard;
use crate::config::Durability;

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
        let reason = if self.config.storage.durability == Durability::Power {
            "a table survives a loss of power in checkpoints only, not with Durability::Power"
                .to_owned()
        } else if here > TABLES_MAX {
            format!("{} would have {here} parts of tables, the limit is {TABLES_MAX}", self.id)
        } else {
            return Ok(());
        };
        Err(Untrainable { variable: table.name().to_owned(), reason })
    }
}
