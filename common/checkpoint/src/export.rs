//! Exports a checkpoint as one safetensors file with whole tensors, for other programs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use pushpull_common::codec::{Codec, Encoding};
use pushpull_common::ids::{PartitionId, VariableId};
use pushpull_common::stored_stream::StoredStream;
use pushpull_common::tensor::DType;

use crate::error::{CheckpointError, Refused};
use crate::files::HashedFile;
use crate::header::{METADATA, Tensor, head};
use crate::local::ReplacingFile;
use crate::restore::{Opened, newest_good};
use crate::storage::CheckpointStorage;

/// Writes a checkpoint as one safetensors file.
///
/// - A variable has its own name. If `slots` is set, a slot is named after the variable, a `:` and
///   the slot.
/// - A variable of `f16` or `bf16` is rounded to that type, as in pulls. Its slots are `f32`.
/// - The metadata have the `checkpoint`'s name, its `global_step` and its `restore_epoch`.
/// - A growing table has its rows under its name, in any order, and their 64-bit ids under that
///   name and `:ids`.
///
/// `checkpoint` names a checkpoint; without it the newest valid one is taken, and the newer ones that
/// are not valid are returned. The file replaces an existing one at `to`, or at the end of a link at
/// `to`, only once it is complete, and has mode 0600. Needs little more than 1 MiB of memory, besides
/// the list of variables.
///
/// # Errors
/// [`CheckpointError`], among others if something other than a file exists at `to`.
pub fn export(
    storage: Arc<dyn CheckpointStorage>,
    checkpoint: Option<&str>,
    to: &Path,
    slots: bool,
) -> Result<Vec<Refused>, CheckpointError> {
    export_since(storage, checkpoint, to, slots, 0)
}

/// Writes a checkpoint as one safetensors file, with only those rows of tables that were pushed
/// since a global step.
///
/// A checkpoint of `step` has the other rows as they are: the file contains the rows that were
/// changed after that step, and those changed by the step itself. Variables that are not tables are
/// written whole. Evicted rows are not reported. Otherwise like [`export`].
pub fn export_since(
    storage: Arc<dyn CheckpointStorage>,
    checkpoint: Option<&str>,
    to: &Path,
    slots: bool,
    step: u64,
) -> Result<Vec<Refused>, CheckpointError> {
    let not_found = |name: &str| CheckpointError::NotFound { name: name.to_owned() };
    let (mut opened, passed_over) = match checkpoint {
        Some(name) => {
            let name = name.parse().map_err(|_| not_found(name))?;
            (Opened::open(storage, name)?, Vec::new())
        }
        None => newest_good(&storage)?.ok_or(CheckpointError::NoCheckpoint)?,
    };
    // All files are verified before the first byte is written, because other programs may not check
    // hashes.
    opened.verify()?;
    let (order, tensors) = tensors(&mut opened, slots, step)?;
    // Some readers accept a file only if its metadata names the layout of PyTorch.
    let saved = opened.manifest().checkpoint;
    let metadata = [
        ("format", "pt".to_owned()),
        ("checkpoint", saved.to_string()),
        ("global_step", saved.global_step.to_string()),
        ("restore_epoch", saved.restore_epoch.to_string()),
    ];
    let head = head(&metadata, &tensors)?;
    let mut out = HashedFile::new(Box::new(ReplacingFile::create(to)?));
    out.write(&head)?;
    for (variable, kind) in order {
        let stream = match kind {
            TensorKind::Whole(stream) => stream,
            TensorKind::Ids | TensorKind::Rows(_) => {
                write_rows(&mut opened, variable, kind, step, &mut out)?;
                continue;
            }
        };
        let elements = 0..opened.catalogue().variable(variable).shape().elements();
        match rounding(&opened, variable, stream) {
            None => opened.read(variable, stream, elements, &mut |piece| out.write(piece))?,
            Some(codec) => opened.read(variable, stream, elements, &mut |piece| {
                out.write(&rounded(&codec, piece))
            })?,
        }
    }
    out.finish("export")?;
    Ok(passed_over)
}

/// The part of a variable that a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TensorKind {
    /// All elements of the values or of a slot.
    Whole(StoredStream),
    /// The ids of a table's rows.
    Ids,
    /// The rows of a table's values or slot, in the order of the ids.
    Rows(StoredStream),
}

type TensorOrder = Vec<(VariableId, TensorKind)>;

