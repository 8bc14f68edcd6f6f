//! The samples to train on as CSV, for programs that feed them to workers.

use std::io::{self, BufWriter, Write};

use super::data::Split;
use super::task::TaskError;

/// Prints a row for each sample, in their order: the label, then the pixels.
pub(crate) fn print(split: &Split) -> Result<(), TaskError> {
    let mut output = BufWriter::new(io::stdout().lock());
    for batch in split.train.clone().shard(0, 1)? {
        for (pixels, label) in batch?.samples {
            write!(output, "{label}")?;
            for pixel in pixels {
                write!(output, ",{pixel}")?;
            }
            writeln!(output)?;
        }
    }
    Ok(output.flush()?)
}
