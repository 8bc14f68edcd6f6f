//! Refusals: typed reasons why a request was not done, with the value at fault.

use super::feature::Features;
use super::limits::{DETAIL_BYTES_MAX, JOB_BYTES_MAX};
use super::wire::{Text, wire_enum};
use crate::ids::{
    ClientEpoch, CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, PartitionId,
    RestoreEpoch, Sequence, ShardId, TokenId, VariableId,
};

/// A short explanation.
pub type Detail = Text<DETAIL_BYTES_MAX>;

wire_enum! {
    /// The reason why a request was refused. A refused request has changed nothing on the server.
    #[non_exhaustive]
    Refusal {
        /// Client and server have no protocol version in common.
        1 => Version {
            /// The oldest version that the server speaks.
            oldest: u16,
            /// The newest version that the server speaks.
            newest: u16,
        },
        /// The client belongs to another cluster or has another configuration.
        2 => Identity {
            /// The first field that differs.
            field: Detail,
            /// Its value on the server.
            server: Detail,
            /// Its value in the client's handshake.
            client: Detail,
            /// SHA-256 of the server's identity.
            server_hash: [u8; 32],
            /// SHA-256 of the client's identity.
            client_hash: [u8; 32],
        },
        /// The client declares other variables than the server holds.
        3 => Catalogue {
            /// SHA-256 of the server's catalogue.
            server: [u8; 32],
            /// SHA-256 of the client's catalogue.
            client: [u8; 32],
            /// The first difference, in words.
            differs: Detail,
        },
        /// The connection is for another shard than the one that answered.
        4 => WrongShard {
            /// The requested shard.
            wanted: ShardId,
            /// The ps task that answered.
            task: u32,
            /// The number of its shards.
            shards: u16,
        },
        /// The variables have no values yet.
        5 => NotInitialized {},
        /// A newer incarnation of this client, or a newer chief, has fenced the sender.
        6 => Fenced {
            /// The epoch in the request.
            epoch: ClientEpoch,
            /// The current epoch.
            current: ClientEpoch,
        },
        /// The client's role may not send this message.
        7 => Role {
            /// The role's code.
            role: u8,
            /// The message kind.
            kind: u16,
        },
        /// The variables, optimizer slots and inbox need more memory than the server may use.
        8 => DoesNotFit {
            /// The bytes needed on this shard.
            need: u64,
            /// The bytes that this shard may use.
            limit: u64,
            /// The use of the bytes, and the setting that allows more, in words.
            made_of: Detail,
        },
        /// The shard holds no such partition.
        9 => UnknownPartition {
            /// The requested partition.
            partition: PartitionId,
        },
        /// A part is not within the shard's layout, or does not start at a valid offset.
        10 => Range {
            /// The byte offset of the part.
            offset: u64,
            /// The length of the part in bytes.
            bytes: u64,
            /// The offset at which it had to start, or the end of the shard's layout.
            limit: u64,
        },
        /// A gradient or a value is NaN or infinite, under the policy `reject`.
        11 => NonFinite {
            /// The variable.
            variable: VariableId,
            /// The index of the first such element in the whole variable.
            element: u64,
            /// The element's value, as an f64.
            value: f64,
        },
        /// The push slot has been given to another push; the client requests one again.
        12 => PushSlotTaken {
            /// The slot in the request.
            push_slot: u32,
        },
        /// The deadline of a wait has passed.
        13 => Deadline {
            /// The time that the request waited, in milliseconds.
            waited_ms: u64,
            /// The thing or the tasks that it waited for.
            awaited: Detail,
        },
        /// A limit is reached.
        14 => Busy {
            /// The kind of thing that is limited.
            what: Detail,
            /// The limit.
            limit: u64,
        },
        /// The server does not support the message in its mode or version.
        15 => Unsupported {
            /// The message kind.
            kind: u16,
            /// The reason.
            detail: Detail,
        },
        /// The server is stopping.
        16 => Stopping {},
        /// The client does not hold the token.
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
            /// The current epoch.
            current: RestoreEpoch,
            /// The global step at which the current epoch began.
            step: GlobalStep,
        },
        /// The server's storage failed.
        19 => Storage {
            /// The failure, in words.
            detail: Detail,
        },
        /// The sequence number is outside the client's push window.
        20 => Window {
            /// The sequence number in the request.
            sequence: Sequence,
            /// The oldest sequence number in the window.
            oldest: Sequence,
            /// The newest sequence number allowed.
            newest: Sequence,
        },
        /// A push covers a partition only partly.
        21 => Incomplete {
            /// The partition.
            partition: PartitionId,
            /// The bytes received for it.
            bytes: u64,
            /// The bytes that it has.
            expected: u64,
        },
        /// The operation does not suit the variable: a gradient for a plain variable, or
        /// `assign_add` to a trainable one.
        22 => Operation {
            /// The variable.
            variable: VariableId,
            /// The attempted operation.
            tried: Detail,
        },
        /// Authentication failed.
        23 => Denied {},
        /// The last part of a push announces another length than was received.
        24 => Length {
            /// The bytes that the last part announces.
            named: u64,
            /// The bytes received.
            received: u64,
        },
        /// The partition lacks a row of the request, or the row is out of order in a push.
        25 => Row {
            /// The variable.
            variable: VariableId,
            /// The row's position in the request.
            place: u64,
            /// The row's number within the partition, or its id.
            row: u64,
            /// The first row that would be valid there.
            from: u64,
            /// The last row that would be valid there.
            last: u64,
        },
        /// A request has too many rows.
        26 => Rows {
            /// The variable.
            variable: VariableId,
            /// The number of rows.
            rows: u64,
            /// The limit.
            limit: u64,
        },
        /// A part has an encoding that the server does not know, or invalid encoded values.
        27 => Encoding {
            /// The variable.
            variable: VariableId,
            /// The code of the encoding.
            encoding: u8,
            /// The fault.
            detail: Detail,
        },
        /// A row of a table belongs to another partition: see [`crate::table::bucket`].
        28 => Bucket {
            /// The variable.
            variable: VariableId,
            /// The row's position in the request.
            place: u64,
            /// The row's id.
            row: u64,
            /// The bucket of the id.
            bucket: u64,
            /// The first bucket of the partition.
            from: u64,
            /// The end of the partition's buckets, exclusive.
            to: u64,
        },
        /// A table cannot hold the new rows of a push, or the rows of an assignment.
        ///
        /// A push is refused only by a table that evicts no rows. It has changed nothing on this
        /// shard.
        29 => TableFull {
            /// The variable.
            variable: VariableId,
            /// The number of the table's rows on this shard.
            rows: u64,
            /// The number of rows that the push would add.
            more: u64,
            /// The limit of rows on this shard.
            limit: u64,
        },
        /// The server's configuration cannot train a variable.
        30 => Untrainable {
            /// The variable's name, or a name pattern of a server rule that matches no variable.
            variable: Detail,
            /// The reason.
            detail: Detail,
        },
        /// The step owner cannot have assigned this client epoch to this client.
        31 => UnknownEpoch {
            /// The epoch in the hello.
            epoch: ClientEpoch,
            /// The newest epoch that this client can have; 0 if it has none.
            newest: ClientEpoch,
        },
        /// The server's cluster lacks the job or task, or does not have it in this role.
        32 => UnknownTask {
            /// The job in the hello.
            job: Text<JOB_BYTES_MAX>,
            /// The task's index in the hello.
            task: u32,
            /// The jobs or tasks of the cluster.
            detail: Detail,
        },
        /// A push of finite elements would make a value NaN or infinite, under the policy `reject`.
        33 => Overflow {
            /// The variable.
            variable: VariableId,
            /// The index of the first such element in the whole variable.
            element: u64,
            /// The value that it would get.
            value: f64,
        },
        /// The client reads other data than the training has declared, or has declared none.
        34 => DataSet {
            /// The first difference, in words.
            differs: Detail,
        },
        /// No coordinator of this id is open on the shard.
        35 => UnknownCoordinator {
            /// The coordinator; 0 for a name that has none.
            coordinator: CoordinatorId,
        },
        /// The epoch of an effect or of a request is not the newest one of its coordinator.
        36 => CoordinatorEpoch {
            /// The coordinator; 0 for one that is closed.
            coordinator: CoordinatorId,
            /// The epoch in the request.
            epoch: CoordinatorEpoch,
            /// The newest epoch on this shard.
            current: CoordinatorEpoch,
        },
        /// The number of an effect is outside the effect window.
        37 => EffectWindow {
            /// The number.
            number: EffectNumber,
            /// Every effect up to this number is settled: on the shard, or as the push says.
            settled: EffectNumber,
            /// The newest number that the window has room for.
            newest: EffectNumber,
        },
        /// The training has ended, and its values differ between shards: gradients of workers that
        /// were lost are applied on some shards only.
        38 => NotFinal {
            /// The number of these gradients.
            pushes: u64,
        },
        /// The client requires a feature of the protocol that the server does not have.
        40 => Feature {
            /// The number of the feature.
            number: u8,
            /// The features of the server.
            has: Features,
        },
        /// Checkpoints cannot be saved, or this one not restored, as the server is configured.
        /// Another attempt cannot help.
        44 => Checkpoint {
            /// The reason.
            detail: Detail,
        },
        /// Another shard that the request needs cannot be reached, or was lost meanwhile.
        45 => Unavailable {
            /// The shard and the reason.
            detail: Detail,
        },
        /// Too few replicas are left for a synchronous step, and the policy of the servers ends the
        /// wait for others.
        46 => ReplicasAbsent {
            /// The time for which the step has lacked them, in milliseconds.
            waited_ms: u64,
            /// The step that waits, with the absent replicas.
            awaited: Detail,
        },
        /// The server has no function of this name.
        50 => UnknownFunction {
            /// The function in the call.
            function: Detail,
            /// The functions of the server.
            known: Detail,
        },
        /// An input does not suit the function.
        51 => Input {
            /// The function.
            function: Detail,
            /// The input.
            input: Detail,
            /// The fault.
            detail: Detail,
        },
        /// The server has no such device, or is not this task.
        52 => NoDevice {
            /// The device in the call.
            device: Detail,
            /// The reason.
            detail: Detail,
        },
        /// Nobody holds this output of a call.
        53 => NoOutput {
            /// The call.
            call: u64,
            /// The output.
            output: Detail,
            /// The reason.
            detail: Detail,
        },
        /// A call is nested in too many others.
        54 => Depth {
            /// How many it is nested in.
            depth: u8,
            /// The limit.
            limit: u8,
        },
        /// The inputs of a call need more memory than is left to its client on this server.
        55 => Memory {
            /// What needs it.
            what: Detail,
            /// The bytes that it needs.
            bytes: u64,
            /// The bytes that the client has left.
            left: u64,
        },
        /// Executions of the function have passed their deadlines and not returned.
        56 => Unreturned {
            /// The function.
            function: Detail,
            /// Their number.
            executions: u32,
        },
        /// The client has said that it has the answer to this call, and the server has dropped it.
        57 => Settled {
            /// The call.
            call: u64,
            /// All calls up to this number are settled.
            settled: u64,
        },
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Version { oldest, newest } => {
                write!(f, "the server speaks protocol versions {oldest} to {newest} only")
            }
            Refusal::Feature { number, has } => write!(
                f,
                "this side requires feature {number} of the protocol, and the server does not \
                 have it (its features are {:#x})",
                has.0
            ),
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
                write!(f, "cannot serve {wanted}: this is ps task {task} with {shards} shards")
            }
            Refusal::UnknownFunction { function, known } => {
                write!(f, "no function is named {:?}: there are {known}", function.as_str())
            }
            Refusal::Input { function, input, detail } => write!(
                f,
                "input {:?} does not suit function {:?}: {detail}",
                input.as_str(),
                function.as_str()
            ),
            Refusal::NoDevice { device, detail } => {
                write!(f, "there is no device {:?}: {detail}", device.as_str())
            }
            Refusal::NoOutput { call, output, detail } => {
                write!(f, "call {call} has left no output {:?}: {detail}", output.as_str())
            }
            Refusal::Depth { depth, limit } => {
                write!(f, "the call is nested in {depth} others: the limit is {limit}")
            }
            Refusal::Memory { what, bytes, left } => {
                write!(f, "{what} need {bytes} bytes, and the client may use {left} more")
            }
            Refusal::Unreturned { function, executions } => write!(
                f,
                "{executions} executions of function {:?} have passed their deadlines and not \
                 returned",
                function.as_str()
            ),
            Refusal::Settled { call, settled } => {
                write!(f, "call {call} is settled, as are all calls up to {settled}")
            }
            Refusal::DataSet { differs } => write!(f, "the data differ: {differs}"),
            Refusal::NotInitialized {} => f.write_str("the variables are not initialized yet"),
            Refusal::Fenced { epoch, current } => {
                write!(f, "client epoch {epoch} is fenced by epoch {current}")
            }
            Refusal::Role { role, kind } => {
                write!(f, "role {role} may not send messages of kind {kind}")
            }
            Refusal::DoesNotFit { need, limit, made_of } => {
                write!(f, "the shard needs {need} bytes, it may use {limit}")?;
                if made_of.as_str().is_empty() { Ok(()) } else { write!(f, ": {made_of}") }
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
            Refusal::ReplicasAbsent { waited_ms, awaited } => {
                write!(
                    f,
                    "the step has lacked replicas for {waited_ms} ms, and on_loss ends the "
                )?;
                write!(f, "wait for {awaited}")
            }
            Refusal::Busy { what, limit } => write!(f, "too many {what}: the limit is {limit}"),
            Refusal::Unsupported { kind, detail } => {
                write!(f, "messages of kind {kind} are not supported: {detail}")
            }
            Refusal::Stopping {} => f.write_str("the server is stopping"),
            Refusal::Token { token, generation } => {
                write!(f, "token {token} of generation {generation} is not held by this client")
            }
            Refusal::RestoreEpoch { found, current, step } if found == current => write!(
                f,
                "restore epoch {found} is of a state that was lost; the next began at step {step}"
            ),
            Refusal::RestoreEpoch { found, current, step } => {
                write!(f, "restore epoch {found} is not {current}, which began at step {step}")
            }
            Refusal::Storage { detail } => write!(f, "storage failed: {detail}"),
            Refusal::Checkpoint { detail } | Refusal::Unavailable { detail } => {
                write!(f, "{detail}")
            }
            Refusal::Window { sequence, oldest, newest } => {
                write!(f, "sequence {sequence} is outside the window {oldest} to {newest}")
            }
            Refusal::Incomplete { partition, bytes, expected } => {
                write!(f, "partition {partition} is incomplete: {bytes} of {expected} bytes")
            }
            Refusal::Operation { variable, tried } => {
                write!(f, "variable {variable} does not accept {tried}")
            }
            Refusal::Denied {} => f.write_str("denied"),
            Refusal::Length { named, received } => {
                write!(f, "the last part announces {named} bytes, {received} were received")
            }
            Refusal::Row { variable, place, row, from, last } => write!(
                f,
                "row {row} of variable {variable}, at position {place} of the request, must be \
                 {from} to {last}"
            ),
            Refusal::Rows { variable, rows, limit } => {
                write!(f, "{rows} rows of variable {variable} exceed the limit of {limit}")
            }
            Refusal::Bucket { variable, place, row, bucket, from, to } => write!(
                f,
                "row {row} of table {variable}, at position {place} of the request, is in bucket \
                 {bucket}, but this partition has {from}..{to}"
            ),
            Refusal::TableFull { variable, rows, more, limit } => write!(
                f,
                "table {variable} has {rows} rows on this shard and cannot hold {more} more: \
                 the limit is {limit}"
            ),
            Refusal::Untrainable { variable, detail } => {
                write!(
                    f,
                    "{:?} cannot be trained as the server is configured: {detail}",
                    variable.as_str()
                )
            }
            Refusal::UnknownEpoch { epoch, newest: ClientEpoch(0) } => write!(
                f,
                "no run of this task has client epoch {epoch}: it was ended while its worker was away"
            ),
            Refusal::UnknownEpoch { epoch, newest } => write!(
                f,
                "client epoch {epoch} was not assigned to this client: its newest is {newest}, \
                 unless the clock of this server or of the step owner is wrong by over a day"
            ),
            Refusal::UnknownTask { job, task, detail } => {
                write!(f, "task {task} of job {:?} is not accepted: {detail}", job.as_str())
            }
            Refusal::UnknownCoordinator { coordinator } => {
                write!(f, "coordinator {coordinator} is not open")
            }
            Refusal::CoordinatorEpoch { coordinator, epoch, current } => {
                write!(f, "epoch {epoch} of coordinator {coordinator} is not {current}, the newest")
            }
            Refusal::NotFinal { pushes } => write!(
                f,
                "the values are not final: {pushes} gradients of lost workers are applied on some \
                 shards only"
            ),
            Refusal::EffectWindow { number, settled, newest } => write!(
                f,
                "effect {number} is outside the window, which is settled up to {settled} and ends \
                 at {newest}"
            ),
            Refusal::Encoding { variable, encoding, detail } => {
                write!(f, "encoding {encoding} of variable {variable} is not accepted: {detail}")
            }
        }
    }
}

/// Returns the first eight bytes of a hash in hexadecimal: enough to compare two by eye.
pub fn short_hash(hash: &[u8; 32]) -> String {
    hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
