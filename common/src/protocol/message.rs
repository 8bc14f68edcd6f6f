//! The messages of the protocol: one struct for each kind, and the enum of all kinds.

use super::error::ProtocolError;
use super::limits;
use super::outcome::{Grant, Outcome, PushState};
use super::refusal::{Detail, Refusal};
use super::wire::{FieldReader, List, Text, Wire, wire_enum, wire_struct};
use crate::codec::Encodings;
use crate::ids::{
    ClientEpoch, GlobalStep, Incarnation, PartitionId, RestoreEpoch, ShardId, TokenId,
};

/// An identity on the wire: names and values, in order of names.
pub type IdentityFields = List<
    (Text<{ limits::IDENTITY_NAME_BYTES_MAX }>, Text<{ limits::IDENTITY_VALUE_BYTES_MAX }>),
    { limits::IDENTITY_FIELDS_MAX },
>;

wire_enum! {
    /// What a peer may do; checked for every message.
    #[derive(Copy, Eq)]
    Role {
        /// Takes tokens, pulls and pushes.
        1 => Worker {},
        /// A worker that also declares and initializes the variables and ends training.
        2 => Chief {},
        /// Only pulls, without tokens; holds no lease.
        3 => Reader {},
        /// Stops and saves; reserved.
        4 => Admin {},
        /// Another ps task.
        5 => Peer {},
    }
}

impl Role {
    /// Returns the role's code on the wire.
    pub fn code(self) -> u8 {
        match self {
            Role::Worker {} => 1,
            Role::Chief {} => 2,
            Role::Reader {} => 3,
            Role::Admin {} => 4,
            Role::Peer {} => 5,
        }
    }

    /// Returns whether the role is a member: it holds a lease and may push.
    pub fn is_member(self) -> bool {
        matches!(self, Role::Worker {} | Role::Chief {})
    }
}

wire_enum! {
    /// Whether bodies have a checksum.
    #[derive(Copy, Eq)]
    BodyCrc {
        /// Every body has one.
        1 => On {},
        /// Bodies have none.
        2 => Off {},
        /// In a request: the server decides by the transport.
        3 => Auto {},
    }
}

wire_enum! {
    /// The update mode of a shard.
    #[derive(Copy, Eq)]
    ModeIs {
        /// Each push is applied at once.
        1 => Asynchronous {
            /// Whether the step owner drops stale gradients. A client then sends the last part to
            /// the other shards only after the owner has applied the push.
            owner_first: bool,
        },
        /// A step combines several pushes.
        2 => Synchronous {
            /// The number of gradients in a step.
            replicas_to_aggregate: u32,
            /// The expected number of replicas, backup replicas included.
            total_num_replicas: u32,
        },
    }
}

wire_enum! {
    /// The handling of NaN and infinities in a push.
    #[derive(Copy, Eq)]
    NonFinitePolicy {
        /// The push is refused: by the worker before a byte is sent, and again by the server.
        1 => Reject {},
        /// The push is applied and the server counts it.
        2 => Count {},
        /// No check.
        3 => Allow {},
    }
}

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
    /// The identity of a checkpoint.
    #[derive(Eq)]
    CheckpointId {
        /// The name of its folder.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
        /// The restore epoch in which it was saved.
        epoch: RestoreEpoch,
        /// The global step that it holds.
        step: GlobalStep,
    }
}

wire_struct! {
    /// A corrupt checkpoint that was passed over for an older one.
    #[derive(Eq)]
    PassedOver {
        /// The name of its folder.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
        /// The fault in it.
        cause: Detail,
    }
}

wire_struct! {
    /// Opens a session with one shard.
    Hello {
        /// The oldest protocol version that the client speaks.
        version_oldest: u16,
        /// The newest protocol version that the client speaks.
        version_newest: u16,
        /// The role that the client requests.
        role: Role,
        /// The client's job.
        job: Text<{ limits::JOB_BYTES_MAX }>,
        /// The client's task index.
        task: u32,
        /// The shard that the session is for.
        shard: ShardId,
        /// Chosen by the client at each start.
        incarnation: Incarnation,
        /// The epoch assigned to this incarnation; 0 requests one from the step owner.
        client_epoch: ClientEpoch,
        /// The restore epoch that the client has joined on this shard; 0 before.
        seen_epoch: RestoreEpoch,
        /// The newest global step known to the client.
        seen_step: GlobalStep,
        /// SHA-256 of the client's catalogue; absent before it has joined.
        catalogue: Option<[u8; 32]>,
        /// Whether the client requests checksums for bodies.
        body_crc: BodyCrc,
        /// The facts that must agree, as known to the client.
        identity: IdentityFields,
        /// Reserved for authentication; empty in this version.
        auth: List<u8, { limits::AUTH_BYTES_MAX }>,
    }
}

