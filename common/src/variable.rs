//! `VariableSpec`: what a variable is, before it lives anywhere.

use thiserror::Error;

use crate::device::DeviceSpec;
use crate::initializer::{Initializer, InitializerError};
use crate::partition::{PartitionError, Partitioner};
use crate::protocol::limits::PART_BYTES_MAX;
use crate::table::{BUCKETS, TableError, TableSpec};
use crate::tensor::{DType, Shape, ShapeError};

/// A named tensor that the servers shall hold.
///
/// Its name, type and shape are correct once it exists. What may be chosen freely is in public
/// fields, each with a method of the same name for chaining; [`VariableSpec::validate`] checks the
/// initializer and the partitioner, and whoever places or catalogues variables calls it. That
/// names differ is for the catalogue to check.
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
pub struct VariableSpec {
    name: String,
    dtype: DType,
    shape: Shape,
    trainable: bool,
    sparse: bool,
    table: Option<TableSpec>,
    /// How its first values are chosen.
    pub initializer: Initializer,
    /// The seed of its first values.
    pub seed: u64,
    /// How it is cut into row ranges.
    pub partitioner: Partitioner,
    /// The ps task it is pinned to, if it names one.
    pub device: DeviceSpec,
}

/// Why a variable cannot be declared. Always the fault of the caller's configuration.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum VariableError {
    /// The name is empty.
    #[error(
        "cannot declare a variable without a name: a name has 1 to {} bytes",
        VariableSpec::NAME_BYTES_MAX
    )]
    EmptyName,
    /// The name is longer than [`VariableSpec::NAME_BYTES_MAX`].
    #[error(
        "cannot declare a variable with a name of {bytes} bytes: a name has 1 to {} bytes",
        VariableSpec::NAME_BYTES_MAX
    )]
    LongName {
        /// The length of the name.
        bytes: usize,
    },
    /// The name has a control character.
    #[error(
        "cannot declare the variable {name:?}: its name has the control character {character:?}"
    )]
    ControlCharacter {
        /// The name.
        name: String,
        /// The first control character.
        character: char,
    },
    /// The extents are no shape.
    #[error("cannot declare the variable {name:?}: {source}")]
    Shape {
        /// The variable's name.
        name: String,
        /// What is wrong with the extents.
        source: ShapeError,
    },
    /// The initializer cannot be used.
    #[error("cannot declare the variable {name:?}: {source}")]
    Initializer {
        /// The variable's name.
        name: String,
        /// What is wrong with the initializer.
        source: InitializerError,
    },
    /// The partitioner cannot cut it.
    #[error("cannot declare the variable {name:?}: {source}")]
    Partitioner {
        /// The variable's name.
        name: String,
        /// What is wrong with the partitioner.
        source: PartitionError,
    },
    /// It is sparse, and its rows cannot travel.
    #[error(
        "cannot declare the variable {name:?} sparse: its rows have {bytes} bytes each, and may \
         have 1 to {PART_BYTES_MAX}"
    )]
    RowBytes {
        /// The variable's name.
        name: String,
        /// The bytes of a row, as servers keep it.
        bytes: u64,
    },
    /// It is sparse, and has no rows, or more than can be numbered.
    #[error(
        "cannot declare the variable {name:?} sparse: it has {rows} rows, and may have 1 to {}",
        u32::MAX
    )]
    Rows {
        /// The variable's name.
        name: String,
        /// Its rows.
        rows: u64,
    },
    /// It is a table that cannot be.
    #[error("cannot declare the table {name:?}: {source}")]
    Table {
        /// The variable's name.
        name: String,
        /// What is wrong with it.
        source: TableError,
    },
}

impl VariableSpec {
    /// The longest name in bytes.
    pub const NAME_BYTES_MAX: usize = 256;

