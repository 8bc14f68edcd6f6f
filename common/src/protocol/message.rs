//! The sum of everything that can be said, one struct per message.

use super::error::ProtocolError;
use super::limits;
use super::outcome::{Grant, Outcome, PushState};
use super::refusal::{Detail, Refusal};
use super::wire::{List, Reader, Text, Wire, wire_enum, wire_struct};
use crate::codec::Encodings;
use crate::ids::{
    ClientEpoch, GlobalStep, Incarnation, PartitionId, RestoreEpoch, ShardId, TokenId,
};

/// An identity as it travels: names and values in order of names.
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
        /// Pulls only, without tokens; holds no lease.
        3 => Reader {},
        /// Stops and saves; reserved.
        4 => Admin {},
        /// Another ps task.
        5 => Peer {},
    }
}

impl Role {
    /// The role's code on the wire.
    pub fn code(self) -> u8 {
        match self {
            Role::Worker {} => 1,
            Role::Chief {} => 2,
            Role::Reader {} => 3,
            Role::Admin {} => 4,
            Role::Peer {} => 5,
        }
    }

    /// Whether the role is a member of the training: holds a lease, and may push.
    pub fn is_member(self) -> bool {
        matches!(self, Role::Worker {} | Role::Chief {})
    }
}

wire_enum! {
    /// Whether bodies carry a checksum.
    #[derive(Copy, Eq)]
    BodyCrc {
        /// Every body is covered.
        1 => On {},
        /// Bodies are not covered.
        2 => Off {},
        /// In a request: the server decides by the transport.
        3 => Auto {},
    }
}

wire_enum! {
    /// How updates are taken.
    #[derive(Copy, Eq)]
    ModeIs {
        /// Each push is applied at once.
        1 => Asynchronous {
            /// Whether the step owner drops gradients that are too old: the other shards are told that
            /// they are whole only when the owner has applied them.
            owner_first: bool,
        },
        /// Steps are made of several pushes.
        2 => Synchronous {
            /// Gradients that make a step.
            replicas_to_aggregate: u32,
            /// Replicas that are expected, with the backups.
            total_num_replicas: u32,
        },
    }
}

wire_enum! {
    /// What happens to a NaN or an infinity in a push.
    #[derive(Copy, Eq)]
    NonFinitePolicy {
        /// The push is refused, on the worker before a byte is sent and again on the server.
        1 => Reject {},
        /// The push is taken and the server counts it.
        2 => Count {},
        /// Nobody looks.
        3 => Allow {},
    }
}

wire_enum! {
    /// How far the variables of a shard are.
    #[derive(Copy, Eq)]
    CatalogueState {
        /// Nobody has declared any.
        1 => Absent {},
        /// Declared, without values.
        2 => Declared {
            /// SHA-256 of the catalogue.
            digest: [u8; 32],
        },
        /// Declared and initialized.
        3 => Ready {
            /// SHA-256 of the catalogue.
            digest: [u8; 32],
        },
    }
}

wire_enum! {
    /// What a push does to the variables it covers.
    #[derive(Copy, Eq)]
    Operation {
        /// A gradient for the optimizer, with a token.
        1 => Gradient {},
        /// New values.
        2 => Assign {},
        /// Added to plain variables.
        3 => AssignAdd {},
    }
}

wire_enum! {
    /// Which partitions of a shard a pull wants.
    Selection {
        /// All of them.
        1 => All {},
        /// The ones named, in rising order.
        2 => Partitions {
            /// Their indices in the catalogue.
            partitions: List<PartitionId, { limits::SELECTION_MAX }>,
        },
        /// All that are not sparse.
        3 => Dense {},
    }
}

wire_enum! {
    /// Why no more tokens are granted.
    #[derive(Copy, Eq)]
    EndReason {
        /// The last step is reached, or promised to tokens that are out.
        1 => LastStep {},
        /// The chief has finished the training.
        2 => Finished {},
    }
}

wire_struct! {
    /// A checkpoint, by name.
    #[derive(Eq)]
    CheckpointId {
        /// The name of its folder.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
        /// The restore epoch it was saved in.
        epoch: RestoreEpoch,
        /// The global step it holds.
        step: GlobalStep,
    }
}

wire_struct! {
    /// A checkpoint that is not sound, and was passed over for an older one.
    #[derive(Eq)]
    PassedOver {
        /// The name of its folder.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
        /// What is wrong with it.
        cause: Detail,
    }
}

