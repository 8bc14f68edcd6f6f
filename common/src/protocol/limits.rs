//! Every limit of the protocol, with its reason.

use super::header::Header;

/// The largest body of a tensor frame; larger tensors travel in parts.
///
/// A part is small enough that a heartbeat between two parts is never late, and large enough that
/// the cost of a header per part is negligible.
pub const PART_BYTES_MAX: u64 = 1 << 20;

/// The largest encoded catalogue: 100,000 variables with names of ordinary length and a partition
/// each need about 10 MiB.
pub const CATALOGUE_BYTES_MAX: u64 = 16 << 20;

/// The largest meta of a frame.
pub const META_BYTES_MAX: u32 = {
    // The largest meta is a pull of named partitions, 4 bytes each,
    let partitions = 4 * SELECTION_MAX;
    // plus its few fixed fields.
    (partitions + 64) as u32
};

/// The largest meta before the handshake is done. It bounds the memory that an unauthenticated
/// client can make the server hold.
pub const HANDSHAKE_META_BYTES_MAX: u32 = 8192 - Header::BYTES as u32;

/// The most partitions that one pull may name; a pull of more requests all.
pub const SELECTION_MAX: usize = 16_384;

/// The size of the push window: pushes that one client may have unacknowledged on one shard.
pub const WINDOW: u64 = 64;

/// The most requests that one connection may have parked on a shard: the push window, and as many
/// waits (tokens, pulls, readiness).
pub const PARKED_PER_CONNECTION_MAX: usize = 2 * WINDOW as usize;

/// The most tokens that one client may hold. Each is kept across a restart of the server, and no
/// training loop needs one for each push in its window.
pub const TOKENS_PER_CLIENT_MAX: usize = 16;

/// The size of an effect window: effects from the oldest unsettled one to the newest of one
/// coordinator.
///
/// A coordinator schedules a few calls for each worker, and each shard keeps one bit for each.
pub const EFFECT_WINDOW: u64 = 64;

/// The most coordinators that a shard remembers.
///
/// A training has one coordinator, and seldom a second one for evaluation. A late push to one that
/// was evicted would count twice, so a coordinator that ends closes.
pub const COORDINATORS_MAX: usize = 64;

/// The longest name of a coordinator.
pub const COORDINATOR_NAME_BYTES_MAX: usize = 64;

/// The most pushes in a synchronous step. Each occupies a push slot on every shard, and a shard has
/// no more slots than this.
pub const STEP_PUSHES_MAX: usize = 1024;

/// The most gradients of one client in the answer to an audit: those of a push window, and as many
/// that wait to be applied.
pub const AUDITED_PUSHES_MAX: usize = 2 * WINDOW as usize;

/// The longest name of a job, as in host names.
pub const JOB_BYTES_MAX: usize = 64;
const _: () = assert!(JOB_BYTES_MAX == crate::ids::CLIENT_JOB_BYTES_MAX);
/// The most tasks of a kind in a status. A meta has room for this many, each member with all the
/// tokens that it may hold.
pub const STATUS_TASKS_MAX: usize = 100;
/// The longest name of a checkpoint's folder.
pub const CHECKPOINT_NAME_BYTES_MAX: usize = 64;
/// The most bytes that a checkpoint keeps for its user: positions of data readers, not data.
pub const USER_BLOB_BYTES_MAX: u64 = 1 << 20;
/// The most corrupt checkpoints that one answer names, newest first.
pub const PASSED_OVER_MAX: usize = 16;
/// The longest name of a variable.
pub const NAME_BYTES_MAX: usize = 256;
/// The longest name of a data set.
pub const DATA_NAME_BYTES_MAX: usize = 128;
/// The longest name of an identity field.
pub const IDENTITY_NAME_BYTES_MAX: usize = 32;
/// The longest value of an identity field; a longer one is replaced by its hash.
pub const IDENTITY_VALUE_BYTES_MAX: usize = 160;
/// The most fields of an identity: with both maxima above they fit a handshake's meta.
pub const IDENTITY_FIELDS_MAX: usize = 24;
/// The longest address of a Unix socket: the 107 bytes of a path, after `unix:`.
pub const UNIX_ADDRESS_BYTES_MAX: usize = 112;
/// The most requests for shared memory on one connection: one for each declaration of variables,
/// with a margin.
pub const SHARE_REQUESTS_MAX: u32 = 8;
/// The push slots of a push buffer: the client fills one while the shard applies the other.
pub const BUFFER_SLOTS_MAX: usize = 2;
/// The most push buffers that a shard shares at a time: one for each worker of its host.
///
/// A host has no more workers than cores. Each buffer takes memory for two pushes and one
/// descriptor.
pub const PUSH_BUFFERS_MAX: usize = 64;
/// The most ranges of a push buffer that one message may name.
///
/// One message is enough for adjacent variables of a shard with some between them that travel
/// otherwise; a push with more ranges takes several messages.
pub const PUSH_SHARED_RANGES_MAX: usize = 1024;

