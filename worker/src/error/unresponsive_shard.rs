//! The shards that a call waits for, with the last that is known of each.

use std::fmt;

use pushpull_common::ids::ShardId;

/// A shard that has not answered, with its last known state.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnresponsiveShard {
    /// The shard.
    pub shard: ShardId,
    /// Its address.
    pub address: String,
    /// The last transport error, the state of the connection, or what the shard waits for.
    pub last: String,
}

impl UnresponsiveShard {
    /// Names a shard and what is known of it.
    #[doc(hidden)]
    pub fn new(shard: ShardId, address: String, last: String) -> UnresponsiveShard {
        UnresponsiveShard { shard, address, last }
    }
}

impl fmt::Display for UnresponsiveShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} ({})", self.shard, self.address, self.last)
    }
}

/// Shards that have not answered. `Display` lists them, separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnresponsiveShards(pub Vec<UnresponsiveShard>);

impl fmt::Display for UnresponsiveShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, silent) in self.0.iter().enumerate() {
            write!(f, "{}{silent}", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}