wire_struct! {
    /// Opens a conversation with one shard.
    Hello {
        /// The oldest protocol version the client speaks.
        version_oldest: u16,
        /// The newest protocol version the client speaks.
        version_newest: u16,
        /// What the client wants to be.
        role: Role,
        /// The client's job.
        job: Text<{ limits::JOB_BYTES_MAX }>,
        /// The client's task index.
        task: u32,
        /// The shard the conversation is for.
        shard: ShardId,
        /// Chosen anew by every start of the client.
        incarnation: Incarnation,
        /// The epoch minted for this incarnation; 0 asks the step owner for one.
        client_epoch: ClientEpoch,
        /// The newest restore epoch the client has seen.
        seen_epoch: RestoreEpoch,
        /// The newest global step the client has seen.
        seen_step: GlobalStep,
        /// SHA-256 of the client's catalogue; absent before it has joined.
        catalogue: Option<[u8; 32]>,
        /// Whether the client wants checksums over bodies.
        body_crc: BodyCrc,
        /// What must agree, as far as the client knows it.
        identity: IdentityFields,
        /// Reserved for authentication; empty in this version.
        auth: List<u8, { limits::AUTH_BYTES_MAX }>,
    }
}

wire_struct! {
    /// Accepts a conversation.
    Welcome {
        /// The version both will speak.
        version: u16,
        /// How many shards each ps task has.
        shards: u16,
        /// The client's epoch, minted by the step owner or repeated by another shard.
        client_epoch: ClientEpoch,
        /// How updates are taken.
        mode: ModeIs,
        /// A member that is silent for so long is lost.
        lease_ms: u32,
        /// The largest part the shard takes.
        part_bytes_max: u32,
        /// Whether bodies carry checksums in this conversation: `On` or `Off`.
        body_crc: BodyCrc,
        /// What happens to non-finite values.
        non_finite: NonFinitePolicy,
        /// The encodings that the shard can decode, and, of values, encode.
        encodings: Encodings,
        /// How far the variables are.
        catalogue: CatalogueState,
        /// The restore epoch: goes up each time the cluster goes back to a checkpoint, or begins
        /// anew; 0 before the variables have ever had values here.
        restore_epoch: RestoreEpoch,
        /// The global step at which that epoch began.
        restored_step: GlobalStep,
        /// A Unix socket of the same server, where it lends memory to clients of its host and user, as an
        /// address in a cluster is written; empty if there is none. A client that has come another
        /// way may come that way instead.
        unix_address: Text<{ limits::UNIX_ADDRESS_BYTES_MAX }>,
        /// What must agree, as the server knows it.
        identity: IdentityFields,
        /// Reserved for authentication; empty in this version.
        auth: List<u8, { limits::AUTH_BYTES_MAX }>,
    }
}

wire_struct! {
    /// Answers any request with a typed no.
    Refused {
        /// Why.
        refusal: Refusal,
    }
}

wire_struct! {
    /// Renews a lease. Every byte does; this is for when there is nothing else to say.
    Heartbeat {}
}
wire_struct! {
    /// Answers a heartbeat, so that the client knows the server lives.
    HeartbeatAnswer {}
}

wire_struct! {
    /// Asks for memory of the shard that the client may map, over a Unix socket of the same host, once
    /// the variables have values (worker, chief, reader). Nothing else waits for an answer meanwhile. A
    /// refusal changes nothing: everything can be said over the connection as before.
    ShareValues {
        /// What the client would use, as bits: 1 for values, which it then reads by itself. Others
        /// are passed over.
        wants: u64,
    }
}
wire_struct! {
    /// What is lent. With the first byte of the frame come three descriptors: the board, the desk, the
    /// values, in this order. `pushpull_common::shared_values` is what both sides do with them. They are
    /// lent for as long as the connection lasts, or the restore epoch.
    SharedValues {
        /// What is lent of what was wanted, as bits.
        shares: u64,
        /// Which process has the values, counted.
        owner_generation: u64,
        /// The bytes of the board, which is read only.
        block_table_bytes: u64,
        /// The bytes of the desk.
        reader_slot_bytes: u64,
        /// The bytes of the values, which are read only.
        values_bytes: u64,
        /// Where the first block starts in the values, in bytes.
        offset: u64,
        /// The bytes of a block: a power of two.
        block_bytes: u64,
        /// From the start of a block to that of the next, in bytes.
        stride: u64,
        /// How many blocks there are.
        blocks: u32,
        /// How many of them hold the shard's variables, one behind the other: the places of the board.
        logical_blocks: u32,
    }
}