    /// Declares a variable of zeros: seed 0, one part, on any ps task.
    ///
    /// A float variable is trainable; an `i64` is plain, as no optimizer can train it. The name
    /// has 1 to [`VariableSpec::NAME_BYTES_MAX`] bytes without control characters.
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
            sparse: false,
            table: None,
            partitioner: Partitioner::default(),
            device: DeviceSpec::default(),
        })
    }

    /// Declares a trainable variable of `f32` with these extents; as [`VariableSpec::new`].
    pub fn f32(
        name: impl Into<String>,
        extents: impl Into<Vec<u64>>,
    ) -> Result<VariableSpec, VariableError> {
        VariableSpec::of(name.into(), DType::F32, extents.into())
    }

    /// Declares a trainable variable of [`half::f16`] with these extents; as [`VariableSpec::new`].
    ///
    /// Servers keep it in `f32`, with its slots: they round what is pulled and lose nothing of what is
    /// pushed, so updates too small for an `f16` add up. Workers hold and send 2 bytes an element.
    /// Gradients and values beyond 65504 are infinite; see `docs/codecs.md`.
    pub fn f16(
        name: impl Into<String>,
        extents: impl Into<Vec<u64>>,
    ) -> Result<VariableSpec, VariableError> {
        VariableSpec::of(name.into(), DType::F16, extents.into())
    }

    /// Declares a trainable variable of [`half::bf16`] with these extents; as [`VariableSpec::f16`], with
    /// the range of an `f32` and three bits less of precision.
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

    /// Declares an embedding table that grows: a trainable variable whose rows have any 64-bit ids and
    /// come as they are pushed. `row` are the extents of one row; none are a row of one element.
    ///
    /// It is pulled and pushed by rows, as what is [`VariableSpec::sparse`]. A row's first values
    /// depend on the seed, the name and the id alone; initializers that need fans are refused. Its
    /// shape has [`BUCKETS`] rows, by which it is cut and placed.
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

    /// Sets how its first values are chosen.
    pub fn initializer(mut self, initializer: Initializer) -> VariableSpec {
        self.initializer = initializer;
        self
    }

    /// Sets the seed of its first values; the name counts too, so one seed serves all variables.
    pub fn seed(mut self, seed: u64) -> VariableSpec {
        self.seed = seed;
        self
    }

    /// Makes it plain: no optimizer touches it, only `assign` and `assign_add` change it, or
    /// `assign_rows` if it is sparse.
    pub fn plain(mut self) -> VariableSpec {
        self.trainable = false;
        self
    }

    /// Makes it sparse: it is pulled and pushed by rows, as embeddings are, and no replica has a copy
    /// of all of it. A row is what has one index in the first extent; it has at most 1 MiB where servers
    /// keep it, and there are 1 to 2^32 - 1 of them.
    ///
    /// Its first values are those of the initializer. Shards keep 4 bytes for each row in every room
    /// of their inbox, beside the values that it may hold.
    pub fn sparse(mut self) -> VariableSpec {
        self.sparse = true;
        self
    }

    /// Sets how it is cut into row ranges.
    pub fn partitioner(mut self, partitioner: Partitioner) -> VariableSpec {
        self.partitioner = partitioner;
        self
    }

    /// Pins it, with all its parts, to a ps task by naming the task. The device type is not
    /// looked at.
    pub fn device(mut self, device: DeviceSpec) -> VariableSpec {
        self.device = device;
        self
    }

    /// Whether its initializer and partitioner can be used, and its rows travel if it is sparse.
    pub fn validate(&self) -> Result<(), VariableError> {
        let name = || self.name.clone();
        if self.sparse {
            let (bytes, rows) = (self.master_row_bytes(), self.shape.rows());
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

    /// Into how many parts the partitioner cuts it. Calls a custom partitioner.
    pub fn parts(&self) -> Result<u32, VariableError> {
        let parts = match self.table {
            // What it may take, byte by byte, and not what a row for each bucket would.
            Some(table) => self.partitioner.parts_of(&self.shape, self.dtype, (table.bytes_max, 1)),
            None => self.partitioner.parts(&self.shape, self.dtype),
        };
        parts.map_err(|source| VariableError::Partitioner { name: self.name.clone(), source })
    }

    /// The bytes of so many of its rows as servers keep them; of a table, what so many buckets may take.
    pub(crate) fn bytes_of_rows(&self, rows: u64) -> u64 {
        match self.table {
            Some(table) => table.bytes_of(rows),
            None => rows * self.master_row_bytes(),
        }
    }

    /// The bytes of all its elements, as workers hold them; of a table, what its rows may take.
    pub fn bytes(&self) -> u64 {
        self.bytes_of(self.dtype)
    }

    /// The bytes of all its elements as servers keep them: twice [`VariableSpec::bytes`] for `f16` and
    /// `bf16`. Each slot of its optimizer has as many.
    pub fn master_bytes(&self) -> u64 {
        self.bytes_of(self.dtype.master())
    }

    fn bytes_of(&self, dtype: DType) -> u64 {
        if let Some(table) = self.table {
            return table.bytes_max;
        }
        // A shape has at most 2^48 elements of at most 8 bytes.
        self.shape.elements() * dtype.size() as u64
    }

    /// The bytes of the elements of one row, as workers hold them.
    pub fn row_bytes(&self) -> u64 {
        self.shape.row_elements() * self.dtype.size() as u64
    }

    /// The bytes of the elements of one row as servers keep them: twice [`VariableSpec::row_bytes`] for
    /// `f16` and `bf16`. Each slot of its optimizer has as many.
    pub fn master_row_bytes(&self) -> u64 {
        self.shape.row_elements() * self.dtype.master().size() as u64
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of the whole variable.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether an optimizer updates it; never so for an `i64`.
    pub fn is_trainable(&self) -> bool {
        self.trainable
    }

    /// Whether it is pulled and pushed by rows: so is a table.
    pub fn is_sparse(&self) -> bool {
        self.sparse
    }

    /// If it is a table that grows, what is said of it.
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
        assert!(error.to_string().starts_with("cannot declare the variable \"w\": cannot use the"));
    }

    #[test]
    fn the_free_choices_are_validated() {
        let variable = VariableSpec::f32("w", [10, 3]).unwrap();
        let cut = variable.clone().partitioner(Partitioner::Fixed { shards: 4 }).seed(3);
        assert_eq!((cut.parts(), cut.seed, cut.validate()), (Ok(4), 3, Ok(())));
        let error = variable.clone().initializer(Initializer::Constant(f64::NAN)).validate();
        assert_eq!(
            error.unwrap_err().to_string(),
            "cannot declare the variable \"w\": \
             cannot initialize with constant(NaN): its values would not all be finite"
        );
        let error = variable.partitioner(Partitioner::Fixed { shards: 0 }).validate();
        assert!(matches!(error, Err(VariableError::Partitioner { .. })));
    }

    #[test]
    fn a_table_has_rows_of_any_id() {
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
    fn rows_of_sparse_variables_can_travel() {
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
    fn halves_are_kept_in_f32_and_limited_as_that() {
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
            // Fits a part as halves, and not as masters.
            let table = |width: u64, bytes| {
                let table =
                    VariableSpec::table("h", dtype, [width], TableSpec::new(bytes)).unwrap();
                table.validate()
            };
            let (name, bytes) = ("h".to_owned(), 4 + PART_BYTES_MAX);
            let wide = table(bytes / 4, 1 << 30);
            assert_eq!(wide, Err(VariableError::RowBytes { name, bytes }));
            let least = TableSpec::ROW_OVERHEAD_BYTES + 16;
            assert_eq!(table(4, least), Ok(()));
            let small = table(4, least - 1);
            assert!(matches!(small, Err(VariableError::Table { .. })), "{small:?}");
        }
    }
}
