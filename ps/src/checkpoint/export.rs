//! One safetensors file with whole tensors under their own names, for other programs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use pushpull_common::codec::{Codec, Encoding};
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::DType;

use super::error::CheckpointError;
use super::files::HashedFile;
use super::header::{METADATA, Tensor, head};
use super::local::ReplacingFile;
use super::restore::{Opened, newest_good};
use super::shard_file::Stream;
use super::storage::CheckpointStorage;

/// Writes a checkpoint as one safetensors file: every variable under its own name and, if `slots`
/// is set, every slot under that name, a `:` and the slot's. A variable of `f16` or `bf16` is rounded to
/// that, as pulls have it; its slots are `f32`. A table that grows has its rows under its
/// name, in any order, and their ids under that name and `:ids`, 64 bits each.
///
/// `checkpoint` names one; without it the newest good one is taken. The file replaces what was at
/// `to` only once it is whole, and has mode 0600. Little more than 1 MiB is held in memory, beside the
/// list of variables.
pub fn export(
    storage: Arc<dyn CheckpointStorage>,
    checkpoint: Option<&str>,
    to: &Path,
    slots: bool,
) -> Result<(), CheckpointError> {
    export_since(storage, checkpoint, to, slots, 0)
}

/// The same with those rows of tables only that were pushed since a global step, as a checkpoint of
/// that step has the others: what was changed after it, and what was changed by that step itself.
/// Variables that are no tables are written whole. What was evicted since is not told.
pub fn export_since(
    storage: Arc<dyn CheckpointStorage>,
    checkpoint: Option<&str>,
    to: &Path,
    slots: bool,
    step: u64,
) -> Result<(), CheckpointError> {
    let not_found = |name: &str| CheckpointError::NotFound { name: name.to_owned() };
    let mut opened = match checkpoint {
        Some(name) => Opened::open(storage, name.parse().map_err(|_| not_found(name))?)?,
        None => newest_good(&storage)?.ok_or_else(|| not_found("newest"))?.0,
    };
    // All of it before the first byte is written, as another program may not check hashes.
    opened.verify()?;
    let (order, tensors) = tensors(&opened, slots, step)?;
    // Some readers take a file only if it says that its tensors lie as in PyTorch.
    let metadata = [("format", "pt".to_owned())];
    let head = head(&metadata, &tensors)?;
    let mut out = HashedFile::new(Box::new(ReplacingFile::create(to)?));
    out.write(&head)?;
    for (variable, what) in order {
        let stream = match what {
            What::Whole(stream) => stream,
            What::Ids | What::Rows(_) => {
                write_rows(&opened, variable, what, step, &mut out)?;
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
    Ok(())
}

/// What of a variable a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// All its elements, or those of a slot.
    Whole(Stream),
    /// The ids of a table.
    Ids,
    /// Its rows, or those of a slot, in the order of the ids.
    Rows(Stream),
}

type Order = Vec<(VariableId, What)>;

/// How a tensor is rounded that is not written as servers keep it: that of a variable of a half type.
fn rounding(opened: &Opened, variable: VariableId, stream: Stream) -> Option<Codec> {
    let own = Encoding::of_type(opened.catalogue().variable(variable).dtype());
    own.filter(|_| stream == Stream::Values).and_then(Encoding::codec_of_values)
}

/// Master values as halves.
fn rounded(codec: &Codec, masters: &[u8]) -> Vec<u8> {
    let masters = masters.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let masters: Vec<f32> = masters.collect();
    let mut halves = Vec::new();
    codec
        .encode(&masters, &mut halves)
        .expect("the codecs of values take every element of a piece");
    // Without what pads a stretch.
    halves.truncate(2 * masters.len());
    halves
}

/// Writes a tensor of a table: that of the rows that were pushed since a step.
fn write_rows(
    opened: &Opened,
    variable: VariableId,
    what: What,
    step: u64,
    out: &mut HashedFile,
) -> Result<(), CheckpointError> {
    let (streams, codec) = match what {
        What::Rows(stream) => (vec![stream.number()], rounding(opened, variable, stream)),
        _ => (vec![], None),
    };
    for partition in opened.catalogue().partitions_of(variable) {
        let row_bytes = partition.row_bytes() as usize;
        opened.read_rows(partition.id, &streams, &mut |heads, bytes| {
            let wanted = heads.iter().enumerate().filter(|(_, head)| head.step >= step);
            for (row, head) in wanted {
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

/// How many rows of a table were pushed since a step.
fn count_rows(opened: &Opened, variable: VariableId, step: u64) -> Result<u64, CheckpointError> {
    let mut count = 0;
    for partition in opened.catalogue().partitions_of(variable) {
        opened.read_rows(partition.id, &[], &mut |heads, _| {
            count += heads.iter().filter(|head| head.step >= step).count() as u64;
            Ok(())
        })?;
    }
    Ok(count)
}

/// The tensors in the order of the file: wider elements first, so that all are aligned.
fn tensors(
    opened: &Opened,
    slots: bool,
    step: u64,
) -> Result<(Order, Vec<Tensor>), CheckpointError> {
    let variables = opened.catalogue().variables();
    let mut all = Vec::new();
    for (index, variable) in variables.iter().enumerate() {
        let id = VariableId(index as u32);
        let slots = if slots { opened.manifest().training.slots(id) } else { &[] };
        let named = slots.iter().map(|slot| format!("{}:{slot}", variable.name()));
        let streams = std::iter::once((Stream::Values, variable.name().to_owned()))
            .chain(named.enumerate().map(|(slot, name)| (Stream::Slot(slot), name)));
        let (id, mut extents) = (VariableId(index as u32), variable.shape().extents().to_vec());
        let is_table = variable.as_table().is_some();
        if is_table {
            extents[0] = count_rows(opened, id, step)?;
            let name = format!("{}:ids", variable.name());
            let tensor = Tensor { name, dtype: DType::I64, extents: vec![extents[0]] };
            all.push(((id, What::Ids), tensor));
        }
        for (stream, name) in streams {
            let dtype = match stream {
                Stream::Values => variable.dtype(),
                Stream::Slot(_) => variable.dtype().master(),
            };
            let tensor = Tensor { name, dtype, extents: extents.clone() };
            let what = if is_table { What::Rows(stream) } else { What::Whole(stream) };
            all.push(((id, what), tensor));
        }
    }
    // A variable may be named as another one's slot would be, or as what is no tensor.
    let mut names = BTreeSet::from([METADATA]);
    if let Some((_, tensor)) = all.iter().find(|(_, tensor)| !names.insert(&tensor.name)) {
        return Err(CheckpointError::ExportName { name: tensor.name.clone() });
    }
    all.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype.size()));
    Ok(all.into_iter().unzip())
}