wire_struct! {
    /// Asks for memory of the shard into which the client writes what it pushes, over a Unix socket of the
    /// same user, once the variables have values (worker, chief): a *tray*. A connection has one. Nothing
    /// else waits for an answer meanwhile. A refusal changes nothing: pushes go over the connection
    /// as before.
    SharePushBuffer {}
}
wire_struct! {
    /// A tray. With the first byte of the frame comes a descriptor, to read and to write it. It is lent for
    /// as long as the connection lasts, or the restore epoch.
    SharedPushBuffer {
        /// The bytes of the memory.
        bytes: u64,
        /// Where the first room starts in it, in bytes: a multiple of 4096.
        first: u64,
        /// From the start of a room to that of the next, in bytes: a multiple of 4096.
        stride: u64,
        /// What names its rooms, one behind the other, in pushes. They are this client's until the
        /// connection ends. In each the shard's variables have their places, as the layout says.
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
        /// How far they are now.
        state: CatalogueState,
        /// The restore epoch of this shard, as in [`Welcome`].
        restore_epoch: RestoreEpoch,
        /// Whether something has been made of the values, on the step owner: a step, or in synchronous
        /// mode a gradient that was accepted for one. 1 if so.
        trained: bool,
    }
}
wire_struct! {
    /// Gives every variable nobody assigned its initial value, and opens the shard (chief).
    Initialize {
        /// The restore epoch that begins: higher than that of every shard.
        epoch: RestoreEpoch,
    }
}
wire_struct! {
    /// Asks the step owner for the newest checkpoint that is sound (chief).
    FindCheckpoint {}
}
wire_struct! {
    /// The newest checkpoint that is sound.
    CheckpointFound {
        /// It; nothing if there is none, or the servers keep no checkpoints.
        checkpoint: Option<CheckpointId>,
    }
}
wire_struct! {
    /// Asks the step owner which checkpoints were passed over when the newest sound one was looked for last
    /// (chief).
    PassedOverQuery {}
}
wire_struct! {
    /// The checkpoints that are newer than the newest sound one and were passed over.
    PassedOverAre {
        /// The newest of them, newest first.
        checkpoints: List<PassedOver, { limits::PASSED_OVER_MAX }>,
    }
}
wire_struct! {
    /// Gives every variable, and every slot, its value in a checkpoint, and opens the shard under a
    /// new restore epoch (chief). What belongs to older epochs is dropped. Answered with `Ready`.
    Restore {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The restore epoch that begins: higher than that of every shard and of the checkpoint.
        epoch: RestoreEpoch,
    }
}
wire_struct! {
    /// Asks the step owner to save a checkpoint of all shards (chief, admin). The body is kept in it
    /// for whoever restores it, such as the positions of the data readers.
    Save {}
}
wire_struct! {
    /// A checkpoint is saved, verified and published.
    Saved {
        /// It.
        checkpoint: CheckpointId,
    }
}
wire_struct! {
    /// Asks a shard to write its part of a checkpoint (peer: the step owner's task).
    SaveShard {
        /// The name of the checkpoint that is being written.
        name: Text<{ limits::CHECKPOINT_NAME_BYTES_MAX }>,
    }
}
wire_struct! {
    /// A shard's part is written and verified. The body is what the manifest says of it.
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
    /// Asks for the catalogue.
    FetchCatalogue {}
}
wire_struct! {
    /// The body is the encoded catalogue.
    CatalogueIs {
        /// SHA-256 of the body.
        digest: [u8; 32],
    }
}

wire_struct! {
    /// Asks the step owner for a token; waits until there is one or training has ended.
    TokenRequest {
        /// The newest token this client has been given; 0 for none. If the owner has given it a
        /// newer one, the answer with that was lost, and it is given again.
        newest: TokenId,
    }
}
wire_struct! {
    /// A token.
    Granted {
        /// The token and its room.
        grant: Grant,
    }
}
wire_struct! {
    /// There will be no more tokens.
    Ended {
        /// Why.
        reason: EndReason,
    }
}
wire_struct! {
    /// Gives a token back unspent.
    ReturnToken {
        /// The token.
        token: TokenId,
        /// Its generation.
        generation: u32,
    }
}
wire_struct! {
    /// The token is back in the queue.
    Returned {}
}

