//! Rings: ranks that meet at a rendezvous, the links between neighbours, and collective operations.

use crate::codec::Codec;
use crate::ids::Incarnation;
use crate::protocol::limits;
use crate::protocol::refusal::Detail;
use crate::protocol::wire::{List, Text, wire_enum, wire_struct};

/// The addresses under which a rank takes the link of its predecessor, in the order in which that
/// tries them.
pub type RankAddresses =
    List<Text<{ limits::RANK_ADDRESS_BYTES_MAX }>, { limits::RANK_ADDRESSES_MAX }>;

wire_struct! {
    /// Asks the rendezvous for a place in its next ring. It follows a `Hello` of the role `rank`,
    /// and is sent again by a member that wants to be in the ring after its own.
    RingJoin {
        /// The stable id of the member. A process that is started again under it gets its index
        /// back.
        id: Text<{ limits::RANK_ID_BYTES_MAX }>,
        /// The index that the launcher has given to the member; absent if the rendezvous assigns
        /// one.
        index: Option<u32>,
        /// The number of members that the first ring waits for.
        size: u32,
        /// The host of the member, for the reports of others.
        host: Text<{ limits::HOST_BYTES_MAX }>,
        /// The addresses of the member.
        addresses: RankAddresses,
        /// The epoch of the last ring that the member was in; 0 for none.
        epoch: u64,
        /// The members of that ring, by index, that this member can do without: it has seen that
        /// their processes are gone. Only a rendezvous that has not formed that ring reads them.
        gone: List<u32, { limits::RING_SIZE_MAX }>,
    }
}
wire_struct! {
    /// Names the members that a forming ring waits for. Sent to each that waits, again and again.
    RingWaits {
        /// The number of members that have come.
        came: u32,
        /// The number of members of the ring; the least that it may have if it is elastic.
        size: u32,
        /// The first indices that have not come.
        missing: List<u32, { limits::RING_MISSING_MAX }>,
    }
}
wire_struct! {
    /// Names a member of the ring that a `RingFormed` completes.
    RingMember {
        /// The position in the ring.
        rank: u32,
        /// The stable index.
        index: u32,
        /// The process, as its `Hello` names it. A link to it must name it, too: only members of its
        /// rings can.
        process: Incarnation,
        /// The host.
        host: Text<{ limits::HOST_BYTES_MAX }>,
        /// The addresses.
        addresses: RankAddresses,
    }
}
wire_struct! {
    /// The ring has formed. As many `RingMember`s as its size came before, in order of ranks.
    RingFormed {
        /// Identifies the rendezvous: chosen at random when it starts.
        rendezvous: u64,
        /// The epoch of the ring: higher than that of every ring before.
        epoch: u64,
        /// The rank of the receiver.
        rank: u32,
        /// The number of members.
        size: u32,
        /// The lease: a member that is silent for this long is lost.
        lease_ms: u32,
        /// The rank in whose process the rendezvous is; absent if that is in no member.
        serving: Option<u32>,
    }
}
wire_struct! {
    /// Confirms a `RingFormed`: from now on the member asks for other rings only as a member of this
    /// one. Once all its members have said so, the ring has replaced those before.
    RingEntered {
        /// The epoch of the ring.
        epoch: u64,
    }
}
wire_struct! {
    /// Answers a `RingJoin` of a new member: the rendezvous is in another process now. Sent by a rank
    /// at the address where the ring has met first.
    RingMoved {
        /// The addresses of the rank that serves.
        addresses: RankAddresses,
    }
}
wire_struct! {
    /// Members wait for the next ring. Sent to the members of the present one.
    RingJoiners {
        /// The number of members that wait.
        count: u32,
    }
}
wire_enum! {
    /// The reason why a ring is over.
    RingEnd {
        /// A rank was silent for a lease, or its connection broke.
        1 => Lost {
            /// The rank.
            rank: u32,
            /// Its host.
            host: Text<{ limits::HOST_BYTES_MAX }>,
            /// How long it had been silent, in milliseconds.
            silent_ms: u64,
            /// The fault of its connection, in words; empty if it was silent.
            detail: Detail,
        },
        /// Two ranks perform different operations under one number.
        2 => Difference {
            /// The number of the operation.
            number: u64,
            /// The one rank.
            rank: u32,
            /// Its operation.
            operation: RingOperation,
            /// The other rank.
            other_rank: u32,
            /// The operation of that.
            other: RingOperation,
        },
        /// A rank has given an operation up.
        3 => GivenUp {
            /// The rank.
            rank: u32,
            /// The reason, in words.
            detail: Detail,
        },
        /// A rank has left.
        4 => Left {
            /// The rank.
            rank: u32,
        },
        /// The members form another ring.
        5 => Regrouped {},
    }
}
wire_struct! {
    /// The ring is over. A member sends it to the rendezvous, which sends it to all.
    RingOver {
        /// The epoch of the ring.
        epoch: u64,
        /// The reason.
        end: RingEnd,
    }
}

