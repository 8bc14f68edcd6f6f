//! The fixed part of a frame: 80 bytes in ten rows of eight.

use super::error::ProtocolError;
use super::limits;
use super::message::Message;
use super::version;
use super::wire::{Reader, Wire};
use crate::ids::{ConfigEpoch, GlobalStep, RequestId, RestoreEpoch, Sequence};

/// The first four bytes of every frame: `ppsh`, read little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"ppsh");

/// Set when [`Header::body_crc`] holds the CRC-32C of the body.
pub const FLAG_BODY_CRC: u32 = 1;

/// The header of a frame. Fields that a message does not use are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The protocol version the frame is written in.
    pub version: u16,
    /// Which message the meta holds.
    pub kind: u16,
    /// Bytes of meta that follow the header.
    pub meta_bytes: u32,
    /// A sum of the `FLAG_` constants.
    pub flags: u32,
    /// Bytes of body that follow the meta.
    pub body_bytes: u64,
    /// Correlates a response with its request.
    pub request: RequestId,
    /// The restore epoch the sender lives in.
    pub restore_epoch: RestoreEpoch,
    /// Reserved for replication, the sender's configuration epoch; 0.
    pub config_epoch: ConfigEpoch,
    /// The global step the message belongs to.
    pub step: GlobalStep,
    /// The push the message belongs to.
    pub sequence: Sequence,
    /// How long the requester will still wait, in milliseconds; 0 means no deadline.
    pub deadline_ms: u32,
    /// CRC-32C of the body where [`FLAG_BODY_CRC`] is set, else 0.
    pub body_crc: u32,
    /// Reserved for an authentication tag; 0.
    pub auth: u64,
    /// CRC-32C of the meta.
    pub meta_crc: u32,
}

impl Header {
    /// The size of every header.
    pub const BYTES: usize = 80;

    /// Appends the header, with its own CRC-32C as its last field.
    pub fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        MAGIC.put(out);
        self.version.put(out);
        self.kind.put(out);
        self.meta_bytes.put(out);
        self.flags.put(out);
        self.body_bytes.put(out);
        self.request.put(out);
        self.restore_epoch.put(out);
        self.config_epoch.put(out);
        self.step.put(out);
        self.sequence.put(out);
        self.deadline_ms.put(out);
        self.body_crc.put(out);
        self.auth.put(out);
        self.meta_crc.put(out);
        let crc = crc32c::crc32c(&out[start..]);
        crc.put(out);
    }

    /// Reads a header, and checks all that can be checked before its meta has come.
    ///
    /// Magic and checksum come first, so that a stray peer is told apart from a damaged frame;
    /// lengths come before anything is reserved for them.
    pub fn take(bytes: &[u8; Header::BYTES]) -> Result<Header, ProtocolError> {
        let mut reader = Reader::new("header", bytes);
        let magic = u32::take(&mut reader)?;
        if magic != MAGIC {
            return Err(ProtocolError::Magic { found: magic });
        }
        let computed = crc32c::crc32c(&bytes[..Header::BYTES - 4]);
        let header = Header {
            version: Wire::take(&mut reader)?,
            kind: Wire::take(&mut reader)?,
            meta_bytes: Wire::take(&mut reader)?,
            flags: Wire::take(&mut reader)?,
            body_bytes: Wire::take(&mut reader)?,
            request: Wire::take(&mut reader)?,
            restore_epoch: Wire::take(&mut reader)?,
            config_epoch: Wire::take(&mut reader)?,
            step: Wire::take(&mut reader)?,
            sequence: Wire::take(&mut reader)?,
            deadline_ms: Wire::take(&mut reader)?,
            body_crc: Wire::take(&mut reader)?,
            auth: Wire::take(&mut reader)?,
            meta_crc: Wire::take(&mut reader)?,
        };
        let found = u32::take(&mut reader)?;
        if found != computed {
            return Err(ProtocolError::Crc { what: "header", found, computed });
        }
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), ProtocolError> {
        let (oldest, newest) = (version::OLDEST, version::NEWEST);
        if !(oldest..=newest).contains(&self.version) {
            return Err(ProtocolError::Version { found: self.version, oldest, newest });
        }
        let unknown = self.flags & !FLAG_BODY_CRC;
        if unknown != 0 {
            return Err(ProtocolError::Flags { found: unknown });
        }
        // What this version does not use is zero, so that no sender believes it was understood.
        let body_crc_unused = self.flags & FLAG_BODY_CRC == 0;
        zero("config epoch", self.config_epoch.0.into())?;
        zero("auth", self.auth)?;
        zero("body CRC without its flag", u64::from(self.body_crc) * u64::from(body_crc_unused))?;
        let body_limit =
            Message::body_limit(self.kind).ok_or(ProtocolError::Kind { found: self.kind })?;
        bound("its meta", self.meta_bytes.into(), limits::META_BYTES_MAX.into())?;
        bound("its body", self.body_bytes, body_limit)
    }

    /// The bytes of the whole frame.
    pub fn frame_bytes(&self) -> u64 {
        // Both lengths are bounded by `check`, far below where this sum could overflow.
        Header::BYTES as u64 + u64::from(self.meta_bytes) + self.body_bytes
    }
}

/// Refuses a value in a field that must be zero.
fn zero(field: &'static str, found: u64) -> Result<(), ProtocolError> {
    match found {
        0 => Ok(()),
        found => Err(ProtocolError::Invalid { message: "header", field, found }),
    }
}

/// Refuses a length above its limit.
pub(super) fn bound(what: &'static str, found: u64, limit: u64) -> Result<(), ProtocolError> {
    if found > limit { Err(ProtocolError::TooLong { what, found, limit }) } else { Ok(()) }
}
