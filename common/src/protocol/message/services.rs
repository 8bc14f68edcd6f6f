//! Named functions: servers that compute, the calls of their clients, and what calls leave behind.

use super::sessions::BodyCrc;
use crate::ids::Incarnation;
use crate::protocol::feature::Features;
use crate::protocol::limits;
use crate::protocol::outcome::EffectRef;
use crate::protocol::refusal::Detail;
use crate::protocol::wire::{List, Text, wire_enum, wire_struct};

/// The inputs of a call.
pub type CallInputs = List<NamedInput, { limits::CALL_VALUES_MAX }>;
/// The outputs of a call.
pub type CallOutputs = List<NamedValue, { limits::CALL_VALUES_MAX }>;

wire_struct! {
    /// Accepts a client of the functions of a task.
    ServerIs {
        /// The protocol version of the session.
        version: u16,
        /// The job of the server.
        job: Text<{ limits::JOB_BYTES_MAX }>,
        /// The task index of the server.
        task: u32,
        /// Chosen by the server at each start.
        incarnation: Incarnation,
        /// Whether the server remembers this client: its calls and what they left. It forgets a
        /// client that is silent for a lease.
        known: bool,
        /// How long a client without a connection, or a silent one, is remembered.
        lease_ms: u32,
        /// The largest number of calls of one client that have not ended or are not settled.
        calls_max: u32,
        /// The memory that inputs and outputs of one client may take on the server.
        bytes_max: u64,
        /// Whether bodies have checksums in this session: `On` or `Off`.
        body_crc: BodyCrc,
        /// The server's features. Those that the client has too are agreed.
        features: Features,
    }
}

wire_struct! {
    /// Requests the server's cluster, functions and devices.
    Describe {}
}
wire_struct! {
    /// The server's cluster, functions and devices. Their encoding is in the body and in
    /// `OutputPart`s.
    Described {
        /// The length of the encoding in bytes; it is padded to 8.
        bytes: u64,
    }
}

wire_struct! {
    /// The type of a value: its elements and its extents.
    ValueIs {
        /// The code of the elements: that of a tensor's type, or 0 for bytes.
        elements: u8,
        /// The extents, outermost first; of bytes, their number.
        extents: List<u64, { limits::VALUE_RANK_MAX }>,
    }
}
wire_struct! {
    /// A value of a body by its name.
    NamedValue {
        /// The name.
        name: Text<{ limits::VALUE_NAME_BYTES_MAX }>,
        /// The type. The bytes of the values follow each other in the body, each padded to 8 bytes.
        is: ValueIs,
    }
}
wire_struct! {
    /// An output of a call that has left it on its server.
    OutputRef {
        /// The client whose call it was.
        owner: Incarnation,
        /// The server to which the client has sent the call; 0 if it has not yet. Another process
        /// at that address does not have the output.
        server: Incarnation,
        /// The number of the call.
        call: u64,
        /// The name of the output.
        output: Text<{ limits::VALUE_NAME_BYTES_MAX }>,
    }
}
wire_enum! {
    /// What a function is given under a name.
    Input {
        /// A value in the body of the call.
        1 => Value {
            /// Its type.
            is: ValueIs,
        },
        /// A variable of the parameter servers, which the server of the call pulls.
        2 => Variable {
            /// The variable's name.
            variable: Text<{ limits::NAME_BYTES_MAX }>,
        },
        /// An output that another call leaves on a task.
        3 => Output {
            /// The job of the task that holds it.
            job: Text<{ limits::JOB_BYTES_MAX }>,
            /// Its task index.
            task: u32,
            /// The output.
            of: OutputRef,
        },
    }
}
wire_struct! {
    /// An input of a call by its name.
    NamedInput {
        /// The name.
        name: Text<{ limits::VALUE_NAME_BYTES_MAX }>,
        /// Where the input comes from.
        input: Input,
    }
}

wire_struct! {
    /// Calls a function. The body has the first bytes of the inputs that are values; `InputPart`s
    /// have the others.
    Call {
        /// The number of the call, from 1 in each incarnation of the client. A server executes a
        /// number once.
        call: u64,
        /// The client has the answers of all its calls up to this number, on every server.
        settled: u64,
        /// Calls above that whose answers from this server it has.
        ended: List<u64, { limits::CALLS_ENDED_MAX }>,
        /// How many calls this one is nested in.
        depth: u8,
        /// The function.
        function: Text<{ limits::FUNCTION_NAME_BYTES_MAX }>,
        /// The task and the device on which it runs; open fields are the server's choice.
        device: Text<{ limits::CALL_DEVICE_BYTES_MAX }>,
        /// Whether it may run on another device of the task if the task lacks this one.
        any_device: bool,
        /// Whether the outputs stay on the server. Otherwise they are sent.
        retain: bool,
        /// The effect of the scheduled call that this is an execution of.
        scheduled: Option<EffectRef>,
        /// The inputs.
        inputs: List<NamedInput, { limits::CALL_VALUES_MAX }>,
    }
}
wire_struct! {
    /// More bytes of the inputs of a call, under its request.
    InputPart {
        /// The call.
        call: u64,
        /// The number of bytes before these.
        offset: u64,
    }
}
wire_enum! {
    /// How a call has ended.
    CallOutcome {
        /// The function has returned.
        1 => Done {
            /// The outputs. Unless they are retained, the body and `OutputPart`s have their bytes.
            outputs: List<NamedValue, { limits::CALL_VALUES_MAX }>,
        },
        /// The function has returned an error.
        2 => Failed {
            /// Whether another execution may succeed, on this server or another.
            retry: bool,
            /// The error, in words.
            detail: Detail,
        },
        /// The function has panicked.
        3 => Panicked {
            /// The panic, in words.
            detail: Detail,
        },
        /// The call was cancelled. The function may have run.
        4 => Cancelled {},
    }
}
wire_struct! {
    /// The end of a call.
    CallEnded {
        /// How it ended.
        outcome: CallOutcome,
    }
}
wire_struct! {
    /// More bytes of outputs, under the request that they answer.
    OutputPart {
        /// The number of bytes before these.
        offset: u64,
    }
}
wire_struct! {
    /// Cancels a call. The answer to the call says how it ended.
    CancelCall {
        /// The number of the call.
        call: u64,
    }
}
wire_struct! {
    /// Requests an output that a call left on this task. Waits until the call has ended.
    FetchOutput {
        /// The output.
        of: OutputRef,
        /// For whom a server fetches an input: the name of the principal that has called it. Empty if
        /// the sender fetches for itself.
        principal: Text<{ limits::PRINCIPAL_NAME_BYTES_MAX }>,
    }
}
wire_struct! {
    /// An output; its bytes are in the body and in `OutputPart`s.
    Fetched {
        /// Its type.
        is: ValueIs,
    }
}
wire_struct! {
    /// Drops what calls of this client have left on this task.
    Release {
        /// The numbers of the calls.
        calls: List<u64, { limits::RELEASES_MAX }>,
    }
}
wire_struct! {
    /// The outputs are dropped.
    Released {}
}
