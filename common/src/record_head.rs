//! The head of a record: its length and the checksum of the length.

/// The first 12 bytes of a record's frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHead(pub [u8; RecordHead::BYTES]);

impl RecordHead {
    /// Size of a head.
    pub const BYTES: usize = 12;

    /// Size of the checksum behind the data.
    pub const CHECKSUM_BYTES: usize = 4;

    /// Bytes of a frame beside its data.
    pub const OVERHEAD_BYTES: u64 = (Self::BYTES + Self::CHECKSUM_BYTES) as u64;

    /// Makes the head of a record with a length.
    pub fn new(length: u64) -> RecordHead {
        let length = length.to_le_bytes();
        let mut head = [0; Self::BYTES];
        head[..8].copy_from_slice(&length);
        head[8..].copy_from_slice(&masked_crc32c(&length).to_le_bytes());
        RecordHead(head)
    }

    /// Returns the length of the data, or nothing if its checksum differs.
    pub fn length(self) -> Option<u64> {
        let [a, b, c, d, e, f, g, h, checksum @ ..] = self.0;
        let length = [a, b, c, d, e, f, g, h];
        let is_intact = masked_crc32c(&length) == u32::from_le_bytes(checksum);
        is_intact.then_some(u64::from_le_bytes(length))
    }
}

/// Returns the checksum of a record's length or data: its CRC32C, rotated right by 15 bits, plus a
/// constant. The mask keeps the CRC of data that contains its own CRC from being a constant.
pub fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_has_known_bytes() {
        // From the classic writer: a file-version event is 24 bytes long.
        let head = [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22];
        assert_eq!(RecordHead::new(24).0, head);
        assert_eq!(RecordHead(head).length(), Some(24));
    }

    #[test]
    fn a_flipped_bit_is_found() {
        for length in [0, 1, 24, u64::from(u32::MAX), u64::MAX] {
            let head = RecordHead::new(length);
            assert_eq!(head.length(), Some(length));
            for bit in 0..8 * RecordHead::BYTES {
                let mut flipped = head;
                flipped.0[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(flipped.length(), None, "length {length}, bit {bit}");
            }
        }
    }

    #[test]
    fn zeros_are_no_head() {
        assert_eq!(RecordHead([0; 12]).length(), None);
    }
}