wire_struct! {
    /// Asks for room for one whole push; waits until there is some.
    Reserve {}
}
wire_struct! {
    /// A push slot, reserved for one whole push.
    Reserved {
        /// Names the room in the push that uses it.
        push_slot: u32,
    }
}
wire_struct! {
    /// One part of a push. The body is a range of the shard's variables, laid out as the
    /// catalogue says. Sequence, step and epoch stand in the header.
    PushPart {
        /// What the push does.
        operation: Operation,
        /// The token it spends; 0 for none.
        token: TokenId,
        /// The token's generation.
        generation: u32,
        /// The room it uses.
        push_slot: u32,
        /// Where the body starts in the shard's variables, in bytes.
        offset: u64,
        /// On the last part, the bytes of all parts: the push is whole. Only the answer to the
        /// last part is sent; a refusal answers the first part that deserves it.
        whole: Option<u64>,
        /// On the last part: whether the answer should carry the next token.
        next: bool,
        /// Of which of the shard's values the push was computed: what [`Pulled::gradients`] of them
        /// was. None if the client does not know, and for pushes that are not gradients.
        read: Option<u64>,
    }
}
wire_struct! {
    /// One part of a gradient whose body is encoded: elements of one partition, or of rows of it, as a
    /// stretch of `docs/codecs.md`. They are where the part says, and with the last ones goes the
    /// padding behind them. The bytes of all parts are counted as those of the elements.
    PushEncoded {
        /// The part, but for the form of its body.
        part: PushPart,
        /// The code of the encoding.
        encoding: u8,
        /// How many elements there are.
        elements: u32,
        /// What each is multiplied with once it is decoded: 1 but for gradients of `f16` and `bf16`,
        /// whose product may be no number of that type.
        factor: f64,
    }
}
wire_struct! {
    /// A stretch of a shard's variables.
    #[derive(Copy, Default, Eq)]
    Stretch {
        /// Where it starts, in bytes.
        start: u64,
        /// Where it ends.
        end: u64,
    }
}
wire_struct! {
    /// Parts of a push that lie in a room of the client's tray already. They are values of variables
    /// that are neither sparse nor tables; such parts of the same push come as [`PushPart`] or
    /// [`PushEncoded`], into the same room. Sequence, step and epoch stand in the header. From its
    /// last part on and until it is answered, a client that changes what lies there changes its push.
    PushShared {
        /// What the push does.
        operation: Operation,
        /// The token it spends; 0 for none.
        token: TokenId,
        /// The token's generation.
        generation: u32,
        /// The room it uses, which is one of the tray.
        push_slot: u32,
        /// As in [`PushPart`].
        whole: Option<u64>,
        /// As in [`PushPart`].
        next: bool,
        /// As in [`PushPart`].
        read: Option<u64>,
        /// Where the parts lie in the shard's variables.
        ranges: List<Stretch, { limits::PUSH_SHARED_RANGES_MAX }, { limits::PUSH_SHARED_RANGES_FEW }>,
    }
}
wire_struct! {
    /// What became of a push.
    PushAnswer {
        /// What.
        outcome: Outcome,
        /// Whether this repeats the answer to an earlier arrival of the same push.
        duplicate: bool,
        /// The next token (step owner only; never in synchronous mode).
        next: Option<Grant>,
        /// Why there is no next token, once training has ended.
        ended: Option<EndReason>,
        /// The room reserved for this client's next push; 0 for none.
        push_slot: u32,
    }
}
wire_struct! {
    /// Withdraws a push that is not whole yet; answered with what became of it.
    Withdraw {}
}
wire_struct! {
    /// Asks what became of a push.
    OutcomeQuery {}
}
wire_struct! {
    /// What became of a push that was asked about.
    OutcomeIs {
        /// What.
        state: PushState,
    }
}

wire_struct! {
    /// Asks for values of at least the step in the header.
    ///
    /// In synchronous mode every shard waits for that step, and the step in the header of its answer
    /// is how many steps the shard has applied.
    Pull {
        /// Which.
        selection: Selection,
    }
}
wire_struct! {
    /// One part of the answer to a pull. The body is a range of the shard's variables. All parts
    /// of an answer are of one version.
    Pulled {
        /// The version: how many pushes the shard had applied.
        version: u64,
        /// How many of them were gradients.
        gradients: u64,
        /// Where the body starts in the shard's variables, in bytes.
        offset: u64,
        /// Whether this is the last part.
        last: bool,
    }
}

wire_struct! {
    /// Asks for rows of a sparse partition, of at least the step in the header as a pull does. The body
    /// is the rows' numbers within the partition, a u32 each, in any order.
    PullRows {
        /// The partition's index in the catalogue.
        partition: PartitionId,
    }
}
wire_struct! {
    /// The rows that were asked for. The body is one behind the other, in the order of their numbers
    /// in the request; all as one stretch, if they were asked for encoded. All are of one version.
    Rows {
        /// The version: how many pushes the shard had applied.
        version: u64,
        /// How many of them were gradients.
        gradients: u64,
    }
}
wire_struct! {
    /// As [`Pull`], for values in a shorter form. Answered with [`PulledEncoded`].
    PullEncoded {
        /// Which.
        pull: Pull,
        /// The code of the encoding: one of values.
        encoding: u8,
    }
}
wire_struct! {
    /// One part of the answer to [`PullEncoded`]. The body is a range of the shard's variables,
    /// partition by partition: the elements of trained ones as a stretch each, others as they are.
    PulledEncoded {
        /// The part, but for the form of its body.
        part: Pulled,
        /// The length of the range.
        bytes: u64,
    }
}

