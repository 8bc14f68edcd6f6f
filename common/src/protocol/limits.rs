//! Every bound of the protocol in one place, as sums with a reason per term.

use super::header::Header;

/// The largest body of a tensor frame. Large tensors travel in parts of this size: small enough
/// that a heartbeat between two parts is never late, large enough that a header per part is noise.
pub const PART_BYTES_MAX: u64 = 1 << 20;

/// The largest encoded catalogue: 100,000 variables with names of ordinary length and a partition
/// each need about 10 MiB.
pub const CATALOGUE_BYTES_MAX: u64 = 16 << 20;

/// The largest meta of a frame.
pub const META_BYTES_MAX: u32 = {
    // The largest is a pull of named partitions: 4 bytes each,
    let partitions = 4 * SELECTION_MAX;
    // beside its few fixed fields.
    (partitions + 64) as u32
};

/// The largest meta before the handshake is done, so that a peer nobody has spoken to yet
/// cannot make the server hold more than this for it.
pub const HANDSHAKE_META_BYTES_MAX: u32 = 4096 - Header::BYTES as u32;

/// Partitions that one pull may name; a pull of more asks for all.
pub const SELECTION_MAX: usize = 16_384;

/// Pushes that one client may have unacknowledged on one shard: what the dedupe window remembers.
pub const WINDOW: u64 = 64;

/// Requests that one connection may have parked on a shard: the window of pushes, and as many
/// waits (tokens, pulls, readiness) again.
pub const PARKED_PER_CONNECTION_MAX: usize = 2 * WINDOW as usize;

/// Tokens that one client may hold: one for each push it may have unacknowledged would be more than
/// any training loop asks for, and each is kept across a restart of the server.
pub const TOKENS_PER_CLIENT_MAX: usize = 16;

/// Pushes that a synchronous step may be made of: each lies whole in a room of its own on every
/// shard, and a shard has no more rooms than this.
pub const STEP_PUSHES_MAX: usize = 1024;

/// The longest name of a job, as in host names.
pub const JOB_BYTES_MAX: usize = 64;
/// The longest name of a checkpoint's folder.
pub const CHECKPOINT_NAME_BYTES_MAX: usize = 64;
/// What a checkpoint may keep for its user: positions of data readers, not data.
pub const USER_BLOB_BYTES_MAX: u64 = 1 << 20;
/// The most checkpoints that one answer names as passed over, newest first: as many as anybody reads.
pub const PASSED_OVER_MAX: usize = 16;
/// The longest name of a variable.
pub const NAME_BYTES_MAX: usize = 256;
/// The longest name of an identity field.
pub const IDENTITY_NAME_BYTES_MAX: usize = 32;
/// The longest value of an identity field; a longer one is replaced by its hash.
pub const IDENTITY_VALUE_BYTES_MAX: usize = 160;
/// Fields of an identity: with both maxima above they fit a handshake's meta.
pub const IDENTITY_FIELDS_MAX: usize = 16;
/// The longest address of a Unix socket: the 107 bytes that its path may have, behind `unix:`.
pub const UNIX_ADDRESS_BYTES_MAX: usize = 112;
/// How often one connection is lent memory: once for each declaration of variables it lives through, and
/// some to spare.
pub const SHARE_REQUESTS_MAX: u32 = 8;
/// Rooms of a tray: one is filled while what lies in the other is applied.
pub const BUFFER_SLOTS_MAX: usize = 2;
/// Trays that a shard has lent at a time: one for each worker of its host, of which there are no more than
/// there are cores. Each is memory for two pushes, and a descriptor.
pub const PUSH_BUFFERS_MAX: usize = 64;
/// Stretches that one message may name of a tray. One message is enough for a shard's variables that
/// follow each other, with some that travel otherwise between them; a push of more takes several.
pub const PUSH_SHARED_RANGES_MAX: usize = 1024;

/// How many of them lie in the message itself, and need no memory beside it.
pub const PUSH_SHARED_RANGES_FEW: usize = 6;
/// Authentication bytes in a handshake: a nonce and a MAC with room to spare.
pub const AUTH_BYTES_MAX: usize = 256;
/// The longest explanation in a refusal.
pub const DETAIL_BYTES_MAX: usize = 512;

const _: () = assert!(16 * PUSH_SHARED_RANGES_MAX + 64 <= META_BYTES_MAX as usize);

/// Bytes a connection buffers while it reads headers and metas: a few small frames at once. A
/// larger meta grows it to [`META_BYTES_MAX`] for as long as that meta is read.
pub const READ_BUFFER_BYTES: usize = 8 << 10;

const _: () = {
    let field = 1 + IDENTITY_NAME_BYTES_MAX + 2 + IDENTITY_VALUE_BYTES_MAX;
    let texts = 2 * (1 + JOB_BYTES_MAX) + 2 + UNIX_ADDRESS_BYTES_MAX;
    let fixed = texts + 2 + AUTH_BYTES_MAX + 256;
    assert!(IDENTITY_FIELDS_MAX * field + fixed <= HANDSHAKE_META_BYTES_MAX as usize);
};
