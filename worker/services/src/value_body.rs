//! Values on the wire: bodies that share memory with values, and memory that bodies fill.

use std::ops::Range;
use std::sync::Arc;

use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_net::SendBody;
use pushpull_worker::internal::AlignedBuffer;
use smallvec::SmallVec;

use super::value::{Value, ValueType};

/// The body of a frame: ranges of the memory of values.
#[derive(Clone, Debug, Default)]
pub(crate) struct ValueBody(SmallVec<[(Arc<AlignedBuffer>, Range<usize>); 2]>);

impl ValueBody {
    /// Cuts the bytes of values, each padded, into bodies of at most one part. There is at least
    /// one body, which is empty without values.
    pub(crate) fn parts<'a>(values: impl IntoIterator<Item = &'a Value>) -> Vec<ValueBody> {
        let mut parts = vec![ValueBody::default()];
        let mut left = PART_BYTES_MAX as usize;
        for value in values {
            let (memory, mut range) = value.padded();
            while !range.is_empty() {
                if left == 0 {
                    parts.push(ValueBody::default());
                    left = PART_BYTES_MAX as usize;
                }
                let bytes = range.len().min(left);
                let end = range.start + bytes;
                let part = parts.last_mut().expect("there is at least one part");
                part.0.push((memory.clone(), range.start..end));
                range.start = end;
                left -= bytes;
            }
        }
        parts
    }

    /// Returns the checksum of its bytes.
    pub(crate) fn crc(&self) -> u32 {
        self.slices().fold(0, crc32c::crc32c_append)
    }
}

impl SendBody for ValueBody {
    fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, range)| range.len() as u64).sum()
    }

    fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|(memory, range)| &memory.bytes()[range.clone()])
    }
}

/// Values in receipt: their types, and memory that bodies fill in order.
///
/// Invariant: `announced` and `received` are at most the bytes of the memory.
#[derive(Debug)]
pub(crate) struct IncomingValues {
    types: Vec<ValueType>,
    memory: AlignedBuffer,
    bytes: usize,
    /// The bytes of bodies that have been announced.
    announced: usize,
    /// The bytes of bodies that are whole.
    received: usize,
}

impl IncomingValues {
    /// Returns the bytes that values of these types need; `None` beyond the size of any memory.
    pub(crate) fn bytes_of(types: &[ValueType]) -> Option<u64> {
        let total = types.iter().try_fold(0_u64, |sum, is| sum.checked_add(is.padded_bytes()))?;
        usize::try_from(total).ok().filter(|&bytes| bytes <= isize::MAX as usize)?;
        Some(total)
    }

    /// Allocates memory for values of these types. The caller has checked their bytes. Returns
    /// `None` if the system has no memory.
    pub(crate) fn new(types: Vec<ValueType>) -> Option<IncomingValues> {
        let bytes = IncomingValues::bytes_of(&types).unwrap_or(0) as usize;
        let memory = AlignedBuffer::try_of_bytes(bytes)?;
        Some(IncomingValues { types, memory, bytes, announced: 0, received: 0 })
    }

    /// Announces a body of this many bytes at this offset. Returns whether the body continues the
    /// received bytes.
    pub(crate) fn announce(&mut self, offset: u64, bytes: u64) -> bool {
        let continues = self.announced == self.received && offset == self.received as u64;
        let fits = bytes <= (self.bytes - self.received) as u64;
        if continues && fits {
            self.announced += bytes as usize;
        }
        continues && fits
    }

    /// Returns the memory of the announced body.
    pub(crate) fn target(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut()[self.received..self.announced]
    }

    /// Records the announced body as received. Returns whether all values are whole.
    pub(crate) fn body_received(&mut self) -> bool {
        self.received = self.announced;
        self.is_whole()
    }

    /// Returns whether all values are whole.
    pub(crate) fn is_whole(&self) -> bool {
        self.received == self.bytes
    }

    /// Returns the values, which share their memory.
    pub(crate) fn into_values(self) -> Vec<Value> {
        let memory = Arc::new(self.memory);
        let mut start = 0;
        let value = |is| Value::of_memory(is, &memory, &mut start);
        self.types.into_iter().map_while(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(body: &ValueBody) -> Vec<u8> {
        body.slices().flatten().copied().collect()
    }

    #[test]
    fn values_travel_in_parts_and_arrive_equal() {
        let numbers: Vec<f32> = (0..600_000).map(|n| n as f32).collect();
        let values = [
            Value::from("text"),
            Value::tensor(&[600_000], &numbers).unwrap(),
            Value::scalar(7_i64),
            Value::zeros::<f32>(&[0]).unwrap(),
        ];
        let parts = ValueBody::parts(&values);
        let lengths: Vec<u64> = parts.iter().map(ValueBody::bytes).collect();
        assert_eq!(lengths, [PART_BYTES_MAX, PART_BYTES_MAX, 2_400_016 - 2 * PART_BYTES_MAX]);
        let types = values.iter().map(|value| value.value_type().clone()).collect();
        let mut incoming = IncomingValues::new(types).unwrap();
        let mut offset = 0;
        for part in &parts {
            assert!(!incoming.is_whole());
            assert!(!incoming.announce(offset + 8, 8), "a gap");
            assert!(!incoming.announce(offset, u64::MAX), "beyond the end");
            assert!(incoming.announce(offset, part.bytes()));
            assert!(!incoming.announce(offset, part.bytes()), "announced twice");
            incoming.target().copy_from_slice(&bytes(part));
            incoming.body_received();
            offset += part.bytes();
        }
        assert!(incoming.is_whole());
        assert_eq!(incoming.into_values(), values);
    }

    #[test]
    fn no_values_are_one_empty_body() {
        let parts = ValueBody::parts(&[]);
        assert_eq!((parts.len(), parts[0].bytes()), (1, 0));
        assert!(IncomingValues::new(Vec::new()).unwrap().is_whole());
    }
}
