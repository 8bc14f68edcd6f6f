//! The wire protocol between clients and shards: a header, a small typed meta and a bulk body.
//!
//! A frame is an 80-byte [`header::Header`], a meta of at most [`limits::META_BYTES_MAX`] bytes
//! that encodes one [`message::Message`], and a body. The body is never parsed: it is received
//! directly into its destination. `docs/protocol.md` shows every field.

pub mod decode;
pub mod encode;
pub mod error;
pub mod feature;
pub mod header;
pub mod limits;
pub mod message;
pub mod outcome;
pub mod refusal;
pub mod version;
pub mod wire;

pub use decode::{BodyPoll, FrameEvent, FrameProgress, FrameReader, FrameSink, Poll};
pub use encode::{BodyStamp, Envelope, encode, encode_for};
pub use error::ProtocolError;
pub use feature::Features;
pub use header::Header;
pub use message::Message;
pub use outcome::{EffectId, EffectRef, Grant, Outcome, PushState, SampleRange};
pub use refusal::Refusal;