wire_struct! {
    /// Accepts a session.
    Welcome {
        /// The protocol version of the session.
        version: u16,
        /// The number of shards of each ps task.
        shards: u16,
        /// The client's epoch, assigned by the step owner or repeated by another shard.
        client_epoch: ClientEpoch,
        /// The update mode.
        mode: ModeIs,
        /// The lease: a member that is silent for this long is lost.
        lease_ms: u32,
        /// The largest part that the shard accepts.
        part_bytes_max: u32,
        /// Whether bodies have checksums in this session: `On` or `Off`.
        body_crc: BodyCrc,
        /// The handling of non-finite values.
        non_finite: NonFinitePolicy,
        /// The encodings that the shard can decode; those of values it can also encode.
        encodings: Encodings,
        /// The state of the variables.
        catalogue: CatalogueState,
        /// The restore epoch. It rises when the cluster restores a checkpoint or is initialized
        /// again; 0 before the variables of this shard have had values.
        restore_epoch: RestoreEpoch,
        /// The global step at which that epoch began.
        restored_step: GlobalStep,
        /// The address of a Unix socket of the same server, in the form of a cluster's addresses;
        /// empty if there is none. There the server shares memory with clients of its host and
        /// user. A client that is connected in another way may connect there instead.
        unix_address: Text<{ limits::UNIX_ADDRESS_BYTES_MAX }>,
        /// The facts that must agree, as known to the server.
        identity: IdentityFields,
        /// Reserved for authentication; empty in this version.
        auth: List<u8, { limits::AUTH_BYTES_MAX }>,
    }
}

wire_struct! {
    /// Answers any request with a refusal.
    Refused {
        /// The reason.
        refusal: Refusal,
    }
}

wire_struct! {
    /// Renews a lease. Any byte does; a heartbeat is for times without other traffic.
    Heartbeat {}
}
wire_struct! {
    /// Answers a heartbeat, so that the client knows that the server is alive.
    HeartbeatAnswer {}
}

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
        /// The restore epoch of this shard, as in [`Welcome`].
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
    /// Requests the newest valid checkpoint from the step owner (chief).
    FindCheckpoint {}
}
wire_struct! {
    /// The newest valid checkpoint.
    CheckpointFound {
        /// The checkpoint; absent if there is none, or if the servers keep no checkpoints.
        checkpoint: Option<CheckpointId>,
    }
}
wire_struct! {
    /// Requests the corrupt checkpoints that the last search for the newest valid one passed over
    /// (chief, to the step owner).
    PassedOverQuery {}
}
wire_struct! {
    /// The corrupt checkpoints that are newer than the newest valid one.
    PassedOverAre {
        /// The newest of them, newest first.
        checkpoints: List<PassedOver, { limits::PASSED_OVER_MAX }>,
    }
}
wire_struct! {
    /// Restores every variable and optimizer slot from a checkpoint and opens the shard (chief).
    ///
    /// A new restore epoch begins, and messages of older epochs are dropped. The answer is `Ready`.
    Restore {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The restore epoch that begins: higher than that of every shard and of the checkpoint.
        epoch: RestoreEpoch,
    }
}
wire_struct! {
    /// Requests a checkpoint of all shards from the step owner (chief, admin). The checkpoint keeps
    /// the body for the user, for example the positions of the data readers.
    Save {}
}
wire_struct! {
    /// A checkpoint is saved, verified and published.
    Saved {
        /// The checkpoint.
        checkpoint: CheckpointId,
    }
}
wire_struct! {
    /// Requests that a shard write its part of a checkpoint (peer: the step owner's task).
    SaveShard {
        /// The name of the checkpoint.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
    }
}
wire_struct! {
    /// A shard's part is written and verified. The body is its entry in the manifest.
    ShardSaved {}
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
        /// The values that the gradient was computed from: their [`Pulled::gradients`]. None if
        /// unknown, and for pushes that are not gradients.
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

wire_struct! {
    /// Ends the training: no client gets another token (chief).
    Finish {}
}
wire_struct! {
    /// The training has ended.
    Finished {}
}
wire_struct! {
    /// Leaves the training and returns this client's tokens.
    Leave {}
}
wire_struct! {
    /// The client has left; the connection may close.
    Left {}
}

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
    /// Step owner to shard: the client epoch of the newest chief; 0 if there has been none.
    ChiefIs {
        /// The client epoch.
        client: ClientEpoch,
    }
}