wire_struct! {
    /// As [`PullRows`], of a trained variable, for rows in a shorter form. Answered with [`Rows`].
    PullRowsEncoded {
        /// Which, beside the body.
        pull: PullRows,
        /// The code of the encoding: one of values.
        encoding: u8,
    }
}

wire_struct! {
    /// Ends the training: no more tokens for anybody (chief).
    Finish {}
}
wire_struct! {
    /// The training has ended.
    Finished {}
}
wire_struct! {
    /// Leaves the training: the tokens of this client go back.
    Leave {}
}
wire_struct! {
    /// The client has left; the connection may close.
    Left {}
}

wire_struct! {
    /// Shard to step owner: it holds the push of this token whole (synchronous mode). Said again
    /// after a reconnect. If the token is over, [`Over`] is said.
    Held {
        /// The token that the push spends.
        token: TokenId,
        /// The epoch of the client whose push it is: only its holder may spend a token.
        client: ClientEpoch,
        /// The shard.
        shard: ShardId,
        /// What the squares of the gradient's elements there add up to, where gradients are clipped by
        /// their global norm; 0 elsewhere.
        squares: f64,
    }
}
wire_struct! {
    /// Shard to step owner: it takes part, and has applied as many steps as the header's step says (in
    /// synchronous mode). Said again after a reconnect, and from time to time.
    StepApplied {
        /// The shard.
        shard: ShardId,
    }
}
wire_struct! {
    /// Step owner to shard: the step in the header, counted from 0, is made of these pushes in this
    /// order (synchronous mode). For good, and may be said again.
    Commit {
        /// The tokens that the pushes spend, and what each gradient is multiplied by.
        pushes: List<(TokenId, f64), { limits::STEP_PUSHES_MAX }, 8>,
    }
}
wire_struct! {
    /// Step owner to shard: the push of this token belongs to no step (synchronous mode).
    Over {
        /// The token.
        token: TokenId,
    }
}
wire_struct! {
    /// Step owner to shard: keep what is here after the step in the header, for a checkpoint of which
    /// it will be asked for its part (synchronous mode).
    KeepCut {}
}

wire_struct! {
    /// Step owner to shard: it wants this token back (asynchronous mode). A shard that has not applied its
    /// push closes the client's connection, so that nothing that is under way there arrives. May be
    /// said again.
    Recall {
        /// The token.
        token: TokenId,
        /// The epoch of the client that holds it.
        client: ClientEpoch,
    }
}
wire_struct! {
    /// Shard to step owner: the answer to [`Recall`].
    Recalled {
        /// The token.
        token: TokenId,
        /// The shard.
        shard: ShardId,
        /// Whether the push of the token has been applied here, or lies whole and will be. If not, it
        /// is applied only once the step owner has told its client that it has.
        applied: bool,
    }
}
wire_struct! {
    /// Step owner to shard: the newest chief has this epoch; 0 if there has been none.
    ChiefIs {
        /// The epoch of the client.
        client: ClientEpoch,
    }
}

macro_rules! messages {
    ($($kind:literal => $name:ident, body $limit:expr;)*) => {
        /// Everything that can be said.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each variant is the struct of the same name")]
        #[non_exhaustive]
        pub enum Message {
            $($name($name),)*
        }

        impl Message {
            /// Every kind that exists, in rising order.
            pub const KINDS: &'static [u16] = &[$($kind),*];

            /// The code of the message in the header.
            pub fn kind(&self) -> u16 {
                match self {
                    $(Message::$name(_) => $kind,)*
                }
            }

            /// The name of the message.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Message::$name(_) => stringify!($name),)*
                }
            }

            /// The largest body a message of this kind may have; `None` for an unknown kind.
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

            /// Reads the meta of a message of this kind.
            pub fn take(kind: u16, meta: &[u8]) -> Result<Message, ProtocolError> {
                match kind {
                    $($kind => {
                        let mut reader = Reader::new(stringify!($name), meta);
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
    63 => Over, body 0;
    64 => KeepCut, body 0;
    65 => Recall, body 0;
    66 => Recalled, body 0;
    67 => ChiefIs, body 0;
}
