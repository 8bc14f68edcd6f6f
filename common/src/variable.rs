//! [`VariableSpec`]: the declaration of a variable.

mod replication;
mod variable_error;

use crate::device::DeviceSpec;
use crate::initializer::Initializer;
use crate::partition::Partitioner;
use crate::protocol::limits::PART_BYTES_MAX;
use crate::table::{BUCKETS, TableSpec};
use crate::tensor::{DType, Shape};

pub use replication::Replication;
pub use variable_error::VariableError;

/// The declaration of a named tensor that the servers hold.
///
/// Name, type and shape are validated on creation. The other choices are public fields, each with a
/// chaining method of the same name. [`VariableSpec::validate`] checks initializer, partitioner and
/// rows; planning a placement and building a catalogue call it. The catalogue checks that names
/// differ.
///
/// ```
/// use pushpull_common::initializer::Initializer;
/// use pushpull_common::variable::VariableSpec;
/// let weights = VariableSpec::f32("layer/w", [784, 100])?
///     .initializer(Initializer::GlorotUniform)
///     .seed(7);
/// assert_eq!(weights.bytes(), 4 * 784 * 100);
/// # Ok::<(), pushpull_common::variable::VariableError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[doc(alias = "tf.Variable")]
#[doc(alias = "get_variable")]
pub struct VariableSpec {
    name: String,
    dtype: DType,
    shape: Shape,
    trainable: bool,
    replication: Replication,
    sparse: bool,
    table: Option<TableSpec>,
    /// The distribution of the initial values.
    pub initializer: Initializer,
    /// The seed of the initial values.
    pub seed: u64,
    /// The rule by which the variable is cut into row ranges.
    pub partitioner: Partitioner,
    /// The ps task that the variable is pinned to, if it names one.
    pub device: DeviceSpec,
}

impl VariableSpec {
    /// The longest name in bytes.
    pub const NAME_BYTES_MAX: usize = 256;

