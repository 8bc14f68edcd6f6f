//! What the two sides say to each other: one header, a small typed meta, and bulk body bytes.
//!
//! A frame is an 80-byte [`header::Header`], a meta of at most [`limits::META_BYTES_MAX`] bytes
//! that encodes one [`message::Message`], and a body that is never parsed: it is received
//! straight to where it is used. `docs/protocol.md` draws every field.

pub mod decode;
pub mod encode;
pub mod error;
pub mod header;
pub mod limits;
pub mod message;
pub mod outcome;
pub mod refusal;
pub mod version;
pub mod wire;

pub use decode::{BodyPoll, FrameReader, Poll};
pub use encode::{BodyStamp, Envelope, encode};
pub use error::ProtocolError;
pub use header::Header;
pub use message::Message;
pub use outcome::{Grant, Outcome, PushState};
pub use refusal::Refusal;
