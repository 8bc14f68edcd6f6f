//! Embedding tables that grow: what a variable is whose rows have 64-bit ids and come as they are
//! used.
//!
//! A table has no extent of rows. Its ids are spread over [`BUCKETS`] buckets by a hash, and its
//! partitions are ranges of buckets, so that everything that knows ranges of rows can cut, place and
//! move tables too. Which row an id has is known to the shard that holds its bucket alone.

use thiserror::Error;

use crate::initializer::Initializer;

/// How many buckets the ids of a table are spread over: its nominal extent of rows.
pub const BUCKETS: u64 = 1 << 16;

/// The bucket of an id: the upper 16 bits of [`scatter`].
pub fn bucket(id: u64) -> u64 {
    scatter(id) >> 48
}

/// A bijection of 64 bits that changes half of them when any one changes: the finalizer of
/// MurmurHash3 (Appleby, 2011). Equal on every machine, as workers and servers must agree.
pub fn scatter(id: u64) -> u64 {
    let id = (id ^ (id >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let id = (id ^ (id >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    id ^ (id >> 33)
}

/// When an id is given a row of its own. Until then its gradients are dropped (and counted), and a
/// pull gives its first values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RowAdmission {
    /// With the first push that has it.
    #[default]
    Always,
    /// With this push that has it. In synchronous mode a step counts as one. The counts of ids that
    /// have no row yet are kept in 8 bytes each, for as many as the table may have rows; those of the
    /// rarest are forgotten first.
    After {
        /// Which: 1 is [`RowAdmission::Always`].
        pushes: u32,
    },
    /// With each push that has it by this probability, which is drawn from the id and the number of
    /// the push.
    Chance {
        /// Above 0, and at most 1.
        probability: f64,
    },
}

/// What becomes of a row that a full table has no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// The push is refused, and changes nothing.
    #[default]
    Refuse,
    /// It takes the place of the row that was not pushed for longest, among some that are looked at.
    LeastRecent,
    /// It takes the place of the row that was pushed least often, among some that are looked at.
    LeastFrequent,
}

/// What a table that grows is, beside the name, type and shape of its rows.
///
/// ```
/// use pushpull_common::table::{RowAdmission, Eviction, TableSpec};
/// let table = TableSpec::new(1 << 30)
///     .admission(RowAdmission::After { pushes: 3 })
///     .eviction(Eviction::LeastRecent)
///     .expire_after(100_000);
/// assert_eq!(table.rows_at_once, 1 << 16);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TableSpec {
    /// What its rows may take, on all shards together, in bytes: values and slots as servers keep them
    /// (of `f16` and `bf16` in `f32`, each stream in whole words of 8 bytes), and
    /// [`TableSpec::ROW_OVERHEAD_BYTES`] for each row. Beside that each shard has memory for the
    /// rows of one push or, in synchronous mode, of one step.
    pub bytes_max: u64,
    /// The most rows of one shard in one push. Each room of the inbox has room for so many.
    pub rows_at_once: u32,
    /// When an id is given a row.
    pub admission: RowAdmission,
    /// What becomes of rows that a full table has no room for.
    pub eviction: Eviction,
    /// Rows that no push had for so many global steps are evicted soon after, whether the table is
    /// full or not.
    pub expire_after_steps: Option<u64>,
}

/// Why a table cannot be.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum TableError {
    /// It has room for no row.
    #[error("{bytes_max} bytes are room for no row: the least is {least}")]
    Bytes {
        /// Its bytes.
        bytes_max: u64,
        /// What a row takes, without slots.
        least: u64,
    },
    /// A push could have no rows, or more than 2^24.
    #[error("{rows} rows at once are not 1 to {}", TableSpec::ROWS_AT_ONCE_MAX)]
    RowsAtOnce {
        /// How many rows.
        rows: u32,
    },
    /// Admission after no push, or after more than can be counted.
    #[error("rows are admitted after 1 to {} pushes, not after {pushes}", TableSpec::PUSHES_MAX)]
    Pushes {
        /// How many pushes.
        pushes: u32,
    },
    /// What is no probability.
    #[error("{probability} is no probability above 0")]
    Probability {
        /// What it is.
        probability: f64,
    },
    /// Rows that expire at once.
    #[error("rows that expire after 0 steps cannot be trained")]
    ExpireAtOnce,
    /// First values that depend on how many rows there are.
    #[error("{initializer} depends on the number of rows, which a table has not")]
    Initializer {
        /// The initializer.
        initializer: Initializer,
    },
}

impl TableSpec {
    /// The most rows of one shard in one push.
    pub const ROWS_AT_ONCE_MAX: u32 = 1 << 24;
    /// The most pushes that [`RowAdmission::After`] counts.
    pub const PUSHES_MAX: u32 = 1 << 24;
    /// What a row takes beside its values and slots: 24 bytes for its id and its age, and its entry of
    /// the index, 21.3 on the average.
    pub const ROW_OVERHEAD_BYTES: u64 = 48;

