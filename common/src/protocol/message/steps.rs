//! Messages between the step owner and the other shards.

use crate::ids::{ClientEpoch, Sequence, ShardId, TokenId};
use crate::protocol::limits;
use crate::protocol::wire::{List, wire_struct};

wire_struct! {
    /// Shard to step owner: it holds the push of this token whole (synchronous mode).
    ///
    /// Sent again after a reconnect. If the token is over, the answer is [`TokenOver`].
    Held {
        /// The token that the push spends.
        token: TokenId,
        /// The epoch of the pushing client: only its holder may spend a token.
        client: ClientEpoch,
        /// The shard.
        shard: ShardId,
        /// The sum of the squares of the gradient's elements on the shard, if gradients are clipped
        /// by their global norm; otherwise 0.
        squares: f64,
    }
}
wire_struct! {
    /// Shard to step owner: it takes part and has applied the number of steps in the header
    /// (synchronous mode). Sent again after a reconnect, and periodically.
    StepApplied {
        /// The shard.
        shard: ShardId,
    }
}
wire_struct! {
    /// Step owner to shard: these pushes make the step in the header, counted from 0 (synchronous
    /// mode).
    ///
    /// The order is part of the decision. The decision is final and may be sent again.
    Commit {
        /// The tokens that the pushes spend, and the factor of each gradient.
        pushes: List<(TokenId, f64), { limits::STEP_PUSHES_MAX }, 8>,
    }
}
wire_struct! {
    /// Step owner to shard: the push of this token belongs to no step (synchronous mode).
    TokenOver {
        /// The token.
        token: TokenId,
    }
}
wire_struct! {
    /// Step owner to shard: keep the values after the step in the header, for a checkpoint that
    /// will be requested (synchronous mode).
    KeepCut {}
}

wire_struct! {
    /// Step owner to shard: it takes this token back (asynchronous mode).
    ///
    /// A shard that has not applied the push closes the client's connection, so that nothing in
    /// flight arrives. May be sent again.
    Recall {
        /// The token.
        token: TokenId,
        /// The epoch of the client that holds it.
        client: ClientEpoch,
    }
}
wire_struct! {
    /// Answers [`Recall`], shard to step owner.
    Recalled {
        /// The token.
        token: TokenId,
        /// The shard.
        shard: ShardId,
        /// Whether this shard has applied the push of the token, or holds it whole and will. If
        /// not, the shard applies it only after the step owner has answered its client that it is
        /// applied.
        applied: bool,
    }
}
wire_struct! {
    /// Step owner to shard: which gradients of an absent client has the shard applied (asynchronous
    /// mode)? May be sent again.
    AuditPushes {
        /// The epoch of the client.
        client: ClientEpoch,
        /// Whether this incarnation of the client has ended. The shard closes its connection, and
        /// fences it before it answers.
        ends: bool,
    }
}
wire_struct! {
    /// Answers [`AuditPushes`], shard to step owner.
    PushesAudited {
        /// The epoch of the client.
        client: ClientEpoch,
        /// The shard.
        shard: ShardId,
        /// Whether the client has ended: as in the question.
        ended: bool,
        /// The oldest sequence in the client's push window there: older pushes are settled.
        oldest: Sequence,
        /// The gradients from this sequence on that the shard has applied, or holds whole and will,
        /// with their tokens; without those of calls.
        applied: List<(Sequence, TokenId), { limits::AUDITED_PUSHES_MAX }, 8>,
    }
}
wire_struct! {
    /// Step owner to shard: the client epoch of the newest chief; 0 if there has been none.
    ChiefIs {
        /// The client epoch.
        client: ClientEpoch,
    }
}