/// Returns the codec that rounds the values of a half type; `None` for tensors that are written
/// unchanged.
fn rounding(opened: &Opened, variable: VariableId, stream: StoredStream) -> Option<Codec> {
    let own = Encoding::of_type(opened.catalogue().variable(variable).dtype());
    own.filter(|_| stream == StoredStream::Values).and_then(Encoding::codec_of_values)
}

/// Rounds master values to halves.
fn rounded(codec: &Codec, masters: &[u8]) -> Vec<u8> {
    let masters = masters.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let masters: Vec<f32> = masters.collect();
    let mut halves = Vec::new();
    codec.encode(&masters, &mut halves).expect("codecs of values accept every element");
    // The codec pads its output; the padding is dropped.
    halves.truncate(2 * masters.len());
    halves
}

/// Writes a tensor of a table, for the rows that were pushed since `step`.
fn write_rows(
    opened: &mut Opened,
    variable: VariableId,
    kind: TensorKind,
    step: u64,
    out: &mut HashedFile,
) -> Result<(), CheckpointError> {
    let (streams, codec) = match kind {
        TensorKind::Rows(stream) => (vec![stream.number()], rounding(opened, variable, stream)),
        _ => (vec![], None),
    };
    for (partition, row_bytes) in partitions_of(opened, variable) {
        opened.read_rows(partition, &streams, &mut |heads, bytes| {
            let recent = heads.iter().enumerate().filter(|(_, head)| head.step >= step);
            for (row, head) in recent {
                let values = bytes.first().map(|rows| &rows[row * row_bytes..][..row_bytes]);
                match (values, &codec) {
                    (Some(masters), Some(codec)) => out.write(&rounded(codec, masters))?,
                    (Some(values), None) => out.write(values)?,
                    (None, _) => out.write(&head.id.to_le_bytes())?,
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Returns the partitions of a table, each with the bytes of a row.
fn partitions_of(opened: &Opened, variable: VariableId) -> Vec<(PartitionId, usize)> {
    let partitions = opened.catalogue().partitions_of(variable).iter();
    partitions.map(|partition| (partition.id, partition.row_bytes() as usize)).collect()
}

/// Returns the number of rows of a table that were pushed since `step`.
fn count_rows(
    opened: &mut Opened,
    variable: VariableId,
    step: u64,
) -> Result<u64, CheckpointError> {
    let mut count = 0;
    for (partition, _) in partitions_of(opened, variable) {
        opened.read_rows(partition, &[], &mut |heads, _| {
            count += heads.iter().filter(|head| head.step >= step).count() as u64;
            Ok(())
        })?;
    }
    Ok(count)
}

/// Returns the tensors in the order of the file: wider elements first, so that all are aligned.
fn tensors(
    opened: &mut Opened,
    slots: bool,
    step: u64,
) -> Result<(TensorOrder, Vec<Tensor>), CheckpointError> {
    let variables = opened.catalogue().variables().to_vec();
    let mut all = Vec::new();
    for (index, variable) in variables.iter().enumerate() {
        let id = VariableId(index as u32);
        let slots = if slots { opened.manifest().training.slots(id).to_vec() } else { Vec::new() };
        let named = slots.iter().map(|slot| format!("{}:{slot}", variable.name()));
        let streams = std::iter::once((StoredStream::Values, variable.name().to_owned()))
            .chain(named.enumerate().map(|(slot, name)| (StoredStream::Slot(slot), name)));
        let id = VariableId(index as u32);
        let mut extents = variable.shape().extents().to_vec();
        let is_table = variable.as_table().is_some();
        if is_table {
            extents[0] = count_rows(opened, id, step)?;
            let name = format!("{}:ids", variable.name());
            let tensor = Tensor { name, dtype: DType::I64, extents: vec![extents[0]] };
            all.push(((id, TensorKind::Ids), tensor));
        }
        for (stream, name) in streams {
            let dtype = match stream {
                StoredStream::Values => variable.dtype(),
                StoredStream::Slot(_) => variable.dtype().master(),
            };
            let tensor = Tensor { name, dtype, extents: extents.clone() };
            let kind = if is_table { TensorKind::Rows(stream) } else { TensorKind::Whole(stream) };
            all.push(((id, kind), tensor));
        }
    }
    // A variable may have the name of another variable's slot, or of the metadata.
    let mut names = BTreeSet::from([METADATA]);
    if let Some((_, tensor)) = all.iter().find(|(_, tensor)| !names.insert(&tensor.name)) {
        return Err(CheckpointError::ExportName { name: tensor.name.clone() });
    }
    all.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype.size()));
    Ok(all.into_iter().unzip())
}
