//! The fixed part of a frame: 80 bytes in ten rows of eight.

use super::error::ProtocolError;
use super::limits;
use super::message::Message;
use super::version;
use super::wire::{FieldReader, Wire};
use crate::ids::{ConfigEpoch, GlobalStep, RequestId, RestoreEpoch, Sequence};

/// The first four bytes of every frame: `ppsh`, read little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"ppsh");

/// The flag that says that [`Header::body_crc`] holds the CRC-32C of the body.
pub const FLAG_BODY_CRC: u32 = 1;

/// The header of a frame. Fields that a message does not use are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The protocol version of the frame.
    pub version: u16,
    /// The kind of message in the meta.
    pub kind: u16,
    /// The bytes of meta that follow the header.
    pub meta_bytes: u32,
    /// The sum of the `FLAG_` constants that apply.
    pub flags: u32,
    /// The bytes of body that follow the meta.
    pub body_bytes: u64,
    /// Correlates a response with its request.
    pub request: RequestId,
    /// The restore epoch of the sender.
    pub restore_epoch: RestoreEpoch,
    /// Reserved for replication: the sender's configuration epoch; 0.
    pub config_epoch: ConfigEpoch,
    /// The global step that the message belongs to.
    pub step: GlobalStep,
    /// The push that the message belongs to.
    pub sequence: Sequence,
    /// The time in milliseconds that the requester will still wait; 0 means no deadline.
    pub deadline_ms: u32,
    /// The CRC-32C of the body if [`FLAG_BODY_CRC`] is set, otherwise 0.
    pub body_crc: u32,
    /// Reserved for an authentication tag; 0.
    pub auth: u64,
    /// The CRC-32C of the meta.
    pub meta_crc: u32,
}

impl Header {
    /// The bytes of every header.
    pub const BYTES: usize = 80;

    /// Appends the header, with its own CRC-32C as the last field.
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

    /// Decodes a header and checks everything that does not need the meta.
    ///
    /// Magic and checksum come first, to tell a peer with another protocol from a damaged frame.
    /// Lengths are checked before anything is reserved for them.
    pub fn take(bytes: &[u8; Header::BYTES]) -> Result<Header, ProtocolError> {
        let mut reader = FieldReader::new("header", bytes);
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
        let oldest = version::OLDEST;
        let newest = version::NEWEST;
        if !(oldest..=newest).contains(&self.version) {
            return Err(ProtocolError::Version { found: self.version, oldest, newest });
        }
        let unknown = self.flags & !FLAG_BODY_CRC;
        if unknown != 0 {
            return Err(ProtocolError::Flags { found: unknown });
        }
        // Unused fields must be zero, so that no sender believes that it was understood.
        let body_crc_unused = self.flags & FLAG_BODY_CRC == 0;
        zero("config epoch", self.config_epoch.0.into())?;
        zero("auth", self.auth)?;
        zero("body CRC without its flag", u64::from(self.body_crc) * u64::from(body_crc_unused))?;
        let body_limit =
            Message::body_limit(self.kind).ok_or(ProtocolError::Kind { found: self.kind })?;
        bound("its meta", self.meta_bytes.into(), limits::META_BYTES_MAX.into())?;
        bound("its body", self.body_bytes, body_limit)
    }
}

/// Rejects a value in a field that must be zero.
fn zero(field: &'static str, found: u64) -> Result<(), ProtocolError> {
    match found {
        0 => Ok(()),
        found => Err(ProtocolError::Invalid { message: "header", field, found }),
    }
}

/// Rejects a length above its limit.
pub(super) fn bound(what: &'static str, found: u64, limit: u64) -> Result<(), ProtocolError> {
    if found > limit { Err(ProtocolError::TooLong { what, found, limit }) } else { Ok(()) }
}
