//! Samples to train on from a stream: a record is a label and pixels, in little-endian order.

use std::time::Duration;

use pushpull::training::data::{Pipeline, Source, StreamAddress, StreamLimits};

use super::{CLASSES, Sample, Split, SplitError};

impl Split {
    /// Reads the samples to train on from a stream, to its end. Those to test on are held out of the
    /// digits, so the samples must have as many pixels.
    ///
    /// A record is a label, as an unsigned number of 4 bytes, and the pixels, as `f32` in 0..=1.
    ///
    /// # Errors
    ///
    /// The errors of the stream. A record is checked when it is read as a sample.
    pub(crate) fn of_stream(address: &StreamAddress) -> Result<Split, SplitError> {
        let test = Split::digits()?.test;
        let width = test.width;
        let limits = StreamLimits::new().spool_directory(std::env::temp_dir());
        let source = limits.read(address.to_string(), address.open(SILENCE_MAX)?)?;
        let train_rows = source.len() as usize;
        let train = Pipeline::new(source).try_map(move |record| sample_of(&record, width));
        Ok(Split { train, train_rows, test })
    }
}

/// Reads a record.
fn sample_of(record: &[u8], width: usize) -> Result<Sample, SplitError> {
    let (words, rest) = record.as_chunks::<4>();
    let (label, pixels) = match words.split_first() {
        Some((label, pixels)) if pixels.len() == width && rest.is_empty() => (label, pixels),
        _ => return Err(SplitError::Record { found: record.len(), expected: 4 + 4 * width }),
    };
    let label = u32::from_le_bytes(*label);
    if label as usize >= CLASSES {
        return Err(SplitError::Label { found: label, classes: CLASSES });
    }
    Ok((pixels.iter().map(|pixel| f32::from_le_bytes(*pixel)).collect(), label))
}

/// The longest silence of a stream. Its writer may compute the samples meanwhile.
const SILENCE_MAX: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_label_and_pixels() {
        let words = |label: u32, pixels: &[f32]| {
            let pixels = pixels.iter().flat_map(|pixel| pixel.to_le_bytes());
            label.to_le_bytes().into_iter().chain(pixels).collect::<Vec<u8>>()
        };
        let sample = sample_of(&words(7, &[0.0, 0.25]), 2).unwrap();
        assert_eq!(sample, (vec![0.0, 0.25], 7));
        let refused = |record: &[u8]| sample_of(record, 2).unwrap_err().to_string();
        for bytes in [0, 1, 4, 11, 13, 16] {
            let expected = format!("the record has {bytes} bytes, expected 12: a label and pixels");
            assert_eq!(refused(&vec![0; bytes]), expected);
        }
        assert_eq!(refused(&words(10, &[0.0, 0.0])), "the label is 10, expected less than 10");
    }
}
