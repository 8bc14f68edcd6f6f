//! The poison record: why a shard's files must not be used again in this boot.
//!
//! After a failed flush, the unwritten pages are still in the kernel's memory, and the kernel may
//! count them as written. The next process would flush again, receive success, and acknowledge
//! state that the next power cut destroys. So the reason is committed to the control words like any
//! other change. They are mapped, so this needs no disk, no space and no descriptor. No durable
//! image includes the record: after a reboot, the content of the disk decides.

use pushpull_common::protocol::wire::Text;
use pushpull_store::commit::{Address, FIRST_WORDS, offset_of};
use pushpull_store::layout::Fault;

use super::record::ShardRecord;
use super::shard_files::ShardFiles;

/// The control word of the record: 0, or 1 + the bytes of the reason that follows.
const POISON: usize = 64;

/// The longest reason.
const REASON_BYTES_MAX: usize = 256;

const WORDS: usize = 1 + REASON_BYTES_MAX / 8;
const _: () = assert!(ShardRecord::WORDS <= POISON && POISON + WORDS <= FIRST_WORDS);

fn encode(reason: &str) -> [u64; WORDS] {
    let reason = Text::<REASON_BYTES_MAX>::clipped(reason);
    let text = reason.as_str().as_bytes();
    let mut words = [0; WORDS];
    words[0] = 1 + text.len() as u64;
    for (word, bytes) in words[1..].iter_mut().zip(text.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(padded);
    }
    words
}

/// Returns the reason in the words of the first cell, if there is one.
pub(crate) fn decode(cell: &[u64]) -> Result<Option<String>, Fault> {
    let words = cell.get(POISON..POISON + WORDS).unwrap_or(&[0]);
    let Some(length) = words[0].checked_sub(1) else { return Ok(None) };
    let text: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let text = usize::try_from(length).ok().and_then(|length| text.get(..length));
    match text.and_then(|text| std::str::from_utf8(text).ok()) {
        Some(reason) => Ok(Some(reason.to_owned())),
        None => {
            let what = format!("the reason of a failed flush, at most {REASON_BYTES_MAX} bytes");
            Err(Fault::at(offset_of(Address::Control(POISON)), what))
        }
    }
}

impl ShardFiles {
    /// Stages the reason of a failed flush for the next transaction.
    pub(super) fn stage_poison(&mut self, reason: &str) {
        for (index, word) in encode(reason).into_iter().enumerate() {
            self.journal.stage(Address::Control(POISON + index), word);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(words: &[u64]) -> Vec<u64> {
        let mut cell = vec![0; FIRST_WORDS];
        cell[POISON..POISON + words.len()].copy_from_slice(words);
        cell
    }

    #[test]
    fn decoding_restores_the_reason() {
        assert_eq!(decode(&cell(&[])), Ok(None));
        for reason in ["", "no space", "cannot flush values-1: input/output error (os error 5)"] {
            assert_eq!(decode(&cell(&encode(reason))), Ok(Some(reason.to_owned())));
        }
        let long = "ä".repeat(200);
        assert_eq!(decode(&cell(&encode(&long))), Ok(Some("ä".repeat(128))));
    }

    #[test]
    fn malformed_words_are_refused_with_their_offset() {
        for words in [[2 + REASON_BYTES_MAX as u64, 0], [u64::MAX, 0], [9, u64::MAX]] {
            let fault = decode(&cell(&words)).unwrap_err();
            assert_eq!(fault.offset, 4096 + 64 * 8, "{fault:?}");
        }
    }
}
