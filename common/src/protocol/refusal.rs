//! The typed no: why a request was not done, naming the culprit and the value.

use super::limits::{DETAIL_BYTES_MAX, JOB_BYTES_MAX};
use super::wire::{Text, wire_enum};
use crate::ids::{
    ClientEpoch, GlobalStep, PartitionId, RestoreEpoch, Sequence, ShardId, TokenId, VariableId,
};

/// A short explanation.
pub type Detail = Text<DETAIL_BYTES_MAX>;

wire_enum! {
    /// Why a request was refused. A refusal changes nothing on the server.
    #[non_exhaustive]
    Refusal {
        /// No protocol version is spoken by both sides.
        1 => Version {
            /// The oldest version the server speaks.
            oldest: u16,
            /// The newest version the server speaks.
            newest: u16,
        },
        /// The peer belongs to another cluster, or is configured differently.
        2 => Identity {
            /// The first field that differs.
            field: Detail,
            /// Its value on the server.
            server: Detail,
            /// Its value in the peer's handshake.
            client: Detail,
            /// SHA-256 of the server's identity.
            server_hash: [u8; 32],
            /// SHA-256 of the peer's identity.
            client_hash: [u8; 32],
        },
        /// The peer declares other variables than the ones the server holds.
        3 => Catalogue {
            /// SHA-256 of the server's catalogue.
            server: [u8; 32],
            /// SHA-256 of the peer's catalogue.
            client: [u8; 32],
            /// The first difference, in words.
            differs: Detail,
        },
        /// The connection is for another shard than the one that answered.
        4 => WrongShard {
            /// The shard asked for.
            wanted: ShardId,
            /// The ps task that answered.
            task: u32,
            /// How many shards it has.
            shards: u16,
        },
        /// The variables have no values yet.
        5 => NotInitialized {},
        /// A newer incarnation of this client has taken its place, or a newer chief that of this one.
        6 => Fenced {
            /// The epoch in the request.
            epoch: ClientEpoch,
            /// The epoch that is current.
            current: ClientEpoch,
        },
        /// The peer's role may not do this.
        7 => Role {
            /// The role's code.
            role: u8,
            /// The message kind refused.
            kind: u16,
        },
        /// The variables, slots and inbox need more memory than the server may use.
        8 => DoesNotFit {
            /// Bytes needed on this shard.
            need: u64,
            /// Bytes this shard may use.
            limit: u64,
        },
        /// The shard holds no such partition.
        9 => UnknownPartition {
            /// The partition asked for.
            partition: PartitionId,
        },
        /// A part that does not lie within the shard's variables, or not where it must start.
        10 => Range {
            /// Where the part starts, in bytes.
            offset: u64,
            /// Its length in bytes.
            bytes: u64,
            /// Where it had to start, or the end of the shard's variables.
            limit: u64,
        },
        /// A gradient or a value that is NaN or infinite, with the policy `reject`.
        11 => NonFinite {
            /// The variable.
            variable: VariableId,
            /// The first bad element, counted over the whole variable.
            element: u64,
            /// The element's bits as an f64.
            value: f64,
        },
        /// The room the client counted on has been given to another; it asks again.
        12 => PushSlotTaken {
            /// The room in the request.
            push_slot: u32,
        },
        /// The deadline of a wait has passed.
        13 => Deadline {
            /// How long the request waited, in milliseconds.
            waited_ms: u64,
            /// What, or whom, it waited for.
            awaited: Detail,
        },
        /// A bound is reached.
        14 => Busy {
            /// What there are too many of.
            what: Detail,
            /// How many there may be.
            limit: u64,
        },
        /// The server does not do this in its mode or version.
        15 => Unsupported {
            /// The message kind refused.
            kind: u16,
            /// Why.
            detail: Detail,
        },
        /// The server is stopping.
        16 => Stopping {},
        /// The token is not held by this client.
        17 => Token {
            /// The token in the request.
            token: TokenId,
            /// The generation in the request.
            generation: u32,
        },
        /// The request belongs to another restore epoch.
        18 => RestoreEpoch {
            /// The epoch in the request.
            found: RestoreEpoch,
            /// The epoch that is current.
            current: RestoreEpoch,
            /// The global step at which the current epoch began.
            step: GlobalStep,
        },
        /// The server's storage failed.
        19 => Storage {
            /// The failure, in words.
            detail: Detail,
        },
        /// The sequence number lies outside the client's window.
        20 => Window {
            /// The sequence number in the request.
            sequence: Sequence,
            /// The oldest one remembered.
            oldest: Sequence,
            /// The newest one allowed.
            newest: Sequence,
        },
        /// A push that covers a partition only in part.
        21 => Incomplete {
            /// The partition.
            partition: PartitionId,
            /// Bytes received for it.
            bytes: u64,
            /// Bytes it has.
            expected: u64,
        },
        /// A gradient for a plain variable, or `assign_add` on a trainable one.
        22 => Operation {
            /// The variable.
            variable: VariableId,
            /// What was tried.
            tried: Detail,
        },
        /// Authentication failed.
        23 => Denied {},
        /// A push whose last part says another length than the parts have.
        24 => Length {
            /// Bytes the last part names.
            named: u64,
            /// Bytes received.
            received: u64,
        },
        /// The number of a row that the partition has not, or that is out of order in a push.
        25 => Row {
            /// The variable.
            variable: VariableId,
            /// The row's place among those in the request.
            place: u64,
            /// Its number within the partition, or its id.
            row: u64,
            /// The first that may stand there.
            from: u64,
            /// The last that may.
            last: u64,
        },
        /// More rows than one request may be about.
        26 => Rows {
            /// The variable.
            variable: VariableId,
            /// How many rows it is about.
            rows: u64,
            /// How many it may be about.
            limit: u64,
        },
        /// A part in an encoding that the server does not know, or that is not what it says.
        27 => Encoding {
            /// The variable.
            variable: VariableId,
            /// The code of the encoding.
            encoding: u8,
            /// What is wrong.
            detail: Detail,
        },
        /// A row of a table that lies in another partition: see [`crate::table::bucket`].
        28 => Bucket {
            /// The variable.
            variable: VariableId,
            /// The row's place among those in the request.
            place: u64,
            /// Its id.
            row: u64,
            /// The bucket of that.
            bucket: u64,
            /// The first bucket of the partition.
            from: u64,
            /// The first behind it.
            to: u64,
        },
        /// More rows of a table than there may be: new ones of one that evicts none, or such as are given
        /// values. The push has changed nothing on this shard.
        29 => TableFull {
            /// The variable.
            variable: VariableId,
            /// How many rows this shard has of it.
            rows: u64,
            /// How many more the push has.
            more: u64,
            /// How many there may be.
            limit: u64,
        },
        /// A variable that the server cannot train as it is configured.
        30 => Untrainable {
            /// The variable's name, or names that the server has a rule for and nobody has.
            variable: Detail,
            /// Why not.
            detail: Detail,
        },
        /// A client epoch that the step owner cannot have given to this client.
        31 => UnknownEpoch {
            /// The epoch in the hello.
            epoch: ClientEpoch,
            /// The newest that this client can have; 0 if it has none.
            newest: ClientEpoch,
        },
        /// A job or a task that the cluster of the server does not have, or not in this role.
        32 => UnknownTask {
            /// The job in the hello.
            job: Text<JOB_BYTES_MAX>,
            /// The task's index in the hello.
            task: u32,
            /// What the cluster has.
            detail: Detail,
        },
        /// A push of finite elements that would make a value NaN or infinite, with the policy `reject`.
        33 => Overflow {
            /// The variable.
            variable: VariableId,
            /// The first such element, counted over the whole variable.
            element: u64,
            /// What it would become.
            value: f64,
        },
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Version { oldest, newest } => {
                write!(f, "the server speaks protocol versions {oldest} to {newest} only")
            }
            Refusal::Identity { field, server, client, server_hash, client_hash } => write!(
                f,
                "the identities differ in {field}: the server has {server:?} (identity {}), this \
                 side has {client:?} (identity {})",
                short_hash(server_hash),
                short_hash(client_hash),
                server = server.as_str(),
                client = client.as_str(),
            ),
            Refusal::Catalogue { server, client, differs } => write!(
                f,
                "the variables differ: {differs} (server's catalogue {}, this side's {})",
                short_hash(server),
                short_hash(client)
            ),
            Refusal::WrongShard { wanted, task, shards } => {
                write!(f, "{wanted} is not here: this is ps task {task} with {shards} shards")
            }
            Refusal::NotInitialized {} => f.write_str("the variables are not initialized yet"),
            Refusal::Fenced { epoch, current } => {
                write!(f, "client epoch {epoch} is fenced by epoch {current}")
            }
            Refusal::Role { role, kind } => {
                write!(f, "role {role} may not send messages of kind {kind}")
            }
            Refusal::DoesNotFit { need, limit } => {
                write!(f, "the shard needs {need} bytes, it may use {limit}")
            }
            Refusal::UnknownPartition { partition } => {
                write!(f, "the shard holds no partition {partition}")
            }
            Refusal::Range { offset, bytes, limit } => {
                write!(f, "a part of {bytes} bytes at {offset} is out of place (limit {limit})")
            }
            Refusal::NonFinite { variable, element, value } => {
                write!(f, "element {element} of variable {variable} is {value}")
            }
            Refusal::Overflow { variable, element, value } => {
                write!(f, "element {element} of variable {variable} would become {value}")
            }
            Refusal::PushSlotTaken { push_slot } => {
                write!(f, "push slot {push_slot} was given to another push")
            }
            Refusal::Deadline { waited_ms, awaited } => {
                write!(f, "waited {waited_ms} ms for {awaited}")
            }
            Refusal::Busy { what, limit } => write!(f, "too many {what}: the limit is {limit}"),
            Refusal::Unsupported { kind, detail } => {
                write!(f, "messages of kind {kind} are not supported: {detail}")
            }
            Refusal::Stopping {} => f.write_str("the server is stopping"),
            Refusal::Token { token, generation } => {
                write!(f, "token {token} of generation {generation} is not held by this client")
            }
            Refusal::RestoreEpoch { found, current, step } => {
                write!(f, "restore epoch {found} is not {current}, which began at step {step}")
            }
            Refusal::Storage { detail } => write!(f, "storage failed: {detail}"),
            Refusal::Window { sequence, oldest, newest } => {
                write!(f, "sequence {sequence} is outside the window {oldest} to {newest}")
            }
            Refusal::Incomplete { partition, bytes, expected } => {
                write!(f, "partition {partition} was pushed in part: {bytes} of {expected} bytes")
            }
            Refusal::Operation { variable, tried } => {
                write!(f, "variable {variable} does not take {tried}")
            }
            Refusal::Denied {} => f.write_str("denied"),
            Refusal::Length { named, received } => {
                write!(f, "the push names {named} bytes, {received} were received")
            }
            Refusal::Row { variable, place, row, from, last } => write!(
                f,
                "row {row} of variable {variable}, at place {place} of the request, is none of the \
                 rows {from} to {last} that may stand there"
            ),
            Refusal::Rows { variable, rows, limit } => {
                write!(f, "{rows} rows of variable {variable} are more than {limit}")
            }
            Refusal::Bucket { variable, place, row, bucket, from, to } => write!(
                f,
                "row {row} of table {variable}, at place {place} of the request, is of bucket \
                 {bucket}, and here are {from} to {to}"
            ),
            Refusal::TableFull { variable, rows, more, limit } => write!(
                f,
                "table {variable} has {rows} rows on this shard and has no room for {more} more: there \
                 may be {limit}"
            ),
            Refusal::Untrainable { variable, detail } => {
                write!(
                    f,
                    "{:?} cannot be trained as the server is configured: {detail}",
                    variable.as_str()
                )
            }
            Refusal::UnknownEpoch { epoch, newest } => write!(
                f,
                "client epoch {epoch} was not given to this client, whose epoch is at most {newest}"
            ),
            Refusal::UnknownTask { job, task, detail } => {
                write!(f, "task {task} of job {:?} does not belong here: {detail}", job.as_str())
            }
            Refusal::Encoding { variable, encoding, detail } => {
                write!(f, "encoding {encoding} of variable {variable} is not taken: {detail}")
            }
        }
    }
}

/// The first eight bytes of a hash in hexadecimal: enough to tell two apart by eye.
pub fn short_hash(hash: &[u8; 32]) -> String {
    hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
