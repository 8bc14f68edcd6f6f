//! One safetensors file with whole tensors under their own names, for other programs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use pushpull_common::ids::VariableId;

use super::error::CheckpointError;
use super::files::HashedFile;
use super::header::{METADATA, Tensor, head};
use super::local::ReplacingFile;
use super::restore::{Opened, newest_good};
use super::shard_file::Stream;
use super::storage::CheckpointStorage;

/// Writes a checkpoint as one safetensors file: every variable under its own name and, if `slots`
/// is set, every slot under that name, a `:` and the slot's.
///
/// `checkpoint` names one; without it the newest good one is taken. The file replaces what was at
/// `to` only once it is whole, and has mode 0600. Nothing larger than 1 MiB is held in memory,
/// beside the list of variables.
pub fn export(
    storage: Arc<dyn CheckpointStorage>,
    checkpoint: Option<&str>,
    to: &Path,
    slots: bool,
) -> Result<(), CheckpointError> {
    let not_found = |name: &str| CheckpointError::NotFound { name: name.to_owned() };
    let mut opened = match checkpoint {
        Some(name) => Opened::open(storage, name.parse().map_err(|_| not_found(name))?)?,
        None => newest_good(&storage)?.ok_or_else(|| not_found("newest"))?.0,
    };
    // All of it before the first byte is written, as another program may not check hashes.
    opened.verify()?;
    let (order, tensors) = tensors(&opened, slots)?;
    // Some readers take a file only if it says that its tensors lie as in PyTorch.
    let metadata = [("format", "pt".to_owned())];
    let head = head(&metadata, &tensors)?;
    let mut out = HashedFile::new(Box::new(ReplacingFile::create(to)?));
    out.write(&head)?;
    for (variable, stream) in order {
        let elements = 0..opened.catalogue().variable(variable).shape().elements();
        opened.read(variable, stream, elements, &mut |piece| out.write(piece))?;
    }
    out.finish("export")?;
    Ok(())
}

type Order = Vec<(VariableId, Stream)>;

/// The tensors in the order of the file: wider elements first, so that all are aligned.
fn tensors(opened: &Opened, slots: bool) -> Result<(Order, Vec<Tensor>), CheckpointError> {
    let variables = opened.catalogue().variables();
    let mut all = Vec::new();
    for (index, variable) in variables.iter().enumerate() {
        let id = VariableId(index as u32);
        let slots = if slots { opened.manifest().training.slots(id) } else { &[] };
        let named = slots.iter().map(|slot| format!("{}:{slot}", variable.name()));
        let streams = std::iter::once((Stream::Values, variable.name().to_owned()))
            .chain(named.enumerate().map(|(slot, name)| (Stream::Slot(slot), name)));
        for (stream, name) in streams {
            let extents = variable.shape().extents().to_vec();
            let tensor = Tensor { name, dtype: variable.dtype(), extents };
            all.push(((id, stream), tensor));
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
