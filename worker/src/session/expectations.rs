//! [`Expectations`]: what a worker expects of the training that it joins.

use pushpull_common::identity::Identity;
use pushpull_common::ids::ShardId;
use pushpull_common::protocol::message::{ModeIs, Welcome};

use crate::error::Error;

/// Settings of the step owner that a worker expects. What is `None` may have any value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expectations {
    pub(crate) synchronous: Option<bool>,
    pub(crate) last_step: Option<u64>,
}

impl Expectations {
    /// Checks the welcome of the step owner.
    pub(super) fn check(self, shard: ShardId, welcome: &Welcome) -> Result<(), Error> {
        let unexpected = |setting, expected: &str, found: &str| {
            let expected = expected.to_owned();
            let found = found.to_owned();
            Err(Error::Unexpected { shard, setting, expected, found })
        };
        let mode = |synchronous| if synchronous { "synchronous" } else { "asynchronous" };
        let is_synchronous = matches!(welcome.mode, ModeIs::Synchronous { .. });
        if let Some(expected) = self.synchronous.filter(|&expected| expected != is_synchronous) {
            return unexpected("mode", mode(expected), mode(is_synchronous));
        }
        let identity = Identity::from_wire(&welcome.identity);
        // A server that does not name its last step is another implementation.
        if let (Some(expected), Some(found)) = (self.last_step, identity.free_field("last_step"))
            && found != expected.to_string()
        {
            return unexpected("last_step", &expected.to_string(), found);
        }
        Ok(())
    }
}