macro_rules! messages {
    ($($kind:literal => $name:ident, body $limit:expr;)*) => {
        /// Any message of the protocol.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each variant is the struct of the same name")]
        #[non_exhaustive]
        pub enum Message {
            $($name($name),)*
        }

        impl Message {
            /// Every kind that exists, in ascending order.
            pub const KINDS: &'static [u16] = &[$($kind),*];

            /// Returns the code of the message in the header.
            pub fn kind(&self) -> u16 {
                match self {
                    $(Message::$name(_) => $kind,)*
                }
            }

            /// Returns the name of the message.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Message::$name(_) => stringify!($name),)*
                }
            }

            /// Returns the largest body of a message of this kind; `None` for an unknown kind.
            pub fn body_limit(kind: u16) -> Option<u64> {
                match kind {
                    $($kind => Some($limit),)*
                    _ => None,
                }
            }

            /// Appends the meta.
            pub fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Message::$name(fields) => fields.put(out),)*
                }
            }

            /// Decodes the meta of a message of this kind.
            pub fn take(kind: u16, meta: &[u8]) -> Result<Message, ProtocolError> {
                match kind {
                    $($kind => {
                        let mut reader = FieldReader::new(stringify!($name), meta);
                        let fields = $name::take(&mut reader)?;
                        reader.finish()?;
                        Ok(Message::$name(fields))
                    })*
                    found => Err(ProtocolError::Kind { found }),
                }
            }
        }

        $(impl From<$name> for Message {
            fn from(fields: $name) -> Message {
                Message::$name(fields)
            }
        })*
    };
}

messages! {
    1 => Hello, body 0;
    2 => Welcome, body 0;
    3 => Refused, body 0;
    4 => Heartbeat, body 0;
    5 => HeartbeatAnswer, body 0;
    6 => ShareValues, body 0;
    7 => SharedValues, body 0;
    8 => SharePushBuffer, body 0;
    9 => SharedPushBuffer, body 0;
    10 => Declare, body limits::CATALOGUE_BYTES_MAX;
    11 => Declared, body 0;
    12 => Initialize, body 0;
    13 => AwaitReady, body 0;
    14 => Ready, body 0;
    15 => FetchCatalogue, body 0;
    16 => CatalogueIs, body limits::CATALOGUE_BYTES_MAX;
    17 => FindCheckpoint, body 0;
    18 => CheckpointFound, body 0;
    19 => Restore, body 0;
    20 => TokenRequest, body 0;
    21 => Granted, body 0;
    22 => Ended, body 0;
    23 => ReturnToken, body 0;
    24 => Returned, body 0;
    25 => PassedOverQuery, body 0;
    26 => PassedOverAre, body 0;
    30 => Reserve, body 0;
    31 => Reserved, body 0;
    32 => PushPart, body limits::PART_BYTES_MAX;
    33 => PushAnswer, body 0;
    34 => Withdraw, body 0;
    35 => OutcomeQuery, body 0;
    36 => OutcomeIs, body 0;
    37 => PushEncoded, body limits::PART_BYTES_MAX;
    38 => PushShared, body 0;
    40 => Pull, body 0;
    41 => Pulled, body limits::PART_BYTES_MAX;
    42 => PullRows, body limits::PART_BYTES_MAX;
    43 => Rows, body limits::PART_BYTES_MAX;
    44 => PullEncoded, body 0;
    45 => PulledEncoded, body limits::PART_BYTES_MAX;
    46 => PullRowsEncoded, body limits::PART_BYTES_MAX;
    50 => Finish, body 0;
    51 => Finished, body 0;
    52 => Leave, body 0;
    53 => Left, body 0;
    54 => Save, body limits::USER_BLOB_BYTES_MAX;
    55 => Saved, body 0;
    56 => SaveShard, body 0;
    57 => ShardSaved, body limits::CATALOGUE_BYTES_MAX;
    60 => Held, body 0;
    61 => StepApplied, body 0;
    62 => Commit, body 0;
    63 => TokenOver, body 0;
    64 => KeepCut, body 0;
    65 => Recall, body 0;
    66 => Recalled, body 0;
    67 => ChiefIs, body 0;
}
