//! Shared memory for clients of the same host.

use crate::protocol::limits;
use crate::protocol::wire::{List, wire_struct};

wire_struct! {
    /// Requests shared memory of the shard for the client to map (worker, chief, reader).
    ///
    /// It needs a Unix socket of the same host, and variables that have values. The client sends
    /// nothing else while it waits for the answer. After a refusal everything still works over the
    /// connection.
    ShareValues {
        /// The kinds of memory requested, as bits: 1 for values, which the client then reads in
        /// place. Other bits are ignored.
        wants: u64,
    }
}
wire_struct! {
    /// Describes the shared values of a shard.
    ///
    /// The first byte of the frame carries three descriptors: block table, reader slot, values, in
    /// this order. `pushpull_common::shared_values` says how both sides use them. They are valid
    /// for as long as the connection and the restore epoch last.
    SharedValues {
        /// The kinds of memory that are shared, as bits.
        shares: u64,
        /// The generation of the process that owns the values.
        owner_generation: u64,
        /// The bytes of the block table, which is read only.
        block_table_bytes: u64,
        /// The bytes of the reader slot.
        reader_slot_bytes: u64,
        /// The bytes of the values, which are read only.
        values_bytes: u64,
        /// The byte offset of the first block in the values.
        offset: u64,
        /// The bytes of a block: a power of two.
        block_bytes: u64,
        /// The bytes from the start of a block to the start of the next.
        stride: u64,
        /// The number of blocks.
        blocks: u32,
        /// The number of logical blocks, which hold the shard's variables in order: the entries of
        /// the block table.
        logical_blocks: u32,
    }
}

wire_struct! {
    /// Requests a *push buffer*: shared memory into which the client writes its pushes (worker,
    /// chief).
    ///
    /// It needs a Unix socket of the same user, and variables that have values. A connection has at
    /// most one push buffer. The client sends nothing else while it waits for the answer. After a
    /// refusal pushes still go over the connection.
    SharePushBuffer {}
}
wire_struct! {
    /// Describes the push buffer of a client.
    ///
    /// The first byte of the frame carries a descriptor for reading and writing. The buffer is
    /// valid for as long as the connection and the restore epoch last.
    SharedPushBuffer {
        /// The bytes of the memory.
        bytes: u64,
        /// The byte offset of the first push slot: a multiple of 4096.
        first: u64,
        /// The bytes from the start of a push slot to the start of the next: a multiple of 4096.
        stride: u64,
        /// The numbers of the push slots, in order, as used in pushes. They are this client's until
        /// the connection ends. Each is laid out as the shard's layout.
        push_slots: List<u32, { limits::BUFFER_SLOTS_MAX }>,
    }
}
