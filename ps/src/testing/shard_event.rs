//! The outputs of a shard's endpoint, as frames.

use std::os::fd::OwnedFd;

use pushpull_common::protocol::Features;

use crate::shard::output::PulledParts;

/// An output of a shard, which the caller carries out.
#[derive(Debug)]
pub enum ShardEvent {
    /// Send a frame.
    Send {
        /// The connection.
        connection: u64,
        /// The bytes of the frame.
        frame: Vec<u8>,
    },
    /// Send a frame, with descriptors at its first byte.
    Shared {
        /// The connection: a Unix socket.
        connection: u64,
        /// The bytes of the frame.
        frame: Vec<u8>,
        /// The descriptors of the shared memory.
        descriptors: Vec<OwnedFd>,
    },
    /// Send the values that answer a pull.
    Values {
        /// The connection.
        connection: u64,
        /// The values, to be sent frame by frame as the connection takes them.
        values: Box<PulledFrames>,
    },
    /// Close a connection after all earlier frames are sent.
    Close {
        /// The connection.
        connection: u64,
    },
    /// Send a frame over the connection to the step owner.
    ToOwner {
        /// The bytes of the frame.
        frame: Vec<u8>,
    },
    /// A synchronous step has been applied and committed.
    Applied {
        /// The index of the step, from 0.
        step: u64,
        /// The tokens of the pushes in the step, in the order of their sum.
        tokens: Vec<u64>,
    },
    /// The step owner has reported a gradient that is applied on some shards only.
    PartlyApplied {
        /// The token of its push.
        token: u64,
    },
}

/// The values that answer a pull. Their blocks stay pinned until this is dropped.
#[derive(Debug)]
pub struct PulledFrames {
    pub(super) parts: PulledParts,
    pub(super) part_bytes: u64,
    pub(super) features: Features,
}

impl PulledFrames {
    /// Encodes the next frame; `None` after the last.
    pub fn next_frame(&mut self) -> Option<Vec<u8>> {
        let mut frame = Vec::new();
        let range = self.parts.next_part_of(self.features, self.part_bytes, &mut frame)?;
        self.parts.slices(range).for_each(|slice| frame.extend_from_slice(slice));
        Some(frame)
    }
}
