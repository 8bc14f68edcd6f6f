//! Tokens between a client and the step owner.

use crate::ids::TokenId;
use crate::protocol::outcome::Grant;
use crate::protocol::wire::{wire_enum, wire_struct};

wire_enum! {
    /// The reason why no more tokens are granted.
    #[derive(Copy, Eq)]
    EndReason {
        /// The last step is reached, or reserved for tokens that are granted.
        1 => LastStep {},
        /// The chief has finished the training.
        2 => Finished {},
    }
}

wire_struct! {
    /// Requests a token from the step owner; waits until there is one or training has ended.
    TokenRequest {
        /// The newest token that this client has received; 0 for none. If the owner has granted it
        /// a newer one, that answer was lost and the token is granted again.
        newest: TokenId,
    }
}
wire_struct! {
    /// Grants a token.
    Granted {
        /// The token and its push slot.
        grant: Grant,
    }
}
wire_struct! {
    /// No more tokens will be granted.
    Ended {
        /// The reason.
        reason: EndReason,
    }
}
wire_struct! {
    /// Returns an unspent token.
    ReturnToken {
        /// The token.
        token: TokenId,
        /// The token's generation.
        generation: u32,
    }
}
wire_struct! {
    /// Confirms that a token is returned; its number is not granted again.
    Returned {}
}
