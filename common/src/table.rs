//! Growing embedding tables: variables whose rows have 64-bit ids and are created when they are
//! used.
//!
//! A table has no fixed number of rows. A hash spreads its ids over [`BUCKETS`] buckets, and its
//! partitions are ranges of buckets. All code that handles ranges of rows can therefore partition,
//! place and move tables too. Only the shard that holds a bucket knows the rows of its ids.

use thiserror::Error;

use crate::initializer::Initializer;

/// The number of buckets that the ids of a table are spread over: its nominal extent of rows.
pub const BUCKETS: u64 = 1 << 16;

/// Returns the bucket of an id: the upper 16 bits of [`scatter`].
pub fn bucket(id: u64) -> u64 {
    scatter(id) >> 48
}

/// Applies the 64-bit finalizer of MurmurHash3 (Appleby, 2011), a bijection.
///
/// Changing one bit of the input changes half of the output bits on average. Equal on every
/// machine, because workers and servers must agree.
pub fn scatter(id: u64) -> u64 {
    let id = (id ^ (id >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let id = (id ^ (id >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    id ^ (id >> 33)
}

/// The head of a row: everything except its values and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowHead {
    /// The row's id.
    pub id: u64,
    /// The newest global step that was known at the row's last push.
    pub step: u64,
    /// The number of pushes that contained the row.
    pub pushes: u32,
}

/// The rule by which an id gets a row of its own.
///
/// Gradients of an id without a row are dropped and counted; a pull returns its initial values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RowAdmission {
    /// At the first push of the id.
    #[default]
    Always,
    /// At the N-th push of the id; in synchronous mode a step counts as one push.
    ///
    /// The count of an id without a row takes 8 bytes. There are at most as many counts as the
    /// table may have rows; the lowest counts are forgotten first.
    After {
        /// N; 1 is the same as [`RowAdmission::Always`].
        pushes: u32,
    },
    /// At each push of the id with this probability, drawn by a hash of the variable's seed and
    /// name, the id, and the number of the gradient in the training.
    Chance {
        /// The probability, above 0 and at most 1.
        probability: f64,
    },
}

/// The rule for a new row of a full table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// The push is refused and changes nothing.
    #[default]
    Refuse,
    /// The new row replaces the least recently pushed row of a sample.
    LeastRecent,
    /// The new row replaces the least frequently pushed row of a sample.
    LeastFrequent,
}

/// The settings of a growing table, apart from name, type and row shape.
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
    /// The memory limit of the rows on all shards together, in bytes.
    ///
    /// It covers values and optimizer slots as servers store them: `f16` and `bf16` as `f32`, each
    /// padded to 8 bytes. It also covers [`TableSpec::ROW_OVERHEAD_BYTES`] for each row. In
    /// addition, each shard reserves memory for the rows of one push or, in synchronous mode, of
    /// one step.
    pub bytes_max: u64,
    /// The most rows of one shard in one push. Each push slot reserves memory for that many.
    pub rows_at_once: u32,
    /// The rule by which an id gets a row.
    pub admission: RowAdmission,
    /// The rule for a new row of a full table.
    pub eviction: Eviction,
    /// The number of global steps without a push after which a row is evicted, even from a table
    /// that is not full. Eviction follows soon after, not at once.
    pub expire_after_steps: Option<u64>,
}

/// The reason why a table is invalid.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum TableError {
    /// The memory limit is too small for one row.
    #[error("{bytes_max} bytes cannot hold one row: it needs {least}")]
    Bytes {
        /// The memory limit in bytes.
        bytes_max: u64,
        /// The bytes of one row, without optimizer slots.
        least: u64,
    },
    /// The limit of rows in one push is 0 or above 2^24.
    #[error("cannot limit a push to {rows} rows: use 1 to {}", TableSpec::ROWS_AT_ONCE_MAX)]
    RowsAtOnce {
        /// The limit of rows.
        rows: u32,
    },
    /// The number of pushes before admission is 0 or too large to count.
    #[error("cannot admit rows after {pushes} pushes: use 1 to {}", TableSpec::PUSHES_MAX)]
    Pushes {
        /// The number of pushes.
        pushes: u32,
    },
    /// The probability of admission is not above 0 and at most 1.
    #[error("cannot admit rows with probability {probability}: it must be above 0 and at most 1")]
    Probability {
        /// The probability.
        probability: f64,
    },
    /// Rows would expire at once.
    #[error("cannot train rows that expire after 0 steps")]
    ExpireAtOnce,
    /// The initializer depends on the number of rows.
    #[error("cannot use {initializer}: it depends on the number of rows, which a table lacks")]
    Initializer {
        /// The initializer.
        initializer: Initializer,
    },
}

impl TableSpec {
    /// The highest limit of rows of one shard in one push.
    pub const ROWS_AT_ONCE_MAX: u32 = 1 << 24;
    /// The most pushes that [`RowAdmission::After`] can count.
    pub const PUSHES_MAX: u32 = 1 << 24;
    /// The bytes of a row besides values and optimizer slots: 24 for its id and age, and 21.3 on
    /// average for its index entry.
    pub const ROW_OVERHEAD_BYTES: u64 = 48;

    /// Creates a table of `bytes_max` bytes: 65,536 rows in a push, every id admitted, no row
    /// evicted.
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

    /// Sets the rule by which an id gets a row.
    pub fn admission(mut self, admission: RowAdmission) -> TableSpec {
        self.admission = admission;
        self
    }

    /// Sets the rule for a new row of a full table.
    pub fn eviction(mut self, eviction: Eviction) -> TableSpec {
        self.eviction = eviction;
        self
    }

    /// Evicts rows that no push contained for this number of global steps.
    pub fn expire_after(mut self, steps: u64) -> TableSpec {
        self.expire_after_steps = Some(steps);
        self
    }

    /// Returns the share of `bytes_max` that this number of buckets may use.
    pub(crate) fn bytes_of(&self, buckets: u64) -> u64 {
        (u128::from(self.bytes_max) * u128::from(buckets) / u128::from(BUCKETS)) as u64
    }

    /// Returns the most rows of a partition with `buckets` buckets: at least one.
    ///
    /// `row_bytes` is the length of a row with its optimizer slots.
    pub fn rows_max(&self, buckets: u64, row_bytes: u64) -> u64 {
        let each = row_bytes.saturating_add(TableSpec::ROW_OVERHEAD_BYTES);
        let all = u128::from(self.bytes_max / each.max(1));
        ((all * u128::from(buckets)).div_ceil(BUCKETS.into()) as u64).max(1)
    }

    /// Checks that the table can hold rows of this length with this initializer.
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
    fn invalid_tables_are_rejected() {
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
