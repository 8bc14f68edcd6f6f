//! Calls: which calls of a coordinator have settled on a shard, and pushes that count once for a
//! call however often the call is executed.

use super::pushes::{PushEncoded, PushPart, PushShared};
use crate::ids::{CallEpoch, CallNumber, CallSource};
use crate::protocol::limits;
use crate::protocol::outcome::CallRef;
use crate::protocol::wire::{Text, wire_struct};

wire_struct! {
    /// Opens the calls of a coordinator on a shard under a higher epoch: creates the source, or
    /// resumes it. Pushes of calls under older epochs are refused from then on.
    OpenCalls {
        /// The coordinator's name, not empty.
        name: Text<{ limits::COORDINATOR_NAME_BYTES_MAX }>,
        /// To the step owner 0, for a new epoch; to another shard the source that the step owner
        /// has answered.
        source: CallSource,
        /// To the step owner 0; to another shard the epoch that the step owner has assigned.
        epoch: CallEpoch,
    }
}
wire_struct! {
    /// The calls of a coordinator on a shard.
    CallsAre {
        /// The number space of the calls.
        source: CallSource,
        /// The newest epoch.
        epoch: CallEpoch,
        /// Every call up to this number has settled on this shard.
        settled: CallNumber,
        /// The calls behind it that have settled: bit i is for the number `settled + 1 + i`.
        window: u64,
        /// The digest of call 1, if it has counted here: see [`CallRef`]. 0 if it is unknown.
        first_digest: u64,
        /// The newest call up to `settled` whose digest is known; 0 if there is none.
        digest_of: CallNumber,
        /// The digest of that call and of all before it.
        digest: u64,
    }
}
wire_struct! {
    /// Requests the calls of a coordinator, without a new epoch.
    CallsQuery {
        /// The coordinator's name.
        name: Text<{ limits::COORDINATOR_NAME_BYTES_MAX }>,
    }
}
wire_struct! {
    /// Forgets the calls of a coordinator that ends. First to the step owner, which then refuses
    /// every push of them.
    CloseCalls {
        /// The coordinator's name.
        name: Text<{ limits::COORDINATOR_NAME_BYTES_MAX }>,
        /// The coordinator's epoch. An older one closes nothing.
        epoch: CallEpoch,
    }
}
wire_struct! {
    /// The shard does not know the calls of this coordinator any more.
    CallsClosed {}
}
wire_struct! {
    /// A [`PushPart`] of a gradient that a call makes.
    CallPart {
        /// The part.
        part: PushPart,
        /// The call, the same in all parts of the push.
        call: CallRef,
    }
}
wire_struct! {
    /// A [`PushEncoded`] of a gradient that a call makes.
    CallEncoded {
        /// The part.
        encoded: PushEncoded,
        /// The call, the same in all parts of the push.
        call: CallRef,
    }
}
wire_struct! {
    /// A [`PushShared`] of a gradient that a call makes.
    CallShared {
        /// The ranges. Boxed, so that no message is larger for it.
        shared: Box<PushShared>,
        /// The call, the same in all parts of the push.
        call: CallRef,
    }
}