    /// Declares a variable of zeros: seed 0, one part, on any ps task.
    ///
    /// A float variable is trainable. An `i64` is plain, because no optimizer can train it. The
    /// name has 1 to [`VariableSpec::NAME_BYTES_MAX`] bytes and no control characters.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        shape: Shape,
    ) -> Result<VariableSpec, VariableError> {
        let name = check_name(name.into())?;
        Ok(VariableSpec {
            name,
            dtype,
            shape,
            initializer: Initializer::default(),
            seed: 0,
            trainable: dtype.is_float(),
            replication: Replication::Shared,
            sparse: false,
            table: None,
            partitioner: Partitioner::default(),
            device: DeviceSpec::default(),
        })
    }

    /// Declares a trainable variable of `f32` with these extents; see [`VariableSpec::new`].
    pub fn f32(
        name: impl Into<String>,
        extents: impl Into<Vec<u64>>,
    ) -> Result<VariableSpec, VariableError> {
        VariableSpec::of(name.into(), DType::F32, extents.into())
    }

    /// Declares a trainable variable of [`half::f16`] with these extents; see
    /// [`VariableSpec::new`].
    ///
    /// Servers store it and its optimizer slots in `f32`, so updates too small for an `f16`
    /// accumulate: they round values that are pulled, and lose nothing of pushed gradients. Workers
    /// hold and send 2 bytes an element. Gradients and values beyond 65504 become infinite; see
    /// `docs/codecs.md`.
    pub fn f16(
        name: impl Into<String>,
        extents: impl Into<Vec<u64>>,
    ) -> Result<VariableSpec, VariableError> {
        VariableSpec::of(name.into(), DType::F16, extents.into())
    }

    /// Declares a trainable variable of [`half::bf16`] with these extents; see
    /// [`VariableSpec::f16`].
    ///
    /// A `bf16` has the range of an `f32` and three bits less precision than an `f16`.
    pub fn bf16(
        name: impl Into<String>,
        extents: impl Into<Vec<u64>>,
    ) -> Result<VariableSpec, VariableError> {
        VariableSpec::of(name.into(), DType::Bf16, extents.into())
    }

    fn of(name: String, dtype: DType, extents: Vec<u64>) -> Result<VariableSpec, VariableError> {
        let name = check_name(name)?;
        match Shape::new(extents) {
            Ok(shape) => VariableSpec::new(name, dtype, shape),
            Err(source) => Err(VariableError::Shape { name, source }),
        }
    }

    /// Declares a growing embedding table: a trainable variable whose rows have 64-bit ids.
    ///
    /// Rows are created when they are pushed. `row` has the extents of one row; no extents make a
    /// row of one element. A table is pulled and pushed by rows, as a [`VariableSpec::sparse`]
    /// variable is. The initial values of a row depend only on the seed, the name and the id;
    /// initializers that need fans are rejected. The shape has [`BUCKETS`] rows, by which the table
    /// is partitioned and placed.
    pub fn table(
        name: impl Into<String>,
        dtype: DType,
        row: impl Into<Vec<u64>>,
        table: TableSpec,
    ) -> Result<VariableSpec, VariableError> {
        let name = check_name(name.into())?;
        let extents: Vec<u64> = std::iter::once(BUCKETS).chain(row.into()).collect();
        match Shape::new(extents) {
            Ok(shape) => {
                let variable = VariableSpec::new(name, dtype, shape)?.sparse();
                Ok(VariableSpec { table: Some(table), ..variable })
            }
            Err(source) => Err(VariableError::Shape { name, source }),
        }
    }

    /// Sets the distribution of the initial values.
    pub fn initializer(mut self, initializer: Initializer) -> VariableSpec {
        self.initializer = initializer;
        self
    }

    /// Sets the seed of the initial values. The name counts too, so one seed serves all variables.
    pub fn seed(mut self, seed: u64) -> VariableSpec {
        self.seed = seed;
        self
    }

    /// Makes the variable plain: no optimizer updates it. Only `assign` and `assign_add` change it,
    /// or `assign_rows` if it is sparse.
    #[doc(alias = "trainable")]
    pub fn plain(mut self) -> VariableSpec {
        self.trainable = false;
        self
    }

    /// Makes the variable plain and local: each replica changes values of its own, for example the
    /// running statistics of a batch normalization.
    ///
    /// A pull leaves a replica's values as they are. The servers hold those of the chief, which
    /// [`Replication::Local`] describes.
    #[doc(alias = "UPDATE_OPS")]
    #[doc(alias = "LOCAL_VARIABLES")]
    pub fn local(self) -> VariableSpec {
        VariableSpec { replication: Replication::Local, ..self.plain() }
    }

    /// Makes the variable plain and replicated: each replica changes values of its own, and every
    /// `steps` of its steps it averages them with those of the others on the servers.
    ///
    /// A pull leaves a replica's values as they are. The variable is dense, of `f32` or `f64`, and
    /// `steps` is at least 1. [`Replication::Mean`] describes the average.
    #[doc(alias = "moving_average_variables")]
    pub fn mean_every_steps(self, steps: u64) -> VariableSpec {
        VariableSpec { replication: Replication::Mean { every: steps }, ..self.plain() }
    }

    /// Makes the variable sparse: it is pulled and pushed by rows, as embeddings are.
    ///
    /// No replica holds a full copy. A row is the elements with one index along the first axis. A
    /// row has at most 1 MiB as stored on the servers, and there are 1 to 2^32 - 1 rows. The
    /// initial values are those of the initializer. Each push slot reserves 4 bytes for each row,
    /// in addition to the values.
    #[doc(alias = "embedding_lookup")]
    pub fn sparse(mut self) -> VariableSpec {
        self.sparse = true;
        self
    }

    /// Sets the rule by which the variable is cut into row ranges.
    pub fn partitioner(mut self, partitioner: Partitioner) -> VariableSpec {
        self.partitioner = partitioner;
        self
    }

    /// Pins the variable, with all its parts, to the ps task that `device` names. The device type
    /// is ignored.
    pub fn device(mut self, device: DeviceSpec) -> VariableSpec {
        self.device = device;
        self
    }

    /// Checks the replication, the initializer and the partitioner, the rows if sparse, and the
    /// settings of a table.
    pub fn validate(&self) -> Result<(), VariableError> {
        let name = || self.name.clone();
        match self.replication {
            Replication::Shared => {}
            replication if self.sparse => {
                return Err(VariableError::SparseReplication { name: name(), replication });
            }
            Replication::Mean { every: 0 } => {
                return Err(VariableError::MeanInterval { name: name() });
            }
            Replication::Mean { .. } if !matches!(self.dtype, DType::F32 | DType::F64) => {
                return Err(VariableError::MeanType { name: name(), dtype: self.dtype });
            }
            Replication::Local | Replication::Mean { .. } => {}
        }
        if self.sparse {
            let bytes = self.master_row_bytes();
            let rows = self.shape.rows();
            if !(1..=PART_BYTES_MAX).contains(&bytes) {
                return Err(VariableError::RowBytes { name: name(), bytes });
            }
            if !(1..=u32::MAX.into()).contains(&rows) {
                return Err(VariableError::Rows { name: name(), rows });
            }
        }
        if let Some(table) = self.table {
            table
                .validate(self.master_row_bytes(), self.initializer)
                .map_err(|source| VariableError::Table { name: name(), source })?;
        }
        self.initializer
            .validate()
            .map_err(|source| VariableError::Initializer { name: name(), source })?;
        self.parts().map(|_| ())
    }

    /// Returns the number of parts that the partitioner makes. Calls a custom partitioner.
    pub fn parts(&self) -> Result<u32, VariableError> {
        let parts = match self.table {
            // A table is partitioned by its memory limit, not by the nominal size of its buckets.
            Some(table) => self.partitioner.parts_of(&self.shape, self.dtype, table.bytes_max, 1),
            None => self.partitioner.parts(&self.shape, self.dtype),
        };
        parts.map_err(|source| VariableError::Partitioner { name: self.name.clone(), source })
    }

    /// Returns the stored bytes of `rows` rows; for a table, the memory limit of that many buckets.
    pub(crate) fn bytes_of_rows(&self, rows: u64) -> u64 {
        match self.table {
            Some(table) => table.bytes_of(rows),
            None => rows * self.master_row_bytes(),
        }
    }

    /// Returns the bytes of all elements as workers hold them; for a table, its memory limit.
    pub fn bytes(&self) -> u64 {
        self.bytes_of(self.dtype)
    }

    /// Returns the bytes of all elements as servers store them; each optimizer slot has as many.
    /// Twice [`VariableSpec::bytes`] for `f16` and `bf16`.
    pub fn master_bytes(&self) -> u64 {
        self.bytes_of(self.dtype.master())
    }

    fn bytes_of(&self, dtype: DType) -> u64 {
        if let Some(table) = self.table {
            return table.bytes_max;
        }
        // Cannot overflow: a shape has at most 2^48 elements of at most 8 bytes.
        self.shape.elements() * dtype.size() as u64
    }

    /// Returns the bytes of one row as workers hold it.
    pub fn row_bytes(&self) -> u64 {
        self.shape.row_elements() * self.dtype.size() as u64
    }

    /// Returns the bytes of one row as servers store it; each optimizer slot has as many. Twice
    /// [`VariableSpec::row_bytes`] for `f16` and `bf16`.
    pub fn master_row_bytes(&self) -> u64 {
        self.shape.row_elements() * self.dtype.master().size() as u64
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the shape of the whole variable.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns whether an optimizer updates the variable; never for an `i64`.
    pub fn is_trainable(&self) -> bool {
        self.trainable
    }

    /// Returns whether all replicas use the servers' values; [`Replication::Shared`] if the
    /// variable is trainable.
    pub fn replication(&self) -> Replication {
        self.replication
    }

    /// Returns whether the variable is pulled and pushed by rows; true for a table.
    pub fn is_sparse(&self) -> bool {
        self.sparse
    }

    /// Returns the settings of a growing table; `None` for any other variable.
    pub fn as_table(&self) -> Option<&TableSpec> {
        self.table.as_ref()
    }
}

