//! The intake of pushes: push slots, parts on their way into them, and buffers for bodies.

use super::buffer_pool::BufferPool;
use crate::config::PsConfig;
use crate::inbox::Inbox;
use crate::metrics::Counters;
use std::sync::Arc;

/// The pushes that a shard is receiving or holds.
#[derive(Debug)]
pub(super) struct Intake {
    pub(super) config: Arc<PsConfig>,
    pub(super) counters: Arc<Counters>,
    /// `None` while no variables are declared.
    pub(super) inbox: Option<Inbox>,
    /// The number of the first push slot of the next inbox.
    pub(super) next_push_slot: u32,
    /// Pooled buffers for bodies.
    pub(super) buffer_pool: BufferPool,
}

impl Intake {
    pub(super) fn new(config: Arc<PsConfig>, counters: Arc<Counters>) -> Intake {
        Intake {
            config,
            counters,
            inbox: None,
            next_push_slot: 1,
            buffer_pool: BufferPool::default(),
        }
    }
}
