//! The poison record: why a shard's files must not be used again in this boot.
//!
//! After a failed flush, the unwritten pages are still in the kernel's memory, and the kernel may
//! count them as written. The next process would flush again, receive success, and acknowledge
//! state that the next power cut destroys. So the reason is committed to the control words like any
//! other change. They are mapped, so this needs no disk, no space and no descriptor. No durable
//! image includes the record: after a reboot, the content of the disk decides.

use pushpull_common::protocol::wire::Text;
use pushpull_store::commit::{Address, FIRST_WORDS, Journal, offset_of};
use pushpull_store::layout::Fault;

use super::record::ShardRecord;

/// The control word of the record: 0, or 1 + the bytes of the reason that follows.
const POISON: usize = 64;

/// The longest reason.
const REASON_BYTES_MAX: usize = 256;

const WORDS: usize = 1 + REASON_BYTES_MAX / 8;
const _: () = assert!(ShardRecord::WORDS <= POISON && POISON + WORDS <= FIRST_WORDS);

/// The reason why a shard's files must not be used again.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PoisonRecord {
    pub(crate) reason: String,
}

impl PoisonRecord {
    /// Stages the record for the next transaction.
    pub(in crate::shard) fn stage(&self, journal: &mut Journal) {
        for (index, word) in self.encode().into_iter().enumerate() {
            journal.stage(Address::Control(POISON + index), word);
        }
    }

    fn encode(&self) -> [u64; WORDS] {
        let reason = Text::<REASON_BYTES_MAX>::clipped(&self.reason);
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

    /// Decodes the record from the words of the first cell, if there is one.
    pub(crate) fn decode(cell: &[u64]) -> Result<Option<PoisonRecord>, Fault> {
        let words = cell.get(POISON..POISON + WORDS).unwrap_or(&[0]);
        let Some(length) = words[0].checked_sub(1) else { return Ok(None) };
        let text: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = usize::try_from(length).ok().and_then(|length| text.get(..length));
        match text.and_then(|text| std::str::from_utf8(text).ok()) {
            Some(reason) => Ok(Some(PoisonRecord { reason: reason.to_owned() })),
            None => {
                let what =
                    format!("the reason of a failed flush, at most {REASON_BYTES_MAX} bytes");
                Err(Fault::at(offset_of(Address::Control(POISON)), what))
            }
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
        let restored = |record: &PoisonRecord| {
            let found = PoisonRecord::decode(&cell(&record.encode())).unwrap();
            found.map(|record| record.reason)
        };
        assert_eq!(PoisonRecord::decode(&cell(&[])), Ok(None));
        for reason in ["", "no space", "cannot flush values-1: input/output error (os error 5)"] {
            let record = PoisonRecord { reason: reason.to_owned() };
            assert_eq!(restored(&record).as_deref(), Some(reason));
        }
        let long = PoisonRecord { reason: "ä".repeat(200) };
        assert_eq!(restored(&long), Some("ä".repeat(128)));
    }

    #[test]
    fn malformed_words_are_refused_with_their_offset() {
        for words in [[2 + REASON_BYTES_MAX as u64, 0], [u64::MAX, 0], [9, u64::MAX]] {
            let fault = PoisonRecord::decode(&cell(&words)).unwrap_err();
            assert_eq!(fault.offset, 4096 + 64 * 8, "{fault:?}");
        }
    }
}