fn check_name(name: String) -> Result<String, VariableError> {
    if name.is_empty() {
        return Err(VariableError::EmptyName);
    }
    if name.len() > VariableSpec::NAME_BYTES_MAX {
        return Err(VariableError::LongName { bytes: name.len() });
    }
    match name.chars().find(|character| character.is_control()) {
        Some(character) => Err(VariableError::ControlCharacter { name, character }),
        None => Ok(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Chain;

    #[test]
    fn a_new_variable_is_zeros_in_one_part() {
        let variable = VariableSpec::f32("w", [10, 3]).unwrap();
        assert_eq!((variable.name(), variable.dtype()), ("w", DType::F32));
        assert_eq!((variable.shape().extents(), variable.bytes()), (&[10, 3][..], 120));
        assert_eq!((variable.initializer, variable.seed), (Initializer::Zeros, 0));
        assert!(variable.is_trainable() && variable.device.is_empty());
        assert_eq!(variable.parts(), Ok(1));
        assert!(!variable.clone().plain().is_trainable());
        let step = VariableSpec::new("step", DType::I64, Shape::scalar()).unwrap();
        assert!(!step.is_trainable());
        assert_eq!(step.bytes(), 8);
    }

    #[test]
    fn replicated_variables_are_plain_and_validated() {
        let variable = VariableSpec::f32("m", [3]).unwrap();
        assert_eq!(variable.replication(), Replication::Shared);
        let mean = variable.clone().mean_every_steps(8);
        assert_eq!((mean.replication(), mean.validate()), (Replication::Mean { every: 8 }, Ok(())));
        let local = variable.clone().local();
        assert!(!mean.is_trainable() && !local.is_trainable());
        let step = VariableSpec::new("m", DType::I64, Shape::scalar()).unwrap();
        for (accepted, is_valid) in [
            (local, true),
            (step.clone().local(), true),
            (VariableSpec::f16("m", [3]).unwrap().local(), true),
            (
                VariableSpec::new("m", DType::F64, Shape::scalar()).unwrap().mean_every_steps(1),
                true,
            ),
            (variable.clone().mean_every_steps(0), false),
            (step.mean_every_steps(1), false),
            (VariableSpec::bf16("m", [3]).unwrap().mean_every_steps(1), false),
            (variable.clone().local().sparse(), false),
            (variable.sparse().mean_every_steps(1), false),
        ] {
            assert_eq!(accepted.validate().is_ok(), is_valid, "{accepted:?}");
        }
        let table = VariableSpec::table("t", DType::F32, [4], TableSpec::new(1 << 20)).unwrap();
        assert_eq!(
            table.mean_every_steps(2).validate().unwrap_err().to_string(),
            "cannot declare the variable \"t\" as mean every 2 steps: it is sparse, and no replica \
             has all of its rows"
        );
    }

    #[test]
    fn names_are_checked() {
        let long = "n".repeat(VariableSpec::NAME_BYTES_MAX + 1);
        assert!(VariableSpec::f32(&long[1..], []).is_ok());
        assert!(VariableSpec::f32("schicht/größe:0", []).is_ok());
        assert_eq!(VariableSpec::f32("", []), Err(VariableError::EmptyName));
        assert_eq!(VariableSpec::f32(long, []), Err(VariableError::LongName { bytes: 257 }));
        assert_eq!(
            VariableSpec::f32("a\nb", []).unwrap_err().to_string(),
            "cannot declare the variable \"a\\nb\": its name has the control character '\\n'"
        );
        let error = VariableSpec::f32("w", [1 << 49]).unwrap_err();
        let text = Chain(&error).to_string();
        assert!(text.starts_with("cannot declare the variable \"w\": cannot use the"), "{text}");
    }

    #[test]
    fn initializer_and_partitioner_are_validated() {
        let variable = VariableSpec::f32("w", [10, 3]).unwrap();
        let cut = variable.clone().partitioner(Partitioner::Fixed { shards: 4 }).seed(3);
        assert_eq!((cut.parts(), cut.seed, cut.validate()), (Ok(4), 3, Ok(())));
        let error = variable.clone().initializer(Initializer::Constant(f64::NAN)).validate();
        assert_eq!(
            Chain(&error.unwrap_err()).to_string(),
            "cannot declare the variable \"w\": \
             cannot initialize with constant(NaN): its values would not all be finite"
        );
        let error = variable.partitioner(Partitioner::Fixed { shards: 0 }).validate();
        assert!(matches!(error, Err(VariableError::Partitioner { .. })));
    }

    #[test]
    fn a_table_is_sparse_and_validated() {
        let spec = TableSpec::new(1 << 20);
        let table = |row: &[u64], spec| VariableSpec::table("t", DType::F32, row, spec).unwrap();
        let users = table(&[4], spec);
        assert_eq!((users.validate(), users.as_table()), (Ok(()), Some(&spec)));
        assert_eq!((users.row_bytes(), users.bytes(), users.is_sparse()), (16, 1 << 20, true));
        assert_eq!(table(&[], spec).row_bytes(), 4);
        let refused = table(&[1 << 20], spec).validate();
        assert!(matches!(refused, Err(VariableError::RowBytes { .. })), "{refused:?}");
        let refused = table(&[4], spec.rows_at_once(0)).validate();
        assert!(matches!(refused, Err(VariableError::Table { .. })), "{refused:?}");
    }

    #[test]
    fn rows_of_sparse_variables_fit_a_part() {
        let sparse = |extents: &[u64]| VariableSpec::f32("e", extents).unwrap().sparse().validate();
        assert_eq!(sparse(&[5, 16]), Ok(()));
        assert_eq!(sparse(&[5]), Ok(()));
        let name = || "e".to_owned();
        let bytes = 4 + PART_BYTES_MAX;
        let wide = sparse(&[2, bytes / 4]);
        assert_eq!(wide, Err(VariableError::RowBytes { name: name(), bytes }));
        assert_eq!(sparse(&[2, 0]), Err(VariableError::RowBytes { name: name(), bytes: 0 }));
        let rows = 1 << 32;
        assert_eq!(sparse(&[rows, 2]), Err(VariableError::Rows { name: name(), rows }));
        assert_eq!(sparse(&[0, 2]), Err(VariableError::Rows { name: name(), rows: 0 }));
    }

    #[test]
    fn half_floats_are_stored_and_limited_as_f32() {
        let kinds = [
            (VariableSpec::f16("h", [5, 3]).unwrap(), DType::F16),
            (VariableSpec::bf16("h", [5, 3]).unwrap(), DType::Bf16),
        ];
        for (variable, dtype) in kinds {
            assert_eq!((variable.dtype(), variable.is_trainable()), (dtype, true));
            assert_eq!((variable.bytes(), variable.master_bytes()), (30, 60));
            assert_eq!(variable.validate(), Ok(()));
            assert_eq!((variable.row_bytes(), variable.master_row_bytes()), (6, 12));
            assert_eq!(variable.sparse().validate(), Ok(()));
            // Half floats of this width fit into a part, but the stored `f32` elements do not.
            let table = |width: u64, bytes| {
                let table =
                    VariableSpec::table("h", dtype, [width], TableSpec::new(bytes)).unwrap();
                table.validate()
            };
            let name = "h".to_owned();
            let bytes = 4 + PART_BYTES_MAX;
            let wide = table(bytes / 4, 1 << 30);
            assert_eq!(wide, Err(VariableError::RowBytes { name, bytes }));
            let least = TableSpec::ROW_OVERHEAD_BYTES + 16;
            assert_eq!(table(4, least), Ok(()));
            let small = table(4, least - 1);
            assert!(matches!(small, Err(VariableError::Table { .. })), "{small:?}");
        }
    }
}
