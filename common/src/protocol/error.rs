//! What a peer did wrong on the wire. It is always the peer's fault, and always ends the connection.

use thiserror::Error;

/// Bytes that are not a frame of this protocol.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The first four bytes are not pushpull's.
    #[error("cannot read a frame: its magic is {found:#010x}, not {:#010x}", super::header::MAGIC)]
    Magic {
        /// The four bytes, little-endian.
        found: u32,
    },
    /// The header says another version than the one agreed.
    #[error("cannot read a frame of version {found}: this side speaks {oldest} to {newest}")]
    Version {
        /// The version in the header.
        found: u16,
        /// The oldest version this side speaks.
        oldest: u16,
        /// The newest version this side speaks.
        newest: u16,
    },
    /// A flag that this version does not know.
    #[error("cannot read a frame: unknown flags {found:#x}")]
    Flags {
        /// The unknown bits.
        found: u32,
    },
    /// A message kind that this version does not know.
    #[error("cannot read a frame: unknown message kind {found}")]
    Kind {
        /// The kind in the header.
        found: u16,
    },
    /// A length above its limit. Nothing was allocated for it.
    #[error("cannot read a frame: {what} is {found} bytes, the limit is {limit}")]
    TooLong {
        /// Which length.
        what: &'static str,
        /// The length in the header.
        found: u64,
        /// The largest allowed.
        limit: u64,
    },
    /// A checksum that does not match.
    #[error(
        "cannot read a frame: the {what} has CRC {found:#010x}, its bytes make {computed:#010x}"
    )]
    Crc {
        /// What the checksum covers.
        what: &'static str,
        /// The checksum in the header.
        found: u32,
        /// The checksum of the bytes received.
        computed: u32,
    },
    /// The meta ended before the field did.
    #[error("cannot read the {message} message: it ends inside {field}")]
    Truncated {
        /// The message being read.
        message: &'static str,
        /// The type of the field that was cut.
        field: &'static str,
    },
    /// The meta has bytes after its last field.
    #[error("cannot read the {message} message: {bytes} bytes follow its last field")]
    Trailing {
        /// The message being read.
        message: &'static str,
        /// How many bytes are left over.
        bytes: usize,
    },
    /// A field with a value it cannot have.
    #[error("cannot read the {message} message: {field} cannot be {found}")]
    Invalid {
        /// The message being read.
        message: &'static str,
        /// The type of the field.
        field: &'static str,
        /// The value, or the count, found.
        found: u64,
    },
    /// The stream ended in the middle of a frame.
    #[error("cannot read a frame: the stream ended after {bytes} bytes of it")]
    Cut {
        /// How many bytes of the frame had arrived.
        bytes: u64,
    },
    /// A message that does not belong here, such as a response nobody asked for.
    #[error("cannot accept a {found} message {when}")]
    Unexpected {
        /// The message's name.
        found: &'static str,
        /// The state in which it came.
        when: &'static str,
    },
}
