//! Coordinators: which of their effects have settled on a shard, and gradients that count once for
//! an effect, however often they are pushed.

use super::pushes::{PushEncoded, PushPart, PushShared};
use crate::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber};
use crate::protocol::limits;
use crate::protocol::outcome::EffectRef;
use crate::protocol::wire::{Text, wire_struct};

wire_struct! {
    /// Opens a coordinator on a shard under a higher epoch: creates or resumes it. Pushes of
    /// effects under older epochs are refused from then on.
    OpenCoordinator {
        /// The coordinator's name, not empty.
        name: Text<{ limits::COORDINATOR_NAME_BYTES_MAX }>,
        /// To the step owner 0, for a new epoch; to another shard the id that the step owner has
        /// answered.
        coordinator: CoordinatorId,
        /// To the step owner 0; to another shard the epoch that the step owner has assigned.
        epoch: CoordinatorEpoch,
    }
}
wire_struct! {
    /// A coordinator, as a shard knows it.
    CoordinatorIs {
        /// The id, under which the effects are numbered.
        coordinator: CoordinatorId,
        /// The newest epoch.
        epoch: CoordinatorEpoch,
        /// Every effect up to this number has settled on this shard.
        settled: EffectNumber,
        /// The effects behind it that have settled: bit i is for the number `settled + 1 + i`.
        window: u64,
        /// The digest of effect 1, if it has counted here: see [`EffectRef`]. 0 if it is unknown.
        first_digest: u64,
        /// The newest effect up to `settled` whose digest is known; 0 if there is none.
        digest_of: EffectNumber,
        /// The digest of that effect and of all before it.
        digest: u64,
    }
}
wire_struct! {
    /// Requests a coordinator, without a new epoch.
    CoordinatorQuery {
        /// The coordinator's name.
        name: Text<{ limits::COORDINATOR_NAME_BYTES_MAX }>,
    }
}
wire_struct! {
    /// Forgets a coordinator that ends. First to the step owner, which then refuses every push of
    /// its effects.
    CloseCoordinator {
        /// The coordinator's name.
        name: Text<{ limits::COORDINATOR_NAME_BYTES_MAX }>,
        /// The coordinator's epoch. An older one closes nothing.
        epoch: CoordinatorEpoch,
    }
}
wire_struct! {
    /// The shard does not know this coordinator any more.
    CoordinatorClosed {}
}
wire_struct! {
    /// A [`PushPart`] of a gradient that counts once for an effect.
    EffectPart {
        /// The part.
        part: PushPart,
        /// The effect, the same in all parts of the push.
        effect: EffectRef,
    }
}
wire_struct! {
    /// A [`PushEncoded`] of a gradient that counts once for an effect.
    EffectEncoded {
        /// The part.
        encoded: PushEncoded,
        /// The effect, the same in all parts of the push.
        effect: EffectRef,
    }
}
wire_struct! {
    /// A [`PushShared`] of a gradient that counts once for an effect.
    EffectShared {
        /// The ranges. Boxed, so that no message is larger for it.
        shared: Box<PushShared>,
        /// The effect, the same in all parts of the push.
        effect: EffectRef,
    }
}