/// The number of those ranges stored inline in the message, without an allocation.
pub const PUSH_SHARED_RANGES_FEW: usize = 6;
/// The longest name of a principal: that of an access token or of a certificate.
pub const PRINCIPAL_NAME_BYTES_MAX: usize = 255;
/// The longest name of an access token.
pub const ACCESS_TOKEN_NAME_BYTES_MAX: usize = 64;
/// By how much a restore epoch may exceed the shard's and the checkpoint's.
///
/// No cluster is restored as often. A shard that accepted any number could be left without a higher
/// one, so that its checkpoints could never be restored.
pub const RESTORE_EPOCHS_AHEAD: u32 = 1 << 20;
/// The longest explanation in a refusal.
pub const DETAIL_BYTES_MAX: usize = 512;

/// The longest name of a function.
pub const FUNCTION_NAME_BYTES_MAX: usize = 128;
/// The longest name of an input or an output of a function.
pub const VALUE_NAME_BYTES_MAX: usize = 64;
/// The most inputs, or outputs, of one call.
pub const CALL_VALUES_MAX: usize = 64;
/// The most axes of a value, as of a variable.
pub const VALUE_RANK_MAX: usize = 8;
/// The longest device of a call: a job, a task, a type and an index.
pub const CALL_DEVICE_BYTES_MAX: usize = 160;
/// The most calls that one call may be nested in. Each holds a thread of a server.
pub const CALL_DEPTH_MAX: u8 = 8;
/// The most calls that one call acknowledges.
pub const CALLS_ENDED_MAX: usize = 64;
/// The most calls that one message may release.
pub const RELEASES_MAX: usize = 1024;
/// The largest description of a server: the cluster, and a few hundred bytes for each function.
pub const DESCRIPTION_BYTES_MAX: u64 = 32 << 20;

/// The most members of a ring. Each names the others, and an operation has as many passes.
pub const RING_SIZE_MAX: usize = 1024;
/// The longest stable id of a member of a ring.
pub const RANK_ID_BYTES_MAX: usize = 64;
/// The longest name of a host, as in DNS.
pub const HOST_BYTES_MAX: usize = 255;
/// The longest address of a rank: a host, or the path of a Unix socket.
pub const RANK_ADDRESS_BYTES_MAX: usize = 272;
/// The most addresses of a rank: a Unix socket and a few networks.
pub const RANK_ADDRESSES_MAX: usize = 4;
/// The most indices that one message names as missing.
pub const RING_MISSING_MAX: usize = 16;

/// The longest stable id of a task at a rendezvous.
pub const TASK_ID_BYTES_MAX: usize = 128;
/// The longest address of a task at a rendezvous, as in a cluster.
pub const TASK_ADDRESS_BYTES_MAX: usize = 255;
/// The most tasks that a rendezvous gathers: as many as a launcher may number.
pub const GATHERED_TASKS_MAX: u32 = RING_SIZE_MAX as u32;
/// The longest text of a cluster from a rendezvous: an address and a separator for each task, and
/// the names of two jobs.
pub const CLUSTER_BYTES_MAX: u64 =
    GATHERED_TASKS_MAX as u64 * (TASK_ADDRESS_BYTES_MAX as u64 + 1) + 64;

const _: () = assert!(16 * PUSH_SHARED_RANGES_MAX + 64 <= META_BYTES_MAX as usize);
const _: () = {
    let name = 2 + VALUE_NAME_BYTES_MAX;
    let output = 2 + JOB_BYTES_MAX + 12 + 2 + VALUE_NAME_BYTES_MAX;
    let variable = 2 + NAME_BYTES_MAX;
    assert!(
        variable > output
            && CALL_VALUES_MAX * (name + 1 + variable) + 8 * CALLS_ENDED_MAX + 512
                <= META_BYTES_MAX as usize
    );
};

/// The bytes that a connection buffers for headers and metas: a few small frames. A larger meta
/// grows the buffer to [`META_BYTES_MAX`] while that meta is read.
pub const READ_BUFFER_BYTES: usize = 8 << 10;

const _: () = {
    let field = 1 + IDENTITY_NAME_BYTES_MAX + 2 + IDENTITY_VALUE_BYTES_MAX;
    let texts = 2 * (1 + JOB_BYTES_MAX) + 2 + UNIX_ADDRESS_BYTES_MAX;
    let fixed = texts + 2 + ACCESS_TOKEN_NAME_BYTES_MAX + 256;
    assert!(IDENTITY_FIELDS_MAX * field + fixed <= HANDSHAKE_META_BYTES_MAX as usize);
};
