//! Pushes: push slots, parts and outcomes.

use super::tokens::EndReason;
use crate::ids::TokenId;
use crate::protocol::limits;
use crate::protocol::outcome::{Grant, Outcome, PushState};
use crate::protocol::wire::{List, wire_enum, wire_struct};

wire_enum! {
    /// The effect of a push on the variables that it covers.
    #[derive(Copy, Eq)]
    Operation {
        /// Applies a gradient with the optimizer; spends a token.
        1 => Gradient {},
        /// Replaces the values.
        2 => Assign {},
        /// Adds to the values of plain variables.
        3 => AssignAdd {},
    }
}

wire_struct! {
    /// Requests a push slot for one whole push; waits until one is free.
    Reserve {}
}
wire_struct! {
    /// A push slot, reserved for one whole push.
    Reserved {
        /// The number of the slot, as used in the push.
        push_slot: u32,
    }
}
wire_struct! {
    /// One part of a push. The body is a range of the shard's layout. Sequence, step and restore
    /// epoch are in the header.
    PushPart {
        /// The effect of the push.
        operation: Operation,
        /// The token that it spends; 0 for none.
        token: TokenId,
        /// The token's generation.
        generation: u32,
        /// The push slot that it uses.
        push_slot: u32,
        /// The byte offset of the body in the shard's layout.
        offset: u64,
        /// On the last part, the total bytes of all parts: the push is whole.
        ///
        /// Only the last part is answered; a refusal answers the first part at fault.
        whole: Option<u64>,
        /// On the last part: whether the answer should carry the next token.
        next: bool,
        /// The values that the gradient was computed from: their
        /// [`Pulled::gradients`](super::Pulled::gradients). None if unknown, and for pushes that
        /// are not gradients.
        read: Option<u64>,
    }
}
wire_struct! {
    /// One part of a gradient with an encoded body: elements of one partition or of its rows.
    ///
    /// The body is a stretch of `docs/codecs.md`. The part gives its position; the partition's last
    /// elements include the padding behind them. The bytes of all parts count decoded elements.
    PushEncoded {
        /// The part, apart from the form of its body.
        part: PushPart,
        /// The code of the encoding.
        encoding: u8,
        /// The number of elements.
        elements: u32,
        /// The factor for each element after decoding: 1 except for gradients of `f16` and `bf16`,
        /// whose product may not be a number of that type.
        factor: f64,
    }
}
wire_struct! {
    /// A byte range of a shard's layout.
    #[derive(Copy, Default, Eq)]
    SharedRange {
        /// The first byte.
        start: u64,
        /// The end, exclusive.
        end: u64,
    }
}
wire_struct! {
    /// Parts of a push that are already in a push slot of the client's push buffer.
    ///
    /// They cover dense variables only. The same push sends parts of sparse variables and tables as
    /// [`PushPart`] or [`PushEncoded`] into the same slot. Sequence, step and restore epoch are in
    /// the header. A client that writes the slot between its last part and the answer changes its
    /// push.
    PushShared {
        /// The effect of the push.
        operation: Operation,
        /// The token that it spends; 0 for none.
        token: TokenId,
        /// The token's generation.
        generation: u32,
        /// The push slot that it uses, one of the push buffer.
        push_slot: u32,
        /// The total bytes on the last part, as in [`PushPart`].
        whole: Option<u64>,
        /// The request for the next token, as in [`PushPart`].
        next: bool,
        /// The version that was read, as in [`PushPart`].
        read: Option<u64>,
        /// The ranges of the parts in the shard's layout.
        ranges: List<SharedRange, { limits::PUSH_SHARED_RANGES_MAX }, { limits::PUSH_SHARED_RANGES_FEW }>,
    }
}
wire_struct! {
    /// The outcome of a push.
    PushAnswer {
        /// The outcome.
        outcome: Outcome,
        /// Whether this repeats the answer to an earlier arrival of the same push.
        duplicate: bool,
        /// The next token (step owner only; never in synchronous mode).
        next: Option<Grant>,
        /// The reason why there is no next token, once training has ended.
        ended: Option<EndReason>,
        /// The push slot reserved for this client's next push; 0 for none.
        push_slot: u32,
    }
}
wire_struct! {
    /// Withdraws a push that is not whole yet; the answer is its outcome.
    Withdraw {}
}
wire_struct! {
    /// Requests the outcome of a push.
    OutcomeQuery {}
}
wire_struct! {
    /// The state of the push that was queried.
    OutcomeIs {
        /// The state.
        state: PushState,
    }
}
