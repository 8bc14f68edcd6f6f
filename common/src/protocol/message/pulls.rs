//! Pulls of values and of rows.

use crate::ids::PartitionId;
use crate::protocol::limits;
use crate::protocol::wire::{List, wire_enum, wire_struct};

wire_enum! {
    /// The partitions of a shard that a pull requests.
    Selection {
        /// All partitions.
        1 => All {},
        /// The named partitions, in ascending order.
        2 => Partitions {
            /// Their indices in the catalogue.
            partitions: List<PartitionId, { limits::SELECTION_MAX }>,
        },
        /// All partitions that are not sparse.
        3 => Dense {},
    }
}

wire_struct! {
    /// Requests values of at least the step in the header.
    ///
    /// In synchronous mode every shard waits for that step, and the step in the header of its
    /// answer is the number of steps that the shard has applied.
    Pull {
        /// The partitions to pull.
        selection: Selection,
    }
}
wire_struct! {
    /// One part of the answer to a pull. The body is a range of the shard's layout. All parts of an
    /// answer are of one version.
    Pulled {
        /// The version: the number of pushes that the shard had applied.
        version: u64,
        /// The number of gradients among them.
        gradients: u64,
        /// The byte offset of the body in the shard's layout.
        offset: u64,
        /// Whether this is the last part.
        last: bool,
    }
}

wire_struct! {
    /// Requests rows of a sparse partition, of at least the step in the header. The body is the row
    /// numbers within the partition, in any order: a u32 each, or a u64 id each for a table.
    PullRows {
        /// The partition's index in the catalogue.
        partition: PartitionId,
    }
}
wire_struct! {
    /// Returns the requested rows, all of one version. The body is the rows back to back, in the
    /// order of the request; if they were requested encoded, all of them are one stretch.
    Rows {
        /// The version: the number of pushes that the shard had applied.
        version: u64,
        /// The number of gradients among them.
        gradients: u64,
    }
}
wire_struct! {
    /// Requests values as [`Pull`] does, in a shorter form. The answer is [`PulledEncoded`].
    PullEncoded {
        /// The request, apart from the form.
        pull: Pull,
        /// The code of the encoding: one of values.
        encoding: u8,
    }
}
wire_struct! {
    /// One part of the answer to [`PullEncoded`]. The body is a range of the shard's layout,
    /// partition by partition: a stretch each if trainable, otherwise as stored.
    PulledEncoded {
        /// The part, apart from the form of its body.
        part: Pulled,
        /// The length of the range in bytes.
        bytes: u64,
    }
}

wire_struct! {
    /// Requests rows of a trainable variable as [`PullRows`] does, in a shorter form. The answer is
    /// [`Rows`].
    PullRowsEncoded {
        /// The request, apart from the form.
        pull: PullRows,
        /// The code of the encoding: one of values.
        encoding: u8,
    }
}
