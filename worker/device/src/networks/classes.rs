//! The accuracy of classifiers, counted in parts of a batch.

use crate::device::Device;
use crate::error::ComputeError;
use crate::memory::View;

/// The number of samples that are classified at once, which bounds the buffers.
pub(super) const ROWS_AT_ONCE: usize = 256;

/// Returns the number of samples whose single greatest logit is at their label. Ties and NaN count
/// as wrong.
pub(super) fn correct(
    device: &Device,
    logits: View<'_, f32>,
    labels: &[u32],
) -> Result<usize, ComputeError> {
    let mut values = vec![0.0; logits.len()];
    device.read(logits, &mut values)?;
    let classes = values.len().checked_div(labels.len()).unwrap_or(0);
    let rows = values.chunks_exact(classes.max(1));
    Ok(rows.zip(labels).filter(|(logits, label)| wins(logits, **label)).count())
}

fn wins(logits: &[f32], label: u32) -> bool {
    let Some(logit) = logits.get(label as usize) else { return false };
    let others = logits.iter().enumerate().filter(|(class, _)| *class != label as usize);
    others.into_iter().all(|(_, other)| other < logit)
}
