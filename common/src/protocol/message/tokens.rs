//! Tokens between a client and the step owner.

use crate::data_set::{DataSet, DataSetError};
use crate::ids::TokenId;
use crate::protocol::limits;
use crate::protocol::outcome::Grant;
use crate::protocol::wire::{Text, wire_enum, wire_struct};

wire_enum! {
    /// The reason why no more tokens are granted.
    #[derive(Copy, Eq)]
    EndReason {
        /// The last step is reached, or reserved for tokens that are granted.
        1 => LastStep {},
        /// The chief has finished the training.
        2 => Finished {},
        /// Every batch of the declared data set is spent.
        3 => DataEnd {},
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
wire_struct! {
    /// Ends an unspent token, and spends its batch of the declared data set without a gradient. The
    /// answer is [`Returned`].
    SkipBatch {
        /// The token.
        token: TokenId,
        /// The token's generation.
        generation: u32,
    }
}
wire_struct! {
    /// Declares the data set that this client reads. The first client of a training defines it, and
    /// every other must declare the same. With a data set every token has a batch of it.
    DeclareData {
        /// The name.
        name: Text<{ limits::DATA_NAME_BYTES_MAX }>,
        /// The number of samples.
        samples: u64,
        /// The number of samples of a batch.
        batch: u32,
        /// The seed of the order of epochs; none for the order of the indices.
        seed: Option<u64>,
        /// The number of epochs; none if the data have no end.
        epochs: Option<u64>,
        /// Whether a last batch that would be shorter is left out of every epoch.
        drop_remainder: bool,
    }
}
wire_struct! {
    /// The data set is declared.
    DataDeclared {
        /// The number of batches that were granted or reserved at least once, of all epochs.
        begun: u64,
        /// The number of those that are not spent yet.
        unspent: u64,
    }
}

impl From<&DataSet> for DeclareData {
    fn from(set: &DataSet) -> DeclareData {
        DeclareData {
            name: Text::clipped(set.name()),
            samples: set.samples(),
            batch: set.batch(),
            seed: set.seed(),
            epochs: set.epoch_limit(),
            drop_remainder: set.drops_remainder(),
        }
    }
}

impl TryFrom<&DeclareData> for DataSet {
    type Error = DataSetError;

    fn try_from(declared: &DeclareData) -> Result<DataSet, DataSetError> {
        let &DeclareData { ref name, samples, batch, seed, epochs, drop_remainder } = declared;
        DataSet::of_fields(name.as_str(), samples, batch, seed, epochs, drop_remainder)
    }
}
