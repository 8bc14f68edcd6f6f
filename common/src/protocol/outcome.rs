//! What became of a push, and the right to make the next one.

use super::wire::{wire_enum, wire_struct};
use crate::ids::{GlobalStep, TokenId};

wire_enum! {
    /// What became of a push on one shard. A value, never an error: each of these is settled.
    ///
    /// In synchronous mode the step owner's is what became of the push as a whole.
    #[derive(Copy, Eq)]
    Outcome {
        /// Applied to the variables (asynchronous mode, and plain variables in every mode).
        1 => Applied {
            /// The shard's version after the push: how many pushes it has applied.
            version: u64,
            /// The global step after the push; known to the step owner, 0 elsewhere.
            step: GlobalStep,
            /// How many global steps were made since the gradient's values were pulled, or its token was
            /// granted; known to the step owner, 0 elsewhere.
            staleness: u64,
        },
        /// Admitted to a step for good (synchronous mode); said by the step owner alone.
        2 => Accepted {
            /// The step that takes the gradient.
            step: GlobalStep,
        },
        /// Dropped, because its step has passed, or its values were too old.
        3 => Stale {
            /// The step that is current now.
            current: GlobalStep,
        },
        /// Dropped at the client's own wish, before it was whole.
        4 => Withdrawn {},
        /// Whole on this shard, and kept (synchronous mode): whether it becomes a part of the step is
        /// the step owner's answer, who never says this.
        5 => Held {},
    }
}

wire_enum! {
    /// What a shard knows of a push that a client asks about.
    PushState {
        /// No part of it has come, or what came was given up with its connection.
        1 => Unknown {},
        /// It is being received.
        2 => Receiving {
            /// How many of its bytes are here.
            bytes: u64,
        },
        /// It is settled.
        3 => Settled {
            /// How.
            outcome: Outcome,
        },
        /// It is older than what the window remembers: it was settled, but how is forgotten.
        4 => TooOld {
            /// The oldest sequence number still remembered.
            oldest: u64,
        },
    }
}

wire_struct! {
    /// The right to contribute one gradient to one step.
    #[derive(Copy, Eq)]
    Grant {
        /// The token; never reused.
        token: TokenId,
        /// Goes up each time the token is taken back and given out again.
        generation: u32,
        /// The global step at which it was granted.
        step: GlobalStep,
        /// The room reserved on this shard for the push that spends it; 0 for none.
        push_slot: u32,
    }
}
