//! Why a shard's files may not be used again in this boot, in words for whoever opens them next.
//!
//! What a flush that failed was to write is in the system's memory still, and may be counted as
//! written there. A process that came next would flush again, be told that all is well, and
//! answer for what the next cut of power takes. So the reason goes to the control words, by a commit
//! like any other: into memory that is there and mapped, which needs no disk, no space and no
//! descriptor. No durable image has it: once the machine was started anew, what is on the disk
//! decides.

use pushpull_common::protocol::wire::Text;

use super::Shard;
use super::record::ShardRecord;
use crate::commit::{Address, FIRST_WORDS, offset_of};
use crate::layout::Fault;

/// The control word that is 0, or one more than the bytes of the reason that follows.
const POISON: usize = 64;

/// The longest reason.
const REASON_BYTES_MAX: usize = 256;

const WORDS: usize = 1 + REASON_BYTES_MAX / 8;
const _: () = assert!(ShardRecord::WORDS <= POISON && POISON + WORDS <= FIRST_WORDS);

impl Shard {
    /// Leaves word of a flush that failed, in the transaction that comes next.
    pub(super) fn stage_poison(&mut self, reason: &str) {
        for (index, word) in encode(reason).into_iter().enumerate() {
            self.journal.stage(Address::Control(POISON + index), word);
        }
    }
}

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

/// The reason that the first cell's words give, if they give one.
pub(crate) fn decode(cell: &[u64]) -> Result<Option<String>, Fault> {
    let words = cell.get(POISON..POISON + WORDS).unwrap_or(&[0]);
    let Some(length) = words[0].checked_sub(1) else { return Ok(None) };
    let text: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let text = usize::try_from(length).ok().and_then(|length| text.get(..length));
    match text.and_then(|text| std::str::from_utf8(text).ok()) {
        Some(reason) => Ok(Some(reason.to_owned())),
        None => {
            let what =
                format!("the reason of a flush that failed, at most {REASON_BYTES_MAX} bytes");
            Err(Fault::at(offset_of(Address::Control(POISON)), what))
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
    fn a_reason_reads_as_it_was_left() {
        assert_eq!(decode(&cell(&[])), Ok(None));
        for reason in ["", "no space", "cannot flush values-1: input/output error (os error 5)"] {
            assert_eq!(decode(&cell(&encode(reason))), Ok(Some(reason.to_owned())));
        }
        let long = "ä".repeat(200);
        assert_eq!(decode(&cell(&encode(&long))), Ok(Some("ä".repeat(128))));
    }

    #[test]
    fn words_that_nobody_left_are_refused_by_their_place() {
        for words in [[2 + REASON_BYTES_MAX as u64, 0], [u64::MAX, 0], [9, u64::MAX]] {
            let fault = decode(&cell(&words)).unwrap_err();
            assert_eq!(fault.offset, 4096 + 64 * 8, "{fault:?}");
        }
    }
}