    /// A table of so many bytes: 65,536 rows at once, every id admitted, no row evicted.
    pub const fn new(bytes_max: u64) -> TableSpec {
        TableSpec {
            bytes_max,
            rows_at_once: 1 << 16,
            admission: RowAdmission::Always,
            eviction: Eviction::Refuse,
            expire_after_steps: None,
        }
    }

    /// Sets the most rows of one shard in one push.
    pub fn rows_at_once(mut self, rows: u32) -> TableSpec {
        self.rows_at_once = rows;
        self
    }

    /// Sets when an id is given a row.
    pub fn admission(mut self, admission: RowAdmission) -> TableSpec {
        self.admission = admission;
        self
    }

    /// Sets what becomes of rows that a full table has no room for.
    pub fn eviction(mut self, eviction: Eviction) -> TableSpec {
        self.eviction = eviction;
        self
    }

    /// Has rows evicted that no push had for so many global steps.
    pub fn expire_after(mut self, steps: u64) -> TableSpec {
        self.expire_after_steps = Some(steps);
        self
    }

    /// The share of `bytes_max` of so many of the buckets.
    pub(crate) fn bytes_of(&self, buckets: u64) -> u64 {
        (u128::from(self.bytes_max) * u128::from(buckets) / u128::from(BUCKETS)) as u64
    }

    /// The most rows of a partition that has so many of the buckets, each of so many bytes with its
    /// slots: at least one.
    pub fn rows_max(&self, buckets: u64, row_bytes: u64) -> u64 {
        let each = row_bytes.saturating_add(TableSpec::ROW_OVERHEAD_BYTES);
        let all = u128::from(self.bytes_max / each.max(1));
        ((all * u128::from(buckets)).div_ceil(BUCKETS.into()) as u64).max(1)
    }

    /// Whether it can be the table of a variable with such rows.
    pub(crate) fn validate(
        &self,
        row_bytes: u64,
        initializer: Initializer,
    ) -> Result<(), TableError> {
        let least = row_bytes.saturating_add(TableSpec::ROW_OVERHEAD_BYTES);
        if self.bytes_max < least {
            return Err(TableError::Bytes { bytes_max: self.bytes_max, least });
        }
        if !(1..=TableSpec::ROWS_AT_ONCE_MAX).contains(&self.rows_at_once) {
            return Err(TableError::RowsAtOnce { rows: self.rows_at_once });
        }
        match self.admission {
            RowAdmission::After { pushes } if !(1..=TableSpec::PUSHES_MAX).contains(&pushes) => {
                return Err(TableError::Pushes { pushes });
            }
            RowAdmission::Chance { probability } if !(probability > 0.0 && probability <= 1.0) => {
                return Err(TableError::Probability { probability });
            }
            _ => {}
        }
        if self.expire_after_steps == Some(0) {
            return Err(TableError::ExpireAtOnce);
        }
        match initializer {
            Initializer::GlorotUniform
            | Initializer::GlorotNormal
            | Initializer::HeUniform
            | Initializer::HeNormal => Err(TableError::Initializer { initializer }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_spread_over_the_buckets() {
        let mut counts = vec![0_u32; 16];
        (0..16_000_u64).for_each(|id| counts[(bucket(id) >> 12) as usize] += 1);
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        assert_eq!((scatter(0), bucket(u64::MAX) < BUCKETS), (0, true));
    }

    #[test]
    fn partitions_share_the_rows() {
        let table = TableSpec::new(100 * (24 + TableSpec::ROW_OVERHEAD_BYTES));
        assert_eq!(table.rows_max(BUCKETS, 24), 100);
        assert_eq!(table.rows_max(BUCKETS / 3, 24), 34);
        assert_eq!(table.rows_max(1, 24), 1);
        assert_eq!(TableSpec::new(u64::MAX).rows_max(BUCKETS, 0), u64::MAX / 48);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let table = TableSpec::new(1 << 20);
        let zeros = |table: TableSpec| table.validate(16, Initializer::Zeros);
        assert_eq!(zeros(table), Ok(()));
        assert_eq!(zeros(TableSpec::new(64)), Ok(()));
        assert_eq!(zeros(TableSpec::new(63)), Err(TableError::Bytes { bytes_max: 63, least: 64 }));
        assert_eq!(zeros(table.rows_at_once(0)), Err(TableError::RowsAtOnce { rows: 0 }));
        let never = RowAdmission::After { pushes: 0 };
        assert_eq!(zeros(table.admission(never)), Err(TableError::Pushes { pushes: 0 }));
        for probability in [0.0, -0.1, 1.1, f64::NAN] {
            let chance = table.admission(RowAdmission::Chance { probability });
            assert!(matches!(zeros(chance), Err(TableError::Probability { .. })));
        }
        assert_eq!(zeros(table.expire_after(0)), Err(TableError::ExpireAtOnce));
        let initializer = Initializer::HeNormal;
        let fans = table.validate(16, initializer);
        assert_eq!(fans, Err(TableError::Initializer { initializer }));
    }
}
