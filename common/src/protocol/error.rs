//! Protocol errors: faults of the peer, each of which ends the connection.

use thiserror::Error;

/// Bytes that are not a valid frame of this protocol. The peer is at fault.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The first four bytes are not pushpull's.
    #[error(
        "cannot read a frame: the peer does not speak pushpull, it sent \"{}\"",
        .found.to_le_bytes().escape_ascii()
    )]
    Magic {
        /// The four bytes, little-endian.
        found: u32,
    },
    /// The header has an unsupported version.
    #[error("cannot read a frame of version {found}: this side speaks {oldest} to {newest}")]
    Version {
        /// The version in the header.
        found: u16,
        /// The oldest version that this side speaks.
        oldest: u16,
        /// The newest version that this side speaks.
        newest: u16,
    },
    /// The header has a flag that this version does not know.
    #[error("cannot read a frame: unknown flags {found:#x}")]
    Flags {
        /// The unknown bits.
        found: u32,
    },
    /// The header has a message kind that this version does not know.
    #[error("cannot read a frame: unknown message kind {found}")]
    Kind {
        /// The kind in the header.
        found: u16,
    },
    /// A length is above its limit. Nothing was allocated for it.
    #[error("cannot read a frame: {what} is {found} bytes: the limit is {limit}")]
    TooLong {
        /// The part of the frame.
        what: &'static str,
        /// The length in the header.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A checksum does not match.
    #[error(
        "cannot read a frame: the {what} has CRC {found:#010x}, its bytes make {computed:#010x}"
    )]
    Crc {
        /// The part of the frame that the checksum covers.
        what: &'static str,
        /// The checksum in the header.
        found: u32,
        /// The checksum of the bytes received.
        computed: u32,
    },
    /// The meta ends inside a field.
    #[error("cannot read the {message} message: it ends inside {field}")]
    Truncated {
        /// The message.
        message: &'static str,
        /// The type of the incomplete field.
        field: &'static str,
    },
    /// The meta has bytes after its last field.
    #[error("cannot read the {message} message: {bytes} bytes follow its last field")]
    Trailing {
        /// The message.
        message: &'static str,
        /// The number of extra bytes.
        bytes: usize,
    },
    /// A field has an invalid value.
    #[error("cannot read the {message} message: {field} cannot be {found}")]
    Invalid {
        /// The message.
        message: &'static str,
        /// The type of the field.
        field: &'static str,
        /// The value, or the count, found.
        found: u64,
    },
    /// The stream ended in the middle of a frame.
    #[error("cannot read a frame: the stream ended after {bytes} bytes of it")]
    Cut {
        /// The number of bytes of the frame that arrived.
        bytes: u64,
    },
    /// A message is not valid in the current state, for example an answer without a request.
    #[error("cannot accept a {found} message {when}")]
    Unexpected {
        /// The message's name.
        found: &'static str,
        /// The state in which it arrived.
        when: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_of_another_protocol_is_named_by_its_first_bytes() {
        let text = |bytes| ProtocolError::Magic { found: u32::from_le_bytes(bytes) }.to_string();
        let expected = "cannot read a frame: the peer does not speak pushpull, it sent ";
        assert_eq!(text(*b"HTTP"), format!("{expected}\"HTTP\""));
        assert_eq!(text([0x16, 3, 1, b'"']), format!("{expected}\"\\x16\\x03\\x01\\\"\""));
    }
}
