//! The variables: declared, initialized, described.

use crate::ids::RestoreEpoch;
use crate::protocol::wire::{wire_enum, wire_struct};

wire_enum! {
    /// The state of a shard's variables.
    #[derive(Copy, Eq)]
    CatalogueState {
        /// No variables are declared.
        1 => Absent {},
        /// The variables are declared but have no values.
        2 => Declared {
            /// SHA-256 of the catalogue.
            digest: [u8; 32],
        },
        /// The variables are declared and initialized.
        3 => Ready {
            /// SHA-256 of the catalogue.
            digest: [u8; 32],
        },
    }
}

wire_struct! {
    /// Declares the variables (chief). The body is the encoded catalogue.
    Declare {
        /// SHA-256 of the body.
        digest: [u8; 32],
    }
}
wire_struct! {
    /// The variables are declared and their memory is reserved.
    Declared {
        /// The state of the variables.
        state: CatalogueState,
        /// The restore epoch of this shard, as in [`Welcome`](super::Welcome).
        restore_epoch: RestoreEpoch,
        /// Whether the values have been trained, as known to the step owner: by a step or, in
        /// synchronous mode, a gradient accepted for one.
        trained: bool,
    }
}
wire_struct! {
    /// Gives every unassigned variable its initial value and opens the shard (chief).
    Initialize {
        /// The restore epoch that begins: higher than that of every shard.
        epoch: RestoreEpoch,
    }
}
wire_struct! {
    /// Waits until the shard's variables have values.
    AwaitReady {}
}
wire_struct! {
    /// The shard's variables have values.
    Ready {
        /// SHA-256 of the catalogue.
        digest: [u8; 32],
    }
}
wire_struct! {
    /// Requests the catalogue.
    FetchCatalogue {}
}
wire_struct! {
    /// Returns the catalogue: the body is its encoding.
    CatalogueIs {
        /// SHA-256 of the body.
        digest: [u8; 32],
    }
}