wire_struct! {
    /// Opens the link from a rank to its successor. It follows a `Hello` of the role `rank`.
    RingLink {
        /// The rendezvous of the ring.
        rendezvous: u64,
        /// The epoch of the ring.
        epoch: u64,
        /// The rank of the sender.
        rank: u32,
        /// The process that the link leads to, as a `RingMember` has named it.
        to: Incarnation,
    }
}
wire_struct! {
    /// Accepts the link of the predecessor. Over a Unix socket it may offer memory that the successor
    /// has made, with its descriptor; the predecessor answers with the same message.
    RingLinked {
        /// The bytes that a pipe in this memory holds; 0 to send all frames through the socket.
        memory: u64,
    }
}
wire_enum! {
    /// A collective operation.
    #[derive(Copy, Eq)]
    Collective {
        /// The sum of all contributions, on every rank.
        1 => ReduceSum {},
        /// Their mean.
        2 => ReduceMean {},
        /// Their minimum.
        3 => ReduceMin {},
        /// Their maximum.
        4 => ReduceMax {},
        /// The part of the sum that belongs to the rank.
        5 => ScatterSum {},
        /// The part of the mean.
        6 => ScatterMean {},
        /// The part of the minimum.
        7 => ScatterMin {},
        /// The part of the maximum.
        8 => ScatterMax {},
        /// The contributions of all ranks, one after the other.
        9 => Gather {},
        /// The contribution of one rank.
        10 => Broadcast {
            /// The rank.
            root: u32,
        },
        /// Nothing but the knowledge that all ranks have come.
        11 => Barrier {},
    }
}
wire_enum! {
    /// The codec of an encoded reduction, under the code of its encoding.
    #[derive(Copy)]
    RingCodec {
        /// IEEE 754 half precision.
        1 => F16 {},
        /// The upper half of an f32.
        2 => Bf16 {},
        /// One byte an element.
        3 => Int8 {},
        /// One bit an element.
        4 => OneBit {},
        /// The elements with the largest magnitudes.
        5 => TopK {
            /// The share of each stretch that is sent.
            fraction: f64,
        },
    }
}
impl RingCodec {
    /// Returns how a codec is named on a ring; `None` for one whose encoded length depends on the
    /// elements, because all ranks must know the length of each part.
    pub fn of(codec: Codec) -> Option<RingCodec> {
        match codec {
            Codec::F16 => Some(RingCodec::F16 {}),
            Codec::Bf16 => Some(RingCodec::Bf16 {}),
            Codec::Int8 => Some(RingCodec::Int8 {}),
            Codec::OneBit => Some(RingCodec::OneBit {}),
            Codec::TopK { fraction } => Some(RingCodec::TopK { fraction }),
            Codec::Threshold { .. } => None,
        }
    }

    /// Returns the codec. Its parameter may be out of range.
    pub fn codec(self) -> Codec {
        match self {
            RingCodec::F16 {} => Codec::F16,
            RingCodec::Bf16 {} => Codec::Bf16,
            RingCodec::Int8 {} => Codec::Int8,
            RingCodec::OneBit {} => Codec::OneBit,
            RingCodec::TopK { fraction } => Codec::TopK { fraction },
        }
    }
}

wire_struct! {
    /// Describes the operation that the parts behind it belong to. Every rank sends its own to its
    /// successor, which compares it with its own.
    RingOperation {
        /// The operation.
        collective: Collective,
        /// The code of the elements: that of a tensor's type, or 16 for i32.
        elements: u8,
        /// The number of elements that the rank contributes.
        count: u64,
        /// The name of the tensor; empty if it has none.
        name: Text<{ limits::NAME_BYTES_MAX }>,
        /// The codec of what travels; absent if plain elements do.
        codec: Option<RingCodec>,
    }
}
wire_struct! {
    /// Bytes of one pass of the operation whose number is the header's sequence.
    RingPart {
        /// The pass of the operation.
        pass: u32,
        /// The offset of the bytes in what the pass carries.
        offset: u64,
    }
}
