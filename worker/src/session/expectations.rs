//! [`Expectations`]: what a worker expects of the training that it joins.

use std::fmt;

use pushpull_common::identity::Identity;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::message::{ModeIs, Welcome};

use crate::error::Error;

/// Settings of the step owner that a worker expects. What is `None` may have any value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expectations {
    pub(crate) mode: Option<ExpectedMode>,
    /// The last step; `Some(None)` if there may be none.
    pub(crate) last_step: Option<Option<u64>>,
    /// Whether the servers may not clip gradients.
    pub(crate) is_unclipped: bool,
}

/// The mode that a worker expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedMode {
    Asynchronous,
    /// Synchronous steps, of any number of gradients.
    Synchronous,
    /// Synchronous steps of these numbers of gradients and of replicas.
    Replicas {
        aggregate: u32,
        total: u32,
    },
}

impl ExpectedMode {
    fn of(mode: ModeIs) -> ExpectedMode {
        match mode {
            ModeIs::Asynchronous { .. } => ExpectedMode::Asynchronous,
            ModeIs::Synchronous { replicas_to_aggregate: aggregate, total_num_replicas: total } => {
                ExpectedMode::Replicas { aggregate, total }
            }
        }
    }

    fn accepts(self, found: ExpectedMode) -> bool {
        let is_synchronous = matches!(found, ExpectedMode::Replicas { .. });
        self == found || (self == ExpectedMode::Synchronous && is_synchronous)
    }
}

impl fmt::Display for ExpectedMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExpectedMode::Asynchronous => f.write_str("asynchronous"),
            ExpectedMode::Synchronous => f.write_str("synchronous"),
            ExpectedMode::Replicas { aggregate, total } => {
                write!(f, "synchronous, {aggregate} gradients of {total} replicas")
            }
        }
    }
}

impl Expectations {
    /// Checks the welcome of the step owner.
    pub(super) fn check(self, shard: ShardId, welcome: &Welcome) -> Result<(), Error> {
        let unexpected = |setting, expected: String, found: String| {
            Err(Error::Unexpected { shard, setting, expected, found })
        };
        let found = ExpectedMode::of(welcome.mode);
        if let Some(expected) = self.mode.filter(|expected| !expected.accepts(found)) {
            return unexpected("mode", expected.to_string(), found.to_string());
        }
        let identity = Identity::from_wire(&welcome.identity);
        if let Some(clips) = identity.field("clips").filter(|clips| !clips.is_empty())
            && self.is_unclipped
        {
            return unexpected("clips", "none".to_owned(), clips.to_owned());
        }
        // A server that does not name its last step is another implementation.
        if let (Some(expected), Some(found)) = (self.last_step, identity.field(Identity::LAST_STEP))
        {
            let expected = expected.map_or("none".to_owned(), |step| step.to_string());
            if found != expected {
                return unexpected("last_step", expected, found.to_owned());
            }
        }
        Ok(())
    }
}
