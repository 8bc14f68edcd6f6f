//! The outcome of a push, and the grant of a token.

use super::wire::{wire_enum, wire_struct};
use crate::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, TokenId};

wire_enum! {
    /// The final outcome of a push on one shard; a value, never an error.
    ///
    /// In synchronous mode the step owner's outcome is that of the push as a whole.
    #[derive(Copy, Eq)]
    Outcome {
        /// Applied to the variables (asynchronous mode, and plain variables in every mode).
        1 => Applied {
            /// The shard's version after the push: the number of pushes that it has applied.
            version: u64,
            /// The global step after the push; known to the step owner, 0 elsewhere.
            step: GlobalStep,
            /// The number of global steps since the gradient's values were pulled or its token was
            /// granted; known to the step owner, 0 elsewhere.
            staleness: u64,
        },
        /// Admitted to a step for good (synchronous mode); answered only by the step owner.
        2 => Accepted {
            /// The step that the gradient is part of.
            step: GlobalStep,
        },
        /// Dropped, because its step has passed or its values were stale.
        3 => Stale {
            /// The current step.
            current: GlobalStep,
        },
        /// Withdrawn by the client before it was whole.
        4 => Withdrawn {},
        /// Whole on this shard and kept (synchronous mode). The step owner, which never answers
        /// this, decides whether it becomes part of a step.
        5 => Held {},
        /// Not applied on this shard, because its effect had counted there before (asynchronous
        /// mode). On the step owner the token is returned.
        6 => Repeated {},
    }
}

wire_enum! {
    /// The state of a push that a client queries.
    PushState {
        /// No part has arrived, or the parts were dropped with their connection.
        1 => Unknown {},
        /// The push is being received.
        2 => Receiving {
            /// The number of bytes received.
            bytes: u64,
        },
        /// The push is settled.
        3 => Settled {
            /// Its outcome.
            outcome: Outcome,
        },
        /// The push is older than the push window: it was settled, but its outcome is forgotten.
        4 => TooOld {
            /// The oldest sequence number in the window.
            oldest: u64,
        },
    }
}

wire_struct! {
    /// The identity of an effect: the one gradient at most that a scheduled call adds to the
    /// values, however often the call is executed.
    #[derive(Copy, Eq, Hash)]
    EffectId {
        /// The coordinator that schedules the call.
        coordinator: CoordinatorId,
        /// The epoch under which the coordinator scheduled this execution of the call.
        epoch: CoordinatorEpoch,
        /// The number of the effect.
        number: EffectNumber,
    }
}
wire_struct! {
    /// The effect that a push has.
    #[derive(Copy, Eq, Hash)]
    EffectRef {
        /// The effect.
        id: EffectId,
        /// All effects up to this number are settled on every shard, as the coordinator says. Below
        /// the number of this effect.
        settled: EffectNumber,
        /// The digest of the call of this effect and of all calls before it: their functions and
        /// inputs, in order. 0 if it is unknown.
        digest: u64,
    }
}
wire_struct! {
    /// The samples of one batch: `start..start + len` in the order of an epoch.
    #[derive(Copy, Eq, PartialOrd, Ord, Hash)]
    SampleRange {
        /// The epoch, counted from 0.
        epoch: u64,
        /// The position of the first sample in the order of the epoch.
        start: u64,
        /// The number of samples.
        len: u32,
    }
}
wire_struct! {
    /// The right to contribute one gradient to one step.
    #[derive(Copy, Eq)]
    Grant {
        /// The token; never reused.
        token: TokenId,
        /// A check value that every shard derives from the token and the client epoch that holds
        /// it; not 0.
        generation: u32,
        /// The global step at which it was granted.
        step: GlobalStep,
        /// The push slot reserved on this shard for the push that spends it; 0 for none.
        push_slot: u32,
        /// The samples from which the gradient is to be computed, if a data set is declared.
        samples: Option<SampleRange>,
    } behind READ_AHEAD {
        /// The samples that the client will probably be granted next, so that it can read them
        /// ahead.
        ahead: Option<SampleRange>,
    }
}
